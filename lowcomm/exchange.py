r"""Exchanges: optax transformations that talk along a named axis.

An exchange takes this worker's tree and returns what it heard, a tree like its input:

    mean            x_i ← (1/K) Σ_j x_j                  the same everywhere
    weighted_mean   x_i ← Σ_j w_j x_j / Σ_j w_j          the same everywhere
    gossip          x_i ← Σ_j W_ij x_j                   each worker its own

It may stand anywhere in an ``optax.chain`` before an optimizer, where it exchanges
gradients, or be handed to ``average`` (which exchanges parameters) or ``rounds``
(displacements). Two levels are a chain over two axes. A verb tells its exchange what
it is about (``about=``) and along which axes the workers are (``within=``), so that
one that makes no sense there says so.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from . import uniform
from .leaves import (
    PyTree,
    exchanged,
    fitting,
    map_exchanged,
    map_leaves,
    precise,
    takes_part,
)
from .parts import expect
from .spmd import AXIS, Axis, axis_size, names, tracks_variance, vary, varying_axes
from .topology import Graph, Round, mixing_matrix
from .transport import permute, reduce_max, reduce_mean, reduce_sum

ANYTHING = ("gradients", "parameters", "displacements")


# ``init(params)`` and ``update(tree, state, params=None, *, step, **extra)``, which
# returns what was heard and the state.
Exchange: TypeAlias = optax.GradientTransformationExtraArgs


class GossipState(NamedTuple):
    """State of ``gossip``, of one kind whatever the graph."""

    exchanges: jax.Array  # int32, how often it has mixed on a graph that changes


_VOTES: contextvars.ContextVar[tuple] = contextvars.ContextVar("votes", default=())


@contextlib.contextmanager
def decided_by(who: str, axis: Axis) -> Iterator[None]:
    """Within, what is kept is decided by each group of workers along ``axis``.

    Exchanges that reach further are refused: what one group keeps another would not.
    """
    token = _VOTES.set((*_VOTES.get(), (who, names(axis))))
    try:
        yield
    finally:
        _VOTES.reset(token)


def admit(
    tree: PyTree,
    name: str,
    *,
    axis: Axis,
    about: str,
    within: Axis | None,
    takes: tuple[str, ...],
    instead: str = "",
) -> None:
    """Raise unless the exchange ``name`` makes sense where it is called."""
    axis_size(axis)
    for who, voters in _VOTES.get():
        if not set(names(axis)) <= set(voters):
            among = f"those along {voters} decide" if voters else "each worker decides"
            raise ValueError(
                f"{name} talks along {axis!r} inside {who}, where {among} what to "
                f"keep, and workers would drift apart: put {who} around the inner "
                f"optimizer, or let all of them vote: {who}(..., axis={axis!r})."
            )
    if within is not None and not set(names(axis)) <= set(names(within)):
        raise ValueError(
            f"{name} talks along {names(axis)} and stands in a verb over "
            f"{names(within)}: give both the same axis=, or the verb all of them."
        )
    if about not in takes:
        raise ValueError(
            f"{name} exchanges {' and '.join(takes)}, not {about}. {instead}"
        )
    if about == "gradients":
        check_local(tree, axis)


def check_local(grads: PyTree, axis: Axis, params: PyTree = None) -> None:
    """Raise if ``grads`` were already summed over the workers by JAX itself.

    The gradient of a parameter that is declared replicated is, under shard_map's
    check, the *sum* of the workers' gradients, and typed as equal everywhere.
    """
    if not names(axis) or not tracks_variance(axis):
        return
    reduced = lambda tree: any(
        not varying_axes(x) & set(names(axis))
        for x in jax.tree.leaves(tree)
        if takes_part(x)
    )
    if reduced(grads) and (params is None or reduced(params)):
        raise ValueError(
            f"the gradients are equal along axis {axis!r} before any exchange: JAX "
            "already summed them, because the parameters are declared replicated. "
            "Mark them with lowcomm.spmd.vary(params, axis) before differentiating, "
            "as local_step does, or stack them and use spread. (Constants that are not "
            "gradients need the mark too.)"
        )


def like(tree: PyTree, heard: PyTree) -> PyTree:
    """``heard`` in the types of ``tree``, whose other leaves stay what they are.

    What is finite stays finite, as the largest number of a narrower type.
    """
    return map_exchanged(lambda x, h: fitting(h, jnp.result_type(x)), tree, heard)


def mean(axis: Axis = AXIS) -> Exchange:
    r"""The mean over the workers.

    .. math:: x_i \leftarrow \tfrac1K \sum_j x_j

    Sends every leaf once by an all-reduce; half-precision leaves travel and are
    summed in float32. The result is the same, bit for bit, on all workers.

    Example:
        >>> from lowcomm import spread
        >>> worker = lambda g: mean().update(g, ())[0]
        >>> spread(worker)(jnp.array([1.0, 2.0, 6.0]))
        Array([3., 3., 3.], dtype=float32)
    """

    def update(updates, state, params=None, *, about="gradients", within=None, **extra):
        admit(updates, "mean", axis=axis, about=about, within=within, takes=ANYTHING)
        return like(updates, reduce_mean(exchanged(updates), axis)), state

    return Exchange(lambda params: optax.EmptyState(), update)


def weighted_mean(axis: Axis = AXIS) -> Exchange:
    r"""The mean weighted by ``update(..., weight=w)``, one scalar a worker.

    .. math:: x_i \leftarrow \sum_j w_j x_j \big/ \sum_j w_j

    Sends every leaf once and one float32 by all-reduces. A worker of weight zero does
    not count, even if it holds NaN. If all weights are zero every worker keeps its own.

    Example:
        >>> from lowcomm import spread
        >>> worker = lambda g, w: weighted_mean().update(g, (), weight=w)[0]
        >>> spread(worker)(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([3.0, 1.0, 0.0]))
        Array([1.25, 1.25, 1.25], dtype=float32)
    """

    def update(
        updates,
        state,
        params=None,
        *,
        weight=None,
        about="gradients",
        within=None,
        **extra,
    ):
        admit(
            updates,
            "weighted_mean",
            axis=axis,
            about=about,
            within=within,
            takes=ANYTHING,
        )
        if weight is None or jnp.ndim(weight) != 0:
            raise ValueError(
                "weighted_mean needs update(..., weight=w), one scalar a worker, "
                f"not {'nothing' if weight is None else jnp.shape(weight)}."
            )
        w = jnp.asarray(weight, jnp.float32)
        mine = lambda x: jnp.where(w == 0, 0, precise(x) * w)
        parts, total = reduce_sum((map_leaves(mine, exchanged(updates)), w), axis)

        def heard(x, part):
            return jnp.where(total == 0, precise(x), part / total).astype(x.dtype)

        return map_exchanged(heard, updates, parts), state

    return Exchange(lambda params: optax.EmptyState(), update)


def gossip(graph: Graph, *, axis: Axis = AXIS) -> Exchange:
    r"""Mix with the neighbours of a graph.

    .. math:: x_i \leftarrow \sum_j W_{ij} x_j

    ``W`` is ``mixing_matrix(graph)``, doubly stochastic, so the mean over the workers
    stays, and workers that agree stay as they are, bit for bit. Sends every leaf once
    to each neighbour, in the leaf's own type; sums are formed in float32. A graph of
    several rounds takes the next one at each exchange (not at each step: with a period
    that shares a factor with the number of rounds some would never be used); the
    number of exchanges made is agreed on by one 4-byte maximum.

    Raises:
        ValueError: a graph that is not doubly stochastic; at trace, one that is not
            for this number of workers.

    Example:
        >>> from lowcomm import ring, spread
        >>> worker = lambda x: gossip(ring(4)).update(x, optax.EmptyState())[0]
        >>> spread(worker)(jnp.array([0.0, 0.0, 3.0, 0.0]))
        Array([0., 1., 1., 1.], dtype=float32)
    """
    expect(Graph, graph=graph)
    changing = len(graph.rounds) > 1
    for i in range(len(graph.rounds)):
        mixing_matrix(graph, i)  # raises unless it is doubly stochastic

    def init(params):
        return GossipState(vary(jnp.zeros((), jnp.int32), axis))

    def update(updates, state, params=None, *, about="gradients", within=None, **extra):
        admit(
            updates,
            "gossip",
            axis=axis,
            about=about,
            within=within,
            takes=("gradients", "parameters"),
            instead="Anchors that hear different things drift apart: use average.",
        )
        if graph.size != axis_size(axis):
            raise ValueError(
                f"{graph.name} has {graph.size} nodes and axis {axis!r} has "
                f"{axis_size(axis)} workers: build the graph for {axis_size(axis)}."
            )
        if not changing:
            return _mix(updates, graph.rounds[0], axis), state
        exchanges = reduce_max(state.exchanges, axis)
        heard = uniform.switch(
            exchanges % len(graph.rounds),
            [
                lambda updates, part=part: _mix(updates, part, axis)
                for part in graph.rounds
            ],
            updates,
            axis=axis,
        )
        return heard, GossipState(vary(exchanges + 1, axis))

    return Exchange(init, update)


def _mix(tree: PyTree, part: Round, axis: Axis) -> PyTree:
    """``x + Σ weight · (heard along permutation − x)``: the weights sum to one."""
    # In this form workers that agree already stay as they are, bit for bit.
    sent = exchanged(tree)
    total = map_leaves(precise, sent)
    for weight, permutation in part:
        pairs = list(enumerate(permutation))
        if any(i != j for i, j in pairs):
            # Whoever sits out hears itself: permute would hand it zeros.
            heard = permute(sent, pairs, axis)
            move = lambda t, h, x, w=weight: t + w * (precise(h) - precise(x))
            total = map_leaves(move, total, heard, sent)
    return like(tree, total)
