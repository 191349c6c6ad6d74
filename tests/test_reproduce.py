"""Claims are checked cell by cell, written once, and told from the results alone."""

import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure
from scipy import stats

import lowcomm as lc
from experiments import panels, report, reproduce, trials
from experiments.toys import Problem

PAPER = '''
"""A paper that does not exist."""

from experiments.papers import Verdict

TITLE, REFERENCE, CLAIM, SETTING = "Fake", "Nobody, 2020.", "a | b", "none"
METHODS, BASELINES = (), ("one",)
CALLS, STOP = [], []


def cells(scale):
    """Two of them."""
    return {name: (lambda name=name: run(name)) for name in ("one", "two")}


def run(name):
    CALLS.append(name)
    if name in STOP:
        raise KeyboardInterrupt
    return {
        "seeds": [0, 1],
        "rate": 0.5,
        "at_the_edge": name == "two",
        "relative_bytes": 0.25,
        "final": {"loss": [1.0, float("nan") if name == "two" else 2.0]},
    }


def verdict(found):
    return Verdict("partly", said(found))


def said(found):
    return f"{len(found)} cells"


def draw(found, figure):
    figure.subplots().plot(found["one"]["final"]["loss"])
'''


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Writes the module of a paper, the only one there is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "RESULTS", tmp_path / "home" / "results")
    for where in (reproduce, report):
        monkeypatch.setattr(where, "KEYS", ("fake",))

    def write(source=PAPER):
        path = tmp_path / f"fake{len(list(tmp_path.glob('fake*')))}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("experiments.papers.fake", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return write


def test_a_run_that_was_stopped_goes_on_where_it_was(fake, tmp_path):
    module, results = fake(), tmp_path / "home" / "results"
    module.STOP.append("two")
    assert reproduce.main(["fake"]) == 130
    assert [path.name for path in results.iterdir()] == ["fake.partial.json"]
    module.STOP.clear()
    assert reproduce.main(["fake"]) == 0
    assert module.CALLS == ["one", "two", "two"]
    assert sorted(path.name for path in results.iterdir()) == ["fake.json", "fake.png"]
    found = json.loads((results / "fake.json").read_text())
    assert found["cells"]["two"]["final"]["loss"] == [1.0, None]
    assert found["verdict"] == {"status": "partly", "measured": "2 cells"}
    assert "2 cells" in (tmp_path / "home" / "REPRODUCTION.md").read_text()


def test_what_is_complete_is_not_run_again_unless_it_is_said(fake, tmp_path):
    module = fake()
    done = tmp_path / "home" / "results" / "fake.json"
    assert reproduce.main(["fake"]) == 0
    once = done.read_bytes()
    assert reproduce.main(["fake"]) == 0
    assert (len(module.CALLS), done.read_bytes()) == (2, once)
    assert reproduce.main(["fake", "--again"]) == 0
    assert len(module.CALLS) == 4


def test_what_is_said_of_the_runs_is_made_anew_and_the_runs_are_not(fake, tmp_path):
    fake()
    assert reproduce.main(["fake"]) == 0
    module = fake(PAPER.replace('cells"\n', 'of them"\n'))
    assert reproduce.main(["fake"]) == 0
    assert module.CALLS == []
    found = json.loads((tmp_path / "home" / "results" / "fake.json").read_text())
    assert found["verdict"]["measured"] == "2 of them"


def test_results_of_another_experiment_are_kept(fake, tmp_path, capsys):
    fake()
    assert reproduce.main(["fake"]) == 0
    done = tmp_path / "home" / "results" / "fake.json"
    once = done.read_bytes()
    module = fake(PAPER.replace('"rate": 0.5', '"rate": 0.25'))
    assert reproduce.main(["fake"]) == 2
    assert "--again" in capsys.readouterr().err
    assert (done.read_bytes(), module.CALLS) == (once, [])
    assert reproduce.main(["fake", "--again"]) == 0
    assert json.loads(done.read_text())["cells"]["one"]["rate"] == 0.25


def test_quick_results_lie_elsewhere(fake, tmp_path):
    fake()
    assert reproduce.main(["fake", "--quick"]) == 0
    quick = tmp_path / "runs" / "reproduce-quick"
    names = sorted(path.name for path in quick.iterdir())
    assert names == ["REPRODUCTION.md", "fake.json", "fake.png"]
    assert "](fake.png)" in (quick / "REPRODUCTION.md").read_text()
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("asked", "said"), [(["fade"], "fake"), ([], "name papers, or --all")]
)
def test_a_paper_that_is_not_there_is_asked_back(fake, tmp_path, capsys, asked, said):
    fake()
    assert reproduce.main(asked) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_the_fingerprint_is_of_what_is_run(fake):
    first = reproduce.fingerprint(fake())
    for same in (
        PAPER.replace("A paper", "One paper").replace("Two of them", "Both of them"),
        PAPER.replace('f"{len(found)} cells"', '"all"').replace("Nobody", "Somebody"),
        PAPER.replace(".plot(", ".scatter([1, 2], "),
    ):
        assert same != PAPER
        assert reproduce.fingerprint(fake(same)) == first
    for other in (PAPER.replace("0.25", "0.5"), PAPER.replace('"two")}', '"three")}')):
        assert other != PAPER
        assert reproduce.fingerprint(fake(other)) != first


def test_the_page_is_made_of_the_results_alone(fake, tmp_path):
    module = fake()
    reproduce.main(["fake"])
    folder = tmp_path / "home" / "results"
    page = report.page(folder)
    assert page == report.page(folder)
    assert len(module.CALLS) == 2
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert rows[2].count("|") - rows[2].count("\\|") == 6  # five columns
    assert "**partly**" in rows[2]
    assert "| one (baseline) | 0.5 | 1.500 ± 6.353 | 0.25 |" in rows
    assert any("two | 0.5 (end of the grid) | nan" in row for row in rows)
    other = report.page(tmp_path / "nothing")
    assert other == report.page(tmp_path / "nowhere")
    assert "fake" not in other


def test_cells_without_a_loss_are_named_by_what_they_have(fake, tmp_path):
    fake(PAPER.replace('"final": {"loss"', '"final": {"rounds"'))
    with pytest.raises(KeyError):  # from its own figure; the cells are kept
        reproduce.main(["fake"])
    fake(
        PAPER.replace('"final": {"loss"', '"final": {"rounds"').replace(
            '["loss"])', '["rounds"])'
        )
    )
    assert reproduce.main(["fake"]) == 0
    page = report.page(tmp_path / "home" / "results")
    assert "| one (baseline) | 0.5 | 1.500 ± 6.353 rounds | 0.25 |" in page


def test_intervals_are_those_of_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5))
    found = trials.interval(a)
    low, high = stats.t.interval(0.95, 4, loc=a.mean(), scale=stats.sem(a))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)
    paired = stats.ttest_rel(a, b).confidence_interval()
    found = trials.difference(a, b)
    assert (found.low, found.high) == pytest.approx(tuple(paired), rel=1e-12)
    assert np.isnan(trials.interval([1.0]).half)
    assert np.isnan(trials.interval([1.0, None]).mean)


# Everybody walks downhill at one speed, plus a draw: after t steps x is -rate t.
SLOPE = Problem(
    "a slope",
    4,
    lambda key: {"x": jnp.zeros(3)},
    lambda params, drawn: jnp.sum(params["x"]) * (1 + 0 * drawn),
    np.zeros(4, np.int32),
    lambda own, key: jax.random.normal(key),
    lambda params: {
        "validation": jnp.square(params["x"][0] + 1),
        "loss": jnp.square(params["x"][0] + 2),
    },
)


def local(rate):
    return lc.local_sgd(optax.sgd(rate), period=4)


def test_rates_are_chosen_by_validation_and_not_by_what_is_reported():
    rates = (0.0625, 0.125, 0.25, 1e30)  # 8 steps lead to -0.5, -1, -2 and nowhere
    cell = trials.tuned(SLOPE, local, steps=8, rates=rates, seeds=(0, 1), points=2)
    assert (cell["rate"], cell["at_the_edge"]) == (0.125, False)
    assert cell["final"] == {"validation": [0, 0], "loss": [1, 1]}
    assert cell["curves"]["loss"] == [[4.0, 2.25, 1.0]] * 2
    assert cell["step"] == [0, 4, 8]
    assert cell["rates"] == {"0.0625": 0.25, "0.125": 0.0, "0.25": 1.0, "1e+30": np.inf}
    assert trials.at_rate(cell, 0.25) == [0, 0]
    assert trials.values(cell) == [1, 1]


def test_bytes_are_those_of_the_formula():
    how = {"steps": 8, "rates": [0.125], "seeds": (0, 1), "points": 2}
    cell = trials.tuned(SLOPE, local, **how)
    assert trials.dense_bytes(SLOPE) == 12
    assert cell["bytes"] == [8 // 4 * 12] * 2
    assert cell["relative_bytes"] == 1 / 4
    assert not cell["at_the_edge"]  # of one rate
    with pytest.raises(ValueError, match="8 steps do not fall into 3 equal parts"):
        trials.train(SLOPE, local, **how | {"points": 3})


def test_seeds_decide_what_is_drawn_and_workers_draw_apart():
    noisy = SLOPE._replace(loss=lambda params, drawn: jnp.sum(params["x"]) * drawn)
    how = {"steps": 4, "rates": [0.5, 0.5], "seeds": (3, 4, 3), "points": 1}
    runs = trials.train(noisy, local, watch=trials.drift, **how)
    end = runs["loss"][..., -1]
    np.testing.assert_array_equal(end[:, 0], end[:, 2])
    np.testing.assert_array_equal(end[0], end[1])
    assert (end[:, 0] != end[:, 1]).all()
    keys = lambda t, i: jax.random.fold_in(jax.random.fold_in(jax.random.key(3), t), i)
    drawn = [jax.random.normal(keys(t, i)) for t in range(4) for i in range(4)]
    x = -0.5 * float(np.sum(drawn)) / 4
    assert end[0, 0] == pytest.approx((x + 2) ** 2, rel=1e-5)
    assert runs["drift"][..., -1].max() < 1e-6  # they have just met


def test_what_is_drawn_may_change_with_the_step():
    scaled = SLOPE._replace(loss=lambda params, drawn: jnp.sum(params["x"]) * drawn)
    how = {"steps": 4, "rates": [0.5], "seeds": (0,), "points": 2}
    stop = lambda drawn, key, t: jnp.where(t < 2, 1.0, 0.0)
    runs = trials.train(scaled, local, change=stop, **how)
    assert runs["loss"][0, 0].tolist() == [4, 1, 1]  # x is 0, -1, -1


def test_workers_may_begin_apart():
    spread = SLOPE._replace(init=lambda key: {"x": jax.random.normal(key, (3,))})
    how = {"steps": 4, "rates": [0.0], "seeds": (0, 1), "points": 1}
    how |= {"watch": trials.drift, "start": None}
    together = trials.train(spread, local, **how)["drift"][0]
    apart = trials.train(spread, local, apart=True, **how)["drift"][0]
    assert together[:, 0].tolist() == [0, 0]
    assert (apart[:, 0] > 0.1).all()
    assert apart[0, 0] != apart[1, 0]
    assert apart[:, 1].max() < 1e-6  # they have met


def test_panels_leave_out_what_is_missing():
    left, right = Figure().subplots(1, 2)
    panels.lines(
        left, {"a": ([1, 2, 4], [[1.0, None, 3.0], [2.0, 2.0, 4.0]])}, x="x", y="y"
    )
    assert left.lines[0].get_xydata().tolist() == [[1, 1.5], [4, 3.5]]
    panels.bars(right, {"b": [1.0, 3.0]}, y="y")
    assert right.patches[0].get_height() == 2
    assert right.lines[0].get_ydata().tolist() == [1, 3]
