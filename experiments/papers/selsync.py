"""SelSync: average on the steps where some worker's gradient norm is changing."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lowcomm as lc
from lowcomm.transport import gather

from .. import panels, toys
from ..injection import Injection, injection
from ..trials import (
    Cell,
    Interval,
    dense_bytes,
    difference,
    interval,
    momentum,
    tuned,
    values,
)
from . import Cells, Found, Scale, Verdict

TITLE = "SelSync"
REFERENCE = (
    "Tyagi and Swany, *Accelerating Distributed ML Training via Selective "
    "Synchronization*, 2023, [2307.07950](https://arxiv.org/abs/2307.07950)."
)
CLAIM = """Averaging only where gradients change keeps the accuracy of synchronous
training, in up to 14 times less time; parameters are a better thing to average than
gradients, and data injection helps where data differ (both as recalled)."""
SETTING = """Gaussian mixture, 8 workers, 2000 steps of momentum SGD, rates tuned for
each run; threshold δ of the relative change of the unsquared norm (W = 25, α = 0.01,
the first 25 steps sync), beside periodic averaging; batch 16, on label-sorted shards
18, of which 12 injected where 4 of 8 workers give half of their own."""
METHODS = ("selsync", "selsync_gradients")
THRESHOLDS, PERIODS = (0.03, 0.05, 0.07, 0.1, 0.3), (4, 16, 40, 80)
BASELINES = (
    "iid, every step",
    *(f"iid, H = {h}" for h in PERIODS),
    "sorted, H = 12",
    "sorted, H = 32",
    "sorted, H = 12, injected",
)
BATCH, WORKERS = 18, 8
RATES = (0.0125, 0.025, 0.05, 0.1, 0.2)
HIGHER = (0.025, 0.05, 0.1, 0.2, 0.4)
LOWER = (0.0015625, 0.003125, 0.00625, 0.0125, 0.025, 0.05)


def cells(scale: Scale) -> Cells:
    """Loss for each threshold and period; gradients; all data; injected data."""
    steps = scale.steps(2000)
    iid, whole = toys.mixture(split="iid"), toys.mixture(split="whole")
    apart = toys.mixture(split="sorted", batch_size=BATCH)
    made = injection(BATCH, WORKERS, givers=0.5, given=0.5)
    run = lambda problem, make, rates=RATES, **more: partial(
        _counted,
        problem,
        make,
        steps=steps,
        rates=scale.rates(*rates),
        seeds=scale.seeds,
        **more,
    )
    parameters = lambda threshold: partial(_selsync, lc.selsync, threshold, steps)
    gradients = lambda t: partial(_selsync, lc.selsync_gradients, t, steps)
    fixed = lambda period: partial(_fixed, period, steps)
    jobs: Cells = {"iid, every step": run(iid, fixed(1))}
    jobs |= {f"iid, δ = {t}": run(iid, parameters(t)) for t in THRESHOLDS}
    for h in PERIODS:
        rates = HIGHER if h == 16 else RATES
        jobs[f"iid, H = {h}"] = run(iid, fixed(h), rates)
    jobs["iid, δ = 0.05, gradients"] = run(iid, gradients(0.05), LOWER)
    jobs["all data, δ = 0.1"] = run(whole, parameters(0.1))
    jobs["sorted, δ = 0.1"] = run(apart, parameters(0.1), HIGHER)
    jobs["sorted, δ = 0.1, gradients"] = run(apart, gradients(0.1), LOWER)
    jobs["sorted, δ = 0.1, injected"] = run(apart, parameters(0.1), made=made)
    jobs |= {f"sorted, H = {h}": run(apart, fixed(h)) for h in (12, 32)}
    jobs["sorted, H = 12, injected"] = run(apart, fixed(12), made=made)
    return jobs


def verdict(found: Found) -> Verdict:
    """Within 0.02 of synchronous training with 20 times fewer syncs, and the rest."""
    base = found["iid, every step"]
    away = {t: _minus(found, f"iid, δ = {t}", "iid, every step") for t in THRESHOLDS}
    fewer = {t: base["steps"] / _syncs(found[f"iid, δ = {t}"]) for t in THRESHOLDS}
    within = [t for t in THRESHOLDS if fewer[t] >= 20 and away[t].mean <= 0.02]
    modes = _minus(found, "iid, δ = 0.05, gradients", "iid, δ = 0.05")
    apart = _minus(found, "sorted, δ = 0.1, gradients", "sorted, δ = 0.1")
    injected = _minus(found, "sorted, δ = 0.1, injected", "sorted, δ = 0.1")
    periodic = _minus(found, "sorted, δ = 0.1, injected", "sorted, H = 12, injected")
    everyone = _minus(found, "all data, δ = 0.1", "iid, δ = 0.1")
    sweep = ", ".join(
        f"δ = {t} {away[t]} ({fewer[t]:.0f} times fewer syncs)" for t in THRESHOLDS
    )
    against = [f"δ = {t}: {_against(found, f'iid, δ = {t}')}" for t in THRESHOLDS]
    against += [
        f"sorted{also}: {_against(found, f'sorted, δ = 0.1{also}')}"
        for also in ("", ", injected")
    ]
    counts = [
        f"{_syncs(found[name]):.0f}"
        for name in ("sorted, δ = 0.1, injected", "sorted, H = 12, injected")
    ]
    measured = f"""Loss minus that of synchronous training: {sweep}. Minus a fixed
    period with at most 5 % more bytes: {"; ".join(against)}. Gradients instead of
    parameters: {modes} (IID), {apart} (sorted). Sorted, injected examples: {injected};
    with them, measured syncs ({counts[0]}) minus periodic ones ({counts[1]}):
    {periodic}. All data for everybody instead of IID parts: {everyone}."""
    held = [bool(within), min(modes.low, apart.low) > 0, injected.high < 0]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Loss against syncs, and on sorted shards the bytes."""
    left, right = figure.subplots(1, 2)
    curve = lambda names, at: (
        [at(found[name]) for name in names],
        np.transpose([values(found[name]) for name in names]),
    )
    start = ["iid, every step"]
    curves = {
        "SelSync, δ from 0 to 0.3": start + [f"iid, δ = {t}" for t in THRESHOLDS],
        "fixed period": start + [f"iid, H = {h}" for h in PERIODS],
        "SelSync, gradients": ["iid, δ = 0.05, gradients"],
        "SelSync, all data": ["all data, δ = 0.1"],
    }
    shown = {name: curve(names, _syncs) for name, names in curves.items()}
    panels.lines(left, shown, x="syncs", y="held-out loss", log="x")
    curves = {
        "SelSync": ["sorted, δ = 0.1"],
        "fixed period": ["sorted, H = 12", "sorted, H = 32"],
        "SelSync, injected": ["sorted, δ = 0.1, injected"],
        "fixed period, injected": ["sorted, H = 12, injected"],
    }
    share = lambda cell: cell["relative_bytes"]
    shown = {name: curve(names, share) for name, names in curves.items()}
    label = "bytes, relative to data-parallel (sorted shards)"
    panels.lines(right, shown, x=label, y="held-out loss")


def _syncs(cell: Cell) -> float:
    return float(np.mean(cell["syncs"]))


def _minus(found: Found, name: str, other: str) -> Interval:
    return difference(values(found[name]), values(found[other]))


def _against(found: Found, name: str) -> str:
    """Beside the fixed period that sends the most of those with 5 % more or less."""
    split, most = name.split(",")[0], 1.05 * found[name]["relative_bytes"]
    fixed = {
        other: cell["relative_bytes"]
        for other, cell in found.items()
        if other.startswith(f"{split}, H") and other.count(",") == 1
    }
    no_more = [other for other in fixed if fixed[other] <= most]
    if not no_more:
        return "none sends so little"
    other = max(no_more, key=lambda name: fixed[name])
    gap = _minus(found, name, other)
    who = "better" if gap.low > 0 else "worse" if gap.high < 0 else "as good"
    return f"{gap} ({other.split(', ')[1]} is {who})"


def _selsync(method: Any, threshold: float, steps: int, rate: Any) -> Any:
    return method(momentum(rate, steps), threshold=threshold)


def _fixed(period: int, steps: int, rate: Any) -> Any:
    return lc.local_sgd(momentum(rate, steps), period=period)


def _counted(
    problem: toys.Problem,
    make: Any,
    *,
    steps: int,
    made: Injection | None = None,
    **how: Any,
) -> Cell:
    """A tuned cell with the syncs of each seed, its bytes with the examples given."""
    dense, example = dense_bytes(problem), 4 * (32 + 1)
    gathered = given = 0
    if made is not None:
        problem = toys.mixture(split="sorted", batch_size=made.native)
        how["change"] = partial(_inject, made)
        # The harness gathers what everybody might give; only that of givers is sent.
        gathered = made.given * example * steps
        given = gathered * made.givers // WORKERS
    cell = tuned(problem, make, steps=steps, **how)
    # All flags of a run together are less than one model.
    syncs = [(sent - gathered) // dense for sent in cell["bytes"]]
    sent = [total - gathered + given for total in cell["bytes"]]
    share = interval(sent).mean / steps / dense
    return cell | {"syncs": syncs, "bytes": sent, "relative_bytes": share}


def _inject(made: Injection, batch: Any, key: jax.Array, step: Any) -> Any:
    """The batch and what some workers, the same for all and for every seed, give."""
    shared = jax.random.fold_in(jax.random.key(0), step)
    who = jax.random.choice(shared, WORKERS, (made.givers,), replace=False)

    def add(x):
        pool = gather(x[: made.given], lc.AXIS)[who]
        return jnp.concatenate([x, pool.reshape(-1, *x.shape[1:])])

    return jax.tree.map(add, batch)
