"""SNOO and GPA: what one worker gains from an outer step."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import optax

import lowcomm as lc

from .. import panels
from ..letters import letters
from ..toys import Problem
from ..trials import cosine, difference, tuned, tuned_both, values
from . import Cells, Found, Scale, Verdict

TITLE = "Outer steps on one worker (SNOO and GPA)"
REFERENCE = (
    "Kallusky et al., *SNOO: Step-K Nesterov Outer Optimizer*, 2025, "
    "[2510.15830](https://arxiv.org/abs/2510.15830); Defazio et al., *Smoothing DiLoCo "
    "with Primal Averaging for Faster Training of LLMs*, 2025, "
    "[2512.17131](https://arxiv.org/abs/2512.17131)."
)
CLAIM = """DiLoCo gains from Nesterov's step on displacements, not from distribution: it
gains with one worker as well. GPA, the same without a loop, takes 8.7, 10.1 and 9.6 %
fewer steps than AdamW on Llama models of 160 M, 1 B and 8 B."""
SETTING = """Next byte of Python's sources, two hidden layers, 64 bytes to foretell a
step in all, 1200 steps of AdamW with a cosine schedule, or 1080; rounds of 5 steps and
μ = 0.9, so that the outer momentum looks back over 50 steps. Inner and outer rate tuned
together; for GPA μ_y = 0.8, and of two μ_x the best by the validation loss. Nothing
is sent but by the eight workers."""
METHODS = ("snoo", "gpa")
FEWER = ("", ", 9/10 of the steps")
BASELINES = (*(f"AdamW{name}" for name in FEWER), "Lookahead", "8 workers, local SGD")
RATES, SLOW = (0.004, 0.008, 0.016, 0.032, 0.064), (0.25, 0.5, 1.0)
OUTER = (0.025, 0.05, 0.1, 0.2)  # at the second momentum makes it an average
AVERAGING, INTERPOLATION, PERIOD = (0.5, 0.8), 0.8, 5


def cells(scale: Scale) -> Cells:
    """AdamW alone, smoothed in three ways, on eight workers, in fewer steps."""
    steps, one, eight = scale.steps(1200), _problem(1), _problem(8)
    how: dict[str, Any] = {"rates": scale.rates(*RATES), "seeds": scale.seeds[:3]}
    jobs: Cells = {}
    for name, length in zip(FEWER, (steps, steps * 9 // 10), strict=True):
        inner = partial(_inner, length)
        jobs[f"AdamW{name}"] = partial(tuned, one, inner, steps=length, **how)
        for mu in AVERAGING[: 1 if scale.quick else None]:
            jobs[f"GPA, μ_x = {mu:g}{name}"] = partial(
                tuned, one, partial(_gpa, length, mu), steps=length, **how
            )
    jobs["SNOO"] = partial(
        tuned_both, one, partial(_snoo, steps), steps=steps, others=OUTER, **how
    )
    jobs["Lookahead"] = partial(
        tuned_both, one, partial(_lookahead, steps), steps=steps, others=SLOW, **how
    )
    jobs["8 workers, local SGD"] = partial(
        tuned, eight, partial(_local, steps), steps=steps, **how
    )
    jobs["8 workers, DiLoCo"] = partial(
        tuned_both, eight, partial(_diloco, steps), steps=steps, others=OUTER, **how
    )
    return jobs


def verdict(found: Found) -> Verdict:
    """SNOO is better than AdamW and Lookahead; GPA needs a tenth fewer steps."""
    gpa, less = (found[_gpa_of(found, name)] for name in FEWER)
    gap = lambda a, b="AdamW": difference(values(a), values(found[b]))
    snoo, ahead = gap(found["SNOO"]), gap(found["SNOO"], "Lookahead")
    faster, needed = gap(less), gap(found[f"AdamW{FEWER[1]}"])
    eight = gap(found["8 workers, DiLoCo"], "8 workers, local SGD")
    measured = f"""Loss minus that of AdamW: SNOO {snoo}, Lookahead
    {gap(found["Lookahead"])}, GPA {gap(gpa)}; SNOO minus Lookahead {ahead}. After nine
    tenths of the steps, minus AdamW after all: GPA {faster},
    AdamW itself {needed}. Eight workers on the same batch, DiLoCo
    minus local SGD at equal bytes: {eight}. Outer rate of SNOO
    {found["SNOO"]["other"]:g}, of DiLoCo {found["8 workers, DiLoCo"]["other"]:g}; best
    GPA: {_gpa_of(found, "").removeprefix("GPA, ")}."""
    held = [snoo.high < 0 and ahead.high < 0, faster.mean <= 0]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """What each gives above AdamW, seed by seed, and loss against the outer rate."""
    left, right = figure.subplots(1, 2)
    base = np.array(values(found["AdamW"]))
    shown = {
        "SNOO": "SNOO",
        "Lookahead": "Lookahead",
        "GPA": _gpa_of(found, ""),
        "AdamW, 9/10": f"AdamW{FEWER[1]}",
        "GPA, 9/10": _gpa_of(found, FEWER[1]),
    }
    above = {a: (np.array(values(found[b])) - base).tolist() for a, b in shown.items()}
    panels.bars(left, above, y="held-out loss minus that of AdamW")
    left.axhline(0, color="#888888", linewidth=0.8)
    curves = {}
    for name in ("SNOO", "Lookahead", "8 workers, DiLoCo"):
        rates = [float(rate) for rate in found[name]["others"]]
        curves[name] = rates, np.transpose(found[name]["others grid"]["loss"])
    for name in ("AdamW", "8 workers, local SGD"):
        each = np.array(values(found[name]))
        curves[name] = (OUTER[0], SLOW[-1]), np.stack([each, each], 1)
    panels.lines(right, curves, x="outer rate", y="held-out loss", log="x")
    right.set_xticks((*OUTER, 1.0), [f"{rate:g}" for rate in (*OUTER, 1.0)])
    right.minorticks_off()


def _problem(workers: int) -> Problem:
    return letters(workers=workers, batch_size=64 // workers, hidden=32)


def _inner(steps: int, rate: Any) -> optax.GradientTransformation:
    return optax.adamw(cosine(rate, steps))


def _snoo(steps: int, rate: Any, outer: Any) -> optax.GradientTransformation:
    return lc.snoo(_inner(steps, rate), period=PERIOD, outer_lr=outer)


def _lookahead(steps: int, rate: Any, outer: Any) -> optax.GradientTransformation:
    inner = _inner(steps, rate)
    return lc.snoo(inner, period=PERIOD, outer_lr=outer, momentum=0.0)


def _gpa(steps: int, averaging: float, rate: Any) -> optax.GradientTransformation:
    inner = _inner(steps, rate)
    return lc.gpa(inner, averaging=averaging, interpolation=INTERPOLATION)


def _local(steps: int, rate: Any) -> optax.GradientTransformation:
    return lc.local_sgd(_inner(steps, rate), period=PERIOD)


def _diloco(steps: int, rate: Any, outer: Any) -> optax.GradientTransformation:
    return lc.diloco(_inner(steps, rate), period=PERIOD, outer_lr=outer)


def _gpa_of(found: Found, name: str) -> str:
    """The cell of that length whose averaging is best by the validation loss."""
    there = [f"GPA, μ_x = {mu:g}{name}" for mu in AVERAGING]
    score = lambda cell: float(np.mean(values(found[cell], "validation")))
    return min((cell for cell in there if cell in found), key=score)
