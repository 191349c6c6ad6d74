"""Small problems the laws are tried on, and trajectories recorded once for all laws."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc
from experiments.catalogue import CATALOGUE

K, PERIOD, STEPS = 4, 4, 8  # workers, steps a round, two rounds
BACKENDS = ("vmap", "shard_map", "pmap")


def method(
    name: str, *, inner: Any = None, workers: int = K, steps: int = STEPS, **more
):
    """A method of the catalogue in the setting of the laws."""
    inner = optax.sgd(0.5, momentum=0.5) if inner is None else inner
    setting = {"period": PERIOD, "fraction": 0.25, "threshold": 0.125, "window": 2}
    return CATALOGUE[name].make(
        workers=workers,
        steps=steps,
        learning_rate=0.5,
        inner=inner,
        **(setting | more),
    )


def start(dtype: Any = jnp.float32) -> dict:
    """One worker's parameters: a matrix that has low ranks, a vector and a scalar."""
    whole = lambda *shape: jnp.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    return {"b": whole(4), "s": whole() + 3, "w": whole(8, 8) % 5 - 2}


def targets(workers: int = K, *, binary: bool = True, dtype: Any = jnp.float32) -> dict:
    """Where each worker pulls, stacked: multiples of 4 below 2⁶, or Gaussian."""
    rng = np.random.default_rng(0)

    def draw(x):
        shape = (workers, *x.shape)
        value = 4 * rng.integers(-8, 8, shape) if binary else rng.normal(size=shape)
        return jnp.asarray(value, dtype)

    return jax.tree.map(draw, start())


def squares(params: Any, target: Any) -> jax.Array:
    """½‖x − c‖², whose gradient x − c is exact on binary data."""
    parts = jax.tree.map(lambda x, c: jnp.sum(jnp.square(x - c)) / 2, params, target)
    return sum(jax.tree.leaves(parts), jnp.zeros(()))


class Carry(NamedTuple):
    """What goes from step to step, stacked."""

    params: Any
    state: Any


def stepper(tx: Any, *, backend: str = "vmap", workers: int = K, loss: Any = squares):
    """``(carry, target, t) -> carry`` on stacked trees, not jitted."""
    mesh = None if backend == "vmap" else lc.worker_mesh(workers)
    step = lc.spread(
        lc.local_step(loss, tx), mesh=mesh, backend=backend, in_axes=(0, 0, 0, None)
    )
    return lambda carry, target, t: Carry(*step(*carry, target, t)[:2])


def begin(tx: Any, params: Any = None, *, backend: str = "vmap", workers: int = K):
    """The first carry, on the workers of a backend."""
    mesh = None if backend == "vmap" else lc.worker_mesh(workers)
    params = start() if params is None else params
    params = lc.stack(params, workers, mesh=mesh)
    init = lc.spread(tx.init, mesh=mesh, backend=backend)
    return Carry(params, jax.jit(init)(params))


def run(
    tx: Any,
    target: Any,
    *,
    params: Any = None,
    carry: Any = None,
    first: int = 0,
    steps: int = STEPS,
    loss: Any = squares,
    step: Any = None,
    **where: Any,
):
    """The carries after each step, as numpy arrays, from a jitted step."""
    carry = begin(tx, params, **where) if carry is None else carry
    step = jax.jit(stepper(tx, loss=loss, **where)) if step is None else step
    path = []
    for t in range(first, steps):
        carry = step(carry, target, jnp.int32(t))
        path.append(jax.tree.map(np.asarray, carry))
    return path


@functools.cache
def program(name: str, backend: str = "vmap"):
    """The jitted step of a method in the setting of the laws, compiled once."""
    return jax.jit(stepper(method(name), backend=backend))


@functools.cache
def record(name: str, backend: str = "vmap", binary: bool = True) -> list[Carry]:
    """The trajectory of a method in the setting of the laws."""
    step = program(name, backend)
    return run(method(name), targets(binary=binary), step=step, backend=backend)
