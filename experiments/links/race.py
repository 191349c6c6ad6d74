"""Time to a loss on a shaped link: ``python -m experiments.links.race --help``.

Data-parallel training takes its steps first, and the held-out loss it ends with is what
all others have to reach, at rates that ``experiments.links.tune`` has chosen. Who will
win is said before: the steps that a method took there, times the seconds of a step that
``lowcomm.advise`` expects on the link as it was measured. Seconds
are those of the clock on the wall, which stands only while the consensus is evaluated.
With ``--torch`` the same model, batches and optimizer also run in PyTorch's
DistributedDataParallel, on the same link.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console

import lowcomm as lc
from experiments import records
from experiments.transformer import SIZES
from lowcomm.network import parse_bandwidth
from lowcomm.planning.candidates import PERIODS

from . import ddp_file
from .calibration import ALGORITHM
from .hosts import Host, network, shape
from .job import Job
from .measuring import calibrate, obtained, rounds
from .methods import racing
from .namespaces import SCRATCH, SKIPPED, enter, why_not
from .tables import FOLDER, as_markdown, without_places, write
from .training import task_of
from .tune import BASE, RACERS, TUNED

DDP = "PyTorch DDP"


@dataclass(frozen=True)
class Settings:
    """Race methods to the loss of data-parallel training on a shaped link."""

    processes: int = 2
    rate: str = "50Mbit"
    """Of every host's link, each way."""
    methods: tuple[str, ...] = RACERS[1:]
    """Families of lowcomm.advise, with a period where they have one: "diloco / 30"."""
    steps: int = 200
    """Of data-parallel training."""
    most: float = 3.0
    """How many times as many steps another method may take."""
    every: int = 10
    """Steps from evaluation to evaluation."""
    seeds: tuple[int, ...] = (0, 1)
    task: str = "stdlib-lm"
    size: str = "0.5m"
    torch: Path | None = None
    """A Python that has PyTorch, to race it as well."""
    tuned: Path = TUNED
    """Rates, as experiments.links.tune writes them."""
    out: Path = FOLDER


def main(arguments: Sequence[str] | None = None) -> int:
    """Race, print and record; 77 where there can be no shaped link."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    settings = tyro.cli(Settings, prog="python -m experiments.links.race", args=given)
    try:
        rate = parse_bandwidth(settings.rate)
        tuned = json.loads(settings.tuned.read_text())
        for name in (BASE, *settings.methods):
            racing(name)
            if name not in tuned:
                raise ValueError(
                    f"{settings.tuned} has no rate for {name!r}: run python -m "
                    f'experiments.links.tune --methods {BASE} "{name}"'
                )
    except (ValueError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if reason := why_not():
        print(f"no shaped link here: {reason}", file=sys.stderr)
        return SKIPPED
    enter("experiments.links.race", given)
    found = measure(settings, rate, tuned)
    name = f"race-{settings.task}-{settings.processes}"
    write(settings.out, name, found, markdown(found))
    Console().print(markdown(found))
    return 0


def measure(settings: Settings, rate: float, tuned: dict[str, Any]) -> dict[str, Any]:
    """Curves of all methods and seeds."""
    console = Console(stderr=True)
    curves: dict[str, list[Any]] = {}
    common: dict[str, Any] = {"task": settings.task, "size": settings.size}

    def race(job: Job, name: str, seed: int, target: float | None) -> list[Any]:
        share = settings.most if target is not None else 1
        curve = job.ask(
            "race",
            patience=1200,
            method=name,
            seed=seed,
            rate=tuned[name]["rate"],
            most=int(share * settings.steps),
            every=settings.every,
            target=target,
            **common,
        )[0]
        last = curve[-1]
        console.print(
            f"{name}, seed {seed}: {last['loss']:.3f} after {last['step']} steps, "
            f"{last['seconds']:.1f} s"
        )
        return curve

    with network(settings.processes) as hosts:
        with Job(hosts) as job:
            job.ask("prepare", method=BASE, **common)
            unshaped = float(np.median(rounds(job, BASE, 20)))
            shape(hosts, rate)
            raw, links = obtained(job, rate), calibrate(job, rate, ["all_reduce"])
            about = settings, links["all_reduce"], unshaped
            # Others may take longer than data-parallel training.
            most = int(settings.most * settings.steps)
            advice = _advice(*about, steps=most)
            periods = {racing(name).period for name in settings.methods} - {1}
            raced = _advice(*about, periods=sorted(periods) or PERIODS).options
            console.print(advice.table())
            for seed in settings.seeds:
                curves.setdefault(BASE, []).append(race(job, BASE, seed, None))
                target = curves[BASE][-1][-1]["loss"]
                for name in settings.methods:
                    curve = race(job, name, seed, target)
                    curves.setdefault(name, []).append(curve)
        if settings.torch is not None:
            for i, seed in enumerate(settings.seeds):
                target = curves[BASE][i][-1]["loss"]
                curve = _torch(settings, hosts, seed, tuned[BASE]["rate"], target)
                curves.setdefault(DDP, []).append(curve)
                console.print(f"{DDP}, seed {seed}: {curve[-1]}")
    expected = {
        name: _expected(raced, name, tuned[name]["steps"])
        for name in (BASE, *settings.methods)
    }
    known = {name: seconds for name, seconds in expected.items() if seconds}
    return {
        "settings": without_places(settings),
        "versions": records.versions(),
        "asked": rate,
        "obtained": raw,
        "computing": unshaped,
        "advice": advice.reason,
        "expected": expected,
        "chosen": min(known, key=lambda name: known[name]),
        "rates": {name: tuned[name]["rate"] for name in (BASE, *settings.methods)},
        "targets": [curve[-1]["loss"] for curve in curves[BASE]],
        "curves": curves,
    }


def _advice(settings: Settings, link: lc.Link, computing: float, **choice: Any) -> Any:
    """What lowcomm advises for the link as it was measured."""
    task = task_of(settings.task, settings.size, settings.processes, 0)
    return lc.advise(
        jax.eval_shape(task.init, jax.random.key(0)),
        link=link,
        workers=settings.processes,
        compute=computing,
        overlap=False,
        algorithm=ALGORITHM,
        **choice,
    )


def _expected(options: Any, name: str, steps: int | None) -> float | None:
    """Seconds until the loss, or None where tuning never got there."""
    if steps is None:
        return None
    family, period = name.partition("/")[0].strip(), racing(name).period
    return steps * next(
        option.seconds
        for option in options
        if (option.method, option.period) == (family, period)
    )


def _torch(
    settings: Settings, hosts: Sequence[Host], seed: int, rate: float, target: float
) -> list[Any]:
    """The curve of PyTorch's DistributedDataParallel."""
    task = task_of(settings.task, settings.size, settings.processes, seed)
    with tempfile.TemporaryDirectory(prefix="lowcomm-links-", dir=SCRATCH) as folder:
        path = Path(folder) / "training.npz"
        # Twice as many steps: it need not reach the very same loss after as many.
        ddp_file.save(
            path, task, SIZES[settings.size].heads, seed=seed, steps=2 * settings.steps
        )
        command = [str(settings.torch), str(Path(__file__).with_name("ddp.py"))]
        with Job(hosts, command) as job:
            return job.ask(
                "race",
                patience=1200,
                path=str(path),
                every=settings.every,
                target=target,
                rate=rate,
            )[0]


def markdown(found: dict[str, Any]) -> str:
    """The table: when each method was at the loss, and how many times sooner."""
    base = [curve[-1]["seconds"] for curve in found["curves"][BASE]]
    lines = []
    for name, curves in found["curves"].items():
        ends = [curve[-1] for curve in curves]
        pairs = list(zip(ends, found["targets"], strict=True))
        reached = all(end["loss"] <= target for end, target in pairs)
        sooner = [b / end["seconds"] for b, end in zip(base, ends, strict=True)]
        expected = found["expected"].get(name)
        each = lambda show, ends=ends: " / ".join(map(show, ends))
        lines.append(
            (
                f"**{name}**" if name == found["chosen"] else name,
                each(lambda end: f"{end['loss']:.3f}"),
                each(lambda end: str(end["step"])),
                each(lambda end: f"{1e3 * end['seconds'] / end['step']:.1f} ms"),
                f"{expected:.1f} s" if expected else "",
                each(lambda end: f"{end['seconds']:.1f} s"),
                f"{np.mean(sooner):.1f} ×" if reached else "not reached",
            )
        )
    heads = ("method", "loss", "steps", "a step", "expected", "took", "sooner")
    targets = " / ".join(f"{target:.3f}" for target in found["targets"])
    return (
        f"Time to the held-out loss of data-parallel training ({targets}) on a link of "
        f"{found['asked'] / 1e6:g} Mbit/s, seed by seed. The one that was expected to "
        f"be first is in bold.\n\n{as_markdown(heads, lines)}\n\n"
        f"Advice without any run: {found['advice']}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
