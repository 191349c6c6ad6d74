"""Compressors that send some entries and leave out the others."""

from __future__ import annotations

import math
import numbers
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .compressors import Compressor, Contraction, Unbiased, for_any_shape
from .keys import random_bits
from .largest import largest
from .leaves import precise
from .parts import expect
from .places import pack_sorted, pack_within, unpack_sorted, unpack_within


def top_k(
    fraction: float, *, block: int | None = None, values: Compressor | None = None
) -> Compressor:
    r"""Send the entries of largest magnitude, with their places.

    .. math:: C(x)_i = x_i \text{ if } |x_i| \text{ is among the } k \text{ largest,
        else } 0, \qquad \|C(x) - x\|^2 \le (1 - k/n) \|x\|^2

    ``k`` is ``fraction`` times the number of elements ``n``, rounded to the nearest
    integer (halves up), at least 1 and at most ``n``. The fraction is read as the
    decimal number it prints as, so 0.1 of 30 is 3 and 0.285 of 100 is 29. Exactly ``k``
    entries travel: equal magnitudes go to the lowest index, and there is no threshold.
    Complex entries rank by modulus; NaN ranks first, then infinity.

    With ``block`` every ``block`` consecutive elements (up to 65536; the last block may
    be shorter) send the largest of their own, as many as the same rounding makes, and
    the contraction is by the least ``k/n`` of a block.

    ``values`` compresses the chosen values, one vector in the order of their places
    (so, with ``block``, blocks of as many as a block sends belong together), with the
    same keys. If it contracts by δ the whole contracts by :math:`δ k/n`; an unbiased
    one counts as :math:`δ = 1 - ω`. A statistic is this worker's own, and travels.

    Sent: ``k`` values in the array's own type, or what ``values`` makes of them, in the
    order of the places; and the places, relative to the block in the fewest of 1, 2, 4,
    8, 12 or 16 bits (12 for 4096), or packed as :mod:`lowcomm.places` says (12.4 bits
    each for 1 % of 2²²). No places where all entries travel.

    Raises:
        ValueError: a fraction outside (0, 1] or a block outside 1 … 65536; at trace, an
            array of more than 2³¹ − 1 elements.

    Example:
        >>> x = jnp.array([1.0, -4.0, 3.0, -3.0])
        >>> values, places = payload = top_k(0.5).encode(x, None)
        >>> print(values, places[0])  # places 1 and 2, two bits each
        [-4.  3.] [9]
        >>> print(top_k(0.5).decode(payload, x, None))
        [ 0. -4.  3.  0.]
        >>> pairs = top_k(0.5, block=2)
        >>> print(pairs.decode(pairs.encode(x, None), x, None))
        [ 0. -4.  3.  0.]

    References:
        Stich, Cordonnier, Jaggi, `Sparsified SGD with Memory
        <https://arxiv.org/abs/1809.07599>`_, 2018, Definition 2.2. Quantized values as
        in Basu et al., `Qsparse-local-SGD <https://arxiv.org/abs/1906.02367>`_, 2019;
        in blocks as in Sarfi et al., `Communication Efficient LLM Pre-training with
        SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025.
    """
    share = _check_fraction(fraction)
    _check_block(block)
    expect(Compressor, values=values)

    def cut(n):
        return _Cut.of(n, block, share)

    def encode(x, keys, agreed=None):
        places = cut(x.size).select(x)
        chosen = x[places]
        if values is not None:
            own = None if values.statistic is None else values.statistic(chosen)
            chosen = (values.encode(chosen, keys, own), own)
        return chosen, cut(x.size).pack(places)

    def entries(payload, like, keys):
        sent, packed = payload
        places = cut(like.size).unpack(packed)
        if values is not None:
            vector = jax.ShapeDtypeStruct(places.shape, like.dtype)
            sent = values.decode(sent[0], vector, keys, sent[1])
        return places, precise(sent)

    def decode(payload, like, keys, agreed=None):
        places, sent = entries(payload, like, keys)
        out = jnp.zeros(like.size, sent.dtype)
        return out.at[places].set(sent, indices_are_sorted=True, unique_indices=True)

    def add(total, payload, keys, agreed=None):
        places, sent = entries(payload, total, keys)
        return total.at[places].add(sent, indices_are_sorted=True, unique_indices=True)

    def delta(n):
        part = cut(n).least
        of_values = 1.0 if values is None else _delta(values, cut(n).k)
        return of_values * part if of_values > 0 else of_values

    promised = values is None or values.law is not None
    return for_any_shape(
        "top_k",
        encode,
        decode,
        add_vector=add,
        complex_too=True,
        law=Contraction(delta) if promised else None,
    )


def random_k(fraction: float, *, unbiased: bool = False) -> Compressor:
    r"""Send one random entry of each of ``k`` blocks; the seed gives the places.

    The array is cut into ``k`` (as in :func:`top_k`) blocks of consecutive elements,
    their sizes differing by at most one. With ``s_i`` the size of the block of element
    ``i``, that element is drawn, from ``keys.shared``, with probability ``1 / s_i``:

    .. math::
        E\|C(x) - x\|^2 = \sum_i (1 - 1/s_i)\, x_i^2; \quad \text{unbiased:}\;
        E\,C(x) = x, \; E\|C(x) - x\|^2 = \sum_i (s_i - 1)\, x_i^2 .

    ``unbiased`` multiplies a decoded value by its block's size. Leave it off inside
    error feedback: each step multiplies the mean square of what is remembered of a
    block by ``s_i − 1``, which grows without bound in blocks of 3 and more, and like a
    random walk in blocks of 2. Sent: ``k`` values in the array's own type, no indices.
    Linear. Errors as in :func:`top_k`.

    A place in the block is the high word of 32 random bits times ``s_i``, so the
    probabilities are multiples of :math:`2^{-32}`, off by less than one of them.

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
        within = _below(random_bits(keys.shared, k), size)
        return j * short + jnp.minimum(j, longer) + within, size

    def encode(x, keys, agreed=None):
        return x[places(x.size, keys)[0]]

    def decode(payload, like, keys, agreed=None):
        indices, size = places(like.size, keys)
        # Scaled here and not in encode, so that float16 does not overflow on the way.
        values = precise(payload)
        values = values * size.astype(values.dtype) if unbiased else values
        out = jnp.zeros(like.size, values.dtype)
        return out.at[indices].set(values, indices_are_sorted=True, unique_indices=True)

    longest = lambda n: math.ceil(n / _entries(share, n))
    law = (
        Unbiased(lambda n: longest(n) - 1, always=True)
        if unbiased
        else Contraction(lambda n: 1 / longest(n))
    )
    return for_any_shape(
        "random_k", encode, decode, complex_too=True, linear=True, law=law
    )


class _Cut(NamedTuple):
    """How many entries of a vector travel, and from where: whole, or in blocks."""

    n: int
    size: int  # of a block
    each: int  # entries of a full block
    last: int  # entries of the shorter last block, if there is one
    whole: bool

    @classmethod
    def of(cls, n: int, block: int | None, share: Fraction) -> _Cut:
        size = n if block is None else min(block, n)
        last = _entries(share, n % size) if n % size else 0
        return cls(n, size, _entries(share, size), last, block is None)

    @property
    def k(self) -> int:
        return self.n // self.size * self.each + self.last

    @property
    def least(self) -> float:
        """The least part of a block that travels."""
        rest = self.n % self.size
        return min(self.each / self.size, self.last / rest if rest else 1.0)

    def select(self, x: jax.Array) -> jax.Array:
        """``[k]`` places, ascending, of the largest of each block."""
        end = self.n - self.n % self.size
        first = jnp.arange(0, end, self.size, dtype=jnp.int32)[:, None]
        places = largest(x[:end].reshape(-1, self.size), self.each) + first
        if not self.last:
            return places.ravel()
        rest = largest(x[end:][None], self.last) + end
        return jnp.concatenate([places.ravel(), rest.ravel()])

    def pack(self, places: jax.Array):
        if self.whole or self.k == self.n:
            return pack_sorted(places, self.n)
        return (pack_within(places % self.size, self.size),)

    def unpack(self, packed) -> jax.Array:
        if self.whole or self.k == self.n:
            return unpack_sorted(packed, self.n, self.k)
        block = jnp.arange(self.k, dtype=jnp.int32) // self.each
        return block * self.size + unpack_within(packed[0], self.size, self.k)


def _below(bits: jax.Array, size: jax.Array) -> jax.Array:
    """``⌊bits · size / 2³²⌋``: 32 random bits as an int32 below ``size``.

    In two halves, as there may be no 64-bit integers; no sum exceeds 32 bits.
    """
    half, low = np.uint32(16), np.uint32(0xFFFF)
    size = size.astype(jnp.uint32)
    middle = (bits >> half) * (size & low) + ((bits & low) * (size & low) >> half)
    carry = (bits & low) * (size >> half) + (middle & low)
    high = (bits >> half) * (size >> half) + (middle >> half) + (carry >> half)
    return high.astype(jnp.int32)


def _delta(values: Compressor, k: int) -> float:
    """What ``values`` of ``k`` entries contracts by."""
    if isinstance(values.law, Contraction):
        return values.law.delta(k)
    assert values.law is not None
    return 1 - values.law.omega(k)


def _check_fraction(fraction):
    number = isinstance(fraction, numbers.Real) and not isinstance(fraction, bool)
    if not (number and 0 < float(fraction) <= 1):
        raise ValueError(
            f"fraction={fraction!r}: give the share of entries to send, above 0 and at "
            "most 1 (0.01 sends one in a hundred, 1 sends all)."
        )
    return Fraction(repr(float(fraction)))


def _check_block(block):
    whole = isinstance(block, int) and not isinstance(block, bool)
    if block is not None and not (whole and 1 <= block <= 2**16):
        raise ValueError(
            f"top_k: block={block!r}; give how many consecutive elements choose among "
            "themselves, from 1 to 65536, or None for the whole array."
        )


def _entries(share, n):
    """The number of entries that travel of ``n``."""
    return min(n, max(1, math.floor(share * n + Fraction(1, 2))))
