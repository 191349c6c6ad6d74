"""What traffic costs in seconds on a network, by the α–β model.

A message of n bytes over a link of bandwidth β (bits a second) and latency α takes
α + 8n/β seconds. Among K workers, with n the bytes of the operand of one worker:

    all_reduce       2(K−1)/K · 8n/β + 2(K−1)·α     ring: reduce-scatter, all-gather
    reduce_scatter    (K−1)/K · 8n/β +  (K−1)·α
    all_to_all        (K−1)/K · 8n/β +  (K−1)·α
    all_gather        (K−1)   · 8n/β +  (K−1)·α     n is what each contributes
    broadcast                   8n/β +  (K−1)·α     pipelined along a chain
    permute, send               8n/β +        α

Collectives of one kind along one axis that do not wait for each other (``Row.wave``)
leave together: their bytes add up and latency is paid once, as XLA's combiners and
fused transports have it. All others follow each other and the computation: what a
method overlaps is not overlapped here. One worker pays nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .ledger import Axis, Row, Traffic, calls
from .spmd import names

_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3}


@dataclass(frozen=True)
class Link:
    """A link between workers.

    Attributes:
        bandwidth: bits per second in one direction.
        latency: seconds from one end to the other.

    Raises:
        ValueError: a bandwidth that is not positive, a negative latency, NaN.

    Example:
        >>> Link.parse("100Mbit", "20ms")
        Link(bandwidth=100000000.0, latency=0.02)
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self):
        """Refuse what is no link."""
        if not self.bandwidth > 0:
            raise ValueError(
                f"bandwidth={self.bandwidth}: give bits per second, more than 0."
            )
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency={self.latency}: give seconds, 0 or more.")

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


def collective_seconds(
    collective: str, nbytes: float, *, workers: int, link: Link
) -> float:
    """Seconds of one collective, by the formulas above.

    Args:
        collective: as in ``Row.collective``.
        nbytes: of the operand of one worker.
        workers: K, how many take part.
        link: what connects each to the next.

    Raises:
        ValueError: an unknown collective, fewer than one worker.

    Example:
        >>> link = Link.parse("8Mbit", "1ms")
        >>> collective_seconds("permute", 1_000_000, workers=4, link=link)
        1.001
        >>> round(collective_seconds("all_reduce", 1_000_000, workers=4, link=link), 6)
        1.506
        >>> collective_seconds("all_reduce", 1_000_000, workers=1, link=link)
        0.0
    """
    if workers < 1:
        raise ValueError(f"workers={workers}: there must be at least one.")
    others, share = workers - 1, (workers - 1) / workers
    factors = {
        "all_reduce": (2 * share, 2 * others),
        "reduce_scatter": (share, others),
        "all_to_all": (share, others),
        "all_gather": (others, others),
        "broadcast": (1, others),
        "permute": (1, 1),
        "send": (1, 1),
    }
    if collective not in factors:
        raise ValueError(f"no cost for {collective!r}: know {', '.join(factors)}.")
    if workers == 1:
        return 0.0
    volume, messages = factors[collective]
    return volume * 8 * nbytes / link.bandwidth + messages * link.latency


def seconds(
    traffic: Traffic,
    link: Link | Mapping[str, Link],
    workers: int | Mapping[str, int],
    compute: float = 0.0,
    *,
    counts: Any = None,
) -> float:
    """Predicted seconds of one execution, computing and talking in turn.

    Without ``counts`` every conditional takes its dearest branch: for a method that
    talks now and then this prices the step in which everything fires. With ``counts``
    from ``meter`` (summed over as many steps as you like, and ``compute`` for as many)
    it prices what happened.

    Args:
        traffic: from ``traffic`` or ``compiled_traffic``.
        link: one for all axes, or one per mesh axis. A collective over several axes
            goes at the pace of the slowest of them.
        workers: K of the one axis, or the size of every axis that traffic names.
        compute: seconds of everything else.
        counts: how often each row ran.

    Raises:
        ValueError: an axis without a link or a size, one size for several axes; a
            ``while`` and no ``counts``.

    Example:
        Eight workers on a slow link: compressing 32 bits to 1 saves nearly 32 times,
        until latency is all that is left.

        >>> dense = Traffic((Row("all_reduce", "workers", "float32", 4_000_000),))
        >>> signs = Traffic((Row("all_reduce", "workers", "uint8", 125_000),))
        >>> for latency in ("0s", "20ms"):
        ...     link = Link.parse("100Mbit", latency)
        ...     print(round(seconds(dense, link, 8) / seconds(signs, link, 8), 1))
        32.0
        2.8
    """

    axes = {row.axis for row in traffic.rows if row.count != 0}
    if not isinstance(workers, Mapping) and len(axes) > 1:
        raise ValueError(
            f"workers={workers} is one size and the traffic goes along "
            f"{sorted(map(str, axes))}: give the size of each axis."
        )

    def price(row: Row) -> float:
        return collective_seconds(
            row.collective,
            row.bytes,
            workers=_size(row.axis, workers),
            link=_slowest(row.axis, link),
        )

    times = [1] * len(traffic.rows) if counts is None else calls(traffic, counts)
    messages, ran = _messages(traffic, times)
    if counts is None:
        return compute + float(messages.largest(price))
    pairs = zip(ran, messages.rows, strict=True)
    return compute + sum(n * price(row) for n, row in pairs if n)


def break_even_bandwidth(
    traffic: Traffic,
    baseline: Traffic,
    workers: int,
    compute: float,
    *,
    counts: Any = None,
) -> float:
    """The bandwidth below which ``traffic`` is the faster of the two.

    ``compute`` is what it costs in seconds beside the baseline, such as to encode and
    decode. Below the break-even of ``V`` bits less on the wire, ``V / compute`` bits a
    second, those bits take longer than that. Latency is left out. Infinite where the
    traffic costs no time and is less, 0 where it is not less. Conditionals count as in
    ``seconds``: with their dearest branch, or as ``counts`` of ``traffic`` has them.

    Raises:
        ValueError: ``compute`` that is negative or NaN; what ``seconds`` raises.

    Example:
        A quarter of 4 MB, at 10 ms: it pays on links below a good 4 Gbit/s.

        >>> dense = Traffic((Row("all_reduce", "workers", "float32", 4_000_000),))
        >>> codes = Traffic((Row("all_reduce", "workers", "int8", 1_000_000),))
        >>> break_even_bandwidth(codes, dense, 8, compute=0.01) / 1e9
        4.2
    """
    if not compute >= 0:
        raise ValueError(f"compute={compute}: give seconds, 0 or more.")
    bits = lambda t, n=None: seconds(t, Link(bandwidth=1.0), workers, counts=n)
    saved = bits(baseline) - bits(traffic, counts)
    if saved <= 0:
        return 0.0
    return saved / compute if compute > 0 else math.inf


def _messages(traffic: Traffic, times: Sequence[int]) -> tuple[Traffic, list[int]]:
    """Rows that leave together as one, and how often each such message ran."""
    together: dict[Any, list[tuple[int, Row]]] = {}
    for n, row in zip(times, traffic.rows, strict=True):
        key = (row.collective, row.axis, row.guard, row.wave, row.count, n)
        together.setdefault(key, []).append((n, row))
    rows = [
        replace(rows[0][1], bytes=sum(row.bytes for _, row in rows))
        for rows in together.values()
    ]
    return Traffic(tuple(rows)), [rows[0][0] for rows in together.values()]


def _number(text: str, unit: str, prefixes: Mapping[str, float]) -> float | None:
    """The value of ``"1.5 Gbit"`` in its unit; None if it is not of that form."""
    found = re.fullmatch(
        rf"\s*(\d+\.?\d*(?:e[+-]?\d+)?)\s*(\D?){unit}\s*", text.lower()
    )
    if found is None or found[2] not in prefixes:
        return None
    return float(found[1]) * prefixes[found[2]]


def _size(axis: Axis, workers: int | Mapping[str, int]) -> int:
    if not isinstance(workers, Mapping):
        return int(workers)
    return math.prod(_of(workers, name, "size") for name in names(axis))


def _slowest(axis: Axis, link: Link | Mapping[str, Link]) -> Link:
    if isinstance(link, Link):
        return link
    links = [_of(link, name, "link") for name in names(axis)]
    return Link(
        min((one.bandwidth for one in links), default=math.inf),
        max((one.latency for one in links), default=0.0),
    )


def _of(given: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in given:
        raise ValueError(
            f"the traffic goes along axis {name!r} and no {what} is given for it, only "
            f"for {sorted(given)}."
        )
    return given[name]
