"""How places are chosen and packed: exactly, and in few bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lowcomm import largest as module
from lowcomm.largest import largest
from lowcomm.packing import width_of
from lowcomm.places import pack_sorted, pack_within, unpack_sorted, unpack_within

select = jax.jit(largest, static_argnums=1)


def chosen(x, k):
    """The oracle: a stable sort by falling magnitude, NaN before infinity."""
    size = np.abs(np.asarray(x, np.float64))
    size[np.isnan(size)] = -1
    keys = np.where(size == -1, -np.inf, -size)
    # NaN and infinity are both −inf now; the first key tells them apart.
    order = np.lexsort((keys, size != -1), axis=1)
    return np.sort(order[:, :k], axis=1)


def case(rows, n, kind, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, n)).astype(np.float32)
    if kind == "ties":
        x = np.round(x)
    elif kind == "equal":
        x = np.where(x > 0, np.float32(1), np.float32(-1))
    elif kind == "zeros":
        x = np.where(rng.random((rows, n)) < 0.001, x, 0)
    elif kind == "not finite":
        x = np.where(rng.random((rows, n)) < 0.01, np.nan, x)
        x = np.where(rng.random((rows, n)) < 0.01, np.inf * np.sign(x), x)
    return x.astype(np.float32)


KINDS = ("normal", "ties", "equal", "zeros", "not finite")
# Ranked as they are by a heap; by counting; narrowed first and then by each of both.
SIZES = [
    (3, 50, 7),
    (2, 9000, 4000),
    (5, 20_000, 9),
    (1, 70_001, 700),
    (1, 300_001, 30),
]


@pytest.mark.parametrize(("rows", "n", "k"), SIZES)
def test_the_largest_are_a_stable_sorts_whatever_the_way(rows, n, k):
    for kind in KINDS:
        x = case(rows, n, kind)
        np.testing.assert_array_equal(select(x, k), chosen(x, k), err_msg=kind)


def test_every_way_of_ranking_is_tried_above():
    narrowed = [rows * n >= module._WORTH_NARROWING for rows, n, _ in SIZES]
    counted = [
        k > module._SMALL_HEAP and rows * n >= module._FEW for rows, n, k in SIZES
    ]
    assert {*zip(narrowed, counted, strict=True)} >= {
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    }


def test_batches_and_half_precision_choose_the_same():
    x = jnp.asarray(case(2, 9000, "ties"))
    both = jax.jit(jax.vmap(lambda row: largest(row[None], 4000)[0]))
    np.testing.assert_array_equal(both(x), select(x, 4000))
    half = x.astype(jnp.bfloat16)  # small integers: nothing is rounded
    np.testing.assert_array_equal(select(half, 4000), select(x, 4000))


@functools.cache
def round_trip(n, k):
    def run(places):
        packed = pack_sorted(places, n)
        return packed, unpack_sorted(packed, n, k)

    return jax.jit(run)


def draws(n, k, seed):
    """Places drawn at random, all at the front, and all at the end."""
    drawn = np.sort(np.random.default_rng(seed).choice(n, k, replace=False))
    return [x.astype(np.int32) for x in (drawn, np.arange(k), n - k + np.arange(k))]


ARRAYS = [
    *[(1, 1), (2, 1), (7, 7), (16, 3), (17, 3), (256, 40), (257, 256), (300, 1)],
    *[(4097, 50), (5000, 4000), (70_000, 5), (70_000, 60_000), (200_000, 300)],
]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    shape=st.sampled_from(ARRAYS),
    seed=st.integers(0, 99),
)
def test_sorted_places_come_back_exactly(shape, seed):
    n, k = shape
    for places in draws(n, k, seed):
        np.testing.assert_array_equal(round_trip(n, k)(places)[1], places)


# Low bits and, where one segment does not hold the array, counts of their own type.
@pytest.mark.parametrize(
    ("n", "k", "expected"),
    [
        (2, 1, 1),  # one bit
        (16, 3, 2),  # three of four bits
        (200, 5, 5),  # eight bits
        (257, 100, 50 + 17),  # four bits and 17 counts; eight would be 102
        (600, 30, 30 + 3),  # eight bits and three counts
        (4096, 41, 41 + 16),  # twelve bits would be 62, and no counts
        (4096, 5, 8),  # twelve bits
        (2**22, 41943, 62915 + 1024 * 2),  # twelve bits; a count may be 4096
        (2**22, 42, 84 + 64),  # sixteen bits and 64 counts below 256
        (2**22, 5, 20),  # 32 bits
        (1000, 1000, 0),  # all of them
        (1000, 250, 125 + 63),  # a quarter: four bits and 63 counts of up to 16
        (2**18, 70_000, 35_000 + 2**14),  # and of a large array
    ],
)
def test_the_fewest_bytes_for_sorted_places_are_these(n, k, expected):
    places = jax.ShapeDtypeStruct((k,), jnp.int32)
    packed = jax.eval_shape(functools.partial(pack_sorted, n=n), places)
    assert sum(x.size * x.dtype.itemsize for x in packed) == expected


def test_a_full_segment_of_256_does_not_overflow_its_count():
    n, k = 1024, 400
    places = np.sort(np.r_[np.arange(256), 256 + np.arange(0, 288, 2)])
    np.testing.assert_array_equal(round_trip(n, k)(places.astype(np.int32))[1], places)


@pytest.mark.parametrize("block", [1, 2, 16, 200, 4096, 65536])
def test_places_in_a_block_come_back_in_the_bits_it_takes(block):
    places = np.random.default_rng(0).integers(0, block, 33).astype(np.int32)
    packed = pack_within(jnp.asarray(places), block)
    np.testing.assert_array_equal(unpack_within(packed, block, 33), places)
    assert packed.nbytes == -(-33 * width_of(block) // 8)
