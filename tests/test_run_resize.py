"""A run from the command line goes on with other workers where that is asked for."""

import json
import os
import signal

import numpy as np
import pytest

from experiments import run as program
from lowcomm.checkpoint import Checkpoints

ASKED = (
    *("--task", "digits", "--steps", "24", "--method", "diloco"),
    *("--period", "4", "--evaluations", "4", "--compute", "1ms"),
    *("--learning-rate", "0.05", "--batch-size", "16"),
)


def run(folder, *arguments):
    return program.main([*ASKED, "--out", str(folder), *map(str, arguments)])


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run of four workers that was stopped in the middle of a round."""

    class Stopping(program.Watch):
        def on_step(self, t, loss, sent):
            super().on_step(t, loss, sent)
            if t + 1 == 10:
                os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(program, "Watch", Stopping)
        run(tmp_path, "--workers", 4)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [10]
    return tmp_path


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


def test_a_run_of_four_is_finished_by_eight_where_that_is_asked_for(stopped, capsys):
    assert run(stopped, "--workers", 8, "--resume") == 2
    assert "workers was 4 and is 8" in said(capsys)
    more = ("--workers", 8, "--batch-size", 8, "--resume", "--resize")
    assert run(stopped, *more, "--steps", 25) == 2  # nothing else may change
    assert "steps was 24 and is 25" in said(capsys)
    assert run(stopped, *more) == 0
    found = json.loads((stopped / "results.json").read_text())
    made = found["methods"]["diloco"]
    assert (found["settings"]["workers"], made["syncs"]) == (8, [6])
    loss = np.array(made["loss"][0])
    assert np.isfinite(loss).all()
    assert loss[-1] < 0.5 * loss[0]
    # From the step on at which it was resized it is a run of eight.
    assert Checkpoints(stopped / "checkpoints").about().settings["workers"] == 8
    log = [json.loads(x) for x in (stopped / "log.jsonl").read_text().splitlines()]
    settings = [r["settings"]["workers"] for r in log if "settings" in r]
    assert settings == [4, 8]


def test_only_a_run_that_is_gone_on_with_is_resized(tmp_path, capsys):
    assert run(tmp_path, "--workers", 4, "--resize") == 2
    assert "add --resume" in said(capsys)
