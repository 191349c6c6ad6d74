"""A compressor whose payload is a table of hashed sums."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from .compressors import Compressor, Unbiased, for_any_shape
from .leaves import precise
from .peeling import estimates, sketch


def count_sketch(rows: int, columns: int | float) -> Compressor:
    r"""Send sums of entries with random signs, ``columns`` of them in each row.

    .. math::
        S_{rc} = \sum_{i:\, h_r(i) = c} g_r(i)\, x_i, \qquad
        C(x)_i = \frac1R \sum_r g_r(i)\, S_{r h_r(i)}, \qquad
        E\|C(x) - x\|^2 = \frac{n - 1}{R\,C} \|x\|^2

    Columns ``h`` and signs ``g`` are drawn from ``keys.shared``; the equation holds for
    every ``x`` of ``n`` elements, over those draws. ``columns`` is a number, or as a
    float a share of the elements of an array, at least 1. Linear and unbiased: a mean
    over the workers travels in one all-reduce, and is decoded to the same as their
    decoded mean. It scales up, so it is no contraction: for a plain mean, or for
    ``difference_feedback`` at a small rate. What is read back with the median instead,
    and only where it is large, is ``sketched``.

    Sent: ``rows · columns`` float32; an array of no more elements than that travels as
    it is. A NaN or infinity spoils whatever shares a bucket with it.

    Raises:
        ValueError: rows below 1; columns that are neither a whole number of 1 or more
            nor a share in (0, 1].

    Example:
        One large entry among a thousand comes back; its neighbours hear the rest.

        >>> from lowcomm import payload_bytes
        >>> from lowcomm.keys import Keys
        >>> keys, x = Keys(jax.random.key(0), None), jnp.zeros(1000).at[3].set(8.0)
        >>> c = count_sketch(4, 0.05)
        >>> y = c.decode(c.encode(x, keys), x, keys)
        >>> print(y[3], payload_bytes(c, x) / x.nbytes)
        8.0 0.2

    References:
        Charikar, Chen and Farach-Colton, Finding Frequent Items in Data Streams, 2002.
        Ivkin et al., `Communication-efficient Distributed SGD with Sketching
        <https://arxiv.org/abs/1903.04488>`_, 2019 (there read by the median, which is
        neither linear nor unbiased).
    """
    check_table("count_sketch", rows, columns)

    def encode(x, keys, agreed=None):
        x, width = precise(x), columns_of(columns, x.size)
        if x.size <= rows * width:
            return x
        return sketch(x, jnp.arange(x.size), keys.shared, rows, width)

    def decode(payload, like, keys, agreed=None):
        if payload.ndim == 1:
            return payload
        return sum(estimates(payload, jnp.arange(like.size), keys.shared)) / rows

    def omega(n):
        buckets = rows * columns_of(columns, n)
        return 0.0 if n <= buckets else (n - 1) / buckets

    return for_any_shape(
        "count_sketch", encode, decode, linear=True, law=Unbiased(omega, always=True)
    )


def columns_of(columns: int | float, n: int) -> int:
    """How many columns there are for ``n`` elements."""
    if isinstance(columns, int):
        return columns
    return max(1, math.floor(columns * n + 0.5))


def check_table(name: str, rows: int, columns: int | float) -> None:
    """Raise unless a sketch may have so many rows and columns."""
    whole = lambda x: isinstance(x, int) and not isinstance(x, bool) and x >= 1
    if not whole(rows):
        raise ValueError(f"{name}: rows={rows!r}; give a whole number, 1 or more.")
    if not whole(columns) and not (isinstance(columns, float) and 0 < columns <= 1):
        raise ValueError(
            f"{name}: columns={columns!r}; give a whole number, 1 or more, or a share "
            "of the entries as a float above 0 and at most 1."
        )


def median(rows: list[jax.Array]) -> jax.Array:
    """The median of rows, entry by entry; NaN where any of them is.

    By exchanging neighbours: for few rows far less work than sorting every entry's.
    """
    rows = list(rows)
    for turn in range(len(rows)):
        for i in range(turn % 2, len(rows) - 1, 2):
            a, b = rows[i], rows[i + 1]
            rows[i], rows[i + 1] = jnp.minimum(a, b), jnp.maximum(a, b)
    half = len(rows) // 2
    return rows[half] if len(rows) % 2 else (rows[half - 1] + rows[half]) / 2
