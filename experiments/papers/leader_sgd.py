"""Leader SGD: workers are pulled toward the best of them, not toward their mean."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc
from lowcomm.algorithms.population import LeaderSgdState

from .. import panels, toys
from ..toys import Problem, PyTree
from ..trials import Interval, at_rate, difference, interval, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "Leader SGD"
REFERENCE = (
    "Teng, Gao, Chalus, Choromanska, Goldfarb and Weller, *Leader Stochastic Gradient "
    "Descent for Distributed Training of Deep Learning Models*, 2019, "
    "[1905.10395](https://arxiv.org/abs/1905.10395)."
)
CLAIM = """Faster convergence than elastic averaging and data-parallel SGD on CIFAR-10
and ImageNet, since a leader is a real model while the mean of workers in different,
for instance mirror-image, basins is none; who leads changes often."""
SETTING = """8 workers, τ = 4, pull 0.1 at a refresh and none in between. Matrices: XXᵀ
of rank 3 is fitted to a 20 × 20 matrix with gradient noise 0.3, 200 steps of SGD,
starts apart, exact losses; also 800 steps at rate 0.003. Digits: a network of two
hidden layers, 300 steps of SGD, starts apart or the same, every worker with all the
data or, "shards", with a part of its own, which is what was run first: there one worker
fits its part and leads for good; the last 10 losses decide who leads. Elastic
averaging moves its center by 0.43 of the way to the mean (0.8 on digits) and each
worker by an eighth of that, toward the center as just moved."""
METHODS = ("leader_sgd",)
WORKERS, PERIOD, PULL, WINDOW = 8, 4, 0.1, 10
CENTER = {"matrices": 0.43, "digits": 0.8}
FIXED = {"matrices": 0.003, "digits": 0.1}
NAMES = ("leader", "elastic", "local SGD", "independent", "synchronous")
# Of the starts whether they are apart, and the data.
STARTS = {
    "apart": (True, "whole"),
    "the same": (False, "whole"),
    "apart, shards": (True, "iid"),
}
THREE = NAMES[:3]
BASELINES = (
    *("matrices, local SGD", "matrices, synchronous"),
    *(f"digits, {s}, local SGD" for s in STARTS),
    "digits, apart, synchronous",
)


def cells(scale: Scale) -> Cells:
    """Factors of a matrix, short and long, and digits from both kinds of start."""
    matrices = _matrices()
    run = lambda problem, name, kind, **how: partial(
        tuned,
        problem,
        partial(_make, name, CENTER[kind]),
        seeds=scale.seeds,
        start=None,
        watch=partial(_workers, problem),
        metric="workers' validation",
        **how,
    )
    rates = scale.rates(0.0015, 0.003, 0.006, 0.012, 0.024, 0.048)
    short = {"steps": scale.steps(200), "apart": True}
    long = {"steps": scale.steps(800), "apart": True}
    long["points"] = long["steps"] // 20
    jobs: Cells = {}
    for name in NAMES:
        jobs[f"matrices, {name}"] = run(
            matrices, name, "matrices", rates=rates, **short
        )
    for name in NAMES[:-1]:
        jobs[f"matrices, long, {name}"] = run(
            matrices, name, "matrices", rates=(FIXED["matrices"],), **long
        )
    rates = scale.rates(0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
    shared = {"steps": scale.steps(300), "points": 25, "rates": rates}
    for start in list(STARTS)[:1] if scale.quick else STARTS:
        apart, split = STARTS[start]
        for name in NAMES if start == "apart" else THREE:
            jobs[f"digits, {start}, {name}"] = run(
                toys.digits(split=split), name, "digits", apart=apart, **shared
            )
    return jobs


def verdict(found: Found) -> Verdict:
    """On matrices leader, independent, elastic; on digits, apart, leader, elastic."""
    at = lambda name, step: _looked(found[f"matrices, long, {name}"], step)
    path = {name: [at(name, step) for step in (100, 200)] for name in NAMES[:-1]}
    first = _fewer(path["leader"], path["independent"])
    last = _fewer(path["independent"], path["elastic"])
    loss = lambda name: values(found[name], "workers' loss")
    gap = lambda start, name, how=loss: difference(
        how(f"digits, {start}, leader"), how(f"digits, {start}, {name}")
    )
    fixed = lambda name: at_rate(found[name], FIXED["digits"], "workers' loss")
    apart = gap("apart", "elastic"), gap("apart", "elastic", fixed)
    tuned_matrices = {n: interval(loss(f"matrices, {n}")) for n in NAMES}
    chosen = (
        tuned_matrices["leader"].mean
        < tuned_matrices["independent"].mean
        < tuned_matrices["elastic"].mean
    )
    long = ", ".join(
        f"{name} {np.mean(a):.2f} and {np.mean(b):.2f}" for name, (a, b) in path.items()
    )
    model = lambda name, metric="loss": interval(values(found[name], metric))
    lone = "matrices, long, independent"
    each = lambda start: {
        n: interval(loss(f"digits, {start}, {n}"))
        for n in NAMES
        if f"digits, {start}, {n}" in found
    }
    starts = [s for s in STARTS if f"digits, {s}, leader" in found]
    digits = "; ".join(f"starts {s}: {_each(each(s))}" for s in starts)
    minus = lambda name: ", ".join(f"{gap(s, name)} ({s})" for s in starts)
    early = lambda name: np.asarray(found[name]["curves"]["workers' loss"])[:, 8]
    changes = ", ".join(f"{_changes(found, s)} ({s})" for s in starts)
    measured = f"""Matrices, rate 0.003, the workers' mean loss after 100 and 200 steps:
    {long}; with rates chosen for each, after 200: {_each(tuned_matrices)}. The mean of
    independent workers has a loss of {model(lone)}, the best of them
    {model(lone, "best")}. Digits, the workers' mean loss: {digits}. Leader minus
    elastic: {minus("elastic")}, after a third of the steps
    {gap("apart", "elastic", early)} (apart), at rate 0.1 {apart[1]} (apart); minus
    local SGD at equal bytes: {minus("local SGD")}, minus independent workers that send
    nothing: {gap("apart", "independent")} (apart); where the sign is plus the leader is
    the worse one. Another worker leads, from one look to the next, with a frequency of
    {changes}."""
    held = [first, last, chosen, *(each.high < 0 for each in apart)]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Losses of the workers on matrices, and who leads on digits."""
    left, right = figure.subplots(1, 2)
    curves = {
        name: panels.curve(found[f"matrices, long, {name}"], "workers' loss")
        for name in NAMES[:-1]
    }
    y = "mean loss of the workers, matrices"
    panels.lines(left, curves, x="step", y=y, log="y")
    cell = found["digits, apart, leader"]
    for seed, ranks in enumerate(cell["curves"]["leader"]):
        right.plot(cell["step"], np.array(ranks) + seed * (WORKERS + 2), ".", ms=4)
    middles = [i * (WORKERS + 2) + 3.5 for i in range(len(cell["seeds"]))]
    right.set_yticks(middles, [f"seed {s}" for s in cell["seeds"]])
    right.set_xlabel("step")
    right.set_ylabel("who leads, of 8 workers, digits apart")


def _make(name: str, center: float, rate: Any) -> optax.GradientTransformation:
    inner = optax.sgd(rate)
    if name == "leader":
        return lc.leader_sgd(
            inner, period=PERIOD, pull=PULL, stale_pull=0.0, window=WINDOW
        )
    if name == "elastic":
        return _elastic(inner, center)
    if name == "independent":
        return inner
    return lc.local_sgd(inner, period=1 if name == "synchronous" else PERIOD)


def _elastic(inner: Any, center: float) -> optax.GradientTransformation:
    """Elastic averaging: an anchor that begins at the mean, wherever workers do."""
    tx = lc.rounds(
        inner, optax.sgd(center), pull=center / WORKERS, when=lc.every(PERIOD)
    )
    middle = lambda params: lc.mean().update(
        params, optax.EmptyState(), about="parameters"
    )[0]
    return optax.GradientTransformationExtraArgs(
        lambda params: tx.init(middle(params)), tx.update
    )


def _matrices(size: int = 20, rank: int = 3, noise: float = 0.3) -> Problem:
    """A quarter of ‖XXᵀ − M‖²; noise is in its gradient and not in its value."""
    star = np.random.default_rng(0).normal(size=(size, rank)).astype(np.float32)
    target = star @ star.T

    def exact(x):
        return jnp.sum(jnp.square(x @ x.T - target)) / 4

    def loss(x, drawn):
        return exact(x) + noise * jnp.sum(drawn * (x - jax.lax.stop_gradient(x)))

    return Problem(
        "factors of a matrix",
        WORKERS,
        lambda key: jax.random.normal(key, (size, rank)),
        loss,
        np.zeros(WORKERS, np.int32),
        lambda own, key: jax.random.normal(key, (size, rank)),
        lambda x: {"validation": exact(x), "loss": exact(x)},
    )


def _workers(problem: Problem, params: PyTree, state: Any) -> dict[str, jax.Array]:
    """The mean over workers of what one is judged by, the best, and who leads."""
    each = jax.vmap(problem.judge)(params)
    found = {f"workers' {name}": jnp.mean(x) for name, x in each.items()}
    found["best"] = each["loss"][jnp.argmin(each["validation"])]
    if isinstance(state, LeaderSgdState):
        found["leader"] = jnp.argmin(jnp.mean(state.losses, axis=1))
    return found


def _looked(cell: Any, step: int) -> np.ndarray:
    """The workers' loss of each seed at a step."""
    return np.asarray(cell["curves"]["workers' loss"], float)[
        :, cell["step"].index(step)
    ]


def _fewer(a: Any, b: Any) -> bool:
    """Whether ``a`` is below ``b`` at all steps, by the mean over seeds."""
    return all(np.mean(x) < np.mean(y) for x, y in zip(a, b, strict=True))


def _changes(found: Found, start: str) -> Interval:
    """How often the leader is another one than at the last look."""
    cell = found[f"digits, {start}, leader"]
    ranks = np.asarray(cell["curves"]["leader"], float)[:, 1:]
    return interval((np.diff(ranks) != 0).mean(1))


def _each(named: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in named.items())
