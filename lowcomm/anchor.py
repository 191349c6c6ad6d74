r"""Rounds of local steps, measured from an anchor.

    d      = exchange(anchor − proposal)       once a round, the sign of a gradient
    anchor ← anchor + outer(d)                 any optax descent optimizer, not scaled
    params ← (1 − pull)·proposal + pull·anchor

The anchor is the model all workers last agreed on, bit for bit the same on each of
them. ``params`` may miss it by a rounding, since what an update adds is a difference;
that never accumulates, because the next round is measured from the anchor. Where the
exact model is wanted, ``apply_updates`` and ``consensus`` hand it out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from . import uniform
from .exchange import mean
from .leaves import (
    PyTree,
    add,
    at_least,
    map_leaves,
    movable,
    precise,
    subtract,
    zeros,
)
from .moments import realign
from .parts import expect
from .spmd import AXIS, Axis, vary, vary_with
from .sync import Talking, Transformation, enter, leave, propose
from .triggers import Trigger, every


class RoundsState(NamedTuple):
    """State of ``rounds``."""

    inner: Any
    outer: Any
    exchange: Any
    trigger: Any
    anchor: PyTree  # the model all workers last agreed on
    pending: Any  # with a delay: what was heard and not adopted yet, and whether
    since: jax.Array  # int32, steps since the trigger last fired
    synced: jax.Array  # bool, whether params + updates is the anchor (pull 1)


class _Pending(NamedTuple):
    heard: PyTree
    sent: jax.Array  # bool, whether anything was


def rounds(
    inner: Transformation,
    outer: Transformation,
    *,
    exchange: Talking | None = None,
    when: Trigger | None = None,
    pull: float = 1.0,
    delay: int = 0,
    moments: str = "keep",
    anchor_dtype: Any = None,
    axis: Axis = AXIS,
) -> Talking:
    r"""Take local steps, and an outer step on the exchanged displacements.

    .. math::
        x_i &\leftarrow x_i + \text{inner}(g_i) \\
        \text{if fire: } \Delta &= \text{exchange}(a - x)_i, \qquad
        a \leftarrow a + \text{outer}(\Delta), \qquad
        x_i \leftarrow (1-p)\,x_i + p\,a

    ``a`` is ``state.anchor``, ``p`` is ``pull`` (1 adopts the anchor). ``exchange`` is
    ``mean()`` unless given, and gives all workers the same tree (``gossip`` raises).
    ``when`` is every step unless given. The inner optimizer is handed the extra
    arguments and ``anchor=``; the outer one only ``step=``, since what differs between
    workers would drive their anchors apart. Sends what the exchange sends on the steps
    that fire, and nothing between them but a measured trigger's 4 bytes. State: the
    inner and outer optimizers', the exchange's, one anchor, and with a delay one tree
    more.

    ``delay``: what was sent when the trigger fired is adopted that many steps later,
    and may travel during the steps between. The steps after sending are kept in part
    (pull < 1) or discarded (pull = 1); at a delay of a whole period the next
    displacement is measured just before the last one is adopted, so none is lost.
    ``moments`` are realigned when the trigger fires.

    The anchor and the displacement are float32 (or wider) for half-precision
    parameters, unless ``anchor_dtype`` says otherwise; the displacement is measured
    from the anchor as the worker received it, so zero gradients change nothing.

    Raises:
        ValueError: pull outside [0, 1], a delay that is negative, longer than the
            trigger's gap or behind a measured trigger, unknown ``moments``; at trace,
            a missing ``step`` or ``params``, a bare ``delayed``, another axis.

    Example:
        >>> from lowcomm import spread
        >>> tx = rounds(optax.sgd(0.5), optax.sgd(1.0), when=every(2))
        >>> x, g = jnp.zeros(2), jnp.array([1.0, 3.0])
        >>> state = spread(tx.init)(x)
        >>> update = spread(lambda g, s, x, t: tx.update(g, s, x, step=t),
        ...                 in_axes=(0, 0, 0, None))
        >>> for t in range(2):
        ...     moves, state = update(g, state, x, t)
        ...     x = x + moves
        >>> x, state.anchor
        (Array([-2., -2.], dtype=float32), Array([-2., -2.], dtype=float32))

    References:
        Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023,
        Algorithm 1; `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025
        (delay and pull). Zhang et al., `Lookahead <https://arxiv.org/abs/1907.08610>`_,
        2019, is the case of one worker.
    """
    expect(optax.GradientTransformation, inner=inner, outer=outer, exchange=exchange)
    expect(Trigger, when=when)
    inner = optax.with_extra_args_support(inner)
    outer = optax.with_extra_args_support(outer)
    exchange = optax.with_extra_args_support(
        mean(axis) if exchange is None else exchange
    )
    when = every(1) if when is None else when
    _check_rounds(pull, delay, when)
    together = lambda tree: mean(axis).update(tree, (), about="parameters")[0]
    agree = realign(moments, inner, together)

    def init(params):
        params = movable(params)
        wide = jax.tree.map(lambda p: jnp.array(precise(jnp.asarray(p))), params)
        narrow = lambda p: jnp.array(p, at_least(anchor_dtype, p.dtype))
        state = RoundsState(
            inner.init(params),
            outer.init(wide),
            exchange.init(wide),
            when.init(params),
            jax.tree.map(narrow, wide),
            _Pending(zeros(wide), jnp.zeros((), bool)) if delay else (),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), bool),
        )
        # One worker of rounds, without an axis, may stand among others on a mesh.
        return vary_with(state, params, axis=axis)

    def update(updates, state, params=None, *, step=None, **extra):
        whole, grads, params = enter(updates, params, step, axis)
        anchor = state.anchor
        given = extra | {"anchor": anchor, "step": step}
        moves, inner_state = propose(inner, grads, state.inner, params, **given)
        inner_state = vary(inner_state, axis)
        cast = lambda tree: map_leaves(lambda p, a: a.astype(p.dtype), params, tree)
        here = lambda: map_leaves(add, params, moves)
        drift = lambda: map_leaves(subtract, cast(anchor), here())
        since = state.since + 1
        asked = {"since": since, "grads": grads, "axis": axis} | extra
        fire, trigger = when.fire(state.trigger, step=step, drift=drift(), **asked)

        def send(sending):
            realigned, exchange_state, _ = sending
            heard, exchange_state = exchange.update(
                drift(),
                exchange_state,
                params,
                step=step,
                about="displacements",
                within=axis,
                **extra,
            )
            return heard, (realigned, exchange_state, jnp.zeros_like(since))

        def adopt(heard, outer_state):
            # What differs between workers must not reach the outer optimizer.
            forward, outer_state = outer.update(heard, outer_state, anchor, step=step)
            new = map_leaves(add, anchor, forward)
            there = cast(new)
            if pull != 1:
                # In this form workers that sit on the anchor stay there exactly.
                mix = lambda x, a: precise(x) + pull * subtract(a, x)
                there = map_leaves(mix, here(), there)
            sync = map_leaves(subtract, there, params)
            return sync, outer_state, new, jnp.array(pull == 1)

        def stay(outer_state):
            return map_leaves(precise, moves), outer_state, anchor, jnp.array(False)

        def send_and_adopt(sending, outer_state):
            heard, (realigned, *sent) = send(sending)
            adopted = adopt(heard, outer_state)
            model = map_leaves(add, params, adopted[0])
            return (), (agree(realigned, model), *sent), adopted

        def send_only(sending):
            heard, (realigned, *sent) = send(sending)
            return _Pending(heard, jnp.array(True)), (agree(realigned, here()), *sent)

        def adopt_arrived(outer_state):
            # Nothing arrives from before the first step of a run that starts late.
            sent, heard = state.pending.sent, state.pending.heard
            choose = lambda new, old: jnp.where(sent, new, old)
            return jax.tree.map(choose, adopt(heard, outer_state), stay(outer_state))

        # What passes through a conditional takes temporary memory once more: moments
        # that stay go around it.
        sending = (() if moments == "keep" else inner_state, state.exchange, since)
        pending, outer_state = state.pending, state.outer
        if delay == 0:
            pending, sending, adopted = uniform.cond(
                fire,
                send_and_adopt,
                lambda sending, outer_state: ((), sending, stay(outer_state)),
                sending,
                outer_state,
                axis=axis,
            )
        else:
            # At a delay of a whole period the old news is adopted on the step that
            # sends the new: both start from the same anchor and the same pending.
            with uniform.earlier(step, delay) as then:
                due, _ = when.fire(state.trigger, step=then, drift=None, **asked)
            pending, sending = uniform.cond(
                fire, send_only, lambda sending: (pending, sending), sending, axis=axis
            )
            adopted = uniform.cond(due, adopt_arrived, stay, outer_state, axis=axis)
        realigned, exchange_state, since = sending
        moves, outer_state, anchor, synced = adopted
        return leave(moves, whole), RoundsState(
            inner_state if moments == "keep" else realigned,
            outer_state,
            exchange_state,
            trigger,
            anchor,
            pending,
            since,
            synced,
        )

    return Talking(init, update)


def _check_rounds(pull: float, delay: int, when: Trigger) -> None:
    if not 0 <= pull <= 1:
        raise ValueError(f"pull {pull} is outside [0, 1]; 1 adopts the anchor.")
    if delay < 0 or delay != int(delay):
        raise ValueError(f"delay {delay} must be a whole number of steps, 0 or more.")
    if delay > 0 and when.gap is None:
        raise ValueError(
            f"delay {delay} needs a trigger that the step alone decides, such as "
            "every(period): it must be known when to adopt what was sent."
        )
    if when.gap is not None and delay > when.gap:
        raise ValueError(
            f"delay {delay} is longer than the {when.gap} steps between two syncs: "
            "only one exchange may be on its way."
        )
