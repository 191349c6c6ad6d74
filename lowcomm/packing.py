"""Small integers side by side in bytes: what low-bit formats look like on the wire.

Codes of 1, 2, 4 or 8 bits fill a byte from its lowest bits on; two codes of 12 bits
fill three bytes; codes of 16 bits are uint16. What is left of the last byte is zero.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

WIDTHS = (1, 2, 4, 8, 12, 16)
_WIDE = {4: jnp.uint16, 2: jnp.uint32}


def width_of(values: int) -> int:
    """The fewest bits, of those there are, for codes from 0 to ``values - 1``."""
    for bits in WIDTHS:
        if values <= 2**bits:
            return bits
    raise ValueError(f"{values} values do not fit 16 bits.")


def packed_bytes(n: int, bits: int) -> int:
    """The bytes of ``n`` codes of so many bits."""
    return math.ceil(n * bits / 8)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """``[n]`` codes below ``2**bits`` as ``packed_bytes(n, bits)`` bytes.

    uint8, or uint16 for 16 bits.

    Example:
        >>> print(pack(jnp.array([1, 2, 15]), 4))  # 0x21, 0x0f
        [33 15]
    """
    _check(bits)
    if bits in (8, 16):
        return codes.astype(jnp.uint8 if bits == 8 else jnp.uint16)
    if bits == 12:
        low, high = _columns(codes.astype(jnp.uint16), 2)
        three = (low & 0xFF, low >> 8 | (high & 0xF) << 4, high >> 4)
        three = jnp.stack([x.astype(jnp.uint8) for x in three], axis=1)
        return three.ravel()[: packed_bytes(codes.size, 12)]
    if bits == 1:
        return jnp.packbits(codes, bitorder="little")
    # The codes of a byte as one wide number, each code in a byte of its own: on the CPU
    # several times faster than every second or fourth entry.
    count = 8 // bits
    rows = jnp.pad(codes.astype(jnp.uint8), (0, -codes.size % count))
    wide = jax.lax.bitcast_convert_type(rows.reshape(-1, count), _WIDE[bits])
    shifted = [wide >> i * (8 - bits) for i in range(count)]
    return functools.reduce(jnp.bitwise_or, shifted).astype(jnp.uint8)


def unpack(packed: jax.Array, bits: int, n: int) -> jax.Array:
    """The ``n`` codes of ``pack``: uint8, uint16 where they have more than 8 bits."""
    _check(bits)
    if bits in (8, 16):
        return packed[:n]
    if bits == 12:
        low, middle, high = _columns(packed.astype(jnp.uint16), 3)
        two = (low | (middle & 0xF) << 8, middle >> 4 | high << 4)
        return jnp.stack(two, axis=1).ravel()[:n]
    places = np.arange(0, 8, bits, dtype=np.uint8)
    return (packed[:, None] >> places & np.uint8(2**bits - 1)).ravel()[:n]


def _columns(x: jax.Array, number: int) -> list[jax.Array]:
    """Every ``number``-th entry of ``x``, beginning with the first, the second …"""
    rows = jnp.pad(x, (0, -x.size % number)).reshape(-1, number)
    return [rows[:, i] for i in range(number)]


def _check(bits: int) -> None:
    if bits not in WIDTHS:
        raise ValueError(f"bits={bits}: codes have {', '.join(map(str, WIDTHS))} bits.")
