"""EDiT: rounds of local steps that mistrust unusual displacements, layer by layer."""

from __future__ import annotations

import optax

from .. import uniform
from ..anchor import rounds
from ..exchange import mean
from ..penalty import penalized_mean, roll_back
from ..phases import after, occasional
from ..schedules import at_steps, before
from ..spmd import AXIS, Axis
from ..sync import Talking, Transformation
from ..triggers import Trigger, any_of, clock
from .outer import nesterov


def edit(
    inner: Transformation,
    *,
    period: int | Trigger,
    warmup: int,
    outer_lr: float = 0.7,
    momentum: float = 0.8,
    exchange: Talking | None = None,
    axis: Axis = AXIS,
) -> Talking:
    r"""EDiT: rounds of local steps whose displacements pass a penalty, layer by layer.

    .. math::
        \bar\Delta = \text{exchange}(a - x), \qquad
        v \leftarrow \mu v + \bar\Delta, \qquad
        a \leftarrow a - \eta(\bar\Delta + \mu v), \qquad x_i \leftarrow a

    ``exchange`` is ``penalized_mean()`` unless given: what is unusual for a worker is
    left out, large displacements count less, the combination is clipped. A layer of
    which nothing is left returns to the anchor ``a``, and so does its momentum. ``η``
    is ``outer_lr``, ``μ`` is ``momentum``, ``period`` the steps from sync to sync,
    counted from step 0, or a trigger. The first ``warmup`` steps are synchronous: the
    inner optimizer sees mean gradients, and after the last of them, as at each sync
    before, the model becomes the anchor. Inner moments are kept.

    Sends the parameters when the trigger fires and at the end of the warm-up. Sends the
    gradients at each step of the warm-up, and 4 bytes a layer at the syncs after it.
    State: rounds', one outer buffer, and some numbers a layer.

    Raises:
        ValueError: a negative warm-up, a period below 1; at trace, no ``step``.

    Note:
        Initialization of the detector, masking and granularity are those of
        ``penalized_mean``, not of the released code. There, the exchange of a layer
        overlaps the forward pass of those before it; here the order is the compiler's.
        Defaults are the released ones (100 steps of warm-up, a period of 10); the paper
        has, as recalled, a period of 128, rates 0.8 and 0.85, and clips at 10. The
        asynchronous variant is not included.

    Example:
        The third worker brings NaN, and is taken along by the other two.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = edit(optax.sgd(1.0), period=1, warmup=0, outer_lr=1.0, momentum=0.0)
        >>> def worker(x, g):
        ...     return x + tx.update(g, tx.init(x), x, step=0)[0]
        >>> spread(worker)(jnp.ones(3), jnp.array([0.5, 0.5, jnp.nan]))
        Array([0.5, 0.5, 0.5], dtype=float32)

    References:
        Cheng et al., `EDiT: A Local-SGD-Based Efficient Distributed Training Method for
        Large Language Models <https://arxiv.org/abs/2412.07210>`_, 2025.
    """
    uniform.whole(warmup=warmup)
    if warmup < 0:
        raise ValueError(f"warmup {warmup} is negative; 0 is none.")
    when = clock(period)
    outer = roll_back(nesterov(outer_lr, momentum))
    exchange = penalized_mean(axis) if exchange is None else exchange
    if warmup > 0:
        together = occasional(mean(axis), when=before(warmup), axis=axis)
        inner = optax.chain(together, inner)
        outer = after(warmup, optax.sgd(1.0), outer, axis=axis)
        exchange = after(warmup, mean(axis), exchange, axis=axis)
        when = any_of(at_steps([warmup - 1]), when)
    return rounds(inner, outer, exchange=exchange, when=when, axis=axis)
