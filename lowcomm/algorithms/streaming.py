"""DiLoCo whose parts travel at different times, and while the training goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import optax

from .. import uniform
from ..anchor import rounds
from ..leaves import PyTree, is_inexact
from ..spmd import AXIS, Axis
from ..sync import Talking, Transformation
from ..triggers import every
from .outer import nesterov


def streaming_diloco(
    inner: Transformation,
    *,
    period: int = 100,
    fragments: int = 4,
    delay: int = 0,
    mixing: float = 0.5,
    outer_lr: float = 0.4,
    momentum: float = 0.9,
    fragment_of: Callable[[str], int] | None = None,
    exchange: Talking | None = None,
    axis: Axis = AXIS,
) -> Talking:
    r"""Streaming DiLoCo: fragments of the model synced in turn, and in the background.

    .. math::
        \text{every } H \text{ steps, at its own offset, for each fragment: }
        \Delta = \tfrac1K \sum_i (a - x_i); \\
        \tau \text{ steps later: } v \leftarrow \mu v + \Delta, \quad
        a \leftarrow a - \eta (\Delta + \mu v), \quad
        x_i \leftarrow \alpha x_i + (1 - \alpha) a

    ``H`` is ``period``, ``τ`` is ``delay``, ``α`` is ``mixing``, ``η`` is
    ``outer_lr``, ``μ`` is ``momentum``. Fragment f of P = ``fragments`` is sent after
    the steps t with ``t + 1 ≡ ⌊f H / P⌋ (mod H)``, so its first round is shorter.
    Sends in H steps what ``diloco`` sends, but 1/P of it at a time, and each of these
    may travel during τ steps. With ``exchange=`` it is less. Parameters differ
    between workers after a sync where α > 0; their anchors do not.

    Layer ℓ belongs to fragment ℓ mod P. Layers are the first keys at which paths
    differ, in natural order (``block_10`` after ``block_9``). ``fragment_of`` maps a
    leaf's path, such as ``"block_3/attention/kernel"``, to a fragment instead.
    Half a dozen fragments are enough: the bookkeeping of 24 makes silent steps slow.
    The inner optimizer sees the whole tree (a clip its global norm), not the anchor.

    Note:
        ``η``, ``μ``, ``α`` and ``H`` are recalled, not read in the paper. The paper
        also sends 4-bit floats: that is an ``exchange``.

    Raises:
        ValueError: what ``rounds`` and ``every`` refuse, mixing outside [0, 1],
            fragments < 1; in ``init``, more fragments than layers, or a fragment_of
            that leaves its range.

    Example:
        How far apart two workers are in two layers that take turns.

        >>> import jax.numpy as jnp
        >>> from lowcomm import spread
        >>> tx = streaming_diloco(optax.sgd(1.0), period=4, fragments=2, mixing=0.0)
        >>> def worker(g):
        ...     x = {"a": 0 * g, "b": 0 * g}
        ...     state, path = tx.init(x), []
        ...     for t in range(4):
        ...         moves, state = tx.update({"a": g, "b": g}, state, x, step=t)
        ...         x = optax.apply_updates(x, moves)
        ...         path.append([x["a"], x["b"]])
        ...     return jnp.array(path)
        >>> path = spread(worker)(jnp.array([1.0, 3.0]))
        >>> print(path[0] - path[1])
        [[2. 2.]
         [4. 0.]
         [6. 2.]
         [0. 4.]]

    References:
        Douillard et al., `Streaming DiLoCo with overlapping communication
        <https://arxiv.org/abs/2501.18512>`_, 2025.
    """
    every(period)  # raises unless it is a period
    uniform.whole(fragments=fragments)
    if fragments < 1:
        raise ValueError(f"fragments {fragments} is below 1 (1 is the whole model).")
    if not 0 <= mixing <= 1:
        raise ValueError(f"mixing {mixing} is outside [0, 1]; 0 adopts the anchor.")

    def part(fragment: int) -> Talking:
        return rounds(
            # Updates arrive ready made, from one inner optimizer for all fragments.
            optax.identity(),
            nesterov(outer_lr, momentum),
            exchange=exchange,
            when=every(period, offset=fragment * period // fragments),
            pull=1 - mixing,
            delay=delay,
            axis=axis,
        )

    def labels(tree: PyTree) -> PyTree:
        return fragments_of(tree, fragments, fragment_of)

    moving = lambda tree: jax.tree.map(is_inexact, tree)
    parts: dict[Any, Talking] = {
        fragment: part(fragment) for fragment in range(fragments)
    }
    return optax.chain(optax.masked(inner, moving), optax.partition(parts, labels))


def fragments_of(
    tree: PyTree, fragments: int, fragment_of: Callable[[str], int] | None = None
) -> PyTree:
    """The number of its fragment for each leaf; see ``streaming_diloco``."""
    spell = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    if fragment_of is not None:
        found = [fragment_of(spell(path)) for path, _ in paths]
        for (path, _), fragment in zip(paths, found, strict=True):
            if fragment not in range(fragments):
                raise ValueError(
                    f"fragment_of({spell(path)!r}) is {fragment!r}, and there are "
                    f"the fragments 0 to {fragments - 1}."
                )
        return treedef.unflatten(found)
    keys = [tuple(spell((key,)) for key in path) for path, _ in paths]
    shared = 0
    while keys and len({key[: shared + 1] for key in keys}) == 1 < len(keys):
        shared += 1
    natural = lambda key: [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in re.split(r"(\d+)", key)
    ]
    own = [key[shared] if len(key) > shared else "" for key in keys]
    layers = sorted(set(own), key=natural)
    if len(layers) < fragments and keys:
        raise ValueError(
            f"{fragments} fragments of {len(layers)} layers ({', '.join(layers)}): "
            "take fewer, or say by fragment_of= which leaf belongs where."
        )
    return treedef.unflatten([layers.index(layer) % fragments for layer in own])
