"""Averaging in clusters often, and across them now and then."""

import jax
import numpy as np
import optax
import pytest

import lowcomm as lc
from lowcomm.phases import after
from tests.quadratics import bend, walk

AXES, GRID = ("clusters", "workers"), (2, 3)
K, N, STEPS = 6, 4, 12
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=N), (K, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(K, N)).astype(np.float32)
CURVATURES = RNG.uniform(0.5, 2.0, size=(K, N)).astype(np.float32)
BALL = optax.sgd(0.1, momentum=0.9)
# Numbers below 4, twelve steps of a handful of float32 roundings each.
ROUNDING = 12 * 8 * 4 * 2.0**-24


def train(tx, data=(CURVATURES, OPTIMA)):
    """The path of virtual workers on a grid, ``[K, steps, N]``."""
    mesh = lc.spmd.abstract_mesh(dict(zip(AXES, GRID, strict=True)))

    def worker(x, data):
        def body(carry, t):
            x, state = carry
            moves, state = tx.update(bend(x, data), state, x, step=t)
            return (x + moves, state), x + moves

        return jax.lax.scan(body, (x, tx.init(x)), jax.numpy.arange(STEPS))[1]

    run = jax.jit(lc.spread(worker, mesh=mesh, axis=AXES, backend="vmap"))
    return np.asarray(run(X, data))


def two_level(period, outer_period, inner=BALL):
    return lc.two_level_local_sgd(inner, period=period, outer_period=outer_period)


def on_one_axis(sizes, period, outer_period, inner=BALL):
    near, far = lc.every(period), lc.every(outer_period)
    reach = after(far, lc.gossip(lc.clusters(sizes)), lc.mean())
    return lc.average(inner, exchange=reach, when=lc.any_of(near, far))


def by_hand(sizes, period, outer_period):
    """The same loop in numpy, for clusters of these sizes."""
    x, m, path = X.astype(float), np.zeros((K, N)), []
    places = np.split(np.arange(K), np.cumsum(sizes)[:-1])
    for t in range(1, STEPS + 1):
        m = 0.9 * m + CURVATURES * (x - OPTIMA)
        x = x - 0.1 * m
        if t % outer_period == 0:
            x = np.tile(x.mean(0), (K, 1))
        elif t % period == 0:
            for rows in places:
                x[rows] = x[rows].mean(0)
        path.append(x.copy())
    return np.stack(path, 1)


@pytest.mark.parametrize(("period", "outer_period"), [(2, 6), (1, 4), (3, 4), (4, 4)])
def test_two_levels_are_their_loop_in_numpy(period, outer_period):
    path = train(two_level(period, outer_period))
    expected = by_hand((3, 3), period, outer_period)
    np.testing.assert_allclose(path, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("sizes", [(1, 5), (2, 4), (1, 2, 3), (6,), (1,) * 6])
def test_clusters_of_any_sizes_are_their_loop_in_numpy(sizes):
    path, _ = walk(on_one_axis(sizes, 2, 6), X, (CURVATURES, OPTIMA), steps=STEPS)
    expected = by_hand(sizes, 2, 6)
    np.testing.assert_allclose(path, expected, rtol=0, atol=ROUNDING)


def test_equal_periods_are_one_level():
    one = walk(lc.local_sgd(BALL, period=3), X, (CURVATURES, OPTIMA), steps=STEPS)[0]
    np.testing.assert_allclose(train(two_level(3, 3)), one, rtol=0, atol=ROUNDING)


def test_in_the_middle_of_a_round_clusters_agree_within_and_not_across():
    path = train(two_level(2, 6)).reshape(*GRID, STEPS, N)
    within, across = np.ptp(path, axis=1).max((0, -1)), np.ptp(path, axis=0).max((0, 2))
    t = np.arange(1, STEPS + 1)
    assert (within[t % 2 == 0] < ROUNDING).all()
    assert (within[t % 2 != 0] > 0.01).all()
    assert (across[t % 6 == 0] < ROUNDING).all()
    assert (across[t % 6 != 0] > 0.01).all()


@pytest.mark.parametrize(("period", "outer_period"), [(1, 4), (2, 6), (3, 12)])
def test_on_a_shared_quadratic_the_mean_path_is_the_same_for_all_periods(
    period, outer_period
):
    data = np.tile(CURVATURES[:1], (K, 1)), OPTIMA
    together = walk(lc.data_parallel(BALL), X, data, steps=STEPS)[0][0]
    grid = train(two_level(period, outer_period), data)
    unequal = walk(on_one_axis((1, 5), period, outer_period), X, data, steps=STEPS)[0]
    for path in (grid, unequal):
        np.testing.assert_allclose(path.mean(0), together, rtol=0, atol=ROUNDING)


def test_with_a_curvature_for_each_worker_the_mean_path_is_another():
    apart = train(two_level(2, 6)).mean(0)
    together = walk(lc.data_parallel(BALL), X, (CURVATURES, OPTIMA), steps=STEPS)[0][0]
    assert np.abs(apart - together).max() > 1e-3


def test_the_mean_of_all_is_not_the_mean_of_the_means_of_unequal_clusters():
    x = np.float32([[0], [4], [4], [4]])
    data = np.zeros_like(x), x
    path, _ = walk(on_one_axis((1, 3), 1, 2, optax.sgd(1.0)), x, data, steps=2)
    assert path[:, 0].ravel().tolist() == [0, 4, 4, 4]
    assert path[:, 1].ravel().tolist() == [3, 3, 3, 3]  # 2 would be that of the means


@pytest.mark.parametrize("sizes", [(3,), (1, 1), (2, 3, 1), (4, 2), (5, 1, 1)])
def test_a_graph_of_clusters_is_block_by_block_the_mean(sizes):
    matrix = lc.mixing_matrix(lc.clusters(sizes))
    expected = np.zeros((sum(sizes),) * 2)
    for end, n in zip(np.cumsum(sizes), sizes, strict=True):
        expected[end - n : end, end - n : end] = 1 / n
    np.testing.assert_allclose(matrix, expected, rtol=0, atol=1e-12)


def test_equal_clusters_hear_each_member_once():
    (round_,) = lc.clusters((4, 4)).rounds
    assert len(round_) == 4
    assert [weight for weight, _ in round_] == [0.25] * 4


def slow_and_fast(tx):
    """Bytes of twelve steps along links between clusters, and along all."""
    rows = [
        row
        for t in range(STEPS)
        for row in lc.traffic(
            lambda x, t=t: tx.update(x, tx.init(x), x, step=t),
            X[0],
            workers=list(GRID),
            axis=AXES,
        ).rows
    ]
    slow = sum(row.bytes for row in rows if AXES[0] in row.axis)
    return slow, sum(row.bytes for row in rows)


def test_slow_links_carry_one_model_an_outer_period_whatever_the_inner_one():
    model = 4 * N
    for period in (1, 2, 3):
        for outer_period in (6, 12):
            slow, both = slow_and_fast(two_level(period, outer_period))
            assert slow == STEPS // outer_period * model
            assert both == STEPS // period * model  # where all meet, clusters need not


def test_settings_that_make_no_sense_are_refused():
    for axes in ("workers", ("workers",), ("a", "a")):
        with pytest.raises(ValueError, match="must be two names"):
            lc.two_level_local_sgd(BALL, period=1, outer_period=2, axes=axes)
    with pytest.raises(ValueError, match="outer_period is a measured trigger"):
        two_level(1, lc.change_exceeds(0.5))
    with pytest.raises(ValueError, match="period 0"):
        two_level(0, 2)
    with pytest.raises(ValueError, match="clusters"):
        lc.clusters((2, 0))
    with pytest.raises(ValueError, match="clusters"):
        lc.clusters(())
