"""What lowcomm costs beside hand-written JAX: paired step times, bytes and memory.

    python -m experiments.benchmarks.overhead

Every comparison alternates two programs, ABBA, in one process on the same arrays, and
reports the median of the paired ratios with a bootstrap interval. The interval of a
program against itself stands beside it: what is inside that is noise. A bar is met if
the lower end of the interval is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import lax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import lowcomm as lc
from experiments.tasks import make_task


@dataclass(frozen=True)
class Settings:
    """How long to measure, and on what."""

    task: str = "mnist-cnn"
    workers: int = 8
    batch_size: int = 32
    pairs: int = 300
    period: int = 1_000_000  # so that no measured step syncs
    rate: float = 0.05


class Ratio(NamedTuple):
    """A ratio of step times: median and 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """Median and interval."""
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired(a: Callable[[], Any], b: Callable[[], Any], pairs: int) -> Ratio:
    """Time of ``a`` over time of ``b``, alternating ABBA."""

    def once(f):
        start = time.perf_counter()
        jax.block_until_ready(f())
        return time.perf_counter() - start

    for f in (a, b, a, b):
        once(f)
    ratios = []
    for i in range(pairs):
        if i % 2:
            second, first = once(b), once(a)
        else:
            first, second = once(a), once(b)
        ratios.append(first / second)
    draws = np.random.default_rng(0).choice(ratios, (2000, pairs))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


class Step(NamedTuple):
    """A compiled step and the arrays it goes round with."""

    compiled: Any
    args: list

    def __call__(self) -> Any:
        """One step further; returns the new parameters."""
        params, state, *_ = self.compiled(*self.args)
        self.args[:2] = params, state
        return params


def compile_step(fn: Callable, *args: Any) -> Step:
    """Compile ``fn(params, state, batch, …)``, which keeps its first two arguments."""
    compiled = jax.jit(fn, donate_argnums=(0, 1)).lower(*args).compile()
    return Step(compiled, [jax.tree.map(jnp.copy, args[0]), *map(_copy, args[1:])])


def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def by_hand(loss: Callable, inner: Any, mesh: Any, *, reduce: bool) -> Callable:
    """The data-parallel step one would write without lowcomm, or a silent one."""

    def local(params, state, batch):
        params, state, batch = jax.tree.map(lambda x: x[0], (params, state, batch))
        value, grads = jax.value_and_grad(loss)(params, batch)
        if reduce:
            grads = jax.tree.map(lambda g: lax.pmean(g, lc.AXIS), grads)
        moves, state = inner.update(grads, state, params)
        params = optax.apply_updates(params, moves)
        return jax.tree.map(lambda x: x[None], (params, state, value))

    spec = P(lc.AXIS)
    return jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False
    )


def main(settings: Settings) -> None:
    """Measure and print."""
    workers, console = settings.workers, Console()
    task = make_task(
        settings.task, workers=workers, batch_size=settings.batch_size, split="iid"
    )
    mesh = lc.worker_mesh(workers)
    inner = optax.sgd(settings.rate, momentum=0.9)
    one = task.init(jax.random.key(0))
    params = lc.stack(one, workers, mesh=mesh)
    batch = jax.device_put(task.batches(0), jax.tree.leaves(params)[0].sharding)

    def with_step(tx, step=None):
        in_axes = (0, 0, 0, None)
        run = lc.spread(lc.local_step(task.loss, tx), mesh=mesh, in_axes=in_axes)
        state = jax.jit(lc.spread(tx.init, mesh=mesh))(params)
        if step is None:
            return compile_step(run, params, state, batch, jnp.int32(0))
        known = lambda params, state, batch: run(params, state, batch, step)
        return compile_step(known, params, state, batch)

    bare_state = jax.jit(lc.spread(inner.init, mesh=mesh))(params)
    hand = lambda reduce: compile_step(
        by_hand(task.loss, inner, mesh, reduce=reduce), params, bare_state, batch
    )
    local = lc.local_sgd(inner, period=settings.period)
    rounds = lc.diloco(inner, period=settings.period)
    reduced, silent = hand(True), hand(False)
    parallel = with_step(lc.data_parallel(inner))
    comparisons = [
        ("data_parallel / pmean by hand", parallel, reduced, 1.02),
        ("pmean by hand / itself", hand(True), reduced, None),
        ("local_sgd silent, traced step / inner", with_step(local), silent, 1.05),
        ("local_sgd silent, known step / inner", with_step(local, 0), silent, 1.03),
        ("diloco silent, traced step / inner", with_step(rounds), silent, 1.05),
        ("diloco silent, known step / inner", with_step(rounds, 0), silent, 1.03),
        ("inner / itself", hand(False), silent, None),
    ]

    sent = lambda step: lc.compiled_traffic(step.compiled, mesh=mesh).census()
    same = sent(parallel) == sent(reduced)
    console.print(f"same collectives and bytes as by hand: {same}  {sent(parallel)}")

    table = Table(title=f"{settings.task}, {workers} devices, {settings.pairs} pairs")
    for column in ("comparison", "ratio [95 %]", "bar", "met", "temporary MB"):
        table.add_column(column)
    for name, a, b, bar in comparisons:
        ratio = paired(a, b, settings.pairs)
        met = "" if bar is None else str(ratio.low <= bar)
        megabytes = a.compiled.memory_analysis().temp_size_in_bytes / 1e6
        limit = "" if bar is None else f"{bar:.2f}"
        table.add_row(name, str(ratio), limit, met, f"{megabytes:.2f}")
    console.print(table)


if __name__ == "__main__":
    chosen = tyro.cli(Settings)
    jax.config.update("jax_num_cpu_devices", chosen.workers)
    main(chosen)
