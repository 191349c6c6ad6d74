"""Randomness that is a function of (seed, step, leaf, worker); none is kept in state.

What a shared key determines need not be sent: every worker draws it again.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from .spmd import Axis, worker_index

_SHARD: contextvars.ContextVar[Any] = contextvars.ContextVar("shard", default=None)


class Keys(NamedTuple):
    """Randomness of one leaf at one step."""

    shared: jax.Array  # equal on all workers
    private: jax.Array  # another one on each worker


@contextlib.contextmanager
def of_shard(number: Any) -> Iterator[None]:
    """Within, keys are those of a shard of a leaf: others for every ``number``."""
    token = _SHARD.set(number)
    try:
        yield
    finally:
        _SHARD.reset(token)


def leaf_keys(seed: int, step: Any, leaf: int, axis: Axis) -> Keys:
    """The keys of leaf number ``leaf`` at ``step``; nothing is kept in state."""
    fold = jax.random.fold_in
    at_step = fold(jax.random.key(seed), step)
    if (shard := _SHARD.get()) is not None:
        at_step = fold(at_step, shard)
    shared, private = (fold(fold(at_step, kind), leaf) for kind in (0, 1))
    return Keys(shared, fold(private, worker_index(axis)))
