r"""Sums of hashed entries, and how a sparse vector is read back from them exactly.

A sketch is a table ``S[rows, columns]`` of the entries ``x_i``, each added once to
every row, with a random sign in a random column:

.. math:: S_{rc} = \sum_{i:\, h_r(i) = c} g_r(i)\, x_i .

It is linear in ``x``, so sketches of workers may be summed on the way. ``g_r(i)``
times the bucket of ``i`` is an unbiased estimate of ``x_i`` in each row.

Where the non-zero places are known, and there are enough buckets, it is no estimate:
a bucket that holds a single key gives its value away; subtract that from the key's
other buckets, and some of them are left with a single key. With three rows this ends
with no key left if ``rows · columns`` exceeds 1.222 times the keys (the 2-core of a
random 3-uniform hypergraph is empty), at many keys and with high probability; which
keys are left depends on the places alone, not on the order of removal.

No bucket loses more than one key a round, so each sum is formed in one order, and all
workers, on all backends, read the same bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .keys import hashed
from .spmd import vary_with

ROWS = 3  # of a sketch that is peeled


def hashes(
    key: jax.Array, places: jax.Array, row: int, columns: int
) -> tuple[jax.Array, jax.Array]:
    """The columns (int32) and signs (±1, float32) of places in one row of a sketch."""
    bits = hashed(key, places.astype(jnp.uint32), stream=row)
    signs = 1 - 2 * (bits >> 31).astype(jnp.float32)
    return (bits % np.uint32(columns)).astype(jnp.int32), signs


def sketch(
    values: jax.Array, places: jax.Array, key: jax.Array, rows: int, columns: int
) -> jax.Array:
    """The sketch ``[rows, columns]`` of a vector that has ``values`` at ``places``.

    Example:
        >>> key, x = jax.random.key(0), jnp.array([3.0, 0.0, 5.0])
        >>> of = lambda x: sketch(x, jnp.arange(3), key, 2, 4)
        >>> bool((of(x) + of(2 * x) == of(3 * x)).all())
        True
    """
    start = vary_with(jnp.zeros(columns, values.dtype), values, places, axis=())
    out = []
    for r in range(rows):
        h, g = hashes(key, places, r, columns)
        out.append(start.at[h].add(g.astype(values.dtype) * values))
    return jnp.stack(out)


def estimates(table: jax.Array, places: jax.Array, key: jax.Array) -> list[jax.Array]:
    """What each row of a sketch says of the entries at ``places``: rows of ``[N]``."""
    out = []
    for r, row in enumerate(table):
        h, g = hashes(key, places, r, row.size)
        out.append(g.astype(row.dtype) * row[h])
    return out


def support(bitmap: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The places of the first ``size`` set bits, and how many are set in all.

    ``bitmap`` is packed as by ``packing.pack(flags, 1)``. What is left of the places
    is filled up with numbers that mean nothing.

    Example:
        >>> places, number = support(jnp.array([0b10010, 0b1], jnp.uint8), 4)
        >>> print(places[:3], number)
        [1 4 8] 3
    """
    counts = lax.population_count(bitmap).astype(jnp.int32)
    ends = jnp.cumsum(counts)
    # The byte that holds the j-th set bit, and which of its set bits that is.
    j = jnp.arange(size, dtype=jnp.int32)
    byte = jnp.searchsorted(ends, j, side="right")
    byte = jnp.minimum(byte, bitmap.size - 1).astype(jnp.int32)
    rank = j - (ends[byte] - counts[byte])
    bits = bitmap[byte][:, None] >> np.arange(8, dtype=np.uint8) & np.uint8(1)
    seen = jnp.cumsum(bits, axis=1, dtype=jnp.int32)
    bit = jnp.argmax(seen > rank[:, None], axis=1).astype(jnp.int32)
    return 8 * byte + bit, ends[-1]


def peel(
    table: jax.Array, places: jax.Array, number: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The values at the first ``number`` of ``places``, read from their sketch.

    Returns the values ``[N]``, which of them are not known (bool; they are zero), and
    after how many rounds. Exact where all sums are, as of integers; else each round
    adds its roundings to the next. A NaN or infinity spoils what shares its buckets.
    """
    rows, columns = table.shape
    parts = [hashes(key, places, r, columns) for r in range(rows)]
    g = jnp.stack([g for _, g in parts]).astype(table.dtype)
    ids = jnp.arange(1, places.size + 1, dtype=jnp.int32)
    listed = ids <= number
    # One flat table; what is not listed falls off its end.
    buckets = jnp.stack([r * columns + h for r, (h, _) in enumerate(parts)])
    buckets = jnp.where(listed, buckets, rows * columns)
    look = lambda flat: flat.at[buckets].get(mode="fill", fill_value=0)
    put = lambda change: jnp.broadcast_to(change, buckets.shape)
    empty = vary_with(jnp.zeros(rows * columns, jnp.int32), table, buckets, axis=())

    def going(carry):
        *_, left, moved, _ = carry
        return moved & left.any()

    def round(carry):
        sums, counts, values, left, _, rounds = carry
        alone = (look(counts) == 1) & left
        solo = alone.any(0)
        # Of several keys that would leave a bucket at once, the last goes first.
        claims = empty.at[buckets].max(put(jnp.where(solo, ids, 0)), mode="drop")
        solo &= (look(claims) == ids).all(0)
        seen = g * look(sums)
        value = seen[-1]
        for r in reversed(range(rows - 1)):
            value = jnp.where(alone[r], seen[r], value)
        value = jnp.where(solo, value, 0)
        sums = sums.at[buckets].add(-g * value, mode="drop")
        counts = counts.at[buckets].add(-put(solo.astype(jnp.int32)), mode="drop")
        values = jnp.where(solo, value, values)
        return sums, counts, values, left & ~solo, solo.any(), rounds + 1

    start = (
        table.ravel(),
        empty.at[buckets].add(1, mode="drop"),
        jnp.zeros(places.shape, table.dtype),
        listed,
        jnp.bool_(True),
        jnp.int32(0),
    )
    start = vary_with(start, table, buckets, axis=())
    _, _, values, left, _, rounds = lax.while_loop(going, round, start)
    return values, left, rounds
