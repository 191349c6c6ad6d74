"""DES-LOC: parameters and the moments of Adam are averaged on clocks of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc

from .. import panels, toys
from ..trials import Cell, cosine, difference, interval, train, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "DES-LOC"
REFERENCE = (
    "Iacob et al., *DES-LOC: Desynced Low Communication Adaptive Optimizers for "
    "Training Foundation Models*, 2025, [2505.22549](https://arxiv.org/abs/2505.22549)."
)
CLAIM = """With the first moment averaged every third and the second every sixth time
that the parameters are, training goes as with Local Adam, which averages all three each
time, for half of the bytes, and a 170th of data-parallel training's; on a noisy
Rosenbrock function (256 workers, σ = 1.5) keeping the moments local, or resetting them,
oscillates."""
SETTING = """Gaussian mixture, IID and label-sorted, 8 workers, 1920 steps of Adam,
parameters averaged every 48 steps, and beside it three ways to the same bytes: Local
Adam every 96 steps, moments kept local every 32, synchronous Adam on 32 times as many
examples; rates tuned for each. Rosenbrock: 256 workers with noise 1.5 in each
coordinate, 2304 steps at a constant rate, rounds of 24 and of 192 steps (ours), from
(−1, 1)."""
METHODS = ("des_loc",)
SPLITS = ("iid", "sorted")
EQUAL = ("Local Adam, 96", "moments kept, 32", "one step on 32 batches")
BASELINES = tuple(
    f"{split}, {name}"
    for split in SPLITS
    for name in ("synchronous", "Local Adam, 48", *EQUAL)
)
WAYS = ("DES-LOC", "Local Adam", "moments kept", "moments reset")
VALLEY = (0.01, 0.02, 0.04, 0.08, 0.16)
PERIODS, WORKERS, NOISE = (24, 192), 256, 1.5
CHOOSING = 100  # what seeds that choose the rate are more than those that report


def cells(scale: Scale) -> Cells:
    """Every way on both splits, and four ways on the Rosenbrock function."""
    steps = scale.steps(1920)
    rates = scale.rates(0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
    how: dict[str, Any] = {"rates": rates, "seeds": scale.seeds}
    jobs: Cells = {}
    for split in SPLITS:
        runs: dict[str, Any] = {
            "synchronous": _synchronous,
            "DES-LOC, 48": partial(_way, "DES-LOC", 48),
            "Local Adam, 48": partial(_way, "Local Adam", 48),
            "Local Adam, 96": partial(_way, "Local Adam", 96),
            "moments kept, 32": partial(_way, "moments kept", 32),
        }
        if not scale.quick:
            runs["moments reset, 32"] = partial(_way, "moments reset", 32)
        for name, make in runs.items():
            make = partial(_scheduled, make, steps)
            problem = toys.mixture(split=split)
            jobs[f"{split}, {name}"] = partial(tuned, problem, make, steps=steps, **how)
        jobs[f"{split}, {EQUAL[-1]}"] = partial(
            tuned,
            toys.mixture(split=split, batch_size=16 * 32),
            partial(_scheduled, _synchronous, steps // 32),
            steps=steps // 32,
            instead_of=steps,
            points=1,
            **how,
        )
    for period in PERIODS:
        make = partial(_rosenbrock, period, scale.steps(2304), scale.seeds)
        jobs[f"Rosenbrock, {period}"] = make
    return jobs


def verdict(found: Found) -> Verdict:
    """As good as Local Adam for half of its bytes, and steadier than local moments."""
    gap = {
        (split, name): difference(
            values(found[f"{split}, DES-LOC, 48"]), values(found[f"{split}, {name}"])
        )
        for split in SPLITS
        for name in ("synchronous", "Local Adam, 48", *EQUAL)
    }
    share = {
        name: found[f"iid, {name}"]["relative_bytes"]
        for name in ("DES-LOC, 48", "Local Adam, 48", *EQUAL)
    }
    half = share["DES-LOC, 48"] <= share["Local Adam, 48"] / 2
    as_good = [half and gap[split, "Local Adam, 48"].mean < 0.01 for split in SPLITS]
    valleys = {period: found[f"Rosenbrock, {period}"] for period in PERIODS}
    local = [_moves(v)[w] for v in valleys.values() for w in WAYS[2:]]
    shared = [_moves(v)["DES-LOC"] for v in valleys.values() for _ in WAYS[2:]]
    steadier = all(difference(a, b).low > 0 for a, b in zip(local, shared, strict=True))
    of = lambda split: ", ".join(f"{name} {gap[split, name]}" for _, name in _of(split))
    measured = f"""DES-LOC sends {share["DES-LOC, 48"]:.4f} of data-parallel training's
    bytes, Local Adam at the same period {share["Local Adam, 48"]:.4f}. Loss of DES-LOC
    minus that of others, IID: {of("iid")}; sorted: {of("sorted")}. As good or better
    at the same bytes: {_as_good(gap)}. Rosenbrock:
    {"; ".join(f"rounds of {h}, {_told(v)}" for h, v in valleys.items())}."""
    held = [*as_good, steadier]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """The loss on sorted shards, and how far the model moves in the end."""
    left, right = figure.subplots(1, 2)
    losses = {
        name.removeprefix("sorted, "): values(cell)
        for name, cell in found.items()
        if name.startswith("sorted, ")
    }
    least = 0.9 * min(min(each) for each in losses.values())
    panels.bars(left, losses, y="held-out loss, sorted", least=least)
    valley = found[f"Rosenbrock, {PERIODS[-1]}"]
    rates = valley["rates"]
    curves = {
        way: (rates, np.transpose(_reported(valley, way, "moves"))) for way in WAYS
    }
    label = f"Rosenbrock, moved in {PERIODS[-1]} steps"
    panels.lines(right, curves, x="learning rate", y=label, log="x")
    right.set_xticks(rates, [f"{rate:g}" for rate in rates])
    right.minorticks_off()


def _of(split: str) -> list[tuple[str, str]]:
    return [(split, name) for name in ("synchronous", "Local Adam, 48", *EQUAL)]


def _as_good(gap: dict[tuple[str, str], Any]) -> str:
    names = [
        f"{name} ({split})"
        for split in SPLITS
        for name in EQUAL
        if gap[split, name].high >= 0
    ]
    return ", ".join(names) or "none"


def _told(valley: Any) -> str:
    """How far the model moves, and its mean loss at rates chosen for each."""
    rates, moves = valley["rates"], _moves(valley)
    losses = {}
    for way in WAYS:
        rate = _chosen(valley, way)
        each = 1000 * _reported(valley, way, "losses")[rates.index(rate)]
        losses[way] = f"{interval(each)} (rate {rate:g})"
    far = ", ".join(f"{way} {interval(1000 * each)}" for way, each in moves.items())
    low = ", ".join(f"{way} {each}" for way, each in losses.items())
    return f"""at the rate that is best for DES-LOC the model moves from sync to sync,
    in the second half, by a thousandth of {far}; a thousand times the mean loss there,
    at rates chosen for each: {low}"""


def _moves(valley: Any) -> dict[str, np.ndarray]:
    """How far the model moves from sync to sync at the rate best for DES-LOC."""
    at = valley["rates"].index(_chosen(valley, "DES-LOC"))
    return {way: _reported(valley, way, "moves")[at] for way in WAYS}


def _chosen(valley: Any, way: str) -> float:
    """The rate with the least mean loss by the seeds that choose."""
    n = len(valley["seeds"])
    losses = np.array(valley[way]["losses"], float)[:, n:]
    means = np.where(np.isfinite(losses), losses, np.inf).mean(1)
    return valley["rates"][int(means.argmin())]


def _reported(valley: Any, way: str, name: str) -> np.ndarray:
    """By rate and seed, of the seeds that report."""
    return np.array(valley[way][name], float)[:, : len(valley["seeds"])]


def _scheduled(make: Any, steps: int, rate: Any) -> optax.GradientTransformation:
    return make(optax.adam(cosine(rate, steps)))


def _synchronous(inner: Any) -> optax.GradientTransformation:
    return lc.data_parallel(inner)


def _way(name: str, period: int, inner: Any) -> optax.GradientTransformation:
    if name == "DES-LOC":
        periods = {"mu": 3 * period, "nu": 6 * period}
        return lc.des_loc(inner, period=period, moment_periods=periods)
    how = {"Local Adam": "average", "moments kept": "keep", "moments reset": "reset"}
    return lc.local_sgd(inner, period=period, moments=how[name])


def _rosenbrock(period: int, steps: int, seeds: tuple[int, ...]) -> Cell:
    """Mean loss and root-mean-square move from sync to sync, over the second half."""

    def height(x):
        return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2

    problem = toys.Problem(
        "Rosenbrock",
        WORKERS,
        lambda key: jnp.array([-1.0, 1.0]),
        lambda x, noise: height(x) + noise @ x,
        np.zeros(WORKERS, np.int32),
        lambda own, key: NOISE * jax.random.normal(key, (2,)),
        lambda x: {"loss": height(x), "x": x[0], "y": x[1]},
    )
    cell: Cell = {"rates": list(VALLEY), "seeds": list(seeds)}
    for way in WAYS:
        found = train(
            problem,
            lambda rate, way=way: _way(way, period, optax.adam(rate)),
            steps=steps,
            rates=VALLEY,
            seeds=(*seeds, *(CHOOSING + s for s in seeds)),
            points=steps // period,
        )
        late = slice(steps // period // 2, None)
        path = np.stack([found["x"], found["y"]], -1)[..., late, :]
        squares = np.sum(np.diff(path, axis=-2) ** 2, -1)
        cell[way] = {
            "losses": found["loss"][..., late].mean(-1),
            "moves": np.sqrt(squares.mean(-1)),
        }
    return cell
