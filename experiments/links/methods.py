"""The methods that are timed on a link, with settings of a size for it.

The catalogue's settings are those of its laws, on models of a few hundred entries.
Here are the ones that one would choose for a model of half a million.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax

import lowcomm as lc
from experiments.contracts import dense
from experiments.names import lookup
from lowcomm.algorithms.sparse_rounds import TAILS
from lowcomm.lowrank import low_rank_bytes
from lowcomm.planning.candidates import FAMILIES, exchanged
from lowcomm.row_means import two_stage_bytes

Inner = Any  # optax.GradientTransformation


@dataclass(frozen=True)
class Recipe:
    """A method with its settings, and what it promises.

    Attributes:
        make: from an inner optimizer and the number of workers to the transformation.
        sent: from one worker's parameters and the number of workers to the payload
            bytes that a worker hands to its collectives in one round.
        period: steps of a round.
    """

    make: Callable[[Inner, int], Any]
    sent: Callable[[Any, int], int]
    period: int = 1


def _whole(params: Any, workers: int) -> int:
    return dense(params)


def _coded(compressor: Any) -> Callable[[Any, int], int]:
    return lambda params, workers: lc.payload_bytes(compressor, params)


def _sparse(k: int, block: int) -> Any:
    values = lc.codebook(TAILS, relative_to="rms", block=k)
    return lc.top_k(k / block, block=block, values=values)


_INT8 = lc.quantize(8, block=256)


def _int8(params: Any, workers: int) -> int:
    return two_stage_bytes(_INT8, params, workers=workers)


def local_sgd(period: int) -> Recipe:
    """Parameters are averaged every ``period`` steps."""
    return Recipe(
        lambda inner, workers: lc.local_sgd(inner, period=period), _whole, period
    )


def int8_rounds(period: int) -> Recipe:
    """Local steps, then the mean displacement by an int8 all-reduce in two stages."""
    return Recipe(
        lambda inner, workers: lc.rounds(
            inner,
            optax.sgd(1.0),
            exchange=lc.two_stage(_INT8),
            when=lc.every(period),
        ),
        _int8,
        period,
    )


def sparse_loco(period: int, k: int = 64, block: int = 4096) -> Recipe:
    """SparseLoCo as published: 64 of 4,096 entries, in two bits each."""
    return Recipe(
        lambda inner, workers: lc.sparse_loco(inner, period=period, k=k, block=block),
        _coded(_sparse(k, block)),
        period,
    )


# Names say what is not the method's default.
TIMED: dict[str, Recipe] = {
    "data_parallel": Recipe(lambda inner, workers: lc.data_parallel(inner), _whole),
    "dpsgd": Recipe(
        lambda inner, workers: lc.dpsgd(inner, lc.one_peer_exponential(workers)),
        lambda params, workers: dense(params, least=1) + 4 * (workers > 2),
    ),
    "quantized_sgd": Recipe(
        lambda inner, workers: lc.quantized_sgd(inner, bits=8, block=256), _int8
    ),
    "sign_sgd": Recipe(lambda inner, workers: lc.sign_sgd(inner), _coded(lc.sign())),
    "powersgd_sgd": Recipe(
        lambda inner, workers: lc.powersgd_sgd(inner, rank=4),
        lambda params, workers: low_rank_bytes(params, 4, min_compression=2.0),
    ),
    "top_k_sgd": Recipe(
        lambda inner, workers: lc.top_k_sgd(inner, fraction=0.01),
        _coded(lc.top_k(0.01)),
    ),
    "local_sgd": local_sgd(8),
    "int8_rounds": int8_rounds(8),
    "sparse_loco": sparse_loco(8),
}


def racing(name: str) -> Recipe:
    """A method that advice chooses from: a family, and its period if it has one.

    Raises:
        ValueError: no such family, or a period for one without.

    Example:
        >>> racing("diloco, int8 / 30").period
        30
    """
    family, _, period = (part.strip() for part in name.partition("/"))
    found = lookup({one.name: one for one in FAMILIES}, family, "family of methods")
    if found.rounds != bool(period):
        raise ValueError(
            f"{name!r}: write {family + (' / 30' if found.rounds else '')!r}"
        )
    steps = int(period or 1)
    return Recipe(
        lambda inner, workers: found.make(inner, steps, 0, lc.AXIS),
        lambda params, workers: exchanged(found, params, workers=workers).bytes_always,
        steps,
    )
