"""The penalty's detector, its norms of divided leaves, and the rolling back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import lowcomm as lc
from lowcomm import penalized_mean, roll_back, spread
from lowcomm.penalty import PenaltyState, _observe, _score
from lowcomm.spmd import place


def hear(tx, displacements, **how):
    """What each worker hears of stacked displacements, and the states."""
    talk = lambda d: tx.update(d, tx.init(d), about="displacements")
    return jax.jit(spread(talk, **how))(displacements)


# The detector, whose numbers follow from q = 1 − α


def observe(norms, state=None, smoothing=0.02):
    """The states after each of these norms of one layer."""
    if state is None:
        zero = jnp.zeros(1)
        state = PenaltyState(
            zero, zero, jnp.zeros(1, jnp.int32), jnp.zeros((4, 1)), zero
        )

    def body(state, n):
        norm = jnp.atleast_1d(n)
        z = _score(norm, state)
        state = _observe(norm, z, state, smoothing)
        return state, (z, state)

    norms = jnp.asarray(norms, jnp.float32)
    return jax.tree.map(np.asarray, jax.lax.scan(body, state, norms))


def from_zero():
    """As the released code begins: with a mean of zero, as if it were a norm."""
    zero = jnp.zeros(1)
    return PenaltyState(zero, zero, jnp.ones(1, jnp.int32), jnp.zeros((4, 1)), zero)


def test_a_constant_stream_has_its_value_as_mean_no_spread_and_no_score():
    _, (z, states) = observe([0.7] * 200)
    assert (z == 0).all()
    assert (states.norm_mean == np.float32(0.7)).all()
    assert (states.norm_variance == 0).all()
    assert states.norms_seen[:, 0].tolist() == list(range(1, 201))


def test_a_detector_that_starts_at_zero_has_the_closed_form():
    # The recursion from zero: mean = v (1 − qⁿ), M2 = v² qⁿ⁺¹ (1 − qⁿ), and so z of the
    # next value is q^((n−1)/2) / √(1 − qⁿ). Errors are some roundings a step, and old
    # ones decay: 200 of them at most.
    v, q, n = 2.0, 0.98, np.arange(1, 201)
    _, (z, states) = observe([v] * 200, from_zero())
    mean, variance = v * (1 - q**n), v**2 * q ** (n + 1) * (1 - q**n)
    np.testing.assert_allclose(states.norm_mean[:, 0], mean, rtol=200 * 2**-24)
    np.testing.assert_allclose(states.norm_variance[:, 0], variance, rtol=200 * 2**-23)
    scores = q ** ((n - 1) / 2) / np.sqrt(1 - q**n)
    np.testing.assert_allclose(scores[[0, 119]], [7.07, 0.315], rtol=2e-3)
    assert scores[4] > 3 > scores[5]
    # Of v − mean 0.98²⁰⁰ v = 0.018 v is left at last: errors of the mean grow by 57.
    np.testing.assert_allclose(z[1:, 0], scores[:-1], rtol=1e-3)


def test_an_outlier_scores_high_where_the_first_norm_starts_the_mean():
    rng = np.random.default_rng(0)
    norms = 1 + 0.05 * rng.normal(size=1000)
    scores = []
    for n, start in [(120, None), (120, from_zero()), (1000, None)]:
        _, (_, states) = observe(norms[:n], start)
        last = jax.tree.map(lambda x: jnp.asarray(x[-1]), states)
        scores.append([float(_score(jnp.full(1, x), last)[0]) for x in (2.0, 1.3)])
        if n == 1000:
            np.testing.assert_allclose(last.norm_mean, 0.997, atol=0.02)
            np.testing.assert_allclose(np.sqrt(last.norm_variance), 0.048, atol=0.01)
    # From zero even a norm of 2 is within 4 deviations, and 1.3 is nothing unusual.
    np.testing.assert_allclose(scores[1], [3.9, 1.4], atol=0.25)
    assert scores[0][0] > 15
    assert scores[0][1] > 4.5
    assert scores[2][1] > 4.5


def test_a_flagged_value_that_entered_would_blind_the_detector():
    # Why it does not: mean and deviation jump to α 10⁶ and √(α(1−α)) (1−α)^½ 10⁶.
    _, (_, states) = observe([1.0] * 200 + [1e6 + 1])
    np.testing.assert_allclose(states.norm_mean[-1], 0.02e6, rtol=1e-3)
    np.testing.assert_allclose(np.sqrt(states.norm_variance[-1]), 1.39e5, rtol=4e-3)
    assert float(_score(jnp.full(1, 2.0), jax.tree.map(lambda x: x[-1], states))[0]) < 0


def test_one_norm_is_no_history_to_judge_the_second_by():
    # Its score would stand in the window and make everything after it usual.
    _, (z, _) = observe([1.0, 2.0, 2.0])
    assert (z[:2] == 0).all()
    assert z[2] > 0


def test_norms_that_differ_by_roundings_are_no_anomaly():
    ulp = np.spacing(np.float32(3.0))
    _, (z, _) = observe([3.0] * 50 + [3.0 + ulp, 3.0 - ulp, 3.0 + 2 * ulp])
    assert np.abs(z).max() < 3


# Sharded workers

S = 4
GRID = Mesh(np.array(jax.devices()).reshape(2, S), ("workers", "fsdp"))
SPECS = {"a": {"w": P(None, "fsdp"), "v": P("fsdp")}, "c": {"w": P("fsdp")}}


def sharded():
    """Displacements of whole numbers, of which the second worker's are larger."""
    rng = np.random.default_rng(5)
    draw = lambda *shape: jnp.asarray(rng.integers(-3, 4, (2, *shape)), jnp.float32)
    return {"a": {"w": draw(4, 8), "v": draw(8)}, "c": {"w": draw(16)}}


def same(tree, other):
    # Squares of integers sum exactly, whatever the order; roots and exponentials are
    # those of other programs, and miss by some roundings of values up to 3.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6), tree, other
    )


def crossing(sent, axis):
    """The bytes a device sends along an axis."""
    return sum(row.bytes for row in sent.rows if axis in (row.axis, *row.axis))


TX = {"temperature": 8.0, "clip": 4.0}


def test_leaves_divided_by_the_compiler_give_what_whole_ones_give():
    d, tx = sharded(), penalized_mean(**TX)
    whole = hear(tx, d)
    same(hear(tx, place(d, GRID, specs=SPECS), mesh=GRID), whole)


@pytest.mark.parametrize("check", [True, False])
def test_leaves_divided_by_hand_give_what_whole_ones_give(check):
    d, tx = sharded(), penalized_mean(**TX, shards="fsdp")

    def local(d):
        d = jax.tree.map(lambda x: x[0], d)
        heard, state = tx.update(d, tx.init(d), about="displacements")
        return jax.tree.map(lambda x: x[None], (heard, state.weight))

    where = jax.tree.map(lambda s: P("workers", *s), SPECS)
    call = jax.shard_map(
        local,
        mesh=GRID,
        in_specs=(where,),
        out_specs=(where, P(("workers", "fsdp"))),
        check_vma=check,
    )
    heard, weight = jax.jit(call)(d)
    expected, state = hear(penalized_mean(**TX), d)
    same(heard, expected)
    same(weight, np.repeat(state.weight, S, axis=0))


def test_a_device_sends_its_shard_and_the_scalars():
    tx, d = penalized_mean(**TX), place(sharded(), GRID, specs=SPECS)
    talk = lambda d: tx.update(d, tx.init(d), about="displacements")[0]
    compiled = jax.jit(spread(talk, mesh=GRID)).lower(d).compile()
    sent = lc.compiled_traffic(compiled, mesh=GRID)
    entries = sum(x[0].size for x in jax.tree.leaves(d))
    assert crossing(sent, "workers") == 4 * entries // S + 2 * 4
    assert crossing(sent, "fsdp") <= 64  # norms and nothing else


def test_edit_on_workers_that_are_groups_of_devices_sends_shards_and_keeps_them():
    tx = lc.edit(optax.sgd(0.5), period=2, warmup=0, exchange=penalized_mean(**TX))
    one = jax.tree.map(lambda x: x[0], sharded())
    loss = lambda x, c: sum(jnp.sum(jnp.square(v - c)) / 2 for v in jax.tree.leaves(x))
    how = {"batches": lambda t: jnp.array([1.0, 5.0]), "steps": 4, "workers": 2}
    grouped = lc.fit(loss, tx, one, mesh=GRID, specs=SPECS, **how)
    same(grouped.params, lc.fit(loss, tx, one, **how).params)
    for x, spec in zip(*map(jax.tree.leaves, (grouped.params, SPECS)), strict=True):
        assert tuple(x.sharding.spec) == ("workers", *spec)
    params = lc.stack(one, 2, mesh=GRID, specs=SPECS)
    state = lc.init(tx, params, mesh=GRID)
    step = spread(lc.local_step(loss, tx), mesh=GRID, in_axes=(0, 0, 0, None))
    sync = jax.jit(lambda *args: step(*args, 1))
    compiled = sync.lower(params, state, place(jnp.ones(2), GRID)).compile()
    sent = lc.compiled_traffic(compiled, mesh=GRID)
    entries = sum(x.size for x in jax.tree.leaves(one))
    assert crossing(sent, "workers") == 4 * entries // S + 2 * 4
    assert crossing(sent, "fsdp") <= 64  # sums and norms


def test_a_leaf_that_is_not_divided_is_not_counted_once_a_device():
    tx = penalized_mean(shards="fsdp")

    def local(d):
        return tx.update(d[0], tx.init(d[0]), about="displacements")[0][None]

    call = jax.shard_map(
        local, mesh=GRID, in_specs=P("workers"), out_specs=P("workers")
    )
    with pytest.raises(ValueError, match="same on all devices along 'fsdp'"):
        jax.jit(call)(jnp.ones((2, 4)))


# Rolling back


def test_where_nothing_was_heard_the_outer_optimizer_stays():
    tx = roll_back(optax.sgd(0.5, momentum=0.5, nesterov=True))
    a = {"x": jnp.zeros(2), "y": jnp.zeros(2)}
    heard = [{"x": jnp.ones(2), "y": jnp.full(2, v)} for v in (1.0, jnp.nan, 1.0)]
    state, moves = tx.init(a), []
    for h in heard:
        move, state = tx.update(h, state, a)
        moves.append(move)
    plain = optax.sgd(0.5, momentum=0.5, nesterov=True)
    x, y = plain.init(a["x"]), plain.init(a["y"])
    for i, h in enumerate(heard):
        mx, x = plain.update(h["x"], x)
        np.testing.assert_array_equal(moves[i]["x"], mx)
        if i == 1:
            np.testing.assert_array_equal(moves[i]["y"], np.zeros(2))
            continue
        my, y = plain.update(h["y"], y)
        np.testing.assert_array_equal(moves[i]["y"], my)


@pytest.mark.parametrize("lost", ["one", "all"])
def test_counts_of_the_outer_optimizer_go_on_while_anything_was_heard(lost):
    tx = roll_back(optax.adam(0.5))
    a = {"x": jnp.ones(2), "y": jnp.ones(2), "n": None}
    nan = jnp.full(2, jnp.nan)
    heard = a | {"y": nan} | ({"x": nan} if lost == "all" else {})
    before = tx.update(a, tx.init(a), a)[1]
    _, after = tx.update(heard, before, a)
    assert int(after[0].count) == (1 if lost == "all" else 2)
    np.testing.assert_array_equal(after[0].mu["y"], before[0].mu["y"])
    np.testing.assert_array_equal(after[0].nu["y"], before[0].nu["y"])
