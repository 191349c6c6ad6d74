"""Methods inside methods: which model is handed out, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from lowcomm import every, gpa, mean, rounds
from tests.quadratics import one_update, toward, walk

K = 4
X = np.zeros((K, 3), np.float32)
OPTIMA = np.random.default_rng(0).normal(size=(K, 3)).astype(np.float32)
V = np.zeros(K, np.float32)
SGD = optax.sgd(0.25)
GPA = gpa(SGD, averaging=0.5, interpolation=0.5)
PAIRS = lc.random_matchings(K, rounds=2)

# Verbs of their own: they move what the inner optimizer makes of the parameters.
MOVERS = {
    "local_sgd": lambda inner: lc.local_sgd(inner, period=2),
    "partial_local_sgd": lambda inner: lc.partial_local_sgd(inner, [[""], []]),
    "dreamddp": lambda inner: lc.dreamddp(inner, [[""], []]),
    "noloco": lambda inner: lc.noloco(inner, PAIRS, period=2),
    "leader_sgd": lambda inner: lc.leader_sgd(inner, period=2),
    "pso_ps": lambda inner: lc.pso_ps(inner, period=2),
}


@pytest.mark.parametrize("name", MOVERS)
def test_what_an_outer_method_moves_is_not_the_model_of_an_inner_one(name):
    tx = MOVERS[name](GPA)
    path, states = walk(
        tx, X, OPTIMA, steps=3, gradient=toward, apply=lc.apply_updates, value=V
    )
    last = jax.tree.map(lambda s: jnp.asarray(s[:, -1]), states)
    model = np.asarray(lc.spread(lc.consensus)(last, path[:, -1]))
    # Sums of four numbers below 4.
    np.testing.assert_allclose(model, np.tile(path[:, -1].mean(0), (K, 1)), atol=2e-6)


@pytest.mark.parametrize("name", MOVERS)
def test_a_guard_around_a_whole_method_is_refused(name):
    with pytest.raises(ValueError, match="around a whole verb"):
        lc.skip_nonfinite(MOVERS[name](SGD), axis="workers").init(X[0])


def test_a_guard_may_stand_around_what_sends_nothing():
    moves = one_update(lc.skip_nonfinite(GPA), np.where(OPTIMA > 0, np.nan, X), X)[0]
    assert np.isfinite(moves).all()


def test_a_method_with_an_anchor_keeps_it_beside_an_output_average():
    tx = lc.output_average(lc.diloco(SGD, period=2), offset=1.0)
    loss = lambda x, c: jnp.sum((x - c) ** 2) / 2
    run = lc.fit(loss, tx, X[0], lambda t: OPTIMA, steps=4, workers=K)
    alone = lc.fit(
        loss, lc.diloco(SGD, period=2), X[0], lambda t: OPTIMA, steps=4, workers=K
    )
    np.testing.assert_array_equal(run.params, alone.params)


@pytest.mark.parametrize(
    "tx",
    [
        lc.diloco(SGD, period=2),
        GPA,
        lc.od_sgd(SGD),
        lc.noloco(SGD, PAIRS),
        lc.leader_sgd(SGD, period=2),
        lc.stale_anchor(0.5),
    ],
)
def test_what_keeps_a_model_does_not_begin_late(tx):
    # At the switch it would still hold the first one, and go back to it.
    for phases in (lc.after(4, SGD, tx), lc.after(4, tx, SGD)):
        with pytest.raises(ValueError, match="put after inside"):
            phases.init(X[0])


def test_part_of_the_way_is_no_common_displacement():
    half = lc.toward(mean(), 0.5)
    for tx in (
        rounds(SGD, optax.sgd(1.0), exchange=half, when=every(1)),
        lc.od_sgd(SGD, exchange=half),
    ):
        with pytest.raises(ValueError, match="drift apart"):
            one_update(tx, X, X)


def test_a_model_of_integers_has_no_layers_to_mistrust():
    tx = lc.edit(SGD, period=1, warmup=0)
    update = lambda x: tx.update(x, tx.init(x), x, step=0)[0]
    assert not lc.spread(update)(np.arange(K)).any()


def refused(make, *, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
@pytest.mark.parametrize(
    "method",
    [
        lc.diloco,
        lc.snoo,
        lc.streaming_diloco,
        lambda inner, **how: lc.noloco(inner, PAIRS, **how),
    ],
)
def test_an_outer_momentum_that_does_not_fade_is_refused(method, momentum):
    refused(lambda: method(SGD, momentum=momentum), match="momentum .* is outside")
    refused(lambda: method(SGD, outer_lr=-1.0), match="outer_lr -1.0 must be 0")


def test_a_trigger_is_no_number_of_steps():
    for make in (
        lambda when: lc.streaming_diloco(SGD, period=when),
        lambda when: lc.palsgd(SGD, learning_rate=0.1, period=when),
        lambda when: lc.prlc(SGD, pulls=when),
    ):
        refused(lambda make=make: make(every(2)), match="must be a number of steps")


def test_times_that_would_never_come_are_refused():
    half: Any = 0.5
    refused(
        lambda: every(4, offset=half), match="offset 0.5 is outside .* or not whole"
    )
    refused(
        lambda: rounds(SGD, SGD, when=every(4), delay=3 * half),
        match="delay 1.5 must be",
    )
    for late in (lambda: lc.after(half * np.nan, SGD, SGD), lambda: lc.before(-1)):
        refused(late, match="steps count from 0")
