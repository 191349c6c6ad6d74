"""Agreeing on parameters now and then, and counting steps for plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import (
    average,
    change_exceeds,
    data_parallel,
    delayed,
    drift_exceeds,
    error_feedback,
    every,
    gossip,
    ring,
    spread,
    top_k,
    traffic,
    weighted_mean,
)
from tests.quadratics import bend, one_update, walk

K = 4
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=3), (K, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(K, 3)).astype(np.float32)
CURVATURES = RNG.uniform(0.5, 2.0, size=(K, 3)).astype(np.float32)
SHARED = np.tile(CURVATURES[:1], (K, 1))

LINEAR = {
    "sgd": optax.sgd(0.1),
    "heavy ball": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "weight decay": optax.chain(
        optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9)
    ),
}


def train(tx, steps=8, *, x=X, data=(CURVATURES, OPTIMA), **how):
    """The path of virtual workers, ``[K, steps, …]``, and their last state."""
    path, states = walk(tx, x, data, steps=steps, **how)
    return path, jax.tree.map(lambda s: s[:, -1], states)


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_optimizer_synced_each_step_is_data_parallel(name):
    local, _ = train(average(LINEAR[name]))
    together, _ = train(data_parallel(LINEAR[name]))
    # Eight steps of a contraction, each a few roundings of numbers below 4.
    np.testing.assert_allclose(local, together, rtol=0, atol=8 * 4 * 2.0**-22)
    assert np.abs(together[:, -1] - X).max() > 0.1


@pytest.mark.parametrize(
    ("inner", "moments"),
    [
        (optax.adam(0.1), "keep"),
        (optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1)), "keep"),
        (optax.sgd(0.1, momentum=0.9), "reset"),
    ],
)
def test_adam_clipping_and_reset_moments_are_not_data_parallel(inner, moments):
    local, _ = train(average(inner, moments=moments))
    together, _ = train(data_parallel(inner))
    assert np.abs(local[:, -1] - together[:, -1]).max() > 1e-2


@pytest.mark.parametrize("period", [2, 3, 8])
@pytest.mark.parametrize("name", ["sgd", "nesterov"])
def test_on_a_shared_quadratic_the_mean_path_is_data_parallel(name, period):
    data = SHARED, OPTIMA
    local, _ = train(average(LINEAR[name], when=every(period)), data=data)
    together, _ = train(data_parallel(LINEAR[name]), data=data)
    np.testing.assert_allclose(local.mean(0), together[0], rtol=0, atol=1e-5)
    assert np.ptp(local[:, 0], axis=0).max() > 0.01  # the workers do drift


def test_with_a_curvature_for_each_worker_the_mean_path_is_another():
    local, _ = train(average(optax.sgd(0.1), when=every(8)))
    together, _ = train(data_parallel(optax.sgd(0.1)))
    assert np.abs(local.mean(0) - together[0]).max() > 1e-2


def test_local_steps_are_biased_toward_the_curved_as_derived():
    # One round maps x to x − w (x − c) with w = 1 − (1 − γh)^H on each worker, so the
    # mean rests at Σ w c / Σ w.
    rate, period = 0.3, 5
    path, _ = train(average(optax.sgd(rate), when=every(period)), 100)
    weight = 1 - (1 - rate * CURVATURES.astype(float)) ** period
    rest = (weight * OPTIMA).sum(0) / weight.sum(0)
    np.testing.assert_allclose(path[:, -1], np.tile(rest, (K, 1)), atol=1e-5)
    assert np.abs(rest - OPTIMA.mean(0)).max() > 0.01


def test_replicas_agree_right_after_each_sync_and_not_between():
    path, _ = train(average(optax.adam(0.1), when=every(3, offset=1)), 7)
    before = np.concatenate([X[:, None], path[:, :-1]], 1)
    for t in range(7):
        # What is added is a difference: one ulp of the larger operand may be missed.
        ulp = np.spacing(np.maximum(abs(before[:, t]), abs(path[:, t])).max(0))
        apart = np.ptp(path[:, t], axis=0)
        assert (apart <= ulp).all() == (t % 3 == 0)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_lonely_worker_and_equal_workers_are_plain_optax(workers):
    inner = optax.adam(0.1)
    same = lambda a: np.tile(a[:1], (workers, 1))
    data = same(CURVATURES), same(OPTIMA)
    path, _ = train(average(inner, when=every(2)), x=same(X), data=data)
    state, x = inner.init(X[0]), X[0]
    for t in range(8):
        moves, state = inner.update(bend(x, (data[0][0], data[1][0])), state)
        x = optax.apply_updates(x, moves)
        np.testing.assert_allclose(path[:, t], same(x[None]), atol=1e-6)


def test_between_syncs_nothing_is_sent():
    tx = average(optax.sgd(0.1), when=every(4))
    worker = lambda x, t: tx.update(x, tx.init(x), x, step=t)
    x = jnp.zeros(5)
    traced = traffic(worker, x, jnp.int32(0), workers=K)
    assert (traced.bytes_always, traced.bytes_max) == (0, 20)
    assert [row.guard != () for row in traced.rows] == [True]
    for t, sent in ((2, 0), (3, 20), (4, 0)):
        known = traffic(lambda x, t=t: worker(x, t), x, workers=K)
        assert (known.bytes_always, known.bytes_max) == (sent, sent)
        text = str(jax.make_jaxpr(spread(lambda x, t=t: worker(x, t)))(X))
        assert "cond" not in text


def test_since_counts_the_steps_after_a_sync():
    for when, expected in ((every(3), [1, 2, 0, 1]), (every(1), [0, 0, 0, 0])):
        for steps in range(1, 5):
            _, state = train(average(optax.sgd(0.1), when=when), steps)
            assert state.since.tolist() == [expected[steps - 1]] * K


def test_the_state_is_the_inner_and_one_counter():
    inner = optax.adam(0.1)
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    params = {"w": jnp.zeros((3, 4)), "b": jnp.zeros(4)}
    state = jax.eval_shape(average(inner, when=every(4)).init, params)
    assert size(state) == size(jax.eval_shape(inner.init, params)) + 4


def test_the_exchange_may_give_each_worker_its_own():
    path, _ = train(average(optax.sgd(0.1), exchange=gossip(ring(K))), 1)
    after = X - np.float32(0.1) * bend(X, (CURVATURES, OPTIMA))
    mixed = (after + np.roll(after, 1, 0) + np.roll(after, -1, 0)) / 3
    np.testing.assert_allclose(path[:, 0], mixed, atol=1e-6)


def test_weights_reach_the_exchange_as_an_extra_argument():
    weight = np.array([3, 1, 0, 0], np.float32)
    tx = average(optax.sgd(1.0), exchange=weighted_mean())
    path, _ = train(tx, 1, gradient=lambda x, d: d, data=OPTIMA, weight=weight)
    after = X - OPTIMA
    expected = (3 * after[0] + after[1]) / 4
    np.testing.assert_allclose(path[:, 0], np.tile(expected, (K, 1)), atol=1e-6)


def test_exchanges_that_make_no_sense_there_say_so():
    for exchange, match in (
        (error_feedback(top_k(0.5)), "error_feedback .* not parameters. Use rounds"),
        (delayed(gossip(ring(K))), "delayed exchanges gradients.*overlapped"),
        (gossip(ring(K), axis="sites"), "'sites'"),
    ):
        with pytest.raises(ValueError, match=match):
            one_update(average(optax.sgd(0.1), exchange=exchange), X, X)


def test_an_exchange_along_an_axis_outside_the_verb_is_refused():
    mesh = jax.sharding.AbstractMesh((2, 2), ("workers", "sites"))
    tx = average(optax.sgd(0.1), exchange=gossip(ring(2), axis="sites"))
    worker = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
    call = spread(worker, mesh=mesh, axis=("workers", "sites"), backend="vmap")
    with pytest.raises(ValueError, match=r"'sites'.*in a verb over.*'workers'"):
        call(X)


def test_triggers_and_policies_that_make_no_sense_there_say_so():
    with pytest.raises(ValueError, match="only rounds has one"):
        one_update(average(optax.sgd(0.1), when=drift_exceeds(1.0)), X, X)
    with pytest.raises(ValueError, match="moments 'restart': choose one of keep"):
        average(optax.sgd(0.1), moments="restart")


def test_missing_arguments_are_named():
    tx = average(optax.sgd(0.1))
    with pytest.raises(ValueError, match="update needs params"):
        spread(lambda g: tx.update(g, tx.init(g), step=0)[0])(X)
    with pytest.raises(ValueError, match="update needs step="):
        spread(lambda g: tx.update(g, tx.init(g), g)[0])(X)


def test_a_nan_shows_on_its_worker_and_after_the_sync_on_all():
    poison = OPTIMA.copy()
    poison[2, 1] = np.nan
    path, _ = train(average(optax.sgd(0.1), when=every(2)), 2, data=(SHARED, poison))
    assert np.argwhere(np.isnan(path[:, 0])).tolist() == [[2, 1]]
    assert np.argwhere(np.isnan(path[:, 1])).tolist() == [[k, 1] for k in range(K)]


@pytest.mark.parametrize("period", [1, 2])
def test_half_precision_updates_are_float32_and_land_on_the_target(period):
    x = jnp.asarray(RNG.normal(size=(8, 1000)), jnp.bfloat16)
    g = jnp.asarray(RNG.normal(size=(8, 1000)), jnp.bfloat16)
    updates, _ = one_update(average(optax.sgd(0.5), when=every(period)), g, x)
    assert updates.dtype == jnp.float32
    here = optax.apply_updates(x, jax.tree.map(lambda g: -0.5 * g, g))
    assert here.dtype == jnp.bfloat16
    mean = jnp.mean(here.astype(jnp.float32), 0).astype(jnp.bfloat16)
    target = jnp.tile(mean, (8, 1)) if period == 1 else here
    np.testing.assert_array_equal(optax.apply_updates(x, updates), target)


def test_leaves_that_no_optimizer_may_move_stay():
    params = {
        "w": X,
        "count": np.arange(K, dtype=np.int32),
        "flag": np.arange(K) > 1,
        "none": None,
    }
    grads = params | {"count": np.zeros(K, np.int32), "flag": np.zeros(K, bool)}
    tx = average(optax.adam(0.1), when=every(1), moments="average")
    updates, state = one_update(tx, grads, params)
    after = optax.apply_updates(params, updates)
    assert after["none"] is None
    for name in ("count", "flag"):
        np.testing.assert_array_equal(after[name], params[name])
        assert after[name].dtype == params[name].dtype
    assert not np.array_equal(after["w"], X)
    assert state.inner[0].mu["count"] is None
    keys = jax.random.split(jax.random.key(0), K)
    updates, _ = one_update(tx, {"w": X, "key": keys}, {"w": X, "key": keys})
    assert (jax.random.key_data(updates["key"]) == jax.random.key_data(keys)).all()


def test_the_inner_optimizer_sees_local_params_and_extra_arguments():
    def record(updates, state, params=None, *, step, value, **extra):
        assert not extra
        return updates, (params, jnp.asarray(step), value)

    seen = optax.GradientTransformationExtraArgs(
        lambda p: (jnp.zeros_like(p), jnp.int32(0), jnp.float32(0)), record
    )
    tx = average(optax.chain(seen, optax.sgd(0.1)), when=every(3))
    path, state = train(tx, 6, value=np.arange(K, dtype=np.float32))
    params, step, value = state.inner[0]
    np.testing.assert_array_equal(params, path[:, -2])
    assert np.ptp(params, axis=0).max() > 0
    np.testing.assert_array_equal(step, np.full(K, 5))
    np.testing.assert_array_equal(value, np.arange(K))


def test_weight_decay_without_gradients_is_that_of_plain_optax():
    inner = optax.adamw(0.1, weight_decay=0.5)
    tx = average(inner, when=every(4))
    path, _ = train(tx, 3, gradient=lambda x, d: 0 * x, x=OPTIMA)
    state, x = inner.init(OPTIMA), OPTIMA
    for t in range(3):
        moves, state = inner.update(0 * x, state, x)
        x = optax.apply_updates(x, moves)
        np.testing.assert_array_equal(path[:, t], x)


def test_a_measured_trigger_costs_its_scalar_and_is_asked_each_step():
    tx = average(optax.sgd(0.1), when=change_exceeds(0.5, window=2))
    worker = lambda x, t: tx.update(x, tx.init(x), x, step=t)
    sent = traffic(worker, jnp.zeros(5), jnp.int32(0), workers=K)
    assert (sent.bytes_always, sent.bytes_max) == (4, 24)
