"""Gossip with an outer step: NoLoCo as published, and when workers drift apart."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from lowcomm import mixing_matrix, noloco, random_matchings, rounds
from lowcomm.topology import Graph
from tests.quadratics import bend, walk

K, PERIOD, ETA, MU = 4, 2, 0.7, 0.5
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=3), (K, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(K, 3)).astype(np.float32)
CURVATURES = RNG.uniform(0.5, 2.0, size=(K, 3)).astype(np.float32)
PAIRS = random_matchings(K, rounds=3, seed=2)
BALL = optax.sgd(0.1, momentum=0.9)


def train(tx, steps=8, *, x=X, data=(CURVATURES, OPTIMA), gradient=bend, **how):
    return walk(tx, x, data, steps=steps, gradient=gradient, **how)


REST = {"data": (), "gradient": lambda x, data: 0 * x}


def numpy_rounds(graph, steps=8):
    """Heavy-ball workers, the published rule at the end of their rounds."""
    x, m = X.astype(float), np.zeros_like(X, float)
    a, v, path = x, 0 * x, []
    for t in range(steps):
        m = 0.9 * m + CURVATURES * (x - OPTIMA)
        x = x - 0.1 * m
        if (t + 1) % PERIOD == 0:
            W = mixing_matrix(graph, t // PERIOD)
            v = MU * v + ETA * W @ (x - a) + ETA * (W @ a - a)
            a = a + v
            x = a
        path.append(x)
    return np.stack(path, 1)


@pytest.mark.parametrize(
    "graph", [PAIRS, lc.ring(K), lc.one_peer_exponential(K)], ids=lambda g: g.name
)
def test_one_tree_says_what_the_published_two_say(graph):
    # W(x − a) + (W a − a) = W x − a.
    path, _ = train(noloco(BALL, graph, period=PERIOD, outer_lr=ETA, momentum=MU))
    expected = numpy_rounds(graph)
    np.testing.assert_allclose(path, expected, atol=1e-5)
    assert np.ptp(expected[:, -1], axis=0).max() > 0.1


def test_two_workers_with_equal_anchors_take_a_step_of_heavy_ball_averaging():
    two = {"x": X[:2], "data": (CURVATURES[:2], OPTIMA[:2])}
    pair = random_matchings(2, rounds=1)
    path, state = train(noloco(BALL, pair, period=2, outer_lr=ETA, momentum=MU), **two)
    outer = optax.sgd(ETA, momentum=MU)
    expected, there = train(rounds(BALL, outer, when=lc.every(2)), **two)
    np.testing.assert_allclose(path, expected, atol=2e-6)
    np.testing.assert_allclose(state.own_anchor, there.anchor, atol=2e-6)


@pytest.mark.parametrize("graph", [PAIRS, lc.exponential(K)], ids=lambda g: g.name)
def test_the_mean_follows_heavy_ball_on_the_mean_for_any_matching(graph):
    tx = noloco(optax.sgd(0.1), graph, period=PERIOD, outer_lr=ETA, momentum=MU)
    path, state = train(tx)
    # What the workers propose at the end of a round: the step from where they were.
    before, data = path[:, 0::2], (CURVATURES[:, None], OPTIMA[:, None])
    proposed = before - 0.1 * bend(before, data)
    a, v = X.mean(0).astype(float), np.zeros(3)
    for number in range(4):
        v = MU * v + ETA * (proposed[:, number].mean(0) - a)
        a = a + v
        t = PERIOD * number + 1
        np.testing.assert_allclose(state.own_anchor[:, t].mean(0), a, atol=2e-6)
        np.testing.assert_allclose(state.velocity[:, t].mean(0), v, atol=2e-6)


def second_moments(eta, mu, workers):
    """The map of (Σ‖d‖², Σ d·v, Σ‖v‖²) of the disagreement, in expectation.

    With x = a, a partner drawn from the others, and r = W a − a: Σ r·r = κ/2 Σ d·d,
    Σ r·d = −κ/2 Σ d·d, Σ r·v = −κ/2 Σ d·v, where κ = M/(M − 1).
    """
    k = workers / (workers - 1)
    v = np.array([eta**2 * k / 2, -mu * eta * k, mu**2])
    c = np.array([-eta * k / 2, mu, 0]) + v
    return np.array([np.array([1 - eta * k, 2 * mu, 0]) + v, c, v])


def radius(eta, mu, workers):
    return abs(np.linalg.eigvals(second_moments(eta, mu, workers))).max()


def matchings(order):
    """All perfect matchings of an even number of workers."""
    if not order:
        yield ()
        return
    first, *rest = order
    for i, other in enumerate(rest):
        for pairs in matchings([*rest[:i], *rest[i + 1 :]]):
            yield ((first, other), *pairs)


def test_disagreement_has_the_second_moments_of_the_map():
    # One round without gradients, over all three matchings of four workers.
    a, v = np.random.default_rng(5).normal(size=(2, K, 50)).astype(np.float32)
    a, v = a - a.mean(0), v - v.mean(0)
    found = []
    for pairs in matchings(list(range(K))):
        partner = list(range(K))
        for i, j in pairs:
            partner[i], partner[j] = j, i
        graph = Graph("pairs", K, (((0.5, tuple(range(K))), (0.5, tuple(partner))),))
        tx = noloco(optax.sgd(0.1), graph, period=1, outer_lr=ETA, momentum=MU)
        state = lc.spread(tx.init)(a)._replace(velocity=jnp.asarray(v))
        _, state = train(tx, 1, x=a, state=state, **REST)
        d, w = (np.float64(s[:, 0]) for s in (state.own_anchor, state.velocity))
        found.append([np.sum(d * d), np.sum(d * w), np.sum(w * w)])
    assert len(found) == 3
    before = np.array([np.sum(a * a), np.sum(a * v), np.sum(v * v)], float)
    expected = second_moments(ETA, MU, K) @ before
    np.testing.assert_allclose(np.mean(found, 0), expected, rtol=1e-5)


@pytest.mark.parametrize(("mu", "rate"), [(0.3, 0.71), (0.5, 0.82), (0.9, 1.035)])
def test_replicas_shrink_together_at_these_rates_or_drift_apart(mu, rate):
    assert np.sqrt(radius(0.7, mu, 8)) == pytest.approx(rate, abs=0.005)
    # Seen in runs: DiLoCo's momentum drives workers apart, NoLoCo's does not.
    graph = random_matchings(8, rounds=16, seed=1)
    tx = noloco(optax.sgd(0.1), graph, period=1, outer_lr=0.7, momentum=mu)
    x = np.random.default_rng(1).normal(size=(8, 20)).astype(np.float32)
    path, _ = train(tx, 160, x=x, **REST)
    apart = path.std(0).max(-1)
    assert (apart[-1] < 1e-3) == (rate < 1)
    assert (apart[-1] > 5) == (rate > 1)


@pytest.mark.parametrize(("workers", "mu"), [(4, 0.867), (8, 0.832), (10**9, 0.806)])
def test_the_critical_momentum_of_many_workers_is_that_of_the_bound(workers, mu):
    assert radius(0.7, mu - 0.001, workers) < 1 < radius(0.7, mu + 0.001, workers)
    for eta in (0.3, 0.7, 1.5):  # η = 2 (1 − μ²) as the number of workers grows
        critical = np.sqrt(1 - eta / 2)
        assert (
            radius(eta, critical - 1e-4, 10**9)
            < 1
            < radius(eta, critical + 1e-4, 10**9)
        )


def test_of_an_odd_number_one_idles_with_its_own_weight():
    graph = random_matchings(3, rounds=4, seed=0)
    tx = noloco(optax.sgd(0.1), graph, period=1, outer_lr=1.0, momentum=0.0)
    x = np.arange(3, dtype=np.float32)[:, None]
    path, _ = train(tx, 4, x=x, **REST)
    expected = x.astype(float)
    for t in range(4):
        W = mixing_matrix(graph, t)
        assert sorted(np.diag(W)) == [0.5, 0.5, 1]
        expected = W @ expected
        np.testing.assert_allclose(path[:, t], expected, atol=1e-6)


def test_it_sends_one_tree_to_one_partner_at_the_end_of_a_round():
    x = {
        "w": np.ones((4, 2), np.float32),
        "h": jnp.ones(4, jnp.bfloat16),
        "n": jnp.arange(3),
    }
    tx = noloco(optax.sgd(0.1), PAIRS, period=3)
    step = lambda t: lambda x: tx.update(x, tx.init(x), x, step=t)
    sent = [lc.traffic(step(t), x, workers=K) for t in range(6)]
    whole = 4 * (8 + 4)  # half precision travels in float32
    assert [s.bytes_max for s in sent] == [0, 0, whole + 4, 0, 0, whole + 4]
    kinds = {(row.collective, row.bytes) for row in sent[2].rows}
    assert ("all_reduce", 4) in kinds
    assert {kind for kind, size in kinds if size > 4} == {"permute"}


def test_half_precision_workers_that_rest_keep_their_float32_anchors():
    tx = noloco(optax.sgd(0.1), PAIRS, period=1, outer_lr=0.7, momentum=0.0)
    fine = np.tile(X[:1] * 1.001, (K, 1)).astype(np.float32)
    x = jnp.asarray(fine, jnp.bfloat16)
    state = lc.spread(tx.init)(x)._replace(own_anchor=jnp.asarray(fine))
    path, states = train(tx, 5, x=x, state=state, **REST)
    np.testing.assert_array_equal(states.own_anchor[:, -1], fine)
    np.testing.assert_array_equal(path[:, -1], x)


# The graph


@pytest.mark.parametrize("size", range(1, 8))
def test_random_matchings_pair_all_workers_but_one(size):
    graph = random_matchings(size, rounds=30, seed=3)
    for number, ((keep, own), (weight, partner)) in enumerate(graph.rounds):
        assert (keep, weight, own) == (0.5, 0.5, tuple(range(size)))
        assert all(partner[partner[i]] == i for i in range(size))
        assert sum(partner[i] == i for i in range(size)) == size % 2
        W = mixing_matrix(graph, number)
        np.testing.assert_array_equal(W, W.T)
    assert graph == random_matchings(size, rounds=30, seed=3)
    if size > 2:
        assert graph != random_matchings(size, rounds=30, seed=4)


def test_all_matchings_are_equally_likely():
    graph = random_matchings(6, rounds=3000)
    seen = [partner for _, (_, partner) in graph.rounds]
    counts = [seen.count(p) for p in set(seen)]
    assert len(counts) == 15  # 5 · 3 · 1
    # 200 each, with a standard deviation of √(200 · 14/15) = 13.7.
    assert max(abs(c - 200) for c in counts) < 5 * 13.7
    assert len(set(itertools.pairwise(seen))) > 200  # of 225: the next one is any


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: random_matchings(0, rounds=2), r"random_matchings\(0\)"),
        (lambda: random_matchings(4, rounds=0), r"rounds=0\): needs at least 1"),
        (lambda: noloco(BALL, PAIRS, period=0), "period 0"),
        (lambda: noloco(BALL, "ring"), "graph must be a Graph"),
        (lambda: train(noloco(BALL, lc.ring(3))), "3 nodes and axis 'workers' has 4"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_the_consensus_of_noloco_is_the_mean_of_the_workers():
    path, state = train(noloco(BALL, PAIRS, period=PERIOD))
    last = jax.tree.map(lambda s: jnp.asarray(s[:, -1]), state)
    model = lc.spread(lc.consensus)(last, path[:, -1])
    np.testing.assert_allclose(model, [path[:, -1].mean(0)] * K, atol=1e-6)
