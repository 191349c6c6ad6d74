"""Methods that take local steps and agree on their parameters now and then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import uniform
from ..exchange import mean
from ..leaves import PyTree, map_leaves, movable, precise, subtract
from ..moments import averaged_moments
from ..parts import expect
from ..phases import after
from ..schedules import at_steps
from ..spmd import AXIS, Axis, names, vary
from ..sync import Talking, Transformation, average
from ..triggers import Trigger, any_of, clock, every


def local_sgd(
    inner: Transformation,
    *,
    period: int | Trigger,
    moments: str = "keep",
    axis: Axis = AXIS,
) -> Talking:
    r"""Local SGD: ``period`` local steps, then the mean of the parameters.

    .. math::
        x_i \leftarrow x_i + \text{inner}(g_i), \qquad
        \text{every } H \text{ steps: } x_i \leftarrow \tfrac1K \sum_j x_j

    ``H`` is ``period``, or a trigger says when: any schedule of sync times, such as
    ``at_steps`` or ``growing``. Sends the parameters once every ``period`` steps, after
    the step, so that a period of 1 is data-parallel SGD. ``moments="average"`` is the
    momentum variant of parallel restarted SGD.

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
        <https://arxiv.org/abs/1805.09767>`_, 2019, Algorithm 1. Yu, Yang and Zhu,
        `Parallel Restarted SGD with Faster Convergence and Less Communication
        <https://arxiv.org/abs/1807.06629>`_, 2019.

    Note:
        The listing of parallel restarted SGD averages first and then applies a
        gradient; averaging after the step is what makes a period of 1 exact.
    """
    return average(inner, when=clock(period), moments=moments, axis=axis)


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


class OutputState(NamedTuple):
    """State of ``output_average``."""

    output: PyTree  # the weighted average of this worker's iterates
    total: jax.Array  # float32, the sum of the weights so far


def output_average(tx: Transformation, *, offset: float, axis: Axis = AXIS) -> Talking:
    r"""``tx``, and beside it the weighted average of the iterates.

    .. math::
        \hat x_T = \frac{1}{K S_T} \sum_i \sum_{t<T} w_t\, x_i(t), \qquad
        w_t = (a + t)^2, \qquad S_T = \sum_{t<T} w_t

    ``a`` is ``offset``. What is averaged are the parameters *before* each step;
    updates pass through. Sends nothing: each worker keeps its own average, one tree
    more, and they are combined when it is read,
    ``consensus((), optax.tree.get(state, "output"))``. The output the theorem on local
    SGD is about; at ``a`` of 16 condition numbers or more it forgets the start.

    Raises:
        ValueError: a negative offset; at trace, no ``step`` or no ``params``.

    Example:
        >>> from lowcomm import consensus, spread
        >>> tx = output_average(local_sgd(optax.sgd(1.0), period=2), offset=1.0)
        >>> def worker(x, g):
        ...     state = tx.init(x)
        ...     for t in range(2):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...     return consensus((), optax.tree.get(state, "output"))
        >>> print(spread(worker)(jnp.zeros(2), jnp.array([1.0, 4.0])))  # −4 · 2.5/5
        [-2. -2.]

    References:
        Stich, `Local SGD Converges Fast and Communicates Little
        <https://arxiv.org/abs/1805.09767>`_, 2019, Theorem 2.2.
    """
    expect(optax.GradientTransformation, tx=tx)
    if not 0 <= offset < math.inf:
        raise ValueError(f"offset {offset} must be 0 or more, and finite.")

    def init(params):
        kept = map_leaves(lambda p: jnp.zeros_like(precise(p)), movable(params))
        return vary(OutputState(kept, jnp.zeros((), jnp.float32)), axis)

    def update(updates, state, params=None, *, step=None, **extra):
        if step is None or params is None:
            raise ValueError(
                "output_average needs tx.update(grads, state, params, step=t)."
            )
        weight = jnp.square(offset + jnp.asarray(step, jnp.float32))
        total = state.total + weight
        # With offset 0 the first weight is 0.
        share = jnp.where(total > 0, weight / jnp.where(total > 0, total, 1), 1)
        output = map_leaves(
            lambda x, p: x + (share * subtract(p, x)).astype(x.dtype),
            state.output,
            params,
        )
        return updates, OutputState(output, vary(total, axis))

    # In a chain, so that what tx does to the parameters is what this does.
    return optax.chain(Talking(init, update), tx)


def two_level_local_sgd(
    inner: Transformation,
    *,
    period: int | Trigger,
    outer_period: int | Trigger,
    axes: tuple[str, str] = ("clusters", "workers"),
) -> Talking:
    r"""Local SGD inside clusters, and now and then across them.

    .. math::
        \text{every } H_1 \text{ steps: }
        x_i \leftarrow \text{mean of its cluster}, \qquad
        \text{every } H_2 \text{ steps: } x_i \leftarrow \text{mean of all}

    ``H_1`` is ``period``, ``H_2`` is ``outer_period``, usually a multiple of it.
    ``axes`` names the slow links first: workers of a cluster share a place on the
    first axis. Sends the parameters along both axes every ``H_2`` steps, and along the
    second alone on the other steps that ``H_1`` divides.

    Note:
        The mean of all weighs every worker alike, so that large clusters count for
        more. Clusters of unequal size stand on one axis:
        ``average(inner, exchange=after(far, gossip(clusters(sizes)), mean()),
        when=any_of(near, far))`` with the clocks ``near`` and ``far``.

    Raises:
        ValueError: axes that are not two different names; what ``every`` refuses; an
            outer period that is a measured trigger.

    Example:
        >>> tx = two_level_local_sgd(optax.sgd(1.0), period=1, outer_period=2)
        >>> def worker(x, g):
        ...     state, path = tx.init(x), []
        ...     for t in range(2):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> import lowcomm as lc
        >>> mesh = lc.spmd.abstract_mesh({"clusters": 2, "workers": 2})
        >>> g = jnp.array([1.0, 3.0, 5.0, 7.0])
        >>> axes = ("clusters", "workers")
        >>> print(lc.spread(worker, mesh=mesh, axis=axes, backend="vmap")(0 * g, g).T)
        [[-2. -2. -6. -6.]
         [-8. -8. -8. -8.]]

    References:
        He, Zhuang and Wu, `Exploring Scaling Laws for Local SGD in Large Language
        Model Training <https://arxiv.org/abs/2409.13198>`_, 2024.
    """
    if len(names(axes)) != 2 or axes[0] == axes[1]:
        raise ValueError(f"axes {axes!r} must be two names, the slow links first.")
    near, far = clock(period), clock(outer_period)
    if far.gap is None:
        raise ValueError(
            "outer_period is a measured trigger: clusters meet on a clock, a number of "
            "steps or such as at_steps(...)."
        )
    # One exchange and one conditional: where all meet, clusters need not meet first.
    reach = after(far, mean(axes[1]), mean(axes), axis=axes)
    return average(inner, exchange=reach, when=any_of(near, far), axis=axes)


def swap(
    first: Transformation,
    refine: Transformation,
    *,
    switch: int | Trigger,
    steps: int,
    axis: Axis = AXIS,
) -> Talking:
    r"""SWAP: train together, refine apart, average once.

    .. math::
        x \leftarrow x + \text{first}\big(\tfrac1K \textstyle\sum_i g_i\big)
        \text{ until the switch}, \qquad
        x_i \leftarrow x_i + \text{refine}(g_i), \qquad
        x \leftarrow \tfrac1K \textstyle\sum_i x_i \text{ after step } T

    ``T`` is ``steps``. ``switch`` is the first step of the second phase, or a trigger
    such as ``reaches(0.98, measure=lambda aux, **_: aux["accuracy"])``: the accuracy
    is averaged before it is compared, so that all leave the first phase together.
    Sends the gradients at each step of the first phase, nothing in the second, and
    the parameters once. Batch statistics of the average are nobody's: run
    ``recompute_statistics``. Give each worker its own order of the data.

    Stop the first phase early, while the rate is high: later, refined models hardly
    differ; much earlier, they end in different basins.

    Note:
        ``refine`` begins with fresh moments and its own schedule at 0; the paper does
        not say what becomes of momentum at the switch.

    Raises:
        ValueError: steps < 1, or a switch that is negative or not before ``steps``.

    Example:
        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = swap(optax.sgd(1.0), optax.sgd(0.5), switch=2, steps=4)
        >>> def worker(x, g):
        ...     state, path = tx.init(x), []
        ...     for t in range(4):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> print(spread(worker)(jnp.zeros(2), jnp.array([1.0, 3.0])))
        [[-2.  -4.  -4.5 -6. ]
         [-2.  -4.  -5.5 -6. ]]

    References:
        Gupta, Serrano and DeCoste, `Stochastic Weight Averaging in Parallel:
        Large-Batch Training That Generalizes Well <https://arxiv.org/abs/2001.02312>`_,
        2020, Algorithm 1.
    """
    expect(optax.GradientTransformation, first=first, refine=refine)
    uniform.whole(steps=steps, switch=0 if isinstance(switch, Trigger) else switch)
    if steps < 1:
        raise ValueError(f"steps {steps} must be at least 1, the length of the run.")
    if not isinstance(switch, Trigger) and not 0 <= switch < steps:
        raise ValueError(
            f"switch {switch} is not among the {steps} steps: the second phase begins "
            "at step switch and ends with the run."
        )
    together = optax.chain(mean(axis), first)
    phases = after(switch, together, refine, axis=axis)
    return average(phases, when=at_steps([steps - 1]), axis=axis)


def des_loc(
    inner: Transformation,
    *,
    period: int | Trigger,
    moment_periods: Mapping[str, int | Trigger],
    axis: Axis = AXIS,
) -> Talking:
    r"""DES-LOC: local steps, with parameters and moments on clocks of their own.

    .. math::
        x_i \leftarrow \tfrac1K \sum_j x_j \text{ every } K_x, \qquad
        u_i \leftarrow \tfrac1K \sum_j u_j \text{ every } K_u, \qquad
        v_i \leftarrow \tfrac1K \sum_j v_j \text{ every } K_v \text{ steps}

    ``K_x`` is ``period``; ``moment_periods`` names fields of the inner state, such as
    ``{"mu": 3 * period, "nu": 6 * period}`` for Adam's ``u`` and ``v``, which is the
    paper's choice. Sends the parameters, and each moment at its own syncs: so chosen,
    1 + 1/3 + 1/6 trees a period, half of what Local Adam with averaged moments sends.
    That is the case of equal periods.

    Note:
        With all periods 1 it is not data-parallel Adam: the second moment then holds
        the mean of squares, not the square of the mean.

    Example:
        The bytes of each step.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread, traffic
        >>> tx = des_loc(optax.adam(0.1), period=2, moment_periods={"mu": 4, "nu": 8})
        >>> def sent(t, x=jnp.zeros(100)):
        ...     step = lambda x: tx.update(x, tx.init(x), x, step=t)
        ...     return traffic(step, x, workers=8).bytes_always
        >>> [sent(t) for t in range(8)]
        [0, 400, 0, 800, 0, 400, 0, 1200]

    References:
        Iacob et al., `DES-LOC: Desynced Low Communication Adaptive Optimizers for
        Training Foundation Models <https://arxiv.org/abs/2505.22549>`_, 2025.
    """
    desynced = averaged_moments(inner, moment_periods, axis=axis)
    return average(desynced, when=clock(period), axis=axis)
