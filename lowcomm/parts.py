"""What fits where: checks made when a method is put together."""

from __future__ import annotations

from typing import Any

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
