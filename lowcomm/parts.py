"""What fits where: checks made when a method is put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from .compressors import Compressor
from .topology import Graph
from .triggers import Trigger

_EXAMPLES = {
    Compressor: "top_k(0.01)",
    Graph: "ring(8)",
    Trigger: "every(8)",
    optax.GradientTransformation: "optax.adam(1e-3) or mean()",
}


def is_anchored(state: Any) -> bool:
    """Whether a state is that of ``rounds``, or of a method with a model of its own.

    It has the fields ``anchor``, the model all workers agree on, or ``own_anchor``,
    another one on each worker, and ``synced``, whether the parameters are that now.
    """
    fields = set(getattr(state, "_fields", ()))
    return "synced" in fields and bool({"anchor", "own_anchor"} & fields)


def anchor_of(state: Any) -> tuple[Any, bool]:
    """The model of such a state, and whether it is the worker's own."""
    own = "own_anchor" in state._fields
    return state.own_anchor if own else state.anchor, own


def is_verb(state: Any) -> bool:
    """Whether a state is of what moves parameters that an ``inner`` optimizer moved."""
    return "inner" in getattr(state, "_fields", ())


def holds(state: Any, is_such: Callable[[Any], bool]) -> bool:
    """Whether there is such a state in it."""
    return any(map(is_such, jax.tree.leaves(state, is_leaf=is_such)))


def expect(kind: type, **parts: Any) -> None:
    """Raise unless every part, by its name, is of this kind; None may be left out.

    Whatever has an ``init`` and an ``update`` is a transformation, as for optax.
    """
    for name, part in parts.items():
        if kind is optax.GradientTransformation:
            fits = hasattr(part, "init") and hasattr(part, "update")
        else:
            fits = isinstance(part, kind)
        if part is None or fits:
            continue
        function = getattr(part, "__name__", "")
        found = f"the function {function}" if function else type(part).__name__
        shown = f" {part!r}" if isinstance(part, str | int | float) else ""
        raise ValueError(
            f"{name} must be a {kind.__name__}, such as {_EXAMPLES[kind]}, not "
            f"{found}{shown}."
            + (f" Call it: {function}(...)." if function.isidentifier() else "")
        )
