"""Arrays that several processes share: what each feeds, and what it can read.

JAX runs one program in all of them; arrays span them, and a process holds the parts on
its own devices. What a worker does is the same code as ever. A script that runs in one
process runs in many after ``join()``, if it feeds (``feed``) and reads (``at_hand``,
``unstack``) only what belongs to the workers of its own process.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .agreement import refuse_alone
from .spmd import AXIS, Axis, automatic, check_axes, names


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
