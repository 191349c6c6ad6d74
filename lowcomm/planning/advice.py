r"""Which method, at which period, for a link: the least that has to be given up.

Of a candidate whose exchange takes m seconds on the link and q seconds to encode and
decode, every H steps of c seconds, and may hide behind τ steps of them,

    seconds a step = c + (max(0, m − τ c) + q) / H,         efficiency = c / seconds

The bytes are read from the method's own transformation. Every reduction costs loss, and
how much only a run tells, so what is recommended is the candidate that holds back least
among those that are efficient enough: how many times fewer bytes a step it sends than
data-parallel training, times 1 + τ/H, since with a delay workers know of each other
what was so H + τ steps ago. Of equals those come first whose period was published, then
those whose news is not late, then the simpler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..leaves import PyTree, takes_part
from ..network import Link, Network, seconds
from ..spmd import AXIS
from ..timeline import exposed_seconds
from .candidates import (
    CODECS,
    FAMILIES,
    PERIODS,
    Codec,
    Family,
    coding_seconds,
    exchanged,
)

# How many times the rounds that an outer momentum looks back a run must have.
LOOKS_BACK = 5


class Option(NamedTuple):
    """One candidate and what is expected of it; bytes are those of a worker."""

    method: str  # the family's name
    call: str  # how it is written
    period: int  # H, steps from exchange to exchange
    delay: int  # τ, steps that an exchange may take
    sent: int  # bytes of one exchange
    fewer: float  # by how many times fewer bytes a step than data-parallel's
    exchange: float  # seconds of one exchange on the link
    exposed: float  # seconds a step that are waited for it
    coding: float  # seconds a step to encode and decode
    seconds: float  # of a step
    share: float  # of the time that is computing: the efficiency
    speedup: float  # over data-parallel training
    published: bool  # whether the period is one it was published with
    caution: str

    @property
    def bytes(self) -> float:
        """Of a step, on average."""
        return self.sent / self.period

    @property
    def held_back(self) -> float:
        """How much of what workers could tell each other they do not, or late."""
        return self.fewer * (1 + self.delay / self.period)


class Advice(NamedTuple):
    """What to run, and why."""

    best: Option
    reached: bool  # whether it is as efficient as was wanted
    efficiency: float  # that was wanted
    options: tuple[Option, ...]  # all there were, from the least held back on

    @property
    def reason(self) -> str:
        """The recommendation as a sentence."""
        best, wanted = self.best, f"{self.efficiency:.0%}"
        what = f"{best.call} computes {best.share:.0%} of the time"
        if not self.reached:
            return f"Nothing computes {wanted} of the time; {what}, the most there is."
        if best.method == "data_parallel":
            return f"{what}: nothing need be given up for {wanted}."
        return f"{what}; what holds back less does not reach {wanted}."

    def shown(self) -> list[Option]:
        """Of each family the shortest period that is efficient enough, or the best."""
        families: dict[str, list[Option]] = {}
        for option in self.options:
            families.setdefault(option.method, []).append(option)
        chosen = [_first(found, self.efficiency) for found in families.values()]
        return [option for option in self.options if option in chosen]

    def rows(self, options: Sequence[Option] | None = None) -> list[tuple[str, ...]]:
        """The cells of the table, its head first."""
        head = ("", "method", "H", "a step", "fewer", "exchange", "waits", "coding")
        head += ("step", "computes", "faster", "caution")
        return [head, *map(self._cells, self.shown() if options is None else options)]

    def table(self, options: Sequence[Option] | None = None) -> str:
        """Text, one line for each family, and the reason; or for these options."""
        rows = self.rows(options)
        width = [max(map(len, column)) for column in zip(*rows, strict=True)]
        left = ("", "method", "caution")
        lines = [
            "  ".join(
                cell.ljust(w) if name in left else cell.rjust(w)
                for name, cell, w in zip(rows[0], row, width, strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", self.reason])

    def _cells(self, option: Option) -> tuple[str, ...]:
        return (
            "→" if option == self.best else "",
            option.method,
            str(option.period),
            amount(option.bytes, "B"),
            f"{option.fewer:,.0f}×" if option.fewer >= 100 else f"{option.fewer:.3g}×",
            amount(option.exchange, "s"),
            amount(option.exposed, "s"),
            amount(option.coding, "s"),
            amount(option.seconds, "s"),
            f"{option.share:.0%}",
            f"{option.speedup:.3g}×",
            option.caution,
        )


def advise(
    parameters: float | PyTree,
    *,
    link: Link | Network,
    workers: int | None = None,
    compute: float,
    efficiency: float = 0.8,
    steps: int | None = None,
    periods: Sequence[int] = PERIODS,
    codecs: Mapping[str, Codec] = CODECS,
    families: Sequence[Family] = FAMILIES,
    overlap: bool = True,
    algorithm: str = "best",
) -> Advice:
    """What to run on a link: the method that holds back least and is efficient enough.

    Nothing is trained and no devices are needed. Data-parallel training talks after it
    has computed, and so does everything else but what is delayed. Where no candidate is
    efficient enough, the most efficient one is recommended and ``reached`` is False.

    Args:
        parameters: of one worker's model (of one device's part of it, on a network):
            how many float32, which are then taken to be about sixteen square matrices
            (or more, none wider than 32768), or a tree of arrays or
            ``ShapeDtypeStruct``.
        link: between workers, or a network with the axis "workers".
        workers: how many; a network knows.
        compute: seconds of a step without any communication.
        efficiency: the wanted share of the time that is computing.
        steps: of the whole run. An outer momentum of μ looks back over 1/(1 − μ)
            rounds, ten for DiLoCo's, and begins with none behind it: where the run has
            fewer than five times as many rounds, such a candidate is left out.
        periods: that are tried, 2 or more.
        codecs: how fast compressors are where this will run; the default was measured
            on two CPU cores.
        families: what there is to choose from, data-parallel training among it.
        overlap: whether transfers can hide behind computing where this will run, as
            JAX's on CPUs cannot; otherwise nothing delayed is tried.
        algorithm: of the collectives, see ``seconds``.

    Raises:
        ValueError: no parameters, fewer than two workers, seconds or steps that are not
            positive, an efficiency outside (0, 1), no period or one below 2, a codec
            without a speed.

    Example:
        Three million parameters, steps of 20 ms: in a data center nothing need be given
        up, between offices much.

        >>> for rate, latency in (("100Gbit", "50us"), ("100Mbit", "20ms")):
        ...     link = Link.parse(rate, latency)
        ...     found = advise(3e6, link=link, workers=8, compute=0.02, overlap=False)
        ...     print(f"{found.best.call}: {found.best.share:.0%}")
        data_parallel(inner): 91%
        diloco(inner, period=500): 85%
    """
    if not isinstance(link, Link | Network):
        raise ValueError(
            f"link={link!r}: give a Link, such as Link.parse('100Mbit', '20ms'), or a "
            "Network."
        )
    tree, dense = _model(parameters)
    members = _members(link, workers)
    _check(compute, efficiency, periods, steps)
    families = [family for family in families if overlap or not family.delayed]
    names = [family.name for family in families]
    if "data_parallel" not in names:
        raise ValueError(f"families {names}: data_parallel must be one of them.")
    price = lambda sent: seconds(
        sent, link, None if isinstance(link, Network) else members, algorithm=algorithm
    )
    found: list[Option] = []
    for family in families:
        sent = exchanged(family, tree, workers=members)
        exchange = price(sent)
        coding = coding_seconds(family, dense, workers=members, codecs=codecs)
        for period in sorted(set(periods)) if family.rounds else (1,):
            if steps is not None and steps < LOOKS_BACK * family.remembers * period:
                continue
            delay = 0
            if family.delayed:  # as long as is wanted, and no longer
                slack = max(0.0, (1 / efficiency - 1) * compute * period - coding)
                late = math.ceil((exchange - slack) / compute)
                delay = min(period, max(1, late))
            spent = exchange, exposed_seconds(exchange, compute, delay), coding, compute
            found.append(_option(family, period, delay, sent.bytes_always, *spent))
    base = next(option for option in found if option.method == "data_parallel")
    found = [
        option._replace(
            fewer=base.bytes / option.bytes if option.bytes else math.inf,
            speedup=base.seconds / option.seconds,
        )
        for option in found
    ]

    def order(option: Option) -> tuple[float, ...]:
        simpler = names.index(option.method)
        return round(option.held_back, 6), not option.published, option.delay, simpler

    options = tuple(sorted(found, key=order))
    best = _first(options, efficiency)
    return Advice(best, _is_enough(best, efficiency), efficiency, options)


def _option(
    family: Family,
    period: int,
    delay: int,
    sent: int,
    exchange: float,
    exposed: float,
    coding: float,
    compute: float,
) -> Option:
    total = compute + (exposed + coding) / period
    published = family.published is None or period <= family.published
    cautions = [family.caution.format(delay=delay)] if family.caution else []
    if not published:
        cautions.append(f"published up to H = {family.published}")
    return Option(
        method=family.name,
        call=family.call.format(period=period, delay=delay),
        period=period,
        delay=delay,
        sent=sent,
        fewer=1.0,
        exchange=exchange,
        exposed=exposed / period,
        coding=coding / period,
        seconds=total,
        share=compute / total,
        speedup=1.0,
        published=published,
        caution="; ".join(cautions),
    )


def _first(options: Sequence[Option], efficiency: float) -> Option:
    """The first that is efficient enough, else the most efficient."""
    enough = [option for option in options if _is_enough(option, efficiency)]
    return enough[0] if enough else max(options, key=lambda option: option.share)


def _is_enough(option: Option, efficiency: float) -> bool:
    """Up to rounding: a delay is no longer than it must be, and may hit it exactly."""
    return option.share >= efficiency * (1 - 1e-9)


def amount(x: float, unit: str) -> str:
    """A number of bytes or seconds in three digits.

    Example:
        >>> amount(0, "s"), amount(0.0123, "s"), amount(48_000_000, "B")
        ('0', '12.3 ms', '48 MB')
    """
    if not x or math.isinf(x):
        return f"{x:.0f}"
    x = float(f"{x:.3g}")  # which may be 1000 of the smaller unit
    least = 0 if unit == "B" else -3
    exponent = min(4, max(least, math.floor(math.log10(x) / 3 + 1e-9)))
    return f"{x / 1000.0**exponent:.3g} {'nµm kMGT'[exponent + 3].strip()}{unit}"


def _model(parameters: float | PyTree) -> tuple[PyTree, int]:
    """The shapes of a model, and its bytes in float32."""
    if isinstance(parameters, int | float | np.number):
        count = float(parameters)
        if not 1 <= count < math.inf:
            raise ValueError(f"parameters={parameters}: give how many there are.")
        width = 1 << max(0, round(math.log2(math.sqrt(count) / 4)))
        width = min(width, 2**15)  # indices have 32 bits
        matrices, rest = divmod(int(count), width**2)
        shapes = [(width, width)] * matrices + [(rest,)] * bool(rest)
        tree = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    else:
        tree = jax.eval_shape(lambda x: x, parameters)
    sizes = [x.size for x in jax.tree.leaves(tree) if takes_part(x)]
    if not sum(sizes):
        raise ValueError("parameters hold no floating-point numbers: none would move.")
    return tree, 4 * sum(sizes)


def _members(link: Link | Network, workers: int | None) -> int:
    if isinstance(link, Network):
        if workers is not None:
            raise ValueError("a network has its own sizes: leave workers out.")
        if AXIS not in link.sizes:
            raise ValueError(
                f"the network has axes {sorted(link.sizes)}: workers talk along one "
                f"that is called {AXIS!r}."
            )
        workers = link.sizes[AXIS]
    if workers is None or workers < 2:
        raise ValueError(f"workers={workers}: it takes two to talk.")
    return workers


def _check(
    compute: float, efficiency: float, periods: Sequence[int], steps: int | None
) -> None:
    if not 0 < compute < math.inf:
        raise ValueError(f"compute={compute}: give seconds of a step, more than 0.")
    if steps is not None and steps < 1:
        raise ValueError(f"steps={steps}: give those of the whole run, 1 or more.")
    if not 0 < efficiency < 1:
        raise ValueError(f"efficiency={efficiency} is outside (0, 1), such as 0.8.")
    if not periods or min(periods) < 2 or any(p != int(p) for p in periods):
        raise ValueError(f"periods={periods}: give whole numbers of steps, 2 or more.")
