"""Compressors that send every entry in fewer bits: their grids and their noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lowcomm import quantize, sign
from lowcomm.keys import Keys
from tests.compressor_cases import (
    CASES,
    GRIDS,
    LEAVES,
    LEVELS,
    bits_of,
    encoder,
    every_case,
    floats,
    jitted,
    keys,
    leaves_there_and_back,
    normal,
    squares,
    there_and_back,
)

SIGN = CASES["sign"]


@every_case
def test_zero_of_either_sign_is_sent_as_zero(name):
    for zero in (0.0, -0.0):
        leaves = [jnp.full(shape, zero, dtype) for dtype, shape in LEAVES]
        _, decoded = leaves_there_and_back(name)(leaves, keys())
        for y in decoded:
            assert np.all(np.asarray(y, np.float32) == 0)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(x=st.lists(floats, min_size=11, max_size=11))
def test_sign_has_exactly_the_declared_error(x):
    # ||s sgn(x) − x||² with s = ||x||₁/d and sgn² = 1: d s² − 2 s ||x||₁ + ||x||².
    x = np.asarray(x, np.float32)
    error = squares(np.asarray(jitted(SIGN)(x, None), np.float64) - x)
    expected = squares(x) - np.abs(x.astype(np.float64)).sum() ** 2 / len(x)
    # The scale is a float32 sum of 11: relative error 11 · 2⁻²⁴, times 2 ||x||₁ s.
    assert error == pytest.approx(expected, abs=11 * 2**-22 * squares(x) + 1e-30)


def test_sign_is_exact_on_equal_magnitudes_and_worst_on_one_spike():
    x = jnp.where(jnp.arange(16) % 3 == 0, -0.75, 0.75)
    assert bits_of(jitted(SIGN)(x, None)) == bits_of(x)
    spike = jnp.zeros(16).at[3].set(2.0)
    error = squares(spike - jitted(SIGN)(spike, None))
    assert error == (1 - 1 / 16) * squares(spike)


def test_zero_counts_as_plus_and_padding_bits_are_dropped():
    x = jnp.array([0.0, -0.0, -9.0, 3.0, 0.0, 0.0, 0.0, 0.0, -12.0])
    bits, scale = SIGN.encode(x, None)
    assert bits.tolist() == [0b11011111, 0b00000000]
    assert scale == np.float32(24 / 9)
    assert bits_of(bits) == bits_of(SIGN.encode(x.at[0].set(0.5), None)[0])
    decoded = np.asarray(SIGN.decode((bits, scale), x, None))
    assert np.sign(decoded).tolist() == [1, 1, -1, 1, 1, 1, 1, 1, -1]


def test_half_precision_magnitudes_are_averaged_in_float32():
    top = jnp.full(1000, 60000.0, jnp.float16)
    assert bits_of(jitted(SIGN)(top, None)) == bits_of(top)


def grid(x, bits, block):
    """Step size and position of each element in units of it, in float64."""
    x = np.asarray(x, np.float64)
    width = block or len(x)
    m = np.concatenate(
        [
            np.full(len(part), np.abs(part).max())
            for part in np.split(x, range(width, len(x), width))
        ]
    )
    return m / LEVELS[bits], x * LEVELS[bits] / m


@pytest.mark.parametrize(("bits", "block"), GRIDS)
def test_stochastic_rounding_is_unbiased_with_exactly_the_declared_variance(
    bits, block
):
    # With p the fractional part, a rounded value is a Bernoulli of variance
    # p (1 − p) step². The sum of 41 squared errors over N draws: each error takes the
    # values (1 − p)² with probability p and p² with 1 − p, whose variance is
    # p (1 − p) (1 − 2p)². Float32 moves u by up to 2⁻²³ u, so p by at most 2⁻²³ L.
    n, draws = 41, 10_000
    c, x = quantize(bits, block=block), normal(n, seed=3)
    private = jax.random.split(jax.random.key(4), draws)
    batch = jax.jit(jax.vmap(lambda key: there_and_back(c, x, Keys(None, key))))
    decoded = np.asarray(batch(private), np.float64)
    step, u = grid(x, bits, block)
    p, blur = u - np.floor(u), 2**-22 * LEVELS[bits]
    errors = (decoded - np.asarray(x, np.float64)) / step
    spread = np.sqrt(p * (1 - p) / draws)
    assert np.all(np.abs(errors.mean(axis=0)) <= 4.5 * spread + 2 * blur)
    variance = np.sum(p * (1 - p) * (1 - 2 * p) ** 2) / draws
    measured, expected = (errors**2).sum(axis=1).mean(), np.sum(p * (1 - p))
    assert abs(measured - expected) < 4.5 * np.sqrt(variance) + 2 * n * blur
    width = min(block or n, n)
    omega = (width - 1) / (4 * LEVELS[bits] ** 2)
    assert np.sum(p * (1 - p) * step**2) <= omega * squares(x)


@pytest.mark.parametrize(("bits", "block"), GRIDS)
def test_nearest_rounding_misses_by_half_a_step_and_never_by_more_than_the_entry(
    bits, block
):
    c = quantize(bits, block=block, stochastic=False)
    x = normal(41, seed=7) * jnp.logspace(-6, 0, 41)
    step, _ = grid(x, bits, block)
    x64, ulps = np.asarray(x, np.float64), 2**-22 * np.abs(np.asarray(x, np.float64))
    error = np.abs(np.asarray(jitted(c)(x, None), np.float64) - x64)
    assert np.all(error <= np.minimum(step / 2, np.abs(x64)) + ulps)
    assert squares(error) <= (1 - 1 / min(block or 41, 41)) * squares(x)


def test_quantizing_what_is_on_the_grid_already_changes_nothing():
    for bits, block in GRIDS:
        c = quantize(bits, block=block, stochastic=False)
        payload = encoder(c)(normal(41), None)
        again = encoder(c)(jitted(c)(normal(41), None), None)
        assert bits_of(again) == bits_of(payload)


def test_private_keys_make_the_noise_differ_between_workers():
    x = normal(64)
    encode = encoder(CASES["int8"])
    codes = [encode(x, keys(worker=w))[0].tolist() for w in (0, 0, 1)]
    assert codes[0] == codes[1] != codes[2]


def test_a_short_last_block_has_the_scale_of_its_own_elements():
    x = np.float32([5.0] * 8 + [1e-20, -2e-20])
    codes, scales = encoder(quantize(block=8, stochastic=False))(x, None)
    np.testing.assert_array_equal(scales, np.float32([5.0, 2e-20]))
    assert codes.shape == (10,)
    assert codes[8:].tolist() == [64, -127]


def test_a_bad_entry_spoils_its_own_block_only():
    c = quantize(block=4)
    for bad in (jnp.nan, jnp.inf):
        decoded = np.asarray(jitted(c)(normal(12).at[5].set(bad), keys()))
        assert np.isfinite(decoded).tolist() == [True] * 4 + [False] * 4 + [True] * 4


@pytest.mark.parametrize("bits", [1, 4, 7, 32, True, "8", 8.0, None])
def test_other_widths_are_refused_naming_those_there_are(bits):
    with pytest.raises(ValueError, match=r"8 \(int8\) and 16 \(int16\)") as error:
        quantize(bits)
    assert repr(bits) in str(error.value)


@pytest.mark.parametrize("block", [0, -1, True, 2.5, "64"])
def test_blocks_below_one_element_are_refused_with_their_value(block):
    with pytest.raises(ValueError, match="how many elements share") as error:
        quantize(block=block)
    assert repr(block) in str(error.value)


@pytest.mark.parametrize("compressor", [sign(), quantize()])
def test_complex_arrays_are_refused_where_they_have_no_sign(compressor):
    with pytest.raises(ValueError, match="real and imaginary"):
        compressor.encode(jnp.zeros(3, jnp.complex64), keys())


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("n", [33, 4096, 8192])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_is_seen_in_leaves_of_any_size(n, bad, stochastic):
    # XLA's CPU backend loses a NaN in the maximum of 4096 entries or more.
    x = jnp.ones(n).at[3].set(bad)
    decoded = jitted(quantize(8, stochastic=stochastic))(x, keys())
    assert not np.isfinite(decoded).any()
