"""Low-rank exchange of matrices: PowerSGD."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .exchange import Exchange
from .leaves import PyTree, check_same_leaves, map_leaves, precise, takes_part
from .spmd import AXIS, Axis, vary
from .talk import admit_shrinking
from .transport import reduce_mean


class PowerSGDState(NamedTuple):
    """State of ``powersgd``; None for leaves that travel whole."""

    query: PyTree  # the last right factor Q, scaled, [n, rank]: the same on all
    residual: PyTree  # what this worker has not managed to say yet


def powersgd(rank: int, *, seed: int = 0, axis: Axis = AXIS) -> Exchange:
    r"""Low-rank approximation by one power iteration, with error feedback.

    .. math::
        D_i = u_i + e_i, \quad P = \text{orth}(\tfrac1K \sum_j D_j Q), \quad
        Q \leftarrow \tfrac1K \sum_j D_j^\top P, \quad
        x_i \leftarrow P Q^\top, \quad e_i \leftarrow D_i - P (D_i^\top P)^\top

    A leaf of two or more dimensions is a matrix ``[m, n]`` with ``n`` its last
    dimension. ``Q`` is ``state.query`` (``[n, rank]``, Gaussian at first, kept as a
    warm start with columns of largest entry 1; one that would become zero stays) and
    ``e`` is ``state.residual``. Sends ``rank · (m + n)`` float32 a matrix in two
    all-reduces. Vectors, and matrices for which that would not be less than ``m · n``,
    travel whole and have no state.

    Raises:
        ValueError: rank < 1; at trace, a tree of another structure.

    Note:
        The residual is what this worker's own factors miss. The published code
        subtracts the aggregated approximation instead; what is heard is the same,
        since both factors depend on the workers only through the mean of ``D``, and
        the per-worker residuals stay smaller.

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
    if rank < 1:
        raise ValueError(f"rank {rank} is below 1.")

    def init(params):
        leaves, treedef = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(seed), max(1, len(leaves)))
        query = [
            jax.random.normal(key, (x.shape[-1], rank), precise(x).dtype)
            if _is_low_rank(x, rank)
            else None
            for key, x in zip(keys, leaves, strict=False)
        ]
        residual = [
            jnp.zeros_like(precise(x)) if _is_low_rank(x, rank) else None
            for x in leaves
        ]
        query, residual = (
            jax.tree.unflatten(treedef, part) for part in (query, residual)
        )
        return PowerSGDState(vary(query, axis), residual)

    def update(updates, state, params=None, *, about="gradients", within=None, **extra):
        admit_shrinking(updates, "powersgd", axis, about, within)
        low = jax.tree.map(lambda x: x if _is_low_rank(x, rank) else None, updates)
        check_same_leaves("powersgd", state.residual, low)

        def one(u, q, e):
            if q is None:
                heard = reduce_mean(u, axis).astype(u.dtype) if takes_part(u) else u
                return _Heard(heard, None, None)
            d = (precise(u) + e).reshape(-1, u.shape[-1])
            p = jnp.linalg.qr(reduce_mean(_times(d, q), axis))[0]
            mine = _times(d.T, p)
            factor = reduce_mean(mine, axis)
            heard = _times(p, factor.T).reshape(u.shape).astype(u.dtype)
            # Only directions matter to the next P. Scaled, D Q is of the size of D; and
            # from a direction of zeros nothing would ever be heard again.
            size = jnp.max(jnp.abs(factor), axis=0)
            q = jnp.where(size > 0, factor / jnp.where(size > 0, size, 1), q)
            return _Heard(heard, q, (d - _times(p, mine.T)).reshape(u.shape))

        parts = map_leaves(one, updates, state.query, state.residual)
        heard, query, residual = (
            jax.tree.map(
                lambda part, i=i: part[i],
                parts,
                is_leaf=lambda x: isinstance(x, _Heard),
            )
            for i in range(3)
        )
        return heard, PowerSGDState(query, residual)

    return Exchange(init, update)


def low_rank_bytes(params: PyTree, rank: int) -> int:
    """Payload bytes of ``powersgd(rank)``: a worker's, for one exchange of a tree.

    Shapes will do: leaves may be ``jax.ShapeDtypeStruct``.
    """

    def sent(x):
        if not takes_part(x):
            return 0
        x = x if hasattr(x, "shape") else jnp.asarray(x)
        whole = x.size * jnp.promote_types(x.dtype, jnp.float32).itemsize
        if not _is_low_rank(x, rank):
            return whole
        n = x.shape[-1]
        return rank * (x.size // n + n) * whole // x.size

    return sum(map(sent, jax.tree.leaves(params)))


class _Heard(NamedTuple):
    heard: jax.Array
    query: jax.Array | None
    residual: jax.Array | None


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` in full precision: what the product rounds off, no memory keeps."""
    return jnp.matmul(a, b, precision="highest")


def _is_low_rank(x: jax.Array, rank: int) -> bool:
    if not takes_part(x) or len(getattr(x, "shape", ())) < 2:
        return False
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return False
    n = x.shape[-1]
    m = x.size // n
    return rank * (m + n) < m * n
