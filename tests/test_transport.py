"""Whole trees through few collectives: what is heard, and how many calls it takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P

import lowcomm as lc
from experiments.catalogue import CATALOGUE
from experiments.contracts import Setting
from experiments.tasks import make_task
from lowcomm import transport
from lowcomm.spmd import AXIS
from tests.problems import BACKENDS, place_of

K = 4
backends = pytest.mark.parametrize("backend", BACKENDS)


def tree(seed: int = 0) -> dict:
    """Leaves of several shapes and types, integers, so that sums are exact."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.integers(-50, 50, (K, *shape)))
    return {
        "w": draw(3, 5).astype(jnp.float32),
        "b": draw(7).astype(jnp.float32),
        "half": draw(2, 2).astype(jnp.bfloat16),
        "scalar": draw().astype(jnp.float32),
        "codes": draw(6).astype(jnp.int8),
        "empty": jnp.zeros((K, 0, 3)),
        "none": None,
    }


def run(worker, x, backend):
    return jax.jit(lc.spread(worker, **place_of(backend, K)))(x)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@backends
def test_sums_means_and_maxima_are_those_of_each_leaf(backend):
    x = {k: v for k, v in tree().items() if k != "codes"}
    talks = {
        "sum": (transport.reduce_sum, lambda v: v.astype(np.float32).sum(0)),
        "mean": (transport.reduce_mean, lambda v: v.astype(np.float32).mean(0)),
        "max": (transport.reduce_max, lambda v: v.max(0)),
    }
    worker = lambda x: {n: talk(x, AXIS) for n, (talk, _) in talks.items()}
    heard = run(worker, x, backend)
    for n, (_, expected) in talks.items():
        for leaf, v in x.items():
            if v is not None and v.size:
                wanted = expected(np.asarray(v))
                got = np.asarray(heard[n][leaf])
                np.testing.assert_array_equal(got, np.stack([wanted] * K))


@backends
def test_a_maximum_over_the_workers_does_not_lose_a_nan(backend):
    x = jnp.array([1.0, 2.0, jnp.nan, 3.0])
    worker = lambda x: transport.reduce_max((x, jnp.int32(7)), AXIS)
    numbers, codes = run(worker, x, backend)
    assert np.isinf(numbers).all()
    assert (codes == 7).all()


@backends
def test_a_gather_has_what_each_worker_holds_in_their_order(backend):
    x = tree()
    heard = run(lambda x: transport.gather(x, AXIS), x, backend)
    for leaf, v in x.items():
        if v is not None:
            assert heard[leaf].dtype == v.dtype
            np.testing.assert_array_equal(heard[leaf], np.stack([v] * K))


@backends
@pytest.mark.parametrize("n", [255, 256, 257])
def test_a_gather_is_the_same_whether_it_fills_whole_tiles_or_not(n, backend):
    x = jnp.arange(K * n, dtype=jnp.int32).reshape(K, n)
    heard = run(lambda x: transport.gather(x, AXIS), x, backend)
    np.testing.assert_array_equal(heard, np.stack([x] * K))


@backends
def test_a_swap_transposes_rows_and_workers(backend):
    rng = np.random.default_rng(1)
    x = {
        "a": jnp.asarray(rng.integers(0, 255, (K, K, 5)), jnp.uint8),
        "b": jnp.asarray(rng.normal(size=(K, K)), jnp.float32),
        "c": jnp.asarray(rng.normal(size=(K, K, 2, 3)), jnp.float32),
    }
    heard = run(lambda x: transport.swap(x, AXIS), x, backend)
    same(heard, jax.tree.map(lambda v: jnp.swapaxes(v, 0, 1), x))


@backends
def test_what_is_permuted_is_what_the_partner_holds(backend):
    x = {k: v for k, v in tree().items() if k != "empty"}
    pairs = [(i, (i + 1) % K) for i in range(K)]
    heard = run(lambda x: transport.permute(x, pairs, AXIS), x, backend)
    same(heard, jax.tree.map(lambda v: jnp.roll(v, 1, axis=0), x))


@backends
def test_one_worker_is_heard_exactly_by_all(backend):
    x = tree()
    heard = run(lambda x: transport.from_worker(x, 2, AXIS), x, backend)
    exact = [k for k in x if k not in ("none", "codes")]
    same(
        {k: heard[k] for k in exact},
        {k: jnp.broadcast_to(x[k][2], x[k].shape) for k in exact},
    )
    same(heard["codes"], x["codes"])  # integers are nobody's to exchange


@backends
def test_sums_of_codes_do_not_wrap(backend):
    codes = jnp.full((K, 9), 100, jnp.int8)  # 400 does not fit 8 bits
    heard = run(lambda x: transport.reduce_codes(x, 100, AXIS), codes, backend)
    assert heard.dtype == jnp.int16
    np.testing.assert_array_equal(heard, np.full((K, 9), 400))


@pytest.mark.parametrize(
    ("bound", "workers", "kind"),
    [
        (1, 127, jnp.int8),
        (1, 128, jnp.int16),
        (127, 258, jnp.int16),
        (127, 259, jnp.int32),
    ],
)
def test_sums_travel_in_the_narrowest_type_that_holds_them(bound, workers, kind):
    assert transport.type_of_sums(bound, workers) == kind


def test_sums_that_fit_no_type_are_refused():
    with pytest.raises(ValueError, match="does not fit 32 bits"):
        transport.type_of_sums(2**30, 2)


def calls(worker, x) -> list[str]:
    """The collectives of one worker's program, one entry for each equation."""
    mesh = AbstractMesh((K,), (AXIS,))
    program = jax.make_jaxpr(lc.spread(worker, mesh=mesh))(x)
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            for sub in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
            ):
                if hasattr(sub, "eqns") or hasattr(sub, "jaxpr"):
                    walk(getattr(sub, "jaxpr", sub))
            name = eqn.primitive.name.removesuffix("_invariant")
            if name in ("psum", "pmax", "all_gather", "all_to_all", "ppermute"):
                found.append(name)

    walk(program.jaxpr)
    return found


def leaves(n: int, size: int = 30) -> list[jax.Array]:
    return [jnp.ones((K, size + i)) for i in range(n)]


@pytest.mark.parametrize("n", [2, 40])
def test_a_tree_is_one_collective_however_many_leaves_it_has(n):
    pairs = [(i, (i + 1) % K) for i in range(K)]
    assert calls(lambda x: transport.reduce_mean(x, AXIS), leaves(n)) == ["psum"]
    assert calls(lambda x: transport.gather(x, AXIS), leaves(n)) == ["all_gather"]
    assert calls(lambda x: transport.permute(x, pairs, AXIS), leaves(n)) == ["ppermute"]
    rows = [jnp.ones((K, K, 3 + i)) for i in range(n)]
    assert calls(lambda x: transport.swap(x, AXIS), rows) == ["all_to_all"]


def test_large_leaves_travel_beside_the_buffer_and_the_compiler_combines_them():
    x = [*leaves(10), jnp.ones((K, 2**18)), jnp.ones((K, 2**19))]
    worker = lambda x: transport.reduce_mean(x, AXIS)
    one = jax.tree.map(lambda v: v[0], x)
    rows = lc.traffic(worker, one, workers=K).rows
    small = 4 * sum(v.size for v in one[:10])
    assert [row.bytes for row in rows] == [small, 2**20, 2**21]
    step = jax.jit(lc.spread(worker, mesh=lc.worker_mesh(K)))
    assert step.lower(x).compile().as_text().count(" all-reduce(") == 1


EXCHANGES = {
    "mean": (lc.mean(), 1),
    "weighted_mean": (lc.weighted_mean(), 1),
    "gossip": (lc.gossip(lc.ring(K)), 2),  # to each neighbour
    "top_k": (lc.error_feedback(lc.top_k(0.1)), 2),  # values and places
    "random_k": (lc.error_feedback(lc.random_k(0.1)), 1),
    "sign": (lc.compressed_mean(lc.sign()), 2),  # bits and scales
    "int8": (lc.difference_feedback(lc.quantize()), 2),  # codes and scales
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_is_few_collectives_however_many_leaves_there_are(name):
    tx, most = EXCHANGES[name]

    def worker(x):
        more = {"weight": jnp.sum(x[0])} if name == "weighted_mean" else {}
        return tx.update(x, tx.init(x), step=0, **more)[0]

    few, many = (
        [jnp.ones((K, 8, 6 + i)) for i in range(n)] + leaves(n) for n in (2, 20)
    )
    assert calls(worker, few) == calls(worker, many)
    assert len(calls(worker, many)) <= most


def test_a_method_is_few_collectives_on_the_language_model():
    task = make_task("stdlib-lm", workers=K)
    params = jax.eval_shape(task.init, jax.random.key(0))
    assert len(jax.tree.leaves(params)) > 10
    for name in ("data_parallel", "sign_sgd", "top_k_sgd"):
        tx = CATALOGUE[name].make(workers=K, steps=1, learning_rate=0.1)
        worker = lambda g, tx=tx: tx.update(g, tx.init(g), g, step=0)[0]
        rows = lc.traffic(worker, params, workers=K).rows
        assert len(rows) <= 2
        setting = Setting(K, 1, 0.1, 1)
        assert (
            sum(row.bytes for row in rows)
            == CATALOGUE[name].sent(params, setting).always
        )


def test_leaves_that_the_compiler_divides_are_left_alone():
    mesh = AbstractMesh((2, 2), (AXIS, "fsdp"))
    x = [jnp.ones((2, 8, 4)), jnp.ones((2, 8, 6))]

    def rows(tx):
        worker = lambda x: tx.update(x, tx.init(x), step=0)[0]
        one = jax.tree.map(lambda v: v[0], x)
        return lc.traffic(worker, one, workers=mesh).rows

    where = lambda path: P(None, "fsdp")
    assert len(rows(lc.mean())) == 2
    whole = rows(lc.per_shard(lc.mean(), where, axes="fsdp"))
    assert [row.bytes for row in whole] == [4 * (8 * 2 + 8 * 3)]
