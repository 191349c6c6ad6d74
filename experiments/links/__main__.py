"""Bytes and seconds of methods on shaped links: ``python -m experiments.links --help``.

Hosts are shaped to one rate after the other. On each, raw transfers and single
collectives are timed, from these and from rounds on links that are not shaped the
seconds of a round of each method are predicted, and rounds are run and timed, with the
kernel's counters read before and after. Rounds on both kinds of link take turns, since
how fast such a machine computes is not the same from minute to minute.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console

from experiments import records
from experiments.names import lookup
from lowcomm.network import parse_bandwidth

from . import calibration, tables
from .hosts import network, shape
from .job import Job
from .measuring import calibrate, idle, observe, obtained
from .methods import TIMED
from .namespaces import SKIPPED, enter, why_not


@dataclass(frozen=True)
class Settings:
    """Measure methods on links between hosts of this machine; Linux, as root."""

    processes: int = 2
    """Hosts, each with one process and one worker."""
    rate: tuple[str, ...] = ("20Mbit", "50Mbit", "200Mbit", "1Gbit")
    """Of every host's link, each way; one after the other."""
    methods: tuple[str, ...] = tuple(TIMED)
    task: Literal["stdlib-lm", "kjv-lm", "toy"] = "stdlib-lm"
    """What is trained; toy compiles at once."""
    size: str = "0.5m"
    """Of the language model: 0.5m or 3m parameters."""
    seconds: float = 3.0
    """At least so long are the rounds of a method at a rate, and at least five; rounds
    on links that are not shaped are as many."""
    out: Path = tables.FOLDER
    """Folder for the tables, of which those of the same name are replaced."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and record; 77 where there can be no shaped link."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    settings = tyro.cli(Settings, prog="python -m experiments.links", args=given)
    try:
        for name in settings.methods:
            lookup(TIMED, name, "method")
        if settings.processes < 2:
            raise ValueError("--processes must be 2 or more: one host talks to nobody")
        rates = [parse_bandwidth(text) for text in settings.rate]
        if not rates or not settings.methods:
            raise ValueError("give a --rate and one of the --methods at least")
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if reason := why_not():
        print(f"no shaped link here: {reason}", file=sys.stderr)
        return SKIPPED
    enter("experiments.links", given)
    found = measure(settings, rates)
    name = f"{settings.task}-{settings.processes}"
    tables.write(settings.out, name, found, tables.markdown(found))
    tables.show(found, Console())
    return 0


def measure(settings: Settings, rates: Sequence[float]) -> dict[str, Any]:
    """Everything that is written down."""
    console = Console(stderr=True)
    with network(settings.processes) as hosts, Job(hosts) as job:
        readings = {}
        for name in settings.methods:
            readings[name] = job.ask(
                "prepare", method=name, task=settings.task, size=settings.size
            )[0]
            console.print(f"{name} is ready")
        of_steps = [calibration.found_by(one["steps"]) for one in readings.values()]
        wanted = sorted({name for steps in of_steps for step in steps for name in step})
        background = idle(job)
        found: dict[float | None, Any] = {}
        for rate in (None, *rates):
            shape(hosts, rate)
            raw, links = obtained(job, rate), calibrate(job, rate, wanted)
            found[rate] = {
                "asked": rate,
                "obtained": raw,
                "links": calibration.written(links),
            }
            if rate is None:
                free = links
                continue
            of_methods = found[rate]["methods"] = {}
            for name, reading in readings.items():
                sending = functools.partial(shape, hosts)
                how = background, rate, settings.seconds
                seen = observe(job, name, reading, *how, shape=sending)
                steps, n = reading["steps"], len(hosts)
                alone = calibration.computing(seen["unshaped"], steps, free, n)
                talking = calibration.talking(steps, links, n)
                more = {"computing": alone, "predicted": alone + talking}
                of_methods[name] = seen | more
            console.print(f"{rate:g} is done")
    return {
        "settings": tables.without_places(settings),
        "versions": records.versions(),
        "background": background,
        "readings": readings,
        "unshaped": found.pop(None),
        "rates": {f"{rate:g}": at for rate, at in found.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
