"""Cosine coefficients of chunks: an orthonormal transform, and the largest of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft

from lowcomm import dct_top_k, payload_bytes
from lowcomm.spectral import _cosines, _from_cosines, _matrix, _sides
from tests.compressor_cases import bits_of, encoder, jitted, normal, squares


@pytest.mark.parametrize("n", [1, 2, 5, 64])
def test_the_transform_is_orthonormal_and_the_textbook_one(n):
    d = _matrix(n)
    np.testing.assert_allclose(d @ d.T, np.eye(n), atol=1e-14 * n)
    x = np.random.default_rng(0).standard_normal(n)
    np.testing.assert_allclose(d @ x, scipy.fft.dct(x, norm="ortho"), atol=1e-13 * n)


@pytest.mark.parametrize(
    ("shape", "sides"),
    [
        ((), (1, 1)),
        ((7,), (1, 7)),
        ((128,), (1, 64)),
        ((96, 66), (48, 33)),
        ((67, 10), (1, 10)),  # a prime above 64 has chunks of one
        ((3, 3, 16, 128), (16, 64)),
    ],
)
def test_the_sides_of_a_chunk_are_the_largest_divisors_up_to_64(shape, sides):
    assert _sides(shape, 64) == sides


def test_chunks_are_transformed_one_by_one():
    x = normal((2, 6, 10), seed=1)
    coefficients = np.asarray(_cosines(x, 5)).reshape(2, 2, 2, 3, 5)
    for z in range(2):
        for a in range(2):
            for b in range(2):
                part = np.asarray(x[z, 3 * a : 3 * a + 3, 5 * b : 5 * b + 5])
                expected = scipy.fft.dctn(part, norm="ortho")
                np.testing.assert_allclose(coefficients[z, a, b], expected, atol=2e-6)


def test_what_comes_back_is_the_best_k_coefficients_of_each_chunk():
    # Parseval: the error is the squares of the coefficients that stay behind.
    x, k = normal((12, 16), seed=2), 5
    coefficients = np.asarray(_cosines(x, 8), np.float64)
    behind = np.sort(coefficients**2, axis=1)[:, :-k].sum()
    decoded = jitted(dct_top_k(k, chunk=8))(x, None)
    # Sums of 8 products in float32, twice each way, on entries of a few units.
    assert squares(x - decoded) == pytest.approx(behind, rel=1e-4)
    kept = np.asarray(_cosines(decoded, 8))
    assert np.all(np.sum(np.abs(kept) > 1e-4, axis=1) == k)


def test_it_contracts_by_exactly_k_of_a_chunk_when_coefficients_are_equal():
    flat = jnp.where(normal((4, 64)) > 0, 1.0, -1.0)
    x = _from_cosines(flat.ravel(), (16, 16), 8)
    error = squares(x - jitted(dct_top_k(16, chunk=8))(x, None))
    assert error == pytest.approx((1 - 16 / 64) * squares(x), rel=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (130,), (5, 7), (64, 48), (2, 8, 9)])
def test_the_declared_contraction_holds_for_every_shape(shape):
    c, x = dct_top_k(4, chunk=8), normal(shape, seed=3)
    assert c.law is not None
    delta = c.law.delta(x.size)
    assert 0 < delta <= 1
    error = squares(x - jitted(c)(x, None))
    assert error <= (1 - delta) * squares(x) + 1e-11 * squares(x)


def test_as_many_coefficients_as_entries_are_the_identity_to_rounding():
    x = normal((16, 8), seed=4)
    c = dct_top_k(64, chunk=8)
    np.testing.assert_allclose(jitted(c)(x, None), x, atol=4e-6)
    assert payload_bytes(c, x) == x.nbytes  # no places


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((64, 64), jnp.float32, 32 * 4 + 48),  # of 16384, in 12 bits
        ((128, 192), jnp.float32, 6 * (32 * 4 + 48)),
        ((64, 64), jnp.bfloat16, 32 * 2 + 48),
        ((640,), jnp.float32, 10 * (32 * 4 + 32)),  # chunks of 64, in 8 bits
        ((4, 4), jnp.float32, 16 * 4),  # all of them
        ((0, 4), jnp.float32, 0),
    ],
)
def test_payload_bytes_are_the_formula(shape, dtype, expected):
    x = jax.ShapeDtypeStruct(shape, dtype)
    assert payload_bytes(dct_top_k(), x) == expected


def test_equal_coefficients_go_to_the_lowest_frequency():
    # One sample of ±1 in a chunk of one row has no ties; a delta in 2 × 2 has four.
    x = jnp.array([[2.0, 0.0], [0.0, 0.0]])
    _, places = encoder(dct_top_k(2, chunk=2))(x, None)
    assert places[0].tolist() == [0b0100]  # places 0 and 1, two bits each


def test_a_nan_spoils_its_chunk_and_no_other():
    x = normal((4, 8)).at[1, 2].set(jnp.nan)
    decoded = np.asarray(jitted(dct_top_k(3, chunk=4))(x, None))
    assert np.all(np.isnan(decoded[:, :4]))
    assert np.all(np.isfinite(decoded[:, 4:]))


def test_float16_does_not_overflow_in_the_coefficients():
    # The mean's coefficient would be 64 × 30000.
    x = jnp.full((64, 64), 30000.0, jnp.float16)
    values, _ = encoder(dct_top_k(1))(x, None)
    assert values.tolist() == [65504]


def test_shapes_may_be_batched():
    c, xs = dct_top_k(3, chunk=4), normal((3, 8, 4))
    batched = jax.jit(jax.vmap(lambda x: c.encode(x, None)))(xs)
    single = [encoder(c)(x, None) for x in xs]
    assert bits_of(batched[1]) == bits_of(
        jax.tree.map(lambda *p: jnp.stack(p), *(s[1] for s in single))
    )


@pytest.mark.parametrize("wrong", [{"k": 0}, {"k": 1.5}, {"chunk": 0}, {"chunk": 257}])
def test_options_out_of_range_are_refused_with_their_value(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        dct_top_k(**wrong)


def test_complex_and_too_large_arrays_are_refused_at_trace():
    c = dct_top_k()
    with pytest.raises(ValueError, match="not complex64"):
        c.encode(jnp.ones(3, jnp.complex64), None)
    large = jax.ShapeDtypeStruct((2**16, 2**15), jnp.bfloat16)
    with pytest.raises(ValueError, match="2147483648 elements"):
        jax.eval_shape(lambda x: c.encode(x, None), large)
