"""What a compiled program computes while it sends, read from its schedule.

A scheduled module lists its instructions in the order in which they are issued, and a
transfer that need not be waited for is two of them, its start and its end. What stands
between the two runs meanwhile, and cannot depend on the transfer. Ends are told by

    all-reduce-start … all-reduce-done     GPUs and inside a TPU slice, of any kind
    send, recv … send-done, recv-done      between TPU slices, through the hosts
    AsyncCollectiveStart … Done            TPU fusions that carry a collective along

Whether the link is as fast as what hides it is no matter of the program: multiply by
seconds from ``network`` for that.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh

from .hlo import Reader, is_collective
from .hlo_text import Computation, Instruction, called
from .rows import Row

_PRODUCTS = ("dot", "convolution", "ragged-dot", "scaled-dot")
# Libraries that a GPU program calls for products.
_LIBRARIES = re.compile(r'custom_call_target="[^"]*(gemm|matmul|conv|cudnn|dot)', re.I)
_NAMED = r'{}="?([\w.\-]+)'


class Transfer(NamedTuple):
    """One collective of a scheduled program, with what runs while it is on its way."""

    name: str  # of the instruction that starts it
    row: Row  # what it sends; its count and guard are those of one run of its block
    loops: tuple[str, ...]  # the ``while`` loops between its start and its end
    products: int  # other instructions between that multiply matrices

    @property
    def overlapped(self) -> bool:
        """Whether anything worth the wait runs meanwhile."""
        return bool(self.loops) or self.products > 0


def scheduled(compiled: Any, *, mesh: Mesh | AbstractMesh) -> tuple[Transfer, ...]:
    """The collectives of a scheduled program, block by block in program order.

    Args:
        compiled: ``jax.jit(f).lower(...).compile()``, or its ``as_text()``.
        mesh: as for ``compiled_traffic``.

    One whose result is waited for at once has nothing between its start and its end.
    Collectives within a group of one device are left out.

    Raises:
        ValueError: the text is no scheduled module, whose order means nothing.

    Example:
        The exchange is under way while the loop runs.

        >>> text = '''HloModule round, is_scheduled=true, num_partitions=2
        ...
        ... %again (c: (s32[], f32[5])) -> (s32[], f32[5]) {
        ...   ROOT %c = (s32[], f32[5]) parameter(0)
        ... }
        ...
        ... %more (c: (s32[], f32[5])) -> pred[] {
        ...   %c = (s32[], f32[5]) parameter(0)
        ...   ROOT %no = pred[] constant(false)
        ... }
        ...
        ... ENTRY %main (x: f32[5], y: (s32[], f32[5])) -> f32[5] {
        ...   %x = f32[5] parameter(0)
        ...   %y = (s32[], f32[5]) parameter(1)
        ...   %begin = f32[5] all-reduce-start(%x), replica_groups={{0,1}}
        ...   %steps = (s32[], f32[5]) while(%y), condition=%more, body=%again
        ...   ROOT %end = f32[5] all-reduce-done(%begin)
        ... }'''
        >>> (sent,) = scheduled(text, mesh=AbstractMesh((2,), ("workers",)))
        >>> sent.row.bytes, sent.loops, sent.overlapped
        (20, ('steps',), True)
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    if "is_scheduled=true" not in text[: text.find("\n")]:
        raise ValueError(
            "the order of an unscheduled module means nothing: give the program that "
            "jax.jit(f).lower(...).compile() returns."
        )
    reader = Reader.of(text, mesh)
    found: list[Transfer] = []
    for name in _blocks(reader.computations, reader.entry):
        found += _transfers(reader, reader.computations[name])
    return tuple(found)


def _blocks(computations: dict[str, Computation], entry: str) -> list[str]:
    """The computations whose instructions are issued one by one, the entry first."""
    order, waiting = [], [entry]
    while waiting:
        name = waiting.pop(0)
        if name in order:
            continue
        order.append(name)
        for found in computations[name].values():
            parts = {
                "while": ("body",),
                "conditional": (
                    "branch_computations",
                    "false_computation",
                    "true_computation",
                ),
                "call": ("to_apply",),
            }.get(found.opcode, ())
            waiting += [target for part in parts for target in called(found, part)]
    return order


def _transfers(reader: Reader, block: Computation) -> list[Transfer]:
    order = list(block.values())
    ends = _ends(reader.computations, block)
    transfers = []
    for i, found in enumerate(order):
        rows = _rows(reader, block, found)
        between = order[i + 1 : ends.get(found.name, i)]
        loops = tuple(x.name for x in between if x.opcode == "while")
        products = sum(
            x.opcode != "while" and _multiplies(reader.computations, x) for x in between
        )
        transfers += [Transfer(found.name, row, loops, products) for row in rows]
    return transfers


def _rows(reader: Reader, block: Computation, found: Instruction) -> list[Row]:
    """What an instruction that starts a transfer sends."""
    if found.opcode == "fusion":
        if _chain(reader.computations, found) is None:
            return []
        (inside,) = called(found, "calls")
        if _holds(reader.computations[inside], "AsyncCollectiveStart") is None:
            return []
    elif not (is_collective(found.opcode) or found.opcode in ("send", "async-start")):
        return []
    fresh = Reader(*reader[:-2], [], set())
    fresh.instruction(block, found, (), 1)
    return [row for row in fresh.rows if row.count]


def _ends(computations: dict[str, Computation], block: Computation) -> dict[str, int]:
    """Where what each instruction has started is waited for."""
    ends: dict[str, int] = {}
    received: dict[str, str] = {}  # recv -> where it meets its send
    sends: dict[str, str] = {}  # and the other way
    chains: dict[str, str] = {}  # channel -> the fusion that starts it
    for i, found in enumerate(block.values()):
        meeting = _attribute(found, "_xla_host_transfer_rendezvous")
        if found.opcode == "recv" and meeting:
            received[found.name] = meeting
        elif found.opcode == "send" and meeting:
            sends[meeting] = found.name
        elif found.opcode == "fusion":
            chain = _chain(computations, found)
            if chain is None:
                continue
            (inside,) = called(found, "calls")
            if _holds(computations[inside], "AsyncCollectiveStart") is not None:
                chains[chain] = found.name
            elif _holds(computations[inside], "AsyncCollectiveDone") is not None:
                ends[chains.get(chain, found.name)] = i
        elif found.opcode.endswith("-done") and found.operands:
            begun = block[found.operands[0]]
            while begun.opcode.endswith("-update"):
                begun = block[begun.operands[0]]
            ends[begun.name] = i
    # What a slice hears comes by the recv that meets its send.
    for heard, meeting in received.items():
        if heard in ends and meeting in sends:
            ends[sends[meeting]] = ends[heard]
    return ends


def _chain(computations: dict[str, Computation], found: Instruction) -> str | None:
    """The asynchronous collective of which a TPU fusion carries a part."""
    for target in called(found, "calls"):
        for inside in computations[target].values():
            if is_collective(inside.opcode) and _attribute(inside, "chain_id"):
                return _attribute(inside, "channel_id")
    return None


def _attribute(found: Instruction, name: str) -> str | None:
    value = re.search(_NAMED.format(name), found.attributes)
    return value[1] if value else None


def _holds(block: Computation, target: str) -> Instruction | None:
    """The call of a custom target in a computation."""
    calls = (x for x in block.values() if x.opcode == "custom-call")
    return next((x for x in calls if f'"{target}"' in x.attributes), None)


def _multiplies(computations: dict[str, Computation], found: Instruction) -> bool:
    """Whether an instruction, or what it calls, multiplies matrices."""
    if found.opcode in _PRODUCTS:
        return True
    if found.opcode == "custom-call":
        return bool(_LIBRARIES.search(found.attributes))
    inside = [
        target for part in ("calls", "to_apply") for target in called(found, part)
    ]
    return any(
        _multiplies(computations, x)
        for target in inside
        for x in computations[target].values()
    )
