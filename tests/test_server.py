"""PRLC: what workers that pull now and then do to a server's model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from tests.quadratics import bend, squares, toward, walk

K, N, STEPS = 4, 3, 6
EPS = float(jnp.finfo(jnp.float32).eps)
# Small integers and binary rates: what SGD and heavy ball make of them is exact.
INTEGERS = np.random.default_rng(0).integers(-8, 8, (K, N)).astype(np.float32)
NOISE = np.random.default_rng(1).normal(size=(K, N)).astype(np.float32)
ORIGIN = np.zeros((K, N), np.float32)
TABLE = np.random.default_rng(2).random((5, K)) < 0.4
INNERS = {
    "sgd": optax.sgd(0.5),
    "momentum": optax.sgd(0.5, momentum=0.5),
    "nesterov": optax.sgd(0.25, momentum=0.5, nesterov=True),
}
SCHEDULES = {
    "common": 3,
    "staggered": lc.staggered_pulls(3),
    "random": lc.random_pulls(0.3, seed=1),
    "listed": lc.listed_pulls(TABLE),
}
any_inner = pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS)
any_schedule = pytest.mark.parametrize("pulls", SCHEDULES.values(), ids=SCHEDULES)
never = lc.listed_pulls(np.zeros((1, K)))


def train(tx, steps=STEPS, *, x=ORIGIN, data=INTEGERS, gradient=toward, **how):
    """The workers' models, ``[steps, K, …]``, and the states likewise."""
    path = walk(tx, x, data, steps=steps, gradient=gradient, **how)
    return jax.tree.map(lambda x: np.swapaxes(x, 0, 1), path)


def same(x):
    """Whether all workers hold the same bits."""
    return (x == x[:, :1]).all()


def before(path, x=ORIGIN):
    return np.concatenate([x[None], path[:-1]]).astype(np.float64)


@any_inner
def test_pulling_at_each_step_is_synchronous_training(inner):
    path, state = train(lc.prlc(inner, pulls=1))
    expected, _ = train(lc.data_parallel(inner))
    np.testing.assert_array_equal(path, expected)
    np.testing.assert_array_equal(state.anchor, expected)


@any_inner
def test_a_server_that_nobody_asks_holds_the_mean_of_independent_runs(inner):
    path, state = train(lc.prlc(inner, pulls=never))
    alone, _ = train(lc.local_sgd(inner, period=100))
    np.testing.assert_array_equal(path, alone)
    np.testing.assert_array_equal(state.anchor, alone.mean(1, keepdims=True) + 0 * path)
    assert not state.synced.any()


@any_inner
def test_with_a_common_period_it_is_local_sgd_at_every_step(inner):
    path, state = train(lc.prlc(inner, pulls=3))
    expected, _ = train(lc.local_sgd(inner, period=3))
    np.testing.assert_array_equal(path, expected)
    np.testing.assert_array_equal(state.anchor[:, 0], expected.mean(1))


@any_schedule
def test_a_worker_is_off_by_what_it_has_compensated_since_its_last_pull(pulls):
    # Of a loss that is no quadratic; values below 4, a dozen roundings a step.
    rate, steps, atol = 0.5, 12, 12 * 12 * 4 * EPS
    bent = lambda x, c: jnp.tanh(x - c)
    path, state = train(
        lc.prlc(optax.sgd(rate), pulls=pulls), steps, data=NOISE, gradient=bent
    )
    g = np.tanh(before(path) - NOISE)
    off = np.zeros((K, N))
    for t in range(steps):
        off = off + rate * (g[t].mean(0) - g[t])
        off[state.synced[t]] = 0
        np.testing.assert_allclose(path[t] - state.anchor[t], off, atol=atol)
        pulled = state.synced[t]
        apart = np.abs(path[t] - state.anchor[t])[pulled]
        assert not (apart > 4 * EPS).any()  # a rounding of the sum
    assert state.synced.any()
    # The server takes the mean gradient whoever pulled, and is the same everywhere.
    moved = before(state.anchor) - rate * g.mean(1, keepdims=True)
    np.testing.assert_allclose(state.anchor, moved, atol=12 * EPS)
    assert same(state.anchor)


def test_with_staggered_pulls_the_server_is_not_the_mean_of_the_workers():
    path, state = train(lc.prlc(optax.sgd(0.5), pulls=lc.staggered_pulls(3)))
    assert np.abs(path.mean(1) - state.anchor[:, 0]).max() > 0.1


@any_inner
@pytest.mark.parametrize("name", ["common", "staggered", "random"])
def test_one_worker_is_the_inner_optimizer_on_any_schedule(name, inner):
    one = {"x": ORIGIN[:1], "data": INTEGERS[:1]}
    path, state = train(lc.prlc(inner, pulls=SCHEDULES[name]), **one)
    expected, _ = train(optax.with_extra_args_support(inner), **one)
    np.testing.assert_array_equal(path, expected)
    np.testing.assert_array_equal(state.anchor, expected)


@any_schedule
def test_with_identical_data_any_schedule_is_synchronous_training(pulls):
    data = np.tile(INTEGERS[:1], (K, 1))
    inner = INNERS["momentum"]
    path, _ = train(lc.prlc(inner, pulls=pulls), data=data)
    expected, _ = train(lc.data_parallel(inner), data=data)
    np.testing.assert_array_equal(path, expected)


def frozen(pulls, rate=0.5):
    return lc.prlc(optax.sgd(rate), optax.set_to_zero(), pulls=pulls)


def test_without_compensation_a_worker_stays_where_it_pulled_last():
    path, state = train(frozen(lc.listed_pulls(TABLE)), 10)
    held = ORIGIN.copy()
    for t in range(10):
        held = np.where(TABLE[t % 5, :, None], state.anchor[t], held)
        np.testing.assert_array_equal(path[t], held)


def test_without_compensation_a_common_period_is_one_long_step():
    period, rate = 3, 0.125
    path, state = train(frozen(period, rate), 3 * period)
    x = np.zeros(N)
    for end in state.anchor[period - 1 :: period, 0]:
        x = x - period * rate * (x - INTEGERS.mean(0))
        np.testing.assert_allclose(end, x, atol=16 * EPS * 8)
    # One worker takes so many gradients at one point.
    one = {"x": ORIGIN[:1], "data": INTEGERS[:1]}
    path, state = train(frozen(period, rate), period, **one)
    np.testing.assert_array_equal(path[: period - 1], 0)
    np.testing.assert_array_equal(path[-1, 0], period * rate * INTEGERS[0])


def test_freezing_divides_the_stable_curvatures_by_the_period():
    # x ← (1 − p γ h) x a round, against (1 − γ h) x a step; here p γ = 1 and γ = 1/4.
    curvatures = np.array([1.9, 2.1, 7.9, 8.1], np.float32)
    how = {"x": np.ones((1, 4), np.float32), "gradient": bend}
    data = curvatures[None], np.zeros((1, 4), np.float32)
    grows = lambda tx: np.abs(train(tx, 40, data=data, **how)[0][-1, 0]) > 1
    np.testing.assert_array_equal(grows(frozen(4, 0.25)), [False, True, True, True])
    compensated = lc.prlc(optax.sgd(0.25), pulls=4)
    np.testing.assert_array_equal(grows(compensated), [False, False, False, True])


def test_pulls_are_counted_beside_the_pushes_that_travel_anyway():
    tx = lc.prlc(optax.sgd(0.5), pulls=lc.listed_pulls(TABLE))
    _, state = train(tx, 10)
    np.testing.assert_array_equal(state.synced, np.tile(TABLE, (2, 1)))
    run = lc.fit(squares, tx, ORIGIN[0], lambda t: INTEGERS, steps=10, workers=K)
    assert run.payload.tolist() == [4 * N] * 10


def test_a_random_schedule_has_its_ratio_and_differs_between_workers_and_seeds():
    def table(pulls):
        worker = lambda x: jax.vmap(lambda t: pulls(t, lc.AXIS))(jnp.arange(100))
        return np.asarray(lc.spread(worker)(jnp.zeros(8)))

    drawn = table(lc.random_pulls(0.25))
    # 800 draws of variance 3/16: five standard deviations are 61.
    assert abs(drawn.sum() - 200) < 61
    assert len(np.unique(drawn, axis=0)) == 8
    np.testing.assert_array_equal(drawn, table(lc.random_pulls(0.25)))
    assert (drawn != table(lc.random_pulls(0.25, seed=1))).any()
    assert table(lc.random_pulls(1.0)).all()
    assert not table(lc.random_pulls(0.0)).any()


@pytest.mark.parametrize("backend", ["vmap", "mesh"])
def test_the_server_s_model_is_what_is_read_out_and_what_a_pull_adopts(backend):
    mesh = lc.worker_mesh(K) if backend == "mesh" else None
    tx = lc.prlc(optax.sgd(0.3), pulls=lc.staggered_pulls(2))
    step = lc.spread(lc.local_step(squares, tx), in_axes=(0, 0, 0, None), mesh=mesh)
    step, x = jax.jit(step), lc.stack(jnp.asarray(NOISE[0]), K, mesh=mesh)
    state = jax.jit(lc.spread(tx.init, mesh=mesh))(x)
    for t in range(3):
        x, state, _ = step(x, state, NOISE, jnp.int32(t))
        pulled = np.asarray(state.synced)
        assert pulled.tolist() == [(t + 1 + i) % 2 == 0 for i in range(K)]
        adopted, server = np.asarray(x)[pulled], np.asarray(state.anchor)[pulled]
        assert same(adopted[None])
        # XLA may fuse a multiplication into the sum where one of them is formed.
        np.testing.assert_allclose(adopted, server, atol=EPS)
    model = lc.spread(lc.consensus, mesh=mesh)(state, x)
    np.testing.assert_array_equal(model, state.anchor)


@pytest.mark.parametrize("pulls", [2, lc.staggered_pulls(2)], ids=["common", "own"])
def test_half_precision_parameters_have_a_precise_server(pulls):
    tx = lc.prlc(optax.sgd(2.0**-10), pulls=pulls)
    x = np.ones((K, N), jnp.bfloat16)
    path, state = train(tx, 8, x=x, gradient=lambda x, c: jnp.ones_like(x))
    assert path.dtype == jnp.bfloat16
    # A step of 2⁻¹⁰ is lost beside 1 in bfloat16, and the server makes eight of them.
    np.testing.assert_array_equal(state.anchor[-1], np.float32(1 - 8 * 2.0**-10))
    np.testing.assert_array_equal(path[-1, 1], jnp.bfloat16(1 - 8 * 2.0**-10))


def test_an_exchange_may_compress_what_is_pushed_but_not_differ_between_workers():
    few = lc.error_feedback(lc.top_k(0.5))
    _, state = train(lc.prlc(optax.sgd(0.125), pulls=2, exchange=few), 60)
    assert same(state.anchor)
    np.testing.assert_allclose(state.anchor[-1, 0], INTEGERS.mean(0), atol=2.0)
    tx = lc.prlc(optax.sgd(0.5), pulls=2, exchange=lc.gossip(lc.ring(K)))
    with pytest.raises(ValueError, match="drift apart"):
        train(tx, 1)


def test_schedules_that_make_no_sense_are_refused():
    for table in ([1, 0], np.zeros((0, 4))):
        with pytest.raises(ValueError, match=r"give \[steps, workers\]"):
            lc.listed_pulls(table)
    with pytest.raises(ValueError, match="has 3 columns and axis 'workers' has 4"):
        train(lc.prlc(optax.sgd(0.5), pulls=lc.listed_pulls(np.ones((2, 3)))), 1)
    with pytest.raises(ValueError, match=r"ratio 1.5 is outside \[0, 1\]"):
        lc.random_pulls(1.5)
    for make in (lc.staggered_pulls, lambda p: lc.prlc(optax.sgd(1.0), pulls=p)):
        with pytest.raises(ValueError, match="period 0 must be a whole number"):
            make(0)
