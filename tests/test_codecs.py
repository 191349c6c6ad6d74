"""The table of operators: what stands in the README is what was measured."""

import json
import math
from pathlib import Path

import pytest

from experiments.benchmarks import codecs
from lowcomm import payload_bytes

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"


def test_the_readme_shows_the_table_that_was_measured():
    readme = (ROOT / "README.md").read_text()
    shown = readme.split("<!-- codecs -->\n")[1].split("<!-- end of codecs -->")[0]
    assert shown == (RESULTS / "codecs.md").read_text()
    found = json.loads((RESULTS / "codecs.json").read_text())
    rows = [codecs.Found(**row) for row in found["rows"]]
    assert shown == codecs.markdown(rows) + "\n"
    assert [row.operator for row in rows] == list(codecs.OPERATORS)


@pytest.mark.parametrize("name", ["sign", "random 1 %", "int8"])
def test_an_operator_pays_below_the_bandwidth_at_which_both_take_as_long(name):
    n, k = 2 * codecs.WIDTH, 8
    settings = codecs.Settings(elements=n, workers=k, pairs=1)
    row = codecs.examine(name, settings, [])
    c = codecs.OPERATORS[name]
    spent = 4e-9 * n * (1 / row.encode + (1 if c.linear else k) / row.decode)
    # A ring all-reduce sends 2 (K − 1)/K of the array, a gather K − 1 payloads.
    payload = payload_bytes(c, codecs.jax.ShapeDtypeStruct((n,), "float32"))
    sent = payload * (2 * (k - 1) / k if c.linear else k - 1)
    saved = 8 * (2 * (k - 1) / k * 4 * n - sent)
    expected = max(0, saved) / spent / 1e6
    assert math.isclose(row.break_even, expected, rel_tol=1e-6)
    assert row.bits == pytest.approx(8 * payload / n)


def test_nothing_that_was_measured_is_overwritten(tmp_path):
    codecs.write(tmp_path / "new", codecs.Settings(), [])
    with pytest.raises(FileExistsError, match="choose another folder"):
        codecs.write(tmp_path / "new", codecs.Settings(), [])
