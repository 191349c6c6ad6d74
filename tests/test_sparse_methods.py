"""Methods that send some entries: the loops of their papers, and what they conserve."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lowcomm as lc
from lowcomm import quantize, random_k, top_k
from lowcomm.algorithms.sparse_rounds import TAILS
from tests.quadratics import bend, walk

K, T = 4, 6
EPS = float(jnp.finfo(jnp.float32).eps)
RNG = np.random.default_rng(0)
RATE = 0.25
SGD = optax.sgd(RATE)


def integers(*shape, top=32):
    return RNG.integers(-top, top, shape).astype(np.float32)


@functools.cache
def walker(tx):
    def worker(stream):
        def body(carry, now):
            x, state = carry
            updates, state = tx.update(now[1], state, x, step=now[0])
            x = optax.apply_updates(x, updates)
            return (x, state), (x, state)

        x = jax.tree.map(lambda g: 0 * g[0], stream)
        steps = jnp.arange(len(jax.tree.leaves(stream)[0]))
        return lax.scan(body, (x, tx.init(x)), (steps, stream))[1]

    return jax.jit(lc.spread(worker))


def follow(tx, stream):
    """The path from zero, and the states, for gradients that do not depend on it."""
    return jax.tree.map(np.asarray, walker(tx)(stream))


def error_of(state):
    return optax.tree.get(state, "error")


def largest(x, k):
    """x with all but its k largest entries zero; the first wins a tie."""
    rank = np.argsort(np.argsort(-np.abs(x), axis=-1, kind="stable"), axis=-1)
    return np.where(rank < k, x, 0)


STREAM = integers(K, T, 8)

# EF21 and DIANA


def test_ef21_of_the_identity_is_the_inner_optimizer_on_the_mean_gradient():
    adam = optax.adam(RATE)
    here, _ = follow(lc.ef21(adam, top_k(1.0)), STREAM)
    there, _ = follow(lc.data_parallel(adam), STREAM)
    np.testing.assert_allclose(here, there, rtol=0, atol=1e-6)


def test_ef21_knows_a_fixed_gradient_when_all_of_it_was_said():
    g = RNG.normal(size=(K, 50)).astype(np.float32)
    stream = np.repeat(g[:, None], 11, axis=1)
    _, state = follow(lc.ef21(SGD, top_k(0.1)), stream)
    heard = optax.tree.get(state, "heard")[0]
    far = np.linalg.norm(heard - g.mean(0), axis=1) / np.linalg.norm(g.mean(0))
    # Five of fifty a round: nine leave something, ten nothing but the rounding of sums.
    assert (np.diff(far[:10]) < 0).all()
    assert far[8] > 1e-4
    assert far[9] < 4 * EPS


def test_ef21_with_momentum_compresses_an_average_of_the_gradients():
    tx = lc.ef21(SGD, top_k(0.25), momentum=0.75)
    path, state = follow(tx, STREAM)
    v, h, x = np.zeros((K, 8)), np.zeros((K, 8)), np.zeros(8)
    for t in range(T):
        v = 0.75 * v + 0.25 * STREAM[:, t]
        h = h + largest(v - h, 2)
        x = x - RATE * h.mean(0)
        np.testing.assert_array_equal(optax.tree.get(state, "said")[:, t], h)
        np.testing.assert_array_equal(path[:, t], np.tile(x, (K, 1)))
    plain, _ = follow(lc.ef21(SGD, top_k(0.25), momentum=0.0), STREAM)
    assert (plain != path).any()


def test_the_average_of_half_precision_gradients_is_formed_in_float32():
    stream = jnp.tile(jnp.array([1.0, 256.0], jnp.bfloat16), (1, 40, 1))
    _, state = follow(lc.ef21(SGD, top_k(1.0), momentum=0.99), stream)
    ema = optax.tree.get(state, "ema")
    assert ema.dtype == np.float32
    np.testing.assert_allclose(ema[0, -1, 0], 1 - 0.99**40, rtol=1e-5)


def test_only_differences_leave_no_floor_where_workers_differ():
    # The largest of ten entries a step; each worker has curvatures and an optimum.
    a = RNG.uniform(0.2, 2.0, size=(K, 10)).astype(np.float32)
    c = RNG.normal(size=(K, 10)).astype(np.float32)
    best = (a * c).sum(0) / a.sum(0)
    sgd = optax.sgd(0.05)

    def floor(tx):
        x = np.zeros((K, 10), np.float32)
        path, _ = walk(tx, x, (a, c), steps=2000, gradient=bend)
        return np.linalg.norm(path[0, -1] - best)

    silent = optax.chain(lc.compressed_mean(top_k(0.1)), sgd)
    remembered = floor(lc.top_k_sgd(sgd, fraction=0.1))
    assert floor(silent) > 2 * remembered > 0.02
    # The step is an ulp of values near 1.
    assert floor(lc.ef21(sgd, top_k(0.1))) < 1e-5


def test_diana_keeps_as_much_as_the_declared_variance_allows():
    stream = [integers(K, 1, 8), integers(K, 1, 12)]
    few = random_k(0.25, unbiased=True)
    _, state = follow(lc.diana(SGD, few), stream)
    heard = follow(optax.chain(lc.compressed_mean(few), SGD), stream)[0]
    for n, mean, x in zip((8, 12), optax.tree.get(state, "heard"), heard, strict=True):
        kept = 1 / (1 + few.law.omega(n))
        assert kept == 0.25
        np.testing.assert_array_equal(mean * -RATE, kept * x)


def test_diana_settles_where_compressed_gradients_do_not():
    # At the optimum of the mean each worker's gradient goes on being rounded at random.
    data = np.ones((K, 8), np.float32), integers(K, 8, top=4)
    x, sgd, coarse = 0 * data[1], optax.sgd(0.125), quantize(2, block=8)
    end = lambda tx: walk(tx, x, data, steps=200)[0][0, -20:]
    far = lambda tx: abs(end(tx) - data[1].mean(0)).max()
    assert far(lc.diana(sgd, coarse)) < 1e-4
    assert far(optax.chain(lc.compressed_mean(coarse), sgd)) > 0.1


# DeMo


def cosines(n):
    """The orthonormal DCT-II, a row for each frequency."""
    d = np.cos(np.pi / n * np.outer(np.arange(n), np.arange(n) + 0.5))
    return d / np.linalg.norm(d, axis=1, keepdims=True)


def test_demo_is_the_loop_of_the_paper_with_the_mean_of_all_workers():
    stream = RNG.normal(size=(K, T, 8, 8)).astype(np.float32)
    tx = lc.demo(SGD, decay=0.5, k=8, chunk=8)
    path, state = follow(tx, stream)
    d, m, x = cosines(8), np.zeros((K, 8, 8)), np.zeros((8, 8))
    for t in range(T):
        m = 0.5 * m + stream[:, t]
        said = largest((d @ m @ d.T).reshape(K, 64), 8).reshape(K, 8, 8)
        said = d.T @ said @ d
        m = m - said
        x = x - RATE * np.sign(said.mean(0))
        # 8 · 8 products and sums of numbers below 2³, twice a step.
        np.testing.assert_allclose(error_of(state)[:, t], m, atol=T * 2**7 * EPS)
        np.testing.assert_array_equal(path[:, t], np.tile(x, (K, 1, 1)))
    assert (np.ptp(error_of(state)[:, -1], axis=0) > 0.1).any()  # while x is the same


def test_what_demo_said_and_what_it_keeps_is_its_momentum():
    stream = RNG.normal(size=(K, T, 8, 8)).astype(np.float32)
    exchange = lc.error_feedback(lc.dct_top_k(8, chunk=8), decay=0.5)
    path, state = follow(optax.chain(exchange, optax.sgd(1.0)), stream)
    said = -np.diff(path[0].astype(float), axis=0, prepend=0 * path[0, :1])
    ages = 0.5 ** np.arange(T)[::-1]
    total = error_of(state)[:, -1].mean(0) + np.tensordot(ages, said, 1)
    expected = np.tensordot(ages, stream.mean(0), 1)
    np.testing.assert_allclose(total, expected, atol=T * 2**7 * EPS)


def test_demo_that_says_everything_is_sign_sgd_of_the_mean_gradient():
    stream = integers(K, T, 8, 8) + 1 / 8  # no mean of four is zero
    path, state = follow(lc.demo(SGD, k=64, chunk=8), stream)
    steps = -RATE * np.cumsum(np.sign(stream.mean(0)), axis=0)
    np.testing.assert_array_equal(path[0], steps)
    assert abs(error_of(state)).max() < 2**6 * 2**7 * EPS


# LAGS-SGD

LAYERS = {"a": {"w": integers(K, T, 4, 4), "b": integers(K, T)}, "c": STREAM}
HALVING = optax.piecewise_constant_schedule(0.5, {2: 0.5, 4: 0.25})


def by_leaf(f, *trees):
    return jax.tree.leaves(jax.tree.map(f, *trees))


@pytest.mark.parametrize("entries", [1.0, {"a/w": 99, "a/b": 1, "c": 8}])
def test_all_entries_of_all_layers_are_dense_sgd_and_leave_nothing(entries):
    path, state = follow(lc.lags_sgd(SGD, entries, whole=0), LAYERS)
    there, _ = follow(lc.data_parallel(SGD), LAYERS)
    by_leaf(np.testing.assert_array_equal, path, there)
    assert not any(by_leaf(np.any, error_of(state)))


def test_one_layer_is_top_k_sgd_at_a_constant_rate():
    path, _ = follow(lc.lags_sgd(SGD, 0.25, whole=0), STREAM)
    there, _ = follow(lc.top_k_sgd(SGD, fraction=0.25), STREAM)
    np.testing.assert_array_equal(path, there)


@pytest.mark.parametrize("entries", [0.25, {"a/w": 1, "a/b": 1, "c": 3}])
def test_nothing_is_lost_where_the_rate_decays(entries):
    path, state = follow(lc.lags_sgd(optax.sgd(HALVING), entries, whole=0), LAYERS)
    rates = np.array([float(HALVING(t)) for t in range(T)])

    def conserved(x, e, g):
        rate = rates.reshape(1, T, *[1] * (g.ndim - 2))
        due = -np.cumsum((rate * g).mean(0, keepdims=True), axis=1)
        # At every step: x − mean e moves by the mean of all steps.
        np.testing.assert_array_equal(x + e.mean(0), np.repeat(due, K, 0))
        return e.any()

    assert any(by_leaf(conserved, path, error_of(state), LAYERS))
    # In units of gradients what waits is sent at another rate than it came at.
    tx = lc.top_k_sgd(optax.sgd(HALVING), fraction=0.25)
    x, late = follow(tx, STREAM)
    due = -(rates[:, None] * STREAM.mean(0)).sum(0)
    for rate in rates:
        assert abs(x[0, -1] - rate * error_of(late)[:, -1].mean(0) - due).max() > 0.1


def test_what_is_sent_is_not_kept_and_the_rest_is_bounded():
    path, state = follow(lc.lags_sgd(SGD, {"c": 3}, whole=0), {"c": STREAM[:1]})
    e = error_of(state)["c"]
    sent = np.diff(path["c"], axis=1, prepend=0 * path["c"][:, :1])
    assert ((sent != 0).sum(-1) == 3).all()
    assert not (sent * e).any()
    kept, whole = np.square(e).sum(-1), np.square(sent + e).sum(-1)
    assert (kept <= (1 - 3 / 8) * whole).all()


def test_small_leaves_travel_whole_and_every_other_one_sends_something():
    tree = {"w": np.ones((40, 50), np.float32), "v": np.ones(300, np.float32)}
    tree |= {"b": np.ones(50, np.float32), "s": np.float32(1), "n": np.arange(4)}
    tx = lc.lags_sgd(SGD, 0.001)
    sent = lc.traffic(lambda g: tx.update(g, tx.init(g), g, step=0), tree, workers=K)
    chosen = [lc.payload_bytes(top_k(0.001), tree[name]) for name in "wv"]
    assert sent.bytes_always == sum(chosen) + 4 * (50 + 1)
    assert min(chosen) > 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: lc.lags_sgd(SGD, 0.0), "fraction=0.0"),
        (lambda: lc.lags_sgd(SGD, {"c": 0}), r"entries\['c'\] = 0: send 1 or more"),
        (lambda: lc.lags_sgd(SGD, {"c": 0.5}), r"entries\['c'\] 0.5 must be a whole"),
        (
            lambda: follow(lc.lags_sgd(SGD, {"d": 3}, whole=8), {"c": STREAM}),
            "leaf 'c' has 8 entries, and there is no number .* 'd'",
        ),
        (lambda: lc.ef21(SGD, top_k(0.5), momentum=1.0), "momentum 1.0 is outside"),
        (lambda: lc.diana(SGD, top_k(0.5)), "needs rate=.* use ef21"),
        (lambda: lc.diana(SGD, top_k(0.5), rate=2.0), "rate 2.0 is outside"),
        (lambda: lc.demo(SGD, k=0), "k=0"),
        (lambda: lc.demo(SGD, decay=2.0), "decay 2.0 is outside"),
        (lambda: lc.sparse_loco(SGD, k=0), "k = 0 of blocks of 4096"),
        (lambda: lc.sparse_loco(SGD, k=9, block=8), "k = 9 of blocks of 8"),
        (lambda: lc.qsparse_local_sgd(SGD, fraction=2.0), "fraction=2.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


# Rounds


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("values", [top_k(1.0), None], ids=["exact", "two bits"])
def test_what_sparse_loco_sent_and_what_it_keeps_is_what_was_moved(decay, values):
    tx = lc.sparse_loco(SGD, period=1, k=2, block=4, decay=decay, values=values)
    path, state = follow(tx, STREAM)
    e = error_of(state).mean(0)
    total = -state.anchor[0, -1] + e[-1] + (1 - decay) * e[:-1].sum(0)
    due = RATE * STREAM.mean(0).sum(0)
    # Quantized, each step rounds three numbers below 2⁶.
    bound = 0 if values else T * 3 * 2**6 * EPS
    np.testing.assert_allclose(total, due, rtol=0, atol=bound)
    assert e.any()
    assert (state.anchor == state.anchor[:1]).all()
    np.testing.assert_allclose(path, state.anchor, atol=2**6 * EPS)


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_sparse_loco_that_says_everything_is_parameter_averaging(decay):
    tx = lc.sparse_loco(
        SGD, period=2, k=8, block=8, decay=decay, values=top_k(1.0), outer_lr=1.0
    )
    path, state = follow(tx, STREAM)
    there, _ = follow(lc.local_sgd(SGD, period=2), STREAM)
    np.testing.assert_array_equal(path, there)
    assert not error_of(state).any()


def test_two_bits_miss_a_hundredth_of_the_tails_and_four_bytes_are_saved():
    x = RNG.normal(size=(64, 4096)).astype(np.float32)
    values = lc.codebook(TAILS, relative_to="rms", block=64)
    sent = jnp.asarray(np.sort(np.abs(x))[:, -64:]).ravel()
    miss = values.decode(values.encode(sent, None), sent, None) - sent
    assert np.square(miss).sum() < 0.01 * np.square(sent).sum()
    few, full = top_k(1 / 64, block=4096, values=values), top_k(1 / 64, block=4096)
    saved = lc.payload_bytes(full, x) - lc.payload_bytes(few, x)
    assert saved == 64 * (64 * 4 - 64 // 4 - 4)
    tx = lc.sparse_loco(SGD, period=3)
    step = lambda t: lambda x: tx.update(x, tx.init(x), x, step=t)
    bytes_at = [lc.traffic(step(t), x, workers=K).bytes_always for t in range(3)]
    assert bytes_at == [0, 0, lc.payload_bytes(few, x)]


def test_qsparse_at_every_step_without_a_quantizer_is_top_k_sgd():
    path, state = follow(lc.qsparse_local_sgd(SGD, period=1, fraction=0.25), STREAM)
    there, late = follow(lc.top_k_sgd(SGD, fraction=0.25), STREAM)
    np.testing.assert_array_equal(path, there)
    np.testing.assert_array_equal(error_of(state), RATE * error_of(late))


def test_qsparse_quantizes_the_largest_of_what_was_moved_in_a_round():
    tx = lc.qsparse_local_sgd(SGD, period=2, fraction=0.25, values=lc.sign())
    path, state = follow(tx, STREAM)
    e, a = np.zeros((K, 8)), np.zeros(8)
    for t in range(1, T, 2):
        p = e + RATE * (STREAM[:, t - 1] + STREAM[:, t])
        q = largest(p, 2)
        q = np.sign(q) * abs(q).sum(1, keepdims=True) / 2
        e, a = p - q, a - q.mean(0)
        np.testing.assert_allclose(path[:, t], np.tile(a, (K, 1)), atol=1e-4)
        np.testing.assert_allclose(error_of(state)[:, t], e, atol=1e-4)
