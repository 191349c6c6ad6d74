"""What the table of methods says of each: how it is built, and what it promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import optax

from lowcomm.leaves import takes_part
from lowcomm.spmd import AXIS, Axis


class Setting(NamedTuple):
    """What a method may depend on besides its inner optimizer."""

    workers: int
    steps: int
    learning_rate: optax.ScalarOrSchedule
    period: int
    fraction: float = 0.05
    threshold: float = 0.07
    window: int = 25


class Sent(NamedTuple):
    """Payload bytes per worker, as the formulas of the parts have it."""

    always: int  # at every step
    sync: int  # in addition on the steps that fire, all conditionals of a step together
    at: Callable[[int], int] | None = None  # at a step, where there are several kinds

    @property
    def most(self) -> int:
        """Of a step of which nothing is known: all its conditionals together."""
        return self.always + self.sync


@dataclass(frozen=True)
class Method:
    """One method of the catalogue.

    Attributes:
        wrap: from an inner optimizer and a setting to the transformation.
        sent: the bytes it sends for a tree of parameters, at a step that is not known
            when the program is built (where the clock alone decides, nobody is asked).
        shared: those of one device where so many of them share a worker, from the
            parameters and from the part of each that the device holds; None where it
            sends what ``sent`` has for those parts.
        learning_rate: tuned on the image task, for SGD with momentum 0.9; None where
            it was not.
        adamw_rate: tuned on the language model, for AdamW; None where it was not.
        period: of its syncs in the comparison.
        syncs: on the clock ("every step", "period"), or "measured"; None where steps
            are of more kinds than two.
        kinds: of steps between two syncs and at them, where they are on the clock.
        exact: how many steps stay exact in float32 on small binary data.
        bitwise: whether all workers hold the same bits right after a sync; else, as
            where parameters are averaged, the same up to a rounding.
        smooth: whether a rounding stays a rounding (false for signs and selections).
        about: one line on it, where no factory of its name has one.
        axis: the names its workers are spread over.
        exempt: law -> why it does not apply.
    """

    wrap: Callable[[Any, Setting], optax.GradientTransformationExtraArgs]
    sent: Callable[[Any, Setting], Sent]
    shared: Callable[[Any, Setting, Any, int], Sent] | None = None
    learning_rate: float | None = None
    adamw_rate: float | None = None
    period: int = 8
    syncs: str | None = "every step"
    kinds: int = 2
    exact: int = 8
    bitwise: bool = True
    smooth: bool = True
    axis: Axis = AXIS
    about: str = ""
    exempt: Mapping[str, str] = field(default_factory=dict)

    def make(
        self,
        *,
        workers: int,
        steps: int,
        learning_rate: optax.ScalarOrSchedule | None = None,
        inner: Any = None,
        **setting: Any,
    ) -> optax.GradientTransformationExtraArgs:
        """The transformation, around momentum SGD unless ``inner`` is given."""
        rate = self.learning_rate if learning_rate is None else learning_rate
        if rate is None:
            raise ValueError("no rate was tuned for this method: give learning_rate=.")
        inner = optax.sgd(rate, momentum=0.9) if inner is None else inner
        period = setting.pop("period", self.period)
        return self.wrap(inner, Setting(workers, steps, rate, period, **setting))

    def sent_by_device(
        self, params: Any, setting: Setting, parts: Any, devices: int
    ) -> Sent:
        """What one of a worker's ``devices`` sends, which holds ``parts`` of leaves."""
        if self.shared is None:
            return self.sent(parts, setting)
        return self.shared(params, setting, parts, devices)


def dense(params: Any, *, least: int = 4) -> int:
    """Bytes of the leaves that travel, in at least so many bytes an entry."""
    leaves = [x for x in jax.tree.leaves(params) if takes_part(x)]
    return sum(x.size * max(least, x.dtype.itemsize) for x in leaves)


def every_step(params: Any, setting: Setting) -> Sent:
    """One dense tree a step."""
    return Sent(dense(params), 0)


def at_syncs(params: Any, setting: Setting) -> Sent:
    """One dense tree a sync."""
    return Sent(0, dense(params))
