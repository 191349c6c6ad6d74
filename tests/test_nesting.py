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
    refused(lambda: every(4, offset=half), match="offset 0.5 must be a whole number")
    refused(
        lambda: rounds(SGD, SGD, when=every(4), delay=3 * half),
        match="delay 1.5 must be",
    )
    never: Any = np.nan
    refused(lambda: lc.after(never, SGD, SGD), match="switch nan must be a whole")
    refused(lambda: lc.before(-1), match="steps count from 0")


AXES = ("clusters", "workers")


def test_consensus_is_of_all_workers_that_spread_has():
    tx = lc.two_level_local_sgd(SGD, period=2, outer_period=8)
    mesh = lc.spmd.abstract_mesh({"clusters": 2, "workers": 2})
    place: dict[str, Any] = {"mesh": mesh, "axis": AXES, "backend": "vmap"}
    loss = lambda x, c: jnp.sum((x - c) ** 2) / 2
    run = lc.fit(loss, tx, X[0], lambda t: OPTIMA, steps=4, workers=K, **place)
    model = np.asarray(lc.spread(lc.consensus, **place)(run.state, run.params))
    assert np.ptp(run.params[:, 0]) > 0.01  # the clusters have not met
    np.testing.assert_array_equal(model, np.tile(model[0], (K, 1)))
    np.testing.assert_allclose(model[0], np.mean(run.params, 0), atol=1e-6)


@pytest.mark.parametrize("tx", [GPA, lc.snoo(SGD, period=2)], ids=["gpa", "snoo"])
def test_consensus_of_methods_for_one_worker_is_the_mean_of_their_models(tx):
    path, states = walk(tx, X, OPTIMA, steps=3, gradient=toward)
    last = jax.tree.map(lambda s: jnp.asarray(s[:, -1]), states)
    model = np.asarray(lc.spread(lc.consensus)(last, path[:, -1]))
    own = np.asarray(last.own_anchor)
    assert np.ptp(own[:, 0]) > 0.01
    # Sums of four numbers below 4.
    np.testing.assert_allclose(model, np.tile(own.mean(0), (K, 1)), atol=2e-6)


def test_a_leader_is_chosen_by_the_loss_where_nobody_says_otherwise():
    tx = lc.average(optax.sgd(0.0), exchange=lc.leader())
    update = lambda x, loss: x + tx.update(x, tx.init(x), x, step=0, value=loss)[0]
    losses = jnp.array([3.0, 1.0, 2.0, 4.0])
    np.testing.assert_array_equal(lc.spread(update)(jnp.arange(4.0), losses), 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: every(True),
        lambda: every("4"),
        lambda: every(4, warmup=2.5),
        lambda: lc.before(2.5),
        lambda: lc.after(2.5, SGD, SGD),
        lambda: lc.swap(SGD, SGD, switch=2.5, steps=8),
        lambda: lc.swap(SGD, SGD, switch=2, steps=8.5),
        lambda: lc.od_sgd(SGD, warmup=2.5),
        lambda: lc.edit(SGD, period=2, warmup=2.5),
        lambda: lc.palsgd(SGD, learning_rate=0.1, t_start=2.5),
        lambda: lc.selsync(SGD, threshold=0.1, window=2.5),
        lambda: lc.leader_sgd(SGD, period=2, window=2.5),
        lambda: lc.streaming_diloco(SGD, period=4, fragments=1.5),
        lambda: lc.growing(lambda r: 2, steps=8.5),
    ],
)
def test_counts_that_are_no_whole_numbers_are_refused_by_name(make):
    with pytest.raises(
        ValueError, match=r"^\w+ ('4'|True|[128].5) must be a whole num"
    ):
        make()
