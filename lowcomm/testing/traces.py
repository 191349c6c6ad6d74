"""What a trace shows: whether it is the same every time, and random numbers that are.

Nothing but its arguments may decide what a function's program is. A key that is a
constant of the program, on the other hand, draws the same numbers at every step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..ledger import trace
from ..rows import opened, scan_parts
from .equality import Broken, plain

TIMES = 12

DRAWS = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}


def same_each_time(fn: Callable, args: tuple, sizes: dict[str, int]) -> Any:
    """The program of one worker's function; raise unless all its traces are equal."""
    found = []
    for _ in range(TIMES):
        # JAX remembers functions that it has traced, so it is handed another one.
        again = lambda *args: fn(*args)
        jaxpr, constants, *_ = trace(again, args, axis_env=list(sizes.items()))
        text = re.sub(r"0x[0-9a-f]+", "", str(jaxpr))
        found.append((text, [plain(c).tobytes() for c in constants]))
        if found[-1] != found[0]:
            raise Broken(
                f"its first trace and its {len(found)}th differ: something outside its "
                "arguments, such as a counter or random generator of Python's, has "
                "changed in between"
            )
    return jaxpr


def constant_draws(program: Any) -> str | None:
    """The primitive that draws from constants, "" if none does, None without draws.

    A key is no constant where any input of the program bears on it. Where it is not
    known which inputs of a sub-program are which, all of them are taken to bear.
    """
    jaxpr, _ = opened(program)
    found: list[str] = []
    _walk(jaxpr, [True] * len(jaxpr.invars), found)
    stale = [name for name in found if name]
    return (stale[0] if stale else "") if found else None


def _walk(jaxpr: Any, inputs: Sequence[bool], found: list[str]) -> list[bool]:
    """Which outputs the inputs bear on, given which inputs are no constants."""
    live = {v for v, bears in zip(jaxpr.invars, inputs, strict=True) if bears}
    bears = lambda atom: not hasattr(atom, "val") and atom in live
    for eqn in jaxpr.eqns:
        ins = [bears(atom) for atom in eqn.invars]
        if eqn.primitive.name in DRAWS:
            found.append("" if any(ins) else eqn.primitive.name)
        outs = _inside(eqn, ins, found)
        live |= {v for v, out in zip(eqn.outvars, outs, strict=True) if out}
    return [bears(atom) for atom in jaxpr.outvars]


def _inside(eqn: Any, ins: list[bool], found: list[str]) -> list[bool]:
    bodies = [
        opened(part)[0]
        for value in eqn.params.values()
        for part in (value if isinstance(value, tuple | list) else (value,))
        if hasattr(opened(part)[0], "eqns")
    ]
    name = eqn.primitive.name
    if name == "cond":
        outs = [_walk(body, ins[1:], found) for body in bodies]
        return [any(branch) for branch in zip(*outs, strict=True)]
    if name == "while":
        body = opened(eqn.params["body_jaxpr"])[0]
        return _loop(body, ins[-len(body.invars) :], len(eqn.outvars), found)
    if name == "scan":
        constants, carries = scan_parts(eqn)
        return _loop(opened(eqn.params["jaxpr"])[0], ins, carries, found, constants)
    if len(bodies) == 1 and len(bodies[0].invars) == len(ins):
        outs = _walk(bodies[0], ins, found)
        if len(outs) == len(eqn.outvars):
            return outs
    return [any(ins)] * len(eqn.outvars)


def _loop(
    body: Any,
    ins: list[bool],
    carries: int,
    found: list[str],
    constants: int | None = None,
) -> list[bool]:
    """A body run until what its inputs bear on grows no more."""
    # Of a while, the carries come last; of a scan, after the constants.
    at = len(ins) - carries if constants is None else constants
    ins = list(ins)
    while True:
        seen: list[str] = []
        outs = _walk(body, ins, seen)
        grown = [a or b for a, b in zip(ins[at : at + carries], outs, strict=False)]
        if grown == ins[at : at + carries]:
            found += seen
            return outs
        ins[at : at + carries] = grown
