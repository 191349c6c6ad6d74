"""NoLoCo: outer steps with one random partner, and no all-reduce anywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc
from lowcomm.topology import Graph

from .. import panels, toys
from ..trials import Cell, difference, drift, interval, momentum, train, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "NoLoCo"
REFERENCE = (
    "Kolehmainen et al., *NoLoCo: No-all-reduce Low Communication Training Method for "
    "Large Models*, 2025, [2506.10911](https://arxiv.org/abs/2506.10911)."
)
CLAIM = """Outer steps on the mean with one random partner a round (H = 50, η = 0.7, μ =
0.5 in the released code, beside a DiLoCo with H = 100, η = 0.7, μ = 0.3) train without
an all-reduce, as well as DiLoCo (recalled). Derived here, not the paper's: of M workers
at rest the disagreement shrinks in mean square for η < 2 (1 − μ²) as M grows; with
DiLoCo's μ = 0.9 they drift apart."""
SETTING = """Gaussian mixture, 8 workers, 2000 steps of momentum SGD, rates tuned for
each run, pairs drawn anew for 16 rounds that repeat; judged are the mean of the workers
and, on average, one worker. Bytes are payloads; a ring's all-reduce moves up to twice
as many. At rest: 5 sets of 16 groups of 8 workers in 256
dimensions, 40 rounds of matchings drawn for each group."""
METHODS = ("noloco",)
EQUAL = ("DiLoCo, μ = 0.5", "local SGD", "gossip")
ONE_STEP = "iid, one step on 50 batches"
BASELINES = (
    "iid, synchronous",
    ONE_STEP,
    *(f"{split}, {name}" for split in ("iid", "sorted") for name in EQUAL),
)
MOMENTA, OUTER = (0.0, 0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95), 0.7
SETS, GROUPS, WORKERS, ROUNDS = 5, 16, 8, 40


def cells(scale: Scale) -> Cells:
    """Partners and all-reduces, both splits, short rounds at a high momentum."""
    steps = scale.steps(2000)
    rates = scale.rates(0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2)
    low = scale.rates(0.0015625, 0.003125, 0.00625, 0.0125, 0.025, 0.05)
    pairs = lc.random_matchings(WORKERS, rounds=16)
    no, di = partial(_noloco, pairs, steps), partial(_diloco, steps)
    runs: dict[str, Any] = {
        "iid, synchronous": partial(_local, steps, 1),
        "iid, NoLoCo": partial(no, 50, 0.5),
        "iid, DiLoCo, H = 100, μ = 0.3": partial(di, 100, 0.3),
        "sorted, NoLoCo": partial(no, 50, 0.5),
        "iid, NoLoCo, H = 10": partial(no, 10, 0.5),
        "iid, NoLoCo, H = 10, μ = 0.9": partial(no, 10, 0.9),
        "iid, DiLoCo, H = 10, μ = 0.9": partial(di, 10, 0.9),
    }
    for split in ("iid", "sorted"):
        runs[f"{split}, DiLoCo, μ = 0.5"] = partial(di, 50, 0.5)
        runs[f"{split}, local SGD"] = partial(_local, steps, 50)
        runs[f"{split}, gossip"] = partial(_gossip, pairs, steps, 50)
    jobs: Cells = {"at rest": _at_rest}
    for name, make in runs.items():
        problem = toys.mixture(split=name.split(",")[0])
        jobs[name] = partial(
            tuned,
            problem,
            make,
            steps=steps,
            rates=low if "μ = 0.9" in name else rates,
            seeds=scale.seeds,
            watch=partial(_apart, problem),
        )
    jobs[ONE_STEP] = partial(
        tuned,
        toys.mixture(batch_size=16 * 50),
        partial(_local, steps // 50, 1),
        steps=steps // 50,
        instead_of=steps,
        rates=scale.rates(0.1, 0.2, 0.4, 0.8, 1.6, 3.2),
        seeds=scale.seeds,
        points=1,
    )
    return jobs


def verdict(found: Found) -> Verdict:
    """The law of the disagreement, its consequence in training, and the loss."""
    rest = found["at rest"]
    growth = np.array(rest["growth"], float)
    seen = [interval(each) for each in growth.T]
    law = [_radius(OUTER, μ, WORKERS) ** 0.5 for μ in MOMENTA]
    lawful = all(abs(s.mean - x) < 0.02 for s, x in zip(seen, law, strict=True))
    high, low = (_kept(found, f"iid, NoLoCo, H = 10{m}") for m in (", μ = 0.9", ""))
    drifts = interval(high).low > 0.5 and interval(low).high < 0.1
    gap = {
        (split, name): difference(
            values(found[f"{split}, NoLoCo"]), values(found[f"{split}, {name}"])
        )
        for split in ("iid", "sorted")
        for name in EQUAL
    }
    as_good = gap["iid", EQUAL[0]].mean < 0.03
    against = lambda name: difference(values(found["iid, NoLoCo"]), values(found[name]))
    of = lambda split: ", ".join(f"{name} {gap[split, name]}" for name in EQUAL)
    one = lambda name: difference(values(found[name], "one"), values(found[name]))
    pairs = ", ".join(
        f"{μ:g}: {s} ({x:.3f})" for μ, s, x in zip(MOMENTA, seen, law, strict=True)
    )
    better = [f"{n} ({s})" for (s, n), each in gap.items() if each.low > 0]
    ends = {
        way: np.mean(values(found[f"iid, {way}, H = 10, μ = 0.9"]))
        for way in ("NoLoCo", "DiLoCo")
    }
    measured = f"""At rest the disagreement is multiplied each round, for μ, by (law)
    {pairs}. In training with H = 10, the distance of workers at the end relative to its
    largest: μ = 0.5 {interval(low)}, μ = 0.9 {interval(high)}, where the loss ends at
    {ends["NoLoCo"]:.3g}, DiLoCo's at {ends["DiLoCo"]:.3g}. Loss of NoLoCo minus that of
    others at equal bytes, IID: {of("iid")}; sorted: {of("sorted")}; better than NoLoCo
    at equal bytes: {", ".join(better) or "none"}. IID, minus DiLoCo with H = 100, μ =
    0.3, for half of the bytes: {against("iid, DiLoCo, H = 100, μ = 0.3")}; minus
    synchronous training: {against("iid, synchronous")}; minus one synchronous step on
    50 batches: {against(ONE_STEP)}. One worker of NoLoCo minus their mean: IID
    {one("iid, NoLoCo")}, sorted {one("sorted, NoLoCo")}."""
    held = [lawful, drifts, as_good]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """The law of the disagreement, and the distance of workers in training."""
    left, right = figure.subplots(1, 2)
    μ = np.linspace(0, 0.97, 98)
    law = [_radius(OUTER, each, WORKERS) ** 0.5 for each in μ]
    rest = found["at rest"]
    curves = {"law": (μ, [law]), "measured": (rest["momenta"], rest["growth"])}
    label = f"disagreement, times a round, η = {OUTER:g}"
    panels.lines(left, curves, x="outer momentum μ", y=label)
    left.axhline(1, color="#888888", linewidth=0.8)
    paths = {}
    for name in (
        "NoLoCo, H = 10, μ = 0.9",
        "NoLoCo, H = 10",
        "NoLoCo",
        "gossip",
    ):
        cell = found[f"iid, {name}"]
        each = np.array(cell["curves"]["drift"], float)
        paths[name] = cell["step"][1:], each[:, 1:]
    label = "distance of workers from their mean"
    panels.lines(right, paths, x="step", y=label, log="y")


def _radius(eta: float, mu: float, workers: int) -> float:
    """By what the mean square of the disagreement is multiplied in a round, in the end.

    The map of (Σ‖d‖², Σ d·v, Σ‖v‖²), where d is a worker's distance from the mean and
    v its momentum, over a partner drawn from the others: with r = W a − a and
    κ = M/(M − 1), Σ r·r = κ/2 Σ d·d, Σ r·d = −κ/2 Σ d·d, Σ r·v = −κ/2 Σ d·v.
    """
    k = workers / (workers - 1)
    v = np.array([eta**2 * k / 2, -mu * eta * k, mu**2])
    cross = np.array([-eta * k / 2, mu, 0]) + v
    square = np.array([1 - eta * k, 2 * mu, 0]) + v
    return abs(np.linalg.eigvals(np.array([square, cross, v]))).max()


def _kept(found: Found, name: str) -> np.ndarray:
    """The distance of workers at the end, relative to the largest that was seen."""
    path = np.array(found[name]["curves"]["drift"], float)
    return path[:, -1] / path.max(1)


def _apart(problem: toys.Problem, params: Any, state: Any) -> dict[str, jax.Array]:
    """To watch: the distance of workers from their mean, and the loss of one."""
    return drift(params, state) | {
        "one": jax.vmap(problem.judge)(params)["loss"].mean()
    }


def _noloco(pairs: Graph, steps: int, period: int, mu: float, rate: Any):
    inner = momentum(rate, steps)
    return lc.noloco(inner, pairs, period=period, outer_lr=OUTER, momentum=mu)


def _diloco(steps: int, period: int, mu: float, rate: Any):
    inner = momentum(rate, steps)
    return lc.diloco(inner, period=period, outer_lr=OUTER, momentum=mu)


def _local(steps: int, period: int, rate: Any) -> optax.GradientTransformation:
    return lc.local_sgd(momentum(rate, steps), period=period)


def _gossip(pairs: Graph, steps: int, period: int, rate: Any):
    inner = momentum(rate, steps)
    return lc.average(inner, exchange=lc.gossip(pairs), when=lc.every(period))


def _at_rest() -> Cell:
    """The growth a round of the root mean square, over groups with their own pairs."""
    graph = _groups(SETS * GROUPS, ROUNDS)
    problem = toys.Problem(
        "at rest",
        graph.size,
        lambda key: jax.random.normal(key, (256,)),
        lambda x, nothing: 0 * x.sum(),
        np.zeros(graph.size, np.int32),
        lambda own, key: own,
        lambda x: {"loss": jnp.zeros(())},
    )

    def watch(params, state):
        by_group = params.reshape(SETS, GROUPS, WORKERS, -1)
        far = by_group - by_group.mean(2, keepdims=True)
        return {"distance": jnp.sqrt(jnp.mean(far**2, axis=(1, 2, 3)))}

    found = train(
        problem,
        lambda mu: lc.noloco(
            optax.sgd(0.0), graph, period=1, outer_lr=OUTER, momentum=mu
        ),
        steps=ROUNDS,
        rates=MOMENTA,
        seeds=[0],
        points=ROUNDS,
        watch=watch,
        start=None,
        apart=True,
    )
    late = np.log(found["distance"][:, 0, ROUNDS // 4 :])  # [momenta, rounds, sets]
    slopes = [np.polyfit(np.arange(len(each)), each, 1)[0] for each in late]
    return {"momenta": MOMENTA, "growth": np.exp(slopes).T}


def _groups(groups: int, rounds: int) -> Graph:
    """Groups of workers side by side, each with random matchings of its own."""
    each = [lc.random_matchings(WORKERS, rounds=rounds, seed=g) for g in range(groups)]
    size = groups * WORKERS
    keep = tuple(range(size))

    def partners(r):
        own = [np.array(graph.rounds[r][1][1]) for graph in each]
        both = [WORKERS * g + partner for g, partner in enumerate(own)]
        return tuple(np.concatenate(both).tolist())

    pairs = tuple(((0.5, keep), (0.5, partners(r))) for r in range(rounds))
    return Graph("groups", size, pairs)
