"""What ``rounds`` keeps and sends, and how the exact model is read out of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import (
    apply_updates,
    average,
    consensus,
    diloco,
    every,
    local_step,
    mean,
    overlapped,
    rounds,
    self_clocked,
    spread,
    stack,
    traffic,
)

K, N = 4, 200
RNG = np.random.default_rng(0)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
X = np.tile(RNG.normal(size=N), (K, 1)).astype(np.float32)
# Small next to the parameters, so that p + (t − p) misses t now and then.
OPTIMA = (X + RNG.normal(size=(K, N))).astype(np.float32)


def stepper(tx, apply=lambda x, updates, state: optax.apply_updates(x, updates)):
    """A jitted step ``(x, state, t) -> (x, state)`` of all workers."""

    def worker(x, state, optimum, t):
        grads = jax.tree.map(lambda x: x - optimum, x)
        updates, state = tx.update(grads, state, x, step=t)
        return apply(x, updates, state), state

    step = jax.jit(spread(worker, in_axes=(0, 0, 0, None)))
    return lambda x, state, t: step(x, state, OPTIMA, jnp.int32(t))


def run(tx, steps, *, x=X, state=None, start=0, **how):
    """The parameters and state after each step."""
    state = jax.jit(spread(tx.init))(x) if state is None else state
    step, path = stepper(tx, **how), []
    for t in range(start, steps):
        x, state = step(x, state, t)
        path.append((x, state))
    return path


exactly = functools.partial(run, apply=apply_updates)


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_apply_updates_lands_on_the_anchor_where_the_plain_sum_misses():
    tx = rounds(optax.sgd(0.3), NESTEROV, when=every(2))
    plain, exact = run(tx, 2), exactly(tx, 2)
    (x, state), (y, other) = plain[1], exact[1]
    equal(state.anchor, other.anchor)
    assert (x != state.anchor).any()  # by a rounding
    np.testing.assert_allclose(x, state.anchor, rtol=0, atol=2.0**-21)
    equal(y, other.anchor)
    equal(y, np.tile(y[:1], (K, 1)))
    equal(plain[0], exact[0])  # and between syncs they are the same


def test_apply_updates_is_the_plain_sum_where_no_anchor_was_adopted():
    params = {"w": X, "n": np.arange(K, dtype=np.int32), "f": np.arange(K) > 1}
    updates = {"w": OPTIMA, "n": np.ones(K, np.int32), "f": np.ones(K, bool)}
    for tx in (optax.adam(0.1), average(optax.adam(0.1))):
        out = apply_updates(params, updates, tx.init({"w": X[0]}))
        equal(out, params | {"w": X + OPTIMA})
    pulled = rounds(optax.sgd(0.3), NESTEROV, pull=0.5)
    equal(exactly(pulled, 2), run(pulled, 2))


WRAPPERS = {
    "alone": lambda tx: tx,
    "last of a chain": lambda tx: optax.chain(optax.clip(99.0), tx),
    "last of a named chain": lambda tx: optax.named_chain(
        ("clip", optax.clip(99.0)),
        ("agree", tx),  # not in the order of names
    ),
    "self-clocked": self_clocked,
    "masked": lambda tx: optax.masked(tx, {"a": True, "b": True}),
    "partition": lambda tx: optax.partition(
        {"yes": tx, "no": optax.sgd(0.1)}, {"a": "yes", "b": "no"}
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_hands_updates_on_may_enclose_rounds(name):
    tx = WRAPPERS[name](rounds(optax.sgd(0.5), NESTEROV, when=every(1)))
    # From 7 x to -0.33 x: the difference is rounded more coarsely than its target.
    params = {"a": 7 * X, "b": 7 * X}
    step = {} if name == "self-clocked" else {"step": 0}

    def worker(params):
        state = tx.init(jax.tree.map(lambda x: x / 7, params))
        grads = jax.tree.map(lambda x: 2 * x, params)
        return tx.update(grads, state, params, **step)

    updates, state = spread(worker)(params)
    out = spread(apply_updates)(params, updates, state)
    equal(out, apply_updates(params, updates, state))  # of the stacked trees
    anchor = optax.tree.get(state, "anchor")
    equal(out["a"], anchor["a"])
    assert (params["a"] + updates["a"] != anchor["a"]).any()
    plain = params["b"] + updates["b"]
    equal(out["b"], plain if name == "partition" else anchor["b"])


@pytest.mark.parametrize(
    "enclose",
    [
        lambda tx: optax.chain(tx, optax.scale(0.5)),
        lambda tx: optax.chain(optax.chain(tx, optax.clip(1.0)), optax.scale(1.0)),
        lambda tx: optax.named_chain(("rounds", tx), ("half", optax.scale(0.5))),
    ],
)
def test_what_may_change_the_updates_is_refused(enclose):
    tx = enclose(rounds(optax.sgd(0.3), NESTEROV))
    state = tx.init(X[0])
    with pytest.raises(ValueError, match="something follows or encloses rounds"):
        apply_updates(X[0], X[0], state)


def test_injected_hyperparameters_may_enclose_rounds():
    make = optax.inject_hyperparams(diloco, static_args="period")
    tx = make(optax.sgd(0.3), period=2, outer_lr=0.7)
    path, expected = exactly(tx, 4), exactly(diloco(optax.sgd(0.3), period=2), 4)
    np.testing.assert_allclose(path[-1][0], expected[-1][0], atol=1e-5)
    x, state = path[-1]
    equal(x, state.inner_state.anchor)
    # Changed in the state, without another program.
    state.hyperparams["outer_lr"] = jnp.zeros(K)
    step = stepper(tx, apply_updates)
    for t in (4, 5):
        x, state = step(x, state, t)
    equal(x, path[-1][0])


def test_consensus_in_mid_round_is_the_anchor_of_rounds():
    tx = rounds(optax.sgd(0.3), NESTEROV, when=every(3))
    read = jax.jit(spread(lambda x, state: consensus(state, x)))
    for x, state in exactly(tx, 5):
        equal(read(x, state), state.anchor)
    assert (x != state.anchor).any()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_consensus_of_averaging_is_the_float32_mean(dtype):
    x = RNG.normal(size=(K, N)).astype(dtype)
    params = {"w": x, "n": np.arange(K, dtype=np.int32), "none": None}
    tx = average(optax.adam(0.1), when=every(4))
    out = spread(lambda x: consensus(tx.init(x), x))(params)
    expected = x.astype(np.float32).mean(0, dtype=np.float32).astype(dtype)
    assert out["w"].dtype == dtype
    wide = lambda x: np.asarray(x, np.float32)
    tolerance = 2.0**-22 if dtype == np.float32 else 0  # a sum of four below 4
    np.testing.assert_allclose(wide(out["w"]), [wide(expected)] * K, 0, tolerance)
    equal(out["n"], params["n"])
    assert out["none"] is None


def test_consensus_reads_a_partition_leaf_by_leaf():
    tx = optax.partition(
        {
            "rounds": rounds(optax.sgd(0.5), NESTEROV, when=every(2)),
            "average": average(optax.sgd(0.5), when=every(2)),
        },
        {"a": "rounds", "b": "average"},
    )
    params = {"a": X, "b": X}
    [(x, state)] = run(tx, 1, x=params)
    worker = lambda x, state: consensus(state, x)
    out = spread(worker)(x, state)
    equal(out["a"], X)
    np.testing.assert_allclose(out["b"], [np.mean(x["b"], 0)] * K, atol=1e-6)
    one = jax.tree.map(lambda leaf: leaf[0], (x, state))
    assert traffic(worker, *one, workers=K).bytes_always == 4 * N  # b alone


def test_consensus_takes_the_outermost_rounds():
    inside = rounds(optax.sgd(0.5), optax.sgd(1.0), when=every(1))
    for tx in (
        rounds(inside, NESTEROV, when=every(3)),
        self_clocked(optax.chain(optax.scale(1.0), rounds(inside, NESTEROV))),
    ):
        state = tx.init(X[0])
        outer = state if not hasattr(state, "clocked") else state.clocked[1]
        marked = outer._replace(anchor=outer.anchor + 1)
        whole = marked
        if outer is not state:
            whole = state._replace(clocked=(state.clocked[0], marked))
        out = spread(lambda x, whole=whole: consensus(whole, x))(X)
        equal(out, X + 1)


def test_evaluating_does_not_change_the_run():
    inner = optax.sgd(0.3)
    for tx in (diloco(inner, period=3), average(inner, when=every(3))):
        state, x = jax.jit(spread(tx.init))(X), X
        step, read = stepper(tx), jax.jit(spread(lambda x, s: consensus(s, x)))
        for t in range(5):
            x, state = step(x, state, t)
            read(x, state)
        equal((x, state), run(tx, 5)[-1])


@pytest.mark.parametrize("delay", [0, 1])
def test_a_run_resumes_from_every_phase_of_a_round(delay):
    tx = rounds(optax.adam(0.1), NESTEROV, when=every(3), delay=delay)
    state, step = jax.jit(spread(tx.init))(X), stepper(tx, apply_updates)
    path, x = [], X
    for t in range(8):
        x, state = step(x, state, t)
        path.append(jax.tree.map(np.array, (x, state)))

    def resumed(saved, state):
        x = path[saved][0]
        for t in range(saved + 1, 8):
            x, state = step(x, state, t)
        return x, state

    for saved in range(1, 7):
        equal(resumed(saved, path[saved][1]), path[-1])
    # No part of the state is there in vain: without it the run is another.
    saved = 5 if delay else 4
    for part in ["inner", "outer", "anchor"] + ["pending"] * delay:
        state = path[saved][1]
        zero = jax.tree.map(np.zeros_like, getattr(state, part))
        x, _ = resumed(saved, state._replace(**{part: zero}))
        assert (x != path[-1][0]).any()


def test_init_shares_no_buffer_so_that_all_may_be_donated():
    free = optax.contrib.schedule_free_sgd(1.0, b1=0.5)
    for tx in (
        rounds(optax.adam(0.1), NESTEROV, when=every(2)),
        rounds(optax.adam(0.1), free, exchange=mean(), when=every(2), delay=1),
        average(optax.adam(0.1), exchange=overlapped(mean()), when=every(2)),
    ):
        worker = lambda x, s, t, tx=tx: tx.update(x, s, x, step=t)
        step = spread(worker, in_axes=(0, 0, None))
        step = jax.jit(lambda x, s, t, step=step: step(x, s, t), donate_argnums=(0, 1))
        for make in (spread(tx.init), jax.jit(spread(tx.init))):
            x = stack(jnp.zeros(3), K)
            state = make(x)
            for t in range(4):
                x, state = step(x, state, jnp.int32(t))
            assert np.isfinite(x).all()


def test_the_anchor_is_a_copy_even_if_the_outer_optimizer_keeps_what_it_was_given():
    keeps = optax.GradientTransformation(lambda p: p, lambda d, s, p=None: (d, s))
    x = jnp.zeros(3)
    state = rounds(optax.sgd(0.1), keeps).init(x)
    pointers = {a.unsafe_buffer_pointer() for a in (x, state.outer, state.anchor)}
    assert len(pointers) == 3


@pytest.mark.parametrize("delay", [0, 1])
def test_a_python_step_and_a_traced_step_give_the_same_bits(delay):
    tx = rounds(optax.sgd(0.25), NESTEROV, when=every(2), delay=delay)
    update = lambda x, s, c, t: tx.update(x - c, s, x, step=t)
    traced = jax.jit(spread(update, in_axes=(0, 0, 0, None)))
    x = y = jnp.asarray(X)
    state = other = jax.jit(spread(tx.init))(x)
    for t in range(4):
        static = jax.jit(spread(functools.partial(update, t=t)))
        moves, state = static(x, state, OPTIMA)
        others, other = traced(y, other, OPTIMA, jnp.int32(t))
        x, y = x + moves, y + others
        equal((x, state), (y, other))


def test_nothing_is_sent_between_syncs():
    tx = rounds(optax.sgd(0.1), NESTEROV, when=every(4), delay=2)
    worker = lambda x, t: tx.update(x, tx.init(x), x, step=t)
    x = jnp.zeros(5)
    traced = traffic(worker, x, jnp.int32(0), workers=K)
    assert (traced.bytes_always, traced.bytes_max) == (0, 20)
    sent = [traffic(lambda x, t=t: worker(x, t), x, workers=K) for t in range(6)]
    assert [program.bytes_always for program in sent] == [0, 0, 0, 20, 0, 0]


def test_the_state_is_what_it_says():
    inner, params = optax.adam(0.1), {"w": jnp.zeros((3, 4)), "b": jnp.zeros(4)}
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    bytes_of = lambda tx, params=params: size(jax.eval_shape(tx.init, params))
    whole, scalars = size(params), 4 + 1
    base = bytes_of(inner) + bytes_of(NESTEROV) + scalars
    assert bytes_of(rounds(inner, NESTEROV)) == base + whole
    assert (
        bytes_of(rounds(inner, NESTEROV, when=every(2), delay=1))
        == base + 2 * whole + 1
    )
    assert bytes_of(rounds(inner, optax.sgd(1.0))) == bytes_of(inner) + whole + scalars
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    assert bytes_of(rounds(optax.sgd(1.0), optax.sgd(1.0)), half) == whole + scalars


def test_a_step_of_a_training_loop_lands_on_the_anchor():
    loss = lambda x, c: jnp.sum(jnp.square(x - c)) / 2
    tx = diloco(optax.sgd(0.3), period=2)
    step = jax.jit(spread(local_step(loss, tx), in_axes=(0, 0, 0, None)))
    x, state = X, jax.jit(spread(tx.init))(X)
    for t in range(4):
        x, state, _ = step(x, state, OPTIMA, jnp.int32(t))
    equal(x, state.anchor)
    assert state.synced.all()
