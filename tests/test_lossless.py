"""The lossless exchange: the mean, exactly, whatever becomes of the sketch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import lowcomm as lc
from lowcomm.lossless import lossless_bytes
from lowcomm.spmd import AXIS, worker_mesh
from lowcomm.testing.problems import place_of

N = 3000
EPS = float(jnp.finfo(jnp.float32).eps)


def stacked(workers, share=0.01, seed=0, whole=True, n=N):
    """What workers hold: non-zeros of their own, integers or Gaussian."""
    rng, k = np.random.default_rng(seed), round(share * n)
    x = np.zeros((workers, n), np.float32)
    for row in x:
        values = rng.integers(1, 100, k) if whole else rng.normal(size=k)
        row[rng.choice(n, k, replace=False)] = values
    return x


@functools.cache
def program(workers, on_mesh=False, **options):
    tx = lc.lossless_homomorphic(**({"density": 0.01} | options))
    mesh = worker_mesh(workers) if on_mesh else None
    worker = lambda g, t: tx.update(g, tx.init(g), step=t)
    return jax.jit(lc.spread(worker, mesh=mesh, in_axes=(0, None)))


def exchanged(x, step=0, **options):
    return program(len(x), **options)(x, jnp.int32(step))


@pytest.mark.parametrize(
    ("workers", "on_mesh"), [(1, False), (2, True), (3, True), (4, False), (8, True)]
)
def test_integers_are_averaged_bit_for_bit(workers, on_mesh):
    x = stacked(workers)
    heard, state = exchanged(x, on_mesh=on_mesh)
    dense = jax.vmap(lc.mean().update, axis_name=AXIS, in_axes=(0, None))(x, ())[0]
    assert (np.asarray(heard) == np.asarray(dense)).all()
    assert not state.unpeeled.any()
    assert not state.fallbacks.any()


def test_floats_are_averaged_to_rounding_and_all_hear_the_same_bits():
    # A few roundings of the largest entry for each round of peeling.
    x = stacked(4, whole=False)
    heard, state = exchanged(x, on_mesh=True)
    assert not state.unpeeled.any()
    assert np.abs(heard - x.mean(0)).max() < 32 * EPS * np.abs(x).max()
    assert (np.asarray(heard) == np.asarray(heard)[:1]).all()


def test_more_keys_than_room_fall_back_to_the_dense_mean():
    x = stacked(4, share=0.05, whole=False)  # five times what was declared
    heard, state = exchanged(x, on_mesh=True)
    dense = jax.vmap(lc.mean().update, axis_name=AXIS, in_axes=(0, None))(x, ())[0]
    assert (np.asarray(heard) == np.asarray(dense)).all()
    union = np.count_nonzero(x.any(0))
    assert (np.asarray(state.unpeeled) > 0).all()
    assert (np.asarray(state.unpeeled) <= union).all()
    assert state.fallbacks.tolist() == [1] * 4


def test_below_the_threshold_keys_are_left_and_the_mean_is_exact_all_the_same():
    x = stacked(4, whole=False)
    union = np.count_nonzero(x.any(0))
    for step in range(3):
        heard, state = exchanged(x, step, slack=1.0)
        assert 0.3 * union < state.unpeeled[0] < union
        assert np.abs(heard - x.mean(0)).max() < 4 * EPS * np.abs(x).max()


def test_room_is_for_the_union_of_the_supports():
    # Sized for what one of eight workers holds, nothing peels; shared supports do.
    x = stacked(8)
    apart, alike = (
        exchanged(x, density=0.01 / 8),
        exchanged(np.repeat(x[:1], 8, 0), density=0.01 / 8),
    )
    assert (np.asarray(apart[1].unpeeled) > 0).all()
    assert not alike[1].unpeeled.any()
    bytes_of = lambda workers, how: lossless_bytes(
        np.zeros(100_000, np.float32), 0.02, workers=workers, slack=1.3, supports=how
    )[0]
    bitmap = lambda k: 12_500 if k <= 2 else 12_500 // k * k + 12_500 // k
    for workers in (1, 2, 4):  # 12 500 bytes divide by them
        union = {"any": 0.02 * workers, "independent": 1 - 0.98**workers}
        for how, share in union.items():
            expected = 1.3 * share * 400_000 + bitmap(workers) + 4
            assert abs(bytes_of(workers, how) - expected) <= 24  # whole rows of buckets


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_heard_where_it_is_and_spoils_nothing_else(bad):
    x = stacked(4)
    place = int(np.flatnonzero(x[1])[3])
    x[1, place] = bad
    heard, state = exchanged(x)
    with np.errstate(invalid="ignore"):
        assert np.flatnonzero(~np.isfinite(heard[0])).tolist() == [place]
    rest = np.arange(N) != place
    assert (np.asarray(heard)[:, rest] == x.mean(0)[rest]).all()
    assert state.fallbacks.tolist() == [1] * 4


def test_what_cancels_is_zero():
    x = stacked(1).repeat(2, 0)
    x[1] *= -1
    heard, state = exchanged(x)
    assert not heard.any()
    assert not state.unpeeled.any()


def test_a_tree_that_would_gain_nothing_travels_whole():
    tree = {"w": jnp.ones((4, 8)), "n": jnp.arange(4)}
    tx = lc.lossless_homomorphic(0.5)
    worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
    one = jax.tree.map(lambda x: x[0], tree)
    assert lc.traffic(worker, one, workers=4).bytes_max == 4 * 8
    assert lossless_bytes(one, 0.5, workers=4) == (4 * 8, 0)
    assert lc.spread(worker)(tree)["n"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_it_sends_the_sketch_the_bitmap_and_four_bytes(workers):
    tree = {"a": jnp.zeros((40, 50)), "b": jnp.zeros(7, jnp.bfloat16)}
    tx = lc.lossless_homomorphic(0.01)
    worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
    sent = lc.traffic(worker, tree, workers=workers)
    always, fallback = lossless_bytes(tree, 0.01, workers=workers)
    assert (sent.bytes_always, sent.bytes_max) == (always, always + fallback)
    assert fallback == 4 * 2007
    keys = workers * (20 + 1)
    buckets = 3 * -(-keys * (3 if keys < 100 else 2) // 3)
    bitmap = {2: 251, 3: 252 + 84, 8: 256 + 32}[workers]
    assert always == 4 * buckets + bitmap + 4


def test_it_talks_along_two_axes():
    x, axis = stacked(4), ("groups", "workers")
    tx = lc.lossless_homomorphic(0.01, axis=axis)
    worker = lambda g: tx.update(g, tx.init(g), step=0)
    for backend in ("vmap", "shard_map"):
        place = place_of(backend, 4, axis)
        heard, state = jax.jit(lc.spread(worker, axis=axis, **place))(x)
        assert (np.asarray(heard) == x.mean(0)).all()
        assert not state.unpeeled.any()


def test_each_shard_of_a_worker_falls_back_by_itself():
    # Branches that differ within a worker talk to the same shard of others alone.
    mesh = worker_mesh(2, inside={"fsdp": 4})
    specs = {"w": P(None, "fsdp")}
    tx = lc.per_shard(lc.lossless_homomorphic(0.05), specs, axes="fsdp")
    rng = np.random.default_rng(0)
    g = rng.integers(1, 9, (2, 64, 256)).astype(np.float32)
    full = np.arange(256) // 64 == 1  # the second shard, which is not sparse
    g[(rng.random(g.shape) > 0.04) & ~full] = 0
    stacked = {"w": jnp.asarray(g)}
    x = jax.device_put(stacked, NamedSharding(mesh, P(AXIS, None, "fsdp")))
    worker = lambda g: tx.update(g, tx.init(g), g, step=0)
    heard, state = jax.jit(lc.spread(worker, mesh=mesh))(x)
    np.testing.assert_array_equal(heard["w"], [g.mean(0)] * 2)
    (kept,) = state.shards
    np.testing.assert_array_equal(kept.fallbacks, [[0, 1, 0, 0]] * 2)


def test_peeled_top_k_is_gathered_top_k():
    # Exactly, on integers: what is selected, remembered and heard.
    rng = np.random.default_rng(0)
    stream = rng.integers(-64, 64, (4, 5, 40, 50)).astype(np.float32)
    exchange = (lc.sparsified(lc.top_k(0.01)), lc.lossless_homomorphic(0.01))

    def run(update, init):
        def worker(stream):
            def step(state, now):
                g, t = now
                heard, state = update(g, state, t)
                return state, heard

            first = lc.spmd.vary(init(stream[0]), AXIS)
            return jax.lax.scan(step, first, (stream, jnp.arange(5)))

        return jax.jit(lc.spread(worker))(stream)

    def chained(g, states, t):
        kept, first = exchange[0].update(g, states[0], step=t)
        heard, second = exchange[1].update(kept, states[1], step=t)
        return heard, (first, second)

    feedback = lc.error_feedback(lc.top_k(0.01))
    (first, second), heard = run(chained, lambda g: tuple(x.init(g) for x in exchange))
    state, expected = run(
        lambda g, s, t: feedback.update(g, s, step=t), lambda g: feedback.init(g)
    )
    assert not second.fallbacks.any()
    assert (np.asarray(heard) == np.asarray(expected)).all()
    assert (np.asarray(first.error) == np.asarray(state.error)).all()


def test_half_precision_is_summed_in_float32_and_its_residual_kept_there():
    g = jnp.ones((4, 2000), jnp.bfloat16).at[0, 5].set(3.0)
    tx = lc.sparsified(lc.top_k(0.001))
    worker = lambda g: tx.update(g, tx.init(g), step=0)
    kept, state = lc.spread(worker)(g)
    assert kept.dtype == jnp.bfloat16
    assert state.error.dtype == jnp.float32
    assert (
        np.asarray(kept, np.float32) + state.error == np.asarray(g, np.float32)
    ).all()
    heard, _ = exchanged(kept, density=0.001)
    assert heard.dtype == jnp.bfloat16
    assert (
        heard[0] == jnp.asarray(kept, jnp.float32).mean(0).astype(heard.dtype)
    ).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"density": 0.0}, "fraction=0.0"),
        ({"density": 0.1, "slack": 0.5}, "slack 0.5"),
        ({"density": 0.1, "supports": "equal"}, "supports='equal'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        lc.lossless_homomorphic(**options)


def test_complex_leaves_and_statistics_are_refused():
    tx = lc.lossless_homomorphic(0.1)
    g = {"w": jnp.zeros((2, 5), jnp.complex64)}
    with pytest.raises(ValueError, match=r"leaf \['w'\].*real and imaginary"):
        lc.spread(lambda g: tx.update(g, tx.init(g), step=0)[0])(g)
    with pytest.raises(ValueError, match="use error_feedback"):
        lc.sparsified(lc.thc())
