"""1-bit Adam: Adam as long as it warms up, signs over a frozen moment after that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import one_bit_adam, sign, top_k
from lowcomm.ledger import traffic
from lowcomm.row_means import two_stage_bytes
from lowcomm.spmd import worker_mesh
from lowcomm.workers import spread

K, N, T = 4, 24, 6
EPS = float(jnp.finfo(jnp.float32).eps)
B1, B2, TINY = 0.75, 0.875, 1e-8  # binary, but for the last
GIVEN = {"b1": B1, "b2": B2, "eps": TINY}
ALL = top_k(1.0)


def gradients(seed=0):
    return np.random.default_rng(seed).normal(size=(K, T, N)).astype(np.float32)


def path(tx, stream, backend="vmap"):
    """The updates and states of stacked gradients ``[K, T, …]``."""

    def worker(stream):
        grads = [jax.tree.map(lambda g, t=t: g[t], stream) for t in range(T)]
        state, out = tx.init(grads[0]), []
        for t in range(T):
            moves, state = tx.update(grads[t], state, grads[0], step=t)
            out.append((moves, state))
        return jax.tree.map(lambda *xs: jnp.stack(xs), *out)

    mesh = worker_mesh(K) if backend == "mesh" else None
    moves, state = jax.jit(spread(worker, mesh=mesh))(stream)
    return jax.tree.map(np.asarray, (moves, state[0]))


def oracle(stream, warmup):
    """Adam on mean gradients in float64, whose second moment stops after a while."""
    m, v, out = np.zeros(N), np.zeros(N), []
    for t, g in enumerate(stream.astype(np.float64).mean(0)):
        m = B1 * m + (1 - B1) * g
        if t < warmup:
            v = B2 * v + (1 - B2) * g**2
            size = v / (1 - B2 ** (t + 1))
        out.append(-m / (1 - B1 ** (t + 1)) / (np.sqrt(size) + TINY))
    return np.array(out)


def test_a_warmup_that_never_ends_is_adam_on_the_mean_gradient():
    stream = gradients()
    moves, _ = path(one_bit_adam(optax.sgd(1.0), warmup=T, **GIVEN), stream)
    adam = optax.chain(optax.scale_by_adam(**GIVEN), optax.sgd(1.0))
    state = adam.init(jnp.zeros(N))
    for t in range(T):
        expected, state = adam.update(jnp.asarray(stream[:, t].mean(0)), state)
        # The mean may be rounded otherwise, by EPS, and a step adds no more than ten.
        np.testing.assert_allclose(moves[:, t], [expected] * K, rtol=16 * T * EPS)


def test_after_it_the_second_moment_stays_and_the_first_goes_on():
    stream = gradients()
    tx = one_bit_adam(optax.sgd(1.0), warmup=2, compressor=ALL, **GIVEN)
    moves, state = path(tx, stream)
    assert (state.nu[:, 1:] == state.nu[:, 1:2]).all()
    # Cancellation in the sums of a momentum is absolute, hence atol.
    expected = [oracle(stream, 2)] * K
    np.testing.assert_allclose(moves, expected, rtol=16 * T * EPS, atol=16 * T * EPS)


@pytest.mark.parametrize("backend", ["vmap", "mesh"])
def test_no_momentum_is_lost_and_all_workers_hold_the_same(backend):
    warmup, stream = 2, gradients()
    tx = one_bit_adam(optax.sgd(1.0), warmup=warmup, **GIVEN)
    moves, state = path(tx, stream, backend)
    for x in (moves, state.mu, state.nu):
        assert (x == x[:1]).all()
    assert not state.exchange.error[:, :warmup].any()
    # Every worker goes on from the momentum that all agreed on.
    mu = state.mu[0].astype(np.float64)
    begun = B1 * mu[warmup - 1 : -1] + (1 - B1) * stream[:, warmup:].mean(0)
    left = state.exchange.error.mean(0)[-1] + state.exchange.shard[:, -1].ravel()
    heard = mu[warmup:].sum(0) + left
    np.testing.assert_allclose(heard, begun.sum(0), atol=32 * T * EPS * 4)


def test_a_leaf_of_small_gradients_moves_as_if_they_were_large():
    # A power of two scales all that is summed and its root, and no ε is in the way.
    tx = one_bit_adam(optax.sgd(1.0), warmup=2, b1=B1, b2=B2, eps=0.0)
    large = {"w": gradients(), "b": gradients(seed=1)[..., :5]}
    small = large | {"b": large["b"] * np.float32(2.0**-10)}
    moves, _ = path(tx, large)
    jax.tree.map(np.testing.assert_array_equal, path(tx, small)[0], moves)


def test_what_had_no_gradient_in_the_warmup_never_moves():
    stream = gradients()
    stream[:, :2, 5:9] = 0
    tx = one_bit_adam(optax.sgd(1.0), warmup=2, **GIVEN)
    moves, state = path(tx, stream)
    assert not moves[..., 5:9].any()
    assert not state.mu[..., 5:9].any()
    assert (np.delete(moves, slice(5, 9), axis=-1) != 0).all()


def test_frozen_leaves_stay_and_cost_nothing():
    tx = one_bit_adam(optax.sgd(1.0), warmup=1)
    mask = {"frozen": False, "trained": True}
    tx = optax.masked(tx, mask, mask_compatible_extra_args=True)
    tree = {"frozen": jnp.ones(50), "trained": jnp.ones(64)}
    worker = lambda x, t: tx.update(x, tx.init(x), x, step=t)[0]
    for t, sent in [(0, 4 * 64), (1, two_stage_bytes(sign(), jnp.ones(64), workers=K))]:
        step = traffic(lambda x, t=t: worker(x, t), tree, workers=K)
        assert step.bytes_always == step.bytes_max == sent
    stacked = {"frozen": jnp.ones((K, 50)), "trained": jnp.ones((K, 64))}
    moves = spread(lambda x: worker(x, 1)["frozen"])(stacked)
    assert (moves == 1).all()  # handed on as they came


def test_what_it_cannot_do_is_refused():
    for warmup in (0, -1, 1.5):
        with pytest.raises(ValueError, match="warmup"):
            one_bit_adam(optax.sgd(1.0), warmup=warmup)
    tx = one_bit_adam(optax.sgd(1.0), warmup=1)
    with pytest.raises(ValueError, match="takes real numbers"):
        tx.init(jnp.zeros(2, jnp.complex64))
    with pytest.raises(ValueError, match="needs step="):
        spread(lambda x: tx.update(x, tx.init(x), x)[0])(jnp.ones((K, 4)))
