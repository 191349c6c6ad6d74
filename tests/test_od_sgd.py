"""OD-SGD: gradients a step late, and a local step that stands in for the mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from tests.quadratics import toward, walk

K, N, STEPS = 4, 3, 6
EPS = float(jnp.finfo(jnp.float32).eps)
# Small integers and binary rates: what SGD and heavy ball make of them is exact.
INTEGERS = np.random.default_rng(0).integers(-8, 8, (K, N)).astype(np.float32)
NOISE = np.random.default_rng(1).normal(size=(K, N)).astype(np.float32)
ORIGIN = np.zeros((K, N), np.float32)
SGD, HEAVY = optax.sgd(0.5), optax.sgd(0.25, momentum=0.5)
either = pytest.mark.parametrize("inner", [SGD, HEAVY], ids=["sgd", "momentum"])


def bent(x, target):
    """The gradient of a loss that is no quadratic: Σ log cosh(x − c)."""
    return jnp.tanh(x - target)


def train(tx, steps=STEPS, *, x=ORIGIN, data=INTEGERS, gradient=toward):
    """The workers' models, ``[steps, K, …]``, and the states likewise."""
    path = walk(
        optax.with_extra_args_support(tx), x, data, steps=steps, gradient=gradient
    )
    return jax.tree.map(lambda x: np.swapaxes(x, 0, 1), path)


def before(path, x=ORIGIN):
    return np.concatenate([x[None], path[:-1]]).astype(np.float64)


@either
def test_while_it_warms_up_it_is_synchronous_training(inner):
    path, state = train(lc.od_sgd(inner, warmup=STEPS))
    expected, _ = train(lc.data_parallel(inner))
    np.testing.assert_array_equal(path, expected)
    np.testing.assert_array_equal(state.anchor, expected)
    assert state.synced.all()


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("still", [optax.set_to_zero(), optax.sgd(0.0)])
def test_without_a_local_step_gradients_are_exactly_one_step_late(warmup, still):
    path, state = train(lc.od_sgd(SGD, still, warmup=warmup))
    W = [np.zeros(N)]
    for t in range(STEPS):
        at = W[t] if t <= warmup else W[t - 1]
        W.append(W[t] - 0.5 * (at - INTEGERS.mean(0)))
    np.testing.assert_array_equal(state.anchor[:, 0], W[1:])
    # Not the worker's own old model, but the server's: no worker goes a way of its own.
    np.testing.assert_array_equal(path, path[:, :1] + 0 * path)
    np.testing.assert_array_equal(state.synced[:, 0], np.arange(STEPS) < warmup)


@either
def test_it_is_cocod_and_oldsgd_at_every_step(inner):
    path, state = train(lc.od_sgd(inner, warmup=0))
    for sibling in (
        lc.cocod_sgd(inner, period=1),
        lc.oldsgd(inner, lc.complete(K), period=1),
    ):
        np.testing.assert_array_equal(path, train(sibling)[0])
    np.testing.assert_array_equal(state.anchor[:, 0], path.mean(1))


def test_on_any_loss_workers_combine_and_then_adapt():
    path, state = train(lc.od_sgd(SGD, warmup=0), 12, data=NOISE, gradient=bent)
    x = before(path)
    # Values below 2, a dozen roundings in each of 12 steps.
    atol = 12 * 12 * EPS
    adapted = x.mean(1, keepdims=True) - 0.5 * np.tanh(x - NOISE)
    np.testing.assert_allclose(path, adapted, atol=atol)
    np.testing.assert_allclose(path.mean(1), state.anchor[:, 0], atol=atol)


def test_momentum_in_one_of_the_two_optimizers_is_another_method():
    for inner, local in ((SGD, HEAVY), (HEAVY, SGD)):
        path, state = train(lc.od_sgd(inner, local, warmup=0))
        assert np.abs(path.mean(1) - state.anchor[:, 0]).max() > 0.1


@pytest.mark.parametrize("workers", [1, K])
@pytest.mark.parametrize("warmup", [0, 3])
@either
def test_identical_workers_do_what_the_inner_optimizer_does(inner, warmup, workers):
    data = np.tile(INTEGERS[:1], (workers, 1))
    path, state = train(lc.od_sgd(inner, warmup=warmup), x=ORIGIN[:workers], data=data)
    expected, _ = train(inner, x=ORIGIN[:workers], data=data)
    np.testing.assert_array_equal(path, expected)
    np.testing.assert_array_equal(state.anchor, expected)


def test_schedules_of_both_optimizers_keep_step_through_the_warmup():
    schedule = optax.piecewise_constant_schedule(0.5, {2: 0.5, 4: 0.5})
    one = {"x": ORIGIN[:1], "data": INTEGERS[:1]}
    path, _ = train(lc.od_sgd(optax.sgd(schedule), warmup=3), **one)
    np.testing.assert_array_equal(path, train(optax.sgd(schedule), **one)[0])


def test_workers_are_apart_by_their_last_gradients_and_the_server_is_one():
    warmup, rate = 2, 0.25
    tx = lc.od_sgd(SGD, optax.sgd(rate), warmup=warmup)
    path, state = train(tx, 8, data=NOISE, gradient=bent)
    g = np.tanh(before(path) - NOISE)
    apart = lambda x: x - x[:, :1]
    np.testing.assert_array_equal(apart(path[:warmup]), 0)
    expected = -rate * apart(g[warmup:])
    np.testing.assert_allclose(apart(path[warmup:]), expected, atol=12 * EPS)
    np.testing.assert_array_equal(apart(state.anchor), 0)


LIMITS = {0.0: 1.0, 1 / 8: 8 / 7, 0.5: 2.0, 0.75: 4.0, 1.0: 2.0, 1.2: 1 / 0.7}


def both_sides(limits):
    return np.concatenate([0.97 * limits, 1.03 * limits])


def quadratics(ratios, limits, optima):
    """The paths on curvatures on both sides of limits, one for each ratio of rates."""
    ratios = jnp.asarray(np.tile(ratios, 2), jnp.float32)
    local = optax.stateless(lambda g, _: -ratios * g)
    curvature = jnp.asarray(both_sides(limits), jnp.float32)
    tx = lc.od_sgd(optax.sgd(1.0), local, warmup=0)
    x = np.ones((len(optima), len(ratios)), np.float32)
    data = np.float32(optima)[:, None] + 0 * x
    return train(tx, 400, x=x, data=data, gradient=lambda x, c: curvature * (x - c))[0]


def test_the_mean_is_stable_up_to_the_rates_of_the_theory():
    # a (1 − ρ) < 1, a (2ρ − 1) < 2 and, beyond ρ = 1, a (ρ − 1) < 1.
    ratios, limits = np.array(list(LIMITS)), np.array(list(LIMITS.values()))
    path = quadratics(ratios, limits, [0.0])[:, 0]
    size = np.abs(path).reshape(8, 50, -1).max(1)  # the roots may be complex
    np.testing.assert_array_equal(size[-1] < size[1], [True] * 6 + [False] * 6)


def test_disagreement_is_multiplied_by_the_local_step_alone():
    # w_i = W − ρη g_i, so that workers come together only if ρ a < 1, whatever the
    # mean does: at ρ = 3/4 already for a third of the rates that the mean would allow.
    ratios, optima = np.array([0.5, 0.75, 1.0]), np.array([-1.0, 2.0, 0.0, -1.0])
    path = np.float64(quadratics(ratios, 1 / ratios, optima))
    apart = path - path.mean(1, keepdims=True)
    factor = -np.tile(ratios, 2) * both_sides(1 / ratios)
    expected = factor * (apart[:20] - optima[:, None])
    # Values below 4, a dozen roundings a step.
    np.testing.assert_allclose(apart[1:21], expected, atol=12 * 4 * EPS)
    size = np.abs(apart).reshape(8, 50, K, -1).max((1, 2))
    grows = [False] * 3 + [True] * 3
    np.testing.assert_array_equal(size[-1] > 100 * np.abs(optima).max(), grows)


def test_a_negative_warmup_is_refused():
    with pytest.raises(ValueError, match="warmup -1 is negative"):
        lc.od_sgd(SGD, warmup=-1)
