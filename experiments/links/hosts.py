"""Hosts on one machine, and a link to each of them that has the rate asked for.

    host0 ── eth0 ══ port0 ── bridge ── port1 ══ eth0 ── host1      ══ is shaped

A host is a network and a host name of its own. Its one interface is a virtual cable to
a bridge, and both ends of the cable send through a token bucket: the host's end shapes
what it sends, the bridge's end what it is sent, so every host has a full-duplex link.
Queues are long and senders wait for their own, so that nothing is dropped. A bucket
holds what the rate passes in a quarter of a millisecond, at least two packets: what is
in it after a pause goes at once. The kernel cuts segments to the Ethernet's packets of
1,500 bytes, of which 1,448 are payload.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .namespaces import SCRATCH, Refused, is_inside, run

PACKET = 1514  # bytes of the largest packet, with its Ethernet header
QUEUE = 64 << 20  # bytes that may wait at a bucket
MOST = 250  # hosts, of one network of addresses


class Host(NamedTuple):
    """One host: a process that holds its namespaces open, and its number."""

    holder: int  # process id
    number: int

    @property
    def name(self) -> str:
        """By which the others find it."""
        return f"host{self.number}"

    @property
    def address(self) -> str:
        """On the private network."""
        return f"10.77.0.{self.number + 1}"

    def command(self, command: str) -> str:
        """``command`` as this host runs it."""
        return f"nsenter --target={self.holder} --net --uts -- {command}"


@contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """That many hosts, connected and not shaped yet, with addresses for their names.

    Raises:
        RuntimeError: outside of ``namespaces.enter``'s part of the machine, where this
            would change the machine's own network.
        ValueError: fewer than two hosts or too many.
        Refused: a command of the system fails.
    """
    if not is_inside():
        raise RuntimeError("this would change the machine's network: call enter first")
    if not 2 <= count <= MOST:
        raise ValueError(f"{count} hosts make no network: give 2 to {MOST}")
    holders: list[subprocess.Popen] = []
    names = "/etc/hosts"
    with tempfile.TemporaryDirectory(prefix="lowcomm-links-", dir=SCRATCH) as folder:
        try:
            run("ip link set lo up")
            run("ip link add bridge0 type bridge")
            run("ip link set bridge0 up")
            made = []
            for number in range(count):
                holders.append(_hold(f"host{number}"))
                made.append(Host(holders[-1].pid, number))
                for command in connecting(made[-1]):
                    run(command)
            known = Path(folder) / "hosts"
            lines = [f"{host.address} {host.name}\n" for host in made]
            known.write_text("".join(["127.0.0.1 localhost\n", *lines]))
            run(f"mount --bind {known} {names}")
            try:
                yield made
            finally:
                run(f"umount {names}")
        finally:
            for holder in holders:
                holder.kill()
                holder.wait()
                if holder.stdout is not None:
                    holder.stdout.close()


def connecting(host: Host) -> list[str]:
    """The commands that connect a host to the bridge.

    Connections keep their windows while they are idle, so that a round's first message
    is as fast as the others. Nothing is dropped, so that no congestion control has a
    say, and every kernel has Reno.
    """
    port, settings = f"port{host.number}", "/proc/sys/net/ipv4"
    return [
        f"ip link add {port} type veth peer name eth0 netns {host.holder}",
        f"ip link set {port} master bridge0 up",
        host.command(f"ip address add {host.address}/24 dev eth0"),
        host.command("ip link set eth0 up"),
        host.command("ip link set lo up"),
        host.command(
            f"sh -c 'echo reno > {settings}/tcp_congestion_control && "
            f"echo 0 > {settings}/tcp_slow_start_after_idle'"
        ),
    ]


def shaping(host: Host, rate: float) -> list[str]:
    """The commands that give both ends of a host's cable a rate in bits a second.

    Example:
        >>> print(shaping(Host(holder=7, number=1), 100e6)[1])
        tc qdisc replace dev port1 root tbf rate 100000000bit burst 3125 limit 67108864
    """
    bucket = max(2 * PACKET, int(rate / 8 / 4000))
    how = f"root tbf rate {int(rate)}bit burst {bucket} limit {QUEUE}"
    tc = lambda end: f"tc qdisc replace dev {end} {how}"
    return [host.command(tc("eth0")), tc(f"port{host.number}")]


def freeing(host: Host) -> list[str]:
    """The commands that take the rate of both ends away, if they have one."""
    return [
        host.command("tc qdisc replace dev eth0 root pfifo"),
        f"tc qdisc replace dev port{host.number} root pfifo",
    ]


def shape(hosts: Sequence[Host], rate: float | None) -> None:
    """Give the links of all hosts a rate in bits a second, each way, or none."""
    for host in hosts:
        for command in freeing(host) if rate is None else shaping(host, rate):
            run(command)


def _hold(name: str) -> subprocess.Popen:
    """A process whose namespaces are those of a host, once this returns."""
    script = f"hostname {name} && echo up && exec sleep infinity"
    command = ["unshare", "--net", "--uts", "--", "sh", "-c", script]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    if holder.stdout.readline() != "up\n":
        holder.kill()
        holder.wait()
        raise Refused(f"`{' '.join(command)}` made no host")
    return holder
