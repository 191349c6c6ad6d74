"""Learning rates for the race, by runs without a link: ``python -m …links.tune``.

Virtual workers of one process train each method at several rates, on a split for tuning
and with a seed of its own. The best rate of data-parallel training is the one with the
least loss after its steps; that of any other method is the one that gets to this loss
in the fewest steps. Nothing is timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro
from rich.console import Console

import lowcomm as lc
from experiments import records
from experiments.language import language_task
from experiments.splits import iid
from experiments.text import stdlib
from experiments.transformer import SIZES

from .methods import Recipe, racing

TUNED = Path(__file__).parents[1] / "results" / "links" / "tuned.json"
BASE = "data_parallel"
RACERS = (
    BASE,
    "local_sgd / 16",
    "local_sgd / 30",
    "local_sgd, int8 / 30",
    "diloco, int8 / 30",
    "sparse_loco / 15",
)


@dataclass(frozen=True)
class Settings:
    """Choose rates of AdamW for the methods of the race."""

    methods: tuple[str, ...] = RACERS
    rates: tuple[float, ...] = (0.001, 0.002, 0.005)
    workers: int = 2
    size: str = "0.5m"
    steps: int = 200
    """Of data-parallel training."""
    most: float = 3.0
    """How many times as many steps another method may take."""
    every: int = 10
    """Steps from evaluation to evaluation."""
    seed: int = 100
    out: Path = TUNED


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune, print and record; methods that are not asked for keep their entry."""
    settings = tyro.cli(
        Settings, prog="python -m experiments.links.tune", args=arguments
    )
    task = language_task(
        "stdlib-lm",
        stdlib(),
        SIZES[settings.size],
        workers=settings.workers,
        batch_size=8,
        split=iid,
        seed=settings.seed,
        tuning=True,
    )
    known = json.loads(settings.out.read_text()) if settings.out.exists() else {}
    names = sorted(settings.methods, key=lambda name: name != BASE)
    for name in names:
        most = settings.steps if name == BASE else int(settings.most * settings.steps)
        target = None if name == BASE else known[BASE]["loss"]
        tried: dict[str, Any] = {}
        for rate in settings.rates:
            tried[f"{rate:g}"] = run(
                racing(name), task, rate, settings, most=most, target=target
            )
        order = lambda rate, tried=tried: (
            tried[rate]["steps"] or np.inf,
            tried[rate]["loss"],
        )
        best = min(tried, key=order)
        known[name] = {"rate": float(best), **tried[best], "tried": tried}
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        with records.atomic(settings.out) as beside:
            beside.write_text(json.dumps(records.plain(known), indent=1) + "\n")
        Console().print(
            name, {rate: tuple(one.values()) for rate, one in tried.items()}
        )
    return 0


def run(
    recipe: Recipe,
    task: Any,
    rate: float,
    settings: Settings,
    *,
    most: int,
    target: float | None,
) -> dict[str, Any]:
    """Steps to the target, None if it is not reached, and the last loss."""
    workers = settings.workers
    tx = recipe.make(optax.adamw(rate), workers)
    step = lc.counted_step(task.loss, tx, workers=workers)
    consensus = jax.jit(lc.spread(lc.consensus))
    params = lc.stack(task.init(jax.random.key(settings.seed)), workers)
    state, loss = lc.init(tx, params), np.nan
    for t in range(most):
        params, state, _, _ = step(params, state, task.batches(t), t)
        if (t + 1) % settings.every == 0:
            model = lc.unstack(consensus(state, params))
            loss = task.evaluate(model)["loss"]
            if not np.isfinite(loss):
                break
            if target is not None and loss <= target:
                return {"steps": t + 1, "loss": loss}
    return {"steps": most if target is None else None, "loss": loss}


if __name__ == "__main__":
    sys.exit(main())
