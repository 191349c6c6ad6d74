"""A link's two numbers for each collective, and the seconds of a round they predict.

Timed for it are raw transfers, collectives of their own, and rounds on links that are
not shaped:

    α, β of a collective    from a probe of a few bytes and one of many
    seconds of a round   =  computing  +  Σ over its collectives (bytes; α, β)
    computing            =  seconds of a round where links are not shaped, measured in
                            turns with it, less what the same sum predicts for those
                            links

A collective takes ``lowcomm.costs.collective_seconds`` with gloo's algorithms. β is its
pace and not the link's: gloo tells the other side that it may send in the stream that
carries its own data. Where two hosts send to each other, the one that comes last sends
first, and the other learns that it may only after that: the link is used one way at a
time. Hosts that come at once use it both ways. In a program, the first collective of a
step finds hosts that were computing, all others hosts that have just met, so there are
two probes. What comes of hosts that have just met is chance, so of these the mean is
taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from lowcomm.connections import Link
from lowcomm.costs import collective_seconds

SMALL = 64  # bytes of the small probe
SHORT = 4096  # bytes of what goes before another one, as scales go before codes
ALGORITHM = "gloo"

Links = Mapping[str, Link]  # of each collective, and of each ``after`` another
AFTER = " after another"


def large(rate: float | None) -> int:
    """Bytes of the large probe: a tenth of a second's, between 1/4 and 2 MiB.

    Example:
        >>> large(20e6), large(100e6), large(None)
        (262144, 1249280, 2097152)
    """
    wanted = 1 << 21 if rate is None else int(rate / 8 / 10)
    return max(1 << 18, min(1 << 21, wanted)) // 1024 * 1024


def fit(collective: str, few: float, many: float, nbytes: int, hosts: int) -> Link:
    """The link on which ``collective`` takes as long as two probes did.

    Args:
        collective: its name.
        few: seconds of the probe of ``SMALL`` bytes.
        many: seconds of the probe of ``nbytes``.
        nbytes: of the operand of one host.
        hosts: how many took part.

    Raises:
        ValueError: more bytes took less time.

    Example:
        >>> link = fit("all_reduce", 0.001, 0.101, 1_000_000, hosts=2)
        >>> round(link.bandwidth / 1e6), round(1000 * link.latency, 2)
        (80, 0.25)
    """
    if not many > few > 0:
        raise ValueError(
            f"{collective}: {nbytes} bytes took {many:.3g} s and {SMALL} took "
            f"{few:.3g} s; measure again on a quiet machine."
        )
    how: Any = {"workers": hosts, "algorithm": ALGORITHM}
    waits = collective_seconds(collective, 0, link=Link(1e30, 1.0), **how)
    bits = collective_seconds(collective, nbytes, link=Link(1.0), **how)
    return Link(bandwidth=bits / (many - few), latency=few / waits)


def found_by(steps: Sequence[Sequence[Any]]) -> list[list[str]]:
    """The names of the links that the collectives of each step find.

    Example:
        >>> found_by([[], [{"collective": "permute"}, {"collective": "permute"}]])
        [[], ['permute', 'permute after another']]
    """
    return [
        [one["collective"] + (AFTER if place else "") for place, one in enumerate(step)]
        for step in steps
    ]


def talking(steps: Sequence[Sequence[Any]], links: Links, hosts: int) -> float:
    """Seconds of all collectives of a round.

    Args:
        steps: of each step its collectives in order, ``{"collective", "bytes"}``.
        links: what each collective finds.
        hosts: how many take part.
    """
    return sum(
        collective_seconds(
            one["collective"],
            one["bytes"],
            workers=hosts,
            link=links[name],
            algorithm=ALGORITHM,
        )
        for step, names in zip(steps, found_by(steps), strict=True)
        for one, name in zip(step, names, strict=True)
    )


def computing(
    unshaped: Sequence[float], steps: Sequence[Any], links: Links, hosts: int
) -> float:
    """Seconds of a round without what it waits for, never less than nothing."""
    return max(0.0, float(np.median(unshaped)) - talking(steps, links, hosts))


def written(links: Links) -> dict[str, Any]:
    """Links as JSON has them."""
    return {collective: asdict(link) for collective, link in links.items()}
