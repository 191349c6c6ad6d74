"""The tables of a measurement, for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments import records

FOLDER = Path(__file__).parents[1] / "results" / "links"
BYTES = ("method", "formula", "compiled", "meter", "wire", "kernel", "off by at most")
SECONDS = ("method", "link", "round", "spread", "predicted", "error")


def bytes_of(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Bytes a worker in a round, method by method; the kernel's over all rates."""
    lines = []
    for name, reading in found["readings"].items():
        timed = [at["methods"][name] for at in found["rates"].values()]
        kernel = np.mean([one["kernel"] for one in timed])
        whole = [f"{reading[what]:,}" for what in ("formula", "compiled", "meter")]
        off = max(one["kernel_off"] for one in timed)
        sent = [f"{reading['wire']:,.0f}", f"{kernel:,.0f}"]
        lines.append((name, *whole, *sent, f"{100 * off:.2f} %"))
    return lines


def seconds_of(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Seconds of a round, method by method and rate by rate."""
    lines = []
    for name in found["readings"]:
        for at in found["rates"].values():
            one = at["methods"][name]
            low, high = np.percentile(one["seconds"], [10, 90])
            error = one["predicted"] / one["median"] - 1
            lines.append(
                (
                    name,
                    f"{at['asked'] / 1e6:g} Mbit/s",
                    _time(one["median"]),
                    f"{_time(low)} to {_time(high)}",
                    _time(one["predicted"]),
                    f"{100 * error:+.1f} %",
                )
            )
    return lines


def errors(found: Mapping[str, Any]) -> np.ndarray:
    """Relative errors of all predictions."""
    return np.array(
        [
            abs(one["predicted"] / one["median"] - 1)
            for at in found["rates"].values()
            for one in at["methods"].values()
        ]
    )


def links_of(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """What was found of the links, rate by rate."""
    lines = []
    for at in (found["unshaped"], *found["rates"].values()):
        asked = "no limit" if at["asked"] is None else f"{at['asked'] / 1e6:g} Mbit/s"
        of = [
            f"{1e3 * link['latency']:.2f} ms, {link['bandwidth'] / 1e6:.4g} Mbit/s"
            for link in at["links"].values()
        ]
        lines.append((asked, f"{at['obtained'] / 1e6:.4g} Mbit/s", *of))
    return lines


def markdown(found: Mapping[str, Any]) -> str:
    """All tables, and how far off the predictions were."""
    heads = ("asked", "one connection", *found["unshaped"]["links"])
    parts = [
        "Bytes that a worker hands over in a round: by formula, in the compiled "
        "program, counted while running, expected on the wire, counted by the kernel.",
        as_markdown(BYTES, bytes_of(found)),
        "Seconds of a round: median, 10th to 90th percentile, predicted.",
        as_markdown(SECONDS, seconds_of(found)),
        summary(found),
        "The links: latency and pace of each collective, from probes of their own.",
        as_markdown(heads, links_of(found)),
    ]
    return "\n\n".join(parts) + "\n"


def summary(found: Mapping[str, Any]) -> str:
    """One line on all predictions."""
    off = errors(found)
    if not off.size:
        return "No shaped link was measured."
    return (
        f"Predicted seconds are off by {100 * np.median(off):.1f} % in the median and "
        f"{100 * off.max():.1f} % at most, in {off.size} cases."
    )


def without_places(settings: Any) -> dict[str, Any]:
    """Settings that numbers depend on: all but the paths of this machine."""
    known = dataclasses.asdict(settings)
    return {k: v for k, v in known.items() if not isinstance(v, Path | None)}


def write(folder: Path, name: str, found: Mapping[str, Any], text: str) -> None:
    """Put what was found and its tables into a folder, in place of those before."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = json.dumps(records.plain(found), indent=1, allow_nan=False) + "\n"
    for suffix, content in (("json", numbers), ("md", text)):
        with records.atomic(folder / f"{name}.{suffix}") as beside:
            beside.write_text(content)


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print all tables."""
    for heads, lines in ((BYTES, bytes_of(found)), (SECONDS, seconds_of(found))):
        drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for i, head in enumerate(heads):
            drawn.add_column(head, justify="right" if i else "left", no_wrap=True)
        for line in lines:
            drawn.add_row(*line)
        console.print(drawn)
    console.print(summary(found))


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def as_markdown(heads: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    rows = [heads, tuple("---" for _ in heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
