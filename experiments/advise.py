"""Which method to run on a link, and why: ``python -m experiments.advise --help``.

    python -m experiments.advise --bandwidth 50Mbit --latency 20ms \\
        --parameters 3e6 --workers 8 --compute 20ms

Nothing is trained. Bytes are read from the methods themselves, seconds are predicted;
what a method costs in loss only a run of ``experiments.compare`` tells.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import lowcomm as lc
from lowcomm.network import parse_latency
from lowcomm.planning.advice import Advice, Option, advise


@dataclass(frozen=True)
class Settings:
    """Which method to run on a link, and why."""

    parameters: float = 3e6
    """How many the model has."""
    workers: int = 8
    compute: str = "20ms"
    """Time of a step without any communication."""
    bandwidth: str = "100Mbit"
    """Of the link between workers, per second."""
    latency: str = "20ms"
    """Of the link, one way."""
    overhead: str = "0s"
    """Of every message, while its sender is busy."""
    payload: float = 1.0
    """Share of the bandwidth that is left for the payload."""
    efficiency: float = 0.8
    """The wanted share of the time that is computing."""
    steps: int | None = None
    """Of the whole run: in a short one an outer momentum does not pay off."""
    overlap: bool = True
    """Whether transfers can hide behind computing; on CPUs they cannot."""
    collectives: Literal["best", "ring", "tree", "gloo"] = "best"
    """How all-reduces and gathers are done: the cheapest way, or one of these."""
    all: bool = False
    """Show every period, not only the first that is efficient enough, and no notes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0, or 2 where it was asked for wrongly."""
    settings = tyro.cli(Settings, prog="python -m experiments.advise", args=arguments)
    try:
        advice = asked(settings)
    except ValueError as problem:
        Console(stderr=True).print(
            f"[bold red]error:[/] {escape(str(problem))}", soft_wrap=True
        )
        return 2
    console = Console()
    console.print(table(advice, settings))
    for option in options(advice, settings):
        if option.caution and not settings.all:
            text = f"{option.method}: {option.caution}"
            console.print(text, soft_wrap=True, highlight=False, style="dim")
    console.print(advice.reason, soft_wrap=True, highlight=False)
    return 0


def asked(settings: Settings) -> Advice:
    """The advice that was asked for."""
    try:
        compute = parse_latency(settings.compute)
        overhead = parse_latency(settings.overhead)
    except ValueError as problem:
        raise ValueError(str(problem).replace("latency", "time", 1)) from None
    link = lc.Link.parse(settings.bandwidth, settings.latency)
    return advise(
        settings.parameters,
        link=lc.Link(link.bandwidth, link.latency, overhead, settings.payload),
        workers=settings.workers,
        compute=compute,
        efficiency=settings.efficiency,
        steps=settings.steps,
        overlap=settings.overlap,
        algorithm=settings.collectives,
    )


def options(advice: Advice, settings: Settings) -> Sequence[Option]:
    """What is shown."""
    return advice.options if settings.all else advice.shown()


def table(advice: Advice, settings: Settings) -> Table:
    """For the terminal."""
    drawn = Table(
        title=f"{settings.parameters:.3g} parameters, {settings.workers} workers, "
        f"{settings.compute} a step, link of {settings.bandwidth}/s and "
        f"{settings.latency}",
        caption="H: steps from exchange to exchange; fewer: bytes a step than "
        "data-parallel's; waits, coding: a step, on average; computes: share of the "
        "time; faster: than data-parallel",
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    head, *rows = advice.rows(options(advice, settings))
    kept = [i for i, name in enumerate(head) if name not in ("", "exchange", "caution")]
    for i in kept:
        drawn.add_column(
            head[i], justify="left" if head[i] == "method" else "right", no_wrap=True
        )
    for row in rows:
        drawn.add_row(*(row[i] for i in kept), style="bold green" if row[0] else None)
    return drawn


if __name__ == "__main__":
    sys.exit(main())
