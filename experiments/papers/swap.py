"""SWAP: train together, refine apart, average once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc

from .. import panels, toys
from ..trials import at_rate, cosine, difference, interval, momentum, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "SWAP"
REFERENCE = (
    "Gupta, Serrano and DeCoste, *Stochastic Weight Averaging in Parallel: Large-Batch "
    "Training That Generalizes Well*, 2020, "
    "[2001.02312](https://arxiv.org/abs/2001.02312)."
)
CLAIM = """A large-batch start, stopped early, then independent refinement and one
average generalizes as well as small-batch training (CIFAR-10, as recalled: 95.2 % after
169 s, against 95.2 % after 254 s small-batch and 94.8 % after 133 s large-batch)."""
SETTING = """Gaussian mixture, 8 workers of batch 64 who draw from all examples: 600
synchronous steps at a rate that rises to 0.2, then 1000 steps apart with a rate that
falls to 0 and is tuned, once for the average and once for a member; every baseline
tuned as well."""
METHODS = ("swap",)
TOGETHER, APART = 600, 1000
SMALL = {"as many steps": 1, "as many examples": 8}
BASELINES = (
    "large batch",
    "local SGD, H = 3",
    "local SGD, H = 64",
    *(f"one worker, {what}" for what in SMALL),
)
RATES = (0.003125, 0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)


def cells(scale: Scale) -> Cells:
    """SWAP, one average without a common start, and what trains without it."""
    first, then = scale.steps(TOGETHER), scale.steps(APART)
    steps = first + then
    eight = _all_for_all(toys.mixture(batch_size=64))
    how: dict[str, Any] = {"rates": scale.rates(*RATES), "seeds": scale.seeds}
    run = lambda make, problem=eight, steps=steps, **more: partial(
        tuned, problem, make, steps=steps, points=16, **how, **more
    )
    jobs: Cells = {
        "SWAP": run(partial(_swap, first, steps, steps)),
        # With the rate that is best for a member; the average is only looked at.
        "members": run(
            partial(_swap, first, steps, steps + 1),
            watch=partial(_members, eight),
            metric="validation of a member",
        ),
        "one average at the end": run(partial(_local, steps, steps)),
        "large batch": run(lambda rate: lc.data_parallel(momentum(rate, steps))),
        "local SGD, H = 3": run(partial(_local, 3, steps)),
        "local SGD, H = 64": run(partial(_local, 64, steps)),
    }
    for what, times in SMALL.items():
        alone, longer = toys.mixture(workers=1, batch_size=64), times * steps
        make = partial(_alone, longer)
        jobs[f"one worker, {what}"] = run(make, problem=alone, steps=longer)
    return jobs


def verdict(found: Found) -> Verdict:
    """Average before member before phase 1 for every seed; and the baselines."""
    own, best = found["SWAP"]["rate"], found["members"]["rate"]
    ordered = [_ordered(found, rate) for rate in (own, best)]
    ends = values(found["SWAP"])
    gaps = {name: difference(ends, values(found[name])) for name in BASELINES}
    as_small = gaps["one worker, as many examples"].low <= 0
    beats_large = gaps["large batch"].high < 0
    several = "; ".join(f"{name} {gap}" for name, gap in gaps.items())
    measured = f"""Loss after phase 1 {interval(_start(found))}. At the rate that is
    best for the average ({own:g}): {_said(found, own)}; at that which is best for a
    member ({best:g}): {_said(found, best)}. The average minus each baseline: {several}.
    At no more bytes better than SWAP: {_frugal(found, gaps, 0)}; as good:
    {_frugal(found, gaps, 1)}."""
    held = [*ordered, as_small, beats_large]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Members and their average through both phases, and all ends."""
    left, right = figure.subplots(1, 2)
    cell = found["members"]
    name = {"member": "a member", "loss": "the average of all"}
    name["between two"] = "of two members"
    curves = {said: (cell["step"], cell["curves"][of]) for of, said in name.items()}
    panels.lines(left, curves, x="step", y="held-out loss")
    left.set_ylim(0.9 * min(values(cell)), 1.6 * max(_start(found)))
    rate = found["SWAP"]["rate"]
    ends: dict[str, Any] = {
        "after phase 1": _start(found),
        "a member": at_rate(cell, rate, "member"),
    }
    ends |= {name: values(cell) for name, cell in found.items() if name != "members"}
    least = 0.9 * min(min(each) for each in ends.values())
    panels.bars(right, ends, y="held-out loss", least=least)


def _start(found: Found) -> np.ndarray:
    """Held-out loss after phase 1, by seed."""
    cell = found["members"]
    at = round(len(cell["step"][1:]) * TOGETHER / (TOGETHER + APART))
    return np.array(cell["curves"]["loss"], float)[:, at]


def _ordered(found: Found, rate: float) -> bool:
    """Whether average, member and phase 1 are in this order for every seed."""
    average, member = (
        np.array(at_rate(found["members"], rate, name)) for name in ("loss", "member")
    )
    return bool(np.all(average < member) and np.all(member < _start(found)))


def _said(found: Found, rate: float) -> str:
    member, two, average = (
        interval(at_rate(found["members"], rate, name))
        for name in ("member", "between two", "loss")
    )
    return f"a member {member}, halfway between two {two}, the average {average}"


def _frugal(found: Found, gaps: dict[str, Any], place: int) -> str:
    """Baselines of no more bytes that are better (0) or as good (1)."""
    named = [
        name
        for name, gap in gaps.items()
        if (gap.low <= 0) == place
        and gap.high >= 0
        and found[name]["relative_bytes"] <= found["SWAP"]["relative_bytes"]
    ]
    return ", ".join(named) or "none"


def _all_for_all(problem: toys.Problem) -> toys.Problem:
    """Every worker draws from all examples, in an order of its own."""
    rows = np.asarray(problem.own).reshape(1, -1)
    return problem._replace(own=np.tile(rows, (problem.workers, 1)))


def _members(problem: toys.Problem, params: Any, state: Any) -> dict[str, jax.Array]:
    """To watch: the mean loss of the members, and that of the mean of two of them."""
    two = jax.tree.map(lambda x: x[:2].mean(0), params)
    own = jax.vmap(problem.judge)(params)
    return {
        "member": jnp.mean(own["loss"]),
        "validation of a member": jnp.mean(own["validation"]),
        "between two": problem.judge(two)["loss"],
    }


def _swap(first: int, steps: int, end: int, rate: Any) -> optax.GradientTransformation:
    together = optax.linear_schedule(0.0, 0.2, first // 6)
    fall = lambda t: rate * (1 - t / (steps - first))
    ball = lambda schedule: optax.sgd(schedule, momentum=0.9)
    return lc.swap(ball(together), ball(fall), switch=first, steps=end)


def _local(period: int, steps: int, rate: Any) -> optax.GradientTransformation:
    return lc.local_sgd(momentum(rate, steps), period=period)


def _alone(steps: int, rate: Any) -> optax.GradientTransformation:
    return optax.sgd(cosine(rate, steps), momentum=0.9)
