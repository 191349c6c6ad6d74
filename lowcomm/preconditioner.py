r"""A diagonal scaling of gradients that all workers share, frozen between refreshes.

Where each worker scales by moments of its own, as in local Adam, workers with other
data walk in other metrics, and the mean of their models is biased. ``shared_scaling``
is one diagonal for all, a link before an inner optimizer:

    refresh (first step of a round)   D^p ← β D^p + (1 − β) h     h the same everywhere
    every step                        g ← g / max(α, |D|)

A ``Rule`` says what ``h`` and ``p`` are:

    square_of_mean     p = 2   h = (mean_i g_i)²
    mean_of_squares    p = 2   h = mean_i g_i²          the larger one, entry by entry
    hessian_diagonal   p = 1   h = mean_i v (∇²f_i v)   v = ±1, the same everywhere
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from . import uniform
from .keys import leaf_keys
from .leaves import PyTree, exchanged, map_leaves, precise
from .parts import expect
from .spmd import AXIS, Axis, vary
from .transport import reduce_mean
from .triggers import Trigger


class Rule(NamedTuple):
    """What a scaling is made of.

    ``estimate(grads, *, params, step, axis, **extra)`` returns a precise real array for
    each leaf that takes part, the same on all workers, and None for the others. Its
    average over time is the ``power``-th power of the scaling.
    """

    estimate: Callable[..., PyTree]
    power: int


class ScalingState(NamedTuple):
    """State of ``shared_scaling``."""

    refresh: Any  # the trigger's
    diagonal: PyTree  # D^p, precise and real, the same on all workers
    refreshes: jax.Array  # int32, how often it was refreshed


def shared_scaling(
    rule: Rule,
    *,
    when: Trigger,
    floor: float,
    decay: optax.ScalarOrSchedule = 0.9,
    initial: float | None = None,
    axis: Axis = AXIS,
) -> optax.GradientTransformationExtraArgs:
    r"""Divide gradients by one frozen diagonal, the same on all workers.

    .. math::
        \text{if fire: } D^p \leftarrow \beta D^p + (1 - \beta)\, h, \qquad
        g_i \leftarrow g_i / \max(\alpha, |D|)

    A link before an inner optimizer. ``h`` and ``p`` are those of ``rule``; ``when``
    fires at the first step of each round (``round_starts``), and the new scaling is
    used from that very step on. ``β`` is ``decay``, a number or a schedule of how often
    ``D`` was refreshed before: ``lambda n: (b − b**(n+1)) / (1 − b**(n+1))`` is the
    average with decay ``b`` and Adam's correction of its bias. ``α`` is ``floor``, in
    the units of ``D``: those of gradients, for ``hessian_diagonal`` of curvatures.
    ``initial`` is ``D`` before the first refresh; with None the first estimate is
    taken as it is, and a run that begins within a round stands still until the next,
    at gradients of zero. Sends ``h`` on the steps that fire: the size of the
    parameters.

    Raises:
        ValueError: a floor that is not positive, a decay outside [0, 1], an initial
            value that is not positive.

    Example:
        The worker with the larger gradients sets the metric of both.

        >>> from lowcomm import spread
        >>> from lowcomm.starts import round_starts
        >>> tx = shared_scaling(mean_of_squares(), when=round_starts(2), floor=0.1)
        >>> worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
        >>> spread(worker)(jnp.array([[1.0, 0.0], [7.0, 0.0]]))
        Array([[0.2, 0. ],
               [1.4, 0. ]], dtype=float32)
    """
    expect(Trigger, when=when)
    if not isinstance(rule, Rule):
        raise ValueError(f"rule must be such as mean_of_squares(), not {rule!r}.")
    if not floor > 0:
        raise ValueError(
            f"floor {floor} must be positive: gradients are divided by no less."
        )
    if not callable(decay) and not 0 <= decay <= 1:
        raise ValueError(f"decay {decay} is outside [0, 1].")
    if initial is not None and not initial > 0:
        raise ValueError(f"initial {initial} must be positive; None is the first h.")

    def init(params):
        first = 0.0 if initial is None else initial**rule.power
        diagonal = map_leaves(
            lambda p: jnp.full_like(jnp.real(precise(jnp.asarray(p))), first),
            exchanged(params),
        )
        state = ScalingState(when.init(params), diagonal, jnp.zeros((), jnp.int32))
        return vary(state, axis)

    def update(updates, state, params=None, *, step=None, **extra):
        fire, trigger = when.fire(
            state.refresh,
            step=step,
            since=None,
            drift=None,
            grads=updates,
            axis=axis,
            **extra,
        )

        def renew(diagonal, refreshes):
            h = rule.estimate(updates, params=params, step=step, axis=axis, **extra)
            beta = decay(refreshes) if callable(decay) else decay
            if initial is None:
                beta = jnp.where(refreshes == 0, 0, beta)
            blend = lambda d, h: (beta * d + (1 - beta) * h).astype(d.dtype)
            return map_leaves(blend, diagonal, h), refreshes + 1

        diagonal, refreshes = uniform.cond(
            fire,
            renew,
            lambda *same: same,
            state.diagonal,
            state.refreshes,
            axis=axis,
        )
        root = jnp.sqrt if rule.power == 2 else jnp.abs
        known = (initial is not None) | (refreshes > 0)

        def divide(d, g):
            g_scaled = precise(g) / jnp.maximum(floor, root(d))
            return jnp.where(known, g_scaled, 0).astype(g.dtype)

        scaled = map_leaves(divide, diagonal, exchanged(updates))
        updates = map_leaves(lambda g, s: g if s is None else s, updates, scaled)
        return updates, ScalingState(trigger, diagonal, refreshes)

    return optax.GradientTransformationExtraArgs(init, update)


def square_of_mean() -> Rule:
    r"""The square of the mean gradient: ``h = (mean_i g_i)²``.

    Noise of the workers is averaged before it is squared: with noise alone ``h`` is K
    times smaller than that of ``mean_of_squares``, and steps are √K times longer.
    """

    def estimate(grads, *, axis: Axis, **extra):
        mean = reduce_mean(exchanged(grads), axis)
        return map_leaves(lambda g: jnp.square(jnp.abs(g)), mean)

    return Rule(estimate, power=2)


def mean_of_squares() -> Rule:
    r"""The mean of the squared gradients: ``h = mean_i g_i²``.

    It holds their noise and their disagreement as well.
    """

    def estimate(grads, *, axis: Axis, **extra):
        square = lambda g: jnp.square(jnp.abs(precise(g)))
        return reduce_mean(map_leaves(square, exchanged(grads)), axis)

    return Rule(estimate, power=2)


def hessian_diagonal(*, seed: int = 0) -> Rule:
    r"""An estimate of the Hessian's diagonal: ``h = mean_i v ⊙ (∇²f_i v)``.

    ``v`` is ±1 in each entry, drawn from (seed, step, leaf), the same on all workers;
    on a diagonal Hessian the estimate is exact. It needs an extra argument
    ``curvature``, a function ``(params, v) -> ∇²f(params) v`` that is asked on the
    refreshing steps alone: ``extra_args=hessian_products(loss)`` of ``local_step`` and
    ``fit`` passes it. For parameters that are all real floating point.

    Raises:
        ValueError: at trace, no ``curvature`` or no ``params``.
    """

    def estimate(grads, *, params, step, axis: Axis, curvature=None, **extra):
        if curvature is None or params is None:
            raise ValueError(
                "hessian_diagonal needs update(..., curvature=f), where f(params, v) "
                "is the Hessian's product with v, and params: pass "
                "extra_args=hessian_products(loss) to local_step or fit."
            )
        leaves, treedef = jax.tree.flatten(params)
        signs = treedef.unflatten(
            [
                jax.random.rademacher(
                    leaf_keys(seed, step, i, axis).shared, jnp.shape(p), p.dtype
                )
                for i, p in enumerate(leaves)
            ]
        )
        probe = lambda v, hv: precise(v) * precise(hv)
        products = curvature(params, vary(signs, axis))
        return reduce_mean(map_leaves(probe, exchanged(signs), products), axis)

    return Rule(estimate, power=1)


def hessian_products(
    loss: Callable[[PyTree, PyTree], Any],
) -> Callable[[PyTree], dict[str, Any]]:
    """``extra_args=`` for ``local_step``: the curvature ``hessian_diagonal`` asks for.

    ``loss(params, batch)`` is a scalar. A product costs about two gradients, on the
    steps that ask for it.

    Example:
        >>> loss = lambda x, batch: batch * x[0] ** 2 + x[0] * x[1]
        >>> curvature = hessian_products(loss)(3.0)["curvature"]
        >>> curvature(jnp.zeros(2), jnp.array([1.0, -1.0]))  # of [[6, 1], [1, 0]]
        Array([5., 1.], dtype=float32)
    """

    def extra_args(batch: PyTree) -> dict[str, Any]:
        gradient = jax.grad(lambda params: loss(params, batch))
        return {
            "curvature": lambda params, v: jax.jvp(gradient, (params,), (v,))[1],
        }

    return extra_args
