"""Clocks from lists of steps: exactly these steps, and the quadratic rule's laws."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm import at_steps, before, growing, local_sgd, quadratic_period, rounds
from lowcomm.ledger import traffic
from lowcomm.spmd import NotUniform
from lowcomm.uniform import known
from lowcomm.workers import spread
from tests.quadratics import toward, walk

RNG = np.random.default_rng(0)
X = np.tile(RNG.normal(size=3), (4, 1)).astype(np.float32)
OPTIMA = RNG.normal(size=(4, 3)).astype(np.float32)


def times(when, steps):
    return [t for t in range(steps) if when.fire((), step=t)[0]]


def lengths(when, steps):
    """The number of steps of each round."""
    return np.diff([-1, *times(when, steps)]).tolist()


@pytest.mark.parametrize(
    ("when", "due"),
    [
        (at_steps([7, 0, 3, 3]), [0, 3, 7]),
        (at_steps(np.array([2], np.int64)), [2]),
        (before(3), [0, 1, 2]),
        (before(0), []),
        (growing(lambda r: r + 1, steps=10), [0, 2, 5, 9]),
    ],
)
def test_a_list_fires_at_exactly_its_steps_however_it_is_told(when, due):
    answers = [when.fire((), step=t)[0] for t in range(-3, 12)]
    assert [t for t, fires in zip(range(-3, 12), answers, strict=True) if fires] == due
    assert all(isinstance(answer, bool) for answer in answers)
    traced = jax.jit(lambda t: when.fire((), step=t)[0])
    assert [bool(traced(t)) for t in range(-3, 12)] == answers
    step, asked = jnp.int32(3), []
    with known(step, 3, asked):
        assert when.fire((), step=step)[0] is answers[6]
    assert [asked[0].ask(t) for t in range(-3, 12)] == answers
    assert (
        traffic(lambda t: when.fire((), step=t)[0], np.int32(0), workers=4).rows == ()
    )


def test_the_gap_is_the_least_distance_of_two_syncs():
    assert at_steps([0, 3, 5, 9]).gap == 2
    assert before(4).gap == 1
    assert growing(lambda r: 2 + r, steps=20).gap == 3
    rounds(optax.sgd(1.0), optax.sgd(1.0), when=at_steps([3, 7, 12]), delay=4)
    with pytest.raises(ValueError, match="delay 5 is longer than the 4 steps"):
        rounds(optax.sgd(1.0), optax.sgd(1.0), when=at_steps([3, 7, 12]), delay=5)


def test_the_last_round_is_cut_so_that_a_run_ends_with_a_sync():
    assert lengths(growing(lambda r: 4, steps=10), 30) == [4, 4, 2]
    assert lengths(growing(lambda r: 100, steps=7), 30) == [7]
    constant = quadratic_period(
        optax.constant_schedule(1.0), growth=1.0, least=3, steps=8
    )
    assert lengths(constant, 30) == [3, 3, 2]


@pytest.mark.parametrize("value", [None, 1.0, True, jnp.arange(3)])
def test_a_step_that_is_no_integer_is_refused(value):
    for when in (at_steps([1]), before(2)):
        with pytest.raises(ValueError, match="step"):
            when.fire((), step=value)


def test_a_stacked_step_is_refused_by_name():
    tx = local_sgd(optax.sgd(0.1), period=at_steps([1]))
    worker = lambda x, t: tx.update(x, tx.init(x), x, step=t)[0]
    with pytest.raises(NotUniform, match="step differs"):
        spread(worker)(X, jnp.zeros(4, jnp.int32))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: at_steps([]), "at least one"),
        (lambda: at_steps([3, -1]), "counted from 0"),
        (lambda: at_steps([1.5]), "1.5 must be a whole number"),
        (lambda: before(-1), r"before\(-1\)"),
        (lambda: growing(lambda r: 4, steps=0), "steps 0"),
        (lambda: growing(lambda r: 2 - r, steps=9), "round 2 would take 0 steps"),
        (lambda: growing(lambda r: 2.5, steps=9), "2.5 must be a whole number"),
        (lambda: rule(growth=0.0), "growth 0.0"),
        (lambda: rule(least=0), "least 0"),
        (lambda: rule(steps=0), "steps 0"),
        (lambda: rule(lambda t: -1.0), "rate at step 0 is -1.0"),
        (lambda: rule(lambda t: np.nan), "rate at step 0 is nan"),
        (lambda: jax.jit(lambda r: rule(lambda t: r).fire((), step=0)[0])(0.1), "trac"),
    ],
)
def test_impossible_schedules_are_refused_with_their_value(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def rule(rate=lambda t: 0.01, *, growth=0.02, least=4, steps=40):
    return quadratic_period(rate, growth=growth, least=least, steps=steps)


@pytest.mark.parametrize(
    ("rate", "length"), [(0.02, 4), (0.01, 4), (0.008, 6), (0.004, 25), (0.001, 400)]
)
def test_the_quadratic_rule_has_these_lengths(rate, length):
    # α = 0.02, H_base = 4: the ratios are 1, 4, 6.25, 25 and 400; schedules compute in
    # float32, where 0.02/0.004 is a rounding below or above 5.
    for kind in (lambda t: rate, optax.constant_schedule(jnp.float32(rate))):
        when = rule(kind, steps=2 * length)
        assert lengths(when, 2 * length) == [length, length]
        assert when.gap == length


def test_between_the_base_and_the_end_the_length_is_the_floor_of_the_square():
    # α² − γ² < γ² H ≤ α² for every round of a cosine, at the rate it began with.
    steps, growth, least = 3000, 0.02, 2
    rate = optax.cosine_decay_schedule(0.02, steps)
    when = rule(rate, growth=growth, least=least, steps=steps)
    ends = times(when, steps)
    begins, sizes = [0, *(t + 1 for t in ends[:-1])], lengths(when, steps)
    active = 0
    for begin, size in list(zip(begins, sizes, strict=True))[:-1]:
        gamma = float(rate(begin))
        slack = 1e-6 * growth**2
        assert gamma**2 * size <= growth**2 + slack or size == least
        assert growth**2 - gamma**2 < gamma**2 * size + slack
        active += size > least
    assert active > 10
    assert sizes[:-1] == sorted(sizes[:-1])  # rounds only grow while the rate falls
    assert ends[-1] == steps - 1


def test_a_round_keeps_the_length_of_the_rate_it_began_with():
    # The rate drops in the middle of a round of 4; only the next one is longer.
    drop = optax.piecewise_constant_schedule(0.01, {6: 0.5})
    assert lengths(rule(drop, steps=36), 36) == [4, 4, 16, 12]


def test_a_rate_of_zero_is_a_round_to_the_end():
    drop = lambda t: 0.01 if t < 8 else 0.0
    assert lengths(rule(drop, steps=40), 40) == [4, 4, 32]


def test_at_a_constant_rate_the_rule_is_local_sgd_with_a_fixed_period():
    when = rule(optax.constant_schedule(0.01), steps=12)
    data = {"data": OPTIMA, "steps": 12, "gradient": toward}
    path, _ = walk(local_sgd(optax.sgd(0.3), period=when), X, **data)
    expected, _ = walk(local_sgd(optax.sgd(0.3), period=4), X, **data)
    np.testing.assert_array_equal(path, expected)


def test_a_growing_round_in_local_sgd_meets_at_its_steps_alone():
    when = growing(lambda r: r + 1, steps=10)
    tx = local_sgd(optax.sgd(0.3), period=when)
    path, _ = walk(tx, X, OPTIMA, steps=10, gradient=toward)
    together = np.ptp(path, axis=0).max(-1) < 1e-6
    assert np.flatnonzero(together).tolist() == [0, 2, 5, 9]
