"""Compile methods for a machine that is not here: ``python -m experiments.targets``.

    python -m experiments.targets --target v5e:4x4 --slices 2 --method diloco
    python -m experiments.targets --target v6e:16x16 --slices 4 --out FOLDER
    python -m experiments.targets --target h100:1x4 --slices 2 --method diloco,top_k_sgd

Says what each kind of step sends between slices and inside, whether that is what the
formulas say, what it needs of a device's memory, and which transfers of a round are
hidden. Ends with an error where a method says otherwise, or cannot be compiled.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from .. import language
from ..catalogue import CATALOGUE
from ..names import lookup
from ..splits import iid
from ..task import Task
from ..tasks import make_task
from ..transformer import SIZES, LanguageModel
from . import tables
from .chips import Target, parse
from .clusters import cluster, environment
from .programs import check_divides
from .reports import Report, report

# Beside those that are trained here: shapes, which only a compiler sees.
SHAPES = {
    "0.1m": LanguageModel(width=64, layers=1, heads=2),
    **SIZES,
    "150m": LanguageModel(width=1024, layers=12, heads=16),
    "1b": LanguageModel(width=2048, layers=24, heads=16),
}


@dataclass(frozen=True)
class Settings:
    """What is compiled, and for what."""

    target: str = "v5e:4x4"
    """A chip and the topology of a slice: v4:2x2x2, v5e:4x4, v5p:4x4x4, v6e:16x16, or
    hosts x GPUs for h100:1x4."""
    slices: int = 2
    """How many of them."""
    workers_per_slice: int = 1
    """The devices of a slice are shared out among so many workers."""
    method: str = "all"
    """Names of the catalogue, with commas between them."""
    task: str = "stdlib-lm"
    """As for experiments.run."""
    size: str = "0.5m"
    """Of a language model: 0.1m, 0.5m, 3m, 150m or 1b parameters."""
    length: int = 64
    """Bytes a language model reads at once."""
    batch: int = 1
    """Examples for each device."""
    period: int = 4
    """Steps from sync to sync."""
    few: bool = False
    """Only the last step of a round and the two that follow it."""
    rounds: bool = True
    """Also compile a round as one program, and see what it hides."""
    hiding: bool = False
    """Count a method as it should be only if its round hides all it sends."""
    out: Path | None = None
    """A folder for the results, as JSON and as a table."""


def main(settings: Settings | None = None) -> int:
    """Compile and report; how many methods are not as they should be."""
    settings = tyro.cli(Settings) if settings is None else settings
    environment()
    console = Console()
    plain: Any = {"highlight": False, "soft_wrap": True}
    target = parse(settings.target, settings.slices)
    names = list(CATALOGUE) if settings.method == "all" else settings.method.split(",")
    for name in names:
        lookup(CATALOGUE, name, "method")
    place = None if settings.out is None else tables.free(settings.out, target)
    devices = cluster(target)
    check_divides(target, settings.workers_per_slice)
    task = make(settings, target)
    began, reports = time.perf_counter(), []
    for name in names:
        began_one = time.perf_counter()
        try:
            found = report(
                name,
                task,
                devices,
                few=settings.few,
                rounds=settings.rounds,
                per_slice=settings.workers_per_slice,
                period=settings.period,
            )
        except ValueError as problem:  # such as TooLarge
            found = Report(name, reason=str(problem))
        reports.append(found)
        spent = time.perf_counter() - began_one
        console.print(f"{tables.line(found)} [{spent:.1f} s]", **plain)
    seconds = time.perf_counter() - began
    if place is not None:
        where = tables.write(place, settings, target, task.name, reports, seconds)
        console.print(f"written to {where}", **plain)
    fine = lambda found: found.agrees and (found.hides or not settings.hiding)
    odd = [found.name for found in reports if not fine(found)]
    console.print(
        f"{len(reports) - len(odd)} methods as they should be, {len(odd)} not"
        + (f": {', '.join(odd)}" if odd else "")
        + f" ({seconds:.0f} s)",
        **plain,
    )
    return len(odd)


def make(settings: Settings, target: Target) -> Task:
    """The task for the workers of a target; of a language model the shapes alone."""
    workers = target.slices * settings.workers_per_slice
    each = settings.batch * target.devices // settings.workers_per_slice
    how: Any = {"workers": workers, "batch_size": each, "length": settings.length}
    if settings.task not in language.CORPORA:
        return make_task(settings.task, **how)
    model = lookup(SHAPES, settings.size, "size of language model")
    corpus = language.CORPORA[settings.task]()
    return language.language_task(settings.task, corpus, model, split=iid, **how)


if __name__ == "__main__":
    try:
        sys.exit(main() > 0)
    except (ValueError, ImportError, RuntimeError, OSError) as problem:
        sys.exit(f"error: {problem}")
