"""The model that workers stand for: exact at a sync, agreed at any step.

``params`` may miss the anchor by a rounding, since what an update adds is a difference.
Where the exact model is wanted, these two hand it out.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .exchange import mean
from .leaves import PyTree, is_inexact, map_leaves
from .parts import anchor_of, is_anchored, is_verb
from .spmd import Axis, workers_axis
from .sync import SelfClockedState


def apply_updates(params: PyTree, updates: PyTree, state: Any) -> PyTree:
    """``params + updates``, exactly the anchor where ``rounds`` has just adopted it.

    ``optax.apply_updates`` may miss the anchor by a rounding of the sum. Leaf by leaf,
    where the outermost ``rounds`` (with pull 1) adopted its anchor in this very
    update, this returns the anchor, so all workers hold the same bits. Integer,
    boolean and key leaves stay what they are. For one worker's trees, inside
    ``spread``, and for stacked ones outside.

    Raises:
        ValueError: if something other than ``optax.partition``, ``optax.masked``,
            ``optax.inject_hyperparams``, ``self_clocked`` or the end of an
            ``optax.chain`` encloses the ``rounds``: it may have changed the updates.

    Example:
        Where the model is small beside the step to it, the sum misses it.

        >>> from lowcomm import rounds, spread
        >>> tx = rounds(optax.sgd(1.0), optax.sgd(1.0))
        >>> def worker(x):
        ...     moves, state = tx.update(0 * x, tx.init(0 * x), x, step=0)
        ...     return optax.apply_updates(x, moves), apply_updates(x, moves, state)
        >>> plain, exact = spread(worker)(jnp.array([1e8, 8 - 1e8]))
        >>> print(abs(plain - 4) > 1, exact)
        [ True  True] [4. 4.]
    """
    owned = {}
    for rounds_state in _outermost(state, enclosed=True):
        anchor, _ = anchor_of(rounds_state)
        for path, a in jax.tree_util.tree_leaves_with_path(anchor):
            owned[path] = (rounds_state.synced, a)

    def apply(path, p, u):
        if not is_inexact(p):
            return p
        moved = jnp.asarray(p + u).astype(p.dtype)
        if path not in owned:
            return moved
        synced, a = owned[path]
        if jnp.ndim(synced):  # one for each worker of a stacked tree
            synced = jnp.expand_dims(synced, tuple(range(1, jnp.ndim(p))))
        return jnp.where(synced, a.astype(p.dtype), moved)

    return jax.tree_util.tree_map_with_path(apply, params, updates)


def consensus(state: Any, params: PyTree, *, axis: Axis | None = None) -> PyTree:
    """The model the workers stand for: evaluate and export this one.

    Leaf by leaf the anchor of the outermost ``rounds`` that owns it, else the mean of
    ``params`` over the workers, formed in float32; of methods for one worker (``gpa``,
    ``snoo``) the mean of each worker's model. Call it inside ``spread``: ``axis`` is
    all that its workers are spread over, unless given (``()`` for one worker without
    an axis). It reads and changes nothing of the schedule, so it may be called at any
    step. Sends the leaves that no anchor owns.

    Example:
        >>> from lowcomm import data_parallel, spread
        >>> worker = lambda x: consensus(data_parallel(optax.sgd(1.0)).init(x), x)
        >>> spread(worker)(jnp.array([1.0, 3.0]))
        Array([2., 2.], dtype=float32)
    """
    axis = workers_axis() if axis is None else axis
    agreed, apart = {}, {}
    for rounds_state in _outermost(state, enclosed=False):
        anchor, own = anchor_of(rounds_state)
        leaves = jax.tree_util.tree_leaves_with_path(anchor)
        (apart if own else agreed).update(leaves)
    read = lambda path, p: agreed[path].astype(p.dtype) if path in agreed else None
    anchors = jax.tree_util.tree_map_with_path(read, params)
    mine = jax.tree_util.tree_map_with_path(lambda path, p: apart.get(path, p), params)
    rest = map_leaves(lambda p, a: p if a is None else None, mine, anchors)
    means = mean(axis).update(rest, optax.EmptyState(), about="parameters")[0]
    pick = lambda p, a, m: m.astype(p.dtype) if a is None else a
    return map_leaves(pick, params, anchors, means)


def _outermost(state: Any, *, enclosed: bool) -> list[Any]:
    """The states of ``rounds`` that no other ``rounds`` encloses.

    Whatever ``is_anchored`` counts as one.
    With ``enclosed`` only wrappers that hand updates on unchanged may be around them.
    """
    if is_anchored(state):
        return [state]
    if is_verb(state):
        return []  # it moves what any rounds inside has agreed on
    if isinstance(state, SelfClockedState):
        return _outermost(state.clocked, enclosed=enclosed)
    if isinstance(state, optax.MaskedState | optax.InjectStatefulHyperparamsState):
        return _outermost(state.inner_state, enclosed=enclosed)
    if enclosed and type(state) in (tuple, OrderedDict) and state:
        # A chain: what its last part returns is what the chain returns. The order of
        # a plain dict is not that of a chain, since JAX sorts its keys.
        *before, last = state if isinstance(state, tuple) else state.values()
        _outermost(before, enclosed=True)
        return _outermost(last, enclosed=True)
    if isinstance(state, optax.PartitionState):
        parts = state.inner_states.values()
        return [s for part in parts for s in _outermost(part, enclosed=enclosed)]
    ends = lambda s: is_anchored(s) or is_verb(s)
    found = list(filter(is_anchored, jax.tree.leaves(state, is_leaf=ends)))
    if found and enclosed:
        raise ValueError(
            "something follows or encloses rounds, and what it does to the updates is "
            "unknown, so that the parameters would leave the anchor: put clips, "
            "schedules, learning rates, MultiSteps and guards inside its inner "
            "optimizer."
        )
    return found
