"""Train one method on one task once, and write down what it gave and what it cost.

In several processes each builds the batches of its own workers and reads their losses;
the first one evaluates the consensus, which all of them form.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec as P

import lowcomm as lc

from . import sharding
from .stopping import Kept, Stopped
from .task import Task


class Measurement(NamedTuple):
    """One run, seen at its evaluations; NaN from where it diverged.

    Of several processes only the first has metrics.
    """

    steps: np.ndarray  # [points] int, steps taken before each evaluation
    metrics: dict[str, np.ndarray]  # name -> [points], held out, of the consensus
    bytes: np.ndarray  # [points] payload a worker has sent
    seconds: np.ndarray  # [points] predicted on the link
    syncs: int  # steps on which more than a trigger's scalar was sent
    step_seconds: float  # measured here per step, compilation and evaluation left out
    failure: str | None = None
    model: Any = None  # the consensus at the end


@dataclass
class Seen:
    """What was seen of a run so far; saved with it, as JSON."""

    found: list[dict[str, float]] = field(default_factory=list)  # at the evaluations
    payload: list[int] = field(default_factory=list)  # bytes of each step, a worker
    seconds: list[float] = field(default_factory=list)  # predicted, of its traffic
    warm: list[float] = field(default_factory=list)  # measured, of compiled steps


class Where(NamedTuple):
    """What runs the workers, and what they are imagined to be connected by."""

    workers: int
    link: lc.Link
    mesh: Any = None
    backend: str | None = None
    compute: float | None = None  # seconds of a step without its traffic
    processes: int = 1  # that run it together


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
    on_step: Callable[[int, float, int], None] = lambda step, loss, sent: None,
    kept: Kept | None = None,
) -> Measurement:
    """Train for ``steps`` steps and evaluate the consensus at even intervals.

    There are ``evaluations`` of them after the one before the first step, fewer where
    there are fewer steps. ``on_evaluation`` is shown each as it is made, ``on_step``
    the mean training loss (of the workers at hand, if there are several processes) and
    the payload bytes of every step. The predicted seconds
    are ``where.compute`` a step, or the time measured here if that is None, plus what
    the traffic costs on ``where.link``, each message by the cheapest algorithm. A run
    whose loss stops being finite is returned with its ``failure``, not raised; in
    several processes it is raised where it was seen, since the others may not know.

    What is ``kept`` is saved and gone on from: the curve with the carry, so that a run
    that was stopped and went on gives the numbers of one that was not, but for times
    that were measured. Raises ``Stopped`` where a stop is asked for.
    """
    points = np.unique(np.linspace(0, steps, evaluations + 1).round().astype(int))
    due = set(points.tolist())
    how: dict[str, Any] = {"mesh": where.mesh, "backend": where.backend}
    consensus = jax.jit(lc.spread(lc.consensus, **how))
    model, specs = task.init(jax.random.key(seed)), None
    loss = task.loss
    if group := sharding.group(where.mesh):
        specs = sharding.specs(model, group)
        tx, loss = lc.sharded(tx, specs), sharding.divided(loss, group)
    step = lc.counted_step(loss, tx, workers=where.workers, **how)
    mine, batches = None, task.batches
    if where.processes > 1:
        mine = lc.workers_at_hand(where.mesh)
        batches = lambda t: lc.feed(task.batches(t, mine), where.mesh)
        # Each worker's whole model on each of its devices, for who evaluates it.
        whole = NamedSharding(where.mesh, P(lc.AXIS))
        consensus = jax.jit(lc.spread(lc.consensus, **how), out_shardings=whole)

    def evaluate(t: int, model: Any, training_loss: float | None) -> None:
        if jax.process_index() > 0:
            return
        seen.found.append(task.evaluate(model))
        on_evaluation({"step": t, **seen.found[-1], "training_loss": training_loss})

    params = lc.stack(model, where.workers, mesh=where.mesh, specs=specs)
    carry, seen, first = (params, lc.init(tx, params, **how)), Seen(), 0
    if kept is not None and kept.checkpoints.steps():
        saved = kept.checkpoints
        first, carry = (saved.restore_resized if kept.resize else saved.restore)(carry)
        seen = Seen(**kept.checkpoints.about().notes)
        model = lc.unstack(consensus(carry[1], carry[0]))
    else:
        evaluate(0, model, None)
    params, state = carry
    prices: dict[tuple[int, bytes], float] = {}
    compiled: set[int] = set()
    took = np.nan
    for t in range(first, steps):
        since = time.perf_counter()
        params, state, metrics, sent = step(params, state, batches(t), t)
        losses = lc.at_hand(metrics["loss"])  # waits for the step
        took = time.perf_counter() - since
        try:
            lc.train.check_losses(t, losses, mine)
        except FloatingPointError as failure:
            if where.processes > 1:
                raise
            return _failed(points, seen, str(failure))
        if sent.program in compiled:  # its first step waits for the compiler
            seen.warm.append(took)
        compiled.add(sent.program)
        sends = sent.traffic.together()
        kind = sent.program, sent.ran.tobytes()
        if kind not in prices:
            prices[kind] = lc.seconds(
                sends,
                where.link,
                where.workers,
                counts=sent.ran,
                algorithm="best",
            )
        seen.seconds.append(prices[kind])
        seen.payload.append(sends.bytes(sent.ran))
        loss = float(losses.mean())
        on_step(t, loss, seen.payload[-1])
        if t + 1 in due:
            model = lc.unstack(consensus(state, params))
            evaluate(t + 1, model, loss)
        if kept is not None:
            stop = kept.request.stops_before(t + 1)
            if stop or kept.is_due(t + 1, last=steps):
                kept.checkpoints.save(t + 1, (params, state), notes=asdict(seen))
            if stop:
                kept.checkpoints.wait()
                raise Stopped(t + 1, kept.request.signal)
    step_seconds = float(np.mean(seen.warm or [took]))
    compute = step_seconds if where.compute is None else where.compute
    payload = np.array(seen.payload, np.int64)
    return Measurement(
        steps=points,
        metrics=_columns(seen.found, len(points)),
        bytes=_at(points, payload),
        seconds=_at(points, np.array(seen.seconds) + compute),
        syncs=int((payload > SCALAR).sum()),
        step_seconds=step_seconds,
        model=model,
    )


def _failed(points: np.ndarray, seen: Seen, failure: str) -> Measurement:
    unknown = np.full(len(points), np.nan)
    metrics = _columns(seen.found, len(points))
    return Measurement(points, metrics, unknown, unknown, 0, np.nan, failure)


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
    if not found:  # by another process
        return {}
    missing = [dict.fromkeys(found[0], np.nan)] * (points - len(found))
    rows = [*found, *missing]
    return {name: np.array([row[name] for row in rows]) for name in found[0]}
