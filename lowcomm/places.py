r"""How the places of chosen entries travel: a few bits each, as many as pack well.

Sorted places of a whole array are cut into their low ``b`` bits, which travel as they
are, and the rest, which says in which segment of :math:`2^b` elements a place lies.
Sorted, that rest is known from how many places there are in each segment:

.. math:: \text{bytes} = k\, b / 8 + \lceil n / 2^b \rceil\, c,

with ``c`` the bytes of a count. The ``b`` that costs least, of the widths that pack
well, is known from ``n`` and ``k``; where one segment holds the array no counts travel,
and where all entries are chosen nothing does. This is Elias and Fano's code: 1 % of 2²²
entries take 12.4 bits each, a quarter 6, where no code can do with less than 8.1 and
3.2 on average.

Places within blocks of one size, with as many chosen in each, need no counts at all.

References:
    Elias, Efficient Storage and Retrieval by Content and Address of Static Files, 1974.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from .packing import WIDTHS, pack, packed_bytes, unpack, width_of


def pack_sorted(places: jax.Array, n: int) -> tuple[jax.Array, ...]:
    """``[k]`` ascending places below ``n``: their low bits and, if any, counts.

    All of it in bytes, so that what many arrays send is one buffer.

    Example:
        >>> low, counts = pack_sorted(jnp.array([0, 1, 2, 16, 17, 33, 38, 39]), 40)
        >>> print(counts)  # below 16, below 32, below 48
        [3 2 3]
        >>> print([hex(byte) for byte in low])  # the lower half of a byte comes first
        ['0x10', '0x2', '0x11', '0x76']
    """
    k = places.size
    if k == n:
        return ()
    bits = _bits(n, k)
    if bits == 32:
        return (_to_bytes(places.astype(jnp.uint32)),)
    low = _codes(places & (2**bits - 1), bits)
    if n <= 2**bits:
        return (low,)
    counts = jnp.zeros(_segments(n, bits), jnp.int32).at[places >> bits].add(1)
    return low, _to_bytes(counts.astype(_count_type(k, bits)))


def unpack_sorted(packed: tuple[jax.Array, ...], n: int, k: int) -> jax.Array:
    """The ``k`` int32 places of ``pack_sorted``."""
    if k == n:
        return jnp.arange(n, dtype=jnp.int32)
    bits = _bits(n, k)
    if bits == 32:
        return _from_bytes(packed[0], jnp.uint32).astype(jnp.int32)
    low = _places(packed[0], bits, k)
    if n <= 2**bits:
        return low
    segments = jnp.arange(_segments(n, bits), dtype=jnp.int32)
    counts = _from_bytes(packed[1], _count_type(k, bits)).astype(jnp.int32)
    return (jnp.repeat(segments, counts, total_repeat_length=k) << bits) | low


def pack_within(places: jax.Array, block: int) -> jax.Array:
    """Places in blocks of so many elements, each relative to its block."""
    return _codes(places, width_of(block))


def unpack_within(packed: jax.Array, block: int, k: int) -> jax.Array:
    """The ``k`` int32 places of ``pack_within``."""
    return _places(packed, width_of(block), k)


def _bits(n: int, k: int) -> int:
    """How many low bits make the fewest bytes."""

    def cost(bits):
        if bits == 32:
            return 4 * k
        counts = _segments(n, bits) if n > 2**bits else 0
        return packed_bytes(k, bits) + counts * jnp.dtype(_count_type(k, bits)).itemsize

    return min((*WIDTHS, 32), key=cost)


def _segments(n: int, bits: int) -> int:
    return math.ceil(n / 2**bits)


def _count_type(k: int, bits: int):
    """The narrowest type that holds how many places a segment may have."""
    most = min(k, 2**bits)
    return jnp.uint8 if most < 2**8 else jnp.uint16 if most < 2**16 else jnp.uint32


def _codes(places: jax.Array, bits: int) -> jax.Array:
    return _to_bytes(pack(places, bits))


def _places(packed: jax.Array, bits: int, k: int) -> jax.Array:
    codes = _from_bytes(packed, jnp.uint16) if bits == 16 else packed
    return unpack(codes, bits, k).astype(jnp.int32)


def _to_bytes(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8).ravel()


def _from_bytes(x: jax.Array, dtype) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(x if size == 1 else x.reshape(-1, size), dtype)
