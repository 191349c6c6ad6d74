"""The laws of EDiT's penalty: who is left out, who counts how much, what is clipped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowcomm as lc
from lowcomm import penalized_mean, spread
from lowcomm.penalty import module_of

K = 4
each = lambda path: path  # every leaf is a layer


def hear(tx, displacements, state=None, **how):
    """What each worker hears of stacked displacements, and the states."""
    if state is None:
        state = spread(tx.init, **how)(displacements)
    talk = lambda d, s: tx.update(d, s, about="displacements")
    return jax.jit(spread(talk, **how))(displacements, state)


def directions(*norms, size=8):
    """``[K, size]`` float32, displacements of these norms, in directions of their own.

    Each has one entry only, so that norms and sums are exact.
    """
    out = np.zeros((len(norms), size), np.float32)
    out[np.arange(len(norms)), np.arange(len(norms))] = norms
    return jnp.asarray(out)


def with_history(tx, displacements, *, mean=1.0, deviation=0.25, seen=200):
    """States of workers whose norms have been like this."""
    state = spread(tx.init)(displacements)
    full = lambda x, value: jnp.full_like(x, value)
    return state._replace(
        norm_mean=full(state.norm_mean, mean),
        norm_variance=full(state.norm_variance, deviation**2),
        norms_seen=full(state.norms_seen, seen),
    )


# Weights


def test_equal_norms_weigh_the_same_and_give_the_mean_bit_for_bit():
    rng = np.random.default_rng(0)
    signs = jnp.asarray(rng.choice([-1.0, 1.0], size=(K, 8)), jnp.float32)
    heard, state = hear(penalized_mean(layers=each), signs)
    np.testing.assert_array_equal(heard, np.tile(np.mean(signs, 0), (K, 1)))
    np.testing.assert_array_equal(state.weight, np.full((K, 1), 1 / K))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_norms_that_differ_by_the_log_of_nine_weigh_nine_to_one(temperature):
    far = 1 + temperature * np.log(9.0)
    tx = penalized_mean(layers=each, temperature=temperature)
    heard, state = hear(tx, directions(1.0, far))
    # The root and the exponential miss by some roundings of 1 + T ln 9 < 10.
    np.testing.assert_allclose(state.weight[:, 0], [0.9, 0.1], rtol=16 * 2**-22)
    np.testing.assert_allclose(heard[0, :2], [0.9, 0.1 * far], rtol=16 * 2**-22)


def test_softmax_is_not_scale_free():
    large = []
    for scale in (1e-3, 1.0, 10.0):
        norms = scale * np.array([1.0] * 7 + [3.0])
        _, state = hear(penalized_mean(layers=each), directions(*norms))
        large.append(float(state.weight[-1, 0]))
    np.testing.assert_allclose(large, [0.1248, 0.019, 0.0], atol=5e-5)


def test_all_workers_hear_the_same_bits():
    d = jnp.asarray(np.random.default_rng(1).normal(size=(K, 33)), jnp.float32)
    heard, _ = hear(penalized_mean(layers=each, clip=1.0), d)
    np.testing.assert_array_equal(heard, np.tile(heard[:1], (K, 1)))


def test_one_worker_hears_its_own_displacement():
    d = directions(3.0)
    heard, state = hear(penalized_mean(layers=each), d)
    np.testing.assert_array_equal(heard, d)
    np.testing.assert_array_equal(state.weight, [[1.0]])


# Anomalies


@pytest.mark.parametrize("value", [9.0, np.nan, np.inf])
def test_a_worker_that_is_left_out_leaves_the_weighted_mean_of_the_others(value):
    tx = penalized_mean(layers=each)
    d = directions(1.0, 1.25, 1.5, 0.0).at[3].set(value)
    heard, state = hear(tx, d, with_history(tx, d))
    alone, _ = hear(tx, d[:3])
    np.testing.assert_array_equal(heard[:3], alone)
    np.testing.assert_array_equal(heard[3], heard[0])
    assert float(state.weight[3, 0]) == 0


def test_what_was_left_out_never_enters_the_detector():
    tx = penalized_mean(layers=each)
    d = directions(1.0, 1.25, 1.5, 9.0)
    before = with_history(tx, d)
    _, after = hear(tx, d, before)
    for name in ("norm_mean", "norm_variance", "norms_seen", "scores"):
        old, new = getattr(before, name), getattr(after, name)
        np.testing.assert_array_equal(new[3], old[3])
        assert (np.asarray(new[1]) != np.asarray(old[1])).any()


def test_before_the_warm_up_is_over_only_what_is_not_finite_is_left_out():
    tx = penalized_mean(layers=each, warmup=201)
    d = directions(1.0, 1.0, 1.0, 9.0).at[2].set(jnp.nan)
    _, state = hear(tx, d, with_history(tx, d))
    assert (np.asarray(state.weight[:, 0]) == 0).tolist() == [False, False, True, False]


def test_a_worker_is_judged_by_its_own_history():
    # Norms of 9 are what the last worker always brings; for the others they are news.
    tx = penalized_mean(layers=each)
    d = directions(9.0, 1.0, 1.0, 9.0)
    state = with_history(tx, d)
    state = state._replace(norm_mean=state.norm_mean.at[3].set(9.0))
    _, state = hear(tx, d, state)
    assert (np.asarray(state.weight[:, 0]) == 0).tolist() == [True, False, False, False]


def test_a_restless_window_raises_the_threshold():
    # Scores of ±2 have a deviation of 2: what scores 4 is beyond 3, and within 6.
    tx = penalized_mean(layers=each, window=4)
    d = directions(1.0, 2.0)
    state = with_history(tx, d)  # 2 is four deviations away
    _, after = hear(tx, d, state)
    assert float(after.weight[1, 0]) == 0
    scores = jnp.tile(jnp.array([2.0, -2.0, 2.0, -2.0])[None, :, None], (2, 1, 1))
    _, after = hear(tx, d, state._replace(scores=scores))
    assert float(after.weight[1, 0]) > 0


def test_where_everybody_is_left_out_of_a_layer_nothing_is_heard_of_it():
    tx = penalized_mean(layers=each)
    d = {"a": jnp.full((K, 3), jnp.nan), "b": directions(1.0, 1.0, 1.0, 1.0)}
    heard, state = hear(tx, d)
    assert np.isnan(heard["a"]).all()
    np.testing.assert_array_equal(heard["b"], np.tile(np.mean(d["b"], 0), (K, 1)))
    np.testing.assert_array_equal(state.weight, [[0.0, 0.25]] * K)


# The clip


@pytest.mark.parametrize("clip", [0.125, 0.5, 3.0])
def test_the_combination_is_no_longer_than_the_clip(clip):
    rng = np.random.default_rng(2)
    d = jnp.asarray(rng.normal(size=(K, 64)) + 1, jnp.float32)
    heard, _ = hear(penalized_mean(layers=each, clip=clip), d)
    whole, _ = hear(penalized_mean(layers=each), d)
    length = np.linalg.norm(np.float64(heard[0]))
    # Norms are sums of 64 squares in float32.
    assert length <= clip * (1 + 64 * 2**-24)
    expected = min(clip, np.linalg.norm(np.float64(whole[0])))
    np.testing.assert_allclose(length, expected, rtol=64 * 2**-24 + 1e-6 / expected)


def test_a_clip_that_is_not_reached_changes_nothing():
    d = jnp.asarray(np.random.default_rng(3).normal(size=(K, 9)), jnp.float32)
    near, far = (hear(penalized_mean(clip=c), d)[0] for c in (1e6, np.inf))
    np.testing.assert_array_equal(near, far)


# Layers


def test_layers_do_not_interact_and_their_order_does_not_matter():
    rng = np.random.default_rng(4)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(K, *shape)), jnp.float32)
    parts = {"a": {"w": draw(3, 3), "b": draw(3)}, "c": {"w": draw(5)}}
    swapped = {"x": parts["c"], "y": parts["a"]}
    tx = penalized_mean(clip=0.5)
    heard, renamed = hear(tx, parts)[0], hear(tx, swapped)[0]
    alone = {name: hear(tx, {name: part})[0][name] for name, part in parts.items()}
    for other in ({"a": renamed["y"], "c": renamed["x"]}, alone):
        jax.tree.map(np.testing.assert_array_equal, heard, other)


def test_a_layer_is_a_module_unless_the_caller_says_otherwise():
    assert module_of("block_0/dense/kernel") == "block_0/dense"
    assert module_of("scale") == "scale"
    tree = {"m": {"a": jnp.ones(2), "b": jnp.ones(3)}, "n": {"o": {"c": jnp.ones(1)}}}
    count = lambda layers: penalized_mean(layers=layers).init(tree).weight.size
    assert [count(f) for f in (module_of, each, lambda path: 0)] == [2, 3, 1]


def test_integers_empty_leaves_and_masked_ones_pass_through():
    tree = {"a": jnp.ones((K, 2)), "n": jnp.arange(K), "e": jnp.ones((K, 0)), "z": None}
    heard, _ = hear(penalized_mean(layers=each), tree)
    jax.tree.map(np.testing.assert_array_equal, heard, tree)


def test_half_precision_is_summed_in_single_and_complex_by_modulus():
    d = jnp.array([[256.0], [1.0], [1.0], [-258.0]], jnp.bfloat16)
    heard, _ = hear(penalized_mean(temperature=1e9), d)
    assert heard.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(heard), np.zeros((K, 1)))
    d = jnp.array([[3 + 4j], [5j]], jnp.complex64)
    heard, state = hear(penalized_mean(), d)
    np.testing.assert_array_equal(heard, [[1.5 + 4.5j]] * 2)
    np.testing.assert_array_equal(state.norm_mean, [[5.0]] * 2)


# What is sent


@pytest.mark.parametrize("layers", [1, 7])
def test_the_scalars_of_all_layers_travel_in_one_gather(layers):
    tree = {f"l{i}": {"w": jnp.ones(4), "b": jnp.ones(2)} for i in range(layers)}
    tx = penalized_mean(clip=1.0)
    update = lambda d: tx.update(d, tx.init(d), about="displacements")[0]
    sent = lc.traffic(update, tree, workers=K)
    kinds = [row.collective for row in sent.rows]
    assert kinds.count("all_gather") == 1
    assert kinds.count("all_reduce") == 1  # and all leaves in one buffer
    assert sent.bytes_always == layers * (4 + 4 * 6)


# What is refused


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 0.0},
        {"clip": -1.0},
        {"threshold": float("nan")},
        {"warmup": -1},
        {"window": 0},
        {"smoothing": 1.0},
    ],
)
def test_options_out_of_range_are_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        penalized_mean(**option)


def test_what_is_no_displacement_and_another_tree_are_refused():
    tx = penalized_mean(layers=each)
    talk = lambda d: tx.update(d, tx.init(d), about="parameters")
    with pytest.raises(ValueError, match="displacements, not parameters"):
        spread(talk)(jnp.ones(2))
    other = lambda d: tx.update([d, d], tx.init(d), about="displacements")
    with pytest.raises(ValueError, match="1 layers, and here are 2"):
        spread(other)(jnp.ones(2))
