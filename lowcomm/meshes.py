"""Meshes of workers, and where the leaves of stacked trees lie on them.

A worker is one device, or a group of devices that form further axes of the mesh. A
stacked tree ``[K, …]`` is divided over the workers' axis, and each worker's part over
its own devices as ``PartitionSpec``s say.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec as P,
)

AXIS = "workers"
Axis = str | tuple[str, ...]
PyTree = Any


def names(axis: Axis) -> tuple[str, ...]:
    """The axis names of a name or a tuple of names."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def worker_mesh(
    n: int | None = None,
    *,
    inside: Mapping[str, int] | None = None,
    axis: str = AXIS,
) -> Mesh:
    """A mesh of ``n`` workers, one for each device unless ``inside`` says otherwise.

    ``inside`` names the axes that the devices of one worker form, with their sizes:
    ``{"fsdp": 4, "tensor": 2}`` makes a worker of 8 devices. Without ``n`` there are
    as many workers as the devices suffice for. A worker's devices are neighbours in the
    order of slices, processes and devices: where the numbers allow it they belong to
    one process, and they always belong to one slice.

    Raises:
        ValueError: more devices than JAX sees; with several processes or slices, fewer;
            a worker that would straddle two slices.

    Example:
        >>> dict(worker_mesh(2, inside={"fsdp": 4}).shape)
        {'workers': 2, 'fsdp': 4}
    """
    inside = dict(inside or {})
    if axis in inside or any(size < 1 for size in inside.values()):
        raise ValueError(
            f"inside={inside} must name other axes than {axis!r}, with sizes of 1 or "
            "more."
        )
    groups = devices_of_workers(jax.devices(), n, math.prod(inside.values()))
    return Mesh(groups.reshape(len(groups), *inside.values()), (axis, *inside))


def devices_of_workers(devices: Sequence[Any], n: int | None, group: int) -> np.ndarray:
    """``[n, group]``: whose devices are whose, see ``worker_mesh``."""
    # Where JAX lists them otherwise, as it may the chips of a slice.
    devices = sorted(devices, key=_place)
    if n is None:
        n = max(1, len(devices) // group)
    if n < 1:
        raise ValueError(f"a mesh needs at least one worker, not {n}.")
    _check_number(n, group, devices)
    chosen = np.empty(n * group, object)
    chosen[:] = devices[: n * group]
    groups = chosen.reshape(n, group)
    for worker, members in enumerate(groups):
        slices = sorted({_slice(device) for device in members})
        if len(slices) > 1:
            each = collections.Counter(map(_slice, devices))
            raise ValueError(
                f"worker {worker} of {group} devices would straddle the slices "
                f"{slices} of {each[slices[0]]} devices: choose sizes whose product "
                "divides that number."
            )
    return groups


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def _place(device: Any) -> tuple[int, int, int]:
    return _slice(device), device.process_index, device.id


def _check_number(n: int, group: int, devices: Sequence[Any]) -> None:
    """Raise unless there are devices for ``n`` workers of ``group``, and none alone."""
    needed = n * group
    one = n == 1
    who = f"{n} worker{'' if one else 's'}" + (f" of {group}" if group > 1 else "")
    there = f"{needed} devices and JAX sees {len(devices)}"
    if needed > len(devices):
        raise ValueError(
            f"{who} {'needs' if one else 'need'} {there}. To simulate them on the CPU "
            f'call jax.config.update("jax_num_cpu_devices", {needed}), or set '
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}, before JAX "
            "starts; without a mesh, spread runs any number of virtual workers."
        )
    several = len({_place(device)[:2] for device in devices}) > 1
    if needed < len(devices) and several:
        raise ValueError(
            f"{who} {'takes' if one else 'take'} {there}: a process or slice whose "
            "devices are left out would have nothing to do. Make as many workers, or "
            f"as large ones, as take {len(devices)}."
        )


def automatic(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """``mesh`` with automatic axes.

    On the explicit axes that ``jax.make_mesh`` makes, a shard_map over the worker
    axis alone compiles to all-gathers of whole leaves over the other axes, and newer
    versions of JAX make them for an ``AbstractMesh`` too.
    """
    if isinstance(mesh, AbstractMesh):
        return abstract_mesh(mesh.shape)
    return Mesh(mesh.devices, mesh.axis_names)


def stack(
    tree: PyTree,
    n: int,
    *,
    mesh: Mesh | None = None,
    axis: Axis = AXIS,
    specs: Any = None,
) -> PyTree:
    """``n`` copies of every leaf along a new leading axis, one for each worker.

    With a mesh the copies are placed where the workers are. Where a worker is itself
    a group of devices, ``specs`` says how one worker's leaves lie on the mesh's other
    axes: see ``per_shard``.

    Example:
        >>> stack({"w": jnp.zeros(3)}, 8)["w"].shape
        (8, 3)
    """
    if n < 1:
        raise ValueError(f"there must be at least one worker, not {n}.")
    if not isinstance(mesh, Mesh):
        return jax.tree.map(lambda x: _copies(x, n), tree)
    check_axes(mesh, axis)
    if n != math.prod(mesh.shape[a] for a in names(axis)):
        raise ValueError(f"{n} copies do not fit a mesh of {dict(mesh.shape)} workers.")

    def put(x, sharding):
        if not _is_at_hand(x):
            return jax.device_put(_copies(x, n), sharding)
        # Each device is given its own part, and none the copies of all workers.
        copies = np.broadcast_to(np.asarray(jnp.asarray(x)), (n, *jnp.shape(x)))
        part = lambda index: jnp.array(copies[index])
        return jax.make_array_from_callback(copies.shape, sharding, part)

    return jax.tree.map(put, tree, _shardings(tree, mesh, axis, specs))


def _copies(x: Any, n: int) -> jax.Array:
    # Never weakly typed: no step returns such arrays, so the second would retrace.
    return jnp.repeat(jnp.asarray(x, jnp.asarray(x).dtype)[None], n, 0)


def _is_at_hand(x: Any) -> bool:
    """Whether the host can read it: no tracer, no key, no part of it elsewhere."""
    if isinstance(x, Tracer) or jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def check_axes(mesh: Mesh | AbstractMesh, axis: Axis) -> None:
    """Raise unless ``mesh`` has the worker axis."""
    missing = sorted(set(names(axis)) - set(mesh.axis_names))
    if missing:
        raise ValueError(
            f"the mesh has axes {mesh.axis_names} and no {missing}: "
            "pass axis= or build the mesh with worker_mesh(axis=...)."
        )


def place(tree: PyTree, mesh: Mesh, *, axis: Axis = AXIS, specs: Any = None) -> PyTree:
    """Put a stacked tree on ``mesh``, each worker's part on its own devices."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    return jax.device_put(tree, _shardings(one, mesh, axis, specs))


def _shardings(one: PyTree, mesh: Mesh, axis: Axis, specs: Any) -> PyTree:
    """Where the leaves lie that are stacked of one worker's."""
    others = {name: n for name, n in mesh.shape.items() if name not in names(axis)}
    where = lambda spec: NamedSharding(automatic(mesh), P(axis, *spec))
    return jax.tree.map(where, leaf_specs(specs, one, others))


def leaf_specs(specs: Any, tree: PyTree, sizes: Mapping[str, int | None]) -> PyTree:
    """One ``PartitionSpec`` for each leaf of ``tree``, over axes of these sizes.

    ``specs`` is a prefix of ``tree`` whose leaves are specs (None: not divided), or a
    function from a leaf's path, such as ``"decoder/kernel"``, to one. A size of None is
    an axis that is not here. Raises ``ValueError`` where a spec does not fit its leaf.
    """
    is_spec = lambda s: s is None or isinstance(s, P)
    if callable(specs) and not is_spec(specs):
        pick = lambda path, _: _or_whole(specs(path_name(path)))
        chosen = jax.tree_util.tree_map_with_path(pick, tree)
    else:
        try:
            spread_out = lambda s, part: jax.tree.map(lambda _: _or_whole(s), part)
            chosen = jax.tree.map(spread_out, specs, tree, is_leaf=is_spec)
        except (ValueError, TypeError) as problem:
            raise ValueError(
                "specs must be a prefix of the tree with a PartitionSpec (or None) "
                f"for every leaf, and does not match it: {problem}"
            ) from problem

    def fitting(path, x, spec):
        where = jax.tree_util.keystr(path) or "(the tree)"
        if not isinstance(spec, P):
            raise ValueError(
                f"the spec of leaf {where} is {spec!r}: give a PartitionSpec or None."
            )
        if len(spec) > jnp.ndim(x):
            raise ValueError(
                f"the spec of leaf {where}, {spec}, divides {len(spec)} dimensions and "
                f"one worker's leaf has shape {jnp.shape(x)}."
            )
        for dim, part in zip(jnp.shape(x), spec, strict=False):
            divided = () if part is None else names(part)
            if unknown := [name for name in divided if name not in sizes]:
                raise ValueError(
                    f"the spec of leaf {where}, {spec}, names the axis {unknown[0]!r}, "
                    f"which is none of {tuple(sizes)}."
                )
            pieces = math.prod(sizes[name] or 1 for name in divided)
            if dim % pieces:
                raise ValueError(
                    f"leaf {where} of shape {jnp.shape(x)} does not divide by {spec}: "
                    f"{dim} entries, {pieces} shards."
                )
        return spec

    return jax.tree_util.tree_map_with_path(fitting, tree, chosen)


def path_name(path: Any) -> str:
    """A leaf's path as names, such as ``"decoder/kernel"``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _or_whole(spec: Any) -> Any:
    return P() if spec is None else spec


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh to trace on, without devices; its axes are automatic."""
    automatic = (AxisType.Auto,) * len(sizes)  # not the default in every version
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=automatic)
