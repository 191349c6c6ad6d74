"""Scaling laws of training that seldom talks: loss against size, and the outer rate."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc

from .. import panels
from ..letters import letters, size_of
from ..scaling import PowerLaw, exponent_gap, fit, predict
from ..toys import Problem
from ..trials import Cell, cosine, difference, interval, train, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "Scaling laws of local SGD and DiLoCo"
REFERENCE = (
    "He, Zhuang and Wu, *Exploring Scaling Laws for Local SGD in Large Language Model "
    "Training*, 2024, [2409.13198](https://arxiv.org/abs/2409.13198); Charles et al., "
    "*Communication-Efficient Language Model Training Scales Reliably and Robustly: "
    "Scaling Laws for DiLoCo*, 2025, [2503.09799](https://arxiv.org/abs/2503.09799)."
)
CLAIM = """Loss falls with model size by the same power law as in data-parallel training
(at 4 B and 10 B parameters 2.224 and 2.090, DiLoCo with 4 workers 2.230 and 2.096); the
best outer rate grows with the number of workers and of local steps, not with size."""
SETTING = """Next byte of Python's sources, two hidden layers, 2 k to 10 k parameters
besides the embedding and 16 k held out, 20 bytes a parameter in every arm; Adam inside,
its rate tuned for each arm and size; Nesterov outside, its rate tuned for each number
of workers and of steps a round at one size, together with the inner one."""
METHODS = ("local_sgd", "diloco")
WIDTHS, HELD_OUT, ONE_WIDTH = (12, 20, 32, 52), 72, 20
ARMS = {
    "data-parallel": (4, 0),
    "4 workers, H = 8": (4, 8),
    "4 workers, H = 32": (4, 32),
    "one worker, H = 32": (1, 32),
}
BASELINES = tuple(
    f"{arm}, width {w}"
    for arm in ("data-parallel", "one worker, H = 32")
    for w in (*WIDTHS, HELD_OUT)
)
OUTER = ((1, 32), (2, 32), (4, 32), (8, 32), (4, 8), (4, 128))  # workers, steps a round
BATCH = 64  # bytes to foretell a step, of all workers together
RATES = (0.0015, 0.003, 0.006, 0.012, 0.024, 0.048)
INNER_RATES, OUTER_RATES = (0.006, 0.012, 0.024), (0.0625, 0.125, 0.25, 0.5, 1.0)


def cells(scale: Scale) -> Cells:
    """Each arm at each size, and the best outer rates at one."""
    seeds = scale.seeds[:3]
    steps_at_one = _steps(ONE_WIDTH, scale)
    jobs: Cells = {
        f"outer rate, {workers} workers, H = {period}": partial(
            _outer, workers, period, steps_at_one, seeds[:2]
        )
        for workers, period in OUTER
    }
    for arm, (workers, period) in ARMS.items():
        choose = partial(_outer, workers, period, steps_at_one, seeds[:2])
        for width in (*WIDTHS, HELD_OUT):
            jobs[f"{arm}, width {width}"] = partial(
                _arm,
                workers,
                period,
                width,
                choose,
                steps=_steps(width, scale),
                rates=scale.rates(*RATES),
                seeds=seeds,
            )
    return jobs


def verdict(found: Found) -> Verdict:
    """Equal exponents within two errors, and an outer rate that grows with workers."""
    laws = {arm: _law(found, arm) for arm in ARMS}
    gaps = {
        arm: exponent_gap(laws[arm], laws["data-parallel"])
        for arm in ARMS
        if arm != "data-parallel"
    }
    four = [gaps[arm] for arm in ARMS if arm.startswith("4")]
    equal = all(gap.low <= 0 <= gap.high for gap in four)
    rates = {
        key: found[f"outer rate, {key[0]} workers, H = {key[1]}"]["rate"]
        for key in OUTER
    }
    by_workers = [rates[k, 32] for k in (1, 2, 4, 8)]
    by_period = [rates[4, h] for h in (8, 32, 128)]
    grows = bool(np.all(np.diff(by_workers) >= 0))
    told = [_told(found, arm) for arm in ARMS]
    alone = difference(*(_ends(found, f"{arm}, H = 32", HELD_OUT) for arm in LONG))
    named = lambda each: ", ".join(f"{arm} {x}" for arm, x in each.items())
    exponents = {arm: f"{x.exponent:.3f} ± {_two(x):.3f}" for arm, x in laws.items()}
    floors = {
        arm: f"{x.floor:.2f} (then α = {x.exponent:.2f} ± {_two(x):.2f})"
        for arm in ARMS
        if (x := _law(found, arm, floor=True))
    }
    measured = f"""Exponents of these sizes, with two standard errors:
    {named(exponents)}. With a floor: {named(floors)}. {_sentence(found, told)}
    Four workers minus one, both with H = 32, at the held-out size: {alone}. Best outer
    rate for 1, 2, 4, 8 workers: {_listed(by_workers)}; for 8, 32, 128 steps a round:
    {_listed(by_period)}."""
    held = [equal, grows]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


LONG = ("4 workers", "one worker")


def draw(found: Found, figure: Any) -> None:
    """The laws with the held-out size, and loss against the outer rate."""
    left, right = figure.subplots(1, 2)
    sizes = _sizes()
    curves = {
        f"{arm}: α = {_law(found, arm).exponent:.3f}": (
            sizes,
            np.transpose([_ends(found, arm, w) for w in (*WIDTHS, HELD_OUT)]),
        )
        for arm in ARMS
    }
    label = "parameters without the embedding (the last held out)"
    panels.lines(left, curves, x=label, y="held-out loss", log="xy")
    law = _law(found, "data-parallel")
    left.plot(sizes, [law(n) for n in sizes], color="#888888", linewidth=0.8)
    shown = {}
    for workers, period in OUTER:
        cell = found[f"outer rate, {workers} workers, H = {period}"]
        rates = [float(r) for r in cell["rates"]]
        of = [np.nan if x is None else x for x in cell["rates"].values()]
        shown[f"{workers} workers, H = {period}"] = rates, [of]
    panels.lines(right, shown, x="outer rate", y="validation loss", log="x")


def _two(law: PowerLaw) -> float:
    return 2 * law.exponent_error


def _listed(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _sentence(found: Found, told: list[tuple[float, float, float, float]]) -> str:
    inside = sum(low <= seen <= high for low, _, high, seen in told)
    low, middle, high, seen = told[0]
    return f"""The straight line foretells the held-out size within its 95 % interval in
    {inside} of {len(told)} arms (data-parallel: {low:.3f} to {high:.3f}, middle
    {middle:.3f}, found {seen:.3f})."""


def _sizes() -> list[int]:
    return [size_of(_problem(1, width)) for width in (*WIDTHS, HELD_OUT)]


def _ends(found: Found, arm: str, width: int) -> list[float]:
    return values(found[f"{arm}, width {width}"])


def _law(found: Found, arm: str, *, floor: bool = False) -> PowerLaw:
    losses = [_ends(found, arm, width) for width in WIDTHS]
    sizes = np.repeat(_sizes()[:-1], [len(each) for each in losses])
    return fit(sizes.tolist(), np.concatenate(losses).tolist(), floor=floor)


def _told(found: Found, arm: str) -> tuple[float, float, float, float]:
    """What the law of the smaller sizes says of the held-out one, and what it was."""
    seen = _ends(found, arm, HELD_OUT)
    told = predict(_law(found, arm), _sizes()[-1], runs=len(seen))
    return *told, interval(seen).mean


def _problem(workers: int, width: int) -> Problem:
    assert BATCH % workers == 0  # all arms read as many bytes a step
    return letters(workers=workers, batch_size=BATCH // workers, hidden=width)


def _steps(width: int, scale: Scale) -> int:
    """The same for each number of workers, which share a batch out among them."""
    return scale.steps(20 * size_of(_problem(1, width))) // BATCH // 32 * 32


def _method(period: int, steps: int, outer: Any, rate: Any) -> Any:
    inner = optax.adam(cosine(rate, steps))
    if period == 0:
        return lc.data_parallel(inner)
    return lc.diloco(inner, period=period, outer_lr=outer, momentum=0.9)


def _arm(
    workers: int, period: int, width: int, choose: Any, *, steps: int, **how: Any
) -> Cell:
    """A cell: the best inner rate at the outer rate that was best at one size."""
    outer = choose()["rate"] if period else None
    make = partial(_method, period, steps, outer)
    cell = tuned(_problem(workers, width), make, steps=steps, points=8, **how)
    return cell | {"outer rate": outer}


@cache
def _outer(workers: int, period: int, steps: int, seeds: tuple[int, ...]) -> Cell:
    """A cell whose rate is the outer one, each with the inner rate that suits it."""
    problem, n = _problem(workers, ONE_WIDTH), len(INNER_RATES)

    def make(place):  # in the table of both
        place = jnp.asarray(place, jnp.int32)
        outer, inner = (jnp.array(each) for each in (OUTER_RATES, INNER_RATES))
        return _method(period, steps, outer[place // n], inner[place % n])

    pairs = range(n * len(OUTER_RATES))
    runs = train(problem, make, steps=steps, rates=pairs, seeds=seeds, points=1)
    table = lambda name: runs[name][..., -1].reshape(len(OUTER_RATES), n, -1)
    chosen = np.nan_to_num(table("validation").mean(-1), nan=np.inf)
    inner = chosen.argmin(1)
    best = int(chosen.min(1).argmin())
    at = best, int(inner[best])
    return {
        "problem": problem.name,
        "steps": steps,
        "seeds": list(seeds),
        "rates": dict(zip(map(str, OUTER_RATES), chosen.min(1).tolist(), strict=True)),
        "rate": OUTER_RATES[best],
        "inner rate": INNER_RATES[at[1]],
        "at_the_edge": best in (0, len(OUTER_RATES) - 1) or at[1] in (0, n - 1),
        "relative_bytes": 1 / period if workers > 1 else 0.0,
        "final": {"loss": table("loss")[at]},
    }
