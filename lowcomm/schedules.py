"""Clocks whose rounds are not all equally long: triggers from lists of steps.

Which steps fire is known when the program is built; nothing is sent to find out, and
where the step is known at trace there is no conditional either.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from . import uniform
from .spmd import AXIS, Axis
from .triggers import Trigger

_NEVER = 2**31 - 1  # beyond all steps


def at_steps(steps: Iterable[int]) -> Trigger:
    """After exactly these steps, counted from 0. Sends nothing.

    Raises:
        ValueError: no steps, or one that is negative or no integer.

    Example:
        >>> when = at_steps([0, 1, 4])
        >>> [t for t in range(10) if when.fire((), step=t)[0]]
        [0, 1, 4]
    """
    times = sorted({_whole(t) for t in steps})
    if not times or times[0] < 0:
        raise ValueError(
            f"at_steps takes steps counted from 0, at least one, not {times[:1]}."
        )
    among, table = frozenset(times), np.array(times, np.int32)

    def due(t: Any) -> Any:
        return t in among if isinstance(t, int) else jnp.any(t == table)

    gap = min(np.diff(times), default=times[-1] + 1)
    return Trigger(lambda params: (), _clock(due), gap=int(gap))


def before(step: int) -> Trigger:
    """After every step whose number is below ``step``. Sends nothing.

    Example:
        >>> when = before(2)
        >>> [when.fire((), step=t)[0] for t in range(4)]
        [True, True, False, False]
    """
    uniform.whole(step=step)
    if step < 0:
        raise ValueError(f"before({step}): steps count from 0.")
    return Trigger(lambda params: (), _clock(lambda t: (t >= 0) & (t < step)), gap=1)


def growing(length: Callable[[int], int], *, steps: int) -> Trigger:
    """Rounds of ``length(0)``, ``length(1)``, … steps, the last one cut at ``steps``.

    The last of the ``steps`` steps fires, so that the run ends with a sync. Sends
    nothing.

    Raises:
        ValueError: a length that is no whole number of at least 1, or steps < 1.

    Example:
        >>> when = growing(lambda r: 2 ** r, steps=10)
        >>> [t for t in range(20) if when.fire((), step=t)[0]]
        [0, 2, 6, 9]

    References:
        Yu, Yang and Zhu, `Parallel Restarted SGD with Faster Convergence and Less
        Communication <https://arxiv.org/abs/1807.06629>`_, 2019 (longer epochs at
        smaller rates). Stich, `Local SGD Converges Fast and Communicates Little
        <https://arxiv.org/abs/1805.09767>`_, 2019 (any sync times).
    """
    return at_steps(_ends(lambda number, start: length(number), steps))


def quadratic_period(
    learning_rate: optax.Schedule, *, growth: float, least: int, steps: int
) -> Trigger:
    r"""The quadratic synchronization rule: longer rounds at smaller rates.

    .. math:: H = \max\big(H_{\text{base}}, \lfloor (\alpha/\gamma)^2 \rfloor\big)

    ``γ`` is ``learning_rate`` at the first step of a round, ``α`` is ``growth``, in
    the same units, ``H_base`` is ``least``. The last round is cut at ``steps``, the
    length of the run. Sends nothing.

    Note:
        A ratio that misses a whole number by a rounding of float32 counts as that
        number.

    Raises:
        ValueError: no schedule, growth that is not positive, least or steps below 1, a
            rate that is negative, not finite, or traced.

    Example:
        Each of these rates for 400 steps.

        >>> rate = optax.piecewise_constant_schedule(0.02, {400: 0.5, 800: 0.4})
        >>> when = quadratic_period(rate, growth=0.02, least=4, steps=1200)
        >>> times = [t for t in range(1200) if when.fire((), step=t)[0]]
        >>> sorted({b - a for a, b in zip(times, times[1:], strict=False)})
        [4, 25]

    References:
        Gu, Lyu, Arora and Huang, `A Quadratic Synchronization Rule for Distributed
        Deep Learning <https://arxiv.org/abs/2310.14423>`_, 2024.
    """
    if not callable(learning_rate):
        raise ValueError(
            f"learning_rate {learning_rate} must be a schedule: at a constant rate all "
            "rounds are equally long, every(period)."
        )
    if not growth > 0:
        raise ValueError(f"growth {growth} must be positive, a learning rate.")
    uniform.whole(least=least)
    if least < 1:
        raise ValueError(f"least {least} must be at least 1 step.")

    def length(number: int, start: int) -> int:
        with jax.ensure_compile_time_eval():
            rate: Any = learning_rate(start)
            if isinstance(rate, Tracer):
                raise ValueError(
                    "quadratic_period needs the rates when the program is built, and "
                    "this schedule's are traced: build it outside of jit."
                )
            rate = float(rate)
        if not (0 <= rate < np.inf):
            raise ValueError(f"the learning rate at step {start} is {rate}.")
        if rate * np.sqrt(steps) <= growth:
            return max(least, steps)
        return max(least, int((growth / rate) ** 2 * (1 + 1e-6)))

    return at_steps(_ends(length, steps))


def thinning(repeats: int) -> Trigger:
    """At gaps of one step, ``repeats`` times, then of two, of four and so on.

    From step 0. Sends nothing.

    Example:
        >>> when = thinning(2)
        >>> [t for t in range(20) if when.fire((), step=t)[0]]
        [0, 1, 2, 4, 6, 10, 14]
    """
    uniform.whole(repeats=repeats)
    if repeats < 1:
        raise ValueError(f"repeats {repeats} must be at least 1.")
    begins = [repeats * (2**i - 1) for i in range(31)]
    return _in_turn([(b, b, 2**i) for i, b in enumerate(begins) if b < _NEVER])


def doubling(start: int, *, every: int, longest: int = 16) -> Trigger:
    """At every step before ``start``, then rounds of two steps, of four and so on.

    They double each ``every`` steps and end at ``longest``, a power of two. A round of
    ``H`` steps ends where ``step + 1`` is a multiple of ``H``. Sends nothing.

    Example:
        >>> when = doubling(2, every=4, longest=4)
        >>> [t for t in range(16) if when.fire((), step=t)[0]]
        [0, 1, 3, 5, 7, 11, 15]
    """
    uniform.whole(start=start, every=every, longest=longest)
    if start < 0 or every < 1 or longest < 1 or longest & (longest - 1):
        raise ValueError(
            f"start {start}, every {every}, longest {longest}: steps count from 0, "
            "every is at least 1, and longest a power of two."
        )
    times = range(1, longest.bit_length())
    return _in_turn([(0, 0, 1), *((start + (i - 1) * every, -1, 2**i) for i in times)])


def _in_turn(clocks: list[tuple[int, int, int]]) -> Trigger:
    """Clocks one after the other, each ``(its first step, origin, gap)``."""
    ends = [*(first for first, _, _ in clocks[1:]), _NEVER]

    def due(t: Any) -> Any:
        ticks = [
            (t >= first) & (t < end) & ((t - origin) % gap == 0)
            for (first, origin, gap), end in zip(clocks, ends, strict=True)
        ]
        return functools.reduce(operator.or_, ticks)

    return Trigger(lambda params: (), _clock(due), gap=1)


def _ends(length: Callable[[int, int], int], steps: int) -> Iterator[int]:
    """The last step of each round, from its number and first step to its length."""
    uniform.whole(steps=steps)
    if steps < 1:
        raise ValueError(f"steps {steps} must be at least 1, the length of the run.")
    number = start = 0
    while start < steps:
        size = _whole(length(number, start))
        if size < 1:
            raise ValueError(f"round {number} would take {size} steps.")
        start, number = start + size, number + 1
        yield min(start, steps) - 1


def _whole(t: Any) -> int:
    if isinstance(t, Tracer) or int(t) != t:
        raise ValueError(f"{t} must be a whole number, known when the clock is built.")
    return int(t)


def _clock(due: Callable[[Any], Any]) -> Callable[..., tuple[Any, Any]]:
    def fire(state, *, step=None, axis: Axis = AXIS, **extra):
        uniform.now(step, axis)
        return uniform.decide(due, step), state

    return fire
