"""Rounds of local steps measured from an anchor."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import (
    apply_updates,
    average,
    compressed_mean,
    data_parallel,
    diloco,
    drift_exceeds,
    every,
    gossip,
    random_k,
    ring,
    rounds,
    spread,
)
from tests.quadratics import toward, walk

K = 4
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=3), (K, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(K, 3)).astype(np.float32)
OUTERS = {
    "sgd": optax.sgd(0.7),
    "heavy ball": optax.sgd(0.7, momentum=0.9),
    "nesterov": optax.sgd(0.7, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
}


def train(tx, steps=9, *, x=X, data=OPTIMA, gradient=toward, **how):
    """The paths ``[K, steps, …]`` of virtual workers and of their states."""
    return walk(tx, x, data, steps=steps, gradient=gradient, **how)


exactly = functools.partial(train, apply=apply_updates)


@pytest.mark.parametrize("slow", [0.5, 1.0])
def test_one_worker_is_lookahead(slow):
    inner = optax.sgd(0.3, momentum=0.9)
    one = {"x": X[:1], "data": OPTIMA[:1]}
    path, state = train(rounds(inner, optax.sgd(slow), when=every(3)), **one)
    tx = optax.lookahead(inner, sync_period=3, slow_step_size=slow)
    params = optax.LookaheadParams.init_synced(jnp.asarray(X[0]))
    ahead = tx.init(params)
    for t in range(9):
        grads = toward(params.fast, OPTIMA[0])
        updates, ahead = tx.update(grads, ahead, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(path[0, t], params.fast, atol=1e-6)
        np.testing.assert_allclose(state.anchor[0, t], params.slow, atol=1e-6)


def test_one_worker_at_the_outer_rate_one_is_plain_optax():
    inner, one = optax.adam(0.1), {"x": X[:1], "data": OPTIMA[:1]}
    path, _ = train(rounds(inner, optax.sgd(1.0), when=every(2)), **one)
    alone, _ = train(optax.with_extra_args_support(inner), **one)
    np.testing.assert_allclose(path, alone, atol=1e-6)


@pytest.mark.parametrize("period", [1, 3])
def test_outer_rate_one_is_parameter_averaging(period):
    inner = optax.adam(0.1)
    path, _ = train(rounds(inner, optax.sgd(1.0), when=every(period)))
    averaged, _ = train(average(inner, when=every(period)))
    np.testing.assert_allclose(path, averaged, atol=2e-6)


def test_outer_rate_zero_stays_at_the_anchor():
    path, state = exactly(rounds(optax.sgd(0.3), optax.sgd(0.0), when=every(3)))
    np.testing.assert_array_equal(state.anchor, np.tile(X[:, None], (1, 9, 1)))
    np.testing.assert_array_equal(path[:, 2::3], np.tile(X[:, None], (1, 3, 1)))
    assert np.abs(path[:, 1] - X).max() > 0.1


def test_synced_each_step_it_is_data_parallel_nesterov():
    path, _ = train(rounds(optax.sgd(0.3), OUTERS["nesterov"]))
    together = data_parallel(optax.sgd(0.21, momentum=0.9, nesterov=True))
    np.testing.assert_allclose(path, train(together)[0], atol=5e-6)


@pytest.mark.parametrize("name", OUTERS)
def test_the_anchor_is_the_bare_outer_optimizer_fed_the_recorded_deltas(name):
    outer = OUTERS[name]
    remember = optax.GradientTransformationExtraArgs(
        lambda p: jnp.zeros_like(p), lambda d, s, p=None, **extra: (d, d)
    )
    tx = rounds(optax.sgd(0.3), optax.chain(remember, outer), when=every(3))
    _, state = train(tx)
    anchor, outer_state = X[0], outer.init(X[0])
    for t in (2, 5, 8):
        delta = state.outer[0][0, t]
        assert np.abs(delta).max() > 0
        forward, outer_state = outer.update(delta, outer_state, anchor)
        anchor = optax.apply_updates(anchor, forward)
        np.testing.assert_allclose(state.anchor[0, t], anchor, atol=1e-6)


def test_the_anchor_moves_toward_the_workers_by_their_mean_displacement():
    _, state = train(rounds(optax.sgd(0.5), optax.sgd(0.25), when=every(2)), 2)
    # Each worker is drawn to its optimum: two halvings of the distance remain 1/4.
    local = OPTIMA + (X - OPTIMA) / 4
    expected = X + 0.25 * (local.mean(0) - X)
    np.testing.assert_allclose(state.anchor[:, 1], expected, atol=1e-6)


def test_anchors_have_the_same_bits_on_all_workers():
    big = RNG.normal(size=(8, 50)) * 10.0 ** RNG.integers(-7, 8, size=(8, 50))
    x = np.tile(RNG.normal(size=50), (8, 1)).astype(np.float32)
    tx = rounds(optax.sgd(0.3), OUTERS["nesterov"], when=every(2))
    path, state = exactly(tx, 8, x=x, data=big.astype(np.float32))
    for tree in (state.anchor, state.outer, path[:, 1::2]):
        for leaf in jax.tree.leaves(tree):
            assert (leaf.view(np.uint32) == leaf[:1].view(np.uint32)).all()
    assert (path[:, 0] != path[:1, 0]).any()


@pytest.mark.parametrize("pull", [1.0, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_zero_gradients_change_no_bit(dtype, pull):
    x = np.tile(RNG.normal(size=100), (K, 1)).astype(dtype)
    tx = rounds(optax.sgd(0.3), OUTERS["nesterov"], when=every(2), pull=pull)
    state = jax.jit(spread(tx.init))(x)
    # A float32 anchor that half-precision parameters cannot show, such as 1.00205.
    anchor = state.anchor + (0.002 * jnp.ones_like(x, np.float32))
    anchor = jnp.where(jnp.arange(100) == 0, np.float32(1.00205), anchor)
    state = state._replace(anchor=anchor)
    x = np.asarray(anchor.astype(dtype))
    still = lambda x, d: 0 * d
    path, states = train(tx, 10, x=x, data=x, gradient=still, state=state)
    np.testing.assert_array_equal(path, np.tile(x[:, None], (1, 10, 1)))
    np.testing.assert_array_equal(states.anchor[:, -1], anchor)


def test_many_tiny_outer_steps_move_the_float32_anchor_of_bf16_params():
    x = jnp.ones((2, 4), jnp.bfloat16)
    # Each round moves by 2⁻¹¹, a sixteenth of the spacing of bfloat16 at 1.
    tx = rounds(optax.sgd(1.0), optax.sgd(2.0**-4), when=every(1))
    gradient = lambda x, d: jnp.full_like(x, -(2.0**-7))
    path, state = exactly(tx, 64, x=x, data=x, gradient=gradient)
    anchor = np.ones((2, 4), np.float32)
    for t in range(64):
        start = anchor.astype(jnp.bfloat16)
        there = (start.astype(np.float32) + 2.0**-7).astype(jnp.bfloat16)
        anchor = anchor + (there.astype(np.float32) - start.astype(np.float32)) / 16
        np.testing.assert_array_equal(state.anchor[:, t], anchor)
        np.testing.assert_array_equal(path[:, t], anchor.astype(jnp.bfloat16))
    assert anchor[0, 0] > 1.02
    half = rounds(optax.sgd(1.0), optax.sgd(2.0**-4), anchor_dtype=jnp.bfloat16)
    _, state = exactly(half, 64, x=x, data=x, gradient=gradient)
    assert (state.anchor[:, -1] == 1).all()  # what the float32 anchor is there for


def test_the_worked_example_of_diloco():
    # Two workers on (x − c)²/2, c = 0 and 2, from 4, rate 1/2, two steps a round: both
    # keep a quarter of their distance, so Δ = 3/4 (a − 1); then v ← 0.9 v + Δ and
    # a ← a − 0.7 (Δ + 0.9 v).
    x, c = np.full(2, 4, np.float32), np.array([0, 2], np.float32)
    _, state = train(diloco(optax.sgd(0.5), period=2), 8, x=x, data=c)
    expected = [1.0075, -0.27573125, -0.154553703, 0.503390392]
    np.testing.assert_allclose(state.anchor[:, 1::2], [expected] * 2, atol=1e-6)
    a, v = 4.0, 0.0
    for value in expected:
        delta = 0.75 * (a - 1)
        v = 0.9 * v + delta
        a = a - 0.7 * (delta + 0.9 * v)
        np.testing.assert_allclose(a, value, rtol=1e-8)


NESTEROV = OUTERS["nesterov"]


def test_a_partial_pull_leaves_replicas_apart_and_anchors_equal():
    tx = rounds(optax.sgd(0.3), NESTEROV, when=every(3), pull=0.5)
    path, state = train(tx)
    assert (path[:, 2] != path[:1, 2]).any()
    np.testing.assert_array_equal(state.anchor, np.tile(state.anchor[:1], (K, 1, 1)))
    never, _ = train(rounds(optax.sgd(0.3), NESTEROV, when=every(3), pull=0.0))
    np.testing.assert_allclose(never, train(optax.sgd(0.3))[0], atol=1e-6)
    assert not state.synced.any()


def test_the_mean_path_on_a_shared_quadratic_is_data_parallel_for_every_pull():
    inner = optax.sgd(0.3, momentum=0.5)
    for pull in (1.0, 0.5):
        path, _ = train(rounds(inner, optax.sgd(1.0), when=every(3), pull=pull))
        together, _ = train(data_parallel(inner))
        np.testing.assert_allclose(path.mean(0), together[0], atol=2e-6)


def test_a_drift_trigger_fires_at_equality_on_all_workers():
    # Worker k drifts by k/4 a step; the fastest is 6/4 away after two steps.
    speed = np.arange(K, dtype=np.float32)[:, None]
    tx = rounds(optax.sgd(0.25), optax.sgd(1.0), when=drift_exceeds(1.5))
    _, state = train(tx, 6, x=0 * speed, data=speed, gradient=lambda x, d: d)
    assert state.since.tolist() == [[1, 0, 1, 0, 1, 0]] * K


def test_the_inner_optimizer_is_handed_the_anchor():
    def proximal(updates, state, params, *, anchor, **extra):
        return updates + 0.5 * (params - anchor), state

    link = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), proximal)
    inner = optax.chain(link, optax.sgd(0.25))
    path, _ = train(rounds(inner, optax.sgd(1.0), when=every(3)), 6)
    x, anchor = X.astype(float), X.astype(float)
    for t in range(6):
        x = x - 0.25 * (x - OPTIMA + 0.5 * (x - anchor))
        if t % 3 == 2:
            x = anchor = np.tile(x.mean(0), (K, 1))
        np.testing.assert_allclose(path[:, t], x, atol=1e-6)


def test_a_compressed_exchange_keeps_a_model_all_agree_on():
    tx = rounds(optax.sgd(0.3), NESTEROV, exchange=compressed_mean(random_k(0.5)))
    still = lambda x, d: 0 * d
    path, _ = train(tx, 3, gradient=still)
    np.testing.assert_array_equal(path, np.tile(X[:, None], (1, 3, 1)))


def test_an_exchange_that_would_let_anchors_drift_apart_is_refused():
    tx = rounds(optax.sgd(0.3), optax.sgd(1.0), exchange=gossip(ring(K)))
    with pytest.raises(ValueError, match=r"not displacements.*use average"):
        spread(lambda x: tx.update(x, tx.init(x), x, step=0)[0])(X)


def test_the_outer_optimizer_sees_the_step_and_nothing_that_differs():
    def update(updates, state, params=None, *, step, value=1.0, **extra):
        assert not extra
        return -value * updates, jnp.int32(step)

    outer = optax.GradientTransformationExtraArgs(lambda p: jnp.int32(-1), update)
    heard = optax.GradientTransformationExtraArgs(
        lambda p: jnp.zeros(()), lambda g, s, p, *, value, **extra: (g, value)
    )
    tx = rounds(optax.chain(heard, optax.sgd(0.3)), outer, when=every(2))

    def worker(x, state, optimum, t):
        value = jnp.sum((x - optimum) ** 2)  # the loss, another one on each worker
        updates, state = tx.update(x - optimum, state, x, step=t, value=value)
        return apply_updates(x, updates, state), state, value

    step = jax.jit(spread(worker, in_axes=(0, 0, 0, None)))
    x, state = X, jax.jit(spread(tx.init))(X)
    for t in range(4):
        x, state, value = step(x, state, OPTIMA, jnp.int32(t))
        np.testing.assert_array_equal(state.inner[0], value)
    assert len(np.unique(value)) == K
    np.testing.assert_array_equal(state.anchor, np.tile(state.anchor[:1], (K, 1)))
    assert state.outer.tolist() == [3] * K


def test_an_anchor_of_a_real_type_keeps_the_imaginary_part_of_complex_leaves():
    tx = rounds(optax.sgd(0.5), optax.sgd(1.0), anchor_dtype=jnp.float32)
    x = {"z": (X + 2j * X).astype(np.complex64), "h": X.astype(jnp.bfloat16)}

    def worker(x):
        updates, state = tx.update(x, tx.init(x), x, step=0)
        return state.anchor, apply_updates(x, updates, state)

    anchor, after = spread(worker)(x)
    assert (anchor["z"].dtype, anchor["h"].dtype) == (jnp.complex64, jnp.float32)
    np.testing.assert_allclose(after["z"], x["z"] / 2, rtol=1e-6)
    np.testing.assert_array_equal(after["z"], anchor["z"])
