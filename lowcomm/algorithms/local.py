"""Methods that take local steps and agree now and then."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..anchor import rounds
from ..leaves import PyTree, map_leaves, precise
from ..spmd import AXIS, Axis
from ..sync import Talking, Transformation, average
from ..triggers import every


class SlowMomentumState(NamedTuple):
    """State of ``slow_momentum``."""

    slow: PyTree  # the slow buffer u, in units of gradients


def local_sgd(
    inner: Transformation, *, period: int, moments: str = "keep", axis: Axis = AXIS
) -> Talking:
    r"""Local SGD: ``period`` local steps, then the mean of the parameters.

    .. math::
        x_i \leftarrow x_i + \text{inner}(g_i), \qquad
        \text{every } H \text{ steps: } x_i \leftarrow \tfrac1K \sum_j x_j

    ``H`` is ``period``. Sends the parameters once every ``period`` steps, after the
    step. ``moments="average"`` is the momentum variant of parallel restarted SGD.

    Example:
        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = local_sgd(optax.sgd(1.0), period=2)
        >>> def worker(x, g):
        ...     state, path = tx.init(x), []
        ...     for t in range(4):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> print(spread(worker)(jnp.zeros(2), jnp.array([1.0, 3.0])))
        [[-1. -4. -5. -8.]
         [-3. -4. -7. -8.]]

    References:
        Stich, `Local SGD Converges Fast and Communicates Little
        <https://arxiv.org/abs/1805.09767>`_, 2019, Algorithm 1.
    """
    return average(inner, when=every(period), moments=moments, axis=axis)


def post_local_sgd(
    inner: Transformation, *, warmup: int, period: int, axis: Axis = AXIS
) -> Talking:
    r"""Post-local SGD: average at each of the first steps, then every ``period``.

    .. math:: H(t) = 1 \text{ for } t < t_0, \qquad H(t) = H \text{ afterwards}

    ``t_0`` is ``warmup``, ``H`` is ``period``. Sends the parameters once a step at
    first, then once every ``period`` steps, at the steps whose number ``t + 1`` it
    divides.

    Example:
        Workers pull apart by 2 a step where they do not agree.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = post_local_sgd(optax.sgd(1.0), warmup=2, period=4)
        >>> def worker(x, g):
        ...     state, path = tx.init(x), []
        ...     for t in range(8):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> path = spread(worker)(jnp.zeros(2), jnp.array([1.0, 3.0]))
        >>> print(path[0] - path[1])
        [0. 0. 2. 0. 2. 4. 6. 0.]

    References:
        Lin, Stich, Patel and Jaggi, `Don't Use Large Mini-Batches, Use Local SGD
        <https://arxiv.org/abs/1808.07217>`_, 2020.
    """
    return average(inner, when=every(period, warmup=warmup), axis=axis)


def diloco(
    inner: Transformation,
    *,
    period: int = 500,
    outer_lr: float = 0.7,
    momentum: float = 0.9,
    exchange: Talking | None = None,
    axis: Axis = AXIS,
) -> Talking:
    r"""DiLoCo: many inner steps, then one Nesterov step on the mean displacement.

    .. math::
        \Delta = \tfrac1K \sum_i (a - x_i), \qquad
        v \leftarrow \mu v + \Delta, \qquad a \leftarrow a - \eta (\Delta + \mu v),
        \qquad x_i \leftarrow a

    ``a`` is ``state.anchor``, ``η`` is ``outer_lr``, ``μ`` is ``momentum``; the inner
    optimizer keeps its moments across rounds. Sends the parameters' size once every
    ``period`` steps, or what ``exchange`` makes of it. Compare settings at equal
    ``η / (1 − μ)``, the effective outer step.

    Example:
        Two workers minimize (x − 0)²/2 and (x − 2)²/2 from 4, two steps a round.

        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from lowcomm import spread
        >>> tx = diloco(optax.sgd(0.5), period=2)
        >>> def worker(x, c):
        ...     state, anchors = tx.init(x), []
        ...     for t in range(8):
        ...         moves, state = tx.update(x - c, state, x, step=t)
        ...         x = x + moves
        ...         anchors.append(x)
        ...     return jnp.stack(anchors[1::2])
        >>> anchors = spread(worker)(jnp.full(2, 4.0), jnp.array([0.0, 2.0]))
        >>> print(np.float64(anchors[0]).round(5))
        [ 1.0075  -0.27573 -0.15455  0.50339]

    References:
        Douillard et al., `DiLoCo: Distributed Low-Communication Training of Language
        Models <https://arxiv.org/abs/2311.08105>`_, 2023, Algorithm 1.
    """
    outer = optax.sgd(outer_lr, momentum=momentum, nesterov=True)
    return rounds(inner, outer, exchange=exchange, when=every(period), axis=axis)


def slowmo(
    inner: Transformation,
    *,
    period: int,
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.5,
    slow_learning_rate: float = 1.0,
    moments: str = "keep",
    axis: Axis = AXIS,
) -> Talking:
    r"""SlowMo: local SGD with a slow momentum step at each sync.

    .. math::
        u \leftarrow \beta u + \frac{a - \bar x}{\gamma}, \qquad
        a \leftarrow a - \alpha \gamma u, \qquad x_i \leftarrow a

    ``γ`` is the mean of ``learning_rate`` (that of ``inner``, a number or a schedule
    of the step) over the round, ``β`` is ``momentum``, ``α`` is
    ``slow_learning_rate``, ``moments`` says what happens to the inner buffers. Sends
    the parameters once every ``period`` steps; adds two parameter-sized arrays.

    Note:
        The paper leaves open which ``γ`` of a round divides; the mean keeps the
        buffer's scale under schedules.

    Example:
        Without slow momentum it is local SGD.

        >>> import jax.numpy as jnp
        >>> from lowcomm import local_sgd, spread
        >>> def end(tx):
        ...     def worker(x, c):
        ...         state = tx.init(x)
        ...         for t in range(4):
        ...             moves, state = tx.update(x - c, state, x, step=t)
        ...             x = x + moves
        ...         return x
        ...     return spread(worker)(jnp.full(2, 4.0), jnp.array([0.0, 2.0]))
        >>> inner = optax.sgd(0.5)
        >>> slow = slowmo(inner, period=2, learning_rate=0.5, momentum=0.0)
        >>> print(end(local_sgd(inner, period=2)), end(slow))
        [1.1875 1.1875] [1.1875 1.1875]

    References:
        Wang, Tantia, Ballas and Rabbat, `SlowMo
        <https://arxiv.org/abs/1910.00643>`_, 2020, Algorithm 1.
    """
    outer = slow_momentum(
        learning_rate,
        period=period,
        momentum=momentum,
        slow_learning_rate=slow_learning_rate,
    )
    return rounds(inner, outer, when=every(period), moments=moments, axis=axis)


def slow_momentum(
    learning_rate: optax.ScalarOrSchedule,
    *,
    period: int,
    momentum: float = 0.5,
    slow_learning_rate: float = 1.0,
) -> Talking:
    r"""The outer step of SlowMo, for ``rounds``.

    .. math::
        u \leftarrow \beta u + \Delta / \gamma, \qquad a \leftarrow a - \alpha\gamma u

    ``γ`` is the mean inner learning rate of the last ``period`` steps. At a constant
    rate this is heavy-ball momentum with ``η = α``; when the rate drops, SlowMo
    rescales old momentum to the new rate and heavy ball does not. Where ``γ`` is 0
    nothing has moved, and nothing is added to ``u``.

    Example:
        At a constant rate it is heavy-ball momentum.

        >>> slow = slow_momentum(0.1, period=4, momentum=0.5)
        >>> ball = optax.sgd(1.0, momentum=0.5)
        >>> d, a, b = jnp.ones(()), slow.init(jnp.ones(())), ball.init(jnp.ones(()))
        >>> for t in (3, 7):
        ...     (x, a), (y, b) = slow.update(d, a, step=t), ball.update(d, b)
        ...     print(x, y)
        -1.0 -1.0
        -1.5 -1.5
    """

    def init(params):
        return SlowMomentumState(
            map_leaves(lambda p: jnp.zeros_like(precise(p)), params)
        )

    def update(updates, state, params=None, *, step=None, **extra):
        if callable(learning_rate):
            back = jnp.arange(period, dtype=jnp.int32)
            steps = jnp.maximum(jnp.asarray(step, jnp.int32) - back, 0)
            gamma = jnp.mean(jax.vmap(learning_rate)(steps)).astype(jnp.float32)
        else:
            gamma = jnp.asarray(learning_rate, jnp.float32)
        safe = jnp.where(gamma == 0, 1, gamma)
        slow = map_leaves(
            lambda u, d: (
                momentum * u + jnp.where(gamma == 0, 0, d / safe).astype(u.dtype)
            ),
            state.slow,
            updates,
        )
        forward = map_leaves(lambda u: -slow_learning_rate * gamma * u, slow)
        return forward, SlowMomentumState(slow)

    return optax.GradientTransformationExtraArgs(init, update)
