"""EDGC: the rank of compressed gradients follows their entropy."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lowcomm as lc
from lowcomm.entropy import low_rank_errors

from .. import panels, toys
from ..letters import letters
from ..toys import Problem
from ..trials import difference, interval, momentum, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "EDGC"
REFERENCE = (
    "Yi et al., *EDGC: Entropy-driven Dynamic Gradient Compression for Efficient LLM "
    "Training*, 2025, [2511.10333](https://arxiv.org/abs/2511.10333)."
)
CLAIM = """As training settles the entropy of gradients falls, and a rank that follows
it keeps the accuracy with up to 46.45 % less latency of communication and up to 16.13 %
less training time (GPT-2 of 2.5 and 12.1 billion parameters on 32 and 64 GPUs)."""
SETTING = """The next byte of Python's sources, where low ranks visibly hurt, and the
Gaussian mixture, where they hurt less: 8 workers with batches of 16, 512 steps of
momentum SGD, rates tuned for each. Ranks 2 to 16 and 1 to 8, after 48 dense steps,
windows of 32; beside it fixed ranks, the lowest after as many dense steps, and local
SGD at about as many bytes."""
METHODS = ("edgc",)
STEPS = 512
RANKS = {"text": (2, 4, 8, 16), "mixture": (1, 2, 4, 8)}
FIXED = {"lowest rank": 0, "rank between": 2, "highest rank": 3}
WARM, LOCAL = "dense, then lowest", "local SGD"
PERIODS = {"text": 2, "mixture": 3}
FIRST = 4  # the point after the first decision, of 16
BASELINES = tuple(
    f"{task}, {name}" for task in RANKS for name in ("dense", *FIXED, WARM, LOCAL)
)
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)


def cells(scale: Scale) -> Cells:
    """The entropy's rank, fixed ranks and what else sends as much, on two problems."""
    steps = scale.steps(STEPS)
    control = {"window": steps // 16, "warmup": 3 * steps // 32, "sample_every": 4}
    jobs: Cells = {}
    for task, ranks in RANKS.items():
        makes: dict[str, Any] = {"dense": lc.data_parallel}
        for name, i in FIXED.items():
            how = {"rank": ranks[i], "min_compression": 1.0}
            makes[name] = partial(lc.powersgd_sgd, **how)
        for name, some in {"EDGC": ranks, WARM: ranks[:1]}.items():
            makes[name] = partial(lc.edgc, ranks=some, min_compression=1.0, **control)
        makes[LOCAL] = partial(lc.local_sgd, period=PERIODS[task])
        for name, make in makes.items():
            jobs[f"{task}, {name}"] = partial(
                tuned,
                _problem(task),
                lambda rate, make=make: make(momentum(rate, steps)),
                steps=steps,
                rates=scale.rates(*RATES),
                seeds=scale.seeds,
                points=16,  # in the middle of windows
                watch=_control if name == "EDGC" else None,
            )
        jobs[f"{task}, errors"] = partial(_errors, task)
    return jobs


def _problem(task: str) -> Problem:
    if task == "mixture":
        return toys.mixture()
    return letters(workers=8, batch_size=16, hidden=64)


def _control(params: Any, state: Any) -> dict[str, jax.Array]:
    """To watch: the rank, and the mean entropy of this window and of the first."""
    control = state[0].control
    samples, total, first = control.samples[0], control.entropy[0], control.reference[0]
    entropy = jnp.where(samples > 0, total / jnp.maximum(samples, 1), jnp.nan)
    known = jnp.where(control.windows[0] > 0, first, jnp.nan)
    return {"rank": 1.0 * control.rank[0], "entropy": entropy, "reference": known}


def _errors(task: str) -> dict[str, Any]:
    """``g`` of all matrices together, and the fall that asks for rank 0."""
    params = jax.eval_shape(_problem(task).init, jax.random.key(0))
    shapes = [x.shape for x in jax.tree.leaves(params) if len(x.shape) == 2]
    most = RANKS[task][-1]
    squares = np.zeros(most + 1)
    for m, n in shapes:
        errors = low_rank_errors(m, n)[: most + 1]
        squares[: len(errors)] += errors**2
    g = np.sqrt(squares)
    return {"errors": g, "limit": np.log(g[0] / g[-1])}


def verdict(found: Found) -> Verdict:
    """The rank falls, bytes are between fixed ranks', and the loss is the highest's."""
    held, told, earns = [], [], []
    for task, ranks in RANKS.items():
        cell = lambda name, task=task: found[f"{task}, {name}"]
        share = lambda name, cell=cell: cell(name)["relative_bytes"]
        gap = {
            name: difference(values(cell("EDGC")), values(cell(name)))
            for name in (*FIXED, WARM, LOCAL)
        }
        rank, entropy, reference = (
            np.array(panels.curve(cell("EDGC"), name)[1], float)
            for name in ("rank", "entropy", "reference")
        )
        falls, limit = reference - entropy, cell("errors")["limit"]
        lowest = np.mean(rank[:, FIRST:] == ranks[0])
        beyond = np.mean(falls[:, FIRST:] >= limit)
        held += [
            np.mean(rank[:, -1]) < ranks[-1],
            share("lowest rank") < share("EDGC") < share("highest rank"),
            gap["highest rank"].mean < 0.03,
        ]
        if max(gap[WARM].high, gap[LOCAL].high) < 0:
            earns.append(task)
        losses = ", ".join(
            f"{name} {interval(values(cell(name)))} ({share(name):.3f})"
            for name in ("dense", *FIXED, "EDGC", WARM, LOCAL)
        )
        told.append(
            f"{task}: entropy falls by {interval(falls[:, -1])} nats by the end; a "
            f"fall of {limit:.2f} asks for rank 0, as at {100 * beyond:.0f} % of the "
            f"points after the first decision; the rank ends at "
            f"{interval(rank[:, -1])} of {ranks[-1]}, and is clamped to the lowest at "
            f"{100 * lowest:.0f} % of them; loss, and share of dense bytes: {losses}; "
            f"EDGC minus " + ", ".join(f"{name} {x}" for name, x in gap.items())
        )
    measured = f"""{". ".join(told)}. It beats both the lowest rank after as many dense
    steps and local SGD on: {", ".join(earns) or "neither"}."""
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """The fall of entropy and the rank by steps, and loss against bytes."""
    left, middle, right = figure.subplots(1, 3)
    falls, ranks = {}, {}
    for task in RANKS:
        cell = found[f"{task}, EDGC"]
        at, entropy = panels.curve(cell, "entropy")
        first = np.array(panels.curve(cell, "reference")[1], float)
        falls[task] = at, first - np.array(entropy, float)
        ranks[task] = panels.curve(cell, "rank")
    panels.lines(left, falls, x="steps", y="fall of entropy, nats")
    limit = found["mixture, errors"]["limit"]
    left.axhline(limit, color="#666666", linewidth=1.2, linestyle="--")
    last: Any = {"transform": left.get_yaxis_transform(), "ha": "right"}
    left.text(0.98, limit, "beyond this: rank 0", fontsize=7.5, va="top", **last)
    panels.lines(middle, ranks, x="steps", y="rank", legend=False)
    middle.set_ylim(0)
    kinds = {"dense": ["dense"], "fixed ranks": list(FIXED)}
    kinds |= {name: [name] for name in ("EDGC", WARM, LOCAL)}
    points = {
        kind: (
            [found[f"mixture, {name}"]["relative_bytes"] for name in names],
            np.transpose([values(found[f"mixture, {name}"]) for name in names]),
        )
        for kind, names in kinds.items()
    }
    label = "held-out loss, mixture"
    panels.lines(right, points, x="bytes, dense = 1", y=label, log="x")
