"""Momentum that is masked where it was sent, and exchanges that share a memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from lowcomm import dgc, error_feedback, masked_feedback, random_k, staged, top_k
from lowcomm.algorithms.sparse import WARMUP
from tests.quadratics import walk
from tests.test_feedback import K, N, T, integers, largest, listen

HALF = optax.trace(0.5)
NESTEROV = optax.trace(0.5, nesterov=True)
on_both = pytest.mark.parametrize("backend", ["vmap", "mesh"])


def published(stream, k, beta, nesterov=False):
    """The loop of the released code, in numpy: what was sent, and the memories."""
    u, v, sent = 0 * stream[:, 0], 0 * stream[:, 0], []
    for t in range(stream.shape[1]):
        g = stream[:, t]
        u = beta * (u + g) if nesterov else beta * u + g
        v = v + u + g if nesterov else v + u
        said = largest(v, k)
        u, v = np.where(said, 0, u), np.where(said, 0, v)
        sent.append(said)
    return np.stack(sent, 1), u, v


@on_both
@pytest.mark.parametrize("nesterov", [False, True])
def test_masked_feedback_of_top_k_is_the_loop_of_the_paper(backend, nesterov):
    stream = integers(K, T, N)
    momentum = NESTEROV if nesterov else HALF
    heard, state = listen(masked_feedback(top_k(0.25), momentum), stream, backend)
    sent, u, v = published(stream, 2, 0.5, nesterov)
    np.testing.assert_array_equal(heard, np.tile(sent.mean(0), (K, 1, 1)))
    np.testing.assert_array_equal(state.unsent[:, -1], v)
    # optax keeps u/β of the Nesterov form.
    trace = state.momentum.trace[:, -1]
    np.testing.assert_array_equal(trace * (0.5 if nesterov else 1), u)


@pytest.mark.parametrize("compressor", [top_k(0.25), random_k(0.5)])
@pytest.mark.parametrize("momentum", [HALF, NESTEROV], ids=["plain", "nesterov"])
def test_what_was_sent_and_what_waits_is_all_momentum_that_was_formed(
    compressor, momentum
):
    stream = integers(K, T, N)
    heard, state = listen(masked_feedback(compressor, momentum), stream)
    # u at each step, from the memory that the step before left.
    before = np.concatenate(
        [0 * stream[:, :1], np.asarray(state.momentum.trace)[:, :-1]], axis=1
    )
    u = stream + 0.5 * before
    formed = stream + 0.5 * u if momentum is NESTEROV else u
    total = np.asarray(heard)[0].sum(0) + np.asarray(state.unsent)[:, -1].mean(0)
    np.testing.assert_array_equal(total, formed.mean(0).sum(0))


def test_everything_sent_is_sgd_and_nesterov_scales_it():
    # The momentum is wiped at each step; without the mask it goes on.
    ones = np.ones((K, 3, N), np.float32)
    heard = lambda tx: np.asarray(listen(tx, ones)[0])[0, :, 0]
    nine = optax.trace(0.9)
    near = lambda x: pytest.approx(x, rel=1e-6)
    assert heard(masked_feedback(top_k(1.0), nine)) == near([1, 1, 1])
    fast = optax.trace(0.9, nesterov=True)
    assert heard(masked_feedback(top_k(1.0), fast)) == near([1.9, 1.9, 1.9])
    unmasked = optax.chain(nine, error_feedback(top_k(1.0)))
    assert heard(unmasked) == near([1, 1.9, 2.71])


def test_a_step_count_of_the_momentum_is_not_wiped():
    stream = integers(K, T, N)
    tx = masked_feedback(top_k(1.0), optax.ema(0.5, debias=False))
    heard, state = listen(tx, stream)
    np.testing.assert_array_equal(heard[0], stream.mean(0) / 2)
    np.testing.assert_array_equal(state.momentum.count[0], np.arange(1, T + 1))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_heard_once_and_forgotten(bad):
    stream = integers(K, T, N)
    stream[2, 0, 5] = bad
    heard, state = listen(masked_feedback(top_k(0.25), HALF), stream)
    assert not np.isfinite(heard[:, 0, 5]).any()
    assert np.isfinite(heard[:, 1:]).all()
    assert np.isfinite(heard[:, 0, [0, 1, 2, 3, 4, 6, 7]]).all()
    for memory in jax.tree.leaves(state):
        assert np.isfinite(memory).all()


def test_half_precision_gradients_gather_in_float32():
    steps = 300  # in bfloat16 32 + 1/8 is 32
    stream = jnp.tile(jnp.array([512, 0.125], jnp.bfloat16), (1, steps, 1))
    heard, state = listen(masked_feedback(top_k(0.5), optax.trace(0.0)), stream)
    assert heard.dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(np.float32)}
    np.testing.assert_array_equal(state.unsent[0, -1], [0, 0.125 * steps])


# Stages


@on_both
def test_a_memory_is_kept_from_stage_to_stage(backend):
    stream = integers(K, T, N)
    tx = staged([error_feedback(top_k(f)) for f in (1.0, 0.25, 0.5)], starts=[1, 3])
    heard, state = listen(tx, stream, backend)
    e = np.zeros((K, N))
    for t, k in enumerate([8, 2, 2, 4]):
        said = largest(e + stream[:, t], k)
        e = e + stream[:, t] - said
        np.testing.assert_array_equal(heard[0, t], said.mean(0))
        np.testing.assert_array_equal(state.error[:, t], e)


def test_the_density_falls_with_the_clock_and_so_do_the_bytes():
    start = np.zeros(4096, np.float32)
    tx = dgc(optax.sgd(0.5), fraction=0.001, warmup=2)
    step = lambda g, t, tx=tx: tx.update(g, tx.init(g), g, step=t)[0]
    densities = [f for f in (*WARMUP, 0.001) for _ in range(2)]
    sent = [lc.payload_bytes(top_k(f), start) for f in densities]
    known = [lc.traffic(lambda g, t=t: step(g, t), start, workers=2) for t in range(10)]
    assert [traced.bytes_always for traced in known] == sent
    assert sent[0] > 100 * sent[-1]
    # With an unknown step there is one conditional, of which one branch is taken.
    traced = lc.traffic(step, start, np.int32(0), workers=2)
    assert (traced.bytes_always, traced.bytes_max) == (0, sent[0])
    # Densities that are not above the last one are left out.
    settled = dgc(optax.sgd(0.5), fraction=0.25, warmup=2)
    traced = lc.traffic(lambda g, t: step(g, t, settled), start, 0, workers=2)
    assert traced.bytes_always == sent[0]


@pytest.mark.parametrize("number", [3, np.int32(3)])
def test_a_stage_begins_at_its_start_whether_the_step_is_known_or_not(number):
    tx = staged([error_feedback(top_k(f)) for f in (0.25, 0.5, 1.0)], starts=[3, 4])
    g = integers(K, N)
    worker = lambda g, t: tx.update(g, tx.init(g), step=t)[0]
    for step, k in [(number - 1, 2), (number, 4), (number + 1, 8)]:
        heard = lc.spread(worker, in_axes=(0, None))(g, step)
        np.testing.assert_array_equal(heard[0], largest(g, k).mean(0))


# The method


def test_dgc_is_the_exchange_between_a_clip_and_the_inner_optimizer():
    x = np.zeros((4, N), np.float32)
    data = integers(4, N)
    rate = 0.25
    tx = dgc(optax.sgd(rate), fraction=0.25, momentum=0.5, clip=100.0)
    path, _ = walk(tx, x, data, steps=6, gradient=lambda x, c: x - c)
    u, v, here = np.zeros((4, N)), np.zeros((4, N)), np.zeros(N)
    clipped = 0
    for t in range(6):
        g = here - data
        norm = np.linalg.norm(g, axis=1, keepdims=True)
        clipped += (norm > 50).sum()  # 100 / √4
        g = np.where(norm > 50, g * (50 / norm), g)
        u = 0.5 * u + g
        v = v + u
        said = largest(v, 2)
        u, v = np.where(said, 0, u), np.where(said, 0, v)
        here = here - rate * said.mean(0)
        np.testing.assert_allclose(path[:, t], np.tile(here, (4, 1)), atol=1e-4)
    assert 0 < clipped < 24


def test_a_gradient_that_is_not_finite_spoils_no_more_than_where_it_is():
    g = integers(2, N) * 100
    g[1, 3] = np.nan
    tx = dgc(optax.sgd(1.0), fraction=1.0, clip=1.0)
    moves = lc.spread(lambda g: tx.update(g, tx.init(g), g, step=0)[0])(g)
    assert np.isnan(moves[:, 3]).all()
    assert np.isnan(moves).sum() == 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: dgc(optax.sgd(1.0), clip=0.0), "clip 0.0 must be above 0"),
        (lambda: dgc(optax.sgd(1.0), warmup=-1), "warmup -1 is a number of steps"),
        (lambda: dgc(optax.sgd(1.0), warmup=1.5), "warmup 1.5 must be a whole number"),
        (lambda: dgc(optax.sgd(1.0), fraction=2.0), "fraction=2.0"),
        (lambda: masked_feedback(top_k(0.5), 0.9), "momentum must be a Gradient"),
        (lambda: masked_feedback(top_k, HALF), r"Call it: top_k\(...\)"),
        (lambda: staged([lc.mean()], [3]), "1 exchanges need 0 growing starts"),
        (lambda: staged([lc.mean()] * 3, [3, 3]), "3 exchanges need 2 growing starts"),
        (lambda: staged([lc.mean()] * 2, [-1]), r"not \[-1\]"),
        (lambda: staged([], []), "0 exchanges need 0"),
        (
            lambda: staged([error_feedback(top_k(0.5)), lc.mean()], [1]).init(
                np.ones(2)
            ),
            r"exchanges\[1\] keeps another state than exchanges\[0\]",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
