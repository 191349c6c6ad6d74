"""One figure for a comparison: the same losses against three prices.

Against steps a frugal method may look worse than a lavish one; against the bytes that
a worker sends, or the seconds that a link needs, the order turns. The figure is a
function of ``results.json`` alone: ``python -m experiments.plots FOLDER`` draws it
again.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

from .records import RESULTS, atomic

# Paul Tol's "muted" scheme: nine colours that stay apart for colour-blind readers.
COLOURS = (
    *("#CC6677", "#332288", "#117733", "#88CCEE", "#882255"),
    *("#DDAA33", "#44AA99", "#AA4499", "#999933"),
)
BASELINE, BASELINE_COLOUR = "data_parallel", "#222222"
INK, FAINT = "#333333", "#E4E4E4"

STYLE: Any = {
    "font.family": "DejaVu Sans",  # shipped with matplotlib: the same on any machine
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": "#666666",
    "ytick.color": "#666666",
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "svg.hashsalt": "lowcomm",  # element names in the SVG come from it, not from chance
}


class _Curve(NamedTuple):
    name: str
    colour: str
    dashes: Any
    x: dict[str, np.ndarray]  # price -> [points], mean over seeds
    loss: np.ndarray  # [seeds, points]


def figure(results: Mapping[str, Any], path: Path | str) -> tuple[Path, Path]:
    """Draw loss against steps, bytes and seconds to ``path`` with .png and .svg.

    ``results["methods"]`` maps a method's name to ``steps`` ``[points]`` and ``loss``,
    ``bytes`` and ``seconds`` ``[seeds, points]``, bytes being payload per worker. A
    line is the mean over seeds, its band runs from the least to the greatest. Both
    files are replaced whole; the same results give the same SVG byte for byte.

    Raises ``ValueError`` where there is no method to draw.
    """
    if not results["methods"]:
        raise ValueError("there is nothing to draw: results hold no method")
    curves = _curves(results["methods"])
    with mpl.rc_context(STYLE):
        drawn = _draw(curves, results)
        stem = Path(path)
        stem = stem.with_suffix("") if stem.suffix in {".png", ".svg"} else stem
        places = tuple(stem.with_name(stem.name + end) for end in (".png", ".svg"))
        for place in places:
            undated = {"Date": None} if place.suffix == ".svg" else None
            with atomic(place) as beside:
                drawn.savefig(beside, dpi=200, metadata=undated)
    return places[0], places[1]


def _curves(methods: Mapping[str, Any]) -> list[_Curve]:
    """Best final loss first; colours follow the order of asking."""
    curves = []
    others = [name for name in methods if name != BASELINE]
    for name, method in methods.items():
        loss = np.atleast_2d(np.array(method["loss"], float))
        if name == BASELINE:
            colour, dashes = BASELINE_COLOUR, (0, (4, 1.6))
        else:
            turn, place = divmod(others.index(name), len(COLOURS))
            colour, dashes = COLOURS[place], ("-", (0, (1, 1)), (0, (6, 2)))[turn % 3]
        prices = {
            price: np.atleast_2d(np.array(method[price], float)).mean(0)
            for price in ("steps", "bytes", "seconds")
        }
        curves.append(_Curve(name, colour, dashes, prices, loss))
    # A loss that is not a number ends the list.
    return sorted(curves, key=lambda c: np.nan_to_num(c.loss[:, -1].mean(), nan=np.inf))


def _draw(curves: list[_Curve], results: Mapping[str, Any]) -> Figure:
    drawn = Figure(figsize=(12.6, 4.5), facecolor="white")
    panels = drawn.subplots(1, 3, sharey=True)
    labels = {
        "steps": "steps",
        "bytes": "payload sent per worker",
        "seconds": "predicted time",
    }
    for panel, (price, label) in zip(panels, labels.items(), strict=True):
        for order, curve in enumerate(curves):
            _line(panel, curve, price, order=len(curves) - order)
        panel.set_xlabel(label)
        panel.grid(color=FAINT, linewidth=0.7)
        if price != "steps" and panel.lines:
            panel.set_xscale("log")
    panels[1].xaxis.set_major_formatter(EngFormatter(unit="B", sep=" "))
    panels[2].xaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{t:g} s"))
    _loss_axis(panels[0], np.concatenate([curve.loss.ravel() for curve in curves]))
    _titles(drawn, panels, results)
    _legend(drawn, curves)
    drawn.subplots_adjust(left=0.055, right=0.815, bottom=0.125, top=0.81, wspace=0.09)
    return drawn


def _line(panel: Axes, curve: _Curve, price: str, *, order: int) -> None:
    x = curve.x[price]
    # On a logarithmic axis there is no place for nothing sent yet; where any seed
    # diverged a mean of the others would flatter.
    shown = np.isfinite(curve.loss.mean(0)) & ((x > 0) | (price == "steps"))
    if not shown.any():
        return
    x, loss = x[shown], curve.loss[:, shown]
    panel.plot(
        x,
        loss.mean(0),
        color=curve.colour,
        linestyle=curve.dashes,
        linewidth=1.7,
        zorder=3 + order,
    )
    panel.plot(
        x[-1:],
        loss.mean(0)[-1:],
        "o",
        markersize=4.5,
        markeredgecolor="white",
        markeredgewidth=0.8,
        color=curve.colour,
        zorder=30 + order,
    )
    if len(loss) > 1:
        panel.fill_between(
            x, loss.min(0), loss.max(0), color=curve.colour, alpha=0.16, linewidth=0
        )


def _loss_axis(panel: Axes, losses: np.ndarray) -> None:
    panel.set_ylabel("held-out loss")
    positive = losses[np.isfinite(losses) & (losses > 0)]
    if not positive.size:
        return
    panel.set_yscale("log")
    if positive.max() < 1e3 * positive.min():
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _titles(drawn: Figure, panels: Any, results: Mapping[str, Any]) -> None:
    for panel, title in zip(
        panels, ("per step", "per byte", "per second"), strict=True
    ):
        panel.set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=7)
    drawn.text(
        *(0.055, 0.945), results.get("title", ""), fontsize=13.5, fontweight="bold"
    )
    drawn.text(*(0.055, 0.895), results.get("subtitle", ""), color="#777777")


def _legend(drawn: Figure, curves: list[_Curve]) -> None:
    handles = [
        Line2D([], [], color=curve.colour, linestyle=curve.dashes, linewidth=2.2)
        for curve in curves
    ]
    names = [f"{curve.loss[:, -1].mean():#.3g}  {curve.name}" for curve in curves]
    drawn.legend(
        handles,
        names,
        title="final loss, best first",
        alignment="left",
        loc="upper left",
        bbox_to_anchor=(0.825, 0.83),
        frameon=False,
        handlelength=2.2,
        labelspacing=0.55,
    )


def main() -> None:
    """Draw the figure of a finished run again."""
    folder = Path(sys.argv[1])
    results = json.loads((folder / RESULTS).read_text())
    print(figure(results, folder / results.get("figure", "comparison"))[0])


if __name__ == "__main__":
    main()
