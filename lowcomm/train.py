"""From a loss and a transformation to a training loop.

``local_step`` is one worker's step, for any loop; ``fit`` is a loop around it that
counts bytes, checks the losses, and compiles one program for each kind of step.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from .leaves import PyTree, is_inexact
from .ledger import Traffic, traffic
from .meter import meter
from .readout import apply_updates
from .shards import init
from .spmd import AXIS, Axis, check_axes, names, stack, vary
from .uniform import Question, known
from .workers import spread

Loss = Callable[[PyTree, PyTree], Any]
Batches = Callable[[int], PyTree] | Iterable[PyTree]


# More kinds of step than this share one program that decides as it runs.
MOST_PROGRAMS = 8


class Program(NamedTuple):
    """One kind of step, and what it sent in a run."""

    traffic: Traffic  # one step's
    ran: np.ndarray  # [rows] int64, how often each row of the traffic ran, a worker
    steps: int


class Run(NamedTuple):
    """What ``fit`` hands back; params and state are stacked ``[K, …]``."""

    params: PyTree
    state: Any
    losses: np.ndarray  # [steps, K]
    payload: np.ndarray  # [steps] int64, bytes each worker sent
    programs: tuple[Program, ...]

    @property
    def bytes(self) -> int:
        """Payload bytes each worker sent in the whole run."""
        return int(self.payload.sum())


def local_step(
    loss: Loss,
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    extra_args: Callable[[PyTree], dict] | None = None,
    axis: Axis = AXIS,
) -> Callable:
    """One worker's step, for ``spread`` and any loop.

    It maps ``(params, state, batch, step)`` to ``(params, state, metrics)``.
    ``loss(params, batch)`` is a scalar, or ``(scalar, aux)`` with ``has_aux``. ``tx``
    is passed ``step=``, ``value=`` (the loss) and what ``extra_args(batch)`` returns,
    such as the ``weight`` of ``weighted_mean``. ``metrics`` holds ``"loss"`` and,
    if there is one, ``"aux"``, of this worker. Parameters are marked as this worker's
    own before differentiating: the gradient of a parameter that is declared
    replicated is the sum over the workers.

    Example:
        >>> from lowcomm import local_sgd, spread
        >>> loss = lambda x, c: (x - c) ** 2 / 2
        >>> tx = local_sgd(optax.sgd(0.5), period=2)
        >>> step = spread(local_step(loss, tx), in_axes=(0, 0, 0, None))
        >>> x, c = jnp.full(2, 4.0), jnp.array([0.0, 2.0])
        >>> state = spread(tx.init)(x)
        >>> for t in range(2):
        ...     x, state, metrics = step(x, state, c, t)
        ...     print(metrics["loss"], x)
        [8. 2.] [2. 3.]
        [2.  0.5] [1.75 1.75]
    """
    tx = optax.with_extra_args_support(tx)
    gradient = jax.value_and_grad(loss, has_aux=has_aux, allow_int=True)

    def worker(params, state, batch, step):
        leaves = jax.tree.leaves(params)
        if not any(map(is_inexact, leaves)):
            kinds = ", ".join(sorted({str(jnp.result_type(x)) for x in leaves}))
            raise ValueError(
                f"there is nothing to train: the parameters hold {kinds or 'no leaf'} "
                "and only floating-point and complex leaves have gradients."
            )
        params = vary(params, axis)
        value, grads = gradient(params, batch)
        value, *aux = value if has_aux else (value,)
        # JAX's gradient of an integer has a type that no arithmetic takes.
        still = lambda p, g: jnp.zeros_like(p) if g.dtype == jax.dtypes.float0 else g
        grads = jax.tree.map(still, params, grads)
        more = {} if extra_args is None else extra_args(batch)
        updates, state = tx.update(grads, state, params, step=step, value=value, **more)
        params = apply_updates(params, updates, state)
        return params, state, {"loss": value} | ({"aux": aux[0]} if aux else {})

    return worker


def fit(
    loss: Loss,
    tx: optax.GradientTransformation,
    params: PyTree,
    batches: Batches,
    *,
    steps: int,
    workers: int,
    start: int = 0,
    state: Any = None,
    has_aux: bool = False,
    extra_args: Callable[[PyTree], dict] | None = None,
    mesh: Any = None,
    specs: Any = None,
    axis: Axis = AXIS,
    backend: str | None = None,
    on_step: Callable[[int, PyTree, Any, dict], None] | None = None,
    check_finite: bool = True,
) -> Run:
    """Train ``workers`` workers for ``steps`` steps, from step number ``start``.

    ``params`` are one worker's and all workers start from them. ``batches`` is a
    function of the step number or an iterable; each batch is stacked, ``[K, …]``. To
    go on from an earlier run pass its stacked ``params`` and ``state`` and the next
    step as ``start``. ``mesh`` and ``backend`` are those of ``spread``, ``specs`` those
    of ``stack``, for a mesh on which a worker is a group of devices; parameters and
    state stay divided as they are. (What ``per_shard`` sends is counted by the shard.)
    ``on_step(t, params, state, metrics)`` sees the stacked arrays after step ``t``;
    they are donated to the next step, so copy what is to be kept.

    The step is known to the host, so clock triggers are decided when a program is
    traced, and a step between two syncs holds no conditional and no collective. One
    program is compiled for each kind of step, that is, for each set of answers to what
    the triggers asked about the step; beyond eight, one with conditionals serves the
    rest.

    Raises:
        FloatingPointError: a worker's loss is not finite; names step and worker.
            ``check_finite=False`` goes on, for a method that skips such steps.
        ValueError: a batch that is not stacked for this number of workers.

    Example:
        >>> from lowcomm import local_sgd
        >>> loss = lambda x, c: (x - c) ** 2 / 2
        >>> tx = local_sgd(optax.sgd(0.5), period=4)
        >>> c = jnp.array([0.0, 2.0])
        >>> run = fit(loss, tx, jnp.array(4.0), lambda t: c, steps=8, workers=2)
        >>> print(run.payload, run.bytes, len(run.programs))
        [0 0 0 4 0 0 0 4] 8 2
        >>> print(abs(run.params - 1.0) < 0.02)
        [ True  True]
    """
    if steps < 0 or workers < 1:
        raise ValueError(f"steps={steps} and workers={workers}: give 0 and 1 or more.")
    if mesh is not None:
        check_axes(mesh, axis)
    if state is not None:  # the caller's arrays are not ours to donate
        _check_stacked("with state=, params", params, workers)
        params, state = jax.tree.map(jnp.copy, (params, state))
    else:
        params = stack(params, workers, mesh=mesh, axis=axis, specs=specs)
        state = init(tx, params, mesh=mesh, axis=axis, backend=backend)
    step = local_step(loss, tx, has_aux=has_aux, extra_args=extra_args, axis=axis)
    sizes = workers if mesh is None else [mesh.shape[name] for name in names(axis)]
    if isinstance(mesh, Mesh) and set(mesh.axis_names) - set(names(axis)):
        sizes = mesh  # what is exchanged by shards is traced and counted by shards
    programs: list[_Compiled] = []
    feed = batches if callable(batches) else _in_order(batches)
    losses, payload = [], []

    def record(t, program, metrics, ran):
        values, ran = np.asarray(metrics["loss"]), np.asarray(ran)[0]
        program.ran += ran
        program.steps += 1
        losses.append(values)
        payload.append(program.traffic.bytes(ran))
        bad = np.flatnonzero(~np.isfinite(values))
        if check_finite and bad.size:
            raise FloatingPointError(
                f"the loss is {values[bad[0]]} at step {t} on worker {bad[0]}"
                + (f" and {bad.size - 1} more" if bad.size > 1 else "")
                + ": lower the learning rate, or look at that worker's batch."
            )

    # An accelerator goes on while the host reads the step before. Simulated devices
    # must not run ahead: unfinished collectives of several steps can deadlock.
    lag = 0 if jax.default_backend() == "cpu" else 1
    waiting = collections.deque()
    for t in range(start, start + steps):
        batch = feed(t)
        _check_stacked("batch", batch, workers)
        program = next((p for p in programs if p.serves(t)), None)
        if program is None:
            host = t if len(programs) < MOST_PROGRAMS else None
            program = _Compiled(step, host, sizes, axis, mesh=mesh, backend=backend)
            programs.append(program)
        (params, state, metrics), ran = program(params, state, batch, jnp.int32(t))
        if on_step is not None:
            on_step(t, params, state, metrics)
        waiting.append((t, program, metrics, ran))
        while len(waiting) > lag:
            record(*waiting.popleft())
    for last in waiting:
        record(*last)
    return Run(
        params,
        state,
        np.stack(losses) if losses else np.zeros((0, workers)),
        np.array(payload, np.int64),
        tuple(Program(p.traffic, p.ran, p.steps) for p in programs),
    )


class _Compiled:
    """A step's program, with what it was told about its step when it was traced."""

    def __init__(
        self, step: Callable, host: int | None, workers: Any, axis: Axis, **how: Any
    ):
        self.asked: list[Question] = []
        self.steps = 0
        self.ran: Any = 0
        self.traffic: Any = None
        self.workers, self.axis = workers, axis
        self.grouped = isinstance(workers, Mesh)

        def worker(params, state, batch, now):
            if host is None:
                return step(params, state, batch, now)
            with known(now, host, self.asked):
                return step(params, state, batch, now)

        self.worker = worker
        self.spread = spread(meter(worker), axis=axis, in_axes=(0, 0, 0, None), **how)
        self.call: Any = None

    def serves(self, t: int) -> bool:
        """Whether all that this program was told holds for step ``t`` as well."""
        return all(q.ask(t) == q.answer for q in self.asked)

    def __call__(self, *stacked: Any) -> Any:
        if self.call is None:
            # The compiler may divide a result otherwise than the argument it follows:
            # the next step would be another program.
            placed = jax.tree.map(lambda x: x.sharding, stacked[:2])
            self.call = jax.jit(
                self.spread,
                donate_argnums=(0, 1),
                out_shardings=((*placed, None), None) if self.grouped else None,
            )
            one = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jax.typeof(x).dtype),
                stacked[:-1],
            )
            # Not handed in, where it would be taken for one worker's own.
            now = lambda p, s, batch: self.worker(p, s, batch, stacked[-1])
            self.traffic = traffic(now, *one, workers=self.workers, axis=self.axis)
        return self.call(*stacked)


def _check_stacked(name: str, tree: PyTree, workers: int) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.ndim(x) == 0 or jnp.shape(x)[0] != workers:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} has shape {jnp.shape(x)} and must "
                f"be stacked for {workers} workers, [{workers}, ...]."
            )


def _in_order(batches: Iterable[PyTree]) -> Callable[[int], PyTree]:
    remaining = iter(batches)

    def following(t):
        try:
            return next(remaining)
        except StopIteration:
            raise ValueError(f"batches ended before step {t}.") from None

    return following
