"""Workers that are groups of devices: a mesh of workers × fsdp."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import lowcomm as lc
from lowcomm import shards
from lowcomm.keys import of_shard
from lowcomm.spmd import place

K, S = 2, 4  # workers, devices of each
SPECS = {"b": None, "s": P(), "w": P(None, "fsdp")}


def made(how):
    """The mesh as users make it: ``Mesh(...)`` is automatic, ``make_mesh`` explicit."""
    if how == "make_mesh":
        return jax.make_mesh((K, S), ("workers", "fsdp"))
    return Mesh(np.array(jax.devices()).reshape(K, S), ("workers", "fsdp"))


MESH = made("Mesh")


def draw(*shape):
    rng = np.random.default_rng(shape)  # the same in whatever order tests are run
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


START = {"b": draw(16), "s": draw(), "w": draw(8, 16)}
BATCH = draw(K, 4, 8)


def loss(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w"]) + params["b"] * params["s"]))


# An exchange, and the payload bytes of one leaf of a shape.
top_k, int8 = lc.top_k(0.1), lc.quantize(8)
sent_by = lambda compressor: lambda x: lc.payload_bytes(compressor, x)
COMPRESSED = {
    "top_k": (lc.error_feedback(top_k), sent_by(top_k)),
    "random_k": (lc.error_feedback(lc.random_k(0.25)), sent_by(lc.random_k(0.25))),
    "int8": (lc.compressed_mean(int8), sent_by(int8)),
    "difference": (lc.difference_feedback(top_k), sent_by(top_k)),
    "powersgd": (
        lc.powersgd(2, min_compression=1.0),
        lambda x: lc.lowrank.low_rank_bytes(x, 2, min_compression=1.0),
    ),
}
MIXING = {"mean": lc.mean(), "gossip": lc.gossip(lc.ring(K))}


def shards_of(x):
    """What each device of a worker's group holds of ``w``, ``[S, …]``."""
    return jnp.stack(jnp.split(x, S, axis=-1))


def by_hand(exchange, w, steps):
    """``exchange`` on every shard of ``w [K, 8, 16]`` by itself, virtual workers."""

    def worker(part):
        state, heard = exchange.init(part), []
        for t in range(steps):
            out, state = exchange.update({"w": part["w"] * (t + 1)}, state, step=t)
            heard.append(out["w"])
        return jnp.stack(heard)

    each = []
    for i, part in enumerate(jnp.split(w, S, axis=-1)):
        with of_shard(shards._shard_number("fsdp") + i):
            each.append(lc.spread(worker)({"w": part}))
    return jnp.concatenate(each, axis=-1)


@pytest.mark.parametrize("name", COMPRESSED)
def test_each_shard_is_exchanged_by_itself(name):
    exchange = COMPRESSED[name][0]
    w = draw(K, 8, 16)

    def worker(tree):
        tx = lc.per_shard(exchange, {"w": P(None, "fsdp")}, axes="fsdp")
        state, heard = tx.init(tree), []
        for t in range(3):
            out, state = tx.update({"w": tree["w"] * (t + 1)}, state, step=t)
            heard.append(out["w"])
        return jnp.stack(heard)

    tree = place({"w": w}, MESH, specs={"w": P(None, "fsdp")})
    got = jax.jit(lc.spread(worker, mesh=MESH))(tree)
    # Two workers' sums have one order. QR and fused products round otherwise on
    # another program: some dozens of roundings of what was said in three steps, w, 2 w
    # and 3 w.
    scale = 6 * float(jnp.abs(w).max())
    np.testing.assert_allclose(got, by_hand(exchange, w, 3), atol=64 * 2**-24 * scale)


def test_shards_of_equal_content_are_rounded_by_numbers_of_their_own():
    tx = lc.per_shard(lc.compressed_mean(int8), P("fsdp"), axes="fsdp")
    worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
    same = jnp.tile(draw(1, 16), (K, S))
    call = jax.jit(lc.spread(worker, mesh=MESH))
    rounded = np.asarray(call(place(same, MESH, specs=P("fsdp"))))[0].reshape(S, 16)
    assert len({row.tobytes() for row in rounded}) == S


@pytest.mark.parametrize("check", [True, False])
def test_where_all_axes_are_manual_already_it_is_the_same_exchange(check):
    tx = lc.per_shard(lc.compressed_mean(int8), P(None, "fsdp"), axes="fsdp")
    worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
    w = place(draw(K, 8, 16), MESH, specs=P(None, "fsdp"))
    spec = P("workers", None, "fsdp")
    by_hand = jax.shard_map(
        lambda g: lc.spmd.vary(worker(g[0])[None], ("workers", "fsdp")),
        mesh=MESH,
        in_specs=spec,
        out_specs=spec,
        check_vma=check,
    )
    expected = jax.jit(lc.spread(worker, mesh=MESH))(w)
    np.testing.assert_array_equal(jax.jit(by_hand)(w), expected)


def compiled(tx, mesh=MESH):
    params = lc.stack(START, K, mesh=mesh, specs=SPECS)
    state = lc.init(tx, params, mesh=mesh)
    step = lc.spread(lc.local_step(loss, tx), mesh=mesh, in_axes=(0, 0, 0, None))
    lowered = jax.jit(step).lower(params, state, place(BATCH, mesh), jnp.int32(0))
    return lc.compiled_traffic(lowered.compile(), mesh=mesh)


def between_workers(sent):
    rows = [row for row in sent.rows if "workers" in (row.axis, *row.axis)]
    return sum(row.bytes for row in rows)


def shard(x, spec):
    return (
        x
        if not spec
        else jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] // S), x.dtype)
    )


@pytest.mark.parametrize("how", ["Mesh", "make_mesh"])
@pytest.mark.parametrize("name", COMPRESSED)
def test_a_device_sends_the_payload_of_its_shard(name, how):
    exchange, payload = COMPRESSED[name]
    tx = optax.chain(lc.per_shard(exchange, SPECS, axes="fsdp"), optax.adam(1e-3))
    expected = sum(payload(shard(START[k], SPECS[k])) for k in START)
    assert between_workers(compiled(tx, made(how))) == expected


def test_without_it_every_device_would_send_the_payload_of_the_whole_leaf():
    # Why per_shard is there: nothing but the compiled program shows it.
    exchange, payload = COMPRESSED["int8"]
    tx = optax.chain(exchange, optax.adam(1e-3))
    assert between_workers(compiled(tx)) == sum(map(payload, START.values()))


@pytest.mark.parametrize("how", ["Mesh", "make_mesh"])
@pytest.mark.parametrize("name", MIXING)
def test_a_dense_exchange_sends_the_shard_by_itself(name, how):
    tx = optax.chain(MIXING[name], optax.adam(1e-3))
    sent = compiled(tx, made(how))
    whole = sum(4 * shard(START[k], SPECS[k]).size for k in START)
    of_w = 4 * shard(START["w"], SPECS["w"]).size
    assert of_w in [row.bytes for row in sent.rows if row.axis == "workers"]
    # What is not divided the compiler may divide on its own, or not.
    assert of_w < between_workers(sent) <= whole


@pytest.mark.parametrize("how", ["Mesh", "make_mesh"])
def test_an_elementwise_function_sends_nothing(how):
    mesh = made(how)
    params = lc.stack(START, K, mesh=mesh, specs=SPECS)
    double = jax.jit(lc.spread(lambda p: jax.tree.map(lambda x: 2 * x, p), mesh=mesh))
    program = double.lower(params).compile()
    assert lc.compiled_traffic(program, mesh=mesh).rows == ()


METHODS = {
    "diloco": lc.diloco(
        optax.adam(1e-2),
        period=2,
        exchange=lc.per_shard(lc.error_feedback(top_k), SPECS, axes="fsdp"),
    ),
    "local_sgd": lc.local_sgd(optax.adam(1e-2), period=2),
    "powersgd": optax.chain(
        lc.per_shard(lc.powersgd(2, min_compression=1.0), SPECS, axes="fsdp"),
        optax.adam(1e-2),
    ),
}


def placed(tree):
    """Of every array that has one part a device, the axis its parts lie along."""
    return {
        jax.tree_util.keystr(path): tuple(x.sharding.spec)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.parametrize("how", ["Mesh", "make_mesh"])
@pytest.mark.parametrize("name", METHODS)
def test_parameters_state_anchor_and_residuals_keep_the_models_sharding(name, how):
    mesh, tx, seen = made(how), METHODS[name], []
    run = lc.fit(
        loss,
        tx,
        START,
        lambda t: BATCH,
        steps=4,
        workers=K,
        mesh=mesh,
        specs=SPECS,
        on_step=lambda t, params, state, metrics: seen.append(placed((params, state))),
    )
    params = lc.stack(START, K, mesh=mesh, specs=SPECS)
    first = placed((params, lc.init(tx, params, mesh=mesh)))
    assert seen == [first] * 4
    divided = {path for path, spec in first.items() if "fsdp" in spec}
    sharded = {path for path in first if path.endswith("['w']")}
    assert divided == sharded
    assert len(sharded) >= 3
    if name == "local_sgd":  # a reduction is counted whole, a worker
        expected = 4 * sum(x.size for x in START.values())
    else:  # what each of its devices sends by itself, also of what they all hold
        payload = COMPRESSED["top_k" if name == "diloco" else "powersgd"][1]
        devices = mesh.shape["fsdp"]
        expected = devices * sum(payload(shard(START[k], SPECS[k])) for k in START)
    assert run.payload.max() == expected
    assert (run.payload > 0).tolist() == [name == "powersgd", True] * 2


@pytest.mark.parametrize("name", ["diloco", "local_sgd"])
def test_a_group_of_devices_trains_as_one_device_does(name):
    # Where a worker is one device, per_shard is the exchange of the whole leaf; top-k
    # then takes other entries, so the methods compared send everything.
    exchange = lc.per_shard(lc.error_feedback(lc.top_k(1.0)), SPECS, axes="fsdp")
    tx = {
        "diloco": lc.diloco(optax.adam(1e-2), period=2, exchange=exchange),
        "local_sgd": lc.local_sgd(optax.adam(1e-2), period=2),
    }[name]
    how = {"batches": lambda t: BATCH, "steps": 6, "workers": K}
    alone = lc.fit(loss, tx, START, **how)
    grouped = lc.fit(loss, tx, START, mesh=MESH, specs=SPECS, **how)
    for x, y in zip(
        *(jax.tree.leaves(r.params) for r in (alone, grouped)), strict=True
    ):
        # Adam divides by the root of a squared gradient: a rounding of 2^-24 in a
        # small gradient moves a weight by at most the rate times its relative error.
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_the_variance_check_makes_no_difference():
    tx = lc.per_shard(lc.error_feedback(top_k), SPECS, axes="fsdp")
    tree = place(jax.tree.map(lambda x: draw(K, *x.shape), START), MESH, specs=SPECS)

    def local(tree):
        tree = jax.tree.map(lambda x: x[0], tree)
        heard, state = tx.update(tree, tx.init(tree), step=0)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], (heard, state))

    spec = P("workers")
    how = {"mesh": MESH, "in_specs": spec, "out_specs": spec, "axis_names": {"workers"}}
    both = [jax.jit(jax.shard_map(local, check_vma=c, **how))(tree) for c in (0, 1)]
    for x, y in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", COMPRESSED)
def test_for_virtual_workers_a_shard_is_the_whole_leaf(name):
    exchange = COMPRESSED[name][0]
    runs = [
        lc.fit(
            loss,
            optax.chain(tx, optax.sgd(0.1)),
            START,
            lambda t: BATCH,
            steps=2,
            workers=K,
        )
        for tx in (exchange, lc.per_shard(exchange, dict.fromkeys(SPECS), axes="fsdp"))
    ]
    for x, y in zip(*(jax.tree.leaves(r.params) for r in runs), strict=True):
        np.testing.assert_array_equal(x, y)
    # Divided leaves are another call: the same bytes.
    tx = optax.chain(lc.per_shard(exchange, SPECS, axes="fsdp"), optax.sgd(0.1))
    again = lc.fit(loss, tx, START, lambda t: BATCH, steps=2, workers=K)
    assert again.payload.tolist() == runs[0].payload.tolist()


def test_leaves_may_be_divided_over_several_axes():
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    mesh = Mesh(devices, ("workers", "fsdp", "tensor"))
    specs = {"b": P("tensor"), "s": P(), "w": P("fsdp", "tensor")}
    tx = lc.per_shard(lc.compressed_mean(int8), specs, axes=("fsdp", "tensor"))
    tree = lc.stack(START, K, mesh=mesh, specs=specs)
    worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
    call = jax.jit(lc.spread(worker, mesh=mesh))
    sent = lc.compiled_traffic(call.lower(tree).compile(), mesh=mesh)
    shape = lambda *n: jax.ShapeDtypeStruct(n, jnp.float32)
    parts = (shape(8), shape(), shape(4, 8))
    assert between_workers(sent) == sum(lc.payload_bytes(int8, x) for x in parts)
    assert sum(row.bytes for row in sent.rows) == between_workers(sent)
    # All workers hold the same, and int8 keeps a value to half a step of its shard.
    for x, y in zip(*map(jax.tree.leaves, (call(tree), tree)), strict=True):
        assert float(jnp.abs(x - y).max()) <= float(jnp.abs(y).max()) / 127


def test_functions_of_the_path_and_prefixes_are_specs_too():
    where = lambda path: P(None, "fsdp") if path.endswith("w") else None
    exchange = COMPRESSED["int8"][0]
    byte = {
        between_workers(
            compiled(
                optax.chain(lc.per_shard(exchange, s, axes="fsdp"), optax.sgd(1.0))
            )
        )
        for s in (where, SPECS)
    }
    assert len(byte) == 1
    inside = lambda tree: lc.spmd.leaf_specs(P("fsdp"), tree, {"fsdp": 4})
    assert inside({"a": jnp.zeros(8), "c": {"d": jnp.zeros((4, 1))}})["c"]["d"] == P(
        "fsdp"
    )


def test_extra_arguments_reach_every_shard():
    tx = lc.per_shard(lc.weighted_mean(), SPECS, axes="fsdp")
    worker = lambda g, w: tx.update(g, tx.init(g), weight=w)[0]
    tree = jax.tree.map(lambda x: draw(K, *x.shape), START)
    weights = jnp.array([3.0, 1.0])
    call = jax.jit(lc.spread(worker, mesh=MESH))
    got = call(place(tree, MESH, specs=SPECS), weights)
    for x, y in zip(*map(jax.tree.leaves, (got, tree)), strict=True):
        expected = jnp.broadcast_to((3 * y[0] + y[1]) / 4, y.shape)
        np.testing.assert_allclose(x, expected, rtol=4 * 2**-23, atol=2**-23)
