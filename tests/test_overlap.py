"""Exchanges with time to arrive: shifted by a step, or corrected a round later."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lowcomm
from lowcomm import top_k
from lowcomm.anchor import rounds
from lowcomm.exchange import gossip, mean
from lowcomm.feedback import error_feedback
from lowcomm.ledger import traffic
from lowcomm.overlap import delayed, overlapped
from lowcomm.spmd import worker_mesh
from lowcomm.sync import average
from lowcomm.topology import (
    complete,
    from_matrix,
    lazy,
    mixing_matrix,
    one_peer_exponential,
    ring,
)
from lowcomm.triggers import every
from lowcomm.workers import spread

K = 4
EPS = float(jnp.finfo(jnp.float32).eps)

on_both = pytest.mark.parametrize("backend", ["vmap", "mesh"])


# Weights of 1/2 and 1/4, so that small integers stay exactly representable.
RING = from_matrix(
    sum(np.roll(np.eye(K), hop, 1) * w for hop, w in ((0, 0.5), (1, 0.25), (-1, 0.25)))
)


def mesh_of(backend):
    return worker_mesh(K) if backend == "mesh" else None


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-32, 32, shape).astype(np.float32)


def trajectory(tx, x, gradient, steps, *, targets=None, mesh=None):
    """The stacked parameters after each step, ``[steps, K, …]``."""
    targets = jnp.zeros_like(x) if targets is None else targets

    def worker(x, state, target):
        def step(carry, t):
            x, state = carry
            moves, state = tx.update(gradient(x, target), state, x, step=t)
            x = optax.apply_updates(x, moves)
            return (x, state), x

        return lax.scan(step, (x, state), jnp.arange(steps))[1]

    run = jax.jit(spread(worker, mesh=mesh))
    path = run(x, spread(tx.init)(x), targets)
    return np.swapaxes(np.asarray(path), 0, 1)


def oldsgd(graph, period, rate=0.5):
    return lowcomm.oldsgd(optax.sgd(rate), graph, period=period)


def pull(x, target):
    return x - target


@on_both
@pytest.mark.parametrize(
    "exchange", [mean(), error_feedback(top_k(0.5))], ids=["mean", "top_k"]
)
def test_delayed_is_the_exchange_one_step_late_and_zeros_at_first(backend, exchange):
    stream = integers(K, 4, 6)  # one gradient a step

    def heard(tx):
        def worker(stream, state):
            hear = lambda s, tg: tx.update(tg[1], s, step=tg[0])[::-1]
            return lax.scan(hear, state, (jnp.arange(4), stream))[1]

        state = spread(tx.init)(stream[:, 0])
        return np.asarray(jax.jit(spread(worker, mesh=mesh_of(backend)))(stream, state))

    prompt, late = heard(exchange), heard(delayed(exchange))
    np.testing.assert_array_equal(late[:, 0], 0)
    np.testing.assert_array_equal(late[:, 1:], prompt[:, :-1])
    assert prompt.any()


def test_what_is_late_does_not_wait_for_what_is_sent():
    # The collective is dead code for whoever reads the result alone.
    x = np.zeros(5, np.float32)
    for tx, about in (
        (delayed(mean()), "gradients"),
        (overlapped(mean()), "parameters"),
    ):
        update = lambda x, s, tx=tx, about=about: tx.update(x, s, about=about)
        sent = lambda part, update=update, tx=tx: traffic(
            lambda x, s: update(x, s)[part], x, tx.init(x), workers=K
        )
        assert sent(0).bytes_max == 0
        assert sent(1).bytes_always == 20


@pytest.mark.parametrize("verb", ["average", "rounds"])
def test_delayed_inside_a_verb_is_refused_with_the_remedy(verb):
    tx = {
        "average": average(optax.sgd(1.0), exchange=delayed(mean())),
        "rounds": rounds(optax.sgd(1.0), optax.sgd(1.0), exchange=delayed(mean())),
    }[verb]
    worker = lambda x: tx.update(x, tx.init(x), x, step=0)[0]
    with pytest.raises(ValueError, match=r"use overlapped\(exchange\).*delay="):
        spread(worker)(jnp.ones(K))


def test_overlapped_is_refused_for_gradients_and_in_rounds():
    alone = overlapped(mean())
    tx = rounds(optax.sgd(1.0), optax.sgd(1.0), exchange=overlapped(mean()))
    with pytest.raises(ValueError, match=r"not gradients.*use delayed"):
        spread(lambda x: alone.update(x, alone.init(x))[0])(jnp.ones(K))
    with pytest.raises(ValueError, match=r"not displacements.*use delay="):
        spread(lambda x: tx.update(x, tx.init(x), x, step=0)[0])(jnp.ones(K))


@on_both
def test_oldsgd_mixes_the_models_from_the_start_of_the_round(backend):
    # x(t) = Σ W x(t − τ) − α Σ g at the end of a round: the paper's form, not the
    # correction's. All numbers are multiples of 2⁻¹⁶ below 2⁷: equal bit for bit.
    period, rate, W = 2, 0.5, mixing_matrix(RING)
    targets, start = integers(K, 3), np.zeros((K, 3), np.float32)
    path = trajectory(
        oldsgd(RING, period), start, pull, 6, targets=targets, mesh=mesh_of(backend)
    )
    x, left = start.astype(np.float64), start.astype(np.float64)
    moved = 0.0
    for t in range(6):
        moved = moved - rate * (x - targets)
        x = x - rate * (x - targets)
        if (t + 1) % period == 0:
            x = W @ left + moved
            left, moved = x, 0.0
        np.testing.assert_array_equal(path[t], x)


def test_the_mean_moves_by_the_mean_gradient_at_every_step():
    targets = integers(K, 3)
    path = trajectory(oldsgd(RING, 2), np.zeros((K, 3)), pull, 6, targets=targets)
    before = np.concatenate([np.zeros((1, K, 3)), path[:-1]])
    expected = before.mean(1) - 0.5 * (before - targets).mean(1)
    np.testing.assert_array_equal(path.mean(1, dtype=np.float64), expected)


def test_complete_averaging_is_cocod():
    targets = integers(K, 3)
    paths = [
        trajectory(
            average(optax.sgd(0.5), exchange=overlapped(exchange), when=every(2)),
            np.zeros((K, 3), np.float32),
            pull,
            6,
            targets=targets,
        )
        for exchange in (gossip(complete(K)), mean())
    ]
    np.testing.assert_array_equal(*paths)
    # At the end of the second round: the mean of its start, and one's own steps.
    start, before_sync = paths[1][1], paths[1][3]
    own = start + 0.5 * (targets - start)
    own = own + 0.5 * (targets - own)
    np.testing.assert_array_equal(before_sync, start.mean(0) + (own - start))


def test_a_period_of_one_is_combine_then_adapt():
    targets, W = integers(K, 3), mixing_matrix(RING)
    path = trajectory(oldsgd(RING, 1), np.zeros((K, 3)), pull, 5, targets=targets)
    before = np.concatenate([np.zeros((1, K, 3)), path[:-1]])
    np.testing.assert_array_equal(path, W @ before - 0.5 * (before - targets))


def test_one_worker_or_no_neighbours_is_the_inner_optimizer():
    targets = integers(K, 3)
    alone = from_matrix(np.eye(K))
    path = trajectory(oldsgd(alone, 2), np.zeros((K, 3)), pull, 5, targets=targets)
    halves = 1 - 0.5 ** np.arange(1, 6)
    np.testing.assert_array_equal(path, halves[:, None, None] * targets)
    one = trajectory(oldsgd(ring(1), 2), np.zeros((1, 3)), pull, 5, targets=targets[:1])
    np.testing.assert_array_equal(one, path[:, :1])


def test_without_gradients_each_round_mixes():
    x, W = integers(K, 3), mixing_matrix(RING)
    still = lambda x, _: jnp.zeros_like(x)
    ends = trajectory(oldsgd(RING, 2), x, still, 8)[1::2]
    expected = [x]  # nothing has arrived at the end of the first round
    for _ in range(3):
        expected.append(W @ expected[-1])
    np.testing.assert_array_equal(ends, expected)


@pytest.mark.parametrize(
    ("graph", "low", "grows"), [(ring(8), -1 / 3, True), (lazy(ring(8)), 1 / 3, False)]
)
def test_disagreement_along_an_eigenvector_has_the_factor_of_the_theory(
    graph, low, grows
):
    # λ − 1 + (1 − αh)^τ: stable only if (1 − αh)^τ > −λ. Here it is −1.0798 for the
    # plain ring, whose λ is −1/3, and stable for the lazy one.
    curvature, rate, period = 0.8, 0.3, 5
    x = np.float32((-1.0) ** np.arange(8))
    decay = lambda x, _: curvature * x
    path = trajectory(oldsgd(graph, period, rate), x, decay, 8 * period)
    ends = path[period - 1 :: period]
    factor = low - 1 + (1 - rate * curvature) ** period
    assert (abs(factor) > 1) == grows
    np.testing.assert_allclose(ends[1:], factor * ends[:-1], rtol=64 * EPS)


def test_constant_displacements_leave_the_deviation_of_the_pseudo_inverse():
    # The deviations D solve (I − W) D = u − ū; for complete averaging D = u − ū.
    u = integers(K, 3)
    for graph in (RING, complete(K)):
        tx = oldsgd(graph, 1, 1.0)
        last = trajectory(tx, np.zeros((K, 3)), lambda x, u: -u, 40, targets=u)[-1]
        solved = np.linalg.pinv(np.eye(K) - mixing_matrix(graph)) @ (u - u.mean(0))
        # Positions reach 40 · 32, where float32 is spaced by 2⁻¹³.
        np.testing.assert_allclose(last - last.mean(0), solved, atol=40 * 2.0**-13)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("tx", "about"),
    [
        (delayed(mean()), "gradients"),
        (delayed(error_feedback(top_k(0.5))), "gradients"),
        (overlapped(mean()), "parameters"),
        (overlapped(gossip(one_peer_exponential(K))), "parameters"),
    ],
)
def test_the_state_keeps_its_structure_and_types(tx, about, dtype):
    # Gradients may be of another precision than the parameters that init saw.
    one = {"w": jnp.zeros((2, 3), jnp.float32), "b": jnp.zeros(3, dtype)}
    now = {"w": jnp.zeros((2, 3), dtype), "b": jnp.zeros(3, dtype)}
    params, seen = (jax.tree.map(lambda x: jnp.stack([x] * K), t) for t in (one, now))
    before = spread(tx.init)(params)
    update = spread(lambda x, s: tx.update(x, s, step=0, about=about))
    heard, after = jax.eval_shape(update, seen, before)
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
    assert kinds(after) == kinds(before)
    assert kinds(heard) == kinds(seen)
    assert jax.tree.structure(after) == jax.tree.structure(before)


@pytest.mark.parametrize("late", [delayed, overlapped])
def test_integer_leaves_stay_and_are_not_kept(late):
    tx, about = late(mean()), {delayed: "gradients", overlapped: "parameters"}[late]
    x = {"x": integers(K), "n": np.arange(K, dtype=np.int32), "none": None}

    def worker(x):
        state = tx.init(x)
        assert len(jax.tree.leaves(state)) == 1
        for _ in range(2):
            heard, state = tx.update(x, state, about=about)
        return heard

    heard = spread(worker)(x)
    np.testing.assert_array_equal(heard["x"], [x["x"].mean()] * K)
    np.testing.assert_array_equal(heard["n"], x["n"])


@pytest.mark.parametrize("late", [delayed, overlapped])
def test_a_tree_of_another_shape_is_refused_by_the_leaf_s_name(late):
    tx, about = late(mean()), {delayed: "gradients", overlapped: "parameters"}[late]
    state = tx.init({"w": jnp.zeros(3)})
    update = lambda x: tx.update({"w": x}, state, about=about)[0]
    with pytest.raises(ValueError, match=r"leaf \['w'\] has shape \(2,\)"):
        spread(update)(jnp.zeros((K, 2)))


@on_both
def test_parameters_and_state_can_be_donated(backend):
    x = {"w": jnp.asarray(integers(K, 3)), "b": jnp.asarray(integers(K))}
    tx = optax.chain(delayed(mean()), oldsgd(RING, 2))
    state = spread(tx.init)(x)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((x, state))]
    assert len(set(buffers)) == len(buffers)

    def step(x, state):
        moves, state = tx.update(x, state, x, step=1)
        return optax.apply_updates(x, moves), state

    plain = jax.jit(spread(step, mesh=mesh_of(backend)))
    donating = jax.jit(spread(step, mesh=mesh_of(backend)), donate_argnums=(0, 1))
    expected = plain(*plain(x, state))
    result = donating(*donating(x, state))
    jax.tree.map(np.testing.assert_array_equal, result, expected)
