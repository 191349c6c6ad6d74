"""Deep Gradient Compression: momentum before a very sparse selection, and masked."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import optax

import lowcomm as lc

from .. import panels, toys
from ..trials import cosine, difference, interval, momentum, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "Deep Gradient Compression"
REFERENCE = (
    "Lin, Han, Mao, Wang and Dally, *Deep Gradient Compression: Reducing the "
    "Communication Bandwidth for Distributed Training*, 2018, "
    "[1712.01887](https://arxiv.org/abs/1712.01887)."
)
CLAIM = """At densities down to 0.1 % momentum has to be gathered before the selection
(momentum correction), to be wiped where it was sent (factor masking), and the density
to fall in stages (warm-up); then the accuracy is that of dense momentum SGD (claim
recalled)."""
SETTING = """Gaussian mixture, 8 workers, 1000 steps with a momentum of 0.9 and a cosine
schedule, the rate tuned for each, 1 % and 0.4 % of each layer, IID, and 0.4 % sorted by
label; the warm-up lasts 5 steps at each density above. Local SGD, whose momentum stays
with the workers, sends as much at periods of 64 (1 %) and 120 (0.4 %)."""
METHODS = ("dgc",)
SHARES = (("iid", 0.01), ("iid", 0.004), ("sorted", 0.004))
PERIODS = {0.01: 64, 0.004: 120}
BASELINES = (
    "iid: dense",
    "sorted: dense",
    *(f"{split} {share:.1%}: local SGD" for split, share in SHARES),
)
WARMUP = 5
FORMS = ("momentum after", "momentum before", "masked", "masked, warm-up")
RATES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)


def cells(scale: Scale) -> Cells:
    """Dense training, and each form at each density."""
    steps = scale.steps(1000)
    made: dict[str, Any] = {}
    for split in ("iid", "sorted"):
        made[f"{split}: dense"] = lambda rate: lc.data_parallel(momentum(rate, steps))
    for split, share in SHARES:
        for form in (*FORMS, "local SGD"):
            made[f"{split} {share:.1%}: {form}"] = partial(_make, form, share, steps)
    return {
        name: partial(
            tuned,
            toys.mixture(split=name.split(":")[0].split()[0]),
            make,
            steps=steps,
            rates=scale.rates(*RATES),
            seeds=scale.seeds,
        )
        for name, make in made.items()
    }


def verdict(found: Found) -> Verdict:
    """IID as dense, with what goes without all of it behind; and so sorted by label."""
    near: dict[str, list[bool]] = {"iid": [], "sorted": []}
    behind: dict[str, list[bool]] = {"iid": [], "sorted": []}
    told = []
    for split, share in SHARES:
        of = lambda form, head=f"{split} {share:.1%}": values(found[f"{head}: {form}"])
        dense = values(found[f"{split}: dense"])
        gap = {form: difference(of(form), dense) for form in (*FORMS, "local SGD")}
        parts = [difference(of(a), of(b)) for a, b in pairwise(FORMS)]
        whole = of(FORMS[-1])
        near[split].append(gap[FORMS[-1]].mean < 0.03)
        behind[split].append(difference(of(FORMS[0]), whole).low > 0)
        told.append(
            f"{split}, {share:.1%}: loss minus that of dense SGD ({interval(dense)}): "
            + ", ".join(f"{form} {x}" for form, x in gap.items())
            + f"; momentum correction spares {parts[0]}, the mask {parts[1]}, the "
            f"warm-up {parts[2]}; DGC minus local SGD at as many bytes "
            f"{difference(whole, of('local SGD'))}"
        )
    held = [all(each) for kind in (near, behind) for each in kind.values()]
    sent = found[f"iid {SHARES[1][1]:.1%}: {FORMS[-1]}"]["relative_bytes"]
    plain = found[f"iid {SHARES[1][1]:.1%}: {FORMS[-2]}"]["relative_bytes"]
    measured = f"""{". ".join(told)}. The warm-up makes {sent / plain:.2f} times as many
    bytes at 0.4 %."""
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """What each seed ended with."""
    panes = figure.subplots(1, len(SHARES))
    for panel, (split, share) in zip(panes, SHARES, strict=True):
        named = {"dense": values(found[f"{split}: dense"])}
        for form in (*FORMS, "local SGD"):
            named[form] = values(found[f"{split} {share:.1%}: {form}"])
        panels.bars(panel, named, y=f"held-out loss, {split}, {share:.1%}", least=0.4)


def _make(
    form: str, share: float, steps: int, rate: Any
) -> optax.GradientTransformation:
    """Momentum SGD with a cosine schedule, the momentum in one place or another."""
    schedule, top = optax.sgd(cosine(rate, steps)), lc.top_k(share)
    if form == "local SGD":
        return lc.local_sgd(momentum(rate, steps), period=PERIODS[share])
    if form == "momentum after":
        return optax.chain(lc.error_feedback(top), momentum(rate, steps))
    if form == "momentum before":
        return optax.chain(optax.trace(0.9), lc.error_feedback(top), schedule)
    warmup = WARMUP if form == "masked, warm-up" else 0
    return lc.dgc(schedule, fraction=share, warmup=warmup)
