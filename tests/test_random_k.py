"""Random selections: which places are drawn, how often, and what is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm import random_k
from lowcomm.keys import Keys
from lowcomm.selections import _below
from tests.compressor_cases import (
    CASES,
    encoder,
    keys,
    normal,
    squares,
    there_and_back,
)


def blocks(n, k):
    """Sizes of k consecutive blocks of n elements: the first n mod k are longer."""
    return np.array([n // k + (j < n % k) for j in range(k)])


def test_workers_draw_the_same_places_and_steps_draw_others():
    # The positions themselves are sent, so that the payload says which were drawn.
    at = np.arange(33, dtype=np.float32)
    draw = lambda *who: tuple(encoder(CASES["random_k"])(at, keys(*who)).tolist())
    assert draw(3, 0) == draw(3, 5)
    assert len({draw(step, 0) for step in range(20)}) == 20


@pytest.mark.parametrize(
    ("n", "fraction"), [(1, 0.5), (7, 0.01), (23, 0.3), (40, 0.77)]
)
def test_one_place_is_drawn_from_each_block(n, fraction):
    at = jnp.arange(n, dtype=jnp.float32)
    shared = jax.random.split(jax.random.key(3), 200)
    draw = lambda key: random_k(fraction).encode(at, Keys(key, None))
    drawn = np.asarray(jax.jit(jax.vmap(draw))(shared), int)
    sizes = blocks(n, drawn.shape[1])
    ends = np.cumsum(sizes)
    assert ends[-1] == n
    assert np.all((ends - sizes <= drawn) & (drawn < ends))
    # Every place is reachable: missing one of 200 tries has (1 − 1/s)²⁰⁰ < 3e-13 for
    # the 7 places of the longest block.
    assert len(np.unique(drawn)) == n


@functools.cache
def many_random_k(unbiased, draws=5_000):
    """Decoded arrays of one x of 23 elements (7 blocks, of 4 and 3) for many keys."""
    c, x = random_k(0.3, unbiased=unbiased), normal(23, seed=5)
    shared = jax.random.split(jax.random.key(9), draws)
    batch = jax.jit(jax.vmap(lambda key: there_and_back(c, x, Keys(key, None))))
    return np.asarray(x, np.float64), np.asarray(batch(shared), np.float64)


def test_every_place_of_a_block_is_drawn_equally_often():
    # Counts are binomial with p = 1/s; 23 of them within 4.5 standard deviations.
    _, decoded = many_random_k(False)
    p = 1 / np.repeat(blocks(23, 7), blocks(23, 7))
    deviation = np.mean(decoded != 0, axis=0) - p
    assert np.all(np.abs(deviation) < 4.5 * np.sqrt(p * (1 - p) / len(decoded)))


@pytest.mark.parametrize("unbiased", [False, True])
def test_random_k_has_exactly_the_declared_error(unbiased):
    # In a block B of size s exactly one i survives, uniformly. Unscaled, the error is
    # |x_B|² − x_i², with mean (1 − 1/s) |x_B|². Scaled by s it is
    # |x_B|² − x_i² + (s − 1)² x_i², with mean |x_B|² (1 + ((s − 1)² − 1) / s)
    # = (s − 1) |x_B|². Blocks are independent, so the variances of the sum over
    # blocks add up, and the mean of N draws deviates by 4.5 sqrt(var / N) at most.
    x, decoded = many_random_k(unbiased)
    expected = variance = 0.0
    for part in np.split(x**2, np.cumsum(blocks(23, 7))[:-1]):
        s = len(part)
        errors = part.sum() + (((s - 1) ** 2 - 1) * part if unbiased else -part)
        factor = s - 1 if unbiased else 1 - 1 / s
        assert errors.mean() == pytest.approx(factor * part.sum(), rel=1e-12)
        expected, variance = expected + errors.mean(), variance + errors.var()
    measured = ((decoded - x) ** 2).sum(axis=1).mean()
    assert abs(measured - expected) < 4.5 * np.sqrt(variance / len(decoded))


def test_unbiased_random_k_is_right_on_average_also_in_unequal_blocks():
    x, decoded = many_random_k(True)
    s = np.repeat(blocks(23, 7), blocks(23, 7))
    bound = 4.5 * np.abs(x) * np.sqrt((s - 1) / len(decoded))
    assert np.all(np.abs(decoded.mean(axis=0) - x) < bound)
    # And exactly: a survivor is its value times the size of its block, drawn 1 in s.
    scaled = np.float32(s) * np.float32(x)
    np.testing.assert_array_equal(decoded, np.where(decoded != 0, scaled, 0))


def test_scaling_does_not_overflow_half_precision_on_the_way():
    x = np.full(64, 30000.0, np.float16)
    c, like = random_k(0.25, unbiased=True), jax.ShapeDtypeStruct((64,), jnp.float32)
    payload = encoder(c)(x, keys())
    assert np.all(np.asarray(payload) == 30000)
    wide = jax.jit(lambda payload, keys: c.decode(payload, like, keys))(payload, keys())
    assert set(wide.tolist()) == {0.0, 120000.0}


def test_rescaled_random_k_multiplies_what_is_remembered_by_one_less_than_the_block():
    # The memory of an entry in a block of s is p − s p with probability 1/s and p else:
    # its square is multiplied by (1 − s)² / s + (1 − 1/s) = s − 1 on average. So blocks
    # of one forget, those of two keep the magnitude, and longer ones grow.
    x, steps = normal(24), 3

    def memory(n_of_block):
        c = random_k(1 / n_of_block, unbiased=True)

        def step(e, key):
            return e - there_and_back(c, e, Keys(key, None)), ()

        trial = lambda keys: jax.lax.scan(step, x, keys)[0]
        shared = jax.random.split(jax.random.key(0), (4000, steps))
        return np.asarray(jax.jit(jax.vmap(trial))(shared), np.float64)

    assert not np.any(memory(1))
    np.testing.assert_array_equal(np.abs(memory(2)), np.abs(np.tile(x, (4000, 1))))
    for size in (3, 4):
        grown = np.sum(memory(size) ** 2, axis=1) / squares(x)
        expected = (size - 1) ** steps
        assert abs(grown.mean() - expected) < 4.5 * grown.std() / np.sqrt(4000)
    assert random_k(0.5, unbiased=True).law.omega(24) == 1
    assert random_k(0.25, unbiased=True).law.omega(24) == 3
    assert random_k(0.25).law.delta(24) == 1 / 4


def test_a_place_below_a_bound_is_the_product_with_random_bits_over_two_to_the_32():
    bits = np.array([0, 1, 2**16 - 1, 2**16, 2**31 - 7, 2**32 - 1], np.uint32)
    sizes = np.array([1, 2, 3, 255, 2**16, 2**16 + 1, 10**9, 2**31 - 1], np.int32)
    for size in sizes:
        expected = [int(b) * int(size) >> 32 for b in bits]
        assert _below(jnp.asarray(bits), jnp.asarray(size)).tolist() == expected
