"""A part of this machine that is its own: network, mounts, host name and processes.

What is done there changes nothing outside, and all of it ends with the process that
entered it, however that ends: interfaces are gone, no process survives, nor what was
written to ``SCRATCH``, and ``/etc/hosts`` is what it was.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

SKIPPED = 77  # the exit status by which test drivers know what could not be run here
INSIDE = "LOWCOMM_LINKS_INSIDE"
SCRATCH = "/dev/shm"  # private, once entered
OUTER = (
    "setpriv --pdeathsig SIGKILL unshare --net --mount --uts --pid "
    "--fork --kill-child --mount-proc --propagation private --"
)
TOOLS = ("setpriv", "unshare", "nsenter", "mount", "ip", "tc")
TRIAL = (
    "ip link add trial type bridge && ip link add near type veth peer name far "
    "&& tc qdisc add dev near root tbf rate 50mbit burst 8kb limit 64mb"
)


class Refused(RuntimeError):
    """A command that did not do what it should, and what it said."""


def run(command: str) -> None:
    """Run a command of the system to its end.

    Raises:
        Refused: it fails; tells why.

    Example:
        >>> run("ls /nowhere")
        Traceback (most recent call last):
        experiments.links.namespaces.Refused: `ls /nowhere`: ls: cannot access ...
    """
    done = subprocess.run(
        shlex.split(command), capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Refused(f"`{command}`: {said[-1] if said else 'it gave no reason'}")


def why_not() -> str | None:
    """Why there can be no shaped link here, or None where there can.

    Tries what the network is made of, in a namespace that ends with the trial.
    """
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "only root may make network namespaces; run it as root"
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        return f"{', '.join(missing)} not found; install util-linux and iproute2"
    try:
        run(f"{OUTER} sh -c {shlex.quote(TRIAL)}")
    except (Refused, OSError) as problem:
        return f"this kernel or container permits no shaped network: {problem}"
    return None


def is_inside() -> bool:
    """Whether this process is the first of its own part of the machine."""
    return os.environ.get(INSIDE) == "1" and os.getpid() == 1


def enter(module: str, arguments: Sequence[str]) -> None:
    """Go on as ``python -m module arguments`` in a part of the machine of its own.

    Returns at once where this process is there already; else it waits for the other
    process, and ends with its exit status. SIGTERM, and any other end, ends both.
    """
    if is_inside():
        run(f"mount -t tmpfs tmpfs {SCRATCH}")
        return
    command = [*shlex.split(OUTER), sys.executable, "-m", module, *arguments]
    child = subprocess.Popen(command, env={**os.environ, INSIDE: "1"})
    signal.signal(signal.SIGTERM, lambda *_: child.kill())
    while True:
        try:
            status = child.wait()
        except KeyboardInterrupt:  # of a terminal, which tells the other one as well
            continue
        sys.exit(status if status >= 0 else 128 - status)
