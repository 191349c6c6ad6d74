"""Low-rank exchange of matrices: PowerSGD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from . import uniform
from .exchange import Exchange
from .keys import leaf_keys
from .leaves import PyTree, check_same_leaves, precise, takes_part
from .matrices import (
    Rank,
    check_min_compression,
    check_rank,
    factors,
    leaf_ranks,
    low_part,
    matrix,
    product,
    scaled,
    size_of,
)
from .spmd import AXIS, Axis, vary
from .talk import admit_shrinking, left_over

Residual: TypeAlias = Literal["local", "global"]


class PowerSGDState(NamedTuple):
    """State of ``powersgd``; None for leaves that travel whole."""

    query: PyTree  # the last right factor Q, scaled, [n, rank]: the same on all
    residual: PyTree  # what this worker has not managed to say yet


def powersgd(
    rank: Rank,
    *,
    min_compression: float = 2.0,
    residual: Residual = "local",
    warm_start: bool = True,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Exchange:
    r"""Low-rank approximation by one power iteration, with error feedback.

    .. math::
        D_i = u_i + e_i, \quad P = \text{orth}(\tfrac1K \sum_j D_j Q), \quad
        Q \leftarrow \tfrac1K \sum_j D_j^\top P, \quad
        x_i \leftarrow P Q^\top, \quad e_i \leftarrow D_i - P (D_i^\top P)^\top

    A leaf of two or more dimensions is a matrix ``[m, n]`` with ``n`` its last
    dimension. ``Q`` is ``state.query`` (``[n, rank]``, Gaussian at first, kept as a
    warm start with columns of largest entry 1; one that would become zero stays) and
    ``e`` is ``state.residual``, float32 or wider.

    ``rank`` is a number, or a function from a leaf's path (``"decoder/kernel"``) and
    shape to one, such as ``rank_fraction(0.1)``; more than ``min(m, n)`` means that,
    and where a function says 0 the leaf goes whole. So travel vectors too, and matrices
    that the factors do not make more than ``min_compression`` times smaller. With
    ``residual="global"`` a worker remembers ``D - P Q^T``, what it misses of what was
    heard, instead of what its own factors miss: what is heard is the same, since ``P``
    and ``Q`` depend on the workers only through the mean of ``D``, but the residuals of
    workers whose gradients differ are larger. With ``warm_start=False`` other Gaussian
    directions are drawn at every step, and ``update`` needs ``step=``.

    Sends ``rank · (m + n)`` float32 a matrix in two all-reduces, however many leaves
    there are; what travels whole is in the first. Where what is heard is not finite
    nothing is remembered.

    Raises:
        ValueError: rank < 1, min_compression < 0, another residual; at trace, a tree of
            another structure, a rank of a leaf that is no whole number.

    Note:
        The published code subtracts the aggregated approximation (``"global"``). The
        paper views a convolution as ``[out, in · kh · kw]``, which is the transpose of
        the view here of a kernel ``[kh, kw, in, out]``.

    Example:
        A mean gradient of rank one is heard exactly.

        >>> import numpy as np
        >>> from lowcomm import spread
        >>> tx = powersgd(1)
        >>> worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
        >>> g = jnp.stack([jnp.ones((8, 6)), 3 * jnp.ones((8, 6))])
        >>> bool(np.allclose(spread(worker)(g), 2.0, atol=1e-5))
        True

    References:
        Vogels, Karimireddy and Jaggi, `PowerSGD <https://arxiv.org/abs/1905.13727>`_,
        2019, Algorithms 1 and 2.
    """
    check_rank(rank)
    check_min_compression(min_compression)
    if residual not in ("local", "global"):
        raise ValueError(f"residual {residual!r} is neither 'local' nor 'global'.")

    def init(params):
        leaves, treedef = jax.tree.flatten(params)
        ranks = leaf_ranks(params, rank, min_compression)
        put = lambda parts: jax.tree.unflatten(treedef, parts)
        kept = ranks if warm_start else [0] * len(ranks)
        query = put(first_directions(leaves, kept, seed))
        return PowerSGDState(vary(query, axis), put(no_residuals(leaves, ranks)))

    def update(
        updates,
        state,
        params=None,
        *,
        step=None,
        about="gradients",
        within=None,
        **extra,
    ):
        admit_shrinking(updates, "powersgd", axis, about, within)
        leaves, treedef = jax.tree.flatten(updates)
        ranks = leaf_ranks(updates, rank, min_compression)
        put = lambda parts: jax.tree.unflatten(treedef, parts)
        check_same_leaves("powersgd", state.residual, low_part(updates, ranks))
        if warm_start:
            queries = treedef.flatten_up_to(state.query)
        else:
            queries = drawn(leaves, ranks, seed, uniform.now(step, axis), axis)
        heard, right, left = low_rank_mean(
            leaves,
            ranks,
            queries,
            treedef.flatten_up_to(state.residual),
            residual=residual,
            axis=axis,
        )
        query = [
            scaled(r, q) if warm_start and r is not None else None
            for r, q in zip(right, queries, strict=True)
        ]
        return put(heard), PowerSGDState(put(query), put(left))

    return Exchange(init, update)


def rank_fraction(fraction: float) -> Rank:
    """The rank that is this fraction of a matrix's full rank, and at least one.

    For ``powersgd`` and ``dion``.

    Raises:
        ValueError: fraction outside (0, 1].

    Example:
        >>> rank_fraction(0.25)("kernel", (3, 3, 16, 64))
        16
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction {fraction} is outside (0, 1].")

    def rank(path: str, shape: tuple[int, ...]) -> int:
        m, n = size_of(shape)
        return max(1, round(fraction * min(m, n)))

    return rank


def low_rank_mean(
    leaves: Sequence[jax.Array],
    ranks: Sequence[int],
    queries: Sequence[Any],
    residuals: Sequence[Any],
    *,
    residual: Residual = "local",
    axis: Axis,
) -> tuple[list, list, list]:
    """What is heard of each leaf, its right factor ``[rank, n]``, and what is left.

    Leaves of rank 0 go whole, together with what is left of them; those without a
    residual have none afterwards either.
    """
    wanted = [
        u if e is None else precise(u) + e
        for u, e in zip(leaves, residuals, strict=True)
    ]
    low = [i for i, r in enumerate(ranks) if r]
    found, whole = factors(
        [matrix(wanted[i]) for i in low],
        [queries[i] for i in low],
        [x for x, r in zip(wanted, ranks, strict=True) if not r and takes_part(x)],
        axis,
    )
    means, factored = iter(whole), zip(*found, strict=True)
    heard, left = list(leaves), list(residuals)
    right: list[Any] = [None] * len(leaves)
    for i, (u, d, e) in enumerate(zip(leaves, wanted, residuals, strict=True)):
        if ranks[i]:
            p, mine, mean = next(factored)
            approximation = product(p, mean)
            heard[i] = approximation.reshape(u.shape).astype(u.dtype)
            right[i] = mean
            said = product(p, mine) if residual == "local" else approximation
            left[i] = left_over(matrix(d), said).reshape(u.shape)
        elif takes_part(u):
            heard[i] = next(means).astype(u.dtype)
            left[i] = None if e is None else jnp.zeros_like(e)
    return heard, right, left


def low_rank_bytes(
    params: PyTree,
    rank: Rank,
    parts: PyTree | None = None,
    devices: int = 1,
    *,
    min_compression: float = 2.0,
) -> int:
    """Payload bytes of ``powersgd``: a worker's, for one exchange of a tree.

    Of a worker that is a group, those of one of its ``devices``: it sends an equal part
    of all left factors and of all right ones, and its ``parts`` of what goes whole.
    Shapes will do: leaves may be ``jax.ShapeDtypeStruct``.
    """
    shaped = lambda x: x if hasattr(x, "shape") else jnp.asarray(x)
    leaves = list(map(shaped, jax.tree.leaves(params)))
    own = leaves if parts is None else jax.tree.leaves(parts)

    ranks = leaf_ranks(params, rank, min_compression)
    size = lambda x: jnp.promote_types(x.dtype, jnp.float32).itemsize
    lengths: dict[tuple[int, int], int] = {}  # of left and right factors, by type
    whole = 0
    for x, part, r in zip(leaves, own, ranks, strict=True):
        if r:
            for side, n in enumerate(size_of(x.shape)):
                kind = side, size(x)
                lengths[kind] = lengths.get(kind, 0) + r * n
        elif takes_part(x):
            whole += size(x) * part.size
    return whole + sum(kind[1] * math.ceil(n / devices) for kind, n in lengths.items())


def first_directions(
    leaves: Sequence[jax.Array], ranks: Sequence[int], seed: int
) -> list[Any]:
    """Gaussian directions ``[n, rank]`` of each matrix, the same on all workers."""
    keys = jax.random.split(jax.random.key(seed), max(1, len(leaves)))
    return _gaussian(leaves, ranks, list(keys))


def drawn(
    leaves: Sequence[jax.Array], ranks: Sequence[int], seed: int, step: Any, axis: Axis
) -> list[Any]:
    """The same, others at every step."""
    keys = [leaf_keys(seed, step, i, axis).shared for i in range(len(leaves))]
    return _gaussian(leaves, ranks, keys)


def _gaussian(leaves, ranks, keys) -> list[Any]:
    return [
        jax.random.normal(key, (x.shape[-1], r), precise(x).dtype) if r else None
        for key, x, r in zip(keys, leaves, ranks, strict=False)
    ]


def no_residuals(leaves: Sequence[jax.Array], ranks: Sequence[int]) -> list[Any]:
    """Zeros for each leaf that has a rank."""
    return [
        jnp.zeros_like(precise(x)) if r else None
        for x, r in zip(leaves, ranks, strict=True)
    ]
