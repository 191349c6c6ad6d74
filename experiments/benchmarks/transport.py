"""What one buffer for all leaves saves: paired steps of a method, packed and by leaf.

    python -m experiments.benchmarks.transport

Both exchange the same bytes; the rival hands every leaf to an exchange of its own, as
one would by mapping a function over the tree. Eight devices on few cores wait for each
other in turns, so that the time of a step also stands there as CPU time, of a few steps
of one kind after a few of the other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table

import lowcomm as lc
from experiments.tasks import make_task

from .overhead import compile_step, paired


@dataclass(frozen=True)
class Settings:
    """How long to measure, and on what."""

    task: str = "stdlib-lm"
    workers: int = 8
    batch_size: int = 8
    pairs: int = 60


EXCHANGES: dict[str, Any] = {
    "mean": lc.mean(),
    "sign": lc.error_feedback(lc.sign()),
    "int8, blocks of 256": lc.error_feedback(lc.quantize(8, block=256)),
    "random 1 %": lc.error_feedback(lc.random_k(0.01)),
    "top 1 %": lc.error_feedback(lc.top_k(0.01)),
}


def leafwise(exchange: lc.Exchange) -> lc.Exchange:
    """``exchange`` on each leaf by itself."""

    def init(params):
        return tuple(exchange.init(x) for x in jax.tree.leaves(params))

    def update(updates, state, params=None, **extra):
        leaves, treedef = jax.tree.flatten(updates)
        pairs = [
            exchange.update(x, kept, None, **extra)
            for x, kept in zip(leaves, state, strict=True)
        ]
        heard, states = zip(*pairs, strict=True)
        return jax.tree.unflatten(treedef, heard), states

    return lc.Exchange(init, update)


def cpu_ratio(a: Any, b: Any, pairs: int, steps: int = 3) -> float:
    """The median CPU time of ``a`` over that of ``b``."""

    def spent(f):
        start = time.process_time()
        for _ in range(steps):
            jax.block_until_ready(f())
        return time.process_time() - start

    both = [(spent(a), spent(b)) for _ in range(max(1, pairs // steps))]
    first, second = np.median(both, axis=0)
    return float(first / second)


def main(settings: Settings) -> None:
    """Measure and print."""
    workers, console = settings.workers, Console()
    task = make_task(settings.task, workers=workers, batch_size=settings.batch_size)
    mesh = lc.worker_mesh(workers)
    params = lc.stack(task.init(jax.random.key(0)), workers, mesh=mesh)
    batch = jax.device_put(task.batches(0), jax.tree.leaves(params)[0].sharding)

    def step(exchange, *, learns):
        # Without the loss, the exchange is all there is.
        tx = optax.chain(exchange, optax.sgd(0.05))
        alone = lambda params, state, batch, t: (
            *tx.update(params, state, params, step=t)[:2],
            batch,
        )
        worker = lc.local_step(task.loss, tx) if learns else alone
        run = lc.spread(worker, mesh=mesh, in_axes=(0, 0, 0, None))
        state = lc.init(tx, params, mesh=mesh)
        return compile_step(run, params, state, batch, jnp.int32(0))

    sent = lambda step: lc.compiled_traffic(step.compiled, mesh=mesh).rows
    table = Table(
        title=f"{settings.task}, {workers} devices, {settings.pairs} pairs: numbers of "
        "collectives, and times packed over times by leaf"
    )
    for column in ("", "packed", "by leaf", "exchange", "step", "step, CPU"):
        table.add_column(column)
    for name, exchange in EXCHANGES.items():
        cells = []
        for learns in (False, True):
            both = [step(x, learns=learns) for x in (exchange, leafwise(exchange))]
            cells.append(str(paired(both[0], both[1], settings.pairs)))
        cells.append(f"{cpu_ratio(both[0], both[1], settings.pairs):.3f}")
        numbers = [str(len(sent(one))) for one in both]
        table.add_row(name, *numbers, *cells)
    console.print(table)


if __name__ == "__main__":
    chosen = tyro.cli(Settings)
    jax.config.update("jax_num_cpu_devices", chosen.workers)
    main(chosen)
