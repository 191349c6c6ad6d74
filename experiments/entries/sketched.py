"""Methods that send sums of hashed entries."""

from __future__ import annotations

from typing import Any

import lowcomm as lc
from lowcomm.lossless import lossless_bytes
from lowcomm.sketching import sketched_bytes

from ..contracts import Method, Sent, Setting

_LOSSY = {
    "one worker is the inner optimizer": "one worker's gradient is compressed too"
}
_COINS = "each worker rounds at random, with coins of its own"
_FEW = "one entry of 32 a step is too few for so short a run"


def _peeled(params: Any, s: Setting) -> Sent:
    """The sketch, and the tree where it cannot be peeled: never, on what is run."""
    always, fallback = lossless_bytes(params, s.fraction / 8, workers=s.workers)
    return Sent(always, fallback, at=lambda t: always)


def _found(s: Setting) -> dict[str, Any]:
    return {
        "fraction": s.fraction,
        "rows": 3,
        "columns": s.fraction / 4,
        "candidates": 3,
    }


METHODS: dict[str, Method] = {
    "lossless_sgd": Method(
        # All that K workers select must fit: 8 times less each than of top_k_sgd.
        lambda inner, s: lc.lossless_sgd(inner, fraction=s.fraction / 8),
        _peeled,
        exact=4,  # sums of entries of any size are formed before they are told apart
        smooth=False,
        exempt=_LOSSY | {"half precision": _FEW, "any number of workers": _FEW},
    ),
    "fetch_sgd": Method(
        # The inner optimizer has a momentum.
        lambda inner, s: lc.fetch_sgd(
            inner, fraction=2 * s.fraction, rows=3, columns=s.fraction, momentum=0.0
        ),
        lambda params, s: Sent(sketched_bytes(params, rows=3, columns=s.fraction), 0),
        smooth=False,
        exempt=_LOSSY
        | {"learns": "sketches find what stands out, and here all entries are alike"},
    ),
    "sketched_sgd": Method(
        lambda inner, s: lc.sketched_sgd(inner, **_found(s)),
        lambda params, s: Sent(sketched_bytes(params, **_found(s)), 0),
        smooth=False,
        exempt=_LOSSY,
    ),
    "thc_sgd": Method(
        lambda inner, s: lc.thc_sgd(inner),
        lambda params, s: Sent(
            lc.payload_bytes(lc.thc(), params, workers=s.workers), 0
        ),
        exact=0,  # norms take square roots
        smooth=False,
        exempt=_LOSSY | {"copies": _COINS, "relabelling permutes": _COINS},
    ),
}
