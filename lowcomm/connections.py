"""What connects workers: links, and networks with a link for each axis of a mesh.

A message of n bytes takes

    α + o + 8n / (η β)

seconds: ``α`` the latency from one end to the other, ``o`` what handling any message
costs (the system call, the kernel launch), ``β`` the bandwidth in bits a second and
``η`` the share of it that is payload and not headers, retries and idle windows. While
``α`` goes by the sender may do something else; ``o`` keeps it busy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .spmd import Axis, names

_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3}


@dataclass(frozen=True)
class Link:
    """A link between workers.

    Attributes:
        bandwidth: bits per second in one direction.
        latency: seconds from one end to the other.
        overhead: seconds that every message keeps its sender busy.
        efficiency: share of the bandwidth that is left for the payload.

    Raises:
        ValueError: a bandwidth that is not positive, a negative latency or overhead,
            an efficiency outside (0, 1], NaN.

    Example:
        >>> link = Link.parse("100Mbit", "20ms")
        >>> link
        Link(bandwidth=100000000.0, latency=0.02, overhead=0.0, efficiency=1.0)
        >>> link.message(1_000_000)
        0.1
    """

    bandwidth: float
    latency: float = 0.0
    overhead: float = 0.0
    efficiency: float = 1.0

    def __post_init__(self):
        """Refuse what is no link."""
        if not self.bandwidth > 0:
            raise ValueError(
                f"bandwidth={self.bandwidth}: give bits per second, more than 0."
            )
        for name in ("latency", "overhead"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)}: give seconds, 0 or more."
                )
        if not 0 < self.efficiency <= 1:
            raise ValueError(
                f"efficiency={self.efficiency}: give the share of the bandwidth that "
                "is payload, more than 0 and at most 1."
            )

    @classmethod
    def parse(cls, bandwidth: str, latency: str = "0s") -> Link:
        """A link from text such as ``"100Mbit"`` and ``"20ms"``.

        Bandwidths are in bit, kbit, Mbit, Gbit or Tbit, powers of 1000, case ignored;
        latencies in ns, us, ms or s.

        Raises:
            ValueError: another unit or no number; bytes are refused, not guessed.

        Example:
            >>> Link.parse("1.5 Gbit").bandwidth, Link.parse("1bit", "250us").latency
            (1500000000.0, 0.00025)
        """
        return cls(parse_bandwidth(bandwidth), parse_latency(latency))

    @property
    def rate(self) -> float:
        """Bits of payload a second."""
        return self.efficiency * self.bandwidth

    def transfer(self, nbytes: float) -> float:
        """Seconds from the first to the last bit of so many bytes."""
        return 8 * nbytes / self.rate

    def message(self, nbytes: float) -> float:
        """Seconds until a message of so many bytes is there."""
        return self.latency + self.overhead + self.transfer(nbytes)

    def shared(self, by: float) -> Link:
        """What is left to each of ``by`` senders that use it at once.

        Example:
            >>> Link(8e9, 0.001).shared(4).bandwidth
            2000000000.0
        """
        if by < 1:
            raise ValueError(f"{by} senders share the link: give 1 or more.")
        return replace(self, bandwidth=self.bandwidth / by)


class Level(NamedTuple):
    """One axis that a collective goes along."""

    workers: int
    link: Link
    shared: int = 1


@dataclass(frozen=True)
class Network:
    """What connects the devices of a mesh: a link and a size for each of its axes.

    Bytes are those of a device, as ``compiled_traffic`` and ``per_shard`` count them.
    Where the devices of a worker send side by side and over one link between workers,
    ``shared`` says how many they are, and each has that part of the bandwidth. A
    collective along all of them together has it whole, where it crosses it once.

    Attributes:
        links: of each axis the link between neighbours.
        sizes: of each axis how many devices there are along it.
        shared: of an axis, how many devices share one link of it; 1 unless given.

    Raises:
        ValueError: axes with a link and no size or the other way round, sizes and
            shares below 1.

    Example:
        Two slices of 16 chips, and one link between slices for all chips of each.

        >>> network = Network(
        ...     links={"slices": Link.parse("100Gbit", "1ms"),
        ...            "chips": Link.parse("1.6Tbit", "1us")},
        ...     sizes={"slices": 2, "chips": 16},
        ...     shared={"slices": 16})
        >>> network.along("slices").bandwidth
        6250000000.0
    """

    links: Mapping[str, Link]
    sizes: Mapping[str, int]
    shared: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self):
        """Refuse what is no network."""
        if set(self.links) != set(self.sizes):
            raise ValueError(
                f"links are given for {sorted(self.links)} and sizes for "
                f"{sorted(self.sizes)}: give both for every axis."
            )
        for axis in self.shared:
            lookup(self.links, axis, "link")
        for what in (self.sizes, self.shared):
            for axis, n in what.items():
                if n < 1:
                    raise ValueError(f"{n} devices for axis {axis!r}: give 1 or more.")

    def along(self, axis: str) -> Link:
        """What one device has of the link of an axis."""
        return lookup(self.links, axis, "link").shared(self.shared.get(axis, 1))

    def levels(self, axis: Axis) -> list[Level]:
        """The axes of a collective, the slowest first."""
        found = [
            Level(
                lookup(self.sizes, name, "size"),
                lookup(self.links, name, "link"),
                self.shared.get(name, 1),
            )
            for name in names(axis)
        ]
        return sorted(found, key=lambda level: level.link.rate)


def lookup(given: Mapping[str, Any], axis: str, what: str) -> Any:
    """What is given for an axis, or a ``ValueError`` that names it."""
    if axis not in given:
        raise ValueError(
            f"the traffic goes along axis {axis!r} and no {what} is given for it, only "
            f"for {sorted(given)}."
        )
    return given[axis]


def slowest(links: list[Link]) -> Link:
    """The pace of what waits for all of these links at every message."""
    return Link(
        min((link.rate for link in links), default=math.inf),
        max((link.latency for link in links), default=0.0),
        max((link.overhead for link in links), default=0.0),
    )


def parse_bandwidth(text: str) -> float:
    """Bits per second from text such as ``"100Mbit"``.

    Example:
        >>> parse_bandwidth("10kbit")
        10000.0
    """
    number = _number(text, "bit", _RATES)
    if number is None:
        raise ValueError(
            f"bandwidth {text!r}: write a number and one of bit, kbit, Mbit, Gbit, "
            "Tbit (bits per second, not bytes), such as '100Mbit'."
        )
    return number


def parse_latency(text: str) -> float:
    """Seconds from text such as ``"20ms"``.

    Example:
        >>> parse_latency("20ms")
        0.02
    """
    number = _number(text, "s", _TIMES)
    if number is None:
        raise ValueError(
            f"latency {text!r}: write a number and one of ns, us, ms, s, such as "
            "'20ms'."
        )
    return number


def _number(text: str, unit: str, prefixes: Mapping[str, float]) -> float | None:
    """The value of ``"1.5 Gbit"`` in its unit; None if it is not of that form."""
    found = re.fullmatch(
        rf"\s*(\d+\.?\d*(?:e[+-]?\d+)?)\s*(\D?){unit}\s*", text.lower()
    )
    if found is None or found[2] not in prefixes:
        return None
    return float(found[1]) * prefixes[found[2]]
