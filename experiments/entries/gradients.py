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
        lambda inner, s: lc.powersgd_sgd(inner, rank=2, min_compression=1.0),
        lambda params, s: Sent(low_rank_bytes(params, 2, min_compression=1.0), 0),
        lambda params, s, *shared: Sent(
            low_rank_bytes(params, 2, *shared, min_compression=1.0), 0
        ),
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
    "snoo": Method(
        lambda inner, s: lc.snoo(lc.data_parallel(inner), period=s.period),
        every_step,
        syncs=None,  # it talks at every step, and looks ahead once a period
        exact=1,  # outer rates 0.7 and 0.9 are no binary fractions
        about="SNOO: the outer Nesterov step of DiLoCo, on data-parallel steps.",
        exempt={
            "one worker is the inner optimizer": "the outer momentum acts on it too"
        },
    ),
    "gpa": Method(
        lambda inner, s: lc.gpa(
            lc.data_parallel(inner), averaging=0.5, interpolation=0.5
        ),
        every_step,
        exact=4,  # every step halves what is averaged
        about="Generalized primal averaging, on data-parallel steps.",
        exempt={
            "one worker is the inner optimizer": "its iterates are averaged over time"
        },
    ),
}
