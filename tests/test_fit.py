"""What ``fit`` is handed and hands back: pieces of runs, weights, programs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import (
    counted_step,
    data_parallel,
    diloco,
    fit,
    init,
    local_sgd,
    local_step,
    spread,
    stack,
    steps,
    weighted_mean,
    worker_mesh,
)
from tests.quadratics import squares

K, N = 4, 3
RNG = np.random.default_rng(0)
OPTIMA = RNG.integers(-8, 8, size=(K, N)).astype(np.float32)
START = jnp.arange(float(N))
SGD = optax.sgd(0.5)


def slope(params, batch):
    """A loss whose gradient is the batch."""
    return sum(
        jax.tree.leaves(jax.tree.map(lambda x, g: jnp.sum(x * g), params, batch))
    )


@pytest.mark.parametrize("mesh", [False, True])
def test_two_leaves_under_pmap_are_two_leaves_of_each_worker(mesh):
    params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
    grads = {"w": np.ones((K, 4, 3), np.float32), "b": np.ones((K, 3), np.float32)}
    more = {"backend": "pmap"} | ({"mesh": worker_mesh(K)} if mesh else {})
    tx = diloco(SGD, period=2)
    runs = [
        fit(slope, tx, params, lambda t: grads, steps=2, workers=K, **how)
        for how in ({}, more)
    ]
    for run in runs:
        shapes = jax.tree.map(jnp.shape, run.state.anchor)
        assert shapes == {"w": (K, 4, 3), "b": (K, 3)}
        assert run.payload.tolist() == [0, 4 * (12 + 3)]
    for x, y in zip(*(jax.tree.leaves(run.params) for run in runs), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_going_on_leaves_the_first_run_as_it_was():
    tx = diloco(SGD, period=4)
    how = {"batches": lambda t: OPTIMA, "workers": K}
    first = fit(squares, tx, START, steps=4, **how)
    before = jax.tree.map(np.array, (first.params, first.state))
    for _ in range(2):  # and so one may go on from it twice
        fit(squares, tx, first.params, state=first.state, start=4, steps=2, **how)
    after = first.params, first.state
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_extra_arguments_come_from_the_batch():
    tx = optax.chain(weighted_mean(), SGD)
    weights = np.float32([1, 0, 3, 4])
    batch = {"optimum": OPTIMA, "weight": weights}
    loss = lambda x, batch: squares(x, batch["optimum"])
    extra = lambda batch: {"weight": batch["weight"]}
    run = fit(loss, tx, START, lambda t: batch, steps=2, workers=K, extra_args=extra)
    step = spread(local_step(loss, tx, extra_args=extra), in_axes=(0, 0, 0, None))
    x, state = stack(START, K), spread(tx.init)(stack(START, K))
    expected = np.asarray(START)
    for t in range(2):
        x, state, _ = step(x, state, batch, t)
        expected = (expected + weights @ OPTIMA / 8) / 2
    np.testing.assert_array_equal(run.params, x)
    np.testing.assert_allclose(x, np.tile(expected, (K, 1)), atol=1e-6)
    with pytest.raises(ValueError, match="weighted_mean needs"):
        fit(loss, tx, START, lambda t: batch, steps=1, workers=K)


def test_many_kinds_of_steps_share_one_program_and_the_result_stays():
    # Four periods make sixteen kinds. Steps of whole numbers, and means over four
    # workers of one model each plus whole numbers: all sums are exact.
    periods = {"a": 2, "b": 3, "c": 5, "d": 7}
    parts = {name: local_sgd(optax.sgd(1.0), period=p) for name, p in periods.items()}
    tx = optax.partition(parts, {name: name for name in periods})
    params = dict.fromkeys(periods, START)
    data = RNG.integers(-8, 8, size=(22, K, N)).astype(np.float32)
    feed = lambda t: dict.fromkeys(periods, data[t])
    run = fit(slope, tx, params, feed, steps=22, workers=K)
    assert len(run.programs) == steps.MOST_PROGRAMS + 1 == 9
    step = jax.jit(spread(local_step(slope, tx), in_axes=(0, 0, 0, None)))
    x = stack(params, K)
    state = jax.jit(spread(tx.init))(x)
    for t in range(22):
        x, state, _ = step(x, state, feed(t), jnp.int32(t))
    jax.tree.map(np.testing.assert_array_equal, (run.params, run.state), (x, state))
    sent = [4 * N * sum((t + 1) % p == 0 for p in periods.values()) for t in range(22)]
    assert run.payload.tolist() == sent


def test_a_first_call_that_failed_has_told_the_programs_nothing():
    step = counted_step(squares, local_sgd(SGD, period=2), workers=K)
    x = stack(START, K)
    state = init(local_sgd(SGD, period=2), x)
    with pytest.raises(TypeError):
        step(x, state, {"oops": OPTIMA}, 0)
    x, _, _, sent = step(x, state, OPTIMA, 1)  # a sync
    assert sent.bytes == 4 * N
    np.testing.assert_array_equal(x, np.tile(np.asarray(x)[:1], (K, 1)))


def test_bytes_are_those_of_the_arrays_at_hand():
    tx = data_parallel(SGD)
    step = counted_step(squares, tx, workers=K)
    for n in (1, 3, 1):
        x = stack(jnp.zeros(n), K)
        *_, sent = step(x, init(tx, x), OPTIMA[:, :n], 0)
        assert sent.bytes == 4 * n


def test_arrays_of_numpy_will_do_and_a_traced_step_will_not():
    tx = data_parallel(SGD)
    step = counted_step(squares, tx, workers=K)
    x = np.zeros((K, N), np.float32)
    state = jax.tree.map(np.asarray, init(tx, x))
    expected = step(stack(jnp.zeros(N), K), init(tx, x), OPTIMA, 0)
    np.testing.assert_array_equal(step(x, state, OPTIMA, np.int64(0))[0], expected[0])
    with pytest.raises(ValueError, match="Python integer"):
        jax.jit(lambda t: step(x, state, OPTIMA, t)[0])(0)
