"""A leaf as it is stored, and the same leaf from it again.

Whatever kind of value a carry holds in a place, an array of JAX on some devices, random
keys, an array of NumPy or a number of Python's, a file holds one array of its bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .leaves import PyTree
from .manifest import NUMBERS, Leaf, Manifest, check_same, is_key, manifest


def bits(x: Any) -> Any:
    """The integers behind keys, and any other leaf as it is."""
    if not is_key(x):
        return x
    if isinstance(x, jax.Array):
        return jax.random.key_data(x)
    data = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)


def stored(x: Any) -> Any:
    """The bits of a leaf, in memory that no later step can touch."""
    x = bits(x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        # orbax returns when it has them on the host, which on a CPU is where they are.
        return jnp.copy(x) if jax.default_backend() == "cpu" else x
    return np.array(x)


def as_saved(name: str, saved: Manifest, like: PyTree) -> PyTree:
    """``like`` with leaves of the shapes that were saved, of NumPy and without memory.

    Raises ``ValueError`` where those are other leaves, whatever their shapes.
    """
    here = manifest(like)
    same = {path: leaf._replace(shape=[]) for path, leaf in saved.items()}
    check_same(name, same, {p: leaf._replace(shape=[]) for p, leaf in here.items()})

    def place(path, x):
        shape = tuple(saved[path].shape)
        if is_key(x):
            return jax.ShapeDtypeStruct(shape, x.dtype)
        return np.broadcast_to(np.zeros((), x.dtype), shape)

    leaves, structure = jax.tree.flatten(like)
    placed = [place(path, x) for path, x in zip(here, leaves, strict=True)]
    return jax.tree.unflatten(structure, placed)


def placed(value: Any, leaf: Leaf, place: Any) -> Any:
    """What was read, as the kind of value that is held at its place."""
    place = bits(place)
    if leaf.empty:
        value = np.zeros(place.shape, place.dtype)
    if type(place) in NUMBERS:
        return value.item()
    if isinstance(place, np.ndarray | np.generic):
        return value if isinstance(place, np.ndarray) else value[()]
    # An array that is not committed to a device must come back uncommitted: it goes
    # where the others are, and the compiled step takes it as before.
    sharding = place.sharding if getattr(place, "committed", True) else None
    if isinstance(value, np.ndarray):
        value = jax.device_put(value, sharding)
    if leaf.key:
        return jax.random.wrap_key_data(value, impl=leaf.key)
    if place.weak_type:  # which only a Python number has, and what it is set in
        weak = lambda x: jnp.full(x.shape, x.dtype.type(0).item()).at[...].set(x)
        value = jax.jit(weak, out_shardings=sharding)(value)
    return value
