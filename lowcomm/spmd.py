"""One worker's code, run as K workers: axes, variance and ``spread``.

A worker is a pure function of its own arrays and a named axis. ``spread`` runs it on
trees whose leaves are stacked along a leading axis, ``[K, …]``: as virtual workers
(``vmap``), on the devices of a mesh (``shard_map``), or under ``pmap``. The layout is
the same for all three, so a checkpoint of one is a checkpoint of the others.

Calls whose name or behaviour changed between JAX versions live in this file only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
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


def worker_index(axis: Axis) -> jax.Array:
    """This worker's position along ``axis``, row-major over a tuple of axes."""
    index = jnp.int32(0)
    for name in names(axis):
        index = index * axis_size(name) + lax.axis_index(name)
    return index


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which JAX knows ``x`` to vary (none untracked)."""
    kind = jax.typeof(x)
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


def automatic(mesh: Mesh) -> Mesh:
    """``mesh`` with automatic axes.

    On the explicit axes that ``jax.make_mesh`` makes, a shard_map over the worker
    axis alone compiles to all-gathers of whole leaves over the other axes.
    """
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
    copies = jax.tree.map(copy, tree)
    return copies if mesh is None else place(copies, mesh, axis=axis)


def place(tree: PyTree, mesh: Mesh, *, axis: Axis = AXIS) -> PyTree:
    """Put a stacked tree on ``mesh``, each worker's part on its own devices."""
    return jax.device_put(tree, NamedSharding(automatic(mesh), P(axis)))


def spread(
    fn: Callable,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis: Axis = AXIS,
    in_axes: Any = 0,
    backend: str | None = None,
) -> Callable:
    """Run one worker's function on stacked trees, ``[K, …] → [K, …]``.

    ``in_axes`` is that of ``vmap``: 0 for what is stacked, None for what all workers
    share (a prefix tree of these). ``step`` is shared. Python numbers that are shared
    stay Python numbers inside. The result is stacked. Without a mesh the workers are
    virtual (``vmap``); with one they are its devices along ``axis`` (``shard_map``;
    the mesh's other axes are left to the compiler); ``backend="pmap"`` asks for
    ``pmap``. Not jitted: wrap the call in ``jax.jit``.

    The function is traced once under ``shard_map``'s variance check whatever the
    backend, so a predicate that differs between workers is refused everywhere.
    Under vmap it would silently talk on every step, on devices it would hang.

    Raises:
        ValueError: leading sizes that disagree or differ from the mesh, a scalar
            that is declared stacked, an axis the mesh lacks, an unknown backend.
        NotUniform: a conditional that talks and whose predicate may differ.

    Example:
        >>> worker = lambda x, step: jax.lax.pmean(x, AXIS) + step
        >>> spread(worker, in_axes=(0, None))(jnp.array([1.0, 3.0]), 10)
        Array([12., 12.], dtype=float32)
    """
    backend = backend or ("vmap" if mesh is None else "shard_map")
    if backend not in ("vmap", "shard_map", "pmap"):
        raise ValueError(f"backend {backend!r}: choose 'vmap', 'shard_map' or 'pmap'.")
    if mesh is None and backend == "shard_map":
        raise ValueError("backend 'shard_map' needs mesh=, for instance worker_mesh().")
    if backend == "pmap" and len(names(axis)) > 1:
        raise ValueError(f"pmap has one axis, not {axis}: use a mesh of these axes.")
    if mesh is not None:
        missing = set(names(axis)) - set(mesh.axis_names)
        if missing:
            raise ValueError(
                f"the mesh has axes {mesh.axis_names} and no {sorted(missing)}: "
                "pass axis= or build the mesh with worker_mesh(axis=...)."
            )
        mesh = automatic(mesh) if isinstance(mesh, Mesh) else mesh
    checked: set = set()

    def spread_fn(*args):
        stacked, shared, rebuild = _split(args, in_axes)
        sizes = _sizes(stacked, mesh, axis)
        worker = lambda stacked, shared: fn(*rebuild(stacked, shared))
        if backend == "shard_map":
            return _on_mesh(worker, mesh, axis)(stacked, shared)
        kinds = [str(jax.typeof(x)) for x in (*stacked, *shared)]
        signature = (*kinds, str(jax.tree.structure(args)), sizes)
        problem = None
        if signature not in checked:
            problem = _check(worker, sizes, axis, stacked, shared)
            checked.add(signature)
        out = _run(worker, backend, mesh, axis, sizes, stacked, shared)
        if problem is not None:
            warnings.warn(
                "spread could not check this function for predicates that differ "
                f"between workers, because it does not trace on a mesh: {problem}",
                stacklevel=2,
            )
        return out

    return spread_fn


def _split(args: tuple, in_axes: Any):
    """Leaves that are stacked, leaves that are shared, and the way back to ``args``."""
    leaves, treedef = jax.tree.flatten(args)
    prefix = in_axes if isinstance(in_axes, tuple | list) else (in_axes,) * len(args)
    mark = lambda a, part: jax.tree.map(lambda _: "shared" if a is None else a, part)
    kinds = jax.tree.map(mark, tuple(prefix), args, is_leaf=lambda a: a is None)
    kinds = jax.tree.leaves(kinds)
    odd = [kind for kind in kinds if kind not in (0, "shared")]
    if odd:
        raise ValueError(f"in_axes takes 0 (stacked) and None (shared), not {odd[0]}.")
    number = [
        kind == "shared" and isinstance(x, bool | int | float)
        for kind, x in zip(kinds, leaves, strict=True)
    ]
    stacked = [x for kind, x in zip(kinds, leaves, strict=True) if kind == 0]
    shared = [x for i, x in enumerate(leaves) if kinds[i] != 0 and not number[i]]

    def rebuild(stacked, shared):
        here, there = iter(stacked), iter(shared)
        parts = [
            x if fixed else next(here if kind == 0 else there)
            for x, fixed, kind in zip(leaves, number, kinds, strict=True)
        ]
        return jax.tree.unflatten(treedef, parts)

    return stacked, shared, rebuild


def _sizes(stacked: list, mesh, axis: Axis) -> tuple[int, ...]:
    """The number of workers along each axis name, agreed by leaves and mesh."""
    if any(jnp.ndim(x) == 0 for x in stacked):
        raise ValueError(
            "a scalar argument is declared stacked (in_axes 0): pass what all workers "
            "share, such as step, with in_axes=None."
        )
    counts = sorted({jnp.shape(x)[0] for x in stacked})
    if len(counts) > 1:
        raise ValueError(
            f"the stacked arguments have leading sizes {counts}, and each must be the "
            "number of workers; pass what all workers share with in_axes=None."
        )
    if mesh is not None:
        sizes = tuple(mesh.shape[name] for name in names(axis))
        if counts and counts[0] != math.prod(sizes):
            raise ValueError(
                f"the arguments are stacked for {counts[0]} workers and the mesh has "
                f"{math.prod(sizes)} along {axis!r}: build it with "
                f"worker_mesh({counts[0]}), or leave out mesh= for virtual workers."
            )
        return sizes
    if not counts:
        raise ValueError("no argument is stacked, so the number of workers is unknown.")
    if len(names(axis)) > 1:
        raise ValueError(
            f"the sizes of the axes {axis} are not known: pass mesh=, which may be a "
            'jax.sharding.AbstractMesh with backend="vmap".'
        )
    return (counts[0],)


def _on_mesh(worker: Callable, mesh, axis: Axis) -> Callable:
    """``worker`` on its own slice of the stacked leaves, under shard_map."""

    def local(stacked, shared):
        out = worker([x[0] for x in stacked], shared)
        return jax.tree.map(lambda y: vary(jnp.asarray(y)[None], axis), out)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(axis), P()),
        out_specs=P(axis),
        axis_names=set(names(axis)),
    )

    def call(stacked, shared):
        # A mesh that the user set for the context must not be another one.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return mapped(stacked, shared)

    return call


def _check(worker, sizes, axis, stacked, shared) -> Exception | None:
    """Trace under the variance check; raise if a predicate differs between workers.

    Returns what else went wrong there, for instance a user's scan whose carry starts
    unmarked: the program itself may still be right under vmap.
    """
    shape = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jax.typeof(x).dtype)
    automatic = (AxisType.Auto,) * len(sizes)  # not the default in every version
    mesh = AbstractMesh(sizes, names(axis), axis_types=automatic)
    mapped = _on_mesh(worker, mesh, axis)
    try:
        jax.eval_shape(mapped, *jax.tree.map(shape, (stacked, shared)))
    except NotUniform:
        raise
    except Exception as problem:  # reported by the caller if its own trace succeeds
        return problem
    return None


def _run(worker, backend, mesh, axis, sizes, stacked, shared):
    """``worker`` on virtual workers or under pmap."""
    if backend == "pmap":
        devices = list((mesh or worker_mesh(math.prod(sizes))).devices.flat)
        name = names(axis)[0]
        mapped = jax.pmap(worker, axis_name=name, in_axes=(0, None), devices=devices)
        return mapped(stacked, shared)
    for name, size in reversed(list(zip(names(axis), sizes, strict=True))):
        worker = jax.vmap(worker, in_axes=(0, None), axis_name=name, axis_size=size)
    fold = [jnp.reshape(x, (*sizes, *jnp.shape(x)[1:])) for x in stacked]
    try:
        out = worker(fold, shared)
    except AssertionError as problem:
        if len(sizes) == 1:
            raise
        raise ValueError(
            f"vmap cannot gather or permute over several axes, {axis}: use a mesh."
        ) from problem
    total = math.prod(sizes)
    return jax.tree.map(lambda y: jnp.reshape(y, (total, *y.shape[len(sizes) :])), out)
