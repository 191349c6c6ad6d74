"""Streaming DiLoCo: every leaf in one fragment, each fragment a DiLoCo of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from lowcomm import diloco, every, rounds, streaming_diloco
from lowcomm.algorithms.streaming import fragments_of
from tests.quadratics import walk

K, PERIOD = 3, 6
RNG = np.random.default_rng(0)
NAMES = ("layer_0", "layer_1", "layer_2")
X = {
    name: {
        "w": np.tile(RNG.normal(size=(2, 2)), (K, 1, 1)).astype(np.float32),
        "b": np.tile(RNG.normal(size=2), (K, 1)).astype(np.float32),
    }
    for name in NAMES
}
OPTIMA = jax.tree.map(lambda x: RNG.normal(size=x.shape).astype(np.float32), X)
NESTEROV = {"outer_lr": 0.7, "momentum": 0.9}


def pull(x, c):
    return jax.tree.map(jnp.subtract, x, c)


def train(tx, steps=2 * PERIOD + 3, *, x=X, data=OPTIMA, gradient=pull, **how):
    return walk(tx, x, data, steps=steps, gradient=gradient, **how)


def streaming(inner=None, *, fragments=3, mixing=0.5, **how):
    inner = optax.adam(0.1) if inner is None else inner
    how = {"period": PERIOD} | NESTEROV | how
    return streaming_diloco(inner, fragments=fragments, mixing=mixing, **how)


def anchors(state, name):
    """``state``'s anchor of a layer, and whether the parameters are it."""
    fragment = NAMES.index(name) % len(state[1].inner_states)
    inner = state[1].inner_states[fragment].inner_state
    return inner.anchor[name], inner.synced


def same(path, expected):
    jax.tree.map(np.testing.assert_array_equal, path, expected)


BALL = optax.sgd(0.1, momentum=0.9)


def test_one_fragment_at_once_and_adopted_whole_is_diloco_bit_for_bit():
    inner = optax.chain(optax.clip_by_global_norm(1.0), BALL)
    path, _ = train(streaming(inner, fragments=1, mixing=0.0))
    expected, _ = train(diloco(inner, period=PERIOD, **NESTEROV))
    same(path, expected)


@pytest.mark.parametrize(("delay", "mixing"), [(0, 0.5), (2, 0.25), (6, 0.5)])
def test_each_fragment_is_a_round_of_its_own_at_its_own_offset(delay, mixing):
    path, state = train(streaming(BALL, delay=delay, mixing=mixing))
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    for fragment, name in enumerate(NAMES):
        when = every(PERIOD, offset=fragment * PERIOD // 3)
        tx = rounds(BALL, outer, when=when, delay=delay, pull=1 - mixing)
        alone, rounds_state = train(tx, x=X[name], data=OPTIMA[name])
        close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)
        jax.tree.map(close, path[name], alone)
        jax.tree.map(close, anchors(state, name)[0], rounds_state.anchor)


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_every_leaf_is_synced_exactly_once_in_a_period(fragments):
    _, state = train(streaming(fragments=fragments, mixing=0.0), 2 * PERIOD)
    for name in NAMES:
        anchor, synced = anchors(state, name)
        moved = [
            np.abs(np.diff(a, axis=1)).reshape(K, 11, -1).max((0, 2)) > 0
            for a in anchor.values()
        ]
        assert (moved[0] == moved[1]).all()
        steps = np.flatnonzero(synced.all(0))
        offset = (NAMES.index(name) % fragments) * PERIOD // fragments
        assert [t for t in steps if t < PERIOD] == [(offset - 1) % PERIOD]
        assert len(steps) == 2
        # Where it is synced its anchor moves, and nowhere else.
        assert set(np.flatnonzero(moved[0]) + 1) | {steps[0]} == set(steps)


def test_what_is_sent_in_a_period_is_the_model_a_fragment_at_a_time():
    one = jax.tree.map(lambda x: x[0], X)
    tx = streaming(delay=2)
    step = lambda t: lambda x: tx.update(x, tx.init(x), x, step=t)
    sent = [lc.traffic(step(t), one, workers=K).bytes_always for t in range(PERIOD)]
    layer = 4 * (4 + 2)
    assert sent == [0, layer, 0, layer, 0, layer]
    unknown = lambda x, t: tx.update(x, tx.init(x), x, step=t)
    traffic = lc.traffic(unknown, one, np.int32(0), workers=K)
    assert (traffic.bytes_always, traffic.bytes_max) == (0, 3 * layer)


def test_mixing_of_one_never_adopts():
    path, state = train(streaming(BALL, mixing=1.0))
    alone, _ = train(BALL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), path, alone)
    assert not any(anchors(state, name)[1].any() for name in NAMES)


@pytest.mark.parametrize("delay", [0, 2])
def test_mixing_leaves_workers_apart_and_anchors_equal(delay):
    path, state = train(streaming(BALL, mixing=0.5, delay=delay))
    before, _ = train(streaming(BALL, mixing=1.0, delay=delay))
    for fragment, name in enumerate(NAMES):
        sync = (fragment * PERIOD // 3 - 1) % PERIOD + delay
        for leaf in ("w", "b"):
            apart = np.ptp(path[name][leaf][:, sync], axis=0)
            assert (apart > 1e-3).all()
            # Half of the way to the anchor: half as far apart as without it.
            alone = np.ptp(before[name][leaf][:, sync], axis=0)
            np.testing.assert_allclose(apart, alone / 2, rtol=1e-4)
            assert np.ptp(anchors(state, name)[0][leaf], axis=0).max() == 0


def test_the_inner_optimizer_sees_the_whole_tree():
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append((jax.tree.structure(params), extra["value"]))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    tx = streaming(inner)
    one = jax.tree.map(lambda x: x[0], X)
    step = lambda x: tx.update(x, tx.init(x), x, step=0, value=7.0)
    lc.traffic(step, one, workers=K)
    assert (jax.tree.structure(one), 7.0) in seen


def test_anchors_are_the_consensus_and_what_is_adopted_is_adopted_exactly():
    apply = lambda x, moves, state: lc.apply_updates(x, moves, state)
    path, state = train(streaming(mixing=0.0), apply=apply)
    for name in NAMES:
        anchor, synced = anchors(state, name)
        for t in np.flatnonzero(synced.all(0)):
            same(
                jax.tree.map(lambda x, t=t: x[:, t], path[name]),
                jax.tree.map(lambda x, t=t: x[:, t], anchor),
            )
    last = lambda tree: jax.tree.map(lambda x: jnp.asarray(x[:, -1]), tree)
    read = lc.spread(lc.consensus)(last(state), last(path))
    for name in NAMES:
        same(read[name], last(anchors(state, name)[0]))


def test_integers_and_half_precision_take_no_harm():
    x = {"a": jnp.asarray(X["layer_0"]["b"], jnp.bfloat16), "b": np.ones((K, 2), int)}
    gradient = lambda x, c: {"a": (x["a"] - c).astype(jnp.bfloat16), "b": 0 * x["b"]}
    tx = streaming(optax.adam(0.1), fragments=2)
    data = OPTIMA["layer_0"]["b"]
    path, state = train(tx, 7, x=x, data=data, gradient=gradient)
    assert path["a"].dtype == jnp.bfloat16
    assert (path["b"] == 1).all()
    assert state[1].inner_states[0].inner_state.anchor["a"].dtype == np.float32
    assert np.abs(np.float32(path["a"][:, -1] - x["a"])).max() > 0.1


def labels(names, fragments, tree=None):
    tree = dict.fromkeys(names, 0.0) if tree is None else tree
    return fragments_of(tree, fragments)


def test_layers_are_dealt_out_in_natural_order():
    names = [f"block_{i}" for i in range(12)]
    assert labels(names, 4) == {name: i % 4 for i, name in enumerate(names)}
    listed = fragments_of([0.0] * 12, 5)
    assert listed == [i % 5 for i in range(12)]
    # Keys that all leaves share name no layers.
    nested = {"params": {"model": {key: {"w": 0.0, "b": 0.0} for key in "abc"}}}
    found = fragments_of(nested, 2)["params"]["model"]
    assert [set(found[name].values()) for name in "abc"] == [{0}, {1}, {0}]


def test_a_function_of_the_path_may_say_which_leaf_belongs_where():
    by_kind = lambda path: int(path.endswith("/w"))
    tx = streaming(BALL, fragments=2, fragment_of=by_kind, mixing=0.0)
    path, _ = train(tx, PERIOD)
    for leaf, sync in (("b", 5), ("w", 2)):
        for name in NAMES:
            apart = np.ptp(path[name][leaf], axis=0).reshape(PERIOD, -1).max(-1)
            assert np.flatnonzero(apart < 1e-6).tolist() == [sync]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: streaming(fragments=0), "fragments 0 is below 1"),
        (lambda: streaming(mixing=1.5), r"mixing 1.5 is outside \[0, 1\]"),
        (lambda: streaming(delay=7), "delay 7 is longer than the 6 steps"),
        (lambda: streaming(period=0), "period 0"),
        (lambda: labels("ab", 3), r"3 fragments of 2 layers \(a, b\)"),
        (lambda: fragments_of(0.0, 2), "2 fragments of 1 layers"),
        (
            lambda: fragments_of({"a": {"w": 0.0}}, 2, lambda path: 2),
            r"fragment_of\('a/w'\) is 2, and there are the fragments 0 to 1",
        ),
    ],
)
def test_fragments_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
