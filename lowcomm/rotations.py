r"""Random rotations: entries of any array become as good as Gaussian, and small.

A vector is cut into blocks of a power of two, the last filled up with zeros, and each
is multiplied by :math:`H D / \sqrt{B}`: random signs on the diagonal of ``D``, and the
Walsh–Hadamard matrix ``H`` of ±1, in :math:`B \log_2 B` additions. Norms stay. Of a
block of norm ``‖x‖`` each rotated entry has the variance :math:`\|x\|^2 / B`, however
the norm was distributed over the block.

Sums and differences only: every backend computes the same bits.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from .keys import random_bits

LARGEST = 4096  # elements of a block


def block_of(n: int) -> int:
    """The length of the blocks for ``n`` elements: a power of two, at most 4096."""
    return min(LARGEST, 2 ** math.ceil(math.log2(max(n, 1))))


def blocks(x: jax.Array) -> jax.Array:
    """``[n]`` as ``[blocks, length]``, filled up with zeros."""
    length = block_of(x.size)
    return jnp.pad(x, (0, -x.size % length)).reshape(-1, length)


def rotate(rows: jax.Array, key: jax.Array) -> jax.Array:
    """Each row rotated, by signs of its own."""
    return hadamard(rows * _signs(rows, key)) / math.sqrt(rows.shape[1])


def rotate_back(rows: jax.Array, key: jax.Array) -> jax.Array:
    """The inverse of ``rotate``.

    Example:
        >>> key, x = jax.random.key(0), jnp.array([[1.0, 2.0, 6.0, -3.0]])
        >>> print(jnp.sum(rotate(x, key) ** 2), rotate_back(rotate(x, key), key))
        50.0 [[ 1.  2.  6. -3.]]
    """
    return hadamard(rows) * _signs(rows, key) / math.sqrt(rows.shape[1])


def hadamard(rows: jax.Array) -> jax.Array:
    """Each row times the Walsh–Hadamard matrix, in natural order."""
    shape, step = rows.shape, 1
    while step < shape[1]:
        pairs = rows.reshape(-1, 2, step)
        a, b = pairs[:, 0], pairs[:, 1]
        rows = jnp.stack([a + b, a - b], axis=1)
        step *= 2
    return rows.reshape(shape)


def _signs(rows: jax.Array, key: jax.Array) -> jax.Array:
    bits = random_bits(key, rows.size).reshape(rows.shape)
    return 1 - 2 * (bits >> 31).astype(rows.dtype)
