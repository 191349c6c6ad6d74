"""What a step of each method costs beside the bare optimizer and a sync by hand.

    python -m experiments.benchmarks.methods --task mnist-cnn

Silent steps are compared with the inner optimizer alone, steps that sync with the dense
sync of the same bytes that one would write by hand: the mean of the parameters, or of
the displacements and a Nesterov step. Paired and ABBA like ``overhead``; only methods
that the clock decides have both kinds of step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import lowcomm as lc
from experiments.catalogue import CATALOGUE
from experiments.tasks import make_task

from .overhead import Step, by_hand, compile_step, paired


@dataclass(frozen=True)
class Settings:
    """How long to measure, and on what."""

    task: str = "mnist-cnn"
    algorithms: str = "all"
    workers: int = 8
    batch_size: int = 32
    pairs: int = 100
    period: int = 16
    rate: float = 0.05


def averaged_by_hand(loss: Callable, inner: Any, mesh: Any) -> Callable:
    """A step of local SGD that syncs."""

    def local(params, state, batch):
        params, state, batch = jax.tree.map(lambda x: x[0], (params, state, batch))
        value, grads = jax.value_and_grad(loss)(params, batch)
        moves, state = inner.update(grads, state, params)
        params = optax.apply_updates(params, moves)
        params = jax.tree.map(lambda x: lax.pmean(x, lc.AXIS), params)
        return jax.tree.map(lambda x: x[None], (params, state, value))

    return _mapped(local, mesh)


def nesterov_by_hand(loss: Callable, inner: Any, mesh: Any) -> Callable:
    """A step of DiLoCo that syncs; its state is ``(inner, anchor, velocity)``."""

    def local(params, state, batch):
        params, state, batch = jax.tree.map(lambda x: x[0], (params, state, batch))
        state, anchor, velocity = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        moves, state = inner.update(grads, state, params)
        params = optax.apply_updates(params, moves)
        gap = jax.tree.map(lambda a, x: lax.pmean(a - x, lc.AXIS), anchor, params)
        velocity = jax.tree.map(lambda v, d: 0.9 * v + d, velocity, gap)
        step = lambda a, d, v: a - 0.7 * (d + 0.9 * v)
        anchor = jax.tree.map(step, anchor, gap, velocity)
        state = state, anchor, velocity
        return jax.tree.map(lambda x: x[None], (anchor, state, value))

    return _mapped(local, mesh)


def _mapped(local: Callable, mesh: Any) -> Callable:
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
    state = jax.jit(lc.spread(inner.init, mesh=mesh))(params)
    zero = jax.tree.map(jnp.zeros_like, params)
    hand = {
        "silent": compile_step(
            by_hand(task.loss, inner, mesh, reduce=False), params, state, batch
        ),
        "average": compile_step(
            averaged_by_hand(task.loss, inner, mesh), params, state, batch
        ),
        "rounds": compile_step(
            nesterov_by_hand(task.loss, inner, mesh),
            *(params, (state, params, zero), batch),
        ),
    }

    def compiled(tx: Any, step: int, *, traced: bool) -> Step:
        run = lc.spread(
            lc.local_step(task.loss, tx), mesh=mesh, in_axes=(0, 0, 0, None)
        )
        state = jax.jit(lc.spread(tx.init, mesh=mesh))(params)
        if traced:
            return compile_step(run, params, state, batch, jnp.int32(step))
        known = lambda params, state, batch: run(params, state, batch, step)
        return compile_step(known, params, state, batch)

    table = Table(title=f"{settings.task}, {workers} devices, {settings.pairs} pairs")
    for column in ("method", "step", "silent / inner [95 %]", "sync / by hand [95 %]"):
        table.add_column(column)
    again = compile_step(
        by_hand(task.loss, inner, mesh, reduce=False), params, state, batch
    )
    ratio = paired(again, hand["silent"], settings.pairs)
    table.add_row("(inner against itself)", "", str(ratio), "")
    for name in _named(settings):
        tx = CATALOGUE[name].make(
            workers=workers,
            steps=8 * settings.period,
            learning_rate=settings.rate,
            inner=inner,
            period=settings.period,
        )
        bytes_at = _sends(task.loss, tx, params, batch, 2 * settings.period)
        silent = [t for t, sent in bytes_at.items() if sent == 0]
        syncs = max(bytes_at, key=lambda t: bytes_at[t])
        anchored = bool(
            optax.tree_utils.tree_get_all_with_path(
                jax.eval_shape(tx.init, one), "anchor"
            )
        )
        by = hand["rounds" if anchored else "average"]
        for kind, traced in (("known", False), ("traced", True)):
            quiet = "–"
            if silent:
                step = compiled(tx, silent[0], traced=traced)
                quiet = str(paired(step, hand["silent"], settings.pairs))
            step = compiled(tx, syncs, traced=traced)
            table.add_row(*(name, kind, quiet, str(paired(step, by, settings.pairs))))
            console.print(f"{name}, {kind} step: done", style="dim")
    console.print(table)


def _named(settings: Settings) -> list[str]:
    if settings.algorithms != "all":
        return settings.algorithms.split(",")
    return [
        n for n, m in CATALOGUE.items() if m.syncs == "period" and m.axis == lc.AXIS
    ]


def _sends(
    loss: Callable, tx: Any, params: Any, batch: Any, steps: int
) -> dict[int, int]:
    """Step -> bytes, for the steps of the second of two rounds."""
    step = lc.local_step(loss, tx)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
    part = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    workers = len(jax.tree.leaves(params)[0])
    begun = lambda params, *rest: step(params, tx.init(params), *rest)
    sent = lambda t: lc.traffic(begun, one, part, t, workers=workers).bytes_max
    return {t: sent(t) for t in range(steps // 2, steps)}


if __name__ == "__main__":
    chosen = tyro.cli(Settings)
    jax.config.update("jax_num_cpu_devices", chosen.workers)
    main(chosen)
