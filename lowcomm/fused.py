"""A whole round as one program, so that what is on its way travels while it computes.

Steps that decide alike become one loop, and around it stand those that talk. What a
round sends and does not need before its end is no input of the loop: a compiler that
schedules transfers beside computation starts it before the loop and waits for it after.

    send ──────────────────────────────▶ arrives     (delay, overlapped, stale anchor)
         └ loop: H − 1 local steps ┘
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .leaves import PyTree
from .spmd import AXIS, Axis
from .steps import Loss, counted, local_step
from .uniform import Question, earlier, handed_on, host_of, known


def local_round(
    loss: Loss,
    tx: optax.GradientTransformation,
    *,
    length: int,
    has_aux: bool = False,
    extra_args: Callable[[PyTree], dict] | None = None,
    axis: Axis = AXIS,
) -> Callable:
    r"""``length`` steps of one worker, for ``spread``: ``local_step`` again and again.

    It maps ``(params, state, batches, step)`` to ``(params, state, metrics)``, where
    ``step`` is the number of the first step, and the leaves of ``batches`` and of the
    metrics are ``[length, …]``. Where the step is known to the host (a Python integer,
    or inside ``counted_round``), steps at which all triggers decide alike are one
    ``lax.scan`` without conditionals, and the others stand before, between and after.
    Otherwise all are one scan, with the conditionals in it.

    For an exchange that has time to arrive (``delay``, ``overlapped``,
    ``stale_anchor``) begin with the step that sends: all that follows it in the round
    then hides the transfer.

    Raises:
        ValueError: a length below 1; at trace, a batch of another length.

    Example:
        >>> from lowcomm import local_sgd, spread
        >>> loss = lambda x, c: (x - c) ** 2 / 2
        >>> tx = local_sgd(optax.sgd(0.5), period=2)
        >>> round_ = local_round(loss, tx, length=4)
        >>> x = jnp.full(2, 4.0)
        >>> c = jnp.array([[0.0] * 4, [2.0] * 4])  # [K, length]
        >>> step = spread(round_, in_axes=(0, 0, 0, None))
        >>> x, state, metrics = step(x, spread(tx.init)(x), c, 0)
        >>> print(metrics["loss"][0], x)
        [8.        2.        1.53125   0.3828125] [1.1875 1.1875]
    """
    if length < 1:
        raise ValueError(f"length={length}: a round has at least one step.")
    step = local_step(loss, tx, has_aux=has_aux, extra_args=extra_args, axis=axis)

    def worker(params, state, batches, first):
        for path, x in jax.tree_util.tree_leaves_with_path(batches):
            if jnp.ndim(x) == 0 or jnp.shape(x)[0] != length:
                raise ValueError(
                    f"batches{jax.tree_util.keystr(path)} has shape {jnp.shape(x)} for "
                    f"a worker and must hold one batch for each of {length} steps, "
                    f"[{length}, …]."
                )
        if isinstance(first, int | np.integer):
            now = jnp.int32(first)
            with known(now, int(first), []):
                return _in_turn(step, length, params, state, batches, now)
        return _in_turn(step, length, params, state, batches, first)

    return worker


def counted_round(
    loss: Loss,
    tx: optax.GradientTransformation,
    *,
    length: int,
    workers: int,
    has_aux: bool = False,
    extra_args: Callable[[PyTree], dict] | None = None,
    mesh: Any = None,
    axis: Axis = AXIS,
    backend: str | None = None,
) -> Callable:
    """``counted_step`` for ``length`` steps at once, which are one program.

    It maps stacked ``(params, state, batches, t)`` to ``(params, state, metrics,
    sent)``: ``t`` is the number of the first step, batches and metrics are
    ``[K, length, …]``, and ``sent`` is what the whole round sent. See ``local_round``
    for how its steps are arranged; everything else is as in ``counted_step``.

    Example:
        A round that begins with the step that sends, and adopts what it sent at its
        end, is one program from the second on.

        >>> from lowcomm import diloco, init, stack
        >>> tx = diloco(optax.sgd(0.5), period=4)
        >>> run = counted_round(lambda x, c: (x - c) ** 2 / 2, tx, length=4, workers=2)
        >>> x = stack(jnp.array(4.0), 2)
        >>> state = init(tx, x)
        >>> c = jnp.array([[0.0] * 4, [2.0] * 4])
        >>> for t in (0, 4, 8):
        ...     x, state, metrics, sent = run(x, state, c, t)
        ...     print(metrics["loss"].shape, sent.bytes, sent.program)
        (2, 4) 4 0
        (2, 4) 4 0
        (2, 4) 4 0
    """
    step = local_round(
        loss, tx, length=length, has_aux=has_aux, extra_args=extra_args, axis=axis
    )
    return counted(step, workers=workers, mesh=mesh, axis=axis, backend=backend)


def _in_turn(step, length, params, state, batches, first):
    """The steps from ``first`` on, those that decide alike in one loop."""
    carry, found, at = (params, state), [], 0
    while at < length:
        batch = jax.tree.map(lambda x, at=at: x[at], batches)
        alike = _alike(step, length - at, carry, batch, first, at)
        with earlier(first, -at) as begin:
            turn = _turn(step, begin)
            if alike == 1:
                carry, metrics = turn(carry, (batch, 0))
                metrics = jax.tree.map(lambda x: jnp.asarray(x)[None], metrics)
            else:
                some = jax.tree.map(lambda x, at=at, n=alike: x[at : at + n], batches)
                turns = jnp.arange(alike, dtype=jnp.int32)
                carry, metrics = lax.scan(turn, carry, (some, turns))
        found.append(metrics)
        at += alike
    join = lambda *parts: jnp.concatenate(parts)
    return (*carry, found[0] if len(found) == 1 else jax.tree.map(join, *found))


def _turn(step: Callable, begin: jax.Array) -> Callable:
    """One turn of a loop whose steps decide as the one numbered ``begin`` does."""

    def turn(carry, now):
        batch, i = now
        t = begin + i
        with handed_on(begin, t):
            *after, metrics = step(*carry, batch, t)
        return tuple(after), metrics

    return turn


def _alike(step, most, carry, batch, first, at) -> int:
    """For how many steps from number ``at`` on all triggers decide as they do there."""
    clock = host_of(first)
    if clock is None:
        return most
    host, asked = clock
    before = len(asked)
    with earlier(first, -at) as now:
        # A trace of its own, for the questions alone.
        jax.eval_shape(lambda *args: step(*args, now), *carry, batch)
    here = asked[before:]
    same = lambda i: all(q.ask(host + i) == q.answer for q in here)
    alike = 1 + sum(1 for _ in itertools.takewhile(same, range(1, most)))
    # One program serves all rounds in which every one of these steps decides so.
    for i in range(1, alike):
        asked += [Question(lambda t, q=q, i=i: q.ask(t + i), q.answer) for q in here]
    return alike
