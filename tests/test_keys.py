"""The hash behind all noise: as good as random, where a compressor would notice.

The draws are fixed, so each bound is a statement about these numbers. All are 4.5
standard errors of what independent uniform bits would give, which chance exceeds once
in 150 000.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm.keys import hashed, leaf_keys, random_bits, uniform_floats
from lowcomm.spmd import AXIS

N = 2**18
SIGMAS = 4.5
fold = jax.random.fold_in
STREAMS = {
    "a key": (jax.random.key(0), 0),
    "the next seed": (jax.random.key(1), 0),
    "folded": (fold(jax.random.key(0), 1), 0),
    "folded once more": (fold(jax.random.key(0), 2), 0),
    "another stream": (jax.random.key(0), 1),
    "a third stream": (jax.random.key(0), 2),
    "a large seed": (jax.random.key(2**31), 0),
    "one bit away": (jax.random.wrap_key_data(jnp.array([1, 0], jnp.uint32)), 0),
}
every_stream = pytest.mark.parametrize("name", STREAMS)


def bits_of(name):
    key, stream = STREAMS[name]
    return np.asarray(random_bits(key, N, stream=stream))


def floats_of(name):
    key, stream = STREAMS[name]
    return np.asarray(uniform_floats(key, N, stream=stream), np.float64)


def correlation(x, y):
    """Of uniform numbers, in standard errors: 12 · mean has variance 1/n."""
    return 12 * np.mean((x - 0.5) * (y - 0.5)) * np.sqrt(len(x))


@every_stream
def test_floats_have_the_moments_of_uniform_ones(name):
    # Of U(0, 1): variance 1/12; (U − 1/2)² has mean 1/12 and variance 1/180.
    u = floats_of(name)
    assert 0 <= u.min() < u.max() < 1
    assert abs(u.mean() - 0.5) < SIGMAS / np.sqrt(12 * N)
    assert abs(np.mean((u - 0.5) ** 2) - 1 / 12) < SIGMAS / np.sqrt(180 * N)
    np.testing.assert_array_equal(u, (bits_of(name) >> 8) / 2**24)


@every_stream
def test_every_bit_is_set_half_of_the_time_and_pairs_of_bits_a_quarter(name):
    # ±1 for a bit: the mean of it, and of the product of two, has variance 1/n.
    planes = np.unpackbits(bits_of(name)[:, None].view(np.uint8), axis=1)
    signs = 2.0 * planes - 1
    assert np.all(np.abs(signs.mean(0)) < SIGMAS / np.sqrt(N))
    products = signs.T @ signs / N - np.eye(32)
    assert np.all(np.abs(products) < SIGMAS / np.sqrt(N))


@every_stream
@pytest.mark.parametrize("low", [False, True])
def test_bytes_fill_their_cells_evenly(name, low):
    # χ² of 256 cells has mean 255 and variance 510; so do pairs of neighbours' nibbles.
    bits = bits_of(name)
    single = bits & 255 if low else bits >> 24
    nibble = bits & 15 if low else bits >> 28
    for cells in (single, nibble[::2] << 4 | nibble[1::2]):
        counts, expected = np.bincount(cells, minlength=256), len(cells) / 256
        chi2 = np.sum((counts - expected) ** 2) / expected
        assert abs(chi2 - 255) < SIGMAS * np.sqrt(510)


@every_stream
def test_neighbours_near_and_far_are_not_correlated(name):
    u = floats_of(name)
    for lag in (1, 2, 3, 4, 7, 8, 64, 255, 256, 512, 1000, 4096, 2**16):
        assert abs(correlation(u[:-lag], u[lag:])) < SIGMAS


def test_keys_steps_and_streams_are_not_correlated():
    draws = {name: floats_of(name) for name in STREAMS}
    for one, other in itertools.combinations(draws.values(), 2):
        assert abs(correlation(one, other)) < SIGMAS
        # Nor is one the other, moved by an entry.
        assert abs(correlation(one[1:], other[:-1])) < SIGMAS


def test_steps_of_one_leaf_are_independent_at_each_entry():
    # Over 256 steps the mean of an entry has variance 1/(12 · 256); the largest of 4096
    # exceeds 5.5 standard errors by chance once in 6000.
    steps, n = 256, 4096

    def at(step):
        keys = leaf_keys(0, step, 3, AXIS)
        return uniform_floats(keys.shared, n), uniform_floats(keys.private, n)

    draw = jax.vmap(jax.vmap(at, (0,)), (None,), axis_name=AXIS, axis_size=2)
    shared, private = draw(jnp.arange(steps))
    np.testing.assert_array_equal(shared[0], shared[1])
    for u in (shared[0], private[0], private[1]):
        away = np.asarray(u, np.float64).mean(0) - 0.5
        assert np.abs(away).max() < 5.5 / np.sqrt(12 * steps)
    one, other = (np.asarray(private[w], np.float64).ravel() for w in (0, 1))
    assert abs(correlation(one, other)) < SIGMAS
    mine = np.asarray(shared[0], np.float64).ravel()
    assert abs(correlation(mine, one)) < SIGMAS


def test_a_place_has_the_number_that_it_has_among_all():
    key, places = jax.random.key(5), jnp.array([3, 0, 77], jnp.uint32)
    everywhere = random_bits(key, 100, stream=4)
    np.testing.assert_array_equal(hashed(key, places, stream=4), everywhere[places])
    np.testing.assert_array_equal(random_bits(key, 10, stream=4), everywhere[:10])


def test_different_places_of_one_key_have_different_numbers():
    # Every operation on a number can be undone, so no two places share one.
    assert len(np.unique(bits_of("a key"))) == N


def test_rounding_up_is_as_likely_as_the_fraction():
    # What compressors do with it, for fractions that a weak low bit would spoil: a
    # Bernoulli of p has standard error √(p (1 − p) / n); floats are multiples of 2⁻²⁴.
    u = floats_of("a key")
    for p in (2.0**-12, 2.0**-8, 0.1, 1 / 3, 0.5, 0.999):
        missed = abs(np.mean(u < p) - p) - 2.0**-24
        assert missed < SIGMAS * np.sqrt(p * (1 - p) / N)
