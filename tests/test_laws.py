"""The laws of ``lowcomm.testing`` crossed with the methods of the catalogue.

One trajectory per method and backend is recorded and read by many laws, method after
method, since the programs of all of them would fill the memory. A method is held to
what its line declares, and to every property besides the laws; one that does not obey
is named there with the reason.
"""

from __future__ import annotations

import pytest

from experiments.catalogue import CATALOGUE
from lowcomm.testing.checks import METHOD_LAWS
from lowcomm.testing.subject import Subject
from tests.problems import subject

several = lambda method: not isinstance(method.axis, str)

CASES = [
    pytest.param(name, clause, id=f"{law.name}: {clause}-{name}")
    for name, method in CATALOGUE.items()
    for law in METHOD_LAWS.values()
    for clause in law.clauses
    if law.name not in method.exempt
    # pmap has one axis
    and not (several(method) and clause.variant.get("backend") == "pmap")
]


_held: list[str] = []


def held(name: str) -> Subject:
    """The method of that name; programs and trajectories of the last one may go."""
    if _held != [name]:
        subject.cache_clear()
        _held[:] = [name]
    return subject(name)


@pytest.mark.parametrize(("name", "clause"), CASES)
def test_every_method_obeys_every_law(name, clause):
    clause.ask(held(name), **clause.variant)


@pytest.mark.parametrize(
    "name", [n for n, m in CATALOGUE.items() if m.syncs == "measured"]
)
def test_a_measured_method_that_always_syncs_agrees_at_every_step(name):
    always = subject(name, threshold=0.0)
    always.syncs = 1
    for clause in METHOD_LAWS["workers agree"].clauses:
        clause.ask(always, **clause.variant)


def test_every_exemption_names_a_law_and_gives_a_reason():
    for m in CATALOGUE.values():
        assert set(m.exempt) <= set(METHOD_LAWS)
        assert all(len(reason) > 20 for reason in m.exempt.values())
