"""Outer optimizers: DiLoCo, what its momentum does on quadratics, and Muon inside."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lowcomm as lc
from lowcomm import data_parallel, diloco, local_sgd, muloco, spread
from tests.quadratics import bend, toward, walk

K = 4
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=3), (K, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(K, 3)).astype(np.float32)
CURVATURES = RNG.uniform(0.5, 2.0, size=(K, 3)).astype(np.float32)


def train(tx, steps=8, *, x=X, data=(CURVATURES, OPTIMA), gradient=bend, **how):
    return walk(tx, x, data, steps=steps, gradient=gradient, **how)


# DiLoCo


@pytest.mark.parametrize("period", [1, 3, 4])
def test_plain_outer_steps_are_parameter_averaging(period):
    inner = optax.sgd(0.1, momentum=0.9)
    path, _ = train(diloco(inner, period=period, outer_lr=1.0, momentum=0.0))
    expected, _ = train(local_sgd(inner, period=period))
    np.testing.assert_allclose(path, expected, atol=1e-6)


def test_at_each_step_it_is_data_parallel_nesterov_at_the_product_of_rates():
    path, _ = train(diloco(optax.sgd(0.2), period=1, outer_lr=0.7, momentum=0.9))
    nesterov = optax.sgd(0.2 * 0.7, momentum=0.9, nesterov=True)
    np.testing.assert_allclose(path, train(data_parallel(nesterov))[0], atol=2e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_a_round_moves_in_the_long_run_by_its_effective_outer_step(momentum):
    # On a constant gradient g: η/(1 − μ) · γ H g a round.
    tx = diloco(optax.sgd(0.1), period=2, outer_lr=0.7, momentum=momentum)
    path, _ = train(tx, 200, gradient=lambda x, data: data[1])
    moved = path[:, -1] - path[:, -3]
    expected = -0.7 / (1 - momentum) * 0.1 * 2 * OPTIMA.mean(0)
    np.testing.assert_allclose(moved, np.tile(expected, (K, 1)), rtol=1e-3, atol=1e-5)


def test_two_workers_walk_the_worked_example():
    # ½(x − c)² with c = 0 and 2, γ = 1/2, H = 2, a₀ = 4, η = 0.7, μ = 0.9. Heavy ball
    # would begin at 2.425, a sum for the mean at −1.985, the other sign at 6.9925.
    data = jnp.array([0.0, 2.0])
    tx = diloco(optax.sgd(0.5), period=2, outer_lr=0.7, momentum=0.9)
    _, state = walk(tx, jnp.full(2, 4.0), data, steps=8, gradient=toward)
    expected = [1.0075, -0.27573125, -0.154553703, 0.503390392]
    np.testing.assert_allclose(state.anchor[:, 1::2], [expected] * 2, rtol=0, atol=1e-6)


def round_matrix(eta, mu, rho):
    """One round on (anchor, momentum) of a quadratic whose H steps shrink x by ρ."""
    s = eta * (1 - rho)
    return np.array([[1 - s * (1 + mu), -eta * mu**2], [1 - rho, mu]])


@pytest.mark.parametrize(("rate", "period"), [(0.5, 1), (0.25, 3), (1.0, 2)])
def test_a_round_on_a_quadratic_is_a_matrix(rate, period):
    tx = diloco(optax.sgd(rate), period=period, outer_lr=0.7, momentum=0.9)
    _, state = train(tx, 4 * period, gradient=lambda x, data: x)
    a = X[0].astype(float)
    vector = np.stack([a, 0 * a])
    for t in range(period - 1, 4 * period, period):
        vector = round_matrix(0.7, 0.9, (1 - rate) ** period) @ vector
        trace = state.outer[0].trace[:, t]
        np.testing.assert_allclose(state.anchor[:, t], [vector[0]] * K, atol=2e-6)
        np.testing.assert_allclose(trace, [vector[1]] * K, atol=2e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_outer_nesterov_is_stable_below_exactly_its_bound(momentum):
    # s = η(1 − ρ) < 2(1 + μ)/(1 + 2μ), 1.357 at μ = 0.9. Here ρ = 0, so s = η.
    bound = 2 * (1 + momentum) / (1 + 2 * momentum)
    sizes = []
    for factor in (0.98, 1.02):
        tx = diloco(
            optax.sgd(1.0), period=1, outer_lr=factor * bound, momentum=momentum
        )
        path, _ = train(tx, 400, gradient=lambda x, data: x)
        sizes.append(np.abs(path[:, -20:]).max() / np.abs(X).max())
        radius = abs(np.linalg.eigvals(round_matrix(factor * bound, momentum, 0.0)))
        assert (radius.max() < 1) == (factor < 1)
    assert sizes[0] < 0.1
    assert sizes[1] > 10


def test_the_usual_outer_values_are_stable_for_every_inner_contraction():
    radii = [
        abs(np.linalg.eigvals(round_matrix(0.7, 0.9, rho))).max()
        for rho in np.linspace(0, 0.999, 1000)
    ]
    assert max(radii) < 1
    assert radii[0] == pytest.approx(0.52, abs=0.005)  # and slow modes stay slow
    assert radii == sorted(radii)


# What the outer rate does to noise


def test_without_momentum_a_round_contracts_by_its_closed_form():
    # 1 − η(1 − ρ) with ρ = (1 − γh)^H, stable iff η(1 − ρ) < 2.
    rho = (1 - 0.25) ** 3
    for eta in (0.5, 1.0, 2.0, 1.9 / (1 - rho), 2.1 / (1 - rho)):
        tx = diloco(optax.sgd(0.25), period=3, outer_lr=eta, momentum=0.0)
        _, state = train(tx, 60, gradient=lambda x, data: x)
        ratio = state.anchor[:, 5::3] / state.anchor[:, 2:-3:3]
        factor = 1 - eta * (1 - rho)
        np.testing.assert_allclose(ratio, factor, rtol=1e-4)
        assert (np.abs(state.anchor[:, -1]) < np.abs(X)).all() == (eta * (1 - rho) < 2)


@pytest.mark.parametrize(
    ("eta", "variance"), [(0.3, 0.000665), (1.0, 0.002525), (1.5, 0.004207)]
)
def test_the_noise_of_gradients_leaves_the_anchor_this_stationary_variance(
    eta, variance
):
    # h = 1, γ = 0.02, H = 20, σ = 1, M = 4 workers, μ = 0; a round adds noise of
    # s² = γ²σ²(1 − (1 − γh)^2H)/(1 − (1 − γh)²)/M.
    gamma, period, many, rounds = 0.02, 20, 2000, 40
    rho = (1 - gamma) ** period
    s2 = gamma**2 * (1 - rho**2) / (1 - (1 - gamma) ** 2) / K
    closed = eta * s2 / ((1 - rho) * (2 - eta * (1 - rho)))
    assert closed == pytest.approx(variance, rel=2e-3)
    tx = diloco(optax.sgd(gamma), period=period, outer_lr=eta, momentum=0.0)

    def worker(x, key):
        def body(carry, t):
            x, state = carry
            noise = jax.random.normal(jax.random.fold_in(key, t), x.shape)
            moves, state = tx.update(x + noise, state, x, step=t)
            return (x + moves, state), None

        def one(carry, r):
            carry, _ = lax.scan(body, carry, r * period + jnp.arange(period))
            return carry, carry[1].anchor

        return lax.scan(one, (x, tx.init(x)), jnp.arange(rounds))[1]

    keys = jax.random.split(jax.random.key(7), K)
    anchors = np.asarray(jax.jit(spread(worker))(jnp.zeros((K, many)), keys))[0]
    # After 20 rounds 0.9^40 of the start is left (of none, here). Of 2000 samples of a
    # variance, correlated over rounds, at least 20 are independent at η = 1.5 and 2 at
    # η = 0.3: five standard errors are below 5 √(2/4000) = 11 %.
    found = np.square(anchors[20:].astype(float)).mean()
    assert found == pytest.approx(closed, rel=0.11)


# Muon inside


def square(seed, size):
    draw = np.random.default_rng(seed)
    return draw.normal(size=(K, size, size)).astype(np.float32)


SQUARE = np.tile(square(0, 4)[:1], (K, 1, 1))


def momentum_of_muon(beta=0.95):
    """Muon without orthogonalization: Nesterov momentum, both terms bias-corrected."""

    def init(params):
        return optax.EmaState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(updates, state, params=None):
        count = state.count + 1
        ema = optax.tree.update_moment(updates, state.ema, beta, 1)
        ahead = jax.tree.map(
            lambda m, g: (
                beta * m / (1 - beta ** (count + 1))
                + (1 - beta) * g / (1 - beta**count)
            ),
            ema,
            updates,
        )
        return ahead, optax.EmaState(count, ema)

    return optax.GradientTransformation(init, update)


def test_without_orthogonalization_muloco_is_diloco_with_momentum(monkeypatch):
    # Square matrices, which Muon does not rescale by their shape.
    muon = optax.contrib.muon.__globals__["scale_by_muon"].__globals__
    monkeypatch.setitem(muon, "orthogonalize_via_newton_schulz", lambda x, *_: x)
    data = {"data": square(1, 4), "gradient": toward}
    path, _ = train(muloco(0.1, period=3), 9, x=SQUARE, **data)
    inner = optax.chain(momentum_of_muon(), optax.scale(-0.1))
    expected, _ = train(diloco(inner, period=3), 9, x=SQUARE, **data)
    np.testing.assert_allclose(path, expected, atol=2e-6)
    assert np.abs(path[:, -1] - SQUARE).max() > 0.1


def test_steps_of_muon_on_matrices_are_orthogonal_and_adamw_takes_the_rest():
    x = {"w": np.ones((K, 4, 6), np.float32), "b": np.ones((K, 6), np.float32)}
    draw = np.random.default_rng(3)
    grads = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), x)
    tx = muloco(0.1, period=9, adam_learning_rate=0.01)
    moves = spread(lambda g, p: tx.update(g, tx.init(p), p, step=0)[0])(grads, x)
    # Muon's iteration leaves singular values between about 0.7 and 1.2, times the
    # rate and √(6/4), the shape's factor.
    values = np.linalg.svd(np.asarray(moves["w"]))[1] / (0.1 * np.sqrt(6 / 4))
    assert ((values > 0.6) & (values < 1.3)).all()
    # Adam's first step is the rate and the sign; Nesterov's form of it stretches.
    first = np.asarray(moves["b"])
    np.testing.assert_array_equal(np.sign(first), -np.sign(grads["b"]))
    alone = optax.adamw(0.01, weight_decay=0.0, nesterov=True)
    expected, _ = alone.update(grads["b"][0], alone.init(x["b"][0]), x["b"][0])
    np.testing.assert_allclose(first[0], expected, rtol=1e-4)


def test_muloco_walks_to_an_optimum_that_workers_share_and_past_others():
    # Steps are of one length whatever the gradient. Workers with one optimum go there;
    # with optima of their own they meet, but not at the optimum of their mean loss.
    rate = optax.cosine_decay_schedule(0.1, 120)
    tx = muloco(rate, period=4, outer_lr=1.0, momentum=0.0)
    optima = square(2, 4)
    optima[0] *= 9
    far = []
    for data in (np.tile(optima[1:2], (K, 1, 1)), optima):
        _, state = train(tx, 120, x=SQUARE, data=data, gradient=toward)
        assert np.ptp(state.anchor, axis=0).max() == 0
        gap = np.linalg.norm(state.anchor[0] - data.mean(0), axis=(1, 2))
        far.append(gap[-1] / gap[0])
    assert far[0] < 0.05
    assert far[1] > 0.3


def test_muloco_sends_what_diloco_sends_and_what_an_exchange_makes_of_it():
    x = np.ones((8, 8), np.float32)

    def sent(tx):
        step = lambda x: tx.update(x, tx.init(x), x, step=2)
        return lc.traffic(step, x, workers=K).bytes_always

    assert sent(muloco(0.1, period=3)) == sent(diloco(optax.adam(0.1), period=3)) == 256
    compressed = lc.error_feedback(lc.top_k(0.25))
    # 16 of 64 entries: a value of 4 bytes each, and a place of 6 bits.
    assert sent(muloco(0.1, period=3, exchange=compressed)) == 16 * 4 + 16 * 6 // 8
