"""SparseLoCo: feedback that fades, so that few entries of a round are enough."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import optax

import lowcomm as lc

from .. import panels, toys
from ..trials import difference, interval, momentum, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "SparseLoCo"
REFERENCE = (
    "Sarfi, Thérien, Lidin and Belilovsky, *Communication Efficient LLM Pre-training "
    "with SparseLoCo*, 2025, [2508.15706](https://arxiv.org/abs/2508.15706)."
)
CLAIM = """Rounds that end with 1 to 3 % of the displacements in two bits each, and a
memory of the rest that fades by 0.95 a round in place of an outer momentum, do better
than DiLoCo at 512 M parameters, with over 97 times fewer bytes."""
SETTING = """Gaussian mixture, IID, 8 workers, 2000 steps of momentum SGD with a cosine
schedule, rounds of 16, top-k of each layer at 5 and 1 %, the memory multiplied by β;
rate of the inner optimizer tuned for each, outer rate 1. DiLoCo with an outer rate of
0.7 and a momentum of 0.9 or 0.5. Local SGD at periods of 250, 1000 and 2000 sends as
many bytes as 5 %, 1 % and 1 % in two bits."""
METHODS = ("sparse_loco",)
PERIOD = 16
PERIODS = (PERIOD, 250, 1000, 2000)
OUTER = (0.9, 0.5)  # momenta of DiLoCo
DILOCO = tuple(f"DiLoCo {m}, H = {period}" for period in (PERIOD, 250) for m in OUTER)
BASELINES = (*DILOCO, *(f"local SGD, H = {period}" for period in PERIODS))
RATES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)
LOW = (0.0004, 0.0008, 0.0015, 0.003, 0.006, 0.0125, 0.025)  # with a momentum of 0.9
SMALL = {0.05: 205, 0.01: 41}  # of blocks of 4096
DECAYS = {0.05: (0.0, 0.95, 1.0), 0.01: (0.0, 0.8, 0.9, 0.95, 1.0)}
GRIDS = {name: LOW for name in DILOCO if "0.9" in name} | {
    name: (*LOW[-4:], *RATES[2:5]) for name in DILOCO if "0.5" in name
}


def cells(scale: Scale) -> Cells:
    """Every decay at both densities, the method itself, and the baselines."""
    steps = scale.steps(2000)
    local = lambda period: (
        lambda rate: lc.local_sgd(momentum(rate, steps), period=min(period, steps))
    )
    outer = lambda name: (
        lambda rate: lc.diloco(
            momentum(rate, steps),
            period=int(name.split()[-1]),
            momentum=float(name.split()[1][:-1]),
        )
    )
    made: dict[str, Any] = {name: outer(name) for name in DILOCO}
    for share, decays in DECAYS.items():
        for beta in decays:
            made[f"{share:.0%}, β = {beta:g}"] = partial(_sparse, share, beta, steps)
        made[f"{share:.0%}, two bits"] = partial(_two_bits, share, steps)
    made |= {f"local SGD, H = {period}": local(period) for period in PERIODS}
    return {
        name: partial(
            tuned,
            toys.mixture(),
            make,
            steps=steps,
            rates=scale.rates(*GRIDS.get(name, RATES)),
            seeds=scale.seeds,
        )
        for name, make in made.items()
    }


def verdict(found: Found) -> Verdict:
    """At 1 % fading beats both others, two bits cost nothing, and DiLoCo is behind."""
    gap = lambda a, b: difference(values(found[a]), values(found[b]))
    loss = lambda name: str(interval(values(found[name])))
    fading = gap("1%, β = 0.95", "1%, β = 1"), gap("1%, β = 0.95", "1%, β = 0")
    bits = gap("1%, two bits", "1%, β = 0.95")
    ahead = {name: gap("1%, two bits", name) for name in DILOCO[:2]}
    held = [
        all(x.high < 0 for x in fading),
        bits.mean < 0.03,
        all(x.high < 0 for x in ahead.values()),
    ]
    grids = "; ".join(
        f"{share:.0%}: "
        + ", ".join(f"β = {beta:g} {loss(f'{share:.0%}, β = {beta:g}')}" for beta in of)
        + f", two bits at 0.95 {loss(f'{share:.0%}, two bits')}"
        for share, of in DECAYS.items()
    )
    others = ", ".join(f"{name} {loss(name)}" for name in BASELINES)
    equal = "; ".join(
        f"{mine} minus {other} {gap(mine, other)}"
        for mine, other in (
            ("5%, β = 0.95", "local SGD, H = 250"),
            ("5%, β = 0.95", DILOCO[2]),
            ("5%, β = 0.95", DILOCO[3]),
            ("1%, β = 0.95", "local SGD, H = 1000"),
            ("1%, two bits", "local SGD, H = 2000"),
        )
    )
    sent = lambda name: found[name]["relative_bytes"]
    fewer = sent(DILOCO[0]) / sent("1%, two bits")
    measured = f"""Loss: {grids}. Baselines: {others}. At 1 % β = 0.95 minus β = 1
    {fading[0]}, minus no memory {fading[1]}; two bits minus all bits {bits}; with
    {fewer:.0f} times fewer bytes than DiLoCo two bits minus
    {", minus ".join(f"{name} {x}" for name, x in ahead.items())}. At equal bytes:
    {equal}."""
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Loss against the decay, and against the bytes."""
    left, right = figure.subplots(1, 2)
    of = lambda share, beta: values(found[f"{share:.0%}, β = {beta:g}"])
    curves = {
        f"{share:.0%}": (decays, np.transpose([of(share, beta) for beta in decays]))
        for share, decays in DECAYS.items()
    }
    whole = values(found[f"local SGD, H = {PERIOD}"])
    curves["all, averaged"] = (0.0, 1.0), np.transpose([whole] * 2)
    panels.lines(left, curves, x="β, what is kept of the memory", y="held-out loss")
    groups = {
        "SparseLoCo, all bits": [f"{share:.0%}, β = 0.95" for share in SMALL],
        "SparseLoCo, two bits": [f"{share:.0%}, two bits" for share in SMALL],
        "local SGD": [f"local SGD, H = {period}" for period in PERIODS],
        "DiLoCo, momentum 0.9": DILOCO[::2],
        "DiLoCo, momentum 0.5": DILOCO[1::2],
    }
    paths = {
        group: (
            [found[name]["relative_bytes"] for name in names],
            np.transpose([values(found[name]) for name in names]),
        )
        for group, names in groups.items()
    }
    x = "bytes, relative to data-parallel"
    panels.lines(right, paths, x=x, y="held-out loss", log="x")
    right.set_ylim(top=1.0)  # room for the legend


def _sparse(
    share: float, beta: float, steps: int, rate: Any
) -> optax.GradientTransformation:
    return lc.sparse_loco(
        momentum(rate, steps),
        period=PERIOD,
        k=SMALL[share],
        decay=beta,
        values=lc.top_k(1.0),
    )


def _two_bits(share: float, steps: int, rate: Any) -> optax.GradientTransformation:
    return lc.sparse_loco(momentum(rate, steps), period=PERIOD, k=SMALL[share])
