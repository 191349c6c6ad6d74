"""The next byte from the eight before it, in Python's own sources: a small problem.

A traceable one (see :mod:`experiments.toys`) on which the size of the model can be
chosen freely, for how the loss falls with it.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import text
from .splits import iid
from .toys import Examples, Problem, PyTree, judged

BEFORE, LETTERS, WIDTH = 8, 64, 16  # bytes of context, letters, width of an embedding
WINDOW, WINDOWS, JUDGED = 256, 8192, 4096


class Pages(NamedTuple):
    """Letters by their numbers, the most frequent byte being 0."""

    name: str
    train: np.ndarray  # uint8 [windows, WINDOW]
    validation: Examples
    test: Examples


def letters(*, workers: int, batch_size: int, hidden: int) -> Problem:
    """The 63 most frequent bytes and one for the rest; two hidden layers.

    Letters are embedded, and read off the same embedding in the end; ``size_of``
    counts the parameters between. Windows are dealt out to the workers at random.
    """
    pages = _pages()
    own = iid(np.zeros(len(pages.train)), workers, np.random.default_rng(0))

    def draw(own, key):
        page, place = jax.random.split(key)
        rows = own[jax.random.randint(page, (batch_size,), 0, own.shape[0])]
        at = jax.random.randint(place, (batch_size,), 0, WINDOW - BEFORE)
        columns = at[:, None] + jnp.arange(BEFORE + 1)
        seen = jnp.asarray(pages.train)[rows[:, None], columns].astype(jnp.int32)
        return Examples(seen[:, :BEFORE], seen[:, BEFORE])

    return Problem(
        f"{pages.name}, {hidden} hidden units",
        workers,
        partial(_init, hidden),
        _loss,
        np.asarray(own, np.int32),
        draw,
        partial(judged, _judge, pages.validation, pages.test),
    )


def size_of(problem: Problem) -> int:
    """Parameters of the model without its embedding."""
    params = jax.eval_shape(problem.init, jax.random.key(0))
    whole = sum(x.size for x in jax.tree.leaves(params))
    return whole - params["embedding"].size


def _init(hidden: int, key: jax.Array) -> PyTree:
    sizes = (BEFORE * WIDTH, hidden, hidden, WIDTH)
    first, *keys = jax.random.split(key, len(sizes))
    params: PyTree = {"embedding": jax.random.normal(first, (LETTERS, WIDTH))}
    for i, ((n, m), sub) in enumerate(zip(pairwise(sizes), keys, strict=True)):
        w = jax.random.normal(sub, (n, m)) * jnp.sqrt(2.0 / n)
        params[f"layer{i}"] = {"w": w, "b": jnp.zeros(m)}
    return params


def _logits(params: PyTree, x: jax.Array) -> jax.Array:
    embedding = params["embedding"]
    x = (jax.nn.one_hot(x, LETTERS) @ embedding).reshape(*x.shape[:-1], -1)
    for i in range(2):
        layer = params[f"layer{i}"]
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    last = params["layer2"]
    return (x @ last["w"] + last["b"]) @ embedding.T / jnp.sqrt(WIDTH)


def _judge(params: PyTree, x: jax.Array) -> jax.Array:
    # Otherwise the compiler spends seconds on the one-hot codes of all constants.
    return _logits(params, jax.lax.optimization_barrier(x))


def _loss(params: PyTree, batch: Examples) -> jax.Array:
    chosen = jax.nn.one_hot(batch.labels, LETTERS)
    logs = jax.nn.log_softmax(_logits(params, batch.inputs))
    return -jnp.mean(jnp.sum(chosen * logs, -1))


@cache
def _pages() -> Pages:
    """Windows of the standard library, and examples of others, a fixed choice."""
    corpus, rng = text.stdlib(), np.random.default_rng(0)
    train, held_out = text.windows(corpus, WINDOW)
    at = lambda starts: corpus.text[starts[:, None] + np.arange(WINDOW)]
    some = at(rng.permutation(train.starts)[:WINDOWS])
    order = np.argsort(-np.bincount(some.ravel(), minlength=256), kind="stable")
    number = np.full(256, LETTERS - 1, np.uint8)
    number[order[: LETTERS - 1]] = np.arange(LETTERS - 1)

    def examples(starts):
        pages = number[at(starts)].astype(np.int32)
        rows = rng.integers(0, len(pages), JUDGED)
        columns = rng.integers(0, WINDOW - BEFORE, JUDGED)[:, None]
        seen = pages[rows[:, None], columns + np.arange(BEFORE + 1)]
        return Examples(seen[:, :BEFORE], seen[:, BEFORE])

    validation, test = np.array_split(rng.permutation(held_out.starts), 2)
    return Pages(corpus.name, number[some], examples(validation), examples(test))
