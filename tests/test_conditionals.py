"""Conditionals that talk are refused where workers may decide differently."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from lowcomm import (
    data_parallel,
    every,
    local_sgd,
    rounds,
    spread,
    uniform,
)
from lowcomm.spmd import AXIS, NotUniform, vary, worker_mesh

K = 4
BACKENDS = ("vmap", "shard_map", "pmap")
SGD = optax.sgd(0.5)


def how(backend):
    mesh = worker_mesh(K) if backend == "shard_map" else None
    return {"mesh": mesh, "backend": backend}


# Each counts, in a state of this worker's own, whether to apply what it wraps.
WRAPPERS = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, lambda step: step < 9
    ),
}


def first_update(tx, backend):
    """The updates of a first step whose gradient is not finite on worker 2."""
    worker = lambda g, s, x, t: tx.update(g, s, x, step=t)[0]
    grads, x = jnp.ones(K).at[2].set(jnp.nan), jnp.zeros(K)
    run = spread(worker, in_axes=(0, 0, 0, None), **how(backend))
    return np.asarray(run(grads, spread(tx.init)(x), x, jnp.int32(0)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_that_skips_around_what_talks_is_refused_with_the_remedy(
    name, backend
):
    tx = WRAPPERS[name](data_parallel(SGD))
    with pytest.raises(NotUniform, match=r"'workers'.*around the inner optimizer"):
        first_update(tx, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_that_skips_around_the_inner_optimizer_is_accepted(name, backend):
    tx = local_sgd(WRAPPERS[name](SGD), period=2)
    skipped = np.nan if name == "conditionally_transform" else 0.0
    np.testing.assert_array_equal(
        first_update(tx, backend), [-0.5, -0.5, skipped, -0.5]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_accumulation_that_skips_is_refused_around_what_talks(backend):
    skip = lambda tx: optax.MultiSteps(
        tx, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation()
    with pytest.raises(NotUniform, match=r"MultiSteps.*around the inner optimizer"):
        first_update(skip(data_parallel(SGD)), backend)
    assert first_update(local_sgd(skip(SGD), period=2), backend).shape == (K,)


@pytest.mark.parametrize("backend", BACKENDS)
def test_accumulation_is_refused_around_what_talks_and_not_inside(backend):
    # Its predicate is a constant and what it keeps it selects by arithmetic, so it
    # would talk at every micro-step; a verb's syncs between it would drop.
    verb = local_sgd(SGD, period=2)
    for tx in (data_parallel(SGD), optax.chain(optax.scale(1.0), verb)):
        with pytest.raises(ValueError, match=r"MultiSteps around the inner optimizer"):
            first_update(optax.MultiSteps(tx, 2), backend)
    inside = optax.MultiSteps(SGD, 2).gradient_transformation()
    assert first_update(local_sgd(inside, period=2), backend).shape == (K,)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_conditional_on_a_constant_is_decided_where_it_stands(backend):
    worker = lambda x: uniform.cond(
        jnp.bool_(True), lambda x: lax.pmean(x, AXIS), lambda x: x, x, axis=AXIS
    )
    np.testing.assert_array_equal(
        spread(worker, **how(backend))(jnp.arange(4.0)), np.full(4, 1.5)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "predicate",
    [lambda: True, lambda: lax.axis_size(AXIS) > 2, lambda: lax.psum(1, AXIS) > 2],
)
def test_a_plain_conditional_on_what_all_workers_know_is_accepted(predicate, backend):
    talk = lambda x: vary(lax.pmean(x, AXIS), AXIS)
    worker = lambda x: lax.cond(predicate(), talk, lambda x: x, x)
    np.testing.assert_array_equal(
        spread(worker, **how(backend))(jnp.arange(4.0)), np.full(4, 1.5)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_conditional_inside_scan_and_jit_is_found_and_a_silent_one_is_not(backend):
    def worker(talk):
        pick = lambda x: lax.cond(x > 1, talk, lambda x: x, x)
        turn = jax.jit(lambda x, _: (pick(x), None))
        return lambda x: lax.scan(turn, x, length=2)[0]

    talk = lambda x: vary(lax.pmean(x, AXIS), AXIS)
    with pytest.raises(NotUniform, match="a cond that communicates"):
        spread(worker(talk), **how(backend))(jnp.arange(4.0))
    silent = spread(worker(lambda x: x + 1), **how(backend))(jnp.arange(4.0))
    np.testing.assert_array_equal(silent, [0, 1, 4, 5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_that_talks_as_long_as_this_worker_likes_is_refused(backend):
    talk = lambda x: vary(lax.pmean(x, AXIS), AXIS) / 2
    worker = lambda x: lax.while_loop(lambda x: x > 1, talk, x)
    with pytest.raises(NotUniform, match="a while that communicates"):
        spread(worker, **how(backend))(jnp.arange(4.0))
    agreed = lambda x: lax.while_loop(lambda x: lax.pmax(x, AXIS) > 1, talk, x)
    assert (spread(agreed, **how(backend))(jnp.arange(4.0)) <= 1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_value_of_a_shared_python_number_is_checked(backend):
    # The program of an odd step is another one than that of an even step.
    talk = lambda x: lax.pmean(x, AXIS)

    def worker(x, step):
        if step % 2:
            return uniform.cond(x > 1, talk, lambda x: x, x, axis=AXIS)
        return x

    run = spread(worker, in_axes=(0, None), **how(backend))
    np.testing.assert_array_equal(run(jnp.arange(4.0), 0), np.arange(4.0))
    with pytest.raises(NotUniform, match="a predicate differs between workers"):
        run(jnp.arange(4.0), 1)


def test_uniform_conditionals_of_the_verbs_pass_the_check_on_a_grid():
    mesh = jax.sharding.AbstractMesh((2, 2), ("site", "chip"))
    inside = rounds(SGD, optax.sgd(1.0), when=every(2), axis="chip")
    tx = rounds(inside, optax.sgd(1.0), when=every(4), axis=("site", "chip"))
    worker = lambda x, t: tx.update(x, tx.init(x), x, step=t)[0]
    run = spread(
        worker, mesh=mesh, axis=("site", "chip"), in_axes=(0, None), backend="vmap"
    )
    assert run(jnp.arange(4.0), jnp.int32(3)).shape == (4,)
