r"""A run of K workers that goes on with K′: what is agreed stays, bit for bit.

``resize`` works on any carry at any step. What becomes of which part of a state is in
``lowcomm.legacies``; here are the trees around it, and the places they go to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .handover import Plan, Rules, agree, hand_over, mixed, rows
from .leaves import PyTree, takes_part
from .legacies import RULES
from .manifest import is_key, manifest, some
from .shards import init
from .spmd import AXIS, Axis, check_axes, names, place
from .workers import spread

Carry = tuple[PyTree, Any]


def resize(
    tx: optax.GradientTransformation,
    carry: Carry,
    *,
    workers: int,
    stay: Sequence[int] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis: Axis = AXIS,
    specs: Any = None,
    rules: Rules | None = None,
) -> Carry:
    r"""``(params, state)`` of a run, stacked ``[K, …]``, for another number of workers.

    .. math::
        x'_i = \tfrac{m}{K} x_i + \tfrac1K \sum_{j \text{ leaves}} x_j
        \;\text{ for the } m \text{ who stay}, \qquad
        x'_i = \tfrac1K \sum_j x_j \;\text{ for who is new}

    ``tx`` is the method as it is built for ``workers`` workers; where its factory takes
    their number, or a graph of them, that is another one than before. ``stay`` are the
    numbers of those who stay, in their new order: unless given the first ones, as many
    as there are places.

    - Equal on all workers, bit for bit, and so copied: the anchor, the outer
      optimizer's state, clocks, what was heard and is not adopted yet. At a sync that
      ends in one model, the parameters too.
    - Mixed as above: parameters, the moments of the inner optimizer, residuals and
      other memories. Their means over the workers stay what they were, so ``consensus``
      does, and so does the mean of all that is still to be said; what those who leave
      have learned in this round is not lost, and does not count twice.
    - Counts that differ stay with their workers, and a new one is as far as the
      furthest. Step counts and schedules go on.

    If nobody leaves, those who stay keep their bits, and with nobody new the result is
    the carry, in the order of ``stay``. ``mesh``, ``axis`` and ``specs`` are those of
    ``stack``: the result lies where ``stack`` and ``init`` would put it
    (``AbstractMesh`` says how many virtual workers there are along each of several
    axes). ``rules`` say by its type what becomes of a state of your own:
    ``lowcomm.handover`` has them. Sends nothing; it is computed on the host, which
    holds the whole carry once.

    Raises:
        ValueError: names the leaf. Values that differ between workers in a state of an
            unknown type; anchors that differ, as of groups of workers with models of
            their own; ``choco``, whose memories are those of a graph; what agrees along
            one of several axes and would not any more; numbers of who leaves that are
            not finite, which all others would have a share of; a ``tx`` with another
            state; ``stay`` that is not of the old workers.

    Example:
        In the middle of a round two workers become four, and then two others.

        >>> from lowcomm import diloco, stack
        >>> tx = diloco(optax.sgd(1.0), period=4)
        >>> params = jnp.array([1.0, 3.0])
        >>> carry = params, init(tx, 0 * params)
        >>> params, state = resize(tx, carry, workers=4)
        >>> print(params, state.anchor)
        [1. 3. 2. 2.] [0. 0. 0. 0.]
        >>> print(resize(tx, (params, state), workers=2, stay=[1, 2])[0])
        [2.25 1.75]
    """
    params, _ = carry
    if isinstance(mesh, Mesh | AbstractMesh):
        check_axes(mesh, axis)
        there = math.prod(mesh.shape[name] for name in names(axis))
        if there != workers:
            raise ValueError(f"workers={workers} on a mesh of {there} along {axis!r}.")
    shape = lambda x: jax.ShapeDtypeStruct((workers, *jnp.shape(x)[1:]), x.dtype)
    like = jax.tree.map(shape, params)
    if isinstance(mesh, Mesh):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        like = place(zeros, mesh, axis=axis, specs=specs)
        state = init(tx, like, mesh=mesh, axis=axis)
    else:
        start = spread(tx.init, mesh=mesh, axis=axis, backend="vmap")
        state = jax.eval_shape(start, like)
    sizes = {} if mesh is None else {name: mesh.shape[name] for name in names(axis)}
    return resized(carry, (like, state), stay=stay, rules=rules, sizes=sizes)


def resized(
    carry: Carry,
    like: Carry,
    *,
    stay: Sequence[int] | None = None,
    rules: Rules | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Carry:
    """``resize``, to the shapes and places of the carry that K′ workers begin with.

    ``like`` may hold ``jax.ShapeDtypeStruct``. ``sizes`` are those of the workers'
    axes, unless ``like`` lies on a mesh that has them.
    """
    if not (isinstance(carry, tuple) and len(carry) == 2):
        raise ValueError(
            f"resize takes the carry (params, state), not {type(carry).__name__}: what "
            "else goes from step to step is not the workers'."
        )
    before, after = _workers(carry[0]), _workers(like[0])
    plan = Plan(before, after, _staying(stay, before, after))
    params, state = carry
    found = (
        hand_over(params, plan, mixed, rules={}),
        hand_over(state, plan, rules={**RULES, **(rules or {})}),
    )
    here, there = manifest(found), manifest(like)
    lost, new = here.keys() - there.keys(), there.keys() - here.keys()
    if lost or new:
        raise ValueError(
            f"tx keeps another state than the one to be resized: {some(sorted(new))} "
            f"is new in it and {some(sorted(lost))} is not there. Build the same "
            f"method around the same optimizer, for {after} workers."
        )
    differ = [p for p in here if str(here[p]) != str(there[p])]
    if differ:
        listed = [f"{p} is {here[p]} and would be {there[p]}" for p in differ]
        raise ValueError(
            f"tx for {after} workers keeps other arrays: {some(listed, '; ')}. Build "
            "the same method with the same options."
        )
    sizes = sizes or _sizes(like[0])
    if len(sizes) > 1:
        _check_groups(carry, found, sizes)
    structure = jax.tree.structure(like)
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True)
    return jax.tree.unflatten(structure, [_placed(x, place) for x, place in leaves])


def _workers(params: PyTree) -> int:
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(params)}
    if len(sizes) != 1 or () in sizes:
        found = sorted(size[0] if size else "none" for size in sizes)
        raise ValueError(
            "the parameters must be stacked, [K, ...], one part a worker, and have "
            f"leading sizes {found}."
        )
    return sizes.pop()[0]


def _sizes(params: PyTree) -> dict[str, int]:
    """Of each axis of the workers, where the parameters lie on a mesh."""
    for x in jax.tree.leaves(params):
        place = getattr(x, "sharding", None)
        if isinstance(place, NamedSharding) and place.spec and place.spec[0]:
            return {name: place.mesh.shape[name] for name in names(place.spec[0])}
    return {}


def _staying(stay: Sequence[int] | None, before: int, after: int) -> tuple[int, ...]:
    chosen = tuple(range(min(before, after)) if stay is None else stay)
    if len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(before)):
        raise ValueError(
            f"stay={list(chosen)} must be different numbers of workers below {before}."
        )
    if not chosen or len(chosen) > after:
        raise ValueError(f"stay={list(chosen)}: 1 to {after} of them can go on.")
    return chosen


def _check_groups(before: Carry, after: Carry, sizes: Mapping[str, int]) -> None:
    """Raise where workers agreed along one of their axes, and no longer do."""
    first, *_, last = sizes
    old = jax.tree_util.tree_leaves_with_path(before)
    for (path, x), y in zip(old, jax.tree.leaves(after), strict=True):
        if not (takes_part(x) and x.shape[1:] == y.shape[1:]):
            continue
        along = _agreed_along(rows(x))
        grid = y.reshape(*sizes.values(), *y.shape[1:])
        if along is None or agree(np.moveaxis(grid, along % len(sizes), 0)):
            continue
        name = jax.tree_util.keystr(path)
        raise ValueError(
            f"resize: {name} is the same for all workers along one axis, and along "
            f"{(first, last)[along]!r} of {dict(sizes)} it would not be. Let groups "
            f"come and go whole, along {first!r}, or resize where all workers agree."
        )


def _agreed_along(x: np.ndarray) -> int | None:
    """−1 if x is the same in blocks of neighbours, 0 if in turn, else None."""
    workers = len(x)
    if agree(x):
        return None
    for size in range(2, workers):
        if workers % size == 0:
            blocks = x.reshape(-1, size, *x.shape[1:])
            if agree(np.moveaxis(blocks, 1, 0)):
                return -1
            if agree(blocks):
                return 0
    return None


def _placed(value: Any, place: Any) -> Any:
    """``value`` where ``place`` lies; every process hands in its parts."""
    sharding = getattr(place, "sharding", None)
    if not getattr(place, "committed", sharding is not None):
        sharding = None
    if isinstance(place, np.ndarray):
        return value
    if is_key(value) or sharding is None or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])
