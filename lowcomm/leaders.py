"""Exchanges that follow one worker, or go part of the way that another one shows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from .exchange import ANYTHING, Exchange, admit
from .leaves import add, map_exchanged, subtract
from .parts import expect
from .spmd import AXIS, Axis, vary
from .transport import from_worker, gather


def leader(axis: Axis = AXIS) -> Exchange:
    r"""What the worker with the lowest ``update(..., score=s)`` holds.

    .. math:: x_i \leftarrow x_k, \qquad k = \arg\min_j s_j

    ``score`` is one number a worker, such as a loss; without one it is ``value=``, the
    loss that ``local_step`` passes. Ties go to the lowest rank; NaN
    never wins, and where all are NaN rank 0 does. The result is the same, bit for bit,
    on all workers. Sends one float32 in a gather, and every leaf once, by an all-reduce
    in which all but the leader's are zero: one broadcast of it would do, but who
    sends it is known only at run time.

    Raises:
        ValueError: at trace, no ``score`` or one that is no scalar.

    Example:
        >>> from lowcomm import spread
        >>> worker = lambda x, s: leader().update(x, (), score=s)[0]
        >>> scores = jnp.array([0.3, jnp.nan, 0.2, 0.2])
        >>> spread(worker)(jnp.array([1.0, 2.0, 3.0, 4.0]), scores)
        Array([3., 3., 3., 3.], dtype=float32)
    """

    def update(
        updates,
        state,
        params=None,
        *,
        score=None,
        value=None,
        about="gradients",
        within=None,
        **extra,
    ):
        admit(updates, "leader", axis=axis, about=about, within=within, takes=ANYTHING)
        score = value if score is None else score
        if score is None or jnp.ndim(score) != 0:
            raise ValueError(
                "leader needs update(..., score=s) or value=, one number a worker, not "
                f"{'nothing' if score is None else jnp.shape(score)}."
            )
        return from_worker(updates, lowest(score, axis), axis), state

    return Exchange(lambda params: optax.EmptyState(), update)


def toward(exchange: optax.GradientTransformation, fraction: float) -> Exchange:
    r"""Part of the way to what ``exchange`` says.

    .. math:: x_i \leftarrow x_i + f\,(\text{exchange}(x)_i - x_i)

    ``f`` is ``fraction``: 0 stays, 1 is ``exchange``. Who hears just what it said, like
    a leader, stays exactly where it is. Sends what ``exchange`` sends.

    Raises:
        ValueError: a fraction outside [0, 1]; at trace, displacements.

    Example:
        >>> from lowcomm import mean, spread
        >>> worker = lambda x: toward(mean(), 0.25).update(x, optax.EmptyState())[0]
        >>> spread(worker)(jnp.array([0.0, 8.0]))
        Array([1., 7.], dtype=float32)
    """
    expect(optax.GradientTransformation, exchange=exchange)
    talking = optax.with_extra_args_support(exchange)
    check_fraction("fraction", fraction)

    def update(updates, state, params=None, *, about="gradients", **extra):
        if about == "displacements":
            raise ValueError(
                "toward leaves each worker a part of its own displacement, and anchors "
                "that hear different things drift apart: hand it to average."
            )
        heard, state = talking.update(updates, state, params, about=about, **extra)
        return map_exchanged(lambda x, y: nearer(x, y, fraction), updates, heard), state

    return Exchange(talking.init, update)


def nearer(x: jax.Array, y: jax.Array, fraction: float) -> jax.Array:
    """``x + fraction·(y − x)``, formed precisely; ``y`` itself for a fraction of 1."""
    if not isinstance(fraction, Tracer) and fraction == 1:
        return y.astype(x.dtype)
    return add(x, fraction * subtract(y, x))


def lowest(score: Any, axis: Axis) -> jax.Array:
    """The number of the worker with the lowest score, the same on all of them.

    Ties go to the lowest number and NaN to the end. Sends 4 bytes in a gather.
    """
    scores = gather(jnp.asarray(score, jnp.float32), axis)
    return vary(jnp.argsort(scores, stable=True)[0], axis)  # NaN sorts last


def check_fraction(name: str, value: Any) -> None:
    """Raise unless an option is a fraction; one that is injected may be anything."""
    if not isinstance(value, Tracer) and not 0 <= value <= 1:
        raise ValueError(f"{name} {value} is outside [0, 1]; 1 goes all the way.")
