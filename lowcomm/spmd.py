"""Axes and meshes: the ground that one worker's code stands on.

A worker is a pure function of its own arrays and a named axis. Arrays of all workers
are stacked along a leading axis, ``[K, …]``, whatever runs them.

Calls of JAX whose name or behaviour changed between its versions live here, but for
those with which the ledger and the meter take JAX's own programs apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
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


class NotUniform(ValueError):
    """A value that must be equal on all workers differs between them."""


def names(axis: Axis) -> tuple[str, ...]:
    """The axis names of a name or a tuple of names."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def axis_size(axis: Axis) -> int:
    """How many workers there are along ``axis``; raises where it is not bound."""
    return math.prod(_size_of(name) for name in names(axis))


def _size_of(name: str) -> int:
    try:
        return lax.axis_size(name)
    except NameError:
        bound = jax.sharding.get_abstract_mesh().axis_names
        raise ValueError(
            f"axis {name!r} is not bound here"
            + (f" (this mesh has {', '.join(map(repr, bound))})" if bound else "")
            + ": call this inside spread(..., axis=...), shard_map, pmap or "
            f"vmap(axis_name={name!r}), or pass the axis= your program uses."
        ) from None


def is_bound(name: str) -> bool:
    """Whether this code runs inside something that binds the axis ``name``."""
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def worker_index(axis: Axis) -> jax.Array:
    """This worker's position along ``axis``, row-major over a tuple of axes."""
    index = jnp.int32(0)
    for name in names(axis):
        index = index * axis_size(name) + lax.axis_index(name)
    return index


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which JAX knows ``x`` to vary (none untracked)."""
    return varying_axes_of_type(jax.typeof(x))


def varying_axes_of_type(kind: Any) -> frozenset[str]:
    """The same of a type, as it stands in a jaxpr."""
    manual = getattr(kind, "mat", kind)
    return frozenset(getattr(manual, "varying", getattr(manual, "vma", ())))


def tracks_variance(axis: Axis) -> bool:
    """Whether JAX records here which values vary over ``axis`` (``check_vma=True``)."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    tracked = lambda a: a in manual and a in varying_axes(lax.axis_index(a))
    return all(map(tracked, names(axis)))


def vary(tree: PyTree, axis: Axis) -> PyTree:
    """Mark every array of ``tree`` as different on each worker; sends nothing.

    A mean is equal everywhere and typed so; what a worker keeps or returns is not.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    wanted = [a for a in names(axis) if a in manual]

    def mark(x):
        missing = tuple(a for a in wanted if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree) if wanted else tree


def check_uniform(x: Any, axis: Axis, what: str) -> None:
    """Raise ``NotUniform`` if JAX knows that ``x`` differs between workers."""
    differs = varying_axes(x) & set(names(axis))
    if differs:
        raise NotUniform(
            f"{what} differs between workers along axis "
            f"{', '.join(map(repr, sorted(differs)))}, so some would talk and others "
            "wait forever. Derive it from the step (passed with in_axes=None, not "
            "stacked), or reduce it over the axis first, for instance with lax.pmax."
        )


def worker_mesh(n: int | None = None, *, axis: str = AXIS) -> Mesh:
    """A mesh of ``n`` devices (all of them by default), one worker each."""
    devices = jax.devices()
    n = len(devices) if n is None else n
    if n < 1:
        raise ValueError(f"a mesh needs at least one worker, not {n}.")
    if n > len(devices):
        raise ValueError(
            f"{n} workers need {n} devices and JAX sees {len(devices)}. To simulate "
            f'them on the CPU call jax.config.update("jax_num_cpu_devices", {n}), or '
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={n}, before JAX "
            "starts; without a mesh, spread runs any number of virtual workers."
        )
    return Mesh(np.array(devices[:n]), (axis,))


def automatic(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """``mesh`` with automatic axes.

    On the explicit axes that ``jax.make_mesh`` makes, a shard_map over the worker
    axis alone compiles to all-gathers of whole leaves over the other axes, and newer
    versions of JAX make them for an ``AbstractMesh`` too.
    """
    if isinstance(mesh, AbstractMesh):
        return abstract_mesh(mesh.shape)
    return Mesh(mesh.devices, mesh.axis_names)


def stack(tree: PyTree, n: int, *, mesh: Mesh | None = None, axis: Axis = AXIS):
    """``n`` copies of every leaf along a new leading axis, one for each worker.

    With a mesh the copies are placed where the workers are.

    Example:
        >>> stack({"w": jnp.zeros(3)}, 8)["w"].shape
        (8, 3)
    """
    # Never weakly typed: no step returns such arrays, so the second would retrace.
    copy = lambda x: jnp.repeat(jnp.asarray(x, jnp.asarray(x).dtype)[None], n, 0)
    if n < 1:
        raise ValueError(f"there must be at least one worker, not {n}.")
    if isinstance(mesh, Mesh) and n != math.prod(mesh.shape[a] for a in names(axis)):
        raise ValueError(f"{n} copies do not fit a mesh of {dict(mesh.shape)} workers.")
    copies = jax.tree.map(copy, tree)
    return place(copies, mesh, axis=axis) if isinstance(mesh, Mesh) else copies


def place(tree: PyTree, mesh: Mesh, *, axis: Axis = AXIS) -> PyTree:
    """Put a stacked tree on ``mesh``, each worker's part on its own devices."""
    return jax.device_put(tree, NamedSharding(automatic(mesh), P(axis)))


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh to trace on, without devices; its axes are automatic."""
    automatic = (AxisType.Auto,) * len(sizes)  # not the default in every version
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=automatic)


def on_mesh(fn: Callable, mesh: Mesh | AbstractMesh, axis: Axis, in_specs: Any):
    """``fn`` on each worker's part of its arguments, its results stacked again.

    Only the worker axis is manual; the mesh's other axes are the compiler's.
    """

    def local(*parts):
        out = fn(*parts)
        return jax.tree.map(lambda y: vary(jnp.asarray(y)[None], axis), out)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=P(axis),
        axis_names=set(names(axis)),
    )

    def call(*args):
        # A mesh that the user set for the context must not be another one.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return mapped(*args)

    return call
