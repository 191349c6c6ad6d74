r"""The norm test: is the batch large enough for its gradient to show the way?

At a point where all workers agree, a gradient of ``b`` samples is as good as the test
asks if its noise is below a share of its size, ``E‖g − ∇F‖² ≤ θ²‖∇F‖²``, that is if
``b ≥ noise / (θ² signal)``, where ``noise`` is the variance of one sample's gradient,
summed over its entries. A test is a part that measures both:

    local_test        noise = σ̂²      signal = ‖ḡ‖²    is one worker's batch enough?
    global_test       noise = σ̂²/K    signal = ‖ḡ‖²    are all batches together?
    per_sample_test   noise = mean v_i   signal = mean ‖g_i‖²   from single samples
    corrected(test)   the same, without what noise alone adds to the signal

with ``ḡ`` the mean gradient, ``σ̂² = b/(K−1) Σ_i ‖g_i − ḡ‖²`` and ``v_i`` the variance
over the samples of worker ``i``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from . import uniform
from .leaves import PyTree, precise, takes_part
from .parts import expect
from .spmd import AXIS, Axis, axis_size, vary
from .transport import reduce_mean, reduce_sum
from .triggers import Trigger

# Whole numbers up to here are exact in the float32 that batches are computed in.
_LARGEST = 2**24


class Measured(NamedTuple):
    """What a test measures, float32 scalars that are the same on all workers."""

    noise: jax.Array  # the batch that is asked for, times θ² signal
    signal: jax.Array  # the squared norm of the gradient
    inflation: jax.Array  # what noise is expected to add to ``signal``


# ``test(grads, *, batch_size, params, axis, **extra) -> Measured``.
Test: TypeAlias = Callable[..., Measured]


class NormTestState(NamedTuple):
    """State of ``norm_test``."""

    trigger: Any
    batch_size: jax.Array  # int32, samples a worker and step, the same on all workers


def norm_test(
    test: Test,
    *,
    when: Trigger,
    level: float,
    start: int,
    most: int,
    granularity: int = 1,
    axis: Axis = AXIS,
) -> optax.GradientTransformationExtraArgs:
    r"""Let the batch grow until gradients pass a test; they pass through unchanged.

    .. math::
        \text{if fire: } b \leftarrow \min\Big(b_{\max},\;
        \max\big(b, \lceil \text{noise} / (\theta^2\, \text{signal}) \rceil\big)\Big)

    A link before an inner optimizer. ``state.batch_size`` is ``b``, samples a worker
    and step: a loop reads it and draws so many (``optax.tree.get(state, "batch_size")``
    finds it). It never falls, and is rounded up to a multiple of ``granularity``.
    ``θ`` is ``level``, ``b_max`` is ``most``; ``when`` fires where all workers hold the
    same model (``just_after``). A loop that draws another number than ``b`` says so by
    ``update(..., batch_size=n)``. No noise never grows the batch, nor does what is not
    a number; no signal beside noise grows it to ``most``. Sends what the test sends on
    the steps that fire.

    Raises:
        ValueError: a level that is not positive; start, most or granularity below 1;
            start or most no multiple of granularity; most below start or above 2²⁴.

    Example:
        Two workers' gradients 1 and 3 of 4 samples: σ̂² = 4 · 2, ‖ḡ‖² = 4.

        >>> from lowcomm import every, spread
        >>> tx = norm_test(local_test(), when=every(1), level=0.5, start=4, most=64)
        >>> worker = lambda g: tx.update(g, tx.init(g), step=0)[1].batch_size
        >>> spread(worker)(jnp.array([1.0, 3.0]))
        Array([8, 8], dtype=int32)
    """
    expect(Trigger, when=when)
    if not level > 0:
        raise ValueError(f"level {level} must be positive (infinity never grows).")
    for name, value in {
        "granularity": granularity,
        "start": start,
        "most": most,
    }.items():
        if value < 1 or value != int(value):
            raise ValueError(f"{name} {value} must be a whole number of samples.")
        if value % granularity:
            raise ValueError(
                f"{name} {value} must be a multiple of the granularity, {granularity}."
            )
    if not start <= most <= _LARGEST:
        raise ValueError(f"most {most} must be between start, {start}, and 2**24.")

    def init(params):
        batch_size = jnp.asarray(start, jnp.int32)
        return vary(NormTestState(when.init(params), batch_size), axis)

    def update(updates, state, params=None, *, step=None, batch_size=None, **extra):
        fire, trigger = when.fire(
            state.trigger,
            step=step,
            since=None,
            drift=None,
            grads=updates,
            axis=axis,
            **extra,
        )
        drawn = state.batch_size if batch_size is None else batch_size

        def grow(b):
            found = test(updates, batch_size=drawn, params=params, axis=axis, **extra)
            wanted = found.noise / (level**2 * found.signal)
            # Nothing beside nothing, and what is not a number, is above no batch.
            more = wanted > b
            whole = jnp.ceil(jnp.minimum(jnp.where(more, wanted, 0), most))
            rounded = -(-whole.astype(jnp.int32) // granularity) * granularity
            return jnp.where(more, rounded, b)

        b = uniform.cond(fire, grow, lambda b: b, state.batch_size, axis=axis)
        return updates, NormTestState(trigger, b)

    return optax.GradientTransformationExtraArgs(init, update)


def local_test() -> Test:
    r"""Whether one worker's batch is enough, by how far workers' gradients differ.

    At a stationary point the batch grows by ``K/θ²`` a test: below a level of √K it
    explodes there, above it only fluctuations make it grow. Sends the gradient's size
    and 4 bytes. One worker alone has nobody to differ from, and measures no noise.
    """

    def test(grads, *, batch_size, axis: Axis, **extra):
        variance, signal, inflation = _across(grads, batch_size, axis)
        return Measured(variance, signal, inflation)

    return test


def global_test() -> Test:
    r"""Whether all batches together are enough; else like ``local_test``.

    It asks for what ``local_test`` asks for at √K times the level: the critical level
    is 1.
    """

    def test(grads, *, batch_size, axis: Axis, **extra):
        variance, signal, inflation = _across(grads, batch_size, axis)
        return Measured(variance / axis_size(axis), signal, inflation)

    return test


def per_sample_test() -> Test:
    r"""Whether one worker's batch is enough, by how far its samples differ.

    It needs an extra argument ``sample_variance``, a function of ``params`` that is
    asked on the testing steps alone: ``extra_args=sample_variances(loss)`` of
    ``local_step`` passes it. The critical level is 1. Sends 8 bytes.

    Raises:
        ValueError: at trace, no ``sample_variance``.
    """

    def test(grads, *, batch_size, params, axis: Axis, sample_variance=None, **extra):
        if sample_variance is None:
            raise ValueError(
                "per_sample_test needs update(..., sample_variance=f), where f(params) "
                "is the variance of one sample's gradient: pass "
                "extra_args=sample_variances(loss) to local_step."
            )
        own = sample_variance(params), _square(grads)
        both = jnp.stack([jnp.asarray(x, jnp.float32) for x in own])
        variance, signal = reduce_mean(both, axis)
        return Measured(variance, signal, variance / batch_size)

    return test


def corrected(test: Test) -> Test:
    r"""``test`` with the signal that noise cannot explain.

    ``E‖ḡ‖² = ‖∇F‖² + σ²/(bK)``, and for one worker's gradient ``‖∇F‖² + σ²/b``: the
    expected second term is taken away, down to 0, where the batch grows to ``most``.
    """

    def measure(grads, **more):
        found = test(grads, **more)
        signal = jnp.maximum(found.signal - found.inflation, 0)
        return Measured(found.noise, signal, jnp.zeros_like(found.inflation))

    return measure


def sample_variances(
    loss: Callable[[PyTree, PyTree], Any],
) -> Callable[[PyTree], dict[str, Any]]:
    r"""``extra_args=`` for ``local_step``: the variance ``per_sample_test`` asks for.

    .. math:: v = \tfrac1{b-1} \sum_i \lVert \nabla\ell_i - \overline{\nabla\ell}
              \rVert^2

    ``loss(params, batch)`` is the mean over a batch whose leaves are stacked,
    ``[b, …]``; it is called with batches of one sample, one after the other, in the
    memory of three gradients.

    Raises:
        ValueError: at trace, a batch of a single sample.

    Example:
        >>> loss = lambda x, c: jnp.mean((x - c) ** 2) / 2
        >>> variance = sample_variances(loss)(jnp.array([1.0, 3.0, 5.0]))
        >>> print(variance["sample_variance"](jnp.array(7.0)))
        4.0
    """

    def extra_args(batch: PyTree) -> dict[str, Any]:
        size = jax.tree.leaves(batch)[0].shape[0]

        def sample_variance(params: PyTree) -> jax.Array:
            if size < 2:
                raise ValueError(
                    "one sample has no variance: start with a batch of 2 or more."
                )

            def gradient(i):
                one = jax.tree.map(lambda x: x[i][None], batch)
                return _moving(jax.grad(loss)(params, one))

            # Welford's recursion: no difference of large numbers.
            def add(carry, i):
                mean, scatter = carry
                g = gradient(i)
                new = jax.tree.map(lambda m, x: m + (x - m) / (i + 1), mean, g)
                parts = jax.tree.map(
                    lambda x, m, n: jnp.sum(jnp.real((x - m) * jnp.conj(x - n))),
                    g,
                    mean,
                    new,
                )
                return (new, scatter + sum(jax.tree.leaves(parts))), None

            first = gradient(0)
            nothing = 0 * _square(first)  # and varies as the gradients do
            carry, _ = jax.lax.scan(add, (first, nothing), jnp.arange(1, size))
            return carry[1] / (size - 1)

        return {"sample_variance": sample_variance}

    return extra_args


def _across(grads: PyTree, batch_size: Any, axis: Axis) -> tuple[jax.Array, ...]:
    """``σ̂²``, ``‖ḡ‖²``, and what of it is expected of noise."""
    workers, grads = axis_size(axis), _moving(grads)
    means = reduce_mean(grads, axis)
    # The sum of differences costs no more to send than that of squares, from which a
    # square of the mean would have to be subtracted, and cancels nothing.
    apart = _square(jax.tree.map(jnp.subtract, grads, means))
    variance = batch_size * reduce_sum(apart, axis) / max(workers - 1, 1)
    return variance, _square(means), variance / (batch_size * workers)


def _moving(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: precise(x) if takes_part(x) else None, tree)


def _square(tree: PyTree) -> jax.Array:
    parts = [jnp.sum(jnp.square(jnp.abs(x))) for x in jax.tree.leaves(_moving(tree))]
    return sum(parts, jnp.float32(0)).astype(jnp.float32)
