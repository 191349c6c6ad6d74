"""Whose devices are whose, and where the parameters of a worker's devices lie."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lowcomm as lc
from experiments import sharding
from experiments.models import MLP, PatchMixer, SmallCNN
from experiments.transformer import LanguageModel
from lowcomm.meshes import devices_of_workers, path_name


def machine(*, slices=1, processes=1, each=4):
    """Devices in an order that says nothing; every process has ``each``."""
    devices = [
        SimpleNamespace(
            slice_index=s,
            process_index=s * processes + p,
            id=(s * processes + p) * each + i,
        )
        for s in range(slices)
        for p in range(processes)
        for i in range(each)
    ]
    return list(np.random.default_rng(0).permutation(np.array(devices, object)))


def ids(groups):
    return [[device.id for device in group] for group in groups]


def test_workers_are_neighbours_in_the_order_of_slices_processes_and_devices():
    groups = devices_of_workers(machine(slices=2, processes=2, each=2), 4, 2)
    assert ids(groups) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    mesh = lc.worker_mesh(2, inside={"fsdp": 2, "tensor": 2})
    assert dict(mesh.shape) == {"workers": 2, "fsdp": 2, "tensor": 2}
    assert [d.id for d in mesh.devices.flat] == [d.id for d in jax.devices()]


@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_worker_that_fits_a_process_lies_in_one(group):
    groups = devices_of_workers(machine(slices=2, processes=2, each=4), None, group)
    assert groups.shape == (16 // group, group)
    assert all(len({d.process_index for d in worker}) == 1 for worker in groups)


def test_a_larger_worker_takes_whole_processes_of_one_slice():
    groups = devices_of_workers(machine(slices=2, processes=2, each=4), 2, 8)
    assert [{d.slice_index for d in worker} for worker in groups] == [{0}, {1}]


@pytest.mark.parametrize("how", [{"slices": 3, "each": 4}, {"slices": 2, "each": 2}])
def test_a_worker_never_straddles_slices(how):
    devices = machine(**how)
    with pytest.raises(ValueError, match=rf"straddle.*of {how['each']} devices"):
        devices_of_workers(devices, None, 4 if how["each"] == 2 else 6)


def test_workers_and_devices_must_come_out_even_where_devices_would_be_left_out():
    with pytest.raises(ValueError, match=r"3 workers of 4 need 12 devices.* sees 8"):
        lc.worker_mesh(3, inside={"fsdp": 4})
    with pytest.raises(ValueError, match=r"1 worker of 4 takes 4 devices.* sees 8"):
        devices_of_workers(machine(processes=2, each=4), 1, 4)
    with pytest.raises(ValueError, match="other axes than 'workers'"):
        lc.worker_mesh(2, inside={"workers": 2})
    with pytest.raises(ValueError, match="sizes of 1 or more"):
        lc.worker_mesh(2, inside={"fsdp": 0})


def shapes(model: nn.Module, x):
    return jax.eval_shape(model.init, jax.random.key(0), x)


IMAGE = jnp.zeros((1, 28, 28, 1))
MODELS = {
    "language": shapes(LanguageModel(), jnp.zeros((1, 64), jnp.int32)),
    "mixer": shapes(PatchMixer(), IMAGE),
    "mlp": shapes(MLP(), IMAGE),
    "cnn": shapes(SmallCNN(), IMAGE),
    "least squares": {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)},
}
IS_SPEC = {"is_leaf": lambda x: isinstance(x, P)}


def by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree, **IS_SPEC)
    return {path_name(path): x for path, x in leaves}


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"fsdp": 4, "tensor": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_divided_as_far_as_its_sizes_allow(name, sizes):
    params = MODELS[name]
    specs = by_path(sharding.specs(params, sizes))
    lc.spmd.leaf_specs(sharding.specs(params, sizes), params, sizes)  # they fit
    whole = 0
    for path, x in by_path(params).items():
        over = [a for part in specs[path] if part for a in np.atleast_1d(part)]
        assert len(set(over)) == len(over)
        for axis, size in sizes.items():
            if axis not in over:
                assert all(side % size for side in x.shape)
                whole += x.size
    # Only what is odd: biases of 10 classes.
    assert whole <= 20


def test_the_transformer_is_divided_as_megatron_divides_it():
    specs = by_path(sharding.specs(MODELS["language"], {"fsdp": 4, "tensor": 2}))
    columns, rows = P("fsdp", "tensor"), P("tensor", "fsdp")
    for layer in range(2):
        made = [specs[f"params/Dense_{4 * layer + i}/kernel"] for i in range(4)]
        assert made == [columns, rows, columns, rows]  # qkv, back, MLP in, out
    assert specs["params/head/kernel"] == columns
    assert specs["params/Embed_0/embedding"] == P(None, ("fsdp", "tensor"))
    assert specs["params/RMSNorm_0/scale"] == P(("fsdp", "tensor"))
    square = sharding.leaf_spec("head/kernel", (256, 256), {"fsdp": 4, "tensor": 2})
    assert square == columns


def test_what_is_odd_stays_whole():
    sizes = {"fsdp": 4, "tensor": 2}
    assert sharding.leaf_spec("a", (), sizes) == P()
    assert sharding.leaf_spec("a", (3, 5), sizes) == P(None, None)
    assert sharding.leaf_spec("a", (3, 2), sizes) == P(None, "tensor")
    assert sharding.leaf_spec("a", (3, 8), sizes) == P(None, ("fsdp", "tensor"))


def test_no_device_is_given_more_than_its_part():
    mesh = lc.worker_mesh(2, inside={"fsdp": 4})
    tree = {"w": np.arange(8.0), "k": jax.random.key(0)}
    placed = lc.stack(tree, 2, mesh=mesh, specs={"w": P("fsdp"), "k": None})
    for shard in placed["w"].addressable_shards:
        assert shard.data.nbytes == 2 * 4
        start = shard.index[1].start
        np.testing.assert_array_equal(shard.data[0], [start, start + 1])
    plain = lc.stack(tree, 2)
    assert (placed["w"].dtype, placed["w"].weak_type) == (plain["w"].dtype, False)
    assert bool(jnp.all(placed["k"] == plain["k"]))
    np.testing.assert_array_equal(lc.unstack(placed, 1)["w"], tree["w"])
