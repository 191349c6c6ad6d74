"""What a collective of n bytes puts on the wire of each host, by gloo's algorithms.

Among K hosts, n bytes the operand of one:

    all_reduce    2(K−1)/K · n   in 4(K−1) messages    ring, each part in two segments
    all_gather     (K−1)   · n   in 2(K−1) messages    ring, each part in two segments
    all_to_all     (K−1)/K · n   in  (K−1) messages
    permute                  n   in     1  message

A message has a header, and both sides announce that they are ready: 144 bytes more. A
ring reduces and gathers whole elements, so that parts may differ by some, and sends no
part that is empty: of a few bytes it takes fewer messages than stand here.
"""

from __future__ import annotations

from typing import Any

from lowcomm.ledger import Traffic, calls

MESSAGE = 3 * 48  # bytes: a header, ready to send, ready to receive


def volume(collective: str, nbytes: float, hosts: int) -> tuple[float, int]:
    """Bytes of one worker's data that a host sends, and messages.

    Raises:
        ValueError: another collective, of which nothing is known.

    Example:
        >>> volume("all_reduce", 1_000_000, hosts=4)
        (1500000.0, 12)
    """
    others = hosts - 1
    known = {
        "all_reduce": (2 * others / hosts, 4 * others),
        "all_gather": (others, 2 * others),
        "all_to_all": (others / hosts, others),
        "permute": (1, 1),
    }
    if collective not in known:
        raise ValueError(f"{collective!r} is none of {', '.join(known)}")
    share, messages = known[collective]
    return share * nbytes, messages if hosts > 1 else 0


def expected(traffic: Traffic, ran: Any, hosts: int) -> float:
    """Bytes that a host hands to the kernel where each row ran so often."""
    total = 0.0
    for times, row in zip(calls(traffic, ran), traffic.rows, strict=True):
        sent, messages = volume(row.collective, row.bytes, hosts)
        total += times * (sent + MESSAGE * messages)
    return total
