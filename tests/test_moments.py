"""What happens to the inner optimizer's moments at a sync, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from lowcomm import average, every, rounds, spread
from lowcomm.moments import POLICIES, realign

K, N, STEPS, PERIOD = 3, 4, 6, 2
RNG = np.random.default_rng(0)
GRADS = RNG.normal(size=(K, STEPS, N)).astype(np.float32)
X = np.tile(RNG.normal(size=N), (K, 1)).astype(np.float32)
VERBS = {
    "average": lambda inner, **how: average(inner, when=every(PERIOD), **how),
    "rounds": lambda inner, **how: rounds(
        inner, optax.sgd(1.0), when=every(PERIOD), **how
    ),
}


def train(tx, grads=GRADS, x=X):
    """The path of virtual workers fed with given gradients, and their last state."""

    def worker(x, state, grads):
        def body(carry, now):
            x, state = carry
            t, g = now
            updates, state = tx.update(g, state, x, step=t)
            x = optax.apply_updates(x, updates)
            return (x, state), (x, state)

        steps = grads.shape[0]
        return lax.scan(body, (x, state), (jnp.arange(steps), grads))[1]

    state = jax.jit(spread(tx.init))(x)
    return jax.tree.map(np.asarray, jax.jit(spread(worker))(x, state, grads))


def realigned(policy, *moments):
    """What numpy makes of the moments of all workers at a sync."""
    if policy == "average":
        return [np.tile(m.mean(0), (K, 1)) for m in moments]
    return [m * 0 for m in moments] if policy == "reset" else list(moments)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("policy", POLICIES)
def test_momentum_is_kept_averaged_or_reset_as_in_numpy(policy, verb):
    path, state = train(VERBS[verb](optax.sgd(0.1, momentum=0.9), moments=policy))
    x, m = X.astype(float), np.zeros((K, N))
    for t in range(STEPS):
        m = 0.9 * m + GRADS[:, t]
        x = x - 0.1 * m
        if (t + 1) % PERIOD == 0:
            x = np.tile(x.mean(0), (K, 1))
            [m] = realigned(policy, m)
        np.testing.assert_allclose(path[:, t], x, atol=1e-5)
        np.testing.assert_allclose(state.inner[0].trace[:, t], m, atol=1e-5)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("policy", POLICIES)
def test_adam_is_kept_averaged_or_reset_as_in_numpy(policy, verb):
    path, state = train(VERBS[verb](optax.adam(0.1), moments=policy))
    x, m, v, count = X.astype(float), np.zeros((K, N)), np.zeros((K, N)), 0
    for t in range(STEPS):
        g, count = GRADS[:, t], count + 1
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        x = x - 0.1 * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8)
        if (t + 1) % PERIOD == 0:
            x = np.tile(x.mean(0), (K, 1))
            m, v = realigned(policy, m, v)
            count = 0 if policy == "reset" else count
        np.testing.assert_allclose(path[:, t], x, atol=1e-4)
        adam = state.inner[0]
        np.testing.assert_allclose(adam.mu[:, t], m, atol=1e-5)
        np.testing.assert_allclose(adam.nu[:, t], v, atol=1e-6)
        np.testing.assert_array_equal(adam.count[:, t], np.full(K, count))
        assert adam.count.dtype == np.int32


RATE = optax.piecewise_constant_schedule(1.0, {2: 0.5, 3: 0.5, 5: 0.5})


@pytest.mark.parametrize("policy", POLICIES)
def test_the_learning_rate_goes_on_over_three_rounds(policy):
    ones = np.ones((K, STEPS, N), np.float32)
    expected = np.array([RATE(t) for t in range(STEPS)])

    def trace(inner):
        path, state = train(VERBS["average"](inner, moments=policy), ones)
        before = np.concatenate([X[:, None], path[:, :-1]], 1)
        return (before - path)[0, :, 0], state

    # Adam on a constant gradient moves by the learning rate, reset or not.
    injected = optax.inject_hyperparams(optax.adam)(RATE, eps=0.0)
    for inner in (
        optax.sgd(RATE),
        optax.chain(optax.scale_by_adam(eps=0.0), optax.scale_by_schedule(RATE)),
        injected,
    ):
        moved, state = trace(inner)
        np.testing.assert_allclose(abs(moved), expected, atol=1e-5)
    hyper = state.inner.hyperparams["learning_rate"]
    np.testing.assert_array_equal(hyper[0], expected)
    counts = state.inner.inner_state[0].count[0]
    restarted = [1, 0, 1, 0, 1, 0]
    assert counts.tolist() == (restarted if policy == "reset" else [*range(1, 7)])


def test_what_stands_for_the_model_is_reset_to_the_new_model():
    # Schedule-free SGD keeps an iterate z; after a reset it starts from the new model.
    inner = optax.contrib.schedule_free_sgd(0.1, b1=0.5)
    for verb in VERBS:
        path, state = train(VERBS[verb](inner, moments="reset"))
        for t in (1, 3, 5):
            np.testing.assert_allclose(state.inner.z[:, t], path[:, t], atol=1e-6)
        assert np.abs(state.inner.z[:, 2] - path[:, 2]).max() > 1e-3


def test_moments_under_masks_and_partitions_are_found():
    mask = {"a": True, "b": False}
    params = {"a": X, "b": X}
    inners = {
        "masked": optax.masked(optax.adam(0.1), mask),
        "partition": optax.partition(
            {"yes": optax.adam(0.1), "no": optax.sgd(0.1)}, {"a": "yes", "b": "no"}
        ),
        "chain": optax.chain(optax.clip(1.0), optax.adam(0.1), optax.scale(0.5)),
    }
    grads = {"a": GRADS[:, 0], "b": GRADS[:, 1]}
    for inner in inners.values():

        def after(policy, inner=inner):
            def worker(params, grads):
                tx = average(inner, moments=policy)
                return tx.update(grads, tx.init(params), params, step=0)[1].inner

            return spread(worker)(params, grads)

        kept, means, fresh = (
            optax.tree.get_all_with_path(after(policy), "mu") for policy in POLICIES
        )
        for (_, own), (_, mean), (_, zero) in zip(kept, means, fresh, strict=True):
            expected = np.tile(own["a"].mean(0), (K, 1))
            assert np.abs(own["a"]).max() > 0
            np.testing.assert_allclose(mean["a"], expected, atol=1e-7)
            np.testing.assert_array_equal(zero["a"], 0 * X)
        count = lambda policy: optax.tree.get(after(policy), "count").tolist()
        assert (count("average"), count("reset")) == ([1] * K, [0] * K)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_leaf_changes_its_type(policy):
    mixed = {"w": jnp.zeros(3, jnp.bfloat16), "b": jnp.zeros(2), "n": jnp.int32(1)}
    whole = {"b": jnp.zeros(2), "n": jnp.int32(1)}
    for inner, params in (
        (optax.adamw(RATE), mixed),
        (optax.inject_hyperparams(optax.adamw)(RATE), whole),
    ):
        tx = average(inner, moments=policy)

        def worker(params, tx=tx):
            state = tx.init(params)
            return state, tx.update(params, state, params, step=0)[1]

        stacked = jax.tree.map(lambda p: jnp.stack([p] * 2), params)
        before, after = jax.eval_shape(spread(worker), stacked)
        assert before == after


def test_averages_are_formed_in_float32():
    inner = optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16)
    value = jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16)  # 256 + 1 = 256 in bf16

    def worker(trace, params):
        state = optax.tree.set(inner.init(params), trace=trace)
        together = lambda tree: jax.tree.map(
            lambda x: lax.pmean(x.astype(jnp.float32), "workers").astype(x.dtype), tree
        )
        mine = realign("average", inner, together)(state, params)[0].trace
        tx = average(inner, moments="average")
        wrapped = optax.tree.set(tx.init(params), trace=trace)
        verb = tx.update(0 * params, wrapped, params, step=0)[1].inner[0].trace
        return mine, verb / jnp.bfloat16(0.9)

    mine, verb = spread(worker)(value, jnp.zeros((K, 1), jnp.bfloat16))
    np.testing.assert_array_equal(mine, np.full((K, 1), 86.0, jnp.bfloat16))
    np.testing.assert_allclose(np.float32(verb), 86.0, rtol=2.0**-7)


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'forget': choose one of keep, average"):
        realign("forget", optax.sgd(0.1), lambda tree: tree)


@pytest.mark.parametrize("verb", VERBS)
def test_gradients_that_are_being_accumulated_survive_a_reset(verb):
    inner = optax.MultiSteps(optax.sgd(1.0), 4).gradient_transformation()
    kept, reset = (
        train(VERBS[verb](inner, moments=policy)) for policy in ("keep", "reset")
    )
    np.testing.assert_array_equal(reset[0], kept[0])
    expected = X - GRADS[:, :4].mean((0, 1))  # of four steps, with syncs between
    np.testing.assert_allclose(reset[0][:, 3], expected, atol=1e-6)
    np.testing.assert_array_equal(reset[1].inner.mini_step[0], [1, 2, 3, 0, 1, 2])
