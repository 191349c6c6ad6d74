"""Train one method on one task: ``python -m experiments.run --help``.

A live table shows loss, bytes, syncs and steps per second. Written to the output
folder: ``log.jsonl`` as it happens, checkpoints from which ``--resume`` goes on, and at
the end ``results.json``, the figure ``curve.png`` and ``.svg`` and the last checkpoint.
Language models write a few lines at the end.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from lowcomm.checkpoint import Checkpoints

from . import plots, records
from .catalogue import CATALOGUE
from .measure import SCALAR, Measurement, Where, measure
from .names import lookup
from .settings import Common, check, fixed, learning_rate, task, transformation
from .stopping import Kept, Stopped, stop_requests
from .task import Task

PROMPT = {"stdlib-lm": "def ", "kjv-lm": "In the beginning "}


@dataclass(frozen=True)
class Settings(Common):
    """Train one method, watch it, and keep it."""

    method: str = "diloco"
    """A name of the catalogue."""
    seed: int = 0
    """Of the first parameters, the split and the order of the examples."""
    log_every: int = 10
    """Steps from line to line of the log."""
    samples: int = 2
    """Texts that a language model writes at the end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; 0, or 1 where the loss stopped being finite, 2 where asked wrongly.

    130 on Ctrl-C and 143 on SIGTERM, after saving: ``--resume`` goes on.
    """
    settings = tyro.cli(Settings, prog="python -m experiments.run", args=arguments)
    console, errors = Console(), Console(stderr=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = settings.out or Path("runs", f"{settings.method}-{stamp}")
    try:
        lookup(CATALOGUE, settings.method, "method")
        where = check(settings, counts=("log_every",))
        transformation(settings, settings.method)  # raises before data are touched
        learned = task(settings, settings.seed)
        asked = fixed(settings) | {"data": learned.name}
        with records.open_run(folder, asked, resume=settings.resume) as run:
            made = train(settings, learned, where, run, console)
            if made.failure:
                errors.print(f"{settings.method} failed: {made.failure}")
                return 1
            samples = _samples(settings, learned, made.model)
            results = _results(settings, learned, made, samples)
            # Results last: a run that has them is finished.
            figure, _ = plots.figure(results, run.path / results["figure"])
            records.finish(run, results)
    except (ValueError, OSError, RuntimeError) as problem:
        errors.print(f"[bold red]error:[/] {escape(str(problem))}", soft_wrap=True)
        return 2
    except (KeyboardInterrupt, Stopped) as stop:
        errors.print(
            f"{stop or 'stopped'}; go on with --out {folder} --resume", soft_wrap=True
        )
        return getattr(stop, "exit_code", 130)
    for text in samples:
        console.print(Panel(escape(text), title="sample", title_align="left"))
    console.print(f"figure: {figure}", soft_wrap=True, highlight=False)
    return 0


def train(
    settings: Settings,
    learned: Task,
    where: Where,
    run: records.RunFolder,
    console: Console,
) -> Measurement:
    """Train under a live table; raises ``Stopped`` where a signal asks for it."""
    with contextlib.ExitStack() as stack:
        request = stack.enter_context(stop_requests())
        folder = run.path / records.CHECKPOINTS
        kept = stack.enter_context(Checkpoints(folder, settings=fixed(settings)))
        watch = Watch(settings, run, console)
        if kept.steps():
            watch.go_on(kept.about().notes)
        if console.is_terminal:
            stack.enter_context(Live(get_renderable=watch.table, console=console))
        return measure(
            learned,
            transformation(settings, settings.method),
            where=where,
            steps=settings.steps,
            seed=settings.seed,
            evaluations=settings.evaluations,
            on_evaluation=watch.on_evaluation,
            on_step=watch.on_step,
            kept=Kept(kept, settings.save_every, request, at_the_end=True),
        )


class Watch:
    """What is shown and logged while a run goes on."""

    def __init__(self, settings: Settings, run: records.RunFolder, console: Console):
        """Of a run that begins."""
        self.settings, self.run, self.console = settings, run, console
        self.step = self.sent = self.syncs = 0
        self.loss, self.held_out = np.nan, {}
        self.times: list[float] = []  # when the last steps ended

    def go_on(self, seen: dict[str, Any]) -> None:
        """Of a run of which so much was seen before."""
        self.step, self.sent = len(seen["payload"]), sum(seen["payload"])
        self.syncs = sum(sent > SCALAR for sent in seen["payload"])
        self.held_out = seen["found"][-1]

    def on_step(self, t: int, loss: float, sent: int) -> None:
        """After every step: its number, mean training loss and payload bytes."""
        # Smoothed over about ten steps; the first one as it is.
        self.loss = loss if np.isnan(self.loss) else 0.9 * self.loss + 0.1 * loss
        self.step, self.sent = t + 1, self.sent + sent
        self.syncs += sent > SCALAR
        self.times = [*self.times[-20:], time.perf_counter()]
        if self.step % self.settings.log_every == 0:
            record = {"step": self.step, "training_loss": loss, "bytes": self.sent}
            record |= {"syncs": self.syncs, "steps_per_second": self.pace}
            records.append(self.run, {"event": "step", **record})

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """After every evaluation."""
        records.append(self.run, {"event": "evaluation", **record})
        others = ("step", "training_loss")
        self.held_out = {k: v for k, v in record.items() if k not in others}
        if not self.console.is_terminal:
            text = "  ".join(f"{name} {value}" for name, value in self.row().items())
            self.console.print(text, soft_wrap=True, highlight=False)

    @property
    def pace(self) -> float:
        """Steps per second, over the last twenty."""
        if len(self.times) < 2:
            return np.nan
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])

    def row(self) -> dict[str, str]:
        """What the table shows."""
        known = lambda x, form: "-" if np.isnan(x) else f"{x:{form}}"
        shown = {"step": f"{self.step}/{self.settings.steps}"}
        shown["training loss"] = known(self.loss, ".3f")
        shown |= {name: known(value, ".3f") for name, value in self.held_out.items()}
        shown |= {"payload": decimal(self.sent), "syncs": str(self.syncs)}
        return shown | {"steps/s": known(self.pace, ".1f")}

    def table(self) -> Table:
        """The table of this moment."""
        name = f"{self.settings.method} on {self.settings.task}"
        drawn = Table(title=name, title_justify="left", title_style="bold")
        for column in (row := self.row()):
            drawn.add_column(column, justify="right", no_wrap=True)
        drawn.add_row(*row.values())
        return drawn


def _samples(settings: Settings, learned: Task, model: Any) -> list[str]:
    if learned.sample is None:
        return []
    prompt, key = PROMPT[settings.task], jax.random.key(settings.seed)
    keys = [jax.random.fold_in(key, i) for i in range(settings.samples)]
    return [learned.sample(model, prompt, key=key) for key in keys]


def _results(
    settings: Settings, learned: Task, made: Measurement, samples: list[str]
) -> dict[str, Any]:
    """What the figure and ``results.json`` hold: a comparison of one method."""
    of_seed = {"bytes": made.bytes, "seconds": made.seconds, **made.metrics}
    return {
        "title": f"{settings.method} on {learned.name}",
        "subtitle": f"{settings.workers} workers, link of {settings.bandwidth}/s and "
        f"{settings.latency}",
        "figure": "curve",
        "settings": fixed(settings),
        "methods": {
            settings.method: {
                "learning_rate": learning_rate(settings, settings.method),
                "steps": made.steps,
                "syncs": [made.syncs],
                "step_seconds": [made.step_seconds],
                **{name: [values] for name, values in of_seed.items()},
            }
        },
        "samples": samples,
    }


if __name__ == "__main__":
    sys.exit(main())
