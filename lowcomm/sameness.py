"""Whether all processes are about to run the same program.

Programs that differ wait for each other forever, or go on with other numbers. What is
compared is what they compute: primitives, types, shapes, axes and constants, equation
by equation. Names, messages and what is called back on the host may be a process's own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from .agreement import Disagreement, alike, digest, gathered, processes_of
from .rows import programs_in


def check_program(
    program: core.ClosedJaxpr, *, step: int, arrays: Mapping[str, Any], mesh: Any
) -> None:
    """Raise on all processes of a mesh unless all are about to do the same.

    Args:
        program: what is traced.
        step: the number of the step that it is for.
        arrays: what it will be called with, of which types and shapes are compared.
        mesh: whose devices it runs on.

    Raises:
        Disagreement: which processes differ from the first one and in what.
    """
    among = processes_of(mesh)
    shapes = {
        f"{name}{jax.tree_util.keystr(path)}": str(jax.typeof(x))
        for name, tree in arrays.items()
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    alike({"step": step, **_places(mesh), **shapes}, among)
    lines = list(equations(program))
    told = gathered(digest("\n".join(lines)), among)
    if len(set(told)) > 1:
        texts = [text.split("\n") for text in gathered("\n".join(lines), among)]
        first, other = next((0, i) for i, said in enumerate(told) if said != told[0])
        mine, theirs = _apart(texts[first], texts[other])
        number = among or range(len(texts))
        raise Disagreement(
            f"the processes are about to run other programs at step {step}: where "
            f"process {number[first]} has `{mine}`, process {number[other]} has "
            f"`{theirs}`. Build it from the same numbers on all of them."
        )


def check_start(params: Any, about: Mapping[str, Any], mesh: Any) -> None:
    """Raise on all processes of a mesh unless they start alike.

    Compared are ``about`` and the parameters' values, as far as a process has them.
    """
    among = processes_of(mesh)
    if among is None or len(among) == 1:
        return
    sums = {
        f"params{jax.tree_util.keystr(path)}": zlib.crc32(np.asarray(x).tobytes())
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if _is_here(x)
    }
    alike({**about, **_places(mesh), **sums}, among)


def equations(program: core.ClosedJaxpr) -> Iterator[str]:
    """What a program computes, a line an equation, with those inside after it.

    Example:
        >>> list(equations(jax.make_jaxpr(lambda x: 2.5 * x)(jnp.ones(3))))
        ['mul 2.5:float32[] float32[3] -> float32[3]']
    """
    for x in program.consts:
        if jnp.size(x) == 1 and _is_here(x):
            yield f"constant {np.asarray(x).tolist()}"
    yield from _lines(program.jaxpr)


def _lines(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        told = ((key, _plain(key, x)) for key, x in sorted(eqn.params.items()))
        params = [f"{key}={text}" for key, text in told if text is not None]
        ins, outs = (" ".join(map(_atom, some)) for some in (eqn.invars, eqn.outvars))
        yield " ".join([eqn.primitive.name, *params, ins, "->", outs])
        for inner in programs_in(eqn.params):
            closed = isinstance(inner, core.ClosedJaxpr)
            yield from equations(inner) if closed else _lines(inner)


def _atom(x: Any) -> str:
    kind = f"{x.aval.dtype}{list(x.aval.shape)}" if hasattr(x.aval, "dtype") else "()"
    if isinstance(x, core.Literal):
        return f"{np.asarray(x.val).tolist()}:{kind}"
    return kind


def _plain(key: str, x: Any) -> str | None:
    """A parameter that numbers depend on, or None: names are a process's own."""
    if isinstance(x, str):
        return x if key.startswith(("axis", "axes")) else None
    if isinstance(x, bool | int | float | np.number):
        return repr(x)
    if isinstance(x, tuple | list):
        parts = [_plain(key, one) for one in x]
        return None if None in parts else f"({' '.join(map(str, parts))})"
    return None


def _apart(mine: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """The first lines that differ."""
    for pair in zip(mine, other, strict=False):
        if pair[0] != pair[1]:
            return pair
    n = min(len(mine), len(other))
    return ([*mine, "nothing more"][n], [*other, "nothing more"][n])


def _places(mesh: Any) -> dict[str, Any]:
    if not isinstance(mesh, Mesh):
        return {}
    devices = [d.id for d in mesh.devices.flat]
    return {"axes of the mesh": dict(mesh.shape), "devices of the mesh": devices}


def _is_here(x: Any) -> bool:
    """Whether this process has the values of an array, which are numbers."""
    if isinstance(x, jax.Array):
        numbers = not jnp.issubdtype(x.dtype, jax.dtypes.extended)
        return numbers and x.is_fully_addressable
    return True
