"""What a compiled program sends, read from its optimized HLO.

A jaxpr says what a method asks for. The compiler may combine collectives, gather a
sharded leaf before sending it, or hand a transfer between TPU slices to the host
network; only the compiled text shows that. Bytes are those of the operands on one
device. For a program in which a worker is one device they equal the jaxpr's, after
what ``ledger`` lists is undone.

Read here: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute and
collective-broadcast, plain or as ``-start``/``-done`` pairs or inside ``async-start``,
and ``send`` between slices. Devices are grouped in one of three spellings, and a group
is named after the mesh axes along which its members differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .hlo_text import (
    Computation,
    arrays,
    called,
    parse,
    replica_groups,
    source_target_pairs,
    trip_count,
)
from .ledger import Axis, Row, Traffic

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
BETWEEN_SLICES = {
    "ALL_REDUCE": "all_reduce",
    "ALL_GATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALL_TO_ALL": "all_to_all",
    "ONE_TO_ONE": "permute",
}


def compiled_traffic(compiled: Any, *, mesh: Mesh | AbstractMesh) -> Traffic:
    """What one execution of a compiled program sends, per device.

    Args:
        compiled: ``jax.jit(f).lower(...).compile()``, or its ``as_text()``.
        mesh: the mesh it was compiled for. Partition ``i`` is ``mesh.devices.flat[i]``;
            a program per TPU slice numbers the devices of its slice.

    The rows are those of ``traffic``, with two differences. A loop has the trip count
    the compiler found, or that follows from its condition; None where there is
    neither. A group of one member spans no axis: ``axis`` is ``()``, ``count`` 0.

    Raises:
        ValueError: a program for another number of devices, groups in an unknown
            spelling.

    Example:
        >>> text = '''HloModule step, num_partitions=8
        ...
        ... ENTRY %main (x: bf16[5]) -> bf16[5] {
        ...   %x = bf16[5]{0} parameter(0)
        ...   ROOT %y = bf16[5]{0} all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0)
        ... }'''
        >>> mesh = AbstractMesh((2, 4), ("workers", "fsdp"))
        >>> compiled_traffic(text, mesh=mesh).census()
        {('all_reduce', 'workers', 'bfloat16'): 10}
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    reader = Reader.of(text, mesh)
    reader.walk(reader.entry, (), 1)
    return Traffic(tuple(reader.rows))


def is_collective(opcode: str) -> bool:
    """Whether an instruction is a collective, or starts one."""
    return opcode.removesuffix("-start") in KINDS


class Reader(NamedTuple):
    """A walk over a module from its entry, collecting rows."""

    computations: dict[str, Computation]
    entry: str
    mesh: Any  # Mesh | AbstractMesh
    positions: np.ndarray
    rows: list[Row]
    carried: set[str]  # collectives of which a fusion before had a part

    @classmethod
    def of(cls, text: str, mesh: Mesh | AbstractMesh) -> Reader:
        """A walk that has not begun."""
        return cls(*parse(text), mesh, _positions(text, mesh), [], set())

    def walk(self, name: str, guard: tuple, count: int | None) -> None:
        """What a computation sends that runs ``count`` times."""
        here = self.computations[name]
        for found in here.values():
            self.instruction(here, found, guard, count)

    def instruction(self, here, found, guard, count) -> None:
        """What one of its instructions sends, or what it calls."""
        opcode = found.opcode
        if is_collective(opcode):
            self._collective(here, found, guard, count)
        elif opcode == "send":
            self._send(here, found, guard, count)
        elif opcode == "while":
            trips = trip_count(self.computations, here, found)
            known = None if trips is None or count is None else trips * count
            for part in ("condition", "body"):
                # The condition is asked once more than the body runs.
                more = (count or 0) if part == "condition" else 0
                times = None if known is None else known + more
                self.walk(called(found, part)[0], guard, times)
        elif opcode == "conditional":
            branches = called(found, "branch_computations") or [
                *called(found, "false_computation"),
                *called(found, "true_computation"),
            ]
            taken = [c for row in self.rows for c, _ in row.guard]
            mine = 1 + max(taken + [c for c, _ in guard], default=0)
            for i, branch in enumerate(branches):
                self.walk(branch, (*guard, (mine, i)), count)
        elif not opcode.endswith(("-done", "-update")):
            for key in ("calls", "to_apply", "called_computations"):
                for target in called(found, key):
                    self.walk(target, guard, count)

    def _collective(self, here, found, guard, count) -> None:
        # TPU fusions carry a collective along: its start, its end and what is computed
        # in between each hold it once, as one link of a chain.
        channel = re.search(r"channel_id=(\d+)", found.attributes)
        if channel and "chain_id=" in found.attributes:
            if channel[1] in self.carried:
                return
            self.carried.add(channel[1])
        kind = KINDS[found.opcode.removesuffix("-start")]
        if kind == "permute":
            groups = source_target_pairs(found.attributes)
        else:
            groups = replica_groups(found.attributes, len(self.positions))
        axis = self._axis([self.positions[group] for group in groups])
        sent = [a for name in found.operands for a in arrays(here[name].shape)]
        if found.opcode.startswith("ragged"):
            sent = sent[:1]  # the others are its result and its indices
        elif kind == "all_to_all":  # several operands are the pieces of one
            sent = [(sent[0][0], sum(size for _, size in sent))]
        wave = len(self.rows)  # what the compiler left apart travels apart
        for dtype, size in sent:
            times = count if axis else 0
            self.rows.append(Row(kind, axis, dtype, size, times, guard, wave=wave))

    def _send(self, here, found, guard, count) -> None:
        text = found.attributes
        transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', text)
        if transfer is None and "is_host_transfer=true" in text:
            return  # to this device's own host
        kind = BETWEEN_SLICES.get(transfer[1], "send") if transfer else "permute"
        pairs = re.findall(r"\{(\d+)->(\d+)\}", text)
        listed = source_target_pairs(text)
        if pairs:
            place = {d.id: i for i, d in enumerate(self.mesh.devices.flat)}
            axis = self._axis([[place[int(a)], place[int(b)]] for a, b in pairs])
        elif listed:
            axis = self._axis([self.positions[pair] for pair in listed])
        else:
            axis = self._across_slices()
        wave = len(self.rows)
        for dtype, size in arrays(here[found.operands[0]].shape):
            self.rows.append(Row(kind, axis, dtype, size, count, guard, wave=wave))

    def _axis(self, groups: Sequence[Any]) -> Axis:
        """The mesh axes along which members of a group differ."""
        shape = tuple(self.mesh.shape.values())
        spanned = [False] * len(shape)
        for group in groups:
            for i, along in enumerate(np.unravel_index(np.asarray(group), shape)):
                spanned[i] |= bool((along != along[0]).any())
        names = tuple(n for n, s in zip(self.mesh.shape, spanned, strict=True) if s)
        return names[0] if len(names) == 1 else names

    def _across_slices(self) -> Axis:
        """The mesh axes that lead from one TPU slice to another."""
        if isinstance(self.mesh, AbstractMesh):
            raise ValueError(
                "the program sends between TPU slices: give the mesh of the devices it "
                "is compiled for, which knows the slices."
            )
        look = np.vectorize(lambda device: getattr(device, "slice_index", 0))
        slices = look(self.mesh.devices)
        names = tuple(
            name
            for i, name in enumerate(self.mesh.axis_names)
            if (slices != slices.take([0], axis=i)).any()
        )
        return names[0] if len(names) == 1 else names


def _positions(text: str, mesh: Any) -> np.ndarray:
    """The place in the mesh, row-major, of each partition the program numbers."""
    head = text[: text.find("\n")]
    count = math.prod(
        int(found[1]) if (found := re.search(rf"{key}=(\d+)", head)) else 1
        for key in ("num_partitions", "replica_count")
    )
    if count == mesh.size:
        return np.arange(count)
    if not isinstance(mesh, AbstractMesh):
        slices = [getattr(device, "slice_index", None) for device in mesh.devices.flat]
        mine = np.flatnonzero(np.array([s == slices[0] for s in slices]))
        if len(mine) == count:
            return mine
    raise ValueError(
        f"the program is compiled for {count} devices and the mesh has {mesh.size}."
    )
