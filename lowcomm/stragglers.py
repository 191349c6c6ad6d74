r"""Workers that are not equally fast at every step, drawn from a seed.

A law gives factors on the seconds of a step; ``compute_times`` makes ``[steps,
workers]`` seconds of them. At a sync everyone waits for the last, so that of the rounds
between syncs

    T = Σ_rounds max_i Σ_{t in round} c_i(t)

is what synchronous training takes without its network: with a sync at each step the sum
of the largest, and the longer the round, the more of it averages out, but for a worker
that is always slow. ``timeline`` is the same with transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

# From a generator, a number of steps and the worker's index to factors [steps].
Law = Callable[[np.random.Generator, int, int], np.ndarray]


def steady() -> Law:
    """Every step takes what it takes.

    Example:
        >>> compute_times(0.5, steady(), steps=2, workers=2, seed=0)
        array([[0.5, 0.5],
               [0.5, 0.5]])
    """
    return lambda generator, steps, worker: np.ones(steps)


def one_slow(factor: float, *, worker: int = 0) -> Law:
    """One worker takes ``factor`` times as long at every step.

    Raises:
        ValueError: a factor that is not positive, a negative worker.

    Example:
        >>> compute_times(1.0, one_slow(3.0), steps=1, workers=3, seed=0)
        array([[3., 1., 1.]])
    """
    if not 0 < factor < np.inf or worker < 0:
        raise ValueError(f"factor={factor} of worker {worker}: give a positive one.")
    slow = worker
    return lambda generator, steps, worker: np.full(
        steps, factor if worker == slow else 1.0
    )


def exponential_tail(scale: float) -> Law:
    r"""Steps take longer by an exponential time: a factor of 1 + ``scale`` · Exp(1).

    Of K workers the slowest one's is :math:`1 + s\,(1 + \tfrac12 + \dots + \tfrac1K)`
    in expectation, for ``scale`` s.

    Raises:
        ValueError: a negative scale.

    Example:
        >>> times = compute_times(1.0, exponential_tail(0.5), steps=1000, workers=4,
        ...                       seed=0)
        >>> print(times.mean().round(1), times.max(axis=1).mean().round(1))
        1.5 2.0
    """
    if not 0 <= scale < np.inf:
        raise ValueError(f"scale={scale}: give 0 or more.")
    return lambda generator, steps, worker: (
        1 + scale * generator.exponential(size=steps)
    )


def lognormal(sigma: float) -> Law:
    r"""Factors :math:`\exp(\sigma z - \sigma^2/2)`, z normal: their mean is 1.

    Raises:
        ValueError: a negative sigma.

    Example:
        >>> times = compute_times(1.0, lognormal(0.5), steps=1000, workers=4, seed=0)
        >>> print(times.mean().round(1), times.max(axis=1).mean().round(1))
        1.0 1.5
    """
    if not 0 <= sigma < np.inf:
        raise ValueError(f"sigma={sigma}: give 0 or more.")
    return lambda generator, steps, worker: np.exp(
        sigma * generator.standard_normal(steps) - sigma**2 / 2
    )


def compute_times(
    seconds: float, law: Law, *, steps: int, workers: int, seed: int
) -> np.ndarray:
    """Seconds that each worker computes at each step, ``[steps, workers]``.

    A worker's times are its own: more workers change nothing for the first ones.

    Args:
        seconds: of a step with a factor of 1.
        law: ``steady``, ``one_slow``, ``exponential_tail``, ``lognormal``, or one of
            your own.
        steps: how many.
        workers: how many.
        seed: of all that is drawn.

    Raises:
        ValueError: negative seconds, no workers.

    Example:
        >>> draw = lambda workers: compute_times(
        ...     1.0, lognormal(1.0), steps=3, workers=workers, seed=7)
        >>> bool((draw(2) == draw(5)[:, :2]).all())
        True
    """
    if not 0 <= seconds < np.inf:
        raise ValueError(f"seconds={seconds}: give 0 or more.")
    if steps < 0 or workers < 1:
        raise ValueError(f"{steps} steps of {workers} workers: give 0 and 1 or more.")
    own = lambda worker: law(np.random.default_rng((seed, worker)), steps, worker)
    return seconds * np.stack([own(worker) for worker in range(workers)], axis=1)


def synced_seconds(times: ArrayLike, syncs: int | Sequence[int] | np.ndarray) -> float:
    """Seconds of a run whose workers wait for each other at every sync.

    Args:
        times: seconds of each worker at each step, ``[steps, workers]``.
        syncs: the period, or the steps after which they meet, counted from 0. After
            the last step they meet in any case.

    Raises:
        ValueError: times of another shape, a period below 1, steps that are not there.

    Example:
        Two workers that are slow in turn: it costs them a third, unless they meet only
        every second step.

        >>> times = np.array([[1.0, 2.0], [2.0, 1.0]] * 3)
        >>> synced_seconds(times, 1), synced_seconds(times, 2)
        (12.0, 9.0)
    """
    found = np.asarray(times, float)
    if found.ndim != 2:
        raise ValueError(f"times of shape {found.shape} must be [steps, workers].")
    steps = len(found)
    if isinstance(syncs, int | np.integer):
        if syncs < 1:
            raise ValueError(f"period {syncs}: give 1 or more.")
        begins = np.arange(0, steps, syncs)
    else:
        after = np.unique(np.asarray(syncs, int))
        if after.size and not 0 <= after[0] <= after[-1] < steps:
            raise ValueError(f"syncs after the steps {after} of {steps}.")
        begins = np.union1d([0], after + 1)
        begins = begins[begins < steps]
    if steps == 0:
        return 0.0
    return float(np.add.reduceat(found, begins, axis=0).max(axis=1).sum())
