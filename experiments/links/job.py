"""One process on each host, and whoever directs them: the same request to all.

A host would have its cores to itself. Here all share those of this machine, and with
whatever else runs: so that a host that has something to do need not wait until others
have used up their turn (4 ms, forty times what a small message takes), processes on
hosts run before all others where the machine permits it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from .hosts import Host
from .namespaces import SCRATCH, Refused, run

PORT = 41000
FIRST = "chrt --rr 1"


class Broken(RuntimeError):
    """A process on a host that ended or does not answer."""


class Job:
    """Processes that answer requests together; a context that ends them.

    Args:
        hosts: where they run, one each.
        command: what each runs, ``python -m experiments.links.host`` by default.

    Raises:
        Broken: one of them ended, or did not answer in time; tells what it last said.
    """

    def __init__(self, hosts: Sequence[Host], command: Sequence[str] = ()):
        """See the class."""
        module = [sys.executable, "-m", "experiments.links.host"]
        self.hosts, self.command = hosts, list(command) or module

    def __enter__(self) -> Job:
        """Start all."""
        self.folder = tempfile.TemporaryDirectory(prefix="lowcomm-links-", dir=SCRATCH)
        self.processes: list[subprocess.Popen] = []
        self.answers: list[queue.Queue] = []
        first = shlex.split(FIRST) if runs_first() else []
        for host in self.hosts:
            with open(self._log(host), "wb") as log:
                process = subprocess.Popen(
                    [*shlex.split(host.command("")), *first, *self.command],
                    env={
                        **environment(self.hosts, host),
                        # What was compiled for one seed serves the next.
                        "JAX_COMPILATION_CACHE_DIR": str(
                            Path(self.folder.name) / "jax"
                        ),
                    },
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self.processes.append(process)
            self.answers.append(queue.Queue())
            reading = (process.stdout, self.answers[-1])
            threading.Thread(target=_read, args=reading, daemon=True).start()
        return self

    def __exit__(self, *problem: Any) -> None:
        """End all."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                _of(process.stdin).close()
        self.folder.cleanup()

    def ask(self, do: str, *, patience: float = 300.0, **request: Any) -> list[Any]:
        """The answers of all hosts to one request."""
        line = json.dumps({"do": do, **request})
        for host, process in zip(self.hosts, self.processes, strict=True):
            try:
                _of(process.stdin).write(line + "\n")
                _of(process.stdin).flush()
            except BrokenPipeError:
                raise self._broken(host, "ended") from None
        until = time.monotonic() + patience
        found: dict[int, Any] = {}
        while len(found) < len(self.hosts):
            for host, answers in zip(self.hosts, self.answers, strict=True):
                if host.number in found:
                    continue
                try:
                    answer = answers.get(timeout=0.02)
                except queue.Empty:
                    if time.monotonic() > until:
                        problem = f"did not answer {line} in {patience:g} s"
                        raise self._broken(host, problem) from None
                    continue
                if answer is None:
                    raise self._broken(host, f"ended while it was to do {line}")
                found[host.number] = json.loads(answer)
        return [found[host.number] for host in self.hosts]

    def _log(self, host: Host) -> Path:
        return Path(self.folder.name) / f"{host.name}.log"

    def _broken(self, host: Host, what: str) -> Broken:
        said = self._log(host).read_text(errors="replace")[-2000:]
        return Broken(f"the process on {host.name} {what}; it last said:\n{said}")


def runs_first() -> bool:
    """Whether processes may run before all others here."""
    try:
        run(f"{FIRST} true")
    except (Refused, OSError):
        return False
    return True


def environment(hosts: Sequence[Host], host: Host) -> dict[str, str]:
    """What a process on ``host`` finds in its environment to join the others.

    First as lowcomm reads it, then as PyTorch does.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    return {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "LOWCOMM_COORDINATOR": f"{hosts[0].name}:{PORT}",
        "LOWCOMM_PROCESSES": str(len(hosts)),
        "LOWCOMM_PROCESS": str(host.number),
        "MASTER_ADDR": hosts[0].name,
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(len(hosts)),
        "RANK": str(host.number),
        "GLOO_SOCKET_IFNAME": "eth0",
    }


def _of(stream: IO[str] | None) -> IO[str]:
    assert stream is not None  # it was asked for
    return stream


def _read(stream: Any, answers: queue.Queue) -> None:
    """Lines as they come, and None at the end."""
    with stream:
        for line in stream:
            answers.put(line)
    answers.put(None)
