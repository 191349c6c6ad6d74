"""Triggers for the first step of a round, where all workers hold the same model.

A verb's trigger fires after the last step of a round, and the next step is the first
of another: what is measured there, before anybody has moved, is measured at one point.
"""

from __future__ import annotations

from typing import Any

from . import uniform
from .schedules import before
from .spmd import AXIS, Axis
from .triggers import Trigger, any_of, clock, every


def just_after(period: int | Trigger) -> Trigger:
    """On the step after each one that a clock fires on: the first after a sync.

    ``period`` is the number of steps of a round, or the clock of the syncs. Sends
    nothing.

    Raises:
        ValueError: a measured trigger, which has an answer only at its own step.

    Example:
        >>> when = just_after(3)
        >>> [t for t in range(8) if when.fire((), step=t)[0]]
        [3, 6]
    """
    when = clock(period)
    if when.gap is None:
        raise ValueError(
            "only a clock says beforehand when a round begins, and this trigger "
            "measures: give a number of steps, or a clock such as at_steps(...)."
        )

    def fire(state, *, step: Any = None, axis: Axis = AXIS, **asked):
        uniform.now(step, axis)
        with uniform.earlier(step, 1) as then:
            fired, state = when.fire(state, step=then, axis=axis, **asked)
        if fired is False:  # one question less about the step is one program less
            return False, state
        begun = uniform.decide(lambda t: t > 0, step)
        return begun if fired is True else begun & fired, state

    return Trigger(when.init, fire, gap=when.gap)


def round_starts(period: int | Trigger) -> Trigger:
    """At the first step of each round: step 0, and the first after each sync.

    ``period`` is that of ``just_after``. Sends nothing.

    Example:
        >>> when = round_starts(3)
        >>> [t for t in range(8) if when.fire((), step=t)[0]]
        [0, 3, 6]
    """
    if not isinstance(period, Trigger):
        every(period)  # raises unless it is a period
        return every(period, offset=1 % period)
    return any_of(before(1), just_after(period))
