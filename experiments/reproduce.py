"""Check what papers claim, on small problems, and write down what came of it.

    python -m experiments.reproduce KEY...      the papers of these names
    python -m experiments.reproduce --all       all of them
    python -m experiments.reproduce --all --quick

A full run writes ``experiments/results/KEY.json`` and ``KEY.png`` and then
``experiments/REPRODUCTION.md`` anew; a quick one, with fewer seeds and steps, writes to
``runs/reproduce-quick``. What is computed is kept cell by cell, so that a run which was
stopped goes on where it was; what is complete is not run again unless ``--again`` says
so.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from . import panels, records, report
from .measure import shared_compilations
from .names import lookup
from .papers import KEYS, Scale, paper

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Settings:
    """Which papers, and how much."""

    keys: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of papers; see --list."""
    all: bool = False
    """Every paper."""
    list: bool = False
    """Print the names and stop."""
    quick: bool = False
    """Fewer seeds, steps and rates."""
    again: bool = False
    """Also what is complete; the old results go."""
    jobs: int = 2
    """Papers at once, each in a process of its own."""
    out: Path | None = None
    """Folder; default: experiments/results, or runs/reproduce-quick."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing; 0, or 2 where it was asked for wrongly, 130 on Ctrl-C."""
    settings = tyro.cli(
        Settings, prog="python -m experiments.reproduce", args=arguments
    )
    console, errors = Console(), Console(stderr=True)
    if settings.list:
        console.print("\n".join(KEYS))
        return 0
    try:
        keys = KEYS if settings.all else settings.keys
        if not keys:
            raise ValueError("name papers, or --all; --list shows the names")
        for key in keys:
            lookup(dict.fromkeys(KEYS), key, "paper")
        default = Path("runs/reproduce-quick") if settings.quick else RESULTS
        out = settings.out or default
        out.mkdir(parents=True, exist_ok=True)
        if settings.jobs < 1:
            raise ValueError(f"--jobs {settings.jobs} must be at least 1")
        if settings.jobs > 1 and len(keys) > 1:
            failed = _apart(keys, settings, out)
            if failed:
                raise ValueError(f"these did not finish: {', '.join(failed)}")
        else:
            with shared_compilations():
                for key in keys:
                    found = reproduce(
                        key, Scale(settings.quick), out, console, again=settings.again
                    )
                    _say(key, found["verdict"], console)
    except (ValueError, OSError) as problem:
        errors.print(f"[bold red]error:[/] {problem}", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        errors.print("stopped; the same command goes on from here")
        return 130
    home = out == RESULTS
    page = report.page(out, results="results/" if home else "")
    place = out.parent if home else out
    with records.atomic(place / "REPRODUCTION.md") as beside:
        beside.write_text(page)
    return 0


def _say(key: str, verdict: dict[str, str], console: Console) -> None:
    console.print(f"[bold]{key}[/]: {verdict['status']}", soft_wrap=True)
    console.print(f"  {verdict['measured']}", soft_wrap=True, highlight=False)


def _apart(keys: Sequence[str], settings: Settings, out: Path) -> list[str]:
    """Each paper in a process, several at once; those that did not finish."""

    def one(key: str) -> bool:
        command = [
            sys.executable,
            "-m",
            "experiments.reproduce",
            key,
            "--out",
            str(out),
        ]
        command += ["--quick"] * settings.quick + ["--again"] * settings.again
        return subprocess.run(command, check=False).returncode == 0

    with ThreadPoolExecutor(settings.jobs) as pool:
        finished = list(pool.map(one, keys))
    return [key for key, done in zip(keys, finished, strict=True) if not done]


def reproduce(
    key: str, scale: Scale, out: Path, console: Console, *, again: bool = False
) -> dict[str, Any]:
    """The results of one paper: from the file that has them, else run now.

    What is said of the runs, the verdict and the figure, is made anew each time.
    """
    module, done = paper(key), out / f"{key}.json"
    asked = {"key": key, "quick": scale.quick, "source": fingerprint(module)}
    found = json.loads(done.read_text()) if done.exists() and not again else None
    if found is None:
        cells = _computed(module, scale, asked, out / f"{key}.partial.json", console)
        found = asked | {"versions": records.versions(), "cells": cells}
    elif any(found[name] != value for name, value in asked.items()):
        raise ValueError(
            f"{done} was made by another version of this experiment: keep it, or make "
            "it anew with --again"
        )
    verdict = records.plain(module.verdict(found["cells"])._asdict())
    panels.drawn(module.draw, found["cells"], out / f"{key}.png")
    if found.get("verdict") != verdict:
        found["verdict"] = verdict
        _write(done, found)
    (out / f"{key}.partial.json").unlink(missing_ok=True)
    return found


def _computed(
    module: Any, scale: Scale, asked: dict[str, Any], partial: Path, console: Console
) -> dict[str, Any]:
    """The cells, of which those are not run again that were finished before a stop."""
    kept = json.loads(partial.read_text()) if partial.exists() else {}
    if kept.get("asked") != asked:
        if kept:
            console.print(f"{partial} is of another version; beginning anew")
        kept = {"asked": asked, "cells": {}}
    for name, compute in module.cells(scale).items():
        if name not in kept["cells"]:
            start = time.perf_counter()
            kept["cells"][name] = _short(records.plain(compute()))
            took = f"{time.perf_counter() - start:.0f} s"
            console.print(f"{asked['key']}: {name} ({took})", soft_wrap=True)
            _write(partial, kept)
    return kept["cells"]


def fingerprint(module: Any) -> str:
    """Of ``cells`` and of what it uses: the part of a paper's module that is run.

    What is said of the runs may change without running them again.
    """
    named: dict[str, ast.stmt] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            named[node.name] = node
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            parts = ast.walk(target) if target is not None else ()
            named |= {part.id: node for part in parts if isinstance(part, ast.Name)}
    used, found = ["cells"], {}
    while used:
        name = used.pop()
        if name in named and name not in found:
            found[name] = _without_text(named[name])
            parts = ast.walk(named[name])
            used += [part.id for part in parts if isinstance(part, ast.Name)]
    body = "\n".join(found[name] for name in named if name in found)
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _without_text(node: ast.stmt) -> str:
    """The syntax tree as text, and no docstring in it."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(part):
            part.body = part.body[1:] or [ast.Pass()]
    return ast.dump(node)


def _write(path: Path, found: dict[str, Any]) -> None:
    with records.atomic(path) as beside:
        beside.write_text(_compact(found) + "\n")


def _short(x: Any) -> Any:
    """``x`` in JSON's own types, with as many digits as float32 has."""
    if isinstance(x, dict):
        return {name: _short(value) for name, value in x.items()}
    if isinstance(x, list):
        return [_short(value) for value in x]
    return float(f"{x:.8g}") if isinstance(x, float) else x


def _compact(x: Any, depth: int = 0) -> str:
    """JSON with a line for what a cell has under one name."""
    if not isinstance(x, dict) or not x or depth == 4:
        return json.dumps(x, allow_nan=False, separators=(",", ":"))
    parts = [f"{json.dumps(k)}: {_compact(v, depth + 1)}" for k, v in x.items()]
    pad = "\n" + " " * (depth + 1)
    return "{" + pad + ("," + pad).join(parts) + "}"


if __name__ == "__main__":
    sys.exit(main())
