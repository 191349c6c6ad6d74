"""Compressors that leave entries out: which ones travel, and what is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lowcomm import payload_bytes, quantize, random_k, top_k
from lowcomm.keys import Keys
from tests.compressor_cases import (
    CASES,
    GRIDS,
    LEVELS,
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
    assert payload_bytes(top_k(fraction), x) == 8 * k
    assert payload_bytes(random_k(fraction), x) == 4 * k


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_exactly_k_entries_travel_on_ties_lowest_index_first(dtype):
    x = jnp.asarray(np.where(np.arange(40) % 2, -2.0, 2.0), dtype)
    for encode in (TENTH.encode, jax.jit(TENTH.encode)):
        values, indices = map(np.asarray, encode(x, None))
        assert indices.tolist() == [0, 1, 2, 3]
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
    k = payload_bytes(compressor, x) // 8
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
    _, indices = top_k(1).encode(x, None)
    assert indices.tolist() == [3, 4, 1, 5, 2, 0]


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


@pytest.mark.parametrize(("bits", "block"), GRIDS)
def test_zeros_and_the_largest_entries_come_back_exactly_whatever_the_noise(
    bits, block
):
    # The largest entries sit on the outermost codes: rounding up there would wrap.
    c = quantize(bits, block=block)
    draws = jax.random.split(jax.random.key(0), 1000)

    def run(x, key):
        payload = c.encode(x, Keys(None, key))
        return payload[0], c.decode(payload, x, Keys(None, None))

    batch = jax.jit(jax.vmap(run, in_axes=(None, 0)))
    for seed in range(5):
        x = np.array(normal(16, seed))
        x[3], x[5] = 0, 1.1 * np.abs(x).max()
        x[9] = -x[5]
        codes, decoded = map(np.asarray, batch(x, draws))
        assert codes.min() == -LEVELS[bits]
        assert codes.max() == LEVELS[bits]
        assert np.all(decoded[:, [3, 5, 9]] == x[[3, 5, 9]])


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, float("nan"), "0.1", True, None])
@pytest.mark.parametrize("factory", [top_k, random_k])
def test_a_fraction_outside_zero_to_one_is_refused_with_its_value(factory, fraction):
    with pytest.raises(ValueError, match="above 0 and at most 1") as error:
        factory(fraction)
    assert repr(fraction) in str(error.value)


@every_selection
def test_more_elements_than_indices_are_refused_at_trace_with_their_number(name):
    c = SELECTIONS[name]
    fits = jax.ShapeDtypeStruct((2**31 - 1,), jnp.bfloat16)
    assert jax.eval_shape(c.encode, fits, keys()) is not None
    large = jax.ShapeDtypeStruct((2**16, 2**15), jnp.bfloat16)
    with pytest.raises(ValueError, match="2147483648 elements"):
        jax.eval_shape(c.encode, large, keys())
