"""Every method sends exactly the bytes it says, by four readers.

The formula of the parts, the jaxpr, the compiled program and the meter of a run. The
networks' interface counters are the fifth reader and belong to runs on real links.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from experiments.catalogue import CATALOGUE
from experiments.contracts import Sent, Setting
from tests.problems import (
    PERIOD,
    STEPS,
    K,
    begin,
    mesh_of,
    method,
    place_of,
    sizes_of,
    squares,
    start,
    stepper,
    targets,
)

every_method = pytest.mark.parametrize("name", list(CATALOGUE))
SETTING = Setting(K, STEPS, 0.5, PERIOD, fraction=0.25, threshold=0.125, window=2)


def formula(name: str, setting: Setting = SETTING) -> Sent:
    return CATALOGUE[name].sent(start(), setting)


def read(name: str, t=None, workers: int = K) -> lc.Traffic:
    """The traffic of one worker's step, at a known or an unknown step."""
    tx = method(name, workers=workers)
    params, target = jax.tree.map(lambda x: x[0], (lc.stack(start(), K), targets()))
    worker = lc.local_step(squares, tx, axis=CATALOGUE[name].axis)
    step = np.int32(0) if t is None else t
    axis = CATALOGUE[name].axis
    sizes = list(sizes_of(workers, axis).values())
    begun = lambda params, *rest: worker(params, tx.init(params), *rest)
    return lc.traffic(begun, params, target, step, workers=sizes, axis=axis)


def fires(name: str) -> np.ndarray:
    """On which of the steps the method talks, as its verb's state has it."""
    if CATALOGUE[name].syncs == "every step":
        return np.full(STEPS, True)
    where = {"axis": CATALOGUE[name].axis}
    tx, carry, talked = method(name), begin(method(name), **where), []
    step = jax.jit(stepper(tx, **where))
    for t in range(STEPS):
        carry = step(carry, targets(), jnp.int32(t))
        talked.append(bool((optax.tree.get(carry.state, "since") == 0).all()))
    return np.array(talked)


def expected(name: str) -> np.ndarray:
    """The bytes of each step."""
    sent = formula(name)
    if sent.at is not None:
        return np.array([sent.at(t) for t in range(STEPS)])
    return sent.always + sent.sync * fires(name)


@every_method
def test_the_jaxpr_sends_what_the_formula_says(name):
    assert read(name).bytes_max == formula(name).most


@every_method
def test_the_compiled_program_sends_what_the_jaxpr_says(name):
    axis, tx = CATALOGUE[name].axis, method(name)
    where = {"backend": "shard_map", "axis": axis}
    mesh, carry = mesh_of(K, axis), begin(tx, **where)
    step = jax.jit(stepper(tx, **where))
    compiled = step.lower(carry, targets(), jnp.int32(0)).compile()
    sent = lc.compiled_traffic(compiled, mesh=mesh)
    assert sent.census() == read(name).merged().widened().census()


@every_method
@pytest.mark.parametrize("backend", ["vmap", "shard_map"])
def test_a_run_sends_what_the_formula_says(name, backend):
    axis, sent = CATALOGUE[name].axis, formula(name)
    run = lc.fit(
        squares,
        method(name),
        start(),
        lambda t: targets(),
        steps=STEPS,
        workers=K,
        axis=axis,
        **place_of(backend, K, axis),
    )
    if sent.at is not None:
        assert run.payload.tolist() == expected(name).tolist()
        return
    talks = fires(name)
    rest = run.payload - sent.sync * talks
    assert set(rest[~talks]) <= {sent.always}
    # fit knows the step: where the clock alone decides to talk, nobody is asked.
    assert set(rest[talks]) <= {sent.always, 0 if sent.sync else sent.always}
    assert talks.any()


def test_the_clock_decides_when_clocked_methods_talk():
    t = np.arange(STEPS)
    assert (fires("local_sgd") == ((t + 1) % PERIOD == 0)).all()
    assert (fires("diloco") == ((t + 1) % PERIOD == 0)).all()
    warm = t < STEPS // 4
    assert (fires("post_local_sgd") == (warm | ((t + 1) % PERIOD == 0))).all()


def test_a_known_warmup_asks_nobody():
    run = lc.fit(
        squares,
        method("selsync"),
        start(),
        lambda t: targets(),
        steps=SETTING.window,
        workers=K,
    )
    assert run.payload.tolist() == [formula("selsync").sync] * SETTING.window


@every_method
def test_a_metered_scan_counts_what_happened(name):
    axis, tx = CATALOGUE[name].axis, method(name)
    worker = lc.local_step(squares, tx, axis=axis)

    def whole(params, target):
        def body(carry, t):
            return worker(*carry, target, t)[:2], None

        carry = params, tx.init(params)
        return jax.lax.scan(body, carry, jnp.arange(STEPS))[0]

    place = place_of("vmap", K, axis)
    metered = jax.jit(lc.spread(lc.meter(whole), axis=axis, **place))
    _, counts = metered(lc.stack(start(), K), targets())
    params, target = jax.tree.map(lambda x: x[0], (lc.stack(start(), K), targets()))
    sizes = list(sizes_of(K, axis).values())
    sent = lc.traffic(whole, params, target, workers=sizes, axis=axis)
    total = int(expected(name).sum())
    assert [sent.bytes(c) for c in np.asarray(counts)] == [total] * K


@every_method
def test_one_worker_sends_nothing(name):
    assert read(name, workers=1).bytes_max == 0


@pytest.mark.parametrize(
    "name",
    [
        n
        for n, m in CATALOGUE.items()
        if m.syncs == "period" and formula(n).at is None and m.axis == lc.AXIS
    ],
)
def test_between_syncs_the_program_holds_no_collective(name):
    silent, syncs = read(name, PERIOD), read(name, PERIOD - 1)
    assert silent.rows == ()
    assert syncs.bytes_always == formula(name).sync
    mesh, tx = lc.worker_mesh(K), method(name)
    carry = begin(tx, backend="shard_map")
    step = stepper(tx, backend="shard_map")
    quiet = jax.jit(lambda c, x: step(c, x, PERIOD)).lower(carry, targets()).compile()
    assert lc.compiled_traffic(quiet, mesh=mesh).rows == ()


def test_a_measured_trigger_sends_four_bytes_between_syncs():
    assert read("selsync").bytes_always == formula("selsync").always == 4


def test_with_an_unknown_step_the_taken_branch_is_silent():
    sent = read("local_sgd")
    assert sent.bytes_always == 0
    assert {row.guard for row in sent.rows} == {sent.rows[0].guard}
    assert sent.bytes_max == formula("local_sgd").sync


@pytest.mark.parametrize("clocked", [False, True])
def test_a_self_clocked_step_sends_one_counter_more(clocked):
    tx = lc.local_sgd(optax.sgd(0.5), period=PERIOD)
    tx = lc.self_clocked(tx) if clocked else tx
    more = {} if clocked else {"step": np.int32(0)}
    update = lambda g: tx.update(g, tx.init(g), g, **more)[0]
    assert lc.traffic(update, np.ones(3, np.float32), workers=K).bytes_always == (
        4 if clocked else 0
    )


@pytest.mark.parametrize("name", ["local_sgd", "selsync", "diloco", "slowmo"])
def test_state_is_no_more_than_declared(name):
    inner = optax.sgd(0.5, momentum=0.5)
    state = jax.eval_shape(method(name, inner=inner).init, start())
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    one = size(start())
    # local_sgd: the momentum, and the int32 count since the last sync.
    # selsync: in addition two norms, their mean and how many there are.
    # diloco, slowmo: momentum, anchor and outer buffer, the count and one flag.
    declared = {"local_sgd": one + 4, "selsync": one + 4 + 16}
    assert size(state) == declared.get(name, 3 * one + 4 + 1)


@every_method
def test_half_precision_is_counted_as_it_travels_and_integers_not_at_all(name):
    params = start(jnp.bfloat16) | {"n": jnp.arange(7), "f": jnp.array(True)}
    tx, axis = method(name), CATALOGUE[name].axis
    update = lambda p, t: tx.update(p, tx.init(p), p, step=t, value=jnp.float32(1))
    sizes = list(sizes_of(K, axis).values())
    sent = lc.traffic(update, params, np.int32(0), workers=sizes, axis=axis)
    assert sent.bytes_max == CATALOGUE[name].sent(params, SETTING).most
