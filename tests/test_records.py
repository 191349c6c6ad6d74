"""Records of runs: complete, attributable, never overwritten."""

import contextlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import records


def test_records_are_lines_that_are_there_before_the_run_ends(tmp_path):
    with records.open_run(tmp_path / "a" / "b", {}) as run:
        for step in range(3):
            records.append(run, {"step": step})
            lines = (run.path / "log.jsonl").read_text().splitlines()
            steps = [json.loads(line).get("step") for line in lines]
            assert steps == [None, *range(step + 1)]


def test_results_carry_the_versions_of_what_made_them(tmp_path):
    with records.open_run(tmp_path, {}) as run:
        path = records.finish(run, {"settings": {"seeds": [0, 1]}})
    results = json.loads(path.read_text())
    assert results["settings"] == {"seeds": [0, 1]}
    expected = {"python", "jax", "jaxlib", "optax", "flax", "numpy", "lowcomm"}
    assert set(results["versions"]) == expected
    assert results["versions"]["numpy"] == np.__version__


def test_a_folder_with_a_finished_run_is_refused_by_name_with_the_remedy(tmp_path):
    with records.open_run(tmp_path, {}) as run:
        records.finish(run, {})
    with (
        pytest.raises(FileExistsError, match=f"{tmp_path} .*choose another output"),
        records.open_run(tmp_path, {}),
    ):
        pass


def test_a_folder_with_a_broken_off_run_keeps_what_was_written(tmp_path):
    def broken_off():
        with records.open_run(tmp_path, {}) as run:
            records.append(run, {"step": 0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    with (
        pytest.raises(FileExistsError, match="already holds another run"),
        records.open_run(tmp_path, {}),
    ):
        pass
    assert (tmp_path / "log.jsonl").read_text().endswith('{"step": 0}\n')


def broken_off(folder, settings, *steps, resume=False):
    """What a run of these settings finds there; it records its steps and stops."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        records.open_run(folder, settings, resume=resume) as run,
    ):
        for step in steps:
            records.append(run, {"step": step})
        raise KeyboardInterrupt
    return [r["step"] for r in run.before if "step" in r]


def test_a_run_is_resumed_with_what_it_recorded_and_goes_on_in_the_same_log(tmp_path):
    settings = {"workers": 4, "rates": (0.1, 0.2), "out": None}
    assert broken_off(tmp_path, settings, 0, 1, resume=True) == []
    assert broken_off(tmp_path, settings, 2, resume=True) == [0, 1]
    assert broken_off(tmp_path, settings, resume=True) == [0, 1, 2]
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    events = [json.loads(line).get("event", "step") for line in lines]
    assert events == ["start", "step", "step", "resume", "step", "resume"]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_line_that_was_cut_off_is_written_anew(tmp_path, cut):
    broken_off(tmp_path, {}, 0, 1)
    log = tmp_path / "log.jsonl"
    log.write_text(log.read_text()[:-cut])
    assert broken_off(tmp_path, {}, 1, resume=True) == [0]
    assert broken_off(tmp_path, {}, resume=True) == [0, 1]


def test_other_settings_are_refused_by_name_and_nothing_is_touched(tmp_path):
    broken_off(tmp_path, {"workers": 4, "steps": 8, "task": "x"}, 0)
    before = (tmp_path / "log.jsonl").read_bytes()
    other = {"workers": 5, "steps": 8, "seed": 1, "task": "x"}
    expected = "seed was None and is 1, workers was 4 and is 5;"
    with pytest.raises(ValueError, match=expected):
        broken_off(tmp_path, other, resume=True)
    assert (tmp_path / "log.jsonl").read_bytes() == before


def test_a_finished_run_has_nothing_to_go_on_with(tmp_path):
    with records.open_run(tmp_path, {}) as run:
        records.finish(run, {})
    with pytest.raises(FileExistsError, match="nothing to go on with"):
        broken_off(tmp_path, {}, resume=True)


def test_two_processes_cannot_write_one_run(tmp_path):
    with records.open_run(tmp_path, {}) as run:
        records.append(run, {"step": 0})
        with pytest.raises(FileExistsError, match="another process is writing"):
            broken_off(tmp_path, {}, resume=True)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with (
        pytest.raises(FileExistsError, match="is a file"),
        records.open_run(tmp_path / "out", {}),
    ):
        pass
    assert (tmp_path / "out").read_text() == "mine"


def test_other_files_in_the_folder_do_no_harm_and_come_to_none(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with records.open_run(tmp_path, {}) as run:
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
    with records.open_run(tmp_path / "new", {}):
        pass
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with records.open_run(tmp_path / "old", {}):
        pass
    assert list((tmp_path / "old").iterdir()) == []


def test_settings_that_are_free_change_with_the_run_and_others_never(tmp_path):
    def go_on(workers, steps=8, free=("workers",)):
        settings = {"workers": workers, "steps": steps}
        with (
            contextlib.suppress(KeyboardInterrupt),
            records.open_run(tmp_path, settings, resume=True, free=free) as run,
        ):
            records.append(run, {"step": workers})
            raise KeyboardInterrupt

    go_on(4)
    go_on(8)
    with pytest.raises(ValueError, match="steps was 8 and is 9;"):
        go_on(2, steps=9)
    with pytest.raises(ValueError, match="workers was 8 and is 4;"):
        go_on(4, free=())
    go_on(8, free=())
    go_on(4)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if '"step"' in line]
    assert steps == [4, 8, 8, 4]
