"""The job that a process belongs to: joining the others, stopping with them, leaving.

Who the others are is told by arguments or the environment, or else JAX finds a cluster
that started them. Either way the roll is called before JAX starts.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import jax
from jax.experimental import multihost_utils

from .agreement import PROCESSES
from .rollcall import parts, roll_call

COORDINATOR, PROCESS = "LOWCOMM_COORDINATOR", "LOWCOMM_PROCESS"
DEADLINE = "LOWCOMM_DEADLINE"
BIND, ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS", "JAX_COORDINATOR_ADDRESS"
# Where it is set there are others whom JAX would find, and how many they are.
_CLUSTERS = {
    "SLURM_STEP_NODELIST": "SLURM_NTASKS",
    "OMPI_MCA_orte_hnp_uri": "OMPI_COMM_WORLD_SIZE",
}


class Job(NamedTuple):
    """What JAX has to know of a job, and of the one process of it that runs here."""

    coordinator: str  # host:port of process 0
    processes: int
    process: int
    bind: str  # where process 0 listens
    devices: Sequence[int] | None = None  # of this process; None for all it sees


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    deadline: float | None = None,
) -> int:
    """Join the job that this process belongs to, before JAX starts; how many it has.

    ``coordinator`` is ``host:port`` of process 0, ``process`` this one's number, from
    0. Where they are not given they are taken from the environment,
    ``LOWCOMM_COORDINATOR``, ``LOWCOMM_PROCESSES`` and ``LOWCOMM_PROCESS``, and where it
    has none, JAX looks for a job itself: of SLURM, Open MPI, Kubernetes with JobSets,
    GKE and TPU pods. Without any job, or where this is all of it, nothing happens, and
    1 is returned.

    All must come within ``deadline`` seconds (``LOWCOMM_DEADLINE``, else 300). They
    call the roll first (``lowcomm.rollcall``), so that who is missing is named. Process
    0 listens at the address that was given and nowhere else; in a job that JAX found,
    where JAX's own service would, on all its addresses.

    From then on an error that nobody catches ends this process at once: as Python ends
    otherwise, JAX would wait for the others, which wait for this one. SIGTERM ends it
    no more; it is a notice of preemption, which ``preempted`` tells the loop of.

    Raises:
        RollCallError: who did not come, or that nobody was at the address.
        ValueError: an address without a port, numbers that are missing or no numbers,
            numbers without an address.
        RuntimeError: JAX has started already, and there are others.

    Example:
        >>> join()  # nobody has started others
        1
    """
    if jax.distributed.is_initialized():
        return _count()
    if deadline is None:
        deadline = _deadline()
    _check_deadline(deadline)
    job = _told(coordinator, processes, process)
    if _has_started():
        _refuse_others(1 if job is None else job.processes)
        return 1
    job = job or _found(deadline)
    if job is None or job.processes == 1:
        return 1
    roll_call(
        job.coordinator,
        process=job.process,
        processes=job.processes,
        deadline=deadline,
        bind=job.bind,
    )
    with contextlib.suppress(AttributeError):  # an option of JAX that may go one day
        jax.config.update("jax_enable_preemption_service", True)
    jax.distributed.initialize(
        job.coordinator,
        job.processes,
        job.process,
        job.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=math.ceil(deadline),
        heartbeat_timeout_seconds=30,
        shutdown_timeout_seconds=300,  # for the one that writes the results
        coordinator_bind_address=job.bind,
    )
    _end_at_once()
    return job.processes


def leave(code: int) -> NoReturn:
    """End this process; with an error, without waiting for processes that work on."""
    if code and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def preempted(step: int) -> bool:
    """Whether all processes shall save now and stop, since one of them got SIGTERM.

    To be asked by all of them at every step from the first on, with its number: it is
    true on all at the same step. In one process SIGTERM is what it ever was, and this
    is False. Sends nothing between devices.

    Example:
        >>> for t in range(3):
        ...     if preempted(t):
        ...         break  # after saving what steps 0 to t - 1 made
        >>> t
        2
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return False
    return bool(multihost_utils.reached_preemption_sync_point(step))


def _count() -> int:
    """How many processes have joined; JAX's own function would start JAX."""
    state = getattr(getattr(jax, "_src", None), "distributed", None)
    count = getattr(getattr(state, "global_state", None), "num_processes", None)
    return jax.process_count() if count is None else count


def _deadline() -> float:
    try:
        return float(os.environ.get(DEADLINE, 300))
    except ValueError:
        raise ValueError(
            f"{DEADLINE} must be seconds, not {os.environ[DEADLINE]!r}."
        ) from None


def _check_deadline(seconds: float) -> None:
    """Raise unless one can wait so long, and does."""
    if not 0 < seconds < math.inf:
        raise ValueError(f"a deadline of {seconds} seconds: give a number above 0.")


def _told(
    coordinator: str | None, processes: int | None, process: int | None
) -> Job | None:
    """The job of the arguments and the environment, if they have one."""
    coordinator = coordinator or os.environ.get(COORDINATOR)
    _refuse_halves(coordinator, {PROCESSES: processes, PROCESS: process})
    if coordinator is None:
        return None
    parts(coordinator)  # raises where it is no address
    processes = _number(processes, PROCESSES)
    process = _number(process, PROCESS)
    if not 0 <= process < processes:
        raise ValueError(
            f"process={process} of {processes}: they are numbered from 0 to "
            f"{processes - 1}."
        )
    return Job(coordinator, processes, process, os.environ.get(BIND) or coordinator)


def _found(deadline: float) -> Job | None:
    """The job in which JAX finds this process to be, if it finds one."""
    # What jax.distributed.initialize() asks first; it has no public name.
    from jax._src.clusters import ClusterEnv

    own = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    coordinator, processes, process, devices = (
        ClusterEnv.auto_detect_unset_distributed_params(
            coordinator_address=os.environ.get(ADDRESS),
            num_processes=None,
            process_id=None,
            local_device_ids=list(map(int, own.split(","))) if own else None,
            cluster_detection_method=None,
            initialization_timeout=math.ceil(deadline),
        )
    )
    if coordinator is None or processes is None or process is None:
        # JAX knows jobs of Open MPI by where the launcher is, if that is told.
        others = os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
        if others != "1" or ADDRESS in os.environ:
            raise ValueError(
                "this process has others, as "
                + (ADDRESS if ADDRESS in os.environ else "OMPI_COMM_WORLD_SIZE")
                + f" says, and JAX finds no job of theirs: set {COORDINATOR}, "
                f"{PROCESSES} and {PROCESS}."
            )
        return None
    host, port = _parts_of(coordinator, "the job's first host and JAX_COORDINATOR_PORT")
    bind = os.environ.get(BIND)
    if bind is None:
        bind = f"[::]:{port}"  # as JAX has it
    else:
        _parts_of(bind, BIND)
    coordinator = f"[{host}]:{port}" if ":" in host else coordinator
    return Job(coordinator, processes, process, bind, devices)


def _parts_of(address: str, source: str) -> tuple[str, int]:
    try:
        return parts(address)
    except ValueError:
        raise ValueError(
            f"{source} should make an address, host:port, and make {address!r}."
        ) from None


def _refuse_others(told: int) -> None:
    """Raise where there are others, whom JAX has started without."""
    several = f"of {told}" if told > 1 else ""
    for mark, variable in _CLUSTERS.items():
        count = os.environ.get(variable, "1")
        if mark in os.environ and count != "1":
            several = several or f"of several ({variable}={count})"
    if several:
        raise RuntimeError(
            f"this process is one {several} and JAX has started without the others, "
            "whom it can join no more: call join() before anything else that uses JAX, "
            "such as jax.devices()."
        )


def _refuse_halves(coordinator: str | None, numbers: dict[str, int | None]) -> None:
    """Raise where a number is told without an address: it would train alone."""
    for variable, given in numbers.items():
        if coordinator is None and (given is not None or variable in os.environ):
            raise ValueError(
                f"{variable} is given and {COORDINATOR} is not set: give host:port of "
                "process 0 as well, or neither."
            )


def _number(given: int | str | None, variable: str) -> int:
    text = os.environ.get(variable) if given is None else str(given)
    if text is None:
        raise ValueError(f"the coordinator is given and {variable} is not set.")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable} must be a number, not {text!r}.") from None


def _has_started() -> bool:
    """Whether JAX has: from then on it does not take another number of devices."""
    devices = getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009, for pyright
    try:
        jax.config.update("jax_num_cpu_devices", devices + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", devices)
    return False


def _end_at_once() -> None:
    """Make an error that nobody catches the end of this process."""
    show = sys.excepthook

    def show_and_leave(*error):
        show(*error)
        leave(130 if isinstance(error[1], KeyboardInterrupt) else 1)

    sys.excepthook = show_and_leave
