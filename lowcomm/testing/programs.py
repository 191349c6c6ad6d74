"""Laws about programs: one method, run in many ways, is one method."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..leaves import PyTree
from ..spmd import abstract_mesh, stack
from ..steps import local_step
from ..workers import spread
from .equality import (
    Broken,
    NotApplicable,
    apart,
    difference,
    finite,
    is_key,
    wide,
)
from .laws import Law
from .problems import (
    BACKENDS,
    Carry,
    begin,
    host,
    mesh_of,
    place_of,
    sizes_of,
    squares,
    start,
    stepper,
    walk,
)
from .subject import ROUGH, Subject
from .traces import constant_draws

RUNS = Law("runs", "virtual workers take its steps, and talk")
ONE_PROGRAM = Law("compiles once", "one program serves all steps of a kind")
TYPES = Law("types constant", "structure, shapes and types stay what init made them")
RESUME = Law("resume", "a run resumed from copies is the uninterrupted run")
BACKENDS_AGREE = Law("backends agree", "vmap, shard_map and pmap compute the same")
SCAN = Law("scan", "a scan of steps is the loop")
DONATION = Law("donation", "parameters and state may be donated")
FRESH = Law("fresh draws", "random numbers are drawn anew at every step")


@RUNS.clause()
def its_steps_stay_finite(s: Subject):
    """Two rounds of steps on virtual workers, whose step number is traced."""
    for t, carry in enumerate(s.path()):
        finite(carry.params, f"after step {t}")


@RUNS.clause()
def it_talks(s: Subject):
    """Some step sends something, as ``fit`` counts it."""
    payload = s.fitted()[0].payload
    if not payload.any():
        raise Broken(
            f"{s.workers} workers sent nothing in {len(payload)} steps: give it a "
            "shorter period for the check, or pass steps="
        )
    return f"{s.steps} steps of {s.workers} workers, {len(s.talks)} of them syncs"


@ONE_PROGRAM.clause()
def one_program_serves_two_rounds(s: Subject):
    """The step is traced once, and not again for what it returned."""
    s.path()
    times = len(s.program().traces)
    if times != 1:
        raise Broken(
            f"the step was traced {times} times: what it returns must have the types "
            "of what it was given"
        )


@ONE_PROGRAM.clause()
def tracing_it_again_gives_the_same_program(s: Subject):
    """Nothing outside its arguments changes what an update is."""
    s.traced()


@ONE_PROGRAM.clause()
def fit_compiles_one_program_for_each_kind_of_step(s: Subject):
    """With known steps ``fit`` goes the same way, by a program a kind."""
    made, path = s.fitted()
    kinds = 1 if s.syncs == 1 else s.kinds
    if s.strict and s.syncs is not None and len(made.programs) != kinds:
        raise Broken(f"fit compiled {len(made.programs)} programs and not {kinds}")
    return s.follows(path, s.path(), bits=s.exact or 0)


@TYPES.clause(dtype=[jnp.float32, jnp.bfloat16], t=[0, "sync", "traced"])
def types_stay_what_init_made_them(s: Subject, dtype: Any, t: Any):
    """At step 0, at a sync and at a step that is traced."""
    tx, target = s.method(), s.targets(dtype=dtype)
    if t == "sync":
        t = int(next(iter(s.talks[s.talks > 0]), s.steps - 1))
    carry = jax.eval_shape(lambda: begin(tx, start(dtype), **s.where))
    step = stepper(tx, **s.setting)
    if t == "traced":
        after = jax.eval_shape(step, carry, target, jnp.int32(0))
    else:
        after = jax.eval_shape(lambda c, x: step(c, x, t), carry, target)
    kind = lambda x: f"{x.dtype}{x.shape}{' (weak)' if x.weak_type else ''}"
    one, other = jax.tree.structure(carry), jax.tree.structure(after)
    if one != other:
        raise Broken(f"the structure is {one} before a step and {other} after it")
    before = jax.tree_util.tree_leaves_with_path(carry)
    for (path, x), y in zip(before, jax.tree.leaves(after), strict=True):
        if kind(x) != kind(y):
            name = jax.tree_util.keystr(path)
            raise Broken(f"{name} is {kind(x)} before a step and {kind(y)} after it")


@RESUME.clause()
def a_run_resumed_from_copies_is_the_uninterrupted_run(s: Subject):
    """From each step, bit for bit."""
    path = s.path()
    for t in range(1, s.steps):
        part = difference(s.step(path[t - 1], t), path[t])
        if part:
            raise Broken(f"resumed at step {t}, {part}")


@BACKENDS_AGREE.clause()
def it_traces_on_a_mesh(s: Subject):
    """Under ``shard_map`` with its variance check; no devices are needed."""
    step = spread(
        local_step(squares, s.method(), **s.how),
        mesh=abstract_mesh(sizes_of(s.workers, s.axis)),
        in_axes=(0, 0, 0, None),
        axis=s.axis,
    )
    jax.eval_shape(step, *s.first(), s.targets(), jnp.int32(0))


@BACKENDS_AGREE.clause(backend=["shard_map", "pmap"])
def virtual_workers_equal_devices(s: Subject, backend: str):
    """Bit for bit where declared; else each step, from one state."""
    here, there = s.path(), s.path(backend)
    for t, pair in enumerate(zip(there, here, strict=True)):
        part = difference(*pair) if t < (s.exact or 0) else None
        if part:
            raise Broken(f"after step {t} {part}")
    if not any(map(difference, here, there)):
        return "bit for bit"
    # Sums over the workers may be rounded otherwise elsewhere, and one ulp flips a
    # sign. From the same state of few bits they are exact, and so one step is compared.
    worst = 0.0
    for t in range(s.steps):
        carry = few_bits(here[t - 1] if t else host(s.first()))
        mine, other = s.step(carry, t), s.step(carry, t, backend)
        part = difference(other, mine, inexact=False)
        rough = apart(other.state, mine.state, unit=1.0)
        gap = apart(other.params, mine.params, s.scale)
        if part or not gap <= s.roundings or not rough <= ROUGH:
            part = part or difference(other, mine)
            raise Broken(f"at step {t}, from the same state, {part}")
        worst = max(worst, gap)
    return f"to {np.ceil(worst):.0f} roundings a step"


@BACKENDS_AGREE.clause()
def virtual_workers_equal_devices_on_real_data_to_rounding(s: Subject):
    """All steps of a smooth method, one step of another."""
    # A flipped sign or another selected entry is no rounding, so such methods are asked
    # for one step.
    if s.smooth is None:
        raise NotApplicable("whether a rounding stays one is not declared (smooth=)")
    steps = s.steps if s.smooth else 1
    here, there = s.path(binary=False), s.path("shard_map", binary=False)
    values = [c.params for c in here[:steps]]
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(values))
    for t in range(steps):
        gap = apart(there[t].params, here[t].params, scale)
        if not gap <= steps * (s.workers + 8):
            part = difference(there[t].params, here[t].params)
            raise Broken(f"after step {t} {part}: {gap:.2g} roundings")


@BACKENDS_AGREE.clause()
def results_do_not_depend_on_the_variance_check(s: Subject):
    """``shard_map`` with ``check_vma=False``."""
    s.devices("shard_map")
    worker = local_step(squares, s.method(), **s.how)

    def local(carry, target, t):
        carry, target = jax.tree.map(lambda x: x[0], (carry, target))
        out = worker(*carry, target, t)[:2]
        return jax.tree.map(lambda x: x[None], Carry(*out))

    step = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh_of(s.workers, s.axis),
            in_specs=(P(s.axis), P(s.axis), P()),
            out_specs=P(s.axis),
            check_vma=False,
        )
    )
    path = walk(step, s.first("shard_map"), s.targets(), steps=s.steps)
    return s.follows(path, s.path("shard_map"), bits=s.steps if s.strict else 0)


@SCAN.clause(backend=["vmap", "shard_map"])
def a_scan_of_steps_is_the_loop(s: Subject, backend: str):
    """``lax.scan`` around the spread step."""
    expected, target = s.path(backend), s.targets()

    @jax.jit
    def scanned(carry):
        def body(carry, t):
            carry = s.program(backend).step(carry, target, t)
            return carry, carry

        return jax.lax.scan(body, carry, jnp.arange(s.steps))[1]

    path = _unstacked(scanned(s.first(backend)), s.steps, axis=0)
    return s.follows(
        path, expected, bits=s.exact or 0, close=s.steps if s.strict else None
    )


@SCAN.clause()
def a_worker_may_scan_its_own_steps_under_the_variance_check(s: Subject):
    """``lax.scan`` inside ``spread``, the state made there too."""
    expected, tx = s.path("shard_map"), s.method()
    worker = local_step(squares, tx, **s.how)

    def whole(params, target):
        def body(carry, t):
            carry = worker(*carry, target, t)[:2]
            return carry, carry[0]

        return jax.lax.scan(body, (params, tx.init(params)), jnp.arange(s.steps))[1]

    place = place_of("shard_map", s.workers, s.axis)
    params = stack(start(), s.workers)
    end = jax.jit(spread(whole, axis=s.axis, **place))(params, s.targets())
    path = [Carry(p, ()) for p in _unstacked(end, s.steps, axis=1)]
    expected = [Carry(c.params, ()) for c in expected]
    return s.follows(path, expected, close=s.steps if s.strict else None)


@DONATION.clause()
def init_shares_no_buffer_with_the_parameters(s: Subject):
    """Nor two leaves of the state one between them."""
    params = start()
    leaves = jax.tree_util.tree_leaves_with_path(
        {"params": params, "state": s.method().init(params)}
    )
    buffers: dict[int, str] = {}
    for path, x in leaves:
        if not isinstance(x, jax.Array) or is_key(x) or not x.size:
            continue
        name = jax.tree_util.keystr(path)
        other = buffers.setdefault(x.unsafe_buffer_pointer(), name)
        if other != name:
            raise Broken(f"init returns one buffer as {other} and {name}: copy it")


@DONATION.clause(backend=BACKENDS)
def params_and_state_may_be_donated(s: Subject, backend: str):
    """The path is the same where each step reuses its buffers."""
    expected, carry = s.path(backend), s.initializer(backend)(start())
    step = jax.jit(stepper(s.method(), **s.setting, backend=backend), donate_argnums=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Some donated buffers were not usable")
        path = walk(step, carry, s.targets(), steps=s.steps)
    return s.follows(path, expected, bits=s.steps if s.strict else 0)


@FRESH.clause()
def no_random_number_depends_on_constants_alone(s: Subject):
    """Some input of the step bears on every key."""
    drawn = constant_draws(s.traced())
    if drawn is None:
        return "it draws none"
    if drawn:
        raise Broken(
            f"{drawn} draws its key from constants alone, so each step repeats the "
            "last one's: fold the step into the key (step= reaches every update)"
        )
    return None


def few_bits(tree: PyTree) -> PyTree:
    """Floating-point leaves on a grid of 2⁻¹⁰ of their size: sums of few are exact."""

    def snap(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact) or not x.size:
            return x
        value = wide(x)
        size = float(np.abs(value).max())
        if not 0 < size < np.inf:
            return x
        grid = 2.0 ** (np.ceil(np.log2(size)) - 10)
        return (np.round(value / grid) * grid).astype(x.dtype)

    return jax.tree.map(snap, tree)


def _unstacked(tree: PyTree, steps: int, *, axis: int) -> list:
    """The parts of a tree whose leaves hold all steps along an axis."""
    pick = lambda t: jax.tree.map(lambda x: x[(slice(None),) * axis + (t,)], tree)
    return [host(pick(t)) for t in range(steps)]
