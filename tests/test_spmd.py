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
from lowcomm.keys import leaf_keys
from lowcomm.spmd import AXIS, NotUniform, spread, stack, worker_mesh

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


def test_a_scalar_declared_stacked_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="such as step, with in_axes=None"):
        spread(lambda x, t: x + t)(floats(8), 3)


def test_leading_sizes_that_disagree_are_named():
    with pytest.raises(ValueError, match=r"leading sizes \[4, 8\]"):
        spread(lambda x, y: x)(floats(8), floats(4))


def test_a_stack_for_another_mesh_names_both_numbers():
    with pytest.raises(ValueError, match=r"for 4 workers and the mesh has 8"):
        spread(lambda x: x, mesh=worker_mesh(8))(floats(4))


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"'tpu'.*'vmap', 'shard_map' or 'pmap'"):
        spread(lambda x: x, backend="tpu")


def test_shard_map_needs_a_mesh():
    with pytest.raises(ValueError, match="needs mesh="):
        spread(lambda x: x, backend="shard_map")


def test_a_mesh_without_the_axis_is_refused_with_its_axes():
    with pytest.raises(ValueError, match=r"'workers'.*no \['sites'\]"):
        spread(lambda x: x, mesh=worker_mesh(2), axis="sites")


@pytest.mark.parametrize("in_axes", [1, (1,), ({"w": 1},)])
def test_other_axes_than_the_first_are_refused(in_axes):
    with pytest.raises(ValueError, match=r"0 \(stacked\) and None \(shared\), not 1"):
        spread(lambda tree: tree, in_axes=in_axes)({"w": floats(8, 8)})


def test_nothing_stacked_is_refused():
    with pytest.raises(ValueError, match="number of workers is unknown"):
        spread(lambda x: x, in_axes=None)(floats(8))


def test_pmap_is_refused_for_two_axes():
    with pytest.raises(ValueError, match="pmap has one axis"):
        spread(lambda x: x, axis=("a", "b"), backend="pmap")


def test_an_axis_that_is_not_bound_is_named():
    with pytest.raises(ValueError, match=r"axis 'sites' is not bound.*axis="):
        spread(lambda x: spmd.axis_size("sites") * x)(floats(8))
    with pytest.raises(ValueError, match=r"this mesh has 'workers'"):
        spread(lambda x: spmd.axis_size("sites") * x, mesh=worker_mesh(8))(floats(8))


def test_too_many_workers_names_the_setting_and_both_numbers():
    with pytest.raises(ValueError, match="64 workers need 64 devices and JAX sees 8"):
        worker_mesh(64)
    with pytest.raises(ValueError, match='"jax_num_cpu_devices", 64'):
        worker_mesh(64)
    with pytest.raises(ValueError, match="force_host_platform_device_count=64"):
        worker_mesh(64)
    with pytest.raises(ValueError, match="not 0"):
        worker_mesh(0)


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
        # The program itself, and once before it the check, which a mesh makes anyway.
        assert first <= (1 if backend == "shard_map" else 2)
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


@pytest.mark.parametrize("n", [1, 8])
def test_stack_copies_and_never_aliases(n):
    x = jnp.arange(3.0)
    for mesh in (None, worker_mesh(n)):
        stacked = stack({"a": x, "b": x}, n, mesh=mesh)
        np.testing.assert_array_equal(stacked["a"], np.tile(x, (n, 1)))
        step = jax.jit(lambda t: jax.tree.map(lambda y: y + 1, t), donate_argnums=0)
        out = step(stacked)
        np.testing.assert_array_equal(out["b"], np.tile(x, (n, 1)) + 1)
    np.testing.assert_array_equal(x, [0, 1, 2])


def test_stack_makes_strongly_typed_arrays_of_any_leaf():
    tree = {"number": 4.0, "weak": jnp.asarray(0.0), "key": jax.random.key(0)}
    out = stack(tree, 3)
    assert jax.tree.map(jnp.shape, out) == {"number": (3,), "weak": (3,), "key": (3,)}
    assert not out["number"].weak_type
    assert not out["weak"].weak_type
    assert jnp.issubdtype(out["key"].dtype, jax.dtypes.prng_key)


def test_stack_and_steps_agree_on_the_placement():
    mesh = worker_mesh(4)
    x = stack(floats(3), 4, mesh=mesh)
    assert x.sharding == NamedSharding(mesh, P(AXIS))
    step = jax.jit(spread(lambda x: lax.pmean(x, AXIS) + x, mesh=mesh))
    y = step(x)
    assert y.sharding.is_equivalent_to(x.sharding, x.ndim)
    step(y)
    assert step._cache_size() == 1


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


def test_keys_are_shared_or_private_and_differ_by_seed_step_and_leaf():
    def worker(i):
        keys = [leaf_keys(*of, AXIS) for of in ((0, 0, 0), (1, 0, 0), (0, 1, 0))]
        keys.append(leaf_keys(0, 0, 1, AXIS))
        data = lambda key: jax.random.key_data(key)
        shared = jnp.stack([data(k.shared) for k in keys])
        return shared, jnp.stack([data(k.private) for k in keys])

    shared, private = map(np.asarray, spread(worker)(np.arange(8)))
    assert (shared == shared[0]).all()
    # 4 shared ones, and 4 for each of the 8 workers: all different.
    everything = np.concatenate([shared[0], private.reshape(-1, 2)])
    assert len(np.unique(everything, axis=0)) == 4 + 4 * 8
