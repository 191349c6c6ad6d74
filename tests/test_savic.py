"""SAVIC: local steps under one diagonal scaling, shared and frozen in a round."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from lowcomm import (
    average,
    change_exceeds,
    data_parallel,
    every,
    growing,
    hessian_diagonal,
    hessian_products,
    local_sgd,
    mean_of_squares,
    savic,
    shared_scaling,
    spread,
    square_of_mean,
    worker_mesh,
)
from lowcomm.starts import round_starts

K, N, STEPS, RATE, BETA, FLOOR = 4, 5, 60, 0.03, 0.75, 0.05
EPS64 = 2.0**-52
SQUARED = {"square of mean": square_of_mean(), "mean of squares": mean_of_squares()}
both_rules = pytest.mark.parametrize("rule", SQUARED)
SGD = optax.sgd(RATE)


@functools.cache
def problem():
    """A Hessian that all share, optima and noise of their own."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(N, N))
    hessian = root @ root.T / N + np.eye(N)
    return hessian, rng.normal(size=(K, N)), rng.normal(size=(K, STEPS, N))


def train(tx, *, steps=STEPS, scale=1.0, backend="vmap", x64=True, hessian=None):
    """The paths ``[K, T, N]`` of ½ (x − b)ᵀ A (x − b) + noise, and of the states."""
    shared, optima, noise = problem()
    a = shared if hessian is None else hessian
    loss = lambda x, b: scale * (x - b) @ a @ (x - b) / 2
    curvature = hessian_products(loss)

    def worker(b, noise):
        def body(carry, now):
            (x, state), (t, n) = carry, now
            g = scale * (a @ (x - b) + n)
            moves, state = tx.update(g, state, x, step=t, **curvature(b))
            return (x + moves, state), (x + moves, state)

        x = 0 * b
        return lax.scan(body, (x, tx.init(x)), (jnp.arange(steps), noise[:steps]))[1]

    mesh = worker_mesh(K) if backend == "mesh" else None
    with jax.enable_x64(x64):
        kind = jnp.float64 if x64 else jnp.float32
        a, data = kind(a), (kind(optima), kind(noise))
        path, states = jax.jit(spread(worker, mesh=mesh))(*data)
        return jax.tree.map(np.asarray, (path, states))


def diagonal(states):
    """D to its power, ``[K, T, N]``."""
    return optax.tree.get(states, "diagonal")


def synchronous(rule, refreshes):
    """Preconditioned SGD on the mean gradient, D from all workers' gradients."""
    a, b, noise = problem()
    x, square, path = np.zeros(N), None, []
    for t in range(STEPS):
        g = (x - b) @ a + noise[:, t]
        if t in refreshes:
            mean = rule == "square of mean"
            h = g.mean(0) ** 2 if mean else (g**2).mean(0)
            square = h if square is None else BETA * square + (1 - BETA) * h
        scaling = np.inf if square is None else np.maximum(FLOOR, np.sqrt(square))
        x = x - RATE * g.mean(0) / scaling
        path.append(x)
    return np.array(path)


@both_rules
@pytest.mark.parametrize("period", [1, 4, 15])
def test_the_mean_goes_the_synchronous_way_on_a_shared_hessian(rule, period):
    tx = savic(SGD, period=period, floor=FLOOR, decay=BETA, rule=SQUARED[rule])
    path, _ = train(tx)
    assert period == 1 or np.ptp(path, axis=0).max() > 0.1
    expected = synchronous(rule, range(0, STEPS, period))
    # The dynamics contract: a few roundings of numbers below 4 remain.
    np.testing.assert_allclose(path.mean(0), expected, rtol=0, atol=16 * EPS64)


def test_a_momentum_of_each_worker_s_own_keeps_the_synchronous_way():
    ball = optax.sgd(RATE, momentum=0.5)
    how = {"floor": FLOOR, "decay": 1.0, "initial": 0.7}
    local, _ = train(savic(ball, period=15, **how))
    mean, _ = train(data_parallel(optax.sgd(RATE / 0.7, momentum=0.5)))
    np.testing.assert_allclose(local.mean(0), mean[0], rtol=0, atol=16 * EPS64)


def test_scalings_of_each_worker_s_own_leave_the_synchronous_way():
    rms = optax.rmsprop(RATE, decay=BETA)
    path, _ = train(local_sgd(rms, period=15))
    expected, _ = train(data_parallel(rms))
    assert np.abs(path.mean(0) - expected[0]).max() > 0.1


@both_rules
def test_just_before_the_sync_squared_gradients_hold_the_drift(rule):
    period = 15
    late = shared_scaling(
        SQUARED[rule], when=every(period), floor=FLOOR, decay=BETA, initial=None
    )
    # Nothing is known before step 14, and nobody moves.
    expected = synchronous(rule, range(period - 1, STEPS, period))
    path, _ = train(average(optax.chain(late, SGD), when=every(period)))
    error = np.abs(path.mean(0) - expected).max()
    assert error < 1e-11 if rule == "square of mean" else error > 1e-2


def test_a_scaling_of_one_that_stays_is_local_sgd_bit_for_bit():
    expected, _ = train(local_sgd(SGD, period=4), x64=False)
    tx = savic(SGD, period=4, floor=0.5, decay=1.0, initial=1.0)
    np.testing.assert_array_equal(train(tx, x64=False)[0], expected)


def test_a_floor_above_everything_is_local_sgd_at_a_lower_rate():
    tx, slow = savic(SGD, period=4, floor=2.0**10), optax.sgd(RATE / 2**10)
    path, states = train(tx, x64=False)
    assert np.sqrt(diagonal(states).max()) < 2**10
    np.testing.assert_array_equal(path, train(local_sgd(slow, period=4), x64=False)[0])


def test_a_round_of_one_step_is_rmsprop_with_the_scaling_renewed_before_its_use():
    tx = savic(SGD, period=1, floor=1e-30, decay=BETA, initial=0.5)
    rms = optax.rmsprop(RATE, decay=BETA, eps=0.0, initial_scale=0.25)
    expected, _ = train(data_parallel(rms))
    np.testing.assert_allclose(train(tx)[0], expected, rtol=0, atol=32 * EPS64)


def test_a_decay_that_varies_corrects_the_bias_as_adam_does():
    b = 0.9
    corrected = lambda n: (b - b ** (n + 1)) / (1 - b ** (n + 1))
    adam = data_parallel(optax.adam(RATE, b1=0.0, b2=b, eps=0.0))
    tx = savic(SGD, period=1, floor=1e-30, decay=corrected, initial=3.0)
    # Each power of b is a rounding or two of its own, in float32 in both.
    np.testing.assert_allclose(
        train(tx, x64=False)[0], train(adam, x64=False)[0], rtol=0, atol=2e-5
    )


RULES = SQUARED | {"hessian diagonal": hessian_diagonal()}


@pytest.mark.parametrize("backend", ["vmap", "mesh"])
@pytest.mark.parametrize("rule", RULES)
def test_the_scaling_is_one_for_all_and_frozen_in_a_round(rule, backend):
    period = 4
    tx = savic(SGD, period=period, floor=1.0, decay=BETA, rule=RULES[rule])
    path, states = train(tx, backend=backend, x64=False)
    found = diagonal(states)
    np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))
    rounds = found[0].reshape(-1, period, N)
    np.testing.assert_array_equal(rounds, np.repeat(rounds[:, :1], period, 1))
    assert (rounds[1:, 0] != rounds[:-1, 0]).all()
    assert np.ptp(path[:, period], axis=0).min() > 0
    count = optax.tree.get(states, "refreshes")
    np.testing.assert_array_equal(count, [1 + np.arange(STEPS) // period] * K)


@pytest.mark.parametrize("rule", RULES)
def test_a_loss_in_other_units_takes_the_same_steps_bit_for_bit(rule):
    how = {"period": 4, "floor": 1e-30, "decay": BETA, "rule": RULES[rule]}
    make = lambda initial: savic(SGD, initial=initial, **how)
    path, states = train(make(0.5), x64=False)
    scaled, others = train(make(4.0), scale=8.0, x64=False)
    np.testing.assert_array_equal(scaled, path)
    np.testing.assert_array_equal(
        diagonal(others), 8.0 ** RULES[rule].power * diagonal(states)
    )


def estimates(grads):
    """What the two rules make of stacked gradients."""
    found = spread(
        lambda g: tuple(r.estimate(g, axis="workers") for r in SQUARED.values())
    )(grads)
    return [np.asarray(h[0], np.float64) for h in found]


def test_noise_counts_k_times_as_much_where_it_is_squared_before_the_mean():
    rng, workers, size = np.random.default_rng(1), 8, 1 << 14
    noise = rng.normal(size=(workers, size)).astype(np.float32)
    of_mean, of_squares = estimates(noise)
    assert (of_squares >= of_mean).all()
    # A mean of 2¹⁴ squares of normals is off by √(2/2¹⁴) = 1.1 %; five of these.
    np.testing.assert_allclose(of_mean.mean() * workers, 1, atol=0.055)
    np.testing.assert_allclose(of_squares.mean(), 1, atol=0.055)


def test_a_diagonal_hessian_is_estimated_exactly_and_averaged_over_the_workers():
    curvatures = np.arange(1.0, 1 + K * N).reshape(K, N).astype(np.float32)
    loss = lambda x, c: jnp.sum(c * jnp.square(x)) / 2
    rule = hessian_diagonal(seed=3)

    def worker(c):
        more = hessian_products(loss)(c)
        return rule.estimate(c, params=c, step=5, axis="workers", **more)

    np.testing.assert_array_equal(spread(worker)(curvatures), [curvatures.mean(0)] * K)


def test_other_signs_are_drawn_at_each_refresh_and_their_mean_is_the_diagonal():
    tx = savic(SGD, period=1, floor=1e3, decay=0.0, rule=hessian_diagonal(seed=1))
    _, states = train(tx, x64=False)
    found, hessian = diagonal(states)[0], problem()[0]
    assert len(np.unique(found.round(4), axis=0)) > 10
    off = np.sqrt((hessian**2).sum(1) - np.diag(hessian) ** 2)
    # 60 independent draws around the diagonal with this standard deviation; four.
    assert (np.abs(found.mean(0) - np.diag(hessian)) < 4 * off / np.sqrt(STEPS)).all()


def test_a_run_that_begins_within_a_round_waits_for_its_first_scaling():
    # Divided by a floor under nothing its first steps would be 1/floor as long.
    tx = shared_scaling(square_of_mean(), when=round_starts(4), floor=1e-3)
    g = jnp.ones(N)
    for start, first in ((3, 0.0), (4, 1.0)):
        worker = lambda g, t=start: tx.update(g, tx.init(g), step=t)[0]
        moves = spread(worker)(jnp.tile(g, (K, 1)))
        np.testing.assert_array_equal(moves, np.full((K, N), first))
    known = shared_scaling(
        square_of_mean(), when=round_starts(4), floor=1e-3, initial=0.5
    )
    worker = lambda g: known.update(g, known.init(g), step=3)[0]
    assert (spread(worker)(jnp.tile(g, (K, 1))) == 2.0).all()


def test_curvature_is_asked_for_on_refreshing_steps_alone():
    asked = []

    def curvature(params, v):
        asked.append(1)
        return v

    tx = savic(SGD, period=3, floor=0.1, rule=hessian_diagonal())

    def worker(x):
        state = tx.init(x)
        for t in range(7):
            _, state = tx.update(x, state, x, step=t, curvature=curvature)
        return x

    jax.eval_shape(jax.vmap(worker, axis_name="workers"), jnp.ones((K, N)))
    assert len(asked) == 3


def test_a_missing_curvature_is_missed_by_name():
    tx = savic(SGD, period=3, floor=0.1, rule=hessian_diagonal())
    with pytest.raises(ValueError, match=r"curvature=f.*hessian_products\(loss\)"):
        spread(lambda x: tx.update(x, tx.init(x), x, step=0)[0])(jnp.ones((K, N)))


def test_leaves_that_are_no_parameters_pass_and_types_stay():
    tree = {
        "w": jnp.full((K, 2), 3.0, jnp.bfloat16),
        "n": jnp.arange(K),
        "f": jnp.ones(K, bool),
        "none": None,
        "empty": jnp.zeros((K, 0)),
    }
    tx = shared_scaling(mean_of_squares(), when=every(1), floor=0.5)
    worker = lambda g: tx.update(g, tx.init(g), step=0)
    scaled, state = spread(worker)(tree)
    assert jax.tree.structure(scaled) == jax.tree.structure(tree)
    assert scaled["w"].dtype == jnp.bfloat16
    assert (scaled["w"] == 1).all()
    np.testing.assert_array_equal(scaled["n"], tree["n"])
    assert [x.dtype for x in jax.tree.leaves(state.diagonal)] == [jnp.float32]


def test_rounds_start_at_zero_and_after_each_sync_of_any_clock():
    starts = lambda period: [
        t for t in range(12) if round_starts(period).fire(init(period), step=t)[0]
    ]
    init = lambda period: round_starts(period).init(None)
    assert starts(1) == [*range(12)]
    assert starts(5) == [0, 5, 10]
    assert starts(every(5)) == [0, 5, 10]
    assert starts(growing(lambda r: 2**r, steps=12)) == [0, 1, 3, 7]


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"floor": 0.0}, "floor 0.0 must be positive"),
        ({"decay": 1.5}, "decay 1.5 is outside"),
        ({"initial": 0.0}, "initial 0.0 must be positive"),
        ({"period": 0}, "period 0"),
        ({"period": change_exceeds(0.3)}, "only a clock says beforehand"),
        ({"rule": mean_of_squares}, r"must be such as mean_of_squares\(\)"),
    ],
)
def test_settings_of_savic_that_make_no_sense_are_refused(how, match):
    with pytest.raises(ValueError, match=match):
        savic(SGD, **({"period": 4, "floor": 0.1} | how))
