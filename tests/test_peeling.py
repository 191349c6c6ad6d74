"""Hash tables, sketches and peeling: what is read back, and when it is not."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm.packing import pack
from lowcomm.peeling import estimates, hashes, peel, sketch, support

EPS = float(jnp.finfo(jnp.float32).eps)


def sparse(n, keys, seed=0, whole=True):
    """``keys`` non-zeros among ``n``: integers below 2⁷, or Gaussian."""
    rng = np.random.default_rng(seed)
    x = np.zeros(n, np.float32)
    values = rng.integers(1, 128, keys) if whole else rng.normal(size=keys)
    x[rng.choice(n, keys, replace=False)] = values
    return x


@functools.partial(jax.jit, static_argnums=1)
def read_back(x, columns, key):
    """The vector from its sketch and bitmap, and the keys that are left."""
    table = sketch(x, jnp.arange(x.size), key, 3, columns)
    places, number = support(pack(x != 0, 1), x.size)
    values, left, rounds = peel(table, places, number, key)
    listed = jnp.where(jnp.arange(x.size) < number, places, x.size)
    put = lambda values: (
        jnp.zeros(x.size, values.dtype).at[listed].set(values, mode="drop")
    )
    return put(values), put(left), rounds


def columns_for(keys, slack):
    return math.ceil(slack * keys / 3)


def test_a_sketch_is_linear_bit_for_bit_on_integers():
    x, y = sparse(500, 60), sparse(500, 60, seed=1)
    of = lambda x: np.asarray(sketch(x, jnp.arange(500), jax.random.key(3), 3, 40))
    assert (of(x) + of(y) == of(x + y)).all()
    assert (of(x) != 0).any(axis=1).all()


def test_a_sketch_is_the_sums_that_define_it():
    x, key = sparse(50, 30), jax.random.key(5)
    expected = np.zeros((4, 7))
    for r in range(4):
        for i in range(50):
            h, g = hashes(key, jnp.array([i]), r, 7)
            expected[r, int(h[0])] += float(g[0]) * x[i]
    table = sketch(x, jnp.arange(50), key, 4, 7)
    assert (np.asarray(table) == expected).all()
    told = np.array(estimates(table, jnp.arange(50), key))
    h, g = hashes(key, jnp.arange(50), 2, 7)
    assert (told[2] == np.asarray(g) * expected[2, np.asarray(h)]).all()


def test_hashes_are_balanced_and_rows_do_not_depend_on_each_other():
    n, columns = 30_000, 100
    key = jax.random.key(1)
    (h, g), (h2, g2) = (hashes(key, jnp.arange(n), r, columns) for r in (0, 1))
    cells = np.zeros((columns, columns, 2, 2))
    np.add.at(cells, (h, h2, (g > 0).astype(int), (g2 > 0).astype(int)), 1)
    # χ² of so many cells has a mean of as many and a deviation √2 of that root.
    for kept in [(0,), (1,), (0, 1), (0, 2), (1, 3), (0, 3), (2, 3)]:
        counts = cells.sum(tuple(set(range(4)) - set(kept))).ravel()
        mean = n / counts.size
        chi = np.sum((counts - mean) ** 2) / mean
        assert abs(chi - counts.size) < 5 * math.sqrt(2 * counts.size)


def test_the_support_is_where_bits_are_set():
    flags = np.random.default_rng(0).random(203) < 0.2
    places, number = support(pack(jnp.asarray(flags), 1), 30)
    assert int(number) == flags.sum() > 30
    assert (np.asarray(places) == np.flatnonzero(flags)[:30]).all()
    for few in (np.zeros(203, bool), np.arange(203) == 202, np.ones(203, bool)):
        places, number = support(pack(jnp.asarray(few), 1), 203)
        assert int(number) == few.sum()
        assert (np.asarray(places)[: few.sum()] == np.flatnonzero(few)).all()


def by_hand(x, columns, key):
    """Peeling one key at a time, the last first: values and the keys that are left."""
    places = np.flatnonzero(x)
    rows = [hashes(key, jnp.asarray(places), r, columns) for r in range(3)]
    touched = {
        int(i): [(r, int(h[j]), float(g[j])) for r, (h, g) in enumerate(rows)]
        for j, i in enumerate(places)
    }
    table = np.asarray(sketch(x, jnp.arange(x.size), key, 3, columns), np.float64)
    out, left = np.zeros(x.size), set(touched)
    while True:
        alone = [
            (i, r, b, g)
            for i in sorted(left, reverse=True)
            for r, b, g in touched[i]
            if sum((r, b) in [t[:2] for t in touched[j]] for j in left) == 1
        ]
        if not alone:
            return out, left
        i, r, b, g = alone[0]
        out[i] = g * table[r, b]
        for r, b, g in touched[i]:
            table[r, b] -= g * out[i]
        left.remove(i)


@pytest.mark.parametrize("slack", [0.9, 1.1, 1.6])
def test_whichever_key_goes_first_the_same_are_left_with_the_same_values(slack):
    # The 2-core is unique.
    for seed in range(3):
        x, key = sparse(64, 14, seed), jax.random.key(seed)
        columns = columns_for(14, slack)
        values, left, _ = read_back(x, columns, key)
        expected, core = by_hand(x, columns, key)
        assert set(np.flatnonzero(left)) == core
        assert (np.asarray(values) == expected).all()


def test_integers_come_back_bit_for_bit_and_floats_to_rounding():
    # Of 1000 keys: each round adds its roundings to the next (measured 1e-6 at 1.5).
    for whole, tolerance in ((True, 0), (False, 100 * EPS)):
        x = sparse(10_000, 1000, whole=whole)
        values, left, rounds = read_back(x, columns_for(1000, 1.5), jax.random.key(0))
        assert not left.any()
        assert np.abs(values - x).max() <= tolerance * np.abs(x).max()
        assert rounds < 60


def test_it_peels_above_the_threshold_and_not_below():
    # 1.222 buckets a key at many keys. 20 draws each; at 1.1 two thirds are left.
    def shares(keys, slack):
        x = sparse(2 * keys, keys)
        draws = [
            read_back(x, columns_for(keys, slack), jax.random.key(s))[1].sum()
            for s in range(20)
        ]
        return np.array(draws) / keys

    assert (shares(1000, 1.4) == 0).mean() >= 0.9
    assert (shares(1000, 2.0) == 0).mean() >= 0.9
    left = shares(1000, 1.1)
    assert ((left > 0.5) & (left < 0.8)).all()


def test_what_the_median_says_of_keys_that_are_left_is_far_off():
    # The lossy way out: at 1.1 buckets a key the error is about that of the values.
    x = sparse(2000, 1000, whole=False)
    key, columns = jax.random.key(0), columns_for(1000, 1.1)
    values, left, _ = read_back(x, columns, key)
    assert left.sum() > 500
    told = np.median(
        estimates(sketch(x, jnp.arange(2000), key, 3, columns), jnp.arange(2000), key),
        axis=0,
    )
    guess = np.where(left, told, values)
    assert 0.5 < np.linalg.norm(guess - x) / np.linalg.norm(x) < 1.2


def test_a_full_bitmap_is_the_whole_vector():
    x = sparse(1000, 1000)
    values, left, _ = read_back(x, columns_for(1000, 1.4), jax.random.key(1))
    assert not left.any()
    assert (np.asarray(values) == x).all()


def test_a_key_that_cancels_is_read_as_zero_and_costs_a_bucket():
    x, key = sparse(300, 40), jax.random.key(2)
    flags = (x != 0) | (np.arange(300) == 7)  # a false positive
    table = sketch(x, jnp.arange(300), key, 3, 40)
    places, number = support(pack(jnp.asarray(flags), 1), 60)
    values, left, _ = peel(table, places, number, key)
    read = dict(
        zip(np.asarray(places)[: int(number)], np.asarray(values), strict=False)
    )
    assert not left.any()
    assert read == {i: x[i] for i in np.flatnonzero(flags)}


def test_no_keys_are_peeled_at_once():
    values, left, rounds = read_back(np.zeros(20, np.float32), 5, jax.random.key(0))
    assert not values.any()
    assert not left.any()
    assert rounds == 0
