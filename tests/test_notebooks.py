"""Notebooks: what their sources make, fit to be read, and they still run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import jupytext
import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = sorted({path.stem for path in FOLDER.glob("[0-9]*")} | {"01_tour"})
MOST_BYTES = 300_000
MOST_SECONDS = 240  # of one notebook, on cores that others are using as well
each = pytest.mark.parametrize("name", NAMES)


@cache
def notebook(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def cells(of):
    return [(cell.cell_type, cell.source) for cell in of.cells]


def outputs(name):
    return [x for cell in notebook(name).cells for x in cell.get("outputs", [])]


def rerun(source, into):
    """Build a notebook in a process of its own: one that hangs is ended.

    There the tools' own warnings are not turned into errors either, which they are in
    this process.
    """
    compiled = jax.config.jax_compilation_cache_dir  # what conftest.py chose
    return subprocess.run(
        [sys.executable, FOLDER / "build.py", source, "--into", into],
        env=os.environ
        | {
            "JAX_COMPILATION_CACHE_DIR": compiled,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        },
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )


@each
def test_a_notebook_has_the_cells_of_its_source(name):
    assert cells(notebook(name)) == cells(jupytext.read(FOLDER / f"{name}.py"))


@each
@pytest.mark.timeout(MOST_SECONDS + 30)
def test_a_notebook_runs_in_an_empty_folder(name, tmp_path):
    done = rerun(FOLDER / f"{name}.py", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    fresh = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    assert [c.id for c in fresh.cells] == [c.id for c in notebook(name).cells]
    assert fresh.metadata == notebook(name).metadata


def test_a_cell_that_fails_is_said_and_nothing_is_written(tmp_path):
    source = tmp_path / "broken.py"
    source.write_text(
        "# %%\nprint('fine')\n\n# %%\nraise ValueError('no such thing')\n"
    )
    done = rerun(source, tmp_path)
    assert done.returncode != 0
    assert "no such thing" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["broken.py"]


@each
def test_a_notebook_was_run_from_top_to_bottom_without_complaint(name):
    code = [cell for cell in notebook(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for output in outputs(name):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text


@each
def test_a_notebook_is_small(name):
    assert (FOLDER / f"{name}.ipynb").stat().st_size < MOST_BYTES


@each
def test_a_notebook_says_nothing_of_the_machine_it_was_run_on(name):
    pictures = lambda kind: kind.startswith("image/")
    said = [
        {kind: x for kind, x in output.get("data", {}).items() if not pictures(kind)}
        | {"text": output.get("text", "")}
        for output in outputs(name)
    ]
    text = json.dumps([said, notebook(name).metadata])
    found = re.search(r"(/\w+)*/(home|root|tmp|Users|site-packages|\w+\.py)\b", text)
    assert found is None, found
    assert str(FOLDER.parent) not in text
    assert set(notebook(name).metadata) == {"kernelspec", "language_info"}
    for cell in notebook(name).cells:
        assert not cell.metadata, "times and settings of an editor"
