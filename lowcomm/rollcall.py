"""A roll call before JAX starts, so that who is missing is told by name.

JAX's own service ends a process that nobody joins, or that finds nobody, without saying
who did not come. Here process 0 first listens on the coordinator's address, the others
say their number, and all hear the outcome: to begin, or what is wrong. Then the port
is free again, for JAX's service.

    process n → 0    {"process": n, "processes": N}
    process 0 → n    {"begin": true}  or  {"problem": TEXT}
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Iterator

LONGEST = 65536  # bytes in one line
PAUSE = 0.1  # seconds between two attempts to reach process 0
GRACE = 5.0  # seconds more for what process 0 says at the end of its own deadline


class RollCallError(RuntimeError):
    """Not all processes of a job came together; says which, or where nobody was."""


def roll_call(
    address: str,
    *,
    process: int,
    processes: int,
    deadline: float,
    bind: str | None = None,
) -> None:
    """Return when all ``processes`` have come to ``address``, and raise if they don't.

    ``address`` is ``host:port`` of process 0, which listens there and nowhere else, or
    at ``bind``, for a machine that knows itself by another address. Each process waits
    ``deadline`` seconds. What connects and is no process of the job is ignored.

    Raises:
        RollCallError: on every process that came: who did not, two with one number,
            two that were told different numbers of processes; on a process that found
            no process 0: the address and the deadline.
    """
    if process == 0:
        _call(bind or address, processes, deadline)
    else:
        _answer(address, process, processes, deadline)


def parts(address: str) -> tuple[str, int]:
    """The host and the port of an address; raises ``ValueError`` where it has none.

    Example:
        >>> parts("10.0.0.1:1234"), parts("[::1]:80")
        (('10.0.0.1', 1234), ('::1', 80))
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (
        _may_be_a_host(host)
        and port.isascii()
        and port.isdigit()
        and int(port) <= 65535
    ):
        raise ValueError(
            f"the coordinator's address is {address!r}: write host:port, such as "
            "10.0.0.1:1234."
        )
    return host, int(port)


def _may_be_a_host(name: str) -> bool:
    try:
        return bool(name.encode("idna"))  # as it is encoded when it is looked up
    except UnicodeError:
        return False


class _Guest:
    """Somebody who has connected to process 0, and what it has said so far."""

    def __init__(self, line: socket.socket):
        self.line, self.said, self.process = line, b"", -1  # not known yet

    def listen(self) -> dict | None:
        """Its line when that is whole; raises ``OSError`` when it is no process."""
        heard = self.line.recv(LONGEST)
        if not heard:
            raise ConnectionError("it has left")
        self.said += heard
        if b"\n" not in self.said:
            if len(self.said) > LONGEST:
                raise ConnectionError("it speaks another language")
            return None
        return _heard(self.said)


def _call(bind: str, processes: int, deadline: float) -> None:
    until = time.monotonic() + deadline
    here: dict[int, _Guest] = {}
    problem = ""
    with _door(bind) as door, selectors.DefaultSelector() as ears:
        ears.register(door, selectors.EVENT_READ)
        while len(here) < processes - 1 and not problem:
            if (left := until - time.monotonic()) <= 0:
                missing = [n for n in range(1, processes) if n not in here]
                problem = _did_not_come(missing, processes, deadline)
                break
            for key, _ in ears.select(left):
                if key.fileobj is door:
                    with contextlib.suppress(OSError):
                        line, _ = door.accept()
                        line.setblocking(False)
                        ears.register(line, selectors.EVENT_READ, _Guest(line))
                    continue
                guest = key.data
                try:
                    if (said := guest.listen()) is not None:
                        wrong = _seat(guest, said, here, processes)
                        problem = problem or wrong
                except (OSError, ValueError):  # a stranger, or a process that ended
                    if here.get(guest.process) is guest:
                        del here[guest.process]
                    ears.unregister(guest.line)
                    guest.line.close()
        guests = [k.data for k in ears.get_map().values() if k.data is not None]
    word = {"problem": problem} if problem else {"begin": True}
    for guest in guests:
        with contextlib.suppress(OSError):
            guest.line.settimeout(GRACE)
            if guest.process >= 0:
                guest.line.sendall(_line(word))
                guest.line.recv(1)  # it hangs up first, so that the port is free
        guest.line.close()
    if problem:
        raise RollCallError(problem)


def _seat(guest: _Guest, said: dict, here: dict[int, _Guest], processes: int) -> str:
    """Count the guest in, or say what is wrong; raises if it is no process of a job."""
    number, told = said.get("process"), said.get("processes")
    if not (isinstance(number, int) and isinstance(told, int)) or guest.process >= 0:
        raise ConnectionError("it speaks another language")
    guest.process = number
    if told != processes:
        return (
            f"process {number} was told of {told} processes and process 0 of "
            f"{processes}: give all of them the same number."
        )
    if not 0 < number < processes:
        return (
            f"a process is number {number} of {processes}: the others than process 0 "
            f"must be numbered from 1 to {processes - 1}."
        )
    if number in here:
        return (
            f"two processes are number {number} of {processes}: each must have a "
            "number of its own, from 0."
        )
    here[number] = guest
    return ""


def _answer(address: str, process: int, processes: int, deadline: float) -> None:
    until = time.monotonic() + deadline
    where, reason = parts(address), "it never answered"
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection(where, timeout=left) as line:
                if line.getsockname() == line.getpeername():
                    # Both ends are ours: while nobody listens on a port, the system
                    # may choose it for the end from which one connects to it.
                    raise ConnectionError("nobody listens there")
                line.sendall(_line({"process": process, "processes": processes}))
                line.settimeout(deadline + GRACE)
                word = _heard(_whole_line(line))
            if "problem" in word:
                raise RollCallError(str(word["problem"]))
            if word.get("begin"):
                return
            raise ValueError("no word of ours")
        except ValueError:
            raise RollCallError(
                f"process {process} was answered at {address}, but not by process 0 of "
                "this job: something else listens there. Give the address of process 0 "
                "and a port that is free."
            ) from None
        except OSError as problem:
            reason = _reason(problem)
            time.sleep(min(PAUSE, max(until - time.monotonic(), 0)))
    raise RollCallError(
        f"process {process} of {processes} found no process 0 at {address} within "
        f"{deadline:g} seconds ({reason}): check the address, and that process 0 was "
        "started."
    )


@contextlib.contextmanager
def _door(bind: str) -> Iterator[socket.socket]:
    """A socket that listens at that address alone; at ``[::]`` of both protocols."""
    host, port = parts(bind)
    both = host == "::" and socket.has_dualstack_ipv6()
    if host == "::" and not both:
        host = "0.0.0.0"
    try:
        family, *_, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        door = socket.create_server(
            where[:2], family=family, backlog=1024, dualstack_ipv6=both
        )
    except OSError as problem:
        raise RollCallError(
            f"process 0 cannot listen at {bind} ({_reason(problem)}): the address of "
            "the coordinator must be one of the machine that process 0 runs on, with a "
            "port that is free (in a job that JAX finds, JAX_COORDINATOR_PORT). Where "
            "that machine knows itself by another one, set "
            "JAX_COORDINATOR_BIND_ADDRESS to it there."
        ) from None
    with door:
        door.setblocking(False)
        yield door


def _did_not_come(missing: list[int], processes: int, deadline: float) -> str:
    named = ", ".join(map(str, missing[:8])) + (
        f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    )
    return (
        f"process{'es' * (len(missing) > 1)} {named} of {processes} did not come "
        f"within {deadline:g} seconds."
    )


def _reason(problem: OSError) -> str:
    if problem.errno is None or problem.errno < 0:  # of the name of a host
        return problem.strerror or str(problem)
    return os.strerror(problem.errno)


def _line(words: dict) -> bytes:
    return json.dumps(words).encode() + b"\n"


def _whole_line(line: socket.socket) -> bytes:
    said = b""
    while b"\n" not in said and len(said) <= LONGEST:
        heard = line.recv(LONGEST)
        if not heard and said:
            break  # whoever it was
        if not heard:
            raise ConnectionError("process 0 hung up")
        said += heard
    return said


def _heard(said: bytes) -> dict:
    """The words of a line; raises ``ValueError``, and a guest's is no process then."""
    try:
        words = json.loads(said.split(b"\n")[0])
    except RecursionError:  # brackets in brackets
        words = None
    if not isinstance(words, dict):
        raise ValueError("no object")
    return words
