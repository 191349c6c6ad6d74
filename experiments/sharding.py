"""Workers that are groups of devices: how the models of the tasks are divided.

A worker's devices form a mesh of their own: ``fsdp``, along which parameters and the
examples of a batch are divided, and ``tensor``, along which matrix products are. The
compiler divides activations, and gathers parameters where it needs them, accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import lowcomm as lc
from lowcomm.meshes import path_name

from .catalogue import CATALOGUE
from .task import PyTree


def group(mesh: Mesh | None) -> dict[str, int]:
    """The axes that the devices of a worker form, with their sizes."""
    return {} if mesh is None else {n: k for n, k in mesh.shape.items() if n != lc.AXIS}


def specs(params: PyTree, sizes: Mapping[str, int]) -> PyTree:
    """A ``PartitionSpec`` for every parameter, for ``lc.stack`` and ``lc.sharded``.

    ``sizes`` are those of the axes a worker's devices form, such as ``{"fsdp": 4,
    "tensor": 2}``; a mesh's ``shape`` will do. Shapes will do for parameters.

    Example:
        >>> shape = lambda *n: jax.ShapeDtypeStruct(n, "float32")
        >>> params = {"Dense_0": {"kernel": shape(128, 384), "bias": shape(384)}}
        >>> tuple(specs(params, {"fsdp": 4, "tensor": 2})["Dense_0"]["kernel"])
        ('fsdp', 'tensor')
    """
    one = lambda path, x: leaf_spec(path_name(path), x.shape, sizes)
    return jax.tree_util.tree_map_with_path(one, params)


def leaf_spec(path: str, shape: Sequence[int], sizes: Mapping[str, int]) -> P:
    """How one parameter is divided, by its path and shape.

    ``tensor`` takes the longer side of a kernel, as in Megatron-LM: the columns of what
    makes queries, keys and values, of the first layer of an MLP and of the head, the
    rows of what comes back to the width. ``fsdp`` takes the longest other side. What
    does not divide by a size is not divided by that axis, and a vector, or a side that
    is the only one to divide, is divided by both. So is the width of an embedding: over
    a look-up in a divided vocabulary XLA may end the process.

    References:
        Shoeybi et al., `Megatron-LM <https://arxiv.org/abs/1909.08053>`_, 2019,
        section 3.
    """
    left = list(shape)
    axes: list[tuple[str, ...]] = [()] * len(shape)
    parts = path.split("/")
    columns_first = "head" in parts
    sides = range(len(shape))[-1:] if "embedding" in parts else range(len(shape))

    def give(name: str, places: Sequence[int]) -> bool:
        size = sizes.get(name, 1)
        fit = [i for i in places if left[i] % size == 0 and left[i] >= size]
        if size == 1 or not fit:
            return size == 1
        side = lambda i: (i == len(shape) - 1 and columns_first, left[i], -i)
        best = max(fit, key=side)
        axes[best] = (name, *axes[best])
        left[best] //= size
        return True

    give("tensor", sides)
    if not give("fsdp", [i for i in sides if not axes[i]]):
        give("fsdp", sides)
    return P(*[a[0] if len(a) == 1 else a or None for a in axes])


def sharded(
    name: str, layout: PyTree, **setting: Any
) -> optax.GradientTransformationExtraArgs:
    """A method of the catalogue for workers whose devices share the parameters.

    ``layout`` is what ``specs`` returns, ``setting`` what ``Method.make`` takes:
    ``workers=``, ``steps=``, ``learning_rate=``, ``inner=``, ``period=`` and so on. On
    a mesh of the workers alone it is the method itself. See ``lc.sharded``.
    """
    return lc.sharded(CATALOGUE[name].make(**setting), layout)


def divided(
    loss: Callable[[PyTree, PyTree], jax.Array], sizes: Mapping[str, int]
) -> Callable[[PyTree, PyTree], jax.Array]:
    """``loss``, whose examples the devices of a worker share out along ``fsdp``.

    Then what is gathered along ``fsdp`` is parameters, and no activations. Beside a
    ``tensor`` axis examples are left to the compiler: where both are divided XLA ends
    the process over the look-up of labels (a check in ``spmd_partitioner_util.cc``).

    What an embedding returns is divided by examples as well: its width is divided, and
    a compiler for 256 chips of a TPU slice went on dividing widths, and summed
    activations over the slice, 844 MB a step of the 3m model instead of 53.
    """
    parts = sizes.get("fsdp", 1)
    if parts == 1 or sizes.get("tensor", 1) > 1:
        return loss

    def share(x):
        fits = x.ndim and x.shape[0] % parts == 0
        return lax.with_sharding_constraint(x, P("fsdp")) if fits else x

    def by_example(call, args, kwargs, context):
        returned = call(*args, **kwargs)
        if isinstance(context.module, nn.Embed) and context.method_name == "__call__":
            return share(returned)
        return returned

    def shared(params, batch):
        with nn.intercept_methods(by_example):
            return loss(params, jax.tree.map(share, batch))

    return shared
