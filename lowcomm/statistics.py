r"""Running statistics, such as those of batch normalization.

They are no parameters: nothing descends on them, and no gradient says where they go.
Yet they belong to the model that the workers agree on, and drift apart like it. Here
they travel as leaves beside the parameters, ``{"params": …, "batch_stats": …}``, whose
"gradient" is where they are minus where the forward pass moved them:

    loss(variables, batch) = task loss + track(old statistics, new statistics)
    tx                     = with_statistics(method, when=every(50))

so that any loop, checkpoint and ledger treats them like everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .guard import skip_nonfinite
from .leaves import PyTree, is_inexact, precise
from .parts import expect
from .spmd import AXIS, Axis
from .sync import average
from .triggers import Trigger


def track(old: PyTree, new: PyTree) -> jax.Array:
    r"""A zero to add to the loss; its gradient is ``old − new``.

    ``old`` are statistics among the arguments of the loss, ``new`` what the forward
    pass made of them (no gradient flows through it). Integer leaves stay as they are.
    A loss that also computes with the old ones reads them through
    ``jax.lax.stop_gradient``: otherwise their gradient is added. (flax's ``BatchNorm``
    does not while it trains.)

    Raises:
        ValueError: trees or shapes that differ; names the leaf.

    Example:
        >>> loss = lambda old: 3.0 + track(old, old + 2.0)
        >>> [float(x) for x in jax.value_and_grad(loss)(jnp.array(5.0))]
        [3.0, -2.0]
    """

    before = dict(jax.tree_util.tree_leaves_with_path(old))
    after = dict(jax.tree_util.tree_leaves_with_path(new))
    shapes = lambda leaves: {
        jax.tree_util.keystr(path): jnp.shape(x) for path, x in leaves.items()
    }
    if (was := shapes(before)) != (now := shapes(after)):
        differ = sorted(k for k in was.keys() | now.keys() if was.get(k) != now.get(k))
        raise ValueError(
            f"track: {differ[0] or 'the statistic'} had shape {was.get(differ[0])} and "
            f"has {now.get(differ[0])}: hand it the same tree before and after."
        )
    # Linear in x, so that nothing overflows; the value is exactly zero.
    still = lax.stop_gradient
    pull = lambda x, y: (precise(x) - precise(still(x))) * (precise(still(x - y)))
    pairs = zip(before.values(), after.values(), strict=True)
    parts = [jnp.sum(pull(x, y)) for x, y in pairs if is_inexact(x)]
    return sum(parts, jnp.zeros(()))


def recompute_statistics(
    forward: Callable[[PyTree, Any], PyTree], old: PyTree, batches: Iterable[Any]
) -> PyTree:
    r"""The statistics of a model as it is now, in one pass over ``batches``.

    .. math:: s = \frac1B \sum_b s_b

    ``forward(statistics, batch)`` is what the forward pass makes of the statistics
    while it trains, with the parameters it is about: an exponential average
    ``m·old + (1 − m)·s_b`` of what it sees (flax's ``BatchNorm``), whatever ``m`` is.
    What the statistics were does not matter, so that doing it twice changes nothing;
    the parameters are not touched. For a model that was averaged, whose statistics no
    worker has seen. Sends nothing.

    Raises:
        ValueError: no batches, or a forward pass that does not move a statistic.

    Example:
        >>> forward = lambda s, x: {"mean": 0.9 * s["mean"] + 0.1 * x.mean()}
        >>> batches = [jnp.array([1.0, 3.0]), jnp.array([4.0, 4.0])]
        >>> new = recompute_statistics(forward, {"mean": jnp.array(7.0)}, batches)
        >>> print(f"{new['mean']:.4f}")
        3.0000

    References:
        Izmailov et al., `Averaging Weights Leads to Wider Optima and Better
        Generalization <https://arxiv.org/abs/1803.05407>`_, 2018, section 3.2.
    """
    nothing = jax.tree.map(
        lambda x: jnp.zeros_like(precise(x)) if is_inexact(x) else x, old
    )

    @jax.jit
    def seen(batch):
        # Affine in the old ones: at 0 it is (1 − m)·s_b, at v it is m·v more. Where v
        # is as large as what is added to it, no rounding of the sum hides it.
        zero = forward(nothing, batch)
        far = lambda z: jnp.maximum(1, jnp.abs(precise(z))) if is_inexact(z) else z
        there = jax.tree.map(far, zero)
        one = forward(there, batch)
        share = lambda z, o, v: 1 - (precise(o) - precise(z)) / v
        own = lambda z, o, v: precise(z) / share(z, o, v) if is_inexact(z) else z
        parts = zip(*map(jax.tree.leaves, (zero, one, there)), strict=True)
        moved = [jnp.all(share(*part) > 0) for part in parts if is_inexact(part[0])]
        return jax.tree.map(own, zero, one, there), jnp.all(jnp.array(moved))

    total, count = None, 0
    for batch in batches:
        own, moves = seen(batch)
        if not moves:
            raise ValueError(
                "recompute_statistics: the forward pass leaves a statistic as it was; "
                "hand it the one that trains (mutable, use_running_average=False)."
            )
        total = own if total is None else jax.tree.map(jnp.add, total, own)
        count += 1
    if total is None:
        raise ValueError("recompute_statistics needs at least one batch.")
    mean = lambda x, t: (t / count).astype(x.dtype) if is_inexact(x) else x
    return jax.tree.map(mean, old, total)


def with_statistics(
    tx: optax.GradientTransformation,
    *,
    when: Trigger,
    collection: str = "batch_stats",
    axis: Axis = AXIS,
) -> optax.GradientTransformationExtraArgs:
    r"""``tx`` for the parameters, and running statistics that are averaged at syncs.

    .. math:: s_i \leftarrow \text{new}_i, \qquad
              \text{if fire: } s_i \leftarrow \tfrac1K \sum_j s_j

    For variables ``{"params": …, "batch_stats": …}`` as flax makes them and a loss that
    adds ``track``. ``when`` is the clock of ``tx``, so that the model all workers agree
    on has statistics of its own (beside a measured trigger, which would measure the
    statistics here, any clock). Sends the statistics when it fires. ``consensus`` hands
    out their mean. Statistics that are not finite are not taken over. A clip or a
    schedule of the parameters belongs inside ``tx``: around this it would scale the
    statistics as well.

    The average of variances is not the variance of the pooled batches, which is larger
    by the variance of the workers' means. The statistics of a model that was averaged
    are not averages of statistics either: where it matters, run some batches through
    the final model once more.

    Raises:
        ValueError: at trace, variables without that collection.

    Example:
        >>> from lowcomm import every, fit, local_sgd
        >>> def loss(variables, x):
        ...     seen = {"mean": 0.5 * variables["batch_stats"]["mean"] + 0.5 * x}
        ...     return variables["params"] ** 2 + track(variables["batch_stats"], seen)
        >>> tx = with_statistics(local_sgd(optax.sgd(0.1), period=2), when=every(2))
        >>> start = {"params": jnp.array(1.0), "batch_stats": {"mean": jnp.array(0.0)}}
        >>> x = jnp.array([4.0, 8.0])
        >>> run = fit(loss, tx, start, lambda t: x, steps=2, workers=2)
        >>> run.params["batch_stats"]["mean"]  # (3 + 6) / 2
        Array([4.5, 4.5], dtype=float32)
    """
    expect(optax.GradientTransformation, tx=tx)
    expect(Trigger, when=when)

    def labels(variables: Any):
        found = set()

        def label(path, _):
            found.add(name := str(getattr(path[0], "key", path[0])) if path else "")
            return "statistics" if name == collection else "parameters"

        labelled = jax.tree_util.tree_map_with_path(label, variables)
        if collection not in found:
            raise ValueError(
                f"with_statistics needs variables with a collection {collection!r}, "
                f"not {sorted(found)}: pass what model.init returns, or name the "
                "collection."
            )
        return labelled

    moved = average(skip_nonfinite(optax.sgd(1.0)), when=when, axis=axis)
    return optax.partition({"parameters": tx, "statistics": moved}, labels)
