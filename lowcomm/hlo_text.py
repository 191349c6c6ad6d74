"""The grammar of HLO text: computations, shapes, device groups, trip counts.

Only what a traffic reader needs. The text is XLA's own printing of an optimized
module, which differs a little between its versions and backends: operands with or
without their types, three spellings of device groups, trip counts in a backend's
configuration or nowhere but in the loop's condition.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

_FAMILIES = {"s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}


class Instruction(NamedTuple):
    """One line of HLO."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    literal: str  # what stands between the parentheses


Computation = dict[str, Instruction]  # in program order; the last one is its result


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a module by name, and the name of its entry."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and " = " not in line.split("(")[0]:
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            found = _instruction(line)
            current.pop(found.name, None)
            current[found.name] = found
    return computations, entry


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """The groups of a collective, from any of XLA's three spellings.

    Example:
        >>> replica_groups("replica_groups={{0,2},{1,3}}", 4)
        [[0, 2], [1, 3]]
        >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
        [[0, 2], [1, 3]]
        >>> replica_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}", 4)
        [[0, 2], [1, 3]]
    """
    value = re.search(r"replica_groups=(.*)", attributes)
    value = value[1] if value else "{}"
    if re.match(r"\{\s*\}", value):  # everybody
        return [list(range(devices))]
    if value.startswith("{"):
        listed = value[: value.index("}}")]
        return [_integers(group) for group in re.findall(r"\{([\d, ]+)", listed)]
    iota = re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", value)
    if iota:
        return _iota(iota[2]).reshape(_integers(iota[1])).tolist()
    form = re.match(
        r"@?mesh[\[<](?P<axes>[^\]>]*)[\]>]"
        r"(?:, ?device_ids=\((?P<ids>\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))? ?"
        r"\{(?P<along>[^}]*)\}",
        value,
    )
    if form is None:
        raise ValueError(f"replica groups in an unknown spelling: {value[:120]}")
    return _mesh_groups(form["axes"], form["ids"], form["along"])


def source_target_pairs(attributes: str) -> list[list[int]]:
    """Who sends to whom in a permutation, or in a send between named devices."""
    found = re.search(r'source_target_pairs="?\{((?:\{\d+,\d+\},?)*)\}', attributes)
    numbers = _integers(found[1]) if found else []
    return np.array(numbers, int).reshape(-1, 2).tolist()


def _mesh_groups(axes: str, ids: str | None, along: str) -> list[list[int]]:
    """Groups along named axes of a mesh, or along parts ``name:(before)size`` of them.

    A part of an axis of n splits its positions as (before, size, n / (before·size)).
    """
    sizes = {
        name.strip("'\" "): int(size)
        for name, size in (axis.rsplit("=", 1) for axis in axes.split(","))
    }
    parts: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    order: list[tuple[str, int]] = []
    for reference in along.split(","):
        name, _, part = reference.strip().partition(":(")
        name = name.strip("'\" ")
        before, size = _integers(part.replace(")", ",")) if part else (1, sizes[name])
        parts[name].append((before, size))
        order.append((name, before))
    shape: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        done = 1
        for before, members in sorted(parts[name]):
            place[name, before] = len(shape) + 1
            shape += [before // done, members]
            done = before * members
        shape.append(size // done)
    total = math.prod(sizes.values())
    if ids is None:
        devices = np.arange(total)
    else:
        devices = _iota(ids) if ids.startswith("[") else np.array(_integers(ids))
    inside = [place[key] for key in order]
    outside = [i for i in range(len(shape)) if i not in inside]
    members = math.prod(shape[i] for i in inside)
    grid = devices.reshape(shape).transpose(outside + inside)
    return grid.reshape(-1, members).tolist()


def _iota(text: str) -> np.ndarray:
    """``[4,2]T(1,0)``: 0, 1, 2 … in this shape, transposed, flattened."""
    shape, _, order = text.partition("T")
    grid = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return (grid.transpose(_integers(order)) if order else grid).reshape(-1)


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _instruction(line: str) -> Instruction:
    name, rest = line.strip().removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest, 0) + 1 if rest[0] == "(" else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    literal = re.sub(r"/\*.*?\*/", "", rest[start + 1 : end])
    operands = tuple(part.split(" ")[-1].lstrip("%") for part in _split(literal))
    return Instruction(
        name.lstrip("%"), shape, rest[:start], operands, rest[end + 1 :], literal
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis opened at ``start`` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses in HLO: {text[:120]}")


def _split(text: str) -> Iterator[str]:
    """The parts between the outermost commas."""
    depth = start = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    if text[start:].strip():
        yield text[start:].strip()


def arrays(shape: str) -> list[tuple[str, int]]:
    """The dtype and bytes of each array in a shape."""
    found = []
    for kind, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape):
        if kind in ("token", "opaque"):
            continue
        parts = re.fullmatch(r"([a-z]+)(\d*)(\w*)", kind)
        assert parts is not None
        family, bits, detail = parts.groups()
        dtype = "bool" if kind == "pred" else _FAMILIES.get(family, family) + bits
        # Below a byte one element takes one, as in a numpy array of that dtype.
        size = max(1, int(bits or 8) // 8)
        name = f"{dtype}_{detail}" if detail else dtype
        found.append((name, size * math.prod(_integers(dims))))
    return found


def called(found: Instruction, key: str) -> list[str]:
    """The computations an attribute names."""
    value = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", found.attributes)
    return re.findall(r"[\w.\-]+", value[1]) if value else []


def trip_count(
    computations: dict[str, Computation], here: Computation, loop: Instruction
) -> int | None:
    """How often the body of a ``while`` in ``here`` runs, None if it is not written.

    The GPU and CPU backends write it down. Elsewhere it follows from a condition
    ``i < limit`` where i starts at a constant and the body adds a constant to it.
    """
    written = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if written:
        return int(written[1])
    condition, body = (
        computations[called(loop, part)[0]] for part in ("condition", "body")
    )
    look = lambda where, name, given: _symbolic(computations, where, name, given)
    test = look(condition, next(reversed(condition)), [_CARRY])
    if not isinstance(test, tuple) or test[0] not in _ENDS:
        return None
    direction, left, right = test
    if not _is_carry(left):
        direction, left, right = _MIRROR[direction], right, left
    first = here[loop.operands[0]]
    last = body[next(reversed(body))]
    if not _is_carry(left) or {first.opcode, last.opcode} != {"tuple"}:
        return None
    start = lambda i: look(here, first.operands[i], [])
    after = lambda i: look(body, last.operands[i], [_CARRY])
    if _is_carry(right) and after(right[1]) == right:  # the limit rides along
        right = start(right[1])
    begin, turn = start(left[1]), after(left[1])
    if not isinstance(turn, tuple) or turn[0] != "add" or left not in turn[1:]:
        return None
    step = turn[2] if turn[1] == left else turn[1]
    if not all(isinstance(n, int) for n in (begin, right, step)) or not step:
        return None
    return len(range(begin, right + _ENDS[direction], step))


_CARRY = "carry"  # a loop's whole state
_ENDS = {"LT": 0, "LE": 1, "GT": 0, "GE": -1}
_MIRROR = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
_COPIES = ("copy", "bitcast", "convert", "reshape")


def _is_carry(value: Any) -> bool:
    return isinstance(value, tuple) and value[0] == _CARRY


def _symbolic(computations, here: Computation, name: str, given: Sequence[Any]) -> Any:
    """An integer, ("carry", i), ("add", a, b), a comparison, or None for the rest."""
    found = here[name]
    inside = lambda k: _symbolic(computations, here, found.operands[k], given)
    if found.opcode == "constant":
        return int(found.literal) if re.fullmatch(r"-?\d+", found.literal) else None
    if found.opcode == "parameter":
        number = int(found.literal)
        return given[number] if number < len(given) else None
    if found.opcode == "get-tuple-element":
        index = re.search(r"index=(\d+)", found.attributes)
        whole = inside(0)
        return (_CARRY, int(index[1])) if whole == _CARRY and index else None
    if found.opcode in _COPIES:
        return inside(0)
    if found.opcode == "add":
        return ("add", inside(0), inside(1))
    if found.opcode == "compare":
        direction = re.search(r"direction=(\w+)", found.attributes)
        return (direction[1], inside(0), inside(1)) if direction else None
    if found.opcode in ("fusion", "call"):
        (target,) = called(found, "calls") or called(found, "to_apply")
        body = computations[target]
        values = [inside(k) for k in range(len(found.operands))]
        return _symbolic(computations, body, next(reversed(body)), values)
    return None
