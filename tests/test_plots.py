"""Figures: the same twice, readable, and nothing left behind."""

import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest

from experiments import plots


def results(names=("data_parallel", "diloco"), seeds=2, **changes):
    steps = np.arange(0, 50, 10)
    method = {
        "steps": steps.tolist(),
        "loss": [(2.3 * 0.9**steps + 0.1 * s).tolist() for s in range(seeds)],
        "bytes": [(1000 * steps).tolist()] * seeds,
        "seconds": [(0.1 * steps).tolist()] * seeds,
    }
    return {"title": "title", "methods": {n: method | changes for n in names}}


def test_a_png_and_an_svg_are_written_side_by_side(tmp_path):
    png, svg = plots.figure(results(), tmp_path / "comparison")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert {p.name for p in tmp_path.iterdir()} == {"comparison.png", "comparison.svg"}


def test_the_same_results_give_the_same_svg_byte_for_byte(tmp_path):
    first = plots.figure(results(), tmp_path / "a")[1].read_bytes()
    second = plots.figure(results(), tmp_path / "b")[1].read_bytes()
    assert first == second
    assert first != plots.figure(results(seeds=1), tmp_path / "c")[1].read_bytes()


def test_a_dot_in_the_name_of_the_figure_is_part_of_it(tmp_path):
    names = [p.name for p in plots.figure(results(), tmp_path / "rate-0.1")]
    assert names == ["rate-0.1.png", "rate-0.1.svg"]
    names = [p.name for p in plots.figure(results(), tmp_path / "loss.png")]
    assert names == ["loss.png", "loss.svg"]


def test_no_style_is_left_behind(tmp_path):
    before = dict(matplotlib.rcParams)
    plots.figure(results(), tmp_path / "a")
    assert dict(matplotlib.rcParams) == before


def test_every_method_up_to_ten_has_a_colour_of_its_own():
    names = ["data_parallel", *(f"method{i}" for i in range(9))]
    curves = plots._curves(results(names)["methods"])
    assert len({curve.colour for curve in curves}) == 10


def test_more_methods_than_colours_differ_in_their_dashes():
    curves = plots._curves(results([f"method{i}" for i in range(27)])["methods"])
    assert len({(curve.colour, str(curve.dashes)) for curve in curves}) == 27


def test_methods_are_listed_best_first_and_broken_ones_last():
    methods = results(["broken", "good", "poor"])["methods"]
    methods["good"] = methods["good"] | {"loss": [[2.0, 1.0, 0.5, 0.2, 0.01]]}
    methods["broken"] = methods["broken"] | {"loss": [[2.0, 1.0, None, None, None]]}
    names = [curve.name for curve in plots._curves(methods)]
    assert names == ["good", "poor", "broken"]


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": [[0] * 5] * 2},
        {"loss": [[1.0, None, None, None, None]] * 2},
        {"loss": [[None] * 5] * 2},
        {"loss": [[1e-9, 1e-3, 1.0, 1e2, 1e4]] * 2},
        {"loss": [[0.0] * 5] * 2},
    ],
    ids=["silent", "diverged", "nothing", "many-decades", "solved"],
)
def test_curves_of_any_kind_are_drawn_without_a_warning(tmp_path, change):
    plots.figure(results(**change), tmp_path / "a")


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no method"):
        plots.figure({"methods": {}}, tmp_path / "a")
