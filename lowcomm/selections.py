"""Compressors that send some entries and leave out the others."""

import math
import numbers
from fractions import Fraction

import jax
import jax.numpy as jnp

from .compressors import Compressor, for_any_shape
from .leaves import precise


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
        _, indices = jax.lax.top_k(precise(jnp.abs(x)), _entries(share, x.size))
        return x[indices], indices.astype(jnp.int32)

    def decode(payload, like, keys, agreed=None):
        values, indices = precise(payload[0]), payload[1]
        return jnp.zeros(like.size, values.dtype).at[indices].set(values)

    return for_any_shape("top_k", encode, decode, complex_too=True)


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

        >>> from lowcomm.keys import Keys
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
        values = precise(payload)
        values = values * size.astype(values.dtype) if unbiased else values
        return jnp.zeros(like.size, values.dtype).at[indices].set(values)

    return for_any_shape("random_k", encode, decode, complex_too=True, linear=True)


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
