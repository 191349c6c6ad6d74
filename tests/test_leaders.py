"""Who leads, and how far the others follow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh

import lowcomm as lc
from lowcomm import average, every, leader, mean, spread, toward

K = 4
X = jnp.asarray(np.random.default_rng(0).normal(size=(K, 5)), jnp.float32)


def heard(tx, x, scores, **how):
    worker = lambda x, s: tx.update(x, tx.init(x), score=s, about="parameters")[0]
    return np.asarray(jax.jit(spread(worker, **how))(x, jnp.asarray(scores)))


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([0.3, 0.2, 0.1, 0.4], 2),
        ([0.3, 0.1, 0.4, 0.1], 1),  # a tie goes to the lowest rank
        ([np.nan, 0.2, np.nan, 0.1], 3),
        ([np.nan, np.inf, np.nan, np.inf], 1),  # NaN loses even to infinity
        ([np.nan] * 4, 0),
        ([-np.inf, np.nan, -1.0, 0.0], 0),
    ],
)
def test_the_lowest_score_leads_ties_go_to_the_first_and_nan_never_wins(scores, best):
    np.testing.assert_array_equal(heard(leader(), X, scores), np.tile(X[best], (K, 1)))


@pytest.mark.parametrize("backend", ["vmap", "shard_map", "pmap"])
def test_what_the_others_hold_is_not_in_it_even_if_it_is_nan(backend):
    mesh = None if backend == "vmap" else lc.worker_mesh(K)
    x = X.at[0].set(jnp.nan).at[3].set(jnp.inf)
    found = heard(leader(), x, [3.0, 2.0, 1.0, 4.0], mesh=mesh, backend=backend)
    np.testing.assert_array_equal(found, np.tile(X[2], (K, 1)))


def test_adding_a_constant_to_all_scores_changes_nobody():
    scores = np.array([0.5, 0.25, 1.0, 0.125])
    there = [heard(leader(), X, scores + c) for c in (0.0, 8.0, -64.0)]
    for other in there[1:]:
        np.testing.assert_array_equal(other, there[0])


def test_half_precision_integers_and_keys_keep_their_bits():
    tree = {
        "h": X.astype(jnp.bfloat16),
        "c": X * 1j,
        "n": jnp.arange(K),
        "k": jax.random.split(jax.random.key(0), K),
        "z": None,
    }
    worker = lambda x, s: leader().update(x, (), score=s)[0]
    out = spread(worker)(tree, jnp.array([3.0, 1.0, 2.0, 4.0]))
    for name in "hc":
        assert out[name].dtype == tree[name].dtype
        np.testing.assert_array_equal(out[name], jnp.tile(tree[name][1], (K, 1)))
    np.testing.assert_array_equal(out["n"], tree["n"])
    assert (out["k"] == tree["k"]).all()


@pytest.mark.parametrize("backend", ["vmap", "shard_map"])
def test_a_leader_is_chosen_along_the_axis_that_is_named(backend):
    axes = ("groups", "workers")
    devices = np.array(jax.devices()[:K]).reshape(2, 2)
    mesh = AbstractMesh((2, 2), axes) if backend == "vmap" else Mesh(devices, axes)
    how = {"mesh": mesh, "axis": axes, "backend": backend}
    scores = [0.4, 0.3, 0.1, 0.2]
    of_group = heard(leader("workers"), X, scores, **how)
    of_all = heard(leader(axes), X, scores, **how)
    np.testing.assert_array_equal(of_group, X[np.array([1, 1, 2, 2])])
    np.testing.assert_array_equal(of_all, np.tile(X[2], (K, 1)))


def test_a_leader_costs_one_number_and_one_model():
    worker = lambda x, s: leader().update(x, (), score=s)[0]
    sent = lc.traffic(worker, np.ones(5, np.float32), np.float32(1), workers=K)
    assert sorted((row.collective, row.bytes) for row in sent.rows) == [
        ("all_gather", 4),
        ("all_reduce", 20),
    ]


# Part of the way


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
def test_the_leader_stays_and_the_others_shrink_their_distance_to_it(fraction):
    there = heard(toward(leader(), fraction), X, [2.0, 1.0, 3.0, 4.0])
    np.testing.assert_array_equal(there[1], X[1])
    before, after = (np.float64(x) - np.float64(X[1]) for x in (X, there))
    # Difference, product and sum round, each to 2^-24 of values below 8.
    np.testing.assert_allclose(after, (1 - fraction) * before, atol=3 * 8 * 2**-24)


def test_all_the_way_is_the_exchange_bit_for_bit_and_none_is_staying():
    scores = [2.0, 1.0, 3.0, 4.0]
    far = (1e7 * X).at[1].set(X[1])  # x + (z − x) would lose all digits of z
    np.testing.assert_array_equal(
        heard(toward(leader(), 1.0), far, scores), heard(leader(), far, scores)
    )
    np.testing.assert_array_equal(heard(toward(leader(), 0.0), far, scores), far)


def test_any_exchange_may_be_approached_inside_a_verb():
    tx = average(optax.sgd(1.0), exchange=toward(mean(), 0.25), when=every(1))
    worker = lambda x: x + tx.update(0 * x, tx.init(x), x, step=0)[0]
    np.testing.assert_array_equal(spread(worker)(jnp.array([0.0, 8.0])), [1.0, 7.0])


# What is refused


def test_a_score_is_asked_for_and_is_one_number():
    for score in (None, jnp.ones(2)):
        worker = lambda x, score=score: leader().update(x, (), score=score)[0]
        with pytest.raises(ValueError, match="score=s"):
            spread(worker)(X)


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_a_fraction_is_within_zero_and_one(fraction):
    with pytest.raises(ValueError, match=str(fraction)):
        toward(mean(), fraction)
