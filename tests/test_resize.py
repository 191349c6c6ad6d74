"""A run goes on with more workers or fewer: what was agreed stays, and so do means.

That this holds of every method of the catalogue is the law "changes size".
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import lowcomm as lc
from lowcomm import handover
from lowcomm.legacies import RULES
from tests.problems import begin, start, stepper, targets

SGD = lc.local_sgd(optax.sgd(0.5), period=4)


def raw(tree):
    data = lambda x: jax.random.key_data(x) if handover.is_key(x) else x
    return [np.asarray(data(x)).tobytes() for x in jax.tree.leaves(tree)]


def apart(workers, shape=(3,), dtype=jnp.float32):
    """Parameters of workers that hold other numbers each."""
    rng = np.random.default_rng(workers)
    return jnp.asarray(rng.normal(size=(workers, *shape)), dtype)


def go_on(tx, carry, steps, *, first=0, workers, **where):
    """The carries of so many steps, on targets that differ by worker."""
    step = jax.jit(stepper(tx, workers=workers, **where))
    path = []
    for t in range(first, first + steps):
        carry = step(carry, targets(workers), jnp.int32(t))
        path.append(jax.block_until_ready(carry))
    return path


def trained(tx, steps, workers=4, **where):
    return go_on(tx, begin(tx, workers=workers, **where), steps, workers=workers)[-1]


CASES = [(4, 8, None), (8, 4, None), (4, 3, [3, 0, 1]), (5, 4, [1, 4]), (2, 1, [1])]


@pytest.mark.parametrize(("before", "after", "stay"), CASES)
def test_workers_are_mixed_by_a_doubly_stochastic_matrix(before, after, stay):
    # Worker i holds the i-th unit vector, so that the result is the matrix itself.
    x = jnp.eye(before)
    mixed, _ = lc.resize(SGD, (x, lc.init(SGD, x)), workers=after, stay=stay)
    stay = list(range(min(before, after))) if stay is None else stay
    expected = np.full((after, before), 1 / before)
    for place, i in enumerate(stay):
        left = [j not in stay for j in range(before)]
        expected[place] = np.array(left) / before
        expected[place, i] = len(stay) / before
    np.testing.assert_allclose(mixed, expected, rtol=2**-23)
    np.testing.assert_allclose(expected.sum(1), 1)
    np.testing.assert_allclose(expected.sum(0), after / before)
    assert (expected >= 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
def test_where_nobody_leaves_everybody_keeps_its_bits_in_any_order(dtype):
    x = apart(4, dtype=dtype)
    more, state = lc.resize(SGD, (x, lc.init(SGD, x)), workers=6, stay=[2, 0, 3, 1])
    assert raw(more[:4]) == raw(x[jnp.array([2, 0, 3, 1])])
    assert (more.dtype, state.since.shape) == (dtype, (6,))
    np.testing.assert_allclose(more[4], np.asarray(x, np.complex64).mean(0), rtol=2**-7)


def test_the_consensus_of_models_that_are_apart_stays():
    x = apart(8)
    carry = x, lc.init(SGD, x)
    agreed = lambda carry: lc.spread(lc.consensus)(carry[1], carry[0])[0]
    for workers in (4, 3, 1, 16):
        here = agreed(lc.resize(SGD, carry, workers=workers))
        # Two means of at most sixteen float32 numbers of this size.
        np.testing.assert_allclose(here, agreed(carry), atol=32 * 2**-24 * abs(x).max())


def test_every_state_of_the_library_has_a_rule():
    found = set()
    for module in pkgutil.walk_packages(lc.__path__, "lowcomm."):
        if ".testing" in module.name:
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.endswith("State") and hasattr(value, "_fields"):
                found.add(value)
    ours = {kind for kind in found if kind.__module__.startswith("lowcomm")}
    assert ours - set(RULES) == set()
    assert len(ours) > 35
    for kind, rule in RULES.items():  # and names no field that is not there
        assert not isinstance(rule, dict) or set(rule) <= set(kind._fields)


def test_what_neighbours_told_each_other_is_refused_and_kept_where_nothing_changes():
    tx = lc.choco_sgd(optax.sgd(0.5), lc.ring(4), lc.top_k(0.5), step_size=0.25)
    carry = trained(tx, 2)
    assert raw(lc.resize(tx, carry, workers=4)) == raw(carry)
    said = r"exchange.public\['b'\] of ChocoState is what neighbours of the old graph"
    with pytest.raises(ValueError, match=said):
        lc.resize(tx, carry, workers=8)


class OwnState(NamedTuple):
    """A state of somebody else's optimizer."""

    seen: Any


def own(value):
    start = lambda params: OwnState(value(params))
    return optax.GradientTransformation(start, lambda u, s, p=None: (u, s))


def test_a_state_of_an_unknown_type_is_refused_by_name_unless_it_is_equal():
    tx = lc.local_sgd(own(lambda p: p + 0), period=2)
    carry = apart(4), lc.init(tx, apart(4))
    with pytest.raises(ValueError, match=r"\.inner\.seen of OwnState differs between"):
        lc.resize(tx, carry, workers=2)
    rules = {OwnState: handover.mixed}
    _, state = lc.resize(tx, carry, workers=2, rules=rules)
    expected = np.asarray(carry[0])
    expected = expected[:2] / 2 + expected[2:].sum(0) / 4
    np.testing.assert_allclose(state.inner.seen, expected, rtol=2**-20, atol=2**-20)
    equal = lc.local_sgd(own(jnp.zeros_like), period=2)
    _, state = lc.resize(equal, (apart(4), lc.init(equal, apart(4))), workers=2)
    assert state.inner.seen.shape == (2, 3)


def test_groups_with_anchors_of_their_own_are_refused():
    tx = lc.diloco(optax.sgd(0.5), period=2)
    x = apart(4)
    with pytest.raises(ValueError, match=r"\.anchor of RoundsState must be the same"):
        lc.resize(tx, (x, lc.init(tx, x)), workers=2)


def test_everything_that_was_to_be_said_is_said_whoever_says_it():
    # Multiples of 4, and numbers of workers that are powers of two: all sums exact.
    tx = lc.error_feedback(lc.top_k(0.25))
    update = lc.spread(lambda g, s, t: tx.update(g, s, step=t), in_axes=(0, 0, None))
    update = jax.jit(update)
    grads = targets(4)["w"]
    state, heard = lc.init(tx, grads), 0.0
    for t in range(2):
        told, state = update(grads, state, t)
        heard += np.asarray(told[0])
    carry = grads, state  # any tree that is shaped alike
    for workers in (8, 2, 4):
        carry = lc.resize(tx, carry, workers=workers)
        told, state = update(0 * carry[0], carry[1], 2)
        heard, carry = heard + np.asarray(told[0]), (carry[0], state)
    owed = np.asarray(carry[1].error).mean(0)
    assert abs(owed).max() > 0
    np.testing.assert_array_equal(heard + owed, 2 * np.asarray(grads).mean(0))


@pytest.mark.parametrize("workers", [2, 8])
def test_what_all_heard_is_the_mean_of_what_each_said(workers):
    tx = lc.ef21(optax.sgd(0.5), lc.top_k(0.25))
    _, (state, *_) = lc.resize(tx, trained(tx, 5), workers=workers)
    for said, heard in zip(*map(jax.tree.leaves, state), strict=True):
        # Five sums of at most eight rounded numbers.
        size = 40 * np.spacing(np.float32(abs(said).max()))
        np.testing.assert_allclose(np.asarray(said).mean(0), heard[0], atol=size)
        assert (heard == heard[0]).all()


def test_the_residual_of_a_mean_is_cut_for_the_workers_there_are():
    tx = lc.two_stage_feedback(lc.sign())
    grads, rows = apart(4, (7,)), apart(4, (2,)).at[3, 1].set(0)  # behind the end
    state = lc.init(tx, grads)._replace(error=grads, shard=rows)
    update = lc.spread(lambda g, s: tx.update(g, s, step=0))
    whole = np.asarray(rows).ravel()[:7]
    for workers, size in ((3, 3), (5, 2), (1, 7), (8, 1)):
        more, now = lc.resize(tx, (grads, state), workers=workers)
        assert now.shard.shape == (workers, size)
        np.testing.assert_array_equal(np.asarray(now.shard).ravel()[:7], whole)
        assert not np.asarray(now.shard).ravel()[7:].any()
        jax.eval_shape(update, more, now)  # which is refused for other workers


METHODS = {
    "diloco": lambda n: lc.diloco(optax.adam(0.1), period=4),
    "sparse rounds": lambda n: lc.diloco(
        optax.sgd(0.5), period=4, exchange=lc.error_feedback(lc.top_k(0.25))
    ),
    "late": lambda n: lc.rounds(
        optax.sgd(0.5), optax.sgd(0.5), when=lc.every(4), delay=2, pull=0.5
    ),
    "ring": lambda n: lc.dpsgd(optax.sgd(0.5), lc.one_peer_exponential(n)),
    "self-clocked": lambda n: lc.local_sgd(lc.skip_nonfinite(optax.sgd(0.5)), period=4),
}


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("diloco", 8, 4),
        ("sparse rounds", 4, 8),
        ("late", 4, 8),
        ("ring", 4, 2),
        ("self-clocked", 2, 4),
    ],
)
def test_training_goes_on_on_devices_as_on_virtual_workers(name, before, after):
    make = METHODS[name]
    carry = trained(make(before), 6, before)
    tx, mesh = make(after), lc.worker_mesh(after)
    here = lc.resize(tx, carry, workers=after)
    there = lc.resize(tx, carry, workers=after, mesh=mesh)
    assert raw(there) == raw(here)
    workers = NamedSharding(mesh, P("workers"))
    for x in jax.tree.leaves(there):
        assert x.sharding.is_equivalent_to(workers, x.ndim)
    path = go_on(tx, here, 2, first=6, workers=after)
    other = go_on(tx, there, 2, first=6, workers=after, backend="shard_map")
    for x, y in zip(*map(jax.tree.leaves, (path[-1], other[-1])), strict=True):
        # Sums over workers may be formed in another order, two steps long.
        size = 8 * after * np.spacing(np.float32(max(1.0, abs(np.asarray(x)).max())))
        np.testing.assert_allclose(x, y, atol=size)
    if name not in ("late", "ring"):  # step 7 is a sync
        far = [np.ptp(np.asarray(x), axis=0).max() for x in path[-1].params.values()]
        assert max(far) <= 2 * np.spacing(np.float32(64))


def test_two_programs_serve_a_run_that_is_resized():
    tx = lc.diloco(optax.adam(0.1), period=2)
    mesh = lc.worker_mesh(4)
    run = lc.fit(
        lambda p, c: jnp.sum(jnp.square(p["w"] - c["w"])),
        tx,
        start(),
        lambda t: targets(8),
        steps=3,
        workers=8,
    )
    params, state = lc.resize(tx, (run.params, run.state), workers=4, mesh=mesh)
    loss = lambda p, c: jnp.sum(jnp.square(p["w"] - c["w"]))
    step = lc.counted_step(loss, tx, workers=4, mesh=mesh)
    programs = []
    for t in range(3, 9):
        params, state, _, sent = step(params, state, targets(4), t)
        programs.append(sent.program)
    assert programs == [0, 1, 0, 1, 0, 1]


def test_what_is_kept_by_shard_goes_along_while_the_shards_are_as_many():
    def made(workers, fsdp):
        devices = np.array(jax.devices()[: workers * fsdp]).reshape(workers, fsdp)
        mesh = Mesh(devices, ("workers", "fsdp"))
        where = lambda path: P("fsdp") if path == "w" else P()
        exchange = lc.per_shard(lc.error_feedback(lc.top_k(0.5)), where, axes="fsdp")
        return optax.chain(exchange, optax.sgd(0.5)), mesh, where

    tx, mesh, where = made(4, 2)
    params = lc.stack(start(), 4, mesh=mesh, specs=where)
    state = lc.init(tx, params, mesh=mesh)
    loss = lambda p, c: sum(jnp.sum(jnp.square(p[k] - c[k])) for k in p)
    step = lc.counted_step(loss, tx, workers=4, mesh=mesh)
    carry = step(params, state, targets(4), 0)[:2]
    fewer, mesh, where = made(2, 2)
    params, state = lc.resize(fewer, carry, workers=2, mesh=mesh, specs=where)
    kept, owed = (s[0].shards[1].error["w"] for s in (state, carry[1]))
    assert kept.shape == (2, 2, 4, 8)
    np.testing.assert_array_equal(np.asarray(kept).mean(0), np.asarray(owed).mean(0))
    assert params["w"].sharding.spec == P("workers", "fsdp")
    other, larger, where = made(2, 4)
    with pytest.raises(ValueError, match=r"for 2 workers keeps other arrays: .*error"):
        lc.resize(other, (params, state), workers=2, mesh=larger, specs=where)
    step = lc.counted_step(loss, fewer, workers=2, mesh=mesh)
    assert jnp.isfinite(step(params, state, targets(2), 1)[2]["loss"]).all()


def test_counts_schedules_and_keys_go_on():
    guarded = lc.skip_nonfinite(optax.adam(optax.linear_schedule(0.1, 0.0, 9)))
    tx = lc.local_sgd(guarded, period=2)
    grads = jnp.array([1.0, jnp.nan, 1.0, 1.0])
    x = {"x": jnp.zeros(4), "key": lc.stack(jax.random.key(0), 4)}
    state = lc.init(tx, x)
    update = lambda g, s, x: tx.update({"x": g, "key": x["key"]}, s, x, step=0)
    _, state = lc.spread(update)(grads, state, x)
    more, state = lc.resize(tx, (x, state), workers=6)
    adam, _ = (state.inner.guarded[0], state.inner.guarded[1])
    assert adam.count.tolist() == [1, 0, 1, 1, 1, 1]  # as far as the furthest
    assert state.inner.skipped.tolist() == [0, 1, 0, 0, 0, 0]
    assert raw(more["key"]) == raw(lc.stack(jax.random.key(0), 6))
    x["key"] = jax.random.split(jax.random.key(0), 4)
    with pytest.raises(ValueError, match=r"\['key'\] differs between workers"):
        lc.resize(tx, (x, lc.init(tx, x)), workers=6)


def test_positions_that_particles_found_stay_theirs():
    tx = lc.pso_ps(optax.sgd(0.1), period=1)
    x = apart(4)
    update = lambda x, loss: tx.update(x, tx.init(x), x, step=0, value=loss)[1]
    state = lc.spread(update)(x, jnp.arange(4.0))
    _, more = lc.resize(tx, (x, state), workers=5)
    assert more.best_loss.tolist()[:4] == [0, 1, 2, 3]
    assert more.best_loss[4] > 1e38
    assert not more.velocity[4].any()
    assert raw(more.best[:4]) == raw(state.best)


@pytest.mark.parametrize(
    ("wrong", "options", "said"),
    [
        (lambda c: c, {"stay": [0, 0]}, "must be different numbers of workers below 4"),
        (lambda c: c, {"stay": [4]}, "must be different numbers of workers below 4"),
        (lambda c: c, {"stay": [0, 1, 2]}, "1 to 2 of them can go on"),
        (lambda c: c, {"stay": []}, "1 to 2 of them can go on"),
        (lambda c: list(c), {}, r"takes the carry \(params, state\), not list"),
        (lambda c: (jnp.float32(0), c[1]), {}, "must be stacked"),
        (lambda c: (c[0], lc.init(SGD, apart(3))), {}, "not stacked for 4"),
        (lambda c: (c[0], optax.sgd(1.0).init(c[0])), {}, "keeps another state"),
        (lambda c: c, {"mesh": "of three"}, "workers=2 on a mesh of 3"),
    ],
)
def test_what_cannot_be_resized_is_said(wrong, options, said):
    if "mesh" in options:
        options = {"mesh": lc.worker_mesh(3)}
    carry = wrong((apart(4), lc.init(SGD, apart(4))))
    with pytest.raises(ValueError, match=said):
        lc.resize(SGD, carry, workers=2, **options)


def test_leaves_without_entries_and_numbers_that_are_not_finite_pass():
    x = {"none": jnp.zeros((4, 0)), "odd": jnp.array([1.0, jnp.inf, 3.0, 4.0])}
    more, _ = lc.resize(SGD, (x, lc.init(SGD, x)), workers=5)
    assert more["none"].shape == (5, 0)
    assert more["odd"].tolist()[:4] == [1.0, math.inf, 3.0, 4.0]
    assert more["odd"][4] == math.inf
