"""The laws of compressors: what they declare, what they send, what they never do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import lowcomm as lc
from lowcomm import Compressor, payload_bytes, quantize, random_k, sign, top_k
from lowcomm.codebooks import GAUSSIAN, POWERS
from lowcomm.keys import Keys
from lowcomm.leaves import precise
from tests.compressor_cases import (
    CASES,
    DTYPES,
    LEAVES,
    NOISY,
    SELECTIONS,
    bits_of,
    every_case,
    jitted,
    keys,
    leaves_there_and_back,
    normal,
    said,
)


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
    assert jax.tree.leaves(said(CASES[name], jnp.zeros((3, 0)), keys())) == []


@every_case
def test_payload_shapes_do_not_depend_on_values(name):
    x = np.array(normal(33))
    kinds = [x, 0 * x, x / x, np.where(x > 1, np.nan, x), np.float32(1e30) * x]
    shapes = {
        tuple((y.shape, y.dtype) for y in jax.tree.leaves(payload))
        for payload in (said(CASES[name], jnp.asarray(kind), keys()) for kind in kinds)
    }
    assert len(shapes) == 1


@every_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_another_worker_decodes_from_payload_and_shared_key_alone(name, dtype):
    c, x, mine = CASES[name], normal(33, dtype=dtype), keys(step=4, worker=1)
    payload, agreed = said(c, x, mine)
    expected = c.decode(payload, x, mine, agreed)
    received = jax.tree.map(lambda y: jnp.asarray(np.asarray(y)), payload)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    decoded = c.decode(received, like, Keys(mine.shared, None), agreed)
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
    agreed = None if c.statistic is None else max(map(c.statistic, xs))
    payloads = [c.encode(x, keys(worker=w), agreed) for w, x in enumerate(xs)]
    mean = lambda *values: sum(v.astype(jnp.float32) for v in values) / len(values)
    decode = lambda payload: c.decode(payload, xs[0], keys(), agreed)
    mean_of_decoded = mean(*(decode(payload) for payload in payloads))
    as_sent = lambda v, x: v if c.linear else v.astype(x.dtype)
    decoded_mean = decode(jax.tree.map(lambda *v: as_sent(mean(*v), v[0]), *payloads))
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
            everyones = jax.lax.all_gather(said(c, x, mine), "workers")
            decode = lambda payload, agreed: c.decode(payload, x, mine, agreed)
            return x, jax.vmap(decode)(*everyones)

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
    fresh = "random_k" in name or name in NOISY
    assert fresh != np.array_equal(decoded[:, 0], decoded[:, 1])


@every_case
def test_the_declared_law_holds_with_its_constant(name):
    # A one-sided bound of four standard errors over 1024 keys, on Gaussian, heavy-
    # tailed, equal and one-hot entries: see lowcomm.testing.compressors.losses.
    law = CASES[name].law
    if law is None:
        assert name in ("ternary clipped", "normal levels")
        return
    kind = "contracts" if isinstance(law, lc.Contraction) else "unbiased"
    report = lc.testing.check(CASES[name], only=(kind,), show=lambda line: None)
    assert [v.status for v in report.verdicts] == ["holds"], str(report)


FORMULAS = [  # 33 elements of float32 unless said otherwise
    (top_k(0.1), 3 * (4 + 1)),
    (top_k(1), 33 * 4),
    (random_k(0.1), 3 * 4),
    (random_k(0.5, unbiased=True), 17 * 4),
    (sign(), 5 + 4),
    (lc.ternary(), 33 + 4),
    (lc.ternary(2.5), 33 + 4),
    (lc.qsgd(1), 9 + 4),
    (lc.qsgd(3, block=8), 17 + 5 * 4),
    (lc.qsgd(127), 33 + 4),
    (lc.qsgd(128), 50 + 4),
    (lc.qsgd(2048), 66 + 4),
    (lc.natural(), 33 + 5),
    (lc.codebook(GAUSSIAN, relative_to="rms"), 9 + 4),
    (lc.codebook(POWERS, relative_to="largest", block=8), 17 + 5 * 4),
    (quantize(4, block=8), 17 + 5 * 4),
    (quantize(2), 9 + 4),
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
        (top_k(0.1), 3 * (2 + 1)),
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
    assert payload_bytes(top_k(1), tree) == 8 * 4 + 3 * 2


def test_the_bytes_of_an_agreed_statistic_count():
    largest = lambda x: jnp.max(jnp.abs(x))
    encode = lambda x, keys, agreed=None: jnp.round(x / agreed).astype(jnp.int8)
    decode = lambda payload, like, keys, agreed=None: payload * agreed
    ternary = Compressor(encode, decode, statistic=largest)
    assert payload_bytes(ternary, jnp.zeros(10)) == 10 + 4


def test_the_bytes_of_a_compressor_for_each_leaf_are_those_of_each():
    tree = {"a": {"b": jnp.zeros(33)}, "c": [jnp.zeros(9)], "d": jnp.zeros((0, 5))}
    kinds = {"a/b": top_k(0.1), "c/0": sign()}
    assert payload_bytes(lc.PerLeaf(lambda path, x: kinds[path]), tree) == 15 + 6
    with pytest.raises(ValueError, match="leaf 'a/b' must be a Compressor"):
        payload_bytes(lc.PerLeaf(lambda path, x: x), tree)


def test_a_compressor_in_the_place_of_a_transformation_says_how_to_wrap_it():
    chained = optax.chain(top_k(0.1), optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"no transformation: wrap it.*error_feedback"):
        chained.init(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"inner must be a Grad.*not Compressor\.$"):
        lc.local_sgd(top_k(0.1), period=2)


@every_case
def test_integers_booleans_and_keys_are_refused(name):
    for x in (jnp.arange(3), jnp.ones(3, bool), jax.random.split(jax.random.key(0), 3)):
        with pytest.raises(ValueError, match="floating-point arrays, not"):
            CASES[name].encode(x, keys())
