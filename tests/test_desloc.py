"""Moments on clocks of their own: DES-LOC against numpy and what it reduces to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lowcomm as lc
from lowcomm import average, averaged_moments, data_parallel, des_loc, every, spread
from lowcomm.spmd import worker_mesh

K, N, STEPS, PERIOD, RATE = 3, 4, 12, 2, 0.1
RNG = np.random.default_rng(0)
GRADS = RNG.normal(size=(K, STEPS, N)).astype(np.float32)
X = np.tile(RNG.normal(size=N), (K, 1)).astype(np.float32)
ADAM = optax.adam(RATE)


def train(tx, grads=GRADS, x=X, **where):
    """The path of workers fed with given gradients, and of their states."""

    def worker(x, grads):
        def body(carry, now):
            x, state = carry
            t, g = now
            updates, state = tx.update(g, state, x, step=t)
            x = optax.apply_updates(x, updates)
            return (x, state), (x, state)

        steps = jnp.arange(grads.shape[0])
        return lax.scan(body, (x, tx.init(x)), (steps, grads))[1]

    return jax.tree.map(np.asarray, jax.jit(spread(worker, **where))(x, grads))


def adam(state):
    return state.inner.optimizer[0]


def everywhere(x):
    return np.tile(x.mean(0), (K, 1))


@pytest.mark.parametrize("where", [{}, {"mesh": worker_mesh(K)}], ids=["vmap", "mesh"])
def test_three_clocks_are_three_clocks_in_numpy(where):
    path, state = train(
        des_loc(ADAM, period=2, moment_periods={"mu": 3, "nu": 6}), **where
    )
    x, m, v = X.astype(float), np.zeros((K, N)), np.zeros((K, N))
    for t in range(STEPS):
        g = GRADS[:, t]
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        x = x - RATE * (m / (1 - 0.9 ** (t + 1))) / (
            np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8
        )
        # After the inner update; the step has used the worker's own moments.
        x = everywhere(x) if (t + 1) % 2 == 0 else x
        m = everywhere(m) if (t + 1) % 3 == 0 else m
        v = everywhere(v) if (t + 1) % 6 == 0 else v
        np.testing.assert_allclose(path[:, t], x, atol=1e-4)
        np.testing.assert_allclose(adam(state).mu[:, t], m, atol=1e-6)
        np.testing.assert_allclose(adam(state).nu[:, t], v, atol=1e-6)
        assert adam(state).count[:, t].tolist() == [t + 1] * K


def test_equal_periods_are_local_adam_with_averaged_moments():
    periods = {"mu": PERIOD, "nu": PERIOD}
    path, _ = train(des_loc(ADAM, period=PERIOD, moment_periods=periods))
    expected, _ = train(average(ADAM, when=every(PERIOD), moments="average"))
    np.testing.assert_allclose(path, expected, atol=1e-6)


def test_periods_longer_than_the_run_are_averaging_with_kept_moments():
    periods = {"mu": 10**6, "nu": 10**6}
    path, _ = train(des_loc(ADAM, period=PERIOD, moment_periods=periods))
    expected, _ = train(average(ADAM, when=every(PERIOD)))
    np.testing.assert_allclose(path, expected, atol=1e-6)


def test_all_periods_one_are_not_data_parallel_adam():
    tx = des_loc(ADAM, period=1, moment_periods={"mu": 1, "nu": 1})
    path, state = train(tx)
    expected, there = train(data_parallel(ADAM))
    there = there[1][0]
    # The first moment is linear in the gradients, and so the same. The second holds
    # the mean of squares, which is at least the square of the mean.
    np.testing.assert_allclose(adam(state).mu, there.mu, atol=1e-6)
    assert (adam(state).nu >= there.nu - 1e-7).all()
    assert (adam(state).nu > 1.5 * there.nu).mean() > 0.5
    assert np.abs(path - expected).max() > 0.1


def test_what_is_sent_is_a_tree_at_each_sync_of_each():
    tx = des_loc(ADAM, period=2, moment_periods={"mu": 6, "nu": 12})
    step = lambda t: lambda x: tx.update(x, tx.init(x), x, step=t)
    sent = [lc.traffic(step(t), X[0], workers=K).bytes_always for t in range(12)]
    tree = 4 * N
    # 1 + 1/3 + 1/6 trees a period, where averaging both moments sends 3.
    assert sent == [0, tree, 0, tree, 0, 2 * tree, 0, tree, 0, tree, 0, 3 * tree]
    assert sum(sent) / 6 == 1.5 * tree
    unknown = lambda x, t: tx.update(x, tx.init(x), x, step=t)
    traffic = lc.traffic(unknown, X[0], np.int32(0), workers=K)
    assert (traffic.bytes_always, traffic.bytes_max) == (0, 3 * tree)


def test_half_precision_moments_travel_in_float32_and_stay_what_they_were():
    tx = averaged_moments(optax.adam(RATE, mu_dtype=jnp.bfloat16), {"mu": 1})
    x = jnp.asarray(X, jnp.bfloat16)
    update = lambda g, x: tx.update(g, tx.init(x), x, step=0)
    _, state = spread(update)(jnp.asarray(GRADS[:, 0], jnp.bfloat16), x)
    mu = state.optimizer[0].mu
    assert mu.dtype == jnp.bfloat16
    assert (mu == mu[:1]).all()
    one = jnp.ones(N, jnp.bfloat16)
    assert lc.traffic(update, one, one, workers=K).bytes_always == 4 * N


def test_fields_are_found_in_chains_masks_and_partitions():
    params = {"a": X, "b": X}
    grads = {"a": GRADS[:, 0], "b": GRADS[:, 1]}
    inner = optax.partition(
        {"yes": optax.chain(optax.clip(9.0), ADAM), "no": optax.sgd(0.1, momentum=0.5)},
        {"a": "yes", "b": "no"},
    )
    tx = averaged_moments(inner, {"mu": 1, "trace": 1})
    _, state = spread(lambda g, x: tx.update(g, tx.init(x), x, step=0))(grads, params)
    own = spread(lambda g, x: inner.update(g, inner.init(x), x)[1])(grads, params)
    read = lambda s, name: optax.tree.get(s, name)
    for name, leaf in (("mu", "a"), ("trace", "b")):
        expected = everywhere(np.asarray(read(own, name)[leaf]))
        np.testing.assert_allclose(read(state, name)[leaf], expected, atol=1e-7)
    np.testing.assert_array_equal(read(state, "nu")["a"], read(own, "nu")["a"])


def test_a_moment_may_have_a_trigger_of_its_own_and_knows_its_age():
    tx = averaged_moments(
        optax.sgd(RATE, momentum=0.5), {"trace": lc.at_steps([0, 3, 4])}
    )
    _, state = train(tx)
    ages = [0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert state.moment_ages[0].tolist() == [ages] * K
    apart = np.ptp(state.optimizer[0].trace, axis=0).max(-1)
    assert np.flatnonzero(apart == 0).tolist() == [0, 3, 4]


@pytest.mark.parametrize(
    ("name", "said"),
    [("momentum", "no field 'momentum'.* there are mu, nu"), ("count", "'count'")],
)
def test_a_name_that_is_nowhere_is_refused_with_those_there_are(name, said):
    tx = des_loc(ADAM, period=2, moment_periods={name: 4})
    with pytest.raises(ValueError, match=said):
        tx.init(X[0])


def test_an_inner_optimizer_without_moments_says_so():
    with pytest.raises(ValueError, match="there are none"):
        averaged_moments(optax.sgd(0.1), {"mu": 2}).init(X[0])
    with pytest.raises(ValueError, match="period 0"):
        averaged_moments(ADAM, {"mu": 0})
