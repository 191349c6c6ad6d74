"""A tree cut in one row for each worker, who averages that row and hands it to all.

What the exchanges in two stages are made of. The leaves stand end to end in one
vector, and every row of it is compressed by itself, with random numbers of its own.
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
from .leaves import PyTree
from .spmd import Axis, axis_size, vary, worker_index
from .transport import gather, swap
from .vectors import joined


class Heard(NamedTuple):
    """What came of one exchange in two stages; all of it is precise."""

    heard: PyTree  # the same on all workers, bit for bit
    said: PyTree  # what the others heard of this worker's tree
    row: jax.Array  # of this worker: the mean it was to say
    spoken: jax.Array  # and what all heard of it


def row_size(entries: int, workers: int) -> int:
    """How many entries of a vector a worker averages; the last may have fewer."""
    return math.ceil(entries / workers)


def two_stage_bytes(compressor: Compressor, tree: PyTree, *, workers: int) -> int:
    """Payload bytes of an exchange in two stages: a worker's, for one tree.

    ``K + 1`` rows of ``⌈n/K⌉`` entries, with their statistics. Shapes will do.

    Example:
        >>> from lowcomm import sign
        >>> two_stage_bytes(sign(), {"w": jnp.zeros(4096)}, workers=8)  # 9 (64 + 4)
        612
    """
    vector = jax.eval_shape(lambda tree: joined(tree, "two_stage")[0], tree)
    size = row_size(vector.size, workers)
    row = jax.ShapeDtypeStruct((size,), vector.dtype)
    return (workers + 1) * payload_bytes(compressor, row)


def mean_of_rows(
    compressor: Compressor,
    tree: PyTree,
    kept: jax.Array | float = 0.0,
    *,
    name: str,
    step: Any,
    seed: int,
    axis: Axis,
) -> Heard:
    """The mean of ``tree`` in two stages, ``kept`` added to the row in between."""
    step = uniform.now(step, axis)
    workers, here = axis_size(axis), worker_index(axis)
    vector, back = joined(tree, name)
    n, size = vector.size, row_size(vector.size, workers)
    if not n:
        return Heard(tree, tree, vector, vector)
    row = jax.ShapeDtypeStruct((size,), vector.dtype)

    def keys(stage: int, number: Any) -> Keys:
        return leaf_keys(seed, step, stage * workers + number, axis)

    def encode(x, keys):
        # A statistic need not be agreed on, since no payloads are summed: it travels.
        agreed = None if compressor.statistic is None else compressor.statistic(x)
        return compressor.encode(x, keys, agreed), agreed

    def decode(sent, keys):
        payload, agreed = sent
        return compressor.decode(payload, row, keys._replace(private=None), agreed)

    def listen(total, sent):
        payload, agreed = sent
        if compressor.add is None:
            return total + decode(sent, keys(0, here)), None
        return compressor.add(total, payload, keys(0, here), agreed), None

    first, second = (
        jax.vmap(lambda number, s=stage: keys(s, number))(jnp.arange(workers))
        for stage in (0, 1)
    )
    rows = jnp.pad(vector, (0, workers * size - n)).reshape(workers, size)
    sent = jax.vmap(encode)(rows, first)
    said = jax.vmap(decode)(sent, first)
    start = vary(jnp.zeros_like(rows[0]), axis)
    total, _ = lax.scan(listen, start, swap(sent, axis))
    # What is decoded beyond the vector's end need not be zero.
    ends = np.clip(n - size * np.arange(workers), 0, size).astype(np.int32)
    inside = jnp.arange(size) < jnp.asarray(ends)[here]
    mean = jnp.where(inside, total / workers + kept, 0)
    means = jax.vmap(decode)(gather(encode(mean, keys(1, here)), axis), second)
    whole = lambda rows: back(rows.ravel()[:n])
    return Heard(whole(means), whole(said), mean, jnp.where(inside, means[here], 0))
