"""Look a name up in a table, and say which names are near when it is not there."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def lookup(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return ``table[name]``, or raise a ``ValueError`` that lists the nearest names.

    Example:
        >>> lookup({"iid": 1, "sorted": 2}, "sorted", "split")
        2
        >>> lookup({"iid": 1, "sorted": 2}, "sort", "split")
        Traceback (most recent call last):
            ...
        ValueError: no split is called 'sort'; nearest: sorted (all: iid, sorted)
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=3, cutoff=0.4)
    nearest = f"; nearest: {', '.join(near)}" if near else ""
    raise ValueError(f"no {kind} is called {name!r}{nearest} (all: {', '.join(table)})")
