"""Streaming DiLoCo: parts of the model in turn, in the background, in four bits."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

import lowcomm as lc
from lowcomm.algorithms.streaming import fragments_of
from lowcomm.codebooks import POWERS, codebook

from .. import panels
from ..letters import letters
from ..toys import Problem
from ..trials import cosine, difference, tuned, tuned_both, values
from . import Cells, Found, Scale, Verdict

TITLE = "Streaming DiLoCo"
REFERENCE = (
    "Douillard et al., *Streaming DiLoCo with Overlapping Communication*, 2025, "
    "[2501.18512](https://arxiv.org/abs/2501.18512)."
)
CLAIM = """A model of 1 B parameters on 25, 100 and 250 B tokens: a loss of 2.66, 2.51
and 2.45 where data-parallel training has 2.67, 2.52 and 2.45, with 1.10, 4.42 and
11.05 TB sent where it sends 441, 1767 and 4418."""
SETTING = """Next byte of Python's sources, an embedding and three layers, 8 workers,
960 steps of AdamW with a cosine schedule; H = 16, four fragments, μ = 0.9. Inner rate
tuned for each method, and with it the outer one for DiLoCo and for the whole method
(0.1 between them, at which momentum makes an average); four bits are a sign and a power
of two. Bytes are relative to float32."""
METHODS = ("streaming_diloco",)
PERIOD, FRAGMENTS, DELAY = 16, 4, 2
WHOLE = f"streaming, τ = {DELAY}, α = 0.5, four bits"
AT_ONCE = "streaming, τ = 0, α = 0"
LATER = (2, 0.0), (2, 0.5), (8, 0.5)
LATE = tuple(f"streaming, τ = {t}, α = {a:g}" for t, a in LATER)
SAME_BYTES = f"local SGD, H = {8 * PERIOD}"
BASELINES = ("data-parallel", f"local SGD, H = {PERIOD}", SAME_BYTES)
RATES, OUTER = (0.008, 0.016, 0.032, 0.064), (0.1, 0.2, 0.4, 0.8, 1.6)
SAME = 0.03  # of loss


def cells(scale: Scale) -> Cells:
    """Data-parallel, DiLoCo, its three changes one by one, and local SGD."""
    steps = scale.steps(960)
    how: dict[str, Any] = {
        "steps": steps,
        "rates": scale.rates(*RATES),
        "seeds": scale.seeds[:3],
        "points": 5,
    }
    inner = partial(_inner, steps)
    stream = partial(_streaming, steps)
    one = lambda make: partial(tuned, _problem(), make, **how)
    both = lambda make: partial(tuned_both, _problem(), make, others=OUTER, **how)
    jobs: Cells = {
        "data-parallel": one(lambda rate: lc.data_parallel(inner(rate))),
        f"local SGD, H = {PERIOD}": one(partial(_local, PERIOD, steps)),
        SAME_BYTES: one(partial(_local, 8 * PERIOD, steps)),
        "DiLoCo": both(partial(_diloco, steps)),
        AT_ONCE: one(partial(stream, 0, 0.0)),
    }
    for name, (delay, mixing) in zip(LATE, LATER, strict=True):
        jobs[name] = one(partial(stream, delay, mixing))
    jobs[WHOLE] = both(partial(_four_bits, steps))
    return jobs


def verdict(found: Found) -> Verdict:
    """The whole method keeps the loss of data-parallel training, and of DiLoCo."""
    gap = lambda a, b: difference(values(found[a]), values(found[b]))
    above, diloco = gap(WHOLE, "data-parallel"), gap(WHOLE, "DiLoCo")
    local = gap(WHOLE, SAME_BYTES)
    at_once = gap(AT_ONCE, "DiLoCo")
    late = "; ".join(
        f"{name.removeprefix('streaming, ')}: {gap(name, AT_ONCE)}" for name in LATE
    )
    share = found[WHOLE]["relative_bytes"]
    less = lambda name: 1 / found[name]["relative_bytes"]
    measured = f"""Whole method, with {1 / share:.0f} times fewer bytes, minus
    data-parallel: {above}; minus DiLoCo, whose bytes are {less("DiLoCo"):.0f} times
    fewer: {diloco}; minus local SGD at equal bytes ({less(SAME_BYTES):.0f} times
    fewer): {local}. One by one: fragments in turn, not all at once {at_once}; then a
    delay of τ steps and a mixture α of the own model: {late}. DiLoCo minus local SGD
    with H = {PERIOD}: {gap("DiLoCo", BASELINES[1])}. Outer rate: DiLoCo
    {found["DiLoCo"]["other"]:g}, whole {found[WHOLE]["other"]:g}. The largest of the
    {FRAGMENTS} messages of a round holds {_largest():.0%} of the parameters."""
    held = [above.mean < SAME, diloco.mean < SAME, local.high < 0]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Loss of each against its bytes, and against the outer rate."""
    left, right = figure.subplots(1, 2)
    for name in found:
        cell = found[name]
        at, losses = cell["relative_bytes"], np.array(values(cell))
        middle = losses.mean()
        ends = [[middle - losses.min()], [losses.max() - middle]]
        shown = left.errorbar(at, middle, ends, fmt="o", markersize=4)
        shown.set_label(name)
    left.set_xscale("log")
    left.set_xlabel("bytes, relative to data-parallel")
    left.set_ylabel("held-out loss")
    left.legend(frameon=False, fontsize=6)
    curves = {}
    for name in ("DiLoCo", WHOLE):
        rates = [float(rate) for rate in found[name]["others"]]
        curves[name] = rates, np.transpose(found[name]["others grid"]["loss"])
    for name in BASELINES:
        each = np.array(values(found[name]))
        curves[name] = (OUTER[0], OUTER[-1]), np.stack([each, each], 1)
    panels.lines(right, curves, x="outer rate", y="held-out loss", log="x")
    right.set_xticks(OUTER, [f"{rate:g}" for rate in OUTER])
    right.minorticks_off()


def _problem() -> Problem:
    return letters(workers=8, batch_size=16, hidden=32)


def _inner(steps: int, rate: Any) -> optax.GradientTransformation:
    return optax.adamw(cosine(rate, steps))


def _local(period: int, steps: int, rate: Any) -> optax.GradientTransformation:
    return lc.local_sgd(_inner(steps, rate), period=period)


def _diloco(steps: int, rate: Any, outer: Any) -> optax.GradientTransformation:
    return lc.diloco(_inner(steps, rate), period=PERIOD, outer_lr=outer)


def _streaming(
    steps: int, delay: int, mixing: float, rate: Any, outer: Any = OUTER[0], **more: Any
) -> Any:
    return lc.streaming_diloco(
        _inner(steps, rate),
        period=PERIOD,
        fragments=FRAGMENTS,
        delay=delay,
        mixing=mixing,
        outer_lr=outer,
        **more,
    )


def _four_bits(steps: int, rate: Any, outer: Any) -> optax.GradientTransformation:
    exchange = lc.compressed_mean(codebook(POWERS, relative_to="largest"))
    return _streaming(steps, DELAY, 0.5, rate, outer, exchange=exchange)


def _largest() -> float:
    """The share of the parameters that the largest fragment holds."""
    params = jax.eval_shape(_problem().init, jax.random.key(0))
    labels = jax.tree.leaves(fragments_of(params, FRAGMENTS))
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(params)]
    return np.bincount(labels, sizes).max() / sum(sizes)
