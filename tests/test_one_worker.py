"""Methods of one worker: no axis, no bytes, and what they reduce to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lowcomm as lc
from lowcomm import diloco, gpa, snoo
from tests.quadratics import toward, walk

RNG = np.random.default_rng(0)
X = RNG.normal(size=3).astype(np.float32)
C = RNG.normal(size=3).astype(np.float32)


def train(tx, steps=9, *, x=X, gradient=lambda x: x - C):
    """The path of a plain loop of optax, outside of everything lowcomm, and its states.

    Whatever it sent would raise, since no axis has a name here.
    """

    def body(carry, t):
        x, state = carry
        moves, state = tx.update(gradient(x), state, x, step=t)
        x = optax.apply_updates(x, moves)
        return (x, state), (x, state)

    run = jax.jit(lambda x: lax.scan(body, (x, tx.init(x)), jnp.arange(steps))[1])
    return jax.tree.map(np.asarray, run(x))


def stepped(tx, steps=9, x=X):
    """The same for a transformation that takes no ``step``."""
    return train(optax.with_extra_args_support(tx), steps, x=x)


# SNOO


@pytest.mark.parametrize("slow", [0.5, 1.0])
def test_snoo_without_momentum_is_lookahead(slow):
    inner = optax.sgd(0.3, momentum=0.9)
    path, state = train(snoo(inner, period=3, outer_lr=slow, momentum=0.0))
    tx = optax.lookahead(inner, sync_period=3, slow_step_size=slow)
    params = optax.LookaheadParams.init_synced(jnp.asarray(X))
    ahead = tx.init(params)
    for t in range(9):
        updates, ahead = tx.update(params.fast - C, ahead, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(path[t], params.fast, atol=1e-6)
        np.testing.assert_allclose(state.own_anchor[t], params.slow, atol=1e-6)


def test_snoo_is_diloco_of_one_worker_bit_for_bit():
    inner = optax.adam(0.1)
    path, state = train(snoo(inner, period=3, outer_lr=0.7, momentum=0.9))
    one = diloco(inner, period=3, outer_lr=0.7, momentum=0.9)
    expected, there = walk(one, X[None], C[None], steps=9, gradient=toward)
    np.testing.assert_array_equal(path, expected[0])
    np.testing.assert_array_equal(state.own_anchor, there.anchor[0])


def test_snoo_in_each_step_is_nesterov_at_the_product_of_rates():
    tx = snoo(optax.sgd(0.2), period=1, outer_lr=0.7, momentum=0.9)
    expected, _ = stepped(optax.sgd(0.14, momentum=0.9, nesterov=True))
    np.testing.assert_allclose(train(tx)[0], expected, atol=1e-6)


def test_snoo_may_count_its_own_steps_and_be_told_them_in_python():
    tx = snoo(optax.sgd(0.2), period=2)
    expected, _ = train(tx, 5)
    counted = lc.self_clocked(tx, axis=())
    x, y, state, count = X, X, tx.init(X), counted.init(X)
    for t in range(5):
        moves, state = tx.update(x - C, state, x, step=t)
        x = x + moves
        moves, count = counted.update(y - C, count, y)
        y = y + moves
        np.testing.assert_allclose(x, expected[t], atol=1e-6)
        np.testing.assert_allclose(y, expected[t], atol=1e-6)


def test_snoo_may_be_the_inner_optimizer_of_workers_that_talk():
    inner = snoo(optax.sgd(0.2), period=2, outer_lr=0.5, momentum=0.0)
    x = np.tile(X, (2, 1))
    data = np.stack([C, 2 * C])
    path, _ = walk(lc.local_sgd(inner, period=3), x, data, steps=3, gradient=toward)
    alone = [train(inner, 3, gradient=lambda x, c=c: x - c)[0][-1] for c in data]
    np.testing.assert_allclose(path[:, -1], [np.mean(alone, 0)] * 2, atol=1e-6)


def test_workers_on_a_mesh_may_scan_rounds_of_their_own():
    tx = snoo(optax.sgd(0.2), period=2)

    def worker(c):
        def body(carry, t):
            x, state = carry
            moves, state = tx.update(x - c, state, x, step=t)
            return (x + moves, state), None

        return lax.scan(body, (0 * c, tx.init(0 * c)), jnp.arange(4))[0][0]

    data = np.stack([C, 2 * C])
    on_mesh = jax.jit(lc.spread(worker, mesh=lc.worker_mesh(2)))(data)
    np.testing.assert_allclose(on_mesh, jax.jit(jax.vmap(worker))(data), atol=1e-6)


def test_the_model_of_one_worker_is_its_anchor():
    for tx in (snoo(optax.sgd(0.2), period=4), GPA):
        path, state = train(tx, 6)
        last = jax.tree.map(lambda s: jnp.asarray(s[-1]), state)
        model = lc.consensus(last, jnp.asarray(path[-1]), axis=())
        np.testing.assert_array_equal(model, state.own_anchor[-1])
        assert (model != path[-1]).any()


# GPA

GPA = gpa(optax.sgd(0.2), averaging=0.75, interpolation=0.5)


def test_gpa_is_its_three_lines():
    mu_x, mu_y = 0.9, 0.75
    path, state = train(
        gpa(optax.sgd(0.2, momentum=0.9), averaging=mu_x, interpolation=mu_y)
    )
    z = theta = y = X.astype(float)
    m = np.zeros(3)
    for t in range(9):
        m = 0.9 * m + (y - C)
        z = z - 0.2 * m
        theta = mu_x * theta + (1 - mu_x) * z
        y = mu_y * theta + (1 - mu_y) * z
        np.testing.assert_allclose(path[t], y, atol=1e-5)
        np.testing.assert_allclose(state.fast[t], z, atol=1e-5)
        np.testing.assert_allclose(state.own_anchor[t], theta, atol=1e-5)


@pytest.mark.parametrize("inner", [optax.adamw(0.1), optax.sgd(0.2, momentum=0.9)])
def test_gpa_without_averaging_is_its_base_optimizer(inner):
    path, state = train(gpa(inner, averaging=0.0, interpolation=0.0))
    expected, _ = stepped(inner)
    # An update is a difference of models: a rounding of a step of size one.
    np.testing.assert_allclose(path, expected, atol=2e-6)
    np.testing.assert_allclose(state.own_anchor, expected, atol=2e-6)


def test_the_average_of_gpa_forgets_geometrically():
    # On a constant gradient z = −γ g k, and θ follows 1/(1 − μ_x) − 1 steps behind.
    tx = gpa(optax.sgd(0.5), averaging=0.75, interpolation=0.5)
    _, state = train(tx, 60, gradient=lambda x: jnp.ones(3))
    lag = (state.own_anchor[-1] - state.fast[-1]) / 0.5
    np.testing.assert_allclose(lag, 0.75 / 0.25, rtol=1e-4)


@pytest.mark.parametrize(("interpolation", "synced"), [(1.0, True), (0.5, False)])
def test_only_with_whole_interpolation_the_parameters_are_the_model(
    interpolation, synced
):
    tx = gpa(optax.sgd(0.2), averaging=0.75, interpolation=interpolation)
    moves, state = tx.update(X - C, tx.init(X), X)
    assert bool(state.synced) == synced
    exact = lc.apply_updates(X, moves, state)
    assert (np.asarray(exact) == state.own_anchor).all() == synced


def test_gpa_needs_no_step_and_keeps_integers_and_half_precision():
    x = {"a": jnp.asarray(X, jnp.bfloat16), "n": jnp.arange(2), "f": jnp.array(True)}
    grads = jax.tree.map(jnp.zeros_like, x) | {"a": x["a"]}
    moves, state = GPA.update(grads, GPA.init(x), x)
    new = optax.apply_updates(x, moves)
    assert {k: v.dtype for k, v in new.items()} == {k: v.dtype for k, v in x.items()}
    assert (new["n"] == x["n"]).all()
    assert state.fast["a"].dtype == np.float32
    with pytest.raises(ValueError, match="needs params"):
        GPA.update(grads, GPA.init(x))


@pytest.mark.parametrize("tx", [snoo(optax.adam(0.1), period=2), GPA])
def test_one_worker_sends_nothing_and_may_donate(tx):
    update = lambda g, s, x: tx.update(g, s, x, step=1)
    state = jax.eval_shape(tx.init, X)
    assert lc.traffic(update, X, state, X, workers=1).rows == ()
    leaves = jax.tree.leaves((jnp.asarray(X), tx.init(jnp.asarray(X))))
    buffers = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    assert len(set(buffers)) == len(buffers)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: gpa(optax.sgd(0.1), averaging=1.0, interpolation=0.5), "averaging 1"),
        (lambda: gpa(optax.sgd(0.1), averaging=0.5, interpolation=2), "polation 2"),
        (lambda: snoo(optax.sgd(0.1), period=0), "period 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
