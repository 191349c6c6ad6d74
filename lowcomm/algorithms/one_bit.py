"""Adam in a bit an entry: its second moment is frozen, or refreshed more rarely."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import uniform
from ..compressors import Compressor
from ..exchange import Exchange, admit, like
from ..leaves import (
    PyTree,
    add,
    map_exchanged,
    map_leaves,
    movable,
    precise,
    subtract,
    zeros,
)
from ..parts import expect
from ..schedules import thinning
from ..signs import sign
from ..spmd import AXIS, Axis, vary
from ..sync import Talking, Transformation, enter, leave
from ..transport import reduce_mean
from ..triggers import Trigger, clock
from ..two_stage import two_stage_feedback


class OneBitAdamState(NamedTuple):
    """State of ``one_bit_adam``, but for that of its inner optimizer."""

    mu: PyTree  # the momentum, the same on all workers
    nu: PyTree  # the second moment, the same on all workers
    exchange: Any  # what was not said yet, of ``two_stage_feedback``


class ZeroOneAdamState(NamedTuple):
    """State of ``zero_one_adam``."""

    mu: PyTree  # this worker's momentum, the same on all after a sync
    nu: PyTree  # the second moment, the same on all workers
    summed: PyTree  # this worker's momenta since the last sync, times their rates
    rates: jax.Array  # float32, the sum of those rates
    exchange: Any  # what was not said yet, of ``two_stage_feedback``
    anchor: PyTree  # the model of the last sync, the same on all workers
    synced: jax.Array  # bool, whether params + updates is that model


def one_bit_adam(
    inner: Transformation,
    *,
    warmup: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    compressor: Compressor | None = None,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Talking:
    r"""1-bit Adam: Adam at first, then momenta as signs over a frozen second moment.

    .. math::
        t < T: \quad & m \leftarrow \beta_1 m + (1-\beta_1) \bar g, \quad
        v \leftarrow \beta_2 v + (1-\beta_2) \bar g^2 \\
        t \ge T: \quad & m \leftarrow
        \text{C}\big(\beta_1 m + (1-\beta_1) g_i\big) \\
        & x \leftarrow x + \text{inner}\big(\hat m / (\sqrt{\hat v} + \epsilon)\big)

    ``T`` is ``warmup``, in steps counted from 0, until the learning rate is warmed up
    and ``v`` has settled. These are steps of the run: first called behind them it has
    no ``v`` and never moves, so begin it at step 0, or shift the ``step`` it is handed.
    ``C`` is ``two_stage_feedback``, by ``sign()`` unless another ``compressor`` is
    given: its result replaces the momentum on all workers. ``inner`` is handed Adam's
    direction, and is a learning rate, with or without weight decay:
    ``optax.sgd(1e-3)``. An entry whose ``v`` is zero at the end of the warm-up never
    moves: let it see all of the data's kinds. Leaves to be frozen go into
    ``optax.masked``, and cost nothing. A NaN stays in the momentum for ever, as in
    Adam: guard it by ``skip_nonfinite``.

    Sends the gradients in float32 in the warm-up, then one bit an entry up and one
    down, with one float32 for each worker's row of each leaf (``two_stage_bytes``).

    Note:
        With a warm-up that never ends it is ``optax.scale_by_adam``, whose correction
        of the bias is kept: that of ``v`` stays what it was when ``v`` was frozen, that
        of ``m`` goes on. That the paper's algorithm corrects neither is recalled, not
        read in it. A row, a ``K``-th of a leaf, has one scale, and each of its entries
        is divided by its own ``√v``. Inside ``flattened`` leaves would share a scale,
        and those with small gradients be blown up.

    Raises:
        ValueError: a warmup below 1; at trace, a missing ``step``, complex leaves, and
            what ``two_stage_feedback`` raises.

    Example:
        Signs of two workers' gradients, whose momenta began alike.

        >>> import numpy as np
        >>> from lowcomm import spread, traffic
        >>> tx = one_bit_adam(optax.sgd(0.5), warmup=1)
        >>> def worker(x, g):
        ...     state, path = tx.init(x), []
        ...     for t in range(2):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> g = jnp.array([[3.0, -1.0], [1.0, -1.0]])
        >>> print(np.asarray(spread(worker)(jnp.zeros((2, 2)), g)[0]).round(2))
        [[-0.5  0.5]
         [-1.   1. ]]
        >>> step = lambda g: tx.update(g, tx.init(g), g, step=1)[0]
        >>> traffic(step, jnp.ones(8192), workers=8).bytes_always  # of 32768
        1188

    References:
        Tang et al., `1-bit Adam: Communication Efficient Large-Scale Training with
        Adam's Convergence Speed <https://arxiv.org/abs/2102.02888>`_, 2021,
        Algorithm 1.
    """
    expect(optax.GradientTransformation, inner=inner)
    uniform.whole(warmup=warmup)
    if warmup < 1:
        raise ValueError(
            f"warmup {warmup} must be at least 1 step: without one there is no second "
            "moment to divide by."
        )
    exchange = two_stage_feedback(_or_sign(compressor), seed=seed, axis=axis)

    def init(params):
        state = exchange.init(params)
        return vary(OneBitAdamState(zeros(params), zeros(params), state), axis)

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
        only = ("gradients",)
        admit(
            updates, "one_bit_adam", axis=axis, about=about, within=within, takes=only
        )
        step = uniform.now(step, axis)
        grads = map_leaves(lambda _, g: precise(g), state.mu, updates)

        def dense(grads, state):
            heard = reduce_mean(grads, axis)
            nu = optax.tree.update_moment(heard, state.nu, b2, 2)
            mu = optax.tree.update_moment(heard, state.mu, b1, 1)
            return OneBitAdamState(mu, nu, state.exchange)

        def signs(grads, state):
            mu = optax.tree.update_moment(grads, state.mu, b1, 1)
            mu, kept = exchange.update(mu, state.exchange, step=step)
            # A sign has no zero: what never had a gradient would move.
            mu = map_leaves(lambda v, m: jnp.where(v == 0, 0, m), state.nu, mu)
            return OneBitAdamState(mu, state.nu, kept)

        warm = uniform.decide(lambda t: t < warmup, step)
        state = uniform.cond(warm, dense, signs, grads, state, axis=axis)
        count = jnp.asarray(step + 1, jnp.int32)
        mu = optax.tree.bias_correction(state.mu, b1, count)
        nu = optax.tree.bias_correction(state.nu, b2, jnp.minimum(count, warmup))
        ahead = map_leaves(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
        return like(updates, ahead), state

    return optax.chain(Exchange(init, update), inner)


def zero_one_adam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    period: int | Trigger,
    refresh: Trigger | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    compressor: Compressor | None = None,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Talking:
    r"""0/1 Adam: local Adam steps, agreed on in signs, over a rarely refreshed moment.

    .. math::
        & m_i \leftarrow \beta_1 m_i + (1-\beta_1) g_i, \quad
        u_i \leftarrow u_i + \gamma m_i, \quad
        x_i \leftarrow x_i - \gamma m_i / (\sqrt v + \epsilon) \\
        & \text{if sync: } \bar u = \text{C}(u_i), \quad
        m_i \leftarrow \bar u / \textstyle\sum \gamma, \quad
        x_i, a \leftarrow a - \bar u / (\sqrt v + \epsilon), \quad u_i \leftarrow 0 \\
        & \text{if refresh: } v \leftarrow \beta_2 v + (1-\beta_2) \bar g^2

    ``γ`` is ``learning_rate``, or its value at the step, counted from 0; ``a`` is
    ``state.anchor``, the model to evaluate; the sum of ``γ`` is over the steps since
    the last sync. ``C`` is ``two_stage_feedback``, by ``sign()`` unless another
    ``compressor`` is given. ``period`` says when workers sync, in steps or as a
    trigger; ``doubling(...)`` is the paper's kind. ``refresh`` is ``thinning(16)``
    unless given. Both are clocks, of the run's steps: first called where refreshes have
    thinned out it has no ``v`` and does not move, so begin it at step 0, or shift the
    ``step`` it is handed. An entry whose ``v`` is zero does not move yet. A NaN stays
    in the momentum for ever, as in Adam: guard it by ``skip_nonfinite``.

    Sends one bit an entry up and one down where it syncs, with one float32 for each
    worker's row of each leaf (``two_stage_bytes``), and the gradients in float32 where
    it refreshes.

    Note:
        The rate is its own, not an inner optimizer's, since it weighs what is summed.
        As in the paper there is no correction of the bias: ``v`` is below the mean
        square of gradients until it was refreshed ``1/(1−β₂)`` times, and steps are as
        much longer. Warm the rate up, and choose ``b2`` by the refreshes. Where the
        rate is zero over a whole round, momenta stay the workers' own. The loop, the
        factor of 16 and that a refresh comes after the step are recalled from the
        paper, not read in it; it refreshes only while it syncs at every step. That
        entries without a second moment wait, ``ε`` outside of the root, one scale a row
        and ``weight_decay`` (decoupled, of the anchor at a sync) are choices of this
        library.

    Raises:
        ValueError: a measured trigger; at trace, a missing ``step`` or ``params``, and
            what ``two_stage_feedback`` raises.

    Example:
        No second moment at step 0; then a step of its own, and a sync.

        >>> import numpy as np
        >>> from lowcomm import before, spread
        >>> tx = zero_one_adam(0.5, period=3, refresh=before(1), b1=0.0, b2=0.0)
        >>> def worker(x, g):
        ...     state, path = tx.init(x), []
        ...     for t in range(3):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> path = spread(worker)(jnp.zeros(2), jnp.array([1.0, 3.0]))
        >>> print(np.asarray(path).round(2))
        [[ 0.   -0.25 -1.5 ]
         [ 0.   -0.75 -1.5 ]]

    References:
        Lu, Li, Zhang, De Sa and He, `Maximizing Communication Efficiency for
        Large-scale Training via 0/1 Adam <https://arxiv.org/abs/2202.06009>`_, 2022,
        Algorithm 1.
    """
    expect(Trigger, refresh=refresh)
    syncs, refreshes = clock(period), thinning(16) if refresh is None else refresh
    for name, trigger in {"period": syncs, "refresh": refreshes}.items():
        if trigger.gap is None:
            raise ValueError(
                f"{name} must be a clock, such as every(8) or thinning(16)."
            )
    exchange = two_stage_feedback(_or_sign(compressor), seed=seed, axis=axis)

    def init(params):
        params = movable(params)
        state = ZeroOneAdamState(
            mu=zeros(params),
            nu=zeros(params),
            summed=zeros(params),
            rates=jnp.zeros((), jnp.float32),
            exchange=exchange.init(params),
            anchor=jax.tree.map(lambda p: jnp.array(precise(jnp.asarray(p))), params),
            synced=jnp.zeros((), bool),
        )
        return vary(state, axis)

    def update(updates, state: Any, params=None, *, step=None, **extra):
        whole, grads, params = enter(updates, params, step, axis)
        admit(
            grads,
            "zero_one_adam",
            axis=axis,
            about="gradients",
            within=None,
            takes=("gradients",),
        )
        given: Any = learning_rate
        rate = given(step) if callable(given) else given
        grads = map_leaves(lambda _, g: precise(g), state.mu, grads)
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        summed = map_leaves(lambda u, m: u + rate * m, state.summed, mu)
        rates = state.rates + rate

        def gone(start, way, total):
            """From ``start`` along momenta times rates that are ``total`` together."""

            def moved(x, u, v):
                ahead = jnp.where(v == 0, 0, u / (jnp.sqrt(v) + eps))
                return -ahead - total * weight_decay * precise(x)

            return map_exchanged(moved, start, way, state.nu)

        def agree(mu, summed, rates, kept, anchor):
            heard, kept = exchange.update(summed, kept, step=step)
            anchor = map_leaves(add, anchor, gone(anchor, heard, rates))
            mean = lambda m, u: jnp.where(rates == 0, m, u / rates)
            moves = map_leaves(subtract, like(params, anchor), params)
            mu = map_leaves(mean, mu, heard)
            return moves, mu, zeros(mu), jnp.zeros_like(rates), kept, anchor

        def alone(mu, summed, rates, kept, anchor):
            way = map_leaves(lambda m: rate * m, mu)
            moves = map_leaves(precise, gone(params, way, rate))
            return moves, mu, summed, rates, kept, anchor

        def due(trigger):
            return trigger.fire(trigger.init(params), step=step, axis=axis)[0]

        sync = due(syncs)
        operands = mu, summed, rates, state.exchange, state.anchor
        moves, *kept = uniform.cond(sync, agree, alone, *operands, axis=axis)

        def refreshed(nu):
            return optax.tree.update_moment(reduce_mean(grads, axis), nu, b2, 2)

        nu = uniform.cond(due(refreshes), refreshed, lambda nu: nu, state.nu, axis=axis)
        mu, *others = kept
        state = ZeroOneAdamState(mu, nu, *others, synced=jnp.asarray(sync))
        return leave(moves, whole), vary(state, axis)

    return Talking(init, update)


def _or_sign(compressor: Compressor | None) -> Compressor:
    expect(Compressor, compressor=compressor)
    return sign() if compressor is None else compressor
