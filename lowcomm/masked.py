r"""Feedback of momentum that is masked where it was sent, and memories kept in stages.

    u ← momentum(g);  v ← v + u;  c = C(v);  v ← v − c;  u ← 0 where c ≠ 0

This is the exchange of Deep Gradient Compression. What a worker says late it would go
on pushing for 1/(1 − β) steps more, all workers long having moved on: so what was said
is wiped from its momentum too. Without the mask it is a chain of the momentum and
``error_feedback``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from . import uniform
from .compressors import Compressor
from .exchange import Exchange, like
from .leaves import (
    PyTree,
    check_same_leaves,
    fitting,
    map_exchanged,
    map_leaves,
    precise,
    zeros,
)
from .parts import expect
from .sharded import by_shard
from .spmd import AXIS, Axis
from .talk import (
    PerLeaf,
    admit_shrinking,
    check_divergence,
    expect_compressor,
    left_over,
    talk,
)


class MaskedFeedbackState(NamedTuple):
    """State of ``masked_feedback``."""

    momentum: Any  # of the transformation: what this worker's gradients add up to
    unsent: PyTree  # what this worker has not managed to say yet


def masked_feedback(
    compressor: Compressor | PerLeaf,
    momentum: optax.GradientTransformation,
    *,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Exchange:
    r"""Accumulate momentum, send ``C`` of the sum, and forget both where it was sent.

    .. math::
        u_i \leftarrow \text{momentum}(g_i), \quad v_i \leftarrow v_i + u_i, \quad
        x_i \leftarrow \tfrac1K \textstyle\sum_j C(v_j), \quad
        v_i \leftarrow v_i - C(v_i), \quad
        m_i \leftarrow 0 \text{ where } C(v_i) \ne 0

    ``momentum`` is a transformation such as ``optax.trace(0.9)``, ``m`` the parts of
    its state that are shaped like the parameters (``state.momentum``, float32 or wider)
    and ``v`` is ``state.unsent``. Whatever the compressor,
    :math:`\sum_t \text{said}_t + v_T = \sum_t u_t`. Everything sent at every step is
    plain SGD, since the momentum is wiped each time. Sends one payload a leaf.

    Raises:
        ValueError: at trace, a tree of another structure.

    Example:
        The first coordinate is sent at every step, and its momentum wiped; the second
        waits and gathers momentum.

        >>> from lowcomm import spread, top_k
        >>> tx = masked_feedback(top_k(0.5), optax.trace(0.5))
        >>> def worker(g):
        ...     state = tx.init(g)
        ...     for t in range(2):
        ...         heard, state = tx.update(g, state, step=t)
        ...     return heard, state.unsent, state.momentum.trace
        >>> for x in spread(worker)(jnp.array([[8.0, 2.0]])):
        ...     print(x[0])
        [8. 0.]
        [0. 5.]
        [0. 3.]

    References:
        Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_,
        2018, sections 3.1 and 3.2, Algorithm 4.
    """
    expect_compressor(compressor)
    expect(optax.GradientTransformation, momentum=momentum)
    gather_pace = optax.with_extra_args_support(momentum)

    def init(params):
        return MaskedFeedbackState(gather_pace.init(zeros(params)), zeros(params))

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
        admit_shrinking(updates, "masked_feedback", axis, about, within)
        check_same_leaves("masked_feedback", state.unsent, updates)
        check_divergence(compressor, updates, "masked_feedback")
        grads = map_leaves(lambda v, g: precise(g), state.unsent, updates)
        pushes, pace = gather_pace.update(
            grads, state.momentum, params, step=step, **extra
        )
        wanted = map_leaves(jnp.add, state.unsent, pushes)
        spoken = map_exchanged(lambda g, v: fitting(v, g.dtype), updates, wanted)
        heard, said = talk(compressor, spoken, step=step, seed=seed, axis=axis)
        said = map_leaves(lambda v, c: c, wanted, said)
        mask = lambda m, c: jnp.where(c == 0, m, jnp.zeros_like(m))
        pace = optax.tree_utils.tree_map_params(gather_pace, mask, pace, said)
        unsent = map_leaves(left_over, wanted, said)
        return like(updates, heard), MaskedFeedbackState(pace, unsent)

    return by_shard(Exchange(init, update))


def staged(
    exchanges: Sequence[Exchange], starts: Sequence[int], *, axis: Axis = AXIS
) -> Exchange:
    r"""Exchanges that take turns on one memory: from each start on, the next of them.

    ``exchanges[0]`` is at work before step ``starts[0]``, ``exchanges[n]`` from step
    ``starts[n − 1]`` on. Their states must be of one kind, as those of one feedback
    with several compressors are: a density that falls in stages keeps what was not
    sent yet, where ``after`` would begin anew. Sends what the one at work sends.

    Raises:
        ValueError: another number of starts than of exchanges less one, starts that do
            not grow; in ``init``, states of several kinds.

    Example:
        >>> from lowcomm import error_feedback, spread, top_k
        >>> tx = staged([error_feedback(top_k(f)) for f in (0.5, 1.0)], starts=[1])
        >>> def worker(g):
        ...     first, state = tx.update(g, tx.init(g), step=0)
        ...     return first + 0, tx.update(g, state, step=1)[0] + 0
        >>> spread(worker)(jnp.array([[3.0, 2.0]]))
        (Array([[3., 0.]], dtype=float32), Array([[3., 4.]], dtype=float32))
    """
    for number, exchange in enumerate(exchanges):
        expect(optax.GradientTransformation, **{f"exchanges[{number}]": exchange})
    uniform.whole(**{f"starts[{i}]": start for i, start in enumerate(starts)})
    growing = list(starts) == sorted(set(starts))
    if len(starts) != len(exchanges) - 1 or not growing or min(starts, default=0) < 0:
        raise ValueError(
            f"{len(exchanges)} exchanges need {max(0, len(exchanges) - 1)} growing "
            f"starts, the steps from which on the next is at work, not {list(starts)}."
        )
    talking = [optax.with_extra_args_support(exchange) for exchange in exchanges]

    def init(params):
        states = [exchange.init(params) for exchange in talking]
        shapes = lambda state: [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
        kinds = [(jax.tree.structure(state), shapes(state)) for state in states]
        for number, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise ValueError(
                    f"exchanges[{number}] keeps another state than exchanges[0], and "
                    "one memory has to serve all: give one feedback with several "
                    "compressors, or use after."
                )
        return states[0]

    def update(updates, state, params=None, *, step=None, **extra):
        uniform.now(step, axis)
        stage = uniform.choose(lambda t: sum((t >= s) * 1 for s in starts), step)
        branches = [
            lambda updates, state, one=one: one.update(
                updates, state, params, step=step, **extra
            )
            for one in talking
        ]
        return uniform.switch(stage, branches, updates, state, axis=axis)

    return Exchange(init, update)
