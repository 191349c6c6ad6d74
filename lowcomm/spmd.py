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
from collections.abc import Callable, Iterator, Mapping
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
    # Never weakly typed: no step returns such arrays, so the second would retrace.
    copy = lambda x: jnp.repeat(jnp.asarray(x, jnp.asarray(x).dtype)[None], n, 0)
    if n < 1:
        raise ValueError(f"there must be at least one worker, not {n}.")
    copies = jax.tree.map(copy, tree)
    if not isinstance(mesh, Mesh):
        return copies
    check_axes(mesh, axis)
    if n != math.prod(mesh.shape[a] for a in names(axis)):
        raise ValueError(f"{n} copies do not fit a mesh of {dict(mesh.shape)} workers.")
    return place(copies, mesh, axis=axis, specs=specs)


def unstack(tree: PyTree, worker: int = 0) -> PyTree:
    """What one worker holds of a stacked tree; the inverse of ``stack``.

    Example:
        >>> unstack(stack({"w": jnp.zeros(3)}, 8))["w"].shape
        (3,)
    """
    return jax.tree.map(lambda x: x[worker], tree)


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
    others = {name: n for name, n in mesh.shape.items() if name not in names(axis)}
    where = lambda spec: NamedSharding(automatic(mesh), P(axis, *spec))
    return jax.device_put(tree, jax.tree.map(where, leaf_specs(specs, one, others)))


def leaf_specs(specs: Any, tree: PyTree, sizes: Mapping[str, int | None]) -> PyTree:
    """One ``PartitionSpec`` for each leaf of ``tree``, over axes of these sizes.

    ``specs`` is a prefix of ``tree`` whose leaves are specs (None: not divided), or a
    function from a leaf's path, such as ``"decoder/kernel"``, to one. A size of None is
    an axis that is not here. Raises ``ValueError`` where a spec does not fit its leaf.
    """
    is_spec = lambda s: s is None or isinstance(s, P)
    if callable(specs) and not is_spec(specs):
        spell = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
        pick = lambda path, _: _or_whole(specs(spell(path)))
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


def _or_whole(spec: Any) -> Any:
    return P() if spec is None else spec


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh to trace on, without devices; its axes are automatic."""
    automatic = (AxisType.Auto,) * len(sizes)  # not the default in every version
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=automatic)


def free_axes(axes: tuple[str, ...]) -> dict[str, int | None]:
    """The sizes of the automatic axes of the mesh around, None for axes not there."""
    mesh = jax.sharding.get_abstract_mesh()
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    return {name: mesh.shape[name] if name in free else None for name in axes}


def leaves_are_divided() -> bool:
    """Whether the mesh around has automatic axes, over which leaves may be divided."""
    mesh = jax.sharding.get_abstract_mesh()
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    return any(mesh.shape[name] > 1 for name in free)


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
