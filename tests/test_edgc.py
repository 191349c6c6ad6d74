"""EDGC: windows, ranks that follow entropy, and bytes that follow ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lowcomm as lc
from lowcomm.algorithms.edgc import edgc
from lowcomm.entropy import gaussian_entropy, low_rank_errors, next_rank
from lowcomm.lowrank import low_rank_bytes, powersgd
from lowcomm.spmd import AXIS, vary

K, M, N = 4, 40, 32
EPS = float(jnp.finfo(jnp.float32).eps)
RANKS = (2, 8)
OPTIONS = {
    "ranks": RANKS,
    "window": 3,
    "warmup": 2,
    "sample_every": 1,
    "sampled": 1.0,
    "change": 4,
}


def make(**more):
    return edgc(optax.identity(), **(OPTIONS | more))


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def worker_of(**more):
    tx = make(**more)

    def worker(stream):
        def step(carry, g):
            t, state = carry
            heard, state = tx.update(g, state, g, step=t)
            return (t + 1, state), (heard, state[0])

        first = jax.tree.map(lambda x: x[0], stream)
        carry = jnp.int32(0), vary(tx.init(first), AXIS)
        return lax.scan(step, carry, stream)[1]

    return worker


@functools.cache
def runner(mesh, **more):
    mesh = lc.worker_mesh(K) if mesh else None
    return jax.jit(lc.spread(worker_of(**more), mesh=mesh))


def run(stream, mesh=False, **more):
    """What is heard of ``[K, T, …]`` and the states after each step."""
    return runner(mesh, **more)(stream)


def falling(falls, seed=0):
    """A warm-up, then six windows whose entropy has fallen so far since the first."""
    falls = [*falls, *falls[-1:] * (5 - len(falls))]
    scale = np.exp(-np.repeat([0.0, *falls], 3)).astype(np.float32)
    scale = np.concatenate([[1, 1], scale])
    one = gaussian(K, 1, M, N, seed=seed)
    return scale[None, :, None, None] * np.tile(one, (1, len(scale), 1, 1))


def windows(state):
    """The rank in force during each window."""
    ranks = np.asarray(state.control.rank)
    assert (ranks == ranks[:1]).all()  # on all workers
    return [8, *ranks[0][4::3]][:-1]


FALLS = [0.0, 0.1, 0.5, 0.0, -0.1]


@pytest.mark.parametrize("mesh", [False, True])
def test_ranks_follow_the_entropy_window_by_window(mesh):
    _, state = run(falling(FALLS), mesh)
    g, rank, expected = low_rank_errors(M, N)[:9], 8, [8, 8]
    for fall in FALLS[:-1]:
        rank = int(next_rank(g, 8, fall, rank, least=2, most=8, change=4))
        expected.append(rank)
    assert windows(state) == expected == [8, 8, 8, 6, 2, 6]


@pytest.mark.parametrize("power", [1, 2])
def test_errors_and_their_squares_choose_alike(power):
    _, state = run(falling(FALLS), error_power=power)
    assert windows(state) == [8, 8, 8, 6, 2, 6]


def test_scaling_all_gradients_changes_nothing_but_a_change_of_scale_does():
    stream = falling([0.0, 0.0])
    _, state = run(1024 * stream)
    assert windows(state) == [8] * 6
    reference = run(stream)[1].control.reference[0, -1]
    shift = state.control.reference[0, -1] - reference
    assert float(shift) == pytest.approx(np.log(1024), abs=16 * EPS * 10)
    # Loss scaling in the midst of a run looks like a fall of entropy.
    stream[:, 5:] /= 1024
    assert windows(run(stream)[1]) == [8, 8, 4, 2, 2, 2]


def test_entropy_is_of_raw_gradients_and_its_mean_over_workers_and_matrices():
    scales = np.array([1.0, 2.0, 4.0, 8.0], np.float32)[:, None, None, None]
    stream = {"a": scales * gaussian(K, 6, M, N), "b": gaussian(K, 6, N, M, seed=1)}
    _, state = run(stream)
    H = jax.vmap(jax.vmap(gaussian_entropy))
    mean = np.mean([H(stream["a"])[:, 2:5], H(stream["b"])[:, 2:5]])
    # Residuals are as large as gradients by then: entropies of sums would be others.
    np.testing.assert_allclose(state.control.reference[:, 4], mean, rtol=8 * EPS)
    assert (np.asarray(state.control.samples)[0] == [0, 0, 1, 2, 0, 1]).all()


def test_a_warm_up_is_the_mean_and_the_first_window_is_powersgd():
    stream = falling([0.0])
    heard, state = run(stream)
    stream, heard = stream[:, :5], heard[:, :5]
    tx = powersgd(8)
    mean = stream[:, :2].mean(0)
    np.testing.assert_allclose(heard[:, :2], [mean] * K, rtol=0, atol=8 * EPS)
    assert not np.asarray(state.residual)[:, :2].any()

    def worker(stream):
        state, out = tx.init(stream[0]), []
        for g in stream[2:]:
            x, state = tx.update(g, state)
            out.append(x)
        return jnp.stack(out)

    expected = jax.jit(lc.spread(worker))(stream)
    np.testing.assert_allclose(heard[:, 2:], expected, rtol=0, atol=1024 * EPS)


def test_nothing_is_lost_when_the_rank_changes():
    stream = gaussian(K, 20, M, N)
    stream *= np.exp(-np.repeat([0, 0.5], [8, 12]))[:, None, None]
    stream = stream.astype(np.float32)
    heard, state = run(stream)
    assert len(set(windows(state))) == 3
    total = np.asarray(heard, float)[0].sum(0) + np.asarray(state.residual[:, -1]).mean(
        0
    )
    # Each step rounds numbers below 8 some M + N times on the way.
    bound = 20 * (M + N) * EPS * 8
    np.testing.assert_allclose(total, stream.sum(1).mean(0), rtol=0, atol=bound)
    # Columns in use stay where they turn to; the others are drawn anew.
    used = np.asarray(state.query)[0]
    ranks = np.asarray(state.control.rank)[0]
    assert (np.abs(used[-1][:, :2]).max(0) == 1).all()
    assert (used[-1][:, 2:] != used[-2][:, 2:]).all()
    assert ranks[-1] == 2


def sent(stream, **more):
    """The bytes of a metered run of one worker."""
    worker = worker_of(**more)
    counts = jax.jit(lc.spread(lc.meter(worker)))(stream)[1]
    one = jax.tree.map(lambda x: x[0], stream)
    return lc.traffic(worker, one, workers=K).bytes(np.asarray(counts)[0])


def test_bytes_follow_the_ranks():
    stream = falling(FALLS)
    shape = jax.ShapeDtypeStruct((M, N), np.float32)
    ranks = [8, 8, 8, 8, 2, 8]  # the least of RANKS that is no lower
    factors = sum(3 * low_rank_bytes(shape, r) for r in ranks)
    # Two whole matrices, and what the rank and the entropy of each step take.
    assert sent(stream) == 2 * 4 * M * N + factors + 8 * (stream.shape[1] - 2)


def test_each_kind_of_step_sends_what_it_says():
    tree = {"w": jnp.ones((M, N)), "small": jnp.ones((8, 6)), "b": jnp.ones(N)}
    tree["other"] = tree["w"]

    def read(tx, t):
        """At step ``t``, after two of warm-up."""

        def worker(g):
            state, inner = tx.init(g)
            control = state.control._replace(exchanges=vary(jnp.int32(t - 2), AXIS))
            return tx.update(g, (state._replace(control=control), inner), g, step=t)

        counts = jax.jit(lc.spread(lc.meter(worker)))(lc.stack(tree, K))[1]
        return lc.traffic(worker, tree, workers=K).bytes(np.asarray(counts)[0])

    factors, whole = 4 + low_rank_bytes(tree, 8), 4 * (2 * M * N + 8 * 6 + N)
    sent = [whole, whole, factors + 8, factors, factors, factors + 8]
    assert [read(make(sample_every=3), t) for t in range(6)] == sent
    # Of one rank nobody needs to be asked, but when to take the entropy.
    alone = 4 + low_rank_bytes(tree, 2)
    sent = [whole, whole, alone + 8, alone, alone]
    assert [read(make(ranks=(2,), sample_every=3), t) for t in range(5)] == sent


def test_the_compiled_branches_send_what_the_program_says():
    tx, mesh, tree = make(), lc.worker_mesh(K), {"w": jnp.ones((M, N))}
    worker = lambda g: tx.update(g, tx.init(g), g, step=3)
    step = jax.jit(lc.spread(worker, mesh=mesh)).lower(lc.stack(tree, K))
    compiled = lc.compiled_traffic(step.compile(), mesh=mesh)
    sent = lc.traffic(worker, tree, workers=K)
    assert compiled.census() == sent.merged().widened().census()
    branches = {}
    for row in sent.rows:
        if row.guard:
            branches.setdefault(row.guard, []).append(row.bytes)
    found = [sum(part) for part in branches.values()]
    factors = [low_rank_bytes(tree, rank) for rank in RANKS]
    assert found == [*factors, 4]  # and an entropy


def test_a_matrix_goes_whole_where_its_rank_saves_nothing():
    # 8 · (16 + 16) · 2 is more than 16 · 16: at rank 8 it is heard with all that is
    # left of it; at rank 2 it goes as factors.
    big, small = gaussian(K, 12, 64, 64), gaussian(K, 12, 16, 16, seed=1)
    stream = {"big": big, "small": small}
    scale = np.repeat([1.0, 0.5], [5, 7]).astype(np.float32)[:, None, None]
    stream = jax.tree.map(lambda x: x * scale, stream)
    heard, state = run(stream, change=6)
    assert np.asarray(state.control.rank)[0].tolist() == [8] * 7 + [2] * 5
    mean = stream["small"].mean(0)
    np.testing.assert_allclose(heard["small"][0, :8], mean[:8], rtol=0, atol=16 * EPS)
    residual = np.asarray(state.residual["small"])
    assert not residual[:, :8].any()
    assert residual[:, 8:].any(axis=(2, 3)).all()


@pytest.mark.parametrize("silent", [slice(2, 5), slice(5, 20, 2), slice(6, None)])
def test_a_matrix_that_is_silent_for_a_while_decides_nothing(silent):
    # In the first window, at every other step after it, or from some step on.
    stream = {"w": falling(FALLS), "silent": falling(FALLS, seed=1) * 1e-3}
    both = windows(run(stream)[1])
    stream["silent"][:, silent] = 0
    _, state = run(stream)
    assert np.isfinite(state.control.reference).all()
    assert windows(state) == both == [8, 8, 8, 6, 2, 6]
    one = run({"w": stream["w"], "zero": 0 * stream["w"]})[1]
    assert windows(one) == both


def test_no_gradient_at_all_and_one_that_is_not_finite_decide_nothing():
    bad = falling([0.0, 0.5])
    bad[1, 6] = np.nan
    _, state = run(bad)
    samples = np.asarray(state.control.samples)[0]
    assert samples[:11].tolist() == [0, 0, 1, 2, 0, 1, 1, 0, 1, 2, 0]
    assert windows(state)[:4] == [8, 8, 8, 4]
    still = falling([0.0, 0.5])
    still[:, 8:14] = 0
    assert windows(run(still)[1]) == [8, 8, 8, 8, 8, 4]


def test_in_rounds_windows_and_samples_count_syncs():
    # Syncs on steps 7, 15, 23 …, of which no number is a multiple of ten.
    options = {"ranks": (1, 2, 4), "window": 20, "sample_every": 10}
    tx = lc.rounds(
        optax.sgd(1.0),
        optax.sgd(1.0),
        exchange=edgc(optax.identity(), **options, warmup=0, min_compression=1.0),
        when=lc.every(8),
    )

    def worker(g):
        def step(carry, t):
            x, state = carry
            shrunk = g * jnp.where(t < 160, 1.0, 0.5)
            moves, state = tx.update(shrunk, state, x, step=t)
            return (x + moves, state), optax.tree.get(state, "control")

        carry = vary((jnp.zeros_like(g), tx.init(g)), AXIS)
        return lax.scan(step, carry, jnp.arange(320))[1]

    control = jax.jit(lc.spread(worker))(gaussian(K, M, N))
    ended = np.asarray(control.windows)[0]
    assert ended[[158, 159, 318, 319]].tolist() == [0, 1, 1, 2]
    assert np.asarray(control.samples)[0, [6, 7, 87, 159]].tolist() == [0, 1, 2, 0]
    assert np.asarray(control.rank)[:, [318, 319]].tolist() == [[4, 1]] * K


@pytest.mark.parametrize(
    ("shape", "highest"), [((32, 32), 4), ((64, 64), 8), ((9, 9), 2)]
)
def test_ranks_that_send_everything_whole_are_left_out(shape, highest):
    if shape == (9, 9):
        options = {"min_compression": 0.0, "ranks": (2, 9, 32)}
    else:
        options = {"ranks": (2, 4, 8, 16, 32)}
    tx = make(**options)
    g = gaussian(2, 1, *shape)

    def worker(g):
        def step(carry, t):
            scale = jnp.where(t < 5, 1.0, 0.1)
            _, state = tx.update(scale * g, carry, g, step=t)
            return state, state[0].control.rank

        return lax.scan(step, vary(tx.init(g), AXIS), jnp.arange(16))[1]

    ranks = np.asarray(jax.jit(lc.spread(worker))(g[:, 0]))
    down = np.maximum(2, highest - 4 * np.arange(4))
    assert ranks[0, [4, 7, 10, 13]].tolist() == down.tolist()


def test_a_run_goes_on_from_any_step():
    stream = falling(FALLS)
    heard, state = run(stream)
    tx, t = make(), 9
    at = jax.tree.map(lambda x: x[:, t - 1], state)
    again = lambda g, s, t: tx.update(g, (s, optax.EmptyState()), g, step=t)
    step = jax.jit(lc.spread(again, in_axes=(0, 0, None)))
    moves, (after, _) = step(stream[:, t], at, jnp.int32(t))
    np.testing.assert_array_equal(moves, heard[:, t])
    jax.tree.map(
        np.testing.assert_array_equal, after, jax.tree.map(lambda x: x[:, t], state)
    )


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"ranks": ()}, "must grow from 1"),
        ({"ranks": (4, 2)}, "must grow from 1"),
        ({"ranks": (0, 2)}, "must grow from 1"),
        ({"sample_every": 4}, "between 1 and window 3"),
        ({"window": 2.5}, "window 2.5 must be a whole number"),
        ({"warmup": -1}, "warmup -1 is negative"),
        ({"change": 0}, "change 0 is below 1"),
        ({"sampled": 0}, r"sampled 0 is outside \(0, 1\]"),
        ({"error_power": 3}, "neither 1 nor 2"),
    ],
)
def test_misuse_is_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        make(**wrong)
