"""Transformations that change what they do in the course of a run.

    after(when, first, then)     ``first``, and from some step on ``then``
    occasional(exchange, when)   the exchange where the trigger fires, else one's own

Warm-ups, phases and gradients that are averaged now and then are made of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from . import uniform
from .parts import expect, holds, is_anchored, is_verb
from .spmd import AXIS, Axis, vary
from .triggers import Trigger

Talking = optax.GradientTransformationExtraArgs


class AfterState(NamedTuple):
    """State of ``after``."""

    switch: Any  # the trigger's
    first: Any
    then: Any


class OccasionalState(NamedTuple):
    """State of ``occasional``."""

    trigger: Any
    occasion: Any  # the exchange's
    since: jax.Array  # int32, steps since the last exchange


def after(
    switch: int | Trigger,
    first: optax.GradientTransformation,
    then: optax.GradientTransformation,
    *,
    axis: Axis = AXIS,
) -> Talking:
    """``first`` before step number ``switch``, and ``then`` from that step on.

    For inner optimizers, outer optimizers and exchanges. Both states are held from the
    beginning, and only that of the one at work moves: ``then`` begins with fresh
    moments and with its own schedules at 0. ``switch`` may be a trigger: ``then`` is
    at work on the steps where it fires (``reaches`` goes on firing). Sends what the
    one at work sends, and what the trigger does.

    What keeps a model, such as ``rounds`` or ``stale_anchor``, is refused: at the
    switch it would hold that of the beginning, and go back to it.

    Raises:
        ValueError: a negative step; in ``init``, what keeps a model; at trace, no
            ``step``.

    Example:
        >>> tx = after(2, optax.sgd(1.0), optax.sgd(0.1, momentum=0.5))
        >>> state = tx.init(jnp.zeros(()))
        >>> for t in range(4):
        ...     moves, state = tx.update(jnp.ones(()), state, step=t)
        ...     print(moves)
        -1.0
        -1.0
        -0.1
        -0.15
    """
    expect(optax.GradientTransformation, first=first, then=then)
    if not isinstance(switch, Trigger):
        uniform.whole(switch=switch)
        if switch < 0:
            raise ValueError(f"after({switch}, …): steps count from 0.")
        switch = _since(switch)
    one, other = map(optax.with_extra_args_support, (first, then))

    def init(params):
        states = switch.init(params), one.init(params), other.init(params)
        if holds(states, _keeps_model):
            raise ValueError(
                "after holds both of its transformations from the beginning, and one "
                "of them keeps a model, which would be the first one still when it "
                "begins: put after inside, as in rounds(after(...), after(...))."
            )
        return vary(AfterState(*states), axis)

    def update(updates, state, params=None, *, step=None, **extra):
        turn, trigger = switch.fire(
            state.switch,
            step=step,
            since=None,
            drift=None,
            grads=updates,
            axis=axis,
            **extra,
        )

        def before(updates, first, then):
            updates, first = one.update(updates, first, params, step=step, **extra)
            return updates, first, then

        def afterwards(updates, first, then):
            updates, then = other.update(updates, then, params, step=step, **extra)
            return updates, first, then

        updates, *both = uniform.cond(
            turn, afterwards, before, updates, state.first, state.then, axis=axis
        )
        return updates, AfterState(trigger, *both)

    return Talking(init, update)


def occasional(
    exchange: optax.GradientTransformation, *, when: Trigger, axis: Axis = AXIS
) -> Talking:
    r"""Exchange gradients on the steps that fire; on the others keep one's own.

    .. math:: g_i \leftarrow \text{exchange}(g)_i \text{ if fire, else } g_i

    For a chain, before an optimizer. ``occasional(mean(), when=before(100))`` is a
    synchronous warm-up. Sends what the exchange sends on the steps that fire, and a
    measured trigger's 4 bytes a step.

    Raises:
        ValueError: at trace, no ``step``, or parameters or displacements to exchange.

    Example:
        >>> from lowcomm import every, mean, spread
        >>> tx = occasional(mean(), when=every(2))
        >>> def worker(g):
        ...     state = tx.init(g)
        ...     first, state = tx.update(g, state, step=0)
        ...     return first, tx.update(g, state, step=1)[0]
        >>> spread(worker)(jnp.array([1.0, 3.0]))
        (Array([1., 3.], dtype=float32), Array([2., 2.], dtype=float32))
    """
    expect(optax.GradientTransformation, exchange=exchange)
    expect(Trigger, when=when)
    talking = optax.with_extra_args_support(exchange)

    def init(params):
        zero = jnp.zeros((), jnp.int32)
        state = OccasionalState(when.init(params), talking.init(params), zero)
        return vary(state, axis)

    def update(
        updates,
        state,
        params=None,
        *,
        step=None,
        about="gradients",
        within=None,
        **extra,
    ):
        if about != "gradients":
            raise ValueError(
                f"occasional exchanges gradients, not {about}: a verb has a trigger "
                "of its own, when=."
            )
        since = state.since + 1
        fire, trigger = when.fire(
            state.trigger,
            step=step,
            since=since,
            drift=None,
            grads=updates,
            axis=axis,
            **extra,
        )

        def talk(updates, occasion, since):
            heard, occasion = talking.update(
                updates, occasion, params, step=step, about=about, **extra
            )
            return heard, occasion, jnp.zeros_like(since)

        updates, occasion, since = uniform.cond(
            fire,
            talk,
            lambda *same: same,
            updates,
            state.occasion,
            since,
            axis=axis,
        )
        return updates, OccasionalState(trigger, occasion, since)

    return Talking(init, update)


def _keeps_model(state: Any) -> bool:
    launched = "launched" in getattr(state, "_fields", ())
    return is_verb(state) or is_anchored(state) or launched


def _since(step: int) -> Trigger:
    def fire(state, *, step: Any = None, axis: Axis = AXIS, **extra):
        uniform.now(step, axis)
        return uniform.decide(lambda t: t >= start, step), state

    start = step
    return Trigger(lambda params: (), fire, gap=1)
