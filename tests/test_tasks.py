"""The tasks: models, batches, and losses that can be learned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import models
from experiments.tasks import TASKS, least_squares, make_task

LOCAL = ["mnist-mixer", "mnist-cnn", "digits", "least-squares"]
IMAGES = LOCAL[:3]
# Each count is a sum over layers of (inputs + 1) * outputs.
SIZES = {
    # patches 49 -> 48; two blocks of tokens 16 -> 32 -> 16 and channels 48 -> 96 -> 48;
    # the norm's 2 * 48; classes
    "mnist-mixer": 50 * 48
    + 2 * (17 * 32 + 33 * 16 + 49 * 96 + 97 * 48)
    + 2 * 48
    + 49 * 10,
    # 5 x 5 x 1 -> 16, 3 x 3 x 16 -> 32, 7 x 7 x 32 -> 32, classes
    "mnist-cnn": 26 * 16 + 145 * 32 + 1569 * 32 + 33 * 10,
    "digits": 65 * 32 + 33 * 10,
    "least-squares": 16 * 8,
}


def size(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.fixture(scope="module", params=LOCAL)
def task(request):
    return make_task(request.param, workers=4, batch_size=8)


@pytest.fixture(scope="module")
def params(task):
    return task.init(jax.random.key(0))


def test_the_parameters_are_as_many_as_the_layers_say(task, params):
    assert size(params) == SIZES[task.name]
    assert 20_000 < SIZES["mnist-mixer"] < SIZES["mnist-cnn"] < 60_000


def test_batches_are_stacked_over_workers_and_fit_the_loss(task, params):
    batch = task.batches(0)
    leading = {leaf.shape[:2] for leaf in jax.tree.leaves(batch)}
    assert leading == {(4, 8)}
    loss = jax.vmap(task.loss, in_axes=(None, 0))
    assert jax.eval_shape(loss, params, batch).shape == (4,)


def test_the_same_seed_and_step_give_the_same_batch(task):
    again = make_task(task.name, workers=4, batch_size=8)
    other = make_task(task.name, workers=4, batch_size=8, seed=1)
    for step in (17, 3):
        same = jax.tree.map(np.array_equal, task.batches(step), again.batches(step))
        assert all(jax.tree.leaves(same))
        assert not np.array_equal(task.batches(step)[0], other.batches(step)[0])


def test_a_gradient_step_on_its_batch_lowers_the_loss(task, params):
    batch = jax.tree.map(lambda leaf: leaf[0], task.batches(0))
    step = jax.jit(jax.value_and_grad(task.loss))
    before, grads = step(params, batch)
    after, _ = step(jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), batch)
    assert after < before


def test_an_untrained_model_is_as_good_as_guessing(task, params):
    found = task.evaluate(params)
    assert all(type(value) is float for value in found.values())
    if task.name not in IMAGES:
        assert found["loss"] > 1
        return
    # The loss of ten equal odds, and the share of the first label, which wins all ties.
    assert found["loss"] == pytest.approx(np.log(10), rel=1e-6)
    assert found["accuracy"] == pytest.approx(0.1, abs=0.01)


def test_a_judge_that_works_in_parts_agrees_with_the_whole():
    from experiments import data, tasks

    task = make_task("digits", workers=2)
    noise = jax.random.normal(jax.random.key(1), (10,))
    start = task.init(jax.random.key(1))
    params = jax.tree.map(lambda p: p + 0.1 * jnp.resize(noise, p.shape), start)
    held_out, model = data.digits().held_out, models.MLP()
    whole = tasks._judge(model, params, held_out)
    parts = tasks._judge(model, params, held_out, at_once=100)  # 359 = 3 * 100 + 59
    assert parts == pytest.approx(whole, rel=1e-5)
    guesses = np.asarray(model.apply(params, held_out.inputs)).argmax(-1)
    assert whole["accuracy"] == pytest.approx((guesses == held_out.labels).mean())
    assert whole["loss"] == pytest.approx(float(task.loss(params, held_out)), rel=1e-5)


def test_digits_are_learned():
    task = make_task("digits", workers=1, batch_size=64)
    params = task.init(jax.random.key(0))
    tx = optax.adam(1e-2)

    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(task.loss)(params, batch)
        moves, state = tx.update(grads, state, params)
        return optax.apply_updates(params, moves), state

    state = tx.init(params)
    for t in range(100):
        batch = jax.tree.map(lambda leaf: leaf[0], task.batches(t))
        params, state = step(params, state, batch)
    assert task.evaluate(params)["accuracy"] > 0.9


def test_sorted_workers_have_few_labels_in_their_batches():
    sorted_ = make_task("digits", workers=5, batch_size=64, split="sorted")
    alike = make_task("digits", workers=5, batch_size=64, split="iid")
    labels = lambda task: [len(set(row)) for row in task.batches(0).labels]
    # A fifth of ten nearly equal labels is two and a piece at either end.
    assert max(labels(sorted_)) <= 3
    assert min(labels(alike)) >= 8


def test_the_optimum_of_least_squares_has_no_gradient():
    whole = least_squares(workers=4, batch_size=128, heterogeneity=3.0)
    gradient = jax.vmap(jax.grad(whole.loss), in_axes=(None, 0))
    optimum = jax.tree.map(lambda x: x.astype(np.float32), whole.optimum)
    each = gradient(optimum, whole.batches(0))["x"]
    # Workers pull in different directions, by about their heterogeneity, and cancel to
    # the rounding of 128 products of that size.
    assert jnp.abs(each).max() > 1
    assert jnp.abs(each.mean(0)).max() < 128 * 2**-24 * jnp.abs(each).max()


def test_the_excess_loss_is_the_difference_of_two_mean_losses():
    whole = least_squares(workers=4, batch_size=128)
    mean = lambda x: jax.vmap(whole.loss, (None, 0))(x, whole.batches(0)).mean()
    start = whole.init(jax.random.key(0))
    difference = float(mean(start) - mean(whole.optimum))
    assert whole.evaluate(start)["loss"] == pytest.approx(difference, rel=1e-5)
    assert whole.evaluate(whole.optimum) == {"loss": 0.0, "distance": 0.0}


def test_heterogeneity_sets_workers_apart():
    def spread(heterogeneity):
        task = least_squares(
            workers=4, batch_size=128, heterogeneity=heterogeneity, noise=0.0
        )
        batch = task.batches(0)
        own = [
            np.linalg.lstsq(a, b)[0]
            for a, b in zip(batch.inputs, batch.labels, strict=True)
        ]
        return np.linalg.norm(np.std(own, axis=0))

    assert spread(0.0) < 1e-5
    assert spread(2.0) == pytest.approx(2 * spread(1.0), rel=1e-3)


def test_negative_scales_are_refused():
    with pytest.raises(ValueError, match="cannot be negative: got -1"):
        least_squares(workers=2, batch_size=8, heterogeneity=-1)


def test_an_unknown_task_is_answered_with_the_nearest_names():
    with pytest.raises(ValueError, match="'mnist-mixr'; nearest: mnist-mixer"):
        make_task("mnist-mixr", workers=2)
    for name in TASKS:
        with pytest.raises(ValueError, match=name):
            make_task("?", workers=2)


def test_too_few_examples_for_a_batch_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"batch of 32 .* the 28 examples .* 50 work"):
        make_task("digits", workers=50)


def test_images_that_do_not_fall_into_patches_are_refused_with_both_sizes():
    with pytest.raises(ValueError, match=r"8 x 8 .* patches of 7 x 7"):
        models.PatchMixer().init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))


def test_patches_are_cut_where_they_lie():
    image = jnp.arange(16.0).reshape(1, 4, 4, 1)
    patches = models._patches(image, 2)
    assert patches[0].tolist() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 12, 13],
        [10, 11, 14, 15],
    ]
