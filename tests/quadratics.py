"""Workers that walk down quadratics, each to an optimum of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lowcomm import spread


def bend(x, data):
    """The gradient of ½ h (x − c)², with h and c the worker's own."""
    curvature, optimum = data
    return curvature * (x - optimum)


def toward(x, optimum):
    """The gradient of ½ (x − c)²."""
    return x - optimum


def plain(x, updates, state):
    """What a loop that knows only optax does with updates."""
    return optax.apply_updates(x, updates)


def walk(
    tx: Any,
    x: Any,
    data: Any,
    *,
    steps: int,
    gradient: Any = bend,
    start: int = 0,
    state: Any = None,
    apply: Any = plain,
    **extra: Any,
):
    """The paths ``[K, steps, …]`` of virtual workers and of their states."""

    def worker(x, state, data, extra):
        def body(carry, t):
            x, state = carry
            updates, state = tx.update(gradient(x, data), state, x, step=t, **extra)
            x = apply(x, updates, state)
            return (x, state), (x, state)

        return lax.scan(body, (x, state), start + jnp.arange(steps))[1]

    state = jax.jit(spread(tx.init))(x) if state is None else state
    return jax.tree.map(np.asarray, jax.jit(spread(worker))(x, state, data, extra))


def one_update(tx, grads, params, step=0, **extra):
    """One eager update of stacked gradients and parameters."""
    worker = lambda g, p: tx.update(g, tx.init(p), p, step=step, **extra)
    return spread(worker)(grads, params)


def squares(x, c):
    """The loss whose gradient is ``toward``."""
    return jnp.sum(jnp.square(x - c)) / 2
