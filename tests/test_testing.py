"""``lowcomm.testing``: right methods pass, and each typical bug breaks its law."""

from __future__ import annotations

import re
from typing import Any

import optax
import pytest

import lowcomm as lc
from lowcomm import testing
from lowcomm.testing.checks import COMPRESSOR_LAWS, METHOD_LAWS, TRIGGER_LAWS
from tests import faulty_methods as faulty

QUIET: Any = {"show": lambda line: None}

BUGS = {
    "init aliases the parameters": (
        faulty.aliasing,
        "donation",
        "one buffer as .*par",
    ),
    "a counter of Python's": (faulty.counting, "compiles once", "outside its arg"),
    "a generator of Python's": (faulty.tossing, "compiles once", "outside its arg"),
    "one draw for all steps": (faulty.same_draw, "fresh draws", "constants alone"),
    "a state that widens": (faulty.widening, "types constant", "int32.*float32"),
    "two programs": (faulty.widening, "compiles once", "traced 2 times"),
    "a weak type": (faulty.weak, "types constant", r"\(weak\) before"),
    "a state that grows": (faulty.growing, "compiles once", "traced 8 times"),
    "an anchor in bfloat16": (faulty.narrow_anchor, "zero gradients", "after step 0"),
    "workers that disagree": (faulty.selfish, "runs", "differs between workers"),
    "some talk, some wait": (faulty.clipping, "runs", "may differ between workers"),
    "a step that Python asks": (faulty.asking_python, "runs", "BoolConversion"),
    "an axis of its own": (faulty.own_axis, "runs", "data"),
    "nobody talks": (lambda inner: inner, "runs", "4 workers sent nothing in 8 steps"),
    "virtual workers only": (faulty.one_sided, "backends agree", "on a mesh"),
    "parameters held back": (faulty.deaf, "inner sees all", "params= did not reach"),
    "arguments held back": (faulty.half_deaf, "inner sees all", "step= did not reach"),
    "a sum of gradients": (faulty.summing, "copies", "4 times as far"),
    "a sum of displacements": (faulty.summed_displacements, "copies", "4 times as far"),
    "zero by zero": (faulty.normalizing, "zero gradients", "nan"),
    "a fixed number": (
        faulty.ring_of_four,
        "any number of workers",
        "as a second",
    ),
    "a leader": (faulty.following, "learns", "% of the gap is left"),
    "nobody listens": (faulty.deaf_to_others, "learns", "19.9 % of the gap is left"),
    "half an ear": (faulty.half_listening, "learns", "% of the gap is left"),
    "vectors forgotten": (
        faulty.matrices_only,
        "learns",
        "workers' vectors are as far",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_typical_bug_breaks_its_law(bug):
    method, law, said = BUGS[bug]
    report = testing.check(method, steps=8, only=(law,), **QUIET)
    assert report.failed == (law,)
    assert re.search(said, report.verdicts[0].why), report.verdicts[0].why


def test_a_sync_that_comes_at_another_step_breaks_what_was_declared():
    only = ("workers agree",)
    declared = testing.check(faulty.early, steps=8, syncs=4, only=only, **QUIET)
    assert declared.failed == only
    assert "after step 3" in declared.verdicts[0].why
    assert not testing.check(faulty.early, steps=8, only=only, **QUIET).failed


def capped_selsync(inner, *, threshold, cap, axis=lc.AXIS):
    when = lc.any_of(lc.change_exceeds(threshold, window=4), lc.every(cap))
    return lc.average(inner, when=when, moments="average", axis=axis)


def test_a_method_written_after_the_readme_passes():
    said = []
    method = lambda inner: capped_selsync(inner, threshold=0.1, cap=4)
    report = testing.check(method, show=said.append)
    assert report.failed == ()
    assert [v.law for v in report.verdicts] == list(METHOD_LAWS)
    assert {v.status for v in report.verdicts} == {"holds"}
    assert str(report) == "\n".join(said)


CODES = lc.compressed_mean(lc.quantize(block=16))
RIGHT = {
    "signs": lambda inner: optax.chain(lc.error_feedback(lc.sign()), inner),
    "stochastic codes": lambda inner: optax.chain(CODES, inner),
    "draws anew": faulty.new_draw,
}
EXACTING = ("backends agree", "copies", "fresh draws")


@pytest.mark.parametrize("name", RIGHT)
def test_signs_codes_and_draws_are_no_failures(name):
    # One ulp flips a sign or a code, and what is drawn differs between workers.
    assert not testing.check(RIGHT[name], steps=8, only=EXACTING, **QUIET).failed


def test_a_graph_is_made_for_the_workers_there_are():
    laws = ("runs", "any number of workers", "copies")
    for method in (
        lambda inner, workers: lc.dpsgd(inner, lc.ring(workers)),
        lambda inner, *, workers: lc.dpsgd(inner, lc.ring(workers)),
    ):
        assert not testing.check(method, steps=8, only=laws, **QUIET).failed
    made_for_two = lambda inner: lc.dpsgd(inner, lc.ring(2))
    report = testing.check(made_for_two, workers=2, steps=8, only=laws, **QUIET)
    assert [v.status for v in report.verdicts] == ["holds"] + 2 * ["not applicable"]


def test_workers_may_stand_along_two_axes():
    def method(inner, axis=("site", "chip")):
        levels = optax.chain(lc.mean("chip"), lc.error_feedback(lc.sign(), axis="site"))
        return optax.chain(levels, inner)

    laws = ("runs", "backends agree", "any number of workers")
    report = testing.check(method, axis=("site", "chip"), steps=8, only=laws, **QUIET)
    assert not report.failed, str(report)


def test_less_is_asked_of_a_transformation_whose_inner_optimizer_is_its_own():
    tx = lc.local_sgd(optax.adamw(1e-2), period=4)
    only = ("runs", "zero gradients", "learns", "inner sees all")
    report = testing.check(tx, steps=8, only=only, **QUIET)
    expected = ["holds", "holds", "not applicable", "not applicable"]
    assert [v.status for v in report.verdicts] == expected
    assert "needs a function of the inner optimizer" in report.verdicts[-1].why


def test_a_property_is_asked_for_only_where_it_is_claimed():
    method = lambda inner: lc.diloco(inner, period=2)
    only = ("one worker is the inner optimizer",)
    free = testing.check(method, steps=8, only=only, **QUIET)
    assert (free.failed, free.verdicts[0].status) == ((), "lacks it")
    claimed = testing.check(method, steps=8, only=only, claims=only, **QUIET)
    assert claimed.failed == only


def test_an_exempted_law_is_named_with_its_reason():
    only = ("copies",)
    exempt = {"copies": "the rate grows with the number of workers"}
    report = testing.check(faulty.summing, only=only, exempt=exempt, steps=8, **QUIET)
    assert report.verdicts == (("copies", "exempt", exempt["copies"]),)


def test_the_steps_are_enough_to_see_every_kind_of_step_twice():
    def seen(period):
        method = lambda inner: lc.local_sgd(inner, period=period)
        return testing.check(method, only="runs", **QUIET).verdicts[0].why

    assert "(20 steps" in seen(10)
    assert "(40 steps" in seen(40)
    assert "sent nothing in 64 steps" in seen(65)


def test_what_needs_more_devices_than_there_are_is_said():
    report = testing.check(
        lc.data_parallel, workers=16, steps=2, only=("scan", "backends agree"), **QUIET
    )
    assert [v.status for v in report.verdicts] == ["holds", "holds"]
    assert all("needs 16 devices, JAX sees 8" in v.why for v in report.verdicts)


@pytest.mark.parametrize(
    ("wrong", "options", "said"),
    [
        (3, {}, "a Compressor or a Trigger, not int"),
        (lc.local_sgd, {}, r"method\(inner\) raised TypeError: .*period"),
        (lc.dpsgd, {}, r"method\(inner, workers\) raised ValueError: graph must be"),
        (lambda inner: None, {}, "returned NoneType, not a transformation"),
        (lc.data_parallel, {"only": "lerns"}, "only takes names of laws, and 'lerns'"),
        (lc.data_parallel, {"exempt": {"x": "y"}}, "exempt takes names of laws"),
        (lc.data_parallel, {"claims": ["x"]}, "claims takes names of laws"),
        (lc.data_parallel, {"workers": 1}, "nobody to talk to"),
        (lc.top_k(0.1), {"steps": 4}, "steps= is asked of methods, not of a Comp"),
        (lc.every(4), {"syncs": 4}, "syncs= is asked of methods, not of a Trigger"),
    ],
)
def test_what_is_no_method_is_refused(wrong, options, said):
    with pytest.raises(ValueError, match=said):
        testing.check(wrong, **options, **QUIET)


def test_the_documentation_names_every_law():
    text = " ".join(testing.__doc__.split())
    for name in (*METHOD_LAWS, *COMPRESSOR_LAWS, *TRIGGER_LAWS):
        assert name in text
