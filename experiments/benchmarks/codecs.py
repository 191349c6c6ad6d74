"""What each operator costs and saves: speed, bytes, error, and where it pays.

    python -m experiments.benchmarks.codecs --out runs/codecs

writes ``codecs.json``, a table for the README and a figure of it there.

Speed is that of ``encode`` and ``decode`` on 2²² normal float32, compiled, paired with
a copy of the same array in one process. The relative error is ‖C(x) − x‖² / ‖x‖², on
normal numbers and on the gradient of one worker after some steps of both tasks. The
break-even bandwidth is that of a link between eight workers below which encoding,
sending and decoding what all sent is faster than a ring all-reduce of float32; above
it the operator costs more time than it saves. A gather of what eight workers send costs
seven payloads; in two stages each worker averages a share of the array and says that
again (``two_stage``), which costs two, and rounds twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table

import lowcomm as lc
from experiments.panels import drawn
from experiments.plots import COLOURS, FAINT
from experiments.records import atomic
from experiments.tasks import make_task
from lowcomm.codebooks import GAUSSIAN
from lowcomm.keys import Keys
from lowcomm.ledger import Row, Traffic

OPERATORS: dict[str, lc.Compressor] = {
    "top 1 %": lc.top_k(0.01),
    "top 1 % of blocks of 4096": lc.top_k(0.01, block=4096),
    "top 64 of 4096, in 2 bits": lc.top_k(
        1 / 64, block=4096, values=lc.codebook(GAUSSIAN, relative_to="rms", block=64)
    ),
    "random 1 %": lc.random_k(0.01),
    "DCT, top 32 of 64 x 64": lc.dct_top_k(32, chunk=64),
    "sign": lc.sign(),
    "one bit, two levels": lc.one_bit(),
    "ternary": lc.ternary(),
    "QSGD, 7 levels": lc.qsgd(7),
    "natural": lc.natural(),
    "int8": lc.quantize(8, stochastic=False),
    "int8, blocks of 256": lc.quantize(8, block=256, stochastic=False),
    "int8, stochastic": lc.quantize(8, block=256),
    "int4, blocks of 256": lc.quantize(4, block=256, stochastic=False),
    "int4, stochastic": lc.quantize(4, block=256),
    "2 bits, blocks of 256": lc.quantize(2, block=256),
    "count sketch, 1 %": lc.count_sketch(1, 0.01),
    "THC, 4 bits": lc.thc(4),
}
TASKS = ("mnist-mixer", "stdlib-lm")
WIDTH = 2048  # of the matrix of normal numbers


@dataclass(frozen=True)
class Settings:
    """How long to measure, on how many numbers, and where the results go."""

    out: Path | None = None  # a folder for codecs.json
    elements: int = 2**22
    workers: int = 8
    pairs: int = 15
    steps: int = 100  # of training before a gradient is taken
    only: str = ""  # operators whose name has this in it


class Speed(NamedTuple):
    """Seconds, medians of calls that alternate with copies."""

    encode: float
    decode: float
    copy: float


class Found(NamedTuple):
    """What was measured of one operator."""

    operator: str
    encode: float  # GB of float32 a second
    decode: float
    encode_share: float  # of the rate of a copy
    decode_share: float
    bits: float  # an element, on the wire, of one worker
    gaussian: float  # relative error
    errors: tuple[float, ...]  # on the gradients of the tasks
    break_even: float  # Mbit/s, reduced if it is linear and gathered if not
    two_stages: float  # Mbit/s, where each worker averages a share and says it again


def once(f: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    jax.block_until_ready(f())
    return time.perf_counter() - start


def medians(fs: Sequence[Callable[[], Any]], pairs: int) -> list[float]:
    """The median time of each, called in turn, forwards and backwards."""
    for f in fs:
        once(f)
    times: list[list[float]] = [[] for _ in fs]
    order = list(range(len(fs)))
    for i in range(pairs):
        for j in order if i % 2 else order[::-1]:
            times[j].append(once(fs[j]))
    return [float(np.median(each)) for each in times]


def keys(step: Any = 0) -> Keys:
    """Keys of one leaf."""
    fold = jax.random.fold_in
    return Keys(fold(jax.random.key(1), step), fold(jax.random.key(2), step))


def there(c: lc.Compressor, x: jax.Array, keys: Keys) -> tuple[Any, Any]:
    """The payload and what was agreed on before it."""
    agreed = None if c.statistic is None else c.statistic(x)
    return c.encode(x, keys, agreed), agreed


def speed(c: lc.Compressor, x: jax.Array, pairs: int) -> Speed:
    """Of ``c`` on ``x``."""
    copy = jax.jit(lambda x: x + 0)
    encode = jax.jit(lambda x, keys: there(c, x, keys))
    payload, agreed = encode(x, keys())
    decode = jax.jit(lambda payload, keys, agreed: c.decode(payload, x, keys, agreed))
    calls = (
        lambda: encode(x, keys()),
        lambda: decode(payload, keys(), agreed),
        lambda: copy(x),
    )
    return Speed(*medians(calls, pairs))


def relative_error(c: lc.Compressor, tree: Any) -> float:
    """‖C(x) − x‖² / ‖x‖² over all leaves, each encoded on its own."""

    @jax.jit
    def lost(x):
        payload, agreed = there(c, x, keys())
        return jnp.sum(jnp.square(c.decode(payload, x, keys(), agreed) - x))

    leaves = jax.tree.leaves(tree)
    whole = sum(float(jnp.sum(jnp.square(x))) for x in leaves)
    return sum(float(lost(x)) for x in leaves) / whole


def gradient(task_name: str, workers: int, steps: int) -> Any:
    """One worker's gradient after training all of them together."""
    task = make_task(task_name, workers=workers, batch_size=8)
    tx = lc.data_parallel(optax.adam(1e-3))
    run = lc.fit(
        task.loss,
        tx,
        task.init(jax.random.key(0)),
        task.batches,
        steps=steps,
        workers=workers,
    )
    one = lc.unstack((run.params, task.batches(steps)))
    return jax.jit(jax.grad(task.loss))(*one)


def wire(exchange: lc.Exchange, like: Any, workers: int) -> Traffic:
    """What one exchange of such an array hands to the collectives."""
    worker = lambda x: exchange.update(x, exchange.init(x), step=0)[0]
    return lc.traffic(worker, like, workers=workers)


def examine(name: str, settings: Settings, gradients: Sequence[Any]) -> Found:
    """Everything about one operator."""
    c, n, workers = OPERATORS[name], settings.elements, settings.workers
    normal = np.random.default_rng(0).standard_normal((n // WIDTH, WIDTH))
    x = jnp.asarray(normal, jnp.float32)
    measured = speed(c, x, settings.pairs)
    dense = Traffic((Row("all_reduce", lc.AXIS, "float32", 4 * n),))

    def pays_below(traffic, encodes, decodes):
        spent = encodes * measured.encode + decodes * measured.decode
        return lc.break_even_bandwidth(traffic, dense, workers, spent) / 1e6

    # Of the mean, or of what each sent.
    traffic = wire(lc.compressed_mean(c), x, workers)
    once = pays_below(traffic, 1, 1 if c.linear else workers)
    twice = 0.0
    if not c.linear and traffic.bytes_always >= n / 8:  # what says something of all
        shares = wire(lc.two_stage(c), x, workers)
        twice = pays_below(shares, 1 + 1 / workers, 2)
    rate = lambda seconds: 4 * n / seconds / 1e9
    return Found(
        name,
        rate(measured.encode),
        rate(measured.decode),
        measured.copy / measured.encode,
        measured.copy / measured.decode,
        8 * traffic.bytes_always / n,
        relative_error(c, x),
        tuple(relative_error(c, tree) for tree in gradients),
        once,
        twice,
    )


def table(rows: Sequence[Found], workers: int) -> Table:
    """What was found, for the terminal."""
    shown = Table(title=f"{workers} workers, error is squared and relative")
    for column in (
        "operator",
        "encode GB/s (of copy)",
        "decode GB/s (of copy)",
        "bits",
        "error: normal",
        *TASKS,
        "pays below Mbit/s",
        "in two stages",
    ):
        shown.add_column(column, justify="left" if column == "operator" else "right")
    for row in rows:
        shown.add_row(*cells(row))
    return shown


def cells(row: Found) -> list[str]:
    """One line of the table."""
    return [
        row.operator,
        f"{row.encode:.3g} ({row.encode_share:.0%})",
        f"{row.decode:.3g} ({row.decode_share:.0%})",
        f"{row.bits:.3g}",
        f"{row.gaussian:.2g}",
        *(f"{error:.2g}" for error in row.errors),
        f"{row.break_even:,.0f}" if row.break_even else "never",
        f"{row.two_stages:,.0f}" if row.two_stages else "",
    ]


def markdown(rows: Sequence[Found]) -> str:
    """The table as it stands in the README."""
    head = (
        "operator",
        "encode",
        "decode",
        "bits",
        "error",
        *TASKS,
        "pays below",
        "in two stages",
    )
    lines = [head, ["---"] * len(head), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(found: Mapping[str, Any], figure: Any) -> None:
    """Error against bits, and the bandwidths below which each pays."""
    rows: Sequence[Found] = found["rows"]
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for i, row in enumerate(rows):
        at = row.bits, max(row.errors[-1], 1e-6)
        colour = COLOURS[i % len(COLOURS)]
        left.plot(*at, "o", color=colour, markersize=4)
        aside = (0, (4, -10)[i % 2])  # neighbours in the table often lie together
        left.annotate(f"{i + 1}", at, aside, textcoords="offset points", fontsize=7)
        pays = max(row.break_even, row.two_stages)
        right.barh(f"{row.operator}  {i + 1}", pays, color=colour, alpha=0.55)
    left.set(xscale="log", yscale="log", xlabel="bits an element on the wire")
    left.set_ylabel(f"relative error, gradient of {TASKS[-1]}")
    right.set(xscale="log", xlabel="pays below, Mbit/s")
    right.tick_params(axis="y", labelsize=6)
    right.invert_yaxis()
    for panel in (left, right):
        panel.grid(color=FAINT, linewidth=0.7)


def write(folder: Path, settings: Settings, rows: Sequence[Found]) -> None:
    """What was found, as JSON, as a table and as a figure; nothing is overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"codecs.{kind}" for kind in ("json", "md", "png")]
    for path in paths:
        if path.exists():
            raise FileExistsError(f"{path} is there: choose another folder.")
    asked = {"workers": settings.workers, "elements": settings.elements}
    found = {**asked, "rows": [row._asdict() for row in rows]}
    with atomic(paths[0]) as beside:
        beside.write_text(json.dumps(found, indent=1) + "\n")
    with atomic(paths[1]) as beside:
        beside.write_text(markdown(rows) + "\n")
    drawn(draw, {"rows": rows}, paths[2])


def main(settings: Settings) -> None:
    """Measure, print, and write what was asked for."""
    console = Console()
    gradients = [gradient(task, settings.workers, settings.steps) for task in TASKS]
    rows = []
    for name in OPERATORS:
        if settings.only in name:
            rows.append(examine(name, settings, gradients))
            console.print("  ".join(cells(rows[-1])))
    console.print(table(rows, settings.workers))
    if settings.out is not None:
        write(settings.out, settings, rows)


if __name__ == "__main__":
    main(tyro.cli(Settings))
