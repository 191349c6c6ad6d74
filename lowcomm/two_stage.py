r"""The quantized all-reduce: workers send shares of their tree, and hear all means.

    worker i, row j:    c_ij = C(p_ij)                     an all-to-all: to worker j
    worker j, its row:  s_j  = (1/K) Σ_i c_ij
                        y_j  = C(s_j)                      a gather: to everyone

Each leaf is cut into as many rows as there are workers. A sum of gathered payloads
costs a worker ``K − 1`` of them; this costs about two, whatever ``K`` is, for the price
of a second compression. An entry is compressed twice, not at every hop as in a ring.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .compressors import Compressor
from .exchange import Exchange, like
from .leaves import PyTree, check_same_leaves, map_exchanged, map_leaves, precise, zeros
from .parts import expect
from .row_means import mean_of_rows, rows_like
from .sharded import by_shard
from .spmd import AXIS, Axis, axis_size, is_bound, names, vary
from .talk import admit_shrinking, check_divergence, left_over
from .vectors import check_vectors


class TwoStageState(NamedTuple):
    """State of ``two_stage_feedback``."""

    error: PyTree  # what this worker has not managed to say yet
    shard: PyTree  # [⌈n/K⌉] a leaf, what it has not managed to say of its row's mean


def two_stage(compressor: Compressor, *, seed: int = 0, axis: Axis = AXIS) -> Exchange:
    r"""The mean by two compressions: a quantized all-reduce.

    .. math:: x_i \leftarrow C\big(\tfrac1K \sum_j C(x_j)\big)

    where each row of ``⌈n/K⌉`` of a leaf's ``n`` entries is compressed by itself, so a
    scale is that of a row, or of a block in it, and never that of two leaves. The row
    that a leaf ends in is filled up with its own entries, over and over, so that no
    zeros enter its scale. What is lost is lost: right for an
    unbiased compressor, such as ``quantize(8, block=256)``; biased ones want
    ``two_stage_feedback``. Rounding to the nearest errs by half a step of the worker's
    grid, in the mean over them, and half a step of the mean's.

    Rows are float32, or as wide as the leaf. Sends ``K`` payloads of a row of each leaf
    by an all-to-all and one by a gather (``row_means.two_stage_bytes``), in two
    collectives for each type in a payload, however many leaves there are. Of a tree of
    small leaves the scales are most of what travels: ``flattened`` makes one vector of
    it, whose rows then share a scale across leaves. A compressor's statistic is the
    row's own and travels beside it. Over two levels it is a chain of two, each over its
    own axis, and both move the whole tree. Where the compiler divides leaves over
    further axes it stands inside ``per_shard``.

    Raises:
        ValueError: at trace, leaves that the compiler divides, parameters, a missing
            ``step``.

    Example:
        Two workers: each averages its half of the entries.

        >>> from lowcomm import quantize, spread
        >>> tx = two_stage(quantize(8, stochastic=False))
        >>> worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
        >>> spread(worker)(jnp.array([[127.0, 3.0, 0.5], [127.0, 4.0, 1.5]]))
        Array([[127.,   4.,   1.],
               [127.,   4.,   1.]], dtype=float32)

    References:
        Wang et al., `ZeRO++ <https://arxiv.org/abs/2306.10209>`_, 2023 (qgZ: blocks
        quantized before an all-to-all). Two compressions as in Tang et al.,
        `DoubleSqueeze <https://arxiv.org/abs/1905.05957>`_, 2019.
    """
    expect(Compressor, compressor=compressor)

    def update(
        updates,
        state,
        params=None,
        *,
        step=None,
        about="gradients",
        within=None,
        **extra,
    ):
        admit_shrinking(updates, "two_stage", axis, about, within)
        told = mean_of_rows(
            compressor, updates, name="two_stage", step=step, seed=seed, axis=axis
        )
        return like(updates, told.heard), state

    return by_shard(Exchange(lambda params: optax.EmptyState(), update))


def two_stage_feedback(
    compressor: Compressor, *, seed: int = 0, axis: Axis = AXIS
) -> Exchange:
    r"""``two_stage`` that remembers on both sides what it has not managed to say.

    .. math::
        p_i = e_i + u_i, \quad e_i \leftarrow p_i - C(p_i), \qquad
        s = \epsilon + \tfrac1K \sum_j C(p_j), \quad
        x_i \leftarrow C(s), \quad \epsilon \leftarrow s - C(s)

    ``e`` is ``state.error``, one tree, and ``ε`` is ``state.shard``, of each leaf this
    worker's row of ``⌈n/K⌉`` entries, both float32 or wider and zeros at first. Nothing
    is lost:
    :math:`\sum_t x_t + \tfrac1K \sum_i e_i + \epsilon = \sum_t \tfrac1K \sum_i u_i`.
    Sends what ``two_stage`` does. The compressor must contract, as for
    ``error_feedback``. A leaf of nothing but zeros has a scale of zero, and is heard as
    zeros by signs too; in another a zero is a plus, which the residuals take back.

    Call ``init`` where the workers are, inside ``spread``: elsewhere it makes the state
    of one worker alone.

    Raises:
        ValueError: at trace, what ``two_stage`` raises, a tree of another structure, a
            state for another number of workers, a compressor whose residual would grow
            for ever.

    Example:
        A constant gradient is heard in full, over time.

        >>> from lowcomm import sign, spread
        >>> tx = two_stage_feedback(sign())
        >>> def worker(g):
        ...     state, total = tx.init(g), 0.0
        ...     for t in range(64):
        ...         heard, state = tx.update(g, state, step=t)
        ...         total = total + heard / 64
        ...     return total
        >>> print(spread(worker)(jnp.array([[3.0, 1.0], [1.0, 1.0]])).round(1)[0])
        [2. 1.]

    References:
        Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, 2021 (both
        residuals, around signs). Tang et al., `DoubleSqueeze
        <https://arxiv.org/abs/1905.05957>`_, 2019, Algorithm 1.
    """
    expect(Compressor, compressor=compressor)

    def init(params):
        # Outside of the workers, as where only shapes are asked for, there is one.
        workers = axis_size(axis) if all(map(is_bound, names(axis))) else 1
        check_vectors(params, "two_stage_feedback")
        rows = rows_like(params, workers)
        shard = jax.tree.map(lambda row: jnp.zeros(row.shape, row.dtype), rows)
        return TwoStageState(zeros(params), vary(shard, axis))

    def update(
        updates,
        state,
        params=None,
        *,
        step=None,
        about="gradients",
        within=None,
        **extra,
    ):
        admit_shrinking(updates, "two_stage_feedback", axis, about, within)
        check_same_leaves("two_stage_feedback", state.error, updates)
        wanted = map_exchanged(lambda u, e: precise(u) + e, updates, state.error)
        rows = rows_like(updates, axis_size(axis))
        _check_rows(state.shard, rows, axis)
        check_divergence(compressor, rows, "two_stage_feedback")
        told = mean_of_rows(
            compressor,
            wanted,
            state.shard,
            name="two_stage_feedback",
            step=step,
            seed=seed,
            axis=axis,
        )
        unsaid = lambda e, p, s: left_over(p, s)
        error = map_leaves(unsaid, state.error, wanted, told.said)
        shard = map_leaves(left_over, told.rows, told.spoken)
        return like(updates, told.heard), TwoStageState(error, shard)

    return by_shard(Exchange(init, update))


def _check_rows(shard: PyTree, rows: PyTree, axis: Axis) -> None:
    """Raise unless the state is for as many workers as there are."""
    kept = jax.tree_util.tree_leaves_with_path(shard)
    for (path, had), row in zip(kept, jax.tree.leaves(rows), strict=True):
        if had.shape != row.shape:
            raise ValueError(
                f"two_stage_feedback keeps a row of {had.size} entries of leaf "
                f"{jax.tree_util.keystr(path) or '(the tree)'}, and {axis_size(axis)} "
                f"workers average {row.size} each: call init for them, where they are "
                "(inside spread, or lowcomm.init)."
            )
