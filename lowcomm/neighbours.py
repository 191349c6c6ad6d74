r"""Compressed gossip: neighbours hear differences to what they know already.

Each worker has a public copy x̂ of its parameters, which its neighbours follow exactly,
since they hear every change of it:

    q_i = C(x_i − x̂_i);   x̂_j ← x̂_j + q_j for itself and its neighbours
    x_i ← x_i + γ Σ_j W_ij (x̂_j − x̂_i)

A copy for each neighbour is not needed. On a graph that does not change the sum

    gap_i = Σ_j W_ij (x̂_j − x̂_i)

is linear in the copies, so it grows by Σ_j W_ij (q_j − q_i), all of which the worker
hears. Kept in this form workers that say the same have a gap of exactly zero, and since
the columns of W sum to one, Σ_i gap_i = 0 at all times: for any C and any γ the mean of
the workers stays.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .compressors import Compressor
from .exchange import Exchange, admit, like
from .keys import leaf_keys
from .leaves import (
    PyTree,
    check_same_leaves,
    fitting,
    map_exchanged,
    map_leaves,
    precise,
    subtract,
    takes_part,
    zeros,
)
from .parts import expect
from .sharded import by_shard
from .spmd import AXIS, Axis, axis_size
from .topology import Graph, mixing_matrix
from .transport import permute
from .uniform import now


class ChocoState(NamedTuple):
    """State of ``choco``."""

    public: PyTree  # x̂ of this worker, as its neighbours know it
    gap: PyTree  # Σ_j W_ij (x̂_j − x̂_i)


def choco(
    graph: Graph,
    compressor: Compressor,
    *,
    step_size: float,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Exchange:
    r"""Gossip that sends compressed differences to what the neighbours know.

    .. math::
        q_i = C(x_i - \hat x_i), \qquad \hat x_j \leftarrow \hat x_j + q_j, \qquad
        x_i \leftarrow x_i + \gamma \sum_j W_{ij} (\hat x_j - \hat x_i)

    For ``average``: ``x`` are the parameters proposed, ``W`` is
    ``mixing_matrix(graph)``, ``γ`` is ``step_size``, in (0, 1]. The mean over the
    workers stays, whatever ``C`` and ``γ``. State: two trees in float32 or wider,
    ``x̂`` (``state.public``, zeros at first) and the sum (``state.gap``). Sends one
    payload of ``compressor`` to each neighbour, in one message.

    The less ``C`` says the smaller ``γ`` must be: on a ring of eight with the two
    largest of twenty entries, workers come together for γ up to 0.3 and blow up from
    0.4 on. The identity allows 1, and is gossip then. Until the parameters have been
    said once, in 1/density exchanges or more, neighbours hardly know each other.

    Workers that agree stay where they are if ``C`` draws nothing by itself (a
    compressor that rounds at random moves them apart, by a part of its error). What is
    not finite is heard by the neighbours, and forgotten.

    Raises:
        ValueError: a graph of several rounds, a compressor that needs a statistic of
            all workers, a step size outside (0, 1]; at trace, a graph for another
            number of workers, something else than parameters.

    Note:
        The published algorithm keeps a copy for each neighbour. Their weighted sum is
        all that is used of them, and takes one tree, whatever the graph.

    Example:
        The largest coordinate of each comes half of the way to the other's.

        >>> from lowcomm import average, ring, spread, top_k
        >>> import optax
        >>> tx = average(optax.sgd(1.0), exchange=choco(ring(2), top_k(0.5),
        ...                                             step_size=0.5))
        >>> def worker(x):
        ...     moves, _ = tx.update(0 * x, tx.init(x), x, step=0)
        ...     return x + moves
        >>> print(spread(worker)(jnp.array([[8.0, 1.0], [4.0, 3.0]])))
        [[7. 1.]
         [5. 3.]]

    References:
        Koloskova, Stich and Jaggi, `Decentralized Stochastic Optimization and Gossip
        Algorithms with Compressed Communication <https://arxiv.org/abs/1902.00340>`_,
        2019, Algorithms 1 and 2.
    """
    expect(Graph, graph=graph)
    expect(Compressor, compressor=compressor)
    if not isinstance(step_size, Tracer) and not 0 < step_size <= 1:
        raise ValueError(f"step_size {step_size} is outside (0, 1].")
    if len(graph.rounds) != 1:
        raise ValueError(
            f"{graph.name} has {len(graph.rounds)} rounds, and who is heard in one of "
            "them misses what was said in the others: choco needs a graph that does "
            "not change, such as ring(8) or exponential(8)."
        )
    if compressor.statistic is not None:
        raise ValueError(
            "this compressor needs a statistic of all workers, and neighbours know "
            "only each other: take one with a scale of its own, such as quantize(8)."
        )
    mixing_matrix(graph)  # raises unless it is doubly stochastic
    away = [(w, p) for w, p in graph.rounds[0] if p != tuple(range(graph.size))]

    def init(params):
        return ChocoState(zeros(params), zeros(params))

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
        admit(
            updates,
            "choco",
            axis=axis,
            about=about,
            within=within,
            takes=("parameters",),
            instead="Its copies follow a model: use average.",
        )
        if graph.size != axis_size(axis):
            raise ValueError(
                f"{graph.name} has {graph.size} nodes and axis {axis!r} has "
                f"{axis_size(axis)} workers: build the graph for {axis_size(axis)}."
            )
        check_same_leaves("choco", state.public, updates)
        news = map_exchanged(
            lambda x, known: fitting(subtract(x, known), x.dtype), updates, state.public
        )
        own, others = _tell(compressor, news, away, now(step, axis), seed, axis)

        def drawn(x, gap, own, *others):
            pulls = zip(away, others, strict=True)
            total = sum((w * (q - own) for (w, _), q in pulls), jnp.zeros_like(gap))
            return (precise(x) + step_size * (gap + total)).astype(x.dtype)

        # All who hear it, and the worker itself, leave out what is not finite.
        kept = lambda q: jnp.where(jnp.isfinite(q), q, 0)

        def remembered(gap, own, *others):
            pulls = zip(away, others, strict=True)
            return sum((w * (kept(q) - kept(own)) for (w, _), q in pulls), gap)

        heard = map_exchanged(drawn, updates, state.gap, own, *others)
        public = map_leaves(lambda h, q: h + kept(q), state.public, own)
        gap = map_leaves(remembered, state.gap, own, *others)
        return like(updates, heard), ChocoState(public, gap)

    return by_shard(Exchange(init, update))


def _tell(compressor, news, away, step, seed, axis):
    """What this worker said, and what it heard along each permutation."""
    leaves, treedef = jax.tree.flatten(news)
    places = [i for i, x in enumerate(leaves) if takes_part(x)]
    keys = [leaf_keys(seed, step, i, axis) for i in places]
    wide = lambda x: precise(x) if compressor.linear else x
    xs = [wide(leaves[i]) for i in places]
    payloads = [compressor.encode(x, k) for x, k in zip(xs, keys, strict=True)]
    # Half precision is decoded precisely, and rounded once, in the parameters.
    kinds = [jax.ShapeDtypeStruct(x.shape, precise(x).dtype) for x in xs]

    def read(payloads):
        # Integer codes are sums elsewhere, and means of them what is decoded.
        if compressor.bound is not None:
            payloads = jax.tree.map(lambda x: x.astype(jnp.float32), payloads)
        out = list(leaves)
        for i, payload, kind, k in zip(places, payloads, kinds, keys, strict=True):
            k = k._replace(private=None)  # the neighbours' is another
            out[i] = compressor.decode(payload, kind, k)
        return jax.tree.unflatten(treedef, out)

    heard = [permute(payloads, list(enumerate(p)), axis) for _, p in away]
    return read(payloads), [read(payload) for payload in heard]
