"""What is asked for wrongly where a worker is a group of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

import lowcomm as lc
from tests.quadratics import squares

K, S = 2, 4  # workers, devices of each
MESH = Mesh(np.array(jax.devices()).reshape(K, S), ("workers", "fsdp"))
ZERO = {"a": jnp.zeros((6, 8)), "b": jnp.zeros(3)}


@pytest.mark.parametrize(
    ("specs", "complaint"),
    [
        ({"a": P("fsdp"), "b": None}, r"leaf \['a'\].*6 entries, 4 shards"),
        ({"a": P("model"), "b": None}, r"'model', which is none of \('fsdp',\)"),
        ({"a": P(), "b": P(None, "fsdp")}, r"leaf \['b'\].*divides 2 dimensions"),
        ({"a": P()}, "prefix of the tree"),
        ({"a": P(), "b": P(), "c": P()}, "prefix of the tree"),
        (lambda path: "fsdp", r"spec of leaf \['a'\] is 'fsdp'"),
    ],
)
def test_specs_that_do_not_fit_are_refused_by_leaf(specs, complaint):
    tx = lc.per_shard(lc.mean(), specs, axes="fsdp")
    with pytest.raises(ValueError, match=complaint):
        jax.eval_shape(lc.spread(tx.init, mesh=MESH), lc.stack(ZERO, K))
    with pytest.raises(ValueError, match=complaint):
        lc.stack(ZERO, K, mesh=MESH, specs=specs)


def test_the_worker_axis_is_no_axis_of_a_shard():
    with pytest.raises(ValueError, match="worker axis"):
        lc.per_shard(lc.mean(), None, axes="workers")


def test_a_mesh_without_the_worker_axis_is_refused_by_name():
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    with pytest.raises(ValueError, match=r"\('fsdp',\) and no \['workers'\]"):
        lc.spread(lambda x: x, mesh=mesh)
    with pytest.raises(ValueError, match=r"\('fsdp',\) and no \['workers'\]"):
        lc.stack(ZERO, K, mesh=mesh)
    with pytest.raises(ValueError, match=r"\('fsdp',\) and no \['workers'\]"):
        lc.fit(
            squares,
            lc.local_sgd(optax.sgd(0.1), period=2),
            jnp.zeros(3),
            lambda t: jnp.zeros((K, 3)),
            steps=1,
            workers=K,
            mesh=mesh,
        )


def test_a_tree_of_another_division_than_at_init_is_refused():
    tx = lc.per_shard(lc.mean(), {"a": P(None, "fsdp"), "b": None}, axes="fsdp")
    abstract = AbstractMesh((K, S), ("workers", "fsdp"))

    def worker(tree):
        return tx.update({"a": None, "b": tree["b"]}, tx.init(tree))[0]

    with pytest.raises(ValueError, match="other axes than those init saw"):
        jax.eval_shape(lc.spread(worker, mesh=abstract), lc.stack(ZERO, K))


def test_axes_that_the_mesh_lacks_are_refused_with_those_it_has():
    tx = lc.per_shard(lc.mean(), {"a": P(None, "fspd"), "b": None}, axes="fspd")
    with pytest.raises(ValueError, match=r"\('fspd',\), and this mesh has \['fsdp'\]"):
        jax.eval_shape(lc.spread(tx.init, mesh=MESH), lc.stack(ZERO, K))
    # A worker that is one device has no such axes, and needs none.
    workers = lc.worker_mesh(K)
    assert jax.eval_shape(lc.spread(tx.init, mesh=workers), lc.stack(ZERO, K))


def test_a_state_made_elsewhere_is_answered_with_where_to_make_it():
    specs = {"a": P(None, "fsdp"), "b": None}
    tx = lc.per_shard(lc.error_feedback(lc.top_k(0.5)), specs, axes="fsdp")
    state = lc.stack(tx.init(ZERO), K)
    worker = lambda g, s: tx.update(g, s, step=0)[0]
    with pytest.raises(ValueError, match=r"1 shards over fsdp, and here are 4.*init"):
        jax.eval_shape(lc.spread(worker, mesh=MESH), lc.stack(ZERO, K), state)


def test_what_jax_cannot_do_on_such_a_mesh_is_said_with_the_way_out():
    tx = lc.local_sgd(optax.MultiSteps(optax.sgd(0.1), 2), period=2)
    how = {"batches": lambda t: jnp.zeros((K, 3)), "steps": 1, "workers": K}
    with pytest.raises(ValueError, match="accumulate in the loss, choose another"):
        lc.fit(squares, tx, jnp.zeros(3), mesh=MESH, **how)
    lc.fit(squares, tx, jnp.zeros(3), mesh=lc.worker_mesh(K), **how)
