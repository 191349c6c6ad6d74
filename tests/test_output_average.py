"""The weighted average of the iterates, and the theorem's arithmetic."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import consensus, local_sgd, output_average, spread
from tests.quadratics import walk

K, N, STEPS = 4, 3, 9
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=N), (K, 1)).astype(np.float32)
DATA = tuple(RNG.uniform(0.5, 2.0, size=(K, N)).astype(np.float32) for _ in range(2))
LOCAL = local_sgd(optax.sgd(0.1), period=3)


def closed_form(a, steps):
    """The sum of (a + t)² over the steps."""
    t = steps
    return t / 6 * (2 * t**2 + 6 * a * t - 3 * t + 6 * a**2 - 6 * a + 1)


@pytest.mark.parametrize(("a", "steps", "total"), [(50, 100, 1_073_350), (3, 7, 280)])
def test_the_weights_sum_to_their_closed_form(a, steps, total):
    # All partial sums are integers below 2^24: exact.
    _, states = walk(output_average(LOCAL, offset=a), X, DATA, steps=steps)
    assert closed_form(a, steps) == total
    assert states[0].total[:, -1].tolist() == [total] * K
    assert total >= steps**3 / 3


@pytest.mark.parametrize("offset", [0.0, 1.0, 20.0])
def test_the_output_is_the_weighted_mean_of_the_iterates_before_their_steps(offset):
    path, states = walk(output_average(LOCAL, offset=offset), X, DATA, steps=STEPS)
    iterates = np.concatenate([X[:, None], path[:, :-1]], 1).astype(float)
    weights = (offset + np.arange(STEPS)) ** 2
    for t in range(0 if offset else 1, STEPS):
        own = np.average(iterates[:, : t + 1], axis=1, weights=weights[: t + 1])
        # Numbers below 4, a few roundings a step.
        np.testing.assert_allclose(states[0].output[:, t], own, rtol=0, atol=1e-5)
    read = spread(lambda tree: consensus((), tree))(states[0].output[:, -1])
    np.testing.assert_allclose(read, np.tile(own.mean(0), (K, 1)), rtol=0, atol=1e-5)
    assert np.abs(read - path[:, -1]).max() > 1e-2


def test_at_a_large_offset_it_is_the_running_mean():
    # Weights differ by 2 · 9 / 10^6 of themselves.
    path, states = walk(output_average(LOCAL, offset=1e6), X, DATA, steps=STEPS)
    iterates = np.concatenate([X[:, None], path[:, :-1]], 1)
    np.testing.assert_allclose(states[0].output[:, -1], iterates.mean(1), atol=1e-4)


def test_it_stands_beside_the_path_and_leaves_it_alone():
    path, _ = walk(output_average(LOCAL, offset=1.0), X, DATA, steps=STEPS)
    np.testing.assert_array_equal(path, walk(LOCAL, X, DATA, steps=STEPS)[0])


def test_in_half_precision_the_average_is_kept_precisely():
    tx = output_average(local_sgd(optax.sgd(0.0), period=1), offset=0.0)
    x = jnp.full((K, 1), 1 / 3, jnp.bfloat16)
    _, states = walk(tx, x, (x, x), steps=5)
    assert states[0].output.dtype == np.float32
    assert (states[0].output == np.float32(x[0])).all()


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"offset -1\.0 must be 0 or more"):
        output_average(LOCAL, offset=-1.0)
    tx = output_average(LOCAL, offset=1.0)
    for given in ({"step": 0}, {"params": jnp.zeros(N)}):
        with pytest.raises(ValueError, match="output_average needs"):
            spread(lambda x, given=given: tx.update(x, tx.init(x), **given))(X)


def bound(*, a, steps, start, kappa_mu, variance, second, period, workers):
    """Of E f(x̂) − f*, term by term, for the rate 4/(μ(a + t))."""
    mu, smoothness = kappa_mu
    total = closed_form(a, steps)
    return (
        mu * a**3 / (2 * total) * start,
        4 * steps * (steps + 2 * a) / (mu * workers * total) * variance,
        256 * steps / (mu**2 * total) * second * period**2 * smoothness,
    )


def test_far_out_noise_shrinks_with_the_workers_and_drift_with_the_square_of_time():
    steps, mu, smoothness, workers = 10**8, 0.5, 4.0, 16
    forgotten, noise, drift = bound(
        a=200,
        steps=steps,
        start=9.0,
        kappa_mu=(mu, smoothness),
        variance=3.0,
        second=5.0,
        period=8,
        workers=workers,
    )
    assert noise == pytest.approx(12 * 3.0 / (mu * workers * steps), rel=1e-5)
    expected = 768 * 5.0 * 8**2 * smoothness / (mu * steps) ** 2
    assert drift == pytest.approx(expected, rel=1e-5)
    assert forgotten < drift


def test_the_output_is_as_near_the_optimum_as_the_theorem_says():
    # ½ Σ h (x − c)² with h in [μ, L], without noise; a > 16 κ and a > H.
    mu, smoothness, steps, period = 0.5, 2.0, 64, 4
    a = 16 * smoothness / mu + 1
    h = np.tile(np.float32([[mu, 1.0, smoothness]]), (K, 1))
    rate = lambda t: 4 / (mu * (a + t))
    tx = output_average(local_sgd(optax.sgd(rate), period=period), offset=a)
    path, states = walk(tx, X, (h, DATA[1]), steps=steps)
    best = DATA[1].astype(float).mean(0)
    before = np.concatenate([X[:, None], path[:, :-1]], 1).astype(float)
    second = np.square(h[:, None] * (before - DATA[1][:, None])).sum(-1).max()
    gap = (h[0] * np.square(states[0].output[:, -1].mean(0) - best)).sum() / 2
    terms = bound(
        a=a,
        steps=steps,
        start=np.square(X[0] - best).sum(),
        kappa_mu=(mu, smoothness),
        variance=0.0,
        second=second,
        period=period,
        workers=K,
    )
    assert 0 < gap < sum(terms)
