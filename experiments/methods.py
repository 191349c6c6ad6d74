"""The README's table of methods: what each sends, and what became of its claim.

    python -m experiments.methods

Bytes are counted while 8 workers train a small problem for 64 steps of momentum SGD
with every method at its usual settings, relative to data-parallel training. One-line
descriptions are the factories' own, verdicts those of ``REPRODUCTION.md``.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import optax

import lowcomm as lc
from lowcomm.testing.problems import place_of, squares, start, targets

from . import records
from .catalogue import CATALOGUE
from .papers import KEYS, paper
from .reproduce import RESULTS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- methods -->\n", "<!-- end of methods -->\n"
WORKERS, STEPS = 8, 64


def relative_bytes(name: str) -> float:
    """Payload of a worker over that of data-parallel training, in the same steps."""
    method = CATALOGUE[name]
    tx = method.make(
        workers=WORKERS,
        steps=STEPS,
        learning_rate=0.01,
        inner=optax.sgd(0.01, momentum=0.9),
        window=8,
    )
    run = lc.fit(
        squares,
        tx,
        start(),
        lambda t: targets(WORKERS, binary=False),
        steps=STEPS,
        workers=WORKERS,
        axis=method.axis,
        **place_of("vmap", WORKERS, method.axis),
    )
    dense = sum(4 * x.size for x in jax.tree.leaves(start()))
    return float(np.sum(run.payload)) / (STEPS * dense)


def about(name: str) -> str:
    """The first line of the factory's docstring."""
    text = (CATALOGUE[name].about or getattr(lc, name).__doc__).split("\n")[0]
    return text.rstrip(".").replace("|", "\\|").replace("``", "`")


def verdict(name: str, folder: Path = RESULTS) -> str:
    """What became of the claims about a method, with links."""
    links = []
    for key in KEYS:
        path = folder / f"{key}.json"
        if name in paper(key).METHODS and path.exists():
            status = json.loads(path.read_text())["verdict"]["status"]
            links.append(f"[{status}](experiments/REPRODUCTION.md#{key})")
    return ", ".join(links) or "–"


def table(shares: dict[str, float], folder: Path = RESULTS) -> str:
    """The whole table."""
    lines = ["| method | what it does | bytes | its claim |", "|---|---|---|---|"]
    for name, share in shares.items():
        cells = f"`{name}`", about(name), f"{share:.3g}", verdict(name, folder)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the table into the README."""
    shares = {name: relative_bytes(name) for name in CATALOGUE}
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    with records.atomic(README) as beside:
        beside.write_text(before + BEGIN + table(shares) + END + after)


if __name__ == "__main__":
    main()
