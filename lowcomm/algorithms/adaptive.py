"""Methods that measure as they go: when to talk, how to scale, how much to sample."""

from __future__ import annotations

import optax

from ..exchange import mean
from ..norm_test import Test, local_test, norm_test
from ..phases import occasional
from ..preconditioner import Rule, shared_scaling, square_of_mean
from ..spmd import AXIS, Axis
from ..starts import just_after, round_starts
from ..sync import Talking, Transformation, average
from ..triggers import Trigger, change_exceeds, clock


def selsync(
    inner: Transformation,
    *,
    threshold: float,
    window: int = 25,
    smoothing: float = 0.01,
    warmup: int | None = None,
    axis: Axis = AXIS,
) -> Talking:
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


def selsync_gradients(
    inner: Transformation,
    *,
    threshold: float,
    window: int = 25,
    smoothing: float = 0.01,
    warmup: int | None = None,
    axis: Axis = AXIS,
) -> Talking:
    r"""SelSync in its other mode: the gradients are averaged on the steps that fire.

    .. math::
        \text{if any } \frac{|s_t - s_{t-1}|}{s_{t-1}} \ge \delta: \quad
        g_i \leftarrow \tfrac1K \sum_j g_j, \qquad
        x_i \leftarrow x_i + \text{inner}(g_i)

    The settings are those of ``selsync``. Sends 4 bytes a step, and the gradients on
    steps that fire. ``threshold=0`` is data-parallel training with any ``inner``.
    After a step that did not fire the workers' models differ and stay apart: it is
    ``selsync`` that makes them equal again.

    Note:
        The choices of ``selsync`` hold here too.

    Example:
        One worker's gradient jumps at step 3: both take the mean step, and stay apart.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = selsync_gradients(
        ...     optax.sgd(1.0), threshold=0.5, window=1, smoothing=0.0, warmup=1
        ... )
        >>> def worker(grads):
        ...     x = jnp.zeros(())
        ...     state, path = tx.init(x), []
        ...     for t in range(5):
        ...         moves, state = tx.update(grads[t], state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> print(spread(worker)(-jnp.array([[1.0, 1, 1, 1, 1], [3.0, 3, 3, 9, 9]])))
        [[ 2.  3.  4.  9. 10.]
         [ 2.  5.  8. 13. 22.]]

    References:
        Tyagi and Swany, `Accelerating Distributed ML Training via Selective
        Synchronization <https://arxiv.org/abs/2307.07950>`_, 2023 (gradient
        aggregation).
    """
    when = change_exceeds(threshold, window=window, smoothing=smoothing, warmup=warmup)
    return optax.chain(occasional(mean(axis), when=when, axis=axis), inner)


def savic(
    inner: Transformation,
    *,
    period: int | Trigger,
    floor: float,
    rule: Rule | None = None,
    decay: optax.ScalarOrSchedule = 0.9,
    initial: float | None = None,
    axis: Axis = AXIS,
) -> Talking:
    r"""SAVIC: local steps under one diagonal scaling, shared and frozen in a round.

    .. math::
        x_i \leftarrow x_i + \text{inner}(g_i / \hat D), \qquad
        \text{every } H \text{ steps: } x_i \leftarrow \tfrac1K \sum_j x_j,
        \quad D^p \leftarrow \beta D^p + (1 - \beta)\, h,
        \quad \hat D = \max(\alpha, |D|)

    ``H`` is ``period``, or a clock says when. ``h``, of the gradients at the first step
    of a round, and ``p`` are those of ``rule``: ``square_of_mean()`` unless given,
    ``mean_of_squares()`` or ``hessian_diagonal()``. ``α`` is ``floor``, in the units of
    gradients (of curvatures for ``hessian_diagonal``): with a small one the first noisy
    estimate makes huge steps. ``β`` is ``decay``; ``initial`` is ``D`` before the first
    refresh. Sends the parameters' size after the last step of each round, for the mean,
    and again at the first of the next, for the scaling. Adds one array of that size.

    Note:
        ``D`` is refreshed at the first step of each round from the mean of (squared)
        worker gradients, and used from that step on; the choice of ``h`` is an option.
        ``decay`` and ``floor`` are this implementation's, not the paper's. A momentum
        of ``inner`` is outside the paper, and stays each worker's own.

    Raises:
        ValueError: a measured trigger as ``period``; see ``shared_scaling``.

    Example:
        A flat direction and a steep one fall at the same rate.

        >>> import jax.numpy as jnp
        >>> from lowcomm import fit, hessian_diagonal, hessian_products
        >>> def loss(x, c):
        ...     return jnp.sum(jnp.array([1.0, 1000.0]) * (x - c) ** 2) / 2
        >>> tx = savic(optax.sgd(0.5), period=2, floor=0.1, rule=hessian_diagonal())
        >>> c = jnp.array([[1.0, 1.0], [3.0, 3.0]])
        >>> run = fit(loss, tx, jnp.zeros(2), lambda t: c, steps=4, workers=2,
        ...           extra_args=hessian_products(loss))
        >>> print(run.params[0], run.payload)
        [1.875 1.875] [8 8 8 8]

    References:
        Chezhegov et al., `Local Methods with Adaptivity via Scaling
        <https://arxiv.org/abs/2406.00846>`_, 2024.
    """
    scaling = shared_scaling(
        square_of_mean() if rule is None else rule,
        when=round_starts(period),
        floor=floor,
        decay=decay,
        initial=initial,
        axis=axis,
    )
    return average(optax.chain(scaling, inner), when=clock(period), axis=axis)


def adaptive_batch(
    inner: Transformation,
    *,
    period: int | Trigger,
    level: float,
    start: int,
    most: int,
    granularity: int = 1,
    test: Test | None = None,
    axis: Axis = AXIS,
) -> Talking:
    r"""Local steps whose batch grows when a norm test fails at a synced model.

    .. math::
        x_i \leftarrow x_i + \text{inner}(g_i), \qquad
        \text{every } H \text{ steps: } x_i \leftarrow \tfrac1K \sum_j x_j,
        \quad b \leftarrow \min\Big(b_{\max}, \max\big(b,
        \lceil \text{noise} / (\theta^2\, \text{signal}) \rceil\big)\Big)

    ``H`` is ``period``, or a clock says when. The state holds ``batch_size``, ``b``
    samples a worker and step, from ``start`` to ``most`` in multiples of
    ``granularity``; the training loop draws so many, or says how many it drew, as in
    ``local_step(…, extra_args=lambda batch: {"batch_size": len(batch)})``: the batches
    of ``fit`` know only the step. ``θ`` is ``level``. What noise and
    signal are is said by ``test``: ``local_test()`` unless given, ``global_test()``,
    ``per_sample_test()``, each also ``corrected``. The gradients tested are those of
    the first step after each sync. Sends the parameters once every ``period`` steps,
    and there what the test sends: a gradient and 4 bytes, or 8 bytes for single
    samples.

    Note:
        The level at which the batch explodes depends on the estimator: 1 for
        ``per_sample_test`` and ``global_test``, √workers for ``local_test``. The
        paper's own constant is not known here; both forms are at hand. The learning
        rate is not changed as the batch grows.

    Raises:
        ValueError: a measured trigger as ``period``; see ``norm_test``.

    Example:
        Two workers pull at both sides of 0: near it the noise outweighs the signal.

        >>> import jax.numpy as jnp
        >>> from lowcomm import counted_step, init, stack
        >>> tx = adaptive_batch(
        ...     optax.sgd(0.5), period=2, level=1.0, start=4, most=64, granularity=4
        ... )
        >>> loss = lambda x, c: jnp.mean((x - c) ** 2) / 2
        >>> step = counted_step(loss, tx, workers=2)
        >>> x = stack(jnp.array(8.0), 2)
        >>> state = init(tx, x)
        >>> for t in range(6):
        ...     b = int(optax.tree.get(state, "batch_size")[0])
        ...     c = jnp.stack([jnp.full(b, -1.0), jnp.full(b, 1.0)])
        ...     x, state, _, sent = step(x, state, c, t)
        ...     print(b, sent.bytes)
        4 0
        4 4
        4 8
        4 4
        4 8
        32 4

    References:
        Lau, Li, Xu, Liu and Kolar, `Communication-Efficient Adaptive Batch Size
        Strategies for Distributed Local Gradient Methods
        <https://arxiv.org/abs/2406.13936>`_, 2024. The norm test: Byrd, Chin, Nocedal
        and Wu, Sample Size Selection in Optimization Methods for Machine Learning,
        2012.
    """
    tested = norm_test(
        local_test() if test is None else test,
        when=just_after(period),
        level=level,
        start=start,
        most=most,
        granularity=granularity,
        axis=axis,
    )
    return average(optax.chain(tested, inner), when=clock(period), axis=axis)
