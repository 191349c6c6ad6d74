"""Methods in which what is heard is older than the step that uses it."""

from __future__ import annotations

import lowcomm as lc

from ..contracts import Method, Sent, at_syncs, dense, every_step

_LATE = {"workers agree": "what is heard is old, and own steps have been taken since"}

METHODS: dict[str, Method] = {
    "overlap_local_sgd": Method(
        lambda inner, s: lc.overlap_local_sgd(inner, period=s.period),
        at_syncs,
        syncs="period",
        exact=3,  # its pull of 0.6 and momentum of 0.7 are no binary fractions
        exempt=_LATE
        | {"one worker is the inner optimizer": "one worker is pulled back as well"},
    ),
    "cocod_sgd": Method(
        lambda inner, s: lc.cocod_sgd(inner, period=s.period),
        at_syncs,
        syncs="period",
        exempt=_LATE,
    ),
    "oldsgd": Method(
        lambda inner, s: lc.oldsgd(inner, lc.lazy(lc.ring(s.workers)), period=s.period),
        # To each neighbour, in the leaf's own type.
        lambda params, s: Sent(0, min(s.workers - 1, 2) * dense(params, least=1)),
        syncs="period",
        exact=3,  # its weights of 1/6 are no binary fractions
        exempt=_LATE | {"relabelling permutes": "other names are another graph"},
    ),
    "od_sgd": Method(
        lambda inner, s: lc.od_sgd(inner, warmup=0),
        every_step,
        exempt=_LATE,
    ),
    "prlc": Method(
        lambda inner, s: lc.prlc(inner, pulls=lc.staggered_pulls(s.period)),
        every_step,
        exempt={
            "workers agree": "workers pull one after the other, never all at once",
            "relabelling permutes": "other names are another order of pulls",
        },
    ),
}
