"""Many processes, each with some of the devices: joining, agreeing, feeding, reading.

JAX runs one program in all of them; arrays span them, and a process holds the parts on
its own devices. What a worker does is the same code as ever. A script that runs in one
process runs in many after ``join()``, if it feeds (``feed``) and reads (``at_hand``,
``unstack``) only what belongs to the workers of its own process.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from typing import Any, NoReturn

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .agreement import PROCESSES, refuse_alone
from .rollcall import parts, roll_call
from .spmd import AXIS, Axis, automatic, check_axes, names

COORDINATOR, PROCESS = "LOWCOMM_COORDINATOR", "LOWCOMM_PROCESS"
DEADLINE = "LOWCOMM_DEADLINE"
# Where it is set JAX can find the others by itself, and how many they are.
_CLUSTERS = {
    "SLURM_STEP_NODELIST": "SLURM_NTASKS",
    "OMPI_MCA_orte_hnp_uri": "OMPI_COMM_WORLD_SIZE",
}


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
    GKE and TPU pods. Without any job nothing happens, and 1 is returned.

    All must come within ``deadline`` seconds (``LOWCOMM_DEADLINE``, else 300). Given
    the address, they call the roll first (``lowcomm.rollcall``), and nothing of JAX's
    service listens anywhere else.

    From then on an error that nobody catches ends this process at once: as Python ends
    otherwise, JAX would wait for the others, which wait for this one. SIGTERM ends it
    no more; it is a notice of preemption, which ``preempted`` tells the loop of.

    Raises:
        RollCallError: who did not come, or that nobody was at the address.
        ValueError: an address without a port, numbers that are missing or no numbers,
            numbers without an address.
        RuntimeError: JAX has started already.

    Example:
        >>> join()  # nobody has started others
        1
    """
    if jax.distributed.is_initialized():
        return _count()
    coordinator = coordinator or os.environ.get(COORDINATOR)
    _refuse_halves(coordinator, {PROCESSES: processes, PROCESS: process})
    if deadline is None:
        try:
            deadline = float(os.environ.get(DEADLINE, 300))
        except ValueError:
            raise ValueError(
                f"{DEADLINE} must be seconds, not {os.environ[DEADLINE]!r}."
            ) from None
    how: dict[str, Any] = {"initialization_timeout": math.ceil(deadline)}
    if coordinator is not None:
        parts(coordinator)
        processes = _number(processes, PROCESSES)
        process = _number(process, PROCESS)
        if not 0 <= process < processes:
            raise ValueError(
                f"process={process} of {processes}: they are numbered from 0 to "
                f"{processes - 1}."
            )
        if processes == 1:
            return 1
        if _has_started():
            raise RuntimeError(
                "JAX has started, and can join nobody any more: call join() before "
                "anything else that uses JAX, such as jax.devices()."
            )
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or coordinator
        roll_call(
            coordinator,
            process=process,
            processes=processes,
            deadline=deadline,
            bind=bind,
        )
        how |= {"coordinator_bind_address": bind}
        how |= {"cluster_detection_method": "deactivate"}
    if _has_started():
        _refuse_others()
        return 1
    with contextlib.suppress(AttributeError):  # an option of JAX that may go one day
        jax.config.update("jax_enable_preemption_service", True)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            heartbeat_timeout_seconds=30,
            shutdown_timeout_seconds=300,  # for the one that writes the results
            **how,
        )
    except ValueError as problem:
        if coordinator is None and "coordinator_address" in str(problem):
            return 1  # JAX found no job
        raise
    _end_at_once()
    return _count()


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


def workers_at_hand(mesh: Mesh, *, axis: Axis = AXIS) -> np.ndarray:
    """The workers that have a device of this process, ascending; all, in one process.

    Example:
        >>> from lowcomm import worker_mesh
        >>> workers_at_hand(worker_mesh(4))
        array([0, 1, 2, 3])
    """
    check_axes(mesh, axis)
    refuse_alone()
    places = [mesh.axis_names.index(name) for name in names(axis)]
    devices = np.moveaxis(mesh.devices, places, range(len(places)))
    groups = devices.reshape(math.prod(mesh.shape[name] for name in names(axis)), -1)
    me = jax.process_index()
    own = [i for i, g in enumerate(groups) if me in {d.process_index for d in g}]
    return np.array(own, int)


def feed(own: Any, mesh: Mesh, *, axis: Axis = AXIS) -> Any:
    """Stacked arrays ``[K, …]`` from the parts of the workers of each process.

    ``own`` is what this process has: a tree whose leaves hold the parts of its workers,
    ``workers_at_hand(mesh)``, in order. Sends nothing.

    Raises:
        ValueError: a leaf with another number of parts.

    Example:
        >>> from lowcomm import worker_mesh
        >>> feed(np.arange(8.0), worker_mesh(8)).shape
        (8,)
    """
    sharding = NamedSharding(automatic(mesh), P(axis))
    mine = len(workers_at_hand(mesh, axis=axis))
    workers = math.prod(mesh.shape[name] for name in names(axis))

    def whole(path, x):
        x = np.asarray(x)
        if x.ndim == 0 or x.shape[0] != mine:
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path) or '(the tree)'} of shape {x.shape} "
                f"must hold the parts of the {mine} workers of this process, "
                f"[{mine}, ...]."
            )
        shape = (workers, *x.shape[1:])
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return jax.tree_util.tree_map_with_path(whole, own)


def at_hand(tree: Any) -> Any:
    """The parts of stacked arrays that this process holds, on the host.

    ``[K, …]`` becomes ``[workers of this process, …]``, all of them in one process.
    Sends nothing.

    Raises:
        ValueError: a worker's part that is divided over processes.
    """
    return jax.tree.map(lambda x: _own_rows(x)[1], tree)


def unstack(tree: Any, worker: int | None = None) -> Any:
    """What one worker holds of a stacked tree; the inverse of ``stack``.

    By default worker 0; of arrays that several processes share, the first of this
    process, on the host. Sends nothing.

    Raises:
        ValueError: the worker belongs to another process, or there is none of this
            number.

    Example:
        >>> import jax.numpy as jnp
        >>> from lowcomm import stack
        >>> unstack(stack({"w": jnp.zeros(3)}, 8))["w"].shape
        (3,)
    """

    def part(x):
        if worker is not None and not -len(x) <= worker < len(x):
            raise ValueError(f"there is no worker {worker} of {len(x)}.")
        if _is_whole(x):
            return x[worker or 0]
        numbers, rows = _own_rows(x)
        wanted = numbers[0] if worker is None else worker % x.shape[0]
        if wanted not in numbers:
            raise ValueError(
                f"worker {wanted} belongs to another process: process "
                f"{jax.process_index()} holds {', '.join(map(str, numbers))}."
            )
        return rows[numbers.index(wanted)]

    return jax.tree.map(part, tree)


def _is_whole(x: Any) -> bool:
    traced = isinstance(x, Tracer)  # of which nobody asks where it lies
    return traced or not isinstance(x, jax.Array) or x.is_fully_addressable


def _own_rows(x: Any) -> tuple[list[int], np.ndarray]:
    """The workers of this process, and their parts."""
    if _is_whole(x) or x.is_fully_replicated:
        whole = np.asarray(x)
        return list(range(len(whole) if whole.ndim else 0)), whole
    pieces = {str(s.index): s for s in x.addressable_shards}.values()  # each but once
    rows = {i for s in pieces for i in range(*s.index[0].indices(x.shape[0]))}
    numbers, filled = sorted(rows), 0
    own = np.empty((len(numbers), *x.shape[1:]), x.dtype)
    for piece in pieces:
        start, *_ = piece.index[0].indices(x.shape[0])
        first = numbers.index(start)
        place = slice(first, first + piece.data.shape[0])
        own[(place, *piece.index[1:])] = np.asarray(piece.data)
        filled += piece.data.size
    if filled < own.size:
        raise ValueError(
            f"an array of shape {x.shape} is divided over processes within a worker "
            f"({x.sharding.spec}): no process holds the whole of a worker's part."
        )
    return numbers, own


def _count() -> int:
    """How many processes have joined; JAX's own function would start JAX."""
    state = getattr(getattr(jax, "_src", None), "distributed", None)
    count = getattr(getattr(state, "global_state", None), "num_processes", None)
    return jax.process_count() if count is None else count


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


def _refuse_others() -> None:
    """Raise where there are some that JAX would have found, had it not started."""
    for mark, variable in _CLUSTERS.items():
        count = os.environ.get(variable, "1")
        if mark in os.environ and count != "1":
            raise RuntimeError(
                f"this process is one of several ({variable}={count}) and JAX has "
                "started without the others: call join() before anything else that "
                "uses JAX."
            )


def _end_at_once() -> None:
    """Make an error that nobody catches the end of this process."""
    show = sys.excepthook

    def show_and_leave(*error):
        show(*error)
        leave(130 if isinstance(error[1], KeyboardInterrupt) else 1)

    sys.excepthook = show_and_leave
