"""Methods that exchange gradients at every step."""

from __future__ import annotations

import optax

from ..exchange import mean
from ..feedback import error_feedback
from ..lowrank import powersgd
from ..matrices import Rank
from ..selections import top_k
from ..signs import sign
from ..spmd import AXIS, Axis
from ..sync import Talking, Transformation


def data_parallel(inner: Transformation, *, axis: Axis = AXIS) -> Talking:
    r"""Synchronous data-parallel training: the mean gradient, then ``inner``.

    .. math:: x \leftarrow x + \text{inner}(\tfrac1K \sum_i g_i)

    Sends the gradients once a step. The baseline of everything else.

    Example:
        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = data_parallel(optax.sgd(1.0))
        >>> worker = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        >>> spread(worker)(jnp.array([1.0, 3.0]))
        Array([-2., -2.], dtype=float32)
    """
    return optax.chain(mean(axis), inner)


def top_k_sgd(
    inner: Transformation, *, fraction: float = 0.01, axis: Axis = AXIS
) -> Talking:
    r"""Top-k sparsified gradients with error feedback, then ``inner``.

    .. math::
        p_i = e_i + g_i, \quad
        x \leftarrow x + \text{inner}(\tfrac1K \textstyle\sum_i
        \text{top}_k(p_i)), \quad
        e_i \leftarrow p_i - \text{top}_k(p_i)

    ``k`` is ``fraction`` of each leaf's entries. Sends k values and their places, in 8
    to 16 bits each, a leaf and step.

    Note:
        The residual is in units of gradients, so a learning rate applies when an entry
        is sent; Stich et al. keep it in units of steps. The two are the same at a
        constant rate with ``optax.sgd``.

    Example:
        The small coordinate is not lost: it is sent once it has added up.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = top_k_sgd(optax.sgd(1.0), fraction=0.5)
        >>> def worker(g):
        ...     state, sent = tx.init(g), []
        ...     for t in range(3):
        ...         moves, state = tx.update(g, state, g, step=t)
        ...         sent.append(moves)
        ...     return jnp.stack(sent)
        >>> print(spread(worker)(jnp.array([[3.0, 2.0]]))[0])
        [[-3. -0.]
         [-0. -4.]
         [-6. -0.]]

    References:
        Stich, Cordonnier and Jaggi, `Sparsified SGD with Memory
        <https://arxiv.org/abs/1809.07599>`_, 2018, Algorithm 1.
    """
    return optax.chain(error_feedback(top_k(fraction), axis=axis), inner)


def sign_sgd(inner: Transformation, *, axis: Axis = AXIS) -> Talking:
    r"""Scaled signs with error feedback, then ``inner`` (EF-signSGD).

    .. math::
        p_i = e_i + g_i, \quad C(p) = \tfrac{\lVert p \rVert_1}{d}\,\text{sign}(p),
        \quad x \leftarrow x + \text{inner}(\tfrac1K \textstyle\sum_i C(p_i)),
        \quad e_i \leftarrow p_i - C(p_i)

    ``d`` is the size of the leaf, which has a scale of its own. Sends one bit an
    entry and one float32 a leaf and step.

    Note:
        The residual is in units of gradients; see ``top_k_sgd``.

    Example:
        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = sign_sgd(optax.sgd(1.0))
        >>> worker = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        >>> spread(worker)(jnp.array([[3.0, -1.0]]))
        Array([[-2.,  2.]], dtype=float32)

    References:
        Karimireddy et al., `Error Feedback Fixes SignSGD and other Gradient
        Compression Schemes <https://arxiv.org/abs/1901.09847>`_, 2019, Algorithm 1.
    """
    return optax.chain(error_feedback(sign(), axis=axis), inner)


def powersgd_sgd(
    inner: Transformation,
    *,
    rank: Rank = 2,
    min_compression: float = 2.0,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Talking:
    r"""Low-rank gradients with error feedback, then ``inner`` (PowerSGD).

    .. math:: x \leftarrow x + \text{inner}(P Q^\top)

    with the factors of ``powersgd``, whose ``rank`` and ``min_compression`` these are.
    Sends ``rank · (m + n)`` float32 for each matrix ``[m, n]``; vectors, and matrices
    that this makes less than ``min_compression`` times smaller, whole. Momentum belongs
    into ``inner``, after the decompression.

    Example:
        >>> import jax.numpy as jnp
        >>> from lowcomm import spread, traffic
        >>> g = jnp.ones((64, 32))
        >>> def sent(tx):
        ...     step = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        ...     return traffic(step, g, workers=8).bytes_always
        >>> sent(optax.chain(powersgd_sgd(optax.sgd(1.0), rank=2))), 64 * 32 * 4
        (768, 8192)

    References:
        Vogels, Karimireddy and Jaggi, `PowerSGD <https://arxiv.org/abs/1905.13727>`_,
        2019, Algorithms 1 and 2.
    """
    exchange = powersgd(rank, min_compression=min_compression, seed=seed, axis=axis)
    return optax.chain(exchange, inner)
