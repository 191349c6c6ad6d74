"""What all workers decide alike: the step, and conditionals that talk.

Conditional collectives are the hazard of such programs. If workers disagree about a
predicate, those that talk wait for those that do not, and the program hangs; JAX
traces it without complaint. ``cond`` and ``switch`` refuse, at trace time, a predicate
that differs between workers. They can tell because JAX records over which axes a
value varies. But the output of ``lax.cond`` forgets the variance of its predicate, so
predicates are formed by arithmetic and end in a collective, or come from the step.

The step is an argument of every update, in one of three forms:

- an int32 scalar, the same on all workers: decisions are conditionals in the program;
- a Python integer: decisions are made at trace, and the program holds no conditional;
- a ``Clock``, which is both: decisions are made at trace from ``host``, arithmetic
  uses ``value``, and every question asked is noted, so that one program serves all
  steps for which the answers are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .spmd import Axis, check_uniform, names, vary, varying_axes


class Question(NamedTuple):
    """Something a program was told about its step when it was traced."""

    ask: Callable[[int], bool]  # of the step
    answer: bool


class Clock:
    """A step known to the host (``host``) as well as to the device (``value``).

    In arithmetic it is its value. ``asked`` collects what was decided at trace.
    """

    def __init__(self, value: jax.Array, host: int, asked: list, lag: int = 0):
        """Note questions about step ``host + lag`` in ``asked``."""
        self.value, self.host, self.asked, self.lag = value, host, asked, lag

    def __jax_array__(self) -> jax.Array:
        """The traced value, for ``jax.numpy``."""
        return jnp.asarray(self.value)

    def ago(self, steps: int) -> Clock:
        """This clock ``steps`` earlier, with the same notebook."""
        return Clock(
            self.value - steps, self.host - steps, self.asked, self.lag + steps
        )


def _delegate(name: str, *, swapped: bool = False) -> None:
    compute = getattr(operator, name)

    def method(self, other):
        left, right = (other, self.value) if swapped else (self.value, other)
        return compute(left, right)

    setattr(Clock, f"__{'r' if swapped else ''}{name}__", method)


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
    _delegate(_name)
    _delegate(_name, swapped=True)
for _name in ("lt", "le", "gt", "ge"):
    _delegate(_name)


def now(step: Any, axis: Axis) -> Any:
    """The step as a Python integer or an int32 scalar that is the same everywhere.

    Raises ``ValueError`` if it is missing, stacked or no integer, and ``NotUniform``
    if it differs between workers.
    """
    if isinstance(step, Clock):
        step = step.value
    if step is None:
        raise ValueError(
            "update needs step=, the number of the current step (an integer scalar, "
            "the same on all workers); self_clocked(tx) counts for loops without."
        )
    if isinstance(step, int | np.integer) and not isinstance(step, bool):
        return int(step)
    if jnp.ndim(step) != 0 or not jnp.issubdtype(jnp.result_type(step), jnp.integer):
        raise ValueError(
            "step must be one integer for all workers, not "
            f"{jnp.result_type(step)}{jnp.shape(step)}: pass it to spread with "
            "in_axes=None instead of stacking it."
        )
    check_uniform(step, axis, "step")
    return step


def decide(ask: Callable[[Any], Any], step: Any) -> Any:
    """``ask(step)``: a Python bool where the step is known, else a bool scalar.

    ``ask`` is arithmetic that works on Python integers and on arrays alike.
    """
    if isinstance(step, Clock):
        lag, answer = step.lag, bool(ask(step.host))
        step.asked.append(Question(lambda t: bool(ask(t - lag)), answer))
        return answer
    if isinstance(step, int | np.integer):
        return bool(ask(int(step)))
    return ask(step)


def ago(step: Any, steps: int) -> Any:
    """``step − steps``, keeping what the host knows."""
    return step.ago(steps) if isinstance(step, Clock) else step - steps


def cond(pred: Any, yes: Callable, no: Callable, *operands: Any, axis: Axis) -> Any:
    """``lax.cond`` for branches that may talk along ``axis``.

    A Python bool decides at trace. Anything else must be the same on all workers, or
    ``NotUniform`` is raised. Outputs are marked as varying over ``axis``.
    """
    if isinstance(pred, bool | np.bool_):
        return switch(int(pred), (no, yes), *operands, axis=axis)
    return switch(jnp.asarray(pred).astype(jnp.int32), (no, yes), *operands, axis=axis)


def switch(index: Any, branches: Sequence[Callable], *operands, axis: Axis) -> Any:
    """``lax.switch`` for branches that may talk along ``axis``; see ``cond``."""
    # A branch may leave equal what another makes differ, also over the axes of the
    # operands, and both must have one type: mark them all.
    over = set(names(axis)).union(*map(varying_axes, jax.tree.leaves(operands)))
    marked = [
        lambda *operands, branch=branch: vary(branch(*operands), tuple(sorted(over)))
        for branch in branches
    ]
    if isinstance(index, int | np.integer):
        return marked[int(index)](*operands)
    check_uniform(index, axis, "a predicate")
    return lax.switch(index, marked, *operands)
