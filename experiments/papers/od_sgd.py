"""OD-SGD: gradients a step late, and a local step that makes up for the delay."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.stats import rankdata

import lowcomm as lc

from .. import panels, toys
from ..trials import Cell, at_rate, difference, drift, interval, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "OD-SGD"
REFERENCE = (
    "Xu, Dong, Xu and Liao, *OD-SGD: One-step Delay Stochastic Gradient Descent for "
    "Distributed Training*, 2020, [2005.06728](https://arxiv.org/abs/2005.06728)."
)
CLAIM = """A gradient a step late, made up for by a local step, is as accurate as
synchronous SGD on MNIST, CIFAR-10 and ImageNet, or slightly more so, at a speed above
that of asynchronous SGD."""
SETTING = """8×8 digits, IID, a network of two hidden layers, 8 workers, 300 steps of
plain SGD at a constant rate η, 50 of them synchronous; local rates ρη. A run trains
where all seeds end above an accuracy of 0.9. Seconds are modelled: a step computes for
1, a push and a pull take r, and OD-SGD waits only for what is beyond the next step."""
METHODS = ("od_sgd",)
BASELINES = ("synchronous", "ρ = 0")
RATIOS = (0.0, 0.125, 0.5, 0.75, 1.0, 1.25)
RATES = (0.125, 0.25, 0.35, 0.5, 0.65, 0.8, 1.0, 1.2)
WARMUP, TRAVEL = 50, (0.5, 1.0, 2.0)


def cells(scale: Scale) -> Cells:
    """Every ratio of the two rates at every rate, and a quadratic."""
    steps = scale.steps(300)
    asked: dict[str, Any] = {"synchronous": None}
    asked |= {f"ρ = {rho:g}": rho for rho in RATIOS}
    jobs: Cells = {
        name: partial(
            tuned,
            toys.digits(),
            partial(_late, rho, WARMUP * steps // 300),
            steps=steps,
            rates=scale.rates(*RATES),
            seeds=scale.seeds,
            points=25,
            watch=drift,
        )
        for name, rho in asked.items()
    }
    return jobs | {"quadratic": _quadratic}


def verdict(found: Found) -> Verdict:
    """Delay alone fails where OD-SGD and synchronous SGD train; 0 < best ρ < 1."""
    names = ("synchronous", *(f"ρ = {rho:g}" for rho in RATIOS))
    limits = {name: _limit(found[name]) for name in names}
    rates = [float(rate) for rate in found["ρ = 0"]["rates"]]
    fails = [
        rate
        for rate in rates
        if limits["ρ = 0"] < rate <= limits["synchronous"]
        and any(rate <= limits[f"ρ = {rho:g}"] for rho in RATIOS[1:])
    ]
    # The best is the one that is most accurate at the rates where not all train.
    hard = [rate for rate in rates if rate > limits["ρ = 0"]]
    score = {
        rho: np.mean([at_rate(found[f"ρ = {rho:g}"], r, "accuracy") for r in hard])
        for rho in RATIOS
    }
    best = max(score, key=lambda rho: score[rho])
    inside = 0 < best < 1
    reference = values(found["synchronous"])
    gap = {
        rho: difference(values(found[f"ρ = {rho:g}"]), reference)
        for rho in (0.0, 0.5, 1.0)
    }
    same = gap[0.5].mean < 0.03
    top = max(rates)
    each = lambda rate: ", ".join(
        f"{name} {interval(at_rate(found[name], rate, 'accuracy'))}"
        for name in ("synchronous", "ρ = 0", "ρ = 0.5", "ρ = 0.75", "ρ = 1")
    )
    step = ", ".join(f"{max(1, r) / (1 + r):.2f} at r = {r:g}" for r in TRAVEL)
    exact = found["quadratic"]
    alone, several = (
        exact[f"limit with {what}"] for what in ("one optimum", "several")
    )
    ranks = [rankdata(x) for x in (list(score.values()), alone, several)]
    order = np.corrcoef(ranks)[0]
    told = lambda limit: ", ".join(
        f"{x:.2f} at ρ = {rho:g}"
        for rho, x in zip(RATIOS, limit, strict=True)
        if rho in (0.5, 0.75, 1.0)
    )
    measured = f"""The highest η that trains:
    {", ".join(f"{name} {limit:g}" for name, limit in limits.items())}. Accuracy at
    η = {top:g}: {each(top)}; the best ρ beyond η = {limits["ρ = 0"]:g} is {best:g}. At
    rates chosen for each, loss minus that of synchronous SGD:
    {", ".join(f"ρ = {rho:g} {diff}" for rho, diff in gap.items())}. A step takes of
    synchronous SGD's modelled seconds {step}; but the simplest baseline, delay without
    compensation, at its own rate of {found["ρ = 0"]["rate"]:g}, takes as little. On a
    quadratic of curvature h the highest stable ηh (on a grid of 0.05) is {told(alone)}
    where workers have one optimum, and {told(several)} where each has its own, for
    their disagreement is multiplied by −ρηh a step. The order of the ρ by accuracy on
    the digits beyond η = {limits["ρ = 0"]:g} has a rank correlation of {order[1]:.2f}
    with the first limits and of {order[2]:.2f} with the second."""
    held = [bool(fails), inside, same]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Accuracy against the rate, and loss against modelled seconds."""
    left, right = figure.subplots(1, 2)
    names = ("synchronous", *(f"ρ = {rho:g}" for rho in RATIOS))
    curves = {}
    for name in names:
        rates = [float(rate) for rate in found[name]["rates"]]
        accuracy = [at_rate(found[name], rate, "accuracy") for rate in rates]
        curves[name] = rates, np.transpose(accuracy)
    panels.lines(left, curves, x="learning rate η", y="accuracy")
    paths = {
        name: (
            [step * seconds for step in found[name]["step"]],
            found[name]["curves"]["loss"],
        )
        for name, seconds in {"synchronous": 2, "ρ = 0": 1, "ρ = 0.5": 1}.items()
    }
    x = "modelled seconds, r = 1"
    panels.lines(right, paths, x=x, y="held-out loss", log="xy")


def _late(rho: float | None, warmup: int, rate: Any) -> optax.GradientTransformation:
    if rho is None:
        return lc.data_parallel(optax.sgd(rate))
    local = optax.sgd(rho * rate) if rho else optax.set_to_zero()
    return lc.od_sgd(optax.sgd(rate), local, warmup=warmup)


def _limit(cell: Cell) -> float:
    """The highest rate up to which all seeds train, 0 if the lowest does not."""
    best = 0.0
    for name in cell["rates"]:
        if not np.min(np.asarray(at_rate(cell, float(name), "accuracy"), float)) > 0.9:
            break
        best = float(name)
    return best


def _quadratic() -> Cell:
    """Up to which ηh all goes well, and the factor of the disagreement a step.

    Four workers on the same curvature, with one optimum for all or one for each.
    """
    ratios, scaled = jnp.array(RATIOS), np.arange(1, 85) / 20  # ηh up to 4.2

    def path(rho, optima):
        local = optax.stateless(lambda g, _: -rho * g)
        tx = lc.od_sgd(optax.sgd(1.0), local, warmup=0)

        def worker(x, optimum):
            def body(carry, t):
                x, state = carry
                moves, state = tx.update(scaled * (x - optimum), state, x, step=t)
                return (x + moves, state), x + moves

            return jax.lax.scan(body, (x, tx.init(x)), jnp.arange(400))[1]

        return lc.spread(worker)(jnp.ones((4, len(scaled))), optima)

    def paths(*optima):  # [ratios, workers, steps, ηh]
        each = lambda rho: path(rho, jnp.array(optima))
        return np.asarray(jax.jit(lambda: jax.lax.map(each, ratios))(), np.float64)

    def limits(x):
        middle, end = (np.abs(x[:, :, t : t + 20]).max((1, 2)) for t in (180, 380))
        return [float(scaled[y].max(initial=0)) for y in end < 1.1 * middle + 1e-3]

    same, own = paths(0.0, 0.0, 0.0, 0.0), paths(-1.0, 2.0, 0.0, -1.0)
    early = own[1:, :, :3, 9]  # at ηh = 1/2
    apart = (early - early.mean(1, keepdims=True))[:, 1]  # of one worker
    factor = (apart[:, 2] - apart[:, 1]) / (apart[:, 1] - apart[:, 0])
    return {
        "ratios": RATIOS,
        "limit with one optimum": limits(same),
        "limit with several": limits(own),
        "factor at 1/2": factor,
        "error": np.abs(factor + np.array(RATIOS[1:]) / 2),
    }
