"""What one worker gains from an outer step: methods that send nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..anchor import RoundsState, rounds
from ..leaves import PyTree, map_leaves, movable, precise, subtract
from ..parts import expect
from ..sync import Talking, Transformation, enter, leave, propose
from ..triggers import Trigger, clock
from .outer import nesterov


class SNOOState(NamedTuple):
    """State of ``snoo``: that of ``rounds``, of one worker."""

    base: Any
    outer: Any
    exchange: Any
    trigger: Any
    own_anchor: PyTree
    pending: Any
    since: jax.Array
    synced: jax.Array


class GPAState(NamedTuple):
    """State of ``gpa``."""

    base: Any  # the inner optimizer's
    fast: PyTree  # the iterate z that the inner optimizer moves
    own_anchor: PyTree  # the average θ: the model to evaluate
    synced: jax.Array  # bool, whether the parameters y are that model


def snoo(
    inner: Transformation,
    *,
    period: int | Trigger = 20,
    outer_lr: float = 0.7,
    momentum: float = 0.9,
) -> Talking:
    r"""SNOO: the outer Nesterov step of DiLoCo on the steps of one worker.

    .. math::
        \text{every } H \text{ steps: } \Delta = a - x, \qquad
        v \leftarrow \mu v + \Delta, \qquad a \leftarrow a - \eta (\Delta + \mu v),
        \qquad x \leftarrow a

    ``H`` is ``period``, ``η`` is ``outer_lr``, ``μ`` is ``momentum``; with μ = 0 it is
    Lookahead. Sends nothing and needs no named axis: an ordinary optimizer, but for
    ``step=``, which ``update`` takes (or ``self_clocked(…, axis=())`` counts). Evaluate
    ``state.own_anchor``. Several workers train with ``snoo(data_parallel(inner), …)``.

    Note:
        The default values are DiLoCo's, not read in the paper.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = snoo(optax.sgd(1.0), period=2, outer_lr=0.5, momentum=0.0)
        >>> x = jnp.array(0.0)
        >>> state = tx.init(x)
        >>> for t in range(4):
        ...     moves, state = tx.update(jnp.array(1.0), state, x, step=t)
        ...     x = x + moves
        ...     print(x)
        -1.0
        -1.0
        -2.0
        -2.0

    References:
        Kallusky et al., `SNOO: Step-K Nesterov Outer Optimizer
        <https://arxiv.org/abs/2510.15830>`_, 2025.
    """
    alone = optax.with_extra_args_support(optax.identity())
    outer = nesterov(outer_lr, momentum)
    core = rounds(inner, outer, exchange=alone, when=clock(period), axis=())

    def init(params):
        start: Any = core.init(params)
        return SNOOState(*start)

    def update(updates, state, params=None, **extra):
        before = RoundsState(*state)
        after: Any
        updates, after = core.update(updates, before, params, **extra)
        return updates, SNOOState(*after)

    return Talking(init, update)


def gpa(inner: Transformation, *, averaging: float, interpolation: float) -> Talking:
    r"""Generalized primal averaging: the outer step of every step, without a loop.

    .. math::
        y = \mu_y \theta + (1 - \mu_y) z, \qquad
        z \leftarrow z + \text{inner}(\nabla f(y)), \qquad
        \theta \leftarrow \mu_x \theta + (1 - \mu_x) z

    ``μ_x`` is ``averaging``, ``μ_y`` is ``interpolation``. The parameters that the
    loop holds are ``y``, where gradients are taken; evaluate ``θ``, which is
    ``state.own_anchor``. With both 0 it is ``inner``. Sends nothing and needs no named
    axis: several workers train with ``gpa(data_parallel(inner), …)``; inside a verb,
    which moves ``y``, what ``consensus`` gives is ``y``. State: two trees besides the
    inner optimizer's.

    Note:
        The inner optimizer is handed ``y`` as its parameters, so that is what weight
        decay acts on; the equations leave it open.

    Raises:
        ValueError: averaging outside [0, 1), interpolation outside [0, 1].

    Example:
        >>> import jax.numpy as jnp
        >>> tx = gpa(optax.sgd(1.0), averaging=0.5, interpolation=0.5)
        >>> y = jnp.array(0.0)
        >>> state = tx.init(y)
        >>> for t in range(2):
        ...     moves, state = tx.update(jnp.array(-1.0), state, y, step=t)
        ...     y = y + moves
        ...     print(y, state.fast, state.own_anchor)
        0.75 1.0 0.5
        1.625 2.0 1.25

    References:
        Defazio et al., `Smoothing DiLoCo with Primal Averaging for Faster Training of
        LLMs <https://arxiv.org/abs/2512.17131>`_, 2025.
    """
    expect(optax.GradientTransformation, inner=inner)
    if not 0 <= averaging < 1:
        raise ValueError(f"averaging {averaging} is outside [0, 1); 0 is none.")
    if not 0 <= interpolation <= 1:
        raise ValueError(f"interpolation {interpolation} is outside [0, 1].")
    inner = optax.with_extra_args_support(inner)

    def init(params):
        params = movable(params)
        copy = lambda: jax.tree.map(
            lambda p: jnp.array(precise(jnp.asarray(p))), params
        )
        at_average = jnp.array(interpolation == 1)
        return GPAState(inner.init(params), copy(), copy(), at_average)

    def update(updates, state, params=None, *, step=None, **extra):
        whole, grads, y = enter(updates, params, 0 if step is None else step, ())
        given = extra if step is None else extra | {"step": step}
        moves, base = propose(inner, grads, state.base, y, **given)
        toward = lambda z, theta, mu: z + mu * (theta - z)
        z = map_leaves(lambda z, m: z + m.astype(z.dtype), state.fast, moves)
        theta = map_leaves(lambda a, z: toward(z, a, averaging), state.own_anchor, z)
        there = map_leaves(lambda z, a: toward(z, a, interpolation), z, theta)
        moves = map_leaves(lambda t, p: subtract(t.astype(p.dtype), p), there, y)
        return leave(moves, whole), GPAState(base, z, theta, state.synced)

    return Talking(init, update)
