"""Units that neither overflow nor vanish, and rounding that favors no side."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm import codebook, grids, qsgd, quantize, ternary
from lowcomm.codebooks import GAUSSIAN
from lowcomm.keys import Keys
from tests.compressor_cases import jitted, keys, normal, there_and_back

units = jax.jit(lambda rows: grids.in_units(rows, grids.largest(rows)))
LARGE = np.float32([1, 0.5, -1, 0])


@pytest.mark.parametrize("largest", [3.4e38, 1e38, 1e30, 1.0, 1e-30, 2.5e-38])
def test_units_are_shares_of_the_largest_wherever_float32_reaches(largest):
    # The reciprocal of what is beyond 2¹²⁶ is subnormal, and zero on a CPU.
    rows = jnp.asarray([np.float32(largest) * LARGE])
    np.testing.assert_allclose(units(rows), [LARGE], rtol=2**-22)


@pytest.mark.parametrize("block", [None, 8])
def test_the_largest_is_one_unit_whatever_its_reciprocal(block):
    # x · (1/x) is below 1 for one x in seven, and 32767 of it is rounded down with
    # probability 2⁻⁹: of 40000 blocks in 11.
    x = normal((5000, 64 if block else 8), seed=1)
    back = jax.vmap(lambda x, key: there_and_back(c, x, Keys(None, key)))
    c, draws = quantize(16, block=block), jax.random.split(jax.random.key(0), 5000)
    size, heard = (np.abs(y).reshape(-1, 8) for y in (x, jax.jit(back)(x, draws)))
    np.testing.assert_array_equal(
        heard[size == size.max(1, keepdims=True)], size.max(1)
    )


@pytest.mark.parametrize(
    ("compressor", "lost"),
    [
        (quantize(16), 1e-4),
        (quantize(8, stochastic=False), 1e-2),
        (quantize(4, block=2, stochastic=False), 0.1),
        (quantize(2, block=1), 0),
        (qsgd(127), 2e-2),
        (codebook(GAUSSIAN, relative_to="rms"), 0.5),
        (codebook(np.linspace(-1, 1, 4), relative_to="largest"), 0.5),
        (ternary(2.5), 1),
    ],
)
@pytest.mark.parametrize("size", [1e38, 1.0, 1e-37])
def test_large_and_small_numbers_come_back_as_well_as_others(compressor, lost, size):
    x = np.float32(size) * LARGE
    back = np.asarray(jitted(compressor)(x, keys()), np.float64)
    assert np.abs(back).max() > 0.6 * size
    assert np.all(np.abs(back - x) <= (lost + 1e-6) * np.abs(x).max())


def rounded(monkeypatch, u, bits):
    """What ``u`` becomes with each of these 32 random bits."""
    monkeypatch.setattr(grids, "random_bits", lambda key, n: jnp.asarray(bits))
    return np.asarray(grids.at_random(jnp.full(len(bits), u, jnp.float32), None))


@pytest.mark.parametrize("whole", [0, 3])
@pytest.mark.parametrize("over", [6, 2**9, 2**31, 3 * 2**30, 2**32 - 2**8])
@pytest.mark.parametrize("sign", [1, -1])
def test_of_all_random_bits_the_fraction_rounds_away(monkeypatch, over, whole, sign):
    # Around the place where the outcome changes, which is the fraction of 2³², but for
    # a rounding of the drawn to 24 bits. (Beside 3 a float32 has 22 bits of it, so the
    # smallest are 0 and the largest 1 there.)
    u = np.float32(sign * (whole + over / 2**32))
    part = int(Fraction(abs(float(u))) % 1 * 2**32)
    near = np.arange(part - 600, part + 600, dtype=np.int64)
    near = near[(near >= 0) & (near < 2**32)]
    went = rounded(monkeypatch, u, near.astype(np.uint32)) != np.trunc(u)
    blur = part * 2**-24 if part > 2**24 else 0
    clear = np.abs(near + 0.5 - part) > blur
    np.testing.assert_array_equal(went[clear], (near < part)[clear])
    assert clear.sum() > 300
    away = rounded(monkeypatch, u, near.astype(np.uint32))[went]
    assert set(away.tolist()) <= {int(np.trunc(u)) + sign}


def test_what_is_negative_is_rounded_as_what_is_positive():
    # Also where 1 less it is 1: below 2⁻²⁴ of a step.
    u = normal(4096, seed=2) * jnp.logspace(-9, 1, 4096)
    draw = lambda u: np.asarray(grids.at_random(u, jax.random.key(0)))
    np.testing.assert_array_equal(draw(-u), -draw(u))
