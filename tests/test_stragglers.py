"""Workers of unequal speed: reproducible, averaged out by rounds, and no slower law."""

import itertools
import math

import numpy as np
import pytest

from lowcomm.stragglers import (
    compute_times,
    exponential_tail,
    lognormal,
    one_slow,
    steady,
    synced_seconds,
)
from lowcomm.timeline import Transfer, timeline

LAWS = {
    "steady": steady(),
    "one slow": one_slow(3.0),
    "exponential": exponential_tail(1.0),
    "lognormal": lognormal(0.7),
}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_a_seed_says_everything_and_more_workers_change_nothing(law):
    draw = lambda workers, seed: compute_times(
        2.0, law, steps=50, workers=workers, seed=seed
    )
    assert (draw(4, 0) == draw(4, 0)).all()
    assert (draw(4, 0) == draw(9, 0)[:, :4]).all()
    assert draw(4, 0).shape == (50, 4)
    assert (draw(4, 0) > 0).all()
    if law in (LAWS["exponential"], LAWS["lognormal"]):
        assert (draw(4, 0) != draw(4, 1)).all()
        assert (draw(4, 0)[:, 0] != draw(4, 0)[:, 1]).all()


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_one_worker_waits_for_nobody(law):
    times = compute_times(1.0, law, steps=30, workers=1, seed=3)
    for syncs in (1, 7, [], [4, 20]):
        assert synced_seconds(times, syncs) == pytest.approx(times.sum())


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_meeting_less_often_never_takes_longer(law):
    times = compute_times(1.0, law, steps=240, workers=6, seed=0)
    # Each schedule meets at a part of the steps of the one before.
    taken = [synced_seconds(times, period) for period in (1, 2, 4, 8, 24, 240)]
    assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(taken))
    assert taken[-1] == pytest.approx(times.sum(axis=0).max())


def test_the_slowest_of_exponentials_is_the_harmonic_number():
    steps, workers = 4000, 8
    times = compute_times(
        1.0, exponential_tail(1.0), steps=steps, workers=workers, seed=0
    )
    mean = synced_seconds(times, 1) / steps
    harmonic = sum(1 / i for i in range(1, workers + 1))
    # The variance of the largest of K is the sum of 1/i²; five standard errors.
    error = 5 * math.sqrt(sum(1 / i**2 for i in range(1, workers + 1)) / steps)
    assert abs(mean - 1 - harmonic) < error
    # Rounds of 100 steps: each worker's sum has mean 200 and deviation 10, so the
    # largest of 8 is less than 3 deviations above.
    assert 2 < synced_seconds(times, 100) / steps < 2.3


def test_a_worker_that_is_always_slow_costs_the_same_at_every_period():
    times = compute_times(1.0, one_slow(3.0, worker=2), steps=60, workers=4, seed=0)
    for period in (1, 5, 60):
        assert synced_seconds(times, period) == 180


def test_factors_of_a_lognormal_law_have_mean_one():
    sigma, steps = 0.5, 20_000
    times = compute_times(1.0, lognormal(sigma), steps=steps, workers=1, seed=0)
    error = 5 * math.sqrt(math.expm1(sigma**2) / steps)
    assert abs(times.mean() - 1) < error
    assert abs(np.log(times).std() - sigma) < 5 * sigma / math.sqrt(2 * steps)


def test_listed_syncs_are_periods_and_the_last_step_is_one():
    times = compute_times(1.0, lognormal(1.0), steps=20, workers=3, seed=0)
    assert synced_seconds(times, 6) == synced_seconds(times, [5, 11, 17])
    assert synced_seconds(times, [19]) == synced_seconds(times, [])
    assert synced_seconds(np.zeros((0, 3)), 4) == 0


@pytest.mark.parametrize("period", [1, 3, 7])
def test_transfers_that_take_no_time_make_the_same_run(period):
    times = compute_times(1.0, lognormal(1.0), steps=42, workers=5, seed=1)
    run = timeline(times, Transfer(range(period - 1, 42, period), 0.0))
    assert run.seconds == pytest.approx(synced_seconds(times, period))


def test_delayed_rounds_absorb_stragglers_as_well():
    times = compute_times(1.0, exponential_tail(1.0), steps=60, workers=8, seed=0)
    at = range(5, 60, 6)
    waited = timeline(times, Transfer(at, 1.0)).seconds
    delayed = timeline(times, Transfer(at, 1.0, hidden=5)).seconds
    assert delayed < waited - 5  # more than half of the ten transfers


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: one_slow(0.0), "factor="),
        (lambda: one_slow(2.0, worker=-1), "worker -1"),
        (lambda: exponential_tail(-1), "scale="),
        (lambda: lognormal(math.inf), "sigma="),
        (lambda: compute_times(-1, steady(), steps=1, workers=1, seed=0), "seconds="),
        (lambda: compute_times(1, steady(), steps=1, workers=0, seed=0), "0 workers"),
        (lambda: synced_seconds([1.0], 1), r"\[steps, workers\]"),
        (lambda: synced_seconds([[1.0]], 0), "period 0"),
        (lambda: synced_seconds([[1.0]], [1]), "of 1"),
    ],
)
def test_nonsense_is_refused(call, named):
    with pytest.raises(ValueError, match=named):
        call()
