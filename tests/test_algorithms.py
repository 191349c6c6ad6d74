"""The published methods against independent numpy loops, and the laws they obey."""

import numpy as np
import optax
import pytest

from lowcomm import (
    average,
    consensus,
    data_parallel,
    diloco,
    dpsgd,
    local_sgd,
    mixing_matrix,
    post_local_sgd,
    powersgd_sgd,
    ring,
    selsync,
    sign_sgd,
    slowmo,
    spread,
    top_k_sgd,
)
from tests.quadratics import walk

K, SHAPE, STEPS, PERIOD = 4, (4, 3), 6, 2
RATE, MU = 0.1, 0.9
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=SHAPE), (K, 1, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(K, *SHAPE)).astype(np.float32)
CURVATURES = RNG.uniform(0.5, 2.0, size=(K, *SHAPE)).astype(np.float32)
BALL = optax.sgd(RATE, momentum=MU)


def train(tx, steps=STEPS, *, x=X, data=(CURVATURES, OPTIMA), **how):
    """The paths ``[K, steps, …]`` of virtual workers and of their states."""
    return walk(tx, x, data, steps=steps, **how)


class Numpy:
    """Heavy-ball momentum and what all workers hold, in double precision."""

    def __init__(self):
        self.x, self.m = X.astype(float), np.zeros_like(X, float)

    def gradients(self):
        return CURVATURES.astype(float) * (self.x - OPTIMA)

    def moves(self, g):
        self.m = MU * self.m + g
        return -RATE * self.m

    def path(self, step):
        path = []
        for t in range(STEPS):
            step(t)
            path.append(self.x)
        return np.stack(path, 1)


def everywhere(mean):
    return np.broadcast_to(mean, X.shape)


def numpy_data_parallel():
    w = Numpy()

    def step(t):
        w.x = w.x + w.moves(everywhere(w.gradients().mean(0)))

    return w.path(step)


def numpy_with_error_feedback(compress):
    w, errors = Numpy(), [np.zeros(SHAPE)] * K

    def step(t):
        wanted = [e + g for e, g in zip(errors, w.gradients(), strict=True)]
        said = [compress(p) for p in wanted]
        errors[:] = [p - c for p, c in zip(wanted, said, strict=True)]
        w.x = w.x + w.moves(everywhere(np.mean(said, 0)))

    return w.path(step)


def numpy_top(p, k=3):
    kept = np.argsort(-abs(p).ravel(), kind="stable")[:k]
    return np.where(np.isin(np.arange(p.size), kept).reshape(SHAPE), p, 0)


def numpy_sign(p):
    return abs(p).mean() * np.where(p >= 0, 1, -1)


def numpy_powersgd():
    query = np.asarray(
        powersgd_sgd(BALL, rank=1, min_compression=1.0).init(X[0])[0].query, float
    )
    w, errors, q = Numpy(), np.zeros(X.shape), [query]

    def step(t):
        d = w.gradients() + errors
        p, _ = np.linalg.qr(d.mean(0) @ q[0])
        factors = np.stack([m.T @ p for m in d])
        q[0] = factors.mean(0)
        errors[:] = d - np.stack([p @ f.T for f in factors])
        w.x = w.x + w.moves(everywhere(p @ q[0].T))

    return w.path(step)


def numpy_local(agree, fires=lambda t: (t + 1) % PERIOD == 0):
    w = Numpy()

    def step(t):
        w.x = w.x + w.moves(w.gradients())
        if fires(t):
            w.x = agree(w.x)

    return w.path(step)


def numpy_mean(x):
    return everywhere(x.mean(0))


def numpy_diloco():
    anchor, v = [X[0].astype(float)], [np.zeros(SHAPE)]

    def agree(x):
        delta = anchor[0] - x.mean(0)
        v[0] = 0.9 * v[0] + delta
        anchor[0] = anchor[0] - 0.7 * (delta + 0.9 * v[0])
        return everywhere(anchor[0])

    return numpy_local(agree)


def numpy_slowmo():
    anchor, u = [X[0].astype(float)], [np.zeros(SHAPE)]

    def agree(x):
        u[0] = 0.6 * u[0] + (anchor[0] - x.mean(0)) / RATE
        anchor[0] = anchor[0] - 0.8 * RATE * u[0]
        return everywhere(anchor[0])

    return numpy_local(agree)


def numpy_selsync(threshold=0.3, window=2, q=0.7):
    w, norms, before = Numpy(), [], []
    smooth = lambda n: np.average(n, axis=0, weights=[q**k for k in range(len(n))])

    def step(t):
        g = w.gradients()
        norms.insert(0, np.sqrt((g**2).sum((1, 2))))
        w.x = w.x + w.moves(g)
        now = smooth(norms[:window])
        change = abs(now - before[-1]) / before[-1] if before else np.zeros(K)
        if t < window or (change >= threshold).any():
            w.x = numpy_mean(w.x)
            numpy_selsync.fired.append(t)
        before.append(now)

    numpy_selsync.fired = []
    return w.path(step)


def numpy_dpsgd():
    mix = mixing_matrix(ring(K))
    assert mix[0].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    return numpy_local(lambda x: np.einsum("ij,j...->i...", mix, x), lambda t: True)


# Name -> (the method, the same in numpy).
ORACLES = {
    "data_parallel": (data_parallel(BALL), numpy_data_parallel),
    "local_sgd": (local_sgd(BALL, period=PERIOD), lambda: numpy_local(numpy_mean)),
    "post_local_sgd": (
        post_local_sgd(BALL, warmup=3, period=PERIOD),
        lambda: numpy_local(numpy_mean, lambda t: t < 3 or t % 2 == 1),
    ),
    "diloco": (diloco(BALL, period=PERIOD), numpy_diloco),
    "slowmo": (
        slowmo(
            BALL,
            period=PERIOD,
            learning_rate=RATE,
            momentum=0.6,
            slow_learning_rate=0.8,
        ),
        numpy_slowmo,
    ),
    "selsync": (selsync(BALL, threshold=0.3, window=2, smoothing=0.3), numpy_selsync),
    "top_k_sgd": (
        top_k_sgd(BALL, fraction=0.25),
        lambda: numpy_with_error_feedback(numpy_top),
    ),
    "sign_sgd": (sign_sgd(BALL), lambda: numpy_with_error_feedback(numpy_sign)),
    "powersgd_sgd": (
        powersgd_sgd(BALL, rank=1, min_compression=1.0),
        numpy_powersgd,
    ),
    "dpsgd": (dpsgd(BALL, ring(K)), numpy_dpsgd),
}


@pytest.mark.parametrize("name", ORACLES)
def test_a_method_is_its_equations_in_numpy(name):
    tx, oracle = ORACLES[name]
    path, _ = train(tx)
    expected = oracle()
    assert np.abs(expected[:, -1] - X).max() > 0.1
    np.testing.assert_allclose(path, expected, rtol=0, atol=2e-5)
    if name == "selsync":  # it must have both spoken and been silent after warm-up
        assert 2 < len(numpy_selsync.fired) < STEPS


def test_momentum_buffers_stay_local_in_local_sgd_and_are_averaged_on_request():
    def buffers(moments):
        _, state = train(local_sgd(BALL, period=PERIOD, moments=moments), PERIOD)
        return state.inner[0].trace[:, -1]

    kept = buffers("keep")
    assert np.ptp(kept, axis=0).max() > 0.1
    np.testing.assert_allclose(buffers("average"), everywhere(kept.mean(0)), atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_reset_buffers_at_each_step_are_plain_sgd_at_a_fixed_factor(nesterov):
    inner = optax.sgd(RATE, momentum=MU, nesterov=nesterov)
    path, _ = train(average(inner, moments="reset"))
    factor = 1 + MU if nesterov else 1
    np.testing.assert_allclose(
        path, train(data_parallel(optax.sgd(RATE * factor)))[0], atol=1e-6
    )
    for moments in ("keep", "average"):
        path, _ = train(average(inner, moments=moments))
        np.testing.assert_allclose(path, train(data_parallel(inner))[0], atol=2e-6)


def test_post_local_sgd_lies_between_synchronous_and_local():
    path = lambda tx: train(tx, 4)[0]
    post = lambda warmup: path(post_local_sgd(BALL, warmup=warmup, period=PERIOD))
    local = path(local_sgd(BALL, period=PERIOD))
    np.testing.assert_array_equal(post(0), local)
    for warmup in (4, 99):
        np.testing.assert_array_equal(post(warmup), path(local_sgd(BALL, period=1)))
    assert np.abs(post(4) - local).max() > 1e-3


@pytest.mark.parametrize("nesterov", [False, True])
def test_selsync_at_threshold_zero_is_synchronous_for_sgd(nesterov):
    inner = optax.sgd(RATE, momentum=MU, nesterov=nesterov)
    path, state = train(selsync(inner, threshold=0.0, window=2, warmup=0))
    np.testing.assert_allclose(path, train(data_parallel(inner))[0], atol=2e-6)
    assert (state.since == 0).all()


def test_selsync_at_threshold_zero_is_not_synchronous_for_adam():
    adam = optax.adam(RATE)
    path, _ = train(selsync(adam, threshold=0.0, window=2))
    assert np.abs(path - train(data_parallel(adam))[0]).max() > 1e-2


def test_selsync_at_threshold_infinity_syncs_in_the_warm_up_alone():
    for how, warm in (({}, 3), ({"warmup": 0}, 0), ({"warmup": 1}, 1)):
        _, state = train(selsync(BALL, threshold=np.inf, window=3, **how))
        expected = [max(0, t + 1 - warm) for t in range(STEPS)]
        assert state.since.tolist() == [expected] * K


def test_the_consensus_of_dpsgd_is_the_mean_of_the_workers():
    path, _ = train(dpsgd(BALL, ring(K)))
    tx = dpsgd(BALL, ring(K))
    out = spread(lambda x: consensus(tx.init(x), x))(path[:, -1])
    np.testing.assert_allclose(out, everywhere(path[:, -1].mean(0)), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: local_sgd(BALL, period=0), "period 0"),
        (lambda: local_sgd(BALL, period=2, moments="drop"), "moments 'drop'"),
        (lambda: post_local_sgd(BALL, warmup=-1, period=2), "warmup -1 is negative"),
        (lambda: diloco(BALL, period=-3), "period -3"),
        (lambda: slowmo(BALL, period=0, learning_rate=RATE), "period 0"),
        (lambda: selsync(BALL, threshold=-1.0), "threshold -1.0 must be 0 or more"),
        (lambda: selsync(BALL, threshold=np.nan), "threshold nan"),
        (lambda: selsync(BALL, threshold=1.0, window=0), "window 0 is below 1"),
        (lambda: selsync(BALL, threshold=1.0, smoothing=1.0), "smoothing 1.0"),
        (lambda: top_k_sgd(BALL, fraction=0.0), "fraction"),
        (lambda: top_k_sgd(BALL, fraction=1.5), "fraction"),
        (lambda: powersgd_sgd(BALL, rank=0), "rank 0 is below 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_the_factory(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_a_graph_of_another_size_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"3 nodes and axis 'workers' has 4 workers"):
        train(dpsgd(BALL, ring(3)))
