"""What periodic averaging costs, and two remedies: synchronous steps first, SlowMo."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import optax

import lowcomm as lc

from .. import panels, toys
from ..trials import Interval, cosine, difference, interval, momentum, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "Trade-offs of local SGD, post-local SGD and SlowMo"
REFERENCE = (
    "Ortiz, Frankle, Rabbat, Morcos and Ballas, *Trade-offs of Local SGD at Scale: An "
    "Empirical Study*, 2020, [2110.08133](https://arxiv.org/abs/2110.08133); Lin, "
    "Stich, Patel and Jaggi, *Don't Use Large Mini-Batches, Use Local SGD*, 2020, "
    "[1808.07217](https://arxiv.org/abs/1808.07217); Wang, Tantia, Ballas and Rabbat, "
    "*SlowMo*, 2020, [1910.00643](https://arxiv.org/abs/1910.00643)."
)
CLAIM = """At scale fewer rounds cost accuracy; synchronous steps first recover most of
it; slow momentum improves accuracy consistently, at no communication."""
SETTING = """Gaussian mixture, 8 workers, 2000 steps of momentum SGD, rates tuned for
each run; label-sorted shards, where averaging has its price, and IID ones; SlowMo with
β = 0.5, and beside it a plain outer rate of 2, the same long-run step without
momentum."""
METHODS = ("post_local_sgd", "slowmo")
BASELINES = ("sorted, H = 1", "sorted, H = 2", "sorted, H = 4", "iid, H = 1")
PERIODS, SWITCHES = (1, 2, 4, 16, 64, 256), (500, 1000, 1500)
SLOW = (("sorted", 16), ("sorted", 64), ("iid", 64))
RATES = (0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2)


def cells(scale: Scale) -> Cells:
    """Local SGD for each period; post-local for each switch; the two outer steps."""
    steps = scale.steps(2000)
    shorter = steps / 2000
    runs: dict[str, tuple[str, Any]] = {}
    for period in PERIODS:
        runs[f"sorted, H = {period}"] = "sorted", partial(_local, period)
    for period in (16, 64):
        for switch in SWITCHES:
            make = partial(_post_local, round(switch * shorter), period)
            runs[f"sorted, H = {period} from {switch}"] = "sorted", make
    for period in (1, 64):
        runs[f"iid, H = {period}"] = "iid", partial(_local, period)
    for split, period in SLOW:
        runs[f"{split}, H = {period}, SlowMo"] = split, partial(_slow, period)
        runs[f"{split}, H = {period}, outer rate 2"] = split, partial(_far, period)
    return {
        name: partial(
            tuned,
            toys.mixture(split=split),
            partial(make, steps),
            steps=steps,
            rates=scale.rates(*RATES),
            seeds=scale.seeds,
        )
        for name, (split, make) in runs.items()
    }


def verdict(found: Found) -> Verdict:
    """A price that grows with H, less of it after synchronous steps, SlowMo a gain."""
    loss = lambda name: values(found[name])
    path = [interval(loss(f"sorted, H = {h}")).mean for h in (1, 4, 16, 64, 256)]
    price = difference(loss("sorted, H = 256"), loss("sorted, H = 1"))
    monotone = bool(np.all(np.diff(path) > 0)) and price.low > 0
    post = {h: _between(found, h) for h in (16, 64)}
    recovers = all(np.all(np.diff(each) < 0) for each in post.values())
    gain = {s: _against(found, *s, "SlowMo", "") for s in SLOW}
    far = {s: _against(found, *s, "SlowMo", ", outer rate 2") for s in SLOW}
    slow = all(each.high < 0 for each in gain.values())
    half = difference(loss("sorted, H = 64 from 1000"), loss("sorted, H = 2"))
    quarter = difference(loss("sorted, H = 64 from 500"), loss("sorted, H = 4"))
    to = lambda each: ", ".join(f"{v} ({s}, H = {h})" for (s, h), v in each.items())
    line = ", ".join(f"{x:.3f}" for x in path)
    measured = f"""Label-sorted loss at H = 1, 4, 16, 64, 256: {line}. H = 64 from step
    0, 500, 1000, 1500, 2000: {", ".join(f"{x:.3f}" for x in post[64])}; at equal bytes
    a fixed period is {_who(half)} (H = 2: {half}) and {_who(quarter)} (H = 4:
    {quarter}). SlowMo minus local SGD: {to(gain)}; minus an outer rate of 2: {to(far)}.
    """
    held = [monotone, recovers, slow]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Loss against the period with its remedies, and against the bytes."""
    left, right = figure.subplots(1, 2)
    loss = lambda names: np.transpose([values(found[name]) for name in names])
    both = (16, 64)
    curves: dict[str, Any] = {
        "local": (PERIODS, loss(f"sorted, H = {h}" for h in PERIODS))
    }
    for switch in SWITCHES:
        names = [f"sorted, H = {h} from {switch}" for h in both]
        curves[f"local from step {switch}"] = (both, loss(names))
    for what in ("SlowMo", "outer rate 2"):
        curves[what] = (both, loss(f"sorted, H = {h}, {what}" for h in both))
    panels.lines(left, curves, x="steps between averages", y="held-out loss", log="x")
    by_bytes = {
        "fixed period": [f"sorted, H = {h}" for h in PERIODS],
        "H = 64 from a step on": [f"sorted, H = 64 from {s}" for s in SWITCHES],
        "H = 16 from a step on": [f"sorted, H = 16 from {s}" for s in SWITCHES],
    }
    shares = {
        what: ([found[name]["relative_bytes"] for name in names], loss(names))
        for what, names in by_bytes.items()
    }
    label = "bytes, relative to data-parallel"
    panels.lines(right, shares, x=label, y="held-out loss", log="x")


def _between(found: Found, period: int) -> list[float]:
    """The mean loss for a switch at 0, at the three steps, and at the end."""
    names = [f"sorted, H = {period}"]
    names += [f"sorted, H = {period} from {s}" for s in SWITCHES]
    return [interval(values(found[n])).mean for n in (*names, "sorted, H = 1")]


def _against(found: Found, split: str, period: int, what: str, other: str) -> Interval:
    name = f"{split}, H = {period}"
    return difference(values(found[f"{name}, {what}"]), values(found[name + other]))


def _who(gap: Interval) -> str:
    """Whether the fixed period, of which this is what the other has more, is better."""
    return "better" if gap.low > 0 else "worse" if gap.high < 0 else "as good"


def _local(period: int, steps: int, rate: Any) -> optax.GradientTransformation:
    return lc.local_sgd(momentum(rate, steps), period=period)


def _post_local(warm: int, period: int, steps: int, rate: Any):
    return lc.post_local_sgd(momentum(rate, steps), warmup=warm, period=period)


def _slow(period: int, steps: int, rate: Any) -> optax.GradientTransformation:
    schedule = cosine(rate, steps)
    return lc.slowmo(momentum(rate, steps), period=period, learning_rate=schedule)


def _far(period: int, steps: int, rate: Any) -> optax.GradientTransformation:
    inner, outer = momentum(rate, steps), optax.sgd(2.0)
    return lc.rounds(inner, outer, when=lc.every(period))
