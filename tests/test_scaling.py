"""Fits of power laws return the truth they were given, and know what they do not."""

import numpy as np
import pytest

from experiments.scaling import exponent_gap, fit, local_exponent, predict

SIZES = np.geomspace(1e4, 1e6, 6)
ALPHA, SCALE, FLOOR = 0.34, 3e5, 1.7


def losses(floor=0.0, sizes=SIZES):
    return floor + (SCALE / sizes) ** ALPHA


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.7])
def test_noiseless_points_give_back_the_law(floor):
    law = fit(SIZES, losses(floor), floor=bool(floor))
    assert law.exponent == pytest.approx(ALPHA, rel=1e-10)
    assert law.size == pytest.approx(SCALE, rel=1e-10)
    assert law.floor == pytest.approx(floor, rel=1e-10)
    assert law(3e7) == pytest.approx(float(losses(floor, 3e7)), rel=1e-10)
    assert law.deviation < 1e-10


def test_other_units_of_loss_move_the_size_and_not_the_exponent():
    for c in (0.5, 3.0):
        law = fit(SIZES, c * losses())
        assert law.exponent == pytest.approx(ALPHA, rel=1e-10)
        assert law.size == pytest.approx(SCALE * c ** (1 / ALPHA), rel=1e-10)


def test_two_points_have_the_slope_between_them():
    sizes, pair = (1e3, 8e3), (3.0, 2.0)
    law = fit(sizes, pair)
    assert law.exponent == pytest.approx(local_exponent(sizes, pair), rel=1e-12)
    assert law.exponent == pytest.approx(np.log(1.5) / np.log(8), rel=1e-12)
    assert np.isnan(predict(law, 1e4)).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("pair", "slope"),
    [
        ((2.224, 2.090), 0.0678),  # data-parallel
        ((2.219, 2.086), 0.0675),  # one worker
        ((2.220, 2.086), 0.0679),  # two
        ((2.230, 2.096), 0.0676),  # four
    ],
)
def test_the_published_losses_have_one_slope(pair, slope):
    assert local_exponent((4e9, 10e9), pair) == pytest.approx(slope, abs=5e-5)


@pytest.mark.parametrize("floor", [False, True])
def test_an_interval_of_95_percent_holds_95_of_100_runs(floor):
    # 400 repetitions: the count has a standard deviation of √(0.05 · 0.95/400) = 1.1 %.
    rng, inside, apart = np.random.default_rng(0), 0, 0
    sizes, true = np.repeat(SIZES, 3), FLOOR * floor
    for _ in range(400):
        seen = losses(true, sizes) * np.exp(0.003 * rng.normal(size=len(sizes)))
        law = fit(sizes, seen, floor=floor)
        low, _, high = predict(law, 3e6)
        new = float(losses(true, 3e6)) * np.exp(0.003 * rng.normal())
        inside += low <= new <= high
        again = losses(true, sizes) * np.exp(0.003 * rng.normal(size=len(sizes)))
        gap = exponent_gap(law, fit(sizes, again, floor=floor))
        apart += not gap.low <= 0 <= gap.high
    assert 0.95 - 4 * 0.011 <= inside / 400 <= 0.95 + 4 * 0.011
    assert 0.01 <= apart / 400 <= 0.05 + 4 * 0.011


def test_the_mean_of_several_runs_is_foretold_more_closely():
    seen = losses() * np.exp(0.01 * np.cos(np.arange(6)))
    law = fit(SIZES, seen)
    one, four = (np.ptp(np.log(predict(law, 1e7, runs=n))) for n in (1, 4))
    assert 0.5 < four / one < 1


def test_a_line_through_a_law_with_a_floor_says_too_little_far_out():
    seen = losses(FLOOR)
    assert fit(SIZES, seen)(1e9) < FLOOR < fit(SIZES, seen, floor=True)(1e9)


def test_points_that_tell_too_little_are_refused():
    with pytest.raises(ValueError, match="2 sizes cannot tell 3 parameters"):
        fit([1, 2, 2], [3, 2, 2], floor=True)
    with pytest.raises(ValueError, match="must be positive"):
        fit([1, 2], [3, np.nan])
