"""One worker's step, and one step of all workers with its bytes counted.

``local_step`` is for any loop. ``counted_step`` compiles it for all workers, one
program for each kind of step, and says what every step sent.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh

from .agreement import alone, processes_of, together
from .leaves import PyTree, is_inexact, precise
from .ledger import Traffic, traffic
from .meter import meter
from .processes import at_hand
from .readout import apply_updates
from .sameness import check_program
from .spmd import AXIS, Axis, check_axes, names, vary
from .uniform import Question, known
from .workers import spread

Loss = Callable[[PyTree, PyTree], Any]

# More kinds of step than this share one program that decides as it runs.
MOST_PROGRAMS = 8


class Sent(NamedTuple):
    """What one step sent."""

    traffic: Traffic  # of the program that ran
    counts: jax.Array  # [K, rows] int32, how often each row of it ran
    program: int  # its number, from 0 in order of first use

    @property
    def ran(self) -> np.ndarray:
        """How often each row ran on a worker, ``[rows]``; waits for the step."""
        return at_hand(self.counts)[0]

    @property
    def bytes(self) -> int:
        """Payload bytes each worker sent, all its devices together; waits for it."""
        return self.traffic.together().bytes(self.ran)


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
    is passed ``step=``, ``value=`` (the loss), ``aux=`` if there is one, and what
    ``extra_args(batch)`` returns, such as the ``weight`` of ``weighted_mean``.
    ``metrics`` holds ``"loss"`` and, if there is one, ``"aux"``, of this worker.
    Parameters are marked as this worker's own before differentiating: the gradient of
    a parameter that is declared replicated is the sum over the workers.

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
        more = {"aux": aux[0]} if aux else {}
        more |= {} if extra_args is None else extra_args(batch)
        updates, state = tx.update(grads, state, params, step=step, value=value, **more)
        params = apply_updates(params, updates, state)
        return params, state, {"loss": value} | ({"aux": aux[0]} if aux else {})

    return worker


def microbatched(loss: Loss, *, has_aux: bool = False) -> Loss:
    r"""The mean of ``loss`` over a leading axis of micro-batches, one at a time.

    .. math:: L(x, B) = \tfrac1n \sum_{j=1}^n \ell(x, B_j)

    Its batch has leaves ``[n, …]``, micro-batch by micro-batch. The gradient is the
    mean of their gradients, summed in float32 for half-precision parameters; where
    micro-batches are equally large it is that of the whole batch. It takes the memory
    of one micro-batch, and computes the loss twice. With ``has_aux`` what the loss
    returns besides comes stacked, ``[n, …]``.

    Example:
        >>> loss = lambda x, c: jnp.mean((x - c) ** 2) / 2
        >>> batch = jnp.arange(8.0)
        >>> print(jax.grad(loss)(10.0, batch))
        6.5
        >>> print(jax.grad(microbatched(loss))(10.0, batch.reshape(4, 2)))
        6.5
    """

    def mean_loss(params, batches):
        # Gradients are summed in the type of what the scan closes over.
        params = jax.tree.map(jnp.asarray, params)
        wide = jax.tree.map(lambda p: precise(p) if is_inexact(p) else p, params)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def one(batch):
            narrow = lambda p, w: w.astype(p.dtype) if is_inexact(p) else p
            return loss(jax.tree.map(narrow, params, wide), batch)

        _, found = jax.lax.scan(lambda _, batch: ((), one(batch)), (), batches)
        if has_aux:
            values, aux = found
            return jnp.mean(values, axis=0), aux
        return jnp.mean(found, axis=0)

    return mean_loss


def counted_step(
    loss: Loss,
    tx: optax.GradientTransformation,
    *,
    workers: int,
    has_aux: bool = False,
    extra_args: Callable[[PyTree], dict] | None = None,
    mesh: Any = None,
    axis: Axis = AXIS,
    backend: str | None = None,
) -> Callable:
    """A step of all workers, compiled once for each kind of step; ``fit`` is its loop.

    It maps stacked ``(params, state, batch, t)``, where ``t`` is a Python integer, to
    ``(params, state, metrics, sent)`` and donates the first two. ``sent.bytes`` is the
    payload each worker sent. The arguments are those of ``local_step`` and ``spread``.

    The step is known to the host, so clock triggers are decided when a program is
    traced, and a step between two syncs holds no conditional and no collective. One
    program is compiled for each set of answers to what the triggers asked about the
    step; beyond eight, one with conditionals serves the rest.

    Raises:
        ValueError: a batch that is not stacked for this number of workers.

    Example:
        >>> from lowcomm import init, local_sgd, stack
        >>> tx = local_sgd(optax.sgd(0.5), period=2)
        >>> step = counted_step(lambda x, c: (x - c) ** 2 / 2, tx, workers=2)
        >>> x = stack(jnp.array(4.0), 2)
        >>> state = init(tx, x)
        >>> for t in range(4):
        ...     x, state, metrics, sent = step(x, state, jnp.array([0.0, 2.0]), t)
        ...     print(t, metrics["loss"], sent.bytes)
        0 [8. 2.] 0
        1 [2.  0.5] 4
        2 [1.53125 0.03125] 0
        3 [0.3828125 0.0078125] 4
    """
    step = local_step(loss, tx, has_aux=has_aux, extra_args=extra_args, axis=axis)
    return counted(step, workers=workers, mesh=mesh, axis=axis, backend=backend)


def counted(
    step: Callable, *, workers: int, mesh: Any, axis: Axis, backend: str | None
) -> Callable:
    """One worker's ``step``, or several at once, compiled for all and counted."""
    sizes: Any = workers
    if mesh is not None:
        check_axes(mesh, axis)
        sizes = [mesh.shape[name] for name in names(axis)]
        if isinstance(mesh, Mesh) and set(mesh.axis_names) - set(names(axis)):
            sizes = mesh  # what is exchanged by shards is traced and counted by shards
    programs: list[_Compiled] = []

    def counted(params, state, batch, t):
        if isinstance(t, Tracer):
            raise ValueError(
                "counted_step and counted_round are told their step as a Python "
                "integer, and compile by themselves: call them outside of jit and "
                "scan, or use local_step or local_round there."
            )
        t = operator.index(t)
        check_stacked("batch", batch, workers)
        program = next((p for p in programs if p.serves(t)), None)
        known = program is not None
        if program is None:
            host = t if len(programs) < MOST_PROGRAMS else None
            program = _Compiled(step, host, sizes, axis, mesh=mesh, backend=backend)
        out, sends = program(params, state, batch, jnp.int32(t))
        (params, state, metrics), counts = out
        if not known:  # and not before it has run: a failed trace has asked nothing
            programs.append(program)
        sent = Sent(sends, counts, programs.index(program))
        return params, state, metrics, sent

    return counted


class _Compiled:
    """A step's program, with what it was told about its step when it was traced."""

    def __init__(
        self,
        step: Callable,
        host: int | None,
        workers: Any,
        axis: Axis,
        *,
        mesh: Any,
        backend: str | None,
    ):
        self.asked: list[Question] = []
        self.sends: dict[Any, Traffic] = {}  # for arrays of these shapes
        self.workers, self.axis, self.mesh = workers, axis, mesh
        self.grouped = isinstance(workers, Mesh)

        def worker(params, state, batch, now):
            if host is None:
                return step(params, state, batch, now)
            with known(now, host, self.asked):
                return step(params, state, batch, now)

        self.worker = worker
        how: Any = {"mesh": mesh, "backend": backend, "in_axes": (0, 0, 0, None)}
        self.spread = spread(meter(worker), axis=axis, **how)
        self.call: Any = None

    def serves(self, t: int) -> bool:
        """Whether all that this program was told holds for step ``t`` as well."""
        return all(q.ask(t) == q.answer for q in self.asked)

    def __call__(self, *stacked: Any) -> Any:
        if self.call is None:
            # The compiler may divide a result otherwise than the argument it follows:
            # the next step would be another program.
            placed = lambda: jax.tree.map(lambda x: x.sharding, stacked[:2])
            self.call = jax.jit(
                self.spread,
                donate_argnums=(0, 1),
                out_shardings=((*placed(), None), None) if self.grouped else None,
            )
        leaves, structure = jax.tree.flatten(stacked[:-1])
        kinds = structure, tuple((jnp.shape(x), jax.typeof(x).dtype) for x in leaves)
        fresh = kinds not in self.sends
        if fresh and not alone(among := processes_of(self.mesh)):
            with together(among):
                program = self.call.trace(*stacked).jaxpr
            params, state, batch, now = stacked
            arrays = {"params": params, "state": state, "batch": batch}
            check_program(program, step=int(now), arrays=arrays, mesh=self.mesh)
        out = self.call(*stacked)
        if fresh:
            one = [jax.ShapeDtypeStruct(shape[1:], dtype) for shape, dtype in kinds[1]]
            # Not handed in, where it would be taken for one worker's own.
            now = lambda p, s, batch: self.worker(p, s, batch, stacked[-1])
            self.sends[kinds] = traffic(
                now,
                *jax.tree.unflatten(structure, one),
                workers=self.workers,
                axis=self.axis,
            )
        return out, self.sends[kinds]


def check_stacked(name: str, tree: PyTree, workers: int) -> None:
    """Raise, naming the leaf, unless every leaf has one part for each worker."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.ndim(x) == 0 or jnp.shape(x)[0] != workers:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} has shape {jnp.shape(x)} and must "
                f"be stacked for {workers} workers, [{workers}, ...]."
            )
