"""Methods that exchange matrices as products of narrow ones, and step by them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from ..exchange import Exchange
from ..leaves import PyTree, check_same_leaves, precise, takes_part
from ..lowrank import first_directions, no_residuals
from ..matrices import (
    Rank,
    check_rank,
    factors,
    leaf_ranks,
    low_part,
    matrix,
    product,
    scaled,
    size_of,
)
from ..spmd import AXIS, Axis, vary
from ..sync import Talking, Transformation
from ..talk import admit_shrinking, left_over


class DionState(NamedTuple):
    """State of ``dion``; None for leaves that are no matrices."""

    query: PyTree  # the last right factor Q, columns of length one: the same on all
    momentum: PyTree  # M, this worker's own


def dion(
    inner: Transformation,
    *,
    rank: Rank,
    momentum: float = 0.95,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Talking:
    r"""Orthonormalized momentum of low rank, then ``inner``.

    .. math::
        B_i = M_i + g_i, \quad P = \text{orth}(\tfrac1K \sum_j B_j Q), \quad
        R = \tfrac1K \sum_j B_j^\top P, \quad
        M_i \leftarrow B_i - (1-\mu) P R^\top,

    .. math::
        Q \leftarrow R \text{ with columns of length one}, \qquad
        x \leftarrow x + \text{inner}(\sqrt{n/m}\, P Q^\top)

    A leaf ``[m, n]`` of two or more dimensions is a matrix with ``n`` its last
    dimension, the outputs of a layer. ``M`` is ``state.momentum`` and ``μ`` is
    ``momentum``; ``Q`` is ``state.query`` (``[n, rank]``, random at first). ``rank``
    is one number, ``rank_fraction(0.25)``, or a function of a leaf's path and shape. A
    direction in which nothing was heard but rounding, a ten thousandth of the largest,
    is no part of the step, and stays in ``Q``.

    The squares of what is handed to ``inner`` sum up to ``rank · n / m``, whatever the
    size of the gradients: ``optax.sgd(0.02)`` is a length of steps. Of vectors, and
    where ``rank`` is 0, it is the mean gradient; those, embeddings and the last layer
    want another optimizer: ``inner=optax.partition({"matrix": optax.sgd(0.02), "other":
    optax.adamw(3e-3)}, labels)``, and rank 0 for matrices among the others.

    Sends ``rank · (m + n)`` float32 a matrix and step, in two all-reduces, the mean
    gradient of the others in the first. Workers' momenta drift apart; their mean is
    the momentum of one worker with all the data.

    Raises:
        ValueError: rank < 1, momentum outside [0, 1]; at trace, a tree of another
            structure.

    Note:
        The paper scales by the root of outputs over inputs, with matrices that map
        columns; kernels here map rows, so it is ``√(n/m)``.

    Example:
        Each of the two directions that are heard has length one, whatever the size of
        the gradients.

        >>> from lowcomm import spread
        >>> tx = dion(optax.sgd(1.0), rank=2)
        >>> worker = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        >>> g = jax.random.normal(jax.random.key(0), (4, 16, 16))
        >>> moves = spread(worker)(1000 * g)[0]
        >>> print(round(float(jnp.sum(moves**2)), 3), jnp.linalg.matrix_rank(moves))
        2.0 2

    References:
        Ahn, Xu, Abreu, Fan, Magakyan, Sharma, Zhan and Langford, `Dion: Distributed
        Orthonormalized Updates <https://arxiv.org/abs/2504.05295>`_, 2025.
    """
    check_rank(rank)
    if not isinstance(momentum, Tracer) and not 0 <= momentum <= 1:
        raise ValueError(f"momentum {momentum} is outside [0, 1].")

    def init(params):
        leaves, treedef = jax.tree.flatten(params)
        ranks = leaf_ranks(params, rank, 0)
        query = [
            None if q is None else q / jnp.linalg.norm(q, axis=0)
            for q in first_directions(leaves, ranks, seed)
        ]
        put = lambda parts: jax.tree.unflatten(treedef, parts)
        return DionState(vary(put(query), axis), put(no_residuals(leaves, ranks)))

    def update(updates, state, params=None, *, about="gradients", within=None, **extra):
        admit_shrinking(updates, "dion", axis, about, within)
        leaves, treedef = jax.tree.flatten(updates)
        ranks = leaf_ranks(updates, rank, 0)
        put = lambda parts: jax.tree.unflatten(treedef, parts)
        low = [i for i, r in enumerate(ranks) if r]
        check_same_leaves("dion", state.momentum, low_part(updates, ranks))
        kept = treedef.flatten_up_to(state.momentum)
        query = treedef.flatten_up_to(state.query)
        found, whole = factors(
            [matrix(precise(leaves[i]) + kept[i]) for i in low],
            [query[i] for i in low],
            [x for x, r in zip(leaves, ranks, strict=True) if not r and takes_part(x)],
            axis,
        )
        means, directions = iter(whole), list(leaves)
        for i, x in enumerate(leaves):
            if not ranks[i] and takes_part(x):
                directions[i] = next(means).astype(x.dtype)
        for i, p, r in zip(low, found.left, found.right, strict=True):
            x, (m, n) = leaves[i], size_of(leaves[i].shape)
            sum_ = matrix(precise(x) + kept[i])
            kept[i] = left_over(sum_, (1 - momentum) * product(p, r)).reshape(x.shape)
            # What is no larger may be rounding of the others, as in matrix_rank, of
            # which more is left where random directions were nearly at right angles.
            largest = jnp.max(jnp.abs(r))
            size = jnp.linalg.norm(r / jnp.where(largest == 0, 1, largest), axis=1)
            none = size <= max(m, n, 1024) * jnp.finfo(r.dtype).eps * jnp.max(size)
            toward = scaled(jnp.where(none[:, None], 0, r), query[i])
            toward = toward / jnp.linalg.norm(toward, axis=0)
            heard = jnp.where(none, 0, toward)
            step = np.sqrt(n / m) * product(p, heard.T)
            directions[i] = step.reshape(x.shape).astype(x.dtype)
            query[i] = toward
        return put(directions), DionState(put(query), put(kept))

    return optax.chain(Exchange(init, update), inner)
