r"""Compressed exchanges, and what they remember.

    compressed_mean(C)      heard = mean_j C(u_j)             no memory
    error_feedback(C)       p = decay·e + u;  e ← p − C(p)    what was not said
    difference_feedback(C)  c = C(u − h);  h ← h + rate·c     what was said

``u`` is this worker's tree, ``heard`` the same on all workers, bit for bit. Half-
precision leaves travel as they are when gathered, and in float32 when reduced. What is
not finite is heard by all, sooner or later, and then no memory keeps it. ``C`` is one
``Compressor`` for all leaves, or a ``PerLeaf`` that chooses one for each.

All of them take gradients or displacements, things that shrink to zero. Compressed
parameters would not be the parameters even where all workers already agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax.core import Tracer

from .compressors import Compressor
from .exchange import Exchange, like
from .leaves import (
    PyTree,
    check_same_leaves,
    map_exchanged,
    map_leaves,
    precise,
    subtract,
    zeros,
)
from .sharded import by_shard
from .spmd import AXIS, Axis
from .talk import (
    PerLeaf,
    admit_shrinking,
    check_divergence,
    expect_compressor,
    fitting,
    left_over,
    talk,
)


class ErrorFeedbackState(NamedTuple):
    """State of ``error_feedback``."""

    error: PyTree  # what this worker has not managed to say yet


class DifferenceFeedbackState(NamedTuple):
    """State of ``difference_feedback``."""

    said: PyTree  # the sum of what this worker said, scaled by rate
    heard: PyTree  # its mean over the workers, the same on all


def compressed_mean(
    compressor: Compressor | PerLeaf, *, seed: int = 0, axis: Axis = AXIS
) -> Exchange:
    r"""The mean of what the workers manage to say.

    .. math:: x_i \leftarrow \tfrac1K \sum_j C(x_j)

    Sends one payload of ``compressor`` for every leaf. What is not sent is lost:
    right for unbiased compressors; biased ones want ``error_feedback``.

    Example:
        >>> from lowcomm import spread, top_k
        >>> tx = compressed_mean(top_k(0.5))
        >>> worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
        >>> spread(worker)(jnp.array([[4.0, 1.0], [1.0, 2.0]]))
        Array([[2., 1.],
               [2., 1.]], dtype=float32)
    """
    expect_compressor(compressor)

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
        admit_shrinking(updates, "compressed_mean", axis, about, within)
        heard, _ = talk(compressor, updates, step=step, seed=seed, axis=axis)
        return like(updates, heard), state

    return by_shard(Exchange(lambda params: optax.EmptyState(), update))


def error_feedback(
    compressor: Compressor | PerLeaf,
    *,
    decay: float = 1.0,
    dtype: Any = None,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Exchange:
    r"""Send ``C(e + u)`` and remember the rest for next time.

    .. math::
        p_i = \beta e_i + u_i, \qquad
        x_i \leftarrow \tfrac1K \sum_j C(p_j), \qquad
        e_i \leftarrow p_i - C(p_i)

    ``u`` is the tree, ``e`` is ``state.error`` (one tree, zeros at first; ``dtype``,
    or at least float32) and ``β`` is ``decay``. Whatever the compressor,
    :math:`\sum_t \text{said}_t + e_T + (1-β)\sum_{t<T} e_t = \sum_t u_t`: nothing is
    lost at ``decay=1``, and old news fades below it. Sends one payload a leaf. The
    compressor must contract: around an unbiased one that scales up, such as
    ``random_k(unbiased=True)`` below one half, the error grows without bound.

    Raises:
        ValueError: decay outside [0, 1]; at trace, a tree of another structure, a
            compressor of which it is known that the error grows.

    Example:
        The second coordinate is heard at the second step, both shares of it.

        >>> from lowcomm import spread, top_k
        >>> tx = error_feedback(top_k(0.5))
        >>> def worker(g):
        ...     first, state = tx.update(g, tx.init(g), step=0)
        ...     second, _ = tx.update(g, state, step=1)
        ...     return first + 0, second + 0
        >>> spread(worker)(jnp.array([[3.0, 2.0]]))
        (Array([[3., 0.]], dtype=float32), Array([[0., 4.]], dtype=float32))

    References:
        Karimireddy et al., `Error Feedback Fixes SignSGD and other Gradient
        Compression Schemes <https://arxiv.org/abs/1901.09847>`_, 2019, Algorithm 1.
        Decay as in Sarfi et al., `Communication Efficient LLM Pre-training with
        SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025.
    """
    expect_compressor(compressor)
    if not isinstance(decay, Tracer) and not 0 <= decay <= 1:
        raise ValueError(f"decay {decay} is outside [0, 1].")

    def init(params):
        return ErrorFeedbackState(zeros(params, dtype))

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
        admit_shrinking(updates, "error_feedback", axis, about, within)
        check_same_leaves("error_feedback", state.error, updates)
        check_divergence(compressor, updates, "error_feedback")
        wanted = map_exchanged(
            lambda u, e: precise(u) + decay * e, updates, state.error
        )
        spoken = map_exchanged(lambda u, p: fitting(p, u.dtype), updates, wanted)
        heard, said = talk(compressor, spoken, step=step, seed=seed, axis=axis)
        unsaid = lambda e, p, s: fitting(left_over(p, s), e.dtype)
        error = map_leaves(unsaid, state.error, wanted, said)
        return like(updates, heard), ErrorFeedbackState(error)

    return by_shard(Exchange(init, update))


def difference_feedback(
    compressor: Compressor | PerLeaf,
    *,
    rate: float | Callable[[int], float] = 1.0,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Exchange:
    r"""Send the compressed difference to what was said before.

    .. math::
        c_i = C(u_i - h_i), \qquad
        x_i \leftarrow \bar h + \tfrac1K \sum_j c_j, \qquad
        h_i \leftarrow h_i + \alpha c_i, \quad
        \bar h \leftarrow \bar h + \alpha \tfrac1K \sum_j c_j

    ``h_i`` is ``state.said`` and its mean over the workers ``state.heard`` (one tree
    each, float32 or wider, zeros at first); ``α`` is ``rate``, a number or a function
    of a leaf's number of elements. With ``rate=1`` and a contractive compressor this is
    EF21; with an unbiased one of variance ω and ``rate ≤ 1/(1+ω)`` it is DIANA. At a
    fixed point nothing is left to say, so there is no error floor when the workers'
    gradients differ. Sends one payload a leaf.

    Raises:
        ValueError: rate outside (0, 1], a function's at trace; at trace, a tree of
            another structure.

    Note:
        What is heard already has this exchange's news in it. So ``h`` from zeros is
        EF21 from ``C(u)`` of the first step, without a step of zeros before.

    Example:
        Half a vector a step: after two steps it is known exactly.

        >>> from lowcomm import spread, top_k
        >>> tx = difference_feedback(top_k(0.5))
        >>> def worker(g):
        ...     _, state = tx.update(g, tx.init(g), step=0)
        ...     return tx.update(g, state, step=1)[0]
        >>> spread(worker)(jnp.array([[3.0, 2.0], [1.0, 6.0]]))
        Array([[2., 4.],
               [2., 4.]], dtype=float32)

    References:
        Richtárik, Sokolov and Fatkhullin, `EF21
        <https://arxiv.org/abs/2106.05203>`_, 2021, Algorithm 2. Mishchenko et al.,
        `Distributed Learning with Compressed Gradient Differences
        <https://arxiv.org/abs/1901.09269>`_, 2019 (DIANA), Algorithm 1.
    """
    expect_compressor(compressor)

    def rate_of(elements: int) -> Any:
        alpha = rate(elements) if callable(rate) else rate
        if isinstance(alpha, Tracer):  # by inject_hyperparams
            return alpha
        if not 0 < alpha <= 1:
            raise ValueError(f"rate {alpha} is outside (0, 1].")
        return float(alpha)

    if not callable(rate):
        rate_of(1)

    def init(params):
        return DifferenceFeedbackState(zeros(params), zeros(params))

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
        admit_shrinking(updates, "difference_feedback", axis, about, within)
        check_same_leaves("difference_feedback", state.said, updates)
        check_divergence(compressor, updates, "difference_feedback", rate_of)
        news = map_exchanged(
            lambda u, h: fitting(subtract(u, h), u.dtype), updates, state.said
        )
        heard, said = talk(compressor, news, step=step, seed=seed, axis=axis)
        out = map_exchanged(
            lambda u, h, c: fitting(h + c, u.dtype),
            updates,
            state.heard,
            heard,
        )

        # Where some worker's news is not finite, none of them keeps its own.
        def remember(h, c, all):
            return jnp.where(jnp.isfinite(all), h + rate_of(h.size) * c, h)

        return out, DifferenceFeedbackState(
            map_leaves(remember, state.said, said, heard),
            map_leaves(remember, state.heard, heard, heard),
        )

    return by_shard(Exchange(init, update))
