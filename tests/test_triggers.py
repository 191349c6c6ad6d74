"""Triggers: exactly these steps, the same on all workers, and what asking costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from lowcomm.anchor import rounds
from lowcomm.ledger import traffic
from lowcomm.spmd import AXIS, NotUniform, vary, worker_mesh
from lowcomm.sync import average
from lowcomm.triggers import Trigger, any_of, change_exceeds, drift_exceeds, every
from lowcomm.uniform import known
from lowcomm.workers import spread

K = 4
EPS = float(jnp.finfo(jnp.float32).eps)

on_both = pytest.mark.parametrize("backend", ["vmap", "mesh"])


def mesh_of(backend):
    return worker_mesh(K) if backend == "mesh" else None


@pytest.mark.parametrize(
    ("period", "offset", "warmup"),
    [(1, 0, 0), (3, 0, 0), (3, 2, 0), (4, 1, 3), (2, 0, 5)],
)
def test_every_fires_at_exactly_these_steps_however_it_is_told(period, offset, warmup):
    when = every(period, offset=offset, warmup=warmup)
    due = [t < warmup or (t + 1 - offset) % period == 0 for t in range(20)]
    answers = [when.fire((), step=t)[0] for t in range(20)]
    assert answers == due
    assert all(isinstance(answer, bool) for answer in answers)
    traced = jax.jit(lambda t: when.fire((), step=t)[0])
    assert [bool(traced(t)) for t in range(20)] == due
    step, asked = jnp.int32(7), []
    with known(step, 7, asked):
        assert when.fire((), step=step)[0] is due[7]
    # The question that was noted answers for all the other steps.
    (question,) = asked
    assert [question.ask(t) for t in range(20)] == due
    assert question.answer is due[7]


def test_every_does_not_fire_before_the_first_step():
    # Where a delay asks about steps that never were.
    for when in (every(2), every(1), every(4, warmup=3)):
        assert not any(when.fire((), step=t)[0] for t in range(-5, 0))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"period": 0}, "period 0"),
        ({"period": 2.5}, "period 2.5"),
        ({"period": 3, "offset": 3}, r"offset 3 is outside \[0, 3\)"),
        ({"period": 3, "offset": -1}, "offset -1"),
        ({"period": 3, "warmup": -1}, "warmup -1 is negative"),
    ],
)
def test_an_impossible_schedule_is_refused_with_its_value(wrong, said):
    with pytest.raises(ValueError, match=said):
        every(**wrong)


@pytest.mark.parametrize("step", [None, 1.0, True, jnp.float32(1), jnp.arange(3)])
def test_a_step_that_is_no_integer_is_refused(step):
    with pytest.raises(ValueError, match="step"):
        every(2).fire((), step=step)


def test_the_gap_is_the_least_number_of_steps_between_two_syncs():
    assert every(4).gap == every(4, offset=1).gap == 4
    assert every(4, warmup=2).gap == 1
    assert any_of(every(4)).gap == 4
    assert any_of(every(4), every(6)).gap == 1
    assert drift_exceeds(1.0).gap is change_exceeds(1.0).gap is None
    assert any_of(every(4), change_exceeds(1.0)).gap is None


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


@functools.cache
def detector(when, backend):
    def worker(grads):
        def step(state, now):
            fires, state = when.fire(state, step=now[0], grads=now[1])
            return state, (vary(fires, AXIS), state)

        steps = jnp.arange(len(grads))
        return lax.scan(step, vary(when.init(grads[0]), AXIS), (steps, grads))[1]

    return jax.jit(spread(worker, mesh=mesh_of(backend)))


def detect(when, grads, backend="vmap"):
    """Who fires when, ``[K, T]``, and the states, of a stacked stream ``[K, T, …]``."""
    fires, states = detector(when, backend)(jnp.asarray(grads, jnp.float32))
    return np.asarray(fires), states


def flat(steps, changes=()):
    """One worker's stream of norms 1, changed at some steps."""
    norms = np.ones((1, steps))
    for t, value in changes:
        norms[0, t] = value
    return norms


@functools.cache
def recorded():
    """The norms of four workers, [4, 100], with jumps."""
    draw = np.random.default_rng(0)
    norms = draw.gamma(4.0, size=(K, 100)) * (1 + 9 * (draw.random((K, 100)) < 0.05))
    return norms.astype(np.float32)


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
    # A spike comes and goes; a NaN fires as long as it is in one of the two windows.
    expected = [8, 13, *range(20, 26)]
    np.testing.assert_array_equal(fires, [np.isin(range(30), expected)] * K)
    assert np.isfinite(states.smoothed[:, -1]).all()


def test_any_of_is_or_and_asks_every_trigger():
    when = any_of(every(4), every(6, warmup=2))
    due = [t < 2 or (t + 1) % 4 == 0 or (t + 1) % 6 == 0 for t in range(24)]
    assert [when.fire(when.init(None), step=t)[0] for t in range(24)] == due
    capped = any_of(every(10), change_exceeds(0.05, warmup=0))
    fires, (_, states) = detect(capped, recorded())
    alone, same = detect(change_exceeds(0.05, warmup=0), recorded())
    np.testing.assert_array_equal(fires, alone | (np.arange(1, 101) % 10 == 0))
    np.testing.assert_array_equal(states.smoothed, same.smoothed)
    assert (fires != alone).any()
    with pytest.raises(ValueError, match="at least one trigger"):
        any_of()


@pytest.mark.parametrize(
    ("when", "sent"),
    [
        (every(2, warmup=1), 0),
        (drift_exceeds(1.0), 4),
        (change_exceeds(0.3), 4),
        (any_of(every(2), drift_exceeds(1.0), change_exceeds(0.3)), 8),
    ],
)
def test_asking_costs_four_bytes_a_measurement(when, sent):
    x = np.ones((3, 2), np.float32)
    ask = lambda step, x: when.fire(when.init(x), step=step, drift=x, grads=x)
    assert traffic(ask, np.int32(0), x, workers=8).bytes_always == sent


@pytest.mark.parametrize("backend", ["vmap", "shard_map", "pmap"])
@pytest.mark.parametrize("verb", ["average", "rounds"])
def test_a_decision_that_differs_between_workers_is_refused_everywhere(backend, verb):
    # On devices some would talk and the others wait for ever.
    selfish = Trigger(lambda params: (), lambda state, *, grads, **_: (grads > 1, ()))
    tx = {
        "average": average(optax.sgd(1.0), when=selfish),
        "rounds": rounds(optax.sgd(1.0), optax.sgd(1.0), when=selfish),
    }[verb]
    worker = lambda x: tx.update(x, tx.init(x), x, step=0)[0]
    mesh = None if backend == "vmap" else worker_mesh(K)
    with pytest.raises(NotUniform, match=r"predicate differs .* axis 'workers'"):
        spread(worker, mesh=mesh, backend=backend)(jnp.arange(K, dtype=jnp.float32))


@on_both
def test_workers_that_disagree_sync_together_and_are_equal_afterwards(backend):
    tx = average(optax.sgd(1.0), when=change_exceeds(0.3, window=2, warmup=0))
    # Each walks at its own pace, until one is startled.
    grads = np.tile(np.arange(1, K + 1, dtype=np.float32)[:, None], 6)
    grads[2, 5] = 100

    def worker(grads):
        def step(carry, now):
            x, state = carry
            moves, state = tx.update(now[1], state, x, step=now[0])
            x = optax.apply_updates(x, moves)
            return (x, state), (x, state.since)

        x = jnp.zeros_like(grads[0])
        carry = (x, vary(tx.init(x), AXIS))
        return lax.scan(step, carry, (jnp.arange(6), grads))[1]

    x, since = jax.jit(spread(worker, mesh=mesh_of(backend)))(grads)
    assert len(set(np.asarray(x[:, 4]).tolist())) == K
    np.testing.assert_array_equal(x[:, 5], [-grads.sum(1).mean()] * K)
    np.testing.assert_array_equal(since, [[1, 2, 3, 4, 5, 0]] * K)
