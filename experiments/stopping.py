"""Stopping a run between two steps, so that it can be kept and gone on with.

The first SIGINT (Ctrl-C) or SIGTERM asks the run to stop after the step it is at; a
second one of the same kind does what it would do anyway. Of several processes each may
be asked. SIGTERM reaches JAX's service for preemptions there, by which all of them
agree on a step within a second or two, and SIGINT is handed on to it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from jax.experimental import multihost_utils

from lowcomm.checkpoint import Checkpoints


class Stopped(Exception):
    """The run was asked to stop, and what it needs to go on is saved."""

    def __init__(self, step: int, signal_number: int):
        """Before step number ``step``, by that signal."""
        super().__init__(f"stopped after {step} steps")
        # A run that makes room when it is told to has done nothing wrong.
        self.exit_code = 130 if signal_number == signal.SIGINT else 0


@dataclass
class Request:
    """The signal by which a stop was asked for; 0 as long as there was none here."""

    signal: int = 0
    together: bool = False  # with other processes

    def stops_before(self, step: int) -> bool:
        """Whether to stop now, after ``step`` steps; ask once after every step.

        Several processes that ask at the same steps are told so at one and the same.
        """
        if self.together:
            return multihost_utils.reached_preemption_sync_point(step)
        return self.signal != 0


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
    resize: bool = False  # what was kept, which may be of other workers

    def is_due(self, step: int, *, last: int) -> bool:
        """Whether to save after ``step`` steps of ``last``."""
        on_clock = self.every > 0 and step % self.every == 0
        return on_clock or (self.at_the_end and self.every > 0 and step == last)


@contextmanager
def stop_requests(*, together: bool = False) -> Iterator[Request]:
    """Within, SIGINT and SIGTERM are noted; outside the main thread, nothing is.

    ``together`` with other processes, which have joined, one process's are for all.
    """
    request, before = Request(together=together), {}

    def note(number, frame):
        request.signal = number
        signal.signal(number, before[number])
        if together:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX has been listening for
            return
        print("stopping after this step; once more to stop at once", file=sys.stderr)

    numbers = (signal.SIGINT,) if together else (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as of a background job
                before[number] = signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
