"""Randomness that is a function of (seed, step, leaf, worker); none is kept in state.

What a shared key determines need not be sent: every worker draws it again. A key for a
leaf is folded by JAX's threefry; what is drawn for its entries is a hash of the key and
the entry's number (``random_bits``), which costs a few integer operations an entry.
"""

from __future__ import annotations

import contextlib
import contextvars
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .spmd import Axis, names, worker_index

_SHARD: contextvars.ContextVar[Any] = contextvars.ContextVar("shard", default=None)


class Keys(NamedTuple):
    """Randomness of one leaf at one step."""

    shared: jax.Array  # equal on all workers
    private: Any  # another one on each worker along the axis; None for who decodes


@contextlib.contextmanager
def of_shard(number: Any) -> Iterator[None]:
    """Within, keys are those of a shard of a leaf: others for every ``number``."""
    token = _SHARD.set(number)
    try:
        yield
    finally:
        _SHARD.reset(token)


def leaf_keys(seed: int, step: Any, leaf: int, axis: Axis) -> Keys:
    """The keys of leaf number ``leaf`` at ``step``; nothing is kept in state.

    Others along every axis: the levels of a hierarchy with one seed must not draw
    alike, or an unbiased compressor of what an unbiased one decoded would be biased.
    """
    fold = jax.random.fold_in
    at_step = fold(jax.random.key(seed), step)
    at_step = fold(at_step, zlib.crc32(",".join(names(axis)).encode()))
    if (shard := _SHARD.get()) is not None:
        at_step = fold(at_step, shard)
    shared, private = (fold(fold(at_step, kind), leaf) for kind in (0, 1))
    return Keys(shared, fold(private, worker_index(axis)))


def random_bits(key: jax.Array, n: int, *, stream: int = 0) -> jax.Array:
    """``n`` uint32 that look random: a hash of the key and of the entry's number.

    Two multiplications and three shifts an entry, with one half of the key added before
    and the other mixed in between: enough for rounding, selecting and hashing, and no
    cryptography. ``stream`` gives others of the same key.

    Example:
        >>> bits = random_bits(jax.random.key(0), 4096)
        >>> ones = float(jnp.mean(bits >> 31))
        >>> abs(ones - 0.5) < 4 * 0.5 / 64, len(set(map(int, bits)))
        (True, 4096)
    """
    return hashed(key, jnp.arange(n, dtype=jnp.uint32), stream=stream)


def hashed(key: jax.Array, numbers: jax.Array, *, stream: int = 0) -> jax.Array:
    """What ``random_bits`` has at the places ``numbers`` (uint32)."""
    words = jax.random.key_data(key).astype(jnp.uint32).ravel()
    # Keys of neighbouring seeds differ in one bit: these two, once a key, in many.
    second = _mixed(words[-1] + np.uint32(stream * 0x85EBCA6B % 2**32), 0x6A09E667)
    first = _mixed(words[0], second)
    return _mixed(numbers * np.uint32(0x9E3779B9) + first, second)


def _mixed(x: jax.Array, other: Any) -> jax.Array:
    """uint32 for uint32, one to one, in which each bit depends on all."""
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD) ^ other
    x = (x ^ (x >> 15)) * np.uint32(0x735A2D97)
    return x ^ (x >> 15)


def uniform_floats(key: jax.Array, n: int, *, stream: int = 0) -> jax.Array:
    """``n`` float32 on [0, 1), multiples of 2⁻²⁴, from ``random_bits``."""
    bits = random_bits(key, n, stream=stream)
    return (bits >> 8).astype(jnp.float32) * np.float32(2**-24)
