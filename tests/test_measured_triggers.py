"""Triggers that measure: drifts and changes, heard by all workers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm.sync import average
from lowcomm.triggers import change_exceeds, drift_exceeds
from lowcomm.workers import spread
from tests.streams import K, detect, mesh_of, recorded

EPS = float(jnp.finfo(jnp.float32).eps)
on_both = pytest.mark.parametrize("backend", ["vmap", "mesh"])


@functools.cache
def drifting(threshold, backend):
    fire = lambda drift: drift_exceeds(threshold).fire((), step=0, drift=drift)[0]
    return jax.jit(spread(fire, mesh=mesh_of(backend)))


NAN, INF = np.nan, np.inf
DRIFTS = [
    # threshold, one drift a worker, whether all of them sync
    (0.0, [0, 0, 0, 0], True),
    (2.0, [1, 0, 0, 1.9375], False),
    (2.0, [0, 0, -2, 0], True),  # equality
    (2.0, [0, 0, 0, 50], True),  # one is enough
    (2.0, [0, NAN, 0, 0], True),
    (INF, [0, 1, 1e18, 3], False),
    (INF, [0, 1, 1e38, 3], False),  # whose square overflows
    (INF, [0, NAN, 0, 0], True),
    (0.0, [NAN, 0, 0, 0], True),
]


@on_both
@pytest.mark.parametrize(("threshold", "drifts", "fires"), DRIFTS)
def test_any_worker_s_drift_fires_for_all(backend, threshold, drifts, fires):
    answers = drifting(threshold, backend)(jnp.array(drifts, jnp.float32))
    np.testing.assert_array_equal(answers, [fires] * K)


def test_drift_is_the_norm_of_all_leaves_together():
    drift = {
        "a": jnp.full((K, 2), 2.0),  # 4 + 4
        "b": jnp.full((K, 1), -1.0, jnp.bfloat16),  # + 1 is 9
        "count": jnp.full(K, 100),
        "none": None,
    }
    assert drifting(3.0, "vmap")(drift).all()
    assert not drifting(3.0 + 4 * EPS, "vmap")(drift).any()


def test_drift_is_for_rounds():
    tx = average(optax.sgd(1.0), when=drift_exceeds(1.0))
    with pytest.raises(ValueError, match=r"only rounds has one: use rounds"):
        spread(lambda x: tx.update(x, tx.init(x), x, step=0)[0])(jnp.ones(K))


@pytest.mark.parametrize("trigger", [drift_exceeds, change_exceeds])
@pytest.mark.parametrize("threshold", [-0.5, NAN])
def test_a_threshold_below_zero_is_refused(trigger, threshold):
    with pytest.raises(ValueError, match=f"threshold {threshold} must be 0 or more"):
        trigger(threshold)


W, ALPHA = 25, 0.01
GAIN = ALPHA / (1 - (1 - ALPHA) ** W)


def flat(steps, changes=()):
    """One worker's stream of norms 1, changed at some steps."""
    norms = np.ones((1, steps))
    for t, value in changes:
        norms[0, t] = value
    return norms


def test_zero_is_always_and_infinity_only_the_warm_up():
    fires, _ = detect(change_exceeds(0.0), recorded())
    assert fires.all()
    fires, _ = detect(change_exceeds(INF), recorded())
    np.testing.assert_array_equal(fires, [[t < W for t in range(100)]] * K)
    fires, _ = detect(change_exceeds(INF, warmup=0), recorded())
    assert not fires.any()
    fires, _ = detect(change_exceeds(0.3, window=5, warmup=2), flat(20))
    assert fires.sum() == fires[0, :2].sum() == 2


def test_the_state_follows_the_closed_form_of_the_change():
    # d = | α (n(t) − q^W n(t−W)) / ((1 − q^W) s(t−1)) − α |. A weighted mean of W
    # float32 numbers has W + 2 roundings, and the change is a difference of two.
    norms, q = recorded().astype(np.float64), 1 - ALPHA
    _, states = detect(change_exceeds(0.3), norms)
    s = np.asarray(states.smoothed, np.float64)
    change = np.abs(s[:, W:] - s[:, W - 1 : -1]) / s[:, W - 1 : -1]
    weights = q ** np.arange(1, W + 1)
    window = np.lib.stride_tricks.sliding_window_view(norms, W, axis=1)[..., ::-1]
    exact = window @ weights / weights.sum()
    old = norms[:, :-W] * q**W
    closed = ALPHA * (norms[:, W:] - old) / ((1 - q**W) * exact[:, :-1]) - ALPHA
    np.testing.assert_allclose(change, np.abs(closed), rtol=0, atol=4 * (W + 2) * EPS)
    # The decision is its comparison, wherever rounding cannot turn it.
    for threshold in (0.02, 0.1):
        fires, _ = detect(change_exceeds(threshold), norms)
        wants = (np.abs(closed) >= threshold).any(0)
        clear = (np.abs(np.abs(closed) - threshold) > 4 * (W + 2) * EPS).all(0)
        assert clear.sum() > 70
        np.testing.assert_array_equal(fires[0, W:][clear], wants[clear])
        assert 0 < wants.sum() < 75


@pytest.mark.parametrize("jump", [0.0, 0.5, 7.0, 10.0])
def test_one_jump_by_r_changes_the_mean_by_the_gain_times_r_minus_one(jump):
    change = GAIN * abs(jump - 1)
    for factor, expected in ((0.999, 1), (1.001, 0)):
        when = change_exceeds(factor * change, warmup=0)
        fires, _ = detect(when, flat(W + 10, [(W + 5, jump)]))
        assert fires[0].nonzero()[0].tolist() == [W + 5] * expected


def test_a_spike_is_heard_again_when_it_leaves_the_window():
    spike = flat(3 * W, [(W + 5, 10.0)])
    _, states = detect(change_exceeds(0.3), spike)
    s = np.asarray(states.smoothed, np.float64)[0]
    change = np.abs(np.diff(s)) / s[:-1]
    when = np.argsort(change[W:])[::-1][:2] + W + 1
    assert when.tolist() == [W + 5, 2 * W + 5]
    np.testing.assert_allclose(change[when - 1], [0.405, 0.241], atol=5e-4)
    assert np.delete(change, [*range(W), *(when - 1)]).max() <= 0.003
    fires, _ = detect(change_exceeds(0.2, warmup=0), spike)
    assert fires[0].nonzero()[0].tolist() == [W + 5, 2 * W + 5]


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**30])
def test_only_ratios_count(scale):
    when = change_exceeds(0.05)
    fires, states = detect(when, recorded())
    scaled, after = detect(when, scale * recorded())
    np.testing.assert_array_equal(scaled, fires)
    np.testing.assert_array_equal(after.smoothed, scale * states.smoothed)
    assert fires[:, W:].any()


def test_a_constant_norm_is_no_change_wherever_the_gradient_points():
    turning = [[3, 4], [5, 0], [4, -3], [0, 5]] * 20
    fires, _ = detect(change_exceeds(1e-30), np.tile(np.float32(turning), (K, 1, 1)))
    np.testing.assert_array_equal(fires, [[t < W for t in range(80)]] * K)


def test_more_is_never_asked_of_a_lower_threshold():
    counts = []
    for threshold in (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 2.0):
        fires, _ = detect(change_exceeds(threshold), recorded())
        counts.append(int(fires[0].sum()))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 100
    assert counts[-1] == W
    assert len(set(counts)) > 4


def test_a_window_of_zeros_changes_infinitely_when_something_comes():
    silent = np.zeros((1, 60))
    assert not detect(change_exceeds(0.1, warmup=0), silent)[0].any()
    silent[0, 40] = 1e-3
    assert detect(change_exceeds(1e30, warmup=0), silent)[0][0, 40]
    assert not detect(change_exceeds(INF, warmup=0), silent)[0].any()


@on_both
def test_any_worker_s_change_and_nan_fire_for_all(backend):
    when = change_exceeds(0.3, window=5, warmup=0)
    grads = np.ones((K, 30), np.float32)
    grads[1, 8], grads[3, 20] = 100, NAN
    fires, states = detect(when, grads, backend)
    # A spike comes and goes; a NaN fires once and leaves no trace in the window.
    expected = [8, 13, 20]
    np.testing.assert_array_equal(fires, [np.isin(range(30), expected)] * K)
    assert np.isfinite(states.smoothed).all()


@pytest.mark.parametrize("window", [1, 4])
def test_a_nan_at_the_first_step_fires_once_as_well(window):
    when = change_exceeds(0.5, window=window, warmup=0)
    fires, _ = detect(when, flat(12, [(0, NAN)]))
    assert fires[0].tolist() == [True] + [False] * 11


def test_nan_fires_before_the_window_is_full():
    when = change_exceeds(0.5, window=6, warmup=0)
    fires, _ = detect(when, flat(4, [(2, NAN)]))
    assert fires[0].tolist() == [False, False, True, False]
    fires, _ = detect(when, flat(4, [(2, 1e9)]))
    assert not fires.any()
