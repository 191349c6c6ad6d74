"""A worker that is not finite is left out of the mean, and is one of them again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import lowcomm as lc

K, N, PERIOD, STEPS = 5, 3, 4, 12
SICK, WHEN = 3, 5  # a worker, and a step in the middle of the second round
BAD = (np.nan, np.inf, -np.inf)
TARGETS = np.random.default_rng(0).normal(size=(K, N)).astype(np.float32)


def exchanged(tx, trees, state=None, **more):
    """What each worker hears, and the state."""
    state = lc.spread(tx.init)(trees) if state is None else state
    update = lambda g, s: tx.update(g, s, step=0, **more)
    return jax.jit(lc.spread(update))(trees, state)


def spoiled(x, workers, value, leaf="b"):
    """``x`` with one entry of a leaf that is not finite on some workers."""
    x = dict(x)
    for worker in np.atleast_1d(workers):
        x[leaf] = x[leaf].at[worker, 0].set(value)
    return x


def trees(workers=K, dtype=jnp.float32):
    rng = np.random.default_rng(workers)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(workers, *shape)), dtype)
    return {"a": draw(2, 3), "b": draw(4), "s": draw()}


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_where_all_are_finite_it_is_the_mean_bit_for_bit(workers):
    heard, state = exchanged(lc.surviving_mean(), trees(workers))
    expected, _ = exchanged(lc.mean(), trees(workers))
    jax.tree.map(np.testing.assert_array_equal, heard, expected)
    assert state.dropped.tolist() == state.absences.tolist() == [0] * workers


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_who_is_not_finite_in_one_leaf_is_left_out_of_all(value, dtype):
    x = trees(dtype=dtype)
    heard, state = exchanged(lc.surviving_mean(), spoiled(x, [1, SICK], value))
    others = np.array([0, 2, 4])
    for name, h in heard.items():
        wide = np.asarray(x[name], np.float64)
        assert h.dtype == dtype
        assert (h == h[:1]).all()
        # Two sums in float32 and a division, and a rounding to the leaf's type.
        eps = float(jnp.finfo(dtype).eps) + 4 * 2**-24
        expected = wide[others].mean(0)
        np.testing.assert_allclose(
            np.asarray(h[0], np.float64), expected, atol=eps * abs(wide).max()
        )
    assert state.dropped.tolist() == [2] * K
    assert state.absences.tolist() == [0, 1, 0, 1, 0]


def test_where_nobody_is_finite_that_is_heard_and_counted():
    x = spoiled(trees(), range(K), np.nan)
    for tx in (lc.surviving_mean(), lc.surviving(lc.error_feedback(lc.top_k(0.5)))):
        heard, state = exchanged(tx, x)
        assert all(np.isnan(h).all() for h in jax.tree.leaves(heard))
        assert state.dropped.tolist() == [K] * K


def test_leaves_that_do_not_travel_have_no_vote_and_stay():
    x = trees() | {
        "count": jnp.arange(K),
        "key": jax.random.split(jax.random.key(0), K),
        "empty": jnp.zeros((K, 0)),
        "none": None,
    }
    for tx in (lc.surviving_mean(), lc.surviving(lc.compressed_mean(lc.quantize(8)))):
        heard, state = exchanged(tx, spoiled(x, SICK, np.nan))
        assert heard["count"].tolist() == list(range(K))
        assert (heard["key"] == x["key"]).all()
        assert (heard["empty"].shape, heard["none"]) == ((K, 0), None)
        assert state.dropped[0] == 1


def test_the_count_travels_in_the_buffer_of_the_mean():
    one = jax.tree.map(lambda x: x[0], trees())
    sent = lambda tx: lc.traffic(
        lambda g: tx.update(g, tx.init(g), step=0), one, workers=K
    )
    plain, counted = sent(lc.mean()), sent(lc.surviving_mean())
    assert counted.bytes_always == plain.bytes_always + 4
    assert len(counted.rows) == len(plain.rows) == 1
    feedback = lc.error_feedback(lc.top_k(0.5))
    wrapped = sent(lc.surviving(feedback)).bytes_always
    assert wrapped == sent(feedback).bytes_always + 4


COMPRESSED = {
    "mean": lambda: lc.mean(),
    "random entries": lambda: lc.compressed_mean(lc.random_k(0.5)),
    "largest entries": lambda: lc.error_feedback(lc.top_k(0.5)),
    "two stages": lambda: lc.two_stage_feedback(lc.one_bit()),
    "low rank": lambda: lc.powersgd(1, min_compression=0.0),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_where_all_are_finite_a_wrapped_exchange_is_the_exchange(name):
    tx, x = COMPRESSED[name](), trees()
    heard, state = exchanged(lc.surviving(tx), x)
    expected, kept = exchanged(tx, x)
    jax.tree.map(np.testing.assert_array_equal, heard, expected)
    jax.tree.map(np.testing.assert_array_equal, state.surviving, kept)


def test_what_is_said_over_time_is_the_mean_over_survivors():
    # Small integers, four and two survivors of four: everything is exact.
    workers, rng = 4, np.random.default_rng(0)
    tx = lc.surviving(lc.error_feedback(lc.top_k(0.25)))
    state, heard, news = None, 0.0, 0.0
    for bad in ([], [1, 3], [], [0, 1, 2, 3], [0, 2]):
        g = 4.0 * rng.integers(-9, 9, size=(workers, 8)).astype(np.float32)
        good = [i for i in range(workers) if i not in bad]
        before = state
        x = jnp.asarray(g).at[jnp.array(bad, int)].set(jnp.nan)
        told, state = exchanged(tx, x, state)
        if not good:  # as if it had not been asked
            jax.tree.map(np.testing.assert_array_equal, before[2], state[2])
            continue
        heard, news = heard + np.asarray(told[0]), news + g[good].mean(0)
        owed = np.asarray(state.surviving.error).mean(0)
        np.testing.assert_array_equal(heard + owed, news)
    assert state.absences.tolist() == [2, 2, 2, 2]


def test_what_does_not_compose_says_so():
    x = trees(4)
    ef21 = lc.surviving(lc.difference_feedback(lc.top_k(0.5)))
    with pytest.raises(ValueError, match=r"its memory would follow: .*skip_nonfin"):
        exchanged(ef21, x)
    with pytest.raises(ValueError, match="gossip exchanges gradients and parameters"):
        exchanged(lc.surviving(lc.gossip(lc.ring(4))), x)
    with pytest.raises(ValueError, match=r"surviving exchanges .*, not param"):
        exchanged(lc.surviving(lc.mean()), x, about="parameters")
    with pytest.raises(ValueError, match="must be a GradientTransformation"):
        lc.surviving(lc.top_k(0.5))


def test_a_worker_of_several_devices_has_one_vote():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("workers", "fsdp"))
    where = lambda path: P("fsdp")
    x = jnp.arange(16.0).reshape(4, 4).at[2, 0].set(jnp.nan)  # on its first device
    x = jax.device_put(x, NamedSharding(mesh, P("workers", "fsdp")))
    feedback = lc.error_feedback(lc.top_k(1.0))
    for tx in (
        lc.surviving_mean(),
        lc.surviving(lc.per_shard(feedback, where, axes="fsdp")),
    ):
        worker = lambda g, tx=tx: tx.update(g, tx.init(g), step=0)
        heard, state = jax.jit(lc.spread(worker, mesh=mesh))(x)
        expected = np.arange(16.0).reshape(4, 4)[[0, 1, 3]].mean(0)
        np.testing.assert_allclose(heard, [expected] * 4, rtol=2**-22)
        assert state.absences.tolist() == [0, 0, 1, 0]


# A run in which one worker breaks, moments and all, and comes back.

INNER = {
    "momentum": lambda: optax.sgd(0.25, momentum=0.5),
    "adam": lambda: optax.adam(0.25),
}


def diloco(inner, **more):
    exchange = more.pop("exchange", None) or lc.surviving_mean()
    return lc.diloco(
        lc.restart_nonfinite(inner), period=PERIOD, exchange=exchange, **more
    )


def slope(x, batch):
    return jnp.sum(jnp.square(x - batch["c"])) / 2 + jnp.sum(x * batch["spoil"])


def train(tx, *, backend="vmap", targets=TARGETS, sick=None, value=np.nan, first=0):
    """All carries of a run in which a worker's gradients are spoiled at one step."""
    workers, path = len(targets), []

    def batch(t):
        spoil = np.zeros((workers, N), np.float32)
        if sick is not None and t == WHEN:
            spoil[sick, 1] = value
        return {"c": jnp.asarray(targets), "spoil": jnp.asarray(spoil)}

    keep = lambda t, *carry: path.append(jax.tree.map(np.array, carry[:2]))
    lc.fit(
        slope,
        tx,
        jnp.zeros(N),
        batch,
        steps=STEPS,
        workers=workers,
        mesh=lc.worker_mesh(workers) if backend == "shard_map" else None,
        backend=backend,
        check_finite=False,
        on_step=keep,
    )
    return path


def by_hand(inner, *, left_out, rates=(0.7, 0.9)):
    """DiLoCo in numpy around optax's inner optimizer, one worker out of one mean.

    It adopts the anchor at the sync all the same, and begins its moments anew.
    """
    rate, momentum = rates
    anchor, velocity = np.zeros(N), np.zeros(N)
    x, path = np.zeros((K, N), np.float32), []
    states = [inner.init(jnp.zeros(N)) for _ in range(K)]
    for t in range(STEPS):
        for i in range(K):
            moves, states[i] = inner.update(jnp.asarray(x[i] - TARGETS[i]), states[i])
            x[i] += np.asarray(moves)
        if (t + 1) % PERIOD == 0:
            out = [left_out] if t == WHEN // PERIOD * PERIOD + PERIOD - 1 else []
            heard = np.mean([anchor - x[i] for i in range(K) if i not in out], axis=0)
            velocity = momentum * velocity + heard
            anchor = anchor - rate * (heard + momentum * velocity)
            x[:] = anchor
            for i in out:
                states[i] = inner.init(jnp.zeros(N))
        path.append(x.copy())
    return np.stack(path)


@pytest.mark.parametrize("backend", ["vmap", "shard_map"])
@pytest.mark.parametrize(("name", "value"), [("momentum", np.nan), ("adam", np.inf)])
def test_a_worker_that_breaks_in_a_round_is_back_in_the_next(name, value, backend):
    path = train(diloco(INNER[name]()), backend=backend, sick=SICK, value=value)
    x = np.stack([params for params, _ in path])
    sync = WHEN // PERIOD * PERIOD + PERIOD - 1
    broken = slice(WHEN, sync)
    assert not np.isfinite(x[broken, SICK]).all(-1).any()
    others = [i for i in range(K) if i != SICK]
    expected = by_hand(INNER[name](), left_out=SICK)
    # Twelve contracting steps of a dozen roundings each, of numbers of this size.
    size = 200 * np.spacing(np.float32(abs(expected).max()))
    np.testing.assert_allclose(x[:, others], expected[:, others], atol=size)
    np.testing.assert_allclose(x[sync:, SICK], expected[sync:, SICK], atol=size)
    for t in (sync, sync + PERIOD):  # the very bits of the anchor, for all
        anchor = path[t][1].anchor
        assert (x[t] == anchor[0]).all()
    _, state = path[sync]
    assert state.exchange.dropped.tolist() == [1] * K
    assert state.exchange.absences.tolist() == [0, 0, 0, 1, 0]
    _, state = path[-1]
    assert state.exchange.dropped.tolist() == [0] * K
    assert np.isfinite(jax.tree.leaves(path[-1])[0]).all()
    assert (state.inner.restarts > 0).tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("value", BAD)
def test_the_others_never_notice(value):
    # A worker whose data are broken, in every round, is as good as not there.
    others = [i for i in range(K) if i != SICK]
    tx = diloco(optax.sgd(0.25, momentum=0.5))
    targets = TARGETS.copy()
    targets[SICK] = value
    together, alone = train(tx, targets=targets), train(tx, targets=TARGETS[others])
    for (x, state), (y, there) in zip(together, alone, strict=True):
        np.testing.assert_array_equal(x[others], y)
        np.testing.assert_array_equal(state.anchor[others], there.anchor)


def test_compressed_displacements_recover_too():
    exchange = lc.surviving(lc.error_feedback(lc.quantize(8, stochastic=False)))
    tx = diloco(optax.adam(0.25), exchange=exchange)
    path = train(tx, sick=SICK)
    sync = WHEN // PERIOD * PERIOD + PERIOD - 1
    for t in (sync, sync + PERIOD):
        assert (path[t][0] == path[t][0][0]).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(path[-1]))
    assert path[-1][1].exchange.absences.tolist() == [0, 0, 0, 1, 0]


def test_where_all_break_the_outer_optimizer_may_roll_back():
    outer = lc.roll_back(optax.sgd(0.7, momentum=0.9, nesterov=True))
    inner = lc.restart_nonfinite(optax.adam(0.25))
    when = lc.every(PERIOD)
    tx = lc.rounds(inner, outer, exchange=lc.surviving_mean(), when=when)
    path = train(tx, sick=list(range(K)))
    sync = WHEN // PERIOD * PERIOD + PERIOD - 1
    before, after = path[sync - 1][1], path[sync][1]
    assert after.exchange.dropped.tolist() == [K] * K
    np.testing.assert_array_equal(after.anchor, before.anchor)
    np.testing.assert_array_equal(path[sync][0], before.anchor)
    assert np.isfinite(path[-1][0]).all()
    assert not np.array_equal(path[-1][0], before.anchor)
    lost = train(diloco(optax.adam(0.25)), sick=list(range(K)))
    assert np.isnan(lost[-1][0]).all()  # and without it that is seen


def test_updates_alone_cannot_mend_a_model_that_is_not_finite():
    x = jnp.array([1.0, jnp.nan, 3.0])
    rounds = lc.rounds(optax.sgd(1.0), optax.sgd(1.0), exchange=lc.surviving_mean())
    average = lc.average(optax.sgd(1.0), exchange=lc.surviving_mean())

    def healed(tx, apply):
        def worker(x):
            moves, state = tx.update(0 * x, tx.init(jnp.float32(0)), x, step=0)
            return apply(x, moves, state)

        return np.isfinite(lc.spread(worker)(x)).tolist()

    plain = lambda x, moves, state: optax.apply_updates(x, moves)
    assert healed(rounds, lc.apply_updates) == [True, True, True]
    assert healed(rounds, plain) == [True, False, True]
    assert healed(average, lc.apply_updates) == [True, False, True]
