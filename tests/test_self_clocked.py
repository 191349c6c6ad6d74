"""Verbs inside the wrappers of optax, and in loops that know no step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import average, every, self_clocked, spread, traffic, worker_mesh
from tests.quadratics import bend, one_update, walk

K = 4
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=3), (K, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(K, 3)).astype(np.float32)
CURVATURES = RNG.uniform(0.5, 2.0, size=(K, 3)).astype(np.float32)


def train(tx, steps=8, *, x=X, data=(CURVATURES, OPTIMA), **how):
    """The path of virtual workers, ``[K, steps, …]``, and their last state."""
    path, states = walk(tx, x, data, steps=steps, **how)
    return path, jax.tree.map(lambda s: s[:, -1], states)


def test_it_composes_with_the_wrappers_of_optax():
    expected, _ = train(average(optax.sgd(0.1), when=every(2)))
    halved = optax.chain(average(optax.sgd(0.2), when=every(2)), optax.scale(0.5))
    scaled = lambda x, d: 0.5 * bend(x, d)
    np.testing.assert_allclose(
        train(optax.chain(optax.scale(0.5), average(optax.sgd(0.2), when=every(2))))[0],
        train(average(optax.sgd(0.2), when=every(2)), gradient=scaled)[0],
        atol=1e-7,
    )
    assert np.abs(train(halved, 2)[0] - expected[:, :2]).max() > 1e-3

    gradient = lambda x, d: {"a": bend(x["a"], d), "b": bend(x["b"], d)}
    run = lambda tx: train(tx, 8, gradient=gradient, x={"a": X, "b": X})[0]
    partition = optax.partition(
        {"often": average(optax.sgd(0.1), when=every(2)), "never": optax.sgd(0.1)},
        {"a": "often", "b": "never"},
    )
    alone, _ = train(optax.sgd(0.1))
    got = run(partition)
    np.testing.assert_array_equal(got["a"], expected)
    np.testing.assert_allclose(got["b"], alone, atol=1e-6)

    masked = optax.masked(
        average(optax.sgd(0.1), when=every(2)), {"a": True, "b": False}
    )
    np.testing.assert_array_equal(run(masked)["a"], expected)


def test_hyperparameters_are_injected_with_a_static_period():
    def local_sgd(learning_rate, period):
        return average(optax.sgd(learning_rate), when=every(period))

    rate = optax.linear_schedule(0.1, 0.0, 8)
    injected = optax.inject_hyperparams(local_sgd, static_args="period")(rate, period=2)
    path, state = train(injected)
    expected, _ = train(average(optax.sgd(rate), when=every(2)))
    np.testing.assert_allclose(path, expected, atol=1e-6)
    np.testing.assert_allclose(state.hyperparams["learning_rate"], np.full(K, rate(7)))


def clockless(tx, steps=8):
    """``train`` by a loop that knows no step."""
    counted = self_clocked(tx)
    without = optax.GradientTransformationExtraArgs(
        counted.init, lambda g, s, p, *, step: counted.update(g, s, p)
    )
    return train(without, steps)


def test_self_clocked_is_passing_the_step():
    tx = average(optax.adam(0.1), when=every(3))
    expected, expected_state = train(tx)
    path, state = clockless(tx)
    np.testing.assert_array_equal(path, expected)
    jax.tree.map(np.testing.assert_array_equal, state.clocked, expected_state)
    np.testing.assert_array_equal(state.steps, np.full(K, 8))


def test_self_clocked_stays_uniform_on_virtual_workers_and_on_a_mesh():
    tx = self_clocked(average(optax.sgd(0.1), when=every(3)))
    worker = lambda g, s, x: tx.update(g, s, x)
    state = spread(tx.init)(X)
    text = str(jax.make_jaxpr(spread(worker))(X, state, X))
    assert "cond[" in text
    assert not re.search(r"f32\[[\d,]*\] = select_n", text)
    mesh = jax.jit(spread(worker, mesh=worker_mesh(K)))
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)
    for _ in range(4):
        virtual = spread(worker)(OPTIMA, state, X)
        real = mesh(OPTIMA, state, X)
        jax.tree.map(close, virtual, real)
        state = real[1]
    sent = traffic(lambda x: tx.update(x, tx.init(x), x), jnp.zeros(5), workers=K)
    assert (sent.bytes_always, sent.bytes_max) == (4, 24)


def test_self_clocked_refuses_a_step():
    tx = self_clocked(average(optax.sgd(0.1)))
    with pytest.raises(ValueError, match="drop step="):
        one_update(tx, X, X)
