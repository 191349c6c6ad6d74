"""EF21: compressed differences, where workers differ and where gradients are noisy."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc

from .. import panels, toys
from ..trials import Cell, difference, interval, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "EF21 and EF21-SGDM"
REFERENCE = (
    "Richtárik, Sokolov and Fatkhullin, *EF21: A New, Simpler, Theoretically Better, "
    "and Practically Faster Error Feedback*, 2021, "
    "[2106.05203](https://arxiv.org/abs/2106.05203); Fatkhullin, Tyurin and Richtárik, "
    "*Momentum Provably Improves Error Feedback!*, 2023, "
    "[2305.15155](https://arxiv.org/abs/2305.15155)."
)
CLAIM = """Where workers differ, error feedback stops at a floor, and EF21 converges to
the optimum at a constant rate of learning. With stochastic gradients EF21 tracks the
noise, however small its steps; momentum before the compression mends that."""
SETTING = """Least squares of 4 workers in 10 dimensions, top-1, 3000 steps of 0.05; a
quadratic with skew noise, top-1, at three rates; 8×8 digits, IID and sorted by label, 8
workers with batches of 16, 300 steps of plain SGD at a constant rate, 1 % of each
layer. Local SGD at a period of 64 sends as many bytes."""
METHODS = ("ef21",)
SPLITS = ("iid", "sorted")
BASELINES = tuple(
    f"{split}: {name}"
    for split in SPLITS
    for name in ("dense", "error feedback", "local SGD, H = 64")
)
RATES = (0.06, 0.1, 0.2, 0.3, 0.6, 1.0, 1.5, 2.5)
SHARE = 0.01
MOMENTA = (0.9, 0.97)
SMALL = (0.02, 0.005, 0.00125)  # the rates at which the floor of the noise is sought
TOP = lc.top_k(SHARE)


def _averaged(rate: Any) -> optax.GradientTransformation:
    """Error feedback of the same average of gradients as EF21-SGDM compresses."""
    smooth = optax.ema(MOMENTA[0], debias=False)
    return optax.chain(smooth, lc.error_feedback(TOP), optax.sgd(rate))


MAKE: dict[str, Any] = {
    "dense": lambda rate: lc.data_parallel(optax.sgd(rate)),
    "error feedback": lambda rate: lc.top_k_sgd(optax.sgd(rate), fraction=SHARE),
    "error feedback, averaged 0.9": _averaged,
    "EF21": lambda rate: lc.ef21(optax.sgd(rate), TOP),
    "EF21-SGDM, 0.9": lambda rate: lc.ef21(optax.sgd(rate), TOP, momentum=0.9),
    "EF21-SGDM, 0.97": lambda rate: lc.ef21(optax.sgd(rate), TOP, momentum=0.97),
    "local SGD, H = 64": lambda rate: lc.local_sgd(optax.sgd(rate), period=64),
}


def cells(scale: Scale) -> Cells:
    """The digits on both splits, and the two exact ones."""
    trained: Cells = {
        f"{split}: {name}": partial(
            tuned,
            toys.digits(split=split),
            make,
            steps=scale.steps(300),
            rates=scale.rates(*RATES),
            seeds=scale.seeds,
            points=25,
        )
        for split in SPLITS
        for name, make in MAKE.items()
    }
    return trained | {
        "least squares": partial(_least_squares, scale.seeds),
        "noise": partial(_noise, scale.steps(40)),
    }


def verdict(found: Found) -> Verdict:
    """No floor where workers differ; one of the noise, which momentum lowers."""
    exact, noise = found["least squares"], found["noise"]
    last = {name: np.array(exact[name])[:, -1] for name in exact["names"]}
    no_floor = max(last["EF21"]) < 1e-9 < 1e-3 < min(last["error feedback"])
    ordered = min(last["no feedback"] - last["error feedback"]) > 0
    floor = {name: np.array(noise[name]) for name in noise["names"]}  # [rates, runs]
    # From the last rate but one to the last, which is a quarter of it.
    falls = {name: x[-2].mean() / x[-1].mean() for name, x in floor.items()}
    tracks = falls["EF21"] < 2 and falls["EF21-SGDM"] > 3
    told, worse, mended, behind = [], [], [], []
    for split in SPLITS:
        of = lambda name, split=split: values(found[f"{split}: {name}"])
        gap = lambda a, b, of=of: difference(of(a), of(b))
        worse.append(gap("EF21", "error feedback"))
        mended.append(gap("EF21-SGDM, 0.9", "EF21"))
        behind.append(gap("EF21-SGDM, 0.9", "error feedback"))
        loss = ", ".join(f"{name} {interval(of(name))}" for name in MAKE)
        others = "error feedback, averaged 0.9", "local SGD, H = 64"
        average, local = (gap("EF21-SGDM, 0.9", other) for other in others)
        told.append(
            f"{split}: {loss}; EF21 minus error feedback {worse[-1]}, EF21-SGDM (0.9) "
            f"minus EF21 {mended[-1]}, minus error feedback {behind[-1]}, minus error "
            f"feedback of the same average {average}, minus local SGD at as many bytes "
            f"{local}"
        )
    middle = lambda x: f"{np.median(x):.2g} ({min(x):.2g} to {max(x):.2g})"
    held = [
        bool(no_floor and ordered),
        bool(tracks),
        all(gap.low > 0 for gap in worse) and all(gap.high < 0 for gap in mended),
    ]
    measured = f"""Distance to the optimum of least squares, median and range:
    {", ".join(f"{name} {middle(x)}" for name, x in last.items())}. Squared gradient in
    skew noise at rates of {", ".join(f"{rate:g}" for rate in SMALL)}: {
        "; ".join(
            f"{name} {', '.join(f'{x.mean():.2g}' for x in each)}"
            for name, each in floor.items()
        )
    }. Loss on digits, {". ".join(told)}. EF21-SGDM is behind plain error feedback on
    {sum(gap.low > 0 for gap in behind)} of {len(SPLITS)} splits."""
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Distances on least squares, and losses on sorted digits."""
    left, right = figure.subplots(1, 2)
    exact = found["least squares"]
    distances = {name: (exact["step"], exact[name]) for name in exact["names"]}
    panels.lines(
        left, distances, x="steps, least squares", y="distance to optimum", log="y"
    )
    curves = {name: panels.curve(found[f"sorted: {name}"]) for name in MAKE}
    panels.lines(right, curves, x="steps, sorted digits", y="held-out loss", log="y")
    right.set_ylim(top=20)  # room for the legend


def _run(tx: Any, start: Any, gradient: Any, keys: Any) -> jax.Array:
    """The path ``[steps, d]`` of workers, of each of which there is one gradient."""

    def worker(x, own):
        def body(carry, t_and_key):
            x, state = carry
            t, key = t_and_key
            moves, state = tx.update(gradient(x, own, key), state, x, step=t)
            return (x + moves, state), x + moves

        times = jnp.arange(len(keys))
        return jax.lax.scan(body, (x, tx.init(x)), (times, keys))[1]

    return lc.spread(worker)(*start)[0]


def _least_squares(seeds: tuple[int, ...], steps: int = 3000) -> Cell:
    """Distances to the optimum of four workers' least squares, in double precision."""
    one, rate = lc.top_k(0.1), 0.05
    make = {
        "no feedback": optax.chain(lc.compressed_mean(one), optax.sgd(rate)),
        "error feedback": optax.chain(lc.error_feedback(one), optax.sgd(rate)),
        "EF21": lc.ef21(optax.sgd(rate), one),
    }
    gradient = lambda x, own, key: own[0].T @ (own[0] @ x - own[1]) / 20
    path = lambda tx, *own: _run(tx, (jnp.zeros((4, 10)), own), gradient, zeros)
    at = [*range(0, steps, steps // 100), steps - 1]
    found: dict[str, Any] = {name: [] for name in make}
    with jax.enable_x64(True):
        zeros = jnp.zeros(steps)
        run = {name: jax.jit(partial(path, tx)) for name, tx in make.items()}
        for seed in seeds:
            rng = np.random.default_rng(seed)
            a, b = rng.normal(size=(4, 20, 10)), rng.normal(size=(4, 20))
            best = np.linalg.solve(
                np.einsum("wni,wnj->ij", a, a), np.einsum("wni,wn->i", a, b)
            )
            for name, program in run.items():
                distance = np.linalg.norm(np.asarray(program(a, b)) - best, axis=1)
                found[name].append(distance[at])
    return found | {"names": list(make), "step": [t + 1 for t in at], "seeds": seeds}


def _noise(times: int, runs: int = 64) -> Cell:
    """The mean squared gradient of ``|x|²/2`` in the last quarter, in skew noise.

    There are ``times`` over the rate steps. One worker in two dimensions, the noise one
    of (2, 0), (0, 1) and (−2, −1), so that what is largest is not right on average; an
    example such as the second paper's lower bound, recalled, has.
    """
    vectors = jnp.array([[2.0, 0.0], [0.0, 1.0], [-2.0, -1.0]])
    half = lc.top_k(0.5)
    make: dict[str, Any] = {
        "error feedback": lambda rate: optax.chain(
            lc.error_feedback(half), optax.sgd(rate)
        ),
        "EF21": lambda rate: lc.ef21(optax.sgd(rate), half),
        "EF21-SGDM": lambda rate: lc.ef21(optax.sgd(rate), half, momentum=1 - rate),
    }
    gradient = lambda x, own, key: x + vectors[jax.random.randint(key, (), 0, 3)]
    start = jnp.array([[0.0, -0.1]]), jnp.zeros((1, 1))
    found: dict[str, Any] = {}
    for name, build in make.items():

        def floor(seed, rate, build=build):
            steps = round(times / rate)
            keys = jax.random.split(jax.random.key(seed), steps)
            path = _run(build(rate), start, gradient, keys)
            return jnp.mean(jnp.sum(path[-(steps // 4) :] ** 2, axis=1))

        each = [
            jax.jit(jax.vmap(partial(floor, rate=rate)))(jnp.arange(runs))
            for rate in SMALL
        ]
        found[name] = [np.asarray(x).tolist() for x in each]
    return found | {"names": list(make), "rates": SMALL}
