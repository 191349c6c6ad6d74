"""Methods that exchange some entries of the gradients, and remember the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from .. import uniform
from ..compressors import Compressor, Contraction
from ..feedback import error_feedback
from ..leaves import exchanged, map_exchanged, movable, precise
from ..masked import masked_feedback, staged
from ..parts import expect
from ..selections import top_k
from ..spectral import dct_top_k
from ..spmd import AXIS, Axis, axis_size
from ..sync import Talking, Transformation, enter, leave, propose
from ..talk import PerLeaf

WARMUP = (0.25, 0.0625, 0.015625, 0.004)  # the densities before DGC's own


def dgc(
    inner: Transformation,
    *,
    fraction: float = 0.001,
    momentum: float | Transformation = 0.9,
    clip: float = math.inf,
    warmup: int = 0,
    axis: Axis = AXIS,
) -> Talking:
    r"""Deep Gradient Compression: top-k of accumulated momentum, masked where sent.

    .. math::
        u_i \leftarrow \beta u_i + \text{clip}(g_i), \quad v_i \leftarrow v_i + u_i,
        \quad x \leftarrow x + \text{inner}(\tfrac1K \textstyle\sum_i
        \text{top}_k(v_i)), \quad u_i, v_i \leftarrow 0 \text{ where sent}

    ``k`` is ``fraction`` of each leaf's entries and ``β`` is ``momentum``, which may be
    a transformation: ``optax.trace(0.9, nesterov=True)`` is the Nesterov form. The
    momentum is here, and ``inner`` wants none: ``optax.sgd(rate)``. Gradients are
    clipped on each worker, to a norm of ``clip/√K`` over all leaves. ``warmup`` is the
    number of steps (the paper has an epoch) that each of the densities 25, 6.25, 1.56
    and 0.4 % above ``fraction`` lasts at first. Sends k values and their places
    a leaf and step. Without the mask it is
    ``optax.chain(optax.trace(β), error_feedback(top_k(fraction)), inner)``.

    Raises:
        ValueError: a clip that is not positive, a negative warm-up.

    Note:
        The k largest are found exactly; the paper estimates a threshold from a sample.
        A gradient whose norm is not finite is not clipped.

    Example:
        The second coordinate waits and gathers momentum: 2, and then 3 + ½ · 2 more.

        >>> from lowcomm import spread
        >>> tx = dgc(optax.sgd(1.0), fraction=0.5, momentum=0.5)
        >>> def worker(g):
        ...     state, sent = tx.init(g), []
        ...     for t, grads in enumerate([g, g[::-1]]):
        ...         moves, state = tx.update(grads, state, g, step=t)
        ...         sent.append(moves + 0)
        ...     return jnp.stack(sent)
        >>> print(spread(worker)(jnp.array([[3.0, 2.0]]))[0])
        [[-3.  0.]
         [ 0. -6.]]

    References:
        Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_,
        2018, Algorithms 1 and 4, section 3.
    """
    if not isinstance(clip, Tracer) and not clip > 0:
        raise ValueError(f"clip {clip} must be above 0; infinity does not clip.")
    uniform.whole(warmup=warmup)
    if warmup < 0:
        raise ValueError(f"warmup {warmup} is a number of steps, 0 or more.")
    pace: Any = momentum
    if not isinstance(momentum, optax.GradientTransformation):
        pace = optax.trace(pace)
    before = [f for f in WARMUP if f > fraction] if warmup else []
    exchanges = [
        masked_feedback(top_k(f), pace, axis=axis) for f in (*before, fraction)
    ]
    starts = [warmup * (i + 1) for i in range(len(before))]
    return optax.chain(
        _clip_locally(clip, axis), staged(exchanges, starts, axis=axis), inner
    )


def demo(
    inner: Transformation,
    *,
    decay: float = 0.999,
    k: int = 32,
    chunk: int = 64,
    axis: Axis = AXIS,
) -> Talking:
    r"""DeMo: momentum that each worker keeps, but for what it says of it.

    .. math::
        m_i \leftarrow \beta m_i + g_i, \quad
        q_i = C(m_i), \quad m_i \leftarrow m_i - q_i, \quad
        x \leftarrow x + \text{inner}(\text{sign}(\tfrac1K \textstyle\sum_i q_i))

    ``C`` is ``dct_top_k(k, chunk=chunk)``: the fast components of each chunk, by their
    cosine coefficients. ``m`` is ``state.error`` of the exchange and ``β`` is
    ``decay``. ``inner`` is a rate, ``optax.sgd(rate)``; weight decay belongs into it,
    as ``optax.chain(optax.add_decayed_weights(λ), optax.sgd(rate))``. Sends k
    coefficients and their places for each chunk and step. Each worker holds other
    momentum and the same model.

    Note:
        The mean is over all workers. The released code divides a coefficient by the
        number of those that chose it, which the sign does not undo: it weighs
        coefficients otherwise, and about one sign in six differs. The gradient enters
        ``m`` without the rate, which the sign makes a matter of scale unless the rate
        changes: there the paper's ``m`` holds old gradients at their old rates.

    Example:
        All of a chunk is the sign of the mean gradient, and nothing is left.

        >>> from lowcomm import spread
        >>> tx = demo(optax.sgd(1.0), k=64, chunk=8)
        >>> worker = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        >>> print(spread(worker)(jnp.array([[3.0, -2.0], [-1.0, -2.0]]))[0])
        [-1.  1.]

    References:
        Peng, Quesnelle and Kingma, `DeMo: Decoupled Momentum Optimization
        <https://arxiv.org/abs/2411.19870>`_, 2024, Algorithm 1.
    """
    expect(optax.GradientTransformation, inner=inner)
    exchange = error_feedback(dct_top_k(k, chunk=chunk), decay=decay, axis=axis)
    signs = optax.stateless(lambda heard, params: map_exchanged(jnp.sign, heard))
    return optax.chain(exchange, signs, inner)


def lags_sgd(
    inner: Transformation,
    entries: float | Mapping[str, int] = 0.001,
    *,
    whole: int = 256,
    axis: Axis = AXIS,
) -> Talking:
    r"""LAGS-SGD: the steps of ``inner``, top-k of each layer with a number of its own.

    .. math::
        a_{i,\ell} = e_{i,\ell} + \text{inner}(g_i)_\ell, \qquad
        x_\ell \leftarrow x_\ell + \tfrac1K \textstyle\sum_i
        \text{top}_{k_\ell}(a_{i,\ell}), \qquad
        e_{i,\ell} \leftarrow a_{i,\ell} - \text{top}_{k_\ell}(a_{i,\ell})

    ``entries`` is the share of every leaf to send, or for each leaf, by its path (such
    as ``"dense/kernel"``), how many: ``lowcomm.planning.sparsity`` finds as many as
    hide under the backward pass. Leaves of fewer than ``whole`` entries, which would
    starve, are averaged whole, and need not be named. The residual is in units of
    parameters: the rate is in it, so that nothing is lost where it decays. What
    ``inner`` holds acts before the selection and on each worker's own gradients;
    momentum of what all heard stands behind: ``optax.chain(lags_sgd(optax.sgd(rate)),
    optax.trace(0.9))``. Sends k values and their places a leaf and step.

    Raises:
        ValueError: a share outside (0, 1], a number below 1; at trace, a leaf of
            ``whole`` entries or more that has no number.

    Note:
        All leaves travel in one message. Which layer's may leave while backward goes on
        is up to the compiler, and the plan is a model of it. The released code uses one
        constant density.

    Example:
        Of one leaf a half, of the other everything.

        >>> from lowcomm import spread
        >>> tx = lags_sgd(optax.sgd(1.0), {"a": 1, "b": 2}, whole=0)
        >>> worker = lambda g: tx.update(g, tx.init(g), g, step=0)[0]
        >>> g = jnp.array([[3.0, 2.0]])
        >>> for x in spread(worker)({"a": g, "b": g}).values():
        ...     print(x[0] + 0)
        [-3.  0.]
        [-3. -2.]

    References:
        Shi et al., `Layer-wise Adaptive Gradient Sparsification for Distributed Deep
        Learning with Convergence Guarantees <https://arxiv.org/abs/1911.08727>`_, 2020,
        Algorithm 1.
    """
    expect(optax.GradientTransformation, inner=inner)
    uniform.whole(whole=whole)
    if isinstance(entries, Mapping):
        uniform.whole(**{f"entries[{path!r}]": k for path, k in entries.items()})
        for path, k in entries.items():
            if k < 1:
                raise ValueError(f"entries[{path!r}] = {k}: send 1 or more.")
    else:
        top_k(entries)  # raises unless it is a share

    def choose(path: str, x: jax.Array) -> Compressor:
        if x.size < whole:
            return _WHOLE
        if not isinstance(entries, Mapping):
            return top_k(entries)
        if path not in entries:
            raise ValueError(
                f"lags_sgd: leaf {path!r} has {x.size} entries, and there is no number "
                f"to send for it among {', '.join(map(repr, entries))}."
            )
        return top_k(entries[path] / x.size) if entries[path] < x.size else _WHOLE

    stepping = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, *, step=None, **extra):
        # What no optimizer may move would come out of it as a float.
        whole, grads, params = enter(updates, params, step, axis)
        moves, state = propose(stepping, grads, state, params, step=step, **extra)
        return leave(moves, whole), state

    steps = Talking(lambda params: stepping.init(movable(params)), update)
    return optax.chain(steps, error_feedback(PerLeaf(choose), axis=axis))


_WHOLE = Compressor(
    lambda x, keys, agreed=None: x,
    lambda payload, like, keys, agreed=None: payload.astype(like.dtype),
    linear=True,
    law=Contraction(lambda n: 1.0),
)


def _clip_locally(norm: float, axis: Axis) -> Talking:
    """Clip this worker's gradient, such that those of K workers sum to ``norm``."""

    def update(updates, state, params=None, **extra):
        if not isinstance(norm, Tracer) and norm == math.inf:
            return updates, state
        most = norm / math.sqrt(axis_size(axis))
        size = optax.tree.norm(jax.tree.map(precise, exchanged(updates)))
        # What is not finite stays where it is: scaled by it, all entries would be.
        scale = jnp.where((size > most) & jnp.isfinite(size), most / size, 1.0)
        shrink = lambda g: (precise(g) * scale).astype(g.dtype)
        return map_exchanged(shrink, updates), state

    return Talking(lambda params: optax.EmptyState(), update)
