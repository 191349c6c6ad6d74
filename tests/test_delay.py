"""Rounds whose result arrives some steps after it was sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import (
    delayed,
    drift_exceeds,
    every,
    mean,
    rounds,
    spread,
)
from tests.quadratics import toward, walk

K = 4
RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=3), (K, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(K, 3)).astype(np.float32)


def train(tx, steps=9, *, x=X, data=OPTIMA, gradient=toward, **how):
    """The paths ``[K, steps, …]`` of virtual workers and of their states."""
    return walk(tx, x, data, steps=steps, gradient=gradient, **how)


NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("pull", [1.0, 0.5])
def test_no_delay_is_bit_equal_to_none(pull):
    how = {"when": every(3), "pull": pull}
    plain = train(rounds(optax.adam(0.1), NESTEROV, **how))
    none = train(rounds(optax.adam(0.1), NESTEROV, delay=0, **how))
    jax.tree.map(np.testing.assert_array_equal, none, plain)


@pytest.mark.parametrize("delay", [1, 2])
def test_discarded_steps_make_it_diloco_with_fewer_local_steps(delay):
    # Adopting the anchor discards what came after sending; a stateless inner optimizer
    # then takes 4 steps in the first round and 4 − delay in the next ones.
    late = rounds(optax.sgd(0.3), NESTEROV, when=every(4), delay=delay)
    _, state = train(late, 12 + delay)
    arrived = state.anchor[:, [t + delay for t in (3, 7, 11)]]
    expected, carry, x = [], None, X
    for steps in (4, 4 - delay, 4 - delay):
        # The same outer state goes on through rounds of these lengths.
        tx = rounds(optax.sgd(0.3), NESTEROV, when=every(steps))
        path, states = train(tx, steps, x=x, state=carry)
        carry = jax.tree.map(lambda s: jnp.asarray(s[:, -1]), states)
        x = path[:, -1]
        expected.append(carry.anchor)
    np.testing.assert_allclose(arrived, np.stack(expected, 1), atol=1e-6)
    before = state.anchor[:, : 3 + delay]
    np.testing.assert_array_equal(before, np.tile(X[:, None], (1, 3 + delay, 1)))


@pytest.mark.parametrize("pull", [1.0, 0.5])
def test_a_delay_of_a_period_adopts_the_news_of_the_round_before(pull):
    period, rate, eta = 2, 0.25, 0.5
    tx = rounds(
        optax.sgd(rate), optax.sgd(eta), when=every(period), delay=period, pull=pull
    )
    path, state = train(tx, 8)
    x, anchor, pending = X.astype(float), X[0].astype(float), None
    for t in range(8):
        x = x - rate * (x - OPTIMA)
        if (t + 1) % period == 0:
            delta = (anchor - x).mean(0)  # measured before the old news is adopted
            if pending is not None:
                anchor = anchor - eta * pending
                x = (1 - pull) * x + pull * anchor
            pending = delta
        np.testing.assert_allclose(path[:, t], x, atol=1e-6)
        np.testing.assert_allclose(state.anchor[:, t], [anchor] * K, atol=1e-6)


def test_delays_and_pulls_that_make_no_sense_are_refused():
    inner, outer = optax.sgd(0.1), optax.sgd(1.0)
    for match, how in (
        ("delay 5 is longer than the 4 steps", {"when": every(4), "delay": 5}),
        ("delay -1 must be a whole number", {"delay": -1}),
        ("needs a trigger that the step", {"when": drift_exceeds(1.0), "delay": 1}),
        ("longer than the 1 steps", {"when": every(4, warmup=2), "delay": 2}),
        (r"pull 1.5 is outside \[0, 1\]", {"pull": 1.5}),
        ("moments 'lose'", {"moments": "lose"}),
    ):
        with pytest.raises(ValueError, match=match):
            rounds(inner, outer, **how)


def test_missing_arguments_and_a_bare_delayed_are_refused():
    tx = rounds(optax.sgd(0.1), optax.sgd(1.0))
    with pytest.raises(ValueError, match="update needs params"):
        spread(lambda g: tx.update(g, tx.init(g), step=0)[0])(X)
    with pytest.raises(ValueError, match="update needs step="):
        spread(lambda g: tx.update(g, tx.init(g), g)[0])(X)
    late = rounds(optax.sgd(0.1), optax.sgd(1.0), exchange=delayed(mean()))
    with pytest.raises(ValueError, match="in rounds use delay="):
        spread(lambda g: late.update(g, late.init(g), g, step=0)[0])(X)


@pytest.mark.parametrize("pull", [1.0, 0.5])
def test_a_late_start_adopts_nothing_before_its_own_first_exchange_arrives(pull):
    # Step 5 is when the news of step 3 would arrive, had there been a step 3.
    outer, inner = optax.adam(0.1), optax.sgd(0.3, momentum=0.5)
    tx = rounds(inner, outer, when=every(4), delay=2, pull=pull)
    path, state = train(tx, 5, start=5)
    alone, _ = train(inner, 4)
    np.testing.assert_allclose(path[:, :4], alone, atol=1e-6)
    np.testing.assert_array_equal(state.anchor[:, :4], np.tile(X[:, None], (1, 4, 1)))
    adam = state.outer[0]
    assert adam.count[0].tolist() == [0, 0, 0, 0, 1]
    for moment in (adam.mu, adam.nu):
        assert not moment[:, :4].any()
        assert moment[:, 4].all()
    assert not state.synced[:, :4].any()
    assert state.synced[:, 4].all() == (pull == 1)
    assert (state.anchor[:, 4] != X).all()
