"""Records of runs: complete, attributable, never overwritten."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import records


def test_records_are_lines_that_are_there_before_the_run_ends(tmp_path):
    with records.open_run(tmp_path / "a" / "b") as run:
        for step in range(3):
            records.append(run, {"step": step})
            lines = (run.path / "log.jsonl").read_text().splitlines()
            assert [json.loads(line)["step"] for line in lines] == list(range(step + 1))


def test_results_carry_the_versions_of_what_made_them(tmp_path):
    with records.open_run(tmp_path) as run:
        path = records.finish(run, {"settings": {"seeds": [0, 1]}})
    results = json.loads(path.read_text())
    assert results["settings"] == {"seeds": [0, 1]}
    expected = {"python", "jax", "jaxlib", "optax", "flax", "numpy", "lowcomm"}
    assert set(results["versions"]) == expected
    assert results["versions"]["numpy"] == np.__version__


def test_a_folder_with_a_finished_run_is_refused_by_name_with_the_remedy(tmp_path):
    with records.open_run(tmp_path) as run:
        records.finish(run, {})
    with (
        pytest.raises(FileExistsError, match=f"{tmp_path} .*choose another output"),
        records.open_run(tmp_path),
    ):
        pass


def test_a_folder_with_a_broken_off_run_keeps_what_was_written(tmp_path):
    def broken_off():
        with records.open_run(tmp_path) as run:
            records.append(run, {"step": 0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    with (
        pytest.raises(FileExistsError, match="already holds another run"),
        records.open_run(tmp_path),
    ):
        pass
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 0}\n'


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with (
        pytest.raises(FileExistsError, match="is a file"),
        records.open_run(tmp_path / "out"),
    ):
        pass
    assert (tmp_path / "out").read_text() == "mine"


def test_other_files_in_the_folder_do_no_harm_and_come_to_none(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with records.open_run(tmp_path) as run:
        records.finish(run, {})
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path):
    place = tmp_path / "results.json"
    place.write_text("old")

    def half():
        with records.atomic(place) as beside:
            beside.write_text("half of the new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    assert place.read_text() == "old"


def test_an_atomic_file_keeps_its_suffix_while_it_is_written(tmp_path):
    with records.atomic(tmp_path / "figure.svg") as beside:
        assert beside.suffix == ".svg"
        assert beside.parent == tmp_path


def test_numbers_of_numpy_and_jax_become_plain_json():
    found = records.plain(
        {
            "array": np.arange(3),
            "scalar": np.float32(0.5),
            "jax": jnp.ones(2),
            "tuple": (1, None, True),
            "path": records.Path("a/b"),
        }
    )
    assert found == {
        "array": [0, 1, 2],
        "scalar": 0.5,
        "jax": [1.0, 1.0],
        "tuple": [1, None, True],
        "path": "a/b",
    }


def test_numbers_that_json_does_not_have_are_null():
    found = records.plain({"loss": [float("nan"), np.inf, 1.0]})
    assert json.dumps(found, allow_nan=False) == '{"loss": [null, null, 1.0]}'


def test_a_run_that_recorded_nothing_leaves_nothing(tmp_path):
    with records.open_run(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with records.open_run(tmp_path / "old"):
        pass
    assert list((tmp_path / "old").iterdir()) == []
