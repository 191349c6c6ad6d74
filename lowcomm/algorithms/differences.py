"""Methods that exchange differences to what was said before."""

from __future__ import annotations

import jax
import optax
from jax.core import Tracer

from ..compressors import Compressor, Unbiased
from ..feedback import difference_feedback
from ..leaves import exchanged, map_exchanged, precise, zeros
from ..parts import expect
from ..spmd import AXIS, Axis
from ..sync import Talking, Transformation


def ef21(
    inner: Transformation,
    compressor: Compressor,
    *,
    momentum: float = 0.0,
    axis: Axis = AXIS,
) -> Talking:
    r"""EF21: compressed differences to what was said before, then ``inner``.

    .. math::
        v_i \leftarrow \mu v_i + (1 - \mu) g_i, \qquad
        c_i = C(v_i - h_i), \qquad h_i \leftarrow h_i + c_i, \qquad
        x \leftarrow x + \text{inner}(\tfrac1K \textstyle\sum_i h_i)

    ``C`` is a contraction, such as ``top_k(0.01)``. ``μ`` is ``momentum``: 0 is EF21
    for gradients without noise, which a difference would track, and one near 1 is
    EF21-SGDM for stochastic ones (its η is 1 − μ). There is no error floor where the
    workers' gradients differ. Sends one payload a leaf and step.

    Raises:
        ValueError: momentum outside [0, 1).

    Note:
        ``h`` starts from zeros, so that after the first exchange it is C(v), as the
        paper has it begin; with the identity for C this is ``inner`` on the mean
        gradient. ``v`` starts from zeros too, where the paper takes a first gradient:
        the first steps are shorter, as those of any moving average are. A NaN stays in
        ``v`` for ever, as in Adam's moments: ``skip_nonfinite`` keeps it out.

    Example:
        Two workers whose optima differ: without any floor they find the mean of them.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread, top_k
        >>> tx = ef21(optax.sgd(0.25), top_k(0.5))
        >>> def worker(c):
        ...     x = 0 * c
        ...     state = tx.init(x)
        ...     for t in range(40):
        ...         moves, state = tx.update(x - c, state, x, step=t)
        ...         x = x + moves
        ...     return x
        >>> x = spread(worker)(jnp.array([[3.0, -6.0], [1.0, 9.0]]))[0]
        >>> print([f"{float(entry):.3f}" for entry in x])
        ['2.000', '1.500']

    References:
        Richtárik, Sokolov and Fatkhullin, `EF21 <https://arxiv.org/abs/2106.05203>`_,
        2021, Algorithm 2. Fatkhullin, Tyurin and Richtárik, `Momentum Provably Improves
        Error Feedback! <https://arxiv.org/abs/2305.15155>`_, 2023, Algorithm 1.
    """
    injected = isinstance(momentum, Tracer)  # by inject_hyperparams
    if not injected and not 0 <= momentum < 1:
        raise ValueError(f"momentum {momentum} is outside [0, 1); 0 is none.")
    exchange = difference_feedback(compressor, axis=axis)
    if not injected and momentum == 0:
        return optax.chain(exchange, inner)
    smooth = _precisely(optax.ema(momentum, debias=False))
    return optax.chain(smooth, exchange, inner)


def diana(
    inner: Transformation,
    compressor: Compressor,
    *,
    rate: float | None = None,
    axis: Axis = AXIS,
) -> Talking:
    r"""DIANA: unbiased differences to a slow memory, then ``inner``.

    .. math::
        c_i = C(g_i - h_i), \qquad
        x \leftarrow x + \text{inner}(\bar h + \tfrac1K \textstyle\sum_i c_i), \qquad
        h_i \leftarrow h_i + \alpha c_i, \quad \bar h = \tfrac1K \sum_i h_i

    ``C`` is unbiased, such as ``quantize(4)`` or ``random_k(0.1, unbiased=True)``, and
    so is what ``inner`` gets. ``α`` is ``rate``, unless given ``1/(1 + ω)`` with the
    variance ω that the compressor declares for a leaf of n elements. Sends one payload
    a leaf and step.

    Raises:
        ValueError: no rate and a compressor that declares no variance; a rate outside
            (0, 1].

    Example:
        Compressed differences vanish where compressed gradients would not: at the
        optimum of the mean, workers whose own optima differ stand still.

        >>> import jax.numpy as jnp
        >>> from lowcomm import random_k, spread
        >>> tx = diana(optax.sgd(0.25), random_k(0.5, unbiased=True), rate=0.5)
        >>> def worker(c):
        ...     x = 0 * c
        ...     state = tx.init(x)
        ...     for t in range(60):
        ...         moves, state = tx.update(x - c, state, x, step=t)
        ...         x = x + moves
        ...     return x
        >>> x = spread(worker)(jnp.array([[3.0, -6.0], [1.0, 9.0]]))[0]
        >>> print([f"{float(entry):.2f}" for entry in x])
        ['2.00', '1.50']

    References:
        Mishchenko et al., `Distributed Learning with Compressed Gradient Differences
        <https://arxiv.org/abs/1901.09269>`_, 2019, Algorithm 1.
    """
    expect(Compressor, compressor=compressor)
    law, slow = compressor.law, rate
    if slow is None:
        if not isinstance(law, Unbiased):
            raise ValueError(
                "diana needs rate=, or a compressor that declares its variance, such "
                "as random_k(0.1, unbiased=True): with one that is biased, use ef21."
            )
        slow = lambda n: 1 / (1 + law.omega(n))
    return optax.chain(difference_feedback(compressor, rate=slow, axis=axis), inner)


def _precisely(tx: Transformation) -> Talking:
    """``tx`` on float32 or wider, for half-precision leaves; others pass by."""
    wide = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra):
        precisely = jax.tree.map(precise, exchanged(updates))
        out, state = wide.update(precisely, state, params, **extra)
        return map_exchanged(lambda g, x: x.astype(g.dtype), updates, out), state

    return Talking(lambda params: wide.init(zeros(params)), update)
