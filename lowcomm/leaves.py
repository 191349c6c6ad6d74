"""Which leaves of a tree take part, and in which precision.

Every part of lowcomm treats leaves alike: floating-point and complex leaves are
exchanged; integer, boolean and key leaves stay what they are on each worker;
``None`` and masked nodes hold no leaf and pass through. Sums and differences of
half-precision leaves are formed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def takes_part(leaf: Any) -> bool:
    """Whether a leaf is exchanged: floating point or complex, and not empty."""
    if leaf is None:
        return False
    dtype = jnp.result_type(leaf) if jnp.isscalar(leaf) else leaf.dtype
    return jnp.issubdtype(dtype, jnp.inexact) and getattr(leaf, "size", 1) > 0


def is_inexact(leaf: Any) -> bool:
    """Whether an optimizer may move a leaf: floating point or complex."""
    dtype = jnp.result_type(leaf) if jnp.isscalar(leaf) else leaf.dtype
    return jnp.issubdtype(dtype, jnp.inexact)


def exchanged(tree: PyTree) -> PyTree:
    """``tree`` with None for the leaves that take no part in exchanges."""
    return jax.tree.map(lambda x: jnp.asarray(x) if takes_part(x) else None, tree)


def map_exchanged(f: Callable, tree: PyTree, *rest: PyTree) -> PyTree:
    """``jax.tree.map`` over the leaves that take part; the others stay as in ``tree``.

    ``rest`` may hold ``None`` where ``tree`` has a leaf that does not take part.
    """
    return jax.tree.map(
        lambda x, *xs: f(x, *xs) if takes_part(x) else x,
        tree,
        *rest,
        is_leaf=lambda x: x is None,
    )


def map_leaves(f: Callable, tree: PyTree, *rest: PyTree) -> PyTree:
    """``jax.tree.map`` over the leaves of ``tree``, None where it is None.

    With a state first, which holds None for leaves it keeps nothing of, or with a
    full tree first and states after it.
    """
    return jax.tree.map(
        lambda x, *xs: None if x is None else f(x, *xs),
        tree,
        *rest,
        is_leaf=lambda x: x is None,
    )


def movable(tree: PyTree, like: PyTree | None = None) -> PyTree:
    """``tree`` with ``None`` wherever ``like`` has a leaf no optimizer may move."""
    return jax.tree.map(
        lambda p, x: x if is_inexact(p) else None, tree if like is None else like, tree
    )


def all_finite(tree: PyTree) -> jax.Array:
    """Whether no floating-point or complex leaf holds a NaN or an infinity."""
    leaves = [x for x in jax.tree.leaves(tree) if is_inexact(x)]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in leaves]))


def precise(x: jax.Array) -> jax.Array:
    """``x`` in the precision sums are formed in: float32 for half-precision arrays."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def fitting(x: jax.Array, dtype: Any) -> jax.Array:
    """``x`` in a narrower type; the finite stays finite, as the largest there is."""
    if x.dtype == dtype or not jnp.issubdtype(dtype, jnp.floating):
        return x.astype(dtype)
    limits = jnp.finfo(dtype)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, limits.min, limits.max), x).astype(
        dtype
    )


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x + y`` formed precisely and rounded once to the type of ``x``."""
    return (precise(x) + precise(y)).astype(x.dtype)


def subtract(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x − y``, precise: float32 for half-precision arrays."""
    return precise(x) - precise(y)


def zeros(tree: PyTree, dtype: Any = None) -> PyTree:
    """Precise zeros for each leaf that takes part, ``None`` for the others."""
    return jax.tree.map(
        lambda x: (
            jnp.zeros_like(x, dtype=at_least(dtype, precise(jnp.asarray(x)).dtype))
            if takes_part(x)
            else None
        ),
        tree,
    )


def at_least(asked: Any, precise: Any) -> Any:
    """``asked``, if anything, but complex where the leaf is."""
    is_complex = jnp.issubdtype(precise, jnp.complexfloating)
    return precise if asked is None or is_complex else asked


def check_same_leaves(name: str, expected: PyTree, tree: PyTree) -> None:
    """Raise, naming the leaf, unless the exchanged leaves of both have one shape."""

    def shapes(t):
        leaves = jax.tree_util.tree_leaves_with_path(t)
        return {
            jax.tree_util.keystr(path): jnp.shape(x)
            for path, x in leaves
            if takes_part(x)
        }

    before, now = shapes(expected), shapes(tree)
    for path in sorted(before.keys() | now.keys()):
        if before.get(path) != now.get(path):
            raise ValueError(
                f"{name} keeps one array per leaf, and leaf {path or '(the tree)'} "
                f"has shape {now.get(path, 'nothing')} where init saw "
                f"{before.get(path, 'nothing')}: call init with the new tree (on the "
                "same mesh, and traffic with workers=mesh, where leaves are divided)."
            )
