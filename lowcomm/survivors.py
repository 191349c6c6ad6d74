r"""Exchanges that leave out workers whose numbers are not finite, by vote.

    surviving_mean   x_i ← Σ_good x_j / n          n good workers, of K
    surviving(x)     x_i ← x((K/n) · x_i or 0)     whatever x is a mean of

A worker whose tree holds a NaN or an infinity anywhere says nothing of it, and all
others hear the mean of those that are left. Who was left out hears it too: under
``rounds`` it goes on from the anchor like all others, and is one of them again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .exchange import ANYTHING, Exchange, admit, like
from .feedback import DifferenceFeedbackState
from .leaves import (
    PyTree,
    all_finite,
    exchanged,
    fitting,
    map_exchanged,
    map_leaves,
    precise,
)
from .parts import expect, holds
from .spmd import AXIS, Axis, axis_size, vary
from .transport import reduce_sum


class SurvivingState(NamedTuple):
    """State of ``surviving_mean`` and ``surviving``."""

    dropped: jax.Array  # int32, workers left out of the last exchange, as all know
    absences: jax.Array  # int32, exchanges that this worker was left out of
    surviving: Any  # of the exchange


def surviving_mean(axis: Axis = AXIS) -> Exchange:
    r"""The mean over the workers whose trees are finite.

    .. math::
        x_i \leftarrow \tfrac1n \sum_{j \text{ finite}} x_j, \qquad
        n = \#\{j : x_j \text{ finite}\}

    A worker counts whole or not at all: one NaN or infinity in a leaf that travels, and
    it is left out. Where all are finite this is ``mean``. Where none is, what is heard
    is NaN: put the outer optimizer into ``roll_back``, and the workers return to the
    anchor. Sends what ``mean`` does and the count, one float32 in the same buffer. The
    result is the same, bit for bit, on all workers.

    For displacements, in ``rounds`` with ``pull=1``: the worker that was left out
    adopts the anchor with the others and contributes again in the next round. Three
    things belong to that. Apply updates by ``lowcomm.apply_updates`` (as ``local_step``
    and ``fit`` do): with ``optax.apply_updates`` NaN plus anything stays NaN. Guard the
    moments by ``restart_nonfinite(inner)``, or by ``skip_nonfinite(inner)`` where only
    gradients go wrong; ``moments="average"`` would hand them to everybody. And ``fit``
    stops at a loss that is not finite unless ``check_finite=False``.

    For gradients too. In ``average`` the others are safe, but parameters that are NaN
    stay so, since an update is added to them, and their worker is left out for ever.
    ``dropped`` of the state tells, the same on all workers; ``absences`` whose it is.

    Example:
        >>> from lowcomm import spread
        >>> tx = surviving_mean()
        >>> worker = lambda g: tx.update(g, tx.init(g))
        >>> heard, state = spread(worker)(jnp.array([1.0, 5.0, jnp.nan]))
        >>> print(heard, state.dropped, state.absences)
        [3. 3. 3.] [1 1 1] [0 0 1]
    """

    def update(updates, state, params=None, *, about="gradients", within=None, **extra):
        admit(
            updates,
            "surviving_mean",
            axis=axis,
            about=about,
            within=within,
            takes=ANYTHING,
        )
        good = all_finite(exchanged(updates))
        own = map_leaves(lambda x: jnp.where(good, precise(x), 0), exchanged(updates))
        sums, n = reduce_sum((own, good.astype(jnp.float32)), axis)
        workers = axis_size(axis)
        # 0/0 is NaN. A division by a constant may be rounded otherwise, as in mean.
        share = lambda total: jnp.where(n == workers, total / workers, total / n)
        return like(updates, map_leaves(share, sums)), _told(state, (), good, n, axis)

    return Exchange(lambda params: _begin((), axis), update)


def surviving(exchange: optax.GradientTransformation, *, axis: Axis = AXIS) -> Exchange:
    r"""``exchange`` without the news of workers whose trees are not finite.

    .. math::
        v_i = \begin{cases} \tfrac{K}{n} u_i & u_i \text{ finite} \\ 0 & \text{else}
        \end{cases}, \qquad
        x_i \leftarrow \text{exchange}(v)_i, \qquad
        \tfrac1K \sum_i v_i = \tfrac1n \sum_{j \text{ finite}} u_j

    For exchanges that say the mean, at once or over time: ``compressed_mean``,
    ``error_feedback``, ``two_stage_feedback``, ``powersgd``, chains over two axes
    (``axis`` then names both). What is scaled is what goes in, not what is heard: a
    residual is then exactly what is still to be said of the mean over survivors, at
    the weight it had when it was put off. Residuals stay finite, those of who is left
    out too, which goes on saying what it owes. Where no worker is finite what is heard
    is NaN, and the memory of ``exchange`` is as if it had not been asked. Where all are
    finite this is ``exchange``, bit for bit.

    Sends what ``exchange`` does, and 4 bytes for the vote before it. It goes around
    ``per_shard``: inside, each shard of a worker would vote for itself.

    Raises:
        ValueError: in ``init``, ``difference_feedback``, whose memory would follow the
            zeros; at trace, parameters, ``gossip``, other axes than the exchange's.

    Note:
        A vote of signs (``majority_vote``) has no mean; with two levels zero is a plus.

    Example:
        Worker 1 is left out; of the first worker's 4 and 1 the smaller is put off.

        >>> from lowcomm import error_feedback, spread, top_k
        >>> tx = surviving(error_feedback(top_k(0.5)))
        >>> worker = lambda g: tx.update(g, tx.init(g), step=0)
        >>> g = jnp.array([[4.0, 1.0], [jnp.inf, 2.0]])
        >>> heard, state = spread(worker)(g)
        >>> print(heard[0], state.surviving.error[0], state.surviving.error[1])
        [4. 0.] [0. 2.] [0. 0.]
    """
    expect(optax.GradientTransformation, exchange=exchange)
    exchange = optax.with_extra_args_support(exchange)

    def init(params):
        kept = exchange.init(params)
        if holds(kept, lambda s: isinstance(s, DifferenceFeedbackState)):
            raise ValueError(
                "surviving would tell difference_feedback that a gradient has become "
                "zero, and its memory would follow: keep such gradients out by "
                "skip_nonfinite(..., axis=...) around it."
            )
        return _begin(kept, axis)

    def update(
        updates,
        state,
        params=None,
        *,
        about="gradients",
        within=None,
        **extra,
    ):
        admit(
            updates,
            "surviving",
            axis=axis,
            about=about,
            within=within,
            takes=("gradients", "displacements"),
            instead="Use rounds, which exchanges displacements from a common anchor.",
        )
        good = all_finite(exchanged(updates))
        n = reduce_sum(good.astype(jnp.float32), axis)
        scale = jnp.where(good, axis_size(axis) / jnp.maximum(n, 1), 0)

        def share(x):
            finite = jnp.where(good, precise(x), 0)  # 0 · NaN would be NaN
            return fitting(finite * scale.astype(finite.dtype), x.dtype)

        heard, kept = exchange.update(
            map_exchanged(share, updates),
            state.surviving,
            params,
            about="displacements",  # all must hear the same
            within=axis,
            **extra,
        )
        nobody = n == 0
        heard = map_exchanged(lambda x: jnp.where(nobody, jnp.nan, x), heard)
        choose = lambda old, new: jnp.where(nobody, old, new)
        kept = jax.tree.map(choose, state.surviving, kept)
        return heard, _told(state, kept, good, n, axis)

    return Exchange(init, update)


def _begin(kept: PyTree, axis: Axis) -> SurvivingState:
    zero = lambda: jnp.zeros((), jnp.int32)
    return vary(SurvivingState(zero(), zero(), kept), axis)


def _told(
    state: SurvivingState, kept: PyTree, good: jax.Array, n: jax.Array, axis: Axis
) -> SurvivingState:
    dropped = axis_size(axis) - n.astype(jnp.int32)
    absences = state.absences + ~good
    return vary(SurvivingState(dropped, absences.astype(jnp.int32), kept), axis)
