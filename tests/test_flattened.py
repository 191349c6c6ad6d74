"""A whole tree as one vector: selected from all leaves, put back where it was."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import lowcomm as lc
from lowcomm import compressed_mean, error_feedback, flattened, mean, spread, top_k

K = 4
SHAPES = {"w": (3, 4), "b": (8,)}


def trees(seed=0):
    """Two leaves of very different magnitude, another one on each worker."""
    rng = np.random.default_rng(seed)
    size = {"w": 1000.0, "b": 1.0}
    return {
        name: jnp.asarray(size[name] * rng.standard_normal((K, *shape)), jnp.float32)
        for name, shape in SHAPES.items()
    }


def hear(tx, tree, **options):
    worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
    return jax.jit(spread(worker, **options))(tree)


def largest_of(x, k):
    """One worker's vector with its k largest entries alone."""
    out = np.zeros_like(x)
    chosen = np.argsort(-np.abs(x), kind="stable")[:k]
    out[chosen] = x[chosen]
    return out


@pytest.mark.parametrize("mesh", [None, "mesh"])
def test_flattened_top_k_is_of_the_tree_and_bare_top_k_of_each_leaf(mesh):
    tree, options = trees(), {"mesh": mesh and lc.worker_mesh(K)}
    exchange = compressed_mean(top_k(0.25))
    flat = {n: np.asarray(x).reshape(K, -1) for n, x in tree.items()}
    # Three of twelve and two of eight, or five of all, which are all in "w".
    by_leaf = {n: [largest_of(x, x.size // 4) for x in flat[n]] for n in flat}
    both = np.concatenate([flat["b"], flat["w"]], axis=1)  # leaves in their order
    of_all = np.mean([largest_of(x, 5) for x in both], axis=0)
    heard = hear(exchange, tree, **options)
    together = hear(flattened(exchange), tree, **options)
    for name in SHAPES:
        expected = np.mean(by_leaf[name], axis=0)
        np.testing.assert_allclose(heard[name][1].ravel(), expected, rtol=1e-6)
        assert np.any(heard[name])
    np.testing.assert_allclose(together["w"][2].ravel(), of_all[8:], rtol=1e-6)
    assert not np.any(together["b"])
    assert not np.any(of_all[:8])


def test_the_small_leaf_is_heard_once_its_memory_has_grown():
    tx, tree = flattened(error_feedback(top_k(0.25))), trees()
    steps = 6

    def worker(g):
        def step(state, t):
            heard, state = tx.update(g, state, step=t)
            return state, heard

        return jax.lax.scan(step, tx.init(g), jnp.arange(steps))

    state, heard = jax.jit(spread(worker))(tree)
    error = optax.tree.get(state, "error")["real"]
    assert error.shape == (K, 20)
    # Nothing is lost: what all heard and the mean of what is left is all there was.
    said = np.concatenate(
        [np.asarray(heard[n], np.float64)[0].sum(0).ravel() for n in ("b", "w")]
    )
    given = np.concatenate(
        [steps * np.asarray(tree[n], np.float64).mean(0).ravel() for n in ("b", "w")]
    )
    left = np.asarray(error, np.float64).mean(0)
    # At most a few dozen roundings at the size of the largest entries.
    np.testing.assert_allclose(said + left, given, atol=32 * 2**-23 * steps * 3000)


def mixed():
    return {
        "wide": jnp.full((2,), 3.0),
        "half": jnp.full((3,), 2.0, jnp.bfloat16),
        "complex": jnp.full((2,), 1 + 1j, jnp.complex64),
        "none": None,
        "empty": jnp.zeros((0, 4)),
        "steps": jnp.arange(3),
        "scalar": jnp.float32(5),
    }


def seen(tree):
    """What an exchange inside is handed: types and shapes."""
    noted = {}

    def update(updates, state, params=None, **extra):
        noted["updates"] = jax.tree.map(lambda x: (x.dtype, x.shape), updates)
        noted["params"] = jax.tree.map(lambda x: (x.dtype, x.shape), params)
        noted["extra"] = extra
        return jax.tree.map(lambda x: 2 * x, updates), state

    tx = flattened(optax.GradientTransformationExtraArgs(lambda p: (), update))
    out, _ = tx.update(
        tree, tx.init(tree), tree, step=3, loss=1.0, about="displacements"
    )
    return out, noted


def test_mixed_types_make_a_vector_they_promote_to_and_complex_leaves_another():
    tree = mixed()
    out, noted = seen(tree)
    assert noted["updates"] == noted["params"]
    assert noted["updates"]["real"] == (jnp.float32, (6,))
    assert noted["updates"]["complex"] == (jnp.complex64, (2,))
    assert noted["extra"] == {"step": 3, "loss": 1.0, "about": "displacements"}
    for name, x in tree.items():
        assert (out[name] is None) == (x is None)
        if x is not None:
            assert (out[name].dtype, out[name].shape) == (x.dtype, x.shape)
            factor = 1 if name == "steps" else 2
            np.testing.assert_array_equal(out[name], factor * x)
    _, noted = seen({"a": tree["half"], "b": tree["half"]})
    assert noted["updates"] == {"real": (jnp.bfloat16, (6,))}


@pytest.mark.parametrize("tree", [{}, {"steps": jnp.arange(3)}, {"e": jnp.zeros((0,))}])
def test_a_tree_in_which_nothing_takes_part_stays(tree):
    stacked = lc.stack(tree, K)
    for exchange in (mean(), error_feedback(top_k(0.1)), error_feedback(lc.sign())):
        out = hear(flattened(exchange), stacked) if tree else {}
        for name in tree:
            np.testing.assert_array_equal(out[name], stacked[name])


def test_it_sends_one_payload_for_the_tree():
    tree = {n: jax.ShapeDtypeStruct(shape, jnp.float32) for n, shape in SHAPES.items()}
    tx = flattened(error_feedback(top_k(0.25)))
    worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
    sent = lc.traffic(worker, tree, workers=K)
    vector = jax.ShapeDtypeStruct((20,), jnp.float32)
    assert sent.bytes_max == lc.payload_bytes(top_k(0.25), vector)


@pytest.mark.parametrize("compressor", [top_k(0.25), lc.random_k(0.25)])
def test_of_a_tree_of_one_vector_it_is_the_exchange_itself_in_rounds(compressor):
    def run(exchange):
        tx = lc.rounds(
            optax.sgd(0.5), optax.sgd(1.0), exchange=exchange, when=lc.every(2)
        )

        def worker(params, goal):
            def step(carry, t):
                params, state = carry
                moves, state = tx.update(params - goal, state, params, step=t)
                params = optax.apply_updates(params, moves)
                return (params, state), params

            return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(8))[1]

        goal = trees(1)["b"]
        return np.asarray(jax.jit(spread(worker))(jnp.zeros_like(goal), goal))

    exchange = error_feedback(compressor)
    np.testing.assert_array_equal(run(flattened(exchange)), run(exchange))


def groups():
    return Mesh(np.array(jax.devices()).reshape(K, 2), ("workers", "fsdp"))


def test_divided_leaves_are_refused_with_the_remedy():
    tx = flattened(error_feedback(top_k(0.25)))
    with pytest.raises(ValueError, match=r"per_shard\(flattened"):
        hear(tx, trees(), mesh=groups())


def test_per_shard_it_selects_from_each_devices_part_and_sends_its_payload():
    where = {"w": P(None, "fsdp"), "b": P("fsdp")}
    exchange = lc.per_shard(flattened(compressed_mean(top_k(0.25))), where, axes="fsdp")
    tree, mesh = trees(), groups()
    worker = lambda g: exchange.update(g, exchange.init(g), step=0)[0]
    program = spread(worker, mesh=mesh)
    placed = lc.spmd.place(tree, mesh, specs=where)
    heard = jax.jit(program)(placed)
    for shard in (0, 1):
        own = {
            "b": np.asarray(tree["b"])[:, 4 * shard : 4 * shard + 4],
            "w": np.asarray(tree["w"])[:, :, 2 * shard : 2 * shard + 2],
        }
        vectors = np.concatenate([own[n].reshape(K, -1) for n in ("b", "w")], axis=1)
        # A quarter of ten is 2.5, rounded up.
        expected = np.mean([largest_of(x, 3) for x in vectors], axis=0)
        part = np.asarray(heard["w"])[1, :, 2 * shard : 2 * shard + 2].ravel()
        np.testing.assert_allclose(part, expected[4:], rtol=1e-6)
    compiled = jax.jit(program).lower(placed).compile()
    sent = lc.compiled_traffic(compiled, mesh=mesh)
    vector = jax.ShapeDtypeStruct((10,), jnp.float32)
    assert sent.bytes_max == lc.payload_bytes(top_k(0.25), vector)


def test_a_gradient_that_jax_summed_already_is_not_hidden_in_the_vector():
    tx, mesh = flattened(mean()), lc.worker_mesh(K)

    def worker(x):
        grads = {"own": x[0], "shared": jnp.ones(3)}
        return jax.tree.map(lambda y: y[None], tx.update(grads, (), step=0)[0])

    program = jax.shard_map(
        worker, mesh=mesh, in_specs=P("workers"), out_specs=P("workers")
    )
    with pytest.raises(ValueError, match="already summed"):
        jax.eval_shape(program, jnp.ones((K, 3)))


def test_a_tree_of_more_elements_than_indices_is_refused():
    half = jax.ShapeDtypeStruct((2**30,), jnp.bfloat16)
    tx = flattened(compressed_mean(top_k(0.1)))
    with pytest.raises(ValueError, match=r"2147483648 elements.*per_shard"):
        jax.eval_shape(tx.init, {"a": half, "b": half})


def test_what_is_no_exchange_is_refused():
    with pytest.raises(ValueError, match="exchange must be"):
        flattened(top_k(0.1))
