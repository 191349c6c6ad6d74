"""Several processes that train together: stopped, killed, started wrongly, gone on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import experiments
from experiments import run as program
from experiments.launch import launch
from experiments.records import LOG
from lowcomm.checkpoint import Checkpoints

ROOT = Path(experiments.__file__).parents[1]
STEPS = 500
SETTINGS = (
    *("--task", "least-squares", "--workers", "4", "--steps", str(STEPS)),
    *("--batch-size", "16", "--evaluations", "4", "--compute", "1ms"),
    *("--method", "selsync", "--learning-rate", "0.02", "--threshold", "0.2"),
    *("--save-every", "40", "--log-every", "1"),
)
PATIENCE = 240  # seconds, for a machine with much else to do
pytestmark = pytest.mark.timeout(4 * PATIENCE)


@pytest.fixture(autouse=True)
def listening():
    """Also where the tests run in the background, with signals ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, how) for number, how in usual.items()}
    yield
    for number, how in before.items():
        signal.signal(number, how)


def command(*more):
    return [sys.executable, "-m", "experiments.run", *SETTINGS, *map(str, more)]


@contextlib.contextmanager
def started(*arguments, where=ROOT, **told):
    """A process that is gone in any case in the end, with what it wrote as an error."""
    process = subprocess.Popen(
        arguments,
        cwd=where,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | told,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        yield process
    finally:
        for pid in [*children(process), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def children(process):
    """The processes that a launcher has started, in order of their numbers."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return sorted(map(int, listed.read_text().split())) if listed.exists() else []


def steps_in(folder):
    try:
        lines = (folder / LOG).read_text().splitlines()
    except FileNotFoundError:
        return 0
    return sum('"event": "step"' in line for line in lines)


def run_until(process, folder, more):
    """Wait for so many more steps in the log."""
    wanted = steps_in(folder) + more
    while steps_in(folder) < wanted:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


def said_at_the_end(process):
    _, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, errors


def results(folder):
    found = json.loads((folder / "results.json").read_text())
    for method in found["methods"].values():
        del method["step_seconds"]
    return found


def last_arrays(folder):
    saved = folder / "checkpoints" / str(STEPS)
    leaves = json.loads((saved / "about.json").read_text())["leaves"]
    how = dict.fromkeys(leaves, ocp.RestoreArgs(restore_type=np.ndarray))
    args = ocp.args.PyTreeRestore(dict.fromkeys(leaves, 0), restore_args=how)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arrays = reader.restore(saved / "arrays", args=args)
    return {name: x.tobytes() for name, x in arrays.items()}


def test_a_group_that_is_stopped_and_killed_ends_bit_for_bit_as_it_would(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    again = command("--processes", 2, "--out", broken, "--resume")
    saved = Checkpoints(broken / "checkpoints")
    with started(*command("--processes", 2, "--out", whole)) as undisturbed:
        code, errors = said_at_the_end(undisturbed)
        assert code == 0, errors

    # A notice of preemption to one process: all save at the same step, and that is all.
    with started(*again) as group:
        run_until(group, broken, 20)
        os.kill(children(group)[1], signal.SIGTERM)
        code, errors = said_at_the_end(group)
        assert code == 0
        assert f"go on with --out {broken} --resume" in errors
        assert f"stopped after {saved.steps()[-1]} steps" in errors
        assert not (broken / "results.json").exists()

    # One is killed: the launcher ends the other and says who it was.
    with started(*again) as group:
        run_until(group, broken, 50)
        os.kill(children(group)[1], signal.SIGKILL)
        code, errors = said_at_the_end(group)
        assert code == 128 + signal.SIGKILL
        assert "process 1 of 2 ended of SIGKILL" in errors

    # The launcher is killed: its processes end, too, and let go of the folder.
    with started(*again) as group:
        run_until(group, broken, 50)
        left = children(group)
        os.kill(group.pid, signal.SIGKILL)
        group.communicate(timeout=PATIENCE)  # whose error stream they share
        assert not [pid for pid in left if is_running(pid)]

    # Ctrl-C in the terminal, which the launcher hears and hands on.
    with started(*again) as group:
        run_until(group, broken, 20)
        os.kill(group.pid, signal.SIGINT)
        code, errors = said_at_the_end(group)
        assert code == 130
        assert f"stopped after {saved.steps()[-1]} steps" in errors

    # To the first alone: it waits for the others, which JAX would end without it.
    with started(*again) as group:
        run_until(group, broken, 20)
        os.kill(children(group)[0], signal.SIGINT)
        code, errors = said_at_the_end(group)
        assert code == 130
        assert "Terminating process" not in errors

    with started(*again) as group:
        code, errors = said_at_the_end(group)
        assert code == 0, errors
    assert results(broken) == results(whole)
    assert last_arrays(broken) == last_arrays(whole)


def is_running(pid):
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    return False


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def numbered(process, processes, address, **told) -> dict[str, Any]:
    return told | {
        "LOWCOMM_COORDINATOR": address,
        "LOWCOMM_PROCESSES": str(processes),
        "LOWCOMM_PROCESS": str(process),
    }


def test_what_is_started_wrongly_ends_before_it_trains_and_says_why(tmp_path):
    # Another learning rate and a changed file on the second of two processes.
    other = tmp_path / "other"
    for package in ("lowcomm", "experiments"):
        shutil.copytree(
            ROOT / package,
            other / package,
            ignore=shutil.ignore_patterns("results", "__pycache__"),
        )
    with (other / "lowcomm" / "train.py").open("a") as code:
        code.write("# changed\n")
    out = ("--out", tmp_path / "out")
    unlike = command(*out, "--momentum", "0.5")
    together, alone, nowhere = (free_address() for _ in range(3))
    short = {"LOWCOMM_DEADLINE": "2"}
    with (
        started(*command(*out), **numbered(0, 2, together)) as first,
        started(*unlike, where=other, **numbered(1, 2, together)) as second,
        started(*command(*out), **numbered(0, 3, alone, **short)) as lonely,
        started(*command(*out), **numbered(1, 3, nowhere, **short)) as lost,
    ):
        told = {}
        for process in (first, second, lonely, lost):
            code, told[process] = said_at_the_end(process)
            assert code == 2, told[process]
    line = next(x for x in told[first].splitlines() if x.startswith("error:"))
    assert "process 1: code of lowcomm: train.py is" in line
    assert "process 1: settings: momentum is 0.5 and 0.9 on process 0" in line
    assert line in told[second].splitlines()  # who was started by hand reads it too
    expected = "error: processes 1, 2 of 3 did not come within 2 seconds."
    assert expected in told[lonely].splitlines()
    assert f"found no process 0 at {nowhere} within 2 seconds" in told[lost]
    assert not (tmp_path / "out").exists()


def test_processes_that_cannot_share_the_workers_are_not_started(capsys):
    assert program.main([*SETTINGS, "--processes", "3"]) == 2
    complaint = "--workers 4 cannot be shared out evenly among 3 processes"
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_the_first_to_fail_decides_and_the_others_are_ended(capfd):
    code = "import os, sys, time; n = int(os.environ['LOWCOMM_PROCESS'])\n"
    code += "print('out', n); print('err', n, file=sys.stderr)\n"
    code += "sys.exit(7) if n == 2 else time.sleep(600)"
    assert launch([sys.executable, "-c", code], 3) == 7
    out, err = capfd.readouterr()
    assert "[2] err 2" in err
    assert "process 2 of 3 ended with exit code 7: ending the others" in err
    assert "out 1" not in out


def test_the_first_listens_where_the_others_look_for_it(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "192.0.2.1:1234")
    code = "import os; bind = os.environ['JAX_COORDINATOR_BIND_ADDRESS']\n"
    code += "assert bind == os.environ['LOWCOMM_COORDINATOR']"
    assert launch([sys.executable, "-c", code], 2) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_handed_on(number, capfd):
    code = "import os, signal, sys, time\n"
    code += f"signal.signal({int(number)}, lambda *_: sys.exit(0))\n"
    code += "if os.environ['LOWCOMM_PROCESS'] == '1': os.kill(os.getppid(), "
    code += f"{int(number)})\ntime.sleep(600)"
    before = signal.getsignal(number)
    # The second may come before the first listens.
    assert launch([sys.executable, "-c", code], 2) in (0, 128 + number)
    assert signal.getsignal(number) is before
