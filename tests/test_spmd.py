"""One worker's code on virtual workers, on a mesh and under pmap."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from lowcomm import spmd, uniform
from lowcomm.spmd import AXIS, NotUniform, stack, worker_mesh
from lowcomm.workers import spread

BACKENDS = ("vmap", "shard_map", "pmap")
COLLECTIVE = re.compile(r"all-reduce|all-gather|all-to-all|collective|reduce-scatter")


def how(backend, workers=8):
    """The arguments of spread for one backend."""
    return {
        "vmap": {},
        "shard_map": {"mesh": worker_mesh(workers)},
        "pmap": {"backend": "pmap"},
    }[backend]


def on_all(worker, *args, in_axes=0, workers=8):
    """The results of ``worker`` on the three backends."""
    return [
        jax.tree.map(
            np.asarray, spread(worker, in_axes=in_axes, **how(b, workers))(*args)
        )
        for b in BACKENDS
    ]


def floats(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def talk_if(fire):
    """A worker that asks its argument whether to talk."""
    talk = lambda x: lax.pmean(x, AXIS)
    return lambda x, t: uniform.cond(fire(x, t), talk, lambda x: x, x, axis=AXIS)


@pytest.mark.parametrize("workers", [1, 3, 5, 8])
def test_one_worker_function_gives_the_same_on_all_backends(workers):
    def worker(tree, scale):
        total = lax.psum(tree["w"], AXIS)
        place = spmd.worker_index(AXIS)
        around = [(i, (i + 1) % workers) for i in range(workers)]
        heard = lax.ppermute(tree["w"], AXIS, around)
        return {"w": (total - tree["w"]) * scale + heard, "place": place + tree["b"]}

    args = {"w": floats(workers, 2), "b": np.arange(workers)}, jnp.float32(2)
    one, *rest = on_all(worker, *args, in_axes=(0, None), workers=workers)
    w = args[0]["w"]
    np.testing.assert_array_equal(one["w"], (w.sum(0) - w) * 2 + np.roll(w, 1, 0))
    np.testing.assert_array_equal(one["place"], 2 * np.arange(workers))
    for other in rest:
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_in_axes_is_a_prefix_tree_in_which_none_is_shared():
    def worker(model, inputs):
        return model["w"] * model["scale"] + inputs["x"] + inputs["deep"]["bias"]

    model = {"w": floats(8, 2), "scale": np.float32(3)}
    inputs = {"x": floats(8, 2), "deep": {"bias": floats(2), "unused": floats(5)}}
    in_axes = ({"w": 0, "scale": None}, {"x": 0, "deep": None})
    expected = 4 * floats(8, 2) + floats(2)
    for out in on_all(worker, model, inputs, in_axes=in_axes):
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_python_numbers_stay_python_numbers(backend):
    seen = []

    def worker(x, shared):
        seen.append(shared)
        return x * shared["scale"]

    shared = {"step": 3, "flag": True, "scale": 0.5}
    out = spread(worker, in_axes=(0, None), **how(backend))(floats(8), shared)
    np.testing.assert_array_equal(out, floats(8) / 2)
    assert seen
    for got in seen:
        assert got == shared
        assert {k: type(v) for k, v in got.items()} == {
            "step": int,
            "flag": bool,
            "scale": float,
        }


@pytest.mark.parametrize("backend", BACKENDS)
def test_none_bool_integer_and_key_leaves_pass_through(backend):
    keys = jax.random.split(jax.random.key(0), 8)
    tree = {
        "none": None,
        "bool": np.arange(8) > 3,
        "int": np.arange(8, dtype=np.int32),
        "key": keys,
    }
    out = spread(lambda tree: tree, **how(backend))(tree)
    assert out["none"] is None
    np.testing.assert_array_equal(out["bool"], tree["bool"])
    np.testing.assert_array_equal(out["int"], tree["int"])
    assert out["int"].dtype == jnp.int32
    same = jax.random.key_data(out["key"]) == jax.random.key_data(keys)
    assert same.all()


def test_both_kinds_of_mesh_take_numpy_and_give_the_same_bits():
    x = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    worker = lambda x, t: lax.pmean(x, AXIS) * t + x
    explicit = jax.make_mesh((8,), (AXIS,))
    on = lambda mesh: jax.jit(spread(worker, mesh=mesh, in_axes=(0, None)))
    expected = np.asarray(on(worker_mesh(8))(x, 3))
    np.testing.assert_array_equal(on(explicit)(x, 3), expected)
    placed = jax.device_put(x, NamedSharding(explicit, P(AXIS)))
    np.testing.assert_array_equal(on(explicit)(placed, 3), expected)


@pytest.mark.parametrize("explicit", [False, True])
def test_spread_works_under_a_mesh_set_for_the_context(explicit):
    mesh = jax.make_mesh((8,), (AXIS,)) if explicit else worker_mesh(8)
    worker = lambda x, t: lax.pmean(x, AXIS) + t
    with jax.set_mesh(mesh):
        for given in (None, mesh):
            run = spread(worker, mesh=given, in_axes=(0, None))
            np.testing.assert_array_equal(run(floats(8), 1), np.full(8, 4.5))
            np.testing.assert_array_equal(jax.jit(run)(floats(8), 1), np.full(8, 4.5))
        with pytest.raises(NotUniform):
            spread(talk_if(lambda x, t: x > 3))(floats(8), floats(8))


@pytest.mark.parametrize("explicit", [False, True])
def test_an_elementwise_function_on_workers_times_fsdp_sends_nothing(explicit):
    auto = Mesh(np.array(jax.devices()).reshape(2, 4), (AXIS, "fsdp"))
    mesh = jax.make_mesh((2, 4), (AXIS, "fsdp")) if explicit else auto
    x = jax.device_put(floats(2, 8), NamedSharding(mesh, P(AXIS, "fsdp")))
    call = jax.jit(spread(lambda x: x * 2 + 1, mesh=mesh))
    compiled = call.lower(x).compile()
    assert not COLLECTIVE.findall(compiled.as_text())
    out = compiled(x)
    np.testing.assert_array_equal(out, floats(2, 8) * 2 + 1)
    assert out.addressable_shards[0].data.shape == (1, 2)


def test_the_mesh_other_axes_are_left_to_the_compiler():
    mesh = jax.make_mesh((2, 4), (AXIS, "fsdp"))
    x = jax.device_put(floats(2, 8), NamedSharding(mesh, P(AXIS, "fsdp")))
    call = jax.jit(spread(lambda x: lax.pmean(x, AXIS), mesh=mesh))
    compiled = call.lower(x).compile()
    out = compiled(x)
    np.testing.assert_array_equal(out, np.tile(floats(2, 8).mean(0), (2, 1)))
    # One all-reduce of the local quarter, between the same quarters of both workers.
    reduces = re.findall(r"= (\S+) all-reduce\(", compiled.as_text())
    assert [re.match(r"f32\[[\d,]*\]", r).group() for r in reduces] in (
        ["f32[1,2]"],
        ["f32[2]"],
    )
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stacked_step_is_refused_by_name(backend):
    clock = talk_if(lambda x, t: uniform.now(t, AXIS) % 4 == 3)
    with pytest.raises(NotUniform, match=r"step differs between workers.*'workers'"):
        spread(clock, **how(backend))(floats(8), np.zeros(8, np.int32))
    shared = spread(clock, in_axes=(0, None), **how(backend))
    np.testing.assert_array_equal(shared(floats(8), np.int32(3)), np.full(8, 3.5))
    np.testing.assert_array_equal(shared(floats(8), np.int32(4)), floats(8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_predicate_that_differs_between_workers_is_refused(backend):
    with pytest.raises(NotUniform, match="a predicate differs between workers"):
        spread(talk_if(lambda x, t: x > t), in_axes=(0, None), **how(backend))(
            floats(8), np.float32(3)
        )
    agreed = talk_if(lambda x, t: lax.pmax(x, AXIS) > t)
    run = spread(agreed, in_axes=(0, None), **how(backend))
    np.testing.assert_array_equal(run(floats(8), np.float32(3)), np.full(8, 3.5))
    np.testing.assert_array_equal(run(floats(8), np.float32(9)), floats(8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scan_and_jit_nest_inside_a_worker(backend):
    @jax.jit
    def body(x, t):
        mean = lambda x: lax.pmean(x, AXIS)
        x = uniform.cond(t % 3 == 2, mean, lambda x: x + 1, x, axis=AXIS)
        return x, x.sum()

    worker = lambda x: lax.scan(body, x, jnp.arange(6))
    last, sums = jax.jit(spread(worker, **how(backend)))(floats(8, 2))
    expected = np.tile(floats(8, 2).mean(0) + 4, (8, 1))
    np.testing.assert_array_equal(last, expected)
    assert sums.shape == (8, 6)


def test_a_worker_that_does_not_trace_on_a_mesh_runs_with_a_warning():
    def worker(x):
        body = lambda total, _: (total + x, None)
        return lax.scan(body, jnp.zeros(2), length=3)[0]  # the carry starts unmarked

    with pytest.warns(UserWarning, match="could not check this function"):
        out = spread(worker)(floats(8, 2))
    np.testing.assert_array_equal(out, 3 * floats(8, 2))

    def marked(x):
        body = lambda total, _: (total + x, None)
        return lax.scan(body, spmd.vary(jnp.zeros(2), AXIS), length=3)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(spread(marked)(floats(8, 2)), out)


def test_an_error_of_the_worker_itself_is_not_hidden_by_the_check():
    def worker(x):
        raise KeyError("the worker's own")

    with pytest.raises(KeyError, match="the worker's own"):
        spread(worker)(floats(8))


def test_two_axes_run_on_virtual_workers_of_an_abstract_mesh():
    def worker(x):
        here = lax.pmean(x, "chip")
        return here, lax.pmean(here, "site"), spmd.worker_index(("site", "chip"))

    mesh = AbstractMesh((2, 3), ("site", "chip"))
    axis = ("site", "chip")
    chip, site, index = spread(worker, mesh=mesh, axis=axis, backend="vmap")(floats(6))
    np.testing.assert_array_equal(chip, [1, 1, 1, 4, 4, 4])
    np.testing.assert_array_equal(site, np.full(6, 2.5))
    np.testing.assert_array_equal(index, np.arange(6))
    devices = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), axis)
    on_devices = spread(worker, mesh=devices, axis=axis)(floats(6))
    jax.tree.map(np.testing.assert_array_equal, on_devices, (chip, site, index))
    with pytest.raises(ValueError, match=r"pass mesh=.*AbstractMesh"):
        spread(worker, axis=axis)(floats(6))


def test_a_jitted_spread_is_traced_once():
    traces = []

    def worker(x, t):
        traces.append(t)
        return x + lax.pmean(x, AXIS) * t

    for backend in BACKENDS:
        traces.clear()
        mesh = None if backend == "vmap" else worker_mesh(8)
        call = spread(worker, in_axes=(0, None), mesh=mesh, backend=backend)
        step = jax.jit(call)
        x = step(stack(jnp.zeros(2), 8, mesh=mesh), jnp.int32(0))
        first = len(traces)
        assert first == 2  # the check, and the program itself
        for t in range(1, 4):
            x = step(x, jnp.int32(t))
        assert len(traces) == first


def test_the_check_is_made_once_for_each_kind_of_arguments():
    traces = []

    def worker(x):
        traces.append(x)
        return 2 * x

    run = spread(worker)
    for _ in range(3):
        run(floats(8))
    assert len(traces) == 1 + 3
    run(floats(8, 2))
    assert len(traces) == 1 + 3 + 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_spread_may_donate_its_arguments(backend):
    step = spread(
        lambda x, t: lax.pmean(x, AXIS) + t, in_axes=(0, None), **how(backend)
    )
    step = jax.jit(step, donate_argnums=0)
    x = stack(jnp.arange(2.0), 8, mesh=how(backend).get("mesh"))
    for t in range(3):
        x = step(x, jnp.int32(t))
    np.testing.assert_array_equal(x, np.tile([3.0, 4.0], (8, 1)))


def test_two_stacked_leaves_and_nothing_shared_are_the_same_under_pmap():
    # pmap takes in_axes=(0, None) for a list of two leaves as one entry a leaf.
    worker = lambda tree: jax.tree.map(lambda x: lax.pmean(x, AXIS) + x.sum(), tree)
    tree = {"w": floats(8, 4, 3), "b": floats(8, 3)}
    virtual, on_mesh, pmapped = on_all(worker, tree)
    jax.tree.map(np.testing.assert_array_equal, pmapped, virtual)
    jax.tree.map(np.testing.assert_array_equal, on_mesh, virtual)
