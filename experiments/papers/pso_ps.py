"""PSO-PS: workers fly toward the best positions found, and are not averaged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc
from lowcomm.exchange import Exchange

from .. import panels, toys
from ..toys import Problem, PyTree
from ..trials import at_rate, difference, interval, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "PSO-PS"
REFERENCE = (
    "Ye, Han, Sun and Lv, *PSO-PS: Parameter Synchronization with Particle Swarm "
    "Optimization for Distributed Training of Deep Neural Networks*, 2020, "
    "[2009.03816](https://arxiv.org/abs/2009.03816)."
)
CLAIM = """Workers that fly toward their own and everybody's best past position at each
synchronization, and are not averaged, are competitive with peer methods on MNIST and
CIFAR-10 at several periods."""
SETTING = """8×8 digits, IID, a network of two hidden layers, 8 workers, 320 steps of
plain SGD, rate tuned for each run by the workers' mean validation loss. Coefficients
0.5 (the paper's are unknown); fitness is the loss on 128 training examples that all
workers share, or on the minibatch of the step."""
METHODS = ("pso_ps",)
PERIODS, RATE = (4, 16), 0.2
NAMES = (
    *("averaging", "copy the best", "swarm", "swarm, no inertia"),
    *("swarm, no memory", "swarm, minibatch fitness"),
)
BASELINES = ("synchronous", "independent", *(f"averaging, τ = {t}" for t in PERIODS))
MEAN = "workers' accuracy"


def cells(scale: Scale) -> Cells:
    """Every rule at both periods, and all together or apart at each step."""
    problem = toys.digits()
    fitness = _probe(problem)
    makes: dict[str, Any] = {"synchronous": partial(_make, "averaging", 1, fitness)}
    makes["independent"] = optax.sgd
    for period in PERIODS[-1:] if scale.quick else PERIODS:
        for name in NAMES:
            makes[f"{name}, τ = {period}"] = partial(_make, name, period, fitness)
    return {
        name: partial(
            tuned,
            problem,
            make,
            steps=scale.steps(320),
            rates=scale.rates(0.025, 0.05, 0.1, 0.2, 0.4, 0.8),
            seeds=scale.seeds,
            watch=partial(_workers, problem),
            metric="workers' validation",
        )
        for name, make in makes.items()
    }


def verdict(found: Found) -> Verdict:
    """The swarm trains, and better by a shared probe than by minibatches."""
    periods = _periods(found)
    of = lambda name, t, metric=MEAN: values(found[f"{name}, τ = {t}"], metric)
    fixed = lambda name, t, metric=MEAN: at_rate(
        found[f"{name}, τ = {t}"], RATE, metric
    )
    swarm, small = "swarm", "swarm, minibatch fitness"
    trains = all(np.mean(of(swarm, t)) > 0.8 for t in periods)
    probe = {t: difference(fixed(swarm, t), fixed(small, t)) for t in periods}
    chosen = {t: difference(of(swarm, t), of(small, t)) for t in periods}
    lost = {
        t: (
            difference(of("averaging", t), of(swarm, t)),
            difference(of("averaging", t, "accuracy"), of(swarm, t, "accuracy")),
        )
        for t in periods
    }
    alone = {
        t: difference(of(swarm, t), values(found["independent"], MEAN)) for t in lost
    }
    said = lambda each: "; ".join(f"τ = {t}: {each(t)}" for t in periods)
    row = lambda name, t: (
        f"{name} {interval(of(name, t))} / {interval(of(name, t, 'accuracy'))}"
    )
    measured = f"""Accuracy of the mean worker / of the mean model, rates chosen for
    each: {said(lambda t: ", ".join(row(name, t) for name in NAMES))}. A shared probe
    minus minibatch fitness, mean worker: {said(chosen.get)}; at rate {RATE:g}
    {said(probe.get)}. What the swarm loses to averaging at equal bytes, mean worker and
    mean model: {said(lambda t: f"{lost[t][0]} and {lost[t][1]}")}. What its mean worker
    has more than one on its own: {said(alone.get)}. The claim to be competitive is
    {"not borne out" if all(each[0].low > 0 for each in lost.values()) else "open"}
    here."""
    held = [trains, *(gap.low > 0 for gap in (*probe.values(), *chosen.values()))]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Accuracy of the mean worker and of the mean model against the period."""
    left, right = figure.subplots(1, 2, sharey=True)
    periods = _periods(found)
    for panel, metric, what in (
        (left, MEAN, "mean worker"),
        (right, "accuracy", "mean model"),
    ):
        curves = {
            name: (
                periods,
                np.transpose(
                    [values(found[f"{name}, τ = {t}"], metric) for t in periods]
                ),
            )
            for name in NAMES
        }
        x = "steps between synchronizations"
        panels.lines(panel, curves, x=x, y=f"accuracy, {what}", log="x")
        panel.set_xticks(periods, periods)
        panel.minorticks_off()


def _periods(found: Found) -> list[int]:
    return [t for t in PERIODS if f"{NAMES[0]}, τ = {t}" in found]


def _make(
    name: str, period: int, fitness: Callable[[PyTree], jax.Array], rate: Any
) -> optax.GradientTransformation:
    inner = optax.sgd(rate)
    if name == "averaging":
        return lc.local_sgd(inner, period=period)
    if name == "copy the best":
        best = _best(fitness)
        return lc.average(inner, exchange=best, when=lc.every(period))
    how: dict[str, Any] = {"fitness": fitness}
    if name == "swarm, no inertia":
        how["inertia"] = 0.0
    if name == "swarm, no memory":
        how["history"] = False
    if name == "swarm, minibatch fitness":
        how["fitness"] = None
    return lc.pso_ps(inner, period=period, **how)


def _best(fitness: Callable[[PyTree], jax.Array]) -> Exchange:
    """What the fittest worker holds."""
    leader = lc.leader()

    def update(updates, state, params=None, **extra):
        return leader.update(updates, state, params, score=fitness(updates), **extra)

    return Exchange(leader.init, update)


def _probe(problem: Problem) -> Callable[[PyTree], jax.Array]:
    """The loss on one batch of every worker's, 128 training examples together."""
    keys = jax.random.split(jax.random.key(7), problem.workers)
    drawn = jax.vmap(problem.draw)(jnp.asarray(problem.own), keys)
    probe = jax.tree.map(lambda x: np.asarray(x.reshape(-1, *x.shape[2:])), drawn)
    return lambda params: problem.loss(params, probe)


def _workers(problem: Problem, params: PyTree, state: Any) -> dict[str, jax.Array]:
    """The mean over workers of what one is judged by."""
    each = jax.vmap(problem.judge)(params)
    return {f"workers' {name}": jnp.mean(x) for name, x in each.items()}
