"""Methods that take an outer optimizer step on the displacement of a round."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from .. import uniform
from ..anchor import rounds
from ..exchange import mean
from ..leaves import PyTree, map_leaves, precise
from ..links import random_pull
from ..phases import after, occasional
from ..schedules import before
from ..spmd import AXIS, Axis
from ..sync import Talking, Transformation
from ..triggers import Trigger, clock, every


class SlowMomentumState(NamedTuple):
    """State of ``slow_momentum``."""

    slow: PyTree  # the slow buffer u, in units of gradients


def diloco(
    inner: Transformation,
    *,
    period: int | Trigger = 500,
    outer_lr: optax.ScalarOrSchedule = 0.7,
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
    ``period`` steps (or when a trigger fires), or what ``exchange`` makes of it.
    Compare settings at equal ``η / (1 − μ)``, the effective outer step.

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
    outer = nesterov(outer_lr, momentum)
    return rounds(inner, outer, exchange=exchange, when=clock(period), axis=axis)


def nesterov(outer_lr: optax.ScalarOrSchedule, momentum: float) -> Transformation:
    """The outer step of DiLoCo."""
    check_outer(outer_lr=outer_lr, momentum=momentum)
    return optax.sgd(outer_lr, momentum=momentum, nesterov=True)


def check_outer(*, momentum: float, **rates: optax.ScalarOrSchedule) -> None:
    """Raise unless momentum fades and rates descend, as far as they are known."""
    known = lambda x: not (callable(x) or isinstance(x, Tracer))
    if known(momentum) and not 0 <= momentum < 1:
        raise ValueError(f"momentum {momentum} is outside [0, 1); 0 is none.")
    for name, rate in rates.items():
        if known(rate) and not np.all(np.asarray(rate) >= 0):
            raise ValueError(f"{name} {rate} must be 0 or more; 1 is the mean.")


def muloco(
    learning_rate: optax.ScalarOrSchedule,
    *,
    period: int | Trigger = 30,
    outer_lr: float = 0.7,
    momentum: float = 0.9,
    exchange: Talking | None = None,
    axis: Axis = AXIS,
    **muon: Any,
) -> Talking:
    r"""MuLoCo: DiLoCo with Muon inside.

    .. math::
        x_i \leftarrow x_i - \gamma\, \text{orthogonalize}(m_i), \qquad
        \text{every } H \text{ steps the outer step of } \texttt{diloco}

    ``γ`` is ``learning_rate``, ``H`` is ``period``; ``muon`` are further arguments of
    ``optax.contrib.muon``, such as ``weight_decay`` or ``adam_learning_rate``. Leaves
    that are no matrices take steps of AdamW there. Sends what ``diloco`` sends.

    Note:
        The paper compresses the displacements as well, with error feedback and 2 bits:
        that is an ``exchange``. The outer values are DiLoCo's, not read there.

    Example:
        A step on a matrix is orthogonal (to the accuracy of Muon's iteration) however
        small the gradient; its singular values are all near the rate.

        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from lowcomm import spread
        >>> tx = muloco(0.1, period=9)
        >>> worker = lambda x: tx.update(x, tx.init(x), x, step=0)[0]
        >>> moves = spread(worker)(jnp.array([[[1e-3, 0.0], [0.0, 3e-3]]]))
        >>> print(np.linalg.svd(moves[0])[1] > 0.06)
        [ True  True]

    References:
        Thérien et al., `MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo
        <https://arxiv.org/abs/2505.23725>`_, 2025.
    """
    return diloco(
        optax.contrib.muon(learning_rate, **muon),
        period=period,
        outer_lr=outer_lr,
        momentum=momentum,
        exchange=exchange,
        axis=axis,
    )


def palsgd(
    inner: Transformation,
    *,
    learning_rate: optax.ScalarOrSchedule,
    period: int = 256,
    probability: float = 0.1,
    strength: float = 0.05,
    t_start: int = 0,
    outer_lr: float = 0.7,
    momentum: float = 0.9,
    exchange: Talking | None = None,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Talking:
    r"""PALSGD: DiLoCo whose workers are pulled toward the anchor at random steps.

    .. math::
        x_i \leftarrow \begin{cases}
        x_i - \frac{\gamma\eta}{p} (x_i - a) & \text{with probability } p \\
        x_i + \frac{1}{1-p}\, \text{inner}(g_i) & \text{else}
        \end{cases} \qquad
        \text{every } H \text{ steps the outer step of } \texttt{diloco}

    ``γ`` is ``learning_rate``, that of ``inner``, ``p`` is ``probability``, ``η`` is
    ``strength``, ``H`` is ``period``; see ``random_pull``. In expectation a step is
    one on the loss and a proximal term, so that a worker stays within ‖g‖/η of the
    anchor for any ``H``; a pull toward an old model also slows progress. Before step
    ``t_start`` training is data-parallel, with the same inner optimizer, and rounds
    are counted from there. Sends what ``diloco`` sends (pulls send nothing), and
    before ``t_start`` the gradients at each step besides.

    Note:
        p, η and H defaults are not taken from the paper's tables. Until ``t_start``
        the outer step is plain averaging, so that the anchor is the model there.

    Raises:
        ValueError: what ``random_pull`` and ``every`` refuse.

    Example:
        Two workers walk to −8 and 8, or nearly, without a pull; with one they stay
        together.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> def apart(strength):
        ...     tx = palsgd(optax.sgd(0.5), learning_rate=0.5, period=9,
        ...                 probability=0.5, strength=strength)
        ...     def worker(x, c):
        ...         state = tx.init(x)
        ...         for t in range(8):
        ...             moves, state = tx.update(x - c, state, x, step=t)
        ...             x = x + moves
        ...         return x
        ...     return jnp.ptp(spread(worker)(jnp.zeros(2), jnp.array([-8.0, 8.0])))
        >>> print(apart(0.0), apart(1.0))
        16.0 8.0

    References:
        Naganuma et al., `Pseudo-Asynchronous Local SGD: Robust and Efficient
        Data-Parallel Training <https://arxiv.org/abs/2504.18454>`_, 2025.
    """
    every(period)  # raises unless it is a period
    inner = random_pull(
        inner,
        probability=probability,
        strength=strength,
        learning_rate=learning_rate,
        seed=seed,
        start=t_start,
        axis=axis,
    )
    outer = nesterov(outer_lr, momentum)
    uniform.whole(t_start=t_start)
    if t_start:
        together = occasional(mean(axis), when=before(t_start), axis=axis)
        inner = optax.chain(together, inner)
        outer = after(t_start, optax.sgd(1.0), outer, axis=axis)
        if exchange is not None:  # what is compressed is not the model
            exchange = after(t_start, mean(axis), exchange, axis=axis)
    when = every(period, offset=t_start % period)
    return rounds(inner, outer, exchange=exchange, when=when, axis=axis)


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

    check_outer(slow_learning_rate=slow_learning_rate, momentum=momentum)

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
