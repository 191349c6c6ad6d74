"""Micro-batches, and a loop that draws the batch the state asks for."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.growing_batches import asked_for, buckets, endless, train
from lowcomm import (
    adaptive_batch,
    fit,
    local_sgd,
    microbatched,
    per_sample_test,
    sample_variances,
    worker_mesh,
)

K, N, PERIOD, MICRO = 8, 4, 2, 4
SGD = optax.sgd(0.5)


def loss(x, samples):
    """The mean over the samples of ½ ‖x − c‖²."""
    return jnp.mean(jnp.sum(jnp.square(x - samples), -1)) / 2


@pytest.mark.parametrize("count", [1, 2, 8])
def test_micro_batches_have_the_gradient_of_the_whole(count):
    # Integers, and powers of two of them: every sum and mean is exact.
    batch = np.random.default_rng(0).integers(-8, 8, size=(16, N)).astype(np.float32)
    x = jnp.arange(float(N))
    value, gradient = jax.value_and_grad(loss)(x, batch)
    parts = batch.reshape(count, -1, N)
    found, accumulated = jax.jit(jax.value_and_grad(microbatched(loss)))(x, parts)
    np.testing.assert_array_equal(accumulated, gradient)
    np.testing.assert_array_equal(found, value)


def test_what_the_loss_returns_besides_comes_stacked():
    whole = lambda x, c: (loss(x, c), {"seen": c[0], "size": len(c)})
    batch = np.arange(32.0, dtype=np.float32).reshape(4, 2, N)
    (_, aux), gradient = jax.value_and_grad(
        microbatched(whole, has_aux=True), has_aux=True
    )(jnp.zeros(N), batch)
    np.testing.assert_array_equal(aux["seen"], batch[:, 0])
    np.testing.assert_array_equal(aux["size"], [2, 2, 2, 2])
    np.testing.assert_array_equal(gradient, -batch.mean((0, 1)))


def test_half_precision_gradients_are_summed_in_float32():
    # 512 times 1/512: in bfloat16 the sum would stop at 1/2, whose ulp is 1/256.
    x = jnp.zeros((), jnp.bfloat16)
    gradient = jax.grad(microbatched(lambda x, c: x * c))(x, jnp.ones(512))
    assert gradient.dtype == jnp.bfloat16
    assert gradient == 1


def test_more_micro_batches_take_no_more_memory():
    def wide(x, c):
        return jnp.mean(jnp.square(jnp.tanh(c @ x) @ x.T - c))

    def temporary(count):
        step = jax.jit(jax.grad(microbatched(wide)))
        args = jnp.zeros((64, 512)), jnp.zeros((count, 128, 64))
        return step.lower(*args).compile().memory_analysis().temp_size_in_bytes

    activations = 4 * 128 * 512
    assert activations < temporary(4)
    assert temporary(32) - temporary(4) < activations / 8


def test_integers_in_the_parameters_stay_out_of_it():
    params = {"x": jnp.zeros(N), "n": jnp.arange(3)}
    whole = lambda p, c: loss(p["x"], c) + 0 * p["n"].sum()
    tx, batch = local_sgd(SGD, period=2), np.ones((2, 3, 2, N), np.float32)
    for mesh in (None, worker_mesh(2)):
        run = fit(
            microbatched(whole),
            tx,
            params,
            lambda t: batch,
            steps=2,
            workers=2,
            mesh=mesh,
        )
        np.testing.assert_array_equal(run.params["x"], np.full((2, N), 0.75))
        np.testing.assert_array_equal(run.params["n"], [[0, 1, 2]] * 2)


@functools.cache
def cloud():
    """As many samples of each worker as any run here takes, around zero."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(K, 4096, N)).astype(np.float32)


def grow(*, steps=12, start=None, mesh=None, samples=None, objective=loss, **how):
    how = {"period": PERIOD, "level": 0.8, "start": MICRO, "most": 256} | how
    more = {}
    if "test" in how:
        more["extra_args"] = sample_variances(loss)
    return train(
        objective,
        adaptive_batch(SGD, **how),
        jnp.zeros(N) if start is None else start,
        samples or (lambda first, size: cloud()[:, first : first + size]),
        micro_batch=MICRO,
        steps=steps,
        workers=K,
        mesh=mesh,
        **more,
    )


def test_the_batch_explodes_below_the_critical_level_and_climbs_slowly_above():
    # Each test multiplies by about 8 / level² where the gradient is all noise.
    below, above = grow(level=0.8), grow(level=3.2)
    assert below.asked[-1] == 256
    assert above.asked[-1] < 64
    for run in (below, above):
        assert (np.diff(run.asked) >= 0).all()
        changes = np.flatnonzero(np.diff(run.asked)) + 1
        assert (changes % PERIOD == 1).all()  # seen by the step after the test's


def test_the_trace_samples_and_bytes_add_up():
    run = grow(level=1.0, start=jnp.full(N, 2.0))
    assert (run.drawn >= run.asked).all()
    assert (run.drawn < np.maximum(2 * run.asked, MICRO + 1)).all()
    assert set(run.drawn / MICRO) <= {2.0**k for k in range(7)}
    assert run.samples == K * run.drawn.sum()
    # A sync after every second step, and a gradient and a scalar after each of them.
    each = [4 * N * (t % 2 == 1) + (4 * N + 4) * (t % 2 == 0 < t) for t in range(12)]
    assert run.payload.tolist() == each
    assert run.bytes == sum(each)
    assert run.losses.shape == (12, K)


def test_one_program_is_compiled_for_each_kind_of_step_and_bucket():
    def traces(steps):
        """How often the loss is traced in so many steps, and the run."""
        traced = []

        def counted(x, samples):
            traced.append(samples.shape)
            return loss(x, samples)

        run = grow(steps=steps, level=1.5, objective=counted)
        assert set(traced) == {(MICRO, N)}
        return len(traced), run

    one, _ = traces(1)
    many, run = traces(16)
    kind = lambda t: (t > 0) + t % 2  # silent, tests, syncs
    programs = {(kind(t), size) for t, size in enumerate(run.drawn)}
    assert len(programs) < len({(kind(t), size) for t, size in enumerate(run.asked)})
    assert many <= one * len(programs)


def test_at_level_infinity_it_is_a_loop_of_local_sgd():
    run = grow(level=np.inf)
    batches = lambda t: cloud()[:, MICRO * t : MICRO * (t + 1)]
    plain = fit(
        loss, local_sgd(SGD, period=PERIOD), jnp.zeros(N), batches, steps=12, workers=K
    )
    np.testing.assert_array_equal(run.params, plain.params)
    np.testing.assert_array_equal(run.losses, plain.losses)
    assert run.drawn.tolist() == [MICRO] * 12


def test_single_samples_are_tested_as_one_batch_on_devices_too():
    virtual = grow(test=per_sample_test(), level=0.7, steps=6)
    devices = grow(test=per_sample_test(), level=0.7, steps=6, mesh=worker_mesh(K))
    assert virtual.asked[-1] > MICRO
    np.testing.assert_array_equal(devices.asked, virtual.asked)
    # Two rounds of means of eight: a rounding each of numbers around one.
    np.testing.assert_allclose(devices.params, virtual.params, atol=1e-6)


def test_buckets_are_the_next_power_of_two():
    sizes = np.arange(1, 70)
    found = np.array([buckets(int(size), 4) for size in sizes])
    assert set(found) == {1, 2, 4, 8, 16, 32}
    assert (4 * found >= sizes).all()
    assert (found[sizes > 4] * 2 < sizes[sizes > 4]).all()


def test_an_endless_row_does_not_depend_on_how_it_is_cut():
    rows = np.arange(21).reshape(3, 7)
    whole = endless(rows, seed=4)(0, 40)
    cuts = [0, 1, 6, 7, 20, 40]
    fresh = [endless(rows, seed=4)(a, b - a) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(fresh, axis=1), whole)
    epochs = np.sort(whole[:, :35].reshape(3, 5, 7), axis=-1)
    np.testing.assert_array_equal(epochs, np.repeat(rows[:, None], 5, 1))
    assert (whole[:, :7] != whole[:, 7:14]).any()


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match=r"must be \[8, 4, ...\]: so many were asked"):
        grow(samples=lambda first, size: cloud()[:, : size + 1])
    with pytest.raises(ValueError, match="holds no batch_size: use adaptive_batch"):
        asked_for(local_sgd(SGD, period=2).init(jnp.zeros(N)))
    with pytest.raises(ValueError, match="micro_batch 0"):
        train(
            loss, SGD, jnp.zeros(N), lambda *_: None, micro_batch=0, steps=1, workers=K
        )
