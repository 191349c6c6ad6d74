"""The laws of compressors: what they declare, what they send, what they never do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from lowcomm import Compressor, payload_bytes, quantize, random_k, sign, top_k
from lowcomm.keys import Keys
from lowcomm.leaves import precise
from tests.compressor_cases import (
    CASES,
    DTYPES,
    LEAVES,
    SELECTIONS,
    bits_of,
    every_case,
    jitted,
    keys,
    leaves_there_and_back,
    normal,
)


@every_case
def test_what_is_decoded_has_the_shape_and_type_of_the_original(name):
    leaves = [normal(shape, dtype=dtype) for dtype, shape in LEAVES]
    _, decoded = leaves_there_and_back(name)(leaves, keys())
    for x, y in zip(leaves, decoded, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.all(np.isfinite(np.asarray(y, np.float32)))


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


@every_case
def test_integers_booleans_and_keys_are_refused(name):
    for x in (jnp.arange(3), jnp.ones(3, bool), jax.random.split(jax.random.key(0), 3)):
        with pytest.raises(ValueError, match="floating-point arrays, not"):
            CASES[name].encode(x, keys())
