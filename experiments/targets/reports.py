"""What compiled programs say, held against the formulas and against the ledger.

Bytes are those of one device. Between workers they follow from the formula of the
method, evaluated for the part of the parameters that a device holds, up to two things
that TPU programs do:

- an all-reduce sends whole tiles, of up to 4096 bytes a leaf;
- an all-gather of single numbers becomes an all-reduce, of zeros but for a worker's
  own: K workers send K numbers each. (So would larger ones that fill no whole tiles;
  ``lowcomm.transport.gather`` keeps them from it.)

``expected`` accounts for the second, ``slack`` for the first. A collective of workers
in several slices, of which there are several in each, is compiled in stages within and
between slices, or collectives of both levels are merged into one; what these send
follows from no formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import lowcomm as lc
from lowcomm.scheduled import Transfer as Transfer, scheduled
from lowcomm.spmd import names

from ..contracts import Sent
from .programs import Placed, Program, asks, kinds, memory, place, round_of

TILE = {"tpu": 4096, "cuda": 0}
NUMBERS = 8  # bytes a leaf of gathers that may become reductions


class Step(NamedTuple):
    """One kind of step of a method, on one device.

    Attributes:
        serves: the numbers of the steps.
        formula: bytes between workers that the catalogue's formula has for a device.
        jaxpr: bytes of a worker of one device that the ledger reads from the jaxpr; of
            a device where its leaves are too large for the method.
        wanted: the formula's for the same.
        sent: bytes between workers in the compiled program, its largest branches.
        expected, slack: what the formula becomes where gathers became reductions, and
            how much more whole tiles may be.
        turned: bytes of gathers that became reductions.
        numbers: how many may, of single numbers.
        staged: whether something goes to workers within and between slices at once.
        crossed: bytes between slices, of conditionals the largest branches.
        between, inside: bytes between slices and within, by collective, all branches.
        memory: bytes of arguments, results, temporaries and code.
        seconds: tracing and compiling took.
    """

    serves: tuple[int, ...]
    formula: int
    jaxpr: int
    wanted: int
    sent: int
    expected: int
    slack: int
    turned: int
    numbers: int
    staged: bool
    crossed: int
    between: dict[str, int]
    inside: dict[str, int]
    memory: int
    seconds: float

    @property
    def silent(self) -> bool:
        """Whether it says nothing to other workers, and should not."""
        return self.formula == self.sent == 0

    @property
    def agrees(self) -> bool:
        """Whether formula, jaxpr and compiled program say the same."""
        exact = self.wanted == self.jaxpr
        if self.staged:
            return exact and self.sent > 0
        within = 0 <= self.sent - self.expected <= self.slack
        return exact and within and self.turned <= self.numbers


class Report(NamedTuple):
    """A method on a target: its steps, or the reason why there are none."""

    name: str
    workers: tuple[int, ...] = ()
    devices: int = 1  # of a worker
    steps: tuple[Step, ...] = ()
    overlap: tuple[Transfer, ...] = ()  # between slices, in a round
    reason: str = ""

    @property
    def agrees(self) -> bool:
        """Whether it was compiled, and does what it should."""
        return bool(self.steps) and all(step.agrees for step in self.steps)

    @property
    def busiest(self) -> Step:
        """The kind of step that sends most between workers."""
        return max(self.steps, key=lambda step: step.sent)

    @property
    def quietest(self) -> Step:
        """The one that sends least."""
        return min(self.steps, key=lambda step: step.sent)

    @property
    def hidden(self) -> tuple[int, int]:
        """Bytes between slices in a round that a loop hides, and all of them."""
        rows = [(t.row.bytes, bool(t.loops)) for t in self.overlap]
        return sum(n for n, hides in rows if hides), sum(n for n, _ in rows)

    @property
    def hides(self) -> bool:
        """Whether a round sends something between slices, and hides all of it."""
        hidden, sent = self.hidden
        return hidden == sent > 0


def report(
    name: str,
    task: Any,
    cluster: Any,
    *,
    few: bool = False,
    rounds: bool = True,
    **how: Any,
) -> Report:
    """Compile a method's steps, and its round, and read them.

    With ``few``, the last step of a round and the two that follow it.
    """
    placed = place(name, task, cluster, **how)
    sizes = tuple(placed.mesh.shape[axis] for axis in names(placed.method.axis))
    steps = tuple(read(placed, program) for program in kinds(placed, few=few))
    overlap = ()
    if rounds and placed.method.syncs == "period":
        overlap = between_slices(placed, round_of(placed))
    return Report(name, sizes, placed.devices, steps, overlap)


def read(placed: Placed, program: Program) -> Step:
    """What a compiled step sends and holds, beside what it should."""
    text = program.compiled.as_text()
    workers = set(names(placed.method.axis))
    sent = lc.compiled_traffic(text, mesh=placed.mesh)
    said = _along(sent, workers)
    by_slices = lc.compiled_traffic(text, mesh=placed.slices)
    crossing = _along(by_slices, {"slice"})
    shards = _along(asks(placed, program.host, by_shard=True), workers)
    one = placed.whole[0], placed.setting, placed.shards, placed.devices
    part = placed.method.sent_by_device(*one)
    try:
        whole = asks(placed, program.host, by_shard=False)
        formula = placed.method.sent(placed.whole[0], placed.setting)
    except ValueError:  # a compressor may take the shards and refuse whole leaves
        whole, formula = shards, part
    which = term(placed, formula, program.host, whole.bytes_max)
    for_part, wanted = (_value(s, which) for s in (part, formula))
    turned = max(0, _gathered(shards) - _gathered(said))
    count = placed.setting.workers
    # What was packed into one buffer may be taken apart again.
    pieces = max(len(shards.rows), len(jax.tree.leaves(placed.params)))
    tile = TILE[placed.cluster.target.chip.platform]
    return Step(
        program.serves,
        for_part,
        whole.bytes_max,
        wanted,
        said.bytes_max,
        for_part + (count - 1) * turned,
        tile * pieces if for_part else 0,
        turned,
        NUMBERS * pieces,
        any(is_staged(placed, row.axis) for row in (*shards.rows, *said.rows)),
        crossing.bytes_max,
        _by_kind(crossing),
        _by_kind(_along(by_slices, {"place"}, without={"slice"})),
        memory(program.compiled),
        program.seconds,
    )


def between_slices(placed: Placed, program: Program) -> tuple[Transfer, ...]:
    """The transfers between slices of a program, and what runs meanwhile."""
    found = scheduled(program.compiled, mesh=placed.slices)
    return tuple(t for t in found if "slice" in names(t.row.axis))


def term(placed: Placed, sent: Sent, step: int, found: int) -> str | int:
    """The term of the formula that is for a step, told by what the jaxpr sends.

    Its name, or the number of a step like it, where what a step does is measured.
    """
    terms: list[str | int] = ["most", "sync", "always", "none"]
    if sent.at is not None:
        terms = [step, *terms[:-1], *range(placed.setting.steps)]
    elif placed.method.syncs == "every step":
        terms = ["most"]
    same = (which for which in terms if _value(sent, which) == found)
    return next(same, terms[0])


def _value(sent: Sent, which: str | int) -> int:
    if isinstance(which, int):
        return sent.most if sent.at is None else sent.at(which)
    return 0 if which == "none" else getattr(sent, which)


def is_staged(placed: Placed, axis: Any) -> bool:
    """Whether workers along ``axis`` are in several slices, several in each."""
    along = [placed.mesh.axis_names.index(name) for name in names(axis)]
    places = np.arange(placed.mesh.size).reshape(placed.mesh.devices.shape)
    slices = np.moveaxis(
        places // placed.cluster.target.devices, along, range(len(along))
    )
    group = slices.reshape(math.prod(slices.shape[: len(along)]), -1)[:, 0].tolist()
    return len(group) > len(set(group)) > 1


def _along(
    sent: lc.Traffic, axes: set[str], without: Sequence[str] | set[str] = ()
) -> lc.Traffic:
    """The rows along some of these axes, and along none of the others."""
    keep = lambda row: (
        set(names(row.axis)) & axes and not set(names(row.axis)) & set(without)
    )
    return lc.Traffic(tuple(row for row in sent.rows if keep(row)))


def _gathered(sent: lc.Traffic) -> int:
    return lc.Traffic(
        tuple(row for row in sent.rows if row.collective == "all_gather")
    ).bytes_max


def _by_kind(sent: lc.Traffic) -> dict[str, int]:
    found: dict[str, int] = {}
    for (kind, _, dtype), size in sent.census().items():
        key = f"{kind} {dtype}"
        found[key] = found.get(key, 0) + size
    return found
