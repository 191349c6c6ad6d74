"""Data injection: some workers give part of their batch to all others.

Where workers' data differ, a fraction ``φ_w`` of the workers, drawn anew at each step,
gives a fraction ``φ_b`` of its own batch to everybody. The native batch shrinks to
``b / (1 + φ_w φ_b M)``, so that with what is injected every worker still has ``b``.

Examples travel, not gradients: each worker receives ``givers · given`` of them a step,
which no ledger counts.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import jax
import numpy as np

from .task import PyTree


class Injection(NamedTuple):
    """How the batch of each worker is made up."""

    native: int  # examples that a worker draws itself
    givers: int  # workers that give, at each step
    given: int  # examples that each of them gives

    @property
    def batch_size(self) -> int:
        """Examples that a worker sees in a step."""
        return self.native + self.givers * self.given


def injection(
    batch_size: int, workers: int, *, givers: float, given: float
) -> Injection:
    r"""Make up batches of ``batch_size`` with a share of others' examples.

    .. math:: b_{\text{native}} = b \big/ (1 + \varphi_w \varphi_b M)

    ``φ_w`` is ``givers``, the fraction of the ``workers`` that gives, ``φ_b`` is
    ``given``, the fraction of its batch that each of them gives, ``M`` is ``workers``.

    Raises:
        ValueError: fractions outside [0, 1], or that make no whole numbers of workers
            or examples; says which batch sizes do.

    Example:
        >>> made = injection(12, 8, givers=0.25, given=0.25)
        >>> made, made.batch_size
        (Injection(native=8, givers=2, given=2), 12)

    References:
        Tyagi and Swany, `Accelerating Distributed ML Training via Selective
        Synchronization <https://arxiv.org/abs/2307.07950>`_, 2023.

    Note:
        What is given is part of every batch, also of the giver's own, which then holds
        it twice: so all batches are equally large, as the formula has it.
    """
    if batch_size < 1 or workers < 1:
        raise ValueError(
            f"a batch of {batch_size} on {workers} workers: give 1 or more of each."
        )
    for name, share in {"givers": givers, "given": given}.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name}={share} is a fraction, and outside [0, 1].")
    of_workers, of_batch = (_fraction(share) for share in (givers, given))
    who = of_workers * workers
    if who.denominator != 1:
        raise ValueError(
            f"givers={givers} of {workers} workers are {float(who):g}: give a multiple "
            f"of 1/{workers}."
        )
    # The least native batch of which the share is whole, and the batch it belongs to.
    least, part = of_batch.denominator, of_batch.numerator
    unit = least + int(who) * part
    if batch_size % unit:
        native = batch_size / (1 + float(who) * given)
        raise ValueError(
            f"a batch of {batch_size} would hold {native:.4g} native examples, of "
            f"which {given} are given, and both must be whole: choose a multiple of "
            f"{unit}."
        )
    times = batch_size // unit
    return Injection(times * least, int(who), times * part)


def injected(
    batches: Callable[[int], PyTree], made: Injection, *, seed: int = 0
) -> Callable[[int], PyTree]:
    """The batches with what is given: ``[K, native, …]`` to ``[K, b, …]``.

    Who gives is drawn from (seed, step) without replacement; the first examples of
    their batches are given, so batches must come in random order. A worker's own
    examples come first.

    Raises:
        ValueError: at a step, a batch of another size than ``made.native``; names the
            leaf.

    Example:
        Worker 0 or worker 1 gives one of its two examples to both.

        >>> made = injection(3, 2, givers=0.5, given=0.5)
        >>> batches = injected(lambda step: np.array([[1, 2], [3, 4]]), made, seed=1)
        >>> [batches(step)[:, 2].tolist() for step in range(4)]
        [[1, 1], [3, 3], [3, 3], [1, 1]]
    """

    def of_step(step: int) -> PyTree:
        batch = batches(step)
        workers = np.shape(jax.tree.leaves(batch)[0])[0]
        rng = np.random.default_rng((seed, step))
        who = np.sort(rng.choice(workers, made.givers, replace=False))

        def add(path, x):
            if np.shape(x)[1] != made.native:
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)} has shape {np.shape(x)} and "
                    f"must hold {made.native} native examples of each worker."
                )
            pool = x[who, : made.given].reshape(1, -1, *x.shape[2:])
            return np.concatenate([x, np.repeat(pool, workers, 0)], axis=1)

        return jax.tree_util.tree_map_with_path(add, batch)

    return of_step


def _fraction(share: float) -> Fraction:
    """The fraction that was meant: 1/3 of a float that is not quite a third."""
    return Fraction(share).limit_denominator(10_000)
