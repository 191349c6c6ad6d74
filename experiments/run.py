"""Train one method on one task: ``python -m experiments.run --help``.

A live table shows loss, bytes, syncs and steps per second. Written to the output
folder: ``log.jsonl`` as it happens, checkpoints from which ``--resume`` goes on, and at
the end ``results.json``, the figure ``curve.png`` and ``.svg`` and the last checkpoint.
Language models write a few lines at the end.

With ``--processes N`` it starts as many processes here, which share the workers out.
Where a cluster starts them (``srun``, ``mpirun``, a JobSet, every host of a TPU pod),
the same program joins the others by itself. The first one writes; the training loss
that it shows and logs is that of its own workers, all else is of all.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

import lowcomm as lc
from lowcomm.agreement import Disagreement, gathered, together
from lowcomm.checkpoint import Checkpoints
from lowcomm.jobs import COORDINATOR, leave

from . import plots, records
from .catalogue import CATALOGUE
from .launch import LAUNCHED, end_with_launcher, launch
from .measure import SCALAR, Measurement, Where, measure
from .names import lookup
from .settings import (
    Common,
    check,
    fixed,
    learning_rate,
    place,
    share,
    task,
    transformation,
)
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
    processes: int = 1
    """How many to start here, each with its share of the workers and devices."""
    resize: bool = False
    """Go on, with --resume, with another number of --workers than the run had; how many
    examples each takes, --batch-size, may then change as well."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; 0, or 1 where the loss stopped being finite, 2 where asked wrongly.

    On SIGTERM 0 and on Ctrl-C 130, after saving: ``--resume`` goes on. Of several
    processes the code is that of the first that failed.
    """
    settings = tyro.cli(Settings, prog="python -m experiments.run", args=arguments)
    console, errors = Console(), Console(stderr=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = settings.out or Path("runs", f"{settings.method}-{stamp}")
    try:
        lookup(CATALOGUE, settings.method, "method")
        check(settings, counts=("log_every", "processes"))
        if settings.resize and not settings.resume:
            raise ValueError("--resize is for a run that is gone on with: add --resume")
        if settings.processes > 1 and COORDINATOR not in os.environ:
            return _launched(settings, folder, arguments)
        end_with_launcher()
        if (processes := lc.join()) > 1:
            share(settings, processes)  # raises before JAX starts
            settings = replace(settings, backend="shard_map")
        where = place(settings, processes=processes)
        folder = Path(gathered(str(folder))[0]) if processes > 1 else folder
        if jax.process_index() > 0:
            console = Console(quiet=True)
        with contextlib.ExitStack() as stack:
            with together():
                transformation(settings, settings.method)  # before data are touched
                learned = task(settings, settings.seed)
                asked = fixed(settings) | {"data": learned.name}
                run = stack.enter_context(_opened(folder, asked, settings))
            made = train(settings, learned, where, run, console)
            if made.failure:
                errors.print(f"{settings.method} failed: {made.failure}")
                return 1
            if jax.process_index() > 0:
                return 0
            samples = _samples(settings, learned, made.model)
            results = _results(settings, learned, made, samples)
            # Results last: a run that has them is finished.
            figure, _ = plots.figure(results, run.path / results["figure"])
            records.finish(run, results)
    except FloatingPointError as failure:  # on the workers of this process
        errors.print(f"{settings.method} failed: {failure}", soft_wrap=True)
        return 1
    except jax.errors.JaxRuntimeError as problem:
        lost = f"{problem}".partition("\n")[0]
        errors.print(f"[bold red]error:[/] {escape(lost)}", soft_wrap=True)
        return 1
    except (ValueError, OSError, RuntimeError) as problem:
        # What all of them know the first one says, to all who read one output.
        apart = LAUNCHED not in os.environ or jax.process_index() == 0
        if not isinstance(problem, Disagreement) or apart:
            errors.print(f"[bold red]error:[/] {escape(str(problem))}", soft_wrap=True)
        return 2
    except (KeyboardInterrupt, Stopped) as stop:
        if not isinstance(stop, Stopped) or jax.process_index() == 0:
            errors.print(
                f"{str(stop) or 'stopped'}; go on with --out {folder} --resume",
                soft_wrap=True,
            )
        if isinstance(stop, Stopped) and jax.distributed.is_initialized():
            jax.distributed.shutdown()  # with the others, which have stopped as well
        return getattr(stop, "exit_code", 130)
    for text in samples:
        console.print(Panel(escape(text), title="sample", title_align="left"))
    console.print(f"figure: {figure}", soft_wrap=True, highlight=False)
    return 0


def _launched(settings: Settings, folder: Path, arguments: Sequence[str] | None) -> int:
    """The exit code of processes started here, which all know the folder."""
    given = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, "-m", "experiments.run", *given, "--out", str(folder)]
    devices = share(settings, settings.processes)
    return launch(command, settings.processes, devices=devices)


@contextlib.contextmanager
def _opened(
    folder: Path, asked: Mapping[str, Any], settings: Settings
) -> Iterator[records.RunFolder]:
    """The run's folder, which the first of several processes alone writes to."""
    if jax.process_index() == 0:
        how = {"resume": settings.resume, "free": _free(settings)}
        with records.open_run(folder, asked, **how) as run:
            yield run
        return
    with open(os.devnull, "w") as nowhere:
        yield records.RunFolder(folder, nowhere, [])


def train(
    settings: Settings,
    learned: Task,
    where: Where,
    run: records.RunFolder,
    console: Console,
) -> Measurement:
    """Train under a live table; raises ``Stopped`` where a signal asks for it."""
    with contextlib.ExitStack() as stack:
        several = where.processes > 1
        request = stack.enter_context(stop_requests(together=several))
        folder = run.path / records.CHECKPOINTS
        with together():
            if not (run.path / records.LOG).exists():
                raise FileNotFoundError(
                    f"it does not see {run.path}: --out must be in a folder that all "
                    "processes share"
                )
            saved = Checkpoints(folder, settings=fixed(settings), free=_free(settings))
            kept = stack.enter_context(saved)
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
            kept=Kept(kept, settings.save_every, request, True, settings.resize),
        )


def _free(settings: Settings) -> tuple[str, ...]:
    """Which settings the run so far may have had otherwise."""
    return ("workers", "batch_size") if settings.resize else ()


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
        mine = " here" if jax.process_count() > 1 else ""  # others see others
        shown[f"training loss{mine}"] = known(self.loss, ".3f")
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
    leave(main())
