"""SelSync: both ways of aggregation, and how it shares out and mixes data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import splits
from experiments.injection import Injection, injected, injection
from lowcomm import data_parallel, fit, selsync, selsync_gradients
from lowcomm.triggers import change_exceeds
from tests.quadratics import squares, walk
from tests.streams import detect

K, N, STEPS, RATE = 4, 5, 12, 0.1
# In each step a few roundings of numbers below 4: programs differ in what they fuse.
ROUNDINGS = STEPS * 4 * 2.0**-52


@functools.cache
def problem():
    """Curvatures and optima of each worker's own, and where all of them start."""
    rng = np.random.default_rng(0)
    x = np.tile(rng.normal(size=N), (K, 1))
    return x, (rng.uniform(0.5, 2.0, size=(K, N)), rng.normal(size=(K, N)))


def train(tx, *, x64=False, **how):
    """The paths ``[K, T, N]`` of the workers and of their states."""
    with jax.enable_x64(x64):
        kind = np.float64 if x64 else np.float32
        x, data = jax.tree.map(lambda a: a.astype(kind), problem())
        return walk(tx, x, data, steps=STEPS, **how)


LINEAR = {
    "plain": optax.sgd(RATE),
    "heavy ball": optax.sgd(RATE, momentum=0.9),
    "nesterov": optax.sgd(RATE, momentum=0.9, nesterov=True),
    "l2": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(RATE, momentum=0.9)),
    "decoupled": optax.chain(
        optax.trace(0.9), optax.add_decayed_weights(0.1), optax.scale(-RATE)
    ),
}
OTHERS = {"adam": optax.adam(RATE), "lion": optax.lion(RATE)}


@pytest.mark.parametrize("name", LINEAR)
def test_parameters_averaged_at_each_step_are_synchronous_sgd(name):
    tx = selsync(LINEAR[name], threshold=0.0, window=2, warmup=0)
    path, state = train(tx, x64=True)
    expected, _ = train(data_parallel(LINEAR[name]), x64=True)
    assert (state.since == 0).all()
    np.testing.assert_allclose(path, expected, rtol=0, atol=ROUNDINGS)


@pytest.mark.parametrize("name", LINEAR | OTHERS)
def test_gradients_averaged_at_each_step_are_synchronous_for_any_optimizer(name):
    inner = (LINEAR | OTHERS)[name]
    tx = selsync_gradients(inner, threshold=0.0, window=2, warmup=0)
    expected, _ = train(data_parallel(inner), x64=True)
    np.testing.assert_allclose(train(tx, x64=True)[0], expected, rtol=0, atol=ROUNDINGS)


@pytest.mark.parametrize("make", [selsync, selsync_gradients])
def test_without_warm_up_and_syncs_each_worker_trains_alone_and_sends_its_flag(make):
    inner = optax.adam(RATE)
    path, _ = train(make(inner, threshold=np.inf, window=3, warmup=0), x64=True)
    alone, _ = train(optax.with_extra_args_support(inner), x64=True)
    np.testing.assert_allclose(path, alone, rtol=0, atol=ROUNDINGS)
    tx = make(inner, threshold=np.inf, window=3, warmup=2)
    optima = problem()[1][1].astype(np.float32)
    run = fit(squares, tx, jnp.zeros(N), lambda t: optima, steps=STEPS, workers=K)
    # A warm-up that is known asks nobody; 10 of 12 steps are local.
    assert run.payload.tolist() == [4 * N] * 2 + [4] * (STEPS - 2)


def test_only_parameters_bring_workers_together_again():
    how = {"threshold": 0.05, "window": 1, "smoothing": 0.0, "warmup": 1}
    ball = optax.sgd(RATE, momentum=0.9)
    for make, together in ((selsync, True), (selsync_gradients, False)):
        path, state = train(make(ball, **how))
        synced = optax.tree.get(state, "since")[0] == 0
        after = 1 + np.flatnonzero(~synced)[0] + np.flatnonzero(synced[1:])
        late = [t for t in after if t < STEPS and synced[t] and not synced[:t].all()]
        assert late
        gaps = np.ptp(path, axis=0).max(-1)[late]
        # A difference and a sum round to the ulp of numbers below 4.
        assert (gaps <= 2.0**-21).all() if together else (gaps > 1e-3).all()


def test_all_sync_where_one_wants_to_and_seldom_is_seldom_enough():
    rng, p, steps = np.random.default_rng(1), 0.1, 400
    jumps = rng.random((K, steps)) < p
    # A norm that jumps is doubled, or halved if it is large.
    norms = np.ones((K, steps), np.float32)
    for t in range(1, steps):
        factor = np.where(norms[:, t - 1] > 1, 0.5, 2.0)
        norms[:, t] = norms[:, t - 1] * np.where(jumps[:, t], factor, 1)
    when = change_exceeds(0.5, window=1, smoothing=0.0, warmup=0)
    fires, _ = detect(when, norms)
    jumps[:, 0] = False  # nothing to compare with
    np.testing.assert_array_equal(fires, [jumps.any(0)] * K)
    # 1 − (1 − p)^K with a standard deviation of 2.4 %; four of these.
    assert abs(fires[0].mean() - (1 - (1 - p) ** K)) < 0.096


def test_every_worker_sees_the_whole_data_set_in_an_order_of_its_own():
    labels = np.arange(26) % 3
    rows = splits.whole(labels, 4, np.random.default_rng(0))
    assert rows.shape == (4, 24)
    kept = np.sort(rows[0])
    assert len(set(kept)) == 24
    np.testing.assert_array_equal(np.sort(rows, axis=1), [kept] * 4)
    # At no moment of an epoch are two workers at the same example.
    assert all(len(set(column)) == 4 for column in rows.T)
    np.testing.assert_array_equal(
        rows[:, :6], splits.iid(labels, 4, np.random.default_rng(0))
    )
    assert splits.find_split("whole") is splits.whole
    batches = splits.stream(rows, 8)
    seen = np.concatenate([batches(step) for step in range(3)], axis=1)
    np.testing.assert_array_equal(np.sort(seen, axis=1), [kept] * 4)
    assert (seen[0] != seen[1]).any()


@pytest.mark.parametrize(
    ("size", "workers", "givers", "given", "made"),
    [
        (30, 16, 0.5, 0.5, Injection(6, 8, 3)),
        (70, 8, 0.75, 0.75, None),
        (44, 8, 0.75, 0.75, Injection(8, 6, 6)),
        (12, 8, 0.25, 0.25, Injection(8, 2, 2)),
        (12, 3, 1 / 3, 1 / 3, Injection(9, 1, 3)),
        (32, 8, 0.0, 0.5, Injection(32, 0, 16)),
    ],
)
def test_native_and_injected_examples_make_up_the_batch(
    size, workers, givers, given, made
):
    if made is None:
        with pytest.raises(ValueError, match="choose a multiple of 22"):
            injection(size, workers, givers=givers, given=given)
        return
    found = injection(size, workers, givers=givers, given=given)
    assert found == made
    assert found.batch_size == size
    assert found.native == pytest.approx(size / (1 + givers * given * workers))


def test_what_some_give_is_heard_by_all_and_the_rest_stays():
    made = injection(12, 8, givers=0.25, given=0.25)
    native = {"x": np.arange(8 * 8).reshape(8, 8), "y": np.arange(64.0).reshape(8, 8)}
    batches = injected(lambda step: native, made, seed=2)
    givers = set()
    for step in range(40):
        batch = batches(step)
        assert batch["x"].shape == (8, 12)
        np.testing.assert_array_equal(batch["x"], batch["y"])
        np.testing.assert_array_equal(batch["x"][:, :8], native["x"])
        heard = batch["x"][:, 8:]
        np.testing.assert_array_equal(heard, [heard[0]] * 8)
        who = np.unique(heard // 8)
        assert len(who) == 2
        np.testing.assert_array_equal(heard[0], native["x"][who, :2].ravel())
        givers |= set(who.tolist())
    assert givers == set(range(8))
    again = injected(lambda step: native, made, seed=2)
    np.testing.assert_array_equal(again(7)["x"], batches(7)["x"])


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"givers": 1.5}, "givers=1.5 is a fraction"),
        ({"given": -0.1}, "given=-0.1 is a fraction"),
        ({"given": np.nan}, "given=nan is a fraction"),
        ({"givers": 0.3}, "givers=0.3 of 8 workers are 2.4"),
        ({"batch_size": 32}, "21.33 native examples.*choose a multiple of 6"),
        ({"batch_size": 0}, "a batch of 0 on 8 workers"),
    ],
)
def test_fractions_that_make_no_whole_batch_are_refused(how, match):
    how = {"batch_size": 12, "workers": 8, "givers": 0.25, "given": 0.25} | how
    with pytest.raises(ValueError, match=match):
        injection(**how)


def test_a_batch_of_another_size_is_refused_by_its_leaf():
    made = injection(12, 8, givers=0.25, given=0.25)
    batches = injected(lambda step: {"x": np.zeros((8, 12))}, made)
    with pytest.raises(ValueError, match=r"batch\['x'\] .* must hold 8 native"):
        batches(0)
