"""Every method of the catalogue with workers that are groups of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import lowcomm as lc
from experiments import sharding
from experiments.catalogue import CATALOGUE
from experiments.contracts import Setting
from lowcomm.ledger import Traffic
from lowcomm.shards import PerShardState
from lowcomm.spmd import names

RNG = np.random.default_rng(0)
START = {
    "b": jnp.asarray(RNG.normal(size=16), jnp.float32),
    "s": jnp.float32(3),
    "w": jnp.asarray(RNG.normal(size=(16, 32)), jnp.float32),
}
SPECS = {"b": P("fsdp"), "s": P(), "w": P(None, "fsdp")}
BOTH = {"b": P(("fsdp", "tensor")), "s": P(), "w": P("fsdp", "tensor")}
STEPS, RATE = 8, 0.01


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"]).reshape(-1, 16)
    return jnp.mean(jnp.square(hidden + params["b"] * params["s"]))


def batch(workers):
    return jnp.asarray(RNG.normal(size=(workers, 4, 16)), jnp.float32)


def grouped(axis=lc.AXIS, inside=None):
    """A mesh of two workers along each axis, and groups of what is left."""
    workers = dict.fromkeys(names(axis), 2)
    inside = inside or {"fsdp": 8 // 2 ** len(workers)}
    sizes = workers | inside
    devices = np.array(jax.devices()).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes))


def placed(tx, mesh, axis=lc.AXIS, specs=SPECS):
    workers = int(np.prod([mesh.shape[a] for a in names(axis)]))
    params = lc.stack(START, workers, mesh=mesh, axis=axis, specs=specs)
    return params, lc.init(tx, params, mesh=mesh, axis=axis)


def compiled(tx, carry, mesh, axis=lc.AXIS):
    """What an update sends, of gradients that lie like the parameters."""
    tx = optax.with_extra_args_support(tx)

    def update(params, state, step):
        value = jnp.sum(params["b"])
        return tx.update(params, state, params, step=step, value=value)

    call = jax.jit(lc.spread(update, mesh=mesh, axis=axis, in_axes=(0, 0, None)))
    program = call.lower(*carry, jnp.int32(0)).compile(QUICKLY)
    return lc.compiled_traffic(program, mesh=mesh)


# Only what is sent is looked at, of which the last passes of the compiler know nothing.
QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def between(sent, axis=lc.AXIS):
    """What a device sends to other workers: bytes of the step that sends most."""
    across = set(names(axis))
    rows = [row for row in sent.rows if across & set(names(row.axis))]
    return Traffic(tuple(rows)).bytes_max


def shard(specs, mesh):
    """The shapes of what one device holds of a worker's leaves."""

    def one(spec, x):
        sides = list(x.shape)
        for i, part in enumerate(spec):
            for name in names(part or ()):
                sides[i] //= mesh.shape[name]
        return jax.ShapeDtypeStruct(tuple(sides), x.dtype)

    return jax.tree.map(one, specs, START, is_leaf=lambda s: isinstance(s, P))


# They take leaves as one vector or in rows, and those that are not divided apart.
VECTORS = ("lossless_sgd", "fetch_sgd", "sketched_sgd", "sign_vote_sgd")


def payload(name, setting, mesh):
    """What the formulas of the catalogue say of a shard."""
    method, own = CATALOGUE[name], shard(SPECS, mesh)
    if name not in VECTORS:
        devices = mesh.size // setting.workers
        return method.sent_by_device(START, setting, own, devices).most
    whole = {"s": own.pop("s")}
    return sum(method.sent(part, setting).most for part in (own, whole))


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_device_sends_other_workers_the_payload_of_its_shard(name):
    method = CATALOGUE[name]
    mesh = grouped(method.axis)
    workers = 2 ** len(names(method.axis))
    setting = Setting(workers, STEPS, RATE, method.period, window=8)
    given = {"workers": workers, "steps": STEPS, "learning_rate": RATE, "window": 8}
    tx = sharding.sharded(name, SPECS, **given)
    carry = placed(tx, mesh, method.axis)
    sent = compiled(tx, carry, mesh, method.axis)
    assert between(sent, method.axis) == payload(name, setting, mesh)
    assert whole_entries(carry) <= MOST_WHOLE.get(name, 24)


# Narrow factors, which all devices of a worker hold, columns of length 32; and the
# norms of a hundred rounds for each of three leaves.
MOST_WHOLE = {
    "powersgd_sgd": 24 + 2 * 32,
    "dion": 24 + 4 * 32,
    "edgc": 24 + 2 * 32,
    "edit": 24 + 3 * 100,
}


def whole_entries(carry):
    """How many entries of a worker all its devices hold: scalars, windows, counts."""
    inside = lambda x: {n for part in x.sharding.spec for n in names(part or ())}
    leaves = [x for x in jax.tree.leaves(carry) if "fsdp" not in inside(x)]
    return sum(x.size // x.shape[0] for x in leaves)


COMPRESSED = {
    "sign": (lc.error_feedback(lc.sign()), lc.sign()),
    "top_k": (lc.error_feedback(lc.top_k(0.1)), lc.top_k(0.1)),
    "int8": (lc.compressed_mean(lc.quantize(8)), lc.quantize(8)),
}


@pytest.mark.parametrize("name", [*COMPRESSED, "two_stage", "mean", "powersgd"])
def test_shards_over_two_axes_are_sent_as_those_over_one(name):
    mesh = grouped(inside={"fsdp": 2, "tensor": 2})
    own = shard(BOTH, mesh)
    if name in COMPRESSED:
        exchange, compressor = COMPRESSED[name]
        expected = lc.payload_bytes(compressor, own)
    elif name == "two_stage":
        exchange = lc.two_stage(lc.quantize(8))
        expected = lc.row_means.two_stage_bytes(lc.quantize(8), own, workers=2)
    elif name == "powersgd":  # narrow factors, of which each sends an equal part
        exchange = lc.powersgd(2, min_compression=1.0)
        expected = lc.lowrank.low_rank_bytes(START, 2, own, 4, min_compression=1.0)
    else:
        exchange = lc.mean()
        expected = sum(4 * x.size for x in jax.tree.leaves(own))
    tx = lc.sharded(optax.chain(exchange, optax.adam(RATE)), BOTH)
    carry = placed(tx, mesh, specs=BOTH)
    assert between(compiled(tx, carry, mesh)) == expected


@pytest.mark.parametrize("spec", [P("fsdp", None), P(None, "fsdp"), P()])
def test_narrow_factors_are_sent_in_parts_however_the_matrix_lies(spec):
    # And a matrix that all devices hold stays where it is.
    mesh = grouped(inside={"fsdp": 4})
    params = lc.stack({"w": jnp.ones((32, 64))}, 2, mesh=mesh, specs={"w": spec})
    tx = lc.powersgd(2)
    carry = params, lc.init(tx, params, mesh=mesh)

    def update(params, state):
        return tx.update(params, state, params, step=0)

    program = jax.jit(lc.spread(update, mesh=mesh)).lower(*carry).compile(QUICKLY)
    sent = lc.compiled_traffic(program, mesh=mesh)
    assert between(sent) == 4 * 2 * (32 + 64) // 4
    within = [row for row in sent.rows if row.axis == "fsdp"]
    assert Traffic(tuple(within)).bytes_max < 32 * 64 * 4


def run(tx, *, mesh=None, specs=None, steps=3):
    draw = lambda t: np.random.default_rng(t).normal(size=(2, 4, 16))
    data = [jnp.asarray(draw(t), jnp.float32) for t in range(steps)]
    return lc.fit(loss, tx, START, data, steps=steps, workers=2, mesh=mesh, specs=specs)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.5))

# Norms, measures and factors are those of whole leaves.
WHOLE = {
    "clipped": lc.diloco(CLIPPED, period=2),
    "measured": lc.selsync(optax.sgd(0.1), threshold=0.05, window=2),
    "low rank": lc.powersgd_sgd(optax.sgd(0.1), rank=2, min_compression=1.0),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_method_that_compresses_nothing_trains_as_with_workers_of_one_device(name):
    tx = WHOLE[name]
    alone = run(tx)
    groups = run(lc.sharded(tx, SPECS), mesh=grouped(), specs=SPECS)
    for x, y in zip(*(jax.tree.leaves(r.params) for r in (alone, groups)), strict=True):
        # Three steps of sums of 16 products and fewer operations more, each rounded to
        # 2^-24 of what is at most the largest parameter.
        scale = float(jnp.abs(x).max())
        np.testing.assert_allclose(x, y, atol=3 * 32 * 2**-24 * scale)
    assert alone.payload.tolist() == groups.payload.tolist()


def test_a_clip_before_signs_is_of_the_whole_model_and_their_scales_are_a_shards():
    # The same as a method taken apart, with per_shard around its exchange alone.
    signs = lc.error_feedback(lc.sign())
    apart = lc.per_shard(signs, SPECS, axes="fsdp")
    whole = optax.chain(optax.clip_by_global_norm(0.05), signs, optax.sgd(0.1))
    parts = optax.chain(optax.clip_by_global_norm(0.05), apart, optax.sgd(0.1))
    mesh = grouped()
    one, other = (
        run(tx, mesh=mesh, specs=SPECS) for tx in (lc.sharded(whole, SPECS), parts)
    )
    for x, y in zip(*(jax.tree.leaves(r[:2]) for r in (one, other)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ["diana", "one_bit_adam"])
def test_with_one_shard_it_is_the_method_bit_for_bit(name):
    tx = CATALOGUE[name].make(
        workers=2, steps=4, learning_rate=RATE, period=2, inner=optax.sgd(RATE)
    )
    sharded = lc.sharded(tx, SPECS)
    group = lc.worker_mesh(2, inside={"fsdp": 1})
    for mesh in (None, group):  # the program is the same
        one, other = (
            jax.make_jaxpr(
                lc.spread(lc.local_step(loss, t), mesh=mesh, in_axes=(0, 0, 0, None))
            )(lc.stack(START, 2), lc.init(t, lc.stack(START, 2)), batch(2), 1)
            for t in (tx, sharded)
        )
        assert str(one) == str(other)
    if name == "diana":  # the compiler's part in it
        alone = run(tx, mesh=lc.worker_mesh(2), steps=2)
        shards = run(sharded, mesh=group, specs=SPECS, steps=2)
        for x, y in zip(
            *(jax.tree.leaves(r[:3]) for r in (alone, shards)), strict=True
        ):
            np.testing.assert_array_equal(x, y)


def test_what_is_kept_of_compressed_exchanges_is_kept_by_shard():
    tx = lc.sharded(lc.top_k_sgd(optax.adam(RATE)), SPECS)
    _, (kept, *_) = placed(tx, grouped())
    assert isinstance(kept, PerShardState)
    whole, divided = (state.error for state in kept.shards)
    assert whole["s"].shape == (2,)
    assert divided["w"].shape == (2, 4, 16, 8)
    assert {shard.data.nbytes for shard in divided["w"].addressable_shards} == {512}


def test_one_worker_may_be_a_group_of_devices():
    tx, how = WHOLE["measured"], {"steps": 2, "workers": 1}
    data = [batch(1) for _ in range(2)]
    alone = lc.fit(loss, tx, START, data, **how)
    mesh = lc.worker_mesh(1, inside={"fsdp": 4})
    groups = lc.fit(
        loss, lc.sharded(tx, SPECS), START, data, mesh=mesh, specs=SPECS, **how
    )
    for x, y in zip(*(jax.tree.leaves(r.params) for r in (alone, groups)), strict=True):
        scale = float(jnp.abs(x).max())
        np.testing.assert_allclose(x, y, atol=2 * 32 * 2**-24 * scale)
