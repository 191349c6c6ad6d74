"""Methods in which workers search for themselves and follow those that do best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import uniform
from ..keys import leaf_keys
from ..leaders import check_fraction, leader, nearer
from ..leaves import PyTree, map_exchanged, map_leaves, movable, precise, subtract
from ..parts import expect
from ..spmd import AXIS, Axis, axis_size, names, vary
from ..sync import Talking, Transformation, enter, leave, propose
from ..triggers import Trigger, clock, every


class LeaderSgdState(NamedTuple):
    """State of ``leader_sgd``."""

    inner: Any
    losses: jax.Array  # [window] float32, this worker's last losses, newest first
    losses_seen: jax.Array  # int32, how many there are
    leaders: tuple[Any, ...]  # what the last leader held: of all, of the group


class PsoPsState(NamedTuple):
    """State of ``pso_ps``."""

    inner: Any
    velocity: PyTree
    best: PyTree  # this worker's best position
    best_loss: jax.Array  # float32, the loss there
    trigger: Any
    since: jax.Array  # int32, steps since the last sync


def leader_sgd(
    inner: Transformation,
    *,
    period: int,
    pull: float = 0.1,
    stale_pull: float = 0.1,
    window: int = 10,
    group_axis: Axis | None = None,
    group_period: int | None = None,
    group_pull: float = 0.1,
    group_stale_pull: float = 0.1,
    axis: Axis = AXIS,
) -> Talking:
    r"""Leader SGD: each worker is pulled toward the one that does best at present.

    .. math::
        x_i &\leftarrow x_i + \text{inner}(g_i), \qquad
        x_i \leftarrow x_i + \tfrac{p}{\tau} (z - x_i) \\
        \text{every } \tau \text{ steps: } z &\leftarrow x_k, \qquad
        k = \arg\min_j \ell_j, \qquad x_i \leftarrow x_i + c\,(z - x_i)

    ``ℓ`` is the mean of a worker's last ``window`` losses, each the ``value=`` passed
    to ``update``; ties go to the lowest rank. ``τ`` is ``period``, ``c`` is ``pull``,
    and ``p``, the ``stale_pull`` of a whole round, acts at every step toward what the
    last leader held. With ``group_axis`` workers along it are a group with a leader of
    its own, and pulls of its own every ``group_period`` steps (a quarter of ``period``
    unless given); ``axis`` then names both axes. Where there is but one group its
    leader is everybody's, and the group's pulls are off.

    Sends, when a leader is chosen, 4 bytes and the parameters, among the group or among
    all. State: the inner optimizer's, the losses, and a model for each stale pull.

    Raises:
        ValueError: a pull outside [0, 1], a period, group_period or window below 1, a
            group_period without group_axis, a group_axis not in ``axis``; at trace, no
            ``value``.

    Note:
        The pull at a refresh and the stale pull at each step are separate parameters,
        as in the released code; the paper's λ corresponds to their sum over a round
        only approximately. From a common start elastic averaging does better.

    Example:
        The second worker has the lower loss; the other is pulled half of the way.

        >>> from lowcomm import spread
        >>> tx = leader_sgd(optax.sgd(0.0), period=1, pull=0.5, stale_pull=0.0)
        >>> def worker(x, loss):
        ...     return x + tx.update(x, tx.init(x), x, step=0, value=loss)[0]
        >>> spread(worker)(jnp.array([0.0, 4.0]), jnp.array([2.0, 1.0]))
        Array([2., 4.], dtype=float32)

    References:
        Teng et al., `Leader Stochastic Gradient Descent for Distributed Training of
        Deep Learning Models <https://arxiv.org/abs/1905.10395>`_, 2019.
    """
    expect(optax.GradientTransformation, inner=inner)
    inner = optax.with_extra_args_support(inner)
    uniform.whole(window=window)
    if window < 1:
        raise ValueError(f"window {window} is below 1 loss.")
    if group_axis is None and group_period is not None:
        raise ValueError(
            f"group_period {group_period} without a group_axis: name the axis of the "
            "workers of one group."
        )
    levels = [_Level(axis, period, pull, stale_pull)]
    if group_axis is not None:
        if not set(names(group_axis)) < set(names(axis)):
            raise ValueError(
                f"group_axis {group_axis!r} must be some of the axes of {axis!r}, that "
                "of the workers of one group: axis=('groups', 'workers')."
            )
        each = max(1, period // 4) if group_period is None else group_period
        levels.append(_Level(group_axis, each, group_pull, group_stale_pull))
    for level in levels:
        _check_level(level)

    def init(params):
        params = movable(params)
        here = lambda level: map_leaves(
            lambda p: jnp.array(precise(jnp.asarray(p))), params
        )
        state = LeaderSgdState(
            inner.init(params),
            jnp.zeros(window, jnp.float32),
            jnp.zeros((), jnp.int32),
            tuple(here(level) if level.stale_pull else () for level in levels),
        )
        return vary(state, axis)

    def update(updates, state, params=None, *, step=None, value=None, **extra):
        _check_loss("leader_sgd", value)
        whole, grads, params = enter(updates, params, step, axis)
        given = extra | {"step": step, "value": value}
        moves, inner_state = propose(inner, grads, state.inner, params, **given)
        x = map_leaves(lambda p, m: precise(p) + precise(m), params, moves)
        losses = jnp.roll(state.losses, 1).at[0].set(value)
        seen = jnp.minimum(state.losses_seen + 1, window)
        score = jnp.sum(losses) / seen
        # Where one group is all, its leader would pull twice.
        one_group = axis_size(group_axis or axis) == axis_size(axis)
        at_work = levels[:1] if one_group else levels
        leaders = list(state.leaders)
        for level, z in zip(at_work, leaders, strict=False):
            if level.stale_pull:
                part = level.stale_pull / level.period
                x = map_exchanged(lambda x, z, part=part: nearer(x, z, part), x, z)
        for i, level in reversed(list(enumerate(at_work))):
            fires, _ = every(level.period).fire((), step=step, axis=axis)

            def refresh(x, z, level=level):
                talk = {"score": score, "about": "parameters", "within": axis}
                z, _ = leader(level.axis).update(x, (), **talk)
                x = map_exchanged(lambda x, z: nearer(x, z, level.pull), x, z)
                return x, z if level.stale_pull else ()

            x, leaders[i] = uniform.cond(
                fires, refresh, lambda *same: same, x, leaders[i], axis=axis
            )
        state = LeaderSgdState(inner_state, losses, seen, tuple(leaders))
        return leave(map_leaves(subtract, x, params), whole), vary(state, axis)

    return Talking(init, update)


class _Level(NamedTuple):
    """Who chooses a leader, how often, and how strongly it pulls."""

    axis: Axis
    period: int
    pull: float
    stale_pull: float


def pso_ps(
    inner: Transformation,
    *,
    period: int | Trigger,
    inertia: float = 0.5,
    cognitive: float = 0.5,
    social: float = 0.5,
    fitness: Callable[[PyTree], Any] | None = None,
    history: bool = True,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Talking:
    r"""PSO-PS: workers are particles that fly toward the best positions found.

    .. math::
        \text{every } \tau \text{ steps: } v_i &\leftarrow \omega v_i
        + c_1 r_1 (p_i - x_i) + c_2 r_2 (p^* - x_i), \qquad x_i \leftarrow x_i + v_i \\
        p_i &\text{ the best position of worker } i, \qquad
        p^* \text{ the best of all}, \qquad r_1, r_2 \sim U(0, 1)

    ``τ`` is ``period``, the steps from sync to sync, or a trigger; ``ω`` is
    ``inertia``, ``c₁`` is ``cognitive``, ``c₂`` is ``social``; ``r₁`` and ``r₂`` are
    two numbers for each worker and sync. In between workers take the inner optimizer's
    steps. How good a position is, is asked at each
    sync: ``fitness(params)`` of the parameters after the step, best the loss on a probe
    that all workers share; unless given, ``value=``, the loss at the parameters before
    the step, which are then the position. With ``history=False`` a best position is
    that of the present sync. What has a NaN loss is nobody's best.

    Sends 4 bytes and the parameters every ``period`` steps. State: the inner
    optimizer's, the velocity, and the best position.

    Raises:
        ValueError: a period below 1, a negative coefficient; at trace, no ``value``
            where there is no ``fitness``.

    Note:
        Coefficients unknown; standard particle swarm with memory; not competitive with
        averaging in our runs. Scalar ``r`` and a velocity that is kept through local
        steps are choices as well. Losses of small batches make a poor fitness: one easy
        batch freezes the best position.

    Example:
        The second worker has the lower loss, and the other one flies some of the way.

        >>> from lowcomm import spread
        >>> tx = pso_ps(optax.sgd(0.0), period=1)
        >>> def worker(x, loss):
        ...     return x + tx.update(x, tx.init(x), x, step=0, value=loss)[0]
        >>> x = spread(worker)(jnp.array([0.0, 4.0]), jnp.array([2.0, 1.0]))
        >>> print(0 < x[0] < 2, x[1])
        True 4.0

    References:
        Ye, Han, Sun and Lv, `PSO-PS: Parameter Synchronization with Particle Swarm
        Optimization for Distributed Training of Deep Neural Networks
        <https://arxiv.org/abs/2009.03816>`_, 2020.
    """
    expect(optax.GradientTransformation, inner=inner)
    inner = optax.with_extra_args_support(inner)
    when = clock(period)
    options = {"inertia": inertia, "cognitive": cognitive, "social": social}
    for name, coefficient in options.items():
        if not coefficient >= 0:
            raise ValueError(f"{name} {coefficient} is negative or not a number.")

    def init(params):
        params = movable(params)
        state = PsoPsState(
            inner.init(params),
            map_leaves(lambda p: jnp.zeros_like(precise(jnp.asarray(p))), params),
            map_leaves(lambda p: jnp.array(precise(jnp.asarray(p))), params),
            jnp.float32(jnp.finfo(jnp.float32).max),
            when.init(params),
            jnp.zeros((), jnp.int32),
        )
        return vary(state, axis)

    def update(updates, state, params=None, *, step=None, value=None, **extra):
        if fitness is None:
            _check_loss("pso_ps without fitness=", value)
        whole, grads, params = enter(updates, params, step, axis)
        given = extra | {"step": step} | ({} if value is None else {"value": value})
        moves, inner_state = propose(inner, grads, state.inner, params, **given)
        x = map_leaves(lambda p, m: precise(p) + precise(m), params, moves)

        def judged():
            if fitness is None:
                return map_leaves(precise, params), value
            cast = lambda p, x: p if x is None else x.astype(p.dtype)
            return x, fitness(map_leaves(cast, whole, x))

        def fly(x, velocity, best, best_loss, since):
            position, loss = judged()
            loss = jnp.asarray(loss, jnp.float32)
            better = loss < best_loss if history else jnp.array(True)
            choose = lambda new, old: jnp.where(better, new, old)
            best = map_leaves(choose, position, best)
            best_loss = choose(loss, best_loss)
            talk = {"score": best_loss, "about": "parameters", "within": axis}
            found, _ = leader(axis).update(best, (), **talk)
            r1, r2 = _draws(seed, step, axis)
            velocity = map_exchanged(
                lambda v, x, own, found: (
                    inertia * v + cognitive * r1 * (own - x) + social * r2 * (found - x)
                ),
                velocity,
                x,
                best,
                found,
            )
            x = map_leaves(lambda x, v: x + v, x, velocity)
            return x, velocity, best, best_loss, jnp.zeros_like(since)

        since = state.since + 1
        fires, trigger = when.fire(
            state.trigger, since=since, drift=None, grads=grads, axis=axis, **given
        )
        swarm = state.velocity, state.best, state.best_loss, since
        x, velocity, best, best_loss, since = uniform.cond(
            fires, fly, lambda *same: same, x, *swarm, axis=axis
        )
        state = PsoPsState(inner_state, velocity, best, best_loss, trigger, since)
        return leave(map_leaves(subtract, x, params), whole), vary(state, axis)

    return Talking(init, update)


def _draws(seed: int, step: Any, axis: Axis) -> tuple[jax.Array, jax.Array]:
    """Two numbers of this worker's own, from the unit interval."""
    r1, r2 = jax.random.uniform(leaf_keys(seed, step, 0, axis).private, (2,))
    return r1, r2


def _check_loss(who: str, value: Any) -> None:
    if value is None or jnp.ndim(value) != 0:
        raise ValueError(
            f"{who} needs update(..., value=loss), this worker's loss as one number, "
            f"not {'nothing' if value is None else jnp.shape(value)}: local_step "
            "passes it."
        )


def _check_level(level: _Level) -> None:
    if isinstance(level.period, Trigger):
        raise ValueError(
            "leader_sgd divides the stale pull of a round by its steps: give period "
            "and group_period as whole numbers."
        )
    every(level.period)
    check_fraction("a pull", level.pull)
    check_fraction("a stale pull", level.stale_pull)
