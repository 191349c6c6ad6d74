"""The laws of SlowMo: what its slow momentum is, and when it is heavy ball."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import (
    apply_updates,
    data_parallel,
    every,
    local_sgd,
    rounds,
    slow_momentum,
    slowmo,
)
from tests.quadratics import walk

K, N, STEPS, PERIOD, RATE = 4, 5, 6, 2, 0.1
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=N), (K, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(K, N)).astype(np.float32)
CURVATURES = RNG.uniform(0.5, 2.0, size=(K, N)).astype(np.float32)


def train(tx, steps=STEPS, *, x=X, data=(CURVATURES, OPTIMA), **how):
    """The paths ``[K, steps, …]`` of virtual workers and of their states."""
    return walk(tx, x, data, steps=steps, **how)


SCHEDULE = optax.piecewise_constant_schedule(RATE, {3: 0.1})  # a tenth from step 3


def everywhere(mean):
    return np.broadcast_to(mean, X.shape)


def slow(rate, *, period=PERIOD, inner=None, **how):
    inner = optax.sgd(rate) if inner is None else inner
    return slowmo(inner, period=period, learning_rate=rate, **how)


@pytest.mark.parametrize("rate", [RATE, SCHEDULE])
def test_slowmo_without_momentum_is_local_sgd_at_any_schedule(rate):
    path, _ = train(slow(rate, momentum=0.0))
    expected, _ = train(local_sgd(optax.sgd(rate), period=PERIOD))
    np.testing.assert_allclose(path, expected, atol=1e-6)


def test_slowmo_is_outer_heavy_ball_at_a_constant_rate_only():
    outer = optax.sgd(0.8, momentum=0.6)
    apart = []
    for rate in (RATE, SCHEDULE):
        path, _ = train(slow(rate, momentum=0.6, slow_learning_rate=0.8))
        heavy, _ = train(rounds(optax.sgd(rate), outer, when=every(PERIOD)))
        apart.append(np.abs(path - heavy).max())
    assert apart[0] < 1e-6
    assert apart[1] > 1e-2


def test_slowmo_at_each_step_is_data_parallel_heavy_ball_at_any_schedule():
    path, _ = train(slow(SCHEDULE, period=1, momentum=0.6, slow_learning_rate=0.8))
    rate = lambda t: 0.8 * SCHEDULE(t)
    heavy = optax.chain(optax.trace(0.6), optax.scale_by_learning_rate(rate))
    np.testing.assert_allclose(path, train(data_parallel(heavy))[0], atol=2e-6)


def test_the_slow_buffer_sums_up_to_the_same_whatever_the_schedule():
    # On a constant gradient g each round adds τ g, so u = τ g (1 − βⁿ)/(1 − β), and a
    # round in the long run moves the model by α/(1 − β) times what averaging moves it.
    constant = lambda x, data: data
    beta, tau, n = 0.5, 3, 8
    rise = optax.linear_schedule(0.0, 0.1, 24)
    for rate in (RATE, rise):
        tx = slow(rate, period=tau, momentum=beta, slow_learning_rate=0.8)
        _, state = train(tx, tau * n, gradient=constant, data=OPTIMA)
        g = OPTIMA.mean(0)
        expected = tau * g * (1 - beta**n) / (1 - beta)
        np.testing.assert_allclose(
            state.outer.slow[:, -1], everywhere(expected), rtol=1e-5, atol=1e-5
        )
    tx = slow(RATE, period=tau, momentum=beta)
    _, state = train(tx, tau * n, gradient=constant, data=OPTIMA)
    moved = state.anchor[:, -1] - state.anchor[:, -1 - tau]
    averaging = -tau * RATE * g
    np.testing.assert_allclose(moved, everywhere(2 * averaging), rtol=0.01, atol=1e-5)


def test_a_rate_of_zero_adds_nothing_to_the_slow_buffer():
    _, state = train(slow(optax.constant_schedule(0.0)))
    assert (state.outer.slow == 0).all()
    np.testing.assert_array_equal(state.anchor[:, -1], X)


def test_slowmo_adds_exactly_two_arrays_of_the_size_of_the_parameters():
    def size(tx):
        leaves = jax.tree.leaves(jax.eval_shape(tx.init, X[0]))
        return sum(x.size * x.dtype.itemsize for x in leaves)

    inner, scalars = optax.adam(RATE), 4 + 1
    assert size(slow(RATE, inner=inner)) == size(inner) + 2 * X[0].nbytes + scalars


def test_the_slow_buffer_is_the_same_on_all_workers():
    _, state = train(slow(SCHEDULE, momentum=0.6))
    for leaf in jax.tree.leaves((state.outer, state.anchor)):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))


def test_right_after_a_boundary_the_model_is_the_anchor_bit_for_bit():
    path, state = train(slow(SCHEDULE, momentum=0.6), apply=apply_updates)
    for t in range(STEPS):
        at_anchor = (path[:, t] == state.anchor[:, t]).all()
        assert at_anchor == ((t + 1) % PERIOD == 0)


def test_slow_momentum_takes_the_mean_rate_of_its_round():
    outer = slow_momentum(SCHEDULE, period=4, momentum=0.0)
    displacement = jnp.float32(1.0)
    forward, state = outer.update(displacement, outer.init(displacement), step=5)
    gamma = np.mean([SCHEDULE(t) for t in (2, 3, 4, 5)])
    np.testing.assert_allclose(state.slow, 1 / gamma, rtol=1e-6)
    np.testing.assert_allclose(forward, -1.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_schedule_of_double_precision_changes_no_type(dtype):
    with jax.enable_x64(True):
        rate = optax.cosine_decay_schedule(jnp.float64(RATE), 10)
        tx = slow(rate, inner=optax.sgd(RATE), momentum=0.6)
        path, state = train(tx, x=X.astype(dtype), gradient=lambda x, data: x)
    assert path.dtype == dtype
    assert state.anchor.dtype == state.outer.slow.dtype == np.float32
    assert np.abs(np.float32(path[:, -1])).max() < np.abs(X).max()


def test_the_schedule_is_never_asked_about_a_time_before_the_first_step():
    asked = lambda t: jnp.where(t < 0, jnp.nan, RATE)
    outer = slow_momentum(asked, period=4)
    displacement = jnp.float32(1.0)
    for step in (0, 1, 3):
        forward, _ = outer.update(displacement, outer.init(displacement), step=step)
        np.testing.assert_allclose(forward, -1.0, rtol=1e-6)
