"""Compressors that round every entry at random to one of few levels, right on average.

Their variance is what it costs: each declares the ω that holds for every array.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from .compressors import Compressor, Unbiased, for_any_shape
from .grids import at_random, check_block, in_blocks, in_units, largest, norms, steps
from .keys import random_bits
from .packing import pack, unpack, width_of


def ternary(clip: float | None = None) -> Compressor:
    r"""Send −1, 0 or 1 for each entry, in units of the largest of all workers.

    .. math:: C(x)_i = s \operatorname{sign}(x_i)\, b_i, \quad
        P(b_i = 1) = |x_i| / s, \qquad
        E\|C(x) - x\|^2 = s \|x\|_1 - \|x\|^2

    ``s`` is the largest magnitude in the array, on any worker (the statistic), so that
    the codes can be summed on the way. On its own ω ≤ (√n − 1)/2; of the arrays of K
    workers together, the sum of squared errors is at most (√(nK) − 1)/2 of their sum of
    squares. ``clip`` first moves what is beyond so many σ of the worker's array to
    there (the paper: 2.5). That makes ``s`` small, and the mean biased: an entry is
    :math:`(|x_i| - c \sigma)_+` too small, which of a Gaussian is 0.24 % of the energy
    at 2.5. No law is declared then; those above are about the clipped array.

    Sent: an int8 code per entry, wider where the sum over the workers needs it, and a
    float32 for the statistic. Linear: where codes are gathered instead, two bits would
    do, see :func:`qsgd`. NaN or infinity on one worker spoils the array, visibly.
    ``ValueError`` for a ``clip`` below 1 and, at trace, for complex arrays.

    Note:
        σ is the root mean square, which for gradients is their standard deviation.
        That of equal entries, or of a single one, is zero: nothing would be left.

    Example:
        >>> from lowcomm.keys import Keys
        >>> x = jnp.array([4.0, 0.0, -4.0])
        >>> c = ternary()
        >>> codes = c.encode(x, Keys(None, jax.random.key(0)), c.statistic(x))
        >>> print(codes, c.decode(codes, x, None, c.statistic(x)))
        [ 1  0 -1] [ 4.  0. -4.]

    References:
        Wen, Xu, Yan, Wu, Wang, Chen, Li, `TernGrad: Ternary Gradients to Reduce
        Communication in Distributed Deep Learning <https://arxiv.org/abs/1705.07878>`_,
        2017, Equations 1–3, 14 and 15.
    """
    number = isinstance(clip, int | float) and not isinstance(clip, bool)
    if clip is not None and not (number and 1 <= clip < math.inf):
        raise ValueError(
            f"ternary: clip={clip!r}; give a number of standard deviations, 1 or more, "
            "such as 2.5, or None."
        )

    def reach(x):
        """How large an entry may be, after clipping."""
        if clip is None:
            return largest(x)
        # Not the NaN that the norm has where the largest is infinite.
        return jnp.fmin(largest(x), clip / math.sqrt(x.size) * norms(x))

    def statistic(x):
        return reach(x.ravel().astype(jnp.float32)) if x.size else ()

    def encode(x, keys, agreed=None):
        x = x.astype(jnp.float32)
        if clip is not None:
            x = jnp.clip(x, -reach(x), reach(x))
        u = jnp.clip(in_units(x, jnp.asarray(agreed)), -1, 1)
        return at_random(u, keys.private).astype(jnp.int8)

    def decode(payload, like, keys, agreed=None):
        return payload.astype(jnp.float32) * agreed

    return for_any_shape(
        "ternary",
        encode,
        decode,
        linear=True,
        statistic=statistic,
        bound=1,
        law=Unbiased(lambda n: (math.sqrt(n) - 1) / 2) if clip is None else None,
    )


def qsgd(levels: int, *, block: int | None = 512) -> Compressor:
    r"""Send each entry's share of its block's norm, in so many levels.

    .. math:: u_i = s |x_i| / \|x\|, \qquad
        C(x)_i = \|x\| \operatorname{sign}(x_i) (\lfloor u_i \rfloor + [r_i < p_i]) / s,
        \qquad E\|C(x) - x\|^2 = \|x\|^2 \sum_i p_i (1 - p_i) / s^2

    for each ``block`` of ``d`` consecutive elements (None: all), with ``s`` the
    ``levels``, ``p_i`` the fractional part of ``u_i`` and ``r_i`` uniform on [0, 1)
    from ``keys.private``. ω ≤ √d/s − 1 where that is 1 or more, attained by equal
    entries, and d/4s² otherwise; with one level it is exactly ‖x‖₁/‖x‖₂ − 1. A memory
    wants ω below 1, so about as many levels as √d/2: ``error_feedback`` refuses fewer.

    Sent: ``2 s + 1`` values in the fewest of 2, 4, 8, 12 or 16 bits (``packing``) an
    entry, without the variable-length code of the paper, and a float32 norm per block.
    NaN or infinity spoils its block, visibly, and so does a norm beyond float32's
    range. ``ValueError`` for levels that are not an integer from 1 to 32767, for
    blocks, and at trace for complex arrays.

    Example:
        >>> from lowcomm import payload_bytes
        >>> from lowcomm.keys import Keys
        >>> payload_bytes(qsgd(7), jnp.zeros(4096))  # 4 bits each and 8 norms
        2080
        >>> x = jnp.array([0.0, 0.0, -3.0])  # alone, it is its norm
        >>> payload = qsgd(1).encode(x, Keys(None, jax.random.key(0)))
        >>> print(qsgd(1).decode(payload, x, None))
        [ 0.  0. -3.]

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic, `QSGD: Communication-Efficient SGD via
        Gradient Quantization and Encoding <https://arxiv.org/abs/1610.02132>`_, 2017,
        Section 3.1 and, for blocks, Section 4.
    """
    whole = isinstance(levels, int) and not isinstance(levels, bool)
    if not (whole and 1 <= levels <= 32767):
        raise ValueError(
            f"qsgd: levels={levels!r}; give an integer from 1 to 32767: 1 takes 2 bits "
            "an entry, up to 7 take 4, up to 127 take 8."
        )
    check_block("qsgd", block)
    bits = width_of(2 * levels + 1)

    def encode(x, keys, agreed=None):
        rows = in_blocks(x.astype(jnp.float32), block)
        scales = norms(rows)
        u = jnp.clip(in_units(rows, scales) * levels, -levels, levels)
        q = at_random(u, keys.private).ravel()[: x.size]
        # The mask: what comes of a NaN must not reach the neighbours in its byte.
        return pack(q + levels & 2**bits - 1, bits), scales

    def decode(payload, like, keys, agreed=None):
        codes, scales = payload
        q = unpack(codes, bits, like.size).astype(jnp.float32) - levels
        return steps(in_blocks(q, block), scales, levels).ravel()[: like.size]

    def omega(n):
        d = min(block or n, n)
        ratio = math.sqrt(d) / levels
        return ratio - 1 if ratio >= 2 else ratio**2 / 4

    return for_any_shape("qsgd", encode, decode, law=Unbiased(omega, always=True))


def natural() -> Compressor:
    r"""Send each entry rounded at random to one of the powers of two around it.

    .. math:: \text{for } |x| = 2^a (1 + p): \quad
        C(x) = \pm 2^a \text{ or, with probability } p, \pm 2^{a+1}, \qquad
        E (C(x) - x)^2 = \frac{p (1 - p)}{(1 + p)^2} x^2 \le x^2 / 8

    No scale is needed, and zero and powers of two are exact. Below 2⁻¹²⁶ there is only
    zero: subnormal numbers go to 0 or ±2⁻¹²⁶, right on average still. From 2¹²⁷ on
    there is only infinity, so what is finite there is rounded down.

    Sent: 9 bits an entry, the exponent as float32 has it (uint8) and the signs in
    ``⌈n/8⌉`` bytes, first element in the highest bit. Infinity stays, and NaN becomes
    infinity. ``ValueError`` at trace for complex arrays.

    Example:
        >>> from lowcomm.keys import Keys
        >>> x = jnp.array([4.0, -0.5, 0.0, 3.0])
        >>> exponents, signs = natural().encode(x, Keys(None, jax.random.key(1)))
        >>> print(exponents[:3], signs)  # 127 + 2, 127 - 1; 0100 0000
        [129 126   0] [64]

    References:
        Horváth, Ho, Horváth, Sahu, Canini, Richtárik, `Natural Compression for
        Distributed Deep Learning <https://arxiv.org/abs/1905.10988>`_, 2019,
        Definition 1 and Theorem 1.
    """

    def encode(x, keys, agreed=None):
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
        size = bits & np.uint32(0x7FFFFFFF)
        # The mantissa carries into the exponent as often as it is large.
        noise = random_bits(keys.private, x.size) >> 9
        last = np.uint32(254 << 23)  # beyond, a carry would make it infinite
        rounded = jnp.where(size < last, size + noise, size) >> 23
        return rounded.astype(jnp.uint8), jnp.packbits(bits >> 31)

    def decode(payload, like, keys, agreed=None):
        exponents, signs = payload
        signs = jnp.unpackbits(signs, count=like.size).astype(jnp.uint32)
        bits = signs << 31 | exponents.astype(jnp.uint32) << 23
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    return for_any_shape("natural", encode, decode, law=Unbiased(lambda n: 1 / 8))
