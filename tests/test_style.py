"""The house rules that a machine can hold: floors, speakers, references, length."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import lowcomm as lc

ROOT = Path(lc.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
AROUND = [
    path
    for folder in ("tests", "experiments")
    for path in sorted((ROOT.parent / folder).rglob("*.py"))
]

# A file imports only from floors below its own.
FLOORS = [
    {
        "leaves",
        "meshes",
        "folders",
        "packing",
        "timeline",
        "stragglers",
        "rollcall",
        "agreement",
    },
    {"spmd", "jobs"},
    {
        "keys",
        "uniform",
        "topology",
        "rows",
        "manifest",
        "transport",
        "vectors",
        "connections",
        "processes",
    },
    {
        "compressors",
        "costs",
        "triggers",
        "stored",
        "places",
        "largest",
        "rotations",
        "peeling",
        "matrices",
        "sameness",
        "entropy",
        "grids",
        "handover",
    },
    {"schedules", "pulls"},
    {"parts", "starts"},
    {"phases", "links"},
    {
        "workers",
        "selections",
        "quantizers",
        "signs",
        "levels",
        "codebooks",
        "sketches",
        "spectral",
        "randomized",
        "exchange",
        "ledger",
        "hlo_text",
    },
    {
        "overlap",
        "talk",
        "row_means",
        "meter",
        "hlo",
        "network",
        "shards",
        "leaders",
        "penalty",
        "preconditioner",
        "norm_test",
    },
    {"sharded", "scheduled"},
    {
        "flattened",
        "feedback",
        "masked",
        "lowrank",
        "lossless",
        "sketching",
        "two_stage",
        "votes",
        "neighbours",
        "moments",
        "loading",
    },
    {"sync"},
    {"anchor"},
    {"readout", "guard", "survivors"},
    {"algorithms", "steps", "statistics"},
    {"legacies"},
    {"resize"},
    {"train", "checkpoint", "planning", "fused"},
    {"testing"},
    {"__init__"},
]
SPEAKERS = {"spmd", "transport", "triggers", "sync"}
COLLECTIVES = {
    "psum",
    "pmean",
    "pmax",
    "pmin",
    "ppermute",
    "pshuffle",
    "pswapaxes",
    "psum_scatter",
    "all_gather",
    "all_to_all",
    "ragged_all_to_all",
    "axis_index",
}


def module(path: Path) -> str:
    """The name a file goes by in the table of floors."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def floor(name: str) -> int:
    found = [i for i, names in enumerate(FLOORS) if name in names]
    assert found, f"{name} has no floor: add it to the table"
    return found[0]


def imported(path: Path) -> set[str]:
    """The modules of lowcomm that a file imports."""
    depth = len(path.relative_to(ROOT).parts)
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            listed = [node.module] if node.module else [a.name for a in node.names]
            names |= {name.split(".")[0] for name in listed}
        elif isinstance(node, ast.ImportFrom) and node.level:
            names.add(module(path))
    return names


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_only_go_down(path):
    here = floor(module(path))
    for name in imported(path) - {module(path)}:
        assert floor(name) < here, f"{module(path)} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_only_speakers_call_collectives(path):
    called = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("lax", "jax")
    }
    assert not called & COLLECTIVES or module(path) in SPEAKERS


@pytest.mark.parametrize("path", FILES, ids=str)
def test_nobody_scatters_sums(path):
    # Over several CPU processes psum_scatter is silently wrong in some JAX versions.
    assert "psum_scatter(" not in path.read_text()


@pytest.mark.parametrize("path", FILES + AROUND, ids=str)
def test_a_file_is_one_idea(path):
    assert len(path.read_text().splitlines()) <= 350


@pytest.mark.parametrize("path", FILES + AROUND, ids=str)
def test_every_file_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


METHODS = {
    name: value
    for name, value in vars(lc).items()
    if inspect.isfunction(value) and ".algorithms." in value.__module__
}


@pytest.mark.parametrize("name", METHODS)
def test_a_published_method_shows_equation_example_and_reference(name):
    text = inspect.getdoc(METHODS[name])
    assert ".. math::" in text
    assert "Sends" in text or name == "slow_momentum"
    if name not in ("data_parallel", "slow_momentum"):
        assert "Example:" in text
        assert "References:" in text


@pytest.mark.parametrize("name", [n for n in vars(lc) if n[0] != "_"])
def test_every_public_name_is_documented(name):
    value = getattr(lc, name)
    if callable(value):
        assert inspect.getdoc(value)
