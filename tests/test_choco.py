"""Compressed gossip: the mean stays, copies agree, and the step size decides."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from lowcomm import average, choco, choco_sgd, mixing_matrix, quantize, random_k, top_k
from tests.quadratics import bend, walk

K, N, ETA = 8, 20, 0.25
RNG = np.random.default_rng(0)
X = RNG.integers(-32, 32, (K, N)).astype(np.float32)
DATA = np.ones_like(X), RNG.integers(-32, 32, (K, N)).astype(np.float32)
RING = lc.ring(K)
REST = {"data": (), "gradient": lambda x, data: 0 * x}


def train(tx, steps=8, *, x=X, data=DATA, gradient=bend, **how):
    return walk(tx, x, data, steps=steps, gradient=gradient, **how)


def largest(x, k):
    """x with all but its k largest entries zero; the first wins a tie."""
    rank = np.argsort(np.argsort(-np.abs(x), axis=-1, kind="stable"), axis=-1)
    return np.where(rank < k, x, 0)


@pytest.mark.parametrize(
    "graph", [RING, lc.exponential(K), lc.clusters([3, 5])], ids=lambda g: g.name
)
def test_one_sum_does_what_copies_of_all_neighbours_do(graph):
    tx = choco_sgd(optax.sgd(ETA), graph, top_k(0.1), step_size=0.25)
    path, state = train(tx)
    # The published loop: everyone keeps x̂ of all it hears.
    W, x, copies = mixing_matrix(graph), X.astype(float), np.zeros((K, N))
    for t in range(8):
        half = x - ETA * bend(x, DATA)
        copies = copies + largest(half - copies, 2)
        x = half + 0.25 * (W @ copies - copies)
        # Values below 2⁶, rounded some ten times a step, and errors do not grow.
        np.testing.assert_allclose(path[:, t], x, atol=8 * 10 * 2**6 * 2**-24)
        np.testing.assert_allclose(
            state.exchange.public[:, t], copies, atol=8 * 10 * 2**6 * 2**-24
        )


@pytest.mark.parametrize("step_size", [0.25, 1.0])
@pytest.mark.parametrize(
    "compressor",
    [top_k(0.1), random_k(0.25), quantize(4), lc.sign()],
    ids=["top_k", "random_k", "int4", "sign"],
)
def test_the_mean_takes_the_mean_step_whatever_is_said(compressor, step_size):
    tx = choco_sgd(optax.sgd(ETA), RING, compressor, step_size=step_size)
    path, _ = train(tx, 4)
    before = np.concatenate([X[:, None], path[:, :-1]], axis=1)
    moved = before - ETA * bend(before, (1.0, DATA[1][:, None]))
    # Three roundings of numbers below 2⁸ on each worker, divided by their number.
    np.testing.assert_allclose(path.mean(0), moved.mean(0), atol=6 * 2**8 * 2**-24)
    assert np.ptp(path[:, -1], axis=0).max() > 1


def test_the_identity_with_a_step_of_one_mixes_after_the_gradient():
    tx = choco_sgd(optax.sgd(ETA), RING, top_k(1.0), step_size=1.0)
    path, _ = train(tx, 20)
    W, x, other = mixing_matrix(RING), X.astype(float), X.astype(float)
    for t in range(20):
        x = W @ (x - ETA * bend(x, DATA))
        other = W @ other - ETA * bend(other, DATA)
        np.testing.assert_allclose(path[:, t], x, atol=1e-4)
    assert abs(x - other).max() > 0.1  # the order that combines first
    there, _ = train(lc.dpsgd(optax.sgd(ETA), RING), 20)
    np.testing.assert_allclose(path, there, atol=1e-4)


@pytest.mark.parametrize(
    ("step_size", "least", "most"),
    [
        (0.05, 1e-3, 1e-1),
        (0.1, 1e-5, 1e-3),
        (0.2, 0, 1e-5),
        (0.3, 0, 1e-5),
        (0.4, 1, 1e3),
        (1.0, 1e6, np.inf),
    ],
)
def test_workers_come_together_or_blow_up_by_the_step_size(step_size, least, most):
    # Ring of 8, the two largest of 20, 400 steps without gradients.
    tx = choco_sgd(optax.sgd(ETA), RING, top_k(0.1), step_size=step_size)
    x = np.random.default_rng(0).normal(size=(K, N)).astype(np.float32)
    path, _ = train(tx, 400, x=x, **REST)
    far = lambda x: np.linalg.norm(x - x.mean(0))
    assert least <= far(path[:, -1].astype(float)) / far(x) <= most


def test_workers_that_agree_stay_bit_for_bit():
    x = np.tile(np.random.default_rng(1).normal(size=N), (K, 1)).astype(np.float32)
    tx = choco_sgd(optax.sgd(ETA), lc.clusters([3, 5]), top_k(0.1), step_size=1.0)
    path, state = train(tx, 4, x=x, **REST)
    np.testing.assert_array_equal(path, np.repeat(x[:, None], 4, 1))
    assert not state.exchange.gap.any()


def test_what_is_not_finite_is_heard_by_neighbours_and_kept_by_no_memory():
    x = X.copy()
    x[2, 5] = np.nan
    tx = choco_sgd(optax.sgd(ETA), RING, top_k(0.1), step_size=0.25)
    path, state = train(tx, 2, x=x, **REST)
    hears = lambda t: set(np.flatnonzero(np.isnan(path[:, t, 5])))
    assert [hears(0), hears(1)] == [{1, 2, 3}, {0, 1, 2, 3, 4}]
    assert not np.isnan(np.delete(path, 5, axis=-1)).any()
    memories = state.exchange.public, state.exchange.gap
    assert all(np.isfinite(m).all() for m in memories)
    # Once the model is sound again, all is.
    last = jax.tree.map(lambda s: jnp.asarray(s[:, -1]), state)
    path, _ = train(tx, 1, state=last, **REST)
    assert np.isfinite(path).all()


@pytest.mark.parametrize(
    ("graph", "messages"), [(RING, 2), (lc.exponential(K), 3), (lc.complete(K), 7)]
)
def test_one_payload_goes_to_each_neighbour_in_one_message(graph, messages):
    tree = {"w": np.ones((4, 5), np.float32), "b": jnp.ones(6, jnp.bfloat16)}
    tree["n"] = np.arange(3)
    for compressor in (random_k(0.5), quantize(4)):
        tx = choco_sgd(optax.sgd(ETA), graph, compressor, step_size=0.25)
        sent = lc.traffic(
            lambda x, tx=tx: tx.update(x, tx.init(x), x, step=0), tree, workers=K
        )
        one = lc.payload_bytes(compressor, tree)
        assert sent.bytes_always == messages * one
        assert {row.collective for row in sent.rows} == {"permute"}
        kinds = {row.dtype for row in sent.rows}
        assert len(sent.rows) == messages * len(kinds)


def test_half_precision_workers_keep_precise_copies():
    x = jnp.asarray(X, jnp.bfloat16)
    tx = choco_sgd(optax.sgd(ETA), RING, top_k(0.25), step_size=0.25)
    path, state = train(tx, 30, x=x, **REST)
    assert path.dtype == jnp.bfloat16
    assert state.exchange.public.dtype == state.exchange.gap.dtype == np.float32
    assert np.ptp(np.float32(path[:, -1]), axis=0).mean() < np.ptp(X, axis=0).mean() / 4


def test_codes_that_others_sum_are_decoded_one_by_one():
    whole = lc.Compressor(
        encode=lambda x, keys, agreed=None: jnp.round(x).astype(jnp.int8),
        decode=lambda payload, like, keys, agreed=None: payload.astype(jnp.float32),
        linear=True,
        bound=127,
    )
    path, _ = train(choco_sgd(optax.sgd(ETA), RING, whole, step_size=1.0), 1, **REST)
    np.testing.assert_allclose(path[:, 0], mixing_matrix(RING) @ X, atol=1e-5)


NORM = lc.Compressor(
    encode=lambda x, keys, agreed=None: x / agreed,
    decode=lambda payload, like, keys, agreed=None: payload * agreed,
    statistic=lambda x: jnp.max(jnp.abs(x)),
)


def within(verb):
    return lambda: train(verb, 1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: choco(RING, top_k(0.1), step_size=0.0), "step_size 0.0 is outside"),
        (lambda: choco(RING, top_k(0.1), step_size=1.5), "step_size 1.5 is outside"),
        (lambda: choco(RING, NORM, step_size=1.0), "statistic of all workers"),
        (lambda: choco("ring", top_k(0.1), step_size=1.0), "graph must be a Graph"),
        (lambda: choco(RING, top_k, step_size=1.0), r"Call it: top_k\(...\)"),
        (
            lambda: choco(lc.one_peer_exponential(K), top_k(0.1), step_size=1.0),
            "3 rounds, and who is heard in one of them misses",
        ),
        (
            within(choco_sgd(optax.sgd(1.0), lc.ring(4), top_k(0.1), step_size=1.0)),
            "ring has 4 nodes and axis 'workers' has 8",
        ),
        (
            within(optax.chain(choco(RING, top_k(0.1), step_size=1.0))),
            "choco exchanges parameters, not gradients",
        ),
        (
            within(
                lc.rounds(
                    optax.sgd(1.0),
                    optax.sgd(1.0),
                    exchange=choco(RING, top_k(0.1), step_size=1.0),
                )
            ),
            "not displacements. Its copies follow a model: use average",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_rounds_of_local_steps_end_with_compressed_gossip():
    exchange = choco(RING, top_k(0.5), step_size=0.5)
    tx = average(optax.sgd(ETA), exchange=exchange, when=lc.every(2))
    path, _ = train(tx, 4)
    alone = X - ETA * bend(X, DATA)
    np.testing.assert_array_equal(path[:, 0], alone)
    proposed = path[:, 0::2] - ETA * bend(path[:, 0::2], (1.0, DATA[1][:, None]))
    np.testing.assert_allclose(path[:, 1::2].mean(0), proposed.mean(0), atol=1e-4)
