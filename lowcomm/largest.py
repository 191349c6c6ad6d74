r"""Which entries are the largest: exactly ``k`` of them, in the order of their places.

A large row is first narrowed. Cut into blocks of about ``√(n/k)`` entries, the ``k``
blocks with the largest maxima hold the ``k`` largest entries: were one of these in
another block, ``k`` entries, the maxima of those blocks, would come before it. This
holds for the strict order "larger, and of equals the one with the lower place", so the
selection stays exact on ties. Of ``n`` numbers then only ``2 √(k n)`` are ranked.

Of many numbers the smallest that still belongs is found bit by bit, by counting how
many are at least as large, and the chosen are collected by cumulative sums. That takes
31 short passes whatever ``k`` is; ``lax.top_k``, which keeps a heap on a CPU, does
better for small ``k``, and compiles faster. (1 % of 2²² float32 there, whole or in
blocks of 1024 or 4096: about a third of its time for the whole.)
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from .leaves import precise
from .spmd import vary_with

_WORTH_NARROWING = 2**16  # entries
_FEW = 2**14
_SMALL_HEAP = 16


def largest(x: jax.Array, k: int) -> jax.Array:
    """``[rows, k]`` int32: places of the largest magnitudes of each row, ascending.

    ``x`` is ``[rows, n]``, real or complex, and ``k`` from 1 to ``n``. Equal magnitudes
    go to the lowest place; NaN ranks first, then infinity.

    Example:
        >>> print(largest(jnp.array([[1.0, -4.0, 3.0, -3.0]]), 2))
        [[1 2]]
    """
    rows, n = x.shape
    if k == n:
        return jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (rows, n))
    ranks = _ranks(x)
    width = 1 << (math.isqrt(n // k).bit_length() - 1)
    if width < 4 or x.size < _WORTH_NARROWING:
        return _select(ranks, k)
    # Zeros at the end are behind all others, of which there are at least k.
    blocks = jnp.pad(ranks, ((0, 0), (0, -n % width))).reshape(rows, -1, width)
    chosen = _select(jnp.max(blocks, axis=2), k)
    near = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)
    within = _select(near.reshape(rows, k * width), k)
    block = jnp.take_along_axis(chosen, within // width, axis=1)
    return block * width + within % width


def _ranks(x: jax.Array) -> jax.Array:
    """Integers ordered as the magnitudes: the bits of a float that is not negative."""
    # A maximum of integers loses no NaN, as that of floats does on XLA's CPU backend.
    size = precise(jnp.abs(x))
    return lax.bitcast_convert_type(size, _integers(size))


def _integers(x: jax.Array):
    return jnp.int32 if x.dtype.itemsize == 4 else jnp.int64


def _select(ranks: jax.Array, k: int) -> jax.Array:
    """As ``largest``, of ranks."""
    if k <= _SMALL_HEAP or ranks.size < _FEW:
        kind = jnp.float32 if ranks.dtype.itemsize == 4 else jnp.float64
        # Of floats, because lax.top_k of integers is 20 times slower.
        _, places = lax.top_k(lax.bitcast_convert_type(ranks, kind), k)
        return jnp.sort(places.astype(jnp.int32), axis=1)
    bound = _kth_largest(ranks, k)[:, None]
    above, before = _so_far(ranks > bound), _so_far(ranks == bound)
    wanted = k - above[:, -1:]  # of those equal to the bound
    taken = (ranks > bound) | ((ranks == bound) & (before <= wanted))
    target = jnp.where(taken, above + jnp.minimum(before, wanted) - 1, k)
    rows, n = ranks.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    place = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (rows, n))
    out = jnp.zeros((rows, k), jnp.int32)
    return out.at[row, target].set(place, mode="drop")


def _so_far(mask: jax.Array) -> jax.Array:
    return jnp.cumsum(mask, axis=1, dtype=jnp.int32)


def _kth_largest(ranks: jax.Array, k: int) -> jax.Array:
    """``[rows]``: the largest number that ``k`` of a row's reach, its bits in turn."""
    bits = 8 * ranks.dtype.itemsize - 1

    def settle(i, found):
        tried = found | jnp.asarray(1, ranks.dtype) << (bits - 1 - i).astype(
            ranks.dtype
        )
        reached = jnp.sum(ranks >= tried[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(reached >= k, tried, found)

    start = vary_with(jnp.zeros(ranks.shape[0], ranks.dtype), ranks, axis=())
    return lax.fori_loop(0, bits, settle, start)
