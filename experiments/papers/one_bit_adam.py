"""1-bit Adam: signs of the momentum, over a second moment that was frozen in time."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc

from .. import panels
from ..letters import letters
from ..trials import Cell, cosine, difference, interval, tuned, values
from . import Cells, Found, Scale, Verdict

TITLE = "1-bit Adam and 0/1 Adam"
REFERENCE = (
    "Tang et al., *1-bit Adam: Communication Efficient Large-Scale Training with "
    "Adam's Convergence Speed*, 2021, [2102.02888](https://arxiv.org/abs/2102.02888); "
    "Lu, Li, Zhang, De Sa and He, *Maximizing Communication Efficiency for Large-scale "
    "Training via 0/1 Adam*, 2022, [2202.06009](https://arxiv.org/abs/2202.06009)."
)
CLAIM = """Error feedback does not mend the compression of Adam's gradients, since Adam
is not linear in them; but its second moment settles early (recalled). Frozen after a
dense warm-up, it lets signs of the momentum, a 32nd of the bytes, train as fast per
step as Adam, for up to 5 times fewer bytes in all. 0/1 Adam refreshes it ever more
rarely and skips rounds, for up to 26 times fewer bytes."""
SETTING = """The next byte of Python's sources, a network of two hidden layers of 32, 8
workers with batches of 16, 400 steps, rates that rise for 40 of them and then fall,
tuned for each. Beside a warm-up and signs: as long a warm-up and then an average every
32 steps, local Adam at a fixed period, and one step on 4 to 16 batches, all at about as
many bytes."""
METHODS = ("one_bit_adam", "zero_one_adam")
STEPS = 400
WARMUPS = {"1 step": 0.0, "2.5 %": 0.025, "10 %": 0.1, "25 %": 0.25}
LOCAL = {
    "2.5 %": 16,
    "10 %": 8,
    "25 %": 4,
}  # at as many bytes: a period, or batches a step
BASELINES = (
    "Adam",
    *(f"{share} dense, then H = 32" for share in LOCAL),
    *(f"local Adam, H = {i}" for i in LOCAL.values()),
    *(f"Adam, one step on {i} batches" for i in LOCAL.values()),
)
RATES = (0.004, 0.008, 0.016, 0.032, 0.064)
LOW = (0.00025, 0.0005, 0.001, 0.002, 0.004)  # where it is all that trains
HIGH = (0.008, 0.016, 0.032, 0.064, 0.128)  # for few steps, or few averages
MOMENTUM = (0.05, 0.1, 0.2, 0.4, 0.8)


def cells(scale: Scale) -> Cells:
    """Warm-ups of four lengths, what they replace, and what costs as much."""
    steps = scale.steps(STEPS)
    run = lambda make, rates=RATES: partial(
        _run, make, steps, rates=scale.rates(*rates), seeds=scale.seeds, points=10
    )
    jobs: Cells = {"Adam": run(_dense)}
    for name, share in WARMUPS.items():
        warmup = max(1, round(share * steps))
        rates = RATES if share else LOW
        jobs[f"1-bit Adam, {name}"] = run(partial(_signs, warmup), rates)
    jobs["0/1 Adam, a sync a step"] = run(partial(_thinned, 1, 16))
    rounds = lc.doubling(steps // 4, every=steps // 4, longest=4)
    jobs["0/1 Adam, rounds of 1 to 4"] = run(partial(_thinned, rounds, 4))
    jobs["signs of gradients, Adam"] = run(_signed_gradients)
    jobs["signs of gradients, momentum"] = run(_signed_momentum, MOMENTUM)
    for share, i in LOCAL.items():
        warmup = round(WARMUPS[share] * steps)
        jobs[f"{share} dense, then H = 32"] = run(partial(_post, warmup))
        jobs[f"local Adam, H = {i}"] = run(partial(_local, i), HIGH)
        jobs[f"Adam, one step on {i} batches"] = partial(
            _run,
            _dense,
            steps // i,
            batch_size=16 * i,
            instead_of=steps,
            rates=scale.rates(*HIGH),
            seeds=scale.seeds,
            points=1,
        )
    return jobs


def verdict(found: Found) -> Verdict:
    """As good as Adam with a tenth and a quarter dense, worse with one dense step."""
    adam = values(found["Adam"])
    of = lambda name: f"1-bit Adam, {name}"
    gap = {name: _gap(found[of(name)], adam) for name in WARMUPS}
    signed = _gap(found["signs of gradients, Adam"], adam)
    spared = {
        name: difference(values(found[name]), values(found[of(share)]))
        for share, i in LOCAL.items()
        for name in (
            f"{share} dense, then H = 32",
            f"local Adam, H = {i}",
            f"Adam, one step on {i} batches",
        )
    }
    ahead = [name for name, d in spared.items() if d.high < 0]
    behind = [name for name, d in spared.items() if d.low > 0]
    others = {
        name: difference(values(found[name]), adam)
        for name in found
        if name.startswith("0/1") or name == "signs of gradients, momentum"
    }
    share = lambda name: f"{found[name]['relative_bytes']:.3f}"
    listed = lambda named: ", ".join(f"{name} {x}" for name, x in named.items())
    priced = lambda named: ", ".join(
        f"{name} {x} ({share(name)} of the bytes)" for name, x in named.items()
    )
    measured = f"""Adam's loss is {interval(adam)}. Minus that, 1-bit Adam by its
    warm-up: {", ".join(f"{n} {x} ({share(of(n))})" for n, x in gap.items())} of the
    bytes; signs of gradients with error feedback, then Adam, {signed}
    ({share("signs of gradients, Adam")}). Others: {priced(others)}. At about equal
    bytes, minus 1-bit Adam with as long a warm-up: {listed(spared)}. Better than it:
    {", ".join(ahead) or "none"}; worse: {", ".join(behind) or "none"}."""
    held = [
        gap["10 %"].mean < 0.03,
        gap["25 %"].mean < 0.03,
        gap["1 step"].low > 0,
        signed.low > 0,
    ]
    return Verdict(
        "reproduced" if all(held) else "partly" if any(held) else "not reproduced",
        " ".join(measured.split()),
    )


def draw(found: Found, figure: Any) -> None:
    """Loss against steps by the warm-up, and against the bytes sent."""
    left, right = figure.subplots(1, 2)
    shown = ["Adam", *(f"1-bit Adam, {name}" for name in WARMUPS)]
    shown.append("signs of gradients, Adam")
    curves = {name: panels.curve(found[name]) for name in shown}
    panels.lines(left, curves, x="steps", y="held-out loss")
    of = lambda name: (
        found[name]["relative_bytes"],
        np.mean(np.asarray(values(found[name]), float)),
    )
    kinds = {
        "Adam": ["Adam"],
        "1-bit Adam": [f"1-bit Adam, {name}" for name in WARMUPS],
        "0/1 Adam": [name for name in found if name.startswith("0/1")],
        "signs of gradients, Adam": ["signs of gradients, Adam"],
        "signs of gradients, momentum": ["signs of gradients, momentum"],
        "dense, then H = 32": [f"{share} dense, then H = 32" for share in LOCAL],
        "local Adam": [f"local Adam, H = {i}" for i in LOCAL.values()],
        "larger batches": [f"Adam, one step on {i} batches" for i in LOCAL.values()],
    }
    points = {
        kind: tuple(np.transpose(sorted(map(of, names))))
        for kind, names in kinds.items()
    }
    panels.lines(right, points, x="bytes, Adam's = 1", y="held-out loss", log="x")


def _gap(cell: Cell, base: list[float]) -> Any:
    """Loss minus that of ``base``, infinite where a seed has none."""
    each = np.array(values(cell), float)
    return difference(np.where(np.isfinite(each), each, np.inf), base)


def _run(make: Any, steps: int, *, batch_size: int = 16, **how: Any) -> Cell:
    problem = letters(workers=8, batch_size=batch_size, hidden=32)
    rise = lambda rate: (
        lambda t: cosine(rate, steps)(t) * jnp.minimum(1, (t + 1) / max(1, steps // 10))
    )
    return tuned(problem, lambda rate: make(rise(rate)), steps=steps, **how)


def _dense(rate: Any) -> Any:
    return lc.data_parallel(optax.adam(rate))


def _signs(warmup: int, rate: Any) -> Any:
    return lc.one_bit_adam(optax.sgd(rate), warmup=warmup)


def _thinned(period: Any, repeats: int, rate: Any) -> Any:
    # Of so few refreshes b2 = 0.999 would see next to nothing.
    return lc.zero_one_adam(rate, period=period, refresh=lc.thinning(repeats), b2=0.95)


def _signed_gradients(rate: Any) -> Any:
    return optax.chain(lc.error_feedback(lc.sign()), optax.adam(rate))


def _signed_momentum(rate: Any) -> Any:
    return optax.chain(lc.error_feedback(lc.sign()), optax.sgd(rate, momentum=0.9))


def _post(warmup: int, rate: Any) -> Any:
    warm = lc.occasional(lc.mean(), when=lc.before(warmup))
    return lc.local_sgd(optax.chain(warm, optax.adam(rate)), period=32)


def _local(period: int, rate: Any) -> Any:
    return lc.local_sgd(optax.adam(rate), period=period)
