"""Train one method on one task once, and write down what it gave and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.experimental.compilation_cache import compilation_cache

import lowcomm as lc

from .tasks import Task


class Measurement(NamedTuple):
    """One run, seen at its evaluations; NaN from where it diverged."""

    steps: np.ndarray  # [points] int, steps taken before each evaluation
    metrics: dict[str, np.ndarray]  # name -> [points], held out, of the consensus
    bytes: np.ndarray  # [points] payload a worker has sent
    seconds: np.ndarray  # [points] predicted on the link
    syncs: int  # steps on which more than a trigger's scalar was sent
    step_seconds: float  # measured here per step, compilation and evaluation left out
    failure: str | None = None


class Where(NamedTuple):
    """What runs the workers, and what they are imagined to be connected by."""

    workers: int
    link: lc.Link
    mesh: Any = None
    backend: str | None = None
    compute: float | None = None  # seconds of a step without its traffic


SCALAR = 4  # bytes of the one number a measured trigger sends at every step


def measure(
    task: Task,
    tx: optax.GradientTransformation,
    *,
    where: Where,
    steps: int,
    seed: int,
    evaluations: int = 20,
    on_evaluation: Callable[[dict[str, Any]], None] = lambda record: None,
) -> Measurement:
    """Train for ``steps`` steps and evaluate the consensus at even intervals.

    There are ``evaluations`` of them after the one before the first step, fewer where
    there are fewer steps. ``on_evaluation`` is shown each as it is made. The predicted
    seconds are ``where.compute`` a step, or the time measured here if that is None,
    plus what the traffic costs on ``where.link``. A run whose loss stops being finite
    is returned with its ``failure``, not raised.
    """
    points = np.unique(np.linspace(0, steps, evaluations + 1).round().astype(int))
    due = set(points.tolist())
    found: list[dict[str, float]] = []
    took: list[float] = []
    consensus = jax.jit(lc.spread(lc.consensus, mesh=where.mesh, backend=where.backend))

    def evaluate(step: int, params: Any, training_loss: float | None) -> None:
        found.append(task.evaluate(params))
        on_evaluation({"step": step, **found[-1], "training_loss": training_loss})

    def on_step(t: int, params: Any, state: Any, metrics: dict) -> None:
        nonlocal since
        if t + 1 not in due:
            took.append(time.perf_counter() - since)
        else:
            loss = float(np.mean(metrics["loss"]))  # waits for the step
            took.append(time.perf_counter() - since)
            if np.isfinite(loss):
                model = jax.tree.map(lambda leaf: leaf[0], consensus(state, params))
                evaluate(t + 1, model, loss)
        since = time.perf_counter()

    start = task.init(jax.random.key(seed))
    evaluate(0, start, None)
    since = time.perf_counter()
    try:
        run = lc.fit(
            task.loss,
            tx,
            start,
            task.batches,
            steps=steps,
            workers=where.workers,
            mesh=where.mesh,
            backend=where.backend,
            on_step=on_step,
        )
    except FloatingPointError as failure:
        unknown = np.full(len(points), np.nan)
        metrics = _columns(found, len(points))
        return Measurement(points, metrics, unknown, unknown, 0, np.nan, str(failure))
    # The first step of every program waits for its compilation.
    warm = sorted(took)[: max(1, len(took) - len(run.programs))]
    step_seconds = float(np.mean(warm))
    compute = step_seconds if where.compute is None else where.compute
    return Measurement(
        steps=points,
        metrics=_columns(found, len(points)),
        bytes=_at(points, run.payload),
        seconds=_at(points, traffic_seconds(run, where) + compute),
        syncs=int((run.payload > SCALAR).sum()),
        step_seconds=step_seconds,
    )


def traffic_seconds(run: lc.Run, where: Where) -> np.ndarray:
    """Predicted seconds of communication, step by step, ``[steps]``.

    Their sum is what the counts of every collective cost. Within the run a step is
    priced by the bytes it sent: a silent step, one that only asked, one that synced.
    """
    price = lambda traffic, **counts: lc.seconds(
        traffic, where.link, where.workers, **counts
    )
    known: dict[int, float] = {}
    for program in run.programs:
        asking = lc.Traffic(tuple(r for r in program.traffic.rows if not r.guard))
        known[asking.bytes_always] = price(asking)
        known[program.traffic.bytes_max] = price(program.traffic)
    sizes = sorted(known)
    each = np.interp(run.payload, sizes, [known[size] for size in sizes])
    exact = sum(price(p.traffic, counts=p.ran) for p in run.programs)
    return each * (exact / each.sum()) if each.sum() else each


@contextmanager
def shared_compilations() -> Iterator[None]:
    """Inside, equal programs are compiled once: seeds after the first start at once.

    Does nothing where a compilation cache is configured already.
    """
    options = {
        "jax_compilation_cache_dir": None,
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    if before["jax_compilation_cache_dir"]:
        yield
        return
    with TemporaryDirectory(prefix="lowcomm-") as folder:
        try:
            for name, value in {**options, "jax_compilation_cache_dir": folder}.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


def _at(points: np.ndarray, each: np.ndarray) -> np.ndarray:
    """The sum over the steps before each point."""
    return np.concatenate([[0], np.cumsum(each)])[points]


def _columns(found: list[dict[str, float]], points: int) -> dict[str, np.ndarray]:
    missing = [dict.fromkeys(found[0], np.nan)] * (points - len(found))
    rows = [*found, *missing]
    return {name: np.array([row[name] for row in rows]) for name in found[0]}
