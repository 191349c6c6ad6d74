"""PRLC: every gradient is pushed, the model is pulled now and then."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import optax

import lowcomm as lc

from .. import panels, toys
from ..trials import at_rate, difference, interval, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "PRLC"
REFERENCE = (
    "Wang, Qu, Guo, Gao, Li and Ye, *Intermittent Pulling with Local Compensation for "
    "Communication-Efficient Federated Learning*, 2020, "
    "[2001.08277](https://arxiv.org/abs/2001.08277)."
)
CLAIM = """Workers that push every gradient and pull now and then, with their own
gradients for those of all in between, converge in the order of synchronous SGD, with a
linear speed-up, at about half the pulls of LAG."""
SETTING = """8×8 digits, IID, a network of two hidden layers, 8 workers, 300 steps of
plain SGD at a constant rate; pulls every p steps, at once or one worker after the
other. Over a parameter server a step costs a push and 1/p of a pull; local SGD with H =
2 costs half of each, less than PRLC with any p."""
METHODS = ("prlc",)
BASELINES = ("synchronous", "local SGD, H = 2", "local SGD, H = 16")
PERIODS, RATE = (4, 8, 16), 0.3
RATES = (0.009375, 0.01875, 0.0375, 0.075, 0.15, 0.3, 0.6, 1.2)
COLUMNS = (
    *("compensated, together", "compensated, in turn"),
    *("frozen, together", "frozen, in turn"),
)


def cells(scale: Scale) -> Cells:
    """With and without compensation, pulling together and in turn, and local SGD."""
    at = partial(
        tuned,
        toys.digits(),
        steps=scale.steps(300),
        rates=scale.rates(*RATES),
        seeds=scale.seeds,
        points=25,
    )
    plain = lambda period, rate: lc.local_sgd(optax.sgd(rate), period=period)
    jobs: Cells = {"synchronous": partial(at, partial(plain, 1))}
    for period in (2,) if scale.quick else (2, 16):
        jobs[f"local SGD, H = {period}"] = partial(at, partial(plain, period))
    for period in PERIODS[-1:] if scale.quick else PERIODS:
        for column in COLUMNS:
            make = partial(_pulling, column, period)
            jobs[f"{column}, p = {period}"] = partial(at, make)
    return jobs


def verdict(found: Found) -> Verdict:
    """With compensation nothing is lost at the rate of synchronous SGD."""
    periods = _periods(found)
    reference = at_rate(found["synchronous"], RATE, "accuracy")
    lost = lambda name, rate=RATE: difference(
        reference, at_rate(found[name], rate, "accuracy")
    )
    gap = {(c, p): lost(f"{c}, p = {p}") for c in COLUMNS for p in periods}
    flat = all(gap[c, p].mean < 0.01 for c in COLUMNS[:2] for p in periods)
    fails = [gap[c, 16].mean > 0.1 for c in COLUMNS[2:]]
    tuned_gap = {
        c: difference(values(found[f"{c}, p = 16"]), values(found["synchronous"]))
        for c in COLUMNS
    }
    local = {
        h: difference(values(found[name]), values(found["synchronous"]))
        for h in (2, 16)
        if (name := f"local SGD, H = {h}") in found
    }
    each = lambda column: ", ".join(f"{gap[column, p]} at p = {p}" for p in periods)
    small = ", ".join(
        f"{lost(f'{COLUMNS[2]}, p = {p}', RATE / p)} at p = {p}" for p in periods
    )
    measured = f"""Accuracy of synchronous SGD at rate {RATE:g} {interval(reference)};
    what is lost of it: {"; ".join(f"{c} {each(c)}" for c in COLUMNS)}; frozen,
    together, at the rate over p {small}. At rates chosen for each, p = 16, loss minus
    that of synchronous SGD: {", ".join(f"{c} {tuned_gap[c]}" for c in COLUMNS)}.
    Pulling together is local SGD at a higher price: with p = 16 a parameter server
    carries 53 % of synchronous SGD's bytes, while local SGD carries 1/H of them and
    its loss is higher by {", ".join(f"{x} at H = {h}" for h, x in local.items())}.
    Neither LAG nor the speed-up with workers was tried."""
    held = [flat, *fails]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Accuracy against the period of pulls, and loss against a server's traffic."""
    left, right = figure.subplots(1, 2)
    periods, plain = _periods(found), found["synchronous"]
    rates = {f"{c}, {RATE:g}": (c, lambda p: RATE) for c in COLUMNS}
    rates[f"{COLUMNS[2]}, {RATE:g}/p"] = COLUMNS[2], lambda p: RATE / p
    first, curves = at_rate(plain, RATE, "accuracy"), {}
    for name, (column, rate) in rates.items():
        each = [
            at_rate(found[f"{column}, p = {p}"], rate(p), "accuracy") for p in periods
        ]
        curves[name] = (1, *periods), np.transpose([first, *each])
    panels.lines(left, curves, x="steps from pull to pull, p", y="accuracy", log="x")
    left.set_xticks((1, *periods), map(str, (1, *periods)))
    left.minorticks_off()
    traffic = [100, *(50 * (1 + 1 / p) for p in periods)]
    tuned_losses = {
        column: (
            traffic,
            np.transpose(
                [values(plain), *(values(found[f"{column}, p = {p}"]) for p in periods)]
            ),
        )
        for column in COLUMNS
    }
    long = [h for h in (2, 16) if f"local SGD, H = {h}" in found]
    losses = [values(found[f"local SGD, H = {h}"]) for h in long]
    of_local = np.transpose([values(plain), *losses])
    tuned_losses["local SGD"] = [100, *(100 / h for h in long)], of_local
    x = "bytes over a server, % of synchronous SGD's"
    panels.lines(right, tuned_losses, x=x, y="held-out loss, tuned", log="y")


def _periods(found: Found) -> list[int]:
    return [p for p in PERIODS if f"{COLUMNS[0]}, p = {p}" in found]


def _pulling(column: str, period: int, rate: Any) -> optax.GradientTransformation:
    how, when = column.split(", ")
    return lc.prlc(
        optax.sgd(rate),
        optax.set_to_zero() if how == "frozen" else None,
        pulls=lc.staggered_pulls(period) if when == "in turn" else period,
    )
