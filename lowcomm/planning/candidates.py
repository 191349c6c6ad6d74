"""What advice chooses from: families of methods, what coding costs, what was published.

A family is one method of which the period, and perhaps a delay, is open. Its bytes are
not written down here: they are read from its transformation. Published periods are the
longest of the runs that a method is known for, not limits: 16 of post-local SGD (Lin et
al., 2018), 500 of DiLoCo (Douillard et al., 2023), 100 of Streaming DiLoCo, delayed and
in 4 bits (Douillard et al., 2025), and 250 of SparseLoCo (Sarfi et al., 2025).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from ..algorithms.gradients import (
    data_parallel,
    powersgd_sgd,
    sign_sgd,
    top_k_sgd,
)
from ..algorithms.local import local_sgd
from ..algorithms.outer import diloco
from ..algorithms.precision import quantized_sgd
from ..algorithms.sparse_rounds import sparse_loco
from ..algorithms.streaming import streaming_diloco
from ..anchor import rounds
from ..leaves import PyTree
from ..ledger import Traffic, traffic
from ..quantizers import quantize
from ..spmd import AXIS, Axis
from ..sync import Talking, Transformation
from ..triggers import every
from ..two_stage import two_stage


class Codec(NamedTuple):
    """How fast a compressor is, in bytes of the float32 it is about, a second."""

    encode: float
    decode: float


# Of two CPU cores, from experiments/results/codecs.md; powersgd, whose factors are one
# piece of work, by what it takes beside int8's encode in one process there.
CODECS: dict[str, Codec] = {
    "int8": Codec(6.57e9, 15.3e9),
    "int4": Codec(7.23e9, 10.9e9),
    "sign": Codec(12.2e9, 17.9e9),
    "top_k": Codec(1.19e9, 9.82e9),
    "sparse": Codec(1.19e9, 11.4e9),
    "powersgd": Codec(4.5e9, float("inf")),
}


class Family(NamedTuple):
    """A method of which the period is open.

    Attributes:
        name: of the family.
        call: how it is written, with ``{period}`` and ``{delay}``.
        make: from an inner optimizer, a period, a delay and the axis.
        rounds: whether it has a period; else it talks at every step.
        delayed: whether its exchange has time until some steps later.
        codec: what encodes and decodes, a name of ``CODECS``; "" for nothing.
        passes: from K, how often a worker encodes and decodes the whole tree.
        published: the longest period of the runs it was published with.
        remembers: how many rounds its outer momentum looks back, 1/(1 − μ).
        caution: what is to be known of it at any period.
    """

    name: str
    call: str
    make: Callable[[Transformation, int, int, Axis], Talking]
    rounds: bool = False
    delayed: bool = False
    codec: str = ""
    passes: Callable[[int], tuple[float, float]] = lambda workers: (0, 0)
    published: int | None = None
    remembers: int = 0
    caution: str = ""


def _own(workers: int) -> tuple[float, float]:
    return 1, 1


def _gathered(workers: int) -> tuple[float, float]:
    """Each decodes what each of them said, and what it said itself."""
    return 1, workers + 1


def _in_two_stages(workers: int) -> tuple[float, float]:
    return 1 + 1 / workers, 2


_GROWS = "its gather grows with the workers"
FAMILIES: tuple[Family, ...] = (
    Family(
        "data_parallel",
        "data_parallel(inner)",
        lambda inner, period, delay, axis: data_parallel(inner, axis=axis),
    ),
    Family(
        "int8 gradients",
        "quantized_sgd(inner, bits=8)",
        lambda inner, period, delay, axis: quantized_sgd(inner, bits=8, axis=axis),
        codec="int8",
        passes=_in_two_stages,
    ),
    Family(
        "powersgd",
        "powersgd_sgd(inner, rank=4)",
        lambda inner, period, delay, axis: powersgd_sgd(inner, rank=4, axis=axis),
        codec="powersgd",
        passes=_own,
        caution="saves on matrices only; waits twice a step",
    ),
    Family(
        "sign",
        "sign_sgd(inner)",
        lambda inner, period, delay, axis: sign_sgd(inner, axis=axis),
        codec="sign",
        passes=_gathered,
        caution=f"{_GROWS}; Adam undoes the scale of signs",
    ),
    Family(
        "top-k",
        "top_k_sgd(inner, fraction=0.01)",
        lambda inner, period, delay, axis: top_k_sgd(inner, fraction=0.01, axis=axis),
        codec="top_k",
        passes=_gathered,
        caution=f"{_GROWS}; what it holds back arrives late",
    ),
    Family(
        "local_sgd",
        "local_sgd(inner, period={period})",
        lambda inner, period, delay, axis: local_sgd(inner, period=period, axis=axis),
        rounds=True,
        published=16,
    ),
    Family(
        "diloco",
        "diloco(inner, period={period})",
        lambda inner, period, delay, axis: diloco(inner, period=period, axis=axis),
        rounds=True,
        published=500,
        remembers=10,
    ),
    Family(
        "delayed diloco",
        "streaming_diloco(inner, period={period}, fragments=1, delay={delay})",
        lambda inner, period, delay, axis: streaming_diloco(
            inner, period=period, fragments=1, delay=delay, axis=axis
        ),
        rounds=True,
        delayed=True,
        published=100,
        remembers=10,
        caution="news is late by τ = {delay}",
    ),
    Family(
        "local_sgd, int8",
        "rounds(inner, sgd(1.0), exchange=two_stage(quantize(8, block=256)), "
        "when=every({period}))",
        lambda inner, period, delay, axis: rounds(
            inner,
            optax.sgd(1.0),
            exchange=two_stage(quantize(8, block=256), axis=axis),
            when=every(period),
            axis=axis,
        ),
        rounds=True,
        codec="int8",
        passes=_in_two_stages,
        published=16,
    ),
    Family(
        "diloco, int8",
        "diloco(inner, period={period}, exchange=two_stage(quantize(8, block=256)))",
        lambda inner, period, delay, axis: diloco(
            inner,
            period=period,
            exchange=two_stage(quantize(8, block=256), axis=axis),
            axis=axis,
        ),
        rounds=True,
        codec="int8",
        passes=_in_two_stages,
        published=100,
        remembers=10,
    ),
    Family(
        "diloco, int4",
        "diloco(inner, period={period}, exchange=two_stage(quantize(4, block=256)))",
        lambda inner, period, delay, axis: diloco(
            inner,
            period=period,
            exchange=two_stage(quantize(4, block=256), axis=axis),
            axis=axis,
        ),
        rounds=True,
        codec="int4",
        passes=_in_two_stages,
        published=100,
        remembers=10,
    ),
    Family(
        "sparse_loco",
        "sparse_loco(inner, period={period})",
        lambda inner, period, delay, axis: sparse_loco(inner, period=period, axis=axis),
        rounds=True,
        codec="sparse",
        passes=_gathered,
        published=250,
        caution=_GROWS,
    ),
)
PERIODS = (2, 4, 8, 16, 30, 50, 100, 250, 500, 1000, 2000)


def program(
    family: Family, *, period: int, axis: Axis = AXIS
) -> Callable[[int], Callable]:
    """From a step number to what one worker does with its parameters in it."""
    tx = family.make(optax.sgd(1.0), period, int(family.delayed), axis)

    def at(step: int) -> Callable:
        return lambda params: tx.update(params, tx.init(params), params, step=step)

    return at


def exchanged(family: Family, params: PyTree, *, workers: int) -> Traffic:
    """What one exchange of a family sends, read from its transformation.

    Raises:
        ValueError: it sends something between two exchanges as well.
    """
    shapes, treedef = jax.tree.flatten(jax.eval_shape(lambda x: x, params))
    return _traced(family, treedef, tuple(shapes), workers)


@functools.lru_cache(maxsize=256)  # a model is asked about on many links
def _traced(family: Family, treedef: Any, shapes: Any, workers: int) -> Traffic:
    params = treedef.unflatten(shapes)
    at = program(family, period=2 if family.rounds else 1)
    if family.rounds and (silent := traffic(at(2), params, workers=workers)).rows:
        raise ValueError(f"{family.name} talks between its rounds:\n{silent.table()}")
    return traffic(at(3), params, workers=workers)


def coding_seconds(
    family: Family, nbytes: float, *, workers: int, codecs: Mapping[str, Codec]
) -> float:
    """Seconds that a worker encodes and decodes for one exchange of such a tree.

    Raises:
        ValueError: no speed is given for the family's codec, or one that is none.

    Example:
        Two encodings and two decodings of 4 MB, at 1 and 2 GB/s.

        >>> family = next(f for f in FAMILIES if f.name == "int8 gradients")
        >>> speeds = {"int8": Codec(1e9, 2e9)}
        >>> round(coding_seconds(family, 4e6, workers=1, codecs=speeds), 6)
        0.012
    """
    if not family.codec:
        return 0.0
    if family.codec not in codecs:
        raise ValueError(
            f"codecs has no speed for {family.codec!r}, which {family.name} needs: "
            f"there are {sorted(codecs)}."
        )
    speed = codecs[family.codec]
    if not (speed.encode > 0 and speed.decode > 0):
        raise ValueError(
            f"codecs[{family.codec!r}] = {speed}: give bytes a second, more than 0."
        )
    encodes, decodes = family.passes(workers)
    return encodes * nbytes / speed.encode + decodes * nbytes / speed.decode
