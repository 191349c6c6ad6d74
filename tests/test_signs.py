"""One bit an entry: what it stands for, and what it loses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lowcomm import one_bit, payload_bytes, sign
from tests.compressor_cases import CASES, bits_of, floats, jitted, normal, squares

SIGN, ONE_BIT = CASES["sign"], CASES["one_bit"]


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


def one_bit_by_hand(x):
    """Column by column in float64, as Seide et al. say it."""
    out = np.empty_like(x, np.float64)
    for column in np.ndindex(x.shape[-1:] if x.ndim > 1 else (1,)):
        part = (..., *column) if x.ndim > 1 else ...
        values = np.asarray(x, np.float64)[part]
        plus, decoded = values >= 0, np.empty_like(values)
        for kind in (plus, ~plus):
            decoded[kind] = values[kind].mean() if kind.any() else 0
        out[part] = decoded
    return out


SHAPES = [(), (1,), (9,), (1, 5), (40, 3), (3, 5, 2, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_one_bit_is_the_mean_of_each_kind_in_each_column(shape):
    x = normal(shape, seed=1) + 0.25
    decoded = np.asarray(jitted(ONE_BIT)(x, None), np.float64)
    # Half of Σ|x| ± Σx: two float32 sums of n entries, of error n · 2⁻²⁴ Σ|x| at most.
    allowed = x.size * 2**-23 * np.abs(x).sum()
    np.testing.assert_allclose(decoded, one_bit_by_hand(x), rtol=1e-6, atol=allowed)
    assert payload_bytes(ONE_BIT, x) == -(-x.size // 8) + 8 * (
        shape[-1] if len(shape) > 1 else 1
    )


def test_one_bit_keeps_the_mean_of_every_column():
    x = normal((64, 10), seed=2) ** 3
    decoded = np.asarray(jitted(ONE_BIT)(x, None), np.float64)
    sizes = np.abs(np.asarray(x, np.float64)).mean(0)
    assert np.all(np.abs(decoded.mean(0) - x.mean(0)) <= 64 * 2**-22 * sizes)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(x=st.lists(floats, min_size=12, max_size=12))
def test_one_bit_loses_exactly_what_it_says_and_no_more_than_sign(x):
    x = np.asarray(x, np.float32).reshape(4, 3)
    error = squares(np.asarray(jitted(ONE_BIT)(x, None), np.float64) - x)
    kept = squares(one_bit_by_hand(x))  # Σ n± (m±)², and ‖x‖² = kept + lost
    slack = 12 * 2**-20 * squares(x) + 1e-30
    assert error == pytest.approx(squares(x) - kept, abs=slack)
    assert error <= squares(np.asarray(jitted(SIGN)(x, None), np.float64) - x) + slack
    assert error <= (1 - ONE_BIT.law.delta(12)) * squares(x) + slack


def test_one_bit_loses_less_of_a_gaussian_than_sign():
    # 1 − 2/π = 0.363 of a Gaussian is the variance about the mean magnitude; 20 means
    # fitted to 640 entries instead of one save 19/640 of it.
    errors = []
    for seed in range(20):
        x = normal((64, 10), seed=seed)
        lost = [squares(jitted(c)(x, None) - x) / squares(x) for c in (ONE_BIT, SIGN)]
        assert lost[0] < lost[1]
        errors.append(lost)
    # Over 20 arrays the means have standard errors below 0.003, of their difference,
    # where χ² of 19 varies by a third, below 0.001.
    one, scaled = np.mean(errors, axis=0)
    assert scaled == pytest.approx(1 - 2 / np.pi, abs=0.012)
    assert scaled - one == pytest.approx((1 - 2 / np.pi) * 19 / 640, abs=0.004)


def test_one_bit_is_exact_on_two_values_and_worst_on_one_spike():
    x = jnp.where(normal((8, 4)) >= 0, jnp.array([1.0, 2.0, 4.0, 8.0]), -0.5)
    np.testing.assert_allclose(jitted(ONE_BIT)(x, None), x, rtol=2**-21)
    spike = jnp.zeros(16).at[3].set(-2.0)  # alone in its kind
    assert bits_of(jitted(ONE_BIT)(spike, None)) == bits_of(spike)
    error = squares(
        jitted(ONE_BIT)(-spike, None) + spike
    )  # among zeros, which are plus
    assert error == (1 - 1 / 16) * squares(spike)


def test_a_bad_entry_spoils_its_column_only():
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        x = normal((6, 3)).at[2, 1].set(bad)
        decoded = np.asarray(jitted(ONE_BIT)(x, None))
        assert np.isfinite(decoded).all(0).tolist() == [True, False, True]
        assert not np.isfinite(decoded[2, 1])


@pytest.mark.parametrize("compressor", [sign(), one_bit()])
def test_complex_arrays_are_refused_where_they_have_no_sign(compressor):
    for shape in ((3,), (3, 2)):
        with pytest.raises(ValueError, match="real and imaginary"):
            compressor.encode(jnp.zeros(shape, jnp.complex64), None)


def test_columns_of_many_worker_arrays_are_their_own():
    xs = normal((4, 6, 3))
    together = jax.vmap(lambda x: jitted(ONE_BIT)(x, None))(xs)
    for x, decoded in zip(xs, together, strict=True):
        np.testing.assert_allclose(decoded, jitted(ONE_BIT)(x, None), rtol=1e-6)
