"""DiLoCo: what an outer step adds to averaging, and which outer rate noise wants."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc

from .. import panels
from ..letters import letters
from ..toys import Problem
from ..trials import Cell, cosine, difference, tuned, tuned_both, values
from . import Cells, Found, Scale, Verdict

TITLE = "DiLoCo and the outer rate"
REFERENCE = (
    "Douillard et al., *DiLoCo: Distributed Low-Communication Training of Language "
    "Models*, 2023, [2311.08105](https://arxiv.org/abs/2311.08105); Khaled et al., "
    "*Understanding Outer Optimizers in Local SGD*, 2025, "
    "[2509.10439](https://arxiv.org/abs/2509.10439)."
)
CLAIM = """The best outer rate is above 1 where optimization error dominates and below 1
where noise does; momentum acts as a rate of η/(1 − μ). Recalled: 8 workers with H = 500
reach a perplexity of 15.02, a batch 8 times as large 15.30, one worker 16.23."""
SETTING = """Quadratic in 50 dimensions (Q² with Q = AᵀA, A Gaussian, scaled to
γ λ = 1/2 at most), one worker, 1000 rounds of 50 steps, loss of the last ten rounds,
outer rates of 0.1 to 2, by simulation and by exact recursions for mean and variance.
Then the next byte of Python's sources, two hidden layers, 8 workers with 16 bytes a
step each, 1200 steps of AdamW with a cosine schedule; the inner rate tuned for each
method, and with it the outer one at μ = 0.9."""
METHODS = ("diloco",)
PERIODS = (8, 32)
BASELINES = (
    "synchronous",
    "one worker",
    *(f"local SGD, H = {period}" for period in PERIODS),
)
NOISE = (1e-3, 0.1, 1.0, 10.0, 50.0)  # of a gradient, in each coordinate
ETAS = (0.1, 0.5, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
FINE = tuple(np.geomspace(0.02, 12, 80).tolist())  # η/(1 − μ), in the exact recursions
MOMENTA = (0.0, 0.5, 0.9)
DIMENSIONS, LOCAL, GAMMA = 50, 50, 1e-3
RATES, OUTER, DEFAULT = (0.004, 0.008, 0.016, 0.032, 0.064), (0.0875, 0.175, 0.35), 0.7
SAME = 0.03  # of loss


def cells(scale: Scale) -> Cells:
    """Outer rates against noise, and the outer step against averaging."""
    steps, rounds = scale.steps(1200), scale.steps(1000)
    how: dict[str, Any] = {
        "steps": steps,
        "rates": scale.rates(*RATES),
        "seeds": scale.seeds[:3],
        "points": 5,
    }
    jobs: Cells = {
        "outer rate against noise": partial(_simulated, rounds, seeds=scale.seeds[:2]),
        "exact": partial(_exact, rounds, seeds=scale.seeds[:2]),
        "synchronous": partial(tuned, _problem(8), partial(_local, 1, steps), **how),
        "one worker": partial(tuned, _problem(1), partial(_local, steps, steps), **how),
    }
    for period in PERIODS:
        jobs[f"local SGD, H = {period}"] = partial(
            tuned, _problem(8), partial(_local, period, steps), **how
        )
        jobs[f"DiLoCo, H = {period}"] = partial(
            tuned_both,
            _problem(8),
            partial(_diloco, period, steps),
            others=(*OUTER, DEFAULT),
            **how,
        )
    return jobs


def verdict(found: Found) -> Verdict:
    """The rate falls with noise; momentum is a rate; the outer step beats averaging."""
    best = _best(found["outer rate against noise"]["loss"], ETAS)
    foretold = _best(_of(found, 0.0, "coarse"), ETAS)
    falls = bool(np.all(np.diff(best) <= 0)) and best[0] > 1 > best[-1]
    fine = {mu: _best(_of(found, mu, "fine"), FINE) for mu in MOMENTA}
    # Where noise dominates; without noise plain steps cannot go beyond η = 2.
    ratio = [fine[0.9][i] / fine[0.0][i] for i in (2, 3, 4)]
    acts = all(0.5 <= each <= 2 for each in ratio)
    gap = lambda a, b: difference(values(found[a]), values(found[b]))
    gains = {h: gap(f"DiLoCo, H = {h}", f"local SGD, H = {h}") for h in PERIODS}
    behind = {h: gap(f"DiLoCo, H = {h}", "synchronous") for h in PERIODS}
    alone = gap(f"DiLoCo, H = {PERIODS[0]}", "one worker")
    better = all(gain.high < 0 for gain in gains.values())
    level = behind[PERIODS[0]].mean < SAME and alone.high < 0
    by_period = lambda each: "; ".join(f"H = {h}: {each(h)}" for h in PERIODS)
    listed = lambda x: ", ".join(
        f"{'at least ' * (each == FINE[-1])}{each:.3g}" for each in x
    )
    measured = f"""Best outer rate at noise {listed(NOISE)}: {listed(best)} (the
    recursions say {listed(foretold)}). Best η/(1 − μ) there by the recursions:
    {"; ".join(f"μ = {mu:g}: {listed(fine[mu])}" for mu in MOMENTA)}. Next byte, loss of
    DiLoCo minus that of local SGD at equal bytes: {by_period(gains.get)}; minus
    synchronous AdamW, with H times the bytes: {by_period(behind.get)}; minus one
    worker, H = {PERIODS[0]}: {alone}. Best outer rate:
    {by_period(partial(_chosen, found))}; with {DEFAULT:g} the validation loss is that
    of local SGD {by_period(lambda h: f"{_default(found, h):+.3f}")}."""
    held = [falls, acts, better, level]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Loss against the outer rate: on the quadratic by noise, and on the mixture."""
    left, right = figure.subplots(1, 2)
    seen = np.asarray(found["outer rate against noise"]["loss"], float).mean(0)
    stable = [eta for eta in FINE if eta < 2]  # without momentum
    exact = _of(found, 0.0, "fine").mean(0)[: len(stable)]
    least = exact.min(0)
    shown = {
        f"σ = {s:g}": (stable, exact[:, i] / least[i]) for i, s in enumerate(NOISE)
    }
    panels.lines(left, shown, x="outer rate, μ = 0", y="loss / least loss", log="xy")
    for line, dots in zip(list(left.get_lines()), (seen / least).T, strict=True):
        left.plot(ETAS, dots, "o", color=line.get_color(), markersize=3)
    left.set_xlim(0.09, 2.2)
    left.set_ylim(0.9, 20)
    curves = {}
    for period in PERIODS:
        cell = found[f"DiLoCo, H = {period}"]
        outer = [float(x) for x in cell["others"]]
        losses = np.transpose(cell["others grid"]["loss"])
        curves[f"DiLoCo, H = {period}"] = outer, losses
    ends = curves[f"DiLoCo, H = {PERIODS[0]}"][0]
    for name in BASELINES:
        each = np.array(values(found[name]))
        curves[name] = (ends[0], ends[-1]), np.stack([each, each], 1)
    label = "outer rate, μ = 0.9"
    panels.lines(right, curves, x=label, y="held-out loss", log="x")
    right.set_xticks((*OUTER, DEFAULT), [f"{rate:g}" for rate in (*OUTER, DEFAULT)])
    right.minorticks_off()


def _problem(workers: int) -> Problem:
    return letters(workers=workers, batch_size=16, hidden=32)


def _inner(rate: Any, steps: int) -> optax.GradientTransformation:
    return optax.adamw(cosine(rate, steps))


def _local(period: int, steps: int, rate: Any) -> optax.GradientTransformation:
    return lc.local_sgd(_inner(rate, steps), period=period)


def _diloco(period: int, steps: int, rate: Any, outer: Any) -> Any:
    return lc.diloco(_inner(rate, steps), period=period, outer_lr=outer)


def _quadratic(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Curvatures, and the optimum, a vector of ones, along their directions."""
    a = np.random.default_rng(seed).normal(size=(DIMENSIONS, DIMENSIONS))
    q = a.T @ a
    h, directions = np.linalg.eigh(q @ q)
    return h * 0.5 / GAMMA / h[-1], directions.T @ np.ones(DIMENSIONS)


def _simulated(rounds: int, *, seeds: tuple[int, ...]) -> Cell:
    """The loss of DiLoCo itself, ``[seeds, outer rates, noise]``, without momentum."""
    eta = jnp.array(ETAS)[:, None, None]
    sigma = jnp.array(NOISE)[:, None]
    tx = lc.diloco(optax.sgd(GAMMA), period=LOCAL, outer_lr=eta, momentum=0.0)

    def path(h, optimum, key):
        def step(carry, t):
            params, state = carry
            drawn = jax.random.normal(jax.random.fold_in(key, t), (DIMENSIONS,))
            gradient = lambda x: h * (x - optimum) + sigma * drawn
            update = lambda s, x, t: tx.update(gradient(x), s, x, step=t)
            moves, state = lc.spread(update, in_axes=(0, 0, None))(state, params, t)
            return (params + moves, state), None

        def one(carry, r):
            steps = r * LOCAL + jnp.arange(LOCAL)
            carry, _ = jax.lax.scan(step, carry, steps)
            squares = h * (carry[0][0] - optimum) ** 2
            return carry, squares.sum(-1) / 2

        params = jnp.zeros((1, len(ETAS), len(NOISE), DIMENSIONS))
        first = params, lc.spread(tx.init)(params)
        return jax.lax.scan(one, first, jnp.arange(rounds))[1][-10:].mean(0)

    run = jax.jit(path)
    losses = [run(*map(jnp.float32, _quadratic(s)), jax.random.key(s)) for s in seeds]
    return {"loss": np.stack(losses), "seeds": seeds}


def _exact(rounds: int, *, seeds: tuple[int, ...]) -> Cell:
    """The expected loss ``[seeds, outer rates, noise]`` for each momentum and grid."""
    grids = {"fine": FINE, "coarse": ETAS}
    return {
        f"{name}, μ = {mu:g}": [
            _expected(*_quadratic(seed), mu, np.array(grid), rounds) for seed in seeds
        ]
        for name, grid in grids.items()
        for mu in MOMENTA
    }


def _expected(
    h: np.ndarray, optimum: np.ndarray, mu: float, effective: np.ndarray, rounds: int
) -> np.ndarray:
    """Mean and covariance of (a, v) in each direction, round after round."""
    eta = effective[:, None] * (1 - mu)
    keep = (1 - GAMMA * h) ** LOCAL
    noise = GAMMA**2 * (1 - keep**2) / (1 - (1 - GAMMA * h) ** 2)  # at σ = 1
    turn = np.zeros((len(effective), len(h), 2, 2))
    turn[..., 0, 0], turn[..., 0, 1] = 1 - eta * (1 + mu) * (1 - keep), -eta * mu**2
    turn[..., 1, 0], turn[..., 1, 1] = 1 - keep, mu
    enters = np.stack([-eta * (1 + mu) + 0 * h, np.ones(turn.shape[:2])], -1)
    added = noise[:, None, None] * enters[..., :, None] * enters[..., None, :]
    mean = np.stack([-optimum + 0 * eta, np.zeros(turn.shape[:2])], -1)
    spread, seen = np.zeros_like(turn), []
    with np.errstate(over="ignore", invalid="ignore"):
        for r in range(rounds):
            mean = (turn @ mean[..., None])[..., 0]
            spread = turn @ spread @ turn.swapaxes(-1, -2) + added
            if r >= rounds - 10:
                bias = (h * mean[..., 0] ** 2).sum(-1) / 2
                variance = (h * spread[..., 0, 0]).sum(-1) / 2
                seen.append(bias[:, None] + variance[:, None] * np.square(NOISE))
    return np.mean(seen, 0)


def _of(found: Found, mu: float, grid: str) -> np.ndarray:
    return np.asarray(found["exact"][f"{grid}, μ = {mu:g}"], float)


def _best(losses: Any, grid: tuple[float, ...]) -> list[float]:
    """The rate of the least mean loss for each noise."""
    mean = np.nan_to_num(np.asarray(losses, float).mean(0), nan=np.inf)
    return [grid[i] for i in mean.argmin(0)]


def _chosen(found: Found, period: int) -> str:
    return f"{found[f'DiLoCo, H = {period}']['other']:g}"


def _default(found: Found, period: int) -> float:
    """Of DiLoCo with its default outer step, above that of local SGD."""
    local = found[f"local SGD, H = {period}"]["final"]["validation"]
    cell = found[f"DiLoCo, H = {period}"]
    return float(cell["others"][f"{DEFAULT:g}"] - np.mean(local))
