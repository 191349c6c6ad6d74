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

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .leaves import PyTree, is_inexact, precise
from .parts import expect
from .spmd import AXIS, Axis
from .sync import average
from .triggers import Trigger


def track(old: PyTree, new: PyTree) -> jax.Array:
    r"""A zero to add to the loss; its gradient is ``old − new``.

    ``old`` are statistics among the arguments of the loss, ``new`` what the forward
    pass made of them (no gradient flows through it). Integer leaves stay as they are.

    Example:
        >>> loss = lambda old: 3.0 + track(old, old + 2.0)
        >>> [float(x) for x in jax.value_and_grad(loss)(jnp.array(5.0))]
        [3.0, -2.0]
    """

    def pull(x, there):
        if not is_inexact(x):
            return jnp.zeros(())
        distance = precise(x) - precise(lax.stop_gradient(there))
        return jnp.sum(jnp.square(distance)) / 2

    parts = jax.tree.leaves(jax.tree.map(pull, old, new))
    total = sum(parts, jnp.zeros(()))
    return total - lax.stop_gradient(total)


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
    out their mean.

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
        if not isinstance(variables, dict) or collection not in variables:
            found = sorted(variables) if isinstance(variables, dict) else variables
            raise ValueError(
                f"with_statistics needs variables with a collection {collection!r}, "
                f"not {found}: pass what model.init returns, or name the collection."
            )
        return {
            name: "statistics" if name == collection else "parameters"
            for name in variables
        }

    moved = average(optax.sgd(1.0), when=when, axis=axis)
    return optax.partition({"parameters": tx, "statistics": moved}, labels)
