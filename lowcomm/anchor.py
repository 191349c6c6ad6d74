r"""Rounds of local steps measured from an anchor, and how to read the model out.

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
from .leaves import PyTree, add, is_inexact, map_leaves, movable, precise, subtract
from .moments import realign
from .spmd import AXIS, Axis, vary
from .sync import SelfClockedState, Talking, Transformation, enter, leave
from .triggers import Trigger, every


class RoundsState(NamedTuple):
    """State of ``rounds``."""

    inner: Any
    outer: Any
    exchange: Any
    trigger: Any
    anchor: PyTree  # the model all workers last agreed on
    pending: PyTree  # with a delay: what was heard and not adopted yet
    since: jax.Array  # int32, steps since the trigger last fired
    synced: jax.Array  # bool, whether params + updates is the anchor (pull 1)


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
    ``mean()`` unless given; it must give all workers the same tree, as all but
    ``gossip`` do. ``when`` is every step unless given. The inner optimizer is handed
    ``anchor=`` as an extra argument. Sends what the exchange sends on the steps that
    fire, and nothing between them but a measured trigger's 4 bytes. State: the inner
    and outer optimizers', the exchange's, one anchor, and with a delay one tree more.

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
        state = RoundsState(
            inner.init(params),
            outer.init(wide),
            exchange.init(wide),
            when.init(params),
            jax.tree.map(lambda p: jnp.array(p, anchor_dtype or p.dtype), wide),
            jax.tree.map(jnp.zeros_like, wide) if delay else (),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), bool),
        )
        return vary(state, axis)

    def update(updates, state, params=None, *, step=None, **extra):
        whole, grads, params = enter(updates, params, step, axis)
        anchor = state.anchor
        moves, inner_state = inner.update(
            grads, state.inner, params, step=step, anchor=anchor, **extra
        )
        here = map_leaves(add, params, moves)
        start = map_leaves(lambda p, a: a.astype(p.dtype), params, anchor)
        drift = map_leaves(subtract, start, here)
        since = state.since + 1
        fire, trigger = when.fire(
            state.trigger,
            step=step,
            since=since,
            drift=drift,
            grads=grads,
            axis=axis,
            **extra,
        )

        def send(sending):
            inner_state, exchange_state, since = sending
            heard, exchange_state = exchange.update(
                drift,
                exchange_state,
                params,
                step=step,
                about="displacements",
                within=axis,
                **extra,
            )
            return heard, (inner_state, exchange_state, jnp.zeros_like(since))

        def realigned(sending, model):
            inner_state, *rest = sending
            return (agree(inner_state, model), *rest)

        def adopt(heard, outer_state):
            forward, outer_state = outer.update(
                heard, outer_state, anchor, step=step, **extra
            )
            new = map_leaves(add, anchor, forward)
            there = map_leaves(lambda p, a: a.astype(p.dtype), params, new)
            if pull != 1:
                # In this form workers that sit on the anchor stay there exactly.
                mix = lambda x, a: precise(x) + pull * subtract(a, x)
                there = map_leaves(mix, here, there)
            moves = map_leaves(subtract, there, params)
            return moves, outer_state, new, jnp.array(pull == 1)

        def stay(outer_state):
            return map_leaves(precise, moves), outer_state, anchor, jnp.array(False)

        sending, arrived = (inner_state, state.exchange, since), state.pending
        if delay == 0:

            def send_and_adopt(sending, outer_state):
                heard, sending = send(sending)
                adopted = adopt(heard, outer_state)
                model = map_leaves(add, params, adopted[0])
                return arrived, realigned(sending, model), adopted

            pending, sending, adopted = uniform.cond(
                fire,
                send_and_adopt,
                lambda sending, outer_state: (arrived, sending, stay(outer_state)),
                sending,
                state.outer,
                axis=axis,
            )
        else:
            # At a delay of a whole period the old news is adopted on the step that
            # sends the new: both start from the same anchor and the same pending.
            due, _ = when.fire(
                state.trigger, step=uniform.ago(step, delay), axis=axis, grads=grads
            )

            def send_only(sending):
                heard, sending = send(sending)
                return heard, realigned(sending, here)

            pending, sending = uniform.cond(
                fire, send_only, lambda sending: (arrived, sending), sending, axis=axis
            )
            adopted = uniform.cond(
                due, lambda s: adopt(arrived, s), stay, state.outer, axis=axis
            )
        inner_state, exchange_state, since = sending
        moves, outer_state, anchor, synced = adopted
        return leave(moves, whole), RoundsState(
            inner_state,
            outer_state,
            exchange_state,
            trigger,
            anchor,
            pending,
            since,
            synced,
        )

    return Talking(init, update)


def apply_updates(params: PyTree, updates: PyTree, state: Any) -> PyTree:
    """``params + updates``, exactly the anchor where ``rounds`` has just adopted it.

    ``optax.apply_updates`` may miss the anchor by a rounding of the sum. Leaf by leaf,
    where the outermost ``rounds`` (with pull 1) adopted its anchor in this very
    update, this returns the anchor, so all workers hold the same bits. Integer,
    boolean and key leaves stay what they are. For one worker's trees, inside
    ``spread``, and for stacked ones outside.

    Raises:
        ValueError: if something other than ``optax.partition``, ``optax.masked``,
            ``optax.inject_hyperparams``, ``self_clocked`` or the end of an
            ``optax.chain`` encloses the ``rounds``: it may have changed the updates.
    """
    owned = {}
    for rounds_state in _outermost(state, enclosed=True):
        for path, a in jax.tree_util.tree_leaves_with_path(rounds_state.anchor):
            owned[path] = (rounds_state.synced, a)

    def apply(path, p, u):
        if not is_inexact(p):
            return p
        moved = jnp.asarray(p + u).astype(p.dtype)
        if path not in owned:
            return moved
        synced, a = owned[path]
        if jnp.ndim(synced):  # one for each worker of a stacked tree
            synced = jnp.expand_dims(synced, tuple(range(1, jnp.ndim(p))))
        return jnp.where(synced, a.astype(p.dtype), moved)

    return jax.tree_util.tree_map_with_path(apply, params, updates)


def consensus(state: Any, params: PyTree, *, axis: Axis = AXIS) -> PyTree:
    """The model the workers stand for: evaluate and export this one.

    Leaf by leaf the anchor of the outermost ``rounds`` that owns it, else the mean of
    ``params`` over the workers, formed in float32. Call it inside ``spread``. It
    reads and changes nothing of the schedule, so it may be called at any step. Sends
    the leaves that no anchor owns.

    Example:
        >>> from lowcomm import data_parallel, spread
        >>> worker = lambda x: consensus(data_parallel(optax.sgd(1.0)).init(x), x)
        >>> spread(worker)(jnp.array([1.0, 3.0]))
        Array([2., 2.], dtype=float32)
    """
    owned = {}
    for rounds_state in _outermost(state, enclosed=False):
        owned.update(jax.tree_util.tree_leaves_with_path(rounds_state.anchor))
    read = lambda path, p: owned[path].astype(p.dtype) if path in owned else None
    anchors = jax.tree_util.tree_map_with_path(read, params)
    rest = map_leaves(lambda p, a: p if a is None else None, params, anchors)
    means = mean(axis).update(rest, optax.EmptyState(), about="parameters")[0]
    return map_leaves(lambda p, a, m: m if a is None else a, params, anchors, means)


def _outermost(state: Any, *, enclosed: bool) -> list[RoundsState]:
    """The states of ``rounds`` that no other ``rounds`` encloses.

    With ``enclosed`` only wrappers that hand updates on unchanged may be around them.
    """
    if isinstance(state, RoundsState):
        return [state]
    if isinstance(state, SelfClockedState):
        return _outermost(state.clocked, enclosed=enclosed)
    if isinstance(state, optax.MaskedState | optax.InjectStatefulHyperparamsState):
        return _outermost(state.inner_state, enclosed=enclosed)
    if enclosed and type(state) is tuple and state:
        # A chain: what its last part returns is what the chain returns.
        _outermost([*state[:-1]], enclosed=True)
        return _outermost(state[-1], enclosed=True)
    if isinstance(state, optax.PartitionState):
        parts = state.inner_states.values()
        return [s for part in parts for s in _outermost(part, enclosed=enclosed)]
    found = [
        s
        for s in jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, RoundsState))
        if isinstance(s, RoundsState)
    ]
    if found and enclosed:
        raise ValueError(
            "something follows or encloses rounds, and what it does to the updates is "
            "unknown: put clips and schedules before it or inside its inner optimizer, "
            "or use optax.apply_updates."
        )
    return found


def _check_rounds(pull: float, delay: int, when: Trigger) -> None:
    if not 0 <= pull <= 1:
        raise ValueError(f"pull {pull} is outside [0, 1]; 1 adopts the anchor.")
    if delay < 0:
        raise ValueError(f"delay {delay} is negative.")
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
