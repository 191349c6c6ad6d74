"""Half-precision leaves near their limits: what is remembered stays finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lowcomm import difference_feedback, error_feedback, spread, top_k
from lowcomm.spmd import AXIS, vary

TOP = 60000.0  # below 65504, the largest float16, and twice it is above


def talk(tx, stream):
    """What one worker hears of a stream ``[steps, n]``, and its states."""

    def worker(stream):
        def step(state, now):
            heard, state = tx.update(now[1], state, step=now[0])
            return state, (heard, state)

        first = vary(tx.init(stream[0]), AXIS)
        return lax.scan(step, first, (jnp.arange(len(stream)), stream))[1]

    out = spread(worker)(jnp.asarray(stream, jnp.float16)[None])
    return jax.tree.map(lambda x: np.asarray(x[0]), out)


def test_error_feedback_stays_finite_and_conserves_where_float16_would_overflow():
    stream = np.tile([TOP, 30000.0], (8, 1))
    heard, state = talk(error_feedback(top_k(0.5)), stream)
    assert heard.dtype == np.float16
    assert state.error.dtype == np.float32
    assert np.isfinite(heard).all()
    assert np.isfinite(state.error).all()
    # Σ sent + e = Σ u. All are multiples of 16 below 2²⁴, so that sums are exact.
    sent = np.cumsum(heard.astype(np.float64), 0)
    np.testing.assert_array_equal(sent + state.error, np.cumsum(stream, 0))
    assert state.error.max() > np.finfo(np.float16).max


def test_difference_feedback_follows_a_sign_that_turns_at_the_limit():
    # The difference of g and -g is 120000 and takes two steps to be said.
    stream = np.array([[TOP], [-TOP], [-TOP], [-TOP]])
    heard, state = talk(difference_feedback(top_k(1.0)), stream)
    assert np.isfinite(state.said).all()
    assert np.isfinite(heard).all()
    np.testing.assert_array_equal(heard[[0, 2, 3]], stream[[0, 2, 3]].astype(float))
    limit = float(np.finfo(np.float16).max)
    np.testing.assert_array_equal(state.said[:, 0], [TOP, TOP - limit, -TOP, -TOP])
    np.testing.assert_array_equal(state.heard, state.said)


@pytest.mark.parametrize("feedback", [error_feedback, difference_feedback])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_still_shows(feedback, bad):
    heard, _ = talk(feedback(top_k(1.0)), np.array([[bad, 1.0]]))
    assert not np.isfinite(heard[0, 0])
