"""PowerSGD: one projection for all, in numpy and in the exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from lowcomm.ledger import traffic
from lowcomm.lowrank import low_rank_bytes, powersgd
from lowcomm.spmd import AXIS, vary, worker_mesh
from lowcomm.sync import average
from lowcomm.workers import spread

K, T, M, N = 4, 4, 12, 8
EPS = float(jnp.finfo(jnp.float32).eps)

either = pytest.mark.parametrize("residual", ["local", "global"])
on_both = pytest.mark.parametrize("backend", ["vmap", "mesh"])


@functools.cache
def listener(rank, backend, **options):
    tx = powersgd(rank, **options)

    def worker(stream):
        def step(carry, now):
            t, state = carry
            heard, state = tx.update(now, state, step=t)
            return (t + 1, state), (heard, state)

        first = jax.tree.map(lambda x: x[0], stream)
        carry = jnp.int32(0), vary(tx.init(first), AXIS)
        return lax.scan(step, carry, stream)[1]

    return jax.jit(spread(worker, mesh=worker_mesh(K) if backend == "mesh" else None))


def listen(stream, rank=2, backend="vmap", **options):
    """What is heard of a stacked stream ``[K, T, …]``, and the states after it."""
    return listener(rank, backend, **options)(stream)


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@on_both
def test_what_is_heard_is_the_mean_projected_on_its_leading_directions(backend):
    # The factors as orthogonal projections, which know no signs: P Pᵀ D.
    stream = gaussian(K, T, M, N)
    heard, state = listen(stream, backend=backend)
    Q = np.asarray(powersgd(2).init(stream[0, 0]).query, np.float64)
    e = np.zeros((K, M, N))
    # A projection is as exact as the angle between what P is made of allows.
    bound = 64 * EPS * np.linalg.norm(stream, axis=(2, 3)).max() * 8
    for t in range(T):
        D = e + stream[:, t]
        P = np.linalg.qr(D.mean(0) @ Q)[0]
        Q = D.mean(0).T @ P
        e = D - P @ (P.T @ D)
        np.testing.assert_allclose(heard[:, t], [P @ Q.T] * K, rtol=0, atol=bound)
        np.testing.assert_allclose(state.residual[:, t], e, rtol=0, atol=bound)


@either
def test_nothing_is_lost(residual):
    stream = gaussian(K, 40, M, N)
    heard, state = listen(stream, residual=residual)
    heard = np.asarray(heard, np.float64)[0].sum(0)
    error = np.asarray(state.residual, np.float64).mean(0)
    # Each step rounds numbers below 16 some M + N times on the way.
    bound = 40 * (M + N) * EPS * 16
    total = heard + error[-1]
    np.testing.assert_allclose(total, stream.sum(1).mean(0), rtol=0, atol=bound)
    assert np.abs(error[-1]).max() > 100 * bound


def test_products_are_formed_in_full_precision():
    # On accelerators the default is coarser, and what it rounds off would be lost.
    x = gaussian(M, N)
    tx = powersgd(2)
    program = str(jax.make_jaxpr(tx.update, axis_env=[(AXIS, K)])(x, tx.init(x)))
    # Two of them, and one in the orthonormalization; the others are sums of outer ones.
    products = program.count("dot_general")
    assert products >= 3
    highest = "precision=(Precision.HIGHEST, Precision.HIGHEST)"
    assert program.count(highest) == products


def test_a_mean_of_low_rank_is_heard_exactly_whatever_the_workers_hold():
    noise = gaussian(K, 1, M, N)
    noise -= noise.mean(0)
    low = gaussian(M, 2) @ gaussian(2, N, seed=1)
    heard, state = listen(noise + low)
    np.testing.assert_allclose(heard[0, 0], low, atol=256 * EPS * np.abs(low).max())
    mean = np.asarray(state.residual).mean(0)
    np.testing.assert_allclose(mean, 0, atol=256 * EPS * np.abs(low).max())
    assert np.abs(state.residual).max() > 0.1  # each has more to say than the mean


def test_the_workers_count_only_through_their_mean():
    stream = gaussian(K, T, M, N)
    heard, _ = listen(stream)
    of_mean, _ = listen(np.tile(stream.mean(0), (K, 1, 1, 1)))
    np.testing.assert_allclose(heard, of_mean, rtol=0, atol=1024 * EPS)


@on_both
def test_all_workers_hear_and_share_the_same_bits(backend):
    heard, state = listen(1e4 * gaussian(K, T, M, N) ** 9, backend=backend)
    for x in (heard, state.query):
        assert (np.asarray(x) == np.asarray(x)[:1]).all()
    assert (np.asarray(state.residual) != np.asarray(state.residual)[:1]).any()


def test_a_warm_start_turns_towards_the_leading_directions():
    # Of a fixed matrix with singular values 1, 1/2, 1/4 … the residual repeats the
    # rest, so compare single steps: begin again with the last query and no residual.
    U, V = np.linalg.qr(gaussian(M, N))[0], np.linalg.qr(gaussian(N, N, seed=1))[0]
    u = jnp.asarray((U * 0.5 ** np.arange(N)) @ V.T)
    tx = powersgd(2)

    def worker(u):
        state, errors = tx.init(u), []
        for _ in range(6):
            heard, state = tx.update(u, state._replace(residual=jnp.zeros_like(u)))
            errors.append(jnp.linalg.norm(heard - u))
        return jnp.stack(errors)

    errors = np.asarray(jax.jit(spread(worker))(jnp.stack([u] * K)))[0]
    best = np.linalg.norm(0.5 ** np.arange(2, N))
    assert errors[0] > 1.01 * best
    np.testing.assert_allclose(errors[-1], best, rtol=1e-4)


@on_both
def test_vectors_small_matrices_and_full_ranks_travel_whole(backend):
    integers = np.random.default_rng(0).integers(-32, 32, (K, T, 200))
    integers = integers.astype(np.float32)
    square = integers[..., :96].reshape(K, T, M, N)
    stream = {
        "vector": integers[..., :9],
        "scalar": integers[..., 0],
        "row": integers[..., :7].reshape(K, T, 1, 7),
        "small": integers[..., :64].reshape(K, T, 8, 8),  # 2 · 2 · (8 + 8) = 8 · 8
        "complex": square.astype(np.complex64) * (1 + 2j),
    }
    heard, state = listen(stream, backend=backend)
    for name, x in stream.items():
        np.testing.assert_array_equal(heard[name], [x.mean(0)] * K)
    assert not jax.tree.leaves(state)
    full, state = listen(square, N, backend)
    np.testing.assert_array_equal(full, [square.mean(0)] * K)
    assert not jax.tree.leaves(state)


def test_more_dimensions_are_rows():
    stream = gaussian(K, T, M, N)
    heard, _ = listen(stream)
    folded, state = listen(stream.reshape(K, T, 3, 4, N))
    np.testing.assert_array_equal(folded.reshape(heard.shape), heard)
    assert state.residual.shape == (K, T, 3, 4, N)


def test_other_leaves_stay_and_half_precision_is_remembered_precisely():
    x = {
        "w": jnp.asarray(gaussian(K, M, N), jnp.bfloat16),
        "count": jnp.arange(K),
        "key": jax.random.split(jax.random.key(0), K),
        "empty": jnp.zeros((K, 3, 0)),
        "none": None,
    }
    tx = powersgd(1)

    def worker(x):
        before = tx.init(x)
        heard, after = tx.update(x, before)
        kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
        assert kinds(before) == kinds(after)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(after))
        return heard

    heard = jax.jit(spread(worker))(x)
    assert heard["w"].dtype == jnp.bfloat16
    for name in ("count", "key", "empty"):
        assert (heard[name] == x[name]).all()
    assert heard["none"] is None


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_bytes_are_those_of_the_factors_and_of_what_travels_whole(rank):
    array = jax.ShapeDtypeStruct
    tree = {
        "w": array((M, N), np.float32),
        "conv": array((3, 3, 4, N), np.float32),
        "half": array((M, N), jnp.bfloat16),
        "bias": array((N,), np.float32),
        "count": array((), np.int32),
    }
    # Five pairs make neither half as small, so they travel whole.
    factors = {1: 20, 2: 40, 5: M * N}[rank]
    folded = {1: 36 + N, 2: 2 * (36 + N), 5: 36 * N}[rank]
    expected = 4 * (2 * factors + folded + N)
    assert low_rank_bytes(tree, rank) == expected
    tx = powersgd(rank)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
    state = tx.init(zeros)
    assert traffic(tx.update, zeros, state, workers=8).bytes_always == expected
    assert traffic(tx.update, zeros, state, workers=1).bytes_always == 0


def test_a_device_of_four_sends_a_quarter_of_all_factors_of_a_side():
    array = jax.ShapeDtypeStruct
    tree = {"w": array((24, 32), np.float32), "b": array((8,), np.float32)}
    parts = {"w": array((24, 8), np.float32), "b": array((2,), np.float32)}
    assert low_rank_bytes(tree, 2, parts, 4) == 4 * (2 * (6 + 8) + 2)
    # Of 3 times 17 numbers one device sends one fewer, and zeros make it up.
    odd = {"w": array((17, 32), np.float32), "b": tree["b"]}
    assert low_rank_bytes(odd, 3, parts, 4) == 4 * (13 + 24 + 2)


def test_the_two_residuals_differ_and_what_is_heard_does_not():
    stream = gaussian(K, 20, M, N)
    heard, mine = listen(stream, residual="local")
    same, of_all = listen(stream, residual="global")
    # Residuals below 2⁵ are what the products round, some M + N times a step.
    bound = 20 * (M + N) * EPS * 32
    np.testing.assert_allclose(heard, same, rtol=0, atol=bound)
    means = (np.asarray(s.residual, float).mean(0) for s in (mine, of_all))
    np.testing.assert_allclose(*means, rtol=0, atol=bound)
    sizes = [np.linalg.norm(s.residual[:, -1]) for s in (mine, of_all)]
    assert sizes[1] > 1.5 * sizes[0]


@pytest.mark.parametrize("shape", [(M, N), (N, M)])
def test_full_rank_is_the_mean(shape):
    stream = gaussian(K, T, *shape)
    heard, state = listen(stream, rank=99, min_compression=0.0)
    # A few orthonormal columns that are so to rounding, times numbers below 8.
    bound = 8 * 8 * (M + N) * EPS
    np.testing.assert_allclose(heard, [stream.mean(0)] * K, rtol=0, atol=bound)
    assert state.query.shape == (K, T, shape[1], N)


def test_without_a_warm_start_directions_are_drawn_at_every_step():
    stream = np.tile(gaussian(M, N), (K, T, 1, 1))
    heard, state = listen(stream, rank=1, warm_start=False)
    assert state.query is None
    again, _ = listen(stream, rank=1, warm_start=False)
    np.testing.assert_array_equal(heard, again)
    first, second = heard[0, 0], heard[0, 1]
    cosine = np.sum(first * second) / np.linalg.norm(first) / np.linalg.norm(second)
    assert abs(cosine) < 0.99
    tx = powersgd(1, warm_start=False)
    with pytest.raises(ValueError, match="needs step="):
        spread(lambda x: tx.update(x, tx.init(x))[0])(stream[:, 0])


def test_a_leaf_may_have_a_rank_of_its_own():
    tree = {"a": {"kernel": jnp.ones((M, N))}, "b": {"kernel": jnp.ones((M, N))}}
    asked = []

    def rank(path, shape):
        asked.append((path, shape))
        return {"a/kernel": 1, "b/kernel": 0}[path]

    state = powersgd(rank).init(tree)
    assert asked == [("a/kernel", (M, N)), ("b/kernel", (M, N))]
    assert state.query["a"]["kernel"].shape == (N, 1)
    assert state.query["b"]["kernel"] is None
    assert low_rank_bytes(tree, rank) == 4 * (M + N + M * N)
    with pytest.raises(ValueError, match=r"rank of leaf a/kernel is -1"):
        powersgd(lambda path, shape: -1).init(tree)


def test_a_tree_is_two_collectives_and_one_orthonormalization_a_shape():
    grads = [jnp.ones((M, N))] * 5 + [jnp.ones((32, N))] * 3 + [jnp.ones(N)] * 4
    tx = powersgd(2)
    program = jax.make_jaxpr(tx.update, axis_env=[(AXIS, K)])(grads, tx.init(grads))
    names = [equation.primitive.name for equation in program.eqns]
    assert sum("psum" in name for name in names) == 2
    assert str(program).count("while[") + str(program).count("scan[") == 2 * 2


@pytest.mark.parametrize("rows", [slice(None), slice(3, None)])
def test_zero_is_heard_as_zero_and_does_not_deafen(rows):
    # With a query of zeros the factor P would be the first unit vectors; a gradient
    # without those rows would meet it with zeros, and nothing would be heard again.
    stream = np.zeros((K, T, M, N), np.float32)
    stream[:, 1:, rows] = gaussian(K, T - 1, M, N)[:, :, rows]
    heard, state = listen(stream)
    assert not np.asarray(heard)[:, 0].any()
    assert not np.asarray(state.residual)[:, 0].any()
    assert np.isfinite(heard).all()
    assert np.asarray(heard)[:, 1:].any(axis=(2, 3)).all()


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**40])
def test_scaling_by_a_power_of_two_scales_what_is_heard(scale):
    stream = gaussian(K, T, M, N)
    heard, _ = listen(stream)
    scaled, _ = listen(scale * stream)
    np.testing.assert_array_equal(scaled / scale, heard)


@either
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_heard_by_all_and_forgotten(bad, residual):
    stream = gaussian(K, T, M, N)
    stream[2, 0, 5, 3] = bad
    heard, state = listen(stream, residual=residual)
    assert not np.isfinite(np.asarray(heard)[:, 0]).any(axis=(1, 2)).any()
    assert np.isfinite(np.asarray(heard)[:, 1:]).all()
    assert np.isfinite(state.residual).all()
    assert np.isfinite(state.query).all()


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="rank 0 is below 1"):
        powersgd(0)
    with pytest.raises(ValueError, match="min_compression -1 must be 0 or more"):
        powersgd(1, min_compression=-1)
    with pytest.raises(ValueError, match="neither 'local' nor 'global'"):
        powersgd(1, residual="own")
    tx, x = powersgd(1), jnp.zeros((K, M, N))
    update = lambda x: tx.update({"w": x}, tx.init({"w": jnp.zeros((N, M))}))[0]
    with pytest.raises(ValueError, match=r"\['w'\] has shape \(12, 8\) .* \(8, 12\)"):
        spread(update)(x)
    verb = average(optax.sgd(1.0), exchange=tx)
    with pytest.raises(ValueError, match=r"not parameters. Use rounds"):
        spread(lambda x: verb.update(x, verb.init(x), x, step=0)[0])(x)
