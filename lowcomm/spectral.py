"""Compressors that send the largest coefficients of a transform."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from .compressors import Compressor, Contraction, check_array
from .largest import largest
from .leaves import fitting, precise
from .places import pack_within, unpack_within


def dct_top_k(k: int = 32, *, chunk: int = 64) -> Compressor:
    r"""Send the ``k`` largest cosine coefficients of each chunk.

    .. math:: C(x) = D_1^\top\, \mathrm{top}_k(D_1\, x\, D_2^\top)\, D_2
        \quad\text{for each chunk } x \in R^{s_1 \times s_2}, \qquad
        \|C(x) - x\|^2 \le (1 - \min(1, k / s_1 s_2)) \|x\|^2

    ``D`` is the orthonormal DCT-II. The last two dimensions of an array are cut into
    chunks, their sides the largest divisors of the dimensions up to ``chunk``; leading
    dimensions are a batch, and a vector is a matrix of one row. So a dimension that is
    a prime above ``chunk`` has chunks of one entry, and is better padded. Chunks of at
    most ``k`` entries are sent whole, as coefficients. Equal magnitudes go to the
    lowest frequency, rows first.

    Sent, for each chunk: ``k`` coefficients in the array's own type, computed in
    float32, and their places in the chunk, in 12 bits for 64 × 64: 176 bytes of 16384
    by default. A coefficient is up to ``√(s₁ s₂)`` times as large as the entries, and
    in float16, whose largest number is 65504, it is clipped: 64 × 64 entries of 2000
    come back as 1023.5, and no law holds beyond 1023 unless a memory sends the rest
    later. Bfloat16 reaches as far as float32. A NaN or infinity spoils its
    chunk, visibly. The declared law holds for every shape: δ by a chunk of
    ``chunk × chunk``, or the whole array if that is smaller.

    Raises:
        ValueError: ``k`` below 1 or a chunk outside 1 … 256; at trace, complex arrays
            and arrays of more than 2³¹ − 1 elements.

    Note:
        Places travel in 12 bits for chunks of 64 × 64, where the released code of the
        paper sends 64-bit integers.

    Example:
        A smooth matrix is known from few of its coefficients.

        >>> x = jnp.cos(jnp.arange(32.0) / 4)[:, None] * jnp.arange(32)
        >>> for k in (1, 4, 16):
        ...     c = dct_top_k(k)
        ...     error = c.decode(c.encode(x, None), x, None) - x
        ...     print(f"{jnp.sum(error**2) / jnp.sum(x**2):.3f}")
        0.607
        0.157
        0.004

    References:
        Peng, Quesnelle, Kingma, `DeMo: Decoupled Momentum Optimization
        <https://arxiv.org/abs/2411.19870>`_, 2024, Algorithm 1.
    """
    _check_whole("k", k, 2**31)
    _check_whole("chunk", chunk, 256)

    def encode(x, keys, agreed=None):
        check_array("dct_top_k", x)
        if x.size == 0:
            return ()
        coefficients = _cosines(precise(x), chunk)
        places = largest(coefficients, min(k, coefficients.shape[1]))
        values = jnp.take_along_axis(coefficients, places, axis=1)
        sent = fitting(values.ravel(), x.dtype)
        size = coefficients.shape[1]
        return sent, (pack_within(places.ravel(), size),) if size > k else ()

    def decode(payload, like, keys, agreed=None):
        total = math.prod(like.shape)
        if total == 0:
            return jnp.zeros(like.shape, like.dtype)
        values, packed = precise(payload[0]), payload[1]
        size = math.prod(_sides(like.shape, chunk))
        if packed:
            places = unpack_within(packed[0], size, values.size)
            first = jnp.arange(0, total, size, dtype=jnp.int32)
            values = (
                jnp.zeros(total, values.dtype)
                .at[jnp.repeat(first, k) + places]
                .set(values, indices_are_sorted=True, unique_indices=True)
            )
        return fitting(_from_cosines(values, like.shape, chunk), like.dtype)

    law = Contraction(lambda n: min(1.0, k / min(n, chunk**2)))
    return Compressor(encode, decode, law=law)


def _sides(shape: tuple[int, ...], chunk: int) -> tuple[int, int]:
    """The sides of a chunk of the last two dimensions."""
    divisor = lambda n: max(s for s in range(1, min(n, chunk) + 1) if n % s == 0)
    rows, columns = (1, 1, *shape)[-2:]
    return divisor(rows), divisor(columns)


def _cosines(x: jax.Array, chunk: int) -> jax.Array:
    """``[chunks, entries of a chunk]``: its coefficients."""
    s, t = _sides(x.shape, chunk)
    rows, columns = (1, 1, *x.shape)[-2:]
    cut = x.reshape(-1, rows // s, s, columns // t, t)
    sides = (jnp.asarray(_matrix(n), x.dtype) for n in (s, t))
    out = jnp.einsum("zapbq,ip,jq->zabij", cut, *sides, precision="highest")
    return out.reshape(-1, s * t)


def _from_cosines(values: jax.Array, shape: tuple[int, ...], chunk: int) -> jax.Array:
    """The array of these coefficients, chunk after chunk."""
    s, t = _sides(shape, chunk)
    rows, columns = (1, 1, *shape)[-2:]
    cut = values.reshape(-1, rows // s, columns // t, s, t)
    sides = (jnp.asarray(_matrix(n), values.dtype) for n in (s, t))
    out = jnp.einsum("zabij,ip,jq->zapbq", cut, *sides, precision="highest")
    return out.reshape(shape)


def _matrix(n: int) -> np.ndarray:
    """The orthonormal DCT-II of ``n`` samples, a row for each frequency."""
    frequency, sample = np.arange(n)[:, None], np.arange(n)
    d = np.sqrt(2 / n) * np.cos(np.pi * frequency * (2 * sample + 1) / (2 * n))
    d[0] /= np.sqrt(2)
    return d


def _check_whole(name, value, most):
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and 1 <= value <= most):
        raise ValueError(
            f"dct_top_k: {name}={value!r}; give a whole number from 1 to {most}."
        )
