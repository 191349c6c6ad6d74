"""What is to be learned: a loss, batches for K workers, and an honest judge.

A :class:`Task` is everything a training loop needs to know of a problem. Its batches
have a leading axis of workers, ``[K, b, ...]``, and are a pure function of the step and
of the workers whose part is wanted: a process builds that of its own and no other. Its
loss is one worker's; its judge sees only examples that no worker trains on, or,
where the optimum is known in closed form, the optimum itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

PyTree = Any
Workers = np.ndarray | slice  # whose part of a batch is wanted
ALL = slice(None)


class Task(NamedTuple):
    """A problem shared out among workers."""

    name: str
    init: Callable[[jax.Array], PyTree]  # key -> one worker's parameters
    loss: Callable[[PyTree, PyTree], jax.Array]  # (params, batch [b, ...]) -> scalar
    batches: Callable[..., PyTree]  # (step, workers=all) -> batch [workers, b, ...]
    evaluate: Callable[[PyTree], dict[str, float]]  # params -> held-out metrics
    optimum: PyTree | None = None  # the parameters with the least mean loss, if known
    sample: Callable[..., str] | None = None  # (params, prompt, ...) -> text, if any
