"""The comparison of methods: what it records, and what it refuses."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import lowcomm as lc
from experiments import compare, measure
from experiments.catalogue import CATALOGUE
from experiments.tasks import least_squares

SMALL = [
    *("--task", "least-squares", "--workers", "4", "--batch-size", "16"),
    *("--steps", "32", "--evaluations", "4", "--compute", "1ms"),
]
DENSE = 4 * 16 * 8  # bytes of the one float32 matrix of least squares
ASKS = 32 - 25  # steps on which selsync asks: not while it warms up


def run(*arguments):
    return compare.main([*SMALL, *map(str, arguments)])


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    assert run("--algorithms", "data_parallel,local_sgd,selsync", "--out", folder) == 0
    return folder


@pytest.fixture(scope="module")
def results(out):
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def methods(results):
    return results["methods"]


def test_results_say_what_was_asked_for_and_with_what_it_was_made(results):
    assert list(results["methods"]) == ["data_parallel", "local_sgd", "selsync"]
    assert results["settings"]["steps"] == 32
    assert results["seeds"] == [0, 1]
    assert results["versions"]["jax"] == jax.__version__


def test_curves_have_a_point_at_the_start_and_at_every_evaluation(methods):
    for method in methods.values():
        assert method["steps"] == [0, 8, 16, 24, 32]
        for key in ("loss", "distance", "bytes", "seconds"):
            assert np.shape(method[key]) == (2, 5)


def test_all_methods_start_from_one_model_and_learn(methods):
    losses = np.array([method["loss"] for method in methods.values()])
    assert np.ptp(losses[:, :, 0], axis=0).max() == 0
    assert (losses[:, :, -1] < 0.3 * losses[:, :, 0]).all()


def test_bytes_and_syncs_are_what_the_schedule_says(results, methods):
    period = CATALOGUE["local_sgd"].period
    steps = np.array(methods["local_sgd"]["steps"])
    assert methods["data_parallel"]["syncs"] == [32, 32]
    np.testing.assert_array_equal(methods["data_parallel"]["bytes"][0], DENSE * steps)
    assert results["data_parallel_bytes"] == DENSE * 32
    assert methods["local_sgd"]["syncs"] == [32 // period] * 2
    np.testing.assert_array_equal(
        methods["local_sgd"]["bytes"][1], DENSE * (steps // period)
    )


def test_a_measured_trigger_pays_for_asking_and_is_counted_by_what_it_did(methods):
    method = methods["selsync"]
    for syncs, sent in zip(method["syncs"], method["bytes"], strict=True):
        assert sent[-1] == ASKS * measure.SCALAR + syncs * DENSE


def test_predicted_seconds_are_those_of_the_collectives_and_the_computing(methods):
    link = lc.Link.parse("100Mbit", "20ms")
    how = {"workers": 4, "link": link, "algorithm": "best"}
    sync = lc.collective_seconds("all_reduce", DENSE, **how)
    ask = lc.collective_seconds("all_reduce", 4, **how)
    steps = np.array(methods["data_parallel"]["steps"])
    expected = {
        "data_parallel": steps * (sync + 1e-3),
        "local_sgd": steps // CATALOGUE["local_sgd"].period * sync + steps * 1e-3,
    }
    for name, seconds in expected.items():
        np.testing.assert_allclose(methods[name]["seconds"][0], seconds, rtol=1e-9)
    syncs = methods["selsync"]["syncs"][0]
    total = ASKS * ask + 32 * 1e-3 + syncs * sync
    assert methods["selsync"]["seconds"][0][-1] == pytest.approx(total, rel=1e-9)


def test_the_log_holds_the_settings_then_each_evaluation_then_the_run(out):
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert log[0]["event"] == "start"
    assert log[0]["settings"]["task"] == "least-squares"
    first = log[1:7]
    assert {(record["method"], record["seed"]) for record in first} == {
        ("data_parallel", 0)
    }
    assert [record["event"] for record in first] == ["evaluation"] * 5 + ["run"]
    assert len(log) == 1 + 3 * 2 * 6


def test_the_figure_is_there_in_both_formats(out):
    assert (out / "comparison.png").stat().st_size > 10_000
    assert (out / "comparison.svg").stat().st_size > 10_000


def test_the_folder_of_another_run_is_refused_and_left_as_it_is(out, capsys):
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert run("--out", out) == 2
    complaint = capsys.readouterr().err
    assert str(out) in complaint
    assert "already holds another run" in complaint
    assert {path: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--algorithms", "dilocco"), "no method is called 'dilocco'; nearest: diloco"),
        (("--task", "mnist-mixr"), "nearest: mnist-mixer"),
        (("--split", "dirichle"), "nearest: dirichlet"),
        (("--split", "dirichlet", "--alpha", "0"), "not 0"),
        (("--bandwidth", "10MB"), "bits per second, not bytes"),
        (("--compute", "soon"), "'soon'"),
        (("--seeds", "0"), "seeds must be at least 1, not 0"),
        (("--algorithms", "diloco,diloco"), "named twice"),
        (("--batch-size", "129"), "batch of 129 cannot be taken from the 128 examples"),
        (("--backend", "shard_map", "--workers", "99"), "99 workers need 99 devices"),
    ],
)
def test_what_cannot_run_is_refused_with_the_remedy_and_leaves_no_folder(
    tmp_path, capsys, arguments, complaint
):
    assert run(*arguments, "--out", tmp_path / "new") == 2
    shown = capsys.readouterr()
    assert complaint in " ".join(shown.err.split())
    assert "Traceback" not in shown.err
    assert not (tmp_path / "new").exists()


def test_a_method_that_diverges_is_reported_and_the_others_go_on(
    tmp_path, capsys, monkeypatch
):
    wild = dataclasses.replace(CATALOGUE["local_sgd"], learning_rate=1e30)
    monkeypatch.setitem(CATALOGUE, "local_sgd", wild)
    arguments = ("--algorithms", "local_sgd,data_parallel", "--seeds", 1)
    assert run(*arguments, "--out", tmp_path) == 0
    methods = json.loads((tmp_path / "results.json").read_text())["methods"]
    assert "at step" in methods["local_sgd"]["failure"][0]
    assert methods["local_sgd"]["loss"][0][0] > 0
    assert methods["local_sgd"]["loss"][0][-1] is None
    assert methods["data_parallel"]["loss"][0][-1] is not None
    assert "local_sgd failed: the loss is" in capsys.readouterr().out


def test_if_every_method_fails_so_does_the_comparison(tmp_path, capsys):
    arguments = ("--learning-rate", "1e30", "--algorithms", "local_sgd", "--seeds", 1)
    assert run(*arguments, "--out", tmp_path) == 1
    assert "figure:" not in capsys.readouterr().out


def test_what_no_method_can_be_built_with_is_refused_before_training(tmp_path, capsys):
    arguments = ("--fraction", "2", "--algorithms", "data_parallel,top_k_sgd")
    assert run(*arguments, "--out", tmp_path / "new") == 2
    assert "fraction=2" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_stopping_it_leaves_what_was_written(tmp_path, capsys, monkeypatch):
    measured = compare.measure

    def stopped_at_the_second(*arguments, seed, **options):
        if seed == 1:
            raise KeyboardInterrupt
        return measured(*arguments, seed=seed, **options)

    monkeypatch.setattr(compare, "measure", stopped_at_the_second)
    assert run("--algorithms", "data_parallel", "--out", tmp_path) == 130
    assert str(tmp_path) in capsys.readouterr().err
    log = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["event"] == "run"
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("backend", ["shard_map", "pmap"])
def test_one_device_a_worker_gives_the_curve_of_virtual_workers(
    tmp_path, methods, backend
):
    arguments = ("--backend", backend, "--algorithms", "local_sgd", "--seeds", 1)
    assert run(*arguments, "--out", tmp_path) == 0
    found = json.loads((tmp_path / "results.json").read_text())["methods"]
    expected = methods["local_sgd"]
    # Sums of 16 rows in another order, over 32 steps that contract.
    tolerance = 32 * 16 * 2**-24
    np.testing.assert_allclose(
        found["local_sgd"]["distance"][0], expected["distance"][0], rtol=tolerance
    )
    assert found["local_sgd"]["bytes"][0] == expected["bytes"][0]


def test_fewer_steps_than_evaluations_are_each_evaluated_once():
    task = least_squares(workers=2, batch_size=16)
    found = measure.measure(
        task,
        CATALOGUE["data_parallel"].make(workers=2, steps=3),
        where=measure.Where(2, lc.Link(1e9)),
        steps=3,
        seed=0,
        evaluations=20,
    )
    assert found.steps.tolist() == [0, 1, 2, 3]
    assert found.step_seconds > 0


@pytest.mark.parametrize("configured", [None, "somewhere"])
def test_shared_compilations_leave_no_trace_and_respect_a_cache_that_is_there(
    configured, tmp_path
):
    read = lambda: jax.config.jax_compilation_cache_dir
    before, given = read(), configured and str(tmp_path / configured)
    jax.config.update("jax_compilation_cache_dir", given)
    try:
        with measure.shared_compilations():
            assert read() == given if configured else read()
        assert read() == given
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
