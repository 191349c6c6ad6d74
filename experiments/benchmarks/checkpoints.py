"""What keeping a run costs: steps with and without a save, and the time to resume.

    python -m experiments.benchmarks.checkpoints

A block of steps that begins with a save is compared with one that does not, ABBA, in
one process on the same arrays; the save is written in the background while the block
runs, and the block waits for it at the end. Resuming is timed in fresh processes, from
importing orbax to arrays that are ready.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
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

    task: str = "stdlib-lm"
    workers: int = 8
    batch_size: int = 8
    every: int = 50
    """Steps from save to save."""
    pairs: int = 10
    resumes: int = 5
    folder: Path | None = None
    """Of a checkpoint to resume from, once, printing the seconds; used by itself."""


def begin(settings: Settings) -> tuple[Any, Any, Any]:
    """The task, a step of all workers, and the first carry, on a mesh."""
    task = make_task(
        settings.task, workers=settings.workers, batch_size=settings.batch_size
    )
    mesh = lc.worker_mesh(settings.workers)
    tx = lc.diloco(optax.adamw(1e-3), period=16)
    params = lc.stack(task.init(jax.random.key(0)), settings.workers, mesh=mesh)
    step = lc.counted_step(task.loss, tx, workers=settings.workers, mesh=mesh)
    return task, step, (params, lc.init(tx, params, mesh=mesh))


def main(settings: Settings) -> None:
    """Measure and print."""
    if settings.folder is not None:
        print(resume(settings, settings.folder))
        return
    from lowcomm.checkpoint import Checkpoints

    task, step, carry = begin(settings)
    megabytes = sum(x.nbytes for x in jax.tree.leaves(carry)) / 1e6
    with tempfile.TemporaryDirectory(prefix="lowcomm-") as folder:
        saved, t = Checkpoints(folder), 0

        def block(*, save: bool) -> Any:
            nonlocal carry, t
            if save:
                saved.save(t, tuple(carry))
            for _ in range(settings.every):
                *carry, metrics, _ = step(*carry, task.batches(t), t)
                jax.block_until_ready(metrics)
                t += 1
            saved.wait()
            return carry[0]

        seconds = []
        for _ in range(3):
            since = time.perf_counter()
            block(save=False)
            seconds.append(time.perf_counter() - since)
        ratio = paired(
            lambda: block(save=True), lambda: block(save=False), settings.pairs
        )
        saved.close()
        command = [sys.executable, "-m", __spec__.name, "--folder", folder]
        command += ["--task", settings.task, "--workers", str(settings.workers)]
        command += ["--batch-size", str(settings.batch_size)]
        found = [
            float(subprocess.run(command, check=True, capture_output=True).stdout)
            for _ in range(settings.resumes)
        ]
    table = Table(title=f"{settings.task}, a carry of {megabytes:.0f} MB")
    for column in ("what", "measured", "bar"):
        table.add_column(column)
    pace = settings.every / min(seconds)
    table.add_row("steps per second", f"{pace:.1f}", ">= 10")
    what = f"{settings.every} steps with a save / without"
    table.add_row(what, str(ratio), "1.03")
    spread = f"{np.median(found):.2f} s [{min(found):.2f}, {max(found):.2f}]"
    table.add_row("resuming, in a fresh process", spread, "2 s")
    Console().print(table)


def resume(settings: Settings, folder: Path) -> float:
    """Seconds from importing orbax to a carry that is ready."""
    _, _, carry = begin(settings)
    jax.block_until_ready(carry)
    since = time.perf_counter()
    from lowcomm.checkpoint import Checkpoints

    with Checkpoints(folder) as saved:
        _, carry = saved.restore(tuple(carry))
    jax.block_until_ready(carry)
    return time.perf_counter() - since


if __name__ == "__main__":
    chosen = tyro.cli(Settings)
    jax.config.update("jax_num_cpu_devices", chosen.workers)
    main(chosen)
