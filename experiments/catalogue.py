"""The one table of methods: how to build each, its tuned rate, and its contract.

A new method is one factory in ``lowcomm.algorithms`` and one entry here; the law suite
and the comparison then apply to it. A law that does not hold for a method is named in
its ``exempt`` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import optax

import lowcomm as lc
from lowcomm.leaves import takes_part
from lowcomm.lowrank import low_rank_bytes


class Setting(NamedTuple):
    """What a method may depend on besides its inner optimizer."""

    workers: int
    steps: int
    learning_rate: optax.ScalarOrSchedule
    period: int
    fraction: float = 0.05
    threshold: float = 0.07
    window: int = 25


class Sent(NamedTuple):
    """Payload bytes per worker, as the formulas of the parts have it."""

    always: int  # at every step
    sync: int  # in addition on the steps that fire


@dataclass(frozen=True)
class Method:
    """One method of the catalogue.

    Attributes:
        wrap: from an inner optimizer and a setting to the transformation.
        sent: the bytes it sends for a tree of parameters, at a step that is not known
            when the program is built (where the clock alone decides, nobody is asked).
        learning_rate: tuned on the image task, for SGD with momentum 0.9.
        adamw_rate: tuned on the language model, for AdamW.
        period: of its syncs in the comparison.
        syncs: on the clock ("every step", "period"), or "measured".
        exact: how many steps stay exact in float32 on small binary data.
        bitwise: whether all workers hold the same bits right after a sync; else, as
            where parameters are averaged, the same up to a rounding.
        smooth: whether a rounding stays a rounding (false for signs and selections).
        exempt: law -> why it does not apply.
    """

    wrap: Callable[[Any, Setting], optax.GradientTransformationExtraArgs]
    sent: Callable[[Any, Setting], Sent]
    learning_rate: float
    adamw_rate: float
    period: int = 8
    syncs: str = "every step"
    exact: int = 8
    bitwise: bool = True
    smooth: bool = True
    exempt: Mapping[str, str] = field(default_factory=dict)

    def make(
        self,
        *,
        workers: int,
        steps: int,
        learning_rate: optax.ScalarOrSchedule | None = None,
        inner: Any = None,
        **setting: Any,
    ) -> optax.GradientTransformationExtraArgs:
        """The transformation, around momentum SGD unless ``inner`` is given."""
        rate = self.learning_rate if learning_rate is None else learning_rate
        inner = optax.sgd(rate, momentum=0.9) if inner is None else inner
        period = setting.pop("period", self.period)
        return self.wrap(inner, Setting(workers, steps, rate, period, **setting))


def _dense(params: Any, *, least: int = 4) -> int:
    """Bytes of the leaves that travel, in at least so many bytes an entry."""
    leaves = [x for x in jax.tree.leaves(params) if takes_part(x)]
    return sum(x.size * max(least, x.dtype.itemsize) for x in leaves)


def _every_step(params: Any, setting: Setting) -> Sent:
    return Sent(_dense(params), 0)


def _at_syncs(params: Any, setting: Setting) -> Sent:
    return Sent(0, _dense(params))


_LOSSY = {
    "one worker is the inner optimizer": "one worker's gradient is compressed too"
}
_OUTER = {
    "one worker is the inner optimizer": "the outer momentum acts on one worker too"
}

CATALOGUE: dict[str, Method] = {
    "data_parallel": Method(
        lambda inner, s: lc.data_parallel(inner),
        _every_step,
        learning_rate=0.02,
        adamw_rate=0.005,
    ),
    "local_sgd": Method(
        lambda inner, s: lc.local_sgd(inner, period=s.period),
        _at_syncs,
        learning_rate=0.02,
        adamw_rate=0.005,
        syncs="period",
        bitwise=False,
    ),
    "post_local_sgd": Method(
        lambda inner, s: lc.post_local_sgd(inner, warmup=s.steps // 4, period=s.period),
        _at_syncs,
        learning_rate=0.05,
        adamw_rate=0.005,
        syncs="period",
        bitwise=False,
    ),
    "diloco": Method(
        lambda inner, s: lc.diloco(inner, period=s.period),
        _at_syncs,
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
        _at_syncs,
        learning_rate=0.01,
        adamw_rate=0.005,
        syncs="period",
        exempt=_OUTER,
    ),
    "selsync": Method(
        lambda inner, s: lc.selsync(inner, threshold=s.threshold, window=s.window),
        lambda params, s: Sent(4, _dense(params)),
        learning_rate=0.02,
        adamw_rate=0.005,
        syncs="measured",
        bitwise=False,
        exempt={
            "learns": "gradients of whole batches stop changing, and nobody syncs then"
        },
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
    "dpsgd": Method(
        lambda inner, s: lc.dpsgd(inner, lc.one_peer_exponential(s.workers)),
        # Neighbours hear the leaf's own type, and the count where the graph changes.
        lambda params, s: Sent(
            0 if s.workers == 1 else _dense(params, least=1) + 4 * (s.workers > 2), 0
        ),
        learning_rate=0.02,
        adamw_rate=0.005,
        exempt={
            "workers agree": "workers mix with neighbours and never quite agree",
            "relabelling permutes": "other names are another graph",
        },
    ),
}
