"""Several processes on this machine that run one program together.

Each gets the address of the first, how many they are and its own number, as
``lowcomm.jobs.join`` reads them from the environment. What the first one writes is
shown as it is, and of the others what they write to the error stream, behind their
number. Whoever fails ends them all: the others would wait for it forever.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from lowcomm.agreement import PROCESSES
from lowcomm.jobs import COORDINATOR, PROCESS

PATIENCE = 5.0  # seconds in which the others may say what they died of
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LAUNCHED = "LOWCOMM_LAUNCHED"


def launch(command: Sequence[str], processes: int, *, devices: int = 1) -> int:
    """Run a command that many times at once; the exit code of the first that failed.

    0 where none did. One that was killed by a signal counts as 128 and its number, as
    in a shell. SIGINT, SIGTERM and SIGHUP are handed on to all; a second one of them
    ends all at once. Of GPUs each process sees ``devices``, its own.

    Example:
        >>> launch([sys.executable, "-c", "raise SystemExit(0)"], 2)
        0
    """
    address = f"127.0.0.1:{_free_port()}"
    group: list[subprocess.Popen] = []
    shown: list[threading.Thread] = []
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()
    asked: list[int] = []  # the signals that came

    def hand_on(number, frame):
        asked.append(number)
        _signal(group, number if len(asked) == 1 else signal.SIGKILL)

    before = _handle(FORWARDED, hand_on)
    try:
        for n in range(processes):
            own = range(n * devices, (n + 1) * devices)
            told = {COORDINATOR: address, PROCESSES: str(processes), PROCESS: str(n)}
            told |= {LAUNCHED: "1", "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, own))}
            # What may be set is for a job that spans machines.
            told |= {"JAX_COORDINATOR_BIND_ADDRESS": address}
            group.append(_start(command, n, told))
            _in_background(_wait, group[n], n, ends)
            if (errors := group[n].stderr) is not None:
                shown.append(_in_background(_show, errors, n))
        return _watch(group, ends, asked)
    finally:
        _signal(group, signal.SIGKILL)
        for process in group:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for thread in shown:
            thread.join()  # all that was said has been heard
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_launcher() -> None:
    """In a process that ``launch`` started: end when that has ended, however it did."""

    def wait():
        os.read(0, 1)  # nothing comes but its end
        os._exit(1)

    if LAUNCHED in os.environ:
        _in_background(wait)


def _watch(
    group: list[subprocess.Popen], ends: queue.SimpleQueue[int], asked: list[int]
) -> int:
    """Until all have ended, or one has failed and the others had time to say why."""
    code, until = 0, float("inf")
    for _ in group:
        try:
            n = ends.get(timeout=min(until - time.monotonic(), threading.TIMEOUT_MAX))
        except (queue.Empty, ValueError):  # no time is left
            break
        if code == 0 and (ended := group[n].returncode) != 0:
            code = ended if ended > 0 else 128 - ended
            until = time.monotonic() + PATIENCE
            if not asked:
                how = f"with exit code {code}"
                if ended < 0:
                    how = f"of {signal.Signals(-ended).name}"
                print(
                    f"process {n} of {len(group)} ended {how}: ending the others",
                    file=sys.stderr,
                    flush=True,
                )
    return code


def _start(command: Sequence[str], n: int, told: dict[str, str]) -> subprocess.Popen:
    first = n == 0
    # In a group of its own, so that Ctrl-C comes here alone, once, and is handed on.
    return subprocess.Popen(
        command,
        env=os.environ | told,
        stdin=subprocess.PIPE,
        stdout=None if first else subprocess.DEVNULL,
        stderr=None if first else subprocess.PIPE,
        process_group=0,
    )


def _show(errors: IO[bytes], n: int) -> None:
    with errors:
        for line in errors:
            sys.stderr.write(f"[{n}] {line.decode(errors='replace')}")
            sys.stderr.flush()


def _wait(process: subprocess.Popen, n: int, ends: queue.SimpleQueue[int]) -> None:
    process.wait()
    ends.put(n)


def _in_background(work: Callable, *arguments) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _signal(group: Sequence[subprocess.Popen], number: int) -> None:
    for process in group:
        process.send_signal(number)  # none, to one that has ended


def _handle(numbers, handler) -> dict:
    """Set handlers where that is possible; what they were."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
