"""Train with the batch that the optimizer's state asks for.

A method such as ``adaptive_batch`` keeps a ``batch_size`` in its state. Each step draws
the next power of two of micro-batches that holds so many samples, and goes through them
one at a time: one program is compiled for each power, not for each batch size, and the
memory is that of one micro-batch. The method is told how many samples it really got.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import lowcomm as lc

from .task import PyTree


class Growth(NamedTuple):
    """A run with growing batches; params and state are stacked ``[K, …]``."""

    params: PyTree
    state: Any
    losses: np.ndarray  # [steps, K]
    asked: np.ndarray  # [steps] int64, the batch size in the state before the step
    drawn: np.ndarray  # [steps] int64, samples a worker took in the step
    payload: np.ndarray  # [steps] int64, bytes each worker sent
    workers: int

    @property
    def samples(self) -> int:
        """Samples of all workers in the whole run."""
        return self.workers * int(self.drawn.sum())

    @property
    def bytes(self) -> int:
        """Payload bytes each worker sent in the whole run."""
        return int(self.payload.sum())


def train(
    loss: Callable[[PyTree, PyTree], jax.Array],
    tx: optax.GradientTransformation,
    params: PyTree,
    samples: Callable[[int, int], PyTree],
    *,
    micro_batch: int,
    steps: int,
    workers: int,
    extra_args: Callable[[PyTree], dict] | None = None,
    mesh: Any = None,
) -> Growth:
    """Train ``steps`` steps from one worker's ``params``.

    ``samples(first, size)`` are each worker's samples number ``first`` to
    ``first + size``, stacked ``[K, size, …]``: a function of the two, so that equal
    batches give equal runs. ``loss`` is a mean over a batch; it sees ``micro_batch``
    samples at a time. ``extra_args`` is that of ``local_step``, of a whole batch
    ``[size, …]``; ``batch_size`` is added. Give the method a ``most`` that is a power
    of two times ``micro_batch``: larger ones are rounded up to such a number too.

    Raises:
        ValueError: micro_batch below 1; a state without a batch size; samples of
            another number than asked for.

    Example:
        Two workers pull at both sides of 0; near it the noise outweighs the signal.

        >>> import jax.numpy as jnp
        >>> tx = lc.adaptive_batch(
        ...     optax.sgd(0.5), period=2, level=1.0, start=4, most=64
        ... )
        >>> run = train(
        ...     lambda x, c: jnp.mean((x - c) ** 2) / 2, tx, jnp.array(8.0),
        ...     lambda first, size: np.array([[-1.0] * size, [1.0] * size]),
        ...     micro_batch=4, steps=8, workers=2,
        ... )
        >>> print(run.asked, run.drawn, run.samples, run.bytes)
        [ 4  4  4  4  4 32 32 64] [ 4  4  4  4  4 32 32 64] 296 40
    """
    if micro_batch < 1:
        raise ValueError(f"micro_batch {micro_batch} must be 1 sample or more.")
    sample_args = (lambda batch: {}) if extra_args is None else extra_args

    def told(parts: PyTree) -> dict:
        whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)
        size = jax.tree.leaves(whole)[0].shape[0]
        return {"batch_size": size} | sample_args(whole)

    step = lc.counted_step(
        lc.microbatched(loss), tx, workers=workers, extra_args=told, mesh=mesh
    )
    stacked = lc.stack(params, workers, mesh=mesh)
    state = lc.init(tx, stacked, mesh=mesh)
    taken, losses, asked, drawn, payload = 0, [], [], [], []
    for t in range(steps):
        wanted = asked_for(state)
        count = buckets(wanted, micro_batch)
        size = count * micro_batch
        batch = _cut(samples(taken, size), workers, count, micro_batch)
        stacked, state, metrics, sent = step(stacked, state, batch, t)
        losses.append(np.asarray(metrics["loss"]))
        asked.append(wanted)
        drawn.append(size)
        payload.append(sent.bytes)
        taken += size
    whole = lambda numbers: np.array(numbers, np.int64)
    return Growth(
        stacked,
        state,
        np.array(losses).reshape(steps, workers),
        whole(asked),
        whole(drawn),
        whole(payload),
        workers,
    )


def asked_for(state: Any) -> int:
    """The batch size that a stacked state asks for, the same on all workers."""
    try:
        found = optax.tree.get(state, "batch_size")
    except KeyError:
        found = None
    if found is None:
        raise ValueError(
            "the optimizer's state holds no batch_size: use adaptive_batch, or put "
            "norm_test into the chain before the inner optimizer."
        )
    return int(found[0])


def buckets(size: int, micro_batch: int) -> int:
    """The least power of two of micro-batches that holds ``size`` samples.

    Example:
        >>> [buckets(size, 8) for size in (1, 8, 9, 17, 32, 33)]
        [1, 1, 2, 4, 4, 8]
    """
    return 1 << (-(-size // micro_batch) - 1).bit_length()


def endless(rows: np.ndarray, *, seed: int = 0) -> Callable[[int, int], np.ndarray]:
    """Positions of samples: ``endless(rows, seed=s)(first, size)``, ``int[K, size]``.

    Every epoch each worker goes through its own row once, in a new order; a batch may
    reach into the next. A function of (rows, seed, first, size).

    Example:
        >>> positions = endless(np.arange(10).reshape(2, 5))
        >>> epoch = np.concatenate([positions(0, 2), positions(2, 3)], axis=1)
        >>> np.sort(epoch)
        array([[0, 1, 2, 3, 4],
               [5, 6, 7, 8, 9]])
    """
    length = rows.shape[1]

    # A batch and the next one look into the same epoch, or into two.
    @lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng((seed, epoch)).permuted(rows, axis=1)

    def positions(first: int, size: int) -> np.ndarray:
        epochs = range(first // length, -(-(first + size) // length))
        orders = np.concatenate([order(epoch) for epoch in epochs], axis=1)
        start = first % length
        return orders[:, start : start + size]

    return positions


def _cut(batch: PyTree, workers: int, count: int, micro_batch: int) -> PyTree:
    def cut(path, x):
        if np.shape(x)[:2] != (workers, count * micro_batch):
            raise ValueError(
                f"samples{jax.tree_util.keystr(path)} has shape {np.shape(x)} and must "
                f"be [{workers}, {count * micro_batch}, ...]: so many were asked for."
            )
        return x.reshape(workers, count, micro_batch, *np.shape(x)[2:])

    return jax.tree_util.tree_map_with_path(cut, batch)
