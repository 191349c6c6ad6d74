"""Entropy, what low ranks miss, and the rank that follows: against Monte Carlo."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm.entropy import (
    aligned_ranks,
    gaussian_entropy,
    low_rank_errors,
    next_rank,
    rank_for,
    sample,
)

FALLS = [-0.1, 0.0, 0.05, 0.1, 0.2, 0.3]
G = low_rank_errors(64, 256)


def drawn(m, n, times):
    """``g`` by Monte Carlo."""
    x = np.random.default_rng(0).normal(size=(times, m, n))
    squares = np.linalg.svd(x, compute_uv=False) ** 2
    return np.sqrt([squares[:, r:].sum(1).mean() for r in range(min(m, n) + 1)])


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (48, 48)])
def test_what_a_rank_misses_is_what_monte_carlo_says(shape):
    g, k = low_rank_errors(*shape), min(shape)
    # The law is that of infinite matrices: a finite one misses as much at a rank that
    # is less than a third of one away.
    slack = np.abs(np.diff(g)).max() / 3
    np.testing.assert_allclose(g, drawn(*shape, times=20), rtol=0, atol=slack)
    assert g[0] == np.sqrt(shape[0] * shape[1])
    assert g[k] == 0
    assert (np.diff(g) < 0).all()


@pytest.mark.parametrize("power", [1, 2])
def test_ranks_follow_falls_of_entropy(power):
    ranks = [int(rank_for(G, 16, fall, power=power)) for fall in FALLS]
    assert ranks == [21, 16, 13, 10, 5, 0]
    back = [int(rank_for(G, r, 0.0, power=power)) for r in range(len(G))]
    assert back == list(range(len(G)))


def test_squared_errors_scaled_by_the_fall_itself_would_be_another_rule():
    mixed = [int(rank_for(G**2, 16, fall)) for fall in FALLS]
    assert mixed == [19, 16, 15, 13, 10, 8]


@pytest.mark.parametrize(
    ("rank", "limit"), [(4, 0.069), (8, 0.137), (16, 0.28), (32, 0.619)]
)
def test_the_rule_saturates_after_a_few_tenths_of_a_nat(rank, limit):
    # The limit is Monte Carlo's; the law of infinite matrices is 0.003 below.
    found = np.log(G[0] / G[rank])
    assert found == pytest.approx(limit, abs=0.003)
    assert int(rank_for(G, rank, found)) == 0
    assert int(rank_for(G, rank, 10.0)) == 0
    step = dict(least=3, most=32, change=64)
    assert int(next_rank(G, rank, 10.0, rank, **step)) == 3


def test_a_rank_moves_by_no_more_than_allowed_and_stays_within_its_ends():
    step = lambda fall, rank: int(
        next_rank(G, 32, fall, rank, least=2, most=32, change=4)
    )
    assert [step(10.0, r) for r in (32, 10, 5, 2)] == [28, 6, 2, 2]
    assert [step(-10.0, r) for r in (2, 30, 32)] == [6, 32, 32]
    assert step(0.0, 32) == 32


def test_entropy_is_that_of_a_gaussian_and_shifts_by_the_log_of_a_scale():
    x = np.random.default_rng(0).normal(size=10**5).astype(np.float32)
    entropy = float(gaussian_entropy(jnp.asarray(x)))
    expected = 0.5 * np.log(2 * np.pi * np.e * np.mean(x**2))
    assert entropy == pytest.approx(expected, abs=1e-5)
    for scale in (2.0**-100, 2.0**60):  # whose squares float32 does not hold
        shift = float(gaussian_entropy(jnp.asarray(scale * x))) - entropy
        assert shift == pytest.approx(np.log(scale), abs=1e-5)
    assert float(gaussian_entropy(jnp.zeros(3))) == -np.inf
    assert np.isnan(float(gaussian_entropy(jnp.array([1.0, np.nan]))))


@pytest.mark.parametrize("count", [100, 1000])
def test_a_samples_entropy_errs_by_one_over_the_root_of_twice_its_size(count):
    x = jax.random.normal(jax.random.key(0), (200, 500))
    keys = jax.random.split(jax.random.key(1), 400)
    some = jax.vmap(lambda key: gaussian_entropy(sample(x, key, count / x.size)))(keys)
    # The deviation of 400 is itself known to 1/sqrt(800), 3.5 %: four times that.
    error = float(jnp.std(some - gaussian_entropy(x)))
    assert error == pytest.approx(1 / np.sqrt(2 * count), rel=0.15)
    assert (sample(x, keys[0], 1.0) == x.ravel()).all()


def test_later_stages_of_a_pipeline_have_time_for_higher_ranks():
    time = [lambda r: 2.0 * r] + 3 * [lambda r: 1.0 * r]
    ranks = lambda **more: aligned_ranks(
        6, time, **{"microbatch": 3, "whole": [40] * 4, "most": 20} | more
    )
    assert ranks() == [6, 16, 20, None]  # 15, 18 and 21 in time, in fours
    assert ranks(whole=[40, 15, 40, 40]) == [6, None, 20, None]
    assert ranks(microbatch=0) == [6, 12, 12, 12]
