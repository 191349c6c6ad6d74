"""OLDSGD: mixing with neighbours the models from the start of the round."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import optax

import lowcomm as lc

from .. import panels, toys
from ..trials import (
    at_rate,
    difference,
    drift,
    interval,
    soonest,
    tuned,
    values,
)
from . import Cells, Found, Scale, Verdict

TITLE = "OLDSGD"
REFERENCE = (
    "Zhou and Pu, *Accelerating Decentralized Optimization via Overlapping Local "
    "Steps*, 2026, [2601.01493](https://arxiv.org/abs/2601.01493)."
)
CLAIM = """Decentralized training whose exchange runs during the next local steps needs
as many iterations, in order, as local decentralized SGD, and less wall-clock time at
every level of delay."""
SETTING = """8×8 digits, IID, a network of two hidden layers, 8 workers, 600 steps of
heavy-ball momentum at a constant rate, on the ring of thirds and on the lazy ring.
Seconds are modelled: a step computes for 1, an exchange takes r rounds of computation,
and an overlapped one is waited for only beyond them."""
METHODS = ("oldsgd",)
BASELINES = (
    *("synchronous", "all-reduce, τ = 8", "all-reduce, τ = 24"),
    *("blocking ring, τ = 8", "blocking ring, τ = 24"),
    *("blocking lazy ring, τ = 8", "blocking lazy ring, τ = 24"),
)
WORKERS, PERIODS, OTHERS = 8, (8, 24), (4, 12)
RATIOS, LEVEL, RATE = (0.5, 1.0, 2.0), 0.15, 0.05
RATES = (0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2)
GRAPHS = {"ring": lc.ring(WORKERS), "lazy ring": lc.lazy(lc.ring(WORKERS))}


def cells(scale: Scale) -> Cells:
    """Every way to mix for two periods, and OLDSGD for two others at one rate."""
    at = partial(
        tuned,
        toys.digits(workers=WORKERS),
        steps=scale.steps(600),
        rates=scale.rates(*RATES),
        seeds=scale.seeds,
        points=25,  # of 24 steps: every look comes right after a sync
        level=LEVEL,
        watch=drift,
    )
    jobs: Cells = {"synchronous": partial(at, partial(_blocking, None, 1))}
    for t in PERIODS[:1] if scale.quick else PERIODS:
        jobs[f"all-reduce, τ = {t}"] = partial(at, partial(_blocking, None, t))
        jobs[f"CoCoD, τ = {t}"] = partial(at, partial(_overlapping, None, t))
        for name, graph in GRAPHS.items():
            make = partial(_blocking, graph, t), partial(_overlapping, graph, t)
            jobs[f"blocking {name}, τ = {t}"] = partial(at, make[0])
            jobs[f"OLDSGD {name}, τ = {t}"] = partial(at, make[1])
    for t in () if scale.quick else OTHERS:
        for name, graph in GRAPHS.items():
            make = partial(_overlapping, graph, t)
            jobs[f"OLDSGD {name}, τ = {t}"] = partial(at, make, rates=(RATE,))
    return jobs


def verdict(found: Found) -> Verdict:
    """Half of the seconds where an exchange takes a round, and fewer at any delay."""
    periods = [t for t in PERIODS if f"CoCoD, τ = {t}" in found]
    needed = lambda way, t: soonest(found[f"{way} lazy ring, τ = {t}"])
    longer = {t: needed("OLDSGD", t) / needed("blocking", t) for t in periods}
    gain = {
        (t, r): interval(longer[t] * max(1, r) / (1 + r))
        for t in periods
        for r in RATIOS
    }
    half = all(gain[t, 1.0].mean < 0.65 for t in periods)
    fewer = all(ratio.mean < 1 for ratio in gain.values())
    price = {
        (t, name): difference(
            values(found[f"OLDSGD {name}, τ = {t}"]),
            values(found[f"blocking {name}, τ = {t}"]),
        )
        for t in periods
        for name in GRAPHS
    }
    apart = {
        (t, name): interval(at_rate(found[f"OLDSGD {name}, τ = {t}"], RATE, "drift"))
        for t in periods
        for name in GRAPHS
    }
    said = lambda each: "; ".join(f"τ = {t}: {each(t)}" for t in periods)
    both = lambda each: ", ".join(f"{name} {each(name)}" for name in GRAPHS)
    seconds = lambda t: ", ".join(f"{gain[t, r]} at r = {r:g}" for r in RATIOS)
    loss = lambda name: interval(values(found[name]))
    plain = lambda t: f"{loss(f'all-reduce, τ = {t}')}, CoCoD {loss(f'CoCoD, τ = {t}')}"
    measured = f"""Modelled seconds to a loss of {LEVEL:g}, lazy ring, each at the rate
    that is there soonest, relative to blocking: {said(seconds)}. At rates chosen by the
    end, loss minus that of blocking: {said(lambda t: both(lambda n: price[t, n]))}.
    Workers' distance from their mean at rate {RATE:g}:
    {said(lambda t: both(lambda n: apart[t, n]))}. An all-reduce for about the same
    bytes leads to a loss of {said(plain)}; one a step to {loss("synchronous")}."""
    held = [half, fewer]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Loss against modelled seconds, and the workers' distance against the period."""
    left, right = figure.subplots(1, 2)
    curves = {"synchronous": (1 + 8, found["synchronous"])} | {
        name: (seconds, found[f"{name}, τ = 8"])
        for name, seconds in {
            "blocking ring": 2,
            "blocking lazy ring": 2,
            "OLDSGD ring": 1,
            "OLDSGD lazy ring": 1,
            "CoCoD": 1,
        }.items()
    }
    paths = {
        name: ([step * seconds for step in cell["step"]], cell["curves"]["loss"])
        for name, (seconds, cell) in curves.items()
    }
    label = "modelled seconds, τ = 8, r = 1"
    panels.lines(left, paths, x=label, y="held-out loss", log="xy")
    apart = {}
    for way in ("OLDSGD", "blocking"):
        for name in GRAPHS:
            at = [
                t for t in sorted(PERIODS + OTHERS) if f"{way} {name}, τ = {t}" in found
            ]
            each = [at_rate(found[f"{way} {name}, τ = {t}"], RATE, "drift") for t in at]
            apart[f"{way} {name}"] = at, np.transpose(each)
    y = f"distance from the mean, rate {RATE:g}"
    panels.lines(right, apart, x="steps of a round, τ", y=y, log="y")
    right.set_xticks(sorted(PERIODS + OTHERS))


def _inner(rate: Any) -> optax.GradientTransformation:
    return optax.sgd(rate, momentum=0.9)


def _blocking(graph: Any, period: int, rate: Any) -> optax.GradientTransformation:
    mix = lc.mean() if graph is None else lc.gossip(graph)
    return lc.average(_inner(rate), exchange=mix, when=lc.every(period))


def _overlapping(graph: Any, period: int, rate: Any) -> optax.GradientTransformation:
    if graph is None:
        return lc.cocod_sgd(_inner(rate), period=period)
    return lc.oldsgd(_inner(rate), graph, period=period)
