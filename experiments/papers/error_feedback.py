"""Error feedback: what a biased compressor leaves out must be remembered."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import optax

import lowcomm as lc

from .. import panels, toys
from ..trials import at_rate, difference, interval, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "Error feedback for top-k, random-k and signs"
REFERENCE = (
    "Stich, Cordonnier and Jaggi, *Sparsified SGD with Memory*, 2018, "
    "[1809.07599](https://arxiv.org/abs/1809.07599); Karimireddy, Rebjock, Stich and "
    "Jaggi, *Error Feedback Fixes SignSGD and other Gradient Compression Schemes*, "
    "2019, [1901.09847](https://arxiv.org/abs/1901.09847)."
)
CLAIM = """With a memory of what was not sent, compressed SGD converges at the rate of
SGD for any compressor that contracts, such as top-k or scaled signs; without one,
signSGD need not converge at all, and generalizes worse."""
SETTING = """8×8 digits, IID and sorted by label, a network of two hidden layers, 8
workers with batches of 16, 300 steps of plain SGD at a constant rate, 1 % of each layer
or one bit an entry; also with the rate of 0.3 for all but votes. Local SGD at periods
of 32 and 64 sends about as many bytes as signs and as top-k."""
METHODS = ("top_k_sgd", "sign_sgd", "sign_vote_sgd")
SPLITS = ("iid", "sorted")
BASELINES = tuple(
    f"{split}: {name}"
    for split in SPLITS
    for name in ("dense", "local SGD, H = 32", "local SGD, H = 64")
)
RATES = (0.06, 0.1, 0.2, 0.3, 0.6, 1.0, 1.5, 2.5)
SLOW = (0.0075, 0.015, 0.03, 0.06, 0.1, 0.3, 0.6)  # for what needs small ones
VOTES = (0.0003, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03)
COMMON = 0.3  # the rate at which all are compared
SHARE = 0.01


def _feedback(c: lc.Compressor) -> Any:
    return lambda rate: optax.chain(lc.error_feedback(c), optax.sgd(rate))


def _none(c: lc.Compressor) -> Any:
    return lambda rate: optax.chain(lc.compressed_mean(c), optax.sgd(rate))


MAKE: dict[str, Any] = {
    "dense": lambda rate: lc.data_parallel(optax.sgd(rate)),
    "top-k, feedback": _feedback(lc.top_k(SHARE)),
    "top-k, none": _none(lc.top_k(SHARE)),
    "sign, feedback": _feedback(lc.sign()),
    "sign, none": _none(lc.sign()),
    "random-k, feedback": _feedback(lc.random_k(SHARE)),
    "vote": lambda rate: optax.chain(lc.majority_vote(), optax.sgd(rate)),
    "local SGD, H = 32": lambda rate: lc.local_sgd(optax.sgd(rate), period=32),
    "local SGD, H = 64": lambda rate: lc.local_sgd(optax.sgd(rate), period=64),
}

GRIDS = {"vote": VOTES, "random-k, feedback": SLOW, "sign, none": SLOW}


def cells(scale: Scale) -> Cells:
    """Every method on both splits."""
    return {
        f"{split}: {name}": partial(
            tuned,
            toys.digits(split=split),
            make,
            steps=scale.steps(300),
            rates=scale.rates(*GRIDS.get(name, RATES)),
            seeds=scale.seeds,
            points=25,
        )
        for split in SPLITS
        for name, make in MAKE.items()
    }


def verdict(found: Found) -> Verdict:
    """With feedback near dense at one rate, without far behind; votes suffer a skew."""
    near, far, fair, told = [], [], [], []
    for split in SPLITS:
        cell = lambda name, split=split: found[f"{split}: {name}"]
        dense = at_rate(cell("dense"), COMMON)
        gaps = {
            name: difference(at_rate(cell(name), COMMON), dense)
            for name in MAKE
            if name not in ("dense", "vote") and "random" not in name
        }
        near += [gaps[f"{c}, feedback"].high < 0.1 for c in ("top-k", "sign")]
        far.append(gaps["top-k, none"].low > max(0, gaps["top-k, feedback"].high))
        best = {name: interval(values(cell(name))) for name in MAKE}
        local = difference(
            values(cell("top-k, feedback")), values(cell("local SGD, H = 64"))
        )
        fair.append(local.high < 0)
        told.append(
            f"{split}: at a rate of {COMMON:g} loss minus that of dense SGD: "
            + ", ".join(f"{name} {gap}" for name, gap in gaps.items())
            + "; at rates chosen for each the loss is "
            + ", ".join(f"{name} {loss}" for name, loss in best.items())
            + f"; top-k with feedback minus local SGD at H = 64 {local}"
        )
    signs = [
        difference(
            values(found[f"{split}: sign, none"]),
            values(found[f"{split}: sign, feedback"]),
        )
        for split in SPLITS
    ]
    random = {
        split: difference(
            values(found[f"{split}: random-k, feedback"]),
            values(found[f"{split}: top-k, feedback"]),
        )
        for split in SPLITS
    }
    skew = difference(values(found["sorted: vote"]), values(found["iid: vote"]))
    help_ = "; ".join(
        f"{split} {gap}" for split, gap in zip(SPLITS, signs, strict=True)
    )
    chance = ", ".join(f"{split} {gap}" for split, gap in random.items())
    measured = f"""{". ".join(told)}. What feedback spares scaled signs, at rates chosen
    for each: {help_}. Random-k minus top-k, both with feedback: {chance}. Votes sorted
    by label minus votes IID: {skew}. Top-k beats local SGD at as many bytes on
    {sum(fair)} of {len(SPLITS)} splits."""
    held = [all(near), all(far), skew.low > 0]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Loss against steps at the rates chosen, on both splits."""
    for panel, split in zip(figure.subplots(1, 2), SPLITS, strict=True):
        curves = {}
        for name in MAKE:
            cell = found[f"{split}: {name}"]
            curves[name] = cell["step"], np.array(cell["curves"]["loss"], float)
        panels.lines(
            panel,
            curves,
            x=f"steps, {split}",
            y="held-out loss",
            log="y",
            legend=split == "iid",
        )
