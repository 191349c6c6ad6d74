"""The rows of a jaxpr: one per collective, in program order.

A walk through every sub-program that JAX's control flow and calls hold. Loops
multiply, branches guard, a ``while`` leaves the number open. A primitive that holds a
communicating program and is not known here is an error, never a silent zero.

Primitives are told by name: most of them have no public object, and a name that is
new in some JAX version and names an axis is refused as well. A kernel that moves bytes
between devices by itself, or a callback to the host, is not seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.extend import core

from .spmd import Axis as Axis

# One vocabulary for jaxpr and HLO. A maximum costs what a sum costs.
COLLECTIVES = {
    "psum": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "ppermute": "permute",
    "psend": "permute",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "pbroadcast": "broadcast",
    "pbroadcast_dynamic": "broadcast",
}
# These name an axis and send nothing: queries, casts of type, the end of a transfer.
SILENT = {"axis_index", "pvary", "pcast", "preduced", "vary_unreduced_cast", "precv"}
SILENT |= {"vary_unreduced_cast_p", "reduced_vary_cast", "reduced_vary_cast_p"}
# Primitives that run their one sub-program exactly once, in place.
INLINED = {"jit", "pjit", "closed_call", "core_call", "call"}
INLINED |= {"custom_jvp_call", "custom_vjp_call"}
ONCE = INLINED | {"remat2", "remat", "checkpoint", "shard_map", "custom_partitioning"}
ONCE |= {"custom_vmap_call", "compute_on"}


@dataclass(frozen=True)
class Row:
    """One collective: what one call of it sends, and when it runs.

    Attributes:
        collective: all_reduce, all_gather, reduce_scatter, permute, all_to_all,
            broadcast or send.
        axis: the mesh axis it talks along, or a tuple of several.
        dtype: of the operand.
        bytes: of the operand of one call, for one worker (one device in HLO).
        count: calls in one execution, the product of the enclosing loops' lengths;
            0 in a group of one; None under a ``while``, where only running tells.
        guard: the (conditional, branch) pairs on the way to it, outermost first.
        repeats: whether an equal collective of an equal operand precedes it in the
            same block; XLA sends such a pair once.
        wave: how many collectives one after the other must end before it can begin;
            those of one wave do not wait for each other.
        shards: how many devices of a worker send as much each, where it is a group.
    """

    collective: str
    axis: Axis
    dtype: str
    bytes: int
    count: int | None = 1
    guard: tuple[tuple[int, int], ...] = ()
    repeats: bool = field(default=False, compare=False)
    wave: int = field(default=0, compare=False)
    shards: int = field(default=1, compare=False)


def opened(program: Any) -> tuple[core.Jaxpr, Sequence[Any]]:
    """The jaxpr and constants of a program, closed or not."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def rows_of(
    jaxpr: core.Jaxpr, sizes: Mapping[str, int], workers: Sequence[str] = ()
) -> list[Row]:
    """The rows of a jaxpr whose axes have these sizes (else those bound around).

    Those of ``workers`` lead from one worker to another, and no shards lie along them.
    """
    walk = _Walk([], tuple(workers))
    walk.jaxpr(jaxpr, _Values(), dict(sizes), (), 1)
    return walk.rows


def rows_of_equation(eqn: core.JaxprEqn, sizes: Mapping[str, int]) -> list[Row]:
    """The rows of one equation."""
    walk = _Walk([], ())
    walk.equation(eqn, _Values(), dict(sizes), (), 1)
    return walk.rows


def scan_parts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many carries it has.

    Told by rank, since the parameters that say so have other names in other JAX
    versions: what is scanned has one axis more outside the body than inside.
    """
    body, _ = opened(eqn.params["jaxpr"])
    rank = lambda atom: len(atom.aval.shape)
    pairs = lambda a, b: zip(a, b, strict=True)
    carries = sum(rank(o) == rank(i) for o, i in pairs(eqn.outvars, body.outvars))
    whole = sum(rank(o) == rank(i) for o, i in pairs(eqn.invars, body.invars))
    return whole - carries, carries


class _Values:
    """Numbers for the values of a straight-line program; equal numbers, equal values.

    Two equations with the same primitive, parameters and inputs give the same
    outputs. What cannot be compared gets a number of its own. Each value also has its
    wave: how many collectives lie behind it, at least ``base``.
    """

    def __init__(self, base: int = 0):
        self.base, self.waves = base, {}
        self.numbers: dict[Any, int] = {}
        self.seen: dict[Any, list[int]] = {}
        self.fresh = itertools.count()

    def read(self, atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return (str(atom.aval), repr(atom.val))
        if atom not in self.numbers:
            self.numbers[atom] = next(self.fresh)
        return self.numbers[atom]

    def wave(self, atoms: Sequence[Any]) -> int:
        """The wave in which all of these values are there."""
        waves = (self.waves.get(self.read(atom), self.base) for atom in atoms)
        return max(waves, default=self.base)

    def reach(self, eqn: core.JaxprEqn, wave: int) -> None:
        """Put the outputs of an equation into a wave."""
        self.waves.update((self.read(atom), wave) for atom in eqn.outvars)

    def equation(self, eqn: core.JaxprEqn, *, pure: bool) -> bool:
        """Number the outputs; whether the same equation came before."""
        key = (
            eqn.primitive,
            tuple(sorted(eqn.params.items(), key=lambda item: item[0])),
            tuple(map(self.read, eqn.invars)),
        )
        try:
            known = self.seen.get(key) if pure else None
        except TypeError:  # a parameter that cannot be hashed
            pure, known = False, None
        outputs = known or [next(self.fresh) for _ in eqn.outvars]
        if pure:
            self.seen[key] = outputs
        self.numbers.update(zip(eqn.outvars, outputs, strict=True))
        if known is None:
            self.reach(eqn, self.wave(eqn.invars))
        return known is not None


class _Walk(NamedTuple):
    """A walk over a program in its own order, collecting rows."""

    rows: list[Row]
    workers: tuple[str, ...]
    shards: int = 1

    def jaxpr(self, jaxpr, values: _Values, sizes, guard, count) -> None:
        for eqn in jaxpr.eqns:
            self.equation(eqn, values, sizes, guard, count)

    def equation(self, eqn, values: _Values, sizes, guard, count) -> None:
        name = eqn.primitive.name
        kind = _collective(eqn)
        programs = list(programs_in(eqn.params))
        if kind is not None:
            repeats = values.equation(eqn, pure=True)
            wave = values.wave(eqn.invars)
            values.reach(eqn, wave + 1)
            self.collective(eqn, kind, repeats, wave, sizes, guard, count)
            return
        if name in INLINED and len(programs) == 1:
            inner = opened(programs[0])[0]
            inputs = map(values.read, eqn.invars)
            values.numbers.update(zip(inner.invars, inputs, strict=True))
            self.jaxpr(inner, values, sizes, guard, count)
            outputs = [values.read(atom) for atom in inner.outvars]
            values.numbers.update(zip(eqn.outvars, outputs, strict=True))
            return
        # The only effect of a pure equation is to name an axis.
        named = all(type(e).__name__ == "NamedAxisEffect" for e in eqn.effects)
        values.equation(eqn, pure=named and not programs)
        wave, before = values.wave(eqn.invars), len(self.rows)
        if name == "cond":
            # Numbered from 1 in order of appearance; those that are silent, not at all.
            taken = [c for row in self.rows for c, _ in row.guard]
            mine = 1 + max(taken + [c for c, _ in guard], default=0)
            for i, branch in enumerate(eqn.params["branches"]):
                inside = (*guard, (mine, i))
                self.jaxpr(opened(branch)[0], _Values(wave), sizes, inside, count)
        elif name == "scan":
            times = None if count is None else count * int(eqn.params["length"])
            body = opened(eqn.params["jaxpr"])[0]
            self.jaxpr(body, _Values(wave), sizes, guard, times)
        elif name == "while":
            for part in ("cond_jaxpr", "body_jaxpr"):
                body = opened(eqn.params[part])[0]
                self.jaxpr(body, _Values(wave), sizes, guard, None)
        elif name in ONCE and len(programs) == 1:
            inside = sizes | dict(getattr(eqn.params.get("mesh"), "shape", {}))
            manual = set(eqn.params.get("newly_manual_axes", ())) - set(self.workers)
            shards = self.shards * math.prod(inside[name] for name in manual)
            walk = self._replace(shards=shards)  # into the same list
            walk.jaxpr(opened(programs[0])[0], _Values(wave), inside, guard, count)
        else:
            for program in programs:
                self.refuse(name, opened(program)[0], sizes)
        if inner := self.rows[before:]:
            values.reach(eqn, 1 + max(row.wave for row in inner))

    def collective(self, eqn, kind, repeats, wave, sizes, guard, count) -> None:
        members = {n: sizes[n] if n in sizes else lax.axis_size(n) for n in _axes(eqn)}
        # An axis of one is not crossed; mesh order, so that readers agree.
        axes = [n for n in members if members[n] > 1] or list(members)
        order = list(sizes)
        axes.sort(key=lambda n: order.index(n) if n in sizes else len(order))
        groups = eqn.params.get("axis_index_groups")
        size = len(groups[0]) if groups else math.prod(members.values())
        moves = eqn.params.get("perm")
        if size == 1 or (moves is not None and all(a == b for a, b in moves)):
            count = 0
        operands = eqn.invars if kind == "all_reduce" else eqn.invars[:1]
        for operand in operands:
            aval = operand.aval
            self.rows.append(
                Row(
                    collective=kind,
                    axis=axes[0] if len(axes) == 1 else tuple(axes),
                    dtype=str(aval.dtype),
                    bytes=math.prod(aval.shape) * aval.dtype.itemsize,
                    count=count,
                    guard=guard,
                    repeats=repeats,
                    wave=wave,
                    shards=self.shards,
                )
            )

    def refuse(self, name: str, jaxpr, sizes) -> None:
        inner = _Walk([], ())
        inner.jaxpr(jaxpr, _Values(), sizes, (), 1)
        if inner.rows:
            row = inner.rows[0]
            raise ValueError(
                f"primitive {name!r} runs a program that communicates "
                f"({row.collective} over {row.axis!r}), and how often it does so is "
                "not known: take the collective out of it, or use scan, cond, "
                "while_loop, jit or a custom derivative."
            )


def _axes(eqn: core.JaxprEqn) -> tuple[Any, ...]:
    """The axes an equation names; integers are positions, of reductions or batching."""
    found = eqn.params.get("axes", eqn.params.get("axis_name"))
    found = found if isinstance(found, tuple | list) else (found,)
    return tuple(a for a in found if not isinstance(a, int | np.integer | None))


def _collective(eqn: core.JaxprEqn) -> str | None:
    """What the equation is called here if it communicates."""
    name = eqn.primitive.name
    if (
        not _axes(eqn)
        or name in SILENT
        or name.endswith("_done")
        or list(programs_in(eqn.params))
    ):
        return None
    # The same act under another typing rule, or its start: unreduced_psum,
    # psum_invariant, all_gather_reduced, ppermute_start.
    plain = name.removeprefix("unreduced_")
    for ending in ("_start", "_invariant", "_reduced"):
        plain = plain.removesuffix(ending)
    if plain not in COLLECTIVES:
        raise ValueError(
            f"primitive {name!r} names the axes {_axes(eqn)} and the ledger does not "
            "know whether it communicates."
        )
    return COLLECTIVES[plain]


def programs_in(params: Any) -> Iterator[Any]:
    """The jaxprs anywhere in an equation's parameters."""
    if isinstance(params, core.Jaxpr | core.ClosedJaxpr):
        yield params
    elif isinstance(params, Mapping):
        for value in params.values():
            yield from programs_in(value)
    elif isinstance(params, tuple | list):
        for value in params:
            yield from programs_in(value)
