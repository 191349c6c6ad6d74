r"""Workers that are groups of devices: a mesh of ``workers × fsdp``, say.

Only the worker axis is manual there. What a worker computes is divided among its
devices by the compiler, after the shardings of its arrays: ``stack(..., specs=)``
divides the parameters, ``init`` makes a state divided like them.

A plain reduction over the workers then moves each device's shard and no more. Anything
else, a selection, a quantization, a gather, must run on each shard by itself
(``per_shard``): the compiler would first gather the whole leaf, or its payload, on each
device of the group and send that as often as the group has devices.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from . import uniform
from .exchange import Exchange
from .keys import of_shard
from .leaves import PyTree
from .parts import expect
from .spmd import (
    AXIS,
    Axis,
    automatic,
    automatic_axes,
    free_axes,
    is_bound,
    leaf_specs,
    names,
    on_shards,
    vary,
    worker_index,
)
from .workers import spread


def init(
    tx: optax.GradientTransformation,
    params: PyTree,
    *,
    mesh: Mesh | None = None,
    axis: Axis = AXIS,
    backend: str | None = None,
) -> Any:
    """The state of ``tx`` for stacked parameters, placed where they are.

    It is ``jax.jit(spread(tx.init, mesh=mesh))(params)``, and on a mesh with more axes
    than the workers' what is shaped like a parameter (moments, anchors, residuals) is
    divided like that parameter, from the first step on. A compiler left to itself
    would keep zeros whole on every device until a step returns them divided.

    Example:
        >>> init(optax.adam(1e-3), {"w": jnp.zeros((8, 3))})[0].mu["w"].shape
        (8, 3)
    """
    start = spread(tx.init, mesh=mesh, axis=axis, backend=backend)
    grouped = mesh is not None and set(mesh.axis_names) - set(names(axis))
    if mesh is None or not grouped or backend in ("vmap", "pmap"):
        return jax.jit(start)(params)
    here = automatic(mesh)
    lies = lambda x: getattr(getattr(x, "sharding", None), "spec", P(axis))
    known = {
        path: (jnp.shape(x), lies(x))
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }

    def where(path, x):
        if isinstance(x, PerShardState):
            return None  # says itself where it is
        ends = [path[i:] for i in range(len(path) + 1)]
        like = [known[end] for end in ends if end in known and known[end][0] == x.shape]
        return NamedSharding(here, like[0][1] if like else P(axis))

    shape = jax.eval_shape(start, params)
    at = jax.tree_util.tree_map_with_path(
        where, shape, is_leaf=lambda x: isinstance(x, PerShardState)
    )
    return jax.jit(start, out_shardings=at)(params)


class PerShardState(NamedTuple):
    """State of ``per_shard``: one for each set of axes that leaves are divided over.

    Arrays kept for divided leaves have a leading axis with one entry a shard, divided
    over those axes.
    """

    shards: tuple[Any, ...]


def per_shard(
    exchange: optax.GradientTransformationExtraArgs,
    specs: Any,
    *,
    axes: str | tuple[str, ...],
    axis: Axis = AXIS,
) -> Exchange:
    r"""``exchange`` on each shard of a leaf that a worker's devices share.

    ``specs`` says how one worker's leaves are divided over the mesh axes ``axes``: a
    prefix of the tree with a ``PartitionSpec`` for every leaf, or a function from the
    leaf's path (``"decoder/kernel"``) to one. (They cannot be read from inside a
    program.) Every device sends what the exchange sends for its own shard; leaves that
    are not divided are exchanged as ever. What ``exchange`` keeps is kept by shard.
    Where the axes are not there, as for virtual workers, a worker is one device and its
    shard is the whole leaf.

    Scales, selections, ranks and random numbers are those of a shard: top-k takes the
    largest entries of each. Leaves divided over the same axes are exchanged in one
    call. Extra arguments are handed whole to every shard, the parameters in shards.
    ``mean`` and ``weighted_mean`` do not need this.

    Raises:
        ValueError: at trace, specs that do not match the tree, name another axis or do
            not divide a leaf.

    Example:
        >>> from lowcomm import error_feedback, top_k
        >>> where = lambda path: P(None, "fsdp") if path == "kernel" else P()
        >>> tx = per_shard(error_feedback(top_k(0.01)), where, axes="fsdp")
        >>> step = optax.chain(tx, optax.adamw(1e-3))
    """
    expect(optax.GradientTransformation, exchange=exchange)
    exchange = optax.with_extra_args_support(exchange)
    axes = names(axes)
    if overlap := set(axes) & set(names(axis)):
        raise ValueError(
            f"axes are those a worker's devices form, and {sorted(overlap)} is the "
            "worker axis."
        )

    def init(params):
        chosen, over, kinds = _groups(specs, params, axes)
        states = []
        for kind in kinds:
            part, where = _pick(params, over, kind), _pick(chosen, over, kind)
            start = lambda part: (exchange.init(part),)
            states += _within(kind, axes, start, (where,), (_KEPT,))(part)
        return PerShardState(tuple(states))

    def update(updates, state, params=None, *, step=None, **extra):
        chosen, over, kinds = _groups(specs, updates, axes)
        if len(kinds) != len(state.shards):
            raise ValueError(
                "per_shard: the leaves of this tree are divided over other axes than "
                "those init saw: call init with the new tree."
            )
        arrays, rebuild = _arrays(extra | {"step": step})
        heard, states = updates, []
        for kind, kept in zip(kinds, state.shards, strict=True):

            def talk(part, near, kept, arrays):
                given = rebuild(arrays)
                with uniform.handed_on(step, given["step"]):
                    return exchange.update(part, kept, near, **given)

            part, where = _pick(updates, over, kind), _pick(chosen, over, kind)
            near = None if params is None else _pick(params, over, kind)
            nearby = None if params is None else where
            specs_in, specs_out = (where, nearby, _KEPT, P()), (where, _KEPT)
            _check_kept(kept, kind)
            told = _within(kind, axes, talk, specs_in, specs_out)
            part, kept = told(part, near, kept, arrays)
            heard = _put(heard, over, kind, part)
            states.append(kept)
        return heard, PerShardState(tuple(states))

    return Exchange(init, update)


_KEPT = "kept"  # stands for the spec of what is kept, with its axis of shards


def _groups(specs: Any, tree: PyTree, axes: tuple[str, ...]):
    """Each leaf's spec, the axes it is divided over, and all such sets in order."""
    around = jax.sharding.get_abstract_mesh()
    if (free := list(automatic_axes())) and not set(axes) & set(around.axis_names):
        raise ValueError(
            f"per_shard is over the axes {axes}, and this mesh has {free} besides the "
            "workers': leaves would be exchanged whole. Name the axes of the mesh."
        )
    chosen = leaf_specs(specs, tree, free_axes(axes))
    mentioned = lambda spec: {n for part in spec if part for n in names(part)}
    over = jax.tree.map(
        lambda spec: ",".join(a for a in axes if a in mentioned(spec)), chosen
    )
    return chosen, over, sorted(set(jax.tree.leaves(over)))


def _pick(tree: PyTree, over: PyTree, kind: str) -> PyTree:
    """``tree`` with None for leaves that are divided over other axes than ``kind``."""
    return jax.tree.map(lambda k, x: x if k == kind else None, over, tree)


def _put(tree: PyTree, over: PyTree, kind: str, part: PyTree) -> PyTree:
    """``tree`` with the leaves of ``kind`` from ``part``, the inverse of ``_pick``."""
    ours = iter(jax.tree.leaves(part))
    return jax.tree.map(lambda k, x: next(ours) if k == kind else x, over, tree)


def _within(
    kind: str, axes: tuple[str, ...], fn: Callable, in_specs: tuple, out_specs: tuple
) -> Callable:
    """``fn`` on each shard over the axes of ``kind``, of those the mesh around has.

    ``_KEPT`` among the specs is what is kept by shard: ``fn`` sees its own part. What
    is not divided is the same on all devices of the group, and each does all of it.
    """
    divided = tuple(kind.split(",")) if kind else ()
    there = _present(divided)
    keeps = lambda spec: bool(kind) and isinstance(spec, str)

    def local(*args):
        with of_shard(_shard_number(kind)) if kind else nullcontext():
            return shard(*args)

    def shard(*args):
        own = lambda spec, x: jax.tree.map(lambda y: y[0], x) if keeps(spec) else x
        one = lambda y: jnp.asarray(y)[None]
        kept = lambda spec, x: jax.tree.map(one, x) if keeps(spec) else x
        return vary(tuple(map(kept, out_specs, fn(*map(own, in_specs, args)))), there)

    over = _present(axes)  # all of them, so that nothing is left to the compiler
    if not over:
        return local
    spell = lambda spec: P(*[there] * bool(kind)) if isinstance(spec, str) else spec
    inside, outside = (tuple(map(spell, part)) for part in (in_specs, out_specs))
    return on_shards(local, over, inside, outside)


def _present(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a, size in free_axes(axes).items() if size is not None)


def _shard_number(kind: str) -> Any:
    """Another one for every shard, and for leaves divided over other axes."""
    bound = tuple(filter(is_bound, kind.split(",")))  # by whoever made them manual
    return worker_index(bound) + zlib.crc32(kind.encode()) % 2**24


def _check_kept(kept: PyTree, kind: str) -> None:
    """Raise unless there is one entry for each shard, as where ``init`` ran."""
    sizes = free_axes(tuple(kind.split(","))).values() if kind else ()
    shards = math.prod(size or 1 for size in sizes)
    for x in jax.tree.leaves(kept):
        if kind and jnp.shape(x)[0] != shards:
            raise ValueError(
                f"per_shard keeps something for {jnp.shape(x)[0]} shards over {kind}, "
                f"and here are {shards}: make the state where the shards are, with "
                "lowcomm.init(tx, params, mesh=mesh)."
            )


def _arrays(tree: PyTree) -> tuple[list, Callable[[list], PyTree]]:
    """The arrays among the leaves, and the way back; other leaves stay outside."""
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]

    def rebuild(arrays):
        inside = dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(
            treedef, [inside.get(i, x) for i, x in enumerate(leaves)]
        )

    return [leaves[i] for i in places], rebuild
