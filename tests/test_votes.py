"""Majority votes: what counts as which sign, and how many bits that takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm.ledger import traffic
from lowcomm.spmd import worker_mesh
from lowcomm.votes import majority_vote, vote_bytes
from lowcomm.workers import spread

LEVELS = pytest.mark.parametrize("levels", [2, 3])


def vote(x, levels, backend="vmap"):
    """The outcome of stacked ballots on every worker."""
    tx = majority_vote(levels=levels)
    mesh = worker_mesh(len(x)) if backend == "mesh" else None
    return np.asarray(jax.jit(spread(lambda g: tx.update(g, ())[0], mesh=mesh))(x))


def ballots(k, n=64, seed=0):
    """Integers with many zeros, but not a row of them."""
    draw = np.random.default_rng(seed)
    return draw.integers(-2, 3, (k, n)).astype(np.float32)


def expected(x, levels):
    """The convention, in numpy."""
    if levels == 3:
        return np.sign(np.sign(x).sum(0))
    return np.where(np.where(x >= 0, 1, -1).sum(0) >= 0, 1, -1)


@LEVELS
@pytest.mark.parametrize("backend", ["vmap", "mesh"])
@pytest.mark.parametrize("k", [1, 3, 4])
def test_zeros_and_ties_follow_the_convention_on_all_workers(levels, backend, k):
    x = ballots(k)
    np.testing.assert_array_equal(vote(x, levels, backend), [expected(x, levels)] * k)


@LEVELS
def test_one_worker_says_the_sign_of_its_gradient(levels):
    x = np.float32([[3.0, -0.5, 1e-30, -1e30]])
    np.testing.assert_array_equal(vote(x, levels), [[1, -1, 1, -1]])


@LEVELS
def test_the_size_of_a_worker_s_gradient_does_not_count(levels):
    x = ballots(5)
    scaled = x * np.float32([[1e6], [1.0], [1e-6], [3.0], [0.1]])
    np.testing.assert_array_equal(vote(scaled, levels), vote(x, levels))


@LEVELS
def test_fewer_than_half_cannot_turn_what_the_others_agree_on(levels):
    agreed = np.where(ballots(1, seed=1)[0] >= 0, 1.0, -1.0)
    x = np.tile(agreed.astype(np.float32), (9, 1))
    x[:4] = -1e9 * agreed
    np.testing.assert_array_equal(vote(x, levels), [agreed] * 9)


@LEVELS
def test_three_hundred_votes_are_counted_exactly(levels):
    # As int8 the first sum would be 44, and the third −112.
    x = np.ones((300, 3), np.float32)
    x[:151, 1] = -1
    x[:22, 2] = -1
    x = np.repeat(x, 100, axis=1)
    np.testing.assert_array_equal(vote(x, levels)[0], np.repeat([1, -1, 1], 100))


@LEVELS
def test_zero_is_heard_as_zero(levels):
    assert not vote(np.zeros((3, 10), np.float32), levels).any()


def test_of_two_levels_a_row_of_nothing_says_nothing():
    # Rows of two. In the first one worker has nothing, so that there is no tie with it;
    # in the second all is tied.
    x = np.float32([[0, 0, 1, -2], [-1, 2, -1, 2]])
    np.testing.assert_array_equal(vote(x, 2)[0], [-1, 1, 0, 0])


@LEVELS
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_has_no_sign_is_heard_by_all(levels, value):
    x = ballots(4)
    x[2, 20] = value
    outcome = vote(x, levels)
    spoilt = slice(16, 32) if levels == 2 else slice(20, 21)  # its row, or itself
    assert np.isnan(outcome[:, spoilt]).all()
    rest = np.delete(outcome, np.arange(64)[spoilt], axis=1)
    right = np.delete(expected(x, levels), np.arange(64)[spoilt])
    np.testing.assert_array_equal(rest, [right] * 4)


@LEVELS
def test_the_bytes_are_those_of_the_levels(levels):
    tx = majority_vote(levels=levels)
    worker = lambda g: tx.update(g, ())[0]
    tree = {"w": jnp.ones((100, 10)), "b": jnp.ones(24, jnp.bfloat16)}
    sent = traffic(worker, tree, workers=8).bytes_always
    # Rows of 128: 16 bytes of bits and one of their kind, or 32 bytes.
    assert sent == vote_bytes(tree, workers=8, levels=levels)
    assert sent == 9 * {2: 17, 3: 32}[levels]


def test_there_are_two_levels_or_three():
    with pytest.raises(ValueError, match="levels=4: a vote has 2"):
        majority_vote(levels=4)
