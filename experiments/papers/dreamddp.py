"""DreamDDP: each layer is averaged in slots of its own."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import optax

import lowcomm as lc
from lowcomm.planning.layers import (
    Table,
    Times,
    consecutive_blocks,
    fill_in,
    naive_blocks,
    total_wait,
)

from .. import panels, toys
from ..trials import Cell, difference, drift, interval, train, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "DreamDDP"
REFERENCE = (
    "Tang et al., *DreamDDP: Accelerating Data Parallel Distributed LLM Training with "
    "Layer-wise Scheduled Partial Synchronization*, 2025, "
    "[2502.11058](https://arxiv.org/abs/2502.11058)."
)
CLAIM = """Iterations 1.49–3.91 times shorter than those of leading baselines on 32
GPUs, by averaging each layer in a slot of its own. Modelled seconds in its repository,
GPT-2, 16 workers, 1 Gb/s: synchronous 5.73, overlapped 3.47, local SGD 0.647, naive
slots 0.622, DreamDDP 0.594."""
SETTING = """8×8 digits, a network of three layers, 8 workers, 360 steps of plain SGD;
layers in slots 0, H/3 and 2H/3, averaged after the step (partial local SGD) or before
it (DreamDDP). Spread is the root of the workers' mean squared distance from their mean,
at one rate for both methods. Waits by the link model of this library: GPT-2 with H =
10, 5.65 s for all parameters and 0.082 s of computation, two thirds of it backward, as
the repository's own seconds imply."""
METHODS = ("partial_local_sgd", "dreamddp")
PERIODS, FIXED = (6, 24), {"iid": 0.3, "sorted": 0.1}
SHOWN = 48  # of the last steps the spread is kept
NAMES = ("local SGD", "after the step", "before the step")
BASELINES = tuple(
    f"{split}, {name}"
    for split in FIXED
    for name in ("synchronous", *(f"local SGD, H = {h}" for h in PERIODS))
)
# Backward order: twelve blocks, then the embeddings, which are tied.
GPT2 = [7.09e6] * 12 + [39.4e6]
COMPUTE, SEND, ROUND = 0.082, 5.65, 10
TABLES = ("last slot", "naive blocks", "search", "best of all tables")


def cells(scale: Scale) -> Cells:
    """Losses on both splits, the spread at each step, and modelled waits."""
    steps, periods = scale.steps(360), PERIODS[-1:] if scale.quick else PERIODS
    jobs: Cells = {}
    for split in FIXED:
        asked = [("synchronous", partial(_make, NAMES[0], 1))]
        asked += [
            (f"{name}, H = {h}", partial(_make, name, h))
            for h in periods
            for name in NAMES
        ]
        for name, make in asked:
            jobs[f"{split}, {name}"] = partial(
                tuned,
                toys.digits(split=split),
                make,
                steps=steps,
                rates=scale.rates(0.0375, 0.075, 0.15, 0.3, 0.6, 1.2),
                seeds=scale.seeds,
            )
        for h in periods:
            jobs[f"{split}, spread, H = {h}"] = partial(
                _spread, split, h, steps=steps, seeds=scale.seeds
            )
    jobs["waits, GPT-2"] = _gpt2
    jobs["waits, drawn at random"] = partial(
        _drawn, 20 if scale.quick else 80, scale.seeds
    )
    return jobs


def verdict(found: Found) -> Verdict:
    """A lower peak of the spread on IID data, and modelled waits below local SGD's."""
    spread = {
        (split, h): found[f"{split}, spread, H = {h}"]
        for split in FIXED
        for h in PERIODS
        if f"{split}, spread, H = {h}" in found
    }
    change = lambda key, what: difference(
        spread[key][what][NAMES[1]], spread[key][what][NAMES[0]]
    )
    peak = {key: change(key, "peak") for key in spread}
    lower = [gap.high < 0 for (split, _), gap in peak.items() if split == "iid"]
    waits, seconds = found["waits, GPT-2"]["waits"], found["waits, GPT-2"]["seconds"]
    shorter = waits["search"] < waits["last slot"]
    each = lambda f: "; ".join(f"{s}, H = {h}: {f((s, h))}" for s, h in spread)
    loss = lambda name, key: values(found[f"{key[0]}, {name}, H = {key[1]}"])
    gap = lambda name, key: difference(loss(name, key), loss(NAMES[0], key))
    spreads = each(
        lambda key: (
            f"highest {peak[key]} (of {interval(spread[key]['peak'][NAMES[0]])}), "
            f"mean {change(key, 'mean')}"
        )
    )
    losses = each(lambda key: f"{gap(NAMES[1], key)} and {gap(NAMES[2], key)}")
    modelled = ", ".join(f"{name} {s:.3f}" for name, s in seconds.items())
    drawn = found["waits, drawn at random"]["relative"]
    random = ", ".join(f"{name} {interval(drawn[name])}" for name in TABLES[1:])
    measured = f"""Spread in the second half, slots minus local SGD at equal bytes:
    {spreads}. Loss at rates chosen for each, after the step and before the step, minus
    that of local SGD: {losses}. Modelled seconds a step, GPT-2: {modelled}; the search
    is {seconds["local SGD"] / seconds["search"]:.2f} times as fast as local SGD that
    hides nothing, and {seconds["last slot"] / seconds["search"]:.2f} times as fast as
    local SGD that hides what it can; the rest of the published factor is over
    synchronous training. Waits of 2 to 6 layers drawn at random, relative to all in the
    last slot: {random}."""
    held = [*lower, shorter]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """The spread against the step, and modelled waits."""
    left, right = figure.subplots(1, 2)
    cell = found["iid, spread, H = 24"]
    curves = {name: (cell["step"], cell["spread"][name]) for name in NAMES[:2]}
    panels.lines(left, curves, x="step", y="spread of the workers, IID, H = 24")
    left.set_ylim(bottom=0)
    seconds = found["waits, GPT-2"]["seconds"]
    shown = {n: [s] for n, s in seconds.items() if not n.startswith("synchronous")}
    panels.bars(right, shown, y="modelled seconds a step, GPT-2", least=0.5)


def _make(name: str, period: int, rate: Any) -> optax.GradientTransformation:
    inner = optax.sgd(rate)
    if name == "local SGD":
        return lc.local_sgd(inner, period=period)
    table: list[list[str]] = [[] for _ in range(period)]
    for layer in range(3):
        table[layer * period // 3] = [f"layer{layer}"]
    method = lc.partial_local_sgd if name == "after the step" else lc.dreamddp
    return method(inner, table)


def _spread(split: str, period: int, *, steps: int, seeds: tuple[int, ...]) -> Cell:
    """The spread at each of the last steps, and what it is in the second half."""
    found = {}
    for name in NAMES[:2]:
        runs = train(
            toys.digits(split=split),
            partial(_make, name, period),
            steps=steps,
            rates=[FIXED[split]],
            seeds=seeds,
            points=steps,
            watch=drift,
        )
        found[name] = runs["drift"][0]
    return {
        "seeds": seeds,
        "step": np.arange(steps + 1)[-SHOWN:],
        "spread": {name: x[:, -SHOWN:] for name, x in found.items()},
        "peak": {name: x[:, steps // 2 :].max(1) for name, x in found.items()},
        "mean": {name: x[:, steps // 2 :].mean(1) for name, x in found.items()},
    }


def _gpt2() -> Cell:
    """Waits of a round and modelled seconds of a step; transfers go by size."""
    sizes = np.array(GPT2) / sum(GPT2)
    backward, forward = 2 / 3 * COMPUTE, COMPUTE / 3
    block = backward / 12
    times: tuple[Times, Times] = ([block] * 12 + [0.0], (SEND * sizes).tolist())
    layers = list(range(len(GPT2)))
    naive = naive_blocks(len(layers), ROUND)
    search = consecutive_blocks(*times, slots=ROUND)
    waits = {
        "last slot": total_wait([layers], *times),
        "naive blocks": total_wait(naive, *times),
        "search": total_wait(search, *times),
        "search, filled in": total_wait(fill_in(search, *times), *times),
    }
    each = {name: forward + backward + wait / ROUND for name, wait in waits.items()}
    seconds = {
        "synchronous": COMPUTE + SEND,
        "synchronous, overlapped": COMPUTE + waits["last slot"],
        "local SGD": COMPUTE + SEND / ROUND,
    }
    return {"waits": waits, "seconds": seconds | each, "table": search}


def _drawn(instances: int, seeds: tuple[int, ...]) -> Cell:
    """The mean wait of each kind of table over that in the last slot."""
    relative: dict[str, list[float]] = {name: [] for name in TABLES}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        sums: dict[str, float] = dict.fromkeys(TABLES, 0.0)
        for _ in range(instances):
            layers, slots = int(rng.integers(2, 7)), int(rng.integers(2, 4))
            times: tuple[Times, Times] = (
                list(rng.uniform(0, 1, layers)),
                list(rng.uniform(0, 2, layers)),
            )
            found: dict[str, Table] = {
                "last slot": [list(range(layers))],
                "naive blocks": naive_blocks(layers, slots),
                "search": consecutive_blocks(*times, slots=slots),
            }
            for name, table in found.items():
                sums[name] += total_wait(table, *times)
            sums[TABLES[-1]] += _best(layers, slots, times)
        for name, total in sums.items():
            relative[name].append(total / sums["last slot"])
    return {"seeds": seeds, "relative": relative}


def _best(layers: int, slots: int, times: tuple[Times, Times]) -> float:
    """The least total wait of all tables with each layer in one slot."""
    return min(
        total_wait(
            [[i for i in range(layers) if where[i] == slot] for slot in range(slots)],
            *times,
        )
        for where in product(range(slots), repeat=layers)
    )
