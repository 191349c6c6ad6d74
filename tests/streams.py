"""Streams of gradients that measured triggers listen to."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowcomm.spmd import AXIS, vary, worker_mesh
from lowcomm.workers import spread

K = 4


def mesh_of(backend):
    return worker_mesh(K) if backend == "mesh" else None


@functools.cache
def detector(when, backend):
    def worker(grads):
        def step(state, now):
            fires, state = when.fire(state, step=now[0], grads=now[1])
            return state, (vary(fires, AXIS), state)

        steps = jnp.arange(len(grads))
        return lax.scan(step, vary(when.init(grads[0]), AXIS), (steps, grads))[1]

    return jax.jit(spread(worker, mesh=mesh_of(backend)))


def detect(when, grads, backend="vmap"):
    """Who fires when, ``[K, T]``, and the states, of a stacked stream ``[K, T, …]``."""
    fires, states = detector(when, backend)(jnp.asarray(grads, jnp.float32))
    return np.asarray(fires), states


@functools.cache
def recorded():
    """The norms of four workers, [4, 100], with jumps."""
    draw = np.random.default_rng(0)
    norms = draw.gamma(4.0, size=(K, 100)) * (1 + 9 * (draw.random((K, 100)) < 0.05))
    return norms.astype(np.float32)
