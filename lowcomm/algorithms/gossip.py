"""Methods in which workers talk to their neighbours in a graph."""

from __future__ import annotations

import optax

from ..exchange import gossip
from ..spmd import AXIS, Axis
from ..sync import average
from ..topology import Graph


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
