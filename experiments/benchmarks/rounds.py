"""A round as one program against its steps one by one: paired times.

    python -m experiments.benchmarks.rounds

``counted_round`` and ``counted_step`` train the same model in one process; a pair is
one round by each, in alternating order. Single steps wait for each other, as in a loop
that reads its losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import optax
import tyro
from rich.console import Console
from rich.table import Table

import lowcomm as lc
from experiments.benchmarks.overhead import paired
from experiments.tasks import make_task


@dataclass(frozen=True)
class Settings:
    """How long to measure, and on what."""

    tasks: tuple[str, ...] = ("least-squares", "digits", "mnist-mixer", "stdlib-lm")
    workers: int = 8
    period: int = 16
    pairs: int = 30
    rate: float = 0.01


def main(settings: Settings) -> None:
    """Measure and print."""
    k, period = settings.workers, settings.period
    title = f"{k} workers, {period} steps a round, {settings.pairs} pairs"
    table = Table(title=title)
    for column in ("task", "workers are", "round / its steps [95 %]"):
        table.add_column(column)
    for name in settings.tasks:
        for mesh in (None, lc.worker_mesh(k)):
            task = make_task(name, workers=k, batch_size=8)
            tx = lc.diloco(optax.sgd(settings.rate), period=period)
            how = {"workers": k, "mesh": mesh}
            step = lc.counted_step(task.loss, tx, **how)
            whole = lc.counted_round(task.loss, tx, length=period, **how)
            params = lc.stack(task.init(jax.random.key(0)), k, mesh=mesh)
            state = lc.init(tx, params, mesh=mesh)
            here = jax.tree.leaves(params)[0].sharding if mesh else None
            batch = jax.device_put(task.batches(0), here)
            stack = lambda x: jax.numpy.repeat(x[:, None], period, 1)
            batches = jax.device_put(jax.tree.map(stack, batch), here)

            def carry(params=params, state=state):
                return jax.tree.map(jax.numpy.copy, (params, state))

            one, other = carry(), carry()

            def at_once(whole=whole, batches=batches):
                nonlocal one
                *one, metrics, _ = whole(*one, batches, 0)
                return metrics

            def step_by_step(step=step, batch=batch):
                nonlocal other
                metrics = None
                for t in range(period):
                    *other, metrics, _ = step(*other, batch, t)
                    # Simulated devices must not run ahead of each other.
                    jax.block_until_ready(metrics)
                return metrics

            ratio = paired(at_once, step_by_step, settings.pairs)
            kind = "virtual" if mesh is None else "devices"
            table.add_row(name, kind, str(ratio))
    Console().print(table)


if __name__ == "__main__":
    chosen = tyro.cli(Settings)
    jax.config.update("jax_num_cpu_devices", chosen.workers)
    main(chosen)
