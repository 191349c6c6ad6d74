"""Rounding at random: right on average, and exactly as noisy as the papers say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowcomm as lc
from lowcomm import natural, qsgd, ternary
from lowcomm.keys import Keys
from tests.compressor_cases import (
    bits_of,
    encoder,
    jitted,
    keys,
    normal,
    squares,
    there_and_back,
)

DRAWS = 4000


def decoded(compressor, x, draws=DRAWS):
    """What comes back for so many private keys, in float64."""
    private = jax.random.split(jax.random.key(4), draws)
    back = jax.vmap(lambda key: there_and_back(compressor, x, Keys(None, key)))
    return np.asarray(jax.jit(back)(private), np.float64)


def ternary_variance(x):
    """s² p (1 − p) with p = |x|/s."""
    size = np.abs(np.asarray(x, np.float64))
    return size.max() * size - size**2


def qsgd_variance(levels):
    def of(x):
        x = np.asarray(x, np.float64)
        step = np.sqrt(squares(x)) / levels
        p = np.abs(x) / step % 1
        return p * (1 - p) * step**2

    return of


def natural_variance(x):
    # p (1 − p) / (1 + p)² of x², for |x| = 2^a (1 + p).
    x = np.abs(np.asarray(x, np.float64))
    below = 2.0 ** np.floor(np.log2(np.where(x > 0, x, 1)))
    return np.where(x > 0, (x - below) * (2 * below - x), 0)


EXACT = {
    "ternary": (ternary(), ternary_variance),
    "one level": (qsgd(1), qsgd_variance(1)),
    "seven levels": (qsgd(7, block=None), qsgd_variance(7)),
    "natural": (natural(), natural_variance),
}


@pytest.mark.parametrize("name", EXACT)
def test_every_entry_is_right_on_average_and_as_noisy_as_declared(name):
    # Two values per entry: of N draws the mean has variance v/N, and the squared error
    # at most (widest · v)/N with `widest` the square of the larger error seen: of 41
    # entries one exceeds 4.5 standard errors once in 3000 times. Float32 moves u by
    # 2⁻²³ u, and probabilities are multiples of 2⁻²⁴.
    c, variance = EXACT[name]
    x = normal(41, seed=3)
    errors = decoded(c, x) - np.asarray(x, np.float64)
    v, blur = variance(x), 2**-20 * float(np.abs(x).max())
    assert np.all(np.abs(errors.mean(0)) <= 4.5 * np.sqrt(v / DRAWS) + blur)
    widest = np.square(errors).max(0)
    off = np.abs(np.square(errors).mean(0) - v)
    assert np.all(off <= 4.5 * np.sqrt(widest * v / DRAWS) + blur)


def test_omega_of_qsgd_is_that_of_the_table():
    # d = 1024, a Gaussian: 24.4, 5.4, 0.68 and 0.17 at 1, 4, 16 and 32 levels for one
    # vector; over vectors ‖x‖₁/‖x‖₂ − 1 is 24.53 with a deviation of 0.42 at one level.
    x = normal(1024, seed=5)
    for levels, expected in {1: 24.4, 4: 5.4, 16: 0.68, 32: 0.17}.items():
        omega = qsgd_variance(levels)(x).sum() / squares(x)
        assert omega == pytest.approx(expected, rel=0.05)
        lost = np.square(decoded(qsgd(levels, block=None), x, 64) - x).sum(1)
        noise = 4.5 * lost.std() / 8 + 1e-3 * lost.mean()  # √64 draws, and float32
        assert abs(lost.mean() - omega * squares(x)) <= noise
        declared = qsgd(levels, block=None).law.omega(1024)
        assert omega <= declared <= min(1024 / levels**2, 32 / levels)


def test_omega_of_one_level_is_the_ratio_of_norms():
    x = np.asarray(normal(33), np.float64)
    expected = np.abs(x).sum() / np.sqrt(squares(x)) - 1
    assert qsgd_variance(1)(x).sum() / squares(x) == pytest.approx(expected)


def test_the_declared_variance_is_attained():
    # QSGD: equal entries, u = s/√d each. Ternary: one entry 1 beside equal ones of
    # (√n − 1)/(n − 1). Natural: 4/3, whose p is 1/3.
    n, equal = 64, np.ones(64)
    for levels in (1, 2, 4):
        omega = qsgd_variance(levels)(equal).sum() / n
        assert qsgd(levels).law.omega(n) == pytest.approx(omega)
    spiky = np.full(n, 7 / 63)
    spiky[0] = 1
    omega = ternary_variance(spiky).sum() / squares(spiky)
    assert ternary().law.omega(n) == pytest.approx(omega)
    assert natural_variance(4 / 3) / (4 / 3) ** 2 == pytest.approx(1 / 8)
    assert natural().law.omega(n) == 1 / 8


def test_natural_costs_a_gaussian_eight_percent():
    x = normal(20_000, seed=1)
    # 0.082; over vectors the deviation is below 0.001.
    assert natural_variance(x).sum() / squares(x) == pytest.approx(0.082, abs=0.002)


def test_ternary_codes_are_summed_by_all_workers_in_units_of_the_largest():
    c, k = ternary(), 5
    xs = np.random.default_rng(0).integers(-9, 10, (k, 33)).astype(np.float32)
    agreed = max(map(c.statistic, xs))
    assert agreed == np.abs(xs).max()
    codes = [c.encode(x, keys(worker=w), agreed) for w, x in enumerate(xs)]
    for x, code in zip(xs, codes, strict=True):
        assert code.dtype == jnp.int8
        assert np.all(code * np.sign(x) == np.abs(code))  # −s, 0 and s, never across 0
        assert np.all(np.abs(code)[np.abs(x) == agreed] == 1)
    mean = sum(code.astype(jnp.float32) for code in codes) / k
    by_one = [c.decode(code, xs[0], None, agreed) for code in codes]
    np.testing.assert_allclose(
        c.decode(mean, xs[0], None, agreed), np.mean(by_one, axis=0), rtol=1e-6
    )
    assert lc.payload_bytes(c, xs[0], workers=127) == 33 + 4
    assert lc.payload_bytes(c, xs[0], workers=128) == 66 + 4


def test_the_errors_of_all_workers_are_bounded_together():
    # One large worker sets the scale of small ones: s Σ‖x_k‖₁ − Σ‖x_k‖² over all.
    xs = np.asarray(normal((4, 16)) * np.float32([1, 0.1, 0.1, 0.01])[:, None])
    s = np.abs(xs).max()
    errors = s * np.abs(xs).sum() - squares(xs)
    assert errors <= ternary().law.omega(4 * 16) * squares(xs)


def test_clipping_biases_what_it_clips_and_nothing_else():
    x = normal(41, seed=9).at[7].set(30.0)
    c, sigma = ternary(2.5), np.sqrt(squares(x) / 41)
    back = decoded(c, x)
    assert c.law is None
    assert np.abs(back).max() == pytest.approx(2.5 * sigma, rel=1e-5)
    expected = np.clip(np.asarray(x, np.float64), -2.5 * sigma, 2.5 * sigma)
    spread = np.sqrt(ternary_variance(expected).clip(0) / DRAWS)
    assert np.all(np.abs(back.mean(0) - expected) <= 4.5 * spread + 1e-5)


def test_clipping_takes_a_quarter_of_a_percent_of_a_gaussian():
    # E (|z| − c)²₊ = 2 ((1 + c²) Q(c) − c φ(c)) is 0.0024 at 2.5; over 10⁵ draws the
    # standard error is below 0.0001.
    x = normal(100_000)
    reach = float(ternary(2.5).statistic(x))
    bias = squares(np.maximum(np.abs(np.asarray(x)) - reach, 0)) / squares(x)
    assert bias == pytest.approx(0.0024, abs=0.0004)


@pytest.mark.parametrize("clip", [1, 2.5])
def test_what_is_no_larger_than_usual_is_not_clipped(clip):
    for x in (jnp.full(9, -3.0), jnp.array([2.0]), jnp.zeros(4), jnp.array(0.5)):
        back = jitted(ternary(clip))(x, keys())
        np.testing.assert_allclose(back, x, rtol=1e-6)


def test_buckets_of_qsgd_have_norms_of_their_own():
    x = jnp.concatenate([normal(8), 1e-6 * normal(8), normal(3)])
    codes, norms = encoder(qsgd(7, block=8))(x, keys())
    parts = np.split(np.asarray(x, np.float64), [8, 16])
    np.testing.assert_allclose(norms, [np.sqrt(squares(p)) for p in parts], rtol=1e-6)
    assert codes.shape == (10,)
    lost = decoded(qsgd(7, block=8), x, 500) - np.asarray(x)
    assert squares(lost[:, 8:16]) <= 500 * 8e-12  # as small as they are


def test_norms_neither_overflow_nor_vanish():
    for size in (1e-30, 1e25):
        x = jnp.asarray(size * np.array([3.0, 0.0, -4.0]), jnp.float32)
        norms = encoder(qsgd(5))(x, keys())[1]
        np.testing.assert_allclose(norms, 5 * size, rtol=1e-6)


def test_zero_and_powers_of_two_are_exact_in_natural_compression():
    powers = np.float32(2.0) ** np.arange(-126, 128)
    x = np.concatenate([powers, -powers, np.float32([0.0, -0.0])])
    assert bits_of(jitted(natural())(x, keys())) == bits_of(jnp.asarray(x))


def test_the_ends_of_float32_are_rounded_as_declared():
    tiny, huge = np.float32(2.0**-126), np.float32(2.0**127)
    # Subnormal: 0 or 2⁻¹²⁶, right on average. Read as bits, which no device flushes.
    x = jnp.full(DRAWS, 2.0**-128, jnp.float32)
    exponents, signs = encoder(natural())(x, keys())
    assert set(exponents.tolist()) == {0, 1}
    # A quarter of 4000 Bernoulli draws, to 4.5 standard errors.
    assert abs(float(jnp.mean(exponents == 1)) - 0.25) < 4.5 * np.sqrt(3 / 16 / DRAWS)
    assert not signs.any()
    top = jnp.array([1.9 * huge, -1.9 * huge, jnp.inf, -jnp.inf, jnp.nan, tiny])
    back = np.asarray(jitted(natural())(top, keys()))
    expected = [huge, -huge, np.inf, -np.inf]
    assert back[:4].tolist() == expected
    assert np.isinf(back[4])
    assert back[5] == tiny


def test_half_precision_stays_within_its_range():
    x = jnp.full(64, 60000.0, jnp.float16)
    back = np.asarray(jitted(natural())(x, keys()), np.float32)
    assert set(back.tolist()) <= {32768.0, 65504.0}
    assert np.isfinite(np.asarray(jitted(qsgd(1))(x, keys()), np.float32)).all()


def exchanged(tree, backend, step=0):
    """What four workers hear of a tree that is stacked over them."""
    tx = lc.compressed_mean(ternary())
    mesh = lc.worker_mesh(4) if backend == "mesh" else None
    talk = lambda x: tx.update(x, tx.init(x), step=step)[0]
    return jax.jit(lc.spread(talk, mesh=mesh))(tree)


@pytest.mark.parametrize("backend", ["vmap", "mesh"])
def test_workers_of_all_sizes_hear_the_same_ternary_mean(backend):
    x = jnp.asarray(np.random.default_rng(0).choice([-4.0, 0.0, 4.0], (4, 33)))
    # Where all that is not zero is the largest nothing is random, whatever its size.
    tree = {"a": x, "b": (x / 2**9).astype(jnp.bfloat16), "c": jnp.ones(4)}
    heard = exchanged(tree, backend)
    for name, leaf in tree.items():
        mean = jnp.mean(leaf.astype(jnp.float32), 0).astype(leaf.dtype)
        assert bits_of(heard[name]) == bits_of(jnp.broadcast_to(mean, leaf.shape))


@pytest.mark.parametrize("bad", [jnp.nan, -jnp.inf])
@pytest.mark.parametrize("backend", ["vmap", "mesh"])
def test_what_is_not_finite_on_one_worker_is_heard_by_all(backend, bad):
    tree = {"a": normal((4, 9)).at[2, 3].set(bad), "b": normal((4, 5))}
    heard = exchanged(tree, backend)
    assert not np.isfinite(heard["a"]).any()
    assert np.isfinite(heard["b"]).all()


@pytest.mark.parametrize("clip", [0, -1.0, 0.5, True, "2", float("nan"), float("inf")])
def test_clips_that_are_no_number_of_deviations_are_refused(clip):
    with pytest.raises(ValueError, match="standard deviations, 1 or more") as error:
        ternary(clip)
    assert repr(clip) in str(error.value)


@pytest.mark.parametrize("levels", [0, -1, 32768, 2.0, True, None])
def test_levels_that_do_not_fit_are_refused(levels):
    with pytest.raises(ValueError, match="integer from 1 to 32767"):
        qsgd(levels)
    with pytest.raises(ValueError, match="how many elements share"):
        qsgd(4, block=0)


@pytest.mark.parametrize("compressor", [ternary(), qsgd(4), natural()])
def test_complex_arrays_are_refused(compressor):
    with pytest.raises(ValueError, match="real and imaginary"):
        compressor.encode(jnp.zeros(3, jnp.complex64), keys(), 1.0)
