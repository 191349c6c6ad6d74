"""Integers on a symmetric grid, 16, 8, 4 or 2 bits an entry, and a scale per block."""

from __future__ import annotations

import math

import jax.numpy as jnp

from .compressors import Compressor, Contraction, Unbiased, for_any_shape
from .grids import (
    at_random,
    check_block,
    in_blocks,
    in_units,
    largest,
    nearest,
    steps,
)
from .packing import pack, unpack

_WIDTHS = (16, 8, 4, 2)


def quantize(
    bits: int = 8, *, block: int | None = None, stochastic: bool = True
) -> Compressor:
    r"""Send integers on a symmetric grid that spans each block's largest magnitude.

    .. math:: u_i = L\, x_i / m, \qquad q_i = \lfloor u_i \rfloor + [r_i < p_i], \qquad
        C(x)_i = m\, q_i / L, \qquad
        E\|C(x) - x\|^2 = (m/L)^2 \sum_i p_i (1 - p_i)

    for each block with largest magnitude ``m``; ``L`` is 32767, 127, 7 or 1, ``p_i``
    the fractional part of ``u_i`` and ``r_i`` uniform on [0, 1) from ``keys.private``,
    so that :math:`E\,C(x) = x`. With ``stochastic=False``, ``q_i`` is the nearest
    integer, halves to even, and :math:`|C(x)_i - x_i| \le \min(|x_i|, m/2L)`. ``block``
    consecutive elements share a scale; None: all. Zeros and a block's largest entries
    come back exactly in float32, so ``block=1`` is the identity there. There is no
    floor under ``m``. For blocks of ``s`` elements, and attained by one entry beside
    equal ones,

    .. math:: \omega = \tfrac12 \sqrt{1 + (s - 1) / L^2} - \tfrac12, \qquad
        \delta = \frac{1}{1 + (s - 1) / 4L^2} \;\text{(nearest)} .

    Sent: int16 or int8 codes, or ``q_i + L`` in 4 or 2 bits, the first of each byte in
    its lowest bits, and a float32 ``m`` per block, the last of which may be shorter.
    NaN or infinity spoils its whole block, visibly. ``ValueError`` for other ``bits``
    and blocks, and at trace for complex arrays.

    Example:
        Blocks keep the small numbers from drowning beside the large ones.

        >>> x = jnp.array([100.0, 50.0, 0.01, -0.02])
        >>> whole, pairs = (quantize(block=b, stochastic=False) for b in (None, 2))
        >>> print(whole.decode(whole.encode(x, None), x, None)[2:])
        [0. 0.]
        >>> print(pairs.encode(x, None)[0])
        [ 127   64   64 -127]
        >>> four = quantize(4, stochastic=False)
        >>> print(four.encode(x, None)[0])  # 7, 4, 0 and 0, and 7 added to each
        [190 119]

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic, `QSGD: Communication-Efficient SGD via
        Gradient Quantization and Encoding <https://arxiv.org/abs/1610.02132>`_, 2017
        (its theory scales by the Euclidean norm, its experiments by the largest).
    """
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in _WIDTHS:
        raise ValueError(f"quantize: bits={bits!r}; there are 16, 8, 4 and 2.")
    check_block("quantize", block)
    top = 2 ** (bits - 1) - 1

    def encode(x, keys, agreed=None):
        rows = in_blocks(x.astype(jnp.float32), block)
        scales = largest(rows)
        # The clip is idle where division is correctly rounded; not all devices' is.
        u = jnp.clip(in_units(rows, scales) * top, -top, top)
        q = at_random(u, keys.private) if stochastic else nearest(u)
        q = q.ravel()[: x.size]
        if bits >= 8:
            return q.astype(jnp.int8 if bits == 8 else jnp.int16), scales
        # The mask: what comes of a NaN must not reach the neighbours in its byte.
        return pack(q + top & 2**bits - 1, bits), scales

    def decode(payload, like, keys, agreed=None):
        codes, scales = payload
        if bits < 8:
            codes = unpack(codes, bits, like.size).astype(jnp.int32) - top
        q = in_blocks(codes.astype(jnp.float32), block)
        m = scales[:, None]
        # L * (m / L) may miss m by an ulp.
        y = jnp.where(jnp.abs(q) == top, jnp.copysign(m, q), steps(q, scales, top))
        return y.ravel()[: like.size]

    def excess(n):  # of a block's entries beside the largest, in units of L²
        return (min(block or n, n) - 1) / top**2

    law = (
        Unbiased(lambda n: (math.sqrt(1 + excess(n)) - 1) / 2)
        if stochastic
        else Contraction(lambda n: 1 / (1 + excess(n) / 4))
    )
    return for_any_shape("quantize", encode, decode, law=law)
