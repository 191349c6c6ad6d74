"""Small problems on which published claims are checked, whole runs in one program.

A :class:`Problem` is a :class:`~experiments.task.Task` that can be traced: its batches
are drawn from keys inside the program, so that a run of thousands of steps is one
``lax.scan`` and a grid of learning rates and seeds one compilation. Each has examples
to learn from, others to choose learning rates by, and others to be judged by.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .splits import find_split

PyTree = Any


class Problem(NamedTuple):
    """A problem shared out among workers, all of it traceable."""

    name: str
    workers: int
    init: Callable[[jax.Array], PyTree]  # key -> one worker's parameters
    loss: Callable[[PyTree, PyTree], jax.Array]  # (params, batch) -> scalar
    own: PyTree  # [K, ...], what each worker draws from
    draw: Callable[[PyTree, jax.Array], PyTree]  # (own, key) -> batch
    judge: Callable[[PyTree], dict[str, jax.Array]]  # "validation", and held out


class Examples(NamedTuple):
    """Inputs and labels."""

    inputs: Any
    labels: Any


def mixture(
    *, workers: int = 8, batch_size: int = 16, split: str = "iid", hidden: int = 64
) -> Problem:
    """Ten classes of four Gaussians each in 32 dimensions, and a small network.

    8192 examples to learn from, of which every tenth has a random label, 2048 to choose
    by and 4096 to be judged by, both with the right labels. Batches are drawn with
    replacement. The network has one hidden layer of ReLU.
    """
    train, validation, test = _mixture()
    return _classification(
        "mixture",
        (train, validation, test),
        (32, hidden, 10),
        workers=workers,
        batch_size=batch_size,
        split=split,
    )


def digits(*, workers: int = 8, batch_size: int = 16, split: str = "iid") -> Problem:
    """The 8 x 8 digits of scikit-learn and a network of two hidden layers.

    1200 to learn from, 237 to choose by, 360 to be judged by.
    """
    whole = data.digits()
    flat = lambda b: Examples(b.inputs.reshape(len(b.labels), -1), b.labels)
    train, test = flat(whole.train), flat(whole.held_out)
    order = np.random.default_rng(0).permutation(len(train.labels))
    cut = lambda rows: Examples(*(x[rows] for x in train))
    return _classification(
        "digits",
        (cut(order[:1200]), cut(order[1200:]), test),
        (64, 64, 64, 10),
        workers=workers,
        batch_size=batch_size,
        split=split,
    )


def dense_init(key: jax.Array, sizes: tuple[int, ...]) -> PyTree:
    """Layers of a network of ReLU, ``{"layer0": {"w": …, "b": …}, …}``."""
    params = {}
    for i, (n, m) in enumerate(pairwise(sizes)):
        key, sub = jax.random.split(key)
        w = jax.random.normal(sub, (n, m)) * jnp.sqrt(2.0 / n)
        params[f"layer{i}"] = {"w": w, "b": jnp.zeros(m)}
    return params


def dense(params: PyTree, x: jax.Array) -> jax.Array:
    """Logits of the network."""
    *hidden, last = params.values()
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def cross_entropy(params: PyTree, batch: Examples) -> jax.Array:
    """The mean cross entropy of the network."""
    logits = dense(params, batch.inputs)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels
    return losses(logits, batch.labels).mean()


def judged(
    apply: Callable[[PyTree, jax.Array], jax.Array],
    validation: Examples,
    test: Examples,
    params: PyTree,
) -> dict[str, jax.Array]:
    """Cross entropy to choose by, and cross entropy and accuracy to be judged by."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels
    logits = apply(params, test.inputs)
    return {
        "validation": losses(
            apply(params, validation.inputs), validation.labels
        ).mean(),
        "loss": losses(logits, test.labels).mean(),
        "accuracy": (logits.argmax(-1) == test.labels).mean(),
    }


def _classification(
    name: str,
    parts: tuple[Examples, Examples, Examples],
    sizes: tuple[int, ...],
    *,
    workers: int,
    batch_size: int,
    split: str,
) -> Problem:
    # As numpy arrays they are constants of every program that uses them.
    train, validation, test = (Examples(*map(np.asarray, part)) for part in parts)
    rng = np.random.default_rng(0)
    rows = find_split(split)(train.labels, workers, rng)

    def draw(own, key):
        chosen = own[jax.random.randint(key, (batch_size,), 0, own.shape[0])]
        return Examples(*(jnp.asarray(x)[chosen] for x in train))

    return Problem(
        f"{name}, {split}",
        workers,
        lambda key: dense_init(key, sizes),
        cross_entropy,
        np.asarray(rows, np.int32),
        draw,
        partial(judged, dense, validation, test),
    )


@cache
def _mixture() -> tuple[Examples, Examples, Examples]:
    rng = np.random.default_rng(0)
    centres = 0.75 * rng.normal(size=(10, 4, 32))

    def some(n):
        labels, modes = rng.integers(0, 10, n), rng.integers(0, 4, n)
        inputs = centres[labels, modes] + rng.normal(size=(n, 32))
        return Examples(inputs.astype(np.float32), labels.astype(np.int32))

    train, validation, test = some(8192), some(2048), some(4096)
    wrong = rng.random(8192) < 0.1
    labels = np.where(wrong, rng.integers(0, 10, 8192), train.labels)
    return Examples(train.inputs, labels.astype(np.int32)), validation, test
