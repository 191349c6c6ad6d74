"""What was sent is needed only later: read from the data flow of compiled rounds.

In a program whose steps are known there are no conditionals, and a collective may run
beside everything that does not depend on it. For each model at which a gradient is
taken, the walk below finds the steps whose messages it depends on.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import Literal

import lowcomm as lc
from lowcomm.spmd import AXIS

K, PERIOD, STEPS = 4, 3, 9  # three rounds
COLLECTIVES = {"psum", "psum_invariant", "ppermute", "all_gather"}


def sources(jaxpr, inputs):
    """For each output of a program, the steps whose messages it depends on."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda x: set() if isinstance(x, Literal) else known.get(x, set())
    for eqn in jaxpr.eqns:
        given = [read(x) for x in eqn.invars]
        name = eqn.primitive.name
        assert name not in ("cond", "while", "scan"), "steps are known at trace"
        inside = eqn.params.get("jaxpr")
        if inside is not None:
            inner = getattr(inside, "jaxpr", inside)
            found = sources(inner, given)
        else:
            found = [set().union(*given)] * len(eqn.outvars)
        if name in COLLECTIVES:
            step = re.search(r"step(\d+)", str(eqn.source_info.name_stack))
            assert step, "a collective outside any step"
            found = [one | {int(step[1])} for one in found]
        known.update(zip(eqn.outvars, found, strict=True))
    return [read(x) for x in jaxpr.outvars]


def first_needed(tx, steps=STEPS):
    """``{step that sent: first step whose gradient is taken at what depends on it}``.

    None for what no gradient up to step ``steps`` depends on.
    """

    def worker(x, target):
        state, models = tx.init(x), []
        for t in range(steps):
            models.append(x)
            with jax.named_scope(f"step{t}"):
                moves, state = tx.update(x - target, state, x, step=t)
            x = optax.apply_updates(x, moves)
        return [*models, x], jax.tree.leaves(state)

    program = jax.make_jaxpr(worker, axis_env=[(AXIS, K)])(jnp.ones(5), jnp.ones(5))
    flow = sources(program.jaxpr, [set(), set()])
    needed = lambda s: (t for t in range(steps + 1) if s in flow[t])
    return {s: next(needed(s), None) for s in sorted(set().union(*flow))}


def sgd():
    return optax.sgd(0.5, momentum=0.5)


RING = lc.lazy(lc.ring(K))
LATE = {
    "overlap_local_sgd": lc.overlap_local_sgd(sgd(), period=PERIOD),
    "cocod_sgd": lc.cocod_sgd(sgd(), period=PERIOD),
    "oldsgd": lc.oldsgd(sgd(), RING, period=PERIOD),
    "rounds": lc.rounds(
        sgd(), optax.sgd(1.0), when=lc.every(PERIOD), delay=PERIOD, pull=0.5
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_no_local_step_waits_for_what_left_at_the_start_of_its_round(name):
    assert first_needed(LATE[name]) == {2: 6, 5: 9, 8: None}


def test_blocking_averaging_is_needed_by_the_very_next_step():
    blocking = lc.local_sgd(sgd(), period=PERIOD)
    assert first_needed(blocking) == {2: 3, 5: 6, 8: 9}
    plain = lc.rounds(sgd(), optax.sgd(1.0), when=lc.every(PERIOD))
    assert first_needed(plain) == {2: 3, 5: 6, 8: 9}


def test_a_shorter_delay_is_needed_so_much_earlier():
    outer = optax.sgd(1.0)
    tx = lc.rounds(sgd(), outer, when=lc.every(PERIOD), delay=1, pull=0.5)
    assert first_needed(tx) == {2: 4, 5: 7, 8: None}


def test_delayed_gradients_have_a_step_to_arrive():
    late = optax.chain(lc.delayed(lc.mean()), sgd())
    prompt = lc.data_parallel(sgd())
    assert first_needed(late, 4) == {0: 2, 1: 3, 2: 4, 3: None}
    assert first_needed(prompt, 4) == {0: 1, 1: 2, 2: 3, 3: 4}


def test_od_sgd_needs_gradients_a_step_later_and_at_once_while_it_warms_up():
    assert first_needed(lc.od_sgd(sgd(), warmup=0), 4) == {0: 2, 1: 3, 2: 4, 3: None}
    assert first_needed(lc.od_sgd(sgd(), warmup=2), 4) == {0: 1, 1: 2, 2: 4, 3: None}


def test_prlc_needs_what_was_pushed_at_the_next_pull():
    pushed = first_needed(lc.prlc(sgd(), pulls=PERIOD))
    assert pushed == {t: 3 * (t // 3 + 1) for t in range(STEPS)}
