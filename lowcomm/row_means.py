"""Leaves cut in one row for each worker, who averages that row and hands it to all.

What the exchanges in two stages are made of. Every row of every leaf is compressed by
itself, with random numbers of its own; the payloads of all leaves travel together.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import uniform
from .compressors import Compressor, payload_bytes
from .keys import Keys, leaf_keys
from .leaves import PyTree, precise, takes_part
from .spmd import Axis, axis_size, vary_with, worker_index
from .transport import gather, swap
from .vectors import check_vectors


class Heard(NamedTuple):
    """What came of one exchange in two stages; all of it is precise."""

    heard: PyTree  # the same on all workers, bit for bit
    said: PyTree  # what the others heard of this worker's tree
    rows: PyTree  # of this worker: the means it was to say, one row a leaf
    spoken: PyTree  # and what all heard of them


def row_size(entries: int, workers: int) -> int:
    """How many entries of a leaf a worker averages; the last may have fewer."""
    return math.ceil(entries / workers)


def rows_like(tree: PyTree, workers: int) -> PyTree:
    """The shape of a worker's row of each leaf, None for leaves that take no part.

    Shapes will do.
    """

    def row(x):
        if not takes_part(x):
            return None
        kind = jnp.promote_types(jnp.result_type(x), jnp.float32)
        size = row_size(math.prod(jnp.shape(x)), workers)
        return jax.ShapeDtypeStruct((size,), kind)

    return jax.tree.map(row, tree)


def two_stage_bytes(compressor: Compressor, tree: PyTree, *, workers: int) -> int:
    """Payload bytes of an exchange in two stages: a worker's, for one tree.

    ``K + 1`` rows of ``⌈n/K⌉`` entries of each leaf, with their statistics. Shapes will
    do.

    Example:
        >>> from lowcomm import sign
        >>> tree = {"w": jnp.zeros(4096), "b": jnp.zeros(64)}
        >>> two_stage_bytes(sign(), tree, workers=8)  # 9 (64 + 4) + 9 (1 + 4)
        657
    """
    return (workers + 1) * payload_bytes(compressor, rows_like(tree, workers))


def mean_of_rows(
    compressor: Compressor,
    tree: PyTree,
    kept: PyTree = None,
    *,
    name: str,
    step: Any,
    seed: int,
    axis: Axis,
) -> Heard:
    """The mean of ``tree`` in two stages, ``kept`` added to the rows in between.

    ``kept`` is shaped like ``rows_like``, or None for nothing.
    """
    check_vectors(tree, name)
    step = uniform.now(step, axis)
    workers, here = axis_size(axis), worker_index(axis)
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if takes_part(x)]
    if not places:
        nothing = rows_like(tree, workers)
        return Heard(tree, tree, nothing, nothing)
    xs = [precise(jnp.asarray(leaves[i])) for i in places]
    like = jax.tree.leaves(rows_like(xs, workers))
    numbers = np.arange(2 * len(leaves) * workers, dtype=np.int32)
    drawn = jax.vmap(lambda number: leaf_keys(seed, step, number, axis))(numbers)

    def keys(place: int, stage: int) -> Keys:
        """Those of all rows of a leaf, at a stage."""
        start = (2 * place + stage) * workers
        return jax.tree.map(lambda key: key[start : start + workers], drawn)

    def encode(x, keys):
        # A statistic need not be agreed on, since no payloads are summed: it travels.
        agreed = None if compressor.statistic is None else compressor.statistic(x)
        return compressor.encode(x, keys, agreed), agreed

    def decode(sent, keys, row):
        payload, agreed = sent
        return compressor.decode(payload, row, keys._replace(private=None), agreed)

    def decode_all(sent, keys, row):
        return jax.vmap(lambda sent, keys: decode(sent, keys, row))(sent, keys)

    def add(total, sent, keys, row):
        payload, agreed = sent
        if compressor.add is None:
            return total + decode(sent, keys, row)
        return compressor.add(total, payload, keys, agreed)

    def listen(totals, sent):
        return list(map(add, totals, sent, own[0], like)), None

    of_all = [[keys(place, stage) for place in places] for stage in (0, 1)]
    own = [jax.tree.map(lambda key: key[here], stage) for stage in of_all]
    rows = [_cut(x.ravel(), workers) for x in xs]
    sent = list(map(jax.vmap(encode), rows, of_all[0]))
    said = list(map(decode_all, sent, of_all[0], like))
    start = vary_with([jnp.zeros_like(x[0]) for x in rows], rows, axis=axis)
    totals, _ = lax.scan(listen, start, swap(sent, axis))
    before = [0.0] * len(xs) if kept is None else jax.tree.leaves(kept)
    # What is decoded beyond a leaf's end was said twice, or is nothing.
    inside = [_inside(x.size, workers, here) for x in xs]
    means = [
        jnp.where(real, total / workers + more, 0)
        for real, total, more in zip(inside, totals, before, strict=True)
    ]
    filled = [_filled(m, x.size, here) for m, x in zip(means, xs, strict=True)]
    again = gather(list(map(encode, filled, own[1])), axis)
    heard = list(map(decode_all, again, of_all[1], like))
    spoken = [
        jnp.where(real, all_rows[here], 0)
        for real, all_rows in zip(inside, heard, strict=True)
    ]

    def whole(parts):
        out = list(leaves)
        for i, x, part in zip(places, xs, parts, strict=True):
            out[i] = part.ravel()[: x.size].reshape(x.shape)
        return jax.tree.unflatten(treedef, out)

    def by_row(parts):
        by_place = dict(zip(places, parts, strict=True))
        return jax.tree.unflatten(treedef, map(by_place.get, range(len(leaves))))

    return Heard(whole(heard), whole(said), by_row(means), by_row(spoken))


def _inside(entries: int, workers: int, here: Any) -> jax.Array:
    """Which places of this worker's row are those of an entry."""
    size = row_size(entries, workers)
    ends = np.clip(entries - size * np.arange(workers), 0, size).astype(np.int32)
    return jnp.arange(size) < jnp.asarray(ends)[here]


def _cut(vector: jax.Array, workers: int) -> jax.Array:
    """The rows of a vector; one that it ends in is filled up with its own entries.

    Zeros would be averaged into its scale.
    """
    size = row_size(vector.size, workers)
    whole, rest = divmod(vector.size, size)
    if rest:
        end = _repeated(vector[whole * size :], size)
        vector = jnp.concatenate([vector[: whole * size], end])
    return jnp.pad(vector, (0, workers * size - vector.size)).reshape(workers, size)


def _filled(row: jax.Array, entries: int, here: Any) -> jax.Array:
    """This worker's row, filled up as ``_cut`` does it."""
    whole, rest = divmod(entries, row.size)
    if not rest:
        return row
    return jnp.where(here == whole, _repeated(row[:rest], row.size), row)


def _repeated(x: jax.Array, size: int) -> jax.Array:
    return jnp.tile(x, math.ceil(size / x.size))[:size]
