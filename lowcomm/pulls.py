"""Which workers fetch the server's model after which step.

A schedule of pulls maps ``(step, axis)`` to whether *this* worker pulls after that
step. Unlike a trigger it may differ between workers, so nothing that talks may depend
on it. None of them sends anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .keys import leaf_keys
from .spmd import Axis, axis_size, worker_index
from .triggers import every

Pulls: TypeAlias = Callable[[Any, Axis], Any]


def common_pulls(period: int) -> Pulls:
    """All workers pull after every ``period``-th step.

    Example:
        >>> pulls = common_pulls(3)
        >>> [pulls(t, "workers") for t in range(6)]
        [False, False, True, False, False, True]
    """
    when = every(period)
    return lambda step, axis: when.fire((), step=step, axis=axis)[0]


def staggered_pulls(period: int) -> Pulls:
    """Each worker pulls after every ``period``-th step, the next one a step earlier.

    Worker ``i`` pulls where ``(step + 1 + i) % period == 0``.

    Raises:
        ValueError: period < 1 or not whole.

    Example:
        >>> from lowcomm import spread
        >>> pulls = staggered_pulls(4)
        >>> worker = lambda x: jnp.array([pulls(t, "workers") for t in range(4)])
        >>> print(spread(worker)(jnp.zeros(3)).astype(int))
        [[0 0 0 1]
         [0 0 1 0]
         [0 1 0 0]]
    """
    every(period)  # raises unless it is a period
    return lambda step, axis: (step + 1 + worker_index(axis)) % period == 0


def random_pulls(ratio: float, *, seed: int = 0) -> Pulls:
    """Each worker pulls after a step with probability ``ratio``, for itself.

    The draw is a function of (seed, step, worker).

    Raises:
        ValueError: ratio outside [0, 1].

    Example:
        >>> from lowcomm import spread
        >>> pulls = random_pulls(0.25)
        >>> worker = lambda x: sum(pulls(t, "workers").astype(int) for t in range(40))
        >>> counts = spread(worker)(jnp.zeros(20))
        >>> bool(abs(counts.mean() - 10) < 2), len(set(counts.tolist())) > 3
        (True, True)
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio {ratio} is outside [0, 1]; 1 pulls after each step.")
    return lambda step, axis: jax.random.bernoulli(
        leaf_keys(seed, step, 0, axis).private, ratio
    )


def listed_pulls(table: Any) -> Pulls:
    """Worker ``i`` pulls after step ``t`` where ``table[t % T, i]`` is true.

    Args:
        table: ``[T, n]``, one row a step and one column a worker; after ``T`` steps it
            begins again.

    Raises:
        ValueError: a table of another rank or empty, or of other numbers than 0 and 1;
            at trace, another number of workers.

    Example:
        >>> from lowcomm import spread
        >>> pulls = listed_pulls([[1, 0], [0, 1], [0, 0]])
        >>> worker = lambda x: jnp.array([pulls(t, "workers") for t in range(4)])
        >>> print(spread(worker)(jnp.zeros(2)).astype(int))
        [[1 0 0 1]
         [0 1 0 0]]
    """
    given = np.asarray(table)
    if given.ndim != 2 or not given.size:
        raise ValueError(
            f"the table of pulls has shape {given.shape}: give [steps, workers]."
        )
    mask = given.astype(bool)
    if (mask != given).any():
        raise ValueError(
            f"the table of pulls holds {given[mask != given][0]}: give 0 or 1, whether "
            "a worker pulls; random_pulls takes a probability."
        )

    def pulls(step, axis):
        if mask.shape[1] != axis_size(axis):
            raise ValueError(
                f"the table of pulls has {mask.shape[1]} columns and axis {axis!r} has "
                f"{axis_size(axis)} workers: give one column a worker."
            )
        return jnp.asarray(mask)[step % len(mask), worker_index(axis)]

    return pulls
