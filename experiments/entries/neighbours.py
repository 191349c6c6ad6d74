"""Methods in which workers hear some of the others."""

from __future__ import annotations

import lowcomm as lc

from .. import turns
from ..contracts import Method, Sent, dense

_OUTER = {
    "one worker is the inner optimizer": "the outer momentum acts on one worker too"
}

METHODS: dict[str, Method] = {
    "dpsgd": Method(
        lambda inner, s: lc.dpsgd(inner, lc.one_peer_exponential(s.workers)),
        # Neighbours hear the leaf's own type, and the count where the graph changes.
        lambda params, s: Sent(
            0 if s.workers == 1 else dense(params, least=1) + 4 * (s.workers > 2), 0
        ),
        learning_rate=0.02,
        adamw_rate=0.005,
        exempt={
            "workers agree": "workers mix with neighbours and never quite agree",
            "relabelling permutes": "other names are another graph",
        },
    ),
    "noloco": Method(
        lambda inner, s: lc.noloco(
            inner, lc.random_matchings(s.workers, rounds=8), period=s.period
        ),
        turns.partners,
        syncs="period",
        exact=1,  # outer rates 0.7 and 0.5
        exempt=_OUTER
        | {
            "workers agree": "partners mix what they have and never quite agree",
            "relabelling permutes": "other names are other partners",
        },
    ),
}
