"""PSO-PS: where particles fly, what they remember, and what they draw."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import at_steps, leader_sgd, pso_ps, spread
from lowcomm.algorithms import population
from tests.populations import INNER, OPTIMA, START, K, N, near, train

SWARM = {"inertia": 0.5, "cognitive": 0.25, "social": 0.75}
ATTRACTED = {"inertia": 0.0, "cognitive": 0.0}


def probe(x):
    """A fitness that all workers share."""
    return jnp.sum(jnp.square(x - 0.5)) / 2


@pytest.fixture
def half(monkeypatch):
    """Random numbers that are all ½."""
    monkeypatch.setattr(population, "_draws", lambda *_: (jnp.float32(0.5),) * 2)


def flown(fitness, steps, *, period, history=True, inertia, cognitive, social):
    """The method in double precision, with r = ½ and INNER."""
    x, c = np.float64(START), np.float64(OPTIMA)
    m = v = 0 * x
    best, best_loss, path, losses = x.copy(), np.full(K, np.inf), [], []
    for t in range(steps):
        before, m = x, 0.5 * m + (x - c)
        x = x - 0.1 * m
        if (t + 1) % period == 0:
            at = before if fitness is None else x
            aim = c if fitness is None else 0.5
            loss = np.square(at - aim).sum(1) / 2
            better = (loss < best_loss) | (not history)
            best = np.where(better[:, None], at, best)
            best_loss = np.where(better, loss, best_loss)
            found = best[np.argmin(best_loss)]
            v = inertia * v + cognitive / 2 * (best - x) + social / 2 * (found - x)
            x = x + v
        path.append(x)
        losses.append(best_loss)
    return np.stack(path, 1), np.stack(losses, 1)


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("fitness", [probe, None])
def test_pso_ps_is_what_it_says_in_double_precision(half, fitness, history):
    tx = pso_ps(INNER, period=2, fitness=fitness, history=history, **SWARM)
    path, state = train(tx, 8)
    expected, losses = flown(fitness, 8, period=2, history=history, **SWARM)
    near(path, expected)
    losses = np.minimum(losses, np.finfo(np.float32).max)
    np.testing.assert_allclose(state.best_loss, losses, rtol=1e-5)


def test_without_coefficients_particles_are_independent():
    path, _ = train(pso_ps(INNER, period=2, inertia=0, cognitive=0, social=0), 6)
    near(path, train(leader_sgd(INNER, period=2, pull=0.0, stale_pull=0.0), 6)[0], 1)


def test_without_memory_and_with_all_of_the_social_pull_all_copy_the_leader(half):
    tx = pso_ps(INNER, period=2, **ATTRACTED, social=2.0, fitness=probe, history=False)
    path, _ = train(tx, 2)
    alone, _ = train(INNER, 2)
    best = int(np.argmin([probe(x) for x in alone[:, -1]]))
    near(path[:, -1], np.tile(alone[best, -1], (K, 1)), 2)


def test_with_memory_all_copy_the_best_position_ever_even_if_nobody_is_there(half):
    # The optima are worse on the probe than the starts: the first sync was the best.
    far = OPTIMA * 0 + 9.0
    tx = pso_ps(optax.sgd(0.5), period=1, **ATTRACTED, social=2.0, fitness=probe)
    path, _ = train(tx, 2, data=far)
    first = START + 0.5 * (far - START)
    best = first[int(np.argmin([probe(x) for x in first]))]
    near(path, np.tile(best, (K, 2, 1)), 8)
    forgetful = pso_ps(
        optax.sgd(0.5),
        period=1,
        **ATTRACTED,
        social=2.0,
        fitness=probe,
        history=False,
    )
    other, _ = train(forgetful, 2, data=far)
    assert np.abs(other[:, 1] - path[:, 1]).max() > 1


def test_the_best_losses_never_rise_whatever_the_swarm_does():
    tx = pso_ps(optax.sgd(0.5), period=1, inertia=0.9, social=2.0, fitness=probe)
    _, state = train(tx, 20)
    assert (np.diff(state.best_loss, axis=1) <= 0).all()
    assert (np.diff(state.best_loss.min(0)) <= 0).all()
    positions = jax.vmap(jax.vmap(probe))(state.best)
    np.testing.assert_allclose(positions, state.best_loss, rtol=1e-6)


@pytest.mark.parametrize("social", [0.5, 2.0])
def test_a_social_pull_alone_shrinks_the_distance_to_the_best(half, social):
    tx = pso_ps(optax.sgd(0.0), period=1, **ATTRACTED, social=social, fitness=probe)
    path, _ = train(tx, 1)
    best = START[int(np.argmin([probe(x) for x in START]))]
    near(path[:, 0] - best, (1 - social / 2) * (START - best), 2)


def test_a_swarm_at_rest_stays_and_its_equation_is_the_classical_one(half):
    # No steps, p = p* = 0, r = ½: x″ = (1 + ω − φ) x′ − ω x with φ = (c₁ + c₂)/2.
    def begin(best, x, v):
        tx = pso_ps(optax.sgd(0.0), period=1, fitness=lambda x: jnp.float32(1), **SWARM)
        state = spread(tx.init)(x)
        return tx, state._replace(best=best, velocity=v, best_loss=0 * x[:, 0])

    def go(tx, state, x):
        update = lambda s, x: tx.update(0 * x, s, x, step=0)
        moves, state = spread(update)(state, x)
        return x + moves, state

    x = jnp.full((K, N), 0.75)
    tx, state = begin(x, x, 0 * x)
    np.testing.assert_array_equal(go(tx, state, x)[0], x)
    tx, state = begin(0 * x, x, 0 * x)
    path = [x, x]  # at rest before
    for _ in range(5):
        x, state = go(tx, state, x)
        path.append(x)
        near(x, (1 + 0.5 - 0.5) * path[-2] - 0.5 * path[-3], 2)


def test_one_particle_is_pulled_to_its_own_best():
    one = {"x": START[:1], "data": OPTIMA[:1]}
    path, _ = train(pso_ps(optax.sgd(0.5), period=2, **SWARM), 4, **one)
    alone, _ = train(optax.sgd(0.5), 4, **one)
    near(path[:, 0], alone[:, 0], 1)
    assert np.abs(path[:, 1] - alone[:, 1]).max() > 1e-3


def test_random_numbers_differ_by_worker_and_sync_and_repeat_by_seed():
    def pulls(seed):
        draw = lambda x: jnp.stack(
            [jnp.stack(population._draws(seed, t, "workers")) for t in range(3)]
        )
        return np.asarray(spread(draw)(START))

    found = pulls(0)
    assert len(set(found.ravel().tolist())) == K * 3 * 2
    assert ((found >= 0) & (found < 1)).all()
    np.testing.assert_array_equal(found, pulls(0))
    assert (found != pulls(1)).all()


def test_a_shared_fitness_needs_no_loss():
    tx = pso_ps(INNER, period=1, fitness=probe)
    worker = lambda x: tx.update(x, tx.init(x), x, step=0)[0]
    assert np.isfinite(spread(worker)(START)).all()


def test_syncs_may_follow_a_trigger():
    tx = pso_ps(INNER, period=at_steps([1, 2]), fitness=probe)
    _, state = train(tx, 5)
    assert state.since[0].tolist() == [1, 0, 0, 1, 2]
