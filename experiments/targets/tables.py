"""What was compiled, as a line, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import records
from .chips import Target
from .reports import TILE, Report, Step

HEAD = (
    "method",
    "workers",
    "formula",
    "between slices",
    "then",
    "inside",
    "memory",
    "hidden",
)


def line(found: Report) -> str:
    """One method in one line."""
    if found.reason:
        return f"{found.name}: {found.reason}"
    most, least = found.busiest, found.quietest
    verdict = "" if found.agrees else ", and should send something else"
    return (
        f"{found.name}: {most.sent:,} bytes to other workers of {most.formula:,}, "
        f"{least.sent:,} in other steps; {max(s.memory for s in found.steps):,} bytes "
        f"of memory{verdict}"
    )


def table(reports: Sequence[Report]) -> str:
    """All methods, in Markdown."""
    rows = [HEAD, ("---",) * len(HEAD), *map(_cells, reports)]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _cells(found: Report) -> tuple[str, ...]:
    if found.reason:
        return (f"`{found.name}`", "", found.reason, *[""] * (len(HEAD) - 3))
    most, least = found.busiest, found.quietest
    hides, all_of = found.hidden
    workers = " × ".join(map(str, (*found.workers, f"{found.devices} devices")))
    several = len(found.steps) > 1
    return (
        f"`{found.name}`",
        workers,
        _kb(most.formula),
        _kb(most.crossed) + _remark(found, most),
        ("silent" if least.silent else _kb(least.sent)) if several else "",
        _kb(sum(least.inside.values())),
        f"{max(s.memory for s in found.steps) / 2**20:.1f}",
        f"{hides / all_of:.0%}" if all_of else "",
    )


def _remark(found: Report, step: Step) -> str:
    return (" ¹" if step.turned else "") + ("" if found.agrees else " ²")


def _kb(size: int) -> str:
    return f"{size / 1024:,.2f}"


def free(folder: Path, target: Target) -> Path:
    """Where the results of a target go in ``folder``, without a suffix.

    Raises:
        FileExistsError: they are there already.
    """
    path = folder / f"{target.name.replace(':', '-')}-{target.slices}"
    for suffix in (".json", ".md"):
        if path.with_suffix(suffix).exists():
            raise FileExistsError(
                f"{path.with_suffix(suffix)} is there already; {records.REMEDY}"
            )
    return path


def write(
    path: Path,
    settings: Any,
    target: Target,
    task: str,
    reports: Sequence[Report],
    seconds: float,
) -> Path:
    """The results of a target as JSON and as a table; the path of the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {
        "settings": asdict(settings) | {"out": None},
        "task": task,
        "chip": target.chip._asdict(),
        "seconds": round(seconds, 1),
        "versions": records.versions(),
    }
    dump = lambda x, **how: json.dumps(records.plain(x), allow_nan=False, **how)
    lines = ",\n".join(f"  {dump(_plain(found))}" for found in reports)
    text = dump(whole, indent=1)[:-2] + f',\n "methods": [\n{lines}\n ]\n}}\n'
    title = (
        f"# {target.slices} slices of {target.name}\n\n{task}, one program for each "
        f"kind of step, compiled in {seconds:.0f} s. Per device, in KiB; memory in MiB "
        f"of {target.chip.room / 2**30:.1f} GiB.\n\n"
    )
    for suffix, content in (
        (".json", text),
        (".md", title + table(reports) + _notes(reports)),
    ):
        with records.atomic(path.with_suffix(suffix)) as beside:
            beside.write_text(content)
    return path.with_suffix(".md")


def _notes(reports: Sequence[Report]) -> str:
    notes = [
        "formula: what the step that sends most should send to other workers. Between "
        "slices: what it sends to other slices, in whole tiles. Then: what the step "
        "that sends least sends. Inside: what that sends within a slice. Hidden: of "
        "what a round sends between slices, the share that a loop of local steps hides."
    ]
    if any(step.turned for found in reports for step in found.steps):
        notes.append(
            "¹ Gathers of single numbers between slices are compiled to a sum of as "
            "many as there are workers."
        )
    if not all(found.agrees for found in reports if found.steps):
        notes.append(
            "² Formula, jaxpr and compiled program do not say the same, also not up to "
            f"{TILE['tpu'] // 1024} KiB a leaf for whole tiles."
        )
    return "\n" + "\n\n".join(notes) + "\n"


def _plain(found: Report) -> dict[str, Any]:
    if found.reason:
        return {"name": found.name, "reason": found.reason}
    return {
        "name": found.name,
        "workers": found.workers,
        "devices": found.devices,
        "agrees": found.agrees,
        "steps": [
            step._asdict() | {"agrees": step.agrees, "silent": step.silent}
            for step in found.steps
        ],
        "overlap": [
            {
                "collective": t.row.collective,
                "dtype": t.row.dtype,
                "bytes": t.row.bytes,
                "loops": len(t.loops),
                "products": t.products,
            }
            for t in found.overlap
        ],
    }
