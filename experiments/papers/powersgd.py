"""PowerSGD: gradients as products of narrow matrices, with error feedback."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc
from lowcomm.lowrank import low_rank_bytes

from .. import panels
from ..letters import letters
from ..trials import Cell, dense_bytes, difference, interval, momentum, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "PowerSGD"
REFERENCE = (
    "Vogels, Karimireddy and Jaggi, *PowerSGD: Practical Low-Rank Gradient Compression "
    "for Distributed Optimization*, 2019, "
    "[1905.13727](https://arxiv.org/abs/1905.13727)."
)
CLAIM = """One power iteration a step, from the factors of the step before and with
error feedback, is enough for gradients of rank 1 to 4 to reach the test accuracy of SGD
(recalled); without feedback, or with new directions at every step, it is worse
(recalled)."""
SETTING = """The next byte of Python's sources, a network of two hidden layers of 64, 8
workers with batches of 16, 400 steps of momentum SGD, rates tuned for each; low rank
for every matrix where it is smaller. Local SGD sends as many bytes as rank 1 and as
rank 4. Both rules of what is left, on random gradients."""
METHODS = ("powersgd_sgd",)
STEPS, RANKS, ABLATED = 400, (1, 2, 4, 8), (1, 4)
BASELINES = ("dense", *(f"local SGD for rank {r}" for r in ABLATED))
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
WORSE = ("no feedback", "no warm start")


def cells(scale: Scale) -> Cells:
    """Ranks, what they need, and local SGD at as many bytes."""
    steps = scale.steps(STEPS)
    problem = letters(workers=8, batch_size=16, hidden=64)
    shapes = jax.eval_shape(problem.init, jax.random.key(0))
    makes: dict[str, Any] = {"dense": lc.data_parallel}
    for r in RANKS:
        makes[f"rank {r}"] = partial(_low, r)
    for r in ABLATED:
        makes[f"rank {r}, no feedback"] = partial(_forgetful, r)
        makes[f"rank {r}, no warm start"] = partial(_low, r, warm_start=False)
    for r in ABLATED:
        low = low_rank_bytes(shapes, r, min_compression=1.0)
        period = round(dense_bytes(problem) / low)
        makes[f"local SGD for rank {r}"] = partial(lc.local_sgd, period=period)
    jobs: Cells = {
        name: partial(
            tuned,
            problem,
            lambda rate, make=make: make(momentum(rate, steps)),
            steps=steps,
            rates=scale.rates(*RATES),
            seeds=scale.seeds,
            points=10,
        )
        for name, make in makes.items()
    }
    return jobs | {"both rules": partial(_rules, scale.seeds)}


def verdict(found: Found) -> Verdict:
    """Rank 4 as good as dense, worse without feedback or a warm start; one mean."""
    dense = values(found["dense"])
    gap = {r: difference(values(found[f"rank {r}"]), dense) for r in RANKS}
    lost = {
        f"{what} at rank {r}": difference(
            values(found[f"rank {r}, {what}"]), values(found[f"rank {r}"])
        )
        for what in WORSE
        for r in ABLATED
    }
    local = {
        r: difference(
            values(found[f"rank {r}"]), values(found[f"local SGD for rank {r}"])
        )
        for r in ABLATED
    }
    rules = found["both rules"]
    apart = np.max(rules["heard apart"], 0)  # at each step
    share = lambda name: f"{found[name]['relative_bytes']:.3f}"
    ranks = ", ".join(
        f"{r} {x} ({share(f'rank {r}')} of the bytes)" for r, x in gap.items()
    )
    against = ", ".join(
        f"rank {r} {x} ({share(f'local SGD for rank {r}')} of the bytes): {_better(x)}"
        for r, x in local.items()
    )
    norms = ", ".join(
        f"{name} {interval(rules[name])}" for name in ("local rule", "global rule")
    )
    measured = f"""Loss minus dense SGD's ({interval(dense)}), by rank: {ranks}. What is
    lost by {", ".join(f"{name} {x}" for name, x in lost.items())}. Minus local SGD at
    as many bytes, {against}. Both rules of what is left hear the same, to
    {apart[9]:.0e} of the largest entry at the tenth step; of pure noise, rounding then
    grows to {apart[-1]:.1g} at the {len(apart)}th. The norms of what workers keep are
    {norms}."""
    held = [
        gap[4].mean < 0.03,
        all(x.low > 0 for x in lost.values()),
        apart[9] < 1e-4,
    ]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Loss against steps, and against the bytes sent."""
    left, right = figure.subplots(1, 2)
    shown = ["dense", "rank 1", "rank 4", *(f"rank 1, {what}" for what in WORSE)]
    shown.append("local SGD for rank 1")
    curves = {name: panels.curve(found[name]) for name in shown}
    panels.lines(left, curves, x="steps", y="held-out loss")
    kinds = {
        "dense": ["dense"],
        "PowerSGD": [f"rank {r}" for r in RANKS],
        **{what: [f"rank {r}, {what}" for r in ABLATED] for what in WORSE},
        "local SGD": [f"local SGD for rank {r}" for r in ABLATED],
    }
    points = {
        kind: (
            [found[name]["relative_bytes"] for name in names],
            np.transpose([values(found[name]) for name in names]),
        )
        for kind, names in kinds.items()
    }
    panels.lines(right, points, x="bytes, dense = 1", y="held-out loss", log="x")


def _low(rank: int, inner: Any, **how: Any) -> Any:
    return optax.chain(lc.powersgd(rank, min_compression=1.0, **how), inner)


def _forgetful(rank: int, inner: Any) -> Any:
    """PowerSGD without error feedback."""
    exchange: Any = lc.powersgd(rank, min_compression=1.0)

    def update(updates, state, params=None, **extra):
        heard, state = exchange.update(updates, state, params, **extra)
        nothing = jax.tree.map(jnp.zeros_like, state.residual)
        return heard, state._replace(residual=nothing)

    return optax.chain(lc.Exchange(exchange.init, update), inner)


def _better(gap: Any) -> str:
    if gap.high < 0:
        return "better"
    return "worse" if gap.low > 0 else "no difference"


def _rules(seeds: tuple[int, ...], steps: int = 50) -> Cell:
    """What is heard by both rules of what is left, and what workers keep, on noise."""
    shape, k, rank = (24, 16), 8, 4

    def run(rule, seed):
        tx = lc.powersgd(rank, min_compression=1.0, residual=rule)

        def worker(state, key):
            def body(state, t):
                noise = jax.random.normal(jax.random.fold_in(key, t), shape)
                heard, state = tx.update(noise, state, step=t)
                return state, heard

            return jax.lax.scan(body, state, jnp.arange(steps))

        first = lc.spread(tx.init)(jnp.zeros((k, *shape)))
        keys = jax.random.split(jax.random.key(seed), k)
        state, heard = lc.spread(worker)(first, keys)
        norms = jnp.sqrt(jnp.sum(state.residual**2, (1, 2)))
        return heard[0], norms.mean()

    each = lambda rule: jax.lax.map(partial(run, rule), jnp.array(seeds))
    both = [jax.jit(each, static_argnums=0)(rule) for rule in ("local", "global")]
    (one, kept), (other, more) = jax.device_get(both)
    apart = np.abs(one - other).max((2, 3)) / np.abs(one).max((2, 3))
    return {
        "heard apart": apart,  # [seeds, steps]
        "local rule": kept,
        "global rule": more,
    }
