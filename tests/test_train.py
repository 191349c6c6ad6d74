"""From a loss and a transformation to a training loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from lowcomm import (
    data_parallel,
    diloco,
    dpsgd,
    error_feedback,
    fit,
    local_sgd,
    local_step,
    mean,
    one_peer_exponential,
    post_local_sgd,
    rounds,
    selsync,
    spread,
    stack,
    top_k,
    top_k_sgd,
    worker_mesh,
)
from lowcomm.spmd import AXIS
from lowcomm.triggers import every
from tests.quadratics import squares

K, N = 4, 3
RNG = np.random.default_rng(0)
OPTIMA = RNG.integers(-8, 8, size=(K, N)).astype(np.float32)
START = jnp.arange(float(N))
SGD = optax.sgd(0.5)


def train(tx, steps=8, *, loss=squares, params=START, batches=lambda t: OPTIMA, **how):
    return fit(loss, tx, params, batches, steps=steps, workers=K, **how)


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def recorder(*names):
    """An inner transformation that keeps the extra arguments of these names."""

    def update(updates, state, params=None, **extra):
        return updates, {name: jnp.asarray(extra[name], jnp.float32) for name in names}

    init = lambda params: {name: jnp.float32(-1) for name in names}
    return optax.GradientTransformationExtraArgs(init, update)


def test_a_local_step_is_gradient_update_and_sum():
    tx = local_sgd(SGD, period=2)
    step = spread(local_step(squares, tx), in_axes=(0, 0, 0, None))
    x, state = stack(START, K), spread(tx.init)(stack(START, K))
    for t in range(2):
        x, state, metrics = step(x, state, OPTIMA, t)
    halfway = (START + OPTIMA) / 2
    expected = ((halfway + OPTIMA) / 2).mean(0)
    np.testing.assert_allclose(x, np.tile(expected, (K, 1)), atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], [*map(squares, halfway, OPTIMA)])
    assert set(metrics) == {"loss"}


def test_the_loss_may_carry_something_and_is_handed_on_as_value():
    loss = lambda x, c: (squares(x, c), {"first": x[0], "pair": (c, 1)})
    tx = local_sgd(optax.chain(recorder("value", "step"), SGD), period=2)
    step = spread(local_step(loss, tx, has_aux=True), in_axes=(0, 0, 0, None))
    x = stack(START, K)
    _, state, metrics = step(x, spread(tx.init)(x), OPTIMA, 5)
    equal(metrics["aux"]["first"], np.zeros(K))
    equal(metrics["aux"]["pair"], (OPTIMA, np.ones(K)))
    equal(state.inner[0]["value"], metrics["loss"])
    equal(state.inner[0]["step"], np.full(K, 5.0))


@pytest.mark.parametrize("check", [True, False])
def test_gradients_of_replicated_parameters_stay_local(check):
    # Worker i's loss has slope 2^i. JAX would hand all of them the sum, 15.
    slopes = 2.0 ** np.arange(K)
    tx = optax.chain(optax.sgd(1.0))

    def worker(params, slope):
        step = local_step(lambda x, s: x * s, tx)
        return step(params, tx.init(params), slope[0], 0)[0][None]

    call = jax.shard_map(
        worker,
        mesh=worker_mesh(K),
        in_specs=(P(), P(AXIS)),
        out_specs=P(AXIS),
        check_vma=check,
    )
    equal(call(jnp.float32(0), slopes), -slopes)


@pytest.mark.parametrize(
    "tx", [optax.chain(mean(), SGD), local_sgd(SGD, period=2), top_k_sgd(SGD)]
)
def test_gradients_that_jax_summed_are_refused(tx):
    def worker(params, slope):
        grads = jax.grad(lambda x: x * slope[0])(params)
        return tx.update(grads, tx.init(params), params, step=0)[0][None]

    mesh = worker_mesh(K)
    how = {"mesh": mesh, "in_specs": (P(), P(AXIS)), "out_specs": P(AXIS)}
    with pytest.raises(ValueError, match=r"already summed them.*spmd.vary"):
        jax.shard_map(worker, **how)(jnp.float32(0), np.ones(K, np.float32))


def once_a(period, steps, sent, *, warmup=0):
    fires = [t < warmup or (t + 1) % period == 0 for t in range(steps)]
    return [sent * fired for fired in fires]


# Name -> (method, programs, payload a step).
RUNS = {
    "data_parallel": (data_parallel(SGD), 1, [4 * N] * 8),
    "local_sgd": (local_sgd(SGD, period=3), 2, once_a(3, 8, 4 * N)),
    "post_local": (
        post_local_sgd(SGD, warmup=3, period=4),
        2,
        once_a(4, 8, 4 * N, warmup=3),
    ),
    "diloco": (diloco(SGD, period=4), 2, once_a(4, 8, 4 * N)),
    "one_peer": (dpsgd(SGD, one_peer_exponential(K)), 1, [4 * N + 4] * 8),
    # Two of four entries, float32, and their places in a byte.
    "top_k": (top_k_sgd(SGD, fraction=0.5), 1, [2 * 4 + 1] * 8),
}


@pytest.mark.parametrize("name", RUNS)
def test_one_program_for_each_kind_of_step_and_the_payload_of_the_schedule(name):
    tx, kinds, payload = RUNS[name]
    run = train(tx)
    assert run.payload.tolist() == payload
    assert (run.bytes, type(run.bytes)) == (sum(payload), int)
    assert len(run.programs) == kinds
    assert sum(program.steps for program in run.programs) == 8
    sent = [p.traffic.bytes(p.ran) for p in run.programs]
    assert sum(sent) == sum(payload)
    for program in run.programs:
        if name != "one_peer":  # which round of the graph it is, its state knows
            assert not any(row.guard for row in program.traffic.rows)
    assert run.losses.shape == (8, K)


def test_a_delay_asks_about_the_past_and_makes_no_more_programs_than_kinds():
    tx = rounds(SGD, optax.sgd(1.0), when=every(4), delay=1)
    run = train(tx, 12)
    assert run.payload.tolist() == once_a(4, 12, 4 * N)
    assert len(run.programs) == 3  # silent, sending, adopting
    assert [p.steps for p in run.programs] == [7, 3, 2]


def test_measured_triggers_are_counted_by_what_happened():
    tx = selsync(SGD, threshold=0.9, window=2, smoothing=0.0)
    still = lambda t: OPTIMA if t < 6 else 64 + OPTIMA  # the gradient jumps at step 6
    run = train(tx, batches=still)
    warm, silent, synced = 4 * N, 4, 4 + 4 * N  # warm steps need not ask
    assert run.payload.tolist() == [warm] * 2 + [silent] * 4 + [synced, silent]
    assert len(run.programs) <= 2


def test_a_run_goes_on_from_where_it_was():
    momentum = optax.sgd(0.5, momentum=0.5)
    rng = np.random.default_rng(1)
    data = rng.integers(-8, 8, size=(9, K, N)).astype(np.float32)
    feed = lambda t: data[t]
    for tx in (diloco(momentum, period=4), top_k_sgd(momentum, fraction=0.5)):
        whole = train(tx, 9, batches=feed)
        for first in (3, 4):
            part = train(tx, first, batches=feed)
            saved = jax.tree.map(np.array, (part.params, part.state))
            rest = fit(
                squares,
                tx,
                jax.tree.map(jnp.asarray, saved[0]),
                feed,
                state=jax.tree.map(jnp.asarray, saved[1]),
                start=first,
                steps=9 - first,
                workers=K,
            )
            equal((rest.params, rest.state), (whole.params, whole.state))
            equal(np.concatenate([part.losses, rest.losses]), whole.losses)
            equal(np.concatenate([part.payload, rest.payload]), whole.payload)


def test_the_losses_and_numbers_are_those_of_a_plain_loop():
    run = train(data_parallel(SGD), 6)
    x = np.asarray(START)
    for t in range(6):
        np.testing.assert_allclose(run.losses[t], [squares(x, c) for c in OPTIMA], 1e-6)
        x = x - 0.5 * (x - OPTIMA.mean(0))
    np.testing.assert_allclose(run.params, np.tile(x, (K, 1)), atol=1e-6)


def test_a_loss_that_is_not_finite_names_step_and_worker():
    def feed(t):
        bad = OPTIMA.copy()
        bad[2 if t == 3 else [], 0] = np.nan
        return bad

    with pytest.raises(FloatingPointError, match=r"nan at step 3 on worker 2:"):
        train(local_sgd(SGD, period=8), batches=feed)
    everywhere = lambda t: OPTIMA + np.float32(np.inf)
    with pytest.raises(FloatingPointError, match=r"step 5 on worker 0 and 3 more"):
        train(local_sgd(SGD, period=8), batches=everywhere, start=5)


def test_a_batch_for_another_number_of_workers_names_leaf_and_numbers():
    loss = lambda x, batch: squares(x, batch["x"])
    with pytest.raises(ValueError, match=r"batch\['x'\] has shape \(3, 3\).*4 workers"):
        train(data_parallel(SGD), loss=loss, batches=lambda t: {"x": OPTIMA[:3]})
    with pytest.raises(ValueError, match=r"batch has shape \(\).*4 workers"):
        train(data_parallel(SGD), batches=lambda t: 1.0)


def test_batches_may_be_an_iterable_that_is_long_enough():
    tx = data_parallel(SGD)
    data = [OPTIMA + t for t in range(4)]
    run = train(tx, 4, batches=iter(data))
    equal(run.params, train(tx, 4, batches=lambda t: data[t]).params)
    with pytest.raises(ValueError, match="batches ended before step 4"):
        train(tx, 5, batches=data)


def test_on_step_sees_every_step():
    seen, kept = [], []

    def look(t, params, state, metrics):
        loss, since = np.array(metrics["loss"]), int(state.since[0])
        seen.append((t, np.array(params), since, loss))
        kept.append(params)

    run = train(local_sgd(SGD, period=3), 5, on_step=look, start=2)
    assert [t for t, *_ in seen] == [2, 3, 4, 5, 6]
    assert [since for _, _, since, _ in seen] == [0, 1, 2, 0, 1]
    equal(seen[-1][1], run.params)
    equal(np.stack([loss for *_, loss in seen]), run.losses)
    # The arrays of a step are donated to the next one: what is to be kept is copied.
    assert [params.is_deleted() for params in kept] == [True] * 4 + [False]


def test_all_backends_train_alike():
    # Integers, rates that are powers of two and four workers: all sums are exact.
    outer = optax.sgd(0.5, momentum=0.5, nesterov=True)
    feedback = error_feedback(top_k(0.5))
    tx = rounds(SGD, outer, exchange=feedback, when=every(2))
    virtual = train(tx, 4)
    on_mesh = train(tx, 4, mesh=worker_mesh(K))
    pmapped = train(tx, 4, backend="pmap", mesh=worker_mesh(K))
    explicit = train(tx, 4, mesh=jax.make_mesh((K,), (AXIS,)))
    for run in (on_mesh, pmapped, explicit):
        equal((run.params, run.state), (virtual.params, virtual.state))
        equal(run.payload, virtual.payload)
        assert [p.traffic.rows for p in run.programs] == [
            p.traffic.rows for p in virtual.programs
        ]
    assert on_mesh.params.sharding.spec == P(AXIS)
    with pytest.raises(ValueError, match="4 copies do not fit a mesh of"):
        train(tx, 1, mesh=worker_mesh(2))


@pytest.mark.parametrize("name", ["data_parallel", "local_sgd", "diloco", "top_k"])
def test_integer_and_bool_parameters_stay(name):
    params = {"w": START, "n": jnp.int32(3), "f": jnp.array(True), "none": None}
    loss = lambda p, c: squares(p["w"] * p["n"], c)
    run = train(RUNS[name][0], 4, loss=loss, params=params)
    equal(run.params["n"], np.full(K, 3, np.int32))
    equal(run.params["f"], np.full(K, True))
    assert run.params["n"].dtype == jnp.int32
    assert run.params["none"] is None
    assert (run.losses[-1] != run.losses[0]).all()


@pytest.mark.parametrize("mesh", [False, True])
def test_a_program_is_traced_and_compiled_once(mesh):
    traces = []

    def loss(x, c):
        traces.append(x)
        return squares(x, c[0])

    counts = []
    for steps in (1, 5):
        traces.clear()
        how = {"mesh": worker_mesh(K)} if mesh else {}
        train(data_parallel(SGD), steps, loss=loss, params=jnp.asarray(1.0), **how)
        counts.append(len(traces))
    assert counts[0] == counts[1]


def test_no_steps_are_no_steps():
    run = train(local_sgd(SGD, period=2), 0)
    assert (run.losses.shape, run.bytes, run.programs) == ((0, K), 0, ())
    equal(run.params, stack(START, K))
