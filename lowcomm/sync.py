r"""Agreeing on parameters now and then: ``average``, and a clock for plain loops.

A verb wraps an inner optimizer and returns updates, so ``optax.apply_updates`` stays
the loop. Every step the inner optimizer proposes ``params + inner(grads)``. When the
trigger fires:

    average     params ← exchange(proposal)
    rounds      anchor ← anchor + outer(exchange(anchor − proposal)),  params ← anchor

Verbs wrap, rather than follow, the inner optimizer, because what comes after Adam or a
clip no longer sees the gradients, and because they own its moments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from . import uniform
from .exchange import check_local, mean
from .leaves import (
    PyTree,
    add,
    map_leaves,
    movable,
    precise,
    subtract,
)
from .moments import realign
from .parts import expect
from .spmd import AXIS, Axis, axis_size, names, vary
from .triggers import Trigger, every

Transformation = optax.GradientTransformation
Talking = optax.GradientTransformationExtraArgs


class AverageState(NamedTuple):
    """State of ``average``."""

    inner: Any
    exchange: Any
    trigger: Any
    since: jax.Array  # int32, steps since the last sync


class SelfClockedState(NamedTuple):
    """State of ``self_clocked``."""

    steps: jax.Array  # int32, updates so far
    clocked: Any


def average(
    inner: Transformation,
    *,
    exchange: Talking | None = None,
    when: Trigger | None = None,
    moments: str = "keep",
    axis: Axis = AXIS,
) -> Talking:
    r"""Take local steps, and exchange the parameters when the trigger fires.

    .. math::
        x_i \leftarrow x_i + \text{inner}(g_i), \qquad
        \text{if fire: } x_i \leftarrow \text{exchange}(x)_i

    ``exchange`` is ``mean()`` unless given, and must leave agreeing workers alone
    (``mean``, ``weighted_mean``, ``gossip``, ``overlapped``); a compressed one raises:
    use ``rounds``. ``when`` is every step unless given. ``moments`` of the inner
    optimizer are kept, averaged or reset at a sync. Sends what the exchange sends on
    the steps that fire, and nothing between them but a measured trigger's 4 bytes.
    State: the inner optimizer's and the exchange's.

    Raises:
        ValueError: unknown ``moments``; at trace, a missing ``step`` or ``params``, an
            exchange of another kind or along another axis, a drift trigger.

    Example:
        Two workers pull apart and meet at every second step.

        >>> from lowcomm import spread
        >>> tx = average(optax.sgd(1.0), when=every(2))
        >>> x, g = jnp.zeros(2), jnp.array([1.0, 3.0])
        >>> state = spread(tx.init)(x)
        >>> update = spread(lambda g, s, x, t: tx.update(g, s, x, step=t),
        ...                 in_axes=(0, 0, 0, None))
        >>> for t in range(4):
        ...     moves, state = update(g, state, x, t)
        ...     x = x + moves
        ...     print(x)
        [-1. -3.]
        [-4. -4.]
        [-5. -7.]
        [-8. -8.]

    References:
        Stich, `Local SGD Converges Fast and Communicates Little
        <https://arxiv.org/abs/1805.09767>`_, 2019, Algorithm 1.
    """
    expect(optax.GradientTransformation, inner=inner, exchange=exchange)
    expect(Trigger, when=when)
    inner = optax.with_extra_args_support(inner)
    exchange = optax.with_extra_args_support(
        mean(axis) if exchange is None else exchange
    )
    when = every(1) if when is None else when
    together = lambda tree: mean(axis).update(tree, (), about="parameters")[0]
    agree = realign(moments, inner, together)

    def init(params):
        params = movable(params)
        state = AverageState(
            inner.init(params),
            exchange.init(params),
            when.init(params),
            jnp.zeros((), jnp.int32),
        )
        return vary(state, axis)

    def update(updates, state, params=None, *, step=None, **extra):
        whole, grads, params = enter(updates, params, step, axis)
        moves, inner_state = propose(
            inner, grads, state.inner, params, step=step, **extra
        )
        inner_state = vary(inner_state, axis)
        since = state.since + 1
        fire, trigger = when.fire(
            state.trigger,
            step=step,
            since=since,
            drift=None,
            grads=grads,
            axis=axis,
            **extra,
        )

        def talk(realigned, exchange_state, since):
            there, exchange_state = exchange.update(
                map_leaves(add, params, moves),
                exchange_state,
                params,
                step=step,
                about="parameters",
                within=axis,
                **extra,
            )
            sync = map_leaves(subtract, there, params)
            return sync, agree(realigned, there), exchange_state, jnp.zeros_like(since)

        def rest(realigned, exchange_state, since):
            return map_leaves(precise, moves), realigned, exchange_state, since

        # What passes through a conditional takes temporary memory once more: moments
        # that stay go around it.
        realigned = () if moments == "keep" else inner_state
        moves, realigned, exchange_state, since = uniform.cond(
            fire, talk, rest, realigned, state.exchange, since, axis=axis
        )
        inner_state = inner_state if moments == "keep" else realigned
        return leave(moves, whole), AverageState(
            inner_state, exchange_state, trigger, since
        )

    return Talking(init, update)


def self_clocked(tx: Transformation, *, axis: Axis = AXIS) -> Talking:
    """Count the steps for a loop that cannot pass ``step=``.

    The count is made uniform by one 4-byte maximum a step. Where the loop knows its
    step, pass that instead: it costs nothing and resumes exactly from any number.

    Raises:
        ValueError: at trace, if ``step=`` is passed all the same.

    Example:
        >>> from lowcomm import spread
        >>> tx = self_clocked(average(optax.sgd(1.0), when=every(2)))
        >>> def worker(x, g):
        ...     state = tx.init(x)
        ...     for _ in range(2):
        ...         moves, state = tx.update(g, state, x)
        ...         x = x + moves
        ...     return x
        >>> spread(worker)(jnp.zeros(2), jnp.array([1.0, 3.0]))
        Array([-4., -4.], dtype=float32)
    """
    expect(optax.GradientTransformation, tx=tx)
    tx = optax.with_extra_args_support(tx)

    def init(params):
        return vary(SelfClockedState(jnp.zeros((), jnp.int32), tx.init(params)), axis)

    def update(updates, state, params=None, **extra):
        if "step" in extra:
            raise ValueError(
                "self_clocked counts its own steps: drop it, or drop step=."
            )
        axis_size(axis)  # it must be bound
        step = lax.pmax(state.steps, names(axis))
        updates, clocked = tx.update(updates, state.clocked, params, step=step, **extra)
        return updates, SelfClockedState(vary(step + 1, axis), clocked)

    return Talking(init, update)


def enter(grads: PyTree, params: PyTree, step: Any, axis: Axis) -> tuple:
    """What the caller passed, without leaves that no optimizer may move."""
    if params is None:
        raise ValueError(
            "update needs params: tx.update(grads, state, params, step=t)."
        )
    uniform.now(step, axis)
    check_local(grads, axis, params)
    return params, movable(grads, params), movable(params)


def propose(inner: Talking, grads: PyTree, state: Any, params: PyTree, **extra: Any):
    """The inner optimizer's update; where it misses an argument, says whose it is."""
    try:
        return inner.update(grads, state, params, **extra)
    except TypeError as problem:
        text = str(problem)
        if "required keyword-only argument" not in text:
            raise
        raise ValueError(
            f"the inner optimizer needs {text[text.index(': ') + 2 :]}: pass it by "
            "name, as in tx.update(grads, state, params, step=t, value=loss). "
            f"local_step passes value= and what its extra_args= returns. ({text})"
        ) from problem


def leave(moves: PyTree, params: PyTree) -> PyTree:
    """``moves`` with, for each leaf that stays, what leaves it where it is."""

    def still(p, m):
        if m is not None:
            return m
        # Zero for integers. Adding a bool to itself changes nothing; keys have no
        # sum, and only lowcomm.apply_updates knows to pass them by.
        return jnp.zeros_like(p) if jnp.issubdtype(p.dtype, jnp.integer) else p

    return map_leaves(still, params, moves)
