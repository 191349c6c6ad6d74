"""Compressors of every kind, and what they are tried on."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from lowcomm import quantize, random_k, sign, top_k
from lowcomm.keys import Keys

CASES = {
    "top_k": top_k(0.3),
    "random_k": random_k(0.3),
    "random_k unbiased": random_k(0.3, unbiased=True),
    "sign": sign(),
    "int8": quantize(),
    "int8 nearest": quantize(stochastic=False),
    "int8 blocks": quantize(block=4),
    "int16 blocks nearest": quantize(16, block=5, stochastic=False),
}
SELECTIONS = {
    "top_k": top_k(0.3),
    "random_k": random_k(0.3),
    "random_k unbiased": random_k(0.3, unbiased=True),
}
SHAPES = [(), (0,), (3, 0), (1,), (7,), (3, 5), (64, 33)]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
LEAVES = list(itertools.product(DTYPES, SHAPES))
every_case = pytest.mark.parametrize("name", CASES)


def keys(step=0, worker=0):
    private = jax.random.fold_in(jax.random.key(2), step)
    return Keys(
        jax.random.fold_in(jax.random.key(1), step),
        jax.random.fold_in(private, worker),
    )


def normal(shape, seed=0, dtype=jnp.float32):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, dtype)


def there_and_back(compressor, x, keys):
    return compressor.decode(compressor.encode(x, keys), x, keys)


@functools.cache
def jitted(compressor):
    return jax.jit(functools.partial(there_and_back, compressor))


@functools.cache
def encoder(compressor):
    return jax.jit(compressor.encode)


@functools.cache
def leaves_there_and_back(name):
    """Payloads and decoded arrays of every shape and type, compiled once."""
    c = CASES[name]

    def run(leaves, keys):
        payloads = [c.encode(x, keys) for x in leaves]
        decoded = [
            c.decode(payload, jax.ShapeDtypeStruct(x.shape, x.dtype), keys)
            for payload, x in zip(payloads, leaves, strict=True)
        ]
        return payloads, decoded

    return jax.jit(run)


def bits_of(tree):
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def squares(x):
    return float(np.sum(np.abs(np.asarray(x, np.complex128)) ** 2))


floats = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
GRIDS = [(8, None), (8, 16), (16, None), (16, 16)]
LEVELS = {8: 127, 16: 32767}
