"""Blocks of entries on a grid: their scales, and how entries become integers.

A vector is cut into blocks of consecutive entries, ``[blocks, block]``, each with a
scale of its own; in units of it the entries are rounded, to the nearest integer or at
random. What is not finite makes the scale of its block infinite or NaN, so that whoever
decodes sees it in every entry of the block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .keys import random_bits


def in_blocks(x: jax.Array, block: int | None) -> jax.Array:
    """``[blocks, block]``, the last filled up with zeros; None is one block of all."""
    width = min(block or x.size, x.size)
    whole = x.size // width * width
    rows = x[:whole].reshape(-1, width)
    if whole == x.size:
        return rows
    # On the CPU a padded vector is four times slower to work on than a padded row.
    rest = jnp.pad(x[whole:], (0, -x.size % width))
    return jnp.concatenate([rows, rest[None]])


def largest(rows: jax.Array) -> jax.Array:
    """The largest magnitude of each row; infinite where an entry is not finite."""
    # XLA's CPU backend loses a NaN in the maximum of 4096 entries or more, and with it
    # what came before. The sum, in the same loop, is 0 or NaN.
    finite = jnp.sum(rows * 0, axis=-1) == 0
    return jnp.where(finite, jnp.max(jnp.abs(rows), axis=-1), jnp.inf)


def norms(rows: jax.Array) -> jax.Array:
    """The Euclidean norm of each row, though its square may leave float32's range."""
    most = largest(rows)
    return most * jnp.sqrt(jnp.sum(jnp.square(in_units(rows, most)), axis=-1))


def root_mean_squares(rows: jax.Array, n: int) -> jax.Array:
    """The root of each row's mean square, of which the last row may be shorter."""
    blocks, width = rows.shape
    counts = np.minimum(width, n - width * np.arange(blocks))
    return norms(rows) / jnp.asarray(np.sqrt(counts), jnp.float32)


def in_units(rows: jax.Array, scales: jax.Array) -> jax.Array:
    """``rows`` in units of their scales; where the scale is zero, zeros.

    What is as large as the scale is 1 unit, or an ulp more: clip it.
    """
    # A reciprocal for each row (XLA divides by multiplying with it), of a number below
    # 2¹²⁶: beyond it is subnormal, which on a CPU is zero.
    down = jnp.where(scales > 2.0**100, 2.0**-64, 1).astype(rows.dtype)
    # Only the divisor is guarded: an infinite scale must travel.
    divisor = jnp.where(scales == 0, 1, scales * down)
    unit = 1 / divisor
    # Of one number in seven the product with its reciprocal is an ulp below 1.
    unit = jnp.where(divisor * unit < 1, unit * np.float32(1 + 2**-23), unit)
    return rows * down[..., None] * unit[..., None]


def steps(q: jax.Array, scales: jax.Array, top: int) -> jax.Array:
    """``scales · q / top`` for each row, also where a single step is subnormal."""
    # In which order three factors are multiplied is the compiler's choice.
    small = scales < 2.0**-60
    up, down = (jnp.where(small, by, np.float32(1)) for by in (2.0**64, 2.0**-64))
    return q * (scales * up / top)[..., None] * down[..., None]


def nearest(u: jax.Array) -> jax.Array:
    """The nearest integer below 2²² in magnitude, halves to even, as int32."""
    # Float32 has no fractions beside 1.5 · 2²³, and the integer is in its lowest bits:
    # half the time of a rounding and a conversion.
    shift = np.float32(1.5 * 2**23)
    moved = jax.lax.bitcast_convert_type(u + shift, jnp.int32)
    return moved - shift.view(np.int32)


def at_random(u: jax.Array, key: jax.Array) -> jax.Array:
    """One of the two integers around ``u``, which it is on average, as int32.

    An integer stays what it is, and ``-u`` becomes the negative. Probabilities are off
    by a relative 2⁻²⁴ and by less than 2⁻³¹, the resolution of what is drawn.
    """
    # By magnitude: of a small negative number the distance to −1 is 1 in float32.
    toward = u.astype(jnp.int32)
    over = jnp.abs(u - toward.astype(u.dtype))
    # Conversions of signed integers are several times faster than of unsigned ones.
    bits = (random_bits(key, u.size) >> 1).astype(jnp.int32).reshape(u.shape)
    away = bits.astype(jnp.float32) < over * np.float32(2**31)
    sign = jax.lax.bitcast_convert_type(u, jnp.int32) >> 31 | 1
    return toward + jnp.where(away, sign, 0)


def check_block(name: str, block: Any) -> None:
    """Raise unless ``block`` is None or a number of entries."""
    whole = isinstance(block, int) and not isinstance(block, bool)
    if block is not None and not (whole and block >= 1):
        raise ValueError(
            f"{name}: block={block!r}; give how many elements share a scale, 1 or "
            "more, or None for all."
        )
