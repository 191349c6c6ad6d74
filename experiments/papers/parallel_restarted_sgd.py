"""Parallel restarted SGD: the mean of the parameters every I steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc

from .. import panels, toys
from ..trials import Cell, difference, interval, momentum, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "Parallel restarted SGD"
REFERENCE = (
    "Yu, Yang and Zhu, *Parallel Restarted SGD with Faster Convergence and Less "
    "Communication*, 2019, [1807.06629](https://arxiv.org/abs/1807.06629)."
)
CLAIM = """Averaging the models every I > 1 steps keeps the loss of parallel SGD, with
I times fewer rounds; workers drift apart by at most γIG between restarts."""
SETTING = """Gaussian mixture, 8 workers, 2000 steps of momentum SGD, rate tuned for
each I, IID and label-sorted shards; beside it 2000/I synchronous steps on I times as
many examples, with as many bytes; growth of the squared drift on linear losses and on
pure noise."""
METHODS = ("local_sgd", "parallel_restarted_sgd")
LARGE = (("iid", 16), ("iid", 64), ("sorted", 16))
BASELINES = (
    "iid, I = 1",
    "sorted, I = 1",
    *(f"{split}, one step on {i} batches" for split, i in LARGE),
)
PERIODS = (1, 4, 16, 64, 256, 2000)


def cells(scale: Scale) -> Cells:
    """Loss against the period on both splits, and the two slopes of the drift."""
    steps = scale.steps(2000)
    jobs: Cells = {}
    for split in ("iid", "sorted"):
        for period in PERIODS:
            if split == "sorted" and period == 2000:
                continue
            jobs[f"{split}, I = {period}"] = partial(
                tuned,
                toys.mixture(split=split),
                partial(_local, min(period, steps), steps),
                steps=steps,
                rates=scale.rates(0.0125, 0.025, 0.05, 0.1, 0.2, 0.4),
                seeds=scale.seeds,
            )
    for split, period in LARGE:
        jobs[f"{split}, one step on {period} batches"] = partial(
            _large,
            split,
            period,
            steps // period,
            rates=scale.rates(0.1, 0.2, 0.4, 0.8, 1.6, 3.2),
            seeds=scale.seeds,
        )
    jobs["drift on linear losses"] = partial(_drift, noise=False, seeds=scale.seeds)
    jobs["drift on pure noise"] = partial(_drift, noise=True, seeds=scale.seeds)
    return jobs


def verdict(found: Found) -> Verdict:
    """Flat on IID data up to 64 steps, a price for one average only, and the slopes."""
    base = values(found["iid, I = 1"])
    gap = {i: difference(values(found[f"iid, I = {i}"]), base) for i in PERIODS[1:]}
    linear, noise = (
        interval(found[f"drift on {what}"]["slope"])
        for what in ("linear losses", "pure noise")
    )
    flat = all(gap[i].mean < 0.03 for i in (4, 16, 64))
    price = gap[2000].low > 0.03
    slopes = abs(linear.mean - 2) < 0.01 and abs(noise.mean - 1) < 0.1
    sorted_gap = difference(
        values(found["sorted, I = 64"]), values(found[BASELINES[1]])
    )
    measured = f"""IID: loss at I = 64 minus that at I = 1 {gap[64]}, one average at the
    end {gap[2000]}; label-sorted, I = 64: {sorted_gap}. The squared drift grows like
    k^{linear.mean:.2f} on linear losses and k^{noise.mean:.2f} on noise."""
    large = {
        f"{split}, I = {i}": difference(
            values(found[f"{split}, I = {i}"]),
            values(found[f"{split}, one step on {i} batches"]),
        )
        for split, i in LARGE
    }
    measured += f""" Local steps minus one synchronous step on as many examples, at
    equal bytes: {", ".join(f"{name} {gap}" for name, gap in large.items())}."""
    held = [flat, price, slopes]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Loss against the period, and drift against the steps since a restart."""
    left, right = figure.subplots(1, 2)
    losses = {
        split: (
            shown := [i for i in PERIODS if f"{split}, I = {i}" in found],
            np.transpose([values(found[f"{split}, I = {i}"]) for i in shown]),
        )
        for split in ("iid", "sorted")
    }
    panels.lines(left, losses, x="steps between averages", y="held-out loss", log="x")
    drifts = {
        what: (found[f"drift on {what}"]["k"], found[f"drift on {what}"]["squares"])
        for what in ("linear losses", "pure noise")
    }
    label = "mean squared drift"
    panels.lines(right, drifts, x="steps since the restart", y=label, log="xy")


def _local(period: int, steps: int, rate: Any) -> optax.GradientTransformation:
    return lc.local_sgd(momentum(rate, steps), period=period)


def _large(split: str, period: int, rounds: int, **how: Any) -> Cell:
    """One synchronous step a round, on the examples of all its local steps."""
    problem = toys.mixture(split=split, batch_size=16 * period)
    cell = tuned(problem, partial(_local, 1, rounds), steps=rounds, points=1, **how)
    return cell | {"relative_bytes": cell["relative_bytes"] / period}


def _drift(*, noise: bool, seeds: tuple[int, ...], period: int = 64) -> Cell:
    """The squared drift k steps after a restart, and its slope in log-log."""
    k, runs = 8, 256
    tx = lc.local_sgd(optax.sgd(0.05), period=period)

    def path(key):
        fixed = jax.random.normal(key, (k, runs))

        def body(carry, t):
            drawn = jax.random.normal(jax.random.fold_in(key, t), (k, runs))
            params, state = carry
            update = lambda g, s, x, t: tx.update(g, s, x, step=t)
            moves, state = lc.spread(update, in_axes=(0, 0, 0, None))(
                drawn if noise else fixed, state, params, t
            )
            params = params + moves
            squares = jnp.mean((params - params.mean(0)) ** 2)
            return (params, state), squares

        params = jnp.zeros((k, runs))
        first = params, lc.spread(tx.init)(params)
        return jax.lax.scan(body, first, jnp.arange(period - 1))[1]

    squares = np.array([jax.jit(path)(jax.random.key(seed)) for seed in seeds])
    at = np.arange(1, period)
    slope = [np.polyfit(np.log(at), np.log(one), 1)[0] for one in squares]
    return {"k": at, "squares": squares, "slope": slope, "seeds": seeds}
