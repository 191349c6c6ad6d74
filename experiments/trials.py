"""Runs of a method on a traceable problem: a grid of rates and seeds in one program.

Learning rates are chosen by the validation loss, method by method; what is reported
comes from other examples. Bytes are those the program counted as it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.special import stdtrit

import lowcomm as lc
from lowcomm.spmd import abstract_mesh, worker_index
from lowcomm.testing.problems import place_of, sizes_of

from .toys import Problem, PyTree

Cell = dict[str, Any]
Make = Callable[[Any], optax.GradientTransformation]
Watch = Callable[[PyTree, Any], dict[str, jax.Array]]  # (params [K, …], state [K, …])
Change = Callable[[PyTree, jax.Array, Any], PyTree]  # (batch, key, step) -> batch


class Interval(NamedTuple):
    """A mean over seeds and half of its 95 % interval, by Student's t."""

    mean: float
    half: float

    def __str__(self) -> str:
        """Mean ± half."""
        return f"{self.mean:.3f} ± {self.half:.3f}"

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half


def interval(values: Sequence[float] | np.ndarray) -> Interval:
    """The mean over seeds with its 95 % interval (NaN for one seed).

    Example:
        >>> print(interval([1.0, 2.0, 3.0]))
        2.000 ± 2.484
    """
    x = np.asarray(values, float)
    if len(x) < 2:
        return Interval(float(x.mean()), float("nan"))
    half = stdtrit(len(x) - 1, 0.975) * x.std(ddof=1) / np.sqrt(len(x))
    return Interval(float(x.mean()), float(half))


def difference(
    a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray
) -> Interval:
    """The mean of ``a − b``, seed by seed, with its interval."""
    return interval(np.asarray(a, float) - np.asarray(b, float))


def train(
    problem: Problem,
    make: Make,
    *,
    steps: int,
    rates: Sequence[float],
    seeds: Sequence[int],
    points: int = 10,
    watch: Watch | None = None,
    start: int | None = 1,
    apart: bool = False,
    change: Change | None = None,
    axis: Any = lc.AXIS,
    sizes: Mapping[str, int] | None = None,
    extra_args: Callable | None = None,
) -> dict[str, np.ndarray]:
    """Every rate with every seed: curves ``[rates, seeds, points + 1]``, and bytes.

    ``make(rate)`` is the transformation; ``watch(params, state)`` adds scalars of the
    stacked carry at each point. The parameters begin from the key ``start``, the same
    for all seeds, or with None from that of the seed; ``apart`` gives each worker a
    beginning of its own. Seeds decide what is drawn, and ``change(batch, key, step)``,
    called by each worker, what becomes of it. With several axes ``sizes`` says how many
    workers there are along each.
    ``bytes`` is ``[rates, seeds]``, payload per worker over the whole run.
    """
    if steps % points:
        raise ValueError(f"{steps} steps do not fall into {points} equal parts.")
    some, k = steps // points, problem.workers
    place = place_of("vmap", k, axis)
    if sizes is not None:
        place["mesh"] = abstract_mesh(sizes)
    spread = lambda f, in_axes: lc.spread(f, axis=axis, in_axes=in_axes, **place)

    def chunk(params, state, own, rate, seed, first):
        tx = make(rate)
        step = lc.local_step(problem.loss, tx, axis=axis, extra_args=extra_args)

        def body(carry, t):
            key = jax.random.fold_in(jax.random.key(seed), t)
            key = jax.random.fold_in(key, worker_index(axis))
            batch = problem.draw(own, key)
            if change is not None:
                batch = change(batch, jax.random.fold_in(key, 0), t)
            return step(*carry, batch, t)[:2], None

        return jax.lax.scan(body, (params, state), first + jnp.arange(some))[0]

    metered = spread(lc.meter(chunk), (0, 0, 0, None, None, None))
    init = spread(lambda params, rate: make(rate).init(params), (0, None))
    agreed = spread(lambda s, p: lc.consensus(s, p, axis=axis), (0, 0))
    own = jax.tree.map(jnp.asarray, problem.own)

    def seen(params, state):
        found = problem.judge(lc.unstack(agreed(state, params)))
        return found | ({} if watch is None else watch(params, state))

    def one(setting):
        rate, seed = setting
        key = jax.random.key(seed if start is None else start)
        if apart:
            params = jax.vmap(problem.init)(jax.random.split(key, k))
        else:
            params = lc.stack(problem.init(key), k)
        state = init(params, rate)
        first = seen(params, state)

        def part(carry, t):
            (params, state), counts = metered(*carry, own, rate, seed, t)
            return (params, state), (seen(params, state), counts[0])

        _, (path, counts) = jax.lax.scan(
            part, (params, state), jnp.arange(points) * some
        )
        joined = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), first, path)
        return joined, counts

    grid = jnp.array([(i, j) for i in range(len(rates)) for j in seeds], jnp.int32)
    run = lambda ij: one((jnp.asarray(rates, jnp.float32)[ij[0]], ij[1]))
    curves, counts = jax.jit(lambda grid: jax.lax.map(run, grid))(grid)

    shape = lambda tree: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree
    )
    params = jax.eval_shape(lambda: lc.stack(problem.init(jax.random.key(0)), k))
    state = jax.eval_shape(init, params, jnp.float32(0.1))
    args = (*map(shape, (params, state, own)), jnp.float32(0.1), jnp.int32(0))
    along = list((sizes_of(k, axis) if sizes is None else sizes).values())
    sent = lc.traffic(chunk, *args, jnp.int32(0), workers=along, axis=axis)
    payload = [sum(sent.bytes(c) for c in run) for run in np.asarray(counts, np.int64)]
    fold = lambda x: np.asarray(x).reshape(len(rates), len(seeds), *x.shape[1:])
    found = {name: fold(x) for name, x in curves.items()}
    return found | {"bytes": fold(np.array(payload))}


def tuned(
    problem: Problem,
    make: Make,
    *,
    steps: int,
    rates: Sequence[float],
    seeds: Sequence[int],
    metric: str = "validation",
    instead_of: int | None = None,
    level: float | None = None,
    **how: Any,
) -> Cell:
    """A cell: the best of the rates by ``metric``, and what it gave, seed by seed.

    ``instead_of`` says of how many steps the run takes the place, with fewer steps on
    larger batches: its bytes are relative to those of so many. With a ``level`` the
    cell holds, for ``soonest``, after how many steps each run came down to it.
    """
    runs = train(problem, make, steps=steps, rates=rates, seeds=seeds, **how)
    grid = np.where(np.isfinite(runs[metric][..., -1]), runs[metric][..., -1], np.inf)
    best = int(grid.mean(1).argmin())
    payload = runs.pop("bytes")[best]
    at = np.linspace(0, steps, runs[metric].shape[-1]).round().astype(int)
    wanted = () if level is None else (metric, "loss")
    return {
        "problem": problem.name,
        "steps": steps,
        "seeds": list(seeds),
        "rates": {f"{r:g}": float(g) for r, g in zip(rates, grid.mean(1), strict=True)},
        "rate": float(rates[best]),
        "at_the_edge": len(rates) > 1 and best in (0, len(rates) - 1),
        "bytes": payload.tolist(),
        "relative_bytes": float(
            payload.mean() / (instead_of or steps) / dense_bytes(problem)
        ),
        "step": at.tolist(),
        "curves": {name: x[best].tolist() for name, x in runs.items()},
        "final": {name: x[best, :, -1].tolist() for name, x in runs.items()},
        "grid": {name: x[..., -1].tolist() for name, x in runs.items()},
        "reached": {name: reached(at, runs[name], level).tolist() for name in wanted},
    }


def tuned_both(
    problem: Problem,
    make: Callable[[Any, Any], optax.GradientTransformation],
    *,
    rates: Sequence[float],
    others: Sequence[float],
    metric: str = "validation",
    **how: Any,
) -> Cell:
    """As ``tuned``, of ``make(rate, other)``: every rate with every other number.

    ``rates`` and ``others`` of the cell, and ``grid`` and ``others grid``, hold for
    each of one kind what the best of the other kind gave.
    """
    n = len(others)

    def at(place):  # in the table of both; a whole number, though it comes as a float
        place = jnp.asarray(place, jnp.int32)
        first, second = (jnp.asarray(x, jnp.float32) for x in (rates, others))
        return make(first[place // n], second[place % n])

    cell = tuned(problem, at, rates=range(n * len(rates)), metric=metric, **how)
    table = np.array(list(cell["rates"].values())).reshape(len(rates), n)
    i, j = divmod(int(cell["rate"]), n)
    of_rate, of_other = table.argmin(1), table.argmin(0)
    grid = {
        name: np.reshape(x, (len(rates), n, -1)) for name, x in cell["grid"].items()
    }
    named = lambda names, x: {f"{a:g}": float(b) for a, b in zip(names, x, strict=True)}
    ends = ((i, len(rates)), (j, n))
    return cell | {
        "rates": named(rates, table.min(1)),
        "others": named(others, table.min(0)),
        "rate": float(rates[i]),
        "other": float(others[j]),
        "at_the_edge": any(size > 1 and at in (0, size - 1) for at, size in ends),
        "grid": {
            k: x[np.arange(len(rates)), of_rate].tolist() for k, x in grid.items()
        },
        "others grid": {k: x[of_other, np.arange(n)].tolist() for k, x in grid.items()},
    }


def at_rate(cell: Mapping[str, Any], rate: float, name: str = "loss") -> list[float]:
    """What each seed ended with at one of the rates, the best or not."""
    return cell["grid"][name][list(cell["rates"]).index(f"{rate:g}")]


def reached(steps: Any, curves: Any, level: Any) -> np.ndarray:
    """Steps after which each curve ``[…, points]`` first was at ``level``, or NaN.

    Straight lines join the points that were looked at.

    Example:
        >>> print(reached([0, 10, 20], [[3.0, 1.0, 0.5], [3.0, 2.0, 2.0]], 0.75))
        [15. nan]
    """

    def first(y):
        there = np.flatnonzero(y <= level)[:1]
        parts = [slice(max(i - 1, 0), i + 1) for i in there]
        found = [np.interp(-level, -y[part], steps[part]) for part in parts]
        return float(found[0]) if found else float("nan")

    return np.apply_along_axis(first, -1, np.asarray(curves, float))


def soonest(cell: Mapping[str, Any], metric: str = "validation") -> np.ndarray:
    """Steps to the ``level`` of the cell's loss, at the rate that is there soonest.

    The rate is chosen by the ``metric``; a seed that was never there gives NaN.
    """
    chosen, judged = (
        np.array(cell["reached"][name], float) for name in (metric, "loss")
    )
    return judged[np.nan_to_num(chosen, nan=np.inf).mean(1).argmin()]


def dense_bytes(problem: Problem) -> int:
    """Bytes of one tree of parameters: what data-parallel training sends a step."""
    params = jax.eval_shape(problem.init, jax.random.key(0))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def cosine(rate: Any, steps: int) -> Callable[[Any], Any]:
    """From ``rate``, which may be traced, to zero."""
    return lambda t: rate * 0.5 * (1 + jnp.cos(jnp.pi * t / steps))


def momentum(rate: Any, steps: int, beta: float = 0.9) -> optax.GradientTransformation:
    """Heavy ball with a cosine schedule, the inner optimizer of most trials."""
    return optax.sgd(cosine(rate, steps), momentum=beta)


def drift(params: PyTree, state: Any) -> dict[str, jax.Array]:
    """To watch: the root of the mean squared distance of workers from their mean."""
    squares = jax.tree.map(lambda x: jnp.sum((x - x.mean(0)) ** 2) / len(x), params)
    return {"drift": jnp.sqrt(sum(jax.tree.leaves(squares)))}


def values(cell: Mapping[str, Any], name: str = "loss") -> list[float]:
    """What each seed ended with."""
    return cell["final"][name]
