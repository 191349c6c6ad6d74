"""Runs, models and checkpoints with workers that are groups of devices."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import lowcomm as lc
from experiments import compare, run, sharding, text
from experiments.language import language_task
from experiments.splits import iid
from experiments.transformer import LanguageModel
from lowcomm.checkpoint import Checkpoints

K = 2


@pytest.fixture(scope="module")
def task():
    letters = np.random.default_rng(0).integers(97, 123, 10 * text.BLOCK, np.uint8)
    corpus = text.corpus("letters", {"a": bytes(letters)})
    model = LanguageModel(width=16, layers=1, heads=2)
    return language_task(
        "letters", corpus, model, workers=K, batch_size=2, split=iid, length=16
    )


def trained(task, inside=None):
    tx = lc.data_parallel(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    params, how, loss = task.init(jax.random.key(0)), {}, task.loss
    if inside:
        specs, loss = sharding.specs(params, inside), sharding.divided(loss, inside)
        mesh = lc.worker_mesh(K, inside=inside)
        tx, how = lc.sharded(tx, specs), {"mesh": mesh, "specs": specs}
    return lc.fit(loss, tx, params, task.batches, steps=3, workers=K, **how)


def test_a_language_model_trains_divided_as_it_does_whole(task):
    whole, parts = trained(task), trained(task, {"fsdp": 2, "tensor": 2})
    # A loss is a mean of logarithms of sums of 256, of three layers of products of at
    # most 64: some hundreds of roundings of a number below 6.
    np.testing.assert_allclose(parts.losses, whole.losses, atol=512 * 2**-24 * 6)
    spec = parts.params["params"]["Dense_2"]["kernel"].sharding.spec
    assert spec == P("workers", "fsdp", "tensor")


SPECS = {"b": P("fsdp"), "w": P(None, "fsdp")}
START = {"b": np.arange(4, dtype=np.float32), "w": np.ones((3, 8), np.float32)}


def begun(tx, mesh):
    specs = SPECS if mesh is not None and "fsdp" in mesh.shape else None
    params = lc.stack(START, K, mesh=mesh, specs=specs)
    tx = lc.sharded(tx, SPECS)
    return params, lc.init(tx, params, mesh=mesh)


MESHES = {
    "the same": lambda: lc.worker_mesh(K, inside={"fsdp": 4}),
    "other devices": lambda: Mesh(
        np.array(jax.devices())[::-1].reshape(K, 4), ("workers", "fsdp")
    ),
    "smaller groups": lambda: lc.worker_mesh(K, inside={"fsdp": 2}),
    "without groups": lambda: lc.worker_mesh(K),
    "virtual workers": lambda: None,
}


def saved(carry, folder):
    rng = np.random.default_rng(0)
    fill = lambda x: jax.device_put(
        jnp.asarray(rng.integers(0, 9, x.shape), x.dtype), x.sharding
    )
    carry = jax.tree.map(fill, carry)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, carry)
    return carry


def test_a_checkpoint_of_divided_workers_is_restored_wherever_its_layout_is_the_same(
    tmp_path,
):
    tx = lc.diloco(optax.adam(0.1), period=2)
    carry = saved(begun(tx, MESHES["the same"]()), tmp_path)
    for name, mesh in MESHES.items():
        like = begun(tx, mesh())
        with Checkpoints(tmp_path) as checkpoints:
            _, again = checkpoints.restore(like)
        for x, y, z in zip(*map(jax.tree.leaves, (carry, again, like)), strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)
            assert y.sharding == z.sharding


def test_what_is_kept_by_shard_is_restored_on_as_many_shards_and_refused_elsewhere(
    tmp_path,
):
    tx = lc.sign_sgd(optax.sgd(0.1))
    carry = saved(begun(tx, MESHES["the same"]()), tmp_path)
    for name, mesh in MESHES.items():
        like = begun(tx, mesh())
        with Checkpoints(tmp_path) as checkpoints:
            if name in ("the same", "other devices"):
                _, again = checkpoints.restore(like)
                for x, y in zip(*map(jax.tree.leaves, (carry, again)), strict=True):
                    np.testing.assert_array_equal(x, y)
                continue
            with pytest.raises(ValueError, match=r"kept by shard.*as many devices"):
                checkpoints.restore(like)


def test_a_state_for_other_workers_is_refused():
    tx = lc.sharded(lc.sign_sgd(optax.sgd(0.1)), SPECS)
    mesh = MESHES["the same"]()
    params, state = begun(tx, None)
    with pytest.raises(
        ValueError, match=r"made for workers of one device.*here.*sever"
    ):
        update(tx, mesh, params, state)
    params, state = begun(tx, mesh)
    with pytest.raises(ValueError, match=r"made for workers of several.*here.*one"):
        update(tx, None, jax.device_get(params), jax.device_get(state))


def update(tx, mesh, params, state):
    step = lc.spread(lambda g, s: tx.update(g, s, step=0), mesh=mesh)
    return jax.eval_shape(step, params, state)


def test_an_exchange_of_other_leaves_than_the_parameters_is_refused():
    signs = lc.compressed_mean(lc.sign())
    renamed = optax.GradientTransformationExtraArgs(
        lambda params: signs.init({"all": params["w"]}),
        lambda g, s, p=None, **more: signs.update({"all": g["w"]}, s, **more),
    )
    with pytest.raises(
        ValueError, match="leaf 'all', and the parameters have 'b', 'w'"
    ):
        begun(renamed, MESHES["the same"]())


COMMON = (
    *("--task", "least-squares", "--workers", "2", "--steps", "4"),
    *("--compute", "1ms", "--batch-size", "8", "--learning-rate", "0.02"),
    *("--evaluations", "2"),
)


GROUPS = ("--backend", "shard_map")


def results(folder):
    return json.loads((folder / "results.json").read_text())["methods"]


def test_a_comparison_of_divided_workers_counts_what_all_devices_of_one_send(tmp_path):
    asked = (
        *COMMON,
        "--algorithms",
        "diloco,sign_sgd",
        "--period",
        "2",
        "--seeds",
        "1",
    )
    ways = {"one": (), "four": (*GROUPS, "--fsdp", "2", "--tensor", "2")}
    for name, way in ways.items():
        assert compare.main([*asked, *way, "--out", str(tmp_path / name)]) == 0
    one, four = results(tmp_path / "one"), results(tmp_path / "four")
    # Four steps of sums of at most 16 products, in another order.
    np.testing.assert_allclose(four["diloco"]["loss"], one["diloco"]["loss"], rtol=1e-5)
    assert four["diloco"]["bytes"] == one["diloco"]["bytes"]
    # Of 16 × 8 entries a bit each, and a scale: of the leaf, or of four shards of it.
    assert one["sign_sgd"]["bytes"] == [[0, 2 * 20, 4 * 20]]
    assert four["sign_sgd"]["bytes"] == [[0, 2 * 4 * 8, 4 * 4 * 8]]


def test_a_run_of_divided_workers_goes_on_where_it_was_saved(tmp_path):
    given = (*COMMON, *GROUPS, "--fsdp", "2", "--method", "sign_sgd")
    given = (*given, "--save-every", "2")
    given = (*given, "--out", str(tmp_path / "run"), "--resume")
    assert run.main(given) == 0
    first = results(tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    assert run.main(given) == 0
    again = results(tmp_path / "run")
    for name in ("loss", "distance", "bytes"):
        assert again["sign_sgd"][name] == first["sign_sgd"][name]


@pytest.mark.parametrize("backend", ["vmap", "pmap"])
def test_groups_of_devices_need_a_mesh(backend, tmp_path, capsys):
    given = ["--fsdp", "2", "--backend", backend, "--out", str(tmp_path)]
    assert run.main(["--task", "digits", "--workers", "2", *given]) == 2
    assert "--fsdp and --tensor need --backend shard_map" in capsys.readouterr().err
