"""What traffic costs in seconds on a network, by the α–β model.

``costs`` has the formula of each collective. Collectives of one kind along one axis
that do not wait for each other (``Row.wave``) leave together: their bytes add up and
latency is paid once, as XLA's combiners and fused transports have it. All others follow
each other and the computation: ``timeline`` is for what hides behind it. One worker
pays nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from .connections import (
    Level,
    Link as Link,
    Network as Network,
    lookup,
    parse_bandwidth as parse_bandwidth,
    parse_latency as parse_latency,
    slowest,
)
from .costs import collective_seconds as collective_seconds, levels_seconds
from .ledger import Axis, Row, Traffic, calls
from .spmd import names

Links = Link | Mapping[str, Link] | Network


def seconds(
    traffic: Traffic,
    link: Links,
    workers: int | Mapping[str, int] | None = None,
    compute: float = 0.0,
    *,
    counts: Any = None,
    algorithm: str = "ring",
) -> float:
    """Predicted seconds of one execution, computing and talking in turn.

    Without ``counts`` every conditional takes its dearest branch: for a method that
    talks now and then this prices the step in which everything fires. With ``counts``
    from ``meter`` (summed over as many steps as you like, and ``compute`` for as many)
    it prices what happened.

    Args:
        traffic: from ``traffic`` or ``compiled_traffic``.
        link: one for all axes, or one per mesh axis, or a ``Network``. A collective
            over several axes goes at the pace of the slowest of them, but for what
            ``costs.levels_seconds`` says of ``"best"`` and ``"two_level"``.
        workers: K of the one axis, or the size of every axis that traffic names; a
            network has its own.
        compute: seconds of everything else.
        counts: how often each row ran.
        algorithm: "ring", "tree", "best", "two_level" or "gloo"; see ``costs``.

    Raises:
        ValueError: an axis without a link or a size, one size for several axes, sizes
            beside a network; a ``while`` and no ``counts``; an unknown algorithm.

    Example:
        Eight workers on a slow link: compressing 32 bits to 1 saves nearly 32 times,
        until latency is all that is left, of which a tree has less than a ring.

        >>> dense = Traffic((Row("all_reduce", "workers", "float32", 4_000_000),))
        >>> signs = Traffic((Row("all_reduce", "workers", "uint8", 125_000),))
        >>> for latency, how in (("0s", "ring"), ("20ms", "ring"), ("20ms", "best")):
        ...     link = Link.parse("100Mbit", latency)
        ...     price = lambda sent: seconds(sent, link, 8, algorithm=how)
        ...     print(round(price(dense) / price(signs), 1))
        32.0
        2.8
        7.6
    """
    levels = _levels(traffic, link, workers)

    def price(row: Row) -> float:
        return levels_seconds(
            row.collective, row.bytes, levels=levels(row.axis), algorithm=algorithm
        )

    times = [1] * len(traffic.rows) if counts is None else calls(traffic, counts)
    messages, ran = _messages(traffic, times)
    if counts is None:
        return compute + float(messages.largest(price))
    pairs = zip(ran, messages.rows, strict=True)
    return compute + sum(n * price(row) for n, row in pairs if n)


class Ran(Protocol):
    """Some steps of one kind, as ``fit`` has them in ``Run.programs``."""

    @property
    def traffic(self) -> Traffic:
        """Of one of the steps."""
        ...

    @property
    def ran(self) -> Any:
        """How often each row ran in all of them."""
        ...

    @property
    def steps(self) -> int:
        """How many there were."""
        ...


def run_seconds(
    programs: Iterable[Ran],
    link: Links,
    workers: int | Mapping[str, int] | None = None,
    compute: float = 0.0,
    *,
    algorithm: str = "ring",
) -> float:
    """Predicted seconds of a whole run of ``fit``, computing and talking in turn.

    Args:
        programs: ``Run.programs``.
        link: as for ``seconds``, which raises what it raises.
        workers: as for ``seconds``.
        compute: seconds of everything else, a step.
        algorithm: as for ``seconds``.

    Example:
        Eight steps of a millisecond, and two means of four bytes.

        >>> import jax.numpy as jnp, optax
        >>> from lowcomm import fit, local_sgd
        >>> tx = local_sgd(optax.sgd(0.5), period=4)
        >>> c = jnp.array([0.0, 2.0])
        >>> run = fit(lambda x, c: (x - c) ** 2 / 2, tx, jnp.array(4.0), lambda t: c,
        ...           steps=8, workers=2)
        >>> link = Link.parse("1Gbit", "10ms")
        >>> round(run_seconds(run.programs, link, 2, compute=0.001), 3)
        0.048
    """
    return sum(
        seconds(
            program.traffic,
            link,
            workers,
            compute * program.steps,
            counts=program.ran,
            algorithm=algorithm,
        )
        for program in programs
    )


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


def _levels(traffic: Traffic, link: Links, workers: int | Mapping[str, int] | None):
    """From a row's axis to what it goes along."""
    if isinstance(link, Network):
        if workers is not None:
            raise ValueError("a network has its own sizes: leave workers out.")
        return link.levels
    if workers is None:
        raise ValueError("workers: give how many there are, or a Network.")
    sizes = workers if isinstance(workers, Mapping) else None
    whole = 1 if isinstance(workers, Mapping) else int(workers)
    if sizes is None:
        axes = {row.axis for row in traffic.rows if row.count != 0}
        if len(axes) > 1:
            raise ValueError(
                f"workers={workers} is one size and the traffic goes along "
                f"{sorted(map(str, axes))}: give the size of each axis."
            )

    def levels(axis: Axis) -> list[Level]:
        along = names(axis)
        of = lambda name: link if isinstance(link, Link) else lookup(link, name, "link")
        if sizes is None:  # one number for the axis, or for the axes together
            pace = slowest([of(name) for name in along])
            return [Level(whole, pace)] if along else []
        found = [Level(lookup(sizes, name, "size"), of(name)) for name in along]
        return sorted(found, key=lambda level: level.link.rate)

    return levels
