r"""Triggers: when to talk.

A trigger is asked once a step and answers with one bool that is the same on all
workers. Clock triggers read it off the step and send nothing. Measured triggers look
at this worker's own arrays and agree by a maximum over the axis: if any worker wants
to talk, all do, and each sends 4 bytes a step to find out.

Edge values mean the same for all measured triggers: a threshold of 0 always fires,
infinity never does (after a declared warm-up), equality fires, and NaN fires.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from . import uniform
from .leaves import PyTree, precise, takes_part
from .spmd import AXIS, Axis, names, vary


class Trigger(NamedTuple):
    """When to talk: ``init(params) -> state`` and ``fire -> (bool, state)``.

    ``fire(state, *, step, since, drift, grads, axis, **extra)``: ``since`` counts the
    steps since the last sync by whatever trigger, this one included; ``grads`` are
    the raw gradients; ``drift`` is the displacement from the anchor under ``rounds``,
    None under ``average``. The bool is a Python bool where the step is known at
    trace. ``gap`` is the least number of steps between two syncs if the step alone
    decides, else None.
    """

    init: Callable[[PyTree], Any]
    fire: Callable[..., tuple[Any, Any]]
    gap: int | None = None


class ChangeState(NamedTuple):
    """State of ``change_exceeds``."""

    norms: (
        jax.Array
    )  # [window] float32, this worker's last gradient norms, newest first
    smoothed: jax.Array  # float32, their weighted mean one step ago
    seen: jax.Array  # int32, how many norms there are


class ReachedState(NamedTuple):
    """State of ``reaches``."""

    last: jax.Array  # [window] float32, this worker's last measures, newest first
    seen: jax.Array  # int32, how many there are
    reached: jax.Array  # bool


def every(period: int, *, offset: int = 0, warmup: int = 0) -> Trigger:
    r"""After every ``period``-th step, and at each of the first ``warmup`` steps.

    Fires iff ``step < warmup`` or ``(step + 1 − offset) % period == 0``, with steps
    counted from 0: with the defaults after steps ``period − 1``, ``2 period − 1``, ….
    Sends nothing.

    Raises:
        ValueError: period < 1, offset outside [0, period), warmup < 0, any not whole.

    Example:
        >>> when = every(3, warmup=2)
        >>> [when.fire((), step=t)[0] for t in range(6)]
        [True, True, True, False, False, True]
    """
    if isinstance(period, Trigger):
        raise ValueError("a period here must be a number of steps, not a trigger.")
    uniform.whole(period=period, offset=offset, warmup=warmup)
    if period < 1:
        raise ValueError(
            f"period {period} must be a whole number of steps, at least 1 (each step)."
        )
    if not 0 <= offset < period:
        raise ValueError(f"offset {offset} is outside [0, {period}), the period.")
    if warmup < 0:
        raise ValueError(f"warmup {warmup} is negative.")

    def due(t):
        return (t >= 0) & ((t < warmup) | ((t + 1 - offset) % period == 0))

    def fire(state, *, step=None, axis: Axis = AXIS, **extra):
        uniform.now(step, axis)
        return uniform.decide(due, step), state

    return Trigger(lambda params: (), fire, gap=1 if warmup > 0 else period)


def clock(period: int | Trigger) -> Trigger:
    """The trigger a ``period`` stands for: ``every(period)`` of a number of steps."""
    return period if isinstance(period, Trigger) else every(period)


def drift_exceeds(threshold: float) -> Trigger:
    r"""When some worker has moved far from the anchor.

    .. math:: \max_i \lVert a - x_i \rVert_2 \ge \text{threshold}

    over all leaves together, in the units of the parameters. For ``rounds``; raises
    at trace under ``average``, which has no anchor. Sends 4 bytes a step.

    Raises:
        ValueError: a negative or NaN threshold.

    Example:
        One worker is 3 away, the other 1; both hear that somebody is 2 away or more.

        >>> from lowcomm import spread
        >>> when = drift_exceeds(2.0)
        >>> spread(lambda d: when.fire((), drift=d)[0])(jnp.array([1.0, -3.0]))
        Array([ True,  True], dtype=bool)
    """
    _check_threshold(threshold)

    def fire(state, *, drift=None, axis: Axis = AXIS, **extra):
        if drift is None:
            raise ValueError(
                "drift_exceeds measures the displacement from an anchor, and only "
                "rounds has one: use rounds, or change_exceeds with average."
            )
        return any_worker(_reaches(_norm(drift), threshold), axis), state

    return Trigger(lambda params: (), fire)


def change_exceeds(
    threshold: float,
    *,
    window: int = 25,
    smoothing: float = 0.01,
    warmup: int | None = None,
) -> Trigger:
    r"""When some worker's gradient norm is changing (the trigger of SelSync).

    .. math::
        s_t = \frac{\sum_{k=1}^{W} q^k \lVert g_{t+1-k} \rVert}{\sum_{k=1}^{W} q^k},
        \qquad q = 1 - \alpha, \qquad
        \frac{|s_t - s_{t-1}|}{s_{t-1}} \ge \delta \text{ on any worker}

    ``δ`` is ``threshold`` (a ratio), ``W`` is ``window``, ``α`` is ``smoothing``; the
    first ``warmup`` steps (``window`` by default) fire whatever the gradients do, and
    until the window is full there is no change to speak of. A norm that is not finite
    fires and leaves no trace in the window. Sends 4 bytes a step, but
    none on steps that are known at trace to belong to the warm-up.
    A norm that jumps by a factor r from a flat window changes ``s`` by
    ``α/(1 − q^W) · |r − 1|``, 0.045 |r − 1| with the defaults: choose ``δ`` with
    ``W`` and ``α`` in view.

    Raises:
        ValueError: threshold negative or NaN, window < 1, smoothing outside [0, 1),
            warmup < 0.

    Note:
        The norm is the unsquared norm of all gradients together and is smoothed once.
        The paper prints the squared norm; the released code sums the norms of the
        layers, smooths twice, and warms up for one step less.

    Example:
        A worker's gradient jumps at the fourth step, and both hear of it.

        >>> from lowcomm import spread
        >>> when = change_exceeds(0.5, window=1, smoothing=0.0)
        >>> def worker(norms):
        ...     state, fires = when.init(None), []
        ...     for t in range(5):
        ...         fired, state = when.fire(state, step=t, grads=norms[t])
        ...         fires.append(fired)
        ...     return jnp.array(fires)
        >>> print(spread(worker)(jnp.array([[1.0, 1, 1, 1, 1], [1.0, 1, 1, 9, 9]]))[0])
        [ True False False  True False]

    References:
        Tyagi and Swany, `Accelerating Distributed ML Training via Selective
        Synchronization <https://arxiv.org/abs/2307.07950>`_, 2023.
    """
    _check_threshold(threshold)
    uniform.whole(window=window, warmup=0 if warmup is None else warmup)
    if window < 1:
        raise ValueError(f"window {window} is below 1.")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing {smoothing} is outside [0, 1).")
    warmup = window if warmup is None else warmup
    if warmup < 0:
        raise ValueError(f"warmup {warmup} is negative.")
    q = 1.0 - smoothing
    # Normalized here: a division behind the sum may be fused into the difference below
    # and leave a rounding of it, where there should be none.
    total = sum(q**k for k in range(1, window + 1))
    weights = np.array([q**k / total for k in range(1, window + 1)], np.float32)

    def init(params):
        return ChangeState(
            jnp.zeros(window, jnp.float32),
            jnp.zeros((), jnp.float32),
            jnp.zeros((), jnp.int32),
        )

    def fire(state, *, step=None, grads, axis: Axis = AXIS, **extra):
        uniform.now(step, axis)
        norm = _norm(grads)
        norms = jnp.roll(state.norms, 1).at[0].set(norm)
        smoothed = jnp.sum(weights * norms)
        was_full = state.seen >= window
        difference = jnp.abs(smoothed - state.smoothed)
        # A window of zeros: no change if it stays so, an infinite one if it does not.
        still = difference == 0
        change = jnp.where(still, 0.0, difference / jnp.where(still, 1, state.smoothed))
        bad = ~jnp.isfinite(norm)
        change = jnp.where(bad, jnp.nan, jnp.where(was_full, change, 0.0))
        wants = any_worker(_reaches(change, threshold), axis)
        warm = uniform.decide(lambda t: t < warmup, step)
        seen = jnp.minimum(state.seen + 1, window)
        # A norm that is not finite fires, and the window has not seen it.
        after = ChangeState(norms, smoothed, seen)
        state = jax.tree.map(lambda a, b: jnp.where(bad, b, a), after, state)
        return _either(warm, wants), vary(state, axis)

    return Trigger(init, fire)


def reaches(level: float, *, measure: Callable[..., Any], window: int = 1) -> Trigger:
    r"""From the step on at which a measure reaches a level, and ever after.

    .. math:: \frac{1}{KW} \sum_i \sum_{k<W} m_i(t-k) \ge \text{level}

    ``measure(**extra)`` makes one scalar of what ``update`` is passed by name, such as
    ``lambda value, **_: -value`` (the loss falls to −level) or, of the ``aux`` of
    ``local_step``, ``lambda aux, **_: aux["accuracy"]``. ``W`` is ``window``, in
    steps; before it is full nothing fires. Sends 4 bytes a step.

    Raises:
        ValueError: a level that is NaN, window < 1.

    Example:
        >>> from lowcomm import spread
        >>> when = reaches(0.5, measure=lambda accuracy, **_: accuracy)
        >>> def worker(accuracies):
        ...     state, fires = when.init(None), []
        ...     for accuracy in accuracies:
        ...         fired, state = when.fire(state, accuracy=accuracy)
        ...         fires.append(fired)
        ...     return jnp.array(fires)
        >>> print(spread(worker)(jnp.array([[0.1, 0.2, 0.4], [0.2, 0.8, 0.4]]))[0])
        [False  True  True]
    """
    if not level == level:
        raise ValueError("reaches(nan): nothing does.")
    uniform.whole(window=window)
    if window < 1:
        raise ValueError(f"window {window} is below 1 step.")

    def init(params):
        seen = jnp.zeros((), jnp.int32)
        return ReachedState(jnp.zeros(window, jnp.float32), seen, jnp.zeros((), bool))

    def fire(state, *, axis: Axis = AXIS, **extra):
        new = jnp.asarray(measure(**extra), jnp.float32)
        last = jnp.roll(state.last, 1).at[0].set(new)
        seen = jnp.minimum(state.seen + 1, window)
        score = jnp.where(seen == window, jnp.mean(last), -jnp.inf)
        # What was reached once stays reached: infinity is carried by the same mean.
        score = lax.pmean(jnp.where(state.reached, jnp.inf, score), names(axis))
        fires = ~(score < level)
        return fires, vary(ReachedState(last, seen, fires), axis)

    return Trigger(init, fire)


def any_of(*triggers: Trigger) -> Trigger:
    """When at least one of the triggers fires; each is asked at every step.

    Sends what they send. ``any_of(change_exceeds(0.3), every(100))`` caps the interval.

    Example:
        >>> when = any_of(every(4), every(6))
        >>> [t for t in range(12) if when.fire(when.init(None), step=t)[0]]
        [3, 5, 7, 11]
    """
    if not triggers or not all(isinstance(t, Trigger) for t in triggers):
        raise ValueError(f"any_of takes triggers, at least one, not {triggers!r}.")

    def init(params):
        return tuple(trigger.init(params) for trigger in triggers)

    def fire(state, **asked):
        fires, states = False, []
        for trigger, s in zip(triggers, state, strict=True):
            fired, s = trigger.fire(s, **asked)
            fires = _either(fires, fired)
            states.append(s)
        return fires, tuple(states)

    clocks = all(trigger.gap is not None for trigger in triggers)
    single = triggers[0].gap if len(triggers) == 1 else 1
    return Trigger(init, fire, gap=single if clocks else None)


def _either(a: Any, b: Any) -> Any:
    """``a or b``, decided at trace where that is possible."""
    if a is True or b is True:
        return True
    if a is False:
        return b
    return a if b is False else a | b


def _reaches(measure: jax.Array, threshold: float) -> jax.Array:
    """``measure >= threshold``, or NaN; nothing else reaches infinity."""
    return ~(jnp.minimum(measure, jnp.finfo(measure.dtype).max) < threshold)


def any_worker(wants: jax.Array, axis: Axis = AXIS) -> jax.Array:
    """Whether ``wants`` holds on any worker, the same on all: one int32 maximum.

    What a measured trigger of one's own ends in.

    Example:
        >>> from lowcomm import spread
        >>> print(spread(any_worker)(jnp.array([False, True, False])))
        [ True  True  True]
    """
    return lax.pmax(jnp.asarray(wants).astype(jnp.int32), names(axis)) > 0


def _norm(tree: PyTree) -> jax.Array:
    leaves = [precise(x) for x in jax.tree.leaves(tree) if takes_part(x)]
    squares = [jnp.sum(jnp.square(jnp.abs(x))) for x in leaves]
    return jnp.sqrt(sum(squares, jnp.float32(0))).astype(jnp.float32)


def _check_threshold(threshold: float) -> None:
    if isinstance(threshold, Tracer):  # injected: a comparison will do
        return
    if not threshold >= 0:
        raise ValueError(
            f"threshold {threshold} must be 0 or more (infinity is never)."
        )
