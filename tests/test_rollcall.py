"""Who comes together, who is missed, and who is none of us."""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lowcomm.rollcall import RollCallError, roll_call

LONG = 120.0  # a deadline that is not to be reached, on any machine


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def called(address, callers, deadline=LONG, before=lambda: None):
    """What became of processes, each ``(process, processes)``: None or its error."""

    def one(process, processes):
        try:
            roll_call(address, process=process, processes=processes, deadline=deadline)
        except RollCallError as problem:
            return str(problem)

    with ThreadPoolExecutor(len(callers)) as pool:
        calls = [pool.submit(one, *caller) for caller in callers]
        before()
        return [call.result(2 * LONG) for call in calls]


def line_to(address):
    """A connection to process 0, when it listens."""
    host, port = address.split(":")
    until = time.monotonic() + LONG
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            assert time.monotonic() < until


@contextlib.contextmanager
def listening(address, answer):
    """Somebody else at that address, who says the same to everybody."""
    host, port = address.split(":")
    with (
        socket.create_server((host, int(port))) as door,
        ThreadPoolExecutor(1) as pool,
    ):

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    line, _ = door.accept()
                    with line:
                        line.recv(1000)
                        line.sendall(answer)

        pool.submit(serve)
        yield
        door.shutdown(socket.SHUT_RDWR)


def test_all_who_come_begin_and_leave_the_port_free(address):
    callers = [(n, 5) for n in (3, 0, 4, 1, 2)]
    assert called(address, callers) == [None] * 5
    host, port = address.split(":")
    socket.create_server((host, int(port))).close()
    assert called(address, callers) == [None] * 5


def test_everybody_who_came_is_told_who_did_not(address):
    told = called(address, [(0, 5), (1, 5), (3, 5)], deadline=2.0)
    assert told == ["processes 2, 4 of 5 did not come within 2 seconds."] * 3


def test_two_of_one_number_are_told_and_so_are_the_others(address):
    told = called(address, [(0, 4), (2, 4), (2, 4)])
    assert told[0].startswith("two processes are number 2 of 4")
    assert set(told) == {told[0]}


def test_two_who_were_told_of_different_numbers_are_told(address):
    told = called(address, [(0, 3), (1, 2)])
    assert "process 1 was told of 2 processes and process 0 of 3" in told[0]
    assert told[1] == told[0]


def test_a_number_that_is_none_is_told(address):
    assert "a process is number 7 of 3" in called(address, [(0, 3), (7, 3)])[1]


def test_strangers_are_ignored(address):
    lines = []

    def strangers():
        for words in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\xff\n",
            b"[]\n",
            b'{"process": "one", "processes": 3}\n',
            b"x" * 100_000,
            b"[" * 60_000 + b"\n",
            b"",  # it stays and says nothing
        ):
            lines.append(line_to(address))
            with contextlib.suppress(ConnectionError):
                lines[-1].sendall(words)
        line_to(address).close()

    # Process 0 first, so that they are there before all have come.
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(called, address, [(0, 3)])
        strangers()
        assert called(address, [(1, 3), (2, 3)]) == [None, None]
        assert first.result() == [None]
    for line in lines:
        line.close()


def test_a_process_that_ends_may_come_again(address):
    def ends():
        with line_to(address) as line:
            line.sendall(b'{"process": 1, "processes": 3}\n')

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(called, address, [(0, 3)])
        ends()
        assert called(address, [(1, 3), (2, 3)]) == [None, None]
        assert first.result() == [None]


def test_nobody_there_is_told_with_address_and_deadline(address):
    (told,) = called(address, [(1, 2)], deadline=0.3)
    assert f"found no process 0 at {address} within 0.3 seconds" in told
    assert "Connection refused" in told


def test_somebody_else_at_the_address_is_told_from_process_0(address):
    for answer in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0\n", b"{}\n", b"\0\0"):
        with listening(address, answer):
            (told,) = called(address, [(1, 2)])
        assert f"was answered at {address}, but not by process 0 of this job" in told


def test_process_0_cannot_listen_at_another_machines_address_or_a_taken_port(address):
    (told,) = called("192.0.2.1:1234", [(0, 2)])
    assert "process 0 cannot listen at 192.0.2.1:1234 (Cannot assign" in told
    with listening(address, b""):
        (told,) = called(address, [(0, 2)])
        assert f"cannot listen at {address} (Address already in use)" in told


def test_process_0_listens_at_its_address_alone(address):
    port = int(address.split(":")[1])

    def knock():
        line_to(address).close()  # it listens
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(called, address, [(0, 2)])
        knock()
        assert called(address, [(1, 2)]) == [None]
        assert first.result() == [None]


def test_process_0_may_listen_at_an_address_it_knows_itself_by(address):
    port = address.split(":")[1]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(
            roll_call,
            f"elsewhere.invalid:{port}",
            process=0,
            processes=2,
            deadline=LONG,
            bind=address,
        )
        assert called(address, [(1, 2)]) == [None]
        first.result()


@pytest.mark.parametrize(
    "wrong", ["10.0.0.1", ":80", "host:", "host:http", "h:70000", "a..b:80", "[]:80"]
)
def test_an_address_without_host_or_port_is_refused(wrong):
    with pytest.raises(ValueError, match="write host:port"):
        roll_call(wrong, process=1, processes=2, deadline=LONG)
