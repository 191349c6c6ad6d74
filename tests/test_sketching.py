"""Feedback in sketches, against the same with vectors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lowcomm as lc
from lowcomm.peeling import estimates, hashes, sketch
from lowcomm.sketches import median
from lowcomm.sketching import sketched_bytes
from lowcomm.spmd import AXIS, vary, worker_mesh

K, T, N = 4, 6, 12
KEY = jax.random.key(0)  # of seed 0


@functools.cache
def listener(tx, on_mesh=False):
    def worker(stream):
        def step(state, now):
            heard, state = tx.update(now, state)
            return state, (heard, state)

        first = jax.tree.map(lambda x: x[0], stream)
        return lax.scan(step, vary(tx.init(first), AXIS), stream)[1]

    return jax.jit(lc.spread(worker, mesh=worker_mesh(K) if on_mesh else None))


def integers(*shape, seed=0):
    values = np.random.default_rng(seed).integers(-64, 64, shape)
    return values.astype(np.float32)


def top(x, k):
    """The k largest of a vector, the others zero."""
    out = np.zeros_like(x)
    chosen = np.argsort(-np.abs(x), kind="stable")[:k]
    out[chosen] = x[chosen]
    return out


def collides(columns, n=N):
    of = lambda r: np.asarray(hashes(KEY, jnp.arange(n), r, columns)[0])
    return any(len(set(of(r))) < n for r in range(3))


@functools.cache
def enough():
    """So many columns that no two of the entries share a bucket."""
    return next(c for c in range(16, 10_000) if not collides(c))


@pytest.mark.parametrize("forget", ["zero", "subtract"])
@pytest.mark.parametrize("on_mesh", [False, True])
def test_without_collisions_it_is_top_k_of_the_mean_with_error_feedback(
    forget, on_mesh
):
    # Not of each worker's own: the selection is one for all.
    tx = lc.sketched(0.25, rows=3, columns=enough(), momentum=0.0, forget=forget)
    stream = integers(K, T, N)
    heard, state = listener(tx, on_mesh)(stream)
    e = np.zeros(N)
    for t in range(T):
        p = e + stream[:, t].mean(0)
        expected = top(p, 3)
        e = p - expected
        assert (np.asarray(heard)[:, t] == expected).all()
    of_e = sketch(jnp.asarray(e, jnp.float32), jnp.arange(N), KEY, 3, enough())
    assert (np.asarray(state.sketched_error)[:, -1] == of_e).all()


def test_momentum_acts_before_selection_and_is_forgotten_where_it_was_applied():
    tx = lc.sketched(0.25, rows=3, columns=enough(), momentum=0.5)
    stream = integers(K, T, N)
    heard, _ = listener(tx)(stream)
    v = e = np.zeros(N)
    for t in range(T):
        v = v / 2 + stream[:, t].mean(0)
        delta = top(e + v, 3)
        e, v = np.where(delta, 0, e + v), np.where(delta, 0, v)
        assert (np.asarray(heard)[:, t] == delta).all()


@pytest.mark.parametrize("forget", ["zero", "subtract"])
def test_with_collisions_buckets_are_zeroed_or_what_was_applied_is_subtracted(forget):
    tx = lc.sketched(0.25, rows=3, columns=8, momentum=0.0, forget=forget)
    stream = integers(K, T, N)
    heard, state = listener(tx)(stream)
    E = np.zeros((3, 8))
    columns = [np.asarray(hashes(KEY, jnp.arange(N), r, 8)[0]) for r in range(3)]
    of = lambda x: np.asarray(
        sketch(jnp.asarray(x, jnp.float32), jnp.arange(N), KEY, 3, 8), np.float64
    )
    for t in range(T):
        E = E + of(stream[:, t].mean(0))
        found = np.median(estimates(jnp.asarray(E), jnp.arange(N), KEY), axis=0)
        delta = top(found, 3)
        assert (np.asarray(heard)[0, t] == delta).all()
        if forget == "subtract":
            E = E - of(delta)
        else:
            for r in range(3):
                E[r, columns[r][np.flatnonzero(delta)]] = 0
        assert (np.asarray(state.sketched_error)[0, t] == E).all()


def test_with_few_columns_what_is_subtracted_comes_back_and_zeroed_does_not():
    # Nothing is added after the first step: what is kept should fade.
    stream = np.zeros((1, 20, 200), np.float32)
    stream[:, 0] = np.random.default_rng(0).normal(size=200)
    sizes = {}
    for forget in ("zero", "subtract"):
        tx = lc.sketched(0.25, rows=3, columns=20, momentum=0.0, forget=forget)
        E = np.asarray(listener(tx)(stream)[1].sketched_error, np.float64)[0]
        sizes[forget] = np.abs(E).sum((1, 2))
    assert sizes["zero"][-1] <= sizes["zero"][0]
    assert sizes["subtract"][-1] > 10 * sizes["subtract"][0]


def test_a_sparse_vector_is_recovered_once_there_are_columns_enough():
    # 5 rows, 10 of 5000 entries, 50 draws: 42 % at 200 columns, all at 1000.
    @functools.partial(jax.jit, static_argnums=2)
    def recovered(x, key, columns):
        table = sketch(x, jnp.arange(5000), key, 5, columns)
        found = median(estimates(table, jnp.arange(5000), key))
        places = lax.top_k(jnp.abs(found), 10)[1]
        return (x[places] != 0).all()

    rng, share = np.random.default_rng(0), {}
    for columns in (200, 1000):
        hits = 0
        for draw in range(50):
            x = np.zeros(5000, np.float32)
            x[rng.choice(5000, 10, replace=False)] = rng.normal(size=10)
            hits += bool(recovered(x, jax.random.key(draw), columns))
        share[columns] = hits / 50
    # Two standard errors of 50 draws are 14 %, and the two counts differ by both.
    assert abs(share[200] - 0.42) < 0.2
    assert share[1000] >= 0.94


def test_the_second_round_makes_values_exact_and_loses_nothing():
    tx = lc.sketched_top_k(0.25, rows=3, columns=8, candidates=2)
    stream = integers(K, T, N)
    heard, state = listener(tx)(stream)
    heard, error = np.asarray(heard), np.asarray(state.error)
    assert (heard == heard[:1]).all()
    total = heard[0].sum(0) + error[:, -1].mean(0)
    assert (total == stream.sum(1).mean(0)).all()
    assert (np.count_nonzero(heard[0], axis=1) <= 3).all()
    # What was chosen is exactly the mean of what the workers wanted there.
    e = np.zeros((K, N))
    for t in range(T):
        p = e + stream[:, t]
        chosen = heard[0, t] != 0
        assert (heard[0, t][chosen] == p.mean(0)[chosen]).all()
        e = error[:, t]
        assert (e[:, ~chosen] == p[:, ~chosen]).all()


@pytest.mark.parametrize("on_mesh", [False, True])
def test_among_all_candidates_it_is_top_k_of_the_mean(on_mesh):
    # Four times a quarter: the sketch, of a single bucket, has nothing to say.
    tx = lc.sketched_top_k(0.25, rows=1, columns=1, candidates=4)
    stream = integers(K, T, N)
    heard, _ = listener(tx, on_mesh)(stream)
    e = np.zeros(N)
    for t in range(T):
        p = e + stream[:, t].mean(0)
        expected = top(p, 3)
        e = p - expected
        assert (np.asarray(heard)[:, t] == expected).all()


@pytest.mark.parametrize(
    "tx",
    [
        lc.sketched(0.25, rows=3, columns=8),
        lc.sketched(0.25, rows=3, columns=8, forget="subtract"),
        lc.sketched_top_k(0.25, rows=3, columns=8),
    ],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_heard_by_all_and_then_forgotten(tx, bad):
    stream = integers(K, T, N)
    stream[1, 2, 5] = bad
    heard, state = listener(tx)(stream)
    finite = np.isfinite(np.asarray(heard)).all((0, 2))
    assert finite.tolist() == [t != 2 for t in range(T)]
    assert not np.isfinite(np.asarray(heard)[:, 2]).all(1).any()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_bytes_are_those_of_the_tables_and_the_candidates():
    tree = {"w": jnp.zeros((30, 10), jnp.bfloat16), "b": jnp.zeros(5), "n": 3}
    for tx, more, expected in (
        (lc.sketched(0.1, columns=0.02), {}, 5 * 6),
        (lc.sketched(0.1, rows=2, columns=7), {"rows": 2, "columns": 7}, 14),
        (
            lc.sketched_top_k(0.1, candidates=3),
            {"fraction": 0.1, "candidates": 3},
            5 * 6 + 3 * 31,
        ),
    ):
        worker = lambda g, tx=tx: tx.update(g, tx.init(g))[0]
        sent = lc.traffic(worker, tree, workers=4).bytes_always
        assert sent == sketched_bytes(tree, **more) == 4 * expected
        shapes = jax.eval_shape(lambda: tree | {"n": jnp.int32(3)})
        assert sketched_bytes(shapes, **more) == sent


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: lc.sketched(0.0), "fraction=0.0"),
        (lambda: lc.sketched(0.1, momentum=1.0), "momentum 1.0"),
        (lambda: lc.sketched(0.1, forget="both"), "forget='both'"),
        (lambda: lc.sketched(0.1, columns=0), "columns=0"),
        (lambda: lc.sketched_top_k(2.0), "fraction=2.0"),
        (lambda: lc.sketched_top_k(0.1, candidates=0), "candidates=0"),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_another_tree_than_that_of_init_is_refused():
    tx = lc.sketched(0.1, columns=0.5)
    worker = lambda g: tx.update(g, tx.init(g[:4]))[0]
    with pytest.raises(ValueError, match="2 columns and this tree of 12 entries"):
        lc.spread(worker)(jnp.zeros((K, N)))
