"""The quantized all-reduce: two roundings, one result, nothing lost between them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec as P

from lowcomm import (
    Compressor,
    count_sketch,
    one_bit,
    per_shard,
    quantize,
    random_k,
    rounds,
    sign,
    top_k,
)
from lowcomm.ledger import traffic
from lowcomm.row_means import two_stage_bytes
from lowcomm.spmd import AXIS, vary, worker_mesh
from lowcomm.sync import average
from lowcomm.two_stage import two_stage, two_stage_feedback
from lowcomm.workers import spread

K, T = 4, 4
EPS = float(jnp.finfo(jnp.float32).eps)
ALL = top_k(1.0)  # loses nothing
NEAREST = quantize(8, stochastic=False)
on_both = pytest.mark.parametrize("backend", ["vmap", "mesh"])
both = pytest.mark.parametrize("exchange", [two_stage, two_stage_feedback])


def integers(*shape, top=32, seed=0):
    draw = np.random.default_rng(seed).integers(-top, top, shape)
    return draw.astype(np.float32)


def once(tx, x, backend="vmap", step=0):
    """What is heard of one stacked tree."""
    k = len(jax.tree.leaves(x)[0])
    worker = lambda x: tx.update(x, tx.init(x), step=step)[0]
    mesh = worker_mesh(k) if backend == "mesh" else None
    return jax.tree.map(np.asarray, jax.jit(spread(worker, mesh=mesh))(x))


@functools.cache
def listener(tx, backend):
    def worker(stream):
        def step(state, now):
            heard, state = tx.update(now[1], state, step=now[0])
            return state, (heard, state)

        start = vary(tx.init(stream[0]), AXIS)
        return lax.scan(step, start, (jnp.arange(len(stream)), stream))[1]

    return jax.jit(spread(worker, mesh=worker_mesh(K) if backend == "mesh" else None))


def rows_of(x, k=K):
    """``[…, n]`` in rows of as many entries; what the last ones lack are zeros."""
    size = -(-x.shape[-1] // k)
    pad = [(0, 0)] * (x.ndim - 1) + [(0, k * size - x.shape[-1])]
    return np.pad(x, pad).reshape(*x.shape[:-1], k, size)


def own_rows(x, k=K):
    """The same, but a row that has some entries begins again where it ends."""
    rows = rows_of(x, k)
    whole, rest = divmod(x.shape[-1], rows.shape[-1])
    if rest:
        again = whole * rows.shape[-1] + np.arange(rows.shape[-1]) % rest
        rows[..., whole, :] = x[..., again]
    return rows


def signs(x):
    """Scaled signs along the last axis."""
    return np.where(x >= 0, 1, -1) * np.abs(x).mean(-1, keepdims=True)


@both
@pytest.mark.parametrize("k", [1, 3, 8])
def test_an_exact_compressor_gives_the_mean_of_any_tree(exchange, k):
    # With 8 workers and 13 numbers the last row has none of them, and with all leaves
    # but one taken away there are fewer numbers than workers.
    x = {"w": integers(k, 3, 2) * 24, "b": integers(k, 6) * 24, "s": integers(k) * 24}
    others = {"n": np.arange(k), "empty": np.zeros((k, 0), np.float32), "none": None}
    for tree in (x, {"s": x["s"]}):
        heard = once(exchange(ALL), tree | others)
        for name, value in tree.items():
            assert (heard[name] == value.mean(0)).all()
        assert (heard["n"] == others["n"]).all()
        assert heard["empty"].shape == (k, 0)
    assert (once(exchange(ALL), others)["n"] == others["n"]).all()


@on_both
@pytest.mark.parametrize("n", [32, 29, 3])
def test_signs_of_means_of_signs_are_those_of_numpy(backend, n):
    # Rows of 8 have scales exact in binary; the last is filled up from its own.
    x = integers(K, n)
    said = signs(own_rows(x)).reshape(K, -1)[:, :n]
    mean = own_rows(said.mean(0))
    heard = once(two_stage(sign()), x, backend)
    np.testing.assert_array_equal(heard, [signs(mean).ravel()[:n]] * K)


@both
@pytest.mark.parametrize("n", [9, 65, 5])
def test_no_padding_enters_a_scale(exchange, n):
    # The last row of 9 entries has one of its two, and that of 65 two of its nine; 5
    # leave rows empty. Averaged with a zero twice, a one would be heard as a quarter.
    x = np.ones((8, n), np.float32)
    for compressor, sent in ((sign(), x), (one_bit(), -x)):
        tx = exchange(compressor)
        worker = lambda x, tx=tx: tx.update(x, tx.init(x), step=0)
        heard, left = jax.jit(spread(worker))(sent)
        np.testing.assert_array_equal(heard, sent)
        assert not any(np.any(kept) for kept in jax.tree.leaves(left))


def test_no_leaf_shares_a_scale_a_statistic_or_a_coin_with_another():
    x = {"a": integers(K, 32), "b": integers(K, 30, seed=1) * 1024}
    for compressor in (sign(), NEAREST):
        tx = two_stage(compressor)
        for name, heard in once(tx, x).items():
            np.testing.assert_array_equal(heard, once(tx, x[name]))
    half = np.full((K, K * 64), 0.5, np.float32)
    half[:, ::64] = 127
    tossed = once(two_stage(quantize()), {"a": half, "b": half})
    assert (tossed["a"] != tossed["b"]).any()


def test_the_error_is_half_a_step_of_each_worker_s_grid_and_half_of_the_mean_s():
    x = np.random.default_rng(1).normal(size=(K, 1022)).astype(np.float32)
    x *= np.float32(10.0) ** np.arange(K)[:, None]
    heard = once(two_stage(NEAREST), x)[0]
    mean = x.astype(np.float64).mean(0)
    workers = np.abs(rows_of(x)).max(-1).mean(0) / 127
    # The grid of the second rounding spans what the first has made of the mean.
    largest = np.abs(rows_of(mean)).max(-1) + workers / 2
    bound = (workers + largest / 127)[:, None] / 2 * (1 + 16 * EPS)
    error = np.abs(rows_of(heard - mean))
    assert (error <= bound).all()
    assert error.max() > 0.25 * bound.max()


def test_what_is_on_the_grid_already_is_said_again_to_an_ulp():
    # The scale times 127 over 127 may miss the block's largest by an ulp.
    tx = two_stage(quantize(8, block=5, stochastic=False))  # rows of 8
    heard = once(tx, integers(K, 32, top=1000))
    again = once(tx, heard)
    np.testing.assert_array_max_ulp(again, heard, 2)


def test_signs_lose_nothing_that_is_not_remembered_on_one_side_or_the_other():
    # Rows of 8, 4 workers and 4 steps: multiples of 2⁻¹⁷ below 2⁷ add exactly.
    stream = integers(K, T, 32, top=8)
    heard, state = listener(two_stage_feedback(sign()), "vmap")(stream)
    for t in range(T):
        total = np.asarray(heard)[0, : t + 1].sum(0)
        total += np.asarray(state.error)[:, t].mean(0)
        total += np.asarray(state.shard)[:, t].ravel()
        np.testing.assert_array_equal(total, stream[:, : t + 1].mean(0).sum(0))
    assert np.asarray(state.shard).any(-1).all()
    assert np.asarray(state.error).any(-1).all()


@pytest.mark.parametrize("exchange", [two_stage, two_stage_feedback])
def test_all_workers_hear_the_same_bits_on_any_backend(exchange):
    hard = np.array([1e7, 1, -1e7, 0.003], np.float32)
    columns = np.random.default_rng(0).permuted(np.tile(hard, (T * 33, 1)), axis=1)
    stream = columns.T.reshape(K, T, 33)
    for backend in ("vmap", "mesh"):
        heard, _ = listener(exchange(NEAREST), backend)(stream)
        assert (heard == heard[:1]).all()


def test_both_backends_compute_the_same_on_binary_data():
    stream = integers(K, T, 32, top=8)
    tx = two_stage_feedback(sign())
    here, there = (listener(tx, backend)(stream) for backend in ("vmap", "mesh"))
    jax.tree.map(np.testing.assert_array_equal, here, there)


@both
@pytest.mark.parametrize("compressor", [sign(), NEAREST, quantize(8, block=5), ALL])
def test_it_sends_a_row_more_than_the_tree_in_as_few_calls_as_types(
    exchange, compressor
):
    tx = exchange(compressor)
    worker = lambda x: tx.update(x, tx.init(x), step=0)[0]
    few = {"a": jnp.ones((6, 5)), "n": jnp.arange(3), "h": jnp.ones(7, jnp.bfloat16)}
    many = [jnp.ones(3)] * 20
    for tree in (few, many):
        sent = traffic(worker, tree, workers=8)
        assert sent.bytes_always == two_stage_bytes(compressor, tree, workers=8) > 0
        kinds = {row.collective for row in sent.rows}
        assert kinds == {"all_to_all", "all_gather"}
        assert len(sent.rows) <= 4
        assert traffic(worker, tree, workers=1).bytes_always == 0


def test_rows_workers_and_steps_toss_coins_of_their_own():
    # Every entry but the scales' is half way between two integers.
    x = np.full((K, K * 1024), 0.5, np.float32)
    x[:, ::1024] = 127
    tx = two_stage(quantize())
    heard = [once(tx, x, step=t)[0].reshape(K, 1024)[:, 1:] for t in (0, 1)]
    assert (heard[0] != heard[1]).any()
    assert all((heard[0][i] != heard[0][j]).any() for i in range(K) for j in range(i))
    # A mean of K coins is of variance 1/4K, and a mean of quarters m is rounded to
    # integers at variance m (1 − m), on average 1/4 − 1/4K: together 1/4.
    spread_of = np.mean((heard[0] - 0.5) ** 2)
    assert spread_of == 0.25
    assert abs(heard[0].mean() - 0.5) < 4 * 0.5 / np.sqrt(heard[0].size)


def test_a_statistic_is_that_of_a_row_and_travels_beside_it():
    grid = Compressor(
        encode=lambda x, keys, agreed: jnp.round(x / agreed * 64).astype(jnp.int8),
        decode=lambda payload, like, keys, agreed: payload / jnp.float32(64) * agreed,
        statistic=lambda x: jnp.max(jnp.abs(x)),
    )
    x = np.repeat(np.float32([[64, 3, 128, 2], [64, 5, 128, 4]]), 2, axis=0)
    tx = two_stage(grid)
    np.testing.assert_array_equal(once(tx, x[::2]), [[64, 4, 128, 4]] * 2)
    worker = lambda x: tx.update(x, (), step=0)[0]
    assert traffic(worker, x[0], workers=K).bytes_always == 5 * (1 + 4)


@both
def test_what_is_not_finite_is_heard_by_all_and_then_forgotten(exchange):
    stream = integers(K, T, 32)
    stream[2, 0, 5] = np.nan
    stream[1, 0, 30] = np.inf
    heard, state = listener(exchange(sign()), "vmap")(stream)
    bad = ~np.isfinite(rows_of(np.asarray(heard)))
    assert bad[:, 0, [0, 3]].all()
    assert not bad[:, 0, [1, 2]].any()
    assert not bad[:, 1:].any()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_several_axes_are_one_row_of_workers_or_one_level_after_the_other():
    axes = ("sites", "chips")
    x = integers(K, 13) * 4
    virtual = {"mesh": AbstractMesh((2, 2), axes), "axis": axes, "backend": "vmap"}
    devices = np.array(jax.devices()[:K]).reshape(2, 2)
    real = {"mesh": jax.sharding.Mesh(devices, axes), "axis": axes}
    levels = [two_stage(ALL, axis=name) for name in reversed(axes)]
    for tx in (two_stage_feedback(ALL, axis=axes), optax.chain(*levels)):
        worker = lambda x, tx=tx: tx.update(x, tx.init(x), step=0)[0]
        for place in (virtual, real):
            heard = jax.jit(spread(worker, **place))(x)
            np.testing.assert_array_equal(heard, [x.mean(0)] * K)


def test_leaves_that_the_compiler_divides_want_per_shard():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, (AXIS, "fsdp"))
    x = {"w": integers(2, 4, 6)}
    tx = two_stage_feedback(sign())
    worker = lambda tx: lambda x: tx.update(x, tx.init(x), step=0)[0]
    with pytest.raises(ValueError, match=r"two_stage_feedback .* put per_shard"):
        jax.jit(spread(worker(tx), mesh=mesh))(x)
    whole = per_shard(two_stage_feedback(ALL), P(None, "fsdp"), axes="fsdp")
    heard = jax.jit(spread(worker(whole), mesh=mesh))(x)["w"]
    np.testing.assert_array_equal(heard, [x["w"].mean(0)] * 2)


def test_masked_leaves_stay_and_cost_nothing():
    mask = {"frozen": False, "trained": True}
    tx = optax.masked(two_stage_feedback(sign()), mask, mask_compatible_extra_args=True)
    worker = lambda x: tx.update(x, tx.init(x), step=0)[0]
    x = {"frozen": integers(K, 50), "trained": integers(K, 8)}
    one = jax.tree.map(lambda x: x[0], x)
    sent = traffic(worker, one, workers=K).bytes_always
    assert sent == two_stage_bytes(sign(), one["trained"], workers=K) == 5 * (1 + 4)
    assert (once(tx, x)["frozen"] == x["frozen"]).all()


def test_displacements_may_travel_so_and_parameters_may_not():
    def worker(x, tx):
        return tx.update(x, tx.init(x), x, step=0)[0]

    x, exchange = jnp.ones((K, 8)), two_stage(NEAREST)
    agreed = rounds(optax.sgd(0.5), optax.sgd(1.0), exchange=exchange)
    moved = jax.jit(spread(functools.partial(worker, tx=agreed)))(x)
    np.testing.assert_array_equal(moved, -0.5 * x)
    verb = average(optax.sgd(1.0), exchange=exchange)
    with pytest.raises(ValueError, match=r"not parameters. Use rounds"):
        spread(functools.partial(worker, tx=verb))(x)


def test_what_does_not_fit_is_refused_with_the_remedy():
    tx = two_stage_feedback(sign())
    state = tx.init(jnp.zeros(8))  # of one worker, since there are none around
    assert state.shard.shape == (8,)
    with pytest.raises(ValueError, match=r"a row of 8 .* 4 workers average 2 each"):
        spread(lambda x: tx.update(x, state, step=0)[0])(jnp.zeros((K, 8)))
    with pytest.raises(ValueError, match="needs step="):
        spread(lambda x: tx.update(x, tx.init(x))[0])(jnp.zeros((K, 8)))
    with pytest.raises(ValueError, match=r"\['c'\]: two_stage takes real numbers"):
        once(two_stage(ALL), {"c": jnp.zeros((K, 2), jnp.complex64)})
    with pytest.raises(ValueError, match="must be a Compressor"):
        two_stage(sign)
    for growing in (random_k(0.1, unbiased=True), count_sketch(3, 0.05)):
        with pytest.raises(ValueError, match=r"\['w'\]: of 100 .* grow for ever"):
            once(two_stage_feedback(growing), {"w": jnp.zeros((K, 400))})
