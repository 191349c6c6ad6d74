"""Leader SGD: who is followed, how far; and what all such methods ask for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh

import lowcomm as lc
from lowcomm import leader_sgd, pso_ps, spread
from tests.populations import INNER, OPTIMA, START, K, N, constant, near, train
from tests.quadratics import squares

PULLS = {"pull": 0.25, "stale_pull": 0.5}
NONE = {"pull": 0.0, "stale_pull": 0.0}


def led(levels, steps, *, window=10, rate=0.1, momentum=0.5):
    """The method in double precision: levels of (groups, period, pull, stale pull)."""
    x, c = np.float64(START), np.float64(OPTIMA)
    m, losses, path = 0 * x, [], []
    stale = [x.copy() for _ in levels]
    for t in range(steps):
        losses.append(np.square(x - c).sum(1) / 2)
        m = momentum * m + (x - c)
        x = x - rate * m
        score = np.mean(losses[-window:], axis=0)
        for (_, period, _, p), z in zip(levels, stale, strict=True):
            x = (1 - p / period) * x + p / period * z
        for i, (groups, period, pull, _) in reversed(list(enumerate(levels))):
            if (t + 1) % period == 0:
                best = {i: g[np.argmin(score[g])] for g in map(list, groups) for i in g}
                stale[i] = x[[best[k] for k in range(K)]]
                x = (1 - pull) * x + pull * stale[i]
        path.append(x)
    return np.stack(path, 1)


@pytest.mark.parametrize("window", [1, 3, 10])
def test_leader_sgd_is_what_it_says_in_double_precision(window):
    tx = leader_sgd(INNER, period=3, window=window, **PULLS)
    path, state = train(tx, 9)
    near(path, led([([range(K)], 3, 0.25, 0.5)], 9, window=window))
    assert state.losses.shape[-1] == window


AXES = ("groups", "workers")


def grid(backend, groups):
    """So many groups of virtual workers, or of devices."""
    if backend == "vmap":
        mesh = AbstractMesh((groups, K // groups), AXES)
    else:
        mesh = Mesh(np.array(jax.devices()[:K]).reshape(groups, -1), AXES)
    return {"axis": AXES, "mesh": mesh, "backend": backend}


@pytest.mark.parametrize("backend", ["vmap", "shard_map"])
def test_groups_have_leaders_of_their_own(backend):
    tx = leader_sgd(
        INNER,
        period=4,
        **PULLS,
        group_axis="workers",
        group_period=2,
        group_pull=0.125,
        group_stale_pull=0.25,
        axis=AXES,
    )
    levels = [([range(K)], 4, 0.25, 0.5), ([(0, 1), (2, 3)], 2, 0.125, 0.25)]
    near(train(tx, 8, **grid(backend, 2))[0], led(levels, 8))


def test_one_group_pulls_once():
    tx = leader_sgd(
        INNER,
        period=4,
        **PULLS,
        group_axis="workers",
        group_pull=0.5,
        axis=AXES,
    )
    near(train(tx, 8, **grid("vmap", 1))[0], led([([range(K)], 4, 0.25, 0.5)], 8))


def test_without_pulls_workers_are_independent():
    path, state = train(leader_sgd(INNER, period=2, **NONE), 6)
    alone = np.stack(
        [
            train(INNER, 6, x=START[i : i + 1], data=OPTIMA[i : i + 1])[0][0]
            for i in range(K)
        ]
    )
    near(path, alone, 4)
    assert state.leaders == ((),)  # and no model is kept for pulls that are not there


def test_a_refresh_leaves_the_leader_where_it_is_and_all_the_way_copies_it():
    values = jnp.array([3.0, 1.0, 2.0, 1.0])
    still = 0 * START, values
    for pull in (0.25, 1.0):
        tx = leader_sgd(optax.sgd(0.5), period=1, pull=pull, stale_pull=0.0)
        path, _ = train(tx, 1, data=still, loss=constant)
        np.testing.assert_array_equal(path[1, 0], START[1])
        near(path[:, 0] - START[1], (1 - pull) * (START - START[1]), 2)
        assert pull < 1 or (path[:, 0] == np.asarray(START[1])).all()


def test_a_leader_at_a_stationary_point_stays_until_another_has_a_lower_loss():
    # Loss ½(x − c)² + b. The first worker sits at its optimum; the last one comes down
    # from above to a lower floor, and is there when (x − c)² < 2 (0.5 − 0.25) on it.
    floor = jnp.array([0.5, 4.0, 4.0, 0.25])
    optima = jnp.array([[1.0], [3.0], [-2.0], [5.0]])
    x = optima + jnp.array([[0.0], [1.0], [1.0], [4.0]])
    loss = lambda x, data: squares(x, data[0]) + data[1]
    tx = leader_sgd(optax.sgd(0.25), period=1, pull=0.25, stale_pull=0.0, window=1)
    path, _ = train(tx, 30, x=x, data=(optima, floor), loss=loss)
    x, leaders = np.float64(x), []
    for _ in range(30):
        score = np.square(x - optima)[:, 0] / 2 + floor
        leaders.append(int(np.argmin(score)))
        x = x - 0.25 * (x - np.asarray(optima))
        x = x + 0.25 * (x[leaders[-1]] - x)
    near(path[:, -1], x)
    change = leaders.index(3)
    assert 0 < change < 30
    assert set(leaders[:change]) == {0}
    np.testing.assert_array_equal(path[0, :change], np.ones((change, 1)))
    assert abs(path[0, change] - 1) > 0.1


@pytest.mark.parametrize(
    ("period", "pull", "factor"),
    [(16, 0.1, 0.9485), (64, 0.1, 0.9508), (4, 0.1, 0.9390), (16, 0.5, 0.7717)],
)
def test_stale_pulls_slow_down_even_workers_that_are_alike(period, pull, factor):
    tx = leader_sgd(optax.sgd(1.0), period=period, pull=0.1, stale_pull=pull)
    data = jnp.full((2, 1), -1.0), jnp.ones(2)
    path, _ = train(tx, period, x=jnp.zeros((2, 1)), data=data, loss=constant)
    # The first round pulls toward the start, where all begin.
    p = pull / period
    exact = (1 - p) * (1 - (1 - p) ** period) / (p * period)
    np.testing.assert_allclose(exact, factor, atol=5e-5)
    np.testing.assert_allclose(path[:, -1] / period, exact, rtol=period * 2**-22)


def test_a_constant_on_all_losses_changes_nothing_and_other_names_permute():
    tx = leader_sgd(INNER, period=2, **PULLS)
    rng = np.random.default_rng(1)
    slopes = jnp.asarray(rng.integers(-4, 5, size=(K, N)), jnp.float32)
    values = jnp.array([0.5, 0.25, 1.0, 2.0])
    path, _ = train(tx, 6, data=(slopes, values), loss=constant)
    raised, _ = train(tx, 6, data=(slopes, values + 64), loss=constant)
    np.testing.assert_array_equal(raised, path)
    order = np.array([2, 0, 3, 1])
    data = slopes[order], values[order]
    renamed, _ = train(tx, 6, x=START[order], data=data, loss=constant)
    np.testing.assert_array_equal(renamed, path[order])


def test_between_mirrored_basins_averaging_is_stuck_and_a_leader_leads():
    # f(X) = ¼‖XXᵀ − M‖² with M = X*X*ᵀ is 0 at X* and −X*; their mean has ¼‖M‖² and no
    # gradient.
    basin = jnp.asarray(np.random.default_rng(2).normal(size=(5, 2)), jnp.float32)
    target = basin @ basin.T
    f = lambda x, _: jnp.sum(jnp.square(x @ x.T - target)) / 4
    x = jnp.stack([basin, -basin])
    data = jnp.zeros(2)
    averaged, _ = train(
        lc.local_sgd(optax.sgd(0.01), period=1), 5, x=x, data=data, loss=f
    )
    tx = leader_sgd(optax.sgd(0.01), period=1, pull=1.0, stale_pull=0.0)
    following, _ = train(tx, 5, x=x, data=data, loss=f)
    stuck = float(jnp.sum(jnp.square(target)) / 4)
    np.testing.assert_allclose(f(averaged[0, -1], None), stuck, rtol=1e-6)
    assert f(following[1, -1], None) < 1e-6 * stuck


def test_a_loss_of_nan_never_leads():
    values = jnp.array([jnp.nan, 2.0, 1.0, 3.0])
    tx = leader_sgd(optax.sgd(0.0), period=1, pull=1.0, stale_pull=0.0)
    path, _ = train(tx, 1, data=(0 * START, values), loss=constant)
    np.testing.assert_array_equal(path[:, 0], np.tile(START[2], (K, 1)))


# What is sent and refused, of both methods

METHODS = {
    "leader_sgd": lambda **how: leader_sgd(INNER, **({"period": 4} | how)),
    "pso_ps": lambda **how: pso_ps(INNER, **({"period": 4} | how)),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_sync_sends_one_number_and_one_model_and_other_steps_nothing(name):
    tx, one = METHODS[name](), START[0]
    state = jax.eval_shape(tx.init, one)

    def sent(t):
        update = lambda g, s, x: tx.update(g, s, x, step=t, value=jnp.float32(1))
        return lc.traffic(update, one, state, one, workers=K).bytes_always

    assert [sent(t) for t in range(4)] == [0, 0, 0, 4 + 4 * N]


@pytest.mark.parametrize("name", METHODS)
def test_a_loss_is_asked_for(name):
    tx = METHODS[name]()
    for more in ({}, {"value": jnp.ones(2)}):
        worker = lambda x, more=more: tx.update(x, tx.init(x), x, step=0, **more)[0]
        with pytest.raises(ValueError, match=f"{name}.*value=loss"):
            spread(worker)(START)


@pytest.mark.parametrize(
    ("name", "option", "words"),
    [
        ("leader_sgd", {"pull": 1.5}, "a pull 1.5"),
        ("leader_sgd", {"stale_pull": -0.1}, "a stale pull -0.1"),
        ("leader_sgd", {"period": 0}, "period 0"),
        ("leader_sgd", {"period": lc.every(4)}, "as whole numbers"),
        ("leader_sgd", {"window": 0}, "window 0"),
        ("leader_sgd", {"group_axis": "chip"}, "group_axis 'chip'"),
        ("leader_sgd", {"group_axis": "workers"}, "group_axis 'workers'"),
        ("pso_ps", {"period": 0}, "period 0"),
        ("pso_ps", {"inertia": -1.0}, "inertia -1.0"),
        ("pso_ps", {"social": float("nan")}, "social nan"),
    ],
)
def test_options_out_of_range_are_refused(name, option, words):
    with pytest.raises(ValueError, match=words):
        METHODS[name](**option)
