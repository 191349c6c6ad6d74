"""Workers that walk down quadratics with the value of their losses at hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc
from lowcomm import spread
from tests.quadratics import squares

K, N = 4, 3
RNG = np.random.default_rng(0)
# Multiples of 2⁻⁶, so that the sum of a parameter and its update is exact.
START = jnp.asarray(RNG.integers(-99, 99, size=(K, N)) / 64, jnp.float32)
OPTIMA = jnp.asarray(RNG.normal(size=(K, N)), jnp.float32)
INNER = optax.sgd(0.1, momentum=0.5)


def train(tx, steps, *, x=START, data=OPTIMA, loss=squares, axis="workers", **where):
    """The paths ``[K, steps, …]`` of the workers and of their states."""
    step = lc.local_step(loss, tx, axis=axis)

    def worker(x, data):
        def body(carry, t):
            x, state, _ = step(*carry, data, t)
            return (x, state), (x, state)

        return jax.lax.scan(body, (x, tx.init(x)), jnp.arange(steps))[1]

    run = jax.jit(spread(worker, axis=axis, **where))
    return jax.tree.map(np.asarray, run(x, data))


def constant(x, data):
    """A loss whose gradient is the worker's own, with a value of its own besides."""
    slope, value = data
    pushes = jnp.sum(slope * x)
    return pushes - jax.lax.stop_gradient(pushes) + value


def near(path, expected, roundings=64):
    """Values below 4, and a few operations a step."""
    np.testing.assert_allclose(path, expected, atol=roundings * 2**-22)
