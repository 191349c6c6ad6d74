"""Methods that follow the best worker."""

from __future__ import annotations

import lowcomm as lc

from .. import turns
from ..contracts import Method

METHODS: dict[str, Method] = {
    "leader_sgd": Method(
        lambda inner, s: lc.leader_sgd(inner, period=s.period),
        turns.best,
        syncs="period",
        exact=0,  # pulls of 0.1
        smooth=False,  # another worker leads
        exempt={
            "workers agree": "workers follow a leader and never quite agree",
            "learns": "who leads fits its own data, and here data differ by worker",
            "one worker is the inner optimizer": "a stale leader pulls one worker too",
        },
    ),
    "pso_ps": Method(
        lambda inner, s: lc.pso_ps(inner, period=s.period),
        turns.best,
        syncs="period",
        exact=0,  # random coefficients
        smooth=False,  # another worker is the best
        exempt={
            "workers agree": "workers fly about the best of them",
            "learns": "the best fits its own data, and here data differ by worker",
            "relabelling permutes": "every worker draws random numbers of its own",
            "one worker is the inner optimizer": "its own best position pulls it too",
        },
    ),
}
