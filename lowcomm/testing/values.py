"""Laws about values: what a method must do to the model, and what it may do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..leaves import PyTree
from ..ledger import traffic
from ..meter import meter
from ..readout import consensus
from ..spmd import stack
from ..steps import local_step
from ..workers import spread
from .equality import Broken, NotApplicable, apart, difference, finite, wide
from .laws import Law
from .problems import (
    BACKENDS,
    Carry,
    host,
    place_of,
    run,
    sizes_of,
    squares,
    start,
    stepper,
    targets,
    walk,
)
from .subject import Subject, heavy_ball

STILL = Law("zero gradients", "workers that agree stay where they are")
HALF = Law("half precision", "bfloat16 parameters stay bfloat16 and finite, and learn")
ANY_NUMBER = Law("any number of workers", "1, 3, 5 and 8 workers learn; one is silent")
COPIES = Law("copies", "workers with the same data do what one of them would do")
INNER_SEES = Law(
    "inner sees all", "parameters and extra arguments reach the inner optimizer"
)
COMPOSES = Law("composes", "a rate may be injected; it works in a partition and a mask")
LEARNS = Law("learns", "workers that disagree approach the optimum of their mean")
ALONE = Law(
    "one worker is the inner optimizer",
    "nothing else acts on one worker",
    optional=True,
)
PERMUTES = Law(
    "relabelling permutes", "renaming the workers renames results", optional=True
)
AGREE = Law("workers agree", "after a sync all hold the same model", optional=True)


@STILL.clause(dtype=[jnp.float32, jnp.bfloat16])
def zero_gradients_change_nothing(s: Subject, dtype: Any):
    """From one model, each worker's own optimum."""
    rng = np.random.default_rng(2)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), dtype), start()
    )
    here = stack(params, s.workers)  # each worker's target is where it is
    step = s.program().call if dtype == jnp.float32 else s.half()
    first = s.initializer()(params)
    for t, carry in enumerate(walk(step, first, here, steps=s.steps)):
        finite(carry, f"after step {t}")
        part = difference(carry.params, host(here))
        if part is None or s.fixed_inner:
            continue
        # A convex combination in float32 may round; in half precision it is a drift.
        gap = apart(carry.params, host(here), None)
        if s.strict or dtype != jnp.float32 or not gap <= 2 * (t + 1):
            raise Broken(f"after step {t} {part}")
    return f"only asked to stay finite: {s.fixed_inner}" if s.fixed_inner else None


@HALF.clause()
def half_precision_parameters_stay_finite_and_learn(s: Subject):
    """bfloat16 parameters, targets and gradients."""
    target, params = s.targets(dtype=jnp.bfloat16), start(jnp.bfloat16)
    path = walk(s.half(), s.initializer()(params), target, steps=s.patience)
    for t, carry in enumerate(path):
        finite(carry.params, f"after step {t}")
    for name, x in path[-1].params.items():
        if x.dtype != jnp.bfloat16:
            raise Broken(f"[{name!r}] has become {x.dtype}")
    if not s.fixed_inner:
        model = _consensus(s, path[-1].state, path[-1].params, s.workers)
        _improves(model, stack(params, s.workers), target)


@ANY_NUMBER.clause(workers=[1, 3, 5, 8])
def any_number_of_workers_will_do(s: Subject, workers: int):
    """On devices where there are enough, and the model improves."""
    s.own_inner()
    s.own_workers()
    backend = "shard_map" if len(jax.devices()) >= workers else "vmap"
    tx, target = s.method(workers=workers), targets(workers)
    step = local_step(squares, tx, **s.how)

    def whole(params, target):
        body = lambda carry, t: (step(*carry, target, t)[:2], None)
        first = (params, tx.init(params))
        return jax.lax.scan(body, first, jnp.arange(s.patience))[0]

    place = place_of(backend, workers, s.axis)
    params = stack(start(), workers)
    metered = jax.jit(spread(meter(whole), axis=s.axis, **place))
    (last, state), counts = metered(params, target)
    _improves(_consensus(s, state, last, workers), params, target)
    one = jax.tree.map(lambda x: x[0], (params, target))
    sizes = list(sizes_of(workers, s.axis).values())
    sent = traffic(whole, *one, workers=sizes, axis=s.axis).bytes(counts[0])
    if (sent == 0) != (workers == 1):
        raise Broken(f"{workers} workers sent {sent} bytes each in {s.patience} steps")


@COPIES.clause()
def workers_with_the_same_data_do_what_one_would_do(s: Subject):
    """A sum that should be a mean is found here."""
    s.own_inner()
    s.own_workers()
    same = jax.tree.map(lambda x: jnp.repeat(x[:1], s.workers, 0), s.targets())
    path = walk(s.program().call, s.first(), same, steps=s.steps)
    one = [
        jax.tree.map(lambda x: np.repeat(x, s.workers, 0), c.params) for c in s.alone()
    ]
    here = [Carry(c.params, ()) for c in path]
    there = [Carry(params, ()) for params in one]
    try:
        return s.follows(here, there, bits=s.exact or 0)
    except Broken:
        if s.strict:
            raise
    # Each may toss its own coins; but on average none goes several times as far.
    way = jax.tree.map(lambda c, x: wide(c) - wide(x), same, stack(start(), s.workers))
    for t in range(s.steps):
        far, gone = _along(way, here[t].params), _along(way, one[t])
        if not (abs(far) < 3 * abs(gone) and abs(gone) < 3 * abs(far)):
            raise Broken(
                f"after step {t} {s.workers} workers with the same data are "
                f"{far / gone if gone else np.inf:.3g} times as far as one of them"
            )
    return "but for chance"


@INNER_SEES.clause()
def parameters_and_extra_arguments_reach_the_inner_optimizer(s: Subject):
    """``params``, ``step``, ``value`` and whatever else is passed."""
    s.own_inner()
    seen: list[tuple] = []

    def update(updates, state, params=None, **extra):
        seen.append((params, extra))
        return jax.tree.map(lambda g: -0.5 * g, updates), state

    inner = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )
    tx = optax.with_extra_args_support(s.method(inner))

    def worker(p, target):
        more = {} if s.extra_args is None else s.extra_args(target)
        more |= {"value": 7.0, "fruit": "pear"}
        return tx.update(p, tx.init(p), p, step=0, **more)[0]

    place = place_of("vmap", s.workers, s.axis)
    params = stack(start(), s.workers)
    jax.eval_shape(spread(worker, axis=s.axis, **place), params, s.targets())
    if not seen:
        raise Broken("the inner optimizer was not asked at all")
    params, extra = seen[-1]
    if params is None:
        raise Broken("params= did not reach the inner optimizer")
    part = difference(*map(_kinds, (params, start())))
    if part:
        raise Broken(f"of the parameters that reach the inner optimizer {part}")
    for name, value in {"step": 0, "value": 7.0, "fruit": "pear"}.items():
        if name not in extra:
            raise Broken(
                f"the extra argument {name}= did not reach the inner optimizer"
            )
        if name != "step" and extra[name] != value:
            raise Broken(f"{name}={value} reached the inner optimizer as {extra[name]}")


@COMPOSES.clause()
def a_learning_rate_may_be_injected(s: Subject):
    """By ``optax.inject_hyperparams``, and the path is the same."""
    s.own_inner()

    def make(learning_rate, steps):
        return s.method(heavy_ball(learning_rate), steps=steps)

    injected = optax.inject_hyperparams(make, static_args=("steps",))
    tx = injected(learning_rate=s.rate, steps=s.steps)
    path = run(tx, s.targets(), steps=s.steps, **s.setting)
    here, there = ([Carry(c.params, ()) for c in p] for p in (path, s.path()))
    return s.follows(here, there, close=s.steps if s.strict else None)


@COMPOSES.clause()
def it_works_inside_a_partition_and_a_mask(s: Subject):
    """``optax.partition`` keeps one leaf frozen."""
    labels = {"b": "frozen", "s": "moving", "w": "moving"}
    parts: dict[Any, Any] = {"moving": s.method(), "frozen": optax.set_to_zero()}
    tx = optax.partition(parts, labels)
    params = run(tx, s.targets(), steps=s.steps, **s.setting)[-1].params
    first = host(stack(start(), s.workers))
    part = difference(params["b"], first["b"])
    if part:
        raise Broken(f"the frozen leaf {part}")
    for name in "sw":
        if not (params[name] != first[name]).any():
            raise Broken(f"[{name!r}] does not move inside a partition")


@LEARNS.clause()
def it_learns_from_workers_that_disagree(s: Subject):
    """Least squares, each worker with data of its own."""
    # Each worker has a truth of its own, looks at features of its own, and the mean of
    # the losses has a closed-form optimum. The mean of the workers' own optima leaves
    # 20 % of the gap to it, one of them half of it or more.
    s.own_inner()
    rng, k = np.random.default_rng(1), s.workers
    seen = np.where(np.arange(8) // 2 % k == np.arange(k)[:, None], 1.0, 0.3)
    a, noise = rng.normal(size=(k, 32, 8)), 0.3 * rng.normal(size=(k, 32, 4))
    a = np.concatenate([a * seen[:, None], np.ones((k, 32, 1))], axis=-1)
    y = a @ (rng.normal(size=(9, 4)) + rng.normal(size=(k, 9, 4))) + noise
    rows = a.reshape(-1, 9)
    best, *_ = np.linalg.lstsq(rows, y.reshape(-1, 4), rcond=None)
    batch = jnp.asarray(a[..., :8], jnp.float32), jnp.asarray(y, jnp.float32)
    loss = lambda x, batch: jnp.mean(jnp.square(batch[0] @ x["w"] + x["b"] - batch[1]))
    total = lambda x: float(np.mean(np.square(a @ x - y)))
    gap = lambda x: (total(x) - total(best)) / (total(0 * best) - total(best))
    whole = lambda x: np.concatenate([x["w"], x["b"][:, None]], axis=1)
    # How far workers are from each other, leaf by leaf, where each of them is alone.
    spread_of = lambda x: np.sqrt([np.var(x[:, :8], 0).sum(), np.var(x[:, 8], 0).sum()])
    alone = spread_of(np.stack([np.linalg.lstsq(a[i], y[i])[0] for i in range(k)]))
    left, apart_by = 1.0, np.ones(2)
    # A method that says little a step may take longer, a noisy one a lower rate.
    for rate, patience in [(0.05, 200)] if s.strict else [(0.05, 1600), (0.005, 1600)]:
        step = stepper(s.method(heavy_ball(rate), steps=200), loss=loss, **s.setting)
        body = lambda carry, t, step=step: (step(carry, batch, t), None)
        scan = lambda c, t, body=body: jax.lax.scan(body, c, t + jnp.arange(200))[0]
        first = {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)}
        scanned, carry = jax.jit(scan), s.initializer()(first)
        for t in range(0, patience, 200):
            carry = scanned(carry, jnp.int32(t))
            model = host(_consensus(s, carry.state, carry.params, k))
            left = gap(whole(model)[0])
            apart_by = spread_of(whole(host(carry.params))) / alone
            if left < 0.05 and apart_by.max() < 0.5:
                return f"{100 * left:.2g} % of the gap left after {t + 200} steps"
    if left < 0.05:
        which = "matrices" if apart_by[0] > apart_by[1] else "vectors"
        raise Broken(
            f"the consensus learns, but the workers' {which} are as far apart as if "
            f"they were alone ({apart_by.max():.0%}): they seem not to be exchanged"
        )
    raise Broken(f"{100 * left:.3g} % of the gap is left")


@ALONE.clause()
def one_worker_is_the_inner_optimizer(s: Subject):
    """Step by step, optax without any workers."""
    s.own_inner()
    s.own_workers()
    alone = jax.tree.map(lambda x: x[0], s.targets())
    inner = heavy_ball(s.rate)
    params, state, path = start(), inner.init(start()), []
    for _ in range(s.steps):
        grads = jax.grad(squares)(params, alone)
        moves, state = inner.update(grads, state, params)
        params = optax.apply_updates(params, moves)
        path.append(Carry(host(params), ()))
    here = [Carry(jax.tree.map(lambda x: x[0], c.params), ()) for c in s.alone()]
    return s.follows(here, path, bits=s.steps if s.strict else 0, close=s.steps)


@PERMUTES.clause()
def renaming_the_workers_only_permutes(s: Subject):
    """Another order of the data is another order of results."""
    order = np.array([2, 0, 3, 1, *range(4, s.workers)])[: s.workers]
    if s.workers < 4:
        raise NotApplicable("asked of four workers or more")
    target = jax.tree.map(lambda x: x[order], s.targets())
    path = walk(s.program().call, s.first(), target, steps=s.steps)
    expected = [jax.tree.map(lambda x: x[order], c) for c in s.path()]
    return s.follows(path, expected, bits=s.exact or 0)


@AGREE.clause(backend=BACKENDS)
def after_a_sync_all_workers_hold_the_same_model(s: Subject, backend: str):
    """At the declared steps, else at those that send most."""
    if isinstance(s.syncs, int):
        path = s.path(backend, binary=False)
        steps = [t for t in range(s.steps) if (t + 1) % s.syncs == 0]
    else:
        path, steps = s.path(backend), list(s.talks)
    for t in steps:
        before = jax.tree.leaves((path[t - 1] if t else s.first(backend)).params)
        here = jax.tree_util.tree_leaves_with_path(path[t].params)
        for (where, x), x0 in zip(here, before, strict=True):
            # Parameter and update may miss the model by a rounding of the larger.
            larger = np.maximum(abs(x), abs(np.asarray(x0)))
            larger = larger if isinstance(s.syncs, int) else np.float32(s.scale)
            ulp = np.spacing(np.max(larger))
            gap = float(np.ptp(x, axis=0).max())
            if not gap <= (0 if s.bitwise else 2 * ulp):
                name = jax.tree_util.keystr(where)
                raise Broken(
                    f"after step {t} {name} differs by {gap:.3g} among workers"
                )


def _consensus(s: Subject, state: Any, params: PyTree, workers: int) -> PyTree:
    place = place_of("vmap", workers, s.axis)
    read = spread(lambda x, p: consensus(x, p, axis=s.axis), axis=s.axis, **place)
    return jax.jit(read)(state, params)


def _improves(after: PyTree, before: PyTree, target: PyTree) -> None:
    far = lambda x, c: np.square(wide(x) - wide(c)).sum() / 2
    loss = lambda params: sum(jax.tree.leaves(jax.tree.map(far, params, target)))
    if not loss(after) < loss(before):
        raise Broken(f"the loss went from {loss(before):.4g} to {loss(after):.4g}")


def _along(way: PyTree, params: PyTree) -> float:
    gone = lambda w, x, x0: float(np.sum(w * (wide(x) - wide(x0))))
    return sum(jax.tree.leaves(jax.tree.map(gone, way, params, _first(params))))


def _first(params: PyTree) -> PyTree:
    return stack(start(), jax.tree.leaves(params)[0].shape[0])


def _kinds(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)
