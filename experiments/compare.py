"""Compare methods on one task: ``python -m experiments.compare --help``.

Every method trains the same model on the same batches from the same start, seed by
seed. Bytes are counted while running, seconds are predicted for the given link from the
collectives that ran. Written to the output folder: ``log.jsonl`` as it happens,
``results.json`` and the figure ``comparison.png`` and ``.svg`` at the end, and
checkpoints of the method at work, from which ``--resume`` goes on.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from rich.table import Table

from lowcomm.checkpoint import Checkpoints

from . import plots, records
from .catalogue import CATALOGUE
from .measure import Measurement, Where, measure, shared_compilations
from .names import lookup
from .settings import (
    Common,
    check,
    examples,
    fixed,
    learning_rate,
    place,
    task,
    transformation,
    tuned,
)
from .stopping import Kept, Request, Stopped, stop_requests
from .task import Task


@dataclass(frozen=True)
class Settings(Common):
    """Train one task with several methods and compare loss, bytes and seconds."""

    algorithms: str = "all"
    """Names of the catalogue with commas between them, or "all"."""
    seeds: int = 2
    """How many runs of each method: seeds 0, 1, ..."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; 0, or 2 where it was asked for wrongly.

    130 on Ctrl-C, and 0 on SIGTERM: what was written goes on with ``--resume``.
    """
    settings = tyro.cli(Settings, prog="python -m experiments.compare", args=arguments)
    console, errors = Console(), Console(stderr=True)
    folder = settings.out or Path(
        "runs", f"{settings.task}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    try:
        names, where = _checked(settings)
        tasks = [task(settings, seed) for seed in range(settings.seeds)]
        asked = fixed(settings) | {"data": tasks[0].name}
        with records.open_run(folder, asked, resume=settings.resume) as run:
            results = compare(settings, names, tasks, where, run, console)
            failed = _failures(results)
            # Results last: a run that has them is finished.
            if len(failed) < len(names):
                figure, _ = plots.figure(results, run.path / "comparison")
            records.finish(run, results)
            with contextlib.suppress(OSError):  # of a run whose checkpoints are gone
                (run.path / records.CHECKPOINTS).rmdir()
    except (ValueError, OSError, RuntimeError) as problem:
        errors.print(f"[bold red]error:[/] {escape(str(problem))}", soft_wrap=True)
        return 2
    except (KeyboardInterrupt, Stopped) as stop:
        errors.print(
            f"stopped; {folder} keeps what was written: go on with --out {folder} "
            "--resume",
            soft_wrap=True,
        )
        return getattr(stop, "exit_code", 130)
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
    points = min(settings.evaluations, settings.steps) + 1
    done = {(r["method"], r["seed"]): r for r in run.before if r.get("event") == "run"}
    methods = {}
    with (
        stop_requests() as request,
        shared_compilations(),
        _progress(console) as progress,
    ):
        bar = progress.add_task("", total=len(names) * len(seeds) * points)
        for place, name in enumerate(names):
            found = []
            for seed in seeds:
                about = {"method": name, "seed": seed}
                completed = (place * len(seeds) + seed) * points
                description = f"{name} [dim]seed {seed}[/]"
                progress.update(bar, description=description, completed=completed)
                last = done.get((name, seed))
                if last is None:

                    def on_evaluation(record, about=about):
                        records.append(run, {"event": "evaluation", **about, **record})
                        progress.advance(bar)

                    made = _measure(
                        settings, about, tasks[seed], where, run, request, on_evaluation
                    )
                    last = {
                        "event": "run",
                        **about,
                        **made._replace(model=None)._asdict(),
                    }
                    records.append(run, last)
                    shutil.rmtree(_kept_in(run, about), ignore_errors=True)
                found.append(records.plain(last))
            methods[name] = _method(settings, name, found)
        progress.update(bar, description="", completed=len(names) * len(seeds) * points)
    model = jax.eval_shape(tasks[0].init, jax.random.key(0))
    dense = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model))
    return {
        "title": f"{tasks[0].name} on {settings.workers} workers",
        "subtitle": _subtitle(settings),
        "settings": fixed(settings),
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
        for metric in ("loss", "perplexity", "accuracy", "distance")
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
        tuned(settings)
        if settings.algorithms == "all"
        else [name.strip() for name in settings.algorithms.split(",")]
    )
    for name in names:
        lookup(CATALOGUE, name, "method")
    if len(set(names)) < len(names):
        raise ValueError(f"a method is named twice in {settings.algorithms}")
    check(settings, counts=("seeds",))
    for name in names:
        transformation(settings, name)  # raises before anything is trained
    return names, place(settings)


def _kept_in(run: records.RunFolder, about: Mapping[str, Any]) -> Path:
    return run.path / records.CHECKPOINTS / f"{about['method']}-{about['seed']}"


def _measure(
    settings: Settings,
    about: Mapping[str, Any],
    task: Task,
    where: Where,
    run: records.RunFolder,
    request: Request,
    on_evaluation: Callable[[dict[str, Any]], None],
) -> Measurement:
    asked = fixed(settings) | dict(about)
    with Checkpoints(_kept_in(run, about), keep=1, settings=asked) as checkpoints:
        return measure(
            task,
            transformation(settings, about["method"]),
            where=where,
            steps=settings.steps,
            seed=about["seed"],
            evaluations=settings.evaluations,
            on_evaluation=on_evaluation,
            kept=Kept(checkpoints, settings.save_every, request),
        )


def _method(settings: Settings, name: str, runs: list[dict]) -> dict[str, Any]:
    """The runs of all seeds side by side, as the log has them."""
    keys = ("bytes", "seconds", "syncs", "step_seconds", "failure")
    side_by_side = {key: [run[key] for run in runs] for key in keys}
    metrics = {m: [run["metrics"][m] for run in runs] for m in runs[0]["metrics"]}
    return {
        "learning_rate": learning_rate(settings, name),
        "steps": runs[0]["steps"],
        **metrics,
        **side_by_side,
    }


def _subtitle(settings: Settings) -> str:
    split = settings.split + f"({settings.alpha})" * (settings.split == "dirichlet")
    return ", ".join(
        (
            f"{settings.steps} steps",
            f"{examples(settings)} examples a worker and step, {split}",
            f"link of {settings.bandwidth}/s and {settings.latency}",
            f"mean and range of {settings.seeds} seeds" if settings.seeds > 1 else "",
        )
    ).removesuffix(", ")


def _spread(metric: str, values: Sequence[float]) -> str:
    """The mean, and half the distance from the least to the greatest."""
    mean, half = np.mean(values), np.ptp(values) / 2
    if metric == "accuracy":
        mean, half = 100 * mean, 100 * half
    coarse = metric in ("accuracy", "perplexity")
    form = ".1f" if coarse else ".3f" if abs(mean) >= 1e-3 else ".0e"
    return f"{mean:{form}} ± {half:{form}}" if len(values) > 1 else f"{mean:{form}}"


def _progress(console: Console) -> Progress:
    columns = ("[progress.description]{task.description}", BarColumn(bar_width=None))
    return Progress(*columns, TimeElapsedColumn(), console=console)


if __name__ == "__main__":
    sys.exit(main())
