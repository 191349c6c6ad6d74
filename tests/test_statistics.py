"""Running statistics travel beside the parameters and are averaged at syncs."""

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc

K, STEPS, PERIOD = 4, 6, 3
DATA = np.random.default_rng(0).normal(size=(STEPS, K, 16, 5)).astype(np.float32)
DATA += np.arange(K, dtype=np.float32)[None, :, None, None]  # workers that differ


class Normed(nn.Module):
    """A dense layer behind a batch normalization."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
        return nn.Dense(1)(x)


MODEL = Normed()
START = MODEL.init(jax.random.key(0), DATA[0, 0])


def loss(variables, x):
    y, after = MODEL.apply(variables, x, mutable=["batch_stats"])
    before = variables["batch_stats"]
    return jnp.mean(jnp.square(y - 1)) + lc.track(before, after["batch_stats"])


def train(tx, **how):
    return lc.fit(loss, tx, START, lambda t: DATA[t], steps=STEPS, workers=K, **how)


def by_hand(period):
    """Running mean and variance of each worker, averaged every ``period`` steps."""
    mean, var = np.zeros((K, 5)), np.ones((K, 5))
    for t in range(STEPS):
        mean = 0.5 * mean + 0.5 * DATA[t].mean(1)
        var = 0.5 * var + 0.5 * DATA[t].var(1)
        if (t + 1) % period == 0:
            mean, var = (np.tile(x.mean(0), (K, 1)) for x in (mean, var))
    return mean, var


METHODS = {
    "local_sgd": lc.local_sgd(optax.sgd(0.1), period=PERIOD),
    "diloco": lc.diloco(optax.adam(0.01), period=PERIOD),
}


@pytest.mark.parametrize("backend", ["vmap", "shard_map"])
@pytest.mark.parametrize("name", METHODS)
def test_batch_statistics_run_locally_and_are_averaged_at_syncs(name, backend):
    tx = lc.with_statistics(METHODS[name], when=lc.every(PERIOD))
    mesh = lc.worker_mesh(K) if backend == "shard_map" else None
    run = train(tx, mesh=mesh, backend=backend)
    found = run.params["batch_stats"]["BatchNorm_0"]
    # Values of order ten, six steps of a few float32 roundings each.
    for x, expected in zip((found["mean"], found["var"]), by_hand(PERIOD), strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-5)
        assert len({row.tobytes() for row in np.asarray(x)}) == 1
    parameters = sum(x.size for x in jax.tree.leaves(START["params"]))
    assert run.payload.tolist() == [0, 0, 4 * (parameters + 10)] * 2


@pytest.mark.parametrize("name", METHODS)
def test_the_parameters_train_as_if_the_statistics_were_not_there(name):
    both = train(lc.with_statistics(METHODS[name], when=lc.every(PERIOD)))
    alone = lc.fit(
        lambda params, x: loss({**START, "params": params}, x),
        METHODS[name],
        START["params"],
        lambda t: DATA[t],
        steps=STEPS,
        workers=K,
    )
    for x, y in zip(
        *map(jax.tree.leaves, (both.params["params"], alone.params)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(both.losses, alone.losses, rtol=1e-6)


def test_consensus_in_the_middle_of_a_round_has_the_mean_statistics():
    tx = lc.with_statistics(METHODS["diloco"], when=lc.every(100))
    run = train(tx)
    model = lc.spread(lc.consensus)(run.state, run.params)
    own = np.asarray(run.params["batch_stats"]["BatchNorm_0"]["mean"])
    assert np.ptp(own, axis=0).min() > 0.5
    mean = model["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, np.tile(own.mean(0), (K, 1)), rtol=1e-6)


def test_the_averaged_variance_is_short_of_the_pooled_one_by_that_of_the_means():
    tx = lc.with_statistics(METHODS["local_sgd"], when=lc.every(1))
    run = lc.fit(loss, tx, START, lambda t: DATA[t], steps=1, workers=K)
    batch = DATA[0].astype(np.float64)
    pooled = batch.reshape(-1, 5).var(0)
    averaged = 2 * run.params["batch_stats"]["BatchNorm_0"]["var"][0] - 1
    np.testing.assert_allclose(pooled - averaged, batch.mean(1).var(0), rtol=1e-5)


def test_statistics_that_are_not_finite_are_not_taken_over():
    sick = DATA.copy()
    sick[1, 2, 0, 0] = np.nan
    inner = lc.skip_nonfinite(optax.sgd(0.1))
    tx = lc.with_statistics(lc.local_sgd(inner, period=PERIOD), when=lc.every(PERIOD))
    run = lc.fit(
        loss,
        tx,
        START,
        lambda t: sick[t],
        steps=STEPS,
        workers=K,
        check_finite=False,
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(run.params))


def test_a_frozen_dict_is_variables_too():
    tx = lc.with_statistics(METHODS["diloco"], when=lc.every(2))
    frozen = flax.core.freeze(START)
    whole = lambda variables, x: loss(flax.core.unfreeze(variables), x)
    run = lc.fit(whole, tx, frozen, lambda t: DATA[t], steps=2, workers=K)
    assert isinstance(run.params, flax.core.FrozenDict)
    plain = lc.fit(loss, tx, START, lambda t: DATA[t], steps=2, workers=K)
    for x, y in zip(*map(jax.tree.leaves, (run.params, plain.params)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_track_neither_broadcasts_nor_overflows():
    with pytest.raises(ValueError, match=r"\['a'\] had shape \(\) and has \(2,\)"):
        lc.track({"a": jnp.zeros(())}, {"a": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"\['b'\] had shape None"):
        lc.track({"a": jnp.zeros(2)}, {"a": jnp.zeros(2), "b": jnp.zeros(2)})
    value, pull = jax.value_and_grad(lc.track)(jnp.float32(1e30), jnp.float32(0))
    assert (value, pull) == (0, jnp.float32(1e30))


def test_track_is_zero_and_pulls_every_leaf_to_where_it_went():
    old = {"mean": jnp.array([1.0, 2.0]), "var": jnp.bfloat16(3), "seen": jnp.int32(4)}
    new = {"mean": jnp.array([5.0, 5.0]), "var": jnp.bfloat16(1), "seen": jnp.int32(5)}
    value, pull = jax.value_and_grad(lc.track, allow_int=True)(old, new)
    assert value == 0
    np.testing.assert_array_equal(pull["mean"], [-4.0, -3.0])
    assert pull["var"] == 2
    none = jax.grad(lc.track, 1, allow_int=True)(old, new)
    np.testing.assert_array_equal(none["mean"], [0.0, 0.0])


def test_variables_without_the_collection_are_refused_by_name():
    tx = lc.with_statistics(METHODS["diloco"], when=lc.every(2), collection="ema")
    with pytest.raises(ValueError, match=r"'ema', not \['batch_stats', 'params'\]"):
        lc.init(tx, lc.stack(START, K))


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e4, 1e8])
@pytest.mark.parametrize("kept", [0.9, 0.99])
def test_recomputed_statistics_are_those_of_the_batches_whatever_their_size(size, kept):
    # What is kept of 1 would vanish in the roundings of a large statistic.
    forward = lambda old, x: kept * old + (1 - kept) * x
    batches = [jnp.float32(size), jnp.float32(3 * size)]
    new = lc.recompute_statistics(forward, jnp.float32(7.0), batches)
    # 1 − kept is known to a rounding of 1: 100 times as much relative to it.
    np.testing.assert_allclose(new, 2 * size, rtol=400 * 2**-24)
