"""Stopping a run between two steps, so that it can be kept and gone on with.

The first SIGINT (Ctrl-C) or SIGTERM asks the run to stop after the step it is at; a
second one of the same kind does what it would do anyway.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from lowcomm.checkpoint import Checkpoints


class Stopped(Exception):
    """The run was asked to stop, and what it needs to go on is saved."""

    def __init__(self, step: int, signal_number: int):
        """Before step number ``step``, by that signal."""
        super().__init__(f"stopped after {step} steps")
        self.exit_code = 128 + signal_number


@dataclass
class Request:
    """The signal by which a stop was asked for; 0 as long as there was none."""

    signal: int = 0


class Kept(NamedTuple):
    """Where a run is kept, how often, and what may ask it to stop.

    A run that is killed loses the steps since its last complete checkpoint: at most
    ``every``, and those that ran while one was being written (fewer than ``every``
    more, since a save waits for the one before).
    """

    checkpoints: Checkpoints
    every: int  # steps; 0 is never
    request: Request
    at_the_end: bool = False

    def is_due(self, step: int, *, last: int) -> bool:
        """Whether to save after ``step`` steps of ``last``."""
        on_clock = self.every > 0 and step % self.every == 0
        at_the_end = self.at_the_end and self.every > 0 and step == last
        return on_clock or at_the_end or self.request.signal != 0


@contextmanager
def stop_requests() -> Iterator[Request]:
    """Within, SIGINT and SIGTERM are noted; outside the main thread, nothing is."""
    request, before = Request(), {}

    def note(number, frame):
        request.signal = number
        signal.signal(number, before[number])
        print("stopping after this step; once more to stop at once", file=sys.stderr)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as of a background job
                before[number] = signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
