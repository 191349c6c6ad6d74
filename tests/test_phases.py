"""What changes in the course of a run: phases, warm-ups and occasional exchanges."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lowcomm as lc
from lowcomm import after, average, before, every, mean, occasional, reaches, rounds
from lowcomm.spmd import worker_mesh
from tests.quadratics import toward, walk

K = 4
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=3), (K, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(K, 3)).astype(np.float32)
BALL = optax.sgd(0.1, momentum=0.9)


def train(tx, steps=8, *, x=X, data=OPTIMA, gradient=toward, **how):
    return walk(tx, x, data, steps=steps, gradient=gradient, **how)


def resumed(tx, path, states, t, steps, **how):
    """From the carry after step t − 1 on."""
    state = jax.tree.map(lambda s: jnp.asarray(s[:, t - 1]), states)
    return train(tx, steps - t, x=path[:, t - 1], state=state, start=t, **how)


# after


def test_the_second_phase_begins_with_fresh_moments_and_its_own_schedule():
    falling = optax.sgd(optax.linear_schedule(0.2, 0.0, 4), momentum=0.5)
    path, states = train(after(4, BALL, falling))
    first, momenta = train(BALL, 4)
    np.testing.assert_allclose(path[:, :4], first, atol=1e-6)
    second, _ = train(falling, 4, x=path[:, 3])
    np.testing.assert_allclose(path[:, 4:], second, atol=1e-6)
    # The state of the one that is not at work stands still.
    trace = states.first[0].trace
    np.testing.assert_allclose(trace[:, 3:], np.repeat(trace[:, 3:4], 5, 1), atol=0)
    np.testing.assert_allclose(trace[:, :4], momenta[0].trace, atol=1e-6)
    assert not states.then[0].trace[:, :4].any()


@pytest.mark.parametrize(("switch", "alone"), [(0, "then"), (99, "first")])
def test_a_switch_outside_of_the_run_leaves_one_phase(switch, alone):
    parts = {"first": BALL, "then": optax.sgd(0.3)}
    path, _ = train(after(switch, **parts))
    np.testing.assert_allclose(path, train(parts[alone])[0], atol=1e-6)


def test_a_phase_sends_what_its_own_transformation_sends():
    tx = after(2, optax.chain(mean(), BALL), BALL)
    update = lambda x, t: tx.update(x, tx.init(x), x, step=t)[0]
    x = np.ones(3, np.float32)
    known = [lc.traffic(lambda x, t=t: update(x, t), x, workers=K) for t in range(4)]
    assert [sent.bytes_always for sent in known] == [12, 12, 0, 0]
    sent = lc.traffic(update, x, np.int32(0), workers=K)
    assert (sent.bytes_always, sent.bytes_max) == (0, 12)


def test_a_known_step_leaves_no_conditional():
    tx = after(2, BALL, optax.sgd(0.3))
    program = lambda t: str(
        jax.make_jaxpr(lambda x: tx.update(x, tx.init(x), x, step=t)[0])(X[0])
    )
    assert "cond[" not in program(1) + program(2)
    traced = jax.make_jaxpr(lambda x, t: tx.update(x, tx.init(x), x, step=t)[0])
    assert "cond[" in str(traced(X[0], 1))


def test_an_outer_optimizer_may_change_and_anchors_stay_equal():
    nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
    outer = after(4, optax.sgd(1.0), nesterov)
    path, states = train(rounds(optax.sgd(0.2), outer, when=every(2)))
    plain, _ = train(rounds(optax.sgd(0.2), optax.sgd(1.0), when=every(2)), 4)
    np.testing.assert_allclose(path[:, :4], plain, atol=1e-6)
    rest, _ = train(rounds(optax.sgd(0.2), nesterov, when=every(2)), 4, x=path[:, 3])
    np.testing.assert_allclose(path[:, 4:], rest, atol=1e-6)
    assert np.ptp(states.anchor, axis=0).max() == 0


def test_an_exchange_may_change_inside_a_verb():
    tx = average(BALL, exchange=after(4, mean(), lc.gossip(lc.ring(K))), when=every(2))
    path, states = train(tx)
    first, _ = train(average(BALL, when=every(2)), 4)
    np.testing.assert_allclose(path[:, :4], first, atol=1e-6)
    mixing = average(BALL, exchange=lc.gossip(lc.ring(K)), when=every(2))
    inner = jax.tree.map(lambda s: jnp.asarray(s[:, 3]), states.inner)
    fresh = jax.jit(lc.spread(mixing.init))(X)._replace(inner=inner)
    rest, _ = train(mixing, 4, x=path[:, 3], state=fresh, start=4)
    np.testing.assert_allclose(path[:, 4:], rest, atol=1e-6)


def falling_loss(value, **_):
    return -value


def test_a_measured_switch_is_made_by_all_workers_at_once():
    # Each worker's own loss halves at its own pace; the mean decides.
    tx = after(reaches(-1.0, measure=falling_loss), optax.sgd(1.0), optax.sgd(0.0))
    losses = np.array([[8.0, 4, 2, 1], [4.0, 2, 1, 0.5]], np.float32)

    def worker(losses):
        state, moves = tx.init(losses[0]), []
        for t in range(4):
            move, state = tx.update(losses[0] * 0 + 1, state, step=t, value=losses[t])
            moves.append(move)
        return jnp.stack(moves)

    # The means are 6, 3, 1.5 and 0.75: at the last step all are in the second phase.
    moved = np.asarray(lc.spread(worker)(losses))
    np.testing.assert_array_equal(moved, [[-1, -1, -1, 0]] * 2)


def test_what_was_reached_stays_reached():
    when = reaches(0.5, measure=falling_loss)

    def worker(values):
        state, fires = when.init(None), []
        for value in values:
            fired, state = when.fire(state, value=value)
            fires.append(fired)
        return jnp.array(fires)

    values = np.array([[0, -1, 0, 0], [0, -1, 9, 0]], np.float32)
    fires = np.asarray(lc.spread(worker)(values))
    assert fires.tolist() == [[False, True, True, True]] * 2


def test_a_window_is_filled_before_it_decides():
    when = reaches(1.0, measure=falling_loss, window=3)

    def worker(values):
        state, fires = when.init(None), []
        for value in values:
            fired, state = when.fire(state, value=value)
            fires.append(fired)
        return jnp.array(fires)

    fires = lc.spread(worker)(-np.array([[9, 9, -17, 0, 20, 0]], np.float32))
    # Means of three: none, none, 1/3, −8/3, 1, and then for ever.
    assert np.asarray(fires)[0].tolist() == [False] * 4 + [True] * 2


# occasional


@pytest.mark.parametrize("start", [0, 3])
def test_gradients_are_the_workers_own_between_the_exchanges(start):
    tx = optax.chain(occasional(mean(), when=every(2)), BALL)
    path, states = train(tx, start=start)
    x, m = X.astype(float), np.zeros_like(X, float)
    for i, t in enumerate(range(start, start + 8)):
        g = x - OPTIMA
        m = 0.9 * m + (np.tile(g.mean(0), (K, 1)) if (t + 1) % 2 == 0 else g)
        x = x - 0.1 * m
        np.testing.assert_allclose(path[:, i], x, atol=1e-5)
    assert states[0].since[0].tolist() == [(t + 1) % 2 for t in range(start, start + 8)]


def test_a_synchronous_warm_up_is_data_parallel_and_then_local():
    tx = optax.chain(occasional(mean(), when=before(4)), BALL)
    path, _ = train(tx)
    np.testing.assert_allclose(
        path[:, :4], train(lc.data_parallel(BALL), 4)[0], atol=1e-6
    )
    assert (np.ptp(path[:, :4], axis=0) < 1e-6).all()
    assert (np.ptp(path[:, 4:], axis=0).max(-1) > 1e-2).all()


def test_the_memory_of_an_occasional_exchange_moves_only_when_it_is_used():
    exchange = lc.error_feedback(lc.top_k(0.3))
    _, states = train(occasional(exchange, when=every(4)), 8, gradient=lambda x, c: c)
    memory = jax.tree.leaves(states.occasion)[0]
    moved = np.abs(np.diff(memory, axis=1)).max((0, 2)) > 0
    assert np.flatnonzero(moved).tolist() == [2, 6]  # after the steps 3 and 7
    assert not memory[:, :3].any()


def test_an_occasional_exchange_is_for_gradients():
    for verb in (average, lambda inner, **how: rounds(inner, optax.sgd(1.0), **how)):
        tx = verb(BALL, exchange=occasional(mean(), when=every(2)))
        with pytest.raises(ValueError, match="exchanges gradients, not"):
            train(tx, 1)


def test_a_missing_step_and_a_negative_switch_are_refused():
    with pytest.raises(ValueError, match="steps count from 0"):
        after(-1, BALL, BALL)
    for tx in (after(2, BALL, BALL), occasional(mean(), when=every(2))):
        with pytest.raises(ValueError, match="update needs step="):
            lc.spread(lambda x, tx=tx: tx.update(x, tx.init(x), x)[0])(X)


ADAM = optax.adam(0.1)
CHANGING = {
    "after": after(2, optax.chain(mean(), ADAM), ADAM),
    "after a measure": after(reaches(0.0, measure=lambda **_: 1.0), BALL, ADAM),
    "occasional": occasional(lc.gossip(lc.one_peer_exponential(K)), when=every(2)),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_worker_on_a_mesh_may_scan_its_steps_from_a_state_of_its_own(name):
    tx = CHANGING[name]

    def worker(x, c):
        def body(carry, t):
            x, state = carry
            moves, state = tx.update(x - c, state, x, step=t)
            return (x + moves, state), None

        return lax.scan(body, (x, tx.init(x)), jnp.arange(4))[0][0]

    on_mesh = jax.jit(lc.spread(worker, mesh=worker_mesh(K)))(X, OPTIMA)
    virtual = jax.jit(lc.spread(worker))(X, OPTIMA)
    np.testing.assert_allclose(on_mesh, virtual, atol=1e-5)


def test_a_phase_resumes_where_it_was():
    tx = after(4, BALL, ADAM)
    path, states = train(tx)
    for t in (2, 4, 6):
        rest, _ = resumed(tx, path, states, t, 8)
        np.testing.assert_array_equal(rest, path[:, t:])
