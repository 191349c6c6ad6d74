"""Numbers of two or four bits: an entry travels as its place in a short list."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from .compressors import Compressor, Contraction, for_any_shape
from .grids import check_block, in_blocks, in_units, largest, root_mean_squares
from .packing import pack, unpack

POWERS = tuple(sign * 2.0**-e for sign in (-1, 1) for e in range(8))  # of the largest
GAUSSIAN = (-1.5104, -0.4528, 0.4528, 1.5104)  # best four for N(0, 1): Lloyd and Max


def codebook(
    levels: Sequence[float], *, relative_to: str, block: int | None = None
) -> Compressor:
    r"""Send for each entry the nearest of the levels, times the scale of its block.

    .. math:: C(x)_i = m\, l_j, \qquad j = \arg\min_j |x_i / m - l_j|

    ``relative_to`` is the scale ``m``: "largest" magnitude, or "rms", the root of the
    mean square. ``block`` consecutive elements share it; None: all. A tie goes to the
    lower level. This module has two lists. With ``POWERS`` of the largest an entry of
    at least 2⁻⁷ of it misses by a third of its value at most, but zero becomes 2⁻⁷ of
    it, since there is no zero among 16 levels of both signs. With ``GAUSSIAN`` of the
    root mean square normal noise loses 12 % of its energy.

    Of the largest, in blocks of ``s``, δ is the least over the places ``u`` halfway
    between levels and ±1, with their distance ``e`` to a level and that of ±1, ``e_1``,

    .. math:: \delta = \min_u \; 1 - \frac{(s - 1) e^2 + e_1^2}{1 + (s - 1) u^2} ,

    if that is positive: 8/9 for ``POWERS`` in blocks of at most 1821. Declared where a
    ``block`` makes it so. Of the root mean square there is none: with ``GAUSSIAN`` one
    entry beside many zeros costs up to 1.2 times its energy.

    Sent: 2 or 4 bits an entry, the first of a byte in its lowest bits, and a float32
    per block. NaN or infinity spoils its block, visibly; a level times its scale that
    is beyond float32's range is infinite.

    Raises:
        ValueError: other than 4 or 16 finite levels, another scale or block; at trace
            complex arrays.

    Example:
        >>> x = jnp.array([1.0, -0.3, 0.1])
        >>> few = codebook(POWERS, relative_to="largest")
        >>> codes, scales = payload = few.encode(x, None)
        >>> print(codes.shape, codes.dtype, few.decode(payload, x, None))
        (2,) uint8 [ 1.    -0.25   0.125]

    References:
        Max, Quantizing for Minimum Distortion, IRE Transactions on Information Theory
        6(1), 1960, Table I, for ``GAUSSIAN``.
    """
    bits = {4: 2, 16: 4}.get(len(levels))
    table = np.sort(np.asarray(levels, np.float32))
    if bits is None or not np.all(np.isfinite(table)):
        raise ValueError(
            f"codebook: {len(levels)} levels; give 4 (two bits) or 16 (four), all "
            "finite."
        )
    if relative_to not in ("largest", "rms"):
        raise ValueError(
            f"codebook: relative_to={relative_to!r}; there are 'largest' and 'rms'."
        )
    check_block("codebook", block)
    between = (table[1:] + table[:-1]) / 2

    def encode(x, keys, agreed=None):
        rows = in_blocks(x.astype(jnp.float32), block)
        if relative_to == "largest":
            scales = largest(rows)
        else:
            scales = root_mean_squares(rows, x.size)
        u = in_units(rows, scales).ravel()[: x.size]
        # Of so few levels, comparing with all is faster than a search.
        codes = functools.reduce(
            jnp.add, [(u > edge).astype(jnp.uint8) for edge in between]
        )
        return pack(codes, bits), scales

    def decode(payload, like, keys, agreed=None):
        codes, scales = payload
        shares = jnp.asarray(table)[unpack(codes, bits, like.size)]
        return (scales[:, None] * in_blocks(shares, block)).ravel()[: like.size]

    contracts = relative_to == "largest" and block and _delta(table, block) > 0
    delta = lambda n: _delta(table, min(block or n, n))
    law = Contraction(delta) if contracts else None
    return for_any_shape("codebook", encode, decode, law=law)


def _delta(table: np.ndarray, size: int) -> float:
    """The contraction of blocks of up to ``size``, one entry of each being ±1."""
    # Where the error is less than the entries it is convex in each of them between two
    # changes of the nearest level, and so largest at an end of such a piece. The bound
    # is monotonous in the size, which the last block may have less of.
    table = table.astype(np.float64)
    inside = (table[1:] + table[:-1]) / 2
    ends = np.concatenate([inside[np.abs(inside) < 1], [-1.0, 1.0]])
    missed = np.abs(ends[:, None] - table).min(axis=1) ** 2
    return min(
        1 - np.max(((s - 1) * missed + missed[-2:].max()) / (1 + (s - 1) * ends**2))
        for s in (1, size)
    )
