"""Axes and meshes: the ground that one worker's code stands on.

A worker is a pure function of its own arrays and a named axis. Arrays of all workers
are stacked along a leading axis, ``[K, …]``, whatever runs them.

Calls of JAX whose name or behaviour changed between its versions live here, but for
those with which the ledger and the meter take JAX's own programs apart.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from .meshes import (
    AXIS as AXIS,
    Axis as Axis,
    abstract_mesh as abstract_mesh,
    automatic as automatic,
    check_axes as check_axes,
    leaf_specs as leaf_specs,
    names as names,
    path_name as path_name,
    place as place,
    stack as stack,
    worker_mesh as worker_mesh,
)

PyTree = Any


class NotUniform(ValueError):
    """A value that must be equal on all workers differs between them."""


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


_SPREAD: contextvars.ContextVar[Axis | None] = contextvars.ContextVar(
    "spread", default=None
)


@contextlib.contextmanager
def spread_over(axis: Axis) -> Iterator[None]:
    """Within, workers are spread over ``axis``."""
    token = _SPREAD.set(axis)
    try:
        yield
    finally:
        _SPREAD.reset(token)


def workers_axis() -> Axis:
    """The axis, or axes, that the workers at hand are spread over."""
    return _SPREAD.get() or AXIS


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


def vary_with(tree: PyTree, *others: PyTree, axis: Axis) -> PyTree:
    """``vary`` over ``axis``, and over all that any of ``others`` varies over."""
    over = set(names(axis)).union(*map(varying_axes, jax.tree.leaves(others)))
    return vary(tree, tuple(sorted(over)))


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


def free_axes(axes: tuple[str, ...]) -> dict[str, int | None]:
    """The sizes of the automatic axes of the mesh around, None for axes not there."""
    mesh = jax.sharding.get_abstract_mesh()
    free = automatic_axes()
    return {name: mesh.shape[name] if name in free else None for name in axes}


def automatic_axes() -> tuple[str, ...]:
    """The axes of the mesh around that are left to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(a for a in mesh.axis_names if a not in mesh.manual_axes)


def leaves_are_divided() -> bool:
    """Whether the mesh around has automatic axes, over which leaves may be divided."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in automatic_axes())


def devices_of_worker() -> int:
    """How many the mesh around has for each worker, as far as the compiler has them."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in automatic_axes())


def row_by_row(x: jax.Array) -> jax.Array:
    """``x``, with a row for each of a worker's devices, of which each holds its own."""
    return _placed(x, P(automatic_axes()))


def on_all(x: jax.Array) -> jax.Array:
    """``x``, of which each of a worker's devices holds all."""
    return _placed(x, P())


def _placed(x: jax.Array, spec: P) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def on_shards(fn: Callable, axes: tuple[str, ...], in_specs: Any, out_specs: Any):
    """``fn`` on each shard, over axes that the mesh around leaves to the compiler."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return jax.shard_map(
        fn,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=tracks_variance(tuple(manual)),  # as it is around
    )


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
