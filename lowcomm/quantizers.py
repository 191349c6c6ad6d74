"""Compressors that send every entry in fewer bits."""

import jax
import jax.numpy as jnp

from .compressors import Compressor, for_any_shape


def sign() -> Compressor:
    r"""Send one bit per element and the mean magnitude.

    .. math:: C(x) = \frac{\|x\|_1}{n} \operatorname{sign}(x), \qquad
        \|C(x) - x\|^2 = \|x\|^2 - \|x\|_1^2 / n

    A bit has no third value: zero counts as plus, so a zero beside non-zeros decodes to
    the scale, while an array of zeros has scale 0 and decodes to zeros. ``C`` commutes
    exactly with scaling by powers of two that stay within float32's normal range.

    Sent: ``⌈n/8⌉`` bytes (uint8, first element in the highest bit, the last byte filled
    up with zeros, which decoding drops) and one float32 scale. One NaN or infinity
    makes every decoded entry so. ``ValueError`` at trace for complex arrays.

    Example:
        >>> x = jnp.array([3.0, -1.0, 0.0, -4.0])
        >>> bits, scale = payload = sign().encode(x, None)
        >>> print(bits, scale)  # the bits are 1010 0000
        [160] 2.0
        >>> print(sign().decode(payload, x, None))
        [ 2. -2.  2. -2.]

    References:
        Karimireddy, Rebjock, Stich, Jaggi, `Error Feedback Fixes SignSGD and other
        Gradient Compression Schemes <https://arxiv.org/abs/1901.09847>`_, 2019,
        Algorithm 1.
    """

    def encode(x, keys, agreed=None):
        x = x.astype(jnp.float32)
        return jnp.packbits(x >= 0), jnp.mean(jnp.abs(x))

    def decode(payload, like, keys, agreed=None):
        bits, scale = payload
        return jnp.where(jnp.unpackbits(bits, count=like.size) == 1, scale, -scale)

    return for_any_shape("sign", encode, decode)


def quantize(
    bits: int = 8, *, block: int | None = None, stochastic: bool = True
) -> Compressor:
    r"""Send integers on a symmetric grid that spans each block's largest magnitude.

    .. math:: u_i = L\, x_i / m, \qquad q_i = \lfloor u_i \rfloor + [r_i < p_i], \qquad
        C(x)_i = m\, q_i / L, \qquad
        E\|C(x) - x\|^2 = (m/L)^2 \sum_i p_i (1 - p_i)

    for each block with largest magnitude ``m``; ``L`` is 127 or 32767, ``p_i`` the
    fractional part of ``u_i`` and ``r_i`` uniform on [0, 1) from ``keys.private``, so
    that :math:`E\,C(x) = x`. With ``stochastic=False``, ``q_i`` is the nearest integer,
    halves to even, and :math:`|C(x)_i - x_i| \le \min(|x_i|, m/2L)`. ``block``
    consecutive elements share a scale; None: all. Zeros and a block's largest entries
    come back exactly in float32, so ``block=1`` is the identity there. There is no
    floor under ``m``.

    Sent: an int8 or int16 code per element and a float32 ``m`` per block, the last of
    which may be shorter; no padding. NaN or infinity spoils its whole block, visibly.
    ``ValueError`` for other ``bits`` and blocks, and at trace for complex arrays.

    Example:
        Blocks keep the small numbers from drowning beside the large ones.

        >>> x = jnp.array([100.0, 50.0, 0.01, -0.02])
        >>> whole, pairs = (quantize(block=b, stochastic=False) for b in (None, 2))
        >>> print(whole.decode(whole.encode(x, None), x, None)[2:])
        [0. 0.]
        >>> print(pairs.encode(x, None)[0])
        [ 127   64   64 -127]

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic, `QSGD: Communication-Efficient SGD via
        Gradient Quantization and Encoding <https://arxiv.org/abs/1610.02132>`_, 2017
        (its theory scales by the Euclidean norm, its experiments by the largest).
    """
    if not isinstance(bits, int) or bits not in (8, 16):
        raise ValueError(f"quantize: bits={bits!r}; there are 8 (int8) and 16 (int16).")
    whole = isinstance(block, int) and not isinstance(block, bool)
    if block is not None and not (whole and block >= 1):
        raise ValueError(
            f"quantize: block={block!r}; give how many elements share a scale, 1 or "
            "more, or None for all."
        )
    top = 2 ** (bits - 1) - 1
    code = jnp.int8 if bits == 8 else jnp.int16

    def per_element(scales, n):
        return jnp.repeat(scales, min(block or n, n))[:n]

    def encode(x, keys, agreed=None):
        x = x.astype(jnp.float32)
        width = min(block or x.size, x.size)
        # XLA's CPU backend loses a NaN in the maximum of 4096 entries or more.
        size = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))
        # Padding with zeros raises no maximum of magnitudes.
        rows = jnp.pad(size, (0, -x.size % width)).reshape(-1, width)
        scales = jnp.max(rows, axis=1)
        # Only the divisor is guarded: an infinite scale must travel.
        divisor = per_element(jnp.where(scales == 0, 1, scales), x.size)
        # The clip is idle where division is correctly rounded; not all devices' is.
        u = jnp.clip(x / divisor * top, -top, top)
        if not stochastic:
            return jnp.round(u).astype(code), scales
        # floor(u + r) may round up to L + 1 and wrap; here u = L has p = 0.
        down = jnp.floor(u)
        up = jax.random.uniform(keys.private, u.shape, jnp.float32) < u - down
        return (down + up).astype(code), scales

    def decode(payload, like, keys, agreed=None):
        q, m = payload[0].astype(jnp.float32), per_element(payload[1], like.size)
        # L * (m / L) may miss m by an ulp, and the compiler reorders (q / L) * m.
        inner = q * per_element(payload[1] / top, like.size)
        return jnp.where(jnp.abs(q) == top, jnp.copysign(m, q), inner)

    return for_any_shape("quantize", encode, decode)
