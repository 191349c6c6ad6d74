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
- a traced scalar inside ``known(step, host, asked)``, which is both: decisions are made
  at trace from ``host``, and each question asked is noted, so that one program serves
  all steps for which the answers are the same.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from .spmd import Axis, check_uniform, vary_with


class Question(NamedTuple):
    """Something a program was told about its step when it was traced."""

    ask: Callable[[int], bool]  # of the step
    answer: bool


class _Known(NamedTuple):
    value: Any  # the traced step
    host: int
    lag: int  # by how much it is earlier than the present step
    asked: list[Question]


_KNOWN: contextvars.ContextVar[tuple[_Known, ...]] = contextvars.ContextVar(
    "known", default=()
)


def known(
    value: jax.Array, host: int, asked: list[Question]
) -> contextlib.AbstractContextManager[None]:
    """Within, the host knows that the traced step ``value`` is ``host``.

    What is decided about it is decided at trace and noted in ``asked``. It stays a
    JAX array, so inner optimizers may do with their step what they like. Where it
    passes through ``jit`` or ``scan`` it is another array, of which nothing is known:
    then there is a conditional, and the program is right as well.
    """
    return _knowing(_Known(value, host, 0, asked))


@contextlib.contextmanager
def _knowing(clock: _Known) -> Iterator[None]:
    token = _KNOWN.set((*_KNOWN.get(), clock))
    try:
        yield
    finally:
        _KNOWN.reset(token)


def _recall(step: Any) -> _Known | None:
    return next((k for k in reversed(_KNOWN.get()) if k.value is step), None)


def host_of(step: Any) -> tuple[int, list[Question]] | None:
    """What the host knows this step to be, and the questions asked; None if nothing.

    Of an ``earlier`` step, the number of the present one, which questions are about.
    """
    clock = _recall(step)
    return None if clock is None else (clock.host + clock.lag, clock.asked)


def now(step: Any, axis: Axis) -> Any:
    """The step as a Python integer or an int32 scalar that is the same everywhere.

    Raises ``ValueError`` if it is missing, stacked or no integer, and ``NotUniform``
    if it differs between workers.
    """
    if step is None:
        raise ValueError(
            "update needs step=, the number of the current step (an integer scalar, "
            "the same on all workers); self_clocked(tx) counts for loops without. "
            "Wrappers that do not hand it on, such as optax.MultiSteps, belong around "
            "the inner optimizer."
        )
    if isinstance(step, int | np.integer) and not isinstance(step, bool):
        return int(step)
    dtype = jnp.result_type(step)
    if not jnp.issubdtype(dtype, jnp.signedinteger):
        raise ValueError(
            f"step must be one signed integer for all workers, not {dtype}: count in "
            "int32 or in Python integers."
        )
    if jnp.ndim(step) != 0:
        raise ValueError(
            "step must be one signed integer for all workers, not "
            f"{dtype}{jnp.shape(step)}: pass it to spread with in_axes=None instead of "
            "stacking it."
        )
    check_uniform(step, axis, "step")
    return step


def whole(**counts: Any) -> None:
    """Raise unless every count, by its name, is a whole number known at build time."""
    for name in counts:
        count: Any = counts[name]
        if isinstance(count, Tracer):
            raise ValueError(
                f"{name} is a traced array, and must be known when the program is "
                "built: inject_hyperparams takes it in static_args."
            )
        is_number = isinstance(count, int | float | np.number | np.ndarray | jax.Array)
        if (
            isinstance(count, bool)
            or not is_number
            or not float(np.real(count)).is_integer()
        ):
            shown = repr(count) if is_number or isinstance(count, bool | str) else ""
            raise ValueError(
                f"{name} {shown or f'of type {type(count).__name__}'} must be a whole "
                "number."
            )


def decide(ask: Callable[[Any], Any], step: Any) -> Any:
    """``ask(step)``: a Python bool where the step is known, else a bool scalar.

    ``ask`` is arithmetic that works on Python integers and on arrays alike.
    """
    clock = _recall(step)
    if clock is not None:
        lag, answer = clock.lag, bool(ask(clock.host))
        clock.asked.append(Question(lambda t: bool(ask(t - lag)), answer))
        return answer
    if isinstance(step, int | np.integer):
        return bool(ask(int(step)))
    return ask(step)


def choose(ask: Callable[[Any], Any], step: Any) -> Any:
    """``ask(step)``, a small integer: Python's where the step is known, else int32.

    For ``switch``. ``ask`` is arithmetic that works on Python integers and on arrays
    alike. One program serves all steps for which the number is the same.
    """
    clock = _recall(step)
    if clock is not None:
        lag, answer = clock.lag, int(ask(clock.host))
        clock.asked.append(Question(lambda t: int(ask(t - lag)) == answer, True))
        return answer
    if isinstance(step, int | np.integer):
        return int(ask(int(step)))
    return jnp.asarray(ask(step), jnp.int32)


@contextlib.contextmanager
def earlier(step: Any, steps: int) -> Iterator[Any]:
    """Within, the step ``steps`` ago, known to the host if ``step`` is."""
    clock, then = _recall(step), step - steps
    with contextlib.ExitStack() as stack:
        if clock is not None:
            stack.enter_context(
                _knowing(
                    _Known(then, clock.host - steps, clock.lag + steps, clock.asked)
                )
            )
        yield then


def handed_on(step: Any, inside: Any) -> contextlib.AbstractContextManager[None]:
    """Within, ``inside`` is the step that ``step`` is outside of a program's part.

    Handing an array into ``shard_map`` or ``jit`` makes another of it; what the host
    knows of the one it then knows of the other.
    """
    clock = _recall(step)
    return (
        contextlib.nullcontext()
        if clock is None
        else _knowing(clock._replace(value=inside))
    )


def cond(pred: Any, yes: Callable, no: Callable, *operands: Any, axis: Axis) -> Any:
    """``lax.cond`` for branches that may talk along ``axis``.

    What is no tracer decides at trace. A tracer must be the same on all workers, or
    ``NotUniform`` is raised. Outputs are marked as varying over ``axis``.
    """
    if not isinstance(pred, Tracer):
        return switch(int(pred), (no, yes), *operands, axis=axis)
    return switch(jnp.asarray(pred).astype(jnp.int32), (no, yes), *operands, axis=axis)


def switch(index: Any, branches: Sequence[Callable], *operands, axis: Axis) -> Any:
    """``lax.switch`` for branches that may talk along ``axis``; see ``cond``."""
    # A branch may leave equal what another makes differ, also over the axes of the
    # operands, and both must have one type: mark them all.
    marked = [
        lambda *args, branch=branch: vary_with(branch(*args), operands, axis=axis)
        for branch in branches
    ]
    if isinstance(index, int | np.integer):
        return marked[int(index)](*operands)
    check_uniform(index, axis, "a predicate")
    return lax.switch(index, marked, *operands)
