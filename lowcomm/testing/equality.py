"""Equality of trees: bit for bit, or how many roundings apart.

``difference`` says in words where two trees part; ``apart`` measures how far.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..leaves import PyTree


class Broken(AssertionError):
    """A law does not hold; the message names the leaf and the values."""


class NotApplicable(Exception):
    """A law cannot be asked here; the message says why."""


def is_key(x: Any) -> bool:
    """Whether a leaf is a typed random key, which numpy cannot hold."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def plain(x: Any) -> np.ndarray:
    """A leaf as a numpy array: of a key, its data."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def difference(here: PyTree, there: PyTree, *, inexact: bool = True) -> str | None:
    """Where two trees differ, in words, or None where they do not.

    Without ``inexact`` the values of floating-point leaves are not compared.
    """
    kind, other = jax.tree.structure(here), jax.tree.structure(there)
    if kind != other:
        return f"the structures are {kind} and {other}"
    there_leaves = jax.tree.leaves(there)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(here), there_leaves, strict=True
    ):
        name = jax.tree_util.keystr(path) or "the array"
        x, y = plain(x), plain(y)
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"{name} is {x.dtype}{x.shape} and {y.dtype}{y.shape}"
        if not inexact and jnp.issubdtype(x.dtype, jnp.inexact):
            continue
        unequal = (x != y) & ~((x != x) & (y != y))
        if unequal.any():
            return f"{name} {_first(x, y, unequal)}"
    return None


def apart(
    here: PyTree,
    there: PyTree,
    scale: float | None = None,
    *,
    unit: float | None = None,
) -> float:
    """The largest difference, in roundings of values of this scale.

    Each leaf's own largest magnitude is its scale unless one is given, and the eps of
    its type the unit.
    """
    worst = 0.0
    for x, y in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        if not jnp.issubdtype(x.dtype, jnp.inexact) or not x.size:
            continue
        eps = float(jnp.finfo(x.dtype).eps) if unit is None else unit
        x, y = wide(x), wide(y)
        if not np.array_equal(np.isfinite(x), np.isfinite(y)):
            return np.inf
        x, y = x[np.isfinite(x)], y[np.isfinite(y)]
        largest = float(np.abs(y).max(initial=0.0)) if scale is None else scale
        gap = float(np.abs(x - y).max(initial=0.0))
        worst = max(worst, gap / max(eps * largest, 1e-300))
    return worst


def magnitude(tree: PyTree) -> float:
    """The largest magnitude of all entries."""
    return max(float(np.abs(wide(x)).max(initial=0)) for x in jax.tree.leaves(tree))


def finite(tree: PyTree, what: str) -> None:
    """Raise, naming the leaf, unless every number of ``tree`` is finite."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            continue
        bad = ~np.isfinite(wide(x))
        if bad.any():
            name = jax.tree_util.keystr(path)
            raise Broken(f"{what}: {name} is {wide(x)[bad][0]} in {bad.sum()} entries")


def wide(x: Any) -> np.ndarray:
    """A floating-point or complex leaf in double precision."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _first(x: np.ndarray, y: np.ndarray, unequal: np.ndarray) -> str:
    where = tuple(int(i) for i in np.argwhere(unequal)[0]) if x.ndim else ()
    at = f" at {list(where)}" if where else ""
    more = int(unequal.sum()) - 1
    also = f", and {more} more entries differ" if more else ""
    return f"is {x[where]} and not {y[where]}{at}{also}"
