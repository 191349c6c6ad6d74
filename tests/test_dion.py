"""Dion: many workers are one with the mean of their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from lowcomm import dion, rank_fraction, spread, traffic
from lowcomm.spmd import AXIS, vary

K, T, M, N = 4, 6, 12, 8
EPS = float(jnp.finfo(jnp.float32).eps)


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run(stream, *, rank=2, momentum=0.95):
    """Directions and states of a stacked stream ``[K, T, …]``."""
    tx = dion(optax.identity(), rank=rank, momentum=momentum)

    def worker(stream):
        def step(state, g):
            moves, state = tx.update(g, state, g)
            return state, (moves, state[0])

        first = jax.tree.map(lambda x: x[0], stream)
        return lax.scan(step, vary(tx.init(first), AXIS), stream)[1]

    return jax.jit(spread(worker))(stream)


STREAM = gaussian(K, T, M, N)
# Sums of some 100 products of numbers below 16 go into what the bounds are said of, and
# a projection turns by a rounding over the gap of what it is made of, of which ten.
BOUND = 100 * 16 * EPS * 10


def test_it_is_the_published_iteration():
    moves, state = run(STREAM)
    first = dion(optax.identity(), rank=2).init(STREAM[0, 0])[0]
    Q, B = np.asarray(first.query, float), np.zeros((K, M, N))
    for t in range(T):
        B = B + STREAM[:, t]
        P = np.linalg.qr(B.mean(0) @ Q)[0]
        R = B.mean(0).T @ P
        B = B - 0.05 * P @ R.T
        Q = R / np.linalg.norm(R, axis=0)
        expected = [np.sqrt(N / M) * P @ Q.T] * K
        np.testing.assert_allclose(moves[:, t], expected, rtol=0, atol=BOUND)
        np.testing.assert_allclose(state.momentum[:, t], B, rtol=0, atol=BOUND)


def test_many_workers_are_one_with_the_mean_gradient():
    moves, state = run(STREAM)
    alone, central = run(np.tile(STREAM.mean(0), (K, 1, 1, 1)))
    np.testing.assert_allclose(moves, alone, rtol=0, atol=BOUND)
    mean = np.asarray(state.momentum, float).mean(0)
    np.testing.assert_allclose(mean, central.momentum[0], rtol=0, atol=BOUND)
    apart = np.asarray(state.momentum)[:, -1].std(0)
    assert apart.min() > 100 * BOUND  # while each of them goes its own way
    assert (np.asarray(moves) == np.asarray(moves)[:1]).all()
    assert (np.asarray(state.query) == np.asarray(state.query)[:1]).all()


def test_what_is_missed_stays_in_the_momentum():
    # Σ g = M_T + (1 − μ) Σ P Rᵀ: without decay of what was heard, M alone has it all.
    _, state = run(STREAM, momentum=1.0)
    total = STREAM.astype(float).sum(1)
    np.testing.assert_allclose(state.momentum[:, -1], total, rtol=0, atol=BOUND)
    # With it, of each step's mean momentum P Rᵀ is a projection: P P^T B.
    _, state = run(STREAM, momentum=0.5)
    B = np.asarray(state.momentum, float).mean(0)
    before = np.concatenate([np.zeros((1, M, N)), B[:-1]]) + STREAM.mean(0)
    heard = 2 * (before - B)
    assert np.linalg.matrix_rank(heard, tol=BOUND).tolist() == [2] * T
    np.testing.assert_allclose(
        B[-1] + 0.5 * heard.sum(0), STREAM.mean(0).sum(0), rtol=0, atol=BOUND
    )


def test_at_full_rank_momentum_is_the_plain_one():
    _, state = run(STREAM, rank=N, momentum=0.5)
    mean, expected = np.asarray(state.momentum, float).mean(0), np.zeros((M, N))
    for t in range(T):
        expected = 0.5 * (expected + STREAM[:, t].mean(0))
        np.testing.assert_allclose(mean[t], expected, rtol=0, atol=BOUND)


def test_no_gradient_is_no_step_and_the_size_of_gradients_does_not_matter():
    still = STREAM.copy()
    still[:, 0] = 0
    moves, state = run(still)
    assert not np.asarray(moves)[:, 0].any()
    assert not np.asarray(state.momentum)[:, 0].any()
    assert np.asarray(moves)[:, 1:].any(axis=(2, 3)).all()
    np.testing.assert_array_equal(run(2.0**40 * STREAM)[0], run(STREAM)[0])
    squares = np.square(np.asarray(moves, float)[:, 1:]).sum((2, 3))
    np.testing.assert_allclose(squares, 2 * N / M, rtol=64 * EPS)


@pytest.mark.parametrize("rank", [2, 32, 33, 64])
def test_a_mean_gradient_of_rank_one_moves_in_one_direction(rank):
    # Above rank 32 another algorithm finds the bases.
    m, n = (M, N) if rank == 2 else (80, 64)
    u, v = gaussian(m, 1), gaussian(1, n, seed=1)
    moves, _ = run(np.tile(u @ v, (K, 2, 1, 1)), rank=rank)
    expected = np.sqrt(n / m) * u @ v / np.linalg.norm(u) / np.linalg.norm(v)
    np.testing.assert_allclose(moves[0], [expected] * 2, rtol=0, atol=BOUND)


def test_a_mean_gradient_of_a_few_examples_moves_within_their_directions():
    m, few, rank = 256, 8, 64
    mean = gaussian(m, few) @ gaussian(few, m, seed=1)
    moves = np.asarray(run(np.tile(mean, (K, 3, 1, 1)), rank=rank)[0][0], float)
    basis = np.linalg.qr(mean[:, :few].astype(float))[0]
    # Eight directions of length one; rounding of the columns is a thousandth of none.
    np.testing.assert_allclose(np.square(moves).sum((1, 2)), few, rtol=1e-3)
    outside = moves - basis @ (basis.T @ moves)
    assert np.abs(outside).max() < 1e-3


def test_vectors_and_rank_zero_are_mean_gradients_for_another_optimizer():
    integers = np.random.default_rng(0).integers(-32, 32, (K, T, 60))
    stream = {
        "b": integers[..., :6].astype(np.float32),
        "embedding": integers.reshape(K, T, 12, 5).astype(np.float32),
        "w": STREAM,
        "n": integers[..., 0],
    }
    ranks = lambda path, shape: 0 if path == "embedding" else 2
    moves, state = run(stream, rank=ranks)
    for name in ("b", "embedding"):
        np.testing.assert_array_equal(moves[name], [stream[name].mean(0)] * K)
    assert state.momentum["embedding"] is None
    squares = np.square(np.asarray(moves["w"], float)).sum((2, 3))
    np.testing.assert_allclose(squares, 2 * N / M, rtol=64 * EPS)
    assert (moves["n"] == stream["n"]).all()


def test_it_sends_factors_and_vectors_in_two_collectives():
    grads = {"w": [jnp.ones((M, N))] * 3, "k": jnp.ones((2, 2, 3, N)), "b": jnp.ones(N)}
    tx = dion(optax.identity(), rank=rank_fraction(0.25))
    sent = traffic(lambda g: tx.update(g, tx.init(g), g)[0], grads, workers=K)
    assert sent.bytes_always == 4 * (4 * 2 * (M + N) + N)
    assert sorted(row.wave for row in sent.rows) == [0, 1]


def test_what_is_not_finite_is_heard_and_forgotten():
    stream = STREAM.copy()
    stream[2, 0, 5, 3] = np.nan
    moves, state = run(stream)
    assert np.isnan(np.asarray(moves)[:, 0]).any(axis=(1, 2)).all()
    assert np.isfinite(moves[:, 1:]).all()
    assert np.isfinite(state.momentum).all()


def test_momentum_may_be_injected():
    make = optax.inject_hyperparams(dion, static_args=("inner", "rank"))
    tx = make(optax.identity(), rank=2, momentum=0.5)
    plain = dion(optax.identity(), rank=2, momentum=0.5)
    move = lambda tx: jax.jit(spread(lambda g: tx.update(g, tx.init(g), g)[0]))
    np.testing.assert_array_equal(move(tx)(STREAM[:, 0]), move(plain)(STREAM[:, 0]))


def test_misuse_is_refused():
    for wrong, match in [
        ({"rank": 0}, "rank 0 is below 1"),
        ({"rank": 1, "momentum": 1.5}, "momentum 1.5 is outside"),
    ]:
        with pytest.raises(ValueError, match=match):
            dion(optax.identity(), **wrong)
    with pytest.raises(ValueError, match=r"fraction 2 is outside \(0, 1\]"):
        rank_fraction(2)
