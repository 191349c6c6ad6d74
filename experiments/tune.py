"""Learning rates for the catalogue: ``python -m experiments.tune --help``.

A grid for every method on the task of the comparison, on a ladder of rates in steps of
1, 2, 5. Where the best rate lies at an end of the grid the ladder goes on. A rate is
scored by the mean over seeds of the final loss on a tuning split, so that neither its
examples nor the seeds are those of the comparison: images taken from the training set,
windows of held-out text that the comparison is not judged by. The tables are kept in
``experiments/results``, method by method; methods that are not asked for keep their
entry.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import lowcomm as lc

from . import data, language, models, records
from .catalogue import CATALOGUE
from .measure import Where, measure, shared_compilations
from .names import lookup
from .splits import iid
from .task import Task
from .tasks import image_task
from .transformer import SIZES

FOLDER = Path(__file__).parent / "results"
LADDER = tuple(
    float(f"{digit}e{power}") for power in range(-4, 2) for digit in (1, 2, 5)
)


@dataclass(frozen=True)
class Settings:
    """Choose a learning rate for methods of the catalogue.

    On mnist-mixer with SGD and momentum, on a language model with AdamW.
    """

    task: Literal["mnist-mixer", "stdlib-lm", "kjv-lm"] = "mnist-mixer"
    algorithms: str = "all"
    """Names of the catalogue with commas between them, or "all"."""
    rates: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.5)
    """Where to begin; each must be 1, 2 or 5 times a power of ten."""
    workers: int = 8
    steps: int = 320
    seeds: tuple[int, ...] = (100, 101)
    batch_size: int = 32
    momentum: float = 0.9
    """Of SGD."""
    fraction: float = 0.05
    """Share of the entries that top_k_sgd sends."""
    backend: Literal["vmap", "shard_map"] = "vmap"
    out: Path | None = None
    """Default: experiments/results/tuning-TASK.json."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune, print and record."""
    settings = tyro.cli(Settings, prog="python -m experiments.tune", args=arguments)
    names = list(CATALOGUE)
    if settings.algorithms != "all":
        names = [name.strip() for name in settings.algorithms.split(",")]
    for name in names:
        lookup(CATALOGUE, name, "method")
    if settings.backend == "shard_map":
        jax.config.update("jax_num_cpu_devices", settings.workers)
    tasks = {seed: _task(settings, seed) for seed in settings.seeds}
    out = settings.out or FOLDER / f"tuning-{settings.task}.json"
    console = Console()
    with shared_compilations():
        for name in names:
            entry = tune(
                lambda rate, name=name: _losses(settings, tasks, name, rate),
                settings.rates,
            )
            asked = asdict(settings)
            del asked["algorithms"], asked["out"]
            entry["settings"] = {**asked, "period": CATALOGUE[name].period}
            _record(out, name, entry)
            console.print(f"{name}: {entry['learning_rate']:g}")
    console.print(table(json.loads(out.read_text())["methods"]))
    return 0


def tune(
    losses: Callable[[float], list[float]], rates: Sequence[float]
) -> dict[str, Any]:
    """The best rate of the ladder, walking on from ``rates`` while an end is best.

    ``losses(rate)`` are the final losses, one a seed; NaN is worst.

    Example:
        >>> found = tune(lambda rate: [abs(rate - 1.0)], rates=(0.1, 0.2))
        >>> found["learning_rate"], sorted(found["losses"])
        (1.0, ['0.1', '0.2', '0.5', '1', '2'])
    """
    score: dict[float, float] = {}
    tried: dict[str, list[float]] = {}

    def try_(rate: float) -> None:
        tried[f"{rate:g}"] = losses(rate)
        mean = float(np.mean(tried[f"{rate:g}"]))
        score[rate] = mean if math.isfinite(mean) else math.inf

    for rate in rates:
        try_(rate)
    while True:
        best = min(score, key=lambda rate: score[rate])
        place = LADDER.index(best)
        beside = [LADDER[i] for i in (place - 1, place + 1) if 0 <= i < len(LADDER)]
        missing = [rate for rate in beside if rate not in score]
        if not missing:
            return {"learning_rate": best, "losses": tried}
        for rate in missing:
            try_(rate)


def table(methods: dict[str, Any]) -> Table:
    """Mean loss on the tuning split, by method and rate; the best in bold."""
    rates = sorted({float(r) for entry in methods.values() for r in entry["losses"]})
    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    drawn.add_column("method", no_wrap=True)
    for rate in rates:
        drawn.add_column(f"{rate:g}", justify="right", no_wrap=True)
    for name, entry in methods.items():
        cells = []
        for rate in rates:
            losses = entry["losses"].get(f"{rate:g}")
            diverged = losses is not None and None in losses
            text = (
                "" if losses is None else "-" if diverged else f"{np.mean(losses):.3f}"
            )
            best = rate == entry["learning_rate"]
            cells.append(f"[bold]{text}[/]" if best else text)
        drawn.add_row(name, *cells)
    return drawn


def _task(settings: Settings, seed: int) -> Task:
    """The task, judged by a tuning split."""
    how: Any = {"workers": settings.workers, "batch_size": settings.batch_size}
    how |= {"split": iid, "seed": seed}
    name = f"{settings.task}, tuning split"
    if settings.task in language.CORPORA:
        corpus, model = language.CORPORA[settings.task](), SIZES["0.5m"]
        return language.language_task(name, corpus, model, tuning=True, **how)
    dataset = data.tuning_split(data.mnist())
    return image_task(name, dataset, models.PatchMixer(), **how)


def _losses(
    settings: Settings, tasks: dict[int, Task], name: str, rate: float
) -> list[float]:
    # A rate that is part of the state leaves the program the same for all rates.
    if settings.task in language.CORPORA:
        inner = optax.inject_hyperparams(optax.adamw)(learning_rate=rate)
    else:
        inner = optax.inject_hyperparams(optax.sgd)(
            learning_rate=rate, momentum=settings.momentum
        )
    tx = CATALOGUE[name].make(
        workers=settings.workers,
        steps=settings.steps,
        learning_rate=rate,
        inner=inner,
        fraction=settings.fraction,
    )
    mesh = lc.worker_mesh(settings.workers) if settings.backend != "vmap" else None
    where = Where(settings.workers, lc.Link(1e9), mesh, settings.backend, compute=0.0)
    return [
        float(
            measure(
                task, tx, where=where, steps=settings.steps, seed=seed, evaluations=1
            ).metrics["loss"][-1]
        )
        for seed, task in tasks.items()
    ]


def _record(path: Path, name: str, entry: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {"methods": {}}
    methods = {**known["methods"], name: {**entry, "versions": records.versions()}}
    with records.atomic(path) as beside:
        text = json.dumps(records.plain({"methods": methods}), indent=1)
        beside.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
