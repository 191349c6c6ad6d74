"""Runs that are killed, again and again, and end as if nothing had happened."""

import contextlib
import io
import json
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest

from lowcomm.checkpoint import Checkpoints

STEPS, EVERY, KILLS = 240, 10, 10
SETTINGS = (
    *("--task", "least-squares", "--workers", "4", "--steps", str(STEPS)),
    *("--batch-size", "16", "--evaluations", "8", "--compute", "1ms"),
    *("--learning-rate", "0.02", "--save-every", str(EVERY), "--log-every", "1"),
)
# A process of which copies are made that have imported everything: they start at once.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["experiments.run"])


def train(method, folder):
    """What a process does that may be killed at any moment."""
    import optax

    import lowcomm as lc
    from experiments import plots, run
    from experiments.catalogue import CATALOGUE
    from experiments.contracts import Method

    def delayed(inner, setting):
        # Sent at every fifth step, adopted three later.
        return lc.rounds(inner, optax.sgd(1.0), when=lc.every(5), delay=3)

    nothing = lambda params, setting: None
    CATALOGUE["delayed"] = Method(delayed, nothing, 0.02, 0.02)
    plots.figure = lambda results, path: (path, path)
    command = [*SETTINGS, "--method", method, "--out", folder, "--resume"]
    with contextlib.redirect_stdout(io.StringIO()):
        raise SystemExit(run.main(command))


def started(method, folder):
    process = FORKS.Process(target=train, args=(method, str(folder)))
    process.start()
    return process


def logged(folder):
    """The number of the last step in the log."""
    try:
        lines = (folder / "log.jsonl").read_text().splitlines()[:-1]
    except FileNotFoundError:
        return 0
    events = [json.loads(line) for line in lines]
    return max((e["step"] for e in events if e["event"] == "step"), default=0)


def results(folder):
    found = json.loads((folder / "results.json").read_text())
    for method in found["methods"].values():
        del method["step_seconds"]
    return found


def arrays(folder, step):
    path = folder / "checkpoints" / str(step) / "arrays"
    return ocp.PyTreeCheckpointer().restore(path)


@pytest.mark.parametrize("method", ["diloco", "selsync", "top_k_sgd", "delayed"])
def test_a_run_killed_at_ten_random_moments_ends_bit_for_bit_as_it_would(
    method, tmp_path
):
    rng = random.Random(method)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = started(method, whole)
    process.join(120)
    assert process.exitcode == 0
    for moment in sorted(rng.sample(range(1, STEPS - 60), KILLS)):
        process = started(method, killed)
        while logged(killed) < moment and process.is_alive():
            time.sleep(0.002)
        # Anywhere within a step, or within the writing of a checkpoint.
        time.sleep(rng.uniform(0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        # What is lost ran since the last complete checkpoint, and a save waits for
        # the one before it.
        complete = Checkpoints(killed / "checkpoints").steps()
        assert logged(killed) - max(complete, default=0) <= 2 * EVERY
    process = started(method, killed)
    process.join(120)
    assert process.exitcode == 0
    assert results(killed) == results(whole)
    found, expected = arrays(killed, STEPS), arrays(whole, STEPS)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name].view(np.uint8), x.view(np.uint8))
