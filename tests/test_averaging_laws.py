"""What holds of every method that does nothing but average parameters now and then."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import (
    at_steps,
    data_parallel,
    growing,
    local_sgd,
    post_local_sgd,
)
from lowcomm.spmd import worker_index
from tests.quadratics import walk

K, N, RATE, STEPS = 4, 3, 0.1, 12
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=N), (K, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(K, N)).astype(np.float32)
CURVATURES = RNG.uniform(0.5, 2.0, size=(K, N)).astype(np.float32)
SHARED = np.tile(CURVATURES[:1], (K, 1))
SGD, BALL = optax.sgd(RATE), optax.sgd(RATE, momentum=0.9)
# Numbers below 4; a step is a handful of float32 roundings and a contraction.
ROUNDING = STEPS * 8 * 4 * 2.0**-24

CLOCKS = {"1": 1, "3": 3, "growing": growing(lambda r: r + 1, steps=STEPS)}


def noisy(inner, sigma=1.0):
    """``inner`` on gradients with noise, the same for each method at a step."""

    def add(updates, state, params=None, *, step, **extra):
        key = jax.random.fold_in(jax.random.key(0), step)
        key = jax.random.fold_in(key, worker_index("workers"))
        return updates + sigma * jax.random.normal(key, updates.shape), state

    none = lambda params: optax.EmptyState()
    return optax.chain(optax.GradientTransformationExtraArgs(none, add), inner)


def train(tx, steps=STEPS, *, x=X, data=(CURVATURES, OPTIMA), **how):
    """The path of virtual workers, ``[K, steps, …]``."""
    return walk(tx, x, data, steps=steps, **how)[0]


def spread_of(path):
    """The mean over workers of the squared distance to their mean, after each step."""
    path = path.astype(float)
    return np.square(path - path.mean(0)).sum(-1).mean(0)


@pytest.mark.parametrize("period", CLOCKS.values(), ids=CLOCKS)
def test_averaging_does_not_move_the_mean(period):
    path = train(local_sgd(SGD, period=period)).astype(float)
    before = np.concatenate([X[:, None], path[:, :-1]], 1)
    moved = RATE * (CURVATURES[:, None] * (before - OPTIMA[:, None]))
    expected = before.mean(0) - moved.mean(0)
    np.testing.assert_allclose(path.mean(0), expected, rtol=0, atol=ROUNDING / STEPS)


def test_averaging_before_the_step_is_another_algorithm():
    # x_i <- mean(x) - rate g_i(x_i): its mean obeys the recursion above just as well.
    x, other = X.astype(float), []
    for _ in range(STEPS):
        x = x.mean(0) - RATE * CURVATURES * (x - OPTIMA)
        other.append(x)
    other, ours = np.stack(other, 1), train(local_sgd(SGD, period=1))
    together = train(data_parallel(SGD))
    assert spread_of(other)[1:].min() > 1e-3
    assert np.sqrt(spread_of(ours).max()) < ROUNDING
    assert np.abs(other.mean(0) - together[0]).max() > 1e-3
    np.testing.assert_allclose(ours.mean(0), together[0], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("period", [4, 12])
def test_workers_drift_no_farther_than_their_gradients_carry_them(period):
    path = train(local_sgd(SGD, period=period))
    before = np.concatenate([X[:, None], path[:, :-1]], 1)
    gradients = CURVATURES[:, None] * (before - OPTIMA[:, None])
    most = np.linalg.norm(gradients, axis=-1).max()
    k = (np.arange(STEPS) + 1) % period  # steps since the last restart
    drift = spread_of(path)
    assert (drift <= (RATE * k * most) ** 2 + ROUNDING**2).all()
    assert np.sqrt(drift[k == 0].max()) < ROUNDING
    assert drift.max() > (RATE * most) ** 2 / 10  # the bound is no empty one


def test_on_linear_losses_the_squared_drift_grows_with_the_square_of_the_steps():
    # Multiples of 4 and a rate of 1/8: every number is exact.
    g = 4 * np.random.default_rng(1).integers(-8, 8, (K, 6)).astype(np.float32)
    apart = np.square(g - g.mean(0)).sum(-1).mean()
    k = (np.arange(16) + 1) % 8
    for rate in (0.125, 0.25):
        tx = local_sgd(optax.sgd(rate), period=8)
        path = train(tx, 16, x=0 * g, data=g, gradient=lambda x, g: g)
        np.testing.assert_array_equal(spread_of(path), rate**2 * k**2 * apart)


def test_on_pure_noise_the_squared_drift_grows_with_the_steps():
    # E = rate² k (1 − 1/K) a coordinate. The mean over n coordinates of a variance of
    # K − 1 degrees of freedom has a relative error of √(2 / (K − 1) / n) = 0.8 %.
    workers, n, rate = 8, 4096, 0.03
    tx = local_sgd(noisy(optax.sgd(rate)), period=14)
    x = np.zeros((workers, n), np.float32)
    path = train(tx, 14, x=x, data=x, gradient=lambda x, data: data)
    k = np.arange(1, 14)
    expected = rate**2 * k * (1 - 1 / workers)
    assert expected[12] == pytest.approx(0.01024, abs=5e-6)
    np.testing.assert_allclose(spread_of(path)[:13] / n, expected, rtol=4 * 0.0084)


@pytest.mark.parametrize(
    ("period", "rest"), [(1, 0.75), (2, 0.72857), (10, 0.59871), (100, 0.50001)]
)
def test_local_steps_rest_away_from_the_optimum(period, rest):
    x = np.zeros((2, 1), np.float32)
    data = (np.float32([[1], [3]]), np.float32([[0], [1]]))
    path = train(local_sgd(optax.sgd(0.1), period=period), 400, x=x, data=data)
    np.testing.assert_allclose(path[:, -1], rest, rtol=0, atol=6e-6)


def bound(*, gap, rate, steps, period, second, smoothness, variance, workers):
    """Of the mean squared gradient at the mean, by the theorem."""
    drift = 4 * (rate * period * smoothness) ** 2 * second
    noise = smoothness * rate * variance / workers
    return 2 * gap / (rate * steps) + drift + noise


def test_the_bound_at_the_rate_and_the_period_of_the_theorem_is_one_over_root_nt():
    gap, second, variance, smoothness, workers, steps = 3.0, 5.0, 2.0, 7.0, 4, 4096
    found = bound(
        gap=gap,
        rate=np.sqrt(workers) / (smoothness * np.sqrt(steps)),
        steps=steps,
        period=steps**0.25 / workers**0.75,
        second=second,
        smoothness=smoothness,
        variance=variance,
        workers=workers,
    )
    expected = (2 * smoothness * gap + 4 * second + variance) / np.sqrt(workers * steps)
    assert found == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("period", [1, 4])
def test_the_mean_of_the_squared_gradient_is_below_the_bound(period):
    # Losses ½(x − c_i)², many of them at once: the mean over them is the expectation.
    n, steps, rate = 1024, 64, 0.1
    x = np.full((K, n), 3, np.float32)
    c = np.tile(np.float32([[-1], [0], [0], [1]]), n)
    data = np.ones_like(c), c
    tx = local_sgd(noisy(optax.sgd(rate)), period=period)
    path = train(tx, steps, x=x, data=data)
    before = np.concatenate([x[:, None], path[:, :-1]], 1)
    second = np.square(before - c[:, None]).mean(-1).max() + 1
    found = np.square(before.mean(0)).mean()
    gap = 3**2 / 2
    most = bound(
        gap=gap,
        rate=rate,
        steps=steps,
        period=period,
        second=second,
        smoothness=1,
        variance=1,
        workers=K,
    )
    assert most / 100 < found < most


NESTEROV = optax.sgd(RATE, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(
    ("inner", "moments", "clock"),
    [
        pytest.param(SGD, "keep", "growing", id="sgd"),
        pytest.param(BALL, "keep", "growing", id="momentum"),
        pytest.param(BALL, "average", "3", id="averaged momentum"),
        pytest.param(NESTEROV, "average", "growing", id="averaged nesterov"),
    ],
)
def test_with_one_curvature_the_mean_path_is_synchronous_under_any_noise(
    inner, moments, clock
):
    period = CLOCKS[clock]
    data = SHARED, OPTIMA
    local = train(local_sgd(noisy(inner), period=period, moments=moments), data=data)
    together = train(noisy(data_parallel(inner)), data=data)
    np.testing.assert_allclose(local.mean(0), together[0], rtol=0, atol=ROUNDING)


def test_after_synchronous_steps_the_mean_path_is_synchronous_as_well():
    data = SHARED, OPTIMA
    local = train(post_local_sgd(noisy(BALL), warmup=3, period=4), data=data)
    together = train(noisy(data_parallel(BALL)), data=data)
    np.testing.assert_allclose(local.mean(0), together[0], rtol=0, atol=ROUNDING)
    other = train(post_local_sgd(noisy(BALL), warmup=3, period=4))
    together = train(noisy(data_parallel(BALL)))
    assert np.abs(other.mean(0) - together[0]).max() > 1e-3


@pytest.mark.parametrize(
    ("inner", "moments"), [(BALL, "reset"), (optax.adam(RATE), "keep")]
)
def test_reset_moments_and_adam_move_the_mean_path(inner, moments):
    data = SHARED, OPTIMA
    local = train(local_sgd(inner, period=4, moments=moments), data=data)
    together = train(data_parallel(inner), data=data)
    assert np.abs(local.mean(0) - together[0]).max() > 1e-2


def test_the_noise_of_the_mean_is_the_same_for_every_period():
    # Stationary variance rate σ² / (h (2 − rate h)) / K, in 40 steps to 0.7^80 of it.
    # 60 steps of 4096 runs, of which squares are correlated by 0.49 a step: a relative
    # error of √(2 / 4096 / (60 · 0.51 / 1.49)) = 0.5 %.
    workers, h, rate = 8, 1.5, 0.2
    expected = rate / (h * (2 - rate * h)) / workers
    assert expected == pytest.approx(0.0098039, abs=5e-8)
    x = np.zeros((workers, 4096), np.float32)
    for period in (1, 5, 50):
        tx = local_sgd(noisy(optax.sgd(rate)), period=period)
        path = train(tx, 100, x=x, data=(x + np.float32(h), x))
        assert np.square(path.mean(0)[40:]).mean() == pytest.approx(expected, rel=0.02)


def test_a_sync_right_after_a_sync_changes_nothing():
    binary = 4 * np.random.default_rng(2).integers(-8, 8, (K, 6)).astype(np.float32)
    once, twice = (
        walk(
            local_sgd(optax.sgd(0.5), period=at_steps(when)),
            np.zeros_like(binary),
            binary,
            steps=3,
            # Away from the start there is no slope.
            gradient=lambda x, g: jnp.where(jnp.all(x == -g), 0, g),
        )[0]
        for when in ([1], [1, 2])
    )
    still = lambda x, g: jnp.zeros_like(g)
    synced = once[:, 1]
    assert np.ptp(once[:, 0], axis=0).max() > 0
    np.testing.assert_array_equal(synced, np.tile(synced[:1], (K, 1)))
    again = walk(
        local_sgd(SGD, period=1), synced, binary, steps=2, gradient=still, start=2
    )[0]
    np.testing.assert_array_equal(again[:, -1], synced)
    np.testing.assert_array_equal(twice[:, :2], once[:, :2])


@pytest.mark.parametrize("workers", [1, 4])
def test_alone_or_all_alike_workers_never_drift(workers):
    same = lambda a: np.tile(a[:1], (workers, 1))
    data = same(CURVATURES), same(OPTIMA)
    alone = train(data_parallel(BALL), x=same(X), data=data)
    for period in CLOCKS.values():
        path = train(local_sgd(BALL, period=period), x=same(X), data=data)
        assert (spread_of(path) == 0).all()
        np.testing.assert_allclose(path, alone, rtol=0, atol=ROUNDING)


def test_longer_rounds_at_smaller_rates_are_their_loop_in_numpy():
    rate = lambda t: 0.2 / jnp.sqrt(1 + t)
    clock = growing(lambda r: 2**r, steps=10)  # after steps 0, 2, 6 and 9
    path = train(local_sgd(optax.sgd(rate, momentum=0.5), period=clock), 10)
    x, m = X.astype(float), np.zeros((K, N))
    for t in range(10):
        m = 0.5 * m + CURVATURES * (x - OPTIMA)
        x = x - 0.2 / np.sqrt(1 + t) * m
        if t in (0, 2, 6, 9):
            x = np.tile(x.mean(0), (K, 1))
        np.testing.assert_allclose(path[:, t], x, rtol=0, atol=ROUNDING)
