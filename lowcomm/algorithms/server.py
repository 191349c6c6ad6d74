"""Methods in which a server's model takes every gradient, and workers fetch it late.

There is no server process: every worker holds the server's model and its optimizer, and
an all-reduce of the gradients keeps them the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..exchange import mean
from ..leaves import PyTree, add, map_leaves, movable, precise, subtract
from ..parts import expect
from ..pulls import Pulls, common_pulls
from ..spmd import AXIS, Axis, vary
from ..sync import Talking, Transformation, enter, leave, propose


class ServerState(NamedTuple):
    """State of a method with a server's model."""

    server: Any  # of the server's optimizer, the same on all workers
    local: Any  # of this worker's optimizer
    exchange: Any
    anchor: PyTree  # the server's model, the same on all workers
    synced: jax.Array  # bool, whether params + updates is the server's model


def prlc(
    inner: Transformation,
    local: Transformation | None = None,
    *,
    pulls: int | Pulls,
    exchange: Talking | None = None,
    axis: Axis = AXIS,
) -> Talking:
    r"""PRLC: push every gradient, pull now and then, compensate in between.

    .. math::
        X \leftarrow X + \text{inner}(\tfrac1n \sum_i g_i), \qquad
        x_i \leftarrow \begin{cases} X & \text{where worker } i \text{ pulls} \\
        x_i + \text{local}(g_i) & \text{otherwise} \end{cases}

    ``X`` is ``state.anchor``, the model to evaluate. ``local`` is ``inner`` unless
    given, with a state of its own that sees all of this worker's gradients; for
    workers that do not compensate it is ``optax.set_to_zero()``, which leaves them
    where they pulled last. ``pulls`` is a period for all, or ``staggered_pulls``,
    ``random_pulls`` or ``listed_pulls``. The extra arguments reach ``local``; ``inner``
    is given only ``step=``, since what differs between workers would drive their
    copies of ``X`` apart.

    Sends, over a parameter server, the gradients up at every step and the model down
    where a worker pulls: ``(1 + r) P`` a step for a share ``r`` of pulls, against
    ``2 P``. In this program, the gradients by one all-reduce a step, whatever the
    pulls, and that is what is counted; its first half is the push. ``state.synced``
    says who pulled. What left at a step is not needed before the next pull.

    Note:
        It saves at most half of the traffic, and with a common period it is local SGD.
        Without compensation a common period ``p`` multiplies the step by ``p``. The
        paper's pull rule and an optimizer other than SGD are not known from it; that
        the compensation keeps its moments over pulls is an inference.

    Raises:
        ValueError: a period < 1; at trace, a missing ``step`` or ``params``, a schedule
            for another number of workers, an exchange that gives workers different
            results.

    Example:
        The server is the mean of the workers, who meet it at every second step.

        >>> from lowcomm import spread
        >>> tx = prlc(optax.sgd(0.5), pulls=2)
        >>> def worker(x, c):
        ...     state, path = tx.init(x), []
        ...     for t in range(4):
        ...         moves, state = tx.update(x - c, state, x, step=t)
        ...         x = x + moves
        ...         path.append(jnp.stack([x, state.anchor]))
        ...     return jnp.stack(path)
        >>> path = spread(worker)(jnp.full(2, 4.0), jnp.array([0.0, 2.0]))
        >>> for x, y, server in zip(*path[..., 0], path[0, :, 1]):
        ...     print(x, y, server)
        2.0 3.0 2.5
        1.75 1.75 1.75
        0.875 1.875 1.375
        1.1875 1.1875 1.1875

    References:
        Wang, Qu, Guo, Gao, Li and Ye, `Intermittent Pulling with Local Compensation
        for Communication-Efficient Federated Learning
        <https://arxiv.org/abs/2001.08277>`_, 2020.
    """
    pulls = pulls if callable(pulls) else common_pulls(pulls)
    return served(inner, local, pulls, lambda x, anchor: x, exchange, axis)


def served(
    inner: Transformation,
    local: Transformation | None,
    receives: Pulls,
    begin: Callable[[PyTree, PyTree], PyTree],
    exchange: Talking | None,
    axis: Axis,
) -> Talking:
    r"""The server takes every gradient; a worker receives its model or goes on itself.

    .. math:: X \leftarrow X + \text{inner}(\text{exchange}(g)), \qquad
        x_i \leftarrow X \text{ or } \text{begin}(x_i, X_\text{old}) + \text{local}(g_i)

    ``receives(step, axis)`` says which. Both optimizers see all gradients.
    """
    local = inner if local is None else local
    expect(optax.GradientTransformation, inner=inner, local=local, exchange=exchange)
    inner, local, exchange = map(
        optax.with_extra_args_support,
        (inner, local, mean(axis) if exchange is None else exchange),
    )

    def init(params):
        params = movable(params)
        wide = jax.tree.map(lambda p: jnp.array(precise(jnp.asarray(p))), params)
        state = ServerState(
            inner.init(wide),
            local.init(params),
            exchange.init(wide),
            wide,
            jnp.zeros((), bool),
        )
        return vary(state, axis)

    def update(updates, state, params=None, *, step=None, **extra):
        whole, grads, params = enter(updates, params, step, axis)
        heard, exchange_state = exchange.update(
            map_leaves(precise, grads),
            state.exchange,
            params,
            step=step,
            about="displacements",  # gradients, but all copies must hear the same
            within=axis,
            **extra,
        )
        forward, server = inner.update(heard, state.server, state.anchor, step=step)
        anchor = map_leaves(add, state.anchor, forward)
        cast = lambda tree: map_leaves(lambda p, a: a.astype(p.dtype), params, tree)
        old = begin(params, state.anchor)
        own, local_state = propose(
            local, grads, state.local, cast(old), step=step, **extra
        )
        # Exactly its own moves where it begins where it is.
        own = map_leaves(lambda p, o, m: subtract(o, p) + precise(m), params, old, own)
        received = map_leaves(subtract, cast(anchor), params)
        receive = receives(step, axis)
        if isinstance(receive, bool):  # known when the program is built
            moves = received if receive else own
        else:
            moves = map_leaves(lambda r, o: jnp.where(receive, r, o), received, own)
        synced = jnp.asarray(receive)
        state = ServerState(server, local_state, exchange_state, anchor, synced)
        return leave(moves, whole), vary(state, axis)

    return Talking(init, update)
