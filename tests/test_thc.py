"""THC and the rotation it rests on."""

import itertools
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm import payload_bytes, testing, thc
from lowcomm.keys import Keys
from lowcomm.randomized import levels
from lowcomm.rotations import block_of, blocks, hadamard, rotate, rotate_back

EPS = float(jnp.finfo(jnp.float32).eps)
T = NormalDist().inv_cdf(1 - 1 / 64)


def keys(step=0, worker=0):
    fold = jax.random.fold_in
    return Keys(
        fold(jax.random.key(0), step), fold(fold(jax.random.key(1), step), worker)
    )


def heavy(*shape, seed=0):
    values = np.random.default_rng(seed).standard_t(1.5, size=shape)
    return jnp.asarray(values, jnp.float32)


def test_the_transform_is_the_product_with_hadamards_matrix():
    H = np.array([[1.0]])
    for _ in range(4):
        H = np.kron([[1, 1], [1, -1]], H)
        x = np.random.default_rng(0).integers(-50, 50, (3, len(H))).astype(np.float32)
        assert (np.asarray(hadamard(jnp.asarray(x))) == x @ H).all()


@pytest.mark.parametrize("n", [1, 2, 5, 64, 4097])
def test_a_rotation_keeps_norms_and_is_undone(n):
    rows = blocks(heavy(n))
    assert rows.shape == (2, 4096) if n == 4097 else (1, block_of(n))
    turned = rotate(rows, jax.random.key(3))
    # A pass of additions rounds entries to half an ulp, twelve there and twelve back.
    bound = 24 * EPS * np.linalg.norm(rows)
    assert abs(np.linalg.norm(turned) - np.linalg.norm(rows)) <= bound
    back = rotate_back(turned, jax.random.key(3)).ravel()
    assert np.abs(back[:n] - rows.ravel()[:n]).max() <= bound


def test_rotated_entries_of_a_spike_are_all_of_one_size():
    turned = rotate(jnp.zeros((1, 4096)).at[0, 9].set(64.0), jax.random.key(0))
    assert (np.abs(turned) == 1).all()
    assert abs(float(turned.mean())) < 5 / 64  # as many of each sign, to 5 σ


@pytest.mark.parametrize(
    ("compressor", "claims"),
    [
        (thc(), ["contracts"]),
        (thc(3, granularity=16), ["contracts"]),
        (thc(overflow=0.0), ["unbiased"]),
    ],
)
def test_it_obeys_the_laws_of_compressors(compressor, claims):
    report = testing.check(
        compressor, claims=[*claims, "shows NaN"], show=lambda line: None
    )
    assert not report.failed


def lost(c, x, draws=64):
    """The mean of the relative squared error."""

    @jax.jit
    @jax.vmap
    def errors(t):
        agreed = c.statistic(x)
        y = c.decode(c.encode(x, keys(t), agreed), x, keys(t), agreed)
        return jnp.sum((y - x) ** 2) / jnp.sum(x**2)

    return float(np.mean(errors(jnp.arange(draws))))


@pytest.mark.parametrize("n", [1, 3, 64, 4096])
@pytest.mark.parametrize("options", [{}, {"granularity": 30}])
def test_the_declared_contraction_holds_for_gaussian_and_worst_arrays(n, options):
    c = thc(**options)
    allowed = 1 - c.law.delta(n)
    assert 0 <= allowed < 1
    assert lost(c, heavy(n)) <= allowed
    if block_of(n) < n or n == 3:
        return
    # The worst rotates to a single spike, for these signs.
    spike = jnp.zeros((1, n)).at[0, 0].set(1.0)
    x = rotate_back(spike, keys().shared).ravel()
    y = c.decode(c.encode(x, keys(), c.statistic(x)), x, keys(), c.statistic(x))
    error = float(jnp.sum((y - x) ** 2))
    assert 0.8 * allowed < error <= 1.05 * allowed or n == 1


def test_a_gaussian_loses_what_rounding_and_clipping_of_the_quantile_lose():
    # With step 2t/15, p(1 − p) is 1/6 on average where the density varies little.
    z = np.linspace(-8, 8, 400_001)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    clipped = np.sum(np.maximum(np.abs(z) - T, 0) ** 2 * density)
    inside = np.sum((np.abs(z) < T) * density)
    expected = (2 * T / 15) ** 2 / 6 * inside + clipped
    # 4096 entries 64 times: 0.2 % of it is the deviation of the mean, and more of it.
    x = jnp.asarray(np.random.default_rng(0).normal(size=4096), jnp.float32)
    assert abs(lost(thc(), x) / expected - 1) < 0.03


def test_without_overflow_the_mean_of_workers_is_right_on_average():
    xs, c = heavy(8, 64), thc(overflow=0.0)
    agreed = jnp.max(jnp.stack([c.statistic(x) for x in xs]), 0)

    @jax.jit
    @jax.vmap
    def mean(t):
        codes = [c.encode(x, keys(t, w), agreed) for w, x in enumerate(xs)]
        total = sum(q.astype(jnp.float32) for q in codes) / 8
        return c.decode(total, xs[0], keys(t), agreed)

    drawn = np.asarray(mean(jnp.arange(1000)), np.float64)
    bias = drawn.mean(0) - np.asarray(xs).mean(0)
    # Σ bias² has the mean Σ var / draws, and 64 terms: 3 times that is 8 deviations.
    assert np.sum(bias**2) < 3 * drawn.var(0).sum() / 1000


def test_rotated_levels_fit_heavy_tails_and_others_do_not():
    # 8 workers, 4096 entries, 4 bits: the error relative to the mean's squared norm.
    xs, c = heavy(8, 4096), thc()
    mean = np.asarray(xs).mean(0)
    agreed = jnp.max(jnp.stack([c.statistic(x) for x in xs]), 0)
    codes = [c.encode(x, keys(0, w), agreed) for w, x in enumerate(xs)]
    total = sum(q.astype(jnp.float32) for q in codes) / 8
    rotated = np.asarray(c.decode(total, xs[0], keys(), agreed))
    # The same grid of 15 steps on the range of the entries themselves.
    most = np.abs(xs).max()
    u = (np.asarray(xs) / most + 1) * 7.5
    rounded = np.floor(u + np.random.default_rng(0).random(u.shape))
    unrotated = ((rounded / 7.5 - 1) * most).mean(0)
    nmse = lambda y: np.sum((y - mean) ** 2) / np.sum(mean**2)
    assert nmse(rotated) < 0.25
    assert nmse(unrotated) > 4 * nmse(rotated)


def test_codes_sum_in_the_narrowest_type():
    x = jnp.zeros(5000)  # two blocks of 4096
    for workers, size in ((1, 1), (15, 1), (16, 2)):
        assert payload_bytes(thc(), x, workers=workers) == 8192 * size + 8
    # Around the middle a table up to 30 takes 15: one worker less would do from zero.
    assert thc(granularity=30).bound == 15
    assert thc().bound == 8
    codes = thc().encode(heavy(64), keys(), jnp.zeros(1))
    assert codes.dtype == jnp.int8


def test_tables_are_the_best_of_all():
    z = np.linspace(-T, T, 20_001)
    density = np.exp(-(z**2) / 2)

    def cost(table):
        x = T * (2 * np.asarray(table) / 9 - 1)
        right = np.clip(np.searchsorted(x, z, side="right"), 1, len(x) - 1)
        return np.sum((z - x[right - 1]) * (x[right] - z) * density)

    every = [(0, *inner, 9) for inner in itertools.combinations(range(1, 9), 2)]
    best = min(map(cost, every))
    assert cost(levels(2, 9, T)) <= best * (1 + 1e-6)
    assert levels(3, 7, T).tolist() == list(range(8))
    table = levels(4, 30, T)
    assert len(set(table.tolist())) == 16
    assert (table[0], table[-1]) == (0, 30)
    assert np.diff(table)[5:10].mean() < np.diff(table)[[0, 1, -2, -1]].mean()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bits": 0}, "bits=0"),
        ({"bits": 4, "granularity": 14}, "granularity=14"),
        ({"overflow": 1.0}, r"overflow 1\.0"),
    ],
)
def test_what_makes_no_sense_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        thc(**options)


def test_where_no_bound_below_one_is_known_no_law_is_declared():
    assert thc(2).law is None
