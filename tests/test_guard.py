"""A worker whose gradients are not finite skips its step; moments begin anew."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import lowcomm as lc

K, N, STEPS = 4, 3, 8
RNG = np.random.default_rng(0)
GRADS = RNG.integers(-4, 4, size=(STEPS, K, N)).astype(np.float32)
BACKENDS = ("vmap", "shard_map", "pmap")


def sick(*where, value=np.nan):
    """Gradients of which some (step, worker) hold one entry that is not finite."""
    grads = GRADS.copy()
    for t, k in where:
        grads[t, k, 1] = value
    return grads


def slope(x, g):
    """A loss whose gradient is the batch; its value may be no number either."""
    return jnp.sum(x * g)


def train(tx, grads, backend="vmap", **how):
    mesh = lc.worker_mesh(K) if backend == "shard_map" else None
    return lc.fit(
        slope,
        tx,
        jnp.zeros(N),
        lambda t: grads[t],
        steps=len(grads),
        workers=K,
        mesh=mesh,
        backend=backend,
        check_finite=False,
        **how,
    )


def local_sgd_by_hand(grads, period, *, rate=0.5):
    """Steps of numpy in which a worker with a bad gradient stays where it is."""
    x, path = np.zeros((K, N), np.float32), []
    for t, g in enumerate(grads):
        good = np.isfinite(g).all(-1, keepdims=True)
        x = x - rate * np.where(good, g, 0)
        if (t + 1) % period == 0:
            x = np.broadcast_to(x.mean(0), x.shape)
        path.append(x)
    return np.stack(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_skips_its_local_step_and_the_sync_happens(backend, value):
    # At an ordinary step, at a sync step, and all workers at once.
    grads = sick((1, 2), (3, 0), *[(6, k) for k in range(K)], value=value)
    path = []
    run = train(
        lc.local_sgd(lc.skip_nonfinite(optax.sgd(0.5)), period=4),
        grads,
        backend,
        on_step=lambda t, params, state, metrics: path.append(np.array(params)),
    )
    # Whole gradients, halves of them, and quarters at the sync: exact.
    np.testing.assert_array_equal(np.stack(path), local_sgd_by_hand(grads, 4))
    assert run.payload.tolist() == [0, 0, 0, 4 * N] * 2
    assert run.state.inner.skipped.tolist() == [2, 1, 2, 1]


def test_moments_and_counts_of_a_skipped_step_stay():
    tx = lc.skip_nonfinite(optax.adam(0.1))
    state = tx.init(jnp.zeros(N))
    _, one = tx.update(jnp.asarray(GRADS[0, 0]), state)
    moves, two = tx.update(jnp.asarray(sick((1, 0))[1, 0]), one)
    np.testing.assert_array_equal(moves, np.zeros(N))
    jax.tree.map(np.testing.assert_array_equal, two.guarded, one.guarded)
    assert (one.skipped, two.skipped) == (0, 1)


METHODS = {
    "data_parallel": lambda: lc.data_parallel(optax.adam(0.1)),
    "top_k_sgd": lambda: lc.top_k_sgd(optax.sgd(0.5), fraction=0.5),
    "sign_sgd": lambda: lc.sign_sgd(optax.sgd(0.5)),
    "powersgd_sgd": lambda: lc.powersgd_sgd(optax.sgd(0.5), rank=1),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", METHODS)
def test_where_gradients_are_exchanged_the_workers_vote_and_all_skip(name, backend):
    tx, path = lc.skip_nonfinite(METHODS[name](), axis=lc.AXIS), []
    keep = lambda t, *carry: path.append(jax.tree.map(np.array, carry[:2]))
    run = train(tx, sick((2, 1), (5, 3)), backend, on_step=keep)
    healthy = np.array([0, 1, 3, 4, 6, 7])
    for t in (2, 5):
        before, after = path[t - 1], path[t]
        np.testing.assert_array_equal(before[0], after[0])
        jax.tree.map(np.testing.assert_array_equal, before[1].guarded, after[1].guarded)
    assert run.state.skipped.tolist() == [2] * K
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(path))
    assert len({p.tobytes() for p in np.asarray(run.params)}) == 1
    # The run is the one that never saw those steps, where nothing depends on the clock.
    without = train(METHODS[name](), GRADS[healthy], backend)
    np.testing.assert_array_equal(run.params, without.params)
    assert (run.payload - without.payload[0]).tolist() == [4] * STEPS


def test_without_a_vote_an_exchange_inside_is_refused_with_both_remedies():
    remedy = r"around the inner optimizer, or .*skip_nonfinite\(..., axis='workers'\)"
    with pytest.raises(ValueError, match=remedy):
        train(lc.skip_nonfinite(lc.data_parallel(optax.sgd(0.5))), GRADS)


def test_a_vote_of_some_about_an_exchange_of_all_is_refused():
    axes = ("site", "chip")
    mesh = AbstractMesh((2, 2), axes)

    def first(vote):
        tx = lc.skip_nonfinite(lc.data_parallel(optax.sgd(0.5), axis=axes), axis=vote)
        worker = lambda g: tx.update(g, tx.init(g), g)[0]
        call = lc.spread(worker, mesh=mesh, axis=axes, backend="vmap")
        return jax.eval_shape(call, GRADS[0])

    assert first(axes).shape == (K, N)
    with pytest.raises(ValueError, match=r"those along \('chip',\) decide"):
        first("chip")
    # Inside a guard that votes, one that does not is still refused.
    tx = lc.skip_nonfinite(
        lc.skip_nonfinite(lc.data_parallel(optax.sgd(0.5)), axis=lc.AXIS)
    )
    with pytest.raises(ValueError, match="each worker decides"):
        train(tx, GRADS)


@pytest.mark.parametrize("axis", [(), lc.AXIS])
@pytest.mark.parametrize(
    "verb",
    [
        lc.local_sgd(optax.sgd(0.5), period=500),
        lc.diloco(optax.sgd(0.5), period=500),
        optax.chain(optax.clip(1.0), lc.self_clocked(optax.sgd(0.5))),
    ],
)
def test_a_whole_verb_inside_is_refused_before_the_first_step(verb, axis):
    with pytest.raises(ValueError, match="would skip the sync"):
        lc.skip_nonfinite(verb, axis=axis).init(jnp.zeros(N))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_leaves_of_every_kind_pass(dtype):
    params = {
        "x": jnp.ones(2, dtype),
        "count": jnp.int32(3),
        "key": jax.random.key(0),
        "empty": jnp.zeros(0),
        "none": None,
    }
    grads = params | {"x": jnp.array([1.0, jnp.nan], dtype)}
    tx = lc.skip_nonfinite(optax.identity())
    moves, state = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(moves["x"], jnp.zeros(2, dtype))
    assert moves["x"].dtype == dtype
    assert (moves["count"], state.skipped) == (3, 1)


def test_a_measured_trigger_fires_once_and_goes_on_measuring():
    # All gradients alike: after the warm-up of two steps nothing changes.
    grads = np.ones((STEPS, K, N), np.float32)
    grads[4, 2] = np.nan
    when = lc.change_exceeds(0.5, window=2)
    run = train(lc.average(lc.skip_nonfinite(optax.sgd(0.5)), when=when), grads)
    fired = [t for t, sent in enumerate(run.payload) if sent > 4]
    assert fired == [0, 1, 4]
    assert np.isfinite(run.params).all()


def test_fit_stops_at_a_loss_that_is_no_number_unless_told_otherwise():
    tx = lc.local_sgd(lc.skip_nonfinite(optax.sgd(0.5)), period=2)
    how = {"steps": 4, "workers": K}
    feed = lambda t: sick((1, 2))[t]
    with pytest.raises(FloatingPointError, match="nan at step 1 on worker 2"):
        lc.fit(slope, tx, jnp.zeros(N), feed, **how)
    run = lc.fit(slope, tx, jnp.zeros(N), feed, check_finite=False, **how)
    assert np.isnan(run.losses[1, 2])
    assert np.isfinite(run.params).all()


# Moments that are not finite begin anew, each worker's by itself.


def test_moments_begin_anew_and_schedules_go_on():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    tx = lc.restart_nonfinite(
        optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(schedule))
    )
    x = jnp.zeros(2)
    state = tx.init(x)
    for g in (1.0, 1e30, 1.0):  # whose square is infinite
        moves, state = tx.update(jnp.array([g, 1.0]), state, x)
    adam, scheduled = state.restarted
    first, _ = optax.scale_by_adam().update(jnp.ones(2), optax.scale_by_adam().init(x))
    np.testing.assert_array_equal(moves, first * schedule(2))
    assert (adam.count, scheduled.count, state.restarts) == (1, 3, 1)


def test_infinities_of_the_beginning_are_no_loss():
    def update(updates, state, params=None):
        return updates, jnp.minimum(state, jnp.max(jnp.abs(updates)))

    least = optax.GradientTransformation(lambda p: jnp.float32(jnp.inf), update)
    tx = lc.restart_nonfinite(optax.chain(optax.trace(0.5), least))
    state = tx.init(jnp.zeros(1))
    for g in (jnp.inf, 2.0, 3.0):
        moves, state = tx.update(jnp.full(1, g), state, jnp.zeros(1))
    assert (moves[0], state.restarts, state.restarted[1]) == (4.0, 1, 2.0)


def test_keys_in_a_state_that_begins_anew_go_on():
    noisy = optax.add_noise(0.1, 0.5, key=jax.random.key(0))
    tx = lc.restart_nonfinite(optax.chain(optax.trace(0.5), noisy))
    state, x = tx.init(jnp.zeros(2)), jnp.zeros(2)
    keys = [state.restarted[1].rng_key]
    for g in (jnp.inf, 1.0):
        moves, state = tx.update(jnp.full(2, g), state, x)
        keys.append(state.restarted[1].rng_key)
    assert np.isfinite(moves).all()
    assert state.restarts == 1
    assert keys[0] != keys[1] != keys[2]


def test_where_nothing_is_lost_it_is_the_optimizer_bit_for_bit():
    plain, x = optax.adamw(0.1), {"x": jnp.asarray(GRADS[0]), "y": jnp.ones(2)}
    guarded = lc.restart_nonfinite(plain)
    state, other = guarded.init(x), plain.init(x)
    for _ in range(3):
        moves, state = guarded.update(x, state, x)
        expected, other = plain.update(x, other, x)
        jax.tree.map(np.testing.assert_array_equal, moves, expected)
    jax.tree.map(np.testing.assert_array_equal, state.restarted, other)


def test_what_talks_has_no_place_inside():
    x = jnp.zeros(N)
    for verb in (lc.local_sgd(optax.sgd(1.0), period=2), lc.diloco(optax.sgd(1.0))):
        with pytest.raises(ValueError, match="would forget the anchor on one worker"):
            lc.restart_nonfinite(verb).init(x)
    tx = lc.restart_nonfinite(lc.data_parallel(optax.sgd(1.0)))
    with pytest.raises(ValueError, match="restart_nonfinite, where each worker decid"):
        lc.spread(lambda g: tx.update(g, tx.init(g), g))(jnp.zeros((2, N)))
    tx = lc.restart_nonfinite(optax.sgd(1.0))
    with pytest.raises(ValueError, match="restart_nonfinite needs params"):
        tx.update(x, tx.init(x))
