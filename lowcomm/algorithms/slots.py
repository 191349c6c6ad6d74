"""Methods that average each layer in time slots of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import uniform
from ..exchange import mean
from ..leaves import PyTree, add, movable, precise, subtract, takes_part
from ..parts import expect
from ..spmd import AXIS, Axis, vary
from ..sync import Talking, Transformation, enter, leave, propose

# Of each slot the layers, as prefixes of paths; or what makes one of the leaves' paths.
Table = Sequence[Sequence[str]]
Slots = Table | Callable[[list[str]], Table]


class SlotsState(NamedTuple):
    """State of ``partial_local_sgd`` and ``dreamddp``."""

    inner: Any


def partial_local_sgd(
    inner: Transformation, slots: Slots, *, axis: Axis = AXIS
) -> Talking:
    r"""Partial local SGD: each layer is averaged in slots of its own.

    .. math::
        x_{i,\ell} \leftarrow x_{i,\ell} + \text{inner}(g_i)_\ell, \qquad
        \text{if } t \bmod H \in S_\ell: \quad
        x_{i,\ell} \leftarrow \tfrac1K \sum_j x_{j,\ell}

    ``slots`` is a table: of each of the ``H`` slots, the layers that are averaged after
    its step, as prefixes of paths (``"block_0"`` is ``block_0/dense/kernel`` and all
    else there; ``""`` is everything); or a function from the paths of all leaves that
    travel, in the tree's order, to such a table. Tied weights are one leaf and have one
    place. All layers in the last slot is local SGD. Sends in each slot its layers, so
    that no step need send all. State: the inner optimizer's, which stays local.

    Raises:
        ValueError: a table without slots; in ``init`` and at trace, a leaf that is in
            no slot.

    Example:
        >>> from lowcomm import spread
        >>> tx = partial_local_sgd(optax.sgd(1.0), [["a"], ["b"]])
        >>> def worker(g):
        ...     x = {"a": 0 * g, "b": 0 * g}
        ...     state = tx.init(x)
        ...     for t in range(2):
        ...         moves, state = tx.update({"a": g, "b": g}, state, x, step=t)
        ...         x = optax.apply_updates(x, moves)
        ...     return x
        >>> spread(worker)(jnp.array([1.0, 3.0]))
        {'a': Array([-3., -5.], dtype=float32), 'b': Array([-4., -4.], dtype=float32)}

    References:
        Tang et al., `DreamDDP: Accelerating Data Parallel Distributed LLM Training with
        Layer-wise Scheduled Partial Synchronization
        <https://arxiv.org/abs/2502.11058>`_, 2025.
    """

    def meet(p, move, together):
        return subtract(together(add(p, move)), p)

    return _slotted("partial_local_sgd", inner, slots, meet, axis)


def dreamddp(inner: Transformation, slots: Slots, *, axis: Axis = AXIS) -> Talking:
    r"""DreamDDP: layers are averaged in slots of their own, before the step.

    .. math::
        x_{i,\ell} \leftarrow \text{inner}(g_i)_\ell +
        \begin{cases} \tfrac1K \sum_j x_{j,\ell} & t \bmod H \in S_\ell \\
        x_{i,\ell} & \text{otherwise} \end{cases}

    The gradients are those at a worker's own parameters. What travels is known before
    the step, so that it may hide under the backward pass:
    ``lowcomm.planning.layers`` finds the ``slots`` that do, written as for
    ``partial_local_sgd``. All layers in every slot is combine-then-adapt D-PSGD on a
    complete graph; all in one slot is not local SGD. Sends in each slot its layers.
    State: the inner optimizer's, which stays local.

    Raises:
        ValueError: a table without slots; in ``init`` and at trace, a leaf that is in
            no slot.

    Note:
        Schedules are optimal among consecutive blocks, not globally. The form before
        the update is that of the released code. Whether transfers hide is up to the
        compiler; the order of layers is not enforced.

    Example:
        What is averaged are the parameters before the step.

        >>> from lowcomm import spread
        >>> tx = dreamddp(optax.sgd(1.0), [[""], []])
        >>> def worker(x, g):
        ...     state, path = tx.init(x), []
        ...     for t in range(3):
        ...         moves, state = tx.update(g, state, x, step=t)
        ...         x = x + moves
        ...         path.append(x)
        ...     return jnp.stack(path)
        >>> print(spread(worker)(jnp.zeros(2), jnp.array([1.0, 3.0])))
        [[-1. -2. -5.]
         [-3. -6. -7.]]

    References:
        Tang et al., `DreamDDP: Accelerating Data Parallel Distributed LLM Training with
        Layer-wise Scheduled Partial Synchronization
        <https://arxiv.org/abs/2502.11058>`_, 2025.
    """

    def meet(p, move, together):
        return subtract(together(p), p) + precise(move)

    return _slotted("dreamddp", inner, slots, meet, axis)


def _slotted(
    name: str, inner: Transformation, slots: Slots, meet: Callable, axis: Axis
) -> Talking:
    """Local steps; ``meet(p, move, together)`` is a leaf's update in its slots."""
    expect(optax.GradientTransformation, inner=inner)
    inner = optax.with_extra_args_support(inner)
    if not callable(slots):
        _prefixes(name, slots)  # raises unless it is a table
    together = lambda x: mean(axis).update(x, (), about="parameters", within=axis)[0]

    def init(params):
        params = movable(params)
        _table(name, slots, params)  # raises unless every leaf is in it
        return vary(SlotsState(inner.init(params)), axis)

    def update(updates, state, params=None, *, step=None, **extra):
        whole, grads, params = enter(updates, params, step, axis)
        table = _table(name, slots, params)
        kinds = list(dict.fromkeys(table))  # slots that are alike are one program
        which = [kinds.index(block) for block in table]
        moves, kept = propose(inner, grads, state.inner, params, step=step, **extra)

        def kind_of(t):
            if isinstance(t, int):
                return which[t % len(which)]
            return jnp.array(which, jnp.int32)[t % len(which)]

        def slot(block, moves):
            def leaf(path, p, move):
                due = takes_part(p) and _within(_spell(path), block)
                return meet(p, move, together) if due else precise(move)

            return jax.tree_util.tree_map_with_path(leaf, params, moves)

        branches = [lambda moves, block=block: slot(block, moves) for block in kinds]
        now = uniform.choose(kind_of, uniform.now(step, axis))
        moves = uniform.switch(now, branches, moves, axis=axis)
        return leave(moves, whole), vary(SlotsState(kept), axis)

    return Talking(init, update)


def _table(name: str, slots: Slots, params: PyTree) -> list[frozenset[str]]:
    """The table for these parameters; raises unless every leaf is in some slot."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [_spell(path) for path, x in leaves if takes_part(x)]
    table = _prefixes(name, slots(paths) if callable(slots) else slots)
    held = frozenset().union(*table)
    for path in paths:
        if not _within(path, held):
            raise ValueError(
                f"leaf {path or '(the tree)'} is in no slot of {name}, so it would "
                f"never be averaged; the slots hold {sorted(held)}."
            )
    return table


def _prefixes(name: str, table: Table) -> list[frozenset[str]]:
    blocks = list(table)
    if not blocks:
        raise ValueError(f"{name} needs at least one slot.")
    for number, block in enumerate(blocks):
        if isinstance(block, str) or not all(isinstance(part, str) for part in block):
            raise ValueError(
                f"slot {number} of {name} is {block!r}: give a list of prefixes of "
                'paths, such as ["block_0", "block_1/dense"].'
            )
    return [frozenset(part.strip("/") for part in block) for block in blocks]


def _spell(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _within(path: str, block: frozenset[str]) -> bool:
    """Whether a prefix among ``block`` holds the leaf."""
    return any(part == "" or f"{path}/".startswith(f"{part}/") for part in block)
