"""Compressed exchanges: nothing is lost, nothing is invented, all hear the same."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from lowcomm.compressors import (
    Compressor,
    payload_bytes,
    quantize,
    random_k,
    sign,
    top_k,
)
from lowcomm.feedback import compressed_mean, difference_feedback, error_feedback
from lowcomm.ledger import traffic
from lowcomm.spmd import NotUniform, spread, worker_mesh
from lowcomm.sync import average

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
    "unbiased": random_k(0.5, unbiased=True),
    "sign": sign(),
    "int8": quantize(8, block=4),
    "int16": quantize(16, stochastic=False),
}

on_both = pytest.mark.parametrize("backend", ["vmap", "mesh"])
every_exchange = pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
every_compressor = pytest.mark.parametrize(
    "compressor", COMPRESSORS.values(), ids=COMPRESSORS
)


def mesh_of(backend):
    return worker_mesh(K) if backend == "mesh" else None


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-32, 32, shape).astype(np.float32)


def listen(tx, stream, *, mesh=None):
    """What is heard of a stacked stream ``[K, T, …]``, and the states after it."""

    def worker(stream, state):
        def step(state, now):
            heard, state = tx.update(now[1], state, step=now[0])
            return state, (heard, state)

        return lax.scan(step, state, (jnp.arange(steps), stream))[1]

    steps = jax.tree.leaves(stream)[0].shape[1]
    first = jax.tree.map(lambda x: x[:, 0], stream)
    return jax.jit(spread(worker, mesh=mesh))(stream, spread(tx.init)(first))


def constant(x, steps):
    """The stream that repeats the stacked ``x``."""
    return jnp.repeat(jnp.asarray(x)[:, None], steps, axis=1)


def largest(x, k):
    """x with all but its k largest entries zero; the first wins a tie."""
    kept = np.argsort(-np.abs(x), axis=-1, kind="stable")[..., :k]
    out = np.zeros_like(x)
    np.put_along_axis(out, kept, np.take_along_axis(x, kept, -1), -1)
    return out


@on_both
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_error_feedback_of_top_k_is_the_loop_of_the_paper(backend, decay):
    stream = integers(K, 5, 8)
    tx = error_feedback(top_k(0.25), decay=decay)
    heard, state = listen(tx, stream, mesh=mesh_of(backend))
    e = np.zeros((K, 8))
    for t in range(5):
        p = decay * e + stream[:, t]
        said = largest(p, 2)
        e = p - said
        np.testing.assert_array_equal(heard[:, t], [said.mean(0)] * K)
        np.testing.assert_array_equal(state.error[:, t], e)


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
@every_compressor
def test_what_was_heard_and_what_is_remembered_is_what_there_was(compressor, decay):
    # Σ said + e(T) + (1 − decay) Σ e(t) = Σ u, in the mean over the workers.
    stream = integers(K, 4, 4)
    heard, state = listen(error_feedback(compressor, decay=decay), stream)
    said = np.asarray(heard, np.float64)[0].sum(0)
    error = np.asarray(state.error, np.float64).mean(0)
    total = said + error[-1] + (1 - decay) * error[:-1].sum(0)
    # Multiples of 2⁻¹⁶ below 2⁷ add exactly; a 127th of something is rounded, by half
    # an ulp in each of the three operations of a step.
    exact = compressor not in (COMPRESSORS["int8"], COMPRESSORS["int16"])
    bound = 0 if exact else 4 * 1.5 * EPS * 4 * 32
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
def test_a_full_budget_is_the_mean_and_leaves_nothing_to_remember(exchange, backend):
    stream = integers(K, 3, 6)
    for compressor in (top_k(1.0), random_k(1.0), quantize(block=1)):
        heard, state = listen(exchange(compressor), stream, mesh=mesh_of(backend))
        np.testing.assert_array_equal(heard, [stream.mean(0)] * K)
        if exchange is error_feedback:
            assert not np.asarray(state.error).any()
        if exchange is difference_feedback:
            np.testing.assert_array_equal(state.said, stream)


@every_exchange
@every_compressor
def test_zero_is_heard_as_zero_and_leaves_no_trace(exchange, compressor):
    stream = {
        "w": np.zeros((K, 2, 3, 2), np.float32),
        "b": np.zeros((K, 2), np.float32),
    }
    stream["w"][:, 1] = 3.0
    heard, state = listen(exchange(compressor), stream)
    for x in jax.tree.leaves((heard, state)):
        assert not np.asarray(x)[:, 0].any()
        assert np.isfinite(x).all()
    assert np.asarray(heard["w"])[:, 1].any()


@every_exchange
def test_linear_compressors_see_the_workers_only_through_their_mean(exchange):
    stream = integers(K, 6, 8)
    mean = stream.mean(0, keepdims=True)
    for compressor in (random_k(0.25), random_k(0.5, unbiased=True)):
        heard, _ = listen(exchange(compressor), stream)
        alone, _ = listen(exchange(compressor), mean)
        np.testing.assert_array_equal(heard[:1], alone)
    heard, _ = listen(exchange(top_k(0.25)), stream)
    alone, _ = listen(exchange(top_k(0.25)), mean)
    assert (heard[:1] != alone).any()


def test_error_feedback_needs_a_contraction():
    # A hit multiplies what is remembered of a coordinate by 1 − 4, and misses keep it.
    stream = constant(integers(1, 40), 80)
    grown = lambda compressor: np.abs(
        listen(error_feedback(compressor), stream)[1].error[0, -1]
    ).max()
    assert grown(random_k(0.25, unbiased=True)) > 1e6
    # Missed 40 times in a row with probability (3/4)⁴⁰, for one of 40 coordinates.
    assert grown(random_k(0.25)) <= 40 * 32


@on_both
def test_difference_feedback_recovers_a_fixed_vector_after_all_its_parts(backend):
    u = integers(K, 10)
    u[u == 0] = 1
    heard, state = listen(
        difference_feedback(top_k(0.3)), constant(u, 6), mesh=mesh_of(backend)
    )
    for t in range(6):
        known = largest(u, min(10, 3 * (t + 1)))
        np.testing.assert_array_equal(state.said[:, t], known)
        np.testing.assert_array_equal(heard[:, t], [known.mean(0)] * K)
    np.testing.assert_array_equal(heard[:, 3], [u.mean(0)] * K)  # ⌈10 / 3⌉ rounds
    assert (np.asarray(heard)[:, 2] != u.mean(0)).any()


def test_a_rate_makes_difference_feedback_of_an_unbiased_compressor_settle():
    # The variance is ω = 1, so the rate of DIANA is 1/2; at rate 1 half of the
    # coordinates, all drawn twice as large, jump from side to side for ever.
    u = integers(K, 8)
    compressor = random_k(0.5, unbiased=True)
    heard, state = listen(difference_feedback(compressor, rate=0.5), constant(u, 40))
    np.testing.assert_array_equal(state.said[:, -1], u)
    np.testing.assert_array_equal(heard[:, -1], [u.mean(0)] * K)
    _, state = listen(difference_feedback(compressor), constant(u, 40))
    assert (np.asarray(state.said)[:, -1] != u).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("compressor", [top_k(0.25), random_k(0.25), sign()])
def test_what_all_heard_is_the_mean_of_what_each_said(compressor, dtype):
    # Of four bfloat16 numbers the mean is none, so a rounded memory would drift.
    stream = jnp.asarray(integers(K, 30, 8), dtype)
    _, state = listen(difference_feedback(compressor), stream)
    mean = np.asarray(state.said).mean(0)
    # Sums of multiples of 2⁻⁸; only sign's scales are finer.
    bound = 30 * EPS * 2 * 32 if compressor not in COMPRESSORS.values() else 0
    np.testing.assert_allclose(state.heard, [mean] * K, rtol=0, atol=bound)


@on_both
@every_compressor
def test_all_workers_hear_and_share_the_same_bits(backend, compressor):
    hard = np.array([1e7, 1, -1e7, 0.003], np.float32)
    columns = np.random.default_rng(0).permuted(np.tile(hard, (60, 1)), axis=1).T
    stream = columns.reshape(K, 3, 20)
    for exchange in (compressed_mean, difference_feedback):
        heard, state = listen(exchange(compressor), stream, mesh=mesh_of(backend))
        for x in [heard, *([state.heard] if state else [])]:
            np.testing.assert_array_equal(x, np.tile(x[:1], (K, 1, 1)))


TREE = {
    "w": jax.ShapeDtypeStruct((6, 5), jnp.float32),
    "half": jax.ShapeDtypeStruct((7,), jnp.bfloat16),
    "scalar": jax.ShapeDtypeStruct((), jnp.float32),
    "count": jax.ShapeDtypeStruct((3,), jnp.int32),
}


@every_exchange
@every_compressor
def test_the_payload_is_what_the_program_sends(exchange, compressor):
    tx = exchange(compressor)
    worker = lambda x: tx.update(x, tx.init(x), step=0)[0]
    # What is reduced travels in float32, what is gathered as it is.
    wide = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, np.float32))
            if compressor.linear and x.dtype == jnp.bfloat16
            else x
        ),
        TREE,
    )
    sent = traffic(worker, TREE, workers=8)
    assert sent.bytes_always == payload_bytes(compressor, wide) > 0
    assert traffic(worker, TREE, workers=1).bytes_always == 0


def shared_grid():
    """Integers on a grid that spans the largest entry of any worker."""

    def encode(x, keys, agreed=None):
        return jnp.round(x / agreed * 64).astype(jnp.int8)

    def decode(payload, like, keys, agreed=None):
        return payload.astype(like.dtype) / 64 * agreed

    return Compressor(encode, decode, statistic=lambda x: jnp.max(jnp.abs(x)))


@on_both
def test_a_statistic_is_agreed_on_before_encoding_and_its_bytes_count(backend):
    x = np.array([[1, -2, 3], [64, 5, 0], [-7, 7, 1], [2, 2, 2]], np.float32)
    tx = compressed_mean(shared_grid())
    heard, _ = listen(tx, x[:, None], mesh=mesh_of(backend))
    np.testing.assert_array_equal(heard[:, 0], [x.mean(0)] * K)
    worker = lambda x: tx.update(x, (), step=0)[0]
    assert traffic(worker, x[0], workers=K).bytes_always == 3 + 4
    assert payload_bytes(shared_grid(), x[0]) == 3 + 4


@on_both
def test_workers_round_independently_and_afresh_at_each_step(backend):
    # One grid for all, and everyone halfway: 64 of 4096 coins may well agree, all not.
    x = constant(np.tile(np.float32([127, *[0.5] * 4095]), (K, 1)), 2)
    heard, _ = listen(compressed_mean(quantize()), x, mesh=mesh_of(backend))
    heard = np.asarray(heard)[0, :, 1:]
    assert (heard[0] != heard[1]).any()
    # The mean of K coins of variance 1/4, seen 4095 times: within 4 standard errors.
    deviation = np.mean((heard - 0.5) ** 2) * 4 * K
    assert abs(deviation - 1) < 4 * np.sqrt(2 / (2 * 4095))


@on_both
def test_workers_draw_the_same_places_and_others_at_each_step_and_leaf(backend):
    ones = np.ones((K, 16), np.float32)
    stream = jax.tree.map(lambda x: constant(x, 4), {"a": ones, "b": ones})

    def places(seed):
        tx = compressed_mean(random_k(0.25), seed=seed)
        heard, _ = listen(tx, stream, mesh=mesh_of(backend))
        return np.concatenate([heard["a"][0], heard["b"][0]])

    drawn = places(0)
    assert set(drawn.ravel()) == {0, 1}  # a place is everyone's or no one's
    assert (drawn.sum(1) == 4).all()
    assert all((a != b).any() for a, b in itertools.combinations(drawn, 2))
    assert (places(1) != drawn).any()


@pytest.mark.parametrize("exchange", [error_feedback, difference_feedback])
@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"w": jnp.zeros((K, 3))}, r"\['w'\] has shape \(3,\) where init saw \(2,\)"),
        ({"v": jnp.zeros((K, 2))}, r"\['v'\] has shape \(2,\) .* saw nothing"),
    ],
)
def test_a_tree_of_another_structure_is_refused_by_the_leaf_s_name(
    exchange, tree, said
):
    tx = exchange(top_k(0.5))
    state = tx.init({"w": jnp.zeros(2)})
    with pytest.raises(ValueError, match=said):
        spread(lambda x: tx.update(x, state, step=0)[0])(tree)


@every_exchange
def test_compressed_parameters_are_refused_in_favour_of_rounds(exchange):
    tx = average(optax.sgd(1.0), exchange=exchange(top_k(0.5)))
    worker = lambda x: tx.update(x, tx.init(x), x, step=0)[0]
    with pytest.raises(ValueError, match=r"not parameters. Use rounds"):
        spread(worker)(jnp.ones((K, 2)))


@every_exchange
def test_a_step_that_is_missing_or_stacked_is_refused(exchange):
    tx, x = exchange(top_k(0.5)), jnp.ones((K, 2))
    with pytest.raises(ValueError, match="needs step="):
        spread(lambda x: tx.update(x, tx.init(x))[0])(x)
    worker = lambda x, t: tx.update(x, tx.init(x), step=t)[0]
    for mesh in (None, worker_mesh(K)):
        with pytest.raises(NotUniform, match="step differs between workers"):
            spread(worker, mesh=mesh)(x, jnp.arange(K))


@every_exchange
def test_masked_leaves_cost_nothing_and_stay(exchange):
    tree = {"frozen": np.ones(50, np.float32), "trained": np.ones(8, np.float32)}
    mask = {"frozen": False, "trained": True}
    tx = optax.masked(exchange(sign()), mask, mask_compatible_extra_args=True)
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
    tx = exchange(top_k(0.5))

    def worker(x):
        heard, state = tx.update(x, tx.init(x), step=0)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))
        return heard

    for mesh in (None, worker_mesh(K)):
        heard = spread(worker, mesh=mesh)(others | {"x": jnp.ones((K, 2))})
        for name, x in others.items():
            assert x is heard[name] is None or (heard[name] == x).all()


@every_exchange
@pytest.mark.parametrize("name", ["top_k", "sign", "int8", "int16"])
def test_a_nan_on_one_worker_is_heard_by_all(exchange, name):
    x = integers(K, 1, 8)
    x[2, 0, 5] = np.nan
    heard, _ = listen(exchange(COMPRESSORS[name]), x)
    assert np.isnan(heard[:, 0, 5]).all()


def test_a_nan_that_is_not_drawn_is_remembered_until_it_is():
    x = integers(K, 40, 8)
    x[2, 0, 5] = np.nan
    heard, state = listen(error_feedback(random_k(0.25)), x)
    assert np.isnan(np.asarray(heard)[:, -1, 5]).all() or np.isnan(
        state.error[2, -1, 5]
    )
    assert np.isnan(heard).any()


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda v: error_feedback(sign(), decay=v), 1.5),
        (lambda v: error_feedback(sign(), decay=v), float("nan")),
        (lambda v: difference_feedback(sign(), rate=v), 0.0),
        (lambda v: difference_feedback(sign(), rate=v), -1.0),
    ],
)
def test_a_memory_outside_its_range_is_refused_with_the_value(make, value):
    with pytest.raises(ValueError, match=f"{value} is outside"):
        make(value)
