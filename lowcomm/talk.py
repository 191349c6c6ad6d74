"""One compressed exchange of a tree: what is said, and what is heard.

Every leaf is encoded on its own; the payloads of all leaves travel together. A linear
compressor's are averaged on the way (all-reduce); the others are gathered, decoded one
worker after the other in their order and averaged here, so that all hear the same, bit
for bit. What is remembered of an exchange is kept by those who call it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from . import uniform
from .compressors import (
    Compressor,
    Contraction,
    PerLeaf as PerLeaf,
    Unbiased,
    check_law,
)
from .exchange import admit
from .keys import leaf_keys
from .leaves import PyTree, fitting as fitting, precise, takes_part
from .parts import expect
from .spmd import Axis, axis_size, vary, vary_with
from .transport import gather, reduce_codes, reduce_max, reduce_mean


def expect_compressor(compressor: Any) -> None:
    """Raise unless it is a ``Compressor`` or chooses one for each leaf."""
    if not isinstance(compressor, PerLeaf):
        expect(Compressor, compressor=compressor)
        check_law(compressor.law)


def talk(
    compressor: Compressor | PerLeaf, tree: PyTree, *, step: Any, seed: int, axis: Axis
) -> tuple[PyTree, PyTree]:
    """Send ``tree`` compressed; return what was heard and what was said.

    ``heard`` is the mean over the workers of what each of them said. Both are shaped
    like ``tree`` and precise, so that a memory of them does not drift. Leaves that take
    no part are returned as they are. At most one collective for each type in a payload,
    and one for a statistic, whatever the number of leaves; where leaves have different
    compressors, those that are reduced and those that are gathered go apart.
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
        payloads = []
        for i, one, *leaf in zip(group, group.values(), xs, keys, agreed, strict=True):
            with _about_leaf(i, tree):
                payloads.append(one.encode(*leaf))
        # Half precision is decoded precisely, and rounded once when all are added.
        like = [jax.ShapeDtypeStruct(x.shape, precise(x).dtype) for x in xs]
        known = [one._replace(private=None) for one in keys]  # to who decodes
        parts = list(zip(group.values(), like, known, agreed, strict=True))
        listen = _reduced(bound) if linear else _gathered
        for i, total, payload, (one, *leaf) in zip(
            group, listen(parts, payloads, axis), payloads, parts, strict=True
        ):
            heard[i], said[i] = total, one.decode(payload, *leaf)
    return jax.tree.unflatten(treedef, heard), jax.tree.unflatten(treedef, said)


def _chosen(compressor: Compressor | PerLeaf, tree: PyTree) -> dict[int, Compressor]:
    """The compressors of the leaves that take part, by the number of the leaf."""
    chosen = {}
    for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        if not takes_part(x):
            continue
        if isinstance(compressor, PerLeaf):
            chosen[i] = compressor.of(path, x)
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
        return [one.decode(payload, *leaf) for (one, *leaf), payload in pairs]

    return listen


def _gathered(parts: list, payloads: list, axis: Axis) -> list:
    """What is heard of payloads that are decoded one worker after the other."""

    def hear(total, payload, part):
        one, like, keys, agreed = part
        if one.add is not None:
            return one.add(total, payload, keys, agreed)
        return total + one.decode(payload, like, keys, agreed)

    def listen(totals, payloads):
        return list(map(hear, totals, payloads, parts)), None

    start = [jnp.zeros(like.shape, like.dtype) for _, like, *_ in parts]
    start = vary_with(start, payloads, axis=axis)  # as of shards, over their axes too
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


def check_divergence(
    compressor: Compressor | PerLeaf,
    tree: PyTree,
    name: str,
    rate: Callable[[int], Any] = lambda elements: 1.0,
) -> None:
    """Raise where a memory of what a compressor says is known to grow for ever.

    A share ``rate`` of ``C(x)`` leaves ``(1 − rate)² + rate² ω`` of the square of
    ``x``, if C is unbiased and always loses ω; from ``rate = 2/(1 + ω)`` on that is
    what there was, or more.
    """
    paths = jax.tree_util.tree_leaves_with_path(tree)
    for i, one in _chosen(compressor, tree).items():
        path, x = paths[i]
        n, law = math.prod(jnp.shape(x)), one.law
        where = f"leaf {jax.tree_util.keystr(path) or '(the tree)'}"
        if isinstance(law, Contraction) and not law.delta(n) > 0:
            raise ValueError(
                f"{where}: of {n} entries this compressor may lose all it is given and "
                f"more (δ = {law.delta(n):.3g}), and {name} would not catch up: send "
                "more entries, or their values in more bits."
            )
        if isinstance(law, Unbiased) and law.always:
            omega, share = law.omega(n), rate(n)
            if not isinstance(share, Tracer) and share * (1 + omega) >= 2:
                raise ValueError(
                    f"{where}: of {n} entries this unbiased compressor loses about "
                    f"ω = {omega:.3g} times the square, and what {name} remembers "
                    "would grow for ever: take the contraction it scales up, such as "
                    "random_k without unbiased=True, more levels, or diana, which "
                    "is difference_feedback with a rate of "
                    f"{1 / (1 + omega):.3g} or less."
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
