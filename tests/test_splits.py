"""How examples are shared out among workers."""

import numpy as np
import pytest

from experiments import splits

LABELS = np.random.default_rng(7).permutation(np.repeat(np.arange(10), 120))
SPLITS = {
    "iid": splits.iid,
    "sorted": splits.by_label,
    "dirichlet(0.01)": splits.dirichlet(0.01),
    "dirichlet(1)": splits.dirichlet(1),
}


def rows(split, workers=8, seed=0, labels=LABELS):
    return split(labels, workers, np.random.default_rng(seed))


def skew(split, workers=8):
    """Mean total variation between a worker's labels and everyone's; 0 is alike."""
    histograms = np.stack(
        [np.bincount(LABELS[r], minlength=10) / len(r) for r in rows(split, workers)]
    )
    return 0.5 * np.abs(histograms - 0.1).sum(1).mean()


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_splits_partition_the_data_set(name, workers):
    parts = rows(SPLITS[name], workers)
    assert parts.shape == (workers, 1200 // workers)
    assert sorted(parts.ravel()) == list(range(1200))


@pytest.mark.parametrize("name", SPLITS)
def test_workers_are_equally_rich_when_the_examples_do_not_share_out(name):
    parts = rows(SPLITS[name], 7)
    assert parts.shape == (7, 171)
    assert len(set(parts.ravel())) == 7 * 171


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_is_a_function_of_its_seed(name):
    again, other = rows(SPLITS[name], seed=5), rows(SPLITS[name], seed=6)
    np.testing.assert_array_equal(rows(SPLITS[name], seed=5), again)
    assert (again != other).any()


def test_sorted_workers_see_few_labels():
    # 150 examples are at most a piece of one label, 120, and a piece of the next.
    assert max(len(set(LABELS[part])) for part in rows(splits.by_label)) == 2
    # Two labels of 120 make up each of five workers exactly.
    assert all(len(set(LABELS[r])) == 2 for r in rows(splits.by_label, 5))


def test_dirichlet_goes_from_one_label_to_iid_as_alpha_grows():
    by_alpha = [skew(splits.dirichlet(alpha)) for alpha in (1e-3, 0.1, 1, 10, 1e6)]
    assert by_alpha == sorted(by_alpha, reverse=True)
    assert by_alpha[0] > 0.75
    # Both draw 150 labels at random, so what is left of the skew is sampling noise.
    assert by_alpha[-1] < 1.5 * skew(splits.iid)


def test_dirichlet_follows_the_shares_of_labels_that_are_not_equally_frequent():
    labels = np.repeat([0, 1], [900, 300])
    parts = rows(splits.dirichlet(1e6), 4, labels=labels)
    # 300 draws of a share of 3/4 have a standard deviation of 7.5; four are allowed.
    assert np.abs((labels[parts] == 0).sum(1) - 225).max() < 30


@pytest.mark.parametrize("alpha", [0, -1, np.nan, np.inf])
def test_a_concentration_that_is_not_positive_is_refused(alpha):
    with pytest.raises(ValueError, match=f"not {alpha}"):
        splits.dirichlet(alpha)


@pytest.mark.parametrize("name", SPLITS)
def test_more_workers_than_examples_are_refused_with_both_numbers(name):
    with pytest.raises(ValueError, match=r"3 examples .* 4 workers"):
        SPLITS[name](np.arange(3), 4, np.random.default_rng(0))


def test_an_unknown_split_is_answered_with_the_nearest_name():
    with pytest.raises(ValueError, match="'dirichlett'; nearest: dirichlet"):
        splits.find_split("dirichlett")


def test_alpha_reaches_the_dirichlet_split():
    named = splits.find_split("dirichlet", alpha=0.01)
    np.testing.assert_array_equal(rows(named), rows(SPLITS["dirichlet(0.01)"]))


ROWS = np.arange(60).reshape(3, 20)


def test_the_same_seed_and_step_give_the_same_batch_in_any_order():
    steps = [*range(12), 3, 0, 40, 5]
    forward = splits.stream(ROWS, 6, seed=1)
    taken = {step: forward(step).copy() for step in steps}
    for step in reversed(steps):
        fresh = splits.stream(ROWS, 6, seed=1)(step)
        np.testing.assert_array_equal(fresh, taken[step])


def test_another_seed_gives_another_order():
    assert (
        splits.stream(ROWS, 6, seed=1)(0) != splits.stream(ROWS, 6, seed=2)(0)
    ).any()


@pytest.mark.parametrize("batch_size", [1, 4, 6, 20])
def test_no_example_is_used_twice_in_an_epoch_nor_by_another_worker(batch_size):
    batches = 20 // batch_size
    positions = splits.stream(ROWS, batch_size)
    for epoch in range(3):
        used = np.concatenate(
            [positions(epoch * batches + b) for b in range(batches)], axis=1
        )
        for worker, own in zip(used, ROWS, strict=True):
            assert len(set(worker)) == batches * batch_size
            assert set(worker) <= set(own)


def test_examples_that_sit_one_epoch_out_come_in_another():
    positions = splits.stream(ROWS, 6)  # 18 of 20 an epoch
    seen = np.concatenate([positions(step) for step in range(30)], axis=1)
    assert all(set(s) == set(own) for s, own in zip(seen, ROWS, strict=True))


def test_epochs_are_shuffled_anew():
    positions = splits.stream(ROWS, 20)
    assert (positions(0) != positions(1)).any()


@pytest.mark.parametrize("batch_size", [0, 21])
def test_a_batch_that_a_worker_cannot_fill_is_refused_with_both_numbers(batch_size):
    with pytest.raises(ValueError, match=f"batch of {batch_size} .* the 20 examples"):
        splits.stream(ROWS, batch_size)


def test_steps_before_the_first_are_refused():
    with pytest.raises(ValueError, match="-1"):
        splits.stream(ROWS, 2)(-1)
