"""Adaptive local batch sizes: larger where gradients are too noisy for a step."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc
from lowcomm.spmd import vary

from .. import panels, toys
from ..trials import Cell, Interval, difference, interval, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "Adaptive local batch sizes"
REFERENCE = (
    "Lau, Li, Xu, Liu and Kolar, *Communication-Efficient Adaptive Batch Size "
    "Strategies for Distributed Local Gradient Methods*, 2024, "
    "[2406.13936](https://arxiv.org/abs/2406.13936)."
)
CLAIM = """A batch that grows where a norm test fails at a sync needs fewer rounds than
a small one for the same quality and generalizes better than a large one (as
recalled); by our analysis, it explodes below a critical level of the test, √workers for
the test across workers, and above it only fluctuations make it grow."""
SETTING = """Gaussian mixture, 8 workers, 1200 steps of SGD with a constant rate, tuned
for each run; H = 16, batches from 8 to 128 a worker, test level θ across workers
(critical: 2.83); constant batches 8 and 128 at as many rounds, as many examples (with
the rate that is best at their end) and, with H = 8, as many bytes."""
METHODS = ("adaptive_batch",)
LEAST, MOST, PERIOD, LONGER = 8, 128, 16, 8
LEVELS = (1.5, 2.5, 3.0, 3.5)
SMALL, LONG = "batch 8", "batch 8, 8 times the steps"
LARGE, SHORT = "batch 128", "batch 128, examples of batch 8"
OFTEN = "batch 8, H = 8"
BASELINES = (SMALL, OFTEN, LONG, LARGE, SHORT)
RATES = (0.1, 0.2, 0.4, 0.8, 1.6)
LOWER, HIGHER = (0.0125, 0.025, 0.05, 0.1, 0.2), (0.4, 0.8, 1.6, 3.2, 6.4)


class Drawn(NamedTuple):
    """State of ``_drawing``."""

    inner: Any
    samples: jax.Array  # int32, that this worker took so far


def cells(scale: Scale) -> Cells:
    """Each level of the test, and batches that stay as they are."""
    steps = scale.steps(1200)
    how: dict[str, Any] = {"seeds": scale.seeds}
    usual, lower, higher = (scale.rates(*r) for r in (RATES, LOWER, HIGHER))
    jobs: Cells = {
        f"θ = {t}": partial(_growing, t, steps=steps, points=25, rates=usual, **how)
        for t in LEVELS
    }
    short = steps * LEAST // MOST // 3 * 3
    for name, size, some, points, rates in (
        (SMALL, LEAST, steps, 25, usual),
        (OFTEN, LEAST, steps, 25, usual),
        (LONG, LEAST, LONGER * steps, 25, lower),
        (LARGE, MOST, steps, 25, usual),
        (SHORT, MOST, short, short // 3, higher),
    ):
        period = PERIOD // 2 if name == OFTEN else PERIOD
        run = partial(_constant, size, period, rates=rates, **how)
        jobs[name] = partial(run, steps=some, points=points)
    return jobs


def verdict(found: Found) -> Verdict:
    """An explosion below the critical level, a staircase above it, and its use."""
    at = {level: found[f"θ = {level}"] for level in LEVELS}
    until = {level: _until(cell, MOST) for level, cell in at.items()}
    low, high = LEVELS[0], 3.0
    explodes = bool(np.all(until[low] <= at[low]["steps"] / 4))
    stairs = _stairs(at[high])
    climbs = min(stairs) >= 3 and bool(np.all(until[high] > until[low]))
    small, large = (_minus(found, f"θ = {high}", name) for name in (SMALL, LARGE))
    sizes = {level: interval(values(cell, "batch")).mean for level, cell in at.items()}
    reached = "; ".join(
        f"θ = {level} {_said(until[level])}, {sizes[level]:.0f} at the end"
        for level in LEVELS
    )
    equal = "; ".join(
        f"θ = {level} {_equal(found, level, LONG)} (8), "
        f"{_equal(found, level, LARGE)} (128)"
        for level in LEVELS
    )
    rounds = "; ".join(
        f"θ = {level} {_minus(found, f'θ = {level}', SMALL)} (8), "
        f"{_minus(found, f'θ = {level}', LARGE)} (128)"
        for level in LEVELS
    )
    measured = f"""Batch {MOST} is reached: {reached}; θ = {high} goes over
    {min(stairs)} to {max(stairs)} sizes between {LEAST} and {MOST}. Loss minus that of
    constant batches at as many rounds: {rounds}; at as many examples: {equal}. Batch 8
    minus 128 at as many rounds {_minus(found, SMALL, LARGE)}, on as many examples
    {_minus(found, SMALL, SHORT)}. The test sends a gradient a round; at equal bytes,
    θ = {high} minus {OFTEN}: {_minus(found, f"θ = {high}", OFTEN)}."""
    held = [explodes, climbs, small.high < 0, large.high < 0]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """The batch against the steps, and the loss against the examples."""
    left, right = figure.subplots(1, 2)
    batches = {
        f"θ = {level}": panels.curve(found[f"θ = {level}"], "batch") for level in LEVELS
    }
    panels.lines(left, batches, x="step", y="batch of a worker", log="y")
    names = [*batches, LONG, LARGE]
    losses = {
        name: (
            np.mean(found[name]["curves"]["samples"], 0)[1:],
            np.asarray(found[name]["curves"]["loss"], float)[:, 1:],
        )
        for name in names
    }
    panels.lines(right, losses, x="examples", y="held-out loss", log="x")


def _minus(found: Found, name: str, other: str) -> Interval:
    return difference(values(found[name]), values(found[other]))


def _until(cell: Cell, size: int) -> np.ndarray:
    """The step at which each seed was first seen with that batch, or infinity."""
    there = np.asarray(cell["curves"]["batch"], float) >= size
    return np.where(there.any(1), np.array(cell["step"])[there.argmax(1)], np.inf)


def _said(steps: np.ndarray) -> str:
    if not np.isfinite(steps).any():
        return "never"
    several = f"{steps.min():.0f} to {np.max(steps[np.isfinite(steps)]):.0f}"
    missing = int(np.isinf(steps).sum())
    return f"by step {several}" + (f" (never by {missing} seeds)" if missing else "")


def _stairs(cell: Cell) -> list[int]:
    """How many sizes each seed was seen with between the least and the most."""
    between = lambda sizes: {size for size in sizes if LEAST < size < MOST}
    return [len(between(sizes)) for sizes in cell["curves"]["batch"]]


def _equal(found: Found, level: float, name: str) -> Interval | str:
    """What it ends with, minus what the other had after as many examples."""
    cell, other = found[f"θ = {level}"], found[name]["curves"]
    ends = values(cell, "samples")
    if max(ends) > min(samples[-1] for samples in other["samples"]):
        return "not run so long"
    had = [
        float(np.interp(end, samples, losses))
        for end, samples, losses in zip(
            ends, other["samples"], other["loss"], strict=True
        )
    ]
    return difference(values(cell), had)


def _constant(size: int, period: int, **how: Any) -> Cell:
    problem = toys.mixture(batch_size=size)
    make = lambda rate: lc.local_sgd(optax.sgd(rate), period=period)
    cell = tuned(problem, make, **how)
    samples = [step * size * problem.workers for step in cell["step"]]
    cell["curves"]["samples"] = [samples] * len(cell["seeds"])
    return cell


def _growing(level: float, **how: Any) -> Cell:
    """Steps that draw as many examples as the state asks for, in parts of ``LEAST``."""
    problem = toys.mixture(batch_size=LEAST)
    place = lambda own, key: {"own": own, "key": jax.random.key_data(key)}
    # The harness's own gradients are of nothing: the method draws what it needs.
    outer = problem._replace(loss=lambda params, batch: jnp.zeros(()), draw=place)

    def make(rate):
        tx = lc.adaptive_batch(
            optax.sgd(rate), period=PERIOD, level=level, start=LEAST, most=MOST
        )
        return _drawing(tx, problem)

    def watch(params, state):
        size = optax.tree.get(state, "batch_size")[0]
        return {"batch": size, "samples": problem.workers * state.samples[0]}

    return tuned(outer, make, watch=watch, extra_args=lambda batch: batch, **how)


def _drawing(tx: Any, problem: toys.Problem) -> optax.GradientTransformationExtraArgs:
    """``tx`` with the mean gradient of so many examples as it asks for, and few more.

    They are drawn from ``own`` with ``key``; ``tx`` is told how many there are.
    """

    def init(params):
        return Drawn(tx.init(params), vary(jnp.zeros((), jnp.int32), lc.AXIS))

    def update(
        updates, state, params=None, *, own: Any = None, key: Any = None, **extra
    ):
        parts = -(-optax.tree.get(state.inner, "batch_size") // LEAST)
        key = jax.random.wrap_key_data(key)

        def add(i, total):
            batch = problem.draw(own, jax.random.fold_in(key, i))
            grads = jax.grad(problem.loss)(params, batch)
            return jax.tree.map(jnp.add, total, grads)

        total = jax.lax.fori_loop(0, parts, add, jax.tree.map(lambda p: 0 * p, params))
        grads = jax.tree.map(lambda g: g / parts, total)
        size = parts * LEAST
        moves, inner = tx.update(grads, state.inner, params, batch_size=size, **extra)
        return moves, Drawn(inner, state.samples + size)

    return optax.GradientTransformationExtraArgs(init, update)
