"""PALSGD's random pulls and the proximal term, against expectations and exact steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lowcomm as lc
from lowcomm import diloco, palsgd, proximal, random_pull, rounds, spread
from tests.quadratics import toward, walk

K, PERIOD, RATE = 4, 4, 0.25
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=3), (K, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(K, 3)).astype(np.float32)
MANY = 20_000  # workers, each a sample of the draws


def train(tx, steps=8, *, x=X, data=OPTIMA, gradient=toward, **how):
    return walk(tx, x, data, steps=steps, gradient=gradient, **how)


def pulling(inner=None, *, rate=RATE, **how):
    how = {"probability": 0.5, "strength": 0.5, "period": PERIOD} | how
    inner = optax.sgd(rate) if inner is None else inner
    return palsgd(inner, learning_rate=rate, **how)


@functools.cache
def draws(seed, steps, p, workers=K):
    """Which steps of which worker are pulls, as ``random_pull`` makes them."""
    tx = random_pull(
        optax.identity(), probability=p, strength=1.0, learning_rate=p, seed=seed
    )
    # The inner step is +1/(1−p); a pull moves by −(x − a) = −1.
    worker = lambda x, t: tx.update(x, tx.init(x), x, step=t, anchor=0 * x)[0]
    one = jax.jit(spread(worker, in_axes=(0, None)))
    return np.stack([np.asarray(one(jnp.ones(workers), t)) for t in range(steps)]) < 0


@functools.cache
def constant(strength, p, steps=15, rate=0.05):
    """``x − a`` of many workers on a constant gradient, ``[workers, steps, 4]``."""
    g = np.array([0.5, -1.0, 2.0, 0.25], np.float32)
    tx = random_pull(
        optax.sgd(rate), probability=p, strength=strength, learning_rate=rate
    )

    def worker(x):
        def body(x, t):
            moves, _ = tx.update(g, tx.init(x), x, step=t, anchor=jnp.zeros(4))
            return x + moves, x + moves

        return lax.scan(body, x, jnp.arange(steps))[1]

    return g, np.asarray(jax.jit(spread(worker))(np.zeros((MANY, 4), np.float32)))


def test_without_pulls_it_is_diloco_bit_for_bit():
    for inner in (optax.adam(0.1), optax.sgd(0.1, momentum=0.9)):
        path, state = train(pulling(inner, probability=0.0, strength=5.0))
        expected, expected_state = train(diloco(inner, period=PERIOD))
        np.testing.assert_array_equal(path, expected)
        jax.tree.map(np.testing.assert_array_equal, state, expected_state)
        assert np.isfinite(path).all()


def test_pulls_of_no_strength_are_not_diloco_but_skipped_and_longer_steps():
    # Between syncs: a step of rate γ/(1 − p), or none.
    path, _ = train(pulling(strength=0.0), 3)
    pulls = draws(0, 3, 0.5)
    x = X.astype(float)
    for t in range(3):
        x = x - np.where(pulls[t][:, None], 0, RATE / 0.5 * (x - OPTIMA))
        np.testing.assert_allclose(path[:, t], x, atol=1e-6)
    assert 0 < pulls.sum() < pulls.size
    assert (
        np.abs(path - train(diloco(optax.sgd(RATE), period=PERIOD), 3)[0]).max() > 0.1
    )


def test_it_is_its_equations_in_numpy():
    # Momentum inside; the pull leaves the inner state alone, and acts outside of it.
    eta, p, mu = 0.5, 0.5, 0.9
    tx = pulling(optax.sgd(RATE, momentum=mu), strength=eta, probability=p, seed=3)
    path, state = train(tx, 10)
    pulls = draws(3, 10, p)
    x, m = X.astype(float), np.zeros((K, 3))
    a, v = X[0].astype(float), np.zeros(3)
    for t in range(10):
        pull = pulls[t][:, None]
        m = np.where(pull, m, mu * m + x - OPTIMA)
        x = np.where(pull, x - RATE * eta / p * (x - a), x - RATE / (1 - p) * m)
        if (t + 1) % PERIOD == 0:
            delta = a - x.mean(0)
            v = 0.9 * v + delta
            a = a - 0.7 * (delta + 0.9 * v)
            x = np.tile(a, (K, 1))
        np.testing.assert_allclose(path[:, t], x, atol=1e-5)
        np.testing.assert_allclose(state.anchor[:, t], np.tile(a, (K, 1)), atol=1e-5)


@pytest.mark.parametrize(
    ("gamma", "eta", "p"), [(0.05, 0.5, 0.2), (0.5, 0.25, 0.25), (1e-3, 4.0, 0.1)]
)
def test_the_expected_step_is_a_step_on_the_loss_and_a_proximal_term(gamma, eta, p):
    tx = random_pull(optax.sgd(gamma), probability=p, strength=eta, learning_rate=gamma)
    g, x, a = 0.75, 2.0, 0.5
    worker = lambda x: tx.update(jnp.float32(g), tx.init(x), x, step=0, anchor=x / 4)[0]
    moves = np.unique(np.asarray(spread(worker)(jnp.full(300, x))))
    back, ahead = sorted(moves, key=lambda m: abs(m + gamma * eta / p * (x - a)))
    expected = (1 - p) * np.float64(ahead) + p * np.float64(back)
    # Two roundings of float32 in each of the two moves.
    np.testing.assert_allclose(expected, -gamma * (g + eta * (x - a)), rtol=3e-7)


def test_the_expected_walk_on_a_constant_gradient_has_its_closed_form():
    # E[x_k − a] = −(g/η)(1 − (1 − γη)^k), at most ‖g‖/η for any number of steps.
    g, path = constant(0.5, 0.2)
    k = np.arange(1, 16)[:, None]
    expected = -g / 0.5 * (1 - (1 - 0.05 * 0.5) ** k)
    error = 5 * path.std(0) / np.sqrt(MANY)  # five standard errors
    assert (np.abs(path.mean(0) - expected) < error + 1e-6).all()
    assert (error[-1] < 0.02 * np.abs(expected[-1])).all()
    assert (np.abs(expected) < np.abs(g) / 0.5).all()


def test_with_no_strength_the_number_of_steps_is_binomial():
    # Mean displacement −γHg as without pulls, variance H γ² g² p/(1 − p) instead of 0.
    g, path = constant(0.0, 0.2)
    steps, gamma, p = 15, 0.05, 0.2
    last = path[:, -1].astype(float)
    taken = np.rint(last / (-gamma / (1 - p) * g))
    np.testing.assert_allclose(last, -gamma / (1 - p) * g * taken, rtol=1e-5, atol=1e-7)
    assert np.ptp(taken, axis=1).max() == 0
    variance = steps * gamma**2 * g**2 * p / (1 - p)
    error = 5 * np.sqrt(variance / MANY)
    assert (np.abs(last.mean(0) + gamma * steps * g) < error).all()
    # The variance of a sample variance of n near-normal values is 2/n of its square.
    np.testing.assert_allclose(last.var(0), variance, rtol=5 * np.sqrt(2 / MANY))


def test_stronger_pulls_keep_workers_nearer_with_the_same_draws():
    drift = []
    for eta in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0):
        tx = random_pull(
            optax.sgd(0.05), probability=0.2, strength=eta, learning_rate=0.05
        )
        whole = rounds(tx, optax.sgd(1.0), when=lc.every(1000))
        path, state = train(whole, 20, data=8 * OPTIMA)
        drift.append(np.square(path - state.anchor).mean())
    assert drift == sorted(drift, reverse=True)
    assert drift[-1] < drift[0] / 4


def test_the_first_pull_of_a_round_is_a_step_of_zero():
    path, _ = train(pulling(), 12)
    pulls = draws(0, 12, 0.5)
    before = np.concatenate([X[:, None], path[:, :-1]], 1)
    for t in (0, 4, 8):
        still = (path[:, t] == before[:, t]).all(-1)
        np.testing.assert_array_equal(still, pulls[t])
        assert pulls[t].any()


@pytest.mark.parametrize("coefficient", [0.5, 1.0])
def test_a_pull_of_one_resets_a_worker_to_its_anchor(coefficient):
    tx = random_pull(
        optax.sgd(1.0), probability=0.5, strength=coefficient / 2, learning_rate=1.0
    )
    worker = lambda x, a: x + tx.update(a, tx.init(x), x, step=0, anchor=a)[0]
    x, a = jnp.arange(8.0) + 3, jnp.full(8, 2.0)
    after = np.asarray(spread(worker)(x, a))
    there = np.asarray(x - coefficient * (x - a))
    assert set(after) <= {*there.tolist(), *np.asarray(x - 2 * a).tolist()}
    assert (after == there).any()


def test_a_schedule_shrinks_the_pull_with_the_step():
    rate = optax.piecewise_constant_schedule(0.5, {4: 0.25})
    tx = random_pull(optax.sgd(rate), probability=0.5, strength=1.0, learning_rate=rate)

    def worker(x, t):
        return tx.update(0 * x, tx.init(x), x, step=t, anchor=0 * x)[0]

    moves = [spread(lambda x, t=t: worker(x, t))(jnp.ones(20)) for t in (0, 4)]
    assert [set(np.asarray(m).tolist()) for m in moves] == [{0, -1}, {0, -0.25}]


def test_each_step_with_no_pull_drawn_is_outer_optimized_data_parallel():
    seed = next(s for s in range(99) if not draws(s, 3, 1 / 16).any())
    tx = pulling(period=1, probability=1 / 16, strength=0.25, seed=seed)
    path, _ = train(tx, 3)
    expected, _ = train(diloco(optax.sgd(RATE * 16 / 15), period=1), 3)
    np.testing.assert_allclose(path, expected, atol=1e-6)


def test_draws_differ_between_workers_and_are_the_same_after_a_restart():
    one = draws(0, 30, 0.5, 8)
    assert (one == draws(0, 30, 0.5, 8)).all()
    assert (one != draws(1, 30, 0.5, 8)).any()
    assert len({tuple(column) for column in one.T}) == 8
    tx = pulling(seed=0)
    path, state = train(tx, 8)
    half = jax.tree.map(lambda s: jnp.asarray(s[:, 4]), state)
    rest, _ = train(tx, 3, x=path[:, 4], state=half, start=5)
    np.testing.assert_array_equal(rest, path[:, 5:])


def test_every_leaf_is_pulled_and_the_anchor_stays_within_a_round():
    x = {"a": X, "b": 2 * X, "n": np.ones((K, 2), np.int32)}
    gradient = lambda x, c: {"a": x["a"] - c, "b": x["b"] - c, "n": 0 * x["n"]}
    tx = pulling(strength=1.0, seed=1)
    path, state = train(tx, PERIOD, x=x, gradient=gradient)
    for name in "ab":
        for t in range(PERIOD - 1):
            np.testing.assert_array_equal(state.anchor[name][:, t], x[name])
    pull = draws(1, 2, 0.5)[1] & ~draws(1, 2, 0.5)[0]
    assert pull.any()
    for name in "ab":  # γη/p = 1/2: half of the way back
        far = path[name][pull, 0] - x[name][pull]
        assert (np.abs(far) > 0.01).all()
        np.testing.assert_allclose(
            path[name][pull, 1], x[name][pull] + far / 2, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("start", [4, 6])
def test_until_t_start_it_is_data_parallel_and_the_anchor_is_the_model_there(start):
    ball = optax.sgd(0.1, momentum=0.5)
    path, state = train(pulling(ball, t_start=start), 14)
    expected, _ = train(lc.data_parallel(ball), start)
    np.testing.assert_allclose(path[:, :start], expected, atol=1e-6)
    np.testing.assert_array_equal(state.anchor[:, start - 1], path[:, start - 1])
    # Its momentum goes on, and rounds are counted from there.
    assert np.abs(state.inner[1][0].trace[:, start]).max() > 0
    assert np.flatnonzero(state.synced.all(0)[start:]).tolist() == [
        t for t in range(14 - start) if (t + 1) % PERIOD == 0
    ]


def test_until_t_start_nothing_is_compressed():
    # All but one entry of three would be left behind at each sync.
    exchange = lc.error_feedback(lc.top_k(1 / 3))
    ends = [train(pulling(t_start=4, exchange=e), 4)[0] for e in (None, exchange)]
    np.testing.assert_allclose(*ends, atol=1e-6)


def test_pulls_send_nothing():
    tx, x = pulling(t_start=4), np.ones(3, np.float32)
    sent = lambda t: (
        lc.traffic(
            lambda x: tx.update(x, tx.init(x), x, step=t), x, workers=K
        ).bytes_always
    )
    # Gradients and, at the end of what would be rounds, displacements.
    assert [sent(t) for t in range(9)] == [12, 12, 12, 24, 0, 0, 0, 12, 0]


# proximal


def test_the_proximal_term_is_a_pull_in_the_gradient():
    eta = 0.5
    inner = optax.chain(proximal(eta), optax.sgd(0.1, momentum=0.9))
    path, _ = train(rounds(inner, optax.sgd(1.0), when=lc.every(PERIOD)))
    x, m, a = X.astype(float), np.zeros((K, 3)), X[0].astype(float)
    for t in range(8):
        m = 0.9 * m + (x - OPTIMA) + eta * (x - a)
        x = x - 0.1 * m
        if (t + 1) % PERIOD == 0:
            a = x.mean(0)
            x = np.tile(a, (K, 1))
        np.testing.assert_allclose(path[:, t], x, atol=1e-5)


def test_links_work_in_half_precision_and_under_a_mask_that_is_told_so():
    x = {"a": jnp.asarray(X, jnp.bfloat16), "b": jnp.asarray(X, jnp.bfloat16)}
    gradient = lambda x, c: jax.tree.map(lambda x: (x - c).astype(x.dtype), x)
    link = optax.chain(proximal(0.5), optax.sgd(0.1))
    mask = {"a": True, "b": False}
    told = optax.masked(link, mask, mask_compatible_extra_args=True)
    verb = lambda inner: rounds(inner, optax.sgd(1.0), when=lc.every(PERIOD))
    path, _ = train(verb(told), 2, x=x, gradient=gradient)
    expected, _ = train(verb(link), 2, x=x, gradient=gradient)
    assert path["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(path["a"], expected["a"])
    with pytest.raises(ValueError, match="pass mask_compatible_extra_args=True"):
        train(verb(optax.masked(link, mask)), 1, x=x, gradient=gradient)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pulling(probability=1.0), r"probability 1.0 is outside \[0, 1\)"),
        (lambda: pulling(probability=-0.1), "probability -0.1"),
        (lambda: pulling(strength=-1.0), "strength -1.0"),
        (lambda: pulling(strength=4.0), r"= 2 overshoots the anchor"),
        (lambda: pulling(t_start=-1), "start -1"),
        (lambda: pulling(period=0), "period 0"),
        (lambda: proximal(-1.0), "strength -1.0"),
        (lambda: proximal(np.nan), "strength nan"),
        (
            lambda: train(lc.local_sgd(optax.chain(proximal(0.1)), period=2), 1),
            "proximal pulls toward an anchor, and none",
        ),
        (
            lambda: proximal(0.1).update(X, optax.EmptyState(), anchor=X),
            "proximal needs params",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
