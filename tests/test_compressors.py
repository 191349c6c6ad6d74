"""The laws of compressors: what they declare, what they send, what they never do."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, PartitionSpec as P

from lowcomm import Compressor, payload_bytes, quantize, random_k, sign, top_k
from lowcomm.keys import Keys
from lowcomm.leaves import precise

CASES = {
    "top_k": top_k(0.3),
    "random_k": random_k(0.3),
    "random_k unbiased": random_k(0.3, unbiased=True),
    "sign": sign(),
    "int8": quantize(),
    "int8 nearest": quantize(stochastic=False),
    "int8 blocks": quantize(block=4),
    "int16 blocks nearest": quantize(16, block=5, stochastic=False),
}
SELECTIONS = {
    "top_k": top_k(0.3),
    "random_k": random_k(0.3),
    "random_k unbiased": random_k(0.3, unbiased=True),
}
FULL_BUDGET = {
    "top_k": top_k(1),
    "random_k": random_k(1.0),
    "random_k unbiased": random_k(1, unbiased=True),
    "int8": quantize(8, block=1),
    "int16 nearest": quantize(16, block=1, stochastic=False),
}
SIGN = CASES["sign"]
TENTH = top_k(0.1)
SHAPES = [(), (0,), (3, 0), (1,), (7,), (3, 5), (64, 33)]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
LEAVES = list(itertools.product(DTYPES, SHAPES))

every_case = pytest.mark.parametrize("name", CASES)
every_selection = pytest.mark.parametrize("name", SELECTIONS)


def keys(step=0, worker=0):
    private = jax.random.fold_in(jax.random.key(2), step)
    return Keys(
        jax.random.fold_in(jax.random.key(1), step),
        jax.random.fold_in(private, worker),
    )


def normal(shape, seed=0, dtype=jnp.float32):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, dtype)


def there_and_back(compressor, x, keys):
    return compressor.decode(compressor.encode(x, keys), x, keys)


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
        payloads = [c.encode(x, keys) for x in leaves]
        decoded = [
            c.decode(payload, jax.ShapeDtypeStruct(x.shape, x.dtype), keys)
            for payload, x in zip(payloads, leaves, strict=True)
        ]
        return payloads, decoded

    return jax.jit(run)


def bits_of(tree):
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def squares(x):
    return float(np.sum(np.abs(np.asarray(x, np.complex128)) ** 2))


# All of them


@every_case
def test_what_is_decoded_has_the_shape_and_type_of_the_original(name):
    leaves = [normal(shape, dtype=dtype) for dtype, shape in LEAVES]
    _, decoded = leaves_there_and_back(name)(leaves, keys())
    for x, y in zip(leaves, decoded, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.all(np.isfinite(np.asarray(y, np.float32)))


@every_case
def test_zero_of_either_sign_is_sent_as_zero(name):
    for zero in (0.0, -0.0):
        leaves = [jnp.full(shape, zero, dtype) for dtype, shape in LEAVES]
        _, decoded = leaves_there_and_back(name)(leaves, keys())
        for y in decoded:
            assert np.all(np.asarray(y, np.float32) == 0)


@every_case
def test_what_is_encoded_has_the_bytes_that_were_announced(name):
    leaves = [normal(shape, dtype=dtype) for dtype, shape in LEAVES]
    if CASES[name].linear:  # summed on the way, in float32
        leaves = [precise(x) for x in leaves]
    payloads, _ = leaves_there_and_back(name)(leaves, keys())
    for x, payload in zip(leaves, payloads, strict=True):
        sent = sum(y.nbytes for y in jax.tree.leaves(payload))
        assert payload_bytes(CASES[name], x) == sent


@every_case
def test_arrays_without_elements_send_nothing(name):
    payload = CASES[name].encode(jnp.zeros((3, 0)), keys())
    assert jax.tree.leaves(payload) == []


@every_case
def test_payload_shapes_do_not_depend_on_values(name):
    x = np.array(normal(33))
    kinds = [x, 0 * x, x / x, np.where(x > 1, np.nan, x), np.float32(1e30) * x]
    shapes = {
        tuple((y.shape, y.dtype) for y in jax.tree.leaves(payload))
        for payload in (CASES[name].encode(jnp.asarray(kind), keys()) for kind in kinds)
    }
    assert len(shapes) == 1


@every_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_another_worker_decodes_from_payload_and_shared_key_alone(name, dtype):
    c, x, mine = CASES[name], normal(33, dtype=dtype), keys(step=4, worker=1)
    payload = c.encode(x, mine)
    expected = c.decode(payload, x, mine)
    received = jax.tree.map(lambda y: jnp.asarray(np.asarray(y)), payload)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    decoded = c.decode(received, like, Keys(mine.shared, None))
    assert bits_of(decoded) == bits_of(expected)
    assert np.any(np.asarray(decoded, np.float32))


@every_case
def test_scaling_by_a_power_of_two_commutes_exactly(name):
    c, x = CASES[name], normal(33)
    for s in np.float32([2**-100, 2**-31, 2**60]):
        assert bits_of(jitted(c)(s * x, keys())) == bits_of(s * jitted(c)(x, keys()))


@every_case
def test_nothing_that_is_not_finite_is_hidden(name):
    c, x = CASES[name], normal(33)
    if "random_k" in name:  # sends what is drawn: put it where the draw falls
        hit = int(np.flatnonzero(np.asarray(jitted(c)(x, keys())))[0])
    else:
        hit = 6
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        assert not np.isfinite(np.asarray(jitted(c)(x.at[hit].set(bad), keys())[hit]))


@every_case
def test_only_declared_compressors_are_linear(name):
    # Integers and a power of two of workers: means are exact, so equality is bitwise.
    c = CASES[name]
    xs = jnp.asarray(np.random.default_rng(0).integers(-99, 99, (4, 33)), jnp.float32)
    payloads = [c.encode(x, keys(worker=w)) for w, x in enumerate(xs)]
    mean = lambda *values: sum(v.astype(jnp.float32) for v in values) / len(values)
    decode = lambda payload: c.decode(payload, xs[0], keys())
    mean_of_decoded = mean(*(decode(payload) for payload in payloads))
    decoded_mean = decode(
        jax.tree.map(lambda *v: mean(*v).astype(v[0].dtype), *payloads)
    )
    same = np.array_equal(np.asarray(decoded_mean), np.asarray(mean_of_decoded))
    assert same == c.linear


@every_case
def test_a_mesh_computes_what_virtual_workers_do_step_by_step_in_a_scan(name):
    c, xs = CASES[name], normal((4, 3, 8))
    mesh = Mesh(np.array(jax.devices()[:4]), ("workers",))

    def worker(x):
        w = jax.lax.axis_index("workers")

        def step(x, t):
            mine = Keys(
                jax.random.fold_in(jax.random.key(1), t),
                jax.random.fold_in(jax.random.fold_in(jax.random.key(2), t), w),
            )
            # Decoding what every worker sent, as an exchange does.
            everyones = jax.lax.all_gather(c.encode(x, mine), "workers")
            return x, jax.vmap(lambda payload: c.decode(payload, x, mine))(everyones)

        return jax.lax.scan(step, x, jnp.arange(2))[1]

    virtual = jax.jit(jax.vmap(worker, axis_name="workers"))(xs)
    one_slice = lambda x: worker(x[0])[None]
    on_mesh = jax.shard_map(
        one_slice, mesh=mesh, in_specs=P("workers"), out_specs=P("workers")
    )
    decoded = np.asarray(jax.jit(on_mesh)(xs))
    # Sums and quotients may be vectorized differently: one ulp of the largest entry.
    tolerance = 0 if name in SELECTIONS else 2**-23 * float(np.max(np.abs(xs)))
    np.testing.assert_allclose(decoded, virtual, rtol=0, atol=tolerance)
    assert np.all(decoded == decoded[:1])  # what one worker decodes, all decode
    fresh = "random_k" in name or name in ("int8", "int8 blocks")
    assert fresh != np.array_equal(decoded[:, 0], decoded[:, 1])


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


# Bytes

FORMULAS = [  # 33 elements of float32 unless said otherwise
    (top_k(0.1), 3 * (4 + 4)),
    (top_k(1), 33 * (4 + 4)),
    (random_k(0.1), 3 * 4),
    (random_k(0.5, unbiased=True), 17 * 4),
    (sign(), 5 + 4),
    (quantize(), 33 + 4),
    (quantize(block=8), 33 + 5 * 4),
    (quantize(block=10**9), 33 + 4),
    (quantize(16, block=11, stochastic=False), 2 * 33 + 3 * 4),
]


@pytest.mark.parametrize(("compressor", "expected"), FORMULAS)
def test_payload_bytes_are_the_formula(compressor, expected):
    assert payload_bytes(compressor, jnp.zeros((3, 11))) == expected
    like = jax.ShapeDtypeStruct((33,), jnp.float32)
    assert payload_bytes(compressor, like) == expected


@pytest.mark.parametrize(
    ("compressor", "expected"),
    [
        (top_k(0.1), 3 * (2 + 4)),
        (random_k(0.1), 3 * 4),  # linear: summed on the way, in float32
        (sign(), 5 + 4),
        (quantize(block=8), 33 + 20),
    ],
)
def test_gathered_values_travel_in_the_type_of_the_array_and_sums_in_float32(
    compressor, expected
):
    for dtype in (jnp.bfloat16, jnp.float16):
        assert payload_bytes(compressor, jax.ShapeDtypeStruct((33,), dtype)) == expected


def test_bytes_add_up_over_the_leaves_that_travel():
    tree = {
        "w": jnp.zeros((4, 2)),
        "b": jax.ShapeDtypeStruct((3,), jnp.bfloat16),
        "none": None,
        "empty": jnp.zeros((0, 5)),
        "steps": jnp.zeros(9, jnp.int32),
        "mask": jnp.zeros(9, bool),
        "key": jax.random.key(0),
        "number": 3,
    }
    assert payload_bytes(sign(), tree) == (1 + 4) + (1 + 4)
    assert payload_bytes(top_k(1), tree) == 8 * (4 + 4) + 3 * (2 + 4)


def test_the_bytes_of_an_agreed_statistic_count():
    largest = lambda x: jnp.max(jnp.abs(x))
    encode = lambda x, keys, agreed=None: jnp.round(x / agreed).astype(jnp.int8)
    decode = lambda payload, like, keys, agreed=None: payload * agreed
    ternary = Compressor(encode, decode, statistic=largest)
    assert payload_bytes(ternary, jnp.zeros(10)) == 10 + 4


# Top-k


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


floats = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


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


# Random-k


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


# Sign


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


# Quantization

GRIDS = [(8, None), (8, 16), (16, None), (16, 16)]
LEVELS = {8: 127, 16: 32767}


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


# Refusals


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, float("nan"), "0.1", True, None])
@pytest.mark.parametrize("factory", [top_k, random_k])
def test_a_fraction_outside_zero_to_one_is_refused_with_its_value(factory, fraction):
    with pytest.raises(ValueError, match="above 0 and at most 1") as error:
        factory(fraction)
    assert repr(fraction) in str(error.value)


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


@every_case
def test_integers_booleans_and_keys_are_refused(name):
    for x in (jnp.arange(3), jnp.ones(3, bool), jax.random.split(jax.random.key(0), 3)):
        with pytest.raises(ValueError, match="floating-point arrays, not"):
            CASES[name].encode(x, keys())


@pytest.mark.parametrize("compressor", [sign(), quantize()])
def test_complex_arrays_are_refused_where_they_have_no_sign(compressor):
    with pytest.raises(ValueError, match="real and imaginary"):
        compressor.encode(jnp.zeros(3, jnp.complex64), keys())


@every_selection
def test_more_elements_than_indices_are_refused_at_trace_with_their_number(name):
    c = SELECTIONS[name]
    fits = jax.ShapeDtypeStruct((2**31 - 1,), jnp.bfloat16)
    assert jax.eval_shape(c.encode, fits, keys()) is not None
    large = jax.ShapeDtypeStruct((2**16, 2**15), jnp.bfloat16)
    with pytest.raises(ValueError, match="2147483648 elements"):
        jax.eval_shape(c.encode, large, keys())
