"""SWAP: together, then apart, then one average with statistics of its own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from tests.quadratics import bend, squares, walk

K, N, SWITCH, STEPS = 4, 3, 3, 8
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=N), (K, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(K, N)).astype(np.float32)
CURVATURES = RNG.uniform(0.5, 2.0, size=(K, N)).astype(np.float32)
BALL, REFINE = optax.sgd(0.2, momentum=0.5), optax.sgd(0.1, momentum=0.9)
METHOD = lc.swap(BALL, REFINE, switch=SWITCH, steps=STEPS)
# Numbers below 4, eight steps of a handful of float32 roundings each.
ROUNDING = 8 * 8 * 4 * 2.0**-24


def train(tx=METHOD, *, x=X, data=(CURVATURES, OPTIMA), steps=STEPS, **how):
    """The path of virtual workers, ``[K, steps, …]``."""
    return walk(tx, x, data, steps=steps, **how)[0]


def test_one_worker_is_one_run_whose_optimizer_changes():
    path = train(x=X[:1], data=(CURVATURES[:1], OPTIMA[:1]))
    x, state, inner = X[0], BALL.init(X[0]), BALL
    for t in range(STEPS):
        if t == SWITCH:  # with moments of its own
            inner, state = REFINE, REFINE.init(x)
        moves, state = inner.update(bend(x, (CURVATURES[0], OPTIMA[0])), state)
        x = optax.apply_updates(x, moves)
        np.testing.assert_allclose(path[0, t], x, rtol=0, atol=ROUNDING)


def test_workers_are_one_before_the_switch_and_after_the_end_only():
    apart = np.ptp(train(), axis=0).max(-1)
    assert (apart[:SWITCH] == 0).all()
    assert (apart[SWITCH : STEPS - 1] > 0.01).all()
    assert apart[-1] < ROUNDING


def test_the_same_data_keep_all_members_the_same():
    same = lambda a: np.tile(a[:1], (K, 1))
    data = same(CURVATURES), same(OPTIMA)
    path, alone = train(data=data), train(x=X[:1], data=[a[:1] for a in data])
    np.testing.assert_array_equal(path, np.tile(path[:1], (K, 1, 1)))
    np.testing.assert_allclose(path[:1], alone, rtol=0, atol=ROUNDING)


def test_the_second_phase_sends_nothing():
    run = lc.fit(squares, METHOD, X[0], lambda t: OPTIMA, steps=STEPS, workers=K)
    whole = 4 * N
    quiet = STEPS - SWITCH - 1
    assert run.payload.tolist() == [whole] * SWITCH + [0] * quiet + [whole]
    for t in range(SWITCH, STEPS - 1):
        update = lambda x, t=t: METHOD.update(x, METHOD.init(x), x, step=t)
        assert lc.traffic(update, X[0], workers=K).rows == ()


def test_the_average_is_the_mean_of_the_members_in_any_order():
    out = train()[:, -1]
    order = [2, 0, 3, 1]
    renamed = train(data=(CURVATURES[order], OPTIMA[order]))[:, -1]
    np.testing.assert_allclose(renamed, out[order], rtol=0, atol=ROUNDING)
    endless = lc.swap(BALL, REFINE, switch=SWITCH, steps=STEPS + 1)
    members = train(endless)[:, -1].astype(float)
    assert np.ptp(members, axis=0).max() > 0.01
    np.testing.assert_allclose(out[0], members.mean(0), rtol=0, atol=ROUNDING)


def test_on_a_quadratic_the_average_gains_the_spread_of_its_members():
    a = np.array([[2.0, 1, 0], [1, 3, 1], [0, 1, 2]])
    gradient = lambda x, c: jnp.float32(a) @ (x - c)
    how = {"data": OPTIMA, "gradient": gradient}
    members = train(lc.swap(BALL, REFINE, switch=3, steps=9), **how)[:, -1]
    average = train(**how)[0, -1].astype(float)
    loss = lambda x: np.einsum("...i,ij,...j", x, a, x) / 2
    apart = members.astype(float) - average
    gain = loss(members.astype(float)).mean() - loss(average)
    assert gain == pytest.approx(loss(apart).mean(), abs=16 * ROUNDING)
    assert gain > 1e-3


def test_on_a_convex_loss_the_average_is_better_than_its_members():
    inputs = RNG.normal(size=(K, 16, N)).astype(np.float32)
    signs = np.sign(inputs @ np.float32([1, -2, 1]) + RNG.normal(size=(K, 16)))
    data = inputs * signs[..., None].astype(np.float32)
    loss = lambda x, rows: jnp.mean(jax.nn.softplus(-(rows @ x)))
    how = {"data": data, "gradient": jax.grad(loss)}
    members = train(lc.swap(BALL, REFINE, switch=3, steps=9), **how)[:, -1]
    average = train(**how)[0, -1]
    everyone = data.reshape(-1, N)
    of_members = np.mean([loss(x, everyone) for x in members])
    assert loss(average, everyone) < of_members - 1e-4


def test_averaging_lessens_the_noise_by_the_workers_and_the_bias_not_at_all():
    # x ← (1 − rate h) x + rate ε from 2: the mean of n runs of K members.
    workers, n, rate, h, k = 8, 4096, 0.2, 1.5, 6

    def add(updates, state, params=None, *, step, **extra):
        key = jax.random.fold_in(jax.random.key(0), step)
        key = jax.random.fold_in(key, jax.lax.axis_index("workers"))
        return updates + jax.random.normal(key, updates.shape), state

    noise = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), add)
    noisy = optax.chain(noise, optax.sgd(rate))
    x = np.full((workers, n), 2, np.float32)
    data = np.full_like(x, h), 0 * x
    ends = [  # one step more, so that nobody averages; and the average
        train(lc.swap(BALL, noisy, switch=0, steps=s), x=x, data=data, steps=k)[:, -1]
        for s in (k + 1, k)
    ]
    keep = 1 - rate * h
    variance = rate**2 * (1 - keep ** (2 * k)) / (1 - keep**2)
    for end, share in zip(ends, (1, workers), strict=True):
        # Relative errors of √(2/n) = 2.2 % at most; means to 1 % of their value 2.
        bias = end[0].mean()
        assert bias == pytest.approx(2 * keep**k, abs=4 * np.sqrt(variance / n))
        expected = variance / share
        assert np.square(end - 2 * keep**k).mean() == pytest.approx(expected, rel=0.09)


def test_for_plain_sgd_it_is_local_sgd_with_syncs_at_first_and_at_the_end():
    sgd = optax.sgd(0.1)
    clock = lc.any_of(lc.before(SWITCH), lc.at_steps([STEPS - 1]))
    local = train(lc.local_sgd(sgd, period=clock))
    path = train(lc.swap(sgd, sgd, switch=SWITCH, steps=STEPS))
    np.testing.assert_allclose(path, local, rtol=0, atol=ROUNDING)


def test_a_measured_switch_is_the_same_step_for_all():
    # The mean loss falls below its level, though not on every worker.
    level = 5.0
    when = lc.reaches(-level, measure=lambda value, **_: -value)
    tx = lc.swap(optax.sgd(0.25), optax.sgd(0.25), switch=when, steps=STEPS)
    run = lc.fit(squares, tx, X[0] + 3, lambda t: OPTIMA, steps=STEPS, workers=K)
    first = int(np.argmax(run.losses.mean(1) <= level))
    assert 0 < first < STEPS - 1
    assert (run.losses[first] > level).any()
    assert (run.losses[first - 1] < level).any()
    whole, quiet = 4 * N + 4, STEPS - first - 1
    assert run.payload.tolist() == [whole] * first + [4] * quiet + [whole]


class Normed(nn.Module):
    """A batch normalization between two dense layers."""

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return nn.Dense(1)(jax.nn.relu(x))


def test_the_statistics_of_the_average_are_its_own():
    model, data = Normed(), RNG.normal(size=(STEPS, K, 16, 5)).astype(np.float32)
    data += np.arange(K, dtype=np.float32)[:, None, None]
    start = model.init(jax.random.key(0), data[0, 0], train=True)

    def loss(variables, x):
        y, new = model.apply(variables, x, train=True, mutable=["batch_stats"])
        before = variables["batch_stats"]
        return jnp.mean(jnp.square(y - 1)) + lc.track(before, new["batch_stats"])

    tx = lc.with_statistics(METHOD, when=lc.at_steps([STEPS - 1]))
    run = lc.fit(loss, tx, start, lambda t: data[t], steps=STEPS, workers=K)
    params, old = (lc.unstack(run.params)[c] for c in ("params", "batch_stats"))

    def forward(statistics, x):
        variables = {"params": params, "batch_stats": statistics}
        return model.apply(variables, x, train=True, mutable=["batch_stats"])[1][
            "batch_stats"
        ]

    batches = [data[t, i] for t in (0, 1) for i in range(K)]
    new = lc.recompute_statistics(forward, old, batches)
    layer = params["Dense_0"]
    hidden = np.stack(batches).astype(float) @ layer["kernel"] + layer["bias"]
    # Numbers of order ten and squares of them, in float32.
    found = new["BatchNorm_0"]
    np.testing.assert_allclose(found["mean"], hidden.mean((0, 1)), rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["var"], hidden.var(1).mean(0), rtol=1e-4)
    again = lc.recompute_statistics(forward, new, batches)
    jax.tree.map(np.testing.assert_array_equal, again, new)
    outputs = [
        model.apply({"params": params, "batch_stats": s}, data[0, 0], train=False)
        for s in (old, new)
    ]
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-2


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"switch": 2, "steps": 0}, "steps 0 must be at least 1"),
        ({"switch": 4, "steps": 4}, "switch 4 is not among the 4 steps"),
        ({"switch": -1, "steps": 4}, "switch -1"),
    ],
)
def test_phases_that_do_not_fit_the_run_are_refused(how, match):
    with pytest.raises(ValueError, match=match):
        lc.swap(BALL, REFINE, **how)
