"""Layered SGD: gradients summed in groups, then between them while batches load."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import optax

import lowcomm as lc
from lowcomm.network import collective_seconds

from .. import panels, toys
from ..trials import Cell, interval, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "Layered SGD"
REFERENCE = (
    "Yu, Flynn, Yoo and D'Imperio, *Layered SGD: A Decentralized and Synchronous SGD "
    "Algorithm for Scalable Deep Neural Network Training*, 2019, "
    "[1906.05936](https://arxiv.org/abs/1906.05936)."
)
CLAIM = """Synchronous SGD in two levels, of which the one between groups hides behind
the loading of the next batch, scales better than one flat all-reduce on
ImageNet/ResNet-50 up to 256 GPUs, and converges the same."""
SETTING = """8×8 digits, 8 workers in four shapes of groups, heavy-ball momentum; the
paper's groups of 4 in a cost model: 100 MB of gradients, 0.3 s to compute them, 25
Gbit/s and 50 µs between groups, 200 Gbit/s and 5 µs inside, loading a batch takes none,
half or all of the time of an all-reduce between 64 groups. Nothing is timed."""
METHODS = ("layered_sgd",)
BASELINES = ("flat",)
SHAPES = ((1, 8), (2, 4), (4, 2), (8, 1))
AXES = ("groups", "workers")
SIZE, GROUPS = 4, (1, 2, 4, 8, 16, 32, 64, 128, 256)
BETWEEN, INSIDE = lc.Link(25e9, 50e-6), lc.Link(200e9, 5e-6)
NBYTES, COMPUTE, MOST = 100e6, 0.3, 64
LOADING = {"no loading": 0.0, "half": 0.5, "all": 1.0}


def cells(scale: Scale) -> Cells:
    """The flat mean, the four shapes, and the cost model."""
    how = {
        "steps": scale.steps(300),
        "rates": scale.rates(0.0125, 0.025, 0.05, 0.1, 0.2),
        "seeds": scale.seeds,
        "points": 25,
    }
    around = lambda make, rate: make(optax.sgd(rate, momentum=0.9))
    flat = partial(around, lc.data_parallel)
    jobs: Cells = {"flat": partial(tuned, toys.digits(), flat, **how)}
    for shape in SHAPES:
        jobs["{} × {}".format(*shape)] = partial(
            tuned,
            toys.digits(),
            partial(around, lc.layered_sgd),
            axis=AXES,
            sizes=dict(zip(AXES, shape, strict=True)),
            **how,
        )
    return jobs | {"cost model": _costs}


def verdict(found: Found) -> Verdict:
    """The losses coincide to 1e-6, and loading hides what it leaves room for."""

    def apart(what):  # by the first axis: rates of the grid, or seeds
        of = lambda name: np.asarray(found[name][what]["loss"], float)
        shapes = [of("{} × {}".format(*shape)) for shape in SHAPES]
        return np.abs(np.array(shapes) - of("flat")).max((0, 2))

    worst, by_rate = apart("curves").max(), apart("grid")
    rates = [float(rate) for rate in found["flat"]["rates"]]
    ends = ", ".join(
        f"{x:.1e} at {rate:g}" for rate, x in zip(rates, by_rate, strict=True)
    )
    costs = found["cost model"]
    between = np.array(costs["all-reduce between groups"])
    plain = np.array(costs["hierarchical"])
    error = max(
        np.abs(
            plain[i] - np.array(costs["layered"][i]) - np.minimum(loading, between)
        ).max()
        for i, loading in enumerate(costs["loading"])
    )
    at = list(GROUPS).index(MOST)
    one = np.array(costs["one worker"])
    efficient = lambda what, i: one[i] / costs[what][i][at]
    shares = "; ".join(
        f"{1000 * loading:.0f} ms: {efficient('flat', i):.0%}, "
        f"{efficient('hierarchical', i):.0%}, {efficient('layered', i):.0%}"
        for i, loading in enumerate(costs["loading"])
    )
    measured = f"""Held-out loss {interval(values(found["flat"]))}; at the chosen rate
    the curves of all shapes are within {worst:.1e} of synchronous SGD's all along. At
    the end they differ, by rate, by {ends}: where a rate is so high that roundings
    grow, even a single group, which differs only in when it divides, ends elsewhere.
    In the model a step gains min(loading, all-reduce between groups) over a plain
    hierarchical all-reduce, to {error:.0e} s. Modelled efficiency at {SIZE * MOST}
    workers of flat, hierarchical and layered, by how long loading takes: {shares}.
    Where batches are loaded ahead of time nothing is left to hide behind, and the
    method is a hierarchical all-reduce. Not counted: the communicator of a group is a
    process that trains nothing."""
    held = [worst <= 1e-6, error < 1e-9]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """The loss of all shapes, and modelled seconds of a step against the workers."""
    left, right = figure.subplots(1, 2)
    names = ["flat", *("{} × {}".format(*shape) for shape in SHAPES)]
    paths = {n: (found[n]["step"], found[n]["curves"]["loss"]) for n in names}
    panels.lines(left, paths, x="steps", y="held-out loss", log="y")
    costs, curves = found["cost model"], {}
    for i, loading in enumerate(costs["loading"]):
        for what in ("flat", "layered"):
            name = f"{what}, loading takes {1000 * loading:.0f} ms"
            curves[name] = costs["workers"], costs[what][i]
    panels.lines(right, curves, x="workers", y="modelled seconds of a step", log="x")


def _costs() -> Cell:
    """Seconds of a step by workers, for each time that loading takes."""
    reduced = lambda groups: collective_seconds(
        "all_reduce", NBYTES, workers=groups, link=BETWEEN
    )
    loading = [share * reduced(MOST) for share in LOADING.values()]

    def flat(groups, seconds):
        n = groups * SIZE
        link = BETWEEN if groups > 1 else INSIDE
        return lc.flat_seconds(
            NBYTES, workers=n, link=link, compute=COMPUTE, loading=seconds
        )

    def layered(groups, seconds):
        return lc.layered_seconds(
            NBYTES,
            groups=groups,
            workers=SIZE,
            between=BETWEEN,
            inside=INSIDE,
            compute=COMPUTE,
            loading=seconds,
        )

    each = lambda cost: [[cost(groups, s) for groups in GROUPS] for s in loading]
    return {
        "workers": [SIZE * groups for groups in GROUPS],
        "loading": loading,
        "all-reduce between groups": [reduced(groups) for groups in GROUPS],
        "one worker": [COMPUTE + seconds for seconds in loading],
        "flat": each(flat),
        "hierarchical": each(lambda groups, s: s + layered(groups, 0.0)),
        "layered": each(layered),
    }
