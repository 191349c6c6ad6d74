"""Methods that exchange gradients at every step."""

from __future__ import annotations

import lowcomm as lc
from lowcomm.lowrank import low_rank_bytes

from ..contracts import Method, Sent, dense, every_step

_LOSSY = {
    "one worker is the inner optimizer": "one worker's gradient is compressed too"
}

METHODS: dict[str, Method] = {
    "data_parallel": Method(
        lambda inner, s: lc.data_parallel(inner),
        every_step,
        learning_rate=0.02,
        adamw_rate=0.005,
    ),
    "top_k_sgd": Method(
        lambda inner, s: lc.top_k_sgd(inner, fraction=s.fraction),
        lambda params, s: Sent(lc.payload_bytes(lc.top_k(s.fraction), params), 0),
        learning_rate=0.05,
        adamw_rate=0.002,
        smooth=False,
        exempt=_LOSSY,
    ),
    "sign_sgd": Method(
        lambda inner, s: lc.sign_sgd(inner),
        lambda params, s: Sent(lc.payload_bytes(lc.sign(), params), 0),
        learning_rate=0.05,
        adamw_rate=0.002,
        exact=1,  # the scale is a mean over the entries of a leaf
        smooth=False,
        exempt=_LOSSY,
    ),
    "powersgd_sgd": Method(
        lambda inner, s: lc.powersgd_sgd(inner, rank=2),
        lambda params, s: Sent(low_rank_bytes(params, 2), 0),
        learning_rate=0.02,
        adamw_rate=0.002,
        exact=0,  # orthogonalization takes square roots
        exempt=_LOSSY,
    ),
    "layered_sgd": Method(
        lambda inner, s: lc.layered_sgd(inner),
        lambda params, s: Sent(2 * dense(params), 0),  # on each of the two levels
        axis=("groups", "workers"),
    ),
}
