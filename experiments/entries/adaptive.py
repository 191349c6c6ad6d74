"""Methods that look at gradients to decide."""

from __future__ import annotations

import lowcomm as lc

from .. import turns
from ..contracts import Method, Sent, dense

METHODS: dict[str, Method] = {
    "selsync": Method(
        lambda inner, s: lc.selsync(inner, threshold=s.threshold, window=s.window),
        lambda params, s: Sent(4, dense(params)),
        learning_rate=0.02,
        adamw_rate=0.005,
        syncs="measured",
        bitwise=False,
        exempt={
            "learns": "gradients of whole batches stop changing, and nobody syncs then"
        },
    ),
    "selsync_gradients": Method(
        lambda inner, s: lc.selsync_gradients(
            inner, threshold=s.threshold, window=s.window
        ),
        lambda params, s: Sent(4, dense(params)),
        syncs="measured",
        exempt={
            "workers agree": "the mean of gradients brings no models together",
            "learns": "gradients of whole batches stop changing, and nobody syncs then",
        },
    ),
    "savic": Method(
        lambda inner, s: lc.savic(
            inner, period=s.period, floor=1e-3, rule=lc.mean_of_squares()
        ),
        lambda params, s: turns.first_and_last(s, dense(params), dense(params)),
        syncs="period",
        kinds=3,  # the first of a round, the last, and those between
        exact=0,  # square roots
        bitwise=False,
        exempt={
            "one worker is the inner optimizer": "one worker's gradient is scaled too"
        },
    ),
    "adaptive_batch": Method(
        lambda inner, s: lc.adaptive_batch(
            inner, period=s.period, level=0.8, start=8, most=64
        ),
        # The test wants a gradient and a scalar, where there was a sync before.
        lambda params, s: turns.first_and_last(
            s, dense(params) + 4, dense(params), begin=1
        ),
        syncs="period",
        kinds=3,
        bitwise=False,
    ),
}
