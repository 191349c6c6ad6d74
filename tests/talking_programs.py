"""Programs of one worker that talk, and the bytes counted by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from lowcomm.ledger import traffic
from lowcomm.spmd import AXIS, vary

K, N = 8, 6
BYTES = 4 * N
RING = [(i, (i + 1) % K) for i in range(K)]


def mesh_of(workers):
    return Mesh(np.array(jax.devices()[:workers]), (AXIS,))


def psum(x):
    return vary(lax.psum(x, AXIS), AXIS)


def pmean(x):
    return vary(lax.pmean(x, AXIS), AXIS)


def pmax(x):
    return vary(lax.pmax(x, AXIS), AXIS)


def loudest(x):
    return lax.pmax(jnp.abs(x).max(), AXIS)


@jax.custom_vjp
def with_vjp(x):
    return pmean(x) * 3


with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, g: (g,))


@jax.custom_vjp
def guarded(x):
    return lax.cond(loudest(x) > 3, pmean, lambda x: x, x)


guarded.defvjp(lambda x: (guarded(x), None), lambda _, g: (g,))


@jax.custom_jvp
def with_jvp(x):
    return pmax(x) - x


with_jvp.defjvp(lambda p, t: (with_jvp(*p), t[0]))


def scanned(x):
    def body(c, i):
        mean = lax.cond(i % 3 == 0, pmean, lambda c: c + 1, c)
        return mean, lax.cond(i % 2 == 0, pmax, lambda c: c, c)

    last, all_ = lax.scan(body, x, jnp.arange(7))
    return last, all_.sum(0)


# Name -> (one worker's function, bytes when everything fires).
PROGRAMS = {
    "psum": (psum, BYTES),
    "pmean": (pmean, BYTES),
    "pmax": (pmax, BYTES),
    "silence": (lambda x: x * 2 + vary(lax.axis_index(AXIS), AXIS), 0),
    "constant": (lambda x: x * vary(lax.psum(1, AXIS), AXIS), 0),
    "all_gather": (lambda x: lax.all_gather(x, AXIS).sum(0), BYTES),
    "ppermute": (lambda x: lax.ppermute(x, AXIS, RING), BYTES),
    "lonely": (lambda x: lax.ppermute(x, AXIS, [(0, 1), (2, 2)]), BYTES),
    "self": (lambda x: lax.ppermute(x, AXIS, [(i, i) for i in range(K)]), 0),
    "all_to_all": (
        lambda x: lax.all_to_all(jnp.outer(jnp.arange(K), x), AXIS, 0, 0).sum(0),
        K * BYTES,
    ),
    "reduce_scatter": (
        lambda x: lax.psum_scatter(jnp.outer(jnp.arange(1.0, K + 1), x), AXIS) + x,
        K * BYTES,
    ),
    "int8": (lambda x: lax.all_gather(x.astype(jnp.int8), AXIS).sum(0) + x, N),
    "bfloat16": (lambda x: pmean(x.astype(jnp.bfloat16)) + x, 2 * N),
    "float8": (
        lambda x: (
            lax.all_gather(x.astype(jnp.float8_e4m3fn), AXIS)[0].astype(float) + x
        ),
        N,
    ),
    "bool": (lambda x: pmax(x > 3) + x, N),
    "tree": (lambda x: sum(jax.tree.leaves(pmean((x, x[:2].sum())))), BYTES + 4),
    "equal twice": (lambda x: psum(jnp.sin(x)) * psum(jnp.sin(x)), 2 * BYTES),
    "scan": (
        lambda x: lax.scan(lambda c, z: (pmean(c) + z, None), x, jnp.arange(5.0))[0],
        5 * BYTES,
    ),
    "scan in scan": (
        lambda x: lax.scan(
            lambda c, z: (lax.fori_loop(0, 3, lambda i, c: pmean(c) * i, c) + z, z),
            x,
            jnp.arange(5.0),
            reverse=True,
        )[0],
        15 * BYTES,
    ),
    "jit": (jax.jit(pmean), BYTES),
    "jit in jit": (jax.jit(lambda x: jax.jit(pmean)(x) + 1), BYTES),
    "custom_vjp": (with_vjp, BYTES),
    "custom_jvp": (with_jvp, BYTES),
    "grad": (lambda x: jax.grad(lambda y: (with_vjp(y) ** 2).sum())(x), BYTES),
    "remat": (jax.checkpoint(lambda x: jnp.sin(pmean(x))), BYTES),
    "vmap inside": (
        lambda x: jax.vmap(pmean)(x.reshape(2, 3)).reshape(-1),
        BYTES,
    ),
    "axis inside": (
        lambda x: jax.vmap(lambda y: pmean(lax.psum(y, "inner")), axis_name="inner")(
            x.reshape(2, 3)
        ).reshape(-1),
        BYTES // 2,
    ),
    "cond": (
        lambda x: lax.cond(loudest(x) > 3, lambda x: pmean(x) * 2, lambda x: x, x),
        BYTES + 4,
    ),
    "switch": (
        lambda x: lax.switch(
            lax.pmax(x[0].astype(int), AXIS) % 3,
            [
                lambda x: x,
                pmean,
                lambda x: lax.ppermute(pmax(x), AXIS, RING),
            ],
            x,
        ),
        2 * BYTES + 4,
    ),
    "cond in cond": (
        lambda x: lax.cond(
            loudest(x) > 1,
            lambda x: lax.cond(loudest(pmean(x)) > 2, psum, pmax, x) + 1,
            lambda x: x,
            x,
        ),
        2 * BYTES + 8,
    ),
    "cond in scan": (lambda x: sum(scanned(x)), 14 * BYTES),
    "cond in jit in scan": (
        lambda x: lax.fori_loop(
            0,
            4,
            jax.jit(lambda i, c: lax.cond(i == 2, with_vjp, lambda c: c * 2, c)),
            x,
        ),
        4 * BYTES,
    ),
    "cond in custom_vjp": (
        lambda x: guarded(x) + 1,
        BYTES + 4,
    ),
    "cond in remat": (
        jax.checkpoint(lambda x: lax.cond(loudest(x) > 3, psum, jnp.sin, x)),
        BYTES + 4,
    ),
}


def stacked(workers=K):
    return jnp.asarray(np.arange(workers * N).reshape(workers, N) % 5, jnp.float32)


def on_mesh(fn, workers=K, **options):
    """One worker's function on stacked arguments, as a shard_map."""
    local = lambda x: jax.tree.map(lambda y: vary(y, AXIS)[None], fn(x[0]))
    return jax.shard_map(
        local, mesh=mesh_of(workers), in_specs=P(AXIS), out_specs=P(AXIS), **options
    )


def virtual(fn):
    return jax.vmap(fn, axis_name=AXIS)


@functools.cache
def reading(name, workers=K):
    return traffic(PROGRAMS[name][0], stacked()[0], workers=workers)


def skip_what_jax_cannot_check(name, check):
    if name == "axis inside" and check:
        pytest.skip("a vmap axis inside a checked shard_map is an assertion in JAX")


def until_quiet(x):
    go = lambda s: (lax.pmax(s[0].max(), AXIS) > 1) & (s[1] < 50)
    turn = lambda s: (lax.cond(s[1] % 2 == 0, pmean, lambda x: x, s[0]) / 2, s[1] + 1)
    return lax.while_loop(go, turn, (x, 0))[0]
