"""Methods in which workers talk to their neighbours in a graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import uniform
from ..compressors import Compressor
from ..exchange import gossip
from ..leaves import PyTree, add, map_leaves, movable, precise, subtract
from ..neighbours import choco
from ..parts import expect
from ..spmd import AXIS, Axis, vary
from ..sync import Talking, Transformation, average, enter, leave, propose
from ..topology import Graph
from ..triggers import Trigger, clock
from .outer import check_outer


class NoLoCoState(NamedTuple):
    """State of ``noloco``."""

    inner: Any
    trigger: Any
    mixing: Any  # the gossip's
    own_anchor: PyTree  # where this worker's round began, another on each worker
    velocity: PyTree  # this worker's outer momentum
    since: jax.Array  # int32, steps since the last sync


def dpsgd(
    inner: optax.GradientTransformation, graph: Graph, *, axis: Axis = AXIS
) -> optax.GradientTransformationExtraArgs:
    r"""D-PSGD: a local step, then mix with the neighbours.

    .. math:: x_i \leftarrow \sum_j W_{ij} \big( x_j + \text{inner}(g_j) \big)

    ``W`` is ``mixing_matrix(graph)``. Sends the parameters to each neighbour at every
    step; on the complete graph it is parameter averaging. Workers never agree
    exactly: evaluate ``consensus``.

    Note:
        This is the adapt-then-combine order. The paper combines first, ``W x + inner``,
        so that mixing and gradient run side by side: that is
        ``average(inner, exchange=overlapped(gossip(graph)))``.

    Example:
        >>> import jax.numpy as jnp
        >>> from lowcomm import ring, spread
        >>> tx = dpsgd(optax.sgd(1.0), ring(4))
        >>> worker = lambda g: tx.update(g, tx.init(g), 0 * g, step=0)[0]
        >>> spread(worker)(jnp.array([3.0, 0.0, 0.0, 0.0]))
        Array([-1., -1.,  0., -1.], dtype=float32)

    References:
        Lian et al., `Can Decentralized Algorithms Outperform Centralized Algorithms?
        <https://arxiv.org/abs/1705.09056>`_, 2017, Algorithm 1.
    """
    return average(inner, exchange=gossip(graph, axis=axis), axis=axis)


def choco_sgd(
    inner: optax.GradientTransformation,
    graph: Graph,
    compressor: Compressor,
    *,
    step_size: float,
    axis: Axis = AXIS,
) -> optax.GradientTransformationExtraArgs:
    r"""CHOCO-SGD: a local step, then neighbours hear compressed differences.

    .. math::
        x_i \leftarrow x_i + \text{inner}(g_i), \quad q_i = C(x_i - \hat x_i), \quad
        \hat x_j \leftarrow \hat x_j + q_j, \quad
        x_i \leftarrow x_i + \gamma \textstyle\sum_j W_{ij} (\hat x_j - \hat x_i)

    with ``choco(graph, compressor, step_size=γ)``, where more is said of ``γ``: mind
    that a compressor that says little needs a small one. Whatever they are, the mean
    over the workers moves by the mean of what ``inner`` does. Sends one payload to
    each neighbour at every step. Workers never agree exactly: evaluate ``consensus``.

    Example:
        The identity and a step size of 1 are D-PSGD.

        >>> import jax.numpy as jnp
        >>> from lowcomm import ring, spread, top_k
        >>> tx = choco_sgd(optax.sgd(1.0), ring(4), top_k(1.0), step_size=1.0)
        >>> worker = lambda g: tx.update(g, tx.init(g), 0 * g, step=0)[0]
        >>> spread(worker)(jnp.array([3.0, 0.0, 0.0, 0.0]))
        Array([-1., -1.,  0., -1.], dtype=float32)

    References:
        Koloskova, Stich and Jaggi, `Decentralized Stochastic Optimization and Gossip
        Algorithms with Compressed Communication <https://arxiv.org/abs/1902.00340>`_,
        2019, Algorithm 2.
    """
    exchange = choco(graph, compressor, step_size=step_size, axis=axis)
    return average(inner, exchange=exchange, axis=axis)


def noloco(
    inner: Transformation,
    graph: Graph,
    *,
    period: int | Trigger = 50,
    outer_lr: float = 0.7,
    momentum: float = 0.5,
    axis: Axis = AXIS,
) -> Talking:
    r"""NoLoCo: rounds of local steps that end with one partner, not with all workers.

    .. math::
        v_i \leftarrow \mu v_i + \eta \big( \textstyle\sum_j W_{ij} x_j - a_i \big),
        \qquad a_i \leftarrow a_i + v_i, \qquad x_i \leftarrow a_i

    ``W`` is ``mixing_matrix(graph)``, a random matching each round with
    ``random_matchings``; ``a_i`` is where worker i began the round, ``η`` is
    ``outer_lr``, ``μ`` is ``momentum``. Sends the parameters, in float32 or wider, to
    each neighbour once every ``period`` steps, and 4 bytes where the graph changes.
    Workers never agree exactly: evaluate ``consensus``, their mean, after a sync.

    Of random pairs that stay where they are, the disagreement shrinks in mean square
    for ``η < 2 (1 − μ²)`` (many workers): at ``η`` = 0.7 the momentum must stay below
    0.8, and DiLoCo's 0.9 drives the workers apart.

    Note:
        The published rule mixes two trees, displacements and anchors:
        ``v ← μ v + η · W(x − a) + η · (W a − a)``. With one ``η`` for both they add up
        to ``η (W x − a)``, so the parameters alone travel, half of the bytes. The
        paper's graph is a random matching each round; others are an extension.

    Example:
        Two partners with equal anchors take steps of heavy-ball averaging.

        >>> import jax.numpy as jnp
        >>> from lowcomm import random_matchings, spread
        >>> pairs = random_matchings(2, rounds=1)
        >>> tx = noloco(optax.sgd(1.0), pairs, period=1, outer_lr=0.5)
        >>> def worker(x, g):
        ...     state, path = tx.init(x), []
        ...     for t in range(2):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> print(spread(worker)(jnp.zeros(2), jnp.array([-1.0, -3.0])))
        [[1.  2.5]
         [1.  2.5]]

    References:
        Kolehmainen et al., `NoLoCo: No-all-reduce Low Communication Training Method
        for Large Models <https://arxiv.org/abs/2506.10911>`_, 2025.
    """
    expect(optax.GradientTransformation, inner=inner)
    check_outer(outer_lr=outer_lr, momentum=momentum)
    inner = optax.with_extra_args_support(inner)
    mixing, when = gossip(graph, axis=axis), clock(period)

    def init(params):
        params = movable(params)
        wide = lambda: jax.tree.map(
            lambda p: jnp.array(precise(jnp.asarray(p))), params
        )
        state = NoLoCoState(
            inner.init(params),
            when.init(params),
            mixing.init(params),
            wide(),
            jax.tree.map(jnp.zeros_like, wide()),
            jnp.zeros((), jnp.int32),
        )
        return vary(state, axis)

    def update(updates, state, params=None, *, step=None, **extra):
        whole, grads, params = enter(updates, params, step, axis)
        moves, inner_state = propose(
            inner, grads, state.inner, params, step=step, **extra
        )
        since = state.since + 1
        fire, trigger = when.fire(
            state.trigger,
            step=step,
            since=since,
            drift=None,
            grads=grads,
            axis=axis,
            **extra,
        )

        def wide(x, a):
            # A half-precision worker that has not moved stands for its own anchor.
            return x if x.dtype == a.dtype else a + subtract(x, a.astype(x.dtype))

        def talk(mixing_state, anchor, velocity, since):
            here = map_leaves(wide, map_leaves(add, params, moves), anchor)
            heard, mixing_state = mixing.update(
                here, mixing_state, about="parameters", within=axis
            )
            turn = lambda v, h, a: momentum * v + outer_lr * (h - a)
            velocity = map_leaves(turn, velocity, heard, anchor)
            anchor = map_leaves(jnp.add, anchor, velocity)
            there = lambda p, a: subtract(a.astype(p.dtype), p)
            sync = map_leaves(there, params, anchor)
            return sync, mixing_state, anchor, velocity, jnp.zeros_like(since)

        moves, *outer = uniform.cond(
            fire,
            talk,
            lambda *same: (map_leaves(precise, moves), *same),
            state.mixing,
            state.own_anchor,
            state.velocity,
            since,
            axis=axis,
        )
        state = NoLoCoState(vary(inner_state, axis), trigger, *outer)
        return leave(moves, whole), state

    return Talking(init, update)
