"""Compare methods on one task: ``python -m experiments.compare --help``.

Every method trains the same model on the same batches from the same start, seed by
seed. Bytes are counted while running, seconds are predicted for the given link from the
collectives that ran. Written to the output folder: ``log.jsonl`` as it happens,
``results.json`` and the figure ``comparison.png`` and ``.svg`` at the end.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from rich.table import Table

import lowcomm as lc
from lowcomm.network import parse_latency

from . import plots, records
from .catalogue import CATALOGUE
from .measure import Measurement, Where, measure, shared_compilations
from .names import lookup
from .splits import find_split
from .tasks import TASKS, Task, make_task


@dataclass(frozen=True)
class Settings:
    """Train one task with several methods and compare loss, bytes and seconds."""

    task: str = "mnist-mixer"
    """One of mnist-mixer, mnist-cnn, fashion-mixer, fashion-cnn, digits,
    least-squares."""
    algorithms: str = "all"
    """Names of the catalogue with commas between them, or "all"."""
    workers: int = 8
    steps: int = 320
    seeds: int = 2
    """How many runs of each method: seeds 0, 1, ..."""
    batch_size: int = 32
    """Examples a worker takes in a step."""
    split: str = "iid"
    """How examples go to workers: iid, sorted or dirichlet."""
    alpha: float = 0.5
    """Concentration of the dirichlet split; small is uneven."""
    heterogeneity: float = 1.0
    """How far least-squares workers disagree."""
    bandwidth: str = "100Mbit"
    """Of the imagined link, per second."""
    latency: str = "20ms"
    """Of the imagined link, one way."""
    compute: str | None = None
    """Time of a step without its traffic, such as 5ms; measured here by default, where
    all workers share this machine."""
    learning_rate: float | None = None
    """For all methods, instead of the rate each was tuned to."""
    fraction: float = 0.05
    """Share of the entries that top_k_sgd sends."""
    evaluations: int = 20
    """Points of a curve."""
    backend: Literal["vmap", "shard_map", "pmap"] = "vmap"
    """Virtual workers, or one device each (simulated on a CPU)."""
    out: Path | None = None
    """Folder for the output, without another run in it; default: a new one in runs/."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; 0, or 2 where it was asked for wrongly, 130 on Ctrl-C."""
    settings = tyro.cli(Settings, prog="python -m experiments.compare", args=arguments)
    console, errors = Console(), Console(stderr=True)
    folder = settings.out or Path(
        "runs", f"{settings.task}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    with contextlib.ExitStack() as stack:
        try:
            names, where = _checked(settings)
            run = stack.enter_context(records.open_run(folder))
            tasks = [_task(settings, seed) for seed in range(settings.seeds)]
        except (ValueError, OSError) as problem:
            errors.print(f"[bold red]error:[/] {escape(str(problem))}", soft_wrap=True)
            return 2
        try:
            results = compare(settings, names, tasks, where, run, console)
        except KeyboardInterrupt:
            errors.print(f"stopped; {folder} keeps what was written", soft_wrap=True)
            return 130
        records.finish(run, results)
        failed = _failures(results)
        if len(failed) < len(names):
            figure, _ = plots.figure(results, run.path / "comparison")
    console.print(table(results))
    for name, failure in failed.items():
        console.print(f"{name} failed: {failure}", soft_wrap=True, highlight=False)
    if len(failed) == len(names):
        return 1
    console.print(f"figure: {figure}", soft_wrap=True, highlight=False)
    return 0


def compare(
    settings: Settings,
    names: Sequence[str],
    tasks: Sequence[Task],
    where: Where,
    run: records.RunFolder,
    console: Console,
) -> dict[str, Any]:
    """Train every method on the task of every seed; what goes into the results."""
    seeds = range(len(tasks))
    stamp = {"event": "start", "settings": settings, "versions": records.versions()}
    records.append(run, stamp)
    points = min(settings.evaluations, settings.steps) + 1
    methods = {}
    with shared_compilations(), _progress(console) as progress:
        bar = progress.add_task("", total=len(names) * len(seeds) * points)
        for done, name in enumerate(names):
            found = []
            for seed, task in zip(seeds, tasks, strict=True):
                about = {"method": name, "seed": seed}
                completed = (done * len(seeds) + seed) * points
                description = f"{name} [dim]seed {seed}[/]"
                progress.update(bar, description=description, completed=completed)

                def on_evaluation(record, about=about):
                    records.append(run, {"event": "evaluation", **about, **record})
                    progress.advance(bar)

                found.append(_measure(settings, name, task, where, seed, on_evaluation))
                last = {"event": "run", **about, **found[-1]._asdict()}
                records.append(run, last)
            methods[name] = _method(settings, name, found)
        progress.update(bar, description="", completed=len(names) * len(seeds) * points)
    model = jax.eval_shape(tasks[0].init, jax.random.key(0))
    dense = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model))
    return {
        "title": f"{settings.task} on {settings.workers} workers",
        "subtitle": _subtitle(settings),
        "settings": settings,
        "seeds": list(seeds),
        "data_parallel_bytes": settings.steps * dense,
        "methods": methods,
    }


def table(results: Mapping[str, Any]) -> Table:
    """One row for each method, from what ``results.json`` holds."""
    drawn = Table(
        title=results["title"],
        caption=f"{results['subtitle']}\npayload: what a worker hands to its "
        "collectives; fewer: than data-parallel's; time: predicted on the link; "
        "steps/s: measured here, without compilation",
        caption_justify="left",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    drawn.add_column("method", style="bold", no_wrap=True)
    metrics = [
        metric
        for metric in ("loss", "accuracy", "distance")
        if all(metric in method for method in results["methods"].values())
    ]
    for column in (*metrics, "syncs", "payload", "fewer", "time", "steps/s"):
        drawn.add_column(column, justify="right", no_wrap=True)
    for name, method in results["methods"].items():
        if name in _failures(results):
            drawn.add_row(name, "[red]failed[/]")
            continue
        sent = np.mean([seed[-1] for seed in method["bytes"]])
        seconds = np.mean([seed[-1] for seed in method["seconds"]])
        drawn.add_row(
            name,
            *(_spread(m, [seed[-1] for seed in method[m]]) for m in metrics),
            f"{np.mean(method['syncs']):.0f}",
            decimal(int(sent)),
            f"{results['data_parallel_bytes'] / sent:.1f} x" if sent else "-",
            f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.1f} s",
            f"{1 / np.mean(method['step_seconds']):.0f}",
        )
    return drawn


def _failures(results: Mapping[str, Any]) -> dict[str, str]:
    """Why methods failed, by name; the first seed that did."""
    found = {
        name: [text for text in method["failure"] if text]
        for name, method in results["methods"].items()
    }
    return {name: texts[0] for name, texts in found.items() if texts}


def _checked(settings: Settings) -> tuple[list[str], Where]:
    """The methods and the place, after refusing what cannot run; touches no data."""
    names = (
        list(CATALOGUE)
        if settings.algorithms == "all"
        else [name.strip() for name in settings.algorithms.split(",")]
    )
    for name in names:
        lookup(CATALOGUE, name, "method")
    if len(set(names)) < len(names):
        raise ValueError(f"a method is named twice in {settings.algorithms}")
    lookup(dict.fromkeys(TASKS), settings.task, "task")
    find_split(settings.split, alpha=settings.alpha)
    for count in ("workers", "steps", "seeds", "batch_size", "evaluations"):
        if getattr(settings, count) < 1:
            option = "--" + count.replace("_", "-")
            raise ValueError(
                f"{option} must be at least 1, not {getattr(settings, count)}"
            )
    link = lc.Link.parse(settings.bandwidth, settings.latency)
    try:
        compute = None if settings.compute is None else parse_latency(settings.compute)
    except ValueError:
        raise ValueError(
            f"--compute {settings.compute!r}: write seconds such as '5ms'."
        ) from None
    mesh = None
    if settings.backend != "vmap":
        # Only before the backend starts; after that the mesh says what is missing.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", settings.workers)
        mesh = lc.worker_mesh(settings.workers)
    for name in names:
        _transformation(settings, name)  # raises before anything is trained
    return names, Where(settings.workers, link, mesh, settings.backend, compute)


def _task(settings: Settings, seed: int) -> Task:
    return make_task(
        settings.task,
        workers=settings.workers,
        batch_size=settings.batch_size,
        split=settings.split,
        alpha=settings.alpha,
        heterogeneity=settings.heterogeneity,
        seed=seed,
    )


def _transformation(settings: Settings, name: str) -> Any:
    return CATALOGUE[name].make(
        workers=settings.workers,
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        fraction=settings.fraction,
    )


def _measure(
    settings: Settings,
    name: str,
    task: Task,
    where: Where,
    seed: int,
    on_evaluation: Callable[[dict[str, Any]], None],
) -> Measurement:
    return measure(
        task,
        _transformation(settings, name),
        where=where,
        steps=settings.steps,
        seed=seed,
        evaluations=settings.evaluations,
        on_evaluation=on_evaluation,
    )


def _method(settings: Settings, name: str, runs: list[Measurement]) -> dict[str, Any]:
    """The runs of all seeds side by side."""
    method = CATALOGUE[name]
    rate = settings.learning_rate
    return {
        "learning_rate": method.learning_rate if rate is None else rate,
        "steps": runs[0].steps,
        **{key: [run.metrics[key] for run in runs] for key in runs[0].metrics},
        **{
            key: [getattr(run, key) for run in runs]
            for key in ("bytes", "seconds", "syncs", "step_seconds", "failure")
        },
    }


def _subtitle(settings: Settings) -> str:
    split = settings.split + f"({settings.alpha})" * (settings.split == "dirichlet")
    return ", ".join(
        (
            f"{settings.steps} steps",
            f"{settings.batch_size} examples a worker and step, {split}",
            f"link of {settings.bandwidth}/s and {settings.latency}",
            f"mean and range of {settings.seeds} seeds" if settings.seeds > 1 else "",
        )
    ).removesuffix(", ")


def _spread(metric: str, values: Sequence[float]) -> str:
    """The mean, and half the distance from the least to the greatest."""
    mean, half = np.mean(values), np.ptp(values) / 2
    if metric == "accuracy":
        mean, half = 100 * mean, 100 * half
    form = ".1f" if metric == "accuracy" else ".3f" if abs(mean) >= 1e-3 else ".0e"
    return f"{mean:{form}} ± {half:{form}}" if len(values) > 1 else f"{mean:{form}}"


def _progress(console: Console) -> Progress:
    columns = ("[progress.description]{task.description}", BarColumn(bar_width=None))
    return Progress(*columns, TimeElapsedColumn(), console=console)


if __name__ == "__main__":
    sys.exit(main())
