"""Compressors of every kind, and what they are tried on."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import lowcomm as lc
from lowcomm import quantize, random_k, top_k
from lowcomm.codebooks import GAUSSIAN, POWERS
from lowcomm.keys import Keys

CASES = {
    "top_k": top_k(0.3),
    "top_k blocks": top_k(0.3, block=8),
    "top_k of int8": top_k(0.3, values=quantize(stochastic=False)),
    "dct_top_k": lc.dct_top_k(2, chunk=8),
    "random_k": random_k(0.3),
    "random_k unbiased": random_k(0.3, unbiased=True),
    "sign": lc.sign(),
    "one_bit": lc.one_bit(),
    "int8": quantize(),
    "int8 nearest": quantize(stochastic=False),
    "int8 blocks": quantize(block=4),
    "int16 blocks nearest": quantize(16, block=5, stochastic=False),
    "4 bits, blocks": quantize(4, block=5),
    "2 bits nearest": quantize(2, stochastic=False),
    "ternary": lc.ternary(),
    "ternary clipped": lc.ternary(2.5),
    "qsgd": lc.qsgd(1),
    "qsgd blocks": lc.qsgd(7, block=5),
    "natural": lc.natural(),
    "powers": lc.codebook(POWERS, relative_to="largest", block=16),
    "normal levels": lc.codebook(GAUSSIAN, relative_to="rms"),
}
NOISY = {  # what a worker draws for itself
    *("int8", "int8 blocks", "4 bits, blocks", "qsgd", "qsgd blocks"),
    *("ternary", "ternary clipped", "natural"),
}
SELECTIONS = {
    "top_k": top_k(0.3),
    "random_k": random_k(0.3),
    "random_k unbiased": random_k(0.3, unbiased=True),
}
SHAPES = [(), (0,), (3, 0), (1,), (7,), (3, 5), (64, 33)]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
LEAVES = [
    *itertools.product([jnp.float32], SHAPES),
    *itertools.product([jnp.bfloat16, jnp.float16], [(), (3, 5)]),
]
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


def said(compressor, x, keys):
    """What travels, and the statistic as one worker alone agrees on it."""
    agreed = None if compressor.statistic is None else compressor.statistic(x)
    return compressor.encode(x, keys, agreed), agreed


def there_and_back(compressor, x, keys):
    payload, agreed = said(compressor, x, keys)
    return compressor.decode(payload, x, keys, agreed)


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
        sent = [said(c, x, keys) for x in leaves]
        decoded = [
            c.decode(payload, jax.ShapeDtypeStruct(x.shape, x.dtype), keys, agreed)
            for (payload, agreed), x in zip(sent, leaves, strict=True)
        ]
        return sent, decoded

    return jax.jit(run)


def bits_of(tree):
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def squares(x):
    return float(np.sum(np.abs(np.asarray(x, np.complex128)) ** 2))


floats = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
GRIDS = [(8, None), (8, 16), (16, None), (16, 16), (4, None), (4, 13), (2, 16)]
LEVELS = {2: 1, 4: 7, 8: 127, 16: 32767}
