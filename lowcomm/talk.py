"""One compressed exchange of a tree: what is said, and what is heard.

Every leaf is encoded on its own; the payloads of all leaves travel together. A linear
compressor's are averaged on the way (all-reduce); the others are gathered, decoded one
worker after the other in their order and averaged here, so that all hear the same, bit
for bit. What is remembered of an exchange is kept by those who call it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import uniform
from .compressors import Compressor
from .exchange import admit
from .keys import leaf_keys
from .leaves import PyTree, precise, takes_part
from .parts import expect
from .spmd import Axis, axis_size, vary
from .transport import gather, reduce_codes, reduce_max, reduce_mean


class PerLeaf(NamedTuple):
    """A compressor for every leaf of its own.

    ``choose(path, leaf)`` gives the ``Compressor`` of the leaf at a path such as
    ``"decoder/kernel"``; it may look at shape and type. Exchanges that talk leaf by
    leaf take it in place of a ``Compressor``.
    """

    choose: Callable[[str, jax.Array], Compressor]


def expect_compressor(compressor: Any) -> None:
    """Raise unless it is a ``Compressor`` or chooses one for each leaf."""
    if not isinstance(compressor, PerLeaf):
        expect(Compressor, compressor=compressor)


def talk(
    compressor: Compressor | PerLeaf, tree: PyTree, *, step: Any, seed: int, axis: Axis
) -> tuple[PyTree, PyTree]:
    """Send ``tree`` compressed; return what was heard and what was said.

    ``heard`` is the mean over the workers of what each of them said. Both are shaped
    like ``tree`` and precise, so that a memory of them does not drift. Leaves that take
    no part are returned as they are. At most one collective for each type in a payload,
    and one for a statistic, whatever the number of leaves; where leaves have compressors
    of their own, those that are reduced and those that are gathered go apart.
    """
    step = uniform.now(step, axis)
    leaves, treedef = jax.tree.flatten(tree)
    groups: dict[tuple, dict[int, Compressor]] = {}
    for i, one in _chosen(compressor, tree).items():
        groups.setdefault((one.linear, one.bound), {})[i] = one
    heard, said = list(leaves), list(leaves)
    for (linear, bound), group in groups.items():
        # Linear payloads are summed on the way.
        xs = [precise(leaves[i]) if linear else leaves[i] for i in group]
        keys = [leaf_keys(seed, step, i, axis) for i in group]
        agreed = _agree(group.values(), xs, axis)
        parts = list(zip(group.values(), xs, keys, agreed, strict=True))
        payloads = []
        for i, (one, *leaf) in zip(group, parts, strict=True):
            with _about_leaf(i, tree):
                payloads.append(one.encode(*leaf))
        listen = _reduced(bound) if linear else _gathered
        for i, total, payload, (one, *leaf) in zip(
            group, listen(parts, payloads, axis), payloads, parts, strict=True
        ):
            heard[i], said[i] = total, precise(one.decode(payload, *leaf))
    return jax.tree.unflatten(treedef, heard), jax.tree.unflatten(treedef, said)


def _chosen(compressor: Compressor | PerLeaf, tree: PyTree) -> dict[int, Compressor]:
    """The compressors of the leaves that take part, by the number of the leaf."""
    chosen = {}
    for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        if not takes_part(x):
            continue
        if isinstance(compressor, PerLeaf):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            chosen[i] = compressor.choose(where, x)
            expect(Compressor, **{f"the compressor of leaf {where!r}": chosen[i]})
        else:
            chosen[i] = compressor
    return chosen


def _agree(compressors: Iterable[Compressor], xs: list, axis: Axis) -> list:
    """The largest statistic of any worker, for every leaf that has one."""
    pairs = zip(compressors, xs, strict=True)
    own = [None if c.statistic is None else c.statistic(x) for c, x in pairs]
    if not jax.tree.leaves(own):
        return own
    return vary(reduce_max(own, axis), axis)


def _reduced(bound: int | None) -> Callable[[list, list, Axis], list]:
    """What is heard of payloads that are averaged on the way."""

    def listen(parts, payloads, axis):
        if bound is None:
            mean = reduce_mean(payloads, axis)
        else:
            total = reduce_codes(payloads, bound, axis)
            share = lambda x: x.astype(jnp.float32) / axis_size(axis)
            mean = jax.tree.map(share, total)
        pairs = zip(parts, mean, strict=True)
        return [precise(one.decode(payload, *leaf)) for (one, *leaf), payload in pairs]

    return listen


def _gathered(parts: list, payloads: list, axis: Axis) -> list:
    """What is heard of payloads that are decoded one worker after the other."""

    def hear(total, payload, part):
        one, x, keys, agreed = part
        if one.add is not None:
            return one.add(total, payload, keys, agreed)
        return total + precise(one.decode(payload, x, keys, agreed))

    def listen(totals, payloads):
        return list(map(hear, totals, payloads, parts)), None

    start = vary([jnp.zeros_like(precise(x)) for _, x, *_ in parts], axis)
    totals = lax.scan(listen, start, gather(payloads, axis))[0]
    return [total / axis_size(axis) for total in totals]


@contextlib.contextmanager
def _about_leaf(number: int, tree: PyTree) -> Iterator[None]:
    """Within, an error about an array also names the leaf."""
    try:
        yield
    except ValueError as problem:
        path = jax.tree_util.tree_leaves_with_path(tree)[number][0]
        where = jax.tree_util.keystr(path) or "(the tree)"
        raise ValueError(f"leaf {where}: {problem}") from problem


def fitting(x: jax.Array, dtype: Any) -> jax.Array:
    """``x`` in a narrower type; the finite stays finite, and memory keeps the rest."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return x.astype(dtype)
    limits = jnp.finfo(dtype)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, limits.min, limits.max), x).astype(
        dtype
    )


def left_over(wanted: jax.Array, said: jax.Array) -> jax.Array:
    """What is remembered of ``wanted``, but nothing where what was said is not finite.

    A NaN or infinity waits in memory until it is said, and is then forgotten: it was
    heard by all, and would be heard for ever.
    """
    return jnp.where(jnp.isfinite(said), wanted - said, 0)


def admit_shrinking(
    tree: PyTree, name: str, axis: Axis, about: str, within: Axis | None
) -> None:
    """Raise unless ``name`` is about something that may be sent in part."""
    admit(
        tree,
        name,
        axis=axis,
        about=about,
        within=within,
        takes=("gradients", "displacements"),
        instead="Use rounds, which exchanges displacements from a common anchor.",
    )
