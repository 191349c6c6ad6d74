"""The chips and topologies that can be compiled for, and what each chip can hold."""

from __future__ import annotations

import difflib
import math
from typing import Literal, NamedTuple

_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16"),
)


class Chip(NamedTuple):
    """One kind of chip.

    Attributes:
        platform: whose compiler it needs.
        memory: bytes of high-bandwidth memory of a chip.
        devices: how many JAX devices the compiler makes of a chip, which share it.
        topologies: of a slice, chips along each side; hosts x GPUs for a GPU cluster.
        source: where the size of the memory is from.
    """

    platform: Literal["tpu", "cuda"]
    memory: int
    devices: int
    topologies: tuple[str, ...]
    source: str

    @property
    def room(self) -> int:
        """Bytes of memory of one device."""
        return self.memory // self.devices


_DOCS = "Google Cloud documentation, Cloud TPU, system architecture of TPU {}: {} HBM"
CHIPS: dict[str, Chip] = {
    "v4": Chip("tpu", 32 * 2**30, 2, _CUBES, _DOCS.format("v4", "32 GiB")),
    "v5e": Chip("tpu", 16 * 10**9, 1, _FLAT, _DOCS.format("v5e", "16 GB")),
    "v5p": Chip("tpu", 95 * 10**9, 1, _CUBES, _DOCS.format("v5p", "95 GB")),
    "v6e": Chip("tpu", 32 * 10**9, 1, _FLAT, _DOCS.format("v6e", "32 GB")),
    "h100": Chip(
        "cuda",
        84_942_979_072,
        1,
        ("1x1", "1x2", "1x4", "1x8", "2x8", "4x8", "8x8", "16x8", "32x8"),
        "device_memory_size that the CUDA driver reports for an H100 80GB HBM3",
    ),
}


class Target(NamedTuple):
    """So many slices of one topology. A slice of GPUs is what one fast fabric joins."""

    name: str  # such as "v5e:4x4"
    slices: int

    @property
    def chip(self) -> Chip:
        """The kind of chip."""
        return CHIPS[self.name.split(":")[0]]

    @property
    def sides(self) -> str:
        """The topology of a slice."""
        return self.name.split(":")[1]

    @property
    def devices(self) -> int:
        """JAX devices of one slice."""
        return math.prod(map(int, self.sides.split("x"))) * self.chip.devices


def parse(name: str, slices: int) -> Target:
    """The target of this name, such as ``v5e:4x4`` or ``h100:2x8``.

    Raises:
        ValueError: an unknown chip or topology, with those that are known, the nearest
            first; no slices.

    Example:
        >>> parse("v5e:4x4", 2).devices
        16
        >>> parse("v5e:4x5", 2)
        Traceback (most recent call last):
            ...
        ValueError: no target is called 'v5e:4x5': v5e has 4x4, 4x8, 2x2, 2x4, 8x8, \
8x16, 16x16.
    """
    kind, _, sides = name.partition(":")
    if kind not in CHIPS:
        raise ValueError(
            f"no target is called {name!r}: a target is a chip and a topology, such as "
            f"v5e:4x4, and the chips are {', '.join(_nearest(kind, tuple(CHIPS)))}."
        )
    known = CHIPS[kind].topologies
    if sides not in known:
        raise ValueError(
            f"no target is called {name!r}: {kind} has "
            f"{', '.join(_nearest(sides, known))}."
        )
    if slices < 1:
        raise ValueError(f"slices={slices}: give one slice or more.")
    return Target(name, slices)


def _nearest(name: str, known: tuple[str, ...]) -> list[str]:
    """All that are known, those that look most alike first."""
    alike = lambda other: difflib.SequenceMatcher(None, name, other).ratio()
    return sorted(known, key=alike, reverse=True)
