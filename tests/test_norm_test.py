"""The norm test: what it measures, and how the batch grows by it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from lowcomm import (
    Trigger,
    adaptive_batch,
    change_exceeds,
    corrected,
    every,
    global_test,
    local_sgd,
    local_test,
    norm_test,
    per_sample_test,
    sample_variances,
    spread,
    traffic,
    worker_mesh,
)
from lowcomm.starts import just_after

K, N, B, PERIOD, STEPS = 4, 6, 16, 4, 17
SGD = optax.sgd(0.25)
TESTS = {"local": local_test(), "global": global_test(), "samples": per_sample_test()}
GROWS = {"local": 2.0, "global": 1.0, "samples": 0.8}  # levels with a few steps
all_tests = pytest.mark.parametrize("name", TESTS)


def loss(x, samples):
    """The mean over the samples ``[b, N]`` of ½ ‖x − c‖²."""
    return jnp.mean(jnp.sum(jnp.square(x - samples), -1)) / 2


@functools.cache
def cloud():
    """Samples of each worker around one point, ``[K, T, B, N]``."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(K, STEPS, B, N)).astype(np.float32)


def train(tx, samples, *, scale=1.0, backend="vmap"):
    """The paths ``[K, T, …]`` of the workers and of their batch sizes."""

    def worker(samples):
        objective = lambda x, c: scale * loss(x, c)

        def body(carry, now):
            (x, state), (t, c) = carry, now
            grads = jax.grad(objective)(x, c)
            more = sample_variances(objective)(c)
            moves, state = tx.update(grads, state, x, step=t, **more)
            x = x + moves
            return (x, state), (x, optax.tree.get(state, "batch_size", default=0))

        x = jnp.full(N, 2.0) + 0 * samples[0, 0]
        steps = jnp.arange(len(samples))
        return lax.scan(body, (x, tx.init(x)), (steps, samples))[1]

    mesh = worker_mesh(K) if backend == "mesh" else None
    run = jax.jit(spread(worker, mesh=mesh))
    return jax.tree.map(np.asarray, run(samples))


def adaptive(name="local", inner=SGD, **how):
    how = {"period": PERIOD, "level": 0.8, "start": B, "most": 4096} | how
    return adaptive_batch(inner, test=TESTS[name], **how)


@pytest.mark.parametrize("alike", ["workers", "samples"])
def test_without_noise_the_batch_never_grows(alike):
    if alike == "workers":
        samples = np.repeat(cloud()[:1], K, 0)
    else:
        samples = np.repeat(cloud()[:, :, :1], B, 2)
    name = {"workers": "local", "samples": "samples"}[alike]
    _, sizes = train(adaptive(name, level=1e-6), samples)
    assert (sizes == B).all()
    _, sizes = train(adaptive(name, level=1e-6), cloud())
    assert (sizes[:, -1] == 4096).all()


@all_tests
def test_at_level_infinity_it_is_local_sgd_bit_for_bit(name):
    path, sizes = train(adaptive(name, level=np.inf), cloud())
    expected, _ = train(local_sgd(SGD, period=PERIOD), cloud())
    np.testing.assert_array_equal(path, expected)
    assert (sizes == B).all()


@all_tests
def test_at_level_zero_the_first_test_after_a_sync_asks_for_the_most(name):
    for level in (1e-3, 1e-30):  # whose square is 0 in float32
        _, sizes = train(adaptive(name, level=level), cloud())
        expected = np.where(np.arange(STEPS) < PERIOD, B, 4096)
        np.testing.assert_array_equal(sizes, [expected] * K)


def test_without_a_sync_no_test_runs():
    _, sizes = train(adaptive(level=1e-6, period=STEPS), cloud())
    assert (sizes == B).all()


@pytest.mark.parametrize("backend", ["vmap", "mesh"])
@all_tests
def test_the_batch_grows_in_steps_and_is_the_same_on_all_workers(name, backend):
    how = {"level": GROWS[name], "granularity": 6, "start": 12, "most": 96}
    _, sizes = train(adaptive(name, **how), cloud(), backend=backend)
    np.testing.assert_array_equal(sizes, np.broadcast_to(sizes[:1], sizes.shape))
    assert (np.diff(sizes[0]) >= 0).all()
    assert (sizes % 6 == 0).all()
    assert sizes.max() <= 96
    changes = np.flatnonzero(np.diff(sizes[0])) + 1
    assert len(changes) > 0
    assert set(changes) <= set(range(PERIOD, STEPS, PERIOD))


@all_tests
def test_a_loss_in_other_units_asks_for_the_same_batches(name):
    level = GROWS[name]
    _, sizes = train(adaptive(name, level=level), cloud())
    slower = adaptive(name, level=level, inner=optax.sgd(0.25 / 8))
    _, scaled = train(slower, cloud(), scale=8.0)
    np.testing.assert_array_equal(scaled, sizes)
    assert sizes.max() > B


def test_the_global_test_is_the_local_one_at_the_root_of_k_times_the_level():
    for level in (0.5, 1.0, 1.5, 3.0):
        _, of_all = train(adaptive("global", level=level), cloud())
        _, local = train(adaptive("local", level=level * np.sqrt(K)), cloud())
        np.testing.assert_array_equal(of_all, local)


def measured(test, grads, batch_size=B, **extra):
    """What a test makes of stacked trials ``[K, trials, d]``, ``[trials]`` each."""

    def worker(grads):
        one = lambda g: test(
            g, batch_size=batch_size, params=g, axis="workers", **extra
        )
        return jax.vmap(one)(grads)

    found = jax.jit(spread(worker))(grads)
    return jax.tree.map(lambda x: np.asarray(x[0], np.float64), found)


@functools.cache
def trials(workers=8, size=200, count=500):
    """Gradients of B samples whose covariance is the identity, around zero."""
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(workers, count, size)) / np.sqrt(B)
    return noise.astype(np.float32)


def test_the_scatter_of_workers_is_their_squares_without_the_mean_s():
    grads = trials(count=20).astype(np.float64)
    squares = (grads**2).sum((0, 2)) - 8 * (grads.mean(0) ** 2).sum(-1)
    # Sums of 1600 float32 squares of one sign: rounding grows like a random walk.
    found = measured(local_test(), trials(count=20))
    np.testing.assert_allclose(found.noise, B * squares / 7, rtol=1e-5)
    np.testing.assert_allclose(found.signal, (grads.mean(0) ** 2).sum(-1), rtol=1e-5)


def test_the_variance_is_unbiased_and_the_signal_inflated_as_predicted():
    d, workers = 200, 8
    found = measured(local_test(), trials())
    # χ² with 1400 and 200 degrees: 3.8 % and 10 % a trial, a 22nd of it in the mean.
    np.testing.assert_allclose(found.noise.mean(), d, rtol=4 * 0.038 / 22)
    inflated = d / (B * workers)  # 1.5625, of a true gradient of zero
    np.testing.assert_allclose(found.signal.mean(), inflated, rtol=4 * 0.1 / 22)
    np.testing.assert_allclose(found.inflation.mean(), inflated, rtol=4 * 0.038 / 22)
    rest = measured(corrected(local_test()), trials() + np.float32(0.25))
    np.testing.assert_allclose(rest.signal.mean(), d * 0.25**2, rtol=0.01)
    near = measured(corrected(local_test()), trials())
    assert (near.signal >= 0).all()
    assert (near.signal == 0).mean() > 0.3
    np.testing.assert_array_equal(near.noise, found.noise)


@pytest.mark.parametrize(
    ("test", "factor"), [(local_test(), 8), (global_test(), 1), (per_sample_test(), 1)]
)
def test_near_an_optimum_the_batch_grows_by_the_predicted_factor(test, factor):
    # b_new / b = noise / (θ² b signal); the mean of 1/χ²_d is 1/(d − 2), and of the
    # mean of eight such, which the test on samples takes, 1/(8 d − 2).
    d, extra = 200, {}
    if factor == 1 and test is not TESTS["global"]:
        extra = {"sample_variance": lambda params: jnp.float32(d)}
    found = measured(test, trials(), **extra)
    growth = (found.noise / (B * found.signal)).mean()
    assert growth == pytest.approx(factor * d / (d - 2), rel=4 * 0.11 / 22)


@pytest.mark.parametrize(
    ("test", "critical"), [(local_test(), np.sqrt(8)), (global_test(), 1.0)]
)
def test_below_the_critical_level_the_batch_explodes_and_above_it_stays(test, critical):
    noise = np.sqrt(B) * trials(count=12)

    def final(level):
        tx = norm_test(test, when=every(1), level=level, start=B, most=2**16)

        def worker(noise):
            def body(state, now):
                t, z = now
                grads = z / jnp.sqrt(state.batch_size.astype(jnp.float32))
                return tx.update(grads, state, step=t)[1], state.batch_size

            return lax.scan(body, tx.init(noise), (jnp.arange(12), noise))[1]

        return np.asarray(jax.jit(spread(worker))(noise))[0]

    # A test multiplies by 1/0.64 below, and by 1/1.44 above, off by 11 %.
    below, above = final(0.8 * critical), final(1.2 * critical)
    assert below[-1] > B * 0.64**-8
    assert (above == B).all()


def test_sample_variances_are_those_of_numpy_for_any_tree():
    samples = cloud()[0, 0]
    tree = lambda x, c: jnp.mean(x["s"] * jnp.sum(jnp.square(x["w"] - c), -1)) / 2
    params = {"w": jnp.full(N, 0.5), "s": jnp.float32(3.0)}
    found = sample_variances(tree)(jnp.asarray(samples))["sample_variance"](params)
    off = 0.5 - samples.astype(np.float64)
    grads = np.concatenate([3 * off, (off**2).sum(-1, keepdims=True) / 2], axis=1)
    np.testing.assert_allclose(found, grads.var(0, ddof=1).sum(), rtol=1e-5)


def update(tx, grads, **extra):
    worker = lambda g: tx.update(g, tx.init(g), step=0, **extra)
    return spread(worker)(grads)


def test_a_loop_that_drew_another_number_says_so():
    tx = norm_test(local_test(), when=every(1), level=1.0, start=4, most=64)
    grads = jnp.array([1.0, 3.0])  # σ̂² is b times 2, ‖ḡ‖² is 4
    assert update(tx, grads)[1].batch_size.tolist() == [4, 4]
    assert update(tx, grads, batch_size=32)[1].batch_size.tolist() == [16, 16]


def test_gradients_pass_and_what_is_not_a_number_grows_nothing():
    tx = norm_test(local_test(), when=every(1), level=1.0, start=4, most=64)
    for value, size in ((jnp.nan, 4), (jnp.inf, 4), (-1.0, 64)):
        grads = {"x": jnp.array([1.0, value]), "n": jnp.arange(2), "none": None}
        passed, state = update(tx, grads)
        np.testing.assert_array_equal(passed["x"], grads["x"])
        np.testing.assert_array_equal(passed["n"], grads["n"])
        assert state.batch_size.tolist() == [size, size]


def test_one_worker_alone_measures_no_noise():
    tx = norm_test(local_test(), when=every(1), level=0.1, start=4, most=64)
    assert update(tx, jnp.ones((1, 3)))[1].batch_size.tolist() == [4]


def test_the_first_step_after_a_sync_is_the_one_that_tests():
    when = just_after(PERIOD)
    assert [t for t in range(13) if when.fire((), step=t)[0]] == [4, 8, 12]
    traced = jax.jit(lambda t: when.fire((), step=t)[0])
    assert [t for t in range(13) if traced(t)] == [4, 8, 12]
    # At step 0 no sync came before, whatever a clock may say of step −1.
    low = Trigger(lambda params: (), lambda s, *, step, **_: (step < 2, s), gap=1)
    early = just_after(low)
    asked = jax.jit(lambda t: early.fire((), step=t)[0])
    assert [t for t in range(6) if early.fire((), step=t)[0]] == [1, 2]
    assert [t for t in range(6) if asked(t)] == [1, 2]
    each = just_after(1)
    assert [t for t in range(4) if each.fire((), step=t)[0]] == [1, 2, 3]


@pytest.mark.parametrize(("name", "sent"), [("local", 4 * N + 4), ("samples", 8)])
def test_a_test_sends_a_gradient_and_a_scalar_or_two_scalars(name, sent):
    tx = norm_test(TESTS[name], when=every(1), level=1.0, start=4, most=64)
    variance = lambda params: jnp.float32(1)
    step = lambda g: tx.update(g, tx.init(g), step=0, sample_variance=variance)
    assert traffic(step, np.ones(N, np.float32), workers=K).bytes_always == sent


def test_the_sample_test_misses_its_argument_by_name():
    tx = norm_test(per_sample_test(), when=every(1), level=1.0, start=4, most=64)
    with pytest.raises(ValueError, match=r"sample_variance=f.*sample_variances\(loss"):
        update(tx, jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="one sample has no variance"):
        sample_variances(loss)(jnp.ones((1, N)))["sample_variance"](jnp.ones(N))


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"level": 0.0}, "level 0.0 must be positive"),
        ({"level": np.nan}, "level nan must be positive"),
        ({"start": 0}, "start 0 must be a whole number"),
        ({"granularity": 0}, "granularity 0 must be"),
        ({"start": 15, "granularity": 2}, "start 15 must be a multiple"),
        ({"most": 99, "granularity": 2}, "most 99 must be a multiple"),
        ({"most": 8}, "most 8 must be between start, 16, and 2"),
        ({"most": 2**25}, "must be between"),
        ({"period": change_exceeds(0.3)}, "only a clock says beforehand"),
    ],
)
def test_settings_of_the_norm_test_that_make_no_sense_are_refused(how, match):
    with pytest.raises(ValueError, match=match):
        adaptive(**how)
