"""Triggers: exactly these steps, the same on all workers, and what asking costs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from lowcomm.anchor import rounds
from lowcomm.ledger import traffic
from lowcomm.spmd import AXIS, NotUniform, vary, worker_mesh
from lowcomm.sync import average
from lowcomm.triggers import Trigger, any_of, change_exceeds, drift_exceeds, every
from lowcomm.uniform import known
from lowcomm.workers import spread
from tests.streams import K, detect, mesh_of, recorded

on_both = pytest.mark.parametrize("backend", ["vmap", "mesh"])


@pytest.mark.parametrize(
    ("period", "offset", "warmup"),
    [(1, 0, 0), (3, 0, 0), (3, 2, 0), (4, 1, 3), (2, 0, 5)],
)
def test_every_fires_at_exactly_these_steps_however_it_is_told(period, offset, warmup):
    when = every(period, offset=offset, warmup=warmup)
    due = [t < warmup or (t + 1 - offset) % period == 0 for t in range(20)]
    answers = [when.fire((), step=t)[0] for t in range(20)]
    assert answers == due
    assert all(isinstance(answer, bool) for answer in answers)
    traced = jax.jit(lambda t: when.fire((), step=t)[0])
    assert [bool(traced(t)) for t in range(20)] == due
    step, asked = jnp.int32(7), []
    with known(step, 7, asked):
        assert when.fire((), step=step)[0] is due[7]
    # The question that was noted answers for all the other steps.
    (question,) = asked
    assert [question.ask(t) for t in range(20)] == due
    assert question.answer is due[7]


def test_every_does_not_fire_before_the_first_step():
    # Where a delay asks about steps that never were.
    for when in (every(2), every(1), every(4, warmup=3)):
        assert not any(when.fire((), step=t)[0] for t in range(-5, 0))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"period": 0}, "period 0"),
        ({"period": 2.5}, "period 2.5"),
        ({"period": 3, "offset": 3}, r"offset 3 is outside \[0, 3\)"),
        ({"period": 3, "offset": -1}, "offset -1"),
        ({"period": 3, "warmup": -1}, "warmup -1 is negative"),
    ],
)
def test_an_impossible_schedule_is_refused_with_its_value(wrong, said):
    with pytest.raises(ValueError, match=said):
        every(**wrong)


@pytest.mark.parametrize("step", [None, 1.0, True, jnp.float32(1), jnp.arange(3)])
def test_a_step_that_is_no_integer_is_refused(step):
    with pytest.raises(ValueError, match="step"):
        every(2).fire((), step=step)


def test_the_gap_is_the_least_number_of_steps_between_two_syncs():
    assert every(4).gap == every(4, offset=1).gap == 4
    assert every(4, warmup=2).gap == 1
    assert any_of(every(4)).gap == 4
    assert any_of(every(4), every(6)).gap == 1
    assert drift_exceeds(1.0).gap is change_exceeds(1.0).gap is None
    assert any_of(every(4), change_exceeds(1.0)).gap is None


def test_any_of_is_or_and_asks_every_trigger():
    when = any_of(every(4), every(6, warmup=2))
    due = [t < 2 or (t + 1) % 4 == 0 or (t + 1) % 6 == 0 for t in range(24)]
    assert [when.fire(when.init(None), step=t)[0] for t in range(24)] == due
    capped = any_of(every(10), change_exceeds(0.05, warmup=0))
    fires, (_, states) = detect(capped, recorded())
    alone, same = detect(change_exceeds(0.05, warmup=0), recorded())
    np.testing.assert_array_equal(fires, alone | (np.arange(1, 101) % 10 == 0))
    np.testing.assert_array_equal(states.smoothed, same.smoothed)
    assert (fires != alone).any()
    with pytest.raises(ValueError, match="takes triggers, at least one"):
        any_of()


@pytest.mark.parametrize(
    ("when", "sent"),
    [
        (every(2, warmup=1), 0),
        (drift_exceeds(1.0), 4),
        (change_exceeds(0.3), 4),
        (any_of(every(2), drift_exceeds(1.0), change_exceeds(0.3)), 8),
    ],
)
def test_asking_costs_four_bytes_a_measurement(when, sent):
    x = np.ones((3, 2), np.float32)
    ask = lambda step, x: when.fire(when.init(x), step=step, drift=x, grads=x)
    assert traffic(ask, np.int32(0), x, workers=8).bytes_always == sent


@pytest.mark.parametrize("backend", ["vmap", "shard_map", "pmap"])
@pytest.mark.parametrize("verb", ["average", "rounds"])
def test_a_decision_that_differs_between_workers_is_refused_everywhere(backend, verb):
    # On devices some would talk and the others wait for ever.
    selfish = Trigger(lambda params: (), lambda state, *, grads, **_: (grads > 1, ()))
    tx = {
        "average": average(optax.sgd(1.0), when=selfish),
        "rounds": rounds(optax.sgd(1.0), optax.sgd(1.0), when=selfish),
    }[verb]
    worker = lambda x: tx.update(x, tx.init(x), x, step=0)[0]
    mesh = None if backend == "vmap" else worker_mesh(K)
    with pytest.raises(NotUniform, match=r"predicate differs .* axis 'workers'"):
        spread(worker, mesh=mesh, backend=backend)(jnp.arange(K, dtype=jnp.float32))


@on_both
def test_workers_that_disagree_sync_together_and_are_equal_afterwards(backend):
    tx = average(optax.sgd(1.0), when=change_exceeds(0.3, window=2, warmup=0))
    # Each walks at its own pace, until one is startled.
    grads = np.tile(np.arange(1, K + 1, dtype=np.float32)[:, None], 6)
    grads[2, 5] = 100

    def worker(grads):
        def step(carry, now):
            x, state = carry
            moves, state = tx.update(now[1], state, x, step=now[0])
            x = optax.apply_updates(x, moves)
            return (x, state), (x, state.since)

        x = jnp.zeros_like(grads[0])
        carry = (x, vary(tx.init(x), AXIS))
        return lax.scan(step, carry, (jnp.arange(6), grads))[1]

    x, since = jax.jit(spread(worker, mesh=mesh_of(backend)))(grads)
    assert len(set(np.asarray(x[:, 4]).tolist())) == K
    np.testing.assert_array_equal(x[:, 5], [-grads.sum(1).mean()] * K)
    np.testing.assert_array_equal(since, [[1, 2, 3, 4, 5, 0]] * K)
