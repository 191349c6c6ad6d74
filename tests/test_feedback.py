"""Compressed exchanges: nothing is lost, nothing is invented, all hear the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from lowcomm import payload_bytes, quantize, random_k, sign, top_k
from lowcomm.feedback import compressed_mean, difference_feedback, error_feedback
from lowcomm.ledger import traffic
from lowcomm.spmd import AXIS, NotUniform, vary, worker_mesh
from lowcomm.sync import average
from lowcomm.workers import spread

K = 4
EPS = float(jnp.finfo(jnp.float32).eps)
EXCHANGES = {
    "mean": compressed_mean,
    "error": error_feedback,
    "difference": difference_feedback,
}
COMPRESSORS = {
    "top_k": top_k(0.25),
    "random_k": random_k(0.25),
    "sign": sign(),
    "int8": quantize(8, block=4),
}
TX = {(e, c): EXCHANGES[e](COMPRESSORS[c]) for e in EXCHANGES for c in COMPRESSORS}
UNBIASED = random_k(0.5, unbiased=True)
T, N = 4, 8  # steps and elements of most streams, so that few programs are compiled

on_both = pytest.mark.parametrize("backend", ["vmap", "mesh"])
every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS)


def integers(*shape, top=32):
    return np.random.default_rng(0).integers(-top, top, shape).astype(np.float32)


@functools.cache
def listener(tx, backend):
    """Runs a stream through an exchange; compiled once for all laws."""

    def worker(stream):
        def step(state, now):
            heard, state = tx.update(now[1], state, step=now[0])
            return state, (heard, state)

        first = jax.tree.map(lambda x: x[0], stream)
        steps = jnp.arange(len(jax.tree.leaves(stream)[0]))
        return lax.scan(step, vary(tx.init(first), AXIS), (steps, stream))[1]

    return jax.jit(spread(worker, mesh=worker_mesh(K) if backend == "mesh" else None))


def listen(tx, stream, backend="vmap"):
    """What is heard of a stacked stream ``[K, T, …]``, and the states after it."""
    return listener(tx, backend)(stream)


def constant(x, steps=T):
    """The stream that repeats the stacked ``x``."""
    return jnp.repeat(jnp.asarray(x)[:, None], steps, axis=1)


def largest(x, k):
    """x with all but its k largest entries zero; the first wins a tie."""
    rank = np.argsort(np.argsort(-np.abs(x), axis=-1, kind="stable"), axis=-1)
    return np.where(rank < k, x, 0)


@on_both
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_error_feedback_of_top_k_is_the_loop_of_the_paper(backend, decay):
    stream = integers(K, T, N)
    heard, state = listen(error_feedback(top_k(0.25), decay=decay), stream, backend)
    e = np.zeros((K, N))
    for t in range(T):
        p = decay * e + stream[:, t]
        said = largest(p, 2)
        e = p - said
        np.testing.assert_array_equal(heard[:, t], [said.mean(0)] * K)
        np.testing.assert_array_equal(state.error[:, t], e)


@pytest.mark.parametrize(
    ("compressor", "decay"),
    [*((name, 1.0) for name in COMPRESSORS), ("random_k", 0.5), ("sign", 0.0)],
)
def test_what_was_heard_and_what_is_remembered_is_what_there_was(compressor, decay):
    # Σ said + e(T) + (1 − decay) Σ e(t) = Σ u, in the mean over the workers.
    stream = integers(K, T, N)
    tx = TX["error", compressor]
    if decay != 1:
        tx = error_feedback(COMPRESSORS[compressor], decay=decay)
    heard, state = listen(tx, stream)
    said = np.asarray(heard, np.float64)[0].sum(0)
    error = np.asarray(state.error, np.float64).mean(0)
    total = said + error[-1] + (1 - decay) * error[:-1].sum(0)
    # Multiples of 2⁻¹⁶ below 2⁷ add exactly. A 127th of something is rounded, by half
    # an ulp in each of the three operations of a step.
    bound = T * 1.5 * EPS * 4 * 32 if compressor == "int8" else 0
    np.testing.assert_allclose(total, stream.mean(0).sum(0), rtol=0, atol=bound)


def test_the_error_grows_below_the_resolution_of_the_gradients():
    # In bfloat16 32 + 1/8 is 32. The second coordinate is never sent.
    steps = 300
    stream = constant(jnp.array([[256, 0.125]], jnp.bfloat16), steps)
    _, state = listen(error_feedback(top_k(0.5)), stream)
    assert state.error.dtype == jnp.float32
    np.testing.assert_array_equal(state.error[0, :, 1], 0.125 * np.arange(1, steps + 1))
    _, coarse = listen(error_feedback(top_k(0.5), dtype=jnp.bfloat16), stream)
    assert coarse.error.dtype == jnp.bfloat16
    assert coarse.error[0, -1, 1] == 32


@on_both
@every_exchange
def test_a_full_budget_is_the_mean_and_keeps_nothing(exchange, backend):
    stream = integers(K, T, N)
    for compressor in (top_k(1.0), random_k(1.0)):
        heard, state = listen(EXCHANGES[exchange](compressor), stream, backend)
        np.testing.assert_array_equal(heard, [stream.mean(0)] * K)
        if exchange == "error":
            assert not np.asarray(state.error).any()
        if exchange == "difference":
            np.testing.assert_array_equal(state.said, stream)


@every_exchange
@every_compressor
def test_zero_is_heard_as_zero_and_leaves_no_trace(exchange, compressor):
    stream = integers(K, T, N)
    stream[:, 0] = 0
    heard, state = listen(TX[exchange, compressor], stream)
    for x in jax.tree.leaves((heard, state)):
        assert not np.asarray(x)[:, 0].any()
        assert np.isfinite(x).all()
    assert np.asarray(heard)[:, 1].any()


@pytest.mark.parametrize("exchange", ["error", "difference"])
@pytest.mark.parametrize("compressor", ["random_k", "top_k"])
def test_only_linear_compressors_see_the_mean_alone(exchange, compressor):
    stream, tx = integers(K, T, N), TX[exchange, compressor]
    heard, _ = listen(tx, stream)
    of_mean, _ = listen(tx, np.tile(stream.mean(0), (K, 1, 1)))
    assert (heard == of_mean).all() == COMPRESSORS[compressor].linear


def test_error_feedback_needs_a_contraction():
    # A hit multiplies what is remembered of a coordinate by 1 − 4, and misses keep it.
    stream = constant(integers(1, 40), 80)
    grown = lambda compressor: np.abs(
        listen(error_feedback(compressor), stream)[1].error[0, -1]
    ).max()
    scaled_up = random_k(0.25, unbiased=True)
    assert grown(scaled_up._replace(law=None)) > 1e6  # says nothing of what it loses
    with pytest.raises(ValueError, match=r"leaf .*of 40 entries .* ω = 3 .*for ever"):
        grown(scaled_up)
    # Missed 40 times in a row with probability (3/4)⁴⁰, for one of 40 coordinates.
    assert grown(random_k(0.25)) <= 40 * 32


@on_both
def test_difference_feedback_recovers_a_fixed_vector_part_by_part(backend):
    u = integers(K, N)
    u[u == 0] = 1
    tx = difference_feedback(top_k(0.375))  # three a round, all after ⌈8 / 3⌉
    heard, state = listen(tx, constant(u), backend)
    for t in range(T):
        known = largest(u, min(N, 3 * (t + 1)))
        np.testing.assert_array_equal(state.said[:, t], known)
        np.testing.assert_array_equal(heard[:, t], [known.mean(0)] * K)
    assert (heard == u.mean(0)).all(axis=(0, 2)).tolist() == [False, False, True, True]


def test_a_rate_makes_difference_feedback_of_an_unbiased_compressor_settle():
    # The variance is ω = 1, so the rate of DIANA is 1/2; at rate 1 a coordinate jumps
    # from one side to the other, twice as far, whenever it is drawn.
    u = integers(K, N)
    heard, state = listen(difference_feedback(UNBIASED, rate=0.5), constant(u, 40))
    np.testing.assert_array_equal(state.said[:, -1], u)
    np.testing.assert_array_equal(heard[:, -1], [u.mean(0)] * K)
    silent = UNBIASED._replace(law=None)
    _, state = listen(difference_feedback(silent), constant(u, 40))
    assert (np.asarray(state.said)[:, -1] != u).any()
    with pytest.raises(ValueError, match=r"difference_feedback .* 0\.5 or less"):
        listen(difference_feedback(UNBIASED), constant(u, 40))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("compressor", ["top_k", "random_k"])
def test_what_all_heard_is_the_mean_of_what_each_said(compressor, dtype):
    # The mean of four bfloat16 numbers is none, so a rounded memory would drift.
    stream = jnp.asarray(192 + integers(K, T, N, top=64), dtype)
    _, state = listen(TX["difference", compressor], stream)
    said = np.asarray(state.said)
    np.testing.assert_array_equal(state.heard, [said.mean(0)] * K)
    assert (state.heard != state.heard.astype(jnp.bfloat16)).any()


@on_both
@every_compressor
def test_all_workers_hear_and_share_the_same_bits(backend, compressor):
    hard = np.array([1e7, 1, -1e7, 0.003], np.float32)
    columns = np.random.default_rng(0).permuted(np.tile(hard, (T * N, 1)), axis=1)
    stream = columns.T.reshape(K, T, N)
    heard, state = listen(TX["difference", compressor], stream, backend)
    assert (heard == heard[:1]).all()
    assert (state.heard == state.heard[:1]).all()


@every_exchange
@every_compressor
def test_the_payload_is_what_the_program_sends(exchange, compressor):
    tx, compressor = TX[exchange, compressor], COMPRESSORS[compressor]
    array = jax.ShapeDtypeStruct
    leaves = [array((6, 5), np.float32), array((), np.float32), array((3,), np.int32)]
    # What is reduced travels in float32, what is gathered as it is.
    half = np.float32 if compressor.linear else jnp.bfloat16
    payload = payload_bytes(compressor, [*leaves, array((7,), half)])
    worker = lambda x: tx.update(x, tx.init(x), step=0)[0]
    tree = [*leaves, array((7,), jnp.bfloat16)]
    assert traffic(worker, tree, workers=8).bytes_always == payload > 0
    assert traffic(worker, tree, workers=1).bytes_always == 0


@pytest.mark.parametrize("exchange", ["error", "difference"])
def test_a_tree_of_another_structure_is_refused_by_the_leaf_s_name(exchange):
    tx = TX[exchange, "top_k"]
    update = lambda x: tx.update(x, tx.init({"w": jnp.zeros(2)}), step=0)[0]
    with pytest.raises(ValueError, match=r"\['w'\] has shape \(3,\) .* saw \(2,\)"):
        spread(update)({"w": jnp.zeros((K, 3))})
    with pytest.raises(ValueError, match=r"\['v'\] has shape \(2,\) .* saw nothing"):
        spread(update)({"v": jnp.zeros((K, 2))})


@every_exchange
def test_parameters_and_a_step_that_is_missing_or_stacked_are_refused(exchange):
    tx, x = TX[exchange, "top_k"], jnp.ones((K, 2))
    verb = average(optax.sgd(1.0), exchange=tx)
    with pytest.raises(ValueError, match=r"not parameters. Use rounds"):
        spread(lambda x: verb.update(x, verb.init(x), x, step=0)[0])(x)
    with pytest.raises(ValueError, match="needs step="):
        spread(lambda x: tx.update(x, tx.init(x))[0])(x)
    stacked = lambda x, t: tx.update(x, tx.init(x), step=t)[0]
    for mesh in (None, worker_mesh(K)):
        with pytest.raises(NotUniform, match="step differs between workers"):
            spread(stacked, mesh=mesh)(x, jnp.arange(K))


@every_exchange
def test_masked_leaves_cost_nothing_and_stay(exchange):
    tree = {"frozen": np.ones(50, np.float32), "trained": np.ones(8, np.float32)}
    mask = {"frozen": False, "trained": True}
    tx = optax.masked(TX[exchange, "sign"], mask, mask_compatible_extra_args=True)
    worker = lambda x: tx.update(x, tx.init(x), step=0)[0]
    sent = traffic(worker, tree, workers=K)
    assert sent.bytes_always == payload_bytes(sign(), tree["trained"]) == 5
    x = {"frozen": integers(K, 50), "trained": integers(K, 8)}
    heard = jax.jit(spread(worker))(x)
    np.testing.assert_array_equal(heard["frozen"], x["frozen"])
    assert (heard["trained"] != x["trained"]).any()


@every_exchange
def test_other_leaves_pass_by_and_are_not_kept(exchange):
    others = {
        "count": jnp.arange(K),
        "key": jax.random.split(jax.random.key(0), K),
        "empty": jnp.zeros((K, 0)),
        "none": None,
    }
    tx = TX[exchange, "top_k"]

    def worker(x):
        heard, state = tx.update(x, tx.init(x), step=0)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))
        return heard

    for mesh in (None, worker_mesh(K)):
        heard = jax.jit(spread(worker, mesh=mesh))(others | {"x": jnp.ones((K, 2))})
        for name, x in others.items():
            assert x is heard[name] is None or (heard[name] == x).all()


@every_exchange
@every_compressor
def test_a_nan_is_heard_by_all_and_kept_no_longer(exchange, compressor):
    x = integers(K, T, N)
    x[2, 0, 5] = np.nan
    heard, state = listen(TX[exchange, compressor], x)
    bad = np.isnan(heard)
    assert (bad == bad[0]).all()
    told = bad[0].any(-1)
    if COMPRESSORS[compressor].linear:  # random_k sends what it draws
        assert told.sum() <= 1
    else:
        assert told.tolist() == [True, False, False, False]
    # Until it is drawn it waits, visibly, where it came in; lost is what has no memory.
    waits = np.zeros((K, T, N), bool)
    waits[2, :, 5] = (exchange == "error") & ~np.logical_or.accumulate(told)
    for memory in jax.tree.leaves(state):
        np.testing.assert_array_equal(np.isnan(memory), waits)


def test_an_infinity_that_waits_is_heard_when_it_is_drawn():
    x = integers(K, 16, N)
    x[2, 0, 5] = np.inf
    heard, state = listen(TX["error", "random_k"], x)
    heard, waits = np.isinf(heard[0, :, 5]), np.isinf(state.error[2, :, 5])
    first = int(np.argmax(heard))
    assert (heard == (np.arange(16) == first)).all()
    assert (waits == (np.arange(16) < first)).all()
    assert first > 0


def test_a_memory_outside_its_range_is_refused_with_the_value():
    for decay in (-0.5, 1.5, np.nan):
        with pytest.raises(ValueError, match=f"decay {decay} is outside"):
            error_feedback(sign(), decay=decay)
    for rate in (0.0, 1.5, np.nan):
        with pytest.raises(ValueError, match=f"rate {rate} is outside"):
            difference_feedback(sign(), rate=rate)
    slow = difference_feedback(sign(), rate=lambda n: 8 / n)
    with pytest.raises(ValueError, match=r"rate 2\.0 is outside"):
        spread(lambda x: slow.update(x, slow.init(x), step=0)[0])(jnp.ones((K, 4)))


def test_a_rate_may_depend_on_the_size_of_a_leaf():
    tree = [integers(K, 4), integers(K, 8)]
    tx = difference_feedback(top_k(1.0), rate=lambda n: 2 / n)
    _, state = listen(tx, [x[:, None] for x in tree])
    for x, said in zip(tree, state.said, strict=True):
        np.testing.assert_array_equal(said[:, 0], x * (2 / x.shape[1]))
