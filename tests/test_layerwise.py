"""EDiT's rounds, and the methods that average each layer in slots of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from lowcomm import (
    data_parallel,
    dpsgd,
    dreamddp,
    edit,
    every,
    local_sgd,
    partial_local_sgd,
    penalized_mean,
    rounds,
    spread,
)
from tests.quadratics import bend, walk

K, N = 4, 3
LAYERS = ("a", "b", "c")


def draw(seed, low, high):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.uniform(low, high, size=(K, N)), jnp.float32)
        for name in LAYERS
    }


START = {name: jnp.tile(x[:1], (K, 1)) for name, x in draw(0, -1, 1).items()}
CURVATURES, OPTIMA = draw(1, 0.5, 1.5), draw(2, -1, 1)


def slopes(params, data):
    """The gradients of quadratics that differ by worker."""
    return jax.tree.map(lambda x, h, c: bend(x, (h, c)), params, *data)


def train(tx, steps, *, x=START, data=(CURVATURES, OPTIMA), **how):
    return walk(tx, x, data, steps=steps, gradient=slopes, **how)


def near(path, expected, roundings=64):
    """Values below 4, and a few operations a step."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=roundings * 2**-22),
        path,
        expected,
    )


def apart(path):
    """``[steps, layers]``: how far workers are from each other."""
    return np.stack([np.ptp(path[name], axis=0).max(-1) for name in LAYERS], -1)


# EDiT

NESTEROV = {"outer_lr": 0.7, "momentum": 0.8}
PLAIN = {"outer_lr": 1.0, "momentum": 0.0}
HEAVY = optax.sgd(0.1, momentum=0.5)


def softly(**more):
    """Weights that are equal, and nobody left out."""
    return penalized_mean(temperature=1e9, threshold=np.inf, **more)


def test_without_penalty_and_outer_momentum_edit_is_local_sgd():
    tx = edit(HEAVY, period=3, warmup=0, exchange=softly(), **PLAIN)
    near(train(tx, 9)[0], train(local_sgd(HEAVY, period=3), 9)[0])


def test_its_outer_step_is_nesterov_on_what_the_penalty_makes_of_displacements():
    penalty = penalized_mean(clip=0.25)
    outer = optax.sgd(0.7, momentum=0.8, nesterov=True)
    expected = rounds(HEAVY, outer, exchange=penalty, when=every(2))
    path, _ = train(edit(HEAVY, period=2, warmup=0, exchange=penalty, **NESTEROV), 8)
    near(path, train(expected, 8)[0])
    free = edit(HEAVY, period=2, warmup=0, exchange=penalized_mean(), **NESTEROV)
    assert np.abs(train(free, 8)[0]["a"] - path["a"]).max() > 1e-3


def test_the_warm_up_is_synchronous_and_ends_with_the_model_as_anchor():
    warmup, steps = 5, 12
    tx = edit(HEAVY, period=4, warmup=warmup, **NESTEROV)
    path, state = train(tx, steps)
    near(
        jax.tree.map(lambda x: x[:, :warmup], path),
        train(data_parallel(HEAVY), warmup)[0],
    )
    # It talks on the period's clock, and after step 4, the last of the warm-up.
    fired = [t for t in range(steps) if state.since[0, t] == 0]
    assert fired == [3, 4, 7, 11]
    for name in LAYERS:
        for t in (3, 4):
            np.testing.assert_array_equal(state.synced[:, t], np.full(K, True))
            near(state.anchor[name][:, t], path[name][:, t], 1)


def test_after_the_warm_up_it_is_what_begins_there_with_the_inner_moments():
    # The outer buffer and the detector are fresh, whatever went before.
    tx = edit(HEAVY, period=2, warmup=4, **NESTEROV)
    path, state = train(tx, 8)
    at = lambda tree: jax.tree.map(lambda x: jnp.asarray(x[:, 3]), tree)
    after = edit(HEAVY, period=2, warmup=0, **NESTEROV)
    x = at(path)
    fresh = jax.jit(spread(after.init))(x)
    fresh = fresh._replace(inner=at(state.inner[1]))
    expected, _ = train(after, 4, x=x, start=4, state=fresh)
    near(jax.tree.map(lambda x: x[:, 4:], path), expected)


def poisoned(bad):
    """Optima that make the second layer's gradients of these workers NaN."""
    return CURVATURES, OPTIMA | {"b": OPTIMA["b"].at[np.array(bad)].set(jnp.nan)}


def test_a_worker_with_nan_is_taken_along_in_that_layer_and_counts_in_the_others():
    tx = edit(optax.sgd(0.1), period=1, warmup=0, exchange=softly(), **PLAIN)
    path, _ = train(tx, 1, data=poisoned([2]))
    whole, _ = train(tx, 1)
    for name in "ac":
        np.testing.assert_array_equal(path[name], whole[name])
    part = jax.tree.map(lambda x: x[np.array([0, 1, 3])], (START, CURVATURES, OPTIMA))
    others, _ = train(tx, 1, x=part[0], data=part[1:])
    np.testing.assert_array_equal(path["b"], np.tile(others["b"][:1], (K, 1, 1)))


def test_where_all_are_left_out_the_layer_returns_and_its_momentum_stays():
    tx = edit(optax.sgd(0.1), period=2, warmup=0, **NESTEROV)
    path, state = train(tx, 4, apply=lc.apply_updates)
    x, at = jax.tree.map(lambda x: jnp.asarray(x[:, 3]), (path, state))
    path, after = train(
        tx, 2, x=x, start=4, state=at, data=poisoned(range(K)), apply=lc.apply_updates
    )
    np.testing.assert_array_equal(path["b"][:, 1], at.anchor["b"])
    np.testing.assert_array_equal(after.anchor["b"][:, 1], at.anchor["b"])
    trace = lambda state: optax.tree.get(state.outer, "trace")
    np.testing.assert_array_equal(trace(after)["b"][:, 1], trace(at)["b"])
    for name in "ac":
        assert (trace(after)[name][:, 1] != np.asarray(trace(at)[name])).any()
        assert (path[name][:, 1] != np.asarray(x[name])).any()


def test_what_edit_sends_at_each_kind_of_step():
    tx = edit(optax.sgd(0.1), period=4, warmup=3)
    one = jax.tree.map(lambda x: x[0], START)
    state = jax.eval_shape(tx.init, one)

    def sent(t):
        update = lambda g, s, x: tx.update(g, s, x, step=t)
        return lc.traffic(update, one, state, one, workers=K).bytes_always

    whole, scalars = 4 * N * 3, 4 * 3
    expected = [whole, whole, 2 * whole, whole + scalars, 0, 0, 0, whole + scalars]
    assert [sent(t) for t in range(8)] == expected


def test_a_warm_up_that_is_negative_is_refused():
    with pytest.raises(ValueError, match="warmup -1"):
        edit(optax.sgd(0.1), period=4, warmup=-1)


# Slots

TABLE = [["a"], [], ["b", "c"], ["a"]]
BOTH = [partial_local_sgd, dreamddp]
INNER = {"sgd": optax.sgd(0.1), "heavy ball": HEAVY}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("form", BOTH)
def test_the_mean_over_the_workers_moves_by_the_mean_step_whatever_the_table(
    form, inner
):
    # Gradients that do not depend on the parameters, so that steps are the same.
    how = {"gradient": lambda x, data: data[1], "steps": 8}
    path, _ = walk(form(INNER[inner], TABLE), START, (CURVATURES, OPTIMA), **how)
    alone, _ = walk(
        optax.with_extra_args_support(INNER[inner]), START, (CURVATURES, OPTIMA), **how
    )
    near(*(jax.tree.map(lambda x: x.mean(0), p) for p in (path, alone)))


def test_all_layers_in_the_last_slot_are_local_sgd_after_the_update_only():
    table = [[], [], [""]]
    expected = train(local_sgd(HEAVY, period=3), 9)[0]
    near(train(partial_local_sgd(HEAVY, table), 9)[0], expected)
    other = train(dreamddp(HEAVY, table), 9)[0]
    assert np.abs(other["a"] - expected["a"]).max() > 1e-2


@pytest.mark.parametrize("inner", INNER)
def test_all_layers_in_every_slot_are_synchronous_after_the_update(inner):
    tx = partial_local_sgd(INNER[inner], [[""]])
    near(train(tx, 6)[0], train(data_parallel(INNER[inner]), 6)[0])


def test_all_layers_in_every_slot_are_combine_then_adapt_before_the_update():
    # x_i ← mean(x) − η g_i(x_i), in double precision.
    x = {name: np.float64(v) for name, v in START.items()}
    path, _ = train(dreamddp(optax.sgd(0.1), [[""]]), 5)
    for t in range(5):
        for name in LAYERS:
            h, c = (np.float64(d[name]) for d in (CURVATURES, OPTIMA))
            x[name] = x[name].mean(0) - 0.1 * h * (x[name] - c)
            np.testing.assert_allclose(path[name][:, t], x[name], atol=64 * 2**-22)
    same = train(dpsgd(optax.sgd(0.1), lc.complete(K)), 5)[0]
    assert np.abs(same["a"] - path["a"]).max() > 1e-3  # adapt-then-combine


@pytest.mark.parametrize("steps", ["known", "traced"])
def test_a_layer_is_averaged_in_its_slots_and_in_no_other(steps):
    tx = partial_local_sgd(optax.sgd(0.1), TABLE)
    if steps == "traced":
        path, _ = train(tx, 8)
    else:
        run = []
        lc.fit(
            lambda x, d: sum(
                jnp.sum(d[0][n] * jnp.square(x[n] - d[1][n])) / 2 for n in LAYERS
            ),
            tx,
            jax.tree.map(lambda x: x[0], START),
            lambda t: (CURVATURES, OPTIMA),
            steps=8,
            workers=K,
            on_step=lambda t, x, *_: run.append(jax.tree.map(np.array, x)),
        )
        path = jax.tree.map(lambda *x: np.stack(x, 1), *run)
    agree = apart(path) < 1e-6
    expected = [[n in TABLE[t % 4] for n in LAYERS] for t in range(8)]
    np.testing.assert_array_equal(agree, expected)


@pytest.mark.parametrize("form", BOTH)
def test_a_slot_sends_its_layers_and_a_round_every_layer_as_often_as_it_is_listed(form):
    tx = form(optax.adam(0.1), TABLE)
    one = {"a": jnp.ones(1), "b": jnp.ones(10), "c": jnp.ones((10, 10))}
    state = jax.eval_shape(tx.init, one)

    update = lambda g, s, x, t: tx.update(g, s, x, step=t)
    sent = lambda t: lc.traffic(update, one, state, one, t, workers=K)
    assert [sent(t).bytes_always for t in range(4)] == [4, 0, 440, 4]
    unknown = sent(np.int32(0))
    assert (unknown.bytes_always, unknown.bytes_max) == (0, 440)
    run = lc.fit(
        lambda x, c: sum(jnp.sum(v) for v in x.values()) * c,
        tx,
        one,
        lambda t: jnp.arange(1.0, K + 1),
        steps=8,
        workers=K,
    )
    assert run.payload.tolist() == [4, 0, 440, 4] * 2
    assert len(run.programs) == 3  # slots that are alike share one


def test_a_prefix_is_whole_parts_of_a_path_and_a_function_may_write_the_table():
    tree = {"l1": {"w": jnp.ones(2), "b": jnp.ones(1)}, "l10": {"w": jnp.ones(4)}}
    tables = [
        [["l1"], ["l10/w"]],
        [["l1/b", "l1/w/"], ["l10"]],
        lambda paths: [paths[:2], paths[2:]],
    ]
    for table in tables:
        tx = partial_local_sgd(optax.sgd(0.1), table)
        state = tx.init(tree)
        for t, expected in enumerate([12, 16]):
            update = lambda g, tx=tx, t=t, s=state: tx.update(g, s, g, step=t)
            assert lc.traffic(update, tree, workers=K).bytes_always == expected


@pytest.mark.parametrize("form", BOTH)
def test_half_precision_integers_and_masked_leaves_are_no_trouble(form):
    tree = {"h": jnp.ones((K, 3), jnp.bfloat16), "n": jnp.arange(K), "m": jnp.ones(K)}
    tree["h"] = tree["h"] * jnp.arange(1, K + 1)[:, None]
    tx = optax.masked(form(optax.sgd(0.5), [["h"]]), {"h": True, "n": True, "m": False})

    def worker(x):
        zero = jax.tree.map(jnp.zeros_like, x)
        updates, _ = tx.update(zero, tx.init(x), x, step=0)
        return lc.apply_updates(x, updates, ())

    after = spread(worker)(tree)
    np.testing.assert_array_equal(np.float32(after["h"]), np.full((K, 3), 2.5))
    np.testing.assert_array_equal(after["n"], tree["n"])
    np.testing.assert_array_equal(after["m"], tree["m"])


def test_a_leaf_without_a_slot_and_what_is_no_table_are_refused():
    tree = {"a": jnp.ones(2), "ab": {"c": jnp.ones(1)}}
    with pytest.raises(ValueError, match="leaf ab/c is in no slot of dreamddp"):
        dreamddp(optax.sgd(0.1), [["a"], []]).init(tree)
    with pytest.raises(ValueError, match="leaf a is in no slot"):
        partial_local_sgd(optax.sgd(0.1), lambda paths: [paths[1:]]).init(tree)
    with pytest.raises(ValueError, match="at least one slot"):
        dreamddp(optax.sgd(0.1), [])
    with pytest.raises(ValueError, match="slot 1 of partial_local_sgd is 'b'"):
        partial_local_sgd(optax.sgd(0.1), [["a"], "b"])
