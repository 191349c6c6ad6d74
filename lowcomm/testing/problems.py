"""The small problem that methods are tried on, and one way to run it on each backend.

Every worker pulls at the same parameters from its own side: the loss is ½‖x − c‖² with
a target c of its own. On integer targets and binary rates all arithmetic is exact, so
that two programs can be asked for the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..leaves import PyTree
from ..spmd import AXIS, Axis, abstract_mesh, names, stack
from ..steps import local_step
from ..workers import spread
from .equality import is_key

BACKENDS = ("vmap", "shard_map", "pmap")


class Carry(NamedTuple):
    """What goes from step to step, stacked."""

    params: PyTree
    state: Any


def start(dtype: Any = jnp.float32) -> dict:
    """One worker's parameters: a matrix that has low ranks, a vector and a scalar."""
    whole = lambda *shape: jnp.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    return {"b": whole(4), "s": whole() + 3, "w": whole(8, 8) % 5 - 2}


def targets(workers: int = 4, *, binary: bool = True, dtype: Any = jnp.float32) -> dict:
    """Where each worker pulls, stacked: multiples of 4 below 2⁶, or Gaussian."""
    rng = np.random.default_rng(0)

    def draw(x):
        shape = (workers, *x.shape)
        value = 4 * rng.integers(-8, 8, shape) if binary else rng.normal(size=shape)
        return jnp.asarray(value, dtype)

    return jax.tree.map(draw, start())


def squares(params: PyTree, target: PyTree) -> jax.Array:
    """½‖x − c‖², whose gradient x − c is exact on binary data."""
    parts = jax.tree.map(lambda x, c: jnp.sum(jnp.square(x - c)) / 2, params, target)
    return sum(jax.tree.leaves(parts), jnp.zeros(()))


def sizes_of(workers: int, axis: Axis) -> dict[str, int]:
    """So many workers over one axis name or several, two of them along the second."""
    first, *rest = names(axis)
    inner = 2 if rest and workers % 2 == 0 else 1
    return {first: workers // inner} | dict(
        zip(rest, (inner, *[1] * len(rest)), strict=False)
    )


def mesh_of(workers: int, axis: Axis = AXIS) -> jax.sharding.Mesh:
    """The first devices, as many as there are workers."""
    sizes = sizes_of(workers, axis)
    devices = np.array(jax.devices()[:workers]).reshape(*sizes.values())
    return jax.sharding.Mesh(devices, tuple(sizes))


def place_of(backend: str, workers: int, axis: Axis = AXIS) -> dict[str, Any]:
    """What ``spread`` and ``fit`` are told to run on this backend."""
    if backend != "vmap":
        return {"mesh": mesh_of(workers, axis), "backend": backend}
    several = not isinstance(axis, str)
    mesh = abstract_mesh(sizes_of(workers, axis)) if several else None
    return {"mesh": mesh, "backend": "vmap"}


def stepper(
    tx: Any,
    *,
    backend: str = "vmap",
    workers: int = 4,
    loss: Any = squares,
    axis: Axis = AXIS,
    extra_args: Any = None,
):
    """``(carry, target, t) -> carry`` on stacked trees, not jitted."""
    step = spread(
        local_step(loss, tx, axis=axis, extra_args=extra_args),
        in_axes=(0, 0, 0, None),
        axis=axis,
        **place_of(backend, workers, axis),
    )
    return lambda carry, target, t: Carry(*step(*carry, target, t)[:2])


def initializer(tx: Any, *, backend: str = "vmap", workers: int = 4, axis: Axis = AXIS):
    """``params -> carry`` from one worker's parameters, on the workers of a backend."""
    place = place_of(backend, workers, axis)
    init = jax.jit(spread(tx.init, axis=axis, **place))

    def first(params):
        params = stack(params, workers, mesh=place["mesh"], axis=axis)
        return Carry(params, init(params))

    return first


def begin(tx: Any, params: PyTree = None, **where: Any) -> Carry:
    """The first carry, on the workers of a backend."""
    return initializer(tx, **where)(start() if params is None else params)


def host(tree: PyTree) -> PyTree:
    """``tree`` as numpy arrays; of keys, copies."""
    return jax.tree.map(lambda x: jnp.copy(x) if is_key(x) else np.array(x), tree)


def walk(
    step: Any, carry: Carry, target: PyTree, *, first: int = 0, steps: int
) -> list[Carry]:
    """The carries after each step up to step number ``steps``, as numpy arrays."""
    path = []
    for t in range(first, steps):
        carry = step(carry, target, jnp.int32(t))
        path.append(host(carry))
    return path


def run(
    tx: Any,
    target: PyTree,
    *,
    params: PyTree = None,
    steps: int,
    loss: Any = squares,
    extra_args: Any = None,
    **where: Any,
) -> list[Carry]:
    """The path of a transformation from its first carry, by a jitted step."""
    step = jax.jit(stepper(tx, loss=loss, extra_args=extra_args, **where))
    return walk(step, begin(tx, params, **where), target, steps=steps)
