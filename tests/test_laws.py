"""The laws every method of the catalogue obeys.

One trajectory per method and backend is recorded (``tests/problems.py``) and read by
many laws. Gradients are x − c with integer c and rates are powers of two, so that
equality can be asked bit for bit as long as a method's own arithmetic is exact. A law
that a method does not obey is named in its catalogue line with the reason.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import lowcomm as lc
from experiments.catalogue import CATALOGUE
from tests.problems import (
    BACKENDS,
    PERIOD,
    STEPS,
    Carry,
    K,
    begin,
    method,
    program,
    record,
    run,
    squares,
    start,
    stepper,
    targets,
)

LAWS: set[str] = set()


def lawful(law: str):
    """The methods a law applies to, as a parametrization."""
    LAWS.add(law)
    names = [name for name, m in CATALOGUE.items() if law not in m.exempt]
    return pytest.mark.parametrize("name", names)


same_bits = chex.assert_trees_all_equal


def close(a, b, ulps: int, scale: float = 1.0):
    """Equal up to a number of roundings of values of this scale."""
    tolerance = ulps * scale * float(jnp.finfo(jnp.float32).eps)
    chex.assert_trees_all_close(a, b, rtol=tolerance, atol=tolerance)


@lawful("backends agree")
@pytest.mark.parametrize("backend", ["shard_map", "pmap"])
def test_virtual_workers_equal_devices_bit_for_bit(name, backend):
    exact = CATALOGUE[name].exact
    same_bits(record(name)[:exact], record(name, backend)[:exact])


@lawful("backends agree")
def test_virtual_workers_equal_devices_on_real_data_to_rounding(name):
    # Each step sums K values and does fewer than eight operations more; errors of
    # earlier steps do not grow, since the dynamics contract. A flipped sign or
    # another selected entry is no rounding, so those methods are asked for one step.
    steps = STEPS if CATALOGUE[name].smooth else 1
    here, there = record(name, binary=False), record(name, "shard_map", binary=False)
    values = [c.params for c in here[:steps]]
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(values))
    close(values, [c.params for c in there[:steps]], steps * (K + 8), scale)


@lawful("compiles once")
def test_one_program_serves_two_rounds(name):
    tx, traced = method(name), []

    def counting(carry, target, t):
        traced.append(t)
        return stepper(tx)(carry, target, t)

    step, carry = jax.jit(counting), begin(tx)
    for t in range(STEPS):
        carry = step(carry, targets(), jnp.int32(t))
    assert len(traced) == 1


@lawful("compiles once")
def test_fit_compiles_one_program_for_each_kind_of_step(name):
    tx = method(name)
    made = lc.fit(squares, tx, start(), lambda t: targets(), steps=STEPS, workers=K)
    assert len(made.programs) == (1 if CATALOGUE[name].syncs == "every step" else 2)
    if CATALOGUE[name].exact >= STEPS:
        same_bits(jax.tree.map(np.asarray, made.params), record(name)[-1].params)


@lawful("scan")
@pytest.mark.parametrize("backend", ["vmap", "shard_map"])
def test_a_scan_of_steps_is_the_loop(name, backend):
    tx, target = method(name), targets()

    @jax.jit
    def scanned(carry):
        step = stepper(tx, backend=backend)
        body = lambda carry, t: (step(carry, target, t), None)
        return jax.lax.scan(body, carry, jnp.arange(STEPS))[0]

    end = scanned(begin(tx, backend=backend))
    expected = record(name, backend)[-1]
    if CATALOGUE[name].exact >= STEPS:
        same_bits(jax.tree.map(np.asarray, end), expected)
    else:
        close(end.params, expected.params, STEPS * (K + 8), scale=64.0)


@lawful("scan")
def test_a_worker_may_scan_its_own_steps_under_the_variance_check(name):
    tx, worker = method(name), lc.local_step(squares, method(name))

    def whole(params, target):
        def body(carry, t):
            return worker(*carry, target, t)[:2], None

        return jax.lax.scan(body, (params, tx.init(params)), jnp.arange(STEPS))[0][0]

    mesh = lc.worker_mesh(K)
    end = jax.jit(lc.spread(whole, mesh=mesh))(lc.stack(start(), K), targets())
    close(end, record(name, "shard_map")[-1].params, STEPS * (K + 8), scale=64.0)


@lawful("backends agree")
def test_results_do_not_depend_on_the_variance_check(name):
    tx = method(name)

    def local(carry, target, t):
        carry, target = jax.tree.map(lambda x: x[0], (carry, target))
        out = lc.local_step(squares, tx)(*carry, target, t)[:2]
        return jax.tree.map(lambda x: x[None], Carry(*out))

    step = jax.jit(
        jax.shard_map(
            local,
            mesh=lc.worker_mesh(K),
            in_specs=(P(lc.AXIS), P(lc.AXIS), P()),
            out_specs=P(lc.AXIS),
            check_vma=False,
        )
    )
    carry, checked = begin(tx, backend="shard_map"), record(name, "shard_map")
    for t in range(PERIOD):
        carry = step(carry, targets(), jnp.int32(t))
        same_bits(jax.tree.map(np.asarray, carry), checked[t])


@lawful("donation")
@pytest.mark.parametrize("backend", BACKENDS)
def test_params_and_state_may_be_donated(name, backend):
    carry = begin(method(name), backend=backend)
    step = jax.jit(stepper(method(name), backend=backend), donate_argnums=0)
    for t in range(STEPS):
        carry = step(carry, targets(), jnp.int32(t))
    same_bits(jax.tree.map(np.asarray, carry), record(name, backend)[-1])


@lawful("donation")
def test_init_shares_no_buffer_with_the_parameters(name):
    params = start()
    leaves = jax.tree.leaves((params, method(name).init(params)))
    buffers = [x.unsafe_buffer_pointer() for x in leaves if x.size]
    assert len(buffers) == len(set(buffers))


@lawful("types constant")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("t", [0, PERIOD - 1, None])
def test_types_stay_what_init_made_them(name, dtype, t):
    tx, target = method(name), targets(dtype=dtype)
    carry = jax.eval_shape(lambda: begin(tx, start(dtype)))
    step = stepper(tx)
    if t is None:
        after = jax.eval_shape(step, carry, target, jnp.int32(0))
    else:
        after = jax.eval_shape(lambda c, x: step(c, x, t), carry, target)
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
    assert kinds(carry) == kinds(after)


@lawful("half precision")
def test_half_precision_parameters_stay_finite_and_learn(name):
    tx, target = method(name), targets(dtype=jnp.bfloat16)
    path = run(tx, target, params=start(jnp.bfloat16))
    before = jax.vmap(squares)(lc.stack(start(jnp.bfloat16), K), target)
    after = jax.vmap(squares)(path[-1].params, target)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(path[-1].params))
    assert float(after.mean()) < float(before.mean())


@lawful("resume")
@pytest.mark.parametrize("t", range(1, STEPS))
def test_a_run_resumed_from_copies_is_the_uninterrupted_run(name, t):
    path = record(name)
    carry = jax.tree.map(jnp.array, path[t - 1])
    resumed = run(method(name), targets(), first=t, carry=carry, step=program(name))
    same_bits(resumed, path[t:])


@lawful("any number of workers")
@pytest.mark.parametrize("workers", [1, 3, 5, 8])
def test_any_number_of_workers_will_do(name, workers):
    tx = method(name, workers=workers)
    fit = lc.fit(
        squares,
        tx,
        start(),
        lambda t: targets(workers),
        steps=STEPS,
        workers=workers,
        mesh=lc.worker_mesh(workers),
    )
    model = jax.jit(lc.spread(lc.consensus))(fit.state, fit.params)
    target = targets(workers)
    before = jax.vmap(squares)(lc.stack(start(), workers), target).mean()
    assert float(jax.vmap(squares)(model, target).mean()) < float(before)
    assert (fit.bytes == 0) == (workers == 1)


@lawful("one worker is the inner optimizer")
def test_one_worker_is_the_inner_optimizer(name):
    inner = optax.sgd(0.5, momentum=0.5)
    alone = jax.tree.map(lambda x: x[:1], targets())
    path = run(method(name, workers=1), alone, workers=1)
    params, state = start(), inner.init(start())
    for t in range(STEPS):
        grads = jax.grad(squares)(params, jax.tree.map(lambda x: x[0], alone))
        moves, state = inner.update(grads, state, params)
        params = optax.apply_updates(params, moves)
        same_bits(jax.tree.map(lambda x: x[0], path[t].params), params)


@lawful("inner sees all")
def test_parameters_and_extra_arguments_reach_the_inner_optimizer(name):
    seen = []

    def update(updates, state, params=None, *, value, step, **extra):
        seen.append((params, value, extra.get("fruit")))
        return jax.tree.map(lambda g: -0.5 * g, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    tx = method(name, inner=inner)
    worker = lambda p: tx.update(p, tx.init(p), p, step=0, value=7.0, fruit="pear")[0]
    jax.eval_shape(lc.spread(worker), lc.stack(start(), K))
    params, value, fruit = seen[-1]
    chex.assert_trees_all_equal_shapes_and_dtypes(params, start())
    assert (value, fruit) == (7.0, "pear")


@lawful("composes")
def test_a_learning_rate_may_be_injected(name):
    def make(learning_rate, period):
        inner = optax.sgd(learning_rate, momentum=0.5)
        return method(name, inner=inner, period=period)

    tx = optax.inject_hyperparams(make, static_args=("period",))(
        learning_rate=0.5, period=PERIOD
    )
    worker = lc.spread(
        lambda p, s, c, t: tx.update(jax.tree.map(jnp.subtract, p, c), s, p, step=t),
        in_axes=(0, 0, 0, None),
    )
    carry, step = begin(tx), jax.jit(worker)
    for t in range(PERIOD):
        moves, state = step(*carry, targets(), jnp.int32(t))
        carry = Carry(optax.apply_updates(carry.params, moves), state)
    close(carry.params, record(name)[PERIOD - 1].params, PERIOD * (K + 8), scale=64.0)


@lawful("composes")
def test_it_works_inside_a_partition_and_a_mask(name):
    labels = {"b": "frozen", "s": "moving", "w": "moving"}
    parts = {"moving": method(name), "frozen": optax.set_to_zero()}
    params = run(optax.partition(parts, labels), targets(), steps=PERIOD)[-1].params
    frozen = lc.stack(start(), K)["b"]
    same_bits(params["b"], np.asarray(frozen))
    assert all((params[k] != np.asarray(lc.stack(start(), K)[k])).any() for k in "sw")


@lawful("learns")
def test_it_learns_from_workers_that_disagree(name):
    # Each worker fits other data; the mean of the losses has a closed-form optimum.
    rng = np.random.default_rng(1)
    a = rng.normal(size=(K, 32, 8))
    b = a @ rng.normal(size=(8, 4)) + rng.normal(size=(K, 32, 4))
    best, *_ = np.linalg.lstsq(a.reshape(-1, 8), b.reshape(-1, 4), rcond=None)
    batch = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    loss = lambda x, batch: jnp.mean(jnp.square(batch[0] @ x - batch[1]))
    total = lambda x: float(np.mean(np.square(a @ x - b)))
    tx = method(name, inner=optax.sgd(0.05, momentum=0.5), steps=200)
    fit = lc.fit(loss, tx, jnp.zeros((8, 4)), lambda t: batch, steps=200, workers=K)
    model = np.asarray(lc.spread(lc.consensus)(fit.state, fit.params))[0]
    gap = lambda x: total(x) - total(best)
    assert gap(model) < 0.05 * gap(np.zeros((8, 4)))


@lawful("zero gradients")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_zero_gradients_change_nothing(name, dtype):
    rng = np.random.default_rng(2)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), dtype), start()
    )
    still = lambda params, target: 0.0 * squares(params, target)
    path = run(method(name), targets(dtype=dtype), params=params, loss=still)
    expected = jax.tree.map(np.asarray, lc.stack(params, K))
    for carry in path:
        same_bits(carry.params, expected)


@lawful("relabelling permutes")
def test_renaming_the_workers_only_permutes(name):
    order = np.array([2, 0, 3, 1])
    exact = CATALOGUE[name].exact
    target = jax.tree.map(lambda x: x[order], targets())
    path = run(method(name), target, step=program(name))
    for here, there in zip(record(name)[:exact], path[:exact], strict=True):
        same_bits(jax.tree.map(lambda x: x[order], here), there)


@lawful("workers agree")
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_sync_all_workers_hold_the_same_bits(name, backend):
    # The last step of a round is a sync for every clock; a measured trigger is made
    # to fire by its threshold.
    if CATALOGUE[name].syncs == "measured":
        path = run(method(name, threshold=0.0), targets(binary=False), backend=backend)
    else:
        path = record(name, backend, binary=False)
    for x in jax.tree.leaves(path[-1].params):
        if CATALOGUE[name].bitwise:
            same_bits(x, np.broadcast_to(x[:1], x.shape))
        else:
            ulp = np.spacing(np.abs(x).max())
            assert np.ptp(x, axis=0).max() <= 2 * ulp


def test_every_exemption_names_a_law_and_gives_a_reason():
    for m in CATALOGUE.values():
        assert set(m.exempt) <= LAWS
        assert all(len(reason) > 20 for reason in m.exempt.values())
