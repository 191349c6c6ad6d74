"""Integers on a grid: its steps, its noise, and what it loses at worst."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm import quantize
from lowcomm.keys import Keys
from lowcomm.packing import unpack
from tests.compressor_cases import (
    CASES,
    GRIDS,
    LEVELS,
    bits_of,
    encoder,
    jitted,
    keys,
    normal,
    squares,
    there_and_back,
)


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
    assert np.sum(p * (1 - p) * step**2) <= c.law.omega(n) * squares(x)


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
    assert squares(error) <= (1 - c.law.delta(41)) * squares(x)


@pytest.mark.parametrize(("bits", "block"), GRIDS)
def test_the_declared_constants_are_attained(bits, block):
    # One entry m beside s − 1 equal ones u in units of the step m/L: the relative error
    # is (s − 1) p (1 − p) / (L² + (s − 1) u²), largest at u = L (√(L² + s − 1) − L) /
    # (s − 1), and to nearest (s − 1) u² / (L² + (s − 1) u²) for u up to 1/2.
    n, top = 41, LEVELS[bits]
    s = min(block or n, n)
    u = top * (np.sqrt(top**2 + s - 1) - top) / (s - 1)
    worst = (s - 1) * u * (1 - u) / (top**2 + (s - 1) * u**2)
    assert quantize(bits, block=block).law.omega(n) == pytest.approx(worst, rel=1e-6)
    c = quantize(bits, block=block, stochastic=False)
    x = np.full(s, 0.4999, np.float32)
    x[3] = top
    lost = squares(jitted(c)(x, None) - x) / squares(x)
    assert 0.999 * (1 - c.law.delta(n)) < lost < 1 - c.law.delta(n)


def test_blocks_of_one_entry_lose_nothing():
    for bits in LEVELS:
        c = quantize(bits, block=1)
        assert (c.law.omega(5), quantize(bits).law.omega(1)) == (0, 0)
        assert bits_of(jitted(c)(normal(5), keys())) == bits_of(normal(5))


def test_codes_of_four_and_two_bits_share_a_byte():
    x = jnp.array([7.0, -7.0, 1.0, 0.0, -3.0])
    codes, scales = quantize(4, stochastic=False).encode(x, None)
    assert codes.tolist() == [7 + 7 | (-7 + 7) << 4, 1 + 7 | (0 + 7) << 4, -3 + 7]
    codes, _ = quantize(2, stochastic=False).encode(x, None)
    assert codes.tolist() == [2 | 0 << 2 | 1 << 4 | 1 << 6, 1]
    assert scales.tolist() == [7]


@pytest.mark.parametrize("bits", LEVELS)
def test_noise_is_not_threefry_of_every_entry(bits):
    # Which costs 50 times as much: none of the arrays in the program is one of keys.
    encode = jax.make_jaxpr(quantize(bits).encode)(normal(4096), keys())
    assert "threefry" not in str(encode)
    assert "random_bits" not in str(encode)


def test_a_range_of_half_precision_is_not_left_by_rounding():
    top = jnp.full(5, 65504.0, jnp.float16)
    for bits in LEVELS:
        assert bits_of(jitted(quantize(bits))(top, keys())) == bits_of(top)


def test_subnormal_numbers_count_as_zero_or_come_back():
    # Devices flush them or not; nothing divides by one.
    x = np.float32([1e-40, -1e-42, 0.0])
    for bits in LEVELS:
        decoded = np.asarray(jitted(quantize(bits))(x, keys()))
        assert np.all(np.abs(decoded) <= np.float32(1.0001e-40))


def test_quantizing_what_is_on_the_grid_already_changes_nothing():
    for bits, block in GRIDS:
        c = quantize(bits, block=block, stochastic=False)
        payload = encoder(c)(normal(41), None)
        again = encoder(c)(jitted(c)(normal(41), None), None)
        assert bits_of(again) == bits_of(payload)


@pytest.mark.parametrize(("bits", "block"), GRIDS)
def test_zeros_and_the_largest_entries_come_back_exactly_whatever_the_noise(
    bits, block
):
    # The largest entries sit on the outermost codes: rounding up there would wrap.
    c = quantize(bits, block=block)
    draws = jax.random.split(jax.random.key(0), 1000)

    def run(x, key):
        payload = c.encode(x, Keys(None, key))
        codes = payload[0].astype(int)
        if bits < 8:
            codes = unpack(payload[0], bits, 16).astype(int) - LEVELS[bits]
        return codes, c.decode(payload, x, Keys(None, None))

    batch = jax.jit(jax.vmap(run, in_axes=(None, 0)))
    for seed in range(5):
        x = np.array(normal(16, seed))
        x[3], x[5] = 0, 1.1 * np.abs(x).max()
        x[9] = -x[5]
        codes, decoded = map(np.asarray, batch(x, draws))
        assert codes.min() == -LEVELS[bits]
        assert codes.max() == LEVELS[bits]
        assert np.all(decoded[:, [3, 5, 9]] == x[[3, 5, 9]])


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
    # Also where blocks share bytes.
    for bits, stochastic in itertools.product(LEVELS, (True, False)):
        c = quantize(bits, block=3, stochastic=stochastic)
        good = np.asarray(jitted(c)(normal(9), keys()))
        others = [0, 1, 2, 6, 7, 8]
        for bad in (jnp.nan, jnp.inf):
            decoded = np.asarray(jitted(c)(normal(9).at[5].set(bad), keys()))
            assert not np.isfinite(decoded[3:6]).any()
            np.testing.assert_array_equal(decoded[others], good[others])


@pytest.mark.parametrize("bits", [1, 3, 7, 32, True, "8", 8.0, None])
def test_other_widths_are_refused_naming_those_there_are(bits):
    with pytest.raises(ValueError, match="there are 16, 8, 4 and 2") as error:
        quantize(bits)
    assert repr(bits) in str(error.value)


@pytest.mark.parametrize("block", [0, -1, True, 2.5, "64"])
def test_blocks_below_one_element_are_refused_with_their_value(block):
    with pytest.raises(ValueError, match="how many elements share") as error:
        quantize(block=block)
    assert repr(block) in str(error.value)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("n", [33, 4096, 8192])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_is_seen_in_leaves_of_any_size(n, bad, stochastic):
    # XLA's CPU backend loses a NaN in the maximum of 4096 entries or more.
    x = jnp.ones(n).at[3].set(bad)
    decoded = jitted(quantize(8, stochastic=stochastic))(x, keys())
    assert not np.isfinite(decoded).any()
