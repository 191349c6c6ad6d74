"""A whole tree as one vector, for what is selected or hashed across its leaves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .leaves import PyTree, precise, takes_part
from .spmd import leaves_are_divided


def entries(tree: PyTree) -> int:
    """How many numbers take part in exchanges of a tree; shapes will do."""
    leaves = [x for x in jax.tree.leaves(tree) if takes_part(x)]
    return sum(math.prod(jnp.shape(x)) for x in leaves)


def itemsize(tree: PyTree) -> int:
    """The bytes of each entry of the vector that ``joined`` makes; shapes will do."""
    kinds = [jnp.result_type(x) for x in jax.tree.leaves(tree) if takes_part(x)]
    return jnp.result_type(jnp.float32, *kinds).itemsize


def check_vectors(tree: PyTree, name: str) -> None:
    """Raise where leaves may not be taken as vectors: complex ones, and divided ones.

    ``name`` is who takes them.
    """
    if leaves_are_divided():
        raise ValueError(
            f"{name} takes leaves as vectors, and this mesh has axes over which the "
            "compiler divides leaves: put per_shard around it."
        )
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if takes_part(x) and jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path) or '(the tree)'}: {name} takes real "
                "numbers: send real and imaginary part on their own."
            )


def joined(tree: PyTree, name: str) -> tuple[jax.Array, Callable]:
    """The leaves that take part end to end, precise, and the way back.

    ``back(vector)`` is shaped like ``tree``, with leaves as precise as the vector and
    the others as they are. ``name`` is who asks. ``ValueError`` for complex leaves, for
    leaves that the compiler divides over a mesh, which a vector would gather, and for
    more entries than 32-bit numbers count.

    Example:
        >>> tree = {"b": jnp.ones(2), "n": 3, "w": jnp.zeros((2, 1))}
        >>> vector, back = joined(tree, "sketched")
        >>> print(vector, back(2 * vector)["w"].shape)
        [1. 1. 0. 0.] (2, 1)
    """
    check_vectors(tree, name)
    n = entries(tree)
    if n >= 2**31:
        raise ValueError(
            f"{name} takes the tree as one vector, and {n} entries are more than "
            "32-bit numbers count: give parts of the tree an exchange each, by "
            "optax.partition, or each shard its own, by per_shard."
        )
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if takes_part(x)]
    parts = [precise(jnp.asarray(leaves[i])) for i in places]
    vector = jnp.concatenate([x.ravel() for x in parts]) if parts else jnp.zeros(0)

    def back(vector):
        cuts = list(itertools.accumulate(x.size for x in parts))[:-1]
        out = list(leaves)
        for i, x, part in zip(places, parts, jnp.split(vector, cuts), strict=False):
            out[i] = part.reshape(x.shape)
        return jax.tree.unflatten(treedef, out)

    return vector, back
