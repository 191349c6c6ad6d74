r"""Inner links that know the anchor: what a local step does to stay near it.

``rounds`` hands its anchor to the inner optimizer, as the extra argument ``anchor=``.

    proximal       g ← g + η (x − a)                     at every step, in the gradient
    random_pull    x ← x − (γη/p)(x − a), or the step    at random steps, in the model

Both cost nothing to send: each worker is pulled toward its own copy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from . import uniform
from .keys import leaf_keys
from .leaves import PyTree, add, map_leaves, precise, subtract
from .parts import expect
from .spmd import AXIS, Axis

Talking = optax.GradientTransformationExtraArgs


def proximal(strength: float) -> Talking:
    r"""Add the pull of a proximal term to the gradient (FedProx).

    .. math:: g \leftarrow g + \eta\,(x - a), \qquad \text{the gradient of }
        f(x) + \tfrac{\eta}{2} \lVert x - a \rVert^2

    ``η`` is ``strength``, ``a`` is the anchor that ``rounds`` hands on. For a chain
    before the inner optimizer: ``rounds(optax.chain(proximal(0.1), inner), …)``.
    Sends nothing.

    Raises:
        ValueError: a negative strength; at trace, no ``anchor=`` or one of another
            structure than the parameters.

    Example:
        At the model 3 with the anchor 1 the gradient grows by half of 2.

        >>> tx = proximal(0.5)
        >>> x, a = jnp.array(3.0), jnp.array(1.0)
        >>> tx.update(jnp.array(4.0), tx.init(x), x, anchor=a)[0]
        Array(5., dtype=float32)

    References:
        Li et al., `Federated Optimization in Heterogeneous Networks
        <https://arxiv.org/abs/1812.06127>`_, 2020, Algorithm 2.
    """
    if not strength >= 0:
        raise ValueError(f"strength {strength} must be 0 or more.")

    def update(updates, state, params=None, *, anchor=None, **extra):
        pulls = _from_anchor("proximal", anchor, params)
        return map_leaves(lambda g, far: add(g, strength * far), updates, pulls), state

    return Talking(lambda params: optax.EmptyState(), update)


def random_pull(
    inner: optax.GradientTransformation,
    *,
    probability: float,
    strength: float,
    learning_rate: optax.ScalarOrSchedule,
    seed: int = 0,
    start: int = 0,
    axis: Axis = AXIS,
) -> Talking:
    r"""Now and then a pull toward the anchor in place of the inner step (PALSGD's).

    .. math::
        x \leftarrow \begin{cases}
        x - \frac{\gamma\eta}{p} (x - a) & \text{with probability } p \\
        x + \frac{1}{1-p}\, \text{inner}(g) & \text{else}
        \end{cases}

    ``p`` is ``probability``, ``η`` is ``strength``, ``γ`` is ``learning_rate``, that
    of ``inner``, a number or a schedule of the step; an inner step scaled by 1/(1 − p)
    is one at the rate γ/(1 − p). For SGD the expected step is that on
    ``f + η/2‖x − a‖²``. A pull leaves the inner state alone. Each worker draws for
    itself, as a function of (seed, step, worker). The steps before ``start`` are
    inner steps. Sends nothing.

    A schedule inside ``inner`` counts the inner steps alone, about a share ``1 − p`` of
    all: end it that much earlier than ``learning_rate``.

    A pull of γη/p = 1 resets the worker to the anchor, one above 2 diverges by itself:
    mind the largest rate of a schedule.

    Raises:
        ValueError: probability outside [0, 1), a negative strength or start, a
            constant rate at which γη/p is above 1; at trace, no ``anchor=`` or
            ``step=``, or an anchor of another structure than the parameters.

    Example:
        Workers at 3 with their anchor at 1: a pull resets some, the others step by 1.

        >>> from lowcomm import spread
        >>> tx = random_pull(optax.sgd(0.5), probability=0.5, strength=1.0,
        ...                  learning_rate=0.5)
        >>> def worker(x, a):
        ...     moves, _ = tx.update(x / 3, tx.init(x), x, step=1, anchor=a)
        ...     return x + moves
        >>> print(spread(worker)(jnp.full(8, 3.0), jnp.ones(8)))
        [1. 2. 2. 1. 1. 1. 2. 2.]

    References:
        Naganuma et al., `Pseudo-Asynchronous Local SGD
        <https://arxiv.org/abs/2504.18454>`_, 2025.
    """
    expect(optax.GradientTransformation, inner=inner)
    if not 0 <= probability < 1:
        raise ValueError(
            f"probability {probability} is outside [0, 1); 0 never pulls, and where 1 "
            "always would, nothing is learned."
        )
    if not strength >= 0:
        raise ValueError(f"strength {strength} must be 0 or more.")
    if start < 0:
        raise ValueError(f"start {start}: steps count from 0.")
    known: Any = learning_rate  # or not, if it is a schedule or injected
    if callable(known) or isinstance(known, Tracer):
        known = 0.0
    if not known >= 0:
        raise ValueError(f"learning_rate {learning_rate} must be 0 or more.")
    if probability and known * strength > probability:
        raise ValueError(
            f"a pull by learning_rate · strength / probability = "
            f"{known * strength / probability:.3g} overshoots the anchor: it "
            "must be at most 1."
        )
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, *, step: Any = None, anchor=None, **extra):
        moves, stepped = inner.update(
            updates, state, params, step=step, anchor=anchor, **extra
        )
        far = _from_anchor("random_pull", anchor, params)
        uniform.now(step, axis)
        late: Any = uniform.decide(lambda t: t >= start, step)
        if probability == 0 or late is False:
            return moves, stepped
        drawn = jax.random.bernoulli(
            leaf_keys(seed, step, 0, axis).private, probability
        )
        pulls = drawn & late
        rate: Any = learning_rate(step) if callable(learning_rate) else learning_rate
        back = rate * (strength / probability)
        more = jnp.where(late, 1 / (1 - probability), 1.0)

        def choose(move, far):
            move = precise(move)
            step_, pull = move * more.astype(move.dtype), -back * far
            return jnp.where(pulls, pull.astype(move.dtype), step_)

        kept = jax.tree.map(lambda old, new: jnp.where(pulls, old, new), state, stepped)
        return map_leaves(choose, moves, far), kept

    return Talking(inner.init, update)


def _from_anchor(name: str, anchor: PyTree, params: PyTree) -> PyTree:
    """``x − a``, precise, with the anchor as this worker received it."""
    if params is None:
        raise ValueError(
            f"{name} needs params: tx.update(grads, state, params, step=t)."
        )
    if anchor is None:
        raise ValueError(
            f"{name} pulls toward an anchor, and none was handed to it: only rounds "
            "(diloco, slowmo, …) has one. Put it inside the inner optimizer there, or "
            "pass anchor= to update."
        )
    here, there = jax.tree.structure(params), jax.tree.structure(anchor)
    if here != there:
        raise ValueError(
            f"{name} got parameters {here} and the anchor {there}: inside optax.masked "
            "or optax.partition pass mask_compatible_extra_args=True, so that both are "
            "masked alike."
        )
    return map_leaves(lambda x, a: subtract(x, a.astype(x.dtype)), params, anchor)
