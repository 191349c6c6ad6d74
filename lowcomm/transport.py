r"""What travels together: whole trees through few collectives.

    reduce_mean, reduce_sum, reduce_max     all-reduce, the same on all workers
    gather                                  [K, …], what each worker holds
    swap                                    [K, …] → [K, …], row j goes to worker j
    permute                                 to a neighbour
    from_worker                             what one worker holds

Each takes a tree and copies its leaves into one buffer for each type, so that a tree
costs as many collectives as it has types, not leaves. In a reduction a leaf of a
mebibyte or more travels beside the buffer, in the same call: its copy would cost more
than it saves. (On 8 simulated devices 512 leaves of 16 KiB go 3.5 times as fast in one
buffer, 8 of a MiB as fast as alone, and 4 of 4 MiB 6 times slower.)

Leaves that the compiler divides over further axes of a mesh are left on their own: a
buffer of them would first be gathered. ``per_shard`` makes those axes manual, and each
shard's parts are packed inside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .leaves import PyTree, exchanged, map_exchanged, precise
from .spmd import (
    Axis,
    axis_size,
    devices_of_worker,
    leaves_are_divided,
    names,
    on_all,
    row_by_row,
    vary,
    vary_with,
    worker_index,
)

_ALONE = 2**20  # bytes
_TILE = 128  # entries


def reduce_mean(tree: PyTree, axis: Axis) -> PyTree:
    """The mean of every leaf over the workers, summed and returned precisely."""
    mean = lambda parts: parts if _alone(axis) else lax.pmean(parts, names(axis))
    return vary(_reduce(jax.tree.map(precise, tree), axis, mean), axis)


def shared_out(
    leaves: Sequence[jax.Array],
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], list[jax.Array]]]:
    """What all devices of a worker need, so that each sends an equal part; a way back.

    A worker of ``n`` devices has ``[n, …]`` for each type of leaf, where a device holds
    the row that is its own, filled up with less than ``n`` zeros. A worker of one has
    its leaves.
    """
    devices = devices_of_worker()
    if devices == 1:
        return list(leaves), list
    kinds: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        kinds.setdefault(x.dtype, []).append(i)

    def rows(places):
        flat = jnp.concatenate([on_all(leaves[i]).ravel() for i in places])
        filled = jnp.pad(flat, (0, -flat.size % devices))
        return row_by_row(filled.reshape(devices, -1))

    def back(heard):
        found = list(leaves)
        for places, x in zip(kinds.values(), heard, strict=True):
            ends = itertools.accumulate(leaves[i].size for i in places)
            pieces = jnp.split(on_all(x).ravel(), list(ends))
            for i, piece in zip(places, pieces, strict=False):  # zeros are the last
                found[i] = piece.reshape(leaves[i].shape)
        return found

    return list(map(rows, kinds.values())), back


def reduce_sum(tree: PyTree, axis: Axis) -> PyTree:
    """The sum of every floating-point leaf over the workers, precise as the mean."""
    add = lambda parts: parts if _alone(axis) else lax.psum(parts, names(axis))
    return vary(_reduce(jax.tree.map(precise, tree), axis, add), axis)


def reduce_max(tree: PyTree, axis: Axis) -> PyTree:
    """The largest of every leaf over the workers, entry by entry, typed as equal.

    So it may decide a conditional; what is kept or returned wants ``vary``. NaN counts
    as infinite: the maximum of XLA's CPU backend would lose it.
    """

    def largest(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.where(jnp.isnan(x), jnp.inf, x)

    maximum = lambda parts: lax.pmax(parts, names(axis))
    return _reduce(jax.tree.map(largest, tree), axis, maximum)


def reduce_codes(tree: PyTree, bound: int, axis: Axis) -> PyTree:
    """The sum of integer codes of magnitude at most ``bound``.

    It travels in the narrowest type that holds it, see ``type_of_sums``.
    """
    kind = type_of_sums(bound, axis_size(axis))
    add = lambda parts: parts if _alone(axis) else lax.psum(parts, names(axis))
    return vary(_reduce(jax.tree.map(lambda x: x.astype(kind), tree), axis, add), axis)


def type_of_sums(bound: int, workers: int) -> Any:
    """The narrowest signed type that holds ``workers`` codes of up to ``bound``."""
    for kind in (jnp.int8, jnp.int16, jnp.int32):
        if workers * bound <= jnp.iinfo(kind).max:
            return kind
    raise ValueError(
        f"the sum of {workers} codes of up to {bound} does not fit 32 bits: quantize "
        "in fewer levels, or use a compressor that is gathered."
    )


def gather(tree: PyTree, axis: Axis) -> PyTree:
    """``[K, …]`` for every leaf: what each worker holds, in the order of the workers.

    Along several axes by one gather after the other: vmap knows no other way.
    """
    count = axis_size(axis)

    def everyone(x):
        shape = (count, *jnp.shape(x))
        for name in reversed(names(axis)):
            x = _along(x, name)
        return jnp.reshape(x, shape)

    stacked = _fused(tree, axis, lambda parts: [everyone(x) for x in parts])
    several = lambda x, y: y if x.size else jnp.stack([x] * count)
    return vary(jax.tree.map(several, tree, stacked), axis)


def _along(x: jax.Array, name: str) -> jax.Array:
    """``[K, …]``, what each worker along one axis holds.

    Of arrays that fill no whole tiles the workers' axis is the last one at first. Along
    a first axis XLA turns their gather between slices of TPUs into a sum, for which
    every worker sends K payloads, zeros but for its own.
    """
    if x.size % _TILE == 0 and not leaves_are_divided():
        return lax.all_gather(x, name)
    return jnp.moveaxis(lax.all_gather(x, name, axis=x.ndim), -1, 0)


def swap(tree: PyTree, axis: Axis) -> PyTree:
    """Row ``j`` of every leaf ``[K, …]`` goes to worker ``j``; row ``i`` is from ``i``.

    An all-to-all: each worker sends all rows but its own.
    """
    over = names(axis)[0] if len(names(axis)) == 1 else names(axis)
    trade = lambda x: lax.all_to_all(x, over, 0, 0, tiled=True)
    heard = _fused(tree, axis, lambda parts: [trade(x) for x in parts], rows=1)
    return vary(heard, axis)


def permute(tree: PyTree, pairs: Sequence[tuple[int, int]], axis: Axis) -> PyTree:
    """What the partner holds: worker ``j`` hears ``i`` for each pair ``(i, j)``.

    Who is nobody's ``j`` hears zeros.
    """
    hear = lambda x: lax.ppermute(x, names(axis), pairs)
    return vary(_fused(tree, axis, lambda parts: [hear(x) for x in parts]), axis)


def from_worker(tree: PyTree, index: Any, axis: Axis) -> PyTree:
    """The leaves that worker number ``index`` holds, exactly, on every worker.

    A sum in which the others' are zero: who it is may be known only at run time. (And a
    negative zero becomes a positive one.)
    """
    own = worker_index(axis) == index
    only = lambda x: jnp.where(own, x, jnp.zeros_like(x))
    heard = reduce_sum(jax.tree.map(only, exchanged(tree)), axis)
    return map_exchanged(lambda x, y: y.astype(x.dtype), tree, heard)


def _alone(axis: Axis) -> bool:
    """Whether there is one worker, of several devices: XLA cannot reduce over it."""
    return axis_size(axis) == 1 and leaves_are_divided()


def _reduce(tree: PyTree, axis: Axis, reduce: Callable) -> PyTree:
    return _fused(tree, axis, lambda parts: reduce(tuple(parts)), alone=_ALONE)


def _fused(
    tree: PyTree, axis: Axis, talk: Callable, *, rows: int = 0, alone: float = math.inf
) -> PyTree:
    """``talk``, which takes a list of arrays, on the leaves packed into buffers.

    The first ``rows`` dimensions stay what they are; leaves of ``alone`` bytes and more
    are not packed, nor are any while the mesh around divides leaves by itself.
    """
    leaves, treedef = jax.tree.flatten(tree)
    leaves = vary_with(leaves, leaves, axis=axis)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        single = leaves_are_divided() or x.size * x.dtype.itemsize >= alone
        if x.size:
            groups.setdefault(i if single else x.dtype, []).append(i)
    if not groups:
        return tree
    flat = lambda x: x.reshape(*x.shape[:rows], -1)
    buffers = [
        leaves[first]
        if not others
        else jnp.concatenate([flat(leaves[i]) for i in (first, *others)], axis=rows)
        for first, *others in groups.values()
    ]
    for places, heard in zip(groups.values(), talk(buffers), strict=True):
        if len(places) == 1:
            leaves[places[0]] = heard
            continue
        sizes = [math.prod(leaves[i].shape[rows:]) for i in places]
        cuts = list(itertools.accumulate(sizes))[:-1]
        for i, part in zip(places, jnp.split(heard, cuts, axis=-1), strict=True):
            shape = (*heard.shape[:-1], *leaves[i].shape[rows:])
            leaves[i] = part.reshape(shape)
    return jax.tree.unflatten(treedef, leaves)
