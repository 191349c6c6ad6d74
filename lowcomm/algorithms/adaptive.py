"""Methods that measure when to talk."""

from __future__ import annotations

import optax

from ..spmd import AXIS, Axis
from ..sync import average
from ..triggers import change_exceeds


def selsync(
    inner: optax.GradientTransformation,
    *,
    threshold: float,
    window: int = 25,
    smoothing: float = 0.01,
    warmup: int | None = None,
    axis: Axis = AXIS,
) -> optax.GradientTransformationExtraArgs:
    r"""SelSync: average the parameters when some worker's gradient norm is changing.

    .. math::
        x_i \leftarrow x_i + \text{inner}(g_i), \qquad
        \text{if any } \frac{|s_t - s_{t-1}|}{s_{t-1}} \ge \delta: \quad
        x_i \leftarrow \tfrac1K \sum_j x_j

    ``s`` is the smoothed norm of a worker's gradients and ``δ`` is ``threshold``; see
    ``change_exceeds`` for both and for the choice of ``δ``. Sends 4 bytes a step, and
    the parameters on steps that fire. ``threshold=0`` fires always, and infinity only
    during the warm-up.

    Note:
        Parameters are averaged after the step; the released code averages before it,
        which leaves workers a step apart. The norm convention, the warm-up and the
        smoothing are choices of this implementation, see ``change_exceeds``. The
        statistic is blind to gradients that turn without growing. At an equal number
        of syncs a fixed period may do as well or better: compare with ``local_sgd``.

    Example:
        One worker's gradient jumps at step 3, and both agree there.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = selsync(optax.sgd(1.0), threshold=0.5, window=1, smoothing=0.0)
        >>> def worker(grads):
        ...     x = jnp.zeros(())
        ...     state, path = tx.init(x), []
        ...     for t in range(5):
        ...         moves, state = tx.update(grads[t], state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> print(spread(worker)(-jnp.array([[1.0, 1, 1, 1, 1], [3.0, 3, 3, 9, 9]])))
        [[ 2.  3.  4. 11. 12.]
         [ 2.  5.  8. 11. 20.]]

    References:
        Tyagi and Swany, `Accelerating Distributed ML Training via Selective
        Synchronization <https://arxiv.org/abs/2307.07950>`_, 2023.
    """
    when = change_exceeds(threshold, window=window, smoothing=smoothing, warmup=warmup)
    return average(inner, when=when, axis=axis)
