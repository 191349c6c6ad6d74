"""Overlap-Local-SGD and its siblings: what a stale anchor does, and what it costs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from lowcomm.topology import mixing_matrix
from tests.quadratics import toward, walk

K, N = 4, 3
EPS = float(jnp.finfo(jnp.float32).eps)
# Small integers and binary rates: sums, halves and quarters of them are exact.
INTEGERS = np.random.default_rng(0).integers(-8, 8, (K, N)).astype(np.float32)
ORIGIN = np.zeros((K, N), np.float32)
NOISE = np.random.default_rng(1).normal(size=(K, N)).astype(np.float32)


def constant(x, data):
    return data


def bent(x, target):
    """The gradient of a loss that is no quadratic: Σ log cosh(x − c)."""
    return jnp.tanh(x - target)


def late(period, pull=0.5, momentum=0.0, inner=None):
    inner = optax.sgd(0.5) if inner is None else inner
    return lc.overlap_local_sgd(inner, period=period, pull=pull, momentum=momentum)


def cocod(period, rate=0.5):
    return lc.cocod_sgd(optax.sgd(rate), period=period)


def train(tx, steps, *, x=ORIGIN, data=INTEGERS, gradient=toward):
    """The models ``[steps, K, …]`` and the states' anchors, if any, likewise."""
    path, state = walk(tx, x, data, steps=steps, gradient=gradient)
    anchor = getattr(state.exchange, "launched", None)
    swap = lambda x: None if x is None else np.swapaxes(np.float64(x), 0, 1)
    return swap(path), swap(anchor)


@pytest.mark.parametrize("momentum", [0.0, 0.75])
def test_a_pull_of_zero_leaves_the_workers_alone(momentum):
    inner = optax.sgd(0.5, momentum=0.5)
    path, _ = train(late(2, 0.0, momentum, inner), 6)
    for i in range(K):
        x, state = jnp.zeros(N), inner.init(jnp.zeros(N))
        for t in range(6):
            moves, state = inner.update(x - INTEGERS[i], state)
            x = x + moves
            np.testing.assert_array_equal(path[t, i], x)


@pytest.mark.parametrize("momentum", [0.0, 0.7, 0.9])
def test_a_pull_of_one_discards_every_round(momentum):
    start = np.tile(INTEGERS[:1], (K, 1))
    path, anchor = train(late(2, 1.0, momentum), 8, x=start)
    np.testing.assert_array_equal(path[1::2], np.tile(start, (4, 1, 1)))
    np.testing.assert_array_equal(anchor, np.tile(start, (8, 1, 1)))
    assert (path[::2] != start).any()


def test_the_anchor_moves_by_a_share_of_the_mean_local_steps_of_any_loss():
    pull, rate, period, rounds = 0.6, 0.5, 3, 5
    tx = late(period, pull, inner=optax.sgd(rate))
    path, anchor = train(tx, period * rounds, x=ORIGIN, data=NOISE, gradient=bent)
    before = np.concatenate([ORIGIN[None], path[:-1]])
    moved = rate * np.tanh(before - NOISE).reshape(rounds, period, K, N).sum(1).mean(1)
    ends = anchor[period - 1 :: period, 0]
    z = np.concatenate([np.zeros((1, N)), ends])
    # Values below 2, a dozen roundings a round.
    atol = 12 * rounds * EPS
    np.testing.assert_allclose(z[1:], z[:-1] - (1 - pull) * moved, atol=atol)
    np.testing.assert_allclose(ends, path[period - 1 :: period].mean(1), atol=atol)


def released(rates, pull, momentum, period):
    """The anchors of the released code's form, in float64: it divides by the rate."""
    x, z, v, anchors = np.zeros((K, N)), np.zeros(N), np.zeros((K, N)), []
    for t, rate in enumerate(rates):
        x = x - rate * np.tanh(x - NOISE)
        if (t + 1) % period == 0:
            x = (1 - pull) * x + pull * z
            v = momentum * v - (x - z) / rate
            z = (z - rate * v).mean(0)
            anchors.append(z)
    return np.array(anchors)


def test_anchor_momentum_is_the_released_form_at_a_constant_rate():
    path, anchor = train(late(3, 0.6, 0.7), 18, data=NOISE, gradient=bent)
    expected = released([0.5] * 18, 0.6, 0.7, 3)
    # Values below 2, a dozen roundings in each of 18 steps, which contract.
    np.testing.assert_allclose(anchor[2::3, 0], expected, atol=18 * 12 * EPS)
    # The mean after a pull is a mean of what the local steps reached and the anchor.
    before = np.concatenate([ORIGIN[None], path])[2:-1:3]
    reached = (before - 0.5 * np.tanh(before - NOISE)).mean(1)
    z = np.concatenate([np.zeros((1, N)), anchor[2:-1:3, 0]])
    mean = path[2::3].mean(1)
    np.testing.assert_allclose(mean, 0.4 * reached + 0.6 * z, atol=12 * EPS)


def test_when_the_rate_drops_the_released_form_rescales_its_momentum_once():
    momentum, cut = 0.7, 0.25
    schedule = optax.piecewise_constant_schedule(0.5, {9: cut})
    tx = late(3, 0.6, momentum, optax.sgd(schedule))
    _, anchor = train(tx, 15, data=NOISE, gradient=bent)
    z = anchor[2::3, 0]
    expected = released([float(schedule(t)) for t in range(15)], 0.6, momentum, 3)
    atol = 15 * 12 * EPS
    np.testing.assert_allclose(z[:3], expected[:3], atol=atol)
    once = expected[3] - momentum * (cut - 1) * (z[2] - z[1])
    np.testing.assert_allclose(z[3], once, atol=atol)
    assert np.abs(z[3] - expected[3]).max() > 0.01


@pytest.mark.parametrize(
    ("tx", "share"),
    [
        (late(2, 0.6, 0.7), 0.4 / 0.58),
        (late(2, 0.6), 0.4),
        (late(2, 0.2, 0.5), 0.8 / 0.9),
        (cocod(2), 1.0),
    ],
)
def test_steady_progress_is_the_share_of_the_theory(tx, share):
    u = np.ones((K, N), np.float32)  # two steps of ½ a round
    path, _ = train(tx, 160, data=u, gradient=constant)
    ends = -path[1::2].mean((1, 2))
    # Positions reach 80, where float32 is spaced by 2⁻¹⁷; a sum of ten differences.
    np.testing.assert_allclose((ends[-1] - ends[-11]) / 10, share, atol=4 * 2.0**-17)


def test_a_round_of_mixing_keeps_a_consensus_and_a_weighted_mean_but_not_the_mean():
    pull = 0.25
    tx = lc.stale_anchor(pull)

    def mix(x, z):
        state = tx.init(x)._replace(launched=z)
        out, state = tx.update(x, state, about="parameters")
        return out, state.launched

    units = np.eye(K + 1, dtype=np.float32)
    x, z = lc.spread(mix)(units[:K], np.tile(units[K:], (K, 1)))
    matrix = np.concatenate([x, z[:1]])  # of what each of (x_1 … x_K, z) becomes
    np.testing.assert_array_equal(matrix.sum(1), 1)
    assert (matrix.sum(0) != 1).all()
    kept = np.array([(1 - pull) / K] * K + [pull])
    np.testing.assert_array_equal(kept @ matrix, kept)


@pytest.mark.parametrize(("pull", "period"), [(0.5, 2), (0.25, 3)])
def test_on_a_shared_quadratic_disagreement_shrinks_by_the_factor_of_the_theory(
    pull, period
):
    # η = h = 1/2: a step multiplies by 3/4 and adds two binary digits, a pull and a
    # mean add two each; with integers of four digits that makes 22 of 24.
    shared = lambda x, _: 0.5 * x
    left = 0.75**period
    for tx, factor in (
        (late(period, pull), (1 - pull) * left),
        (cocod(period), left - 1),
    ):
        path, _ = train(tx, 2 * period, x=INTEGERS, gradient=shared)
        ends = path[period - 1 :: period]  # the first one hears of the start alone
        deviations = ends - ends.mean(1, keepdims=True)
        np.testing.assert_array_equal(deviations[1], factor * deviations[0])


def test_in_long_rounds_cocod_no_longer_contracts_where_a_stale_anchor_does():
    shared = lambda x, _: x
    size = lambda path: np.abs(path[15::16] - path[15::16].mean(1, keepdims=True))
    apart, together = (
        size(train(tx, 64, x=INTEGERS, gradient=shared)[0]).max((1, 2))
        for tx in (cocod(16, 0.25), late(16, inner=optax.sgd(0.25)))
    )
    assert apart[-1] / apart[-2] > 0.98
    assert together[-1] < 1e-6 * together[0]


def test_constant_displacements_leave_the_deviation_of_the_theory():
    rounds, pull = 40, 0.25
    u = INTEGERS
    off = u - u.mean(0, dtype=np.float64)
    settings = {
        late(1, pull, inner=optax.sgd(1.0)): -(1 - pull) / pull,
        late(1, pull, 0.5, optax.sgd(1.0)): -(1 - pull) / pull,
        cocod(1, 1.0): -1.0,
        lc.local_sgd(optax.sgd(1.0), period=1): 0.0,
    }
    for tx, factor in settings.items():
        path, _ = train(tx, rounds, data=u, gradient=constant)
        last = path[-1] - path[-1].mean(0)
        # 0.75⁴⁰ of a distance below 48 is missing; positions below 2⁹.
        atol = 48 * 0.75**rounds + rounds * 2.0**9 * EPS
        np.testing.assert_allclose(last, factor * off, atol=atol)


def test_identical_workers_stay_identical():
    same = np.tile(NOISE[:1], (K, 1))
    path, anchor = train(
        late(2, 0.6, 0.7, optax.adam(0.1)), 8, x=same, data=same + 1, gradient=toward
    )
    for x in (path, anchor):
        np.testing.assert_array_equal(x, x[:, :1] + 0 * x)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_anchor_is_precise_equal_everywhere_and_two_arrays_at_most(dtype, momentum):
    x = {"w": jnp.tile(jnp.asarray(NOISE[:1], dtype), (K, 1)), "n": jnp.arange(K)}
    tx = lc.average(optax.sgd(0.5), exchange=lc.stale_anchor(0.6, momentum))
    gradient = lambda x, c: {"w": x["w"] - c.astype(dtype), "n": 0 * x["n"]}
    path, state = walk(tx, x, NOISE, steps=3, gradient=gradient)
    kept = jax.tree.leaves(state.exchange)
    assert len(kept) == (2 if momentum else 1)
    for leaf in kept:
        assert leaf.dtype == np.float32
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    assert path["w"].dtype == dtype
    np.testing.assert_array_equal(path["n"], np.arange(K)[:, None] + np.zeros(3))


def test_another_exchange_may_form_the_anchor():
    weights = np.array([1.0, 0.0, 0.0, 1.0], np.float32)
    tx = lc.overlap_local_sgd(
        optax.sgd(0.5), period=2, pull=0.5, momentum=0.0, exchange=lc.weighted_mean()
    )
    path, state = walk(tx, ORIGIN, INTEGERS, steps=4, gradient=toward, weight=weights)
    pulled = path[:, 1]  # at the first sync
    expected = (pulled[0] + pulled[3]) / 2 + ORIGIN
    np.testing.assert_array_equal(state.exchange.launched[:, 1], expected)


def test_a_tree_of_another_shape_is_refused_by_the_leaf_s_name():
    tx = lc.stale_anchor(0.5)
    state = tx.init({"w": jnp.zeros(3)})
    update = lambda x: tx.update({"w": x}, state, about="parameters")[0]
    with pytest.raises(ValueError, match=r"leaf \['w'\] has shape \(2,\)"):
        lc.spread(update)(jnp.zeros((K, 2)))


def test_what_cannot_be_a_pull_or_a_momentum_is_refused():
    for pull in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=rf"pull {pull} is outside \[0, 1\]"):
            lc.stale_anchor(pull)
    for momentum in (-0.1, 1.0):
        with pytest.raises(ValueError, match=rf"momentum {momentum} is outside"):
            lc.stale_anchor(0.5, momentum)
    tx = lc.rounds(optax.sgd(1.0), optax.sgd(1.0), exchange=lc.stale_anchor(0.5))
    with pytest.raises(ValueError, match=r"not displacements.*use delay= and pull="):
        lc.spread(lambda x: tx.update(x, tx.init(x), x, step=0)[0])(jnp.ones(K))


@pytest.mark.parametrize(
    "graph",
    [lc.ring(2), lc.ring(5), lc.complete(4), lc.one_peer_exponential(8), lc.ring(1)],
)
def test_a_lazy_graph_is_half_the_identity_and_sends_no_more(graph):
    half = lc.lazy(graph)
    moving = lambda part: [p for _, p in part if p != tuple(range(graph.size))]
    for r, part in enumerate(graph.rounds):
        expected = (mixing_matrix(graph, r) + np.eye(graph.size)) / 2
        np.testing.assert_allclose(mixing_matrix(half, r), expected, atol=1e-15)
        assert moving(half.rounds[r]) == moving(part)


def test_blocking_gossip_has_another_factor_on_a_mode_than_oldsgd():
    # Along an eigenvector of W: λ (1 − ηh)^τ a round, against λ − 1 + (1 − ηh)^τ.
    h, rate, period, low = 0.5, 0.5, 2, -1 / 3
    x = np.float32((-1.0) ** np.arange(8))
    shared = lambda x, _: h * x
    ring, left = lc.ring(8), (1 - rate * h) ** period
    blocking = lc.average(
        optax.sgd(rate), exchange=lc.gossip(ring), when=lc.every(period)
    )
    waiting = lc.oldsgd(optax.sgd(rate), ring, period=period)
    for tx, factor in ((blocking, low * left), (waiting, low - 1 + left)):
        path, _ = walk(tx, x, x, steps=3 * period, gradient=shared)
        ends = path[:, period - 1 :: period]
        np.testing.assert_allclose(ends[:, 2], factor * ends[:, 1], rtol=64 * EPS)
