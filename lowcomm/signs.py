"""Compressors that send one bit for every entry."""

from __future__ import annotations

import jax.numpy as jnp

from .compressors import Compressor, Contraction, for_any_shape


def sign() -> Compressor:
    r"""Send one bit per element and the mean magnitude.

    .. math:: C(x) = \frac{\|x\|_1}{n} \operatorname{sign}(x), \qquad
        \|C(x) - x\|^2 = \|x\|^2 - \|x\|_1^2 / n

    A bit has no third value: zero counts as plus, so a zero beside non-zeros decodes to
    the scale, while an array of zeros has scale 0 and decodes to zeros. ``C`` commutes
    exactly with scaling by powers of two that stay within float32's normal range.

    Sent: ``⌈n/8⌉`` bytes (uint8, first element in the highest bit, the last byte filled
    up with zeros, which decoding drops) and one float32 scale. One NaN or infinity
    makes every decoded entry so, and so does a ``‖x‖₁`` beyond float32's range.
    ``ValueError`` at trace for complex arrays.

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

    return for_any_shape("sign", encode, decode, law=Contraction(lambda n: 1 / n))


def one_bit() -> Compressor:
    r"""Send one bit per element, and for each column what its two values stand for.

    .. math:: C(x)_i = m^+ \text{ if } x_i \ge 0, \text{ else } m^-, \qquad
        \|C(x) - x\|^2 = \|x\|^2 - n^+ (m^+)^2 - n^- (m^-)^2

    with :math:`m^\pm` the mean of a column's :math:`n^+` non-negative or :math:`n^-`
    negative entries. The column is one index of the last axis (all that leads to one
    output of a layer) of an array of two dimensions or more, else the whole array. Each
    column keeps its mean, and loses no more than under :func:`sign`, whose two values
    are one and its negative.

    Sent: ``⌈n/8⌉`` bytes, as in :func:`sign`, and two float32 per column, 0 for a kind
    it has none of: much for columns of few entries. NaN or infinity spoils its column,
    visibly, and so does a ``2 ‖x‖₁`` beyond float32's range. ``ValueError`` at trace
    for complex arrays.

    Example:
        >>> x = jnp.array([[1.0, 4.0], [3.0, -2.0], [-6.0, 0.0]])
        >>> payload = one_bit().encode(x, None)
        >>> print(payload[1])
        [[ 2.  2.]
         [-6. -2.]]
        >>> print(one_bit().decode(payload, x, None))
        [[ 2.  2.]
         [ 2. -2.]
         [-6.  2.]]

    References:
        Seide, Fu, Droppo, Li, Yu, `1-Bit Stochastic Gradient Descent and its
        Application to Data-Parallel Distributed Training of Speech DNNs
        <https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html>`_,
        2014, Section 3.
    """

    def columns(shape):
        return shape[-1] if len(shape) > 1 else 1

    def of(count):
        """The compressor of vectors that hold so many columns, entry by entry."""

        def encode(x, keys, agreed=None):
            x = x.astype(jnp.float32).reshape(-1, count)
            plus = x >= 0
            # Half of Σ|x| ± Σx: two such sums are several times faster on the CPU than
            # those of each kind, and miss by a rounding of Σ|x|. It is exactly 0 for a
            # kind there is none of.
            total, size = jnp.sum(x, axis=0), jnp.sum(jnp.abs(x), axis=0)
            sums = jnp.stack([size + total, total - size]) / 2
            count_plus = jnp.sum(plus, axis=0)
            counts = jnp.stack([count_plus, len(x) - count_plus])
            return jnp.packbits(plus.ravel()), sums / jnp.maximum(counts, 1)

        def decode(payload, like, keys, agreed=None):
            bits, (plus, minus) = payload
            bits = jnp.unpackbits(bits, count=like.size).reshape(-1, count)
            return jnp.where(bits == 1, plus, minus).ravel()

        return for_any_shape("one_bit", encode, decode)

    def encode(x, keys, agreed=None):
        return of(columns(x.shape)).encode(x, keys)

    def decode(payload, like, keys, agreed=None):
        return of(columns(like.shape)).decode(payload, like, keys)

    return Compressor(encode, decode, law=Contraction(lambda n: 1 / n))
