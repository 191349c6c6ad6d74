"""``spread``: one worker's function, run as K workers.

As virtual workers (``vmap``), on the devices of a mesh (``shard_map``), or under
``pmap``, on trees whose leaves are stacked, ``[K, …]``. The layout is the same for all
three, so a checkpoint of one is a checkpoint of the others.
"""

from __future__ import annotations

import collections
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from .rows import opened, rows_of_equation
from .spmd import (
    AXIS,
    Axis,
    NotUniform,
    abstract_mesh,
    automatic,
    check_axes,
    is_bound,
    names,
    on_mesh,
    spread_over,
    varying_axes_of_type,
    worker_mesh,
)


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

    The function is traced once more under ``shard_map``'s variance check, whatever the
    backend, so that a conditional or loop that talks and whose predicate may differ
    between workers is refused everywhere, also one inside an optax wrapper. Under vmap
    it would silently talk on every step, on devices it would hang.

    Raises:
        ValueError: leading sizes that disagree or differ from the mesh, a scalar
            that is declared stacked, an axis the mesh lacks, an unknown backend.
        NotUniform: a conditional that talks and whose predicate may differ.
        ValueError: ``optax.MultiSteps`` around something that talks.

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
    if backend in ("vmap", "pmap") and isinstance(mesh, Mesh):
        others = sorted(set(mesh.axis_names) - set(names(axis)))
        if others:
            raise ValueError(
                f"backend {backend!r} has no use for the axes {others} of this mesh: "
                "leave backend out, or pass a mesh of the workers alone."
            )
    if mesh is not None:
        check_axes(mesh, axis)
        mesh = automatic(mesh)
    checked: set = set()

    def spread_fn(*args):
        stacked, shared, rebuild = _split(args, in_axes)
        sizes = _sizes(args, stacked, mesh, axis)

        def worker(stacked, shared):
            with spread_over(axis):
                return _arrays(fn(*rebuild(stacked, shared)))

        problem, signature = None, _signature(args, stacked, shared, sizes)
        if signature not in checked:
            problem = _check(worker, mesh, axis, sizes, stacked, shared)
            checked.add(signature)
        run = {"vmap": _on_one_device, "pmap": _on_devices, "shard_map": _on_mesh}
        out = run[backend](worker, mesh, axis, sizes, stacked, shared)
        if problem is not None:
            warnings.warn(
                "spread could not check this function for predicates that differ "
                f"between workers, because it does not trace on a mesh: {problem}",
                stacklevel=2,
            )
        return out

    return spread_fn


def _arrays(result: Any) -> Any:
    """``result``, if all its leaves are arrays or numbers."""
    kinds = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if not isinstance(leaf, kinds):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path) or '(the result)'} of what a worker "
                f"returns is {leaf!r}, a {type(leaf).__name__}. Parameters, states and "
                "metrics hold arrays: an optimizer keeps anything else in a closure."
            )
    return result


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


def _sizes(args: tuple, stacked: list, mesh, axis: Axis) -> tuple[int, ...]:
    """The number of workers along each axis name, agreed by leaves and mesh."""
    for name in names(axis):
        if is_bound(name):
            raise ValueError(
                f"axis {name!r} is bound already: hand one worker's function to "
                "spread, traffic or meter, not one that spread has been given."
            )
    for path, x in jax.tree_util.tree_leaves_with_path(args):
        if jnp.ndim(x) == 0 and any(x is leaf for leaf in stacked):
            raise ValueError(
                f"argument {path[0].idx}{jax.tree_util.keystr(path[1:])} is a scalar "
                "and declared stacked (in_axes 0): pass what all workers share, such "
                "as step, with in_axes=None. A state must be stacked as well: make it "
                "with lowcomm.init(tx, params)."
            )
    counts = sorted({jnp.shape(x)[0] for x in stacked})
    if len(counts) > 1:
        usual = collections.Counter(jnp.shape(x)[0] for x in stacked)
        leaves = [
            (path, jnp.shape(x)[0])
            for path, x in jax.tree_util.tree_leaves_with_path(args)
            if any(x is leaf for leaf in stacked)
        ]
        leaves.sort(key=lambda leaf: usual[leaf[1]])  # the odd ones first
        found = [
            f"argument {path[0].idx}{jax.tree_util.keystr(path[1:])}: {size}"
            for path, size in leaves
        ]
        raise ValueError(
            f"the stacked arguments have leading sizes {counts}, and each must be the "
            f"number of workers ({', '.join(found[:8])}). stack(tree, n) makes n "
            "copies; pass what all workers share with in_axes=None."
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


def _signature(args: tuple, stacked: list, shared: list, sizes: tuple) -> tuple:
    """What a trace depends on: structure, types, and the values of Python numbers."""
    kinds = [str(jax.typeof(x)) for x in (*stacked, *shared)]
    leaves, treedef = jax.tree.flatten(args)
    fixed = [x for x in leaves if isinstance(x, bool | int | float)]
    return (*kinds, *map(repr, fixed), str(treedef), sizes)


def _check(worker, mesh, axis, sizes, stacked, shared) -> Exception | None:
    """Trace under the variance check; raise if a predicate differs between workers.

    Returns what else went wrong there, for instance a user's scan whose carry starts
    unmarked: the program itself may still be right under vmap.
    """
    shape = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jax.typeof(x).dtype)
    mesh = mesh or abstract_mesh(dict(zip(names(axis), sizes, strict=True)))
    try:
        program = jax.make_jaxpr(_meshed(worker, mesh.abstract_mesh, axis))(
            *jax.tree.map(shape, (stacked, shared))
        )
    except NotUniform:
        raise
    except Exception as problem:  # reported by the caller if its own trace succeeds
        return problem
    _refuse_differing(program.jaxpr, axis, dict(mesh.shape))
    return None


def _refuse_differing(jaxpr: Any, axis: Axis, sizes: Mapping[str, int]) -> None:
    """Raise if a conditional or loop that talks has a predicate that may differ.

    Or if it is that of ``optax.MultiSteps``, which decides nothing: it selects
    afterwards what to keep.
    """
    for eqn in jaxpr.eqns:
        programs = [
            opened(part)[0]
            for value in eqn.params.values()
            for part in (value if isinstance(value, tuple | list) else (value,))
            if hasattr(opened(part)[0], "eqns")
        ]
        if eqn.primitive.name == "cond":
            predicate = eqn.invars[0].aval
        elif eqn.primitive.name == "while":
            predicate = opened(eqn.params["cond_jaxpr"])[0].outvars[0].aval
        else:
            predicate = None
        differs = varying_axes_of_type(predicate) & set(names(axis))
        constant = eqn.primitive.name == "cond" and _accumulates(eqn)
        rows = rows_of_equation(eqn, sizes) if differs or constant else []
        if rows and constant:
            raise ValueError(
                f"optax.MultiSteps stands around something that communicates "
                f"({rows[0].collective} over {rows[0].axis!r}): it would talk at every "
                "micro-step and drop what it heard. Put MultiSteps around the inner "
                "optimizer, which does not communicate, or accumulate in the loss."
            )
        if rows:
            raise NotUniform(
                f"a {eqn.primitive.name} that communicates ({rows[0].collective} over "
                f"{rows[0].axis!r}) has a predicate that may differ between workers "
                f"along axis {', '.join(map(repr, sorted(differs)))}, so some would "
                "talk and others wait forever. Decide from the step, or reduce the "
                "predicate over the axis first. optax.MultiSteps, apply_if_finite and "
                "conditionally_transform belong around the inner optimizer, which does "
                "not communicate."
            )
        for program in programs:
            _refuse_differing(program, axis, sizes)


def _accumulates(eqn: Any) -> bool:
    """Whether a conditional on a constant was made by ``optax.MultiSteps``."""
    if not hasattr(eqn.invars[0], "val"):
        return False
    traceback = getattr(eqn.source_info, "traceback", None)
    frames = getattr(traceback, "frames", ())
    return any("_accumulation" in frame.file_name for frame in frames)


def _meshed(worker: Callable, mesh: Any, axis: Axis) -> Callable:
    own = lambda stacked, shared: worker([x[0] for x in stacked], shared)
    return on_mesh(own, mesh, axis, in_specs=(P(axis), P()))


def _on_mesh(worker, mesh, axis, sizes, stacked, shared):
    try:
        return _meshed(worker, mesh, axis)(stacked, shared)
    except AssertionError as problem:
        if "ManualAxisType" not in str(problem):
            raise
        raise ValueError(
            "JAX cannot make zeros like the result of jax.eval_shape on a mesh whose "
            f"other axes are the compiler's, {mesh.axis_names}. optax.MultiSteps and "
            "adafactor do so: accumulate in the loss, choose another optimizer, or a "
            "mesh of the workers alone."
        ) from problem


def _on_devices(worker, mesh, axis, sizes, stacked, shared):
    devices = list((mesh or worker_mesh(math.prod(sizes))).devices.flat)
    n = len(stacked)
    # One argument per leaf: pmap takes in_axes for a list of leaves where it fits one.
    mapped = jax.pmap(
        lambda *leaves: worker(list(leaves[:n]), list(leaves[n:])),
        axis_name=names(axis)[0],
        in_axes=(0,) * n + (None,) * len(shared),
        devices=devices,
    )
    return mapped(*stacked, *shared)


def _on_one_device(worker, mesh, axis, sizes, stacked, shared):
    for name, size in reversed(list(zip(names(axis), sizes, strict=True))):
        worker = jax.vmap(worker, in_axes=(0, None), axis_name=name, axis_size=size)
    folded = [jnp.reshape(x, (*sizes, *jnp.shape(x)[1:])) for x in stacked]
    try:
        out = worker(folded, shared)
    except AssertionError as problem:
        if len(sizes) == 1:
            raise
        raise ValueError(
            f"vmap cannot gather or permute over several axes, {axis}: use a mesh."
        ) from problem
    unfold = lambda y: jnp.reshape(y, (math.prod(sizes), *y.shape[len(sizes) :]))
    return jax.tree.map(unfold, out)
