"""A round as one program: the steps it stands for, and what does not wait in it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from experiments.catalogue import CATALOGUE
from lowcomm.ledger import trace
from lowcomm.rows import rows_of_equation
from lowcomm.testing.problems import place_of, squares, start, targets

K, H = 4, 4
SIZES = {lc.AXIS: K}

# One of each kind of decision: always, by the clock, late, by an extra round of its
# own, layer by layer, by what was measured, by a count that is agreed on.
KINDS = (
    "data_parallel",
    "local_sgd",
    "post_local_sgd",
    "diloco",
    "streaming_diloco",
    "overlap_local_sgd",
    "cocod_sgd",
    "od_sgd",
    "sparse_loco",
    "selsync",
    "dpsgd",
)


def made(name):
    method = CATALOGUE[name]
    inner = optax.sgd(0.125, momentum=0.5)
    return method.make(
        workers=K, steps=12, learning_rate=0.125, inner=inner, window=2, period=H
    )


def each_step(tx, mesh=None):
    """Parameters, losses and bytes of twelve steps, one at a time."""
    step = lc.counted_step(squares, tx, workers=K, mesh=mesh)
    params = lc.stack(start(), K, mesh=mesh)
    state, losses, sent = lc.init(tx, params, mesh=mesh), [], []
    for t in range(12):
        params, state, metrics, said = step(params, state, targets(K), t)
        losses.append(np.asarray(metrics["loss"]))
        sent.append(said.bytes)
    return jax.device_get(params), np.stack(losses, 1), sent


def by_rounds(tx, begin, mesh=None):
    """The same with rounds of H that begin at a step of this number."""
    step = lc.counted_step(squares, tx, workers=K, mesh=mesh)
    whole = lc.counted_round(squares, tx, length=H, workers=K, mesh=mesh)
    batch = targets(K)
    batches = jax.tree.map(lambda x: jnp.repeat(x[:, None], H, 1), batch)
    params = lc.stack(start(), K, mesh=mesh)
    state, losses, sent, t = lc.init(tx, params, mesh=mesh), [], [], 0
    while t < 12:
        fits = t >= begin and t + H <= 12
        run, data = (whole, batches) if fits else (step, batch)
        params, state, metrics, said = run(params, state, data, t)
        losses.append(np.asarray(metrics["loss"]).reshape(K, -1))
        sent.append(said.bytes)
        t += H if fits else 1
    return jax.device_get(params), np.concatenate(losses, 1), sent


@pytest.mark.parametrize("name", KINDS)
def test_a_round_is_its_steps_one_after_the_other(name):
    tx = made(name)
    params, losses, sent = each_step(tx)
    found, seen, said = by_rounds(tx, begin=H - 1)
    # The same operations: only what a compiler may fuse differs, an ulp or so a step.
    # The losses are at most about 10.
    np.testing.assert_allclose(seen, losses, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        found,
        params,
    )
    assert sum(said) == sum(sent)


def test_rounds_on_devices_are_those_of_virtual_workers():
    tx = made("diloco")
    mesh = lc.worker_mesh(K)
    _, seen, sent = by_rounds(tx, begin=H - 1, mesh=mesh)
    _, losses, said = by_rounds(tx, begin=H - 1)
    np.testing.assert_allclose(seen, losses, rtol=1e-5, atol=1e-5)
    assert sent == said


def test_one_program_serves_all_rounds_that_begin_alike():
    tx = made("streaming_diloco")
    whole = lc.counted_round(squares, tx, length=H, workers=K)
    batches = jax.tree.map(lambda x: jnp.repeat(x[:, None], H, 1), targets(K))
    params = lc.stack(start(), K)
    state, programs = lc.init(tx, params), []
    for t in (0, 4, 8, 12, 13, 17):
        params, state, _, sent = whole(params, state, batches, t)
        programs.append(sent.program)
    first, second = programs[3], programs[4]
    assert programs[-1] == second != first == programs[2]


def test_a_step_that_is_traced_decides_as_it_runs():
    tx = made("diloco")
    worker = lc.local_round(squares, tx, length=H)
    run = jax.jit(lc.spread(worker, in_axes=(0, 0, 0, None)))
    batches = jax.tree.map(lambda x: jnp.repeat(x[:, None], H, 1), targets(K))
    params = lc.stack(start(), K)
    state = lc.init(tx, params)
    for t in range(0, 12, H):
        params, state, _ = run(params, state, batches, jnp.int32(t))
    wanted, _, _ = each_step(tx)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        params,
        wanted,
    )


def waits(tx, first):
    """Of each loop in a round: its length, and whether a collective is an input."""
    worker = lc.local_round(squares, tx, length=H)
    params = start()
    one = jax.tree.map(lambda x: x[0], targets(K))
    batches = jax.tree.map(lambda x: jnp.stack([x] * H), one)
    state = jax.tree.map(lambda x: x[0], lc.init(tx, lc.stack(params, K)))
    jaxpr, *_ = trace(
        worker, (params, state, batches, first), axis_env=[("workers", K)]
    )
    late, loops = set(), []
    for eqn in jaxpr.eqns:
        inputs = {v for v in eqn.invars if not hasattr(v, "val")}
        talks = bool(rows_of_equation(eqn, SIZES))
        if eqn.primitive.name == "scan":
            loops.append((eqn.params["length"], bool(inputs & late), talks))
        if talks or inputs & late:
            late |= set(eqn.outvars)
    return loops


def test_what_arrives_late_is_no_input_of_the_steps_between():
    inner = optax.sgd(0.125)
    late = lc.rounds(inner, optax.sgd(1.0), when=lc.every(H), delay=H)
    prompt = lc.rounds(inner, optax.sgd(1.0), when=lc.every(H))
    for name in ("overlap_local_sgd", "cocod_sgd", "oldsgd"):
        assert waits(made(name), H - 1) == [(H - 1, False, False)], name
    assert waits(late, H - 1) == [(H - 1, False, False)]
    # Where a round adopts at once what it heard, its next steps start from it.
    assert waits(prompt, H - 1) == [(H - 1, True, False)]


def test_a_delay_shorter_than_the_round_hides_behind_as_many_steps():
    inner = optax.sgd(0.125)
    tx = lc.rounds(inner, optax.sgd(1.0), when=lc.every(H), delay=H - 1)
    assert waits(tx, H - 1) == [(H - 2, False, False)]


def test_silent_steps_of_a_round_send_nothing():
    tx = made("diloco")
    one = jax.tree.map(lambda x: x[0], targets(K))
    batches = jax.tree.map(lambda x: jnp.stack([x] * (H - 1)), one)
    state = jax.tree.map(lambda x: x[0], lc.init(tx, lc.stack(start(), K)))
    silent = lc.local_round(squares, tx, length=H - 1)
    assert not lc.traffic(silent, start(), state, batches, H, workers=K).rows


def test_a_batch_of_another_length_is_told():
    tx = made("diloco")
    run = lc.counted_round(squares, tx, length=H, workers=K)
    params = lc.stack(start(), K)
    with pytest.raises(ValueError, match=r"one batch for each of 4 steps"):
        run(params, lc.init(tx, params), targets(K), 0)
    with pytest.raises(ValueError, match="at least one step"):
        lc.counted_round(squares, tx, length=0, workers=K)


def test_two_levels_are_one_program_too():
    method = CATALOGUE["layered_sgd"]
    tx = method.make(workers=K, steps=8, learning_rate=0.125, inner=optax.sgd(0.125))
    place = place_of("vmap", K, method.axis)
    how = {"workers": K, "axis": method.axis, **place}
    run = lc.counted_round(squares, tx, length=2, **how)
    batches = jax.tree.map(lambda x: jnp.repeat(x[:, None], 2, 1), targets(K))
    params = lc.stack(start(), K)
    state = lc.init(tx, params, axis=method.axis, **place)
    assert run(params, state, batches, 0)[3].bytes > 0
