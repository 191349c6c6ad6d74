"""0/1 Adam: local steps, syncs and refreshes where its clocks say, and nothing lost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import (
    apply_updates,
    at_steps,
    consensus,
    doubling,
    drift_exceeds,
    every,
    thinning,
    top_k,
    zero_one_adam,
)
from lowcomm.spmd import worker_mesh
from lowcomm.workers import spread

K, N, T = 4, 24, 8
EPS = float(jnp.finfo(jnp.float32).eps)
B1, B2, TINY = 0.75, 0.875, 1e-8
GIVEN = {"b1": B1, "b2": B2, "eps": TINY}
ALL = top_k(1.0)


def gradients():
    return np.random.default_rng(0).normal(size=(K, T, N)).astype(np.float32)


def path(tx, stream, backend="vmap", start=0.0):
    """Parameters, states and the models workers stand for, ``[K, T, …]``."""

    def worker(stream):
        grads = [jax.tree.map(lambda g, t=t: g[t], stream) for t in range(T)]
        x = jax.tree.map(lambda g: jnp.full_like(g, start), grads[0])
        state, out = tx.init(x), []
        for t in range(T):
            moves, state = tx.update(grads[t], state, x, step=t)
            x = apply_updates(x, moves, state)
            out.append((x, state, consensus(state, x)))
        return jax.tree.map(lambda *xs: jnp.stack(xs), *out)

    mesh = worker_mesh(K) if backend == "mesh" else None
    return jax.tree.map(np.asarray, jax.jit(spread(worker, mesh=mesh))(stream))


def oracle(stream, rates, syncs, refreshes, decay=0.0, start=0.0):
    """The algorithm in float64, without any compression; entries wait for their v."""
    x, a = np.full((K, N), start), np.full(N, start)
    m, u, v, total, out = np.zeros((K, N)), np.zeros((K, N)), np.zeros(N), 0.0, []

    def ahead(way):
        return np.where(v == 0, 0, way / (np.sqrt(v) + TINY))

    for t, g in enumerate(stream.astype(np.float64).swapaxes(0, 1)):
        m = B1 * m + (1 - B1) * g
        u, total = u + rates[t] * m, total + rates[t]
        x = x - ahead(rates[t] * m) - rates[t] * decay * x
        if t in syncs:
            a = a - ahead(u.mean(0)) - total * decay * a
            x, m = np.tile(a, (K, 1)), np.tile(u.mean(0) / total, (K, 1))
            u, total = np.zeros((K, N)), 0.0
        if t in refreshes:
            v = B2 * v + (1 - B2) * g.mean(0) ** 2
        out.append(x)
    return np.stack(out, axis=1)


def test_with_both_clocks_always_it_is_adam_without_correction_over_an_older_moment():
    stream = gradients()
    tx = zero_one_adam(0.125, period=1, refresh=every(1), compressor=ALL, **GIVEN)
    x, _, _ = path(tx, stream)
    m, v, model = np.zeros(N), np.zeros(N), np.zeros(N)
    for t, g in enumerate(stream.astype(np.float64).mean(0)):
        m = B1 * m + (1 - B1) * g
        # At first there is no older moment, and no entry moves.
        model = model - (0.125 * m / (np.sqrt(v) + TINY) if t else 0)
        v = B2 * v + (1 - B2) * g**2
        # A small v, whose root divides, keeps its relative precision; sums of moves
        # lose no more than an EPS of the largest each step.
        scale = np.abs(model).max() + 1
        np.testing.assert_allclose(x[:, t], [model] * K, atol=16 * T * EPS * scale)


@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_local_steps_go_on_and_a_sync_starts_from_the_anchor(decay):
    stream, rates = gradients(), [0.125 / (1 + t // 3) for t in range(T)]
    tx = zero_one_adam(
        lambda t: 0.125 / (1 + t // 3),
        period=3,
        refresh=at_steps([0, 1, 4]),
        weight_decay=decay,
        compressor=ALL,
        **GIVEN,
    )
    x, state, model = path(tx, stream, start=1.0)
    expected = oracle(stream, rates, {2, 5}, {0, 1, 4}, decay, start=1.0)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(x, expected, atol=32 * T * EPS * scale)
    assert state.synced[0].tolist() == [t in (2, 5) for t in range(T)]
    np.testing.assert_array_equal(model, state.anchor)
    assert (np.ptp(x[:, 1], axis=0) > 0).all()  # workers part between syncs


@pytest.mark.parametrize("backend", ["vmap", "mesh"])
def test_signs_lose_no_momentum_and_all_hold_one_anchor(backend):
    stream = gradients()
    tx = zero_one_adam(0.125, period=2, refresh=every(1), **GIVEN)
    x, state, _ = path(tx, stream, backend)
    for same in (state.anchor, state.nu, x[:, 1::2], state.mu[:, 1::2]):
        assert (same == same[:1]).all()
    assert not state.summed[:, 1::2].any()
    # What all heard at a sync is the momentum they hold then, times two rates.
    mu = state.mu.astype(np.float64)
    heard = 0.25 * mu[0, 1::2].sum(0)
    first = np.concatenate([np.zeros((K, 1, N)), mu[:, 1:-1:2]], axis=1)
    one = B1 * first + (1 - B1) * stream[:, ::2]
    two = B1 * one + (1 - B1) * stream[:, 1::2]
    begun = 0.125 * (one + two).sum(1).mean(0)
    left = state.exchange.error.mean(0)[-1] + state.exchange.shard[:, -1].ravel()
    np.testing.assert_allclose(heard + left, begun, atol=32 * T * EPS)


def test_a_rate_of_zero_at_first_hides_no_momentum():
    stream = gradients()
    rate = optax.linear_schedule(0.0, 0.5, 4)
    tx = zero_one_adam(rate, period=1, refresh=every(1), compressor=ALL, **GIVEN)
    x, state, _ = path(tx, stream)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((x, state)))
    rates = [float(rate(t)) for t in range(1, T)]
    # The momenta of step 0 are the workers' own, and agreed on at the next one.
    m = (1 - B1) * stream[:, 0].mean(0)
    m = B1 * m + (1 - B1) * stream[:, 1].mean(0)
    np.testing.assert_allclose(state.mu[:, 1], [m] * K, atol=8 * EPS)
    assert rates[0] > 0


def test_a_leaf_of_small_gradients_moves_as_if_they_were_large():
    # A power of two scales all that is summed and its root, and no ε is in the way.
    tx = zero_one_adam(0.125, period=2, refresh=every(1), b1=B1, b2=B2, eps=0.0)
    large = {"w": gradients(), "b": gradients()[..., 3:8]}
    small = large | {"b": large["b"] * np.float32(2.0**-10)}
    jax.tree.map(np.testing.assert_array_equal, path(tx, small)[0], path(tx, large)[0])


def test_an_empty_leaf_in_half_precision_rides_along():
    tx = zero_one_adam(0.125, period=2)
    x = {"w": jnp.ones((K, 3)), "e": jnp.zeros((K, 0, 3), jnp.bfloat16)}
    step = lambda x, t: tx.update(x, tx.init(x), x, step=t)[0]
    moves = jax.jit(spread(step, in_axes=(0, None)))(x, jnp.int32(1))
    assert moves["e"].shape == (K, 0, 3)


def test_zero_gradients_change_nothing():
    tx = zero_one_adam(0.5, period=2, refresh=every(1))
    x, _, _ = path(tx, np.zeros((K, T, N), np.float32), start=0.3)
    assert (x == np.float32(0.3)).all()


@pytest.mark.parametrize("repeats", [1, 3, 16])
def test_refreshes_thin_out_as_the_paper_s_recursion_does(repeats):
    times, number = [0], 0
    while times[-1] < 500:
        times.append(times[-1] + 2 ** (number // repeats))
        number += 1
    fires = lambda t: thinning(repeats).fire((), step=t)[0]
    assert [t for t in range(500) if fires(t)] == [t for t in times if t < 500]
    traced = jax.vmap(fires)(jnp.arange(500))
    assert np.flatnonzero(traced).tolist() == [t for t in times if t < 500]


def test_rounds_double_up_to_the_longest():
    fires = lambda t: doubling(100, every=64, longest=8).fire((), step=t)[0]
    times = np.flatnonzero([fires(t) for t in range(600)])
    gaps = np.diff(times)
    assert (times[:100] == np.arange(100)).all()
    assert set(gaps[times[1:] < 164]) == {1, 2}
    assert set(gaps[times[1:] > 100 + 3 * 64]) == {8}
    assert np.flatnonzero(jax.vmap(fires)(jnp.arange(600))).tolist() == times.tolist()
    never = doubling(0, every=1, longest=1)
    assert all(never.fire((), step=t)[0] for t in range(4))


def test_clocks_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="period must be a clock"):
        zero_one_adam(0.1, period=drift_exceeds(1.0))
    with pytest.raises(ValueError, match="repeats 0"):
        thinning(0)
    for wrong in ({"every": 0}, {"every": 2, "longest": 6}):
        with pytest.raises(ValueError, match="longest a power of two"):
            doubling(4, **wrong)
