"""Two and four processes against one: the same numbers, each process its own part."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import process_program as program
import pytest
from jobs_of_clusters import free_port

import lowcomm as lc
from experiments import data, language, tasks
from experiments.launch import launch
from experiments.splits import iid
from experiments.transformer import LanguageModel
from lowcomm.agreement import Disagreement, together

K, STEPS, METHODS = program.K, program.STEPS, list(program.METHODS)
SUMMED = {"data_parallel", "diloco", "selsync"}  # what gloo adds up in another order
PATIENCE = 240  # seconds, for a machine with much else to do
pytestmark = pytest.mark.timeout(4 * PATIENCE)


def launched(folder):
    """Four, of which the last fails when all is written."""
    command = [sys.executable, program.__file__, str(folder), "3"]
    return [launch(command, 4)]


def in_a_job_of_slurm(folder):
    """Two, which are told of each other by nothing but what srun would tell them."""
    port = str(free_port())
    told = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost"}
    told |= {"SLURM_NTASKS": "2", "JAX_COORDINATOR_PORT": port}
    told |= {"JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}"}
    with contextlib.ExitStack() as stack:
        processes = []
        for n in range(2):
            own = {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}
            processes.append(
                subprocess.Popen(
                    [sys.executable, program.__file__, str(folder), "-1"],
                    env=os.environ | told | own,
                    stdout=subprocess.DEVNULL,
                )
            )
            stack.callback(processes[n].wait)
            stack.callback(processes[n].kill)
        return [process.wait(PATIENCE) for process in processes]


@pytest.fixture(scope="module", params=[in_a_job_of_slurm, launched])
def group(request, tmp_path_factory):
    """What each process has written, and the exit codes."""
    folder = tmp_path_factory.mktemp("group")
    before = os.environ | {}
    os.environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        codes = request.param(folder)
    finally:
        os.environ.clear()
        os.environ.update(before)
    numbers = range(2 if request.param is in_a_job_of_slurm else 4)
    found = [dict(np.load(folder / f"{n}.npz")) for n in numbers]
    told = [json.loads((folder / f"{n}.json").read_text()) for n in numbers]
    return found, told, codes


def test_all_have_joined_and_know_their_own_workers(group):
    found, told, codes = group
    assert [one["processes"] for one in told] == [len(found)] * len(found)
    assert told[0]["others"] == [f"I am {n}" for n in range(len(found))]
    held = np.concatenate([one["workers"] for one in found])
    np.testing.assert_array_equal(held, np.arange(K))
    # An error that nobody catches ends a process at once, and the launcher the others.
    assert codes == ([0, 0] if len(found) == 2 else [1])


@pytest.mark.parametrize("name", METHODS)
def test_trajectories_are_those_of_one_process(group, name):
    found, _, _ = group
    mesh = lc.worker_mesh(K)
    alone = program.trained(name, mesh)
    params = np.asarray(alone.params["x"])
    # The program is the same, and what is gathered or passed on is computed with bit
    # for bit. A sum of K numbers in another order differs by 2 (K - 1) u of the sum of
    # their magnitudes at most, so a mean by that much of the largest. What is averaged,
    # moves and models, is no larger than the largest parameter; steps are contractions,
    # and rounding what follows from the difference at most doubles it. (DiLoCo's syncs
    # pass through an outer momentum that makes less than four of one, and are fewer by
    # as much.)
    bound = 2 * STEPS * 2 * (K - 1) * 2**-24 if name in SUMMED else 0
    mean = program.consensus(alone, mesh)
    for one in found:
        mine = one["workers"]
        np.testing.assert_array_equal(one[f"{name} payload"], alone.payload)
        close = {"rtol": 0, "atol": bound * np.abs(params).max()}
        np.testing.assert_allclose(one[f"{name} params"], params[mine], **close)
        np.testing.assert_allclose(
            one[f"{name} losses"], alone.losses[:, mine], rtol=bound, atol=0
        )
        # The consensus of a method without an anchor is a mean.
        close["atol"] = max(close["atol"], 2 * (K - 1) * 2**-24 * np.abs(params).max())
        np.testing.assert_allclose(one[f"{name} consensus"], mean, **close)
    assert len({one[f"{name} consensus"].tobytes() for one in found}) == 1


def test_most_steps_of_the_methods_that_sync_now_and_then_are_silent(group):
    found, _, _ = group
    assert (found[0]["diloco payload"] > 0).sum() == STEPS / program.PERIOD
    syncs = (found[0]["selsync payload"] > 4).sum()  # bytes of its one scalar
    assert 0 < syncs < STEPS


def test_a_checkpoint_of_a_group_goes_on_bit_for_bit_and_into_no_other_carry(group):
    found, told, _ = group
    for one, said in zip(found, told, strict=True):
        np.testing.assert_array_equal(one["resumed params"], one["top_k_sgd params"])
        assert "is of another method or model" in said["refused"]


def test_a_process_is_told_whose_a_worker_is_that_is_not_its_own(group):
    for n, said in enumerate(group[1]):
        assert f"belongs to another process: process {n} holds" in said["not here"]


def test_processes_that_train_otherwise_are_told_before_the_step_at_which_they_would(
    group,
):
    last = len(group[1]) - 1
    for told in group[1]:
        said = told["unlike"]
        assert f"process {last}: steps is 4 and 8 on process 0" in said["steps"]
        # The first to sync meets the others when these do.
        assert "step is 4 and 3 on process 0" in said["period"]
        # The first number that differs, in as many digits as JAX keeps of it.
        apart = r"at step 0: where process 0 has `.*-{}.*`, process 1 has `.*-{}"
        other = apart.format(r"0\.0(2|199)", r"0\.0(1|099)")
        assert re.search(other, said["rate"])
        other = apart.format(r"0\.0(4|399)", r"0\.0(2|199)")
        assert re.search(other, said["array"])
        assert 'is "float32[8,8,' in said["batch"]
        assert "devices of the mesh is" in said["devices"]
        assert "params['x'] is" in said["start"]
        assert said["note"] == "nothing"


def test_what_a_process_does_by_itself_is_no_matter_of_the_others(group):
    losses = [told["by itself"] for told in group[1]]
    assert np.isfinite(losses).all()
    assert len(set(losses)) == len(losses)


class Watched:
    """Examples that remember which of them were looked up."""

    def __init__(self, examples):
        self.examples, self.seen = examples, set()

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, places):
        if isinstance(places, np.ndarray):
            self.seen |= set(places.ravel().tolist())
        return self.examples[places]


def test_no_task_looks_up_the_examples_of_other_workers():
    few = data.digits()
    watched = Watched(few.train.inputs)
    images = tasks.image_task(
        "digits",
        few._replace(train=few.train._replace(inputs=watched)),
        tasks.models.MLP(),
        workers=4,
        batch_size=8,
        split=iid,
    )
    letters = language.text.corpus("letters", {"a": bytes(range(256)) * 200})
    text = language.language_task(
        "letters", letters, LanguageModel(8, 1, 2), workers=4, batch_size=3, split=iid
    )
    rows = tasks.least_squares(workers=4, batch_size=8)
    mine = np.array([1, 2])
    for step in (0, 7):
        for task in (images, text, rows):
            own = task.batches(step, mine)
            whole = task.batches(step)
            same = lambda part, x: np.testing.assert_array_equal(part, x[mine])
            jax.tree.map(same, own, whole)
    watched.seen.clear()
    images.batches(3, mine)
    assert len(watched.seen) == 2 * 8


def test_what_is_fed_must_be_one_part_for_each_worker_at_hand():
    mesh = lc.worker_mesh(8)
    with pytest.raises(ValueError, match=r"leaf \['x'\] of shape \(4, 3\) must hold"):
        lc.feed({"x": np.zeros((4, 3))}, mesh)
    with pytest.raises(ValueError, match="must hold the parts of the 8 workers"):
        lc.feed(1.0, mesh)


def test_what_is_fed_on_a_mesh_of_groups_comes_back_whole():
    mesh = lc.worker_mesh(2, inside={"fsdp": 4})
    np.testing.assert_array_equal(lc.workers_at_hand(mesh), [0, 1])
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(lc.at_hand(lc.feed(x, mesh)), x)
    np.testing.assert_array_equal(lc.unstack(lc.feed(x, mesh), 1), x[1])


def test_a_worker_that_there_is_not_is_refused():
    np.testing.assert_array_equal(lc.unstack(np.arange(4), -1), 3)
    for x in (np.arange(4), jnp.arange(4)):
        with pytest.raises(ValueError, match="there is no worker 4 of 4"):
            lc.unstack(x, 4)


def test_alone_everybody_agrees_and_errors_stay_what_they_are():
    lc.check_alike({"a": 1})
    with pytest.raises(KeyError), together():
        raise KeyError("mine")
    assert issubclass(Disagreement, RuntimeError)
    assert Path(program.__file__).exists()


def test_a_process_by_itself_is_never_preempted():
    assert not any(lc.preempted(t) for t in range(3))


def test_what_one_worker_holds_can_be_asked_for_inside_a_program():
    rows = np.arange(6.0).reshape(3, 2)
    assert jax.jit(lc.unstack)(rows).tolist() == [0.0, 1.0]
