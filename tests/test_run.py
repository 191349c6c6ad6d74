"""One method from the command line: watched, kept, stopped and gone on with."""

import json
import os
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

from experiments import compare, run as program
from experiments.catalogue import CATALOGUE
from experiments.records import open_run
from experiments.stopping import stop_requests
from lowcomm import spread
from lowcomm.checkpoint import Checkpoints

STEPS = 40
ASKED = (
    *("--task", "least-squares", "--workers", "4", "--steps", str(STEPS)),
    *("--batch-size", "16", "--evaluations", "4", "--compute", "1ms"),
    *("--learning-rate", "0.05"),
)


def run(*arguments, module=program):
    return module.main([*ASKED, *map(str, arguments)])


def results(folder):
    """What a run found, without the times that were measured."""
    found = json.loads((folder / "results.json").read_text())
    for method in found["methods"].values():
        del method["step_seconds"]
    return found


def last_arrays(folder):
    """The step of the last checkpoint, and the bits of its arrays."""
    where = folder / "checkpoints"
    step = Checkpoints(where).steps()[-1]
    arrays = ocp.PyTreeCheckpointer().restore(where / str(step) / "arrays")
    return step, {name: x.tobytes() for name, x in arrays.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert run("--method", "selsync", "--out", folder) == 0
    return folder


def test_a_run_leaves_log_results_figure_and_its_last_checkpoint(whole):
    log = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    kinds = [record["event"] for record in log]
    assert kinds.count("evaluation") == 5
    assert [r["step"] for r in log if r["event"] == "step"] == [10, 20, 30, 40]
    assert log[0]["settings"]["method"] == "selsync"
    made = results(whole)["methods"]["selsync"]
    final = [r for r in log if r["event"] == "step"][-1]
    assert final["bytes"] == made["bytes"][0][-1]
    assert final["syncs"] == made["syncs"][0]
    assert made["loss"][0][-1] < 0.5 * made["loss"][0][0]
    assert (whole / "curve.png").stat().st_size > 10_000
    assert last_arrays(whole)[0] == STEPS


def test_the_table_shows_loss_bytes_syncs_and_pace(tmp_path, capsys):
    assert run("--method", "local_sgd", "--period", "4", "--out", tmp_path) == 0
    last = [line for line in capsys.readouterr().out.splitlines() if "step 40" in line]
    # One matrix of 16 x 8 float32 at each of ten syncs.
    assert "payload 5.1 kB  syncs 10  steps/s" in last[-1]
    assert "training loss" in last[-1]


def test_the_table_says_where_a_training_loss_is_not_that_of_all(tmp_path, monkeypatch):
    with open_run(tmp_path, {}) as folder:
        watch = program.Watch(program.Settings(), folder, Console())
    assert "training loss" in watch.row()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert "training loss here" in watch.row()


@pytest.fixture(autouse=True)
def signals_are_heard():
    """Also where the tests run in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_background_job_that_ignores_ctrl_c_goes_on_ignoring_it():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stop_requests() as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.signal == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def stopping_at(step, number):
    """A watch that sends this process a signal at a step."""

    class Stopping(program.Watch):
        def on_step(self, t, loss, sent):
            super().on_step(t, loss, sent)
            if t + 1 == step:
                os.kill(os.getpid(), number)

    return Stopping


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)]
)
def test_a_signal_saves_and_the_same_command_goes_on_to_the_same_end(
    whole, tmp_path, monkeypatch, capsys, number, code
):
    command = ("--method", "selsync", "--out", tmp_path, "--resume")
    before = signal.getsignal(number)
    for step in (13, 27):  # at neither an evaluation nor a save
        with monkeypatch.context() as patch:
            patch.setattr(program, "Watch", stopping_at(step, number))
            assert run(*command) == code
        assert f"stopped after {step} steps" in capsys.readouterr().err
        assert last_arrays(tmp_path)[0] == step
        assert signal.getsignal(number) is before
    assert run(*command) == 0
    assert results(tmp_path) == results(whole)
    assert last_arrays(tmp_path) == last_arrays(whole)


def test_ctrl_c_before_the_first_step_says_that_it_stopped(
    tmp_path, monkeypatch, capsys
):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "task", interrupted)
    assert run("--out", tmp_path / "new") == 130
    assert capsys.readouterr().err.startswith("stopped; go on with --out")
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_stopped_after_its_last_step_has_its_model_all_the_same(
    tmp_path, monkeypatch
):
    models = []
    seen = lambda settings, learned, model: models.append(np.asarray(model["x"])) or []
    monkeypatch.setattr(program, "_samples", seen)
    assert run("--out", tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(program, "Watch", stopping_at(STEPS, signal.SIGTERM))
        assert run("--out", tmp_path / "stopped") == 0
    assert run("--out", tmp_path / "stopped", "--resume") == 0
    np.testing.assert_array_equal(*models)


def test_a_new_run_does_not_take_up_the_checkpoints_of_an_old_one(tmp_path, capsys):
    assert run("--out", tmp_path) == 0
    (tmp_path / "log.jsonl").unlink()
    (tmp_path / "results.json").unlink()
    for more in ((), ("--resume",)):
        assert run("--out", tmp_path, *more) == 2
        assert "holds checkpoints of another run" in " ".join(
            capsys.readouterr().err.split()
        )
    # Not even where the log has been emptied.
    (tmp_path / "log.jsonl").touch()
    assert run("--out", tmp_path, "--learning-rate", "0.01", "--resume") == 2
    complaint = "learning_rate was 0.05 and is 0.01"
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_a_damaged_checkpoint_is_an_error_with_the_remedy(
    tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        patch.setattr(program, "Watch", stopping_at(13, signal.SIGTERM))
        assert run("--out", tmp_path) == 0
    file = max((tmp_path / "checkpoints" / "13").rglob("d/*"))
    file.write_bytes(file.read_bytes()[:-1])
    assert run("--out", tmp_path, "--resume") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "is damaged" in said
    assert "Remove the folder" in said


def test_a_comparison_goes_on_in_the_middle_of_its_second_method(
    tmp_path, monkeypatch, capsys
):
    def comparison(folder, *more):
        arguments = ("--algorithms", "local_sgd,diloco,top_k_sgd", "--seeds", 1)
        return run(*arguments, "--out", folder, *more, module=compare)

    assert comparison(tmp_path / "whole") == 0
    measured, calls = compare.measure, []

    def stopped(*arguments, on_evaluation, **options):
        calls.append(1)

        def evaluated(record):
            on_evaluation(record)
            if len(calls) == 2 and record["step"] == 20:
                os.kill(os.getpid(), signal.SIGTERM)

        return measured(*arguments, on_evaluation=evaluated, **options)

    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(compare, "measure", stopped)
        assert comparison(folder) == 0
    assert f"--out {folder} --resume" in " ".join(capsys.readouterr().err.split())
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["diloco-0"]
    calls.clear()
    monkeypatch.setattr(
        compare, "measure", lambda *a, **k: calls.append(1) or measured(*a, **k)
    )
    assert comparison(folder, "--resume") == 0
    assert len(calls) == 2  # the first method is not trained again
    assert results(folder) == results(tmp_path / "whole")
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (("--steps", "80"), "steps was 40 and is 80"),
        (("--method", "diloco"), "method was 'selsync' and is 'diloco'"),
        (("--workers", "2"), "workers was 4 and is 2"),
        (("--inner", "adam"), "inner was 'auto' and is 'adam'"),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(
    tmp_path, monkeypatch, capsys, changed, complaint
):
    with monkeypatch.context() as patch:
        patch.setattr(program, "Watch", stopping_at(3, signal.SIGTERM))
        assert run("--method", "selsync", "--out", tmp_path) == 0
    arguments = ("--method", "selsync", "--out", tmp_path, "--resume", *changed)
    assert run(*arguments) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_what_is_asked_for_wrongly_is_refused_and_leaves_no_folder(tmp_path, capsys):
    for arguments, complaint in (
        (("--method", "dilocco"), "nearest: diloco"),
        (("--method", "layered_sgd"), "is for workers on the axes groups and workers"),
        (("--save-every", "-1"), "--save-every cannot be -1"),
        (("--period", "0"), "--period must be at least 1, not 0"),
        (("--log-every", "0"), "--log-every must be at least 1"),
    ):
        assert run(*arguments, "--out", tmp_path / "new") == 2
        assert complaint in " ".join(capsys.readouterr().err.split())
    assert program.main(["--resume"]) == 2
    assert "--resume needs --out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_that_diverges_says_where_and_ends_with_one(tmp_path, capsys):
    assert run("--learning-rate", "1e30", "--out", tmp_path) == 1
    assert "diloco failed: the loss is" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["slowmo", "top_k_sgd", "powersgd_sgd", "dpsgd"])
def test_a_method_on_devices_goes_on_in_the_middle_of_a_round(
    name, tmp_path, monkeypatch
):
    command = ("--method", name, "--backend", "shard_map", "--save-every", 7)
    assert run(*command, "--steps", 12, "--out", tmp_path / "whole") == 0
    command = (*command, "--steps", 12, "--out", tmp_path / "stopped", "--resume")
    with monkeypatch.context() as patch:
        patch.setattr(program, "Watch", stopping_at(5, signal.SIGTERM))
        assert run(*command) == 0
    assert run(*command) == 0
    assert last_arrays(tmp_path / "stopped") == last_arrays(tmp_path / "whole")


def test_the_consensus_can_be_read_from_the_last_checkpoint(whole):
    saved = Checkpoints(whole / "checkpoints")
    tx = CATALOGUE["selsync"].make(workers=4, steps=STEPS, learning_rate=0.05)
    params = {"x": jax.ShapeDtypeStruct((4, 16, 8), np.float32)}
    state = jax.eval_shape(spread(tx.init), params)
    step, (params, _) = saved.restore((params, state))
    assert step == STEPS
    assert np.isfinite(params["x"]).all()
