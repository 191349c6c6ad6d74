"""What travels instead of an array: pairs of functions that encode and decode.

A compressor ``C`` is local, stateless and works on one array. With
``C(x) = decode(encode(x))`` it declares one of two laws, over the draw of its keys:

.. math::
    E\\|C(x) - x\\|^2 \\le (1 - \\delta) \\|x\\|^2 \\quad\\text{(contraction)}, \\qquad
    E\\,C(x) = x,\\; E\\|C(x) - x\\|^2 \\le \\omega \\|x\\|^2 \\quad\\text{(unbiased)}.

Error feedback needs the first kind; averaging without a memory needs the second.

===============================  ================  =================  ================
factory, n elements              law               constant           payload bytes
===============================  ================  =================  ================
``top_k(f)``                     contraction       δ ≥ k/n            k (itemsize + 4)
``random_k(f)``                  contraction       δ ≥ 1/⌈n/k⌉        k itemsize
``random_k(f, unbiased=True)``   unbiased          ω ≤ ⌈n/k⌉ − 1      k itemsize
``sign()``                       contraction       δ = ‖x‖₁²/(n‖x‖²)  ⌈n/8⌉ + 4
``quantize(b, block=s)``         unbiased          ω ≤ (s − 1)/(4L²)  n b/8 + 4 ⌈n/s⌉
``quantize(stochastic=False)``   contraction       δ ≥ 1/s            n b/8 + 4 ⌈n/s⌉
===============================  ================  =================  ================

For all of them: zero is sent as zero; an array without elements sends nothing; payload
shapes depend on the array's shape alone; half precision is computed in float32 and
decoded to the type of ``like``; a NaN or infinity that enters is seen by whoever
decodes. Integers, booleans and keys are refused: exchanges leave such leaves alone.
"""

import math
import numbers
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .keys import Keys


class Compressor(NamedTuple):
    """How one array travels: ``encode`` what is sent, ``decode`` what was heard.

    - ``encode(x, keys, agreed=None) -> payload``: a pytree holding exactly the arrays
      that travel, with static shapes.
    - ``decode(payload, like, keys, agreed=None) -> array`` shaped and typed like
      ``like``, an array or a ``jax.ShapeDtypeStruct``. It uses ``keys.shared``, never
      ``keys.private``: what a seed determines is drawn again, not sent.
    - ``linear``: with equal ``keys.shared``, decoding the mean of payloads is the mean
      of the decoded, so payloads may be all-reduced.
    - ``statistic(x)``: one number, or one per block, whose maximum over the workers
      reaches both functions as ``agreed``; its bytes count.
    """

    encode: Callable[..., Any]
    decode: Callable[..., jax.Array]
    linear: bool = False
    statistic: Callable[[jax.Array], jax.Array] | None = None


def payload_bytes(compressor: Compressor, like: Any) -> int:
    """The bytes one worker sends for ``like``, without running anything.

    ``like`` is an array, a ``jax.ShapeDtypeStruct`` or a tree of them, of which the
    floating-point and complex leaves travel. A statistic counts. What a linear
    compressor sends is summed on the way, in float32 for half-precision leaves.

    Example:
        >>> weights = {"w": jax.ShapeDtypeStruct((256, 128), jnp.float32), "step": 3}
        >>> payload_bytes(top_k(0.01), weights)  # 328 values, 328 indices
        2624
        >>> payload_bytes(sign(), weights)  # 32768 bits and a scale
        4100
    """

    def travels(x):
        if compressor.linear:
            x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        keys = Keys(jax.random.key(0), jax.random.key(0))
        agreed = None if compressor.statistic is None else compressor.statistic(x)
        return compressor.encode(x, keys, agreed), agreed

    leaves = [x for x in jax.tree.leaves(like) if _is_inexact(x)]
    sent = jax.tree.leaves([jax.eval_shape(travels, x) for x in leaves])
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in sent)


def top_k(fraction: float) -> Compressor:
    r"""Send the entries of largest magnitude, with their places.

    .. math:: C(x)_i = x_i \text{ if } |x_i| \text{ is among the } k \text{ largest,
        else } 0, \qquad \|C(x) - x\|^2 \le (1 - k/n) \|x\|^2

    ``k`` is ``fraction`` times the number of elements ``n``, rounded to the nearest
    integer (halves up), at least 1 and at most ``n``. The fraction is read as the
    decimal number it prints as, so 0.1 of 30 is 3 and 0.285 of 100 is 29. Exactly ``k``
    entries travel: equal magnitudes go to the lowest index, and there is no threshold.

    Sent: ``k`` values in the array's own type and ``k`` int32 indices. Complex entries
    rank by modulus; NaN ranks first, then infinity. ``ValueError`` for a fraction
    outside (0, 1] and, at trace, for an array of more than 2³¹ − 1 elements.

    Example:
        >>> x = jnp.array([1.0, -4.0, 3.0, -3.0])
        >>> values, indices = payload = top_k(0.5).encode(x, None)
        >>> print(values, indices)
        [-4.  3.] [1 2]
        >>> print(top_k(0.5).decode(payload, x, None))
        [ 0. -4.  3.  0.]

    References:
        Stich, Cordonnier, Jaggi, `Sparsified SGD with Memory
        <https://arxiv.org/abs/1809.07599>`_, 2018, Definition 2.2.
    """
    share = _check_fraction(fraction)

    def encode(x, keys, agreed=None):
        # Widening keeps order and ties; on half precision lax.top_k is 20 times slower.
        _, indices = jax.lax.top_k(_widen(jnp.abs(x)), _entries(share, x.size))
        return x[indices], indices.astype(jnp.int32)

    def decode(payload, like, keys, agreed=None):
        values, indices = _widen(payload[0]), payload[1]
        return jnp.zeros(like.size, values.dtype).at[indices].set(values)

    return _on_any_shape("top_k", encode, decode, complex_too=True)


def random_k(fraction: float, *, unbiased: bool = False) -> Compressor:
    r"""Send one random entry of each of ``k`` blocks; the seed gives the places.

    The array is cut into ``k`` (as in :func:`top_k`) blocks of consecutive elements,
    their sizes differing by at most one. With ``s_i`` the size of the block of element
    ``i``, that element is drawn, from ``keys.shared``, with probability ``1 / s_i``:

    .. math::
        E\|C(x) - x\|^2 = \sum_i (1 - 1/s_i)\, x_i^2; \quad \text{unbiased:}\;
        E\,C(x) = x, \; E\|C(x) - x\|^2 = \sum_i (s_i - 1)\, x_i^2 .

    ``unbiased`` multiplies a decoded value by its block's size. Leave it off inside
    error feedback: with ``s_i`` of 2 and more it is no contraction, and the memory
    diverges. Sent: ``k`` values in the array's own type, no indices. Linear. Errors as
    in :func:`top_k`.

    Example:
        One of each pair is kept, the same on every worker that holds the shared key.

        >>> keys = Keys(jax.random.key(1), None)
        >>> x = jnp.array([1.0, 2.0, 3.0, 4.0])
        >>> payload = random_k(0.5).encode(x, keys)
        >>> kept = random_k(0.5).decode(payload, x, keys)
        >>> print(payload.shape, (kept.reshape(2, 2) != 0).sum(axis=1))
        (2,) [1 1]
        >>> bool(jnp.all((kept == 0) | (kept == x)))
        True

    References:
        Stich, Cordonnier, Jaggi, `Sparsified SGD with Memory
        <https://arxiv.org/abs/1809.07599>`_, 2018, Definition 2.2 (there uniform, which
        costs a permutation and has the same expected error when k divides n).
    """
    share = _check_fraction(fraction)

    def places(n, keys):
        # The first n mod k blocks are one longer. In this form nothing exceeds n, where
        # the usual floor(j * n / k) would overflow int32.
        k = _entries(share, n)
        short, longer = divmod(n, k)
        j = jnp.arange(k, dtype=jnp.int32)
        size = short + (j < longer).astype(jnp.int32)
        within = jax.random.randint(keys.shared, (k,), 0, size, dtype=jnp.int32)
        return j * short + jnp.minimum(j, longer) + within, size

    def encode(x, keys, agreed=None):
        return x[places(x.size, keys)[0]]

    def decode(payload, like, keys, agreed=None):
        indices, size = places(like.size, keys)
        # Scaled here and not in encode, so that float16 does not overflow on the way.
        values = _widen(payload)
        values = values * size.astype(values.dtype) if unbiased else values
        return jnp.zeros(like.size, values.dtype).at[indices].set(values)

    return _on_any_shape("random_k", encode, decode, complex_too=True, linear=True)


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

    return _on_any_shape("sign", encode, decode)


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
    come back exactly, so ``block=1`` is the identity. There is no floor under ``m``.

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
        # Padding with zeros raises no maximum of magnitudes.
        rows = jnp.pad(jnp.abs(x), (0, -x.size % width)).reshape(-1, width)
        scales = jnp.max(rows, axis=1)
        # Only the divisor is guarded: a NaN scale must travel.
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

    return _on_any_shape("quantize", encode, decode)


def _on_any_shape(name, encode_vector, decode_vector, *, complex_too=False, **fields):
    """The compressor of all shapes made from a pair for vectors with elements."""

    def encode(x, keys, agreed=None):
        _check_dtype(name, x, complex_too)
        return encode_vector(jnp.ravel(x), keys, agreed) if x.size else ()

    def decode(payload, like, keys, agreed=None):
        if math.prod(like.shape) == 0:
            return jnp.zeros(like.shape, like.dtype)
        flat = jax.ShapeDtypeStruct((math.prod(like.shape),), like.dtype)
        out = decode_vector(payload, flat, keys, agreed)
        return out.reshape(like.shape).astype(like.dtype)

    return Compressor(encode, decode, **fields)


def _widen(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _is_inexact(x):
    return jnp.issubdtype(getattr(x, "dtype", None) or type(x), jnp.inexact)


def _check_dtype(name, x, complex_too):
    if not _is_inexact(x) or (not complex_too and jnp.iscomplexobj(x)):
        raise ValueError(
            f"{name} takes {'real or complex' if complex_too else 'real'} "
            f"floating-point arrays, not {x.dtype}{list(x.shape)}: leave integers "
            "and keys out; send real and imaginary part on their own."
        )


def _check_fraction(fraction):
    number = isinstance(fraction, numbers.Real) and not isinstance(fraction, bool)
    if not (number and 0 < float(fraction) <= 1):
        raise ValueError(
            f"fraction={fraction!r}: give the share of entries to send, above 0 and at "
            "most 1 (0.01 sends one in a hundred, 1 sends all)."
        )
    return Fraction(repr(float(fraction)))


def _entries(share, n):
    """The number of entries that travel of ``n``."""
    if n >= 2**31:
        raise ValueError(
            f"{n} elements in one array are more than int32 indices reach "
            f"({2**31 - 1}): split the leaf along its leading axis."
        )
    return min(n, max(1, math.floor(share * n + Fraction(1, 2))))
