"""Methods with an outer step on the displacements of a round."""

from __future__ import annotations

import lowcomm as lc

from .. import turns
from ..contracts import Method, at_syncs

_OUTER = {
    "one worker is the inner optimizer": "the outer momentum acts on one worker too"
}

METHODS: dict[str, Method] = {
    "diloco": Method(
        lambda inner, s: lc.diloco(inner, period=s.period),
        at_syncs,
        learning_rate=0.005,
        adamw_rate=0.005,
        syncs="period",
        exact=1,  # outer rates 0.7 and 0.9 are no binary fractions
        exempt=_OUTER,
    ),
    "slowmo": Method(
        lambda inner, s: lc.slowmo(
            inner, period=s.period, learning_rate=s.learning_rate
        ),
        at_syncs,
        learning_rate=0.01,
        adamw_rate=0.005,
        syncs="period",
        exempt=_OUTER,
    ),
    "edit": Method(
        lambda inner, s: lc.edit(
            inner,
            period=s.period,
            warmup=s.steps // 4,
            exchange=lc.penalized_mean(clip=10.0),
        ),
        turns.edit,
        syncs=None,
        exact=1,  # roots, exponentials and outer rates that are no binary fractions
        exempt=_OUTER,
    ),
    "palsgd": Method(
        lambda inner, s: lc.palsgd(
            inner, learning_rate=s.learning_rate, period=s.period, t_start=s.period
        ),
        turns.together_then_rounds,
        syncs="period",
        kinds=4,  # gradients, or not, and a sync, or not
        exact=0,  # pulls with probability 0.1, outer rates 0.7 and 0.9
        exempt=_OUTER
        | {
            "copies": "each worker is pulled at random steps of its own",
            "relabelling permutes": "each worker is pulled at random steps of its own",
        },
    ),
    "streaming_diloco": Method(
        lambda inner, s: lc.streaming_diloco(
            inner, period=s.period, fragments=2, delay=1
        ),
        turns.two_fragments,
        syncs="period",
        kinds=5,  # silent, two fragments that leave, two that arrive
        exact=1,  # outer rates 0.4 and 0.9
        exempt=_OUTER
        | {"workers agree": "fragments are synced in turn, and mixed in by half"},
    ),
    "muloco": Method(
        lambda inner, s: lc.muloco(s.learning_rate, period=s.period),
        at_syncs,
        syncs="period",
        exact=0,  # orthogonalization
        smooth=False,
        exempt=_OUTER
        | {
            "inner sees all": "its inner optimizer is Muon, whatever it is given",
            "learns": "steps of one length, whatever the gradients of a worker, meet "
            "elsewhere than at the optimum of the mean",
        },
    ),
}
