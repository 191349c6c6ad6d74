"""What a worker does about numbers that are not finite, by itself.

Gradients: skip the step, not the sync. Moments: begin them anew. What the others do
about a worker whose parameters are not finite is in ``lowcomm.survivors``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .exchange import decided_by
from .leaves import all_finite, is_inexact, map_leaves
from .manifest import is_key
from .moments import realign
from .parts import expect, holds, is_verb
from .spmd import Axis, vary
from .sync import SelfClockedState
from .triggers import any_worker


class SkipNonfiniteState(NamedTuple):
    """State of ``skip_nonfinite``."""

    skipped: jax.Array  # int32, steps this worker has skipped
    guarded: Any


class RestartNonfiniteState(NamedTuple):
    """State of ``restart_nonfinite``."""

    restarts: jax.Array  # int32, steps that began with new moments
    restarted: Any


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
        _refuse_verbs(guarded, "skip_nonfinite", "skip the sync with the step")
        return vary(SkipNonfiniteState(jnp.zeros((), jnp.int32), guarded), axis)

    def update(updates, state, params=None, **extra):
        bad = ~all_finite(updates)
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


def restart_nonfinite(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""Begin moments anew where they have become NaN or infinite, each worker its own.

    .. math::
        s \leftarrow \text{inner}(g, x, s_0), \qquad s_0 = \begin{cases}
        \text{init}(x) & \text{where } s \text{ is not finite and init}(x) \text{ is}
        \\ s & \text{else} \end{cases}

    Before a step, so that a worker that has come back to the anchor takes its first
    step with moments made of it. Moments return to what ``inner.init`` makes of the
    parameters, with the step count of their bias correction, as by ``moments="reset"``
    of ``rounds``; learning-rate schedules go on. Infinities that ``init`` itself put
    there do not count. ``state.restarts`` counts, while the parameters are NaN one a
    step. Around an inner optimizer, it sends nothing, and is all selects::

        diloco(restart_nonfinite(inner), period=50, exchange=surviving_mean())

    ``skip_nonfinite`` keeps the gradients that are not finite out of the moments, and
    this mends what got in otherwise: a square that overflowed, or a step of a model
    that was NaN.

    Raises:
        ValueError: in ``init``, a verb inside; at trace, no ``params``, or an exchange.

    Example:
        >>> tx = restart_nonfinite(optax.trace(0.5))
        >>> state = tx.init(jnp.zeros(1))
        >>> for g in (2.0, jnp.inf, 2.0):
        ...     moves, state = tx.update(jnp.array([g]), state, jnp.zeros(1))
        ...     print(moves, state.restarts)
        [2.] 0
        [inf] 0
        [2.] 1
    """
    expect(optax.GradientTransformation, inner=inner)
    inner = optax.with_extra_args_support(inner)
    reset = realign("reset", inner, lambda tree: tree)

    def init(params):
        restarted = inner.init(params)
        _refuse_verbs(restarted, "restart_nonfinite", "forget the anchor on one worker")
        return RestartNonfiniteState(jnp.zeros((), jnp.int32), restarted)

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError(
                "restart_nonfinite needs params, of which it makes new moments: "
                "tx.update(grads, state, params)."
            )
        before, first = state.restarted, inner.init(params)
        lost = jax.tree.map(_is_lost, before, first)
        bad = jnp.any(jnp.array([*jax.tree.leaves(lost), False]))

        def choose(old, new, first, lost):
            chosen = jnp.where(lost, first, jnp.where(bad, new, old))
            return chosen if is_key(old) else chosen.astype(old.dtype)

        begun = jax.tree.map(choose, before, reset(before, params), first, lost)
        with decided_by("restart_nonfinite", ()):
            moves, after = inner.update(updates, begun, params, **extra)
        return moves, RestartNonfiniteState(
            state.restarts + bad.astype(jnp.int32), after
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _is_lost(x: jax.Array, first: jax.Array) -> jax.Array | bool:
    """Whether something is not finite that was, when the state was made."""
    if not is_inexact(x):
        return False
    return jnp.any(~jnp.isfinite(x) & jnp.isfinite(first))


def _refuse_verbs(state: Any, name: str, wrongly: str) -> None:
    if holds(state, lambda s: is_verb(s) or isinstance(s, SelfClockedState)):
        raise ValueError(
            f"{name} around a whole verb, or self_clocked, would {wrongly}: put it "
            f"around the inner optimizer, as in local_sgd({name}(inner), period=8)."
        )
