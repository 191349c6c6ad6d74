"""Local SGD on a strongly convex problem: how many workers are worth their while."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc

from .. import panels
from ..toys import Examples, Problem
from ..trials import Cell, Interval, dense_bytes, difference, interval, train
from . import Cells, Found, Scale, Verdict

TITLE = "Local SGD"
REFERENCE = (
    "Stich, *Local SGD Converges Fast and Communicates Little*, 2019, "
    "[1805.09767](https://arxiv.org/abs/1805.09767)."
)
CLAIM = """The speed-up is linear in the number of workers as with mini-batch SGD, while
rounds may be up to √(T/K) steps long; with longer rounds it saturates earlier."""
SETTING = """Logistic regression in 20 dimensions, one example a step and worker, from
one distribution; steps to a suboptimality of 0.02, seen where workers meet (every 4
steps at H = 1); the constant rate is chosen by other seeds for each K and H."""
METHODS = ("local_sgd", "output_average")
BASELINES = ("K = 32, H = 1", "K = 32, one step on 16", "K = 32, one step on 64")
WORKERS, PERIODS, BATCHES = (1, 2, 8, 32), (1, 16, 64, 256), (16, 64)
FACTORS = tuple(2.0**i for i in range(-4, 3))  # of a rate of 0.04 a worker
TARGET, EXAMPLES, DIMENSIONS = 0.02, 4000, 20
SEEDS, OTHERS = range(20), range(100, 108)  # rates are chosen by the others


def cells(scale: Scale) -> Cells:
    """Steps to the target, and those of synchronous SGD on as many examples a round."""
    some = partial(
        _steps_to_target,
        seeds=SEEDS[:: 5 if scale.quick else 1],
        others=OTHERS[:: 4 if scale.quick else 1],
    )
    jobs: Cells = {
        f"K = {k}, H = {h}": partial(some, k, h, rate=0.04 * k)
        for k in WORKERS
        for h in PERIODS
    }
    for size in BATCHES:
        name = f"K = 32, one step on {size}"
        jobs[name] = partial(some, 32, 1, rate=5.12, batch_size=size, look=1)
    return jobs


def verdict(found: Found) -> Verdict:
    """Linear with a mean at each step, above 12 at 64; one round at 256 is a floor."""
    speed = {h: _speedup(found, 32, h) for h in PERIODS}
    floor = all(x == 256 for x in _values(found["K = 32, H = 256"]))
    held = [speed[1].mean > 25, speed[64].mean > 12, floor]
    rounds = {b: interval(_values(found[f"K = 32, one step on {b}"])) for b in BATCHES}
    local = {h: interval(_rounds(found, h)) for h in BATCHES}
    gaps = {
        h: difference(_rounds(found, h), _values(found[f"K = 32, one step on {h}"]))
        for h in BATCHES
    }
    said = {h: f"{local[h]} rounds against {rounds[h]}" for h in BATCHES}
    measured = f"""Speed-up of 32 workers: {speed[1]} at H = 1, {speed[16]} at 16,
    {speed[64]} at 64, {speed[256]} at 256, where one round is all it takes. At equal
    bytes and examples, 16 local steps a round against one synchronous step on 16
    examples: {said[16]}, {_better(gaps[16])}; 64: {said[64]}, {_better(gaps[64])}."""
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """The speed-up against the workers, and rounds to the target at equal bytes."""
    left, right = figure.subplots(1, 2)
    curves: dict[str, Any] = {
        f"H = {h}": (WORKERS, [[_speedup(found, k, h).mean for k in WORKERS]])
        for h in PERIODS
    }
    curves["linear"] = (WORKERS, [WORKERS])
    panels.lines(left, curves, x="workers", y="speed-up in steps", log="xy")
    named: dict[str, list[float]] = {}
    for size in BATCHES:
        named[f"{size} steps"] = _rounds(found, size)
        named[f"one step on {size}"] = _values(found[f"K = 32, one step on {size}"])
    panels.bars(right, named, y="rounds to the target, 32 workers")


def _values(cell: Cell) -> list[float]:
    return [np.nan if x is None else x for x in cell["final"]["steps"]]


def _better(gap: Interval) -> str:
    one = (
        "local steps" if gap.high < 0 else "the one step" if gap.low > 0 else "neither"
    )
    return f"{one} better"


def _rounds(found: Found, period: int) -> list[float]:
    return [x / period for x in _values(found[f"K = 32, H = {period}"])]


def _speedup(found: Found, workers: int, period: int) -> Interval:
    """How many times fewer steps, on average over the seeds, than one worker takes."""
    one, many = (
        interval(_values(found[f"K = {k}, H = {period}"])) for k in (1, workers)
    )
    ratio = one.mean / many.mean
    error = np.hypot(one.half / one.mean, many.half / many.mean)
    return Interval(ratio, ratio * float(error))


def _steps_to_target(
    workers: int,
    period: int,
    *,
    rate: float,
    seeds: range,
    others: range,
    batch_size: int = 1,
    look: int = 4,
) -> Cell:
    """A cell: the rate that was fastest for other seeds, and what it took for these."""
    problem, steps = _logistic(workers, batch_size), max(1024, 8192 // max(workers, 2))
    every = max(period, look)

    def took(rates, seeds):
        make = lambda rate: lc.local_sgd(optax.sgd(rate), period=period)
        how: dict[str, Any] = {"steps": steps, "points": steps // every}
        runs = train(problem, make, rates=rates, seeds=seeds, **how)
        there = runs["gap"] <= TARGET
        return np.where(there.any(-1), there.argmax(-1) * float(every), np.inf)

    rates = [rate * factor for factor in FACTORS]
    chosen = took(rates, others).mean(1)
    best = int(chosen.argmin())
    judged = took(rates[best : best + 1], seeds)[0]
    return {
        "problem": problem.name,
        "seeds": list(seeds),
        "rates": {f"{r:g}": x for r, x in zip(rates, chosen, strict=True)},
        "rate": rates[best],
        "at_the_edge": best in (0, len(rates) - 1),
        "bytes": judged / period * dense_bytes(problem) * (workers > 1),
        "relative_bytes": 1 / (period * batch_size) if workers > 1 else 0.0,
        "final": {"steps": judged},
    }


def _logistic(workers: int, batch_size: int) -> Problem:
    """Examples drawn with replacement, by each worker from all of them."""
    examples, least = _examples()

    def loss(x, batch):
        margins = batch.labels * (batch.inputs @ x)
        return jnp.mean(jax.nn.softplus(-margins)) + jnp.sum(x**2) / (2 * EXAMPLES)

    def draw(own, key):
        rows = jax.random.randint(key, (batch_size,), 0, EXAMPLES)
        return Examples(*(jnp.asarray(x)[rows] for x in examples))

    return Problem(
        "logistic regression",
        workers,
        lambda key: jnp.zeros(DIMENSIONS),
        loss,
        np.zeros(workers, np.int32),
        draw,
        lambda x: {"gap": loss(x, examples) - least},
    )


@cache
def _examples() -> tuple[Examples, float]:
    """The examples, and the least loss on them, by Newton's method."""
    rng = np.random.default_rng(0)
    inputs, truth = rng.normal(size=(EXAMPLES, DIMENSIONS)), rng.normal(size=DIMENSIONS)
    likely = 1 / (1 + np.exp(-inputs @ truth))
    labels = np.where(rng.random(EXAMPLES) < likely, 1.0, -1.0)
    rows, x = labels[:, None] * inputs, np.zeros(DIMENSIONS)
    for _ in range(20):
        p = 1 / (1 + np.exp(rows @ x))
        slope = x / EXAMPLES - p @ rows / EXAMPLES
        bend = np.eye(DIMENSIONS) + (rows * (p * (1 - p))[:, None]).T @ rows
        x = x - np.linalg.solve(bend / EXAMPLES, slope)
    least = np.logaddexp(0, -(rows @ x)).mean() + x @ x / (2 * EXAMPLES)
    single = Examples(inputs.astype(np.float32), labels.astype(np.float32))
    return single, float(least)
