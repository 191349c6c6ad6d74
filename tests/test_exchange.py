"""Dense and mixing exchanges: the means and matrices of numpy, on both backends."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from lowcomm import top_k
from lowcomm.exchange import gossip, mean, weighted_mean
from lowcomm.feedback import error_feedback
from lowcomm.ledger import traffic
from lowcomm.spmd import AXIS, vary, worker_mesh
from lowcomm.sync import average
from lowcomm.topology import (
    Graph,
    complete,
    exponential,
    from_matrix,
    mixing_matrix,
    one_peer_exponential,
    ring,
)
from lowcomm.triggers import every
from lowcomm.workers import spread

K = 4
EPS = float(jnp.finfo(jnp.float32).eps)
GRID = ("site", "chip")

on_both = pytest.mark.parametrize("backend", ["vmap", "mesh"])
on_both_grids = pytest.mark.parametrize("backend", ["vmap", "shard_map"])


def mesh_of(backend, workers=K):
    return worker_mesh(workers) if backend == "mesh" else None


def once(tx, x, *, mesh=None, **extra):
    """What each worker hears of the stacked tree ``x``."""
    worker = lambda x: tx.update(x, tx.init(x), step=0, **extra)[0]
    return jax.jit(spread(worker, mesh=mesh))(x)


def on_grid(worker, *args, backend):
    """Two sites of four chips."""
    mesh = AbstractMesh((2, 4), GRID)
    if backend == "shard_map":
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), GRID)
    return jax.jit(spread(worker, mesh=mesh, axis=GRID, backend=backend))(*args)


def integers(*shape, seed=0, top=64):
    whole = np.random.default_rng(seed).integers(-top, top, shape)
    return whole.astype(np.float32)


@on_both
def test_the_mean_is_that_of_numpy_on_every_worker(backend):
    x = {"w": integers(K, 3, 2), "b": integers(K, seed=1)}
    heard = once(mean(), x, mesh=mesh_of(backend))
    for name, value in x.items():
        np.testing.assert_array_equal(heard[name], [value.mean(0)] * K)


@on_both
@pytest.mark.parametrize("tx", [mean(), gossip(complete(K))], ids=["mean", "gossip"])
def test_half_precision_is_summed_in_float32(backend, tx):
    # In bfloat16 512 + 1 + 1 + 2 is 512, and 4 · 60000 is above float16's 65504.
    coarse = jnp.array([512, 1, 1, 2], jnp.bfloat16)
    large = jnp.full(K, 60000, jnp.float16)
    heard = once(tx, (coarse, large), mesh=mesh_of(backend))
    assert heard[0].dtype == jnp.bfloat16
    assert heard[1].dtype == jnp.float16
    np.testing.assert_array_equal(heard[0].astype(np.float32), [129] * K)
    np.testing.assert_array_equal(heard[1].astype(np.float32), [60000] * K)


def test_half_precision_reduces_in_float32_and_gossips_as_it_is():
    leaf = jax.ShapeDtypeStruct((5,), jnp.bfloat16)
    kinds = lambda tx: [
        (row.dtype, row.bytes)
        for row in traffic(lambda x: tx.update(x, ())[0], leaf, workers=K).rows
    ]
    assert kinds(mean()) == [("float32", 20)]
    assert kinds(gossip(ring(K))) == [("bfloat16", 10)] * 2


@on_both
@pytest.mark.parametrize("tx", [mean(), weighted_mean(), gossip(ring(K))])
def test_other_leaves_stay_what_they_are_on_each_worker(backend, tx):
    others = {
        "count": jnp.arange(K, dtype=jnp.int8),
        "flag": jnp.array([True, False, False, True]),
        "key": jax.random.split(jax.random.key(0), K),
        "empty": jnp.zeros((K, 0)),
        "none": None,
        "masked": optax.MaskedNode(),
    }
    x = integers(K)
    heard = once(tx, others | {"x": x}, mesh=mesh_of(backend), weight=1.0)
    assert (heard.pop("x") != x).any()
    assert jax.tree.structure(heard) == jax.tree.structure(others)
    for a, b in zip(jax.tree.leaves(heard), jax.tree.leaves(others), strict=True):
        assert a.dtype == b.dtype
        assert bool(jnp.all(a == b))


@on_both
def test_the_weighted_mean_is_that_of_numpy(backend):
    x, w = integers(K, 5), np.array([1, 2, 0, 5], np.float32)
    worker = lambda x, w: weighted_mean().update(x, (), weight=w)[0]
    run = jax.jit(spread(worker, mesh=mesh_of(backend)))
    heard = run(x, w)
    np.testing.assert_array_equal(heard, [np.average(x, 0, w).astype(np.float32)] * K)
    # The ratio of two sums that only change their exponent is the same number.
    np.testing.assert_array_equal(run(x, 8 * w), heard)
    np.testing.assert_allclose(run(x, 3 * w), heard, rtol=4 * EPS)

    x[2] = np.nan  # of weight zero
    np.testing.assert_array_equal(run(x, w), heard)
    assert np.isnan(run(x, np.ones_like(w))).all()
    np.testing.assert_array_equal(run(x, 0 * w), x)


def test_equal_weights_are_the_mean():
    x = integers(K, 5)
    weighted = once(weighted_mean(), x, weight=2.0)
    np.testing.assert_array_equal(weighted, once(mean(), x))


@pytest.mark.parametrize(("weight", "given"), [(None, "nothing"), ([1.0, 2.0], "(2,)")])
def test_a_weight_that_is_no_scalar_is_refused(weight, given):
    weight = weight and jnp.array(weight)
    with pytest.raises(ValueError, match="one scalar a worker") as error:
        once(weighted_mean(), integers(K), weight=weight)
    assert given in str(error.value)


@on_both
@pytest.mark.parametrize("tx", [mean(), weighted_mean()], ids=["mean", "weighted"])
def test_all_workers_hear_the_same_bits(backend, tx):
    # A sum that begins with one's own value differs: 1.003 on one worker, 1 on others.
    hard = np.array([1e7, 1, -1e7, 0.003], np.float32)
    orders = np.random.default_rng(0).permuted(np.tile(hard, (50, 1)), axis=1).T
    heard = np.asarray(once(tx, orders, mesh=mesh_of(backend), weight=1.0))
    assert (heard == heard[0]).all()


@on_both_grids
def test_two_axis_names_are_one_long_axis(backend):
    x, w = integers(8, 3), np.arange(8, dtype=np.float32)
    everyone = on_grid(lambda x: mean(GRID).update(x, ())[0], x, backend=backend)
    np.testing.assert_array_equal(everyone, [x.mean(0)] * 8)
    worker = lambda x, w: weighted_mean(GRID).update(x, (), weight=w)[0]
    weighted = on_grid(worker, x, w, backend=backend)
    np.testing.assert_allclose(weighted, [w @ x / w.sum()] * 8, rtol=EPS)
    # Row-major: the chips of a site are neighbours in the stack.
    site = on_grid(lambda x: mean("chip").update(x, ())[0], x, backend=backend)
    sites = x.reshape(2, 4, 3).mean(1)
    np.testing.assert_array_equal(site, np.repeat(sites, 4, axis=0))


def test_a_graph_may_run_through_two_axis_names():
    x, graph = integers(8, 3), exponential(8)
    worker = lambda x: gossip(graph, axis=GRID).update(x, ())[0]
    mixed = on_grid(worker, x, backend="shard_map")
    np.testing.assert_array_equal(mixed, mixing_matrix(graph) @ x)


@on_both_grids
def test_a_chain_over_two_axes_is_hierarchical_compression(backend):
    tx = optax.chain(mean("chip"), error_feedback(top_k(0.5), axis="site"))
    x = integers(8, 2) + np.array([[0, 400]] * 4 + [[400, 0]] * 4, np.float32)
    sites = x.reshape(2, 4, 2).mean(1)  # the first site says y, the second x

    def worker(x):
        first, state = tx.update(x, tx.init(x), step=0)
        return first, tx.update(0 * x, state, step=1)[0]

    first, second = on_grid(worker, x, backend=backend)
    said = np.array([[0, sites[0, 1]], [sites[1, 0], 0]])
    np.testing.assert_array_equal(first, [said.mean(0)] * 8)
    np.testing.assert_array_equal(second, [(sites - said).mean(0)] * 8)
    sent = traffic(
        lambda x: tx.update(x, tx.init(x), step=0)[0], x[0], workers=(2, 4), axis=GRID
    )
    rows = [(row.axis, row.bytes) for row in sent.rows]
    # A tree of two entries whole; then one of them, and its place in a byte.
    assert sorted(rows) == [("chip", 8), ("site", 1), ("site", 4)]


def test_an_axis_that_is_not_bound_is_named_with_those_that_are():
    with pytest.raises(ValueError, match="axis 'workers' is not bound"):
        mean().update(jnp.ones(3), ())
    with pytest.raises(ValueError, match="'nodes' is not bound") as error:
        once(mean("nodes"), integers(K), mesh=worker_mesh(K))
    assert "'workers'" in str(error.value)


def test_an_axis_outside_the_verb_s_is_refused():
    tx = average(optax.sgd(1.0), exchange=mean(GRID), axis="site")
    worker = lambda x: tx.update(x, tx.init(x), x, step=0)[0]
    with pytest.raises(ValueError, match=r"\('site', 'chip'\).*\('site',\)"):
        on_grid(worker, integers(8), backend="shard_map")
    inside = average(optax.sgd(1.0), exchange=mean("chip"), axis=GRID)
    worker = lambda x: inside.update(x, inside.init(x), x, step=0)[0]
    assert on_grid(worker, integers(8), backend="shard_map").shape == (8,)


def gradients_of(mark, tx):
    """A user's own shard_map over a replicated parameter."""

    def worker(w, coefficient):
        grads = jax.grad(lambda w: w * coefficient[0])(mark(w))
        return vary(tx.update((grads, jnp.int32(0)), ())[0][0], AXIS)[None]

    where = dict(in_specs=(P(), P(AXIS)), out_specs=P(AXIS))
    run = jax.shard_map(worker, mesh=worker_mesh(K), **where)
    return run(jnp.float32(1), jnp.array([1.0, 2.0, 4.0, 9.0]))


@pytest.mark.parametrize("tx", [mean(), gossip(ring(K))], ids=["mean", "gossip"])
def test_gradients_that_were_summed_already_are_refused(tx):
    with pytest.raises(ValueError, match=r"axis 'workers'.*already summed"):
        gradients_of(lambda w: w, tx)


def test_gradients_of_a_marked_parameter_are_the_workers_own():
    # The constant integer beside them is no gradient, and no reason to complain.
    heard = gradients_of(lambda w: vary(w, AXIS), mean())
    np.testing.assert_array_equal(heard, [4.0] * K)


def chain_graph(n):
    """Metropolis weights of an open chain: its ends hear one neighbour."""
    W = np.eye(n)
    for i in range(n - 1):
        W[[i, i + 1], [i + 1, i]] += 1 / 3
        W[[i, i + 1], [i, i + 1]] -= 1 / 3
    return from_matrix(W, name="chain")


GRAPHS = {
    "ring": ring,
    "complete": complete,
    "exponential": exponential,
    "one_peer": one_peer_exponential,
    "chain": chain_graph,
}


def mixed(graph, x, exchanges, mesh=None):
    """The stacked ``x`` after each of several exchanges, ``[K, exchanges, …]``."""
    tx = gossip(graph)

    def worker(x, state):
        def step(carry, _):
            x, state = tx.update(*carry)
            return (x, state), x

        return lax.scan(step, (x, state), length=exchanges)[1]

    return jax.jit(spread(worker, mesh=mesh))(x, spread(tx.init)(x))


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("n", range(1, 9))
def test_gossip_is_the_mixing_matrix_round_after_round(kind, n):
    graph, x = GRAPHS[kind](n), integers(n, 3)
    exchanges = len(graph.rounds) + 1
    backends = (None, worker_mesh(n)) if n in (1, 3, 8) else (None,)
    results = [np.asarray(mixed(graph, x, exchanges, mesh)) for mesh in backends]
    expected = x.astype(np.float64)
    for t in range(exchanges):
        expected = mixing_matrix(graph, t) @ expected
        # Each of at most 8 + 1 roundings per exchange is of a number below 64.
        for result in results:
            bound = 9 * 64 * EPS * (t + 1)
            np.testing.assert_allclose(result[:, t], expected, rtol=0, atol=bound)
            np.testing.assert_allclose(
                result[:, t].mean(0, dtype=np.float64), x.mean(0), rtol=0, atol=bound
            )


@pytest.mark.parametrize("kind", GRAPHS)
def test_consensus_is_a_fixed_point_of_gossip(kind):
    x = np.tile(np.float32([1, np.pi, 1e-30, -1e30]), (8, 1))
    after = mixed(GRAPHS[kind](8), x, 1)[:, 0]
    np.testing.assert_array_equal(after, x)


@on_both
@pytest.mark.parametrize("period", [1, 2, 3, 6])
def test_a_changing_graph_advances_by_exchange_whatever_the_period(backend, period):
    # By the step, every third or sixth one would only ever use some of the rounds.
    tx = average(
        optax.sgd(0.0), exchange=gossip(one_peer_exponential(8)), when=every(period)
    )
    x = integers(8, 3)
    mesh = mesh_of(backend, 8)

    def worker(x, state):
        def step(carry, t):
            x, state = carry
            moves, state = tx.update(jnp.zeros_like(x), state, x, step=t)
            x = optax.apply_updates(x, moves)
            return (x, state), x

        return lax.scan(step, (x, state), jnp.arange(3 * period))[1]

    path = np.asarray(jax.jit(spread(worker, mesh=mesh))(x, spread(tx.init)(x)))
    agreed = np.tile(x.mean(0), (8, 1))
    np.testing.assert_array_equal(path[:, -1], agreed)
    assert (path[:, -2] != agreed).any()


def test_a_graph_that_moves_the_mean_or_is_of_another_size_is_refused():
    lossy = Graph("lossy", 2, (((0.5, (0, 1)), (0.25, (1, 0))),))
    with pytest.raises(ValueError, match=r"lossy: column 0 sums to 0.75"):
        gossip(lossy)
    with pytest.raises(ValueError, match=r"ring has 5 nodes .* has 4 workers"):
        once(gossip(ring(5)), integers(K))


@pytest.mark.parametrize("kind", GRAPHS)
def test_renaming_the_workers_renames_the_result(kind):
    graph, x = GRAPHS[kind](8), integers(8, 3)
    new = np.random.default_rng(1).permutation(8)  # worker i is now called new[i]
    renamed = lambda p: tuple(int(new[p[old]]) for old in np.argsort(new))
    rounds = tuple(
        tuple((weight, renamed(p)) for weight, p in part) for part in graph.rounds
    )
    old_names = np.argsort(new)
    there = mixed(Graph("renamed", 8, rounds), x[old_names], 2)
    np.testing.assert_array_equal(there, mixed(graph, x, 2)[old_names])


@pytest.mark.parametrize("kind", GRAPHS)
def test_gossip_sends_a_leaf_per_permutation_that_moves(kind):
    graph, x = GRAPHS[kind](8), np.zeros(3, np.float32)
    tx = gossip(graph)
    sent = traffic(tx.update, x, tx.init(x), workers=8)
    moves = max(sum(p != tuple(range(8)) for _, p in part) for part in graph.rounds)
    agree = 4 if len(graph.rounds) > 1 else 0
    assert sent.bytes_max == 12 * moves + agree
    assert sent.bytes_always == (agree or 12 * moves)
