"""What to do about gradients that are not finite: skip the step, not the sync."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .exchange import decided_by
from .leaves import PyTree, is_inexact, map_leaves
from .parts import expect, holds, is_verb
from .spmd import Axis, vary
from .sync import SelfClockedState
from .triggers import any_worker


class SkipNonfiniteState(NamedTuple):
    """State of ``skip_nonfinite``."""

    skipped: jax.Array  # int32, steps this worker has skipped
    guarded: Any


def skip_nonfinite(
    tx: optax.GradientTransformation, *, axis: Axis = ()
) -> optax.GradientTransformationExtraArgs:
    """Leave out a step whose gradients hold NaN or an infinity.

    That step's updates are zero and the state of ``tx`` stays what it was;
    ``state.skipped`` counts. It is all selects, no conditional, so it may stand around
    anything:

    - around an inner optimizer every worker decides by itself and sends nothing:
      ``local_sgd(skip_nonfinite(inner), period=8)``. A worker that skips stays where it
      is, takes part in the next sync, and goes on from there. A measured trigger sees
      the raw gradients and fires;
    - around what exchanges gradients the workers of ``axis`` vote, by one 4-byte
      maximum a step, and all skip if one must: ``skip_nonfinite(data_parallel(inner),
      axis="workers")``. Zeros travel in that step, so no memory of an exchange is
      poisoned. An exchange along other axes than those that vote is refused: workers
      would drift apart. (A collective of your own is not seen.)

    Around a whole verb it would skip the sync with the step, and is refused. ``fit``
    stops at a loss that is not finite unless ``check_finite=False``.

    Raises:
        ValueError: in ``init``, a verb inside; at trace, an exchange along other axes
            than those that vote.

    Example:
        >>> tx = skip_nonfinite(optax.sgd(1.0))
        >>> state = tx.init(jnp.zeros(2))
        >>> for g in ([1.0, 2.0], [1.0, jnp.nan]):
        ...     moves, state = tx.update(jnp.array(g), state)
        ...     print(moves, state.skipped)
        [-1. -2.] 0
        [0. 0.] 1
    """
    expect(optax.GradientTransformation, tx=tx)
    tx = optax.with_extra_args_support(tx)

    def init(params):
        guarded = tx.init(params)
        if holds(guarded, lambda s: is_verb(s) or isinstance(s, SelfClockedState)):
            raise ValueError(
                "skip_nonfinite around a whole verb, or self_clocked, would skip the "
                "sync with the step: put it around the inner optimizer, as in "
                "local_sgd(skip_nonfinite(inner), period=8)."
            )
        return vary(SkipNonfiniteState(jnp.zeros((), jnp.int32), guarded), axis)

    def update(updates, state, params=None, **extra):
        bad = ~_all_finite(updates)
        bad = any_worker(bad, axis) if axis else bad
        zero = lambda tree: map_leaves(
            lambda x: jnp.where(bad, jnp.zeros_like(x), x) if is_inexact(x) else x, tree
        )
        with decided_by("skip_nonfinite", axis):
            moves, after = tx.update(zero(updates), state.guarded, params, **extra)
        keep = lambda before, after: jnp.where(bad, before, after)
        guarded = jax.tree.map(keep, state.guarded, after)
        skipped = state.skipped + bad.astype(jnp.int32)
        return zero(moves), vary(SkipNonfiniteState(skipped, guarded), axis)

    return optax.GradientTransformationExtraArgs(init, update)


def _all_finite(tree: PyTree) -> jax.Array:
    leaves = [x for x in jax.tree.leaves(tree) if is_inexact(x)]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in leaves]))
