"""Exchanges of a whole tree as one vector: what is selected is selected from all."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .exchange import Exchange, check_local
from .leaves import PyTree, fitting, takes_part
from .parts import expect
from .sharded import by_shard
from .spmd import leaves_are_divided, varying_axes


class FlattenedState(NamedTuple):
    """State of ``flattened``."""

    flattened: Any  # of the exchange, for the vector


def flattened(exchange: optax.GradientTransformationExtraArgs) -> Exchange:
    r"""``exchange`` on all leaves as one vector: top-k over the whole tree.

    Exchanges work leaf by leaf, and so do their compressors: ``top_k(0.01)`` takes one
    in a hundred of *every* leaf. Here they see one vector, in the order of the leaves,
    so that it takes one in a hundred of all, and leaves with small gradients may wait
    long. A scale, a rank or a norm is then that of the whole tree too.

    The vector has the type the leaves' types promote to (float32 where bfloat16 and
    float32 meet, bfloat16 where all are), and complex leaves make another one. What is
    heard is cast back to each leaf's own type. The paths that ``PerLeaf`` is asked
    about are "real" and "complex". Sends what ``exchange`` sends for these vectors, and
    keeps what it keeps for them: a tree of the same number of elements in other shapes
    is not noticed. ``params`` are handed on as such vectors.

    Where the compiler divides a worker's leaves among devices the vector would be
    gathered first: there write ``per_shard(flattened(exchange), ...)``, which makes a
    vector of the shards on each device.

    Raises:
        ValueError: at trace, leaves that are divided, and trees of more than 2³¹ − 1
            elements.

    Example:
        Two of four are sent: both are of the leaf with the large entries.

        >>> from lowcomm import compressed_mean, spread, top_k
        >>> tree = {"a": jnp.array([[4.0, -3.0]]), "b": jnp.array([[0.2, 0.1]])}
        >>> half = compressed_mean(top_k(0.5))
        >>> for tx in (half, flattened(half)):
        ...     worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
        ...     print(*spread(worker)(tree).values())
        [[4. 0.]] [[0.2 0. ]]
        [[ 4. -3.]] [[0. 0.]]
    """
    expect(optax.GradientTransformation, exchange=exchange)
    exchange = optax.with_extra_args_support(exchange)

    def init(params):
        return FlattenedState(exchange.init(_vectors(params)))

    def update(updates, state, params=None, *, about="gradients", **extra):
        if about == "gradients":
            _check_alike(updates)
        near = None if params is None else _vectors(params)
        heard, kept = exchange.update(
            _vectors(updates), state.flattened, near, about=about, **extra
        )
        return _put_back(updates, heard), FlattenedState(kept)

    return by_shard(Exchange(init, update))


def _kinds(tree: PyTree) -> dict[str, list[int]]:
    """The numbers of the leaves of each vector."""
    kinds: dict[str, list[int]] = {}
    for i, x in enumerate(jax.tree.leaves(tree)):
        if takes_part(x):
            kind = "complex" if jnp.iscomplexobj(x) else "real"
            kinds.setdefault(kind, []).append(i)
    return kinds


def _vectors(tree: PyTree) -> dict[str, jax.Array]:
    """The leaves that take part as one vector, two if some are complex."""
    if leaves_are_divided():
        raise ValueError(
            "flattened: this mesh has axes over which the compiler divides leaves, and "
            "would gather them to make one vector: put per_shard around it, "
            "per_shard(flattened(...), specs, axes=...)."
        )
    leaves = jax.tree.leaves(tree)

    def vector(places):
        total = sum(math.prod(jnp.shape(leaves[i])) for i in places)
        if total >= 2**31:
            raise ValueError(
                f"flattened: the {len(places)} leaves have {total} elements, more than "
                f"32-bit indices reach ({2**31 - 1}): exchange leaf by leaf, or shard "
                "by shard with per_shard(flattened(...), ...)."
            )
        dtype = jnp.result_type(*(jnp.asarray(leaves[i]).dtype for i in places))
        return jnp.concatenate([jnp.ravel(leaves[i]).astype(dtype) for i in places])

    return {kind: vector(places) for kind, places in _kinds(tree).items()}


def _put_back(tree: PyTree, vectors: Any) -> PyTree:
    """The inverse of ``_vectors``; the other leaves stay as in ``tree``."""
    leaves, treedef = jax.tree.flatten(tree)
    for kind, places in _kinds(tree).items():
        start = 0
        for i in places:
            x = jnp.asarray(leaves[i])
            part = vectors[kind][start : start + x.size]
            leaves[i] = fitting(part.reshape(x.shape), x.dtype)
            start += x.size
    return jax.tree.unflatten(treedef, leaves)


def _check_alike(grads: PyTree) -> None:
    """Raise if some gradients were summed by JAX already: a vector would hide it."""
    over = [varying_axes(x) for x in jax.tree.leaves(grads) if takes_part(x)]
    if len(set(over)) > 1:
        check_local(grads, tuple(sorted(frozenset().union(*over))))
