"""Compressors that leave entries out: which ones travel, and what is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lowcomm import Compressor, payload_bytes, quantize, random_k, top_k
from lowcomm.places import unpack_sorted
from tests.compressor_cases import (
    SELECTIONS,
    bits_of,
    encoder,
    floats,
    jitted,
    keys,
    normal,
    squares,
    there_and_back,
)

FULL_BUDGET = {
    "top_k": top_k(1),
    "random_k": random_k(1.0),
    "random_k unbiased": random_k(1, unbiased=True),
    "int8": quantize(8, block=1),
    "int16 nearest": quantize(16, block=1, stochastic=False),
}
TENTH = top_k(0.1)
every_selection = pytest.mark.parametrize("name", SELECTIONS)


@every_selection
def test_batched_selections_are_bitwise_the_single_ones(name):
    c, xs = SELECTIONS[name], normal((5, 4, 6), dtype=jnp.bfloat16)
    encode = jax.jit(jax.vmap(c.encode, in_axes=(0, None)))
    decode = jax.jit(jax.vmap(lambda p: c.decode(p, xs[0], keys())))
    payloads = encode(xs, keys())
    single = [encoder(c)(x, keys()) for x in xs]
    assert bits_of(payloads) == bits_of(jax.tree.map(lambda *p: jnp.stack(p), *single))
    alone = jax.jit(lambda p: c.decode(p, xs[0], keys()))
    decoded = jnp.stack([alone(p) for p in single])
    assert bits_of(decode(payloads)) == bits_of(decoded)


@pytest.mark.parametrize("name", FULL_BUDGET)
def test_the_full_budget_is_the_identity_bit_for_bit(name):
    for dtype in (jnp.float32, jnp.bfloat16):
        x = normal((3, 11), dtype=dtype)
        assert bits_of(jitted(FULL_BUDGET[name])(x, keys())) == bits_of(x)


@pytest.mark.parametrize(
    ("fraction", "n", "k"),
    [
        (0.1, 30, 3),  # 0.1 * 30 = 3.0000000000000004 would be 4 rounded up
        (0.29, 100, 29),  # 0.29 * 100 = 28.999999999999996 would be 28 rounded down
        (0.285, 100, 29),  # halves up in decimals; 0.285 * 100 = 28.499999999999996
        (1 / 3, 3, 1),
        (2 / 3, 3, 2),
        (0.5, 3, 2),
        (0.01, 1, 1),
        (1e-9, 1000, 1),
        (0.99, 7, 7),
        (1, 7, 7),
        (0.5, 0, 0),
        (np.float32(0.1), 30, 3),
    ],
)
def test_the_number_of_entries_is_the_nearest_to_the_fraction(fraction, n, k):
    x = jax.ShapeDtypeStruct((n,), jnp.float32)
    assert number_sent(top_k(fraction), x) == k
    assert payload_bytes(random_k(fraction), x) == 4 * k


def number_sent(compressor, x):
    payload = jax.eval_shape(lambda x: compressor.encode(x, None), x)
    return payload[0].size if x.size else 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_exactly_k_entries_travel_on_ties_lowest_index_first(dtype):
    x = jnp.asarray(np.where(np.arange(40) % 2, -2.0, 2.0), dtype)
    for encode in (TENTH.encode, jax.jit(TENTH.encode)):
        values, places = encode(x, None)
        assert unpack_sorted(places, 40, 4).tolist() == [0, 1, 2, 3]
        assert values.tolist() == [2, -2, 2, -2]
    decoded = np.asarray(jitted(TENTH)(x, None), np.float32)
    assert np.count_nonzero(decoded) == 4


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    x=st.sampled_from([1, 7, 16]).flatmap(
        lambda n: st.lists(
            floats | st.sampled_from([0.0, 1.0, -1.0]), min_size=n, max_size=n
        )
    ),
    compressor=st.sampled_from([top_k(0.05), top_k(0.3), top_k(0.8)]),
)
def test_top_k_is_a_stable_sort_by_magnitude_and_contracts(x, compressor):
    x = np.asarray(x, np.float32)
    k = number_sent(compressor, x)
    chosen = np.argsort(-np.abs(x), kind="stable")[:k]
    expected = np.zeros_like(x)
    expected[chosen] = x[chosen]
    decoded = np.asarray(jitted(compressor)(x, None))
    np.testing.assert_array_equal(decoded, expected)
    # The k largest squares hold at least k/n of the sum; float64 rounds n times.
    bound = (1 - k / len(x)) * squares(x)
    assert squares(x - decoded) <= bound * (1 + 2**-40)


def test_top_k_contracts_by_exactly_k_of_n_when_magnitudes_are_equal():
    x = jnp.ones(40).at[::3].set(-1.0)
    assert squares(x - jitted(TENTH)(x, None)) == (1 - 4 / 40) * squares(x)


def test_nan_travels_before_infinity_and_infinity_before_numbers():
    x = jnp.array([1.0, -jnp.inf, 3.0, jnp.nan, -jnp.nan, jnp.inf])
    for k, expected in ((1, [3]), (2, [3, 4]), (3, [1, 3, 4]), (5, [1, 2, 3, 4, 5])):
        _, places = encoder(top_k(k / 6))(x, None)
        assert unpack_sorted(places, 6, k).tolist() == expected


@pytest.mark.parametrize("n", [1, 7, 8, 9, 40, 67])
def test_blocks_send_the_largest_of_their_own_and_a_short_last_one_its_share(n):
    c, x = top_k(0.3, block=8), np.array(normal(n, seed=n))
    x[::3] = np.round(x[::3])  # and ties
    decoded = np.asarray(jitted(c)(x, None))
    sent = 0
    for start in range(0, n, 8):
        part = x[start : start + 8]
        k = max(1, int(0.3 * len(part) + 0.5))
        expected = np.zeros_like(part)
        kept = np.argsort(-np.abs(part), kind="stable")[:k]
        expected[kept] = part[kept]
        np.testing.assert_array_equal(decoded[start : start + 8], expected)
        sent += k
    # Three bits would do for a place in eight; four pack.
    places = 0 if n == 1 else -(-sent * 4 // 8)
    assert payload_bytes(c, jnp.asarray(x)) == 4 * sent + places
    assert squares(x - decoded) <= (1 - c.law.delta(n)) * squares(x) * (1 + 2**-40)


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.1])
def test_a_place_in_a_large_array_costs_two_bytes_at_most(fraction):
    x = jax.ShapeDtypeStruct((2**11, 2**11), jnp.float32)
    k = number_sent(top_k(fraction), x)
    assert payload_bytes(top_k(fraction), x) <= 1.05 * k * (4 + 2)
    # In blocks of 4096, twelve bits each.
    c = top_k(64 / 4096, block=4096)
    assert payload_bytes(c, x) == 2**10 * 64 * (4 + 1.5)


@pytest.mark.parametrize("block", [None, 10])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_adding_is_decoding_and_a_sum(block, dtype):
    c, x, total = top_k(0.3, block=block), normal((5, 9), dtype=dtype), normal((5, 9))
    payload = encoder(c)(x, None)
    added = jax.jit(c.add)(total, payload, None)
    expected = total + jax.jit(lambda p: c.decode(p, x, None))(payload)
    assert bits_of(added) == bits_of(expected)


def test_chosen_values_are_compressed_as_one_vector_in_the_order_of_their_places():
    x, inner = normal(64, seed=8), quantize(8, block=4, stochastic=False)
    c = top_k(0.25, block=16, values=inner)  # four of sixteen, a scale for each block
    plain = np.array(jitted(top_k(0.25, block=16))(x, None))
    chosen = plain[plain != 0]
    decoded = np.asarray(jitted(c)(x, None))
    expected = jitted(inner)(chosen, None)
    np.testing.assert_array_equal(decoded[plain != 0], expected)
    assert not np.any(decoded[plain == 0])
    # 16 codes, 4 scales, and 16 places of four bits.
    assert payload_bytes(c, x) == 16 + 4 * 4 + 8
    assert c.law.delta(64) == 0.25 * inner.law.delta(16)
    assert squares(x - decoded) <= (1 - c.law.delta(64)) * squares(x)


def test_noise_of_the_values_is_drawn_from_the_same_keys_and_counts_in_the_law():
    inner = quantize(8)
    c, x = top_k(0.25, values=inner), normal(64, seed=9)
    places = np.flatnonzero(np.asarray(jitted(top_k(0.25))(x, None)))
    expected = there_and_back(inner, x[places], keys(3, 1))
    np.testing.assert_array_equal(jitted(c)(x, keys(3, 1))[places], expected)
    assert c.law.delta(64) == 0.25 * (1 - inner.law.omega(16))
    # What rounds to double the energy of what is sent is no contraction of anything.
    wild = top_k(0.25, values=random_k(1 / 3, unbiased=True))
    assert wild.law.delta(48) == 1 - 2
    assert top_k(0.5, values=inner._replace(law=None)).law is None


def test_a_statistic_of_the_values_is_the_workers_own_and_travels():
    # Whole numbers of the largest magnitude, which the statistic says.
    largest = Compressor(
        lambda x, keys, agreed=None: jnp.round(2 * x / agreed).astype(jnp.int8),
        lambda q, like, keys, agreed=None: (q * agreed / 2).astype(like.dtype),
        statistic=lambda x: jnp.max(jnp.abs(x)),
    )
    c, x = top_k(0.5, values=largest), jnp.array([1.0, -8.0, 3.5, 0.0])
    assert c.statistic is None
    assert jitted(c)(x, None).tolist() == [0, -8, 4, 0]
    assert payload_bytes(c, x) == 2 + 4 + 1


@every_selection
def test_selections_of_complex_arrays_keep_whole_numbers(name):
    z = jnp.array([3 + 4j, 4.5 + 0j, 0 + 1j, -4 - 4j, 0, 1], jnp.complex64)
    decoded = np.asarray(jitted(SELECTIONS[name])(z, keys()))
    assert decoded.dtype == np.complex64
    if name == "top_k":  # moduli 5, 4.5, 1, 5.66: two travel
        assert decoded.tolist() == [3 + 4j, 0, 0, -4 - 4j, 0, 0]
    else:  # two blocks of three
        scale = 3 if "unbiased" in name else 1
        kept = decoded != 0
        np.testing.assert_array_equal(decoded[kept], scale * np.asarray(z)[kept])


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, float("nan"), "0.1", True, None])
@pytest.mark.parametrize("factory", [top_k, random_k])
def test_a_fraction_outside_zero_to_one_is_refused_with_its_value(factory, fraction):
    with pytest.raises(ValueError, match="above 0 and at most 1") as error:
        factory(fraction)
    assert repr(fraction) in str(error.value)


@pytest.mark.parametrize("block", [0, -1, 1.5, True, 2**16 + 1])
def test_a_block_that_places_do_not_reach_is_refused_with_its_value(block):
    with pytest.raises(ValueError, match=f"block={block}; .* 1 to 65536"):
        top_k(0.1, block=block)


def test_values_that_are_no_compressor_are_refused_with_the_remedy():
    with pytest.raises(
        ValueError, match=r"values must be a Compressor.*quantize\(...\)"
    ):
        top_k(0.1, values=quantize)


@every_selection
def test_more_elements_than_indices_are_refused_at_trace_with_their_number(name):
    c = SELECTIONS[name]
    fits = jax.ShapeDtypeStruct((2**31 - 1,), jnp.bfloat16)
    assert jax.eval_shape(c.encode, fits, keys()) is not None
    large = jax.ShapeDtypeStruct((2**16, 2**15), jnp.bfloat16)
    with pytest.raises(ValueError, match="2147483648 elements"):
        jax.eval_shape(c.encode, large, keys())
