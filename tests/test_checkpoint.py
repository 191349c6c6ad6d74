"""A run goes on from a checkpoint as if it had never stopped, bit for bit."""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import lowcomm as lc
from lowcomm import checkpoint
from lowcomm.checkpoint import Checkpoints
from lowcomm.manifest import DTYPES, is_key
from tests.problems import (
    BACKENDS,
    PERIOD,
    STEPS,
    Carry,
    begin,
    method,
    start,
    stepper,
    targets,
)

METHODS = ("diloco", "selsync", "top_k_sgd", "delayed")
PHASES = range(PERIOD - 1, 2 * PERIOD - 1)  # of a round, across its sync


@functools.cache
def transformation(name):
    """A method, and one that has an exchange pending and a residual when it stops."""
    if name != "delayed":
        return method(name)
    return lc.rounds(
        optax.sgd(0.5, momentum=0.5),
        optax.sgd(0.75, momentum=0.5, nesterov=True),
        exchange=lc.error_feedback(lc.top_k(0.25)),
        when=lc.every(PERIOD),
        delay=2,
    )


@functools.cache
def program(name):
    """Its step, which may destroy its argument, with a count of its traces."""
    traces = []
    step = stepper(transformation(name))

    def counted(*args):
        traces.append(1)
        return step(*args)

    return jax.jit(counted, donate_argnums=0), traces


@functools.cache
def path(name):
    """All carries of the run that is never stopped, the first one too."""
    first = begin(transformation(name))
    return [jax.tree.map(np.array, first), *go_on(name, 0, first)]


def go_on(name, first, carry):
    """The carries after each step from step ``first`` on."""
    carries = []
    for t in range(first, STEPS):
        carry = program(name)[0](carry, targets(), jnp.int32(t))
        carries.append(jax.tree.map(np.array, carry))
    return carries


def raw(tree):
    """Every leaf's bits."""
    data = lambda x: jax.random.key_data(x) if is_key(x) else x
    return [np.asarray(data(x)).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", METHODS)
def test_a_run_goes_on_bit_for_bit_from_every_phase_of_a_round(name, tmp_path):
    step, traces = program(name)
    carry = begin(transformation(name))
    with Checkpoints(tmp_path, keep=len(PHASES)) as saved:
        for t in range(PHASES[-1]):
            carry = step(carry, targets(), jnp.int32(t))
            if t + 1 in PHASES:
                saved.save(t + 1, carry)
    before = len(traces)
    for phase in PHASES:
        at, carry = saved.restore(begin(transformation(name)), phase)
        assert at == phase
        assert raw(carry) == raw(path(name)[phase])
        assert raw(go_on(name, at, carry)) == raw(path(name)[phase + 1 :])
    assert len(traces) == before  # the types are those of the program


STATE = {
    "diloco": {"params", "inner", "outer", "anchor"},
    "selsync": {"params", "inner", "smoothed"},
    "top_k_sgd": {"params", "error", "trace"},
    "delayed": {"params", "inner", "outer", "anchor", "error", "heard", "sent"},
}


@pytest.mark.parametrize("name", METHODS)
def test_no_piece_of_the_state_can_be_left_out(name):
    mattered = set()
    for phase in (PERIOD + 1, PERIOD + 2):  # before and after what is delayed arrives
        leaves, structure = jax.tree.flatten(path(name)[phase])
        paths = jax.tree_util.tree_leaves_with_path(path(name)[phase])
        for i, first in enumerate(jax.tree.leaves(path(name)[0])):
            lacking = [*leaves[:i], first, *leaves[i + 1 :]]
            there = go_on(name, phase, jax.tree.unflatten(structure, lacking))
            if raw(there) != raw(path(name)[phase + 1 :]):
                where = jax.tree_util.keystr(paths[i][0], simple=True, separator=" ")
                mattered |= set(where.split())
    assert mattered >= STATE[name]


def test_the_loop_goes_on_while_a_save_is_written_and_may_destroy_the_carry(
    tmp_path, monkeypatch
):
    gone_on, seal = threading.Event(), checkpoint.file_list

    def late(folder):
        assert gone_on.wait(60)
        return seal(folder)

    monkeypatch.setattr(checkpoint, "file_list", late)
    step, _ = program("diloco")
    carry = begin(transformation("diloco"))
    with Checkpoints(tmp_path) as saved:
        for t in range(STEPS):
            carry = step(carry, targets(), jnp.int32(t))
            if t == 2:
                saved.save(t + 1, carry)
                old = carry.params
        complete = saved.steps()
        gone_on.set()
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        assert complete == []  # all those steps did not wait for it
        assert raw(saved.restore(carry)[1]) == raw(path("diloco")[3])


def test_devices_may_reuse_their_buffers_while_every_second_step_is_saved(tmp_path):
    tx, bits = transformation("diloco"), {}
    step = jax.jit(stepper(tx, backend="shard_map"), donate_argnums=0)
    carry = begin(tx, backend="shard_map")
    with Checkpoints(tmp_path, keep=STEPS) as saved:
        for t in range(STEPS):
            carry = step(carry, targets(), jnp.int32(t))
            if t % 2:
                saved.save(t + 1, carry)
                bits[t + 1] = raw(carry)
        saved.wait()
        assert saved.steps() == list(bits)
        for at, expected in bits.items():
            assert raw(saved.restore(carry, at)[1]) == expected


def test_a_restored_carry_may_be_destroyed_and_leaves_the_file_alone(tmp_path):
    with Checkpoints(tmp_path) as saved:
        saved.save(PERIOD, jax.tree.map(jnp.asarray, path("diloco")[PERIOD]))
        for _ in range(2):
            _, carry = saved.restore(begin(transformation("diloco")))
            there = go_on("diloco", PERIOD, carry)
            assert all(x.is_deleted() for x in jax.tree.leaves(carry.params))
            assert raw(there) == raw(path("diloco")[PERIOD + 1 :])


@pytest.mark.parametrize("source", BACKENDS)
def test_a_checkpoint_is_the_same_for_all_backends(source, tmp_path):
    place = lambda backend: begin(method("diloco"), backend=backend)
    bits = path("diloco")[PERIOD + 1]
    put = lambda x, like: jax.device_put(x, like.sharding)
    with Checkpoints(tmp_path) as saved:
        saved.save(5, jax.tree.map(put, bits, place(source)))
        for target in BACKENDS:
            like = place(target)
            _, carry = saved.restore(like)
            assert raw(carry) == raw(bits)
            same = lambda x, y: x.sharding == y.sharding and x.committed == y.committed
            assert all(jax.tree.leaves(jax.tree.map(same, carry, like)))


def test_leaves_that_are_sharded_within_a_worker_come_back_to_their_devices(tmp_path):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("workers", "fsdp"))
    tx = lc.diloco(optax.adam(0.1), period=2)
    loss = lambda p, c: sum(jnp.sum((p[k] - c[k]) ** 2) for k in p)
    step = lc.spread(lc.local_step(loss, tx), mesh=mesh, in_axes=(0, 0, 0, None))
    step = jax.jit(step, donate_argnums=(0, 1))
    init = jax.jit(lc.spread(tx.init, mesh=mesh))
    specs = {"b": P("workers", "fsdp"), "s": P("workers"), "w": P("workers", "fsdp")}

    def first():
        spread_out = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        params = jax.tree.map(spread_out, lc.stack(start(), 2), specs)
        return Carry(params, init(params))

    def on(carry, begin, end):
        for t in range(begin, end):
            carry = Carry(*step(*carry, targets(2), jnp.int32(t))[:2])
            jax.block_until_ready(carry)
        return carry

    with Checkpoints(tmp_path) as saved:
        carry = on(first(), 0, 3)
        saved.save(3, carry)
        places = jax.tree.map(lambda x: x.sharding, carry)
        there = raw(on(carry, 3, 5))
        # The compiled step, not init, says where the state lies from the first step on.
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            first(),
            places,
        )
        at, carry = saved.restore(like)
    assert jax.tree.map(lambda x: x.sharding, carry) == places
    assert places.params["w"].spec == P("workers", "fsdp")
    assert raw(on(carry, at, 5)) == there


class Nested(NamedTuple):
    """A state as optimizers nest them."""

    inner: Any
    nothing: Any
    empty: Any


def everything():
    """Each kind of leaf that a carry may hold."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("workers", "fsdp"))
    on = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    keys = jax.random.split(jax.random.key(1), 2)
    # A quiet and a signaling NaN with payload, -0, the least number.
    odd = np.array([0x7FC00001, 0x7F800001, 0x80000000, 1], np.uint32).view("float32")
    numbers = {
        name: jnp.ones((2, 3)).astype(name)
        for name in sorted(DTYPES - {"float64", "complex128", "int64", "uint64"})
    }
    return {
        "numbers": numbers,
        "odd": jnp.asarray(odd),
        "keys": keys,
        "other keys": on(jax.random.split(jax.random.key(1, impl="rbg"), 2), "workers"),
        "a/b.c ['x'] ~é": on(jnp.arange(16.0).reshape(2, 8), "workers", "fsdp"),
        "replicated": on(jnp.arange(3), None),
        "weak": [jnp.asarray(2.5), jnp.asarray(3), on(jnp.asarray(-0.0))],
        "no entries": [jnp.zeros((2, 0), jnp.bfloat16), keys[:0], np.zeros((0, 3))],
        "numpy": [
            np.arange(3),
            np.float32(0.1),
            np.array(2.0),
            np.ones(2, "complex128"),
        ],
        "python": (3, 0.1, True, 1 + 2j, -(2**63)),
        "nested": Nested(
            {"x": Nested(jnp.ones(1), None, ())}, None, optax.EmptyState()
        ),
        "masked": optax.MaskedNode(),
    }


def test_every_kind_of_leaf_comes_back_as_it_was(tmp_path):
    traces = []
    step = jax.jit(lambda carry: traces.append(1) or jax.tree.map(lambda x: x, carry))
    with Checkpoints(tmp_path) as saved:
        saved.save(1, everything())
        _, carry = saved.restore(everything())
    assert jax.tree.structure(carry) == jax.tree.structure(everything())
    assert raw(carry) == raw(everything())
    for x, y in zip(*map(jax.tree.leaves, (everything(), carry)), strict=True):
        assert type(x) is type(y)
        assert getattr(x, "dtype", None) == getattr(y, "dtype", None)
        if isinstance(x, jax.Array):
            assert jax.typeof(x) == jax.typeof(y)  # weak or not
            assert x.sharding == y.sharding
            assert x.committed == y.committed
    step({k: v for k, v in everything().items() if k != "python"})
    step({k: v for k, v in carry.items() if k != "python"})
    assert len(traces) == 1
    draw = lambda key: jax.random.normal(key, 3)
    assert raw(jax.vmap(draw)(carry["keys"])) == raw(
        jax.vmap(draw)(everything()["keys"])
    )


def test_types_and_places_are_enough_to_restore(tmp_path):
    abstract = lambda x: (
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        if isinstance(x, jax.Array)
        else x
    )
    with Checkpoints(tmp_path) as saved:
        saved.save(1, everything())
        _, carry = saved.restore(jax.tree.map(abstract, everything()))
    assert raw(carry) == raw(everything())
    shardings = lambda tree: [
        getattr(x, "sharding", None) for x in jax.tree.leaves(tree)
    ]
    assert shardings(carry) == shardings(everything())


def test_the_newest_are_kept_with_settings_and_notes(tmp_path):
    folder = tmp_path / "runs" / "x"
    with Checkpoints(folder, keep=2, settings={"period": 4}) as saved:
        assert saved.resume(jnp.zeros(2))[0] == 0
        for t in range(0, 50, 10):
            saved.save(t, jnp.full(2, t), notes={"loss": t / 2})
    with Checkpoints(folder) as saved:
        assert saved.steps() == [30, 40]
        assert saved.about() == (40, {"period": 4}, {"loss": 20.0})
        assert saved.about(30).notes == {"loss": 15.0}
        at, x = saved.resume(jnp.zeros(2, int))
        assert (at, x.tolist()) == (40, [40, 40])
    assert sorted(f.name for f in folder.iterdir()) == ["30", "40"]
