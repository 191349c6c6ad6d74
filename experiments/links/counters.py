"""What the kernel counted on a host's interface, and what of it was payload.

The kernel counts every segment it hands to the wire with its headers, of 66 bytes:
Ethernet 14, IPv4 20, TCP 20 and its time stamps 12. An acknowledgement is a segment
of nothing else. So

    payload  =  bytes − 66 · packets

with what was sent again counted again (``retransmitted``), and a few bytes too few for
every ARP packet. What nobody asked for, such as the heartbeats of the coordination
service, is measured while nothing runs and subtracted by the second.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

HEADERS = 14 + 20 + 20 + 12


class Counters(NamedTuple):
    """What an interface has sent since it is up, or in between."""

    bytes: int
    packets: int
    retransmitted: int  # segments

    @property
    def payload(self) -> int:
        """Bytes that programs handed over."""
        return self.bytes - HEADERS * self.packets

    def since(self, before: Counters) -> Counters:
        """What was sent after ``before``.

        Example:
            >>> sent = Counters(3_132, 3, 0).since(Counters(66, 1, 0))
            >>> sent.packets, sent.payload
            (2, 2934)
        """
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))


def read(interface: str = "eth0", process: str = "self") -> Counters:
    """The counters of an interface in the network namespace of a process."""
    folder = Path("/proc") / process / "net"
    return parse((folder / "dev").read_text(), (folder / "snmp").read_text(), interface)


def parse(dev: str, snmp: str, interface: str) -> Counters:
    """From the text of ``/proc/net/dev`` and ``/proc/net/snmp``.

    Raises:
        ValueError: no such interface; names those there are.

    Example:
        >>> dev = "head |\\n head |\\n eth0: 1 2 0 0 0 0 0 0 900 3 0 0 0 0 0 0"
        >>> parse(dev, "Tcp: InSegs RetransSegs\\nTcp: 7 1", "eth0")
        Counters(bytes=900, packets=3, retransmitted=1)
    """
    lines = dict(line.split(":", 1) for line in dev.splitlines() if ":" in line)
    fields = {name.strip(): counts.split() for name, counts in lines.items()}
    if interface not in fields:
        raise ValueError(f"there is no interface {interface!r}, only {sorted(fields)}")
    sent = fields[interface][8:10]
    names, values = (line.split() for line in snmp.splitlines() if line[:4] == "Tcp:")
    tcp = dict(zip(names[1:], values[1:], strict=True))
    return Counters(int(sent[0]), int(sent[1]), int(tcp["RetransSegs"]))
