"""Methods that send signs or few bits both ways, in two stages."""

from __future__ import annotations

from typing import Any

import lowcomm as lc
from lowcomm.row_means import two_stage_bytes
from lowcomm.votes import vote_bytes

from ..contracts import Method, Sent, Setting, dense

_COMPRESSED = "one worker's gradient is compressed too"
_ROWS = "every row of a leaf has its own scale, and there are as many as workers"
_OWN_ROW = "each worker keeps what was not said of its own row"
_FEEDBACK = {
    "one worker is the inner optimizer": _COMPRESSED,
    "copies": _ROWS,
    "relabelling permutes": _OWN_ROW,
}
_NO_INNER = "its learning rate weighs what it sends: there is no inner optimizer"
_REFRESH = lc.thinning(2)


def _signs(params: Any, s: Setting) -> int:
    return two_stage_bytes(lc.sign(), params, workers=s.workers)


def _warm(s: Setting) -> int:
    return max(1, s.steps // 4)


def _frozen(params: Any, s: Setting) -> Sent:
    """Gradients in the warm-up, then signs of momenta."""
    first, then = dense(params), _signs(params, s)
    return Sent(0, max(first, then), lambda t: first if t < _warm(s) else then)


def _thinned(params: Any, s: Setting) -> Sent:
    """Signs at the end of a round, gradients where the second moment is refreshed."""
    syncs, whole = _signs(params, s), dense(params)

    def at(t: int) -> int:
        refresh = _REFRESH.fire((), step=t)[0]
        return syncs * ((t + 1) % s.period == 0) + whole * refresh

    return Sent(0, syncs + whole, at)


def _tenth(rate: Any) -> Any:
    scaled: Any = lambda t: rate(t) / 10
    return scaled if callable(rate) else rate / 10


METHODS: dict[str, Method] = {
    "sign_vote_sgd": Method(
        lambda inner, s: lc.sign_vote_sgd(inner),
        lambda params, s: Sent(vote_bytes(params, workers=s.workers), 0),
        smooth=False,
        exempt={
            "one worker is the inner optimizer": "one worker's signs are sent too",
            "learns": "the majority's sign is not that of the mean where data differ",
        },
    ),
    "quantized_sgd": Method(
        lambda inner, s: lc.quantized_sgd(inner, block=8),
        lambda params, s: Sent(
            two_stage_bytes(lc.quantize(8, block=8), params, workers=s.workers), 0
        ),
        exact=0,  # rounded at random
        smooth=False,
        exempt={
            "one worker is the inner optimizer": _COMPRESSED,
            "copies": "each worker tosses coins of its own",
            "relabelling permutes": "each worker tosses coins of its own",
        },
    ),
    "one_bit_adam": Method(
        lambda inner, s: lc.one_bit_adam(inner, warmup=_warm(s)),
        _frozen,
        syncs=None,  # gradients in the warm-up, then signs
        exact=0,  # square roots
        smooth=False,
        exempt=_FEEDBACK,
    ),
    "zero_one_adam": Method(
        # Its rates are those of Adam, not of SGD, and refreshes are few.
        lambda inner, s: lc.zero_one_adam(
            _tenth(s.learning_rate), period=s.period, refresh=_REFRESH, b2=0.9
        ),
        _thinned,
        syncs="period",
        kinds=3,
        exact=0,  # square roots
        smooth=False,
        exempt=_FEEDBACK | {"inner sees all": _NO_INNER},
    ),
}
