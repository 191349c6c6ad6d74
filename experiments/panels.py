"""Panels of the figures that go with a reproduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .plots import COLOURS, FAINT, STYLE
from .records import atomic

STYLES = ("-", (0, (4, 1.6)), (0, (1, 1)), (0, (6, 2, 1, 2)))


def drawn(draw: Any, found: Mapping[str, Any], path: Path) -> None:
    """``draw(found, figure)`` on a blank figure, saved as PNG."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.4), facecolor="white", layout="constrained")
        draw(found, figure)
        with atomic(path) as beside:
            figure.savefig(beside, dpi=110, metadata={"Software": None})


def lines(
    panel: Axes,
    curves: Mapping[str, tuple[Sequence[float], Any]],
    *,
    x: str,
    y: str,
    log: str = "",
    legend: bool = True,
) -> None:
    """Name -> ``(x [points], y [seeds, points])``: the mean, and from least to most.

    ``log`` names the axes that are logarithmic: "", "x", "y" or "xy".
    """
    for i, (name, (at, values)) in enumerate(curves.items()):
        y_of = np.atleast_2d(np.asarray(values, float))
        colour = COLOURS[i % len(COLOURS)]
        style: Any = STYLES[i // len(COLOURS) % len(STYLES)]
        shown = np.isfinite(y_of).all(0)
        at, y_of = np.asarray(at, float)[shown], y_of[:, shown]
        panel.plot(
            *(at, y_of.mean(0)),
            color=colour,
            linestyle=style,
            marker="o" if len(at) < 12 else None,
            markersize=3.5,
            linewidth=1.6,
            label=name,
        )
        if len(y_of) > 1:
            low, high = y_of.min(0), y_of.max(0)
            panel.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(color=FAINT, linewidth=0.7)
    if "x" in log:
        panel.set_xscale("log")
    if "y" in log:
        panel.set_yscale("log")
    if legend:
        panel.legend(frameon=False, fontsize=7.5)


def bars(
    panel: Axes, named: Mapping[str, Sequence[float]], *, y: str, least: float = 0.0
) -> None:
    """Name -> one value a seed: the mean as a bar, every seed as a dot."""
    names = list(named)
    for i, name in enumerate(names):
        each = np.asarray(named[name], float)
        colour = COLOURS[i % len(COLOURS)]
        panel.bar(i, each.mean() - least, bottom=least, color=colour, alpha=0.55)
        panel.plot([i] * len(each), each, "o", color=colour, markersize=3.5)
    panel.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=7.5)
    panel.set_ylabel(y)
    panel.grid(axis="y", color=FAINT, linewidth=0.7)


def curve(cell: Mapping[str, Any], name: str = "loss") -> tuple[list, list]:
    """What a cell's metric did over its steps, for ``lines``."""
    return cell["step"], cell["curves"][name]
