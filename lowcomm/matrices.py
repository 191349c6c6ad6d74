r"""Leaves as matrices, and the narrow factors of many matrices at once.

    P = orth(mean_j D_j Q),   R_i = P^T D_i,   R = mean_j R_j,   mean_j D_j ≈ P R

One power iteration from the directions ``Q``, for all matrices of a tree in two
collectives. ``P`` and ``R`` depend on the workers through the mean of ``D`` alone, and
``P R`` is that mean projected on the columns of ``P``.

A leaf of two or more dimensions is a matrix ``[m, n]`` with ``n`` its last dimension,
the outputs of a kernel in flax, and ``m`` all others together: a convolution
``[kh, kw, in, out]`` is ``[kh · kw · in, out]``.

The right factor is kept as ``[rank, n]``: ``P^T D`` runs along the rows of ``D``, and
on a CPU ``D^T P`` takes ten times as long. At low ranks ``P R`` is a sum of outer
products, which is formed while it is added to something else; a matrix product would
be written out first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from . import uniform
from .leaves import PyTree, takes_part
from .spmd import Axis
from .transport import reduce_mean, shared_out

# One for all leaves, or a function of a leaf's path and shape; 0 sends the leaf whole.
Rank: TypeAlias = int | Callable[[str, tuple[int, ...]], int]

_OUTER = 8  # up to this rank a sum of outer products is the faster
_LOW = 32  # up to this rank one column after the other is fast enough
_NOTHING = 32  # roundings of a column's length: no more is left of a dependent one


class Factors(NamedTuple):
    """Of several matrices: see the top of this file."""

    left: list[jax.Array]  # P, [m, rank], orthonormal, the same on all workers
    mine: list[jax.Array]  # P^T D of this worker, [rank, n]
    right: list[jax.Array]  # its mean over the workers


def factors(
    matrices: Sequence[jax.Array],
    directions: Sequence[jax.Array],
    whole: PyTree,
    axis: Axis,
) -> tuple[Factors, PyTree]:
    """One power iteration from ``directions`` ``[n, rank]``, and the mean of ``whole``.

    Two collectives: the products with the directions together with ``whole``, and the
    right factors. All devices of a worker that is a group of them need both factors,
    and each sends an equal part.
    """
    sides, back = shared_out(list(map(times, matrices, directions)))
    sides, whole = reduce_mean((sides, whole), axis)
    left = orthonormal(back(sides))
    mine = [times(p.T, d) for p, d in zip(left, matrices, strict=True)]
    right, back = shared_out(mine)
    return Factors(left, mine, back(reduce_mean(right, axis))), whole


def orthonormal(matrices: Sequence[jax.Array]) -> list[jax.Array]:
    """An orthonormal basis ``[m, rank]`` of each one's columns, all of a shape at once.

    A column that depends on those before it, to rounding, becomes zero.
    """
    kinds: dict[tuple, list[int]] = {}
    for i, x in enumerate(matrices):
        kinds.setdefault((x.shape, x.dtype), []).append(i)
    bases = list(matrices)
    for (shape, _), places in kinds.items():
        together = jnp.stack([matrices[i] for i in places])
        if shape[-1] > _LOW:
            together = _householder(together)
        else:
            # Twice is enough: what a sweep leaves is as small as rounding of unit
            # columns, unless a column was nothing but rounding, and that is dropped.
            together = _gram_schmidt(_gram_schmidt(together))
        for i, basis in zip(places, together, strict=True):
            bases[i] = basis
    return bases


def _householder(matrices: jax.Array) -> jax.Array:
    """The same of ``[b, m, rank]`` by the library, for which many columns are few.

    For a dependent column it returns an arbitrary direction, and takes that out of the
    columns after it: where there is one, again without it.
    """
    columns = _in_range(matrices, axis=1)
    least = _NOTHING * jnp.finfo(columns.dtype).eps * jnp.linalg.norm(columns, axis=1)
    basis, triangle = jnp.linalg.qr(columns)
    along = jnp.abs(jnp.diagonal(triangle, axis1=1, axis2=2))
    dependent = along <= least

    def again(columns, basis):
        order = jnp.argsort(dependent, axis=1, stable=True)[:, None]
        there = ~dependent[:, None]
        kept = jnp.take_along_axis(columns * there, order, axis=2)
        kept = jnp.linalg.qr(kept)[0]
        back = jnp.argsort(order, axis=2)
        return jnp.where(there, jnp.take_along_axis(kept, back, axis=2), 0)

    kept = lambda columns, basis: basis
    return lax.cond(jnp.any(dependent), again, kept, columns, basis)


def _in_range(columns: jax.Array, axis: int) -> jax.Array:
    """Vectors along ``axis`` of largest entry one, whose squares stay in range."""
    size = jnp.max(jnp.abs(columns), axis=axis, keepdims=True)
    return columns / jnp.where(size == 0, 1, size)


def _gram_schmidt(matrices: jax.Array) -> jax.Array:
    """One sweep of modified Gram-Schmidt over the columns of ``[b, m, rank]``.

    Of XLA's own operations alone. The library behind ``jnp.linalg.qr`` on a CPU has
    threads of its own, which wait for each other when cores are taken: of the devices
    simulated on a busy machine each then waits a second for ``[4, 1024, 16]``.
    """
    rank, smallest = matrices.shape[-1], _NOTHING * jnp.finfo(matrices.dtype).eps
    rows = _in_range(jnp.swapaxes(matrices, 1, 2), axis=2)
    norm = lambda v: jnp.sqrt(jnp.sum(v * v, axis=-1))
    before = norm(rows)

    def step(k, rows):
        v = rows[:, k]
        length, was = norm(v)[:, None], before[:, k, None]
        v = jnp.where(length <= smallest * was, 0, v / length)
        along = times(rows, v[:, :, None]) * (jnp.arange(rank) > k)[:, None]
        return (rows - along * v[:, None]).at[:, k].set(v)

    return jnp.swapaxes(lax.fori_loop(0, rank, step, rows), 1, 2)


def times(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` in full precision: what the product rounds off, no memory keeps."""
    return jnp.matmul(a, b, precision="highest")


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    """``P R`` in full precision."""
    rank = left.shape[-1]
    if rank > _OUTER:
        return times(left, right)
    outer = (left[:, k, None] * right[None, k] for k in range(rank))
    return sum(outer, jnp.zeros((), left.dtype))


def scaled(right: jax.Array, before: jax.Array) -> jax.Array:
    """The next directions ``[n, rank]``: the right factor, of largest entry one.

    Only directions matter to the next left factor; scaled, ``D Q`` is of the size of
    ``D``. One that is zero or not finite stays what it was ``before``: from a direction
    of zeros nothing would ever be heard again, and from NaN nothing but NaN.
    """
    size = jnp.max(jnp.abs(right), axis=1, keepdims=True)
    usable = (size > 0) & jnp.isfinite(size)
    return jnp.where(usable, right / jnp.where(usable, size, 1), before.T).T


def matrix(x: jax.Array) -> jax.Array:
    """``x`` as ``[m, n]``."""
    return x.reshape(-1, x.shape[-1])


def is_matrix(x: jax.Array) -> bool:
    """Whether a leaf takes part as a matrix: real, of two or more dimensions."""
    return (
        takes_part(x)
        and len(getattr(x, "shape", ())) >= 2
        and not jnp.issubdtype(x.dtype, jnp.complexfloating)
    )


def size_of(shape: Sequence[int]) -> tuple[int, int]:
    """``(m, n)`` of a leaf that is a matrix."""
    return math.prod(shape[:-1]), shape[-1]


def check_rank(rank: Rank) -> None:
    """Raise unless ``rank`` is one, or a function."""
    if callable(rank):
        return
    uniform.whole(rank=rank)
    if rank < 1:
        raise ValueError(f"rank {rank} is below 1.")


def check_min_compression(min_compression: float) -> None:
    """Raise unless it is a rate."""
    if not min_compression >= 0:
        raise ValueError(f"min_compression {min_compression} must be 0 or more.")


def leaf_ranks(tree: PyTree, rank: Rank, min_compression: float) -> list[int]:
    """The rank of each leaf, at most ``min(m, n)``, and 0 for those that go whole.

    A matrix has one where its factors are more than ``min_compression`` times smaller.
    """

    def choose(path, x):
        if not is_matrix(x):
            return 0
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        chosen = rank(name, tuple(x.shape)) if callable(rank) else rank
        uniform.whole(**{f"the rank of leaf {name}": chosen})
        if chosen < 0:
            raise ValueError(f"the rank of leaf {name} is {chosen}, below 0.")
        m, n = size_of(x.shape)
        chosen = min(int(chosen), m, n)
        return chosen if chosen * (m + n) * min_compression < m * n else 0

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [choose(path, x) for path, x in leaves]


def low_part(tree: PyTree, ranks: Sequence[int]) -> PyTree:
    """``tree`` with None for the leaves of rank 0, which go whole."""
    leaves, treedef = jax.tree.flatten(tree)
    parts = [x if r else None for x, r in zip(leaves, ranks, strict=True)]
    return jax.tree.unflatten(treedef, parts)
