"""Compiling for machines that are not here: what can be said without their compilers.

Eight simulated devices stand for two slices of four chips; the compiler is the CPU's.
What the compilers for TPUs and GPUs make of all methods is held in ``.ci/targets``.
"""

import importlib.util
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.catalogue import CATALOGUE
from experiments.contracts import Sent
from experiments.targets import (
    __main__ as commands,
    chips,
    clusters,
    programs,
    reports,
    tables,
)
from experiments.targets.__main__ import Settings, main, make
from experiments.task import Task
from lowcomm.rows import Row

TARGET = chips.parse("v5e:2x2", 2)


def here(target=TARGET):
    """The simulated devices as a target's."""
    devices = np.array(jax.devices()[: target.slices * target.devices])
    return clusters.Cluster(target, devices.reshape(target.slices, -1))


def products(width=8, depth=1):
    """A task of a matrix to be multiplied by, of which nothing but shapes is used."""
    start = lambda key: {"w": jnp.zeros((depth, width, width)), "b": jnp.zeros(3)}

    def loss(params, x):
        return jnp.mean((x @ params["w"][0]) ** 2) + jnp.sum(params["b"] ** 2)

    batch = lambda step: np.zeros((2, 4, width), np.float32)
    return Task("products", start, loss, batch, lambda params: {})


@pytest.fixture(scope="module")
def compiled():
    """Some methods' reports, of the CPU's compiler."""
    names = ("diloco", "sign_sgd", "selsync", "layered_sgd", "cocod_sgd")
    return {name: reports.report(name, products(), here()) for name in names}


def test_every_known_topology_is_as_many_devices_as_its_sides_say():
    for name, chip in chips.CHIPS.items():
        for sides in chip.topologies:
            found = chips.parse(f"{name}:{sides}", 2)
            edges = [int(side) for side in sides.split("x")]
            assert found.devices == np.prod(edges) * chip.devices
    assert chips.parse("v6e:16x16", 4).devices * 4 == 1024
    assert chips.parse("v4:2x2x2", 1).devices == 16  # two cores a chip


def test_cores_of_a_chip_share_its_memory():
    assert chips.CHIPS["v4"].room == 16 * 2**30
    assert chips.CHIPS["v5e"].room == 16 * 10**9
    assert all(chip.source for chip in chips.CHIPS.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:4x5", r"'v5e:4x5': v5e has 4x4, "),
        ("v5p:4x4", r"'v5p:4x4': v5p has 2x4x4, 4x4x4"),
        ("v6:16x16", r"'v6:16x16'.*chips are v6e, "),
        ("h100", r"'h100': h100 has "),
        ("tpu", r"a chip and a topology, such as v5e:4x4"),
    ],
)
def test_an_unknown_target_is_told_the_nearest_ones_first(name, message):
    with pytest.raises(ValueError, match=message):
        chips.parse(name, 2)


def test_slices_and_workers_must_fit():
    with pytest.raises(ValueError, match="slices=0"):
        chips.parse("v5e:4x4", 0)
    with pytest.raises(ValueError, match="3 workers in a slice of 4 devices"):
        programs.check_divides(TARGET, 3)
    with pytest.raises(ValueError, match="sends nothing to others: give more slices"):
        programs.check_divides(chips.parse("v5e:2x2", 1), 1)
    programs.check_divides(chips.parse("v5e:2x2", 1), 4)


@pytest.mark.parametrize(
    ("target", "extra"), [("v5e:4x4", "tpu"), ("h100:1x4", "cuda")]
)
def test_a_missing_compiler_is_told_with_what_installs_it(monkeypatch, target, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install .*\.\[{extra}\]"):
        main(Settings(target=target))


def test_workers_are_slices_and_their_devices_share_the_parameters():
    placed = programs.place("diloco", products(), here())
    assert dict(placed.mesh.shape) == {"workers": 2, "fsdp": 4}
    assert placed.shards["w"].shape == (1, 2, 8)
    assert placed.shards["b"].shape == (3,)  # does not divide
    anchors = [x for x in jax.tree.leaves(placed.state) if x.shape == (2, 1, 8, 8)]
    assert len(anchors) == 3  # anchor, outer momentum and inner momentum
    assert {x.sharding.shard_shape(x.shape) for x in anchors} == {(1, 1, 2, 8)}


def test_a_slice_may_hold_several_workers():
    placed = programs.place("diloco", products(), here(), per_slice=4)
    assert dict(placed.mesh.shape) == {"workers": 8}
    assert placed.slices.shape == {"slice": 2, "place": 4}
    assert (placed.slices.devices.ravel() == placed.mesh.devices.ravel()).all()


def test_what_does_not_fit_is_told_before_anything_is_compiled():
    # 2^33 float32 in 4 shards are 8.6 GB: parameters and gradients are too many.
    huge = products(width=2**16, depth=2)
    with pytest.raises(programs.TooLarge, match=r"parameters take 8\.59 GB.*16 GB"):
        programs.place("data_parallel", huge, here())
    assert programs.check_fits(programs.place("diloco", products(), here())) < 2**14


def test_what_the_compiled_step_needs_besides_must_fit_as_well(monkeypatch):
    placed = programs.place("diloco", products(), here())
    monkeypatch.setattr(programs, "memory", lambda compiled: 17 * 10**9)
    with pytest.raises(programs.TooLarge, match=r"step 0 needs 17 GB of 16 GB"):
        next(programs.kinds(placed))


def test_compiled_steps_send_what_formula_and_jaxpr_say(compiled):
    for name, found in compiled.items():
        assert found.agrees, (name, found.steps)


def test_the_formula_is_that_of_a_device_and_the_jaxpr_that_of_a_worker(compiled):
    step = compiled["diloco"].busiest
    assert step.jaxpr == step.wanted == 4 * (64 + 3)
    assert step.formula == step.sent == 4 * (16 + 3)


def test_between_syncs_a_clocked_method_is_silent(compiled):
    for name in ("diloco", "cocod_sgd"):
        least, most = compiled[name].quietest, compiled[name].busiest
        assert least.silent
        assert not most.silent
        assert set(most.serves) == {3, 7, 11, 15}
        assert set(least.serves) | set(most.serves) == set(range(16))
        assert least.between == {}
        assert sum(most.between.values()) == most.crossed == most.sent
        assert least.slack == 0
    assert compiled["selsync"].quietest.sent > 0


def test_few_steps_are_the_end_of_a_round_and_what_follows():
    found = reports.report("diloco", products(), here(), few=True, rounds=False)
    assert {step.serves for step in found.steps} == {(7,), (8, 9)}
    assert found.overlap == ()


def test_two_levels_lie_between_slices_and_within(compiled):
    found = compiled["layered_sgd"]
    assert (found.workers, found.devices) == ((2, 2), 2)
    step = found.busiest
    assert step.sent == 2 * 4 * (32 + 3)
    # The gradient of each slice, once.
    assert sum(step.between.values()) == 4 * (32 + 3)


def test_a_compressed_exchange_sends_the_payload_of_a_shard(compiled):
    step = compiled["sign_sgd"].busiest
    # 16 of 64 entries of w, and b: their bits and a scale each.
    assert step.sent == step.formula == (2 + 4) + (1 + 4)


def test_a_program_that_sends_more_than_it_should_is_told():
    # Compressed by the leaf instead of by the shard: every device sends all of it.
    placed = programs.place("sign_sgd", products(width=512), here())
    plain = CATALOGUE["sign_sgd"].make(workers=2, steps=16, learning_rate=0.01)
    state = programs.state_of(plain, placed.params, placed.mesh)
    whole = placed._replace(tx=plain, state=state)
    (program,) = programs.kinds(whole)
    step = reports.read(whole, program)
    # 2^18 bits, and not 2^16; tiles of 4096 bytes do not explain it.
    assert step.sent == (2**15 + 4) + (1 + 4)
    assert step.formula == (2**13 + 4) + (1 + 4)
    assert not step.agrees


def step_of(**changed):
    usual = {
        "serves": (0,),
        "formula": 100,
        "jaxpr": 400,
        "wanted": 400,
        "sent": 100,
        "expected": 100,
        "slack": 0,
        "turned": 0,
        "numbers": 8,
        "staged": False,
        "crossed": 100,
        "between": {"all_reduce float32": 100},
        "inside": {},
        "memory": 2**20,
        "seconds": 1.0,
    }
    return reports.Step(**(usual | changed))


def test_whole_tiles_may_be_more_and_nothing_may_be_less():
    assert step_of(sent=512, slack=4096).agrees
    assert not step_of(sent=5000, slack=4096).agrees
    assert not step_of(sent=99, slack=4096).agrees
    assert not step_of(jaxpr=401).agrees
    assert not step_of(formula=0, expected=0, sent=4).agrees
    # A gathered number may have become a sum, a payload may not.
    assert step_of(sent=104, expected=104, turned=4).agrees
    assert not step_of(sent=200, expected=200, turned=100).agrees
    # What is sent in stages follows from no formula, but something must be.
    assert step_of(sent=5000, staged=True).agrees
    assert not step_of(sent=0, staged=True).agrees


def test_the_term_of_a_formula_is_told_by_the_jaxpr():
    placed = {
        name: programs.place(name, products(), here())
        for name in ("selsync", "data_parallel", "edgc")
    }
    sent = Sent(4, 268)
    term = lambda found: reports.term(placed["selsync"], sent, 7, found)
    assert [term(n) for n in (272, 268, 4, 0)] == ["most", "sync", "always", "none"]
    # One that talks at every step may not be silent.
    assert reports.term(placed["data_parallel"], Sent(268, 0), 7, 0) == "most"
    # What is measured at some steps may happen at any.
    kinds = Sent(0, 500, lambda t: 100 if t % 2 else 124)
    assert reports.term(placed["edgc"], kinds, 7, 100) == 7
    assert reports.term(placed["edgc"], kinds, 7, 124) == 0


def test_workers_in_and_across_slices_talk_in_stages():
    several = programs.place("diloco", products(), here(), per_slice=2)
    levels = programs.place("two_level_local_sgd", products(), here())
    single = programs.place("diloco", products(), here())
    staged = reports.is_staged
    assert staged(several, "workers")
    assert not staged(single, "workers")
    assert staged(levels, ("clusters", "workers"))
    assert not staged(levels, "clusters")
    assert not staged(levels, "workers")


def test_a_round_hides_what_its_loop_does_not_need():
    row = lambda size: Row("all_reduce", "slice", "float32", size)
    hidden = reports.Transfer("send", row(300), ("while.1",), 0)
    waited = reports.Transfer("send.1", row(100), (), 0)
    found = reports.Report("x", (2,), 4, (step_of(),), (hidden, waited))
    assert found.hidden == (300, 400)
    assert not found.hides
    assert found._replace(overlap=(hidden,)).hides
    assert not found._replace(overlap=()).hides


def test_results_are_written_as_json_and_as_a_table(tmp_path, compiled):
    found = [*compiled.values(), reports.Report("edit", reason="does not fit")]
    settings = Settings(out=tmp_path)
    place = tables.free(tmp_path, TARGET)
    where = tables.write(place, settings, TARGET, "products", found, 1.0)
    text = where.read_text()
    assert len([line for line in text.splitlines() if line.startswith("| `")]) == 6
    assert "| `edit` |  | does not fit |" in text
    whole = json.loads((tmp_path / "v5e-2x2-2.json").read_text())
    assert [m["name"] for m in whole["methods"]] == [f.name for f in found]
    assert all(m["agrees"] for m in whole["methods"][:-1])
    assert whole["methods"][-1]["reason"] == "does not fit"
    # Nor are they replaced; nothing has been compiled when this is said.
    with pytest.raises(FileExistsError, match=r"v5e-2x2-2\.json is there already"):
        main(Settings(target="v5e:2x2", out=tmp_path))


def test_one_line_says_what_a_method_sends(compiled):
    line = tables.line(compiled["diloco"])
    assert "76 bytes to other workers of 76, 0 in other steps" in line
    odd = compiled["diloco"]._replace(steps=(step_of(sent=99),))
    assert "should send something else" in tables.line(odd)


def test_the_task_has_a_batch_for_every_device():
    task = make(Settings(task="least-squares", batch=2), TARGET)
    assert task.batches(0).inputs.shape == (2, 8, 16)


def test_the_program_counts_methods_that_are_not_as_they_should_be(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(commands, "cluster", here)
    settings = Settings(
        target="v5e:2x2",
        method="data_parallel,qsparse_local_sgd",
        task="least-squares",
        rounds=False,
        out=tmp_path,
    )
    assert main(settings) == 0
    told = capsys.readouterr().out
    assert "2 methods as they should be, 0 not" in told
    assert (tmp_path / "v5e-2x2-2.md").exists()

    def too_large(name, *rest, **how):
        raise programs.TooLarge(f"{name} does not fit")

    monkeypatch.setattr(commands, "report", too_large)
    assert main(replace(settings, method="diloco", out=None)) == 1
    assert "diloco: diloco does not fit" in capsys.readouterr().out
