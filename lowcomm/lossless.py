r"""Sparse trees summed in an all-reduce, exactly, without knowing where they overlap.

    sparsified(C)               u_i ← C(e_i + u_i), the rest remembered; sends nothing
    lossless_homomorphic(ρ)     x_i ← mean_j u_j of trees with a share ρ of non-zeros

What workers select differs, and a gather of it grows with their number. A sketch does
not: sketches are summed on the way, the places of the non-zeros are united on the way,
and the sum is peeled off at the end (``peeling``). Where that fails, which all workers
see alike, the tree travels whole; so the result is always the mean.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import uniform
from .compressors import Compressor, payload_bytes
from .exchange import Exchange, like
from .keys import leaf_keys
from .leaves import (
    PyTree,
    check_same_leaves,
    map_exchanged,
    map_leaves,
    precise,
    takes_part,
    zeros,
)
from .packing import pack, packed_bytes
from .parts import expect
from .peeling import ROWS, peel, sketch, support
from .selections import random_k
from .sharded import by_shard
from .spmd import AXIS, Axis, axis_size, vary
from .talk import admit_shrinking, check_divergence, fitting, left_over
from .transport import gather, reduce_max, reduce_mean, reduce_sum, swap
from .vectors import entries, itemsize, joined

# Buckets a key, by the number of keys from which on: what was seen to peel in 99 of a
# hundred draws or more. At many keys it nears the threshold 1.222; of few, two or three
# that meet in all their buckets are what fails.
_SLACK = ((10_000, 1.3), (1_000, 1.4), (100, 2.0), (0, 3.0))


class SparsifiedState(NamedTuple):
    """State of ``sparsified``."""

    error: PyTree  # what this worker has held back so far


class LosslessState(NamedTuple):
    """State of ``lossless_homomorphic``; the same on all workers."""

    unpeeled: jax.Array  # int32, keys the last sketch left unknown
    fallbacks: jax.Array  # int32, how often the tree has travelled whole


def sparsified(compressor: Compressor, *, seed: int = 0, axis: Axis = AXIS) -> Exchange:
    r"""Hold back what a compressor leaves out, until it has added up.

    .. math::
        p_i = e_i + u_i, \qquad u_i \leftarrow C(p_i), \qquad e_i \leftarrow p_i - u_i

    Error feedback without the sending: it hands on a tree with zeros, for an exchange
    that knows what to do with them, such as ``lossless_homomorphic``. ``e`` is
    ``state.error``, float32 or wider. Sends nothing.

    Raises:
        ValueError: a compressor that workers must agree on a statistic for; at trace,
            a tree of another structure.

    Example:
        >>> from lowcomm import spread, top_k
        >>> tx = sparsified(top_k(0.5))
        >>> worker = lambda g: tx.update(g, tx.init(g), step=0)
        >>> kept, state = spread(worker)(jnp.array([[3.0, 2.0], [1.0, 4.0]]))
        >>> print(kept[0], kept[1], state.error[0], state.error[1])
        [3. 0.] [0. 4.] [0. 2.] [1. 0.]
    """
    expect(Compressor, compressor=compressor)
    if compressor.statistic is not None:
        raise ValueError(
            "sparsified sends nothing, so workers cannot agree on the statistic this "
            "compressor needs: use error_feedback, which does."
        )

    def update(updates, state, params=None, *, step=None, **extra):
        about, within = extra.get("about", "gradients"), extra.get("within")
        admit_shrinking(updates, "sparsified", axis, about, within)
        check_same_leaves("sparsified", state.error, updates)
        check_divergence(compressor, updates, "sparsified")
        step = uniform.now(step, axis)
        wanted = map_exchanged(lambda u, e: precise(u) + e, updates, state.error)
        count = itertools.count()

        def kept(u, p):
            keys = leaf_keys(seed, step, next(count), axis)
            x = fitting(p, u.dtype)
            return compressor.decode(compressor.encode(x, keys), x, keys)

        said = map_exchanged(kept, updates, wanted)
        unsaid = lambda e, p, s: left_over(p, precise(s))
        return said, SparsifiedState(map_leaves(unsaid, state.error, wanted, said))

    return by_shard(Exchange(lambda params: SparsifiedState(zeros(params)), update))


def lossless_homomorphic(
    density: float,
    *,
    slack: float | None = None,
    supports: str = "any",
    seed: int = 0,
    axis: Axis = AXIS,
) -> Exchange:
    r"""The mean of sparse trees by one sketch, whose entries are read back exactly.

    .. math::
        S_i = \text{sketch}(u_i), \quad b_i = [u_i \ne 0], \qquad
        x_i \leftarrow \tfrac1K \text{peel}\bigl(\textstyle\sum_j S_j,\,
        \bigvee_j b_j\bigr) = \tfrac1K \sum_j u_j

    The whole tree is one vector of ``n`` entries. ``density`` is the share of non-zeros
    in a worker's leaf, counted as by ``top_k``, so that it goes with
    ``sparsified(top_k(density))``. The sketch has ``slack`` buckets for each key of the
    *union* of the supports: ``supports="any"`` makes room for supports that do not
    overlap, ``min(n, K k)`` keys; ``"independent"`` for as many as independent ones
    have on average, ``n (1 − (1 − ρ)^K)``. ``slack=None`` takes 1.3 to 3, the more the
    fewer the keys.

    If keys are left (more of them than there is room for, or an unlucky draw of the
    hashes, which are drawn anew at each step) or a sum in the sketch is not finite, the
    tree is exchanged whole in a second all-reduce. So ``x`` is the mean whatever
    ``u`` is: exactly, bit for bit, where sums are exact, as of integers; else to about
    ten roundings of the largest entry. What is not finite is heard where it is.

    Sends the sketch by an all-reduce (float32), the bitmap ``⌈n/8⌉`` bytes united in an
    all-to-all and a gather (three workers and more: 2/K of what a gather alone would
    put on the links) or a gather, and 4 bytes to agree that nothing is left; the tree
    in addition where it is. Where all that would be no less than the tree, the tree
    instead. ``state.unpeeled`` and ``state.fallbacks`` say what happened. The shards of
    a worker that is a group of devices decide each for itself.

    Raises:
        ValueError: density outside (0, 1], slack below 1, an unknown ``supports``; at
            trace, complex leaves.

    Note:
        Hashes element by element (the released code hashes blocks, whose lanes are
        sketches of their own and fail more often) and sends the exact bitmap, no Bloom
        filter. In each round a bucket loses at most one key, so that replicas agree bit
        for bit wherever sums are formed in an order of their own, as on a GPU.

    Example:
        Four workers hold 1 % of the entries each, and 9.5 % of the bytes travel.

        >>> from lowcomm import spread, traffic
        >>> tx = lossless_homomorphic(0.01)
        >>> worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
        >>> g = jnp.zeros((4, 30_000)).at[jnp.arange(4), 7 * jnp.arange(4)].set(8.0)
        >>> bool((jax.jit(spread(worker))(g) == g.mean(0)).all())
        True
        >>> round(traffic(worker, g[0], workers=4).bytes_always / g[0].nbytes, 3)
        0.095

    References:
        Li et al., `Accelerating Distributed Deep Learning using Lossless Homomorphic
        Compression <https://arxiv.org/abs/2402.07529>`_, 2024.
    """
    random_k(density)  # raises unless it is a share
    if slack is not None and not slack >= 1:
        raise ValueError(f"slack {slack}: a key needs a bucket of its own, 1 or more.")
    if supports not in ("any", "independent"):
        raise ValueError(f'supports={supports!r}: there are "any" and "independent".')
    plan = lambda tree, workers: _plan(tree, workers, density, slack, supports)

    def init(params):
        none = lambda: vary(jnp.zeros((), jnp.int32), axis)
        return LosslessState(none(), none())

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
        admit_shrinking(updates, "lossless_homomorphic", axis, about, within)
        x, back = joined(updates, "lossless_homomorphic")
        columns = plan(updates, axis_size(axis))
        if columns is None:
            heard = back(reduce_mean(x, axis)) if x.size else updates
            return like(updates, heard), LosslessState(0 * state[0], state[1])
        key = leaf_keys(seed, uniform.now(step, axis), 0, axis).shared
        # Of more keys than buckets some are left, whichever they are.
        room = min(x.size, ROWS * columns)
        mine = pack(x != 0, 1)
        places, own = support(mine, room)
        values = jnp.where(jnp.arange(room) < own, x[places], 0)
        total = reduce_sum(sketch(values, places, key, ROWS, columns), axis)
        places, number = support(_union(mine, axis), room)
        values, left, _ = peel(total, places, number, key)
        unpeeled = left.sum(dtype=jnp.int32) + jnp.maximum(number - room, 0)
        # A key that is not finite spoils its neighbours: then nothing is known.
        unpeeled = jnp.where(jnp.isfinite(total).all(), unpeeled, number)
        # All workers have the same number, and this makes JAX know it.
        unpeeled = reduce_max(unpeeled, axis)

        def peeled(x, places, values):
            places = jnp.where(jnp.arange(room) < number, places, x.size)
            out = jnp.zeros_like(x).at[places].set(values, mode="drop")
            return out / axis_size(axis)

        whole = lambda x, places, values: reduce_mean(x, axis)
        heard = uniform.cond(unpeeled > 0, whole, peeled, x, places, values, axis=axis)
        fallbacks = state.fallbacks + (unpeeled > 0)
        state = LosslessState(vary(unpeeled, axis), vary(fallbacks, axis))
        return like(updates, back(heard)), state

    return by_shard(Exchange(init, update))


def lossless_bytes(
    params: PyTree,
    density: float,
    *,
    workers: int,
    slack: float | None = None,
    supports: str = "any",
) -> tuple[int, int]:
    """A worker's payload in one ``lossless_homomorphic``: always, and at a fallback."""
    whole = entries(params) * itemsize(params)
    columns = _plan(params, workers, density, slack, supports)
    if columns is None:
        return whole, 0
    return _sketch_bytes(params, columns, workers), whole


def _plan(tree, workers, density, slack, supports) -> int | None:
    """How many columns the sketch has; None if the tree should travel whole."""
    n = entries(tree)
    leaf = lambda x: jax.ShapeDtypeStruct((math.prod(jnp.shape(x)),), jnp.float32)
    leaves = [leaf(x) for x in jax.tree.leaves(tree) if takes_part(x)]
    each = payload_bytes(random_k(density), leaves) // 4  # as many as top_k chooses
    keys = min(n, workers * each)
    if n and supports == "independent":
        keys = math.ceil(n * (1 - (1 - each / n) ** workers))
    if slack is None:
        slack = next(s for least, s in _SLACK if keys >= least)
    columns = max(1, math.ceil(slack * keys / ROWS))
    smaller = _sketch_bytes(tree, columns, workers) < n * itemsize(tree)
    return columns if smaller else None


def _sketch_bytes(tree, columns: int, workers: int) -> int:
    bitmap = packed_bytes(entries(tree), 1)
    if workers > 2:
        rows = math.ceil(bitmap / workers)
        bitmap = workers * rows + rows
    return ROWS * columns * itemsize(tree) + bitmap + 4


def _union(bitmap: jax.Array, axis: Axis) -> jax.Array:
    """The bits that are set on some worker."""
    workers = axis_size(axis)
    if workers <= 2:
        return _either(gather(bitmap, axis))
    rows = jnp.pad(bitmap, (0, -bitmap.size % workers)).reshape(workers, -1)
    return gather(_either(swap(rows, axis)), axis).ravel()[: bitmap.size]


def _either(rows: jax.Array) -> jax.Array:
    return lax.reduce(rows, jnp.uint8(0), lax.bitwise_or, (0,))
