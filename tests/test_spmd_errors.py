"""What cannot be spread, and what is placed on the workers: errors, stacks, keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from lowcomm import spmd
from lowcomm.keys import leaf_keys
from lowcomm.spmd import AXIS, stack, worker_mesh
from lowcomm.workers import spread


def floats(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


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
