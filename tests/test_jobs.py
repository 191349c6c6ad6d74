"""The job of a process: what it is told of it, what JAX finds, and who is missing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jobs_of_clusters import free_port, of_open_mpi

import lowcomm as lc

PATIENCE = 240  # seconds, for a machine with much else to do


def test_what_join_is_told_wrongly_is_named(monkeypatch):
    with pytest.raises(ValueError, match="write host:port"):
        lc.join("10.0.0.1", 2, 0)
    with pytest.raises(ValueError, match="LOWCOMM_PROCESSES is not set"):
        lc.join("10.0.0.1:1234")
    with pytest.raises(ValueError, match="process=2 of 2: they are numbered from 0"):
        lc.join("10.0.0.1:1234", 2, 2)
    monkeypatch.setenv("LOWCOMM_PROCESS", "one")
    with pytest.raises(ValueError, match="LOWCOMM_PROCESS must be a number, not 'one'"):
        lc.join("10.0.0.1:1234", 2)
    assert lc.join("10.0.0.1:1234", 1, 0) == 1  # nobody to wait for


@pytest.mark.parametrize("variable", ["LOWCOMM_PROCESSES", "LOWCOMM_PROCESS"])
def test_a_number_without_an_address_is_refused(variable, monkeypatch):
    # Each of them would train alone, as if there were no others.
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match=f"{variable} is given and LOWCOMM_COORD"):
        lc.join()
    monkeypatch.delenv(variable)
    told: dict[str, Any] = {variable.removeprefix("LOWCOMM_").lower(): 1}
    with pytest.raises(ValueError, match=f"{variable} is given and LOWCOMM_COORD"):
        lc.join(**told)


def test_joining_too_late_is_an_error_wherever_there_are_others(monkeypatch):
    jnp.zeros(1).block_until_ready()
    assert lc.join() == 1
    with pytest.raises(RuntimeError, match="one of 2 and JAX has started without"):
        lc.join("10.0.0.1:1234", 2, 0)
    for name, value in of_open_mpi(port=1234, process=0, processes=4).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"of several \(OMPI_COMM_WORLD_SIZE=4\)"):
        lc.join()


# Asked by a process that has not started JAX.
FOUND = """
import lowcomm as lc, lowcomm.jobs as jobs
try:
    print(jobs._found(300.0))
except ValueError as problem:
    print(problem)
"""


def found(**told: str) -> str:
    """What is known of the job of a process that is told this."""
    done = subprocess.run(
        [sys.executable, "-c", FOUND],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | told,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return done.stdout.strip()


def test_what_jax_is_told_of_a_job_is_heeded():
    one = of_open_mpi(port=1234, process=1, processes=2)
    assert "coordinator='127.0.0.1:1234', processes=2, process=1" in found(**one)
    assert "devices=[1]" in found(**one)
    own = found(**one, JAX_LOCAL_DEVICE_IDS="2,3", JAX_COORDINATOR_ADDRESS="a:7")
    assert "coordinator='a:7'" in own
    assert "devices=[2, 3]" in own
    six = one | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::1]:34911"}
    assert "coordinator='[fe80::1]:1234'" in found(**six)


def test_of_a_job_that_is_half_known_it_is_said_which_half():
    assert "OMPI_COMM_WORLD_SIZE says" in found(OMPI_COMM_WORLD_SIZE="2")
    assert "JAX_COORDINATOR_ADDRESS says" in found(JAX_COORDINATOR_ADDRESS="a:1")
    one = of_open_mpi(port=1234, process=1, processes=2)
    odd = found(**one | {"JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1"})
    assert odd.startswith("JAX_COORDINATOR_BIND_ADDRESS should make an address")
    assert "JAX_COORDINATOR_PORT" in found(**one | {"JAX_COORDINATOR_PORT": "abc"})
    assert found() == "None"


def test_a_deadline_is_a_time():
    for seconds in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="a deadline of"):
            lc.join(deadline=seconds)


def test_who_does_not_come_to_a_job_that_was_found_is_named():
    told = {"JAX_PLATFORMS": "cpu", "LOWCOMM_DEADLINE": "4"}
    with contextlib.ExitStack() as stack:
        processes = []
        port = free_port()
        for n in (0, 2):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", "import lowcomm as lc; lc.join()"],
                    env=os.environ | told | of_open_mpi(port, n, processes=4),
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        for process in processes:
            said = process.communicate(timeout=PATIENCE)[1]
            assert process.returncode == 1
            missing = "RollCallError: processes 1, 3 of 4 did not come within 4 seconds"
            assert missing in said


def test_who_was_started_with_others_and_joined_nobody_is_told(monkeypatch):
    monkeypatch.setenv("LOWCOMM_PROCESSES", "2")
    mesh = lc.worker_mesh(8)
    for alone in (
        lambda: lc.workers_at_hand(mesh),
        lambda: lc.feed(np.zeros(8), mesh),
        lambda: lc.check_alike({}),
    ):
        with pytest.raises(RuntimeError, match="has joined nobody"):
            alone()
