"""Layered SGD: synchronous SGD on two levels, and the time that hides one of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh

import lowcomm as lc
from lowcomm.network import collective_seconds
from lowcomm.transport import reduce_sum
from tests.quadratics import squares

K, N, STEPS = 8, 3, 6
AXES = ("groups", "workers")
EPS = float(jnp.finfo(jnp.float32).eps)
INTEGERS = np.random.default_rng(0).integers(-8, 8, (K, N)).astype(np.float32)
NOISE = np.random.default_rng(1).normal(size=(K, N)).astype(np.float32)
GRIDS = [(1, 8), (2, 4), (4, 2), (8, 1)]
SCHEDULE = optax.linear_schedule(0.05, 0.4, STEPS)
HEAVY = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(SCHEDULE, momentum=0.9))


def where(grid):
    return {"mesh": AbstractMesh(grid, AXES), "axis": AXES, "backend": "vmap"}


def train(tx, data, *, axis=lc.AXIS, **place):
    """The models ``[STEPS, K, …]`` of a plain loop."""
    step = lc.local_step(squares, tx, axis=axis)

    def worker(x, c):
        def body(carry, t):
            x, state, _ = step(*carry, c, t)
            return (x, state), x

        return jax.lax.scan(body, (x, tx.init(x)), jnp.arange(STEPS))[1]

    path = jax.jit(lc.spread(worker, axis=axis, **place))(jnp.zeros((K, N)), data)
    return np.swapaxes(path, 0, 1)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_shape_of_groups_is_synchronous_sgd(grid):
    tx, flat = (make(optax.sgd(0.5)) for make in (lc.layered_sgd, lc.data_parallel))
    path = train(tx, INTEGERS, **where(grid))
    np.testing.assert_array_equal(path, train(flat, INTEGERS))
    tx, flat = (make(HEAVY) for make in (lc.layered_sgd, lc.data_parallel))
    # Values below 2; eight summands and a few operations more a step, which contract.
    path = train(tx, NOISE, **where(grid))
    np.testing.assert_allclose(path, train(flat, NOISE), atol=16 * STEPS * EPS)


def test_on_devices_too_the_loss_curves_coincide():
    runs = []
    for grid in GRIDS:
        mesh = Mesh(np.array(jax.devices()[:K]).reshape(grid), AXES)
        run = lc.fit(
            squares,
            lc.layered_sgd(HEAVY),
            jnp.zeros(N),
            lambda t: NOISE,
            steps=STEPS,
            workers=K,
            mesh=mesh,
            axis=AXES,
        )
        runs.append(run.losses)
    np.testing.assert_allclose(runs, [runs[0]] * len(runs), rtol=1e-6)


def test_one_division_is_right_for_unequal_groups_where_a_mean_of_means_is_not():
    # Groups of three and of one: on a grid, two places of the second stay empty.
    g = jnp.array([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0]]).reshape(-1)
    present = jnp.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]).reshape(-1)

    def worker(g, w):
        twice = lambda x: reduce_sum(reduce_sum(x, "workers"), "groups")
        groups, _ = lc.weighted_mean("workers").update(g, (), weight=w)
        return twice(w * g) / twice(w), lc.mean("groups").update(groups, ())[0]

    once, means = lc.spread(worker, **where((2, 3)))(g, present)
    assert set(once.tolist()) == {2.0}
    assert set(means.tolist()) == {3.0}


@pytest.mark.parametrize("grid", [(1, 8), (8, 1)], ids=str)
def test_a_level_of_one_sends_nothing(grid):
    tx = lc.layered_sgd(optax.sgd(0.5))
    step = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
    sent = lc.traffic(step, INTEGERS[0], workers=grid, axis=AXES)
    assert sent.bytes_always == 4 * N


def test_the_two_levels_are_counted_apart():
    tx = lc.layered_sgd(optax.sgd(0.5))
    step = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
    sent = lc.traffic(step, INTEGERS[0], workers=(2, 4), axis=AXES)
    found = [(row.collective, row.axis, row.bytes) for row in sent.rows]
    assert found == [
        ("all_reduce", "workers", 4 * N),
        ("all_reduce", "groups", 4 * N),
    ]


def test_an_update_deferred_to_the_next_step_is_applied_before_the_next_gradient():
    tx = lc.layered_sgd(optax.sgd(0.5))
    grid = where((2, 4))
    gradient, seen, applied = jax.grad(squares), [], 0
    apply = lc.spread(
        lambda g, s, x, t: tx.update(g, s, x, step=t), in_axes=(0, 0, 0, None), **grid
    )
    x, pending = jnp.zeros((K, N)), None
    state = lc.spread(tx.init, **grid)(x)
    for t in range(STEPS + 1):  # the last turn flushes
        if pending is not None:
            moves, state = apply(pending, state, x, t - 1)
            x, applied = x + moves, applied + 1
            seen.append(x)
        pending = jax.vmap(gradient)(x, INTEGERS) if t < STEPS else None
    np.testing.assert_array_equal(seen, train(tx, INTEGERS, **grid))
    assert applied == STEPS


FAST, SLOW = lc.Link(8e9, 1e-6), lc.Link(8e7, 1e-3)
NBYTES, COMPUTE, GROUPS, SIZE = 1_000_000, 0.05, 4, 8
BETWEEN = collective_seconds("all_reduce", NBYTES, workers=GROUPS, link=SLOW)
INSIDE = collective_seconds("broadcast", NBYTES, workers=SIZE + 1, link=FAST)


def layered(loading, between=SLOW):
    return lc.layered_seconds(
        NBYTES,
        groups=GROUPS,
        workers=SIZE,
        between=between,
        inside=FAST,
        compute=COMPUTE,
        loading=loading,
    )


def test_loading_hides_the_sum_between_groups_and_only_that():
    plain = lambda loading: COMPUTE + loading + 2 * INSIDE + BETWEEN
    assert layered(0.0) == pytest.approx(plain(0.0))
    for loading in (0.0, BETWEEN / 2, BETWEEN, 2 * BETWEEN):
        gain = plain(loading) - layered(loading)
        assert gain == pytest.approx(min(loading, BETWEEN))
    slower = lc.Link(SLOW.bandwidth / 2, SLOW.latency)
    assert layered(2 * BETWEEN) == layered(2 * BETWEEN, slower)
    assert layered(BETWEEN) < layered(BETWEEN, slower)


def test_a_flat_step_waits_for_everything():
    n = GROUPS * SIZE
    reduced = collective_seconds("all_reduce", NBYTES, workers=n, link=SLOW)
    for loading in (0.0, 1.0):
        flat = lc.flat_seconds(
            NBYTES, workers=n, link=SLOW, compute=COMPUTE, loading=loading
        )
        assert flat == pytest.approx(COMPUTE + loading + reduced)
        assert layered(loading) < flat


@pytest.mark.parametrize("axes", ["workers", ("workers",), ("a", "a")])
def test_fewer_than_two_axes_are_refused(axes):
    with pytest.raises(ValueError, match="give two different names or more"):
        lc.layered_sgd(optax.sgd(1.0), axes=axes)


def test_times_and_groups_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="give seconds, 0 or more"):
        layered(-1.0)
    with pytest.raises(ValueError, match="give seconds, 0 or more"):
        lc.flat_seconds(1, workers=2, link=FAST, compute=-1.0, loading=0.0)
    with pytest.raises(ValueError, match="a group has at least one"):
        lc.layered_seconds(
            1, groups=2, workers=0, between=SLOW, inside=FAST, compute=0, loading=0
        )
