"""LAGS-SGD: top-k of each layer, as many as hide under the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc
from lowcomm.planning.sparsity import (
    entries_to_send,
    ethernet_seconds,
    largest_speedup,
    selection_seconds,
)
from lowcomm.transport import reduce_mean

from .. import panels, toys
from ..trials import Cell, difference, interval, train, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "LAGS-SGD"
REFERENCE = (
    "Shi, Tang, Wang, Zhao and Chu, *Layer-wise Adaptive Gradient Sparsification for "
    "Distributed Deep Learning with Convergence Guarantees*, 2020, "
    "[1911.08727](https://arxiv.org/abs/1911.08727)."
)
CLAIM = """Top-k layer by layer, as many of each layer as its exchange hides under the
backward pass of the next, is faster on 16 GPUs with 1 Gbit/s Ethernet than dense
training and than top-k of the whole gradient, without obvious loss of accuracy."""
SETTING = """8×8 digits, IID and sorted by label, a network of two hidden layers, 8
workers with batches of 16, 300 steps of plain SGD at a constant rate, 1 %. Seconds are
modelled: every layer a thousand times as large, on the paper's 1 Gbit/s Ethernet, 0.2 s
of backward and 0.1 s of forward pass; as many steps as fit into 120 s, sorted by label,
where biases travel whole and take no time. Local SGD sends at a period of 64 as many
bytes as 1 %."""
METHODS = ("lags_sgd",)
SPLITS = ("iid", "sorted")
RATES = (0.06, 0.1, 0.2, 0.3, 0.6, 1.0, 1.5, 2.5)
SLOW = (0.0075, 0.015, 0.03, 0.06, 0.1, 0.2, 0.3, 0.6)  # for a thousandth
SHARE = 0.01
TOTAL = 120.0  # modelled seconds
TIMED = "in 120 s"
BASELINES = (
    *(f"{split}: {n}" for split in SPLITS for n in ("dense", "global top-k")),
    *(f"{split}: local SGD, H = 64" for split in SPLITS),
    *(f"{TIMED}: {name}" for name in ("dense", "whole, 1%", "local SGD, H = 64")),
)
# In backward order: path, its entries a thousand times over, seconds of backward pass.
LAYERS = (
    ("layer2/w", 640_000, 0.015),
    ("layer1/w", 4_096_000, 0.0925),
    ("layer0/w", 4_096_000, 0.0925),
)
SIZES = [size for _, size, _ in LAYERS]
BACKWARD = [seconds for *_, seconds in LAYERS]
FORWARD = 0.1


class Plan(NamedTuple):
    """How a step goes: what of each layer travels, and when."""

    entries: tuple[int, ...]  # in backward order
    one_message: bool = False  # of the whole gradient, after the backward pass


class Timed(NamedTuple):
    """A method and the modelled seconds of its step."""

    make: Any
    seconds: float


def cells(scale: Scale) -> Cells:
    """Loss by steps on both splits, the diagnostic, and loss by modelled seconds."""
    how: dict[str, Any] = {"rates": scale.rates(*RATES), "seeds": scale.seeds}
    make: dict[str, Any] = {
        "dense": lambda rate: lc.data_parallel(optax.sgd(rate)),
        "global top-k": _global,
        "layer-wise": lambda rate: lc.lags_sgd(optax.sgd(rate), SHARE, whole=1),
        "layer-wise, small leaves whole": lambda rate: lc.lags_sgd(
            optax.sgd(rate), SHARE
        ),
        "local SGD, H = 64": lambda rate: lc.local_sgd(optax.sgd(rate), period=64),
    }
    jobs: Cells = {
        f"{split}: {name}": partial(
            tuned,
            toys.digits(split=split),
            made,
            steps=scale.steps(300),
            points=25,
            **how,
        )
        for split in SPLITS
        for name, made in make.items()
    }
    for split in SPLITS:
        jobs[f"delta, {split}"] = partial(_delta, split, scale.steps(300), scale.seeds)
    for name, timed in _timed().items():
        slow = {"rates": scale.rates(*SLOW)} if name == "layers, 0.1%" else {}
        steps = max(2, scale.steps(int(TOTAL / timed.seconds)) // 10) * 10
        jobs[f"{TIMED}: {name}"] = partial(
            tuned, toys.digits(split="sorted"), timed.make, steps=steps, **how | slow
        )
    return jobs | {"modelled seconds": _modelled}


def verdict(found: Found) -> Verdict:
    """Layers as the whole by steps, sooner within the bound, and the plan no worse."""
    told, alike = [], []
    for split in SPLITS:
        of = lambda name, split=split: values(found[f"{split}: {name}"])
        gap = {
            other: difference(of("layer-wise"), of(other))
            for other in ("dense", "global top-k", "local SGD, H = 64")
        }
        alike += [gap[other].mean < 0.03 for other in ("dense", "global top-k")]
        told.append(
            f"{split}: loss of dense SGD {interval(of('dense'))}, layer-wise minus "
            + ", ".join(f"{other} {x}" for other, x in gap.items())
            + ", with small leaves whole "
            f"{interval(of('layer-wise, small leaves whole'))}"
        )
    model = found["modelled seconds"]
    step = dict(zip(model["names"], model["seconds"], strict=True))
    bound = model["bound"]
    speedup = step["whole, 1%"] / step["layers, 1%"]
    sooner = 1 < speedup <= bound and step["layers, adaptive"] < step["dense"]
    timed = {name: values(found[f"{TIMED}: {name}"]) for name in model["names"]}
    against = {
        other: difference(timed["layers, adaptive"], timed[other])
        for other in timed
        if other != "layers, adaptive"
    }
    others = ("dense", "whole, 1%", "layers, 1%", "layers, 0.1%")
    lost = [name for name in others if against[name].low > 0]
    adaptive = all(against[name].mean < 0.03 for name in others)
    deltas = [
        f"{split} "
        + ", ".join(
            f"{path} {np.mean(x):.2f} (at most {np.max(x):.2f})"
            for path, x in found[f"delta, {split}"]["deltas"].items()
        )
        for split in SPLITS
    ]
    shares = ", ".join(
        f"{k / size:.2%} of {path}"
        for k, (path, size, _) in zip(model["entries"], LAYERS, strict=True)
    )
    measured = f"""{". ".join(told)}. δ, which the analysis takes to be at most 1, at a
    rate of 0.3: {"; ".join(deltas)}. Modelled seconds a step: {
        ", ".join(f"{name} {x:.3f}" for name, x in step.items())
    }; layers over the whole gradient {speedup:.2f} times as fast, at most {bound:.2f}.
    The plan sends {shares}. In {TOTAL:g} modelled seconds the loss is {
        ", ".join(f"{name} {interval(x)}" for name, x in timed.items())
    }; adaptive minus {
        ", minus ".join(f"{other} {x}" for other, x in against.items())
    }; it is behind {
        " and ".join(lost) or "none of them"
    }. No backward pass hides the layer that comes last in it, and the plan sends least
    of that."""
    held = [all(alike), bool(sooner), bool(adaptive)]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Loss by steps, and by modelled seconds."""
    left, right = figure.subplots(1, 2)
    names = ("dense", "global top-k", "layer-wise", "local SGD, H = 64")
    curves = {name: panels.curve(found[f"sorted: {name}"]) for name in names}
    panels.lines(left, curves, x="steps, sorted digits", y="held-out loss", log="y")
    model = found["modelled seconds"]
    paths = {}
    for name, seconds in zip(model["names"], model["seconds"], strict=True):
        steps, losses = panels.curve(found[f"{TIMED}: {name}"])
        paths[name] = [step * seconds for step in steps], losses
    panels.lines(right, paths, x="modelled seconds", y="held-out loss", log="y")


def _global(rate: Any) -> optax.GradientTransformation:
    top = lc.flattened(lc.error_feedback(lc.top_k(SHARE)))
    return optax.chain(optax.sgd(rate), top)


def _timed() -> dict[str, Timed]:
    """The methods that are compared at equal modelled seconds."""
    adaptive = Plan(_planned())
    fixed = lambda share: Plan(tuple(round(share * size) for size in SIZES))
    backward = sum(BACKWARD)
    averaging = _all_reduce()
    plain = lambda rate: optax.sgd(rate)
    layers = lambda plan: lambda rate: lc.lags_sgd(plain(rate), _paths(plan))
    return {
        "dense": Timed(
            lambda rate: lc.data_parallel(plain(rate)), FORWARD + backward + averaging
        ),
        "whole, 1%": Timed(_global, _seconds(fixed(SHARE)._replace(one_message=True))),
        "layers, 1%": Timed(layers(fixed(SHARE)), _seconds(fixed(SHARE))),
        "layers, 0.1%": Timed(layers(fixed(0.001)), _seconds(fixed(0.001))),
        "layers, adaptive": Timed(layers(adaptive), _seconds(adaptive)),
        "local SGD, H = 64": Timed(
            lambda rate: lc.local_sgd(plain(rate), period=64),
            FORWARD + backward + averaging / 64,
        ),
    }


def _planned() -> tuple[int, ...]:
    return tuple(entries_to_send(SIZES, BACKWARD, ethernet_seconds(8)))


def _paths(plan: Plan) -> dict[str, int]:
    """What of the small layers travels: the same shares."""
    return {
        path: max(1, round(k / 1000))
        for (path, *_), k in zip(LAYERS, plan.entries, strict=True)
    }


def _all_reduce() -> float:
    """Seconds of a ring all-reduce of everything, by the paper's constants.

    Its times of an all-gather are 2a + 2b·(bytes of all); a byte of one's own travels
    in a ring all-reduce as often as in the all-gather of 2(K − 1)/K² as much.
    """
    size = sum(SIZES)
    to_all = ethernet_seconds(8)
    latency = to_all(0)
    # Twice, there and back, but values without places; and 1/K of it from each.
    return latency + (to_all(size) - latency) / 8


def _seconds(plan: Plan) -> float:
    """Of a step: forward, then backward with what is sent behind it or under it."""
    to_all = ethernet_seconds(8)
    if plan.one_message:
        select = selection_seconds(sum(SIZES))
        return FORWARD + sum(BACKWARD) + select + to_all(sum(plan.entries))
    ready, free = 0.0, 0.0
    for size, seconds, k in zip(SIZES, BACKWARD, plan.entries, strict=True):
        ready += seconds
        free = max(free, ready) + selection_seconds(size) + to_all(k)
    return FORWARD + max(ready, free)


def _modelled() -> Cell:
    """Seconds a step of each method, and the most that hiding can bring."""
    timed = _timed()
    backward = sum(BACKWARD)
    exchange = timed["whole, 1%"].seconds - FORWARD - backward
    return {
        "names": list(timed),
        "seconds": [each.seconds for each in timed.values()],
        "entries": list(_planned()),
        "bound": largest_speedup(FORWARD, backward, exchange),
    }


class Seen(NamedTuple):
    """State of ``_logged``."""

    feedback: Any
    deltas: dict[str, jax.Array]


def _logged() -> optax.GradientTransformationExtraArgs:
    """Top-k with feedback that keeps δ of each weight matrix's last exchange."""
    exchange = lc.error_feedback(lc.top_k(SHARE))
    matrices = lambda tree: {path: _at(tree, path) for path, *_ in LAYERS}

    def init(params):
        return Seen(exchange.init(params), {p: jnp.zeros(()) for p in matrices(params)})

    def update(updates, state, params=None, **extra):
        wanted = jax.tree.map(jnp.add, updates, state.feedback.error)
        heard, feedback = exchange.update(updates, state.feedback, params, **extra)
        mean = matrices(reduce_mean(wanted, lc.AXIS))
        deltas = {
            path: jnp.sum((mean[path] - got) ** 2)
            / (1 - round(SHARE * got.size) / got.size)
            / jnp.sum(mean[path] ** 2)
            for path, got in matrices(heard).items()
        }
        return heard, Seen(feedback, deltas)

    return optax.GradientTransformationExtraArgs(init, update)


def _at(tree: Any, path: str) -> jax.Array:
    for part in path.split("/"):
        tree = tree[part]
    return tree


def _delta(split: str, steps: int, seeds: tuple[int, ...]) -> Cell:
    """δ of each matrix, ``[seeds, points]``, at a common rate."""
    found = train(
        toys.digits(split=split),
        lambda rate: optax.chain(optax.sgd(rate), _logged()),
        steps=steps,
        rates=(0.3,),
        seeds=seeds,
        points=25,
        watch=lambda params, state: {
            path: value[0] for path, value in state[1].deltas.items()
        },
    )
    deltas = {path: found[path][0, :, 1:] for path, *_ in LAYERS}
    return {"deltas": deltas, "seeds": seeds}
