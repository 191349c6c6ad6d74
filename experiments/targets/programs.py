"""A method's steps on a cluster: what lies where, and what its compiler makes of them.

A worker is a slice, or an equal part of one, whose devices share its parameters along
the mesh axis ``fsdp`` (``experiments.sharding``). The method runs as
``lowcomm.sharded`` has it: the compiler divides what is computed on whole leaves, and
compressed exchanges run shard by shard. Left to the compiler these would be gathered
over ``fsdp`` and sent whole by every device, which only the bytes of compiled programs
show. Methods on two levels have their groups on slices and two workers in each.

Nothing is computed: arrays are shapes, placed as they would be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import lowcomm as lc
from lowcomm.fused import local_round
from lowcomm.shards import PerShardState
from lowcomm.spmd import AXIS, names
from lowcomm.uniform import Question, known

from .. import sharding
from ..catalogue import CATALOGUE
from ..contracts import Method, Setting
from ..task import PyTree, Task
from .chips import Target
from .clusters import Cluster

INSIDE = "fsdp"
RATE = 0.01  # of momentum SGD, for which the catalogue's formulas are written


class TooLarge(ValueError):
    """What a program holds does not fit into a device's memory."""


class Placed(NamedTuple):
    """A method on a cluster."""

    name: str
    method: Method
    setting: Setting
    cluster: Cluster
    mesh: Mesh  # workers x fsdp
    tx: Any
    loss: Any
    params: PyTree  # stacked, placed shapes
    state: Any
    batch: PyTree

    @property
    def devices(self) -> int:
        """Of a worker."""
        return self.mesh.shape.get(INSIDE, 1)

    @property
    def divided(self) -> Any:
        """The loss, whose examples the devices of a worker share out."""
        return sharding.divided(self.loss, self.mesh.shape)

    @property
    def slices(self) -> Mesh:
        """The same devices in the same order, as slices and places in them."""
        shape = self.cluster.devices.shape
        return Mesh(self.mesh.devices.reshape(shape), ("slice", "place"))

    @property
    def shards(self) -> PyTree:
        """What one device holds of a worker's parameters."""
        part = lambda x: jax.ShapeDtypeStruct(_shard(x)[1:], x.dtype)
        return jax.tree.map(part, self.params)

    @property
    def whole(self) -> tuple[PyTree, PyTree]:
        """One worker's parameters and batch."""
        one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        return jax.tree.map(one, (self.params, self.batch))


class Program(NamedTuple):
    """One kind of step, compiled, or a round."""

    compiled: Any
    host: int  # the step it was traced at
    serves: tuple[int, ...]  # all steps that decide as it does
    seconds: float  # it took to trace and compile


def workers_of(cluster: Cluster, per_slice: int, method: Method) -> tuple[int, ...]:
    """How many workers there are along each axis of a method.

    Raises:
        ValueError: workers that do not divide a slice, or only one of them.
    """
    slices = cluster.target.slices
    levels = len(names(method.axis))
    inside = 2 if levels == 2 and per_slice == 1 else per_slice
    check_divides(cluster.target, inside)
    return (slices, inside) if levels == 2 else (slices * inside,)


def check_divides(target: Target, per_slice: int) -> None:
    """Raise unless slices fall into so many workers, and there are several in all."""
    if per_slice < 1 or target.devices % per_slice:
        raise ValueError(
            f"{per_slice} workers in a slice of {target.devices} devices: give a "
            f"number that divides {target.devices}."
        )
    if target.slices * per_slice < 2:
        raise ValueError(
            "one slice of one worker sends nothing to others: give more slices, or "
            "several workers in a slice."
        )


def place(
    name: str,
    task: Task,
    cluster: Cluster,
    *,
    per_slice: int = 1,
    period: int = 4,
    steps: int = 16,
) -> Placed:
    """The shapes of a method's parameters, state and batch, where they will lie.

    Raises:
        ValueError: workers that do not fit the slices; a method that cannot be built
            for them.
        TooLarge: the state and one gradient are more than a device's memory.
    """
    method = CATALOGUE[name]
    axis, sizes = method.axis, workers_of(cluster, per_slice, method)
    workers = math.prod(sizes)
    group = cluster.devices.size // workers
    mesh = Mesh(
        cluster.devices.reshape(*sizes, *[group] * (group > 1)),
        (*names(axis), *[INSIDE] * (group > 1)),
    )
    setting = Setting(workers, steps, RATE, period, window=2)
    one = jax.eval_shape(task.init, jax.random.key(0))
    specs = sharding.specs(one, {INSIDE: group})
    tx = sharding.sharded(
        name,
        specs,
        workers=workers,
        steps=steps,
        learning_rate=RATE,
        period=period,
        window=2,
    )
    at = lambda shape, dtype, *parts: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, P(axis, *parts))
    )
    params = jax.tree.map(
        lambda x, spec: at((workers, *x.shape), x.dtype, *spec), one, specs
    )
    state = state_of(tx, params, mesh, axis=axis)
    inside = INSIDE if group > 1 else None

    def example(x):
        divided = (inside,) if x.shape[1] % group == 0 else ()
        return at((workers, *x.shape[1:]), x.dtype, *divided)

    batch = jax.tree.map(example, task.batches(0))
    placed = Placed(
        name, method, setting, cluster, mesh, tx, task.loss, params, state, batch
    )
    check_fits(placed)
    return placed


def check_fits(placed: Placed) -> int:
    """Bytes of state and one gradient on a device, if its memory holds them."""
    held = lambda tree: sum(
        math.prod(_shard(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
    params, state = held(placed.params), held(placed.state)
    room = placed.cluster.target.chip.room
    if (total := 2 * params + state) > room:
        gb = lambda n: f"{n / 1e9:.3g} GB"
        raise TooLarge(
            f"{placed.name} does not fit: on each device the parameters take "
            f"{gb(params)}, their gradients as much and the state {gb(state)}, "
            f"together {gb(total)} of {gb(room)} on {placed.cluster.target.name}. "
            "Choose a smaller model, larger slices or fewer workers in a slice."
        )
    return total


def kinds(placed: Placed, *, few: bool = False) -> Iterator[Program]:
    """A compiled program for each kind of step, in order of first use.

    With ``few``, of the last step of a round and the two that follow it.
    """
    served: dict[int, tuple[list[Question], Any, float]] = {}
    last = 2 * placed.setting.period - 1
    steps = range(last, last + 3) if few else range(placed.setting.steps)
    alike = lambda asked, t: all(q.ask(t) == q.answer for q in asked)
    for host in steps:
        if any(alike(asked, host) for asked, *_ in served.values()):
            continue
        began, asked = time.perf_counter(), []
        lowered = _lower(placed, host, asked)
        served[host] = asked, lowered, time.perf_counter() - began
    for host, (asked, lowered, traced) in served.items():
        earlier = [a for h, (a, *_) in served.items() if h < host]
        mine = tuple(
            t
            for t in steps
            if alike(asked, t) and not any(alike(other, t) for other in earlier)
        )
        yield _compile(placed, lowered, host, mine, traced)


def round_of(placed: Placed) -> Program:
    """One round as one program, beginning with the step that sends."""
    began = time.perf_counter()
    length = placed.setting.period
    host = 2 * length - 1
    lowered = _lower(placed, host, [], length=length)
    return _compile(placed, lowered, host, (host,), time.perf_counter() - began)


def asks(placed: Placed, host: int, *, by_shard: bool) -> lc.Traffic:
    """What the jaxpr of one worker's step sends: of whole leaves, or by shards."""
    params, batch = placed.whole
    axis, mesh = placed.method.axis, placed.mesh
    sizes: Any = mesh
    loss = placed.divided
    if not by_shard or INSIDE not in mesh.shape:
        sizes = [mesh.shape[name] for name in names(axis)]
        loss = placed.loss
    worker = lc.local_step(loss, placed.tx, axis=axis)
    begun = lambda params, batch: worker(params, placed.tx.init(params), batch, host)
    return lc.traffic(begun, params, batch, workers=sizes, axis=axis)


def memory(compiled: Any) -> int:
    """Bytes of a device's memory that a program needs."""
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.generated_code_size_in_bytes
    )


def state_of(tx: Any, params: PyTree, mesh: Mesh, *, axis: Any = AXIS) -> Any:
    """The shapes of the state, what is shaped like a parameter divided like it."""
    shapes = jax.eval_shape(lc.spread(tx.init, mesh=mesh, axis=axis), params)
    like = {
        path: (x.shape, x.sharding)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    everywhere = NamedSharding(mesh, P(axis))
    group = mesh.shape.get(INSIDE, 0)

    def beside(x):  # kept for each shard
        parts = (axis, INSIDE) if x.shape[1:2] == (group,) else (axis,)
        where = NamedSharding(mesh, P(*parts))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    def put(path, x):
        if isinstance(x, PerShardState):
            return jax.tree.map(beside, x)
        ends = [path[i:] for i in range(len(path) + 1)]
        same = [like[end] for end in ends if end in like and like[end][0] == x.shape]
        where = same[0][1] if same else everywhere
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    kept = lambda x: isinstance(x, PerShardState)
    return jax.tree_util.tree_map_with_path(put, shapes, is_leaf=kept)


def _lower(
    placed: Placed, host: int, asked: list[Question], *, length: int | None = None
) -> Any:
    axis = placed.method.axis
    if length is None:
        step, batch = lc.local_step(placed.divided, placed.tx, axis=axis), placed.batch
    else:
        step = local_round(placed.divided, placed.tx, length=length, axis=axis)
        batch = jax.tree.map(lambda x: _repeated(x, length), placed.batch)

    def worker(params, state, batch, now):
        with known(now, host, asked):
            return step(params, state, batch, now)

    spread = lc.spread(worker, mesh=placed.mesh, axis=axis, in_axes=(0, 0, 0, None))
    where = jax.tree.map(lambda x: x.sharding, (placed.params, placed.state))
    jitted = jax.jit(spread, donate_argnums=(0, 1), out_shardings=(*where, None))
    now = jax.ShapeDtypeStruct((), jnp.int32)
    return jitted.lower(placed.params, placed.state, batch, now)


def _compile(
    placed: Placed, lowered: Any, host: int, serves: tuple[int, ...], traced: float
) -> Program:
    began = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=placed.cluster.options)
    except jax.errors.JaxRuntimeError as problem:
        if "RESOURCE_EXHAUSTED" not in str(problem):
            raise
        raise TooLarge(
            f"{placed.name} does not fit, says the compiler: {problem}"
        ) from problem
    room = placed.cluster.target.chip.room
    if (needed := memory(compiled)) > room:
        raise TooLarge(
            f"{placed.name} does not fit: step {host} needs {needed / 1e9:.3g} GB of "
            f"{room / 1e9:.3g} GB on {placed.cluster.target.name}. Choose a smaller "
            "model or batch, or larger slices."
        )
    return Program(compiled, host, serves, traced + time.perf_counter() - began)


def _repeated(x: Any, length: int) -> Any:
    """The batch of one step as those of a round, ``[K, length, ...]``."""
    first, *rest = x.sharding.spec
    where = NamedSharding(x.sharding.mesh, P(first, None, *rest))
    shape = (x.shape[0], length, *x.shape[1:])
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=where)


def _shard(x: Any) -> tuple[int, ...]:
    return x.sharding.shard_shape(x.shape)
