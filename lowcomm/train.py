"""From a loss and a transformation to a trained model: a loop that counts bytes."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from .leaves import PyTree
from .ledger import Traffic
from .processes import at_hand, workers_at_hand
from .sameness import check_start
from .shards import init
from .spmd import AXIS, Axis, stack
from .steps import Loss, check_stacked, counted_step

Batches = Callable[[int], PyTree] | Iterable[PyTree]


class Program(NamedTuple):
    """One kind of step, and what it sent in a run."""

    traffic: Traffic  # one step's
    ran: np.ndarray  # [rows] int64, how often each row of the traffic ran, a worker
    steps: int


class Run(NamedTuple):
    """What ``fit`` hands back; params and state are stacked ``[K, …]``."""

    params: PyTree
    state: Any
    losses: np.ndarray  # [steps, K], of this process's workers if there are several
    payload: np.ndarray  # [steps] int64, bytes each worker sent, all devices of it
    programs: tuple[Program, ...]

    @property
    def bytes(self) -> int:
        """Payload bytes each worker sent in the whole run."""
        return int(self.payload.sum())


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
    state stay divided as they are.
    ``on_step(t, params, state, metrics)`` sees the stacked arrays after step ``t``;
    they are donated to the next step, so copy what is to be kept.

    One program is compiled for each kind of step: see ``counted_step``. After ``join``
    the workers of several processes are trained as one: batches are made by ``feed``,
    and ``losses`` are those of the workers at hand.

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
    about = {"steps": steps, "start": start, "workers": workers}
    check_start(params if state is None else (), about, mesh)
    if state is not None:  # the caller's arrays are not ours to donate
        check_stacked("with state=, params", params, workers)
        params, state = jax.tree.map(jnp.copy, (params, state))
    else:
        params = stack(params, workers, mesh=mesh, axis=axis, specs=specs)
        state = init(tx, params, mesh=mesh, axis=axis, backend=backend)
    step = counted_step(
        loss,
        tx,
        workers=workers,
        has_aux=has_aux,
        extra_args=extra_args,
        mesh=mesh,
        axis=axis,
        backend=backend,
    )
    programs: dict[int, Program] = {}
    feed = batches if callable(batches) else _in_order(batches)
    on_devices = isinstance(mesh, Mesh)
    mine = workers_at_hand(mesh, axis=axis) if on_devices else np.arange(workers)
    losses, payload = [], []

    def record(t, metrics, sent):
        values, ran = at_hand(metrics["loss"]), sent.ran.astype(np.int64)
        before = programs.get(sent.program, Program(sent.traffic, 0 * ran, 0))
        programs[sent.program] = Program(
            sent.traffic, before.ran + ran, before.steps + 1
        )
        losses.append(values)
        payload.append(sent.bytes)
        if check_finite:
            check_losses(t, values, mine)

    # An accelerator goes on while the host reads the step before. Simulated devices
    # must not run ahead: unfinished collectives of several steps can deadlock.
    lag = 0 if jax.default_backend() == "cpu" else 1
    waiting = collections.deque()
    for t in range(start, start + steps):
        params, state, metrics, sent = step(params, state, feed(t), t)
        if on_step is not None:
            on_step(t, params, state, metrics)
        waiting.append((t, metrics, sent))
        while len(waiting) > lag:
            record(*waiting.popleft())
    for last in waiting:
        record(*last)
    return Run(
        params,
        state,
        np.stack(losses) if losses else np.zeros((0, len(mine))),
        np.array(payload, np.int64),
        tuple(programs.values()),
    )


def check_losses(t: int, losses: np.ndarray, workers: np.ndarray | None = None) -> None:
    """Raise ``FloatingPointError`` unless all losses are finite.

    They are those of ``workers``, or of all of them.
    """
    bad = np.flatnonzero(~np.isfinite(losses))
    if bad.size:
        worker = bad[0] if workers is None else workers[bad[0]]
        raise FloatingPointError(
            f"the loss is {losses[bad[0]]} at step {t} on worker {worker}"
            + (f" and {bad.size - 1} more" if bad.size > 1 else "")
            + ": lower the learning rate, or look at that worker's batch; what can "
            "take it runs with check_finite=False."
        )


def _in_order(batches: Iterable[PyTree]) -> Callable[[int], PyTree]:
    remaining = iter(batches)

    def following(t):
        try:
            return next(remaining)
        except StopIteration:
            raise ValueError(f"batches ended before step {t}.") from None

    return following
