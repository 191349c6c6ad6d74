"""SAVIC: local steps under one diagonal scaling, shared and frozen in a round."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import optax

import lowcomm as lc

from .. import panels, toys
from ..trials import Interval, cosine, difference, momentum, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "SAVIC"
REFERENCE = (
    "Chezhegov, Skorik, Khachaturov, Shalagin, Avetisyan, Takáč, Kholodov and "
    "Beznosikov, *Local Methods with Adaptivity via Scaling*, 2024, "
    "[2406.00846](https://arxiv.org/abs/2406.00846)."
)
CLAIM = """Local methods under one diagonal scaling, the same for all workers and fixed
between rounds, converge faster than local methods without."""
SETTING = """Gaussian mixture, 8 workers, 2000 steps without momentum, rates tuned for
each run; local RMSProp (β₂ = 0.99) with second moments v of its own or averaged at each
sync, SAVIC with both squared rules (β = 0.9, floor 0.001), and no scaling; SAVIC and
averaged v send twice the bytes, as local methods with half the period do."""
METHODS = ("savic",)
BASELINES = (
    "iid, synchronous RMSProp",
    "iid, H = 16, no scaling",
    "sorted, H = 16, no scaling",
    "sorted, H = 8, own v",
    "sorted, H = 8, no scaling",
    "sorted, H = 8, momentum",
)
PLACES = (("iid", 16), ("iid", 64), ("sorted", 16), ("sorted", 64))
SCALED = (0.003, 0.006, 0.012, 0.024, 0.048, 0.096)
PLAIN = (0.2, 0.4, 0.8, 1.6, 3.2)
HEAVY = (0.05, 0.1, 0.2, 0.4, 0.8)
DECAY, FLOOR, FIRST = 0.99, 1e-3, 1e-2


def cells(scale: Scale) -> Cells:
    """Whose scaling, on both splits; and what has none."""
    steps = scale.steps(2000)
    run = lambda split, make, rates: partial(
        tuned,
        toys.mixture(split=split),
        partial(make, steps=steps),
        steps=steps,
        rates=scale.rates(*rates),
        seeds=scale.seeds,
    )
    jobs: Cells = {}
    for split, period in PLACES:
        for what, moments in {"own v": "keep", "averaged v": "average"}.items():
            make = partial(_rmsprop, period, moments)
            jobs[f"{split}, H = {period}, {what}"] = run(split, make, SCALED)
        make = partial(_savic, period, lc.mean_of_squares())
        jobs[f"{split}, H = {period}, SAVIC"] = run(split, make, SCALED)
    squared = partial(_savic, 16, lc.square_of_mean())
    jobs["sorted, H = 16, SAVIC, squared mean"] = run("sorted", squared, SCALED)
    for split, period in (("iid", 16), ("sorted", 16), ("sorted", 8)):
        make = partial(_plain, period)
        jobs[f"{split}, H = {period}, no scaling"] = run(split, make, PLAIN)
    half = partial(_rmsprop, 8, "keep")
    jobs["sorted, H = 8, own v"] = run("sorted", half, SCALED)
    jobs["sorted, H = 8, momentum"] = run("sorted", partial(_heavy, 8), HEAVY)
    jobs["iid, synchronous RMSProp"] = run("iid", _synchronous, SCALED)
    return jobs


def verdict(found: Found) -> Verdict:
    """Sharing wins by 0.2 on sorted shards, not on IID ones; and scaling wins."""
    shared, near, even = [], [], []
    for split, period in PLACES:
        own, averaged, savic = (
            f"{split}, H = {period}, {what}"
            for what in ("own v", "averaged v", "SAVIC")
        )
        gaps = [_minus(found, name, own) for name in (averaged, savic)]
        gaps.append(_minus(found, savic, averaged))
        if split == "sorted":
            shared += gaps[:2]
            near.append(gaps[2])
        else:
            even += gaps
    faster = {
        split: _minus(found, f"{split}, H = 16, SAVIC", f"{split}, H = 16, no scaling")
        for split in ("iid", "sorted")
    }
    mean = _minus(found, "sorted, H = 16, SAVIC, squared mean", "sorted, H = 16, SAVIC")
    equal = {
        what: _minus(found, "sorted, H = 16, SAVIC", f"sorted, H = 8, {what}")
        for what in ("own v", "no scaling", "momentum")
    }
    away = _minus(found, "iid, H = 16, SAVIC", "iid, synchronous RMSProp")
    some = lambda gaps: ", ".join(map(str, gaps))
    measured = f"""Sorted, minus v of its own: averaged v and SAVIC {some(shared[:2])}
    (H = 16), {some(shared[2:])} (H = 64); SAVIC minus averaged v {some(near)}; squared
    mean minus mean of squares {mean}. IID, the same three differences: {some(even[:3])}
    (H = 16), {some(even[3:])} (H = 64); SAVIC minus synchronous RMSProp {away}. SAVIC
    minus no scaling, H = 16: {faster["iid"]} (IID), {faster["sorted"]} (sorted). At
    equal bytes, sorted, H = 16 minus H = 8 of local steps with
    {", ".join(f"{what} {gap} ({_who(gap)})" for what, gap in equal.items())}."""
    held = [
        all(gap.mean < -0.2 for gap in shared),
        all(abs(gap.mean) < 0.03 for gap in near),
        all(abs(gap.mean) < 0.04 for gap in even),
        all(gap.high < 0 for gap in faster.values()),
    ]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Loss against rounds on sorted shards, and the ends of all runs there."""
    left, right = figure.subplots(1, 2)
    shown = ("own v", "averaged v", "SAVIC", "no scaling")
    curves = {}
    for what in shown:
        at, losses = panels.curve(found[f"sorted, H = 16, {what}"])
        curves[what] = [step / 16 for step in at], losses
    panels.lines(left, curves, x="rounds (sorted, H = 16)", y="held-out loss")
    start = max(np.max(np.asarray(losses)[:, 1:]) for _, losses in curves.values())
    left.set_ylim(top=1.1 * start)
    ends = {
        name.removeprefix("sorted, "): values(cell)
        for name, cell in found.items()
        if name.startswith("sorted")
    }
    least = 0.9 * min(min(each) for each in ends.values())
    panels.bars(right, ends, y="held-out loss (sorted)", least=least)


def _minus(found: Found, name: str, other: str) -> Interval:
    return difference(values(found[name]), values(found[other]))


def _who(gap: Interval) -> str:
    """Whether what is subtracted is better."""
    return "better" if gap.low > 0 else "worse" if gap.high < 0 else "as good"


def _own(rate: Any, steps: int) -> optax.GradientTransformation:
    scaling = optax.scale_by_rms(DECAY, eps=FLOOR**2, initial_scale=FIRST**2)
    return optax.chain(scaling, optax.sgd(cosine(rate, steps)))


def _rmsprop(period: int, moments: Any, rate: Any, *, steps: int) -> Any:
    return lc.average(_own(rate, steps), when=lc.every(period), moments=moments)


def _synchronous(rate: Any, *, steps: int) -> Any:
    return lc.data_parallel(_own(rate, steps))


def _savic(period: int, rule: Any, rate: Any, *, steps: int) -> Any:
    inner = optax.sgd(cosine(rate, steps))
    return lc.savic(inner, period=period, floor=FLOOR, rule=rule, initial=FIRST)


def _plain(period: int, rate: Any, *, steps: int) -> Any:
    return lc.local_sgd(optax.sgd(cosine(rate, steps)), period=period)


def _heavy(period: int, rate: Any, *, steps: int) -> Any:
    return lc.local_sgd(momentum(rate, steps), period=period)
