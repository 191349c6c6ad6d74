"""The committed results, the page made of them, and the README's table agree."""

from __future__ import annotations

import json

import pytest

from experiments import methods, report
from experiments.catalogue import CATALOGUE
from experiments.papers import KEYS, paper
from experiments.reproduce import RESULTS, fingerprint


def results(key: str) -> dict:
    return json.loads((RESULTS / f"{key}.json").read_text())


@pytest.mark.parametrize("key", KEYS)
def test_results_are_of_a_full_run_of_the_experiment_as_it_stands(key):
    found, module = results(key), paper(key)
    assert found["key"] == key
    assert not found["quick"]
    assert found["source"] == fingerprint(module)
    assert (RESULTS / f"{key}.png").exists()


@pytest.mark.parametrize("key", KEYS)
def test_no_verdict_goes_without_its_seeds_and_its_baseline(key):
    found, module = results(key), paper(key)
    assert module.BASELINES
    assert set(module.BASELINES) <= set(found["cells"])
    trained = [cell for cell in found["cells"].values() if "final" in cell]
    assert trained
    assert all(len(cell["seeds"]) >= 2 for cell in trained)
    verdict = module.verdict(found["cells"])
    assert found["verdict"] == {"status": verdict.status, "measured": verdict.measured}
    assert verdict.status in ("reproduced", "partly", "not reproduced")


def test_the_page_is_that_of_the_results():
    page = (RESULTS.parent / "REPRODUCTION.md").read_text()
    assert page == report.page(RESULTS, results="results/")


def test_every_method_of_a_paper_is_in_the_catalogue():
    assert {name for key in KEYS for name in paper(key).METHODS} <= CATALOGUE.keys()


def test_the_table_of_methods_is_that_of_the_catalogue_and_the_verdicts():
    text = methods.README.read_text()
    lines = text.split(methods.BEGIN)[1].split(methods.END)[0].splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert [row[0] for row in rows] == [f"`{n}`" for n in CATALOGUE]
    for name, (_, about, share, verdict) in zip(CATALOGUE, rows, strict=True):
        assert about == methods.about(name)
        assert verdict == methods.verdict(name)
        assert float(share) > 0
