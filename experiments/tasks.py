"""The tasks there are: images to classify, text to predict, and least squares."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data, language, models
from .names import lookup
from .splits import Split, find_split, stream
from .task import ALL, PyTree, Task
from .transformer import SIZES


def image_task(
    name: str,
    dataset: data.Dataset,
    model: nn.Module,
    *,
    workers: int,
    batch_size: int,
    split: Split,
    seed: int = 0,
) -> Task:
    """Classify images: cross entropy to learn, cross entropy and accuracy to judge."""
    rng = np.random.default_rng(seed)
    rows = split(dataset.train.labels, workers, rng)
    positions = stream(rows, batch_size, seed=seed)

    @jax.jit
    def init(key):
        return model.init(key, dataset.train.inputs[:1])

    def batches(step, workers=ALL):
        chosen = positions(step, workers)
        return data.Batch(dataset.train.inputs[chosen], dataset.train.labels[chosen])

    def evaluate(params):
        return _judge(model, params, dataset.held_out)

    return Task(name, init, partial(_cross_entropy, model), batches, evaluate)


def least_squares(
    *,
    workers: int,
    batch_size: int,
    seed: int = 0,
    heterogeneity: float = 1.0,
    noise: float = 0.1,
    examples: int = 128,
    inputs: int = 16,
    outputs: int = 8,
) -> Task:
    r"""Least squares whose workers disagree, with the optimum in closed form.

    .. math::
        f(X) = \tfrac1K \sum_i f_i(X), \quad
        f_i(X) = \tfrac1{2m} \lVert A_i X - B_i \rVert_F^2, \quad
        B_i = A_i (X_0 + h\, \Xi_i) + \sigma\, E_i

    ``h`` is ``heterogeneity``, ``sigma`` is ``noise``, ``m`` is ``examples`` of each
    worker; all of A, X_0, Xi, E are standard normal. With ``h = 0`` all workers want
    nearly the same, but their curvatures still differ. A batch is ``batch_size`` rows;
    where that is all of them the gradients are exact.

    The judge gives ``loss``, the excess :math:`f(X) - f(X^*)`, and ``distance``,
    :math:`\lVert X - X^* \rVert_F`; both are 0 at the optimum and nowhere else.
    """
    if heterogeneity < 0 or noise < 0:
        raise ValueError(
            "heterogeneity and noise are scales and cannot be negative: got "
            f"{heterogeneity} and {noise}"
        )
    rng = np.random.default_rng(seed)
    positions = stream(
        np.arange(workers * examples).reshape(workers, examples), batch_size, seed=seed
    )
    a = rng.normal(size=(workers, examples, inputs))
    wanted = rng.normal(size=(inputs, outputs))
    own = heterogeneity * rng.normal(size=(workers, inputs, outputs))
    b = a @ (wanted + own) + noise * rng.normal(size=(workers, examples, outputs))
    rows_a = a.reshape(-1, inputs).astype(np.float32)
    rows_b = b.reshape(-1, outputs).astype(np.float32)
    # The optimum of the rounded problem, which is the one that is trained on.
    wide = rows_a.astype(np.float64)
    curvature = wide.T @ wide / len(wide)
    optimum = np.linalg.solve(curvature, wide.T @ rows_b / len(wide))

    def init(key):
        del key
        return {"x": jnp.zeros((inputs, outputs), jnp.float32)}

    def loss(params, batch):
        residual = batch.inputs @ params["x"] - batch.labels
        return 0.5 * jnp.sum(residual**2, axis=-1).mean()

    def batches(step, workers=ALL):
        chosen = positions(step, workers)
        return data.Batch(rows_a[chosen], rows_b[chosen])

    def evaluate(params):
        # The quadratic form, not a difference of two losses, keeps all its digits.
        error = np.asarray(params["x"], np.float64) - optimum
        excess = 0.5 * np.sum(error * (curvature @ error))
        return {"loss": float(excess), "distance": float(np.linalg.norm(error))}

    return Task("least-squares", init, loss, batches, evaluate, {"x": optimum})


_IMAGE_TASKS: dict[str, tuple[Callable[[], data.Dataset], nn.Module]] = {
    "mnist-mixer": (data.mnist, models.PatchMixer()),
    "mnist-cnn": (data.mnist, models.SmallCNN()),
    "fashion-mixer": (data.fashion_mnist, models.PatchMixer()),
    "fashion-cnn": (data.fashion_mnist, models.SmallCNN()),
    "digits": (data.digits, models.MLP()),
}

TASKS = (*_IMAGE_TASKS, *language.CORPORA, "least-squares")


def make_task(
    name: str,
    *,
    workers: int,
    batch_size: int = 32,
    split: str | Split = "iid",
    alpha: float = 0.5,
    heterogeneity: float = 1.0,
    size: str = "0.5m",
    length: int = 64,
    seed: int = 0,
) -> Task:
    """The task of that name, shared out among ``workers``.

    ``batch_size`` is one worker's. ``split`` says how images or windows of text go to
    workers: a function or the name of one (:func:`~experiments.splits.find_split`,
    which uses ``alpha``); ``heterogeneity`` does so for least squares. Language models
    are of a ``size`` (:data:`~experiments.transformer.SIZES`) and read ``length``
    bytes. ``seed`` decides who has which examples and their order, never which are held
    out.

    Raises ``ValueError`` with the nearest names for an unknown task, split or size, and
    with both numbers where the examples are too few for the workers or for a batch;
    ``FileNotFoundError`` for data that are not installed, with what installs them.
    """
    lookup(dict.fromkeys(TASKS), name, "task")
    if name == "least-squares":
        return least_squares(
            workers=workers,
            batch_size=batch_size,
            seed=seed,
            heterogeneity=heterogeneity,
        )
    shared: Any = {
        "workers": workers,
        "batch_size": batch_size,
        "split": find_split(split, alpha=alpha) if isinstance(split, str) else split,
        "seed": seed,
    }
    if name in language.CORPORA:
        model = lookup(SIZES, size, "size of language model")
        load = language.CORPORA[name]
        return language.language_task(name, load(), model, length=length, **shared)
    load, model = _IMAGE_TASKS[name]
    return image_task(name, load(), model, **shared)


def _losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)


# Jitted, so that a loop which traces its step for each kind of step, for each method
# and for its bytes traces the model once.
@partial(jax.jit, static_argnums=0)
def _cross_entropy(model: nn.Module, params: PyTree, batch: data.Batch) -> jax.Array:
    logits = jnp.asarray(model.apply(params, batch.inputs))
    return _losses(logits, jnp.asarray(batch.labels)).mean()


@partial(jax.jit, static_argnums=0)
def _sums(model: nn.Module, params: PyTree, batch: data.Batch) -> dict[str, jax.Array]:
    logits = jnp.asarray(model.apply(params, batch.inputs))
    labels = jnp.asarray(batch.labels)
    return {
        "loss": _losses(logits, labels).sum(),
        "accuracy": (logits.argmax(-1) == labels).sum(),
    }


def _judge(
    model: nn.Module, params: PyTree, held_out: data.Batch, *, at_once: int = 1000
) -> dict[str, float]:
    # Parameters that come from a mesh would be evaluated once by each of its devices.
    params = jax.device_get(params)
    total = {"loss": 0.0, "accuracy": 0.0}
    size = len(held_out.labels)
    for start in range(0, size, at_once):
        part = data.Batch(*(array[start : start + at_once] for array in held_out))
        for metric, value in _sums(model, params, part).items():
            total[metric] += float(value) / size
    return total
