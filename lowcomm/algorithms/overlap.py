"""Methods whose communication has time: it arrives while workers compute."""

from __future__ import annotations

import optax

from .. import uniform
from ..exchange import Exchange, admit, gossip, like, mean
from ..leaves import exchanged, map_leaves
from ..overlap import overlapped, stale_anchor
from ..parts import expect
from ..spmd import AXIS, Axis, axis_size
from ..sync import Talking, Transformation, average
from ..topology import Graph
from ..transport import reduce_sum
from ..triggers import Trigger, clock
from .server import served


def overlap_local_sgd(
    inner: Transformation,
    *,
    period: int | Trigger,
    pull: float = 0.6,
    momentum: float = 0.7,
    exchange: Talking | None = None,
    axis: Axis = AXIS,
) -> Talking:
    r"""Overlap-Local-SGD: local steps, then a pull to the mean of a round ago.

    .. math::
        x_i \leftarrow x_i + \text{inner}(g_i), \qquad
        \text{every } \tau \text{ steps: } x_i \leftarrow (1 - \alpha) x_i + \alpha z,
        \quad z \leftarrow \tfrac1K \sum_j x_j + \beta (z - z_\text{prev})

    ``τ`` is ``period``, steps from sync to sync, or a trigger; ``α`` is ``pull``, ``β``
    is ``momentum``; ``inner`` keeps its moments. Sends the parameters once every ``τ``
    steps, or what ``exchange`` makes of them, and needs them a round later. Progress
    is ``(1 − α)/(1 − αβ)`` of the local steps', 0.69 with the defaults: compare
    methods at equal effective rates. A pull of 1 discards all local steps.

    Note:
        The anchor's momentum is stored as ``z − z_prev``. That is the released code's
        form while the learning rate is constant; when the rate drops, that form
        rescales old momentum and this one does not. Its first round has a step more.

    Example:
        The workers' distance is 2 a step; a pull leaves 1/2 of what has built up.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = overlap_local_sgd(optax.sgd(1.0), period=2, pull=0.5, momentum=0.0)
        >>> def worker(x, g):
        ...     state, path = tx.init(x), []
        ...     for t in range(6):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> print(spread(worker)(jnp.zeros(2), jnp.array([1.0, 3.0])))
        [[-1.   -1.   -2.   -2.5  -3.5  -4.25]
         [-3.   -3.   -6.   -5.5  -8.5  -7.75]]

    References:
        Wang, Liang and Joshi, `Overlap Local-SGD: An Algorithmic Approach to Hide
        Communication Delays in Distributed SGD <https://arxiv.org/abs/2002.09539>`_,
        2020.
    """
    late = stale_anchor(pull, momentum, exchange=exchange, axis=axis)
    return average(inner, exchange=late, when=clock(period), axis=axis)


def cocod_sgd(
    inner: Transformation, *, period: int | Trigger, axis: Axis = AXIS
) -> Talking:
    r"""CoCoD-SGD: a round's local steps, applied to the mean of its start.

    .. math::
        x_i \leftarrow x_i + \text{inner}(g_i), \qquad
        \text{every } \tau \text{ steps: } x_i \leftarrow x_i +
        \tfrac1K \sum_j s_j - s_i

    ``s_i`` is the model at the start of the round, ``τ`` is ``period``, steps from sync
    to sync, or a trigger. Sends the parameters once every ``τ`` steps and needs them a
    round later. The mean of the workers moves as in local SGD.

    Note:
        On a quadratic of curvature ``h`` the disagreement is multiplied each round by
        ``(1 − ηh)^τ − 1``: for long rounds it hardly shrinks.

    Example:
        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = cocod_sgd(optax.sgd(1.0), period=2)
        >>> def worker(x, g):
        ...     state, path = tx.init(x), []
        ...     for t in range(4):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> print(spread(worker)(jnp.zeros(2), jnp.array([1.0, 3.0])))
        [[ -1.  -2.  -3.  -6.]
         [ -3.  -6.  -9. -10.]]

    References:
        Shen et al., `Faster Distributed Deep Net Training: Computation and
        Communication Decoupled Stochastic Gradient Descent
        <https://arxiv.org/abs/1906.12043>`_, 2019.
    """
    late = overlapped(mean(axis))
    return average(inner, exchange=late, when=clock(period), axis=axis)


def oldsgd(
    inner: Transformation,
    graph: Graph,
    *,
    period: int | Trigger,
    axis: Axis = AXIS,
) -> Talking:
    r"""OLDSGD: mix with the neighbours the models from the start of the round.

    .. math::
        x_i \leftarrow x_i + \text{inner}(g_i), \qquad
        \text{every } \tau \text{ steps: } x_i \leftarrow x_i +
        \sum_j W_{ij} s_j - s_i

    ``s_i`` is the model at the start of the round, ``W`` is ``mixing_matrix(graph)``,
    ``τ`` is ``period``, steps from sync to sync, or a trigger; ``inner`` keeps its
    moments, which are not mixed. Sends the parameters to each neighbour once every
    ``τ`` steps, and needs them a round later. The mean of the workers moves as in local
    SGD at every step; on the complete graph it is CoCoD-SGD.

    Note:
        Disagreement is stable only if ``λ_min(W) > −(1 − ηh)^τ`` for all curvatures
        ``h``. The ring of thirds has −1/3: take ``lazy(ring(n))``, without negative
        eigenvalues, unless rounds are short. That is an observation on quadratics, not
        a statement of the paper.

    Example:
        At the end of the second round each has heard where its neighbours began it.

        >>> import jax.numpy as jnp
        >>> from lowcomm import lazy, ring, spread
        >>> tx = oldsgd(optax.sgd(1.0), lazy(ring(2)), period=2)
        >>> def worker(x, g):
        ...     state, path = tx.init(x), []
        ...     for t in range(4):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> print(spread(worker)(jnp.zeros(2), jnp.array([1.0, 3.0])))
        [[ -1.  -2.  -3.  -5.]
         [ -3.  -6.  -9. -11.]]

    References:
        Zhou and Pu, `Accelerating Decentralized Optimization via Overlapping Local
        Steps <https://arxiv.org/abs/2601.01493>`_, 2026.
    """
    late = overlapped(gossip(graph, axis=axis))
    return average(inner, exchange=late, when=clock(period), axis=axis)


def od_sgd(
    inner: Transformation,
    local: Transformation | None = None,
    *,
    warmup: int = 200,
    exchange: Talking | None = None,
    axis: Axis = AXIS,
) -> Talking:
    r"""OD-SGD: the model of a step ago, and one's own step for the mean on its way.

    .. math::
        W_{t+1} = W_t + \text{inner}(\tfrac1n \sum_i g_i(w_{i,t})), \qquad
        w_{i,t+1} = \begin{cases} W_{t+1} & t < t_0 \\
        W_t + \text{local}(g_i(w_{i,t})) & t \ge t_0 \end{cases}

    ``W`` is ``state.anchor``, the model to evaluate, ``w_i`` is what gradients are
    taken at, ``t_0`` is ``warmup``. ``local`` is ``inner`` unless given. Sends the
    gradients once a step and, after the warm-up, needs them a step later. The extra
    arguments reach ``local``; ``inner`` is given only ``step=``, since what differs
    between workers would drive their copies of ``W`` apart.

    The worker starts from ``W`` anew at each step and no local drift builds up; but
    ``local`` has a state of its own that goes on from step to step, momentum included,
    and sees the gradients of the warm-up too. So its schedules keep step with those of
    ``inner``, and identical workers do exactly what ``inner`` alone would.

    Note:
        The local learning rate applies to the worker's mean gradient, and its ratio to
        the global one, ``ρ``, is what matters: the released code divides summed
        gradients by the number of workers in both optimizers, so that its default is
        ``ρ = 1/n``, a weak compensation. On a quadratic of curvature ``h`` the mean of
        the workers is stable where ``ηh (1 − ρ) < 1`` and ``ηh (2ρ − 1) < 2``, and
        their disagreement, multiplied by ``−ρηh`` at each step, where ``ρηh < 1``:
        1/2 keeps both up to the rates of synchronous SGD, ``ηh < 2``, and 1 or no
        compensation, ``optax.set_to_zero()``, up to half of them. That ``local`` sees
        the gradients of the warm-up is a decision of this library.

    Raises:
        ValueError: a negative warmup; at trace, a missing ``step`` or ``params``, an
            exchange that gives workers different results.

    Example:
        Gradients 1 and 3: workers differ by one step, and never by more.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = od_sgd(optax.sgd(1.0), warmup=1)
        >>> def worker(x, g):
        ...     state, path = tx.init(x), []
        ...     for t in range(4):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> print(spread(worker)(jnp.zeros(2), jnp.array([1.0, 3.0])))
        [[-2. -3. -5. -7.]
         [-2. -5. -7. -9.]]

    References:
        Xu, Dong, Xu and Liao, `OD-SGD: One-step Delay Stochastic Gradient Descent for
        Distributed Training <https://arxiv.org/abs/2005.06728>`_, 2020.
    """
    uniform.whole(warmup=warmup)
    if warmup < 0:
        raise ValueError(f"warmup {warmup} is negative; 0 is none.")
    receives = lambda step, axis: uniform.decide(lambda t: t < warmup, step)
    return served(inner, local, receives, lambda x, anchor: anchor, exchange, axis)


def layered_sgd(
    inner: Transformation, *, axes: tuple[str, ...] = ("groups", "workers")
) -> Talking:
    r"""Layered SGD: gradients summed within groups, then between them.

    .. math::
        s_a = \sum_{i \in a} g_i, \qquad
        x \leftarrow x + \text{inner}(\tfrac1n \sum_a s_a)

    ``axes`` are mesh axes from the outermost to the innermost; ``n`` is the product of
    their sizes. Sends the gradients once a step along each of them, the innermost
    first, and divides once. Every gradient is applied before the next is taken.

    Note:
        This is synchronous SGD; the contribution is a shape of mesh and a cost model,
        ``layered_seconds``: the sum between groups may travel while the next batch is
        loaded. A loop gets that from JAX's asynchronous dispatch, if it loads after it
        has called the step and before it looks at a result. The paper has one
        communicator a group that talks to the others; here every worker does, so a
        link shared by a group carries the sum once for each of its workers.

    Raises:
        ValueError: fewer than two axes, or one of them twice.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx, axes = layered_sgd(optax.sgd(1.0)), ("groups", "workers")
        >>> mesh = jax.sharding.AbstractMesh((2, 2), axes)
        >>> worker = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        >>> spread(worker, mesh=mesh, axis=axes, backend="vmap")(jnp.arange(4.0))
        Array([-1.5, -1.5, -1.5, -1.5], dtype=float32)

    References:
        Yu, Flynn, Yoo and D'Imperio, `Layered SGD: A Decentralized and Synchronous SGD
        Algorithm for Scalable Deep Neural Network Training
        <https://arxiv.org/abs/1906.05936>`_, 2019.
    """
    if isinstance(axes, str) or len(set(axes)) < 2 or len(set(axes)) < len(axes):
        raise ValueError(
            f"axes {axes!r}: give two different names or more, the outermost first, "
            "such as ('groups', 'workers'); over one axis it is data_parallel."
        )
    expect(optax.GradientTransformation, inner=inner)

    def update(updates, state, params=None, *, about="gradients", within=None, **extra):
        admit(
            updates,
            "layered_sgd",
            axis=axes,
            about=about,
            within=within,
            takes=("gradients",),
        )
        n, total = axis_size(axes), exchanged(updates)
        for axis in reversed(axes):
            total = reduce_sum(total, axis)
        return like(updates, map_leaves(lambda x: x / n, total)), state

    return optax.chain(Exchange(lambda params: optax.EmptyState(), update), inner)
