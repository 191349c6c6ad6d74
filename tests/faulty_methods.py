"""Methods with one bug each, for the laws to find."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import lowcomm as lc
from lowcomm.spmd import vary

Talking = optax.GradientTransformationExtraArgs


def mean(tree):
    return jax.tree.map(lambda x: lax.pmean(x, lc.AXIS), tree)


def exchange(update, init=lambda params: optax.EmptyState()):
    """A method whose gradients pass through ``update(grads, state, step)``."""

    def full(updates, state, params=None, *, step=None, **extra):
        return update(updates, state, step)

    return lambda inner: optax.chain(Talking(init, full), inner)


def starting(state):
    """An exchange whose state starts so."""
    return lambda update: exchange(
        update, lambda params: jax.tree.map(jnp.array, state)
    )


def aliasing(inner):
    """Its anchor is the very array of the parameters."""
    tx = lc.data_parallel(inner)
    init = lambda params: (params, tx.init(params))

    def update(updates, state, params=None, **extra):
        moves, inner_state = tx.update(updates, state[1], params, **extra)
        return moves, (state[0], inner_state)

    return Talking(init, update)


def counting(inner):
    """Its clock is a variable of Python's."""
    calls = []

    def update(grads, state, step):
        calls.append(step)
        return (mean(grads) if len(calls) % 4 else grads), state

    return exchange(update)(inner)


@exchange
def tossing(grads, state, step):
    scale = random.random()
    return jax.tree.map(lambda g: scale * lax.pmean(g, lc.AXIS), grads), state


@exchange
def same_draw(grads, state, step):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5)
    return jax.tree.map(lambda g: 2 * keep * lax.pmean(g, lc.AXIS), grads), state


@exchange
def new_draw(grads, state, step):
    keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), step), 0.5)
    return jax.tree.map(lambda g: 2 * keep * lax.pmean(g, lc.AXIS), grads), state


@starting(np.int32(0))
def widening(grads, state, step):
    return mean(grads), state + jnp.float32(1)


def _weak(grads, state, step):
    return mean(grads), jnp.zeros((), jnp.float32)


weak = exchange(_weak, lambda params: 0.0)


class Anchored(NamedTuple):
    inner: Any
    anchor: Any


def narrow_anchor(inner):
    """Rounds whose anchor is bfloat16 whatever the parameters are."""
    inner = optax.with_extra_args_support(inner)
    narrow = lambda tree: jax.tree.map(lambda p: p.astype(jnp.bfloat16), tree)

    def update(updates, state, params=None, **extra):
        moves, inner_state = inner.update(updates, state.inner, params, **extra)
        there = lambda a, p, u: a.astype(p.dtype) + lax.pmean(p + u - a, lc.AXIS)
        model = narrow(jax.tree.map(there, state.anchor, params, moves))
        moves = jax.tree.map(lambda a, p: a.astype(p.dtype) - p, model, params)
        return moves, Anchored(inner_state, model)

    return Talking(lambda p: Anchored(inner.init(p), narrow(p)), update)


SELFISH = lc.Trigger(lambda params: (), lambda state, *, grads, **_: (big(grads), ()))


def big(grads):
    return sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)) > 9.0


@exchange
def clipping(grads, state, step):
    """Only workers with large gradients come to the rendezvous."""
    talk = lambda g: vary(mean(g), lc.AXIS)
    return lax.cond(big(grads), talk, lambda g: g, grads), state


@exchange
def one_sided(grads, state, step):
    """Right on virtual workers; on a mesh the branches have different types."""
    wanted = lax.pmax(big(grads).astype(jnp.int32), lc.AXIS) > 0
    return lax.cond(wanted, mean, lambda g: g, grads), state


def deaf(inner):
    """Hands on neither the parameters nor what else is passed."""

    def update(updates, state, params=None, **extra):
        return inner.update(mean(updates), state)

    return Talking(inner.init, update)


def half_deaf(inner):
    """Hands on the parameters alone."""

    def update(updates, state, params=None, **extra):
        return inner.update(mean(updates), state, params)

    return Talking(inner.init, update)


def _sum(grads, state, params=None, **extra):
    return jax.tree.map(lambda g: lax.psum(g, lc.AXIS), grads), state


total = Talking(lambda params: optax.EmptyState(), _sum)
summing = lambda inner: optax.chain(total, inner)


def summed_displacements(inner):
    return lc.rounds(inner, optax.sgd(1.0), exchange=total, when=lc.every(4))


@exchange
def asking_python(grads, state, step):
    return (mean(grads) if step % 4 == 3 else grads), state


@exchange
def normalizing(grads, state, step):
    norm = lambda g: g / jnp.linalg.norm(g)
    return mean(jax.tree.map(norm, grads)), state


@starting(np.zeros(0, np.float32))
def growing(grads, state, step):
    return mean(grads), jnp.concatenate([state, jnp.zeros(1)])


def early(inner):
    """Syncs at the first step of a round and not at its last."""
    return lc.average(inner, when=lc.every(4, offset=1))


@exchange
def following(grads, state, step):
    """All workers follow the first, whose data is not that of the others."""
    mine = lax.axis_index(lc.AXIS) == 0
    own = lambda g: lax.psum(jnp.where(mine, g, 0), lc.AXIS)
    return jax.tree.map(own, grads), state


@exchange
def own_axis(grads, state, step):
    return jax.tree.map(lambda g: lax.pmean(g, "data"), grads), state


ring_of_four = lambda inner: lc.dpsgd(inner, lc.ring(4))
selfish = lambda inner: lc.average(inner, when=SELFISH)


@exchange
def deaf_to_others(grads, state, step):
    return jax.tree.map(lambda g: g + 0 * lax.pmean(g, lc.AXIS), grads), state


@exchange
def half_listening(grads, state, step):
    return jax.tree.map(lambda g: (g + lax.pmean(g, lc.AXIS)) / 2, grads), state


@exchange
def matrices_only(grads, state, step):
    hear = lambda g: vary(lax.pmean(g, lc.AXIS), lc.AXIS) if g.ndim > 1 else g
    return jax.tree.map(hear, grads), state
