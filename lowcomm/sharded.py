r"""Whole methods whose workers are groups of devices: ``sharded``.

A method is built of parts that the compiler can divide among a worker's devices and of
parts that it cannot. Optimizers, verbs, triggers, norms, means, mixing and products of
matrices stay with the compiler: they are computed on whole leaves, whose shards the
devices hold, and a mean over the workers moves each device's shard and no more (of the
narrow factors of matrices, which all devices need, an equal part). What
selects, quantizes or packs entries must be run on each shard by itself. Such exchanges
pass through ``by_shard``, and ``sharded`` tells them, wherever they stand in a method,
how its leaves are divided.

So a method need not be taken apart to put ``per_shard`` into it, and a norm that clips
or a measure that triggers is that of the whole model, as the method has it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from .exchange import Exchange
from .leaves import PyTree
from .parts import expect
from .shards import PerShardState, per_shard
from .spmd import automatic_axes, leaf_specs, leaves_are_divided, path_name

# The leaves' specs by their paths.
_DIVIDED: contextvars.ContextVar[dict[str, P] | None] = contextvars.ContextVar(
    "divided", default=None
)


def sharded(tx: optax.GradientTransformation, specs: Any) -> Exchange:
    r"""``tx`` for workers that are groups of devices, which share its leaves.

    ``specs`` says how one worker's leaves are divided over the mesh's other axes, as
    for ``stack``: a prefix of the parameters with a ``PartitionSpec`` (or None) for
    every leaf, or a function from a leaf's path to one. Compressed exchanges inside
    ``tx`` then run on each shard by itself, as in ``per_shard``: a device sends what
    the exchange sends for its own shard, and scales, selections and random numbers are
    a shard's. Everything else is computed on whole leaves, divided by the compiler: of
    methods that compress nothing nothing changes. On a mesh of the workers alone, for
    virtual workers and for groups of one device it is ``tx``, bit for bit.

    The state of compressed exchanges has an axis of shards there, and is another one
    for another number of them; the rest is that of ``tx``.

    Raises:
        ValueError: at trace, specs that do not match the parameters, name another axis
            or do not divide a leaf; an exchange inside that is handed other leaves than
            the parameters'; a state that was made for other workers.

    Example:
        Signs of two workers of four devices each: a scale for each quarter of the leaf.

        >>> from lowcomm import sign_sgd, traffic
        >>> from jax.sharding import AbstractMesh
        >>> mesh = AbstractMesh((2, 4), ("workers", "fsdp"))
        >>> tx = sign_sgd(optax.sgd(1.0))
        >>> def sent(tx):
        ...     step = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        ...     return traffic(step, jax.numpy.ones(4096), workers=mesh).bytes_always
        >>> sent(tx), sent(sharded(tx, P("fsdp")))
        (516, 132)
    """
    expect(optax.GradientTransformation, tx=tx)
    talking = optax.with_extra_args_support(tx)

    def init(params):
        with _divided(specs, params):
            return talking.init(params)

    def update(updates, state, params=None, **extra):
        with _divided(specs, updates):
            return talking.update(updates, state, params, **extra)

    return Exchange(init, update)


def by_shard(exchange: Exchange) -> Exchange:
    """``exchange``, on each shard by itself where it is used inside ``sharded``."""

    def here() -> Exchange | None:
        known = _DIVIDED.get()
        if known is None or not leaves_are_divided():
            return None
        return per_shard(exchange, _looked_up(known), axes=automatic_axes(), axis=())

    def init(params):
        return (here() or exchange).init(params)

    def update(updates, state, params=None, **extra):
        divided = here()
        if (divided is not None) != isinstance(state, PerShardState):
            raise ValueError(
                "this state was made for workers of "
                + ("one device" if divided else "several devices")
                + ", and here they have "
                + ("several" if divided else "one")
                + ": make it where they are, with lowcomm.init(tx, params, mesh=mesh)."
            )
        return (divided or exchange).update(updates, state, params, **extra)

    return Exchange(init, update)


@contextlib.contextmanager
def _divided(specs: Any, tree: PyTree) -> Iterator[None]:
    """Within, exchanges know how the leaves of ``tree`` are divided."""
    if not leaves_are_divided():
        yield
        return
    sizes = {name: None for name in automatic_axes()}
    chosen = leaf_specs(specs, tree, sizes)
    leaves = jax.tree_util.tree_leaves_with_path(
        chosen, is_leaf=lambda x: isinstance(x, P)
    )
    token = _DIVIDED.set({path_name(path): spec for path, spec in leaves})
    try:
        yield
    finally:
        _DIVIDED.reset(token)


def _looked_up(known: dict[str, P]):
    def spec(path: str) -> P:
        if path not in known:
            raise ValueError(
                f"an exchange inside sharded is handed the leaf {path!r}, and the "
                f"parameters have {', '.join(map(repr, known))}: how it is divided is "
                "not known. Put per_shard around that exchange."
            )
        return known[path]

    return spec
