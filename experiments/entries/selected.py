"""Methods that send some entries of gradients or displacements."""

from __future__ import annotations

from typing import Any

import jax
import optax

import lowcomm as lc
from lowcomm.algorithms.sparse_rounds import TAILS

from ..contracts import Method, Sent, Setting, dense

_LOSSY = {
    "one worker is the inner optimizer": "one worker's gradient is compressed too"
}
_OWN = {
    "workers agree": "workers hear their neighbours and never quite agree",
    "relabelling permutes": "other names are another graph",
}
# To the nearest: at random, hundreds of entries may lose more than they hold.
_FOUR_BITS = lc.quantize(4, stochastic=False)


def _largest_of(s: Setting) -> int:
    """Entries of a block of 64, as the models of the laws and tasks fill."""
    return max(1, round(64 * s.fraction))


def _two_bits(params: Any, s: Setting) -> int:
    """What SparseLoCo sends a round."""
    k = _largest_of(s)
    values = lc.codebook(TAILS, relative_to="rms", block=k)
    return lc.payload_bytes(lc.top_k(k / 64, block=64, values=values), params)


def _by_leaf(params: Any, s: Setting) -> int:
    """What LAGS sends a step: leaves of fewer than eight entries whole."""
    few, many = [], []
    for x in jax.tree.leaves(params):
        (few if x.size < 8 else many).append(x)
    return dense(few) + lc.payload_bytes(lc.top_k(2 * s.fraction), many)


METHODS: dict[str, Method] = {
    "dgc": Method(
        lambda inner, s: lc.dgc(
            optax.sgd(s.learning_rate), fraction=s.fraction, momentum=0.5
        ),
        lambda params, s: Sent(lc.payload_bytes(lc.top_k(s.fraction), params), 0),
        smooth=False,
        exempt=_LOSSY
        | {
            "inner sees all": "its momentum is in the exchange, and SGD without follows"
        },
    ),
    "demo": Method(
        lambda inner, s: lc.demo(inner, k=16, chunk=8),
        lambda params, s: Sent(lc.payload_bytes(lc.dct_top_k(16, chunk=8), params), 0),
        exact=0,  # cosines
        smooth=False,
        exempt=_LOSSY,
    ),
    "ef21": Method(
        lambda inner, s: lc.ef21(inner, lc.top_k(s.fraction), momentum=0.5),
        lambda params, s: Sent(lc.payload_bytes(lc.top_k(s.fraction), params), 0),
        smooth=False,
        exempt=_LOSSY,
    ),
    "diana": Method(
        lambda inner, s: lc.diana(inner, lc.quantize(4)),
        lambda params, s: Sent(lc.payload_bytes(lc.quantize(4), params), 0),
        exact=0,  # rounded at random on a grid
        smooth=False,
        exempt=_LOSSY
        | {
            "copies": "each worker rounds at random, with coins of its own",
            "relabelling permutes": "each worker rounds at random, with its own coins",
        },
    ),
    "lags_sgd": Method(
        lambda inner, s: lc.lags_sgd(inner, 2 * s.fraction, whole=8),
        lambda params, s: Sent(_by_leaf(params, s), 0),
        smooth=False,
        exempt=_LOSSY,
    ),
    "sparse_loco": Method(
        lambda inner, s: lc.sparse_loco(
            inner, period=s.period, k=_largest_of(s), block=64, outer_lr=0.5
        ),
        lambda params, s: Sent(0, _two_bits(params, s)),
        syncs="period",
        exact=0,  # quantized by a norm
        smooth=False,
        exempt=_LOSSY,
    ),
    "qsparse_local_sgd": Method(
        lambda inner, s: lc.qsparse_local_sgd(
            inner, period=s.period, fraction=2 * s.fraction, values=_FOUR_BITS
        ),
        lambda params, s: Sent(
            0,
            lc.payload_bytes(lc.top_k(2 * s.fraction, values=_FOUR_BITS), params),
        ),
        syncs="period",
        exact=0,
        smooth=False,
        exempt=_LOSSY,
    ),
    "choco_sgd": Method(
        lambda inner, s: lc.choco_sgd(
            inner, lc.ring(s.workers), lc.top_k(s.fraction), step_size=0.25
        ),
        # Rings of one, two and more have so many neighbours.
        lambda params, s: Sent(
            min(2, s.workers - 1) * lc.payload_bytes(lc.top_k(s.fraction), params), 0
        ),
        exact=0,  # thirds
        smooth=False,
        exempt=_OWN
        | {"changes size": "what neighbours have told each other is of their graph"},
    ),
}
