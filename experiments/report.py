"""The page that says which claims held; made from the results alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .papers import KEYS, paper
from .trials import interval

HEAD = """# What was reproduced

This page is written by `python -m experiments.reproduce` from the files in
`experiments/results/` and is not edited by hand. Each claim is a published one; each
setting is ours and small, so that a verdict says whether the *mechanism* shows at that
scale, not whether the paper's own numbers are right. Learning rates are chosen for each
method on a grid by examples (for local SGD's speed-up, by seeds) that nothing else
uses; intervals are 95 % over seeds (Student's t). Every comparison
holds the simplest baseline at equal bytes.

"""


def page(folder: Path, *, results: str = "results/") -> str:
    """The whole page, of the results in a folder; ``results`` leads to it from there.

    Where it leads nowhere, the page lies beside them.
    """
    found = {key: _load(folder, key) for key in KEYS}
    found = {key: each for key, each in found.items() if each}
    lines = [HEAD, "| paper | claim | our setting | measured | verdict |"]
    lines += ["|---|---|---|---|---|"]
    for key, each in found.items():
        module, verdict = paper(key), each["verdict"]
        cells = (
            f"[{module.TITLE}](#{key})",
            _line(module.CLAIM),
            _line(module.SETTING),
            _line(verdict["measured"]),
            f"**{verdict['status']}**",
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += [_section(key, each, results) for key, each in found.items()]
    return "\n".join(lines).rstrip() + "\n"


def _section(key: str, results: Mapping[str, Any], here: str) -> str:
    module = paper(key)
    lines = [f'\n<a id="{key}"></a>\n\n## {module.TITLE}\n', f"{module.REFERENCE}\n"]
    trained = {n: c for n, c in results["cells"].items() if "final" in c}
    if trained:
        lines += [
            "| run | chosen rate | held-out loss, or what is named | bytes, relative "
            "to data-parallel |",
            "|---|---|---|---|",
        ]
    for name, cell in trained.items():
        mark = " (baseline)" if name in module.BASELINES else ""
        edge = " (end of the grid)" if cell["at_the_edge"] else ""
        share = f"{cell['relative_bytes']:.3g}"
        rate = f"{cell['rate']:g}{edge}"
        lines.append(f"| {name}{mark} | {rate} | {_outcome(cell)} | {share} |")
    seeds = sorted({s for c in results["cells"].values() for s in c.get("seeds", ())})
    versions = ", ".join(
        f"{package} {results['versions'][package]}" for package in ("jax", "optax")
    )
    lines += [
        f"\n![{module.TITLE}]({here}{key}.png)\n",
        f"Seeds {', '.join(map(str, seeds)) or 'none: nothing is drawn'}; {versions}; "
        f"[numbers]({here}{key}.json), [source](papers/{key}.py).",
    ]
    return "\n".join(lines)


def _outcome(cell: Mapping[str, Any]) -> str:
    """The loss, or the first thing that was measured in its stead."""
    final = cell["final"]
    name = "loss" if "loss" in final else next(iter(final))
    return f"{interval(final[name])}{'' if name == 'loss' else f' {name}'}"


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _load(folder: Path, key: str) -> dict[str, Any] | None:
    path = folder / f"{key}.json"
    return json.loads(path.read_text()) if path.exists() else None
