"""Methods that send matrices as products of narrow ones."""

from __future__ import annotations

from typing import Any

import lowcomm as lc
from lowcomm.lowrank import low_rank_bytes
from lowcomm.matrices import leaf_ranks

from ..contracts import Method, Sent, Setting, dense

_RANKS, _SAMPLE_EVERY = (1, 2), 2


def _dion(params: Any, s: Setting, *shared: Any) -> Sent:
    rank = lc.rank_fraction(0.25)
    return Sent(low_rank_bytes(params, rank, *shared, min_compression=0.0), 0)


def _edgc(params: Any, s: Setting, parts: Any = None, devices: int = 1) -> Sent:
    """Everything in the warm-up, then factors of the largest rank and who has which.

    For two windows, before the first of which nothing was measured.
    """
    warm, whole = s.steps // 4, dense(params if parts is None else parts)
    shared = parts, devices
    factors = 4 + low_rank_bytes(params, _RANKS[-1], *shared, min_compression=1.0)
    entropies = 4 * sum(r > 0 for r in leaf_ranks(params, _RANKS[0], 1.0))
    asks = lambda t: entropies * ((t - warm) % _SAMPLE_EVERY == 0)
    at = lambda t: whole if t < warm else factors + asks(t)
    return Sent(0, max(whole, factors + entropies), at)


METHODS: dict[str, Method] = {
    "dion": Method(
        lambda inner, s: lc.dion(inner, rank=lc.rank_fraction(0.25)),
        _dion,
        _dion,
        exact=0,  # orthogonalization takes square roots
        smooth=False,
        exempt={
            "one worker is the inner optimizer": "its steps have a length of their own",
        },
    ),
    "edgc": Method(
        lambda inner, s: lc.edgc(
            inner,
            ranks=_RANKS,
            window=2 * s.window,
            warmup=s.steps // 4,
            sample_every=_SAMPLE_EVERY,
            min_compression=1.0,
        ),
        _edgc,
        _edgc,
        syncs=None,  # it talks at every step, of which there are several kinds
        exact=0,  # orthogonalization takes square roots
        exempt={
            "one worker is the inner optimizer": "one worker's gradient is compressed",
        },
    ),
}
