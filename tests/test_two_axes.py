"""Methods over two axes: workers on the chips of several sites."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh

from lowcomm import (
    apply_updates,
    average,
    consensus,
    every,
    fit,
    local_step,
    mean,
    rounds,
    spread,
    stack,
)

GRID, K, N = ("site", "chip"), 4, 3
RNG = np.random.default_rng(0)
OPTIMA = RNG.normal(size=(K, N)).astype(np.float32)
START = jnp.arange(float(N))
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
SITES = average(  # rounds within a site, and now and then the mean over the sites
    rounds(optax.sgd(0.25), NESTEROV, when=every(2), axis="chip"),
    when=every(4),
    axis="site",
)


def squares(x, c):
    return jnp.sum(jnp.square(x - c)) / 2


def where(backend):
    """A grid of virtual workers, or of devices."""
    if backend == "vmap":
        return {"mesh": AbstractMesh((2, 2), GRID), "backend": "vmap", "axis": GRID}
    return {"mesh": Mesh(np.array(jax.devices()[:K]).reshape(2, 2), GRID), "axis": GRID}


def loop(tx, steps, backend, apply):
    """A plain loop around update, the sum being ``apply``'s."""

    def worker(x, state, c, t):
        updates, state = tx.update(x - c, state, x, step=t)
        return apply(x, updates, state), state

    step = jax.jit(spread(worker, in_axes=(0, 0, 0, None), **where(backend)))
    x = stack(START, K)
    state = jax.jit(spread(tx.init, **where(backend)))(x)
    for t in range(steps):
        x, state = step(x, state, OPTIMA, jnp.int32(t))
    return x, state


def plain_sum(x, updates, state):
    return optax.apply_updates(x, updates)


@pytest.mark.parametrize("backend", ["vmap", "shard_map"])
def test_the_mean_over_all_axes_of_a_grid_is_the_mean_over_the_workers(backend):
    tx = optax.chain(mean(GRID), optax.sgd(0.5))
    run = fit(
        squares, tx, START, lambda t: OPTIMA, steps=3, workers=K, **where(backend)
    )
    x = np.asarray(START)
    for _ in range(3):
        x = x - 0.5 * (x - OPTIMA.mean(0))
    np.testing.assert_allclose(run.params, np.tile(x, (K, 1)), atol=1e-6)
    assert run.payload.tolist() == [4 * N] * 3


@pytest.mark.parametrize("backend", ["vmap", "shard_map"])
def test_the_model_of_averaged_rounds_is_the_same_on_all_workers(backend):
    x, state = loop(SITES, 3, backend, plain_sum)  # in the middle of both periods
    read = spread(lambda s, x: consensus(s, x, axis=GRID), **where(backend))
    model = np.asarray(read(state, x))
    np.testing.assert_array_equal(model, np.tile(model[:1], (K, 1)))
    np.testing.assert_allclose(model[0], np.mean(x, 0), atol=1e-6)
    assert len(np.unique(state.inner.anchor, axis=0)) == 2  # one a site: not the model


def test_apply_updates_is_the_plain_sum_where_averaging_encloses_rounds():
    # On the step at which both talk the sites' anchors are no longer the parameters.
    for steps in (2, 4):
        exact, plain = (
            loop(SITES, steps, "vmap", apply)[0] for apply in (apply_updates, plain_sum)
        )
        np.testing.assert_array_equal(exact, plain)


@pytest.mark.parametrize("backend", ["vmap", "shard_map"])
def test_fit_and_local_step_train_on_a_grid(backend):
    run = fit(
        squares, SITES, START, lambda t: OPTIMA, steps=8, workers=K, **where(backend)
    )
    step = spread(
        local_step(squares, SITES, axis=GRID), in_axes=(0, 0, 0, None), **where(backend)
    )
    x, step = stack(START, K), jax.jit(step)
    state = jax.jit(spread(SITES.init, **where(backend)))(x)
    for t in range(8):
        x, state, _ = step(x, state, OPTIMA, jnp.int32(t))
    np.testing.assert_allclose(run.params, x, atol=1e-6)
    assert run.payload.tolist() == [0, 4 * N, 0, 8 * N] * 2
    assert run.losses[-1].mean() < run.losses[0].mean()


def test_rounds_inside_rounds_train_and_hand_the_innermost_anchor_on():
    seen = []

    def look(updates, state, params, *, anchor, **extra):
        return updates, anchor

    link = optax.GradientTransformationExtraArgs(jnp.zeros_like, look)
    inside = rounds(
        optax.chain(link, optax.sgd(0.25)), optax.sgd(0.5), when=every(2), axis="chip"
    )
    tx = rounds(inside, optax.sgd(0.5), when=every(4), axis=GRID)

    def on_step(t, params, state, metrics):
        heard = state.inner.inner[0]
        seen.append(
            jax.tree.map(np.array, (heard, state.inner.anchor, state.anchor, params))
        )

    run = fit(
        squares,
        tx,
        START,
        lambda t: OPTIMA,
        steps=12,
        workers=K,
        on_step=on_step,
        **where("vmap"),
    )
    handed, inner, outer, _ = map(np.stack, zip(*seen, strict=True))
    # At each step it is the inner anchor as the step before left it.
    np.testing.assert_array_equal(handed[1:], inner[:-1])
    assert (handed[3] != outer[2]).any()
    assert run.losses[-1].mean() < run.losses[0].mean()
    np.testing.assert_array_equal(outer[-1], np.tile(outer[-1][:1], (K, 1)))
