r"""Exchanges that have time to arrive, so that computation hides them.

    delayed(x)      last step's result of x                     for gradients
    overlapped(x)   own value + last sync's correction by x     for parameters
    stale_anchor    part of the way to last sync's mean         for parameters

No result depends on what is computed while the exchange is on its way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .exchange import Exchange, mean
from .leaves import (
    PyTree,
    add,
    check_same_leaves,
    map_exchanged,
    map_leaves,
    precise,
    subtract,
    takes_part,
    zeros,
)
from .parts import expect
from .spmd import AXIS, Axis


class DelayedState(NamedTuple):
    """State of ``delayed``."""

    arriving: PyTree  # what the next call returns
    delayed: Any


class OverlappedState(NamedTuple):
    """State of ``overlapped``."""

    correction: PyTree  # what the next call adds
    overlapped: Any


class StaleAnchorState(NamedTuple):
    """State of ``stale_anchor``."""

    launched: PyTree  # the anchor that left at the last call, z
    before: PyTree  # the one that left before it; nothing without momentum
    stale_anchor: Any


def delayed(exchange: optax.GradientTransformationExtraArgs) -> Exchange:
    r"""Last step's result of ``exchange``, zeros at first: it has a step to arrive.

    Sends what ``exchange`` sends, and keeps one precise tree. For gradients, before an
    optimizer; inside a verb it would be another algorithm than the published ones,
    and raises: use ``overlapped``, or ``rounds(..., delay=)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from lowcomm import mean, spread
        >>> tx = delayed(mean())
        >>> def worker(g):
        ...     first, state = tx.update(g, tx.init(g))
        ...     second, _ = tx.update(0 * g, state)
        ...     return first, second
        >>> spread(worker)(jnp.array([1.0, 3.0]))
        (Array([0., 0.], dtype=float32), Array([2., 2.], dtype=float32))
    """

    expect(optax.GradientTransformation, exchange=exchange)

    def init(params):
        return DelayedState(zeros(params), exchange.init(params))

    def update(updates, state, params=None, *, about="gradients", **extra):
        if about != "gradients":
            raise ValueError(
                f"delayed exchanges gradients, not {about}: in average use "
                "overlapped(exchange), in rounds use delay=."
            )
        check_same_leaves("delayed", state.arriving, updates)
        leaving, inner = exchange.update(
            updates, state.delayed, params, about=about, **extra
        )
        out = map_exchanged(lambda x, old: old.astype(x.dtype), updates, state.arriving)
        arriving = map_leaves(
            lambda old, x: x.astype(old.dtype), state.arriving, leaving
        )
        return out, DelayedState(arriving, inner)

    return Exchange(init, update)


def overlapped(exchange: optax.GradientTransformationExtraArgs) -> Exchange:
    r"""Add the correction of the model that left at the previous sync.

    .. math:: x_i \leftarrow x_i + c_i, \qquad c_i \leftarrow \text{exchange}(x_i) - x_i

    The new correction is not needed before the next sync, so the exchange may run
    during the local steps in between. ``c`` is zero at first. Sends what ``exchange``
    sends, and keeps one tree. With ``gossip`` this is OLDSGD; with ``mean`` CoCoD-SGD;
    with ``gossip`` and a sync at every step it is D-PSGD in combine-then-adapt order.

    Example:
        One sync later both workers have heard where they were.

        >>> import jax.numpy as jnp
        >>> from lowcomm import mean, spread
        >>> tx = overlapped(mean())
        >>> def worker(x):
        ...     first, state = tx.update(x, tx.init(x), about="parameters")
        ...     second, _ = tx.update(first, state, about="parameters")
        ...     return first, second
        >>> spread(worker)(jnp.array([1.0, 3.0]))
        (Array([1., 3.], dtype=float32), Array([2., 2.], dtype=float32))

    References:
        Zhou and Pu, `Accelerating Decentralized Optimization via Overlapping Local
        Steps <https://arxiv.org/abs/2601.01493>`_, 2026. Shen et al., `Faster
        Distributed Deep Net Training: Computation and Communication Decoupled
        Stochastic Gradient Descent <https://arxiv.org/abs/1906.12043>`_, 2019
        (CoCoD-SGD).
    """

    expect(optax.GradientTransformation, exchange=exchange)

    def init(params):
        return OverlappedState(zeros(params), exchange.init(params))

    def update(updates, state, params=None, *, about="gradients", **extra):
        if about != "parameters":
            raise ValueError(
                f"overlapped exchanges parameters, not {about}: hand it to average; "
                "for gradients use delayed(exchange), in rounds use delay=."
            )
        check_same_leaves("overlapped", state.correction, updates)
        out = map_exchanged(add, updates, state.correction)
        left = _apart(out)
        heard, inner = exchange.update(
            left, state.overlapped, params, about=about, **extra
        )
        correction = jax.tree.map(
            lambda new, old: subtract(new, old) if takes_part(new) else None,
            heard,
            left,
        )
        return out, OverlappedState(correction, inner)

    return Exchange(init, update)


def stale_anchor(
    pull: float,
    momentum: float = 0.0,
    *,
    exchange: optax.GradientTransformationExtraArgs | None = None,
    axis: Axis = AXIS,
) -> Exchange:
    r"""Go part of the way to the mean that left at the previous sync.

    .. math::
        x_i \leftarrow (1 - \alpha)\, x_i + \alpha z, \qquad
        z \leftarrow \tfrac1K \sum_j x_j + \beta\, (z - z_\text{prev})

    ``α`` is ``pull``, ``β`` is ``momentum``. The new ``z`` is not needed before the
    next sync, so it may travel during the local steps in between; all workers hold the
    same. Sends what ``exchange`` sends, ``mean(axis)`` unless given, and keeps two
    precise trees, or one without momentum. The next anchor leaves after the pull: of
    local steps that all go the same way a share ``(1 − α)/(1 − αβ)`` is progress, and
    with a pull of 1 none.

    Raises:
        ValueError: pull outside [0, 1], momentum outside [0, 1); at trace, gradients
            or displacements.

    Example:
        The first pull is to the common start, here 0, the second to the mean of then.

        >>> from lowcomm import spread
        >>> tx = stale_anchor(0.5)
        >>> def worker(x):
        ...     first, state = tx.update(x, tx.init(0 * x), about="parameters")
        ...     second, _ = tx.update(first, state, about="parameters")
        ...     return first, second
        >>> spread(worker)(jnp.array([2.0, 6.0]))
        (Array([1., 3.], dtype=float32), Array([1.5, 2.5], dtype=float32))

    References:
        Wang, Liang and Joshi, `Overlap Local-SGD: An Algorithmic Approach to Hide
        Communication Delays in Distributed SGD <https://arxiv.org/abs/2002.09539>`_,
        2020.
    """
    if not 0 <= pull <= 1:
        raise ValueError(
            f"pull {pull} is outside [0, 1]; 0 never pulls and the paper's is 0.6."
        )
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum {momentum} is outside [0, 1); 0 is none.")
    expect(optax.GradientTransformation, exchange=exchange)
    exchange = mean(axis) if exchange is None else exchange

    def init(params):
        # Copies, each in a buffer of its own: params and state may be donated.
        copy = lambda x: jnp.array(precise(jnp.asarray(x))) if takes_part(x) else None
        copies = lambda: jax.tree.map(copy, params)
        before = copies() if momentum else ()
        return StaleAnchorState(copies(), before, exchange.init(copies()))

    def update(updates, state, params=None, *, about="gradients", **extra):
        if about != "parameters":
            raise ValueError(
                f"stale_anchor exchanges parameters, not {about}: hand it to average; "
                "for gradients use delayed(exchange), in rounds use delay= and pull=."
            )
        check_same_leaves("stale_anchor", state.launched, updates)

        def toward(x, z):
            # In this form workers that sit on the anchor stay there exactly.
            there = z if pull == 1 else precise(x) + pull * subtract(z, x)
            return there.astype(x.dtype)

        out = map_exchanged(toward, updates, state.launched)
        left, last, before = _apart((out, state.launched, state.before))
        launched, inner = exchange.update(
            map_exchanged(precise, left),
            state.stale_anchor,
            params,
            about=about,
            **extra,
        )
        launched = map_leaves(
            lambda z, new: new.astype(z.dtype), state.launched, launched
        )
        if momentum:
            launched = map_leaves(
                lambda new, z, before: new + momentum * (z - before),
                launched,
                last,
                before,
            )
        before = state.launched if momentum else ()
        return out, StaleAnchorState(launched, before, inner)

    return Exchange(init, update)


def _apart(tree: PyTree) -> PyTree:
    """``tree``, for what is computed of it with what is heard.

    Local steps wait for what else it is needed for. XLA on GPUs makes one computation
    of several that begin with the same arrays, and they would wait for what is heard.
    """
    return lax.optimization_barrier(tree)
