"""Methods that average parameters now and then."""

from __future__ import annotations

import lowcomm as lc

from .. import turns
from ..contracts import Method, Sent, at_syncs, dense

_IN_TURN = {"workers agree": "layers are averaged in turn, never all at once"}

METHODS: dict[str, Method] = {
    "local_sgd": Method(
        lambda inner, s: lc.local_sgd(inner, period=s.period),
        at_syncs,
        learning_rate=0.02,
        adamw_rate=0.005,
        syncs="period",
        bitwise=False,
    ),
    "post_local_sgd": Method(
        lambda inner, s: lc.post_local_sgd(inner, warmup=s.steps // 4, period=s.period),
        at_syncs,
        learning_rate=0.05,
        adamw_rate=0.005,
        syncs="period",
        bitwise=False,
    ),
    "parallel_restarted_sgd": Method(
        lambda inner, s: lc.local_sgd(inner, period=s.period, moments="average"),
        lambda params, s: Sent(0, 2 * dense(params)),  # one buffer beside the model
        syncs="period",
        bitwise=False,
        about="Local SGD that averages the momentum as well.",
    ),
    "output_average": Method(
        lambda inner, s: lc.output_average(
            lc.local_sgd(inner, period=s.period), offset=1.0
        ),
        at_syncs,
        syncs="period",
        exact=1,  # divisions by sums of squares
        bitwise=False,
    ),
    "two_level_local_sgd": Method(
        lambda inner, s: lc.two_level_local_sgd(
            inner, period=s.period // 2, outer_period=s.period
        ),
        turns.two_levels,
        syncs="period",
        bitwise=False,
        kinds=3,
        axis=("clusters", "workers"),
        exempt={"relabelling permutes": "renamed workers are in another cluster"},
    ),
    "swap": Method(
        lambda inner, s: lc.swap(inner, inner, switch=s.steps // 2, steps=s.steps),
        turns.together_then_apart,
        syncs="period",  # the run has two halves of a period each
        kinds=3,
        bitwise=False,
    ),
    "qsr": Method(
        lambda inner, s: lc.local_sgd(inner, period=turns.quadratic(s)),
        at_syncs,
        syncs="period",  # at a constant rate, as in the laws, rounds do not grow
        bitwise=False,
        about="`local_sgd` with `period=quadratic_period(...)`: rounds grow.",
    ),
    "des_loc": Method(
        lambda inner, s: lc.des_loc(
            inner, period=s.period, moment_periods=turns.moment_periods(inner, s)
        ),
        turns.desynced,
        syncs="period",
        kinds=3,  # silent, parameters, parameters and moments
        bitwise=False,
    ),
    "partial_local_sgd": Method(
        lambda inner, s: lc.partial_local_sgd(inner, turns.even_slots(s)),
        turns.slots,
        syncs=None,
        exempt=_IN_TURN,
    ),
    "dreamddp": Method(
        lambda inner, s: lc.dreamddp(inner, turns.even_slots(s)),
        turns.slots,
        syncs=None,
        exempt=_IN_TURN,
    ),
}
