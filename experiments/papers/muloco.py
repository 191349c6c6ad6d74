"""MuLoCo: DiLoCo with Muon inside, and two bits an entry."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc
from lowcomm.codebooks import GAUSSIAN, codebook

from .. import panels, toys
from ..trials import cosine, difference, interval, tuned, tuned_both, values
from . import Cells, Found, Scale, Verdict

TITLE = "MuLoCo"
REFERENCE = (
    "Thérien et al., *MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo*, 2025, "
    "[2505.23725](https://arxiv.org/abs/2505.23725)."
)
CLAIM = """With Muon inside, error feedback and 2 bits DiLoCo is better than with AdamW
inside, at 8 times fewer bytes (220 M parameters, 8 workers, H = 30); from 150 M to
3.1 B it is better uncompressed as well, and displacements of the workers are the better
aligned, by comparison, the more workers there are."""
SETTING = """Gaussian mixture, 8 workers, H = 8, 600 steps with a cosine schedule, the
same outer step (Nesterov, μ = 0.9) for Muon and AdamW inside, inner and outer rate
tuned together for each. Two bits: the best four levels for normal numbers, times the
root mean square of a leaf. Agreement: the mean cosine of two workers' displacements
after 6 steps of a round, in the second half of training, at the rates chosen for
each (two workers: at an outer rate of 0.1)."""
METHODS = ("muloco",)
PERIOD = 8
INSIDE = ("AdamW", "Muon")
BASELINES = (
    *(f"{inside}, synchronous" for inside in INSIDE),
    *(f"{inside}, local SGD" for inside in INSIDE),
    "AdamW, local SGD, H = 128",
)
RATES = {"AdamW": (0.032, 0.064, 0.128, 0.256), "Muon": (0.02, 0.08, 0.16, 0.32, 0.64)}
OUTER = (0.0125, 0.025, 0.05, 0.1)  # at the second momentum makes it an average
TWO_BITS, FEW = ", two bits", 2  # workers


def cells(scale: Scale) -> Cells:
    """Both inside DiLoCo, with two bits, averaged, synchronous, and on two workers."""
    steps, jobs = scale.steps(600), {}
    for inside in INSIDE:
        make = partial(_inner, inside, steps)
        how: dict[str, Any] = {
            "steps": steps,
            "rates": scale.rates(*RATES[inside]),
            "seeds": scale.seeds[:3],
            "points": steps // 50,  # every fourth of them 6 steps into a round
        }
        for name, period in (("synchronous", 1), ("local SGD", PERIOD)):
            jobs[f"{inside}, {name}"] = partial(
                tuned, toys.mixture(), partial(_local, make, period), **how
            )
        both = partial(tuned_both, others=OUTER, watch=_agreement, **how)
        jobs[f"{inside}, DiLoCo"] = partial(
            both, toys.mixture(), partial(_diloco, make)
        )
        jobs[f"{inside}, DiLoCo{TWO_BITS}"] = partial(
            both, toys.mixture(), partial(_two_bits, make)
        )
        jobs[f"{inside}, DiLoCo, {FEW} workers"] = partial(
            tuned,
            toys.mixture(workers=FEW),
            partial(_diloco, make, outer=OUTER[3]),
            watch=_agreement,
            **how,
        )
    jobs[BASELINES[-1]] = partial(
        tuned,
        toys.mixture(),
        partial(_local, partial(_inner, "AdamW", steps), 16 * PERIOD),
        steps=steps,
        rates=scale.rates(*RATES["AdamW"]),
        seeds=scale.seeds[:3],
    )
    return jobs


def verdict(found: Found) -> Verdict:
    """Two bits with Muon are better than AdamW; so is Muon; Muon's workers agree."""
    gap = lambda a, b: difference(values(found[a]), values(found[b]))
    adamw, muon = (f"{inside}, DiLoCo" for inside in INSIDE)
    whole, packed = gap(muon, adamw), gap(muon + TWO_BITS, adamw)
    agree = {
        inside: [
            _agreed(found[f"{inside}, DiLoCo{w}"]) for w in (f", {FEW} workers", "")
        ]
        for inside in INSIDE
    }
    # More workers cost Muon less agreement than they cost AdamW.
    falls = {inside: difference(few, many) for inside, (few, many) in agree.items()}
    more = interval(agree["Muon"][1]).low > interval(agree["AdamW"][1]).high
    fewer = found[adamw]["relative_bytes"] / found[muon + TWO_BITS]["relative_bytes"]
    each = lambda of: ", ".join(f"{inside} {of(inside)}" for inside in INSIDE)
    measured = f"""Loss of DiLoCo with Muon minus that with AdamW: {whole}; with two
    bits and error feedback, {fewer:.1f} times fewer bytes: {packed}. Two bits minus
    none: {each(lambda i: gap(f"{i}, DiLoCo{TWO_BITS}", f"{i}, DiLoCo"))}. DiLoCo minus
    local SGD at equal bytes:
    {each(lambda i: gap(f"{i}, DiLoCo", f"{i}, local SGD"))}; Muon with two bits
    minus local SGD with AdamW at equal bytes: {gap(muon + TWO_BITS, BASELINES[-1])}.
    Synchronous, Muon minus AdamW: {gap(BASELINES[1], BASELINES[0])}. Cosine of
    displacements, 8 workers: {each(lambda i: interval(agree[i][1]))}; what 8 instead
    of {FEW} workers take from it: {each(falls.get)}. Outer rate:
    {each(lambda i: f"{found[f'{i}, DiLoCo']['other']:g}")}."""
    held = [packed.high < 0, whole.high < 0, more and falls["Muon"].mean <= 0]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Loss of everything, and loss of DiLoCo against the outer rate."""
    left, right = figure.subplots(1, 2)
    eight = {n: values(c) for n, c in found.items() if not n.endswith("workers")}
    low = min(map(min, eight.values()))
    panels.bars(left, eight, y="held-out loss", least=0.95 * low)
    curves = {}
    for inside in INSIDE:
        for what in ("", TWO_BITS):
            cell = found[f"{inside}, DiLoCo{what}"]
            rates = [float(rate) for rate in cell["others"]]
            losses = np.transpose(cell["others grid"]["loss"])
            curves[f"{inside}, DiLoCo{what}"] = rates, losses
        each = np.array(values(found[f"{inside}, local SGD"]))
        ends = (OUTER[0], OUTER[-1]), np.stack([each, each], 1)
        curves[f"{inside}, local SGD"] = ends
    panels.lines(right, curves, x="outer rate", y="held-out loss", log="x")
    right.set_xticks(OUTER, [f"{rate:g}" for rate in OUTER])
    right.minorticks_off()


def _inner(inside: str, steps: int, rate: Any) -> optax.GradientTransformation:
    schedule = cosine(rate, steps)
    return {"AdamW": optax.adamw, "Muon": optax.contrib.muon}[inside](schedule)


def _local(make: Any, period: int, rate: Any) -> optax.GradientTransformation:
    if period == 1:
        return lc.data_parallel(make(rate))
    return lc.local_sgd(make(rate), period=period)


def _diloco(make: Any, rate: Any, outer: Any) -> optax.GradientTransformation:
    return lc.diloco(make(rate), period=PERIOD, outer_lr=outer)


def _two_bits(make: Any, rate: Any, outer: Any) -> optax.GradientTransformation:
    exchange = lc.error_feedback(codebook(GAUSSIAN, relative_to="rms"))
    return lc.diloco(make(rate), period=PERIOD, outer_lr=outer, exchange=exchange)


def _agreement(params: Any, state: Any) -> dict[str, jax.Array]:
    """The mean cosine of the displacements of two workers."""
    away = jax.tree.map(lambda a, x: (a - x).reshape(len(x), -1), state.anchor, params)
    flat = jnp.concatenate(jax.tree.leaves(away), 1)
    # Right after a sync nobody is away.
    unit = flat / jnp.maximum(jnp.linalg.norm(flat, axis=1, keepdims=True), 1e-30)
    k = len(unit)
    return {"cosine": (jnp.sum(unit.sum(0) ** 2) - k) / (k * (k - 1))}


def _agreed(cell: dict[str, Any]) -> list[float]:
    """Of each seed, 6 steps into a round, in the second half of training."""
    steps = np.array(cell["step"])
    there = (steps % PERIOD == 6) & (steps > cell["steps"] / 2)
    return np.array(cell["curves"]["cosine"])[:, there].mean(1).tolist()
