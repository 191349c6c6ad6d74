"""Rates are chosen by examples that no comparison is judged by."""

import json

import numpy as np
import pytest

from experiments import tune
from experiments.catalogue import CATALOGUE
from experiments.tasks import make_task


def judged(task):
    """The windows of text a task is judged by."""
    return {row.tobytes() for row in np.asarray(task.evaluate.args[-1])}


def test_the_tuning_split_of_text_shares_no_window_with_the_judge():
    settings = tune.Settings(task="stdlib-lm", workers=2, batch_size=8)
    tuning = judged(tune._task(settings, seed=100))
    final = judged(make_task("stdlib-lm", workers=2, batch_size=8))
    # Text repeats itself here and there, in licences for instance; windows do not.
    assert len(tuning & final) <= 0.01 * len(final)
    assert len(tuning) > 500


def test_the_ladder_is_climbed_while_an_end_is_best():
    tried = []

    def losses(rate):
        tried.append(rate)
        return [abs(np.log(rate / 0.004)), abs(np.log(rate / 0.006))]

    found = tune.tune(losses, rates=(0.05, 0.1))
    assert found["learning_rate"] == 0.005
    assert tried == [0.05, 0.1, 0.02, 0.01, 0.005, 0.002]


def test_a_rate_that_diverges_is_never_chosen():
    losses = {0.1: [0.5, np.nan], 0.2: [np.nan, np.nan], 0.05: [2.0, 2.0], 0.02: [3, 3]}
    assert tune.tune(losses.__getitem__, rates=(0.1, 0.2))["learning_rate"] == 0.05


@pytest.mark.parametrize("task", ["mnist-mixer", "stdlib-lm"])
def test_the_rates_of_the_catalogue_are_those_of_the_recorded_grid(task):
    found = json.loads((tune.FOLDER / f"tuning-{task}.json").read_text())["methods"]
    rate = lambda m: m.learning_rate if task == "mnist-mixer" else m.adamw_rate
    assert set(found) == {n for n, m in CATALOGUE.items() if rate(m) is not None}
    for name in found:
        chosen = rate(CATALOGUE[name])
        assert found[name]["learning_rate"] == chosen
        means = {rate: np.mean(x) for rate, x in found[name]["losses"].items()}
        assert min(means, key=means.__getitem__) == f"{chosen:g}"
