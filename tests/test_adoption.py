"""Each way a training loop that is there already takes up a method, in one line."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import lowcomm as lc

K, STEPS, PERIOD = 4, 8, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, K, 16, 5)).astype(np.float32)
Y = X @ RNG.normal(size=(5, 2)).astype(np.float32)
MESHES = {
    "virtual": lambda: None,
    "Mesh": lambda: Mesh(np.array(jax.devices()[:K]), ("workers",)),
    "make_mesh": lambda: jax.make_mesh((K,), ("workers",), devices=jax.devices()[:K]),
}


def loss(params, x, y):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w"]) + params["b"] - y))


START = {"w": RNG.normal(size=(5, 2)).astype(np.float32), "b": np.ones(2, np.float32)}
TX = lc.diloco(optax.adam(0.05), period=PERIOD)


def reference(tx=TX, mesh=None):
    """The path of ``local_step``, which hands the step to the method."""
    whole = lambda params, batch: loss(params, *batch)
    step = lc.spread(lc.local_step(whole, tx), mesh=mesh, in_axes=(0, 0, 0, None))
    step, path = jax.jit(step), []
    params = lc.stack(START, K, mesh=mesh)
    state = lc.init(tx, params, mesh=mesh)
    for t in range(STEPS):
        params, state, _ = step(params, state, (X[t], Y[t]), jnp.int32(t))
        path.append(jax.tree.map(np.asarray, params))
    return path


def close(path, expected):
    # One more rounding where a loop adds the updates itself: 2^-24 of weights of order
    # one at each of eight steps; Adam's small steps do not magnify it.
    for x, y in zip(*map(jax.tree.leaves, (path, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_plain_optax_loop(mesh):
    mesh, tx = MESHES[mesh](), lc.self_clocked(TX)

    def worker(params, state, x, y):
        grads = jax.grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(lc.spread(worker, mesh=mesh), donate_argnums=(0, 1))
    params = lc.stack(START, K, mesh=mesh)
    state, path = lc.init(tx, params, mesh=mesh), []
    for t in range(STEPS):
        params, state = step(params, state, X[t], Y[t])
        path.append(jax.tree.map(np.array, params))
    close(path, reference(mesh=mesh))
    assert step._cache_size() == 1


@pytest.mark.parametrize("mesh", MESHES)
def test_a_flax_train_state(mesh):
    mesh = MESHES[mesh]()
    one = TrainState.create(apply_fn=loss, params=START, tx=lc.self_clocked(TX))

    def worker(state, x, y):
        grads = jax.grad(state.apply_fn)(state.params, x, y)
        return state.apply_gradients(grads=grads)

    step = jax.jit(lc.spread(worker, mesh=mesh), donate_argnums=0)
    state, path = lc.stack(one, K, mesh=mesh), []
    for t in range(STEPS):
        state = step(state, X[t], Y[t])
        path.append(jax.tree.map(np.array, state.params))
    close(path, reference(mesh=mesh))
    model = lc.spread(lc.consensus, mesh=mesh)(state.opt_state, state.params)
    close(jax.tree.map(np.asarray, model), path[-1])
    assert state.step.tolist() == [STEPS] * K
    assert step._cache_size() == 1


class Model(nnx.Module):
    """The same model for nnx."""

    def __init__(self):
        self.w, self.b = nnx.Param(START["w"]), nnx.Param(START["b"])

    def __call__(self, x, y):
        return loss({"w": self.w[...], "b": self.b[...]}, x, y)


@pytest.mark.parametrize("mesh", MESHES)
def test_an_nnx_optimizer_that_passes_the_step(mesh):
    mesh, model = MESHES[mesh](), Model()
    graph, one = nnx.split((model, nnx.Optimizer(model, TX, wrt=nnx.Param)))

    def worker(state, x, y, step):
        model, optimizer = nnx.merge(graph, state)
        grads = nnx.grad(lambda model: model(x, y))(model)
        optimizer.update(model, grads, step=step)
        return nnx.state((model, optimizer))

    step = jax.jit(lc.spread(worker, mesh=mesh, in_axes=(0, 0, 0, None)))
    state, path = lc.stack(one, K, mesh=mesh), []
    for t in range(STEPS):
        state = step(state, X[t], Y[t], jnp.int32(t))
        path.append({name: np.asarray(state[0][name][...]) for name in START})
    close(path, reference(mesh=mesh))
    assert step._cache_size() == 1

    def agreed(state):
        model, optimizer = nnx.merge(graph, state)
        own = nnx.state(model, nnx.Param)
        nnx.update(model, lc.consensus(nnx.as_pure(optimizer.opt_state), own))
        return nnx.state(model)

    # The last step was a sync: DiLoCo's anchor is what the workers hold.
    found = lc.spread(agreed, mesh=mesh)(state)
    close({name: np.asarray(found[name][...]) for name in START}, path[-1])


@pytest.mark.parametrize("tx", [TX, lc.selsync(optax.sgd(0.05), threshold=0.1)])
def test_meshes_of_both_kinds_give_the_same_bits_from_arrays_of_numpy(tx):
    paths = [reference(tx, MESHES[kind]()) for kind in ("Mesh", "make_mesh")]
    for x, y in zip(*map(jax.tree.leaves, paths), strict=True):
        np.testing.assert_array_equal(x, y)


def injected(rate, period):
    return lc.diloco(optax.adam(rate), period=period)


LABELS = {"w": "talks", "b": "talks"}
# Each beside its method: a wrapper that changes nothing, outside and inside.
WRAPPED = {
    "first in a chain": optax.chain(TX, optax.identity()),
    "last in a chain": optax.chain(optax.identity(), TX),
    "partition outside": optax.partition({"talks": TX}, LABELS),
    "partition inside": lc.diloco(
        optax.partition({"talks": optax.adam(0.05)}, LABELS), period=PERIOD
    ),
    "masked outside": optax.masked(TX, {"w": True, "b": True}),
    "masked inside": lc.diloco(
        optax.masked(optax.adam(0.05), {"w": True, "b": True}), period=PERIOD
    ),
    "injected outside": optax.inject_hyperparams(injected, static_args="period")(
        rate=0.05, period=PERIOD
    ),
    "injected inside": lc.diloco(
        optax.inject_hyperparams(optax.adam)(0.05), period=PERIOD
    ),
    "MultiSteps inside": lc.diloco(
        optax.MultiSteps(optax.adam(0.05), 1), period=PERIOD
    ),
    "apply_if_finite inside": lc.diloco(
        optax.apply_if_finite(optax.adam(0.05), 3), period=PERIOD
    ),
    "skip_nonfinite inside": lc.diloco(
        lc.skip_nonfinite(optax.adam(0.05)), period=PERIOD
    ),
}


@pytest.mark.parametrize("mesh", ["virtual", "Mesh"])
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapper_of_optax_outside_or_inside(name, mesh):
    mesh, tx = MESHES[mesh](), WRAPPED[name]

    def worker(params, state, x, y, step):
        grads = jax.grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params, step=step)
        return optax.apply_updates(params, updates), state

    step = jax.jit(lc.spread(worker, mesh=mesh, in_axes=(0, 0, 0, 0, None)))
    params = lc.stack(START, K, mesh=mesh)
    state, path = lc.init(tx, params, mesh=mesh), []
    for t in range(STEPS):
        params, state = step(params, state, X[t], Y[t], jnp.int32(t))
        path.append(jax.tree.map(np.asarray, params))
    close(path, reference(mesh=mesh))
    assert step._cache_size() == 1


def test_gradients_accumulate_inside_and_the_sync_comes_on_its_own_clock():
    # Two micro-batches make one inner step; a round has four of them.
    tx = lc.local_sgd(optax.MultiSteps(optax.sgd(0.25), 2), period=4)
    path = reference(tx)
    params = lc.stack(jax.tree.map(np.float64, START), K)
    gradient = jax.vmap(jax.grad(loss))
    for t in range(0, STEPS, 2):
        halves = [gradient(params, X[s], Y[s]) for s in (t, t + 1)]
        move = lambda p, a, b: p - 0.25 * (a + b) / 2
        params = jax.tree.map(move, params, *halves)
        if t % 4 == 2:
            mean = lambda x: jnp.broadcast_to(x.mean(0), x.shape)
            params = jax.tree.map(mean, params)
        close(path[t + 1], params)


def test_steps_in_a_scan_with_a_trained_flax_module():
    model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)])
    mesh = lc.worker_mesh(K)
    whole = lambda params, batch: jnp.mean(
        jnp.square(model.apply(params, batch[0]) - batch[1])
    )
    step = lc.spread(lc.local_step(whole, TX), mesh=mesh, in_axes=(0, 0, 0, None))

    @jax.jit
    def train(params, state):
        def body(carry, t):
            x, y = jnp.asarray(X)[t], jnp.asarray(Y)[t]
            *carry, metrics = step(*carry, (x, y), t)
            return tuple(carry), metrics["loss"].mean()

        return jax.lax.scan(body, (params, state), jnp.arange(STEPS))

    params = lc.stack(model.init(jax.random.key(0), X[0, 0]), K, mesh=mesh)
    (params, _), losses = train(params, lc.init(TX, params, mesh=mesh))
    assert losses[-1] < losses[0]
    feed = lambda t: (X[t], Y[t])
    one = model.init(jax.random.key(0), X[0, 0])
    run = lc.fit(whole, TX, one, feed, steps=STEPS, workers=K, mesh=mesh)
    np.testing.assert_allclose(losses, run.losses.mean(1), rtol=1e-5)


def test_a_tree_without_a_leaf_to_train_is_refused_by_its_types():
    start = {"count": jnp.zeros(3, jnp.int32), "seen": jnp.zeros(2, bool)}
    with pytest.raises(ValueError, match=r"nothing to train.* bool, int32 "):
        lc.fit(lambda p, x: x.sum(), TX, start, lambda t: X[t], steps=1, workers=K)


def by_loss(rate):
    """Steps as long as the loss is large: an optimizer that needs ``value=``."""
    scale = lambda g, s, p=None, *, value, **extra: (
        jax.tree.map(lambda x: -rate * value * x, g),
        s,
    )
    return optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), scale)


@pytest.mark.parametrize("method", [lc.local_sgd, lc.diloco])
def test_an_inner_optimizer_that_misses_the_loss_says_how_to_pass_it(method):
    tx = method(by_loss(0.1), period=2)
    params = lc.stack(START, K)
    state = lc.init(tx, params)
    worker = lambda g, s, p, step: tx.update(g, s, p, step=step)
    with pytest.raises(ValueError, match=r"inner optimizer needs 'value'.*value=loss"):
        lc.spread(worker, in_axes=(0, 0, 0, None))(params, state, params, 0)
    assert len(reference(tx)) == STEPS  # local_step passes it


@pytest.mark.parametrize("kept", ["a name", len, object()])
def test_an_optimizer_that_keeps_python_objects_is_refused_by_leaf(kept):
    inner = optax.GradientTransformation(
        lambda params: {"note": kept}, lambda g, s, p=None: (g, s)
    )
    tx = lc.local_sgd(inner, period=2)
    with pytest.raises(ValueError, match=r"\.inner\['note'\].*hold arrays"):
        lc.init(tx, lc.stack(START, K))
