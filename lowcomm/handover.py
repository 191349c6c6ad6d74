r"""What becomes of each part of a state when the number of workers changes.

Of K workers m stay, the others leave, and new ones come until there are K′. Whatever
differs between workers is mixed by one matrix, whose rows sum to 1 and whose columns
to K′/K, with nothing negative in it:

    who stays   x_i ← (m/K) x_i + (1/K) Σ x_j over those who leave
    who is new  x_i ← (1/K) Σ x_j over all there were

So four things hold at once. The mean over the workers stays: of parameters, momenta,
and of what is still to be said (an error that was fed back is 1/K′ of it now, and was
1/K). What is linear stays true: a memory's mean is the mean of the memories, a model is
its anchor less what was summed. What is positive stays positive, such as second
moments. And no convex measure of the memories grows, their mean square for one, which
is what error feedback has to keep small. If nobody leaves, who stays keeps its bits.

Numbers that are equal on all workers are copied, whatever they are. For which others a
mean makes sense is said type by type, in ``lowcomm.legacies``; where nothing is said,
and values differ, they are refused by the name of the type that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .leaves import PyTree
from .manifest import is_key


class Plan(NamedTuple):
    """Who stays of how many, and how many there will be."""

    before: int
    after: int
    stay: tuple[int, ...]  # numbers of old workers, in the order of their new ones

    @property
    def leave(self) -> list[int]:
        """The numbers of those who do not stay."""
        return [i for i in range(self.before) if i not in self.stay]


# From ``[K, …]`` to ``[K′, …]``, of a leaf that differs between workers.
Rule: TypeAlias = Callable[[np.ndarray, Plan], np.ndarray]


class Whole(NamedTuple):
    """A rule for a state all at once, whether its values differ or not."""

    make: Callable[[Any, Plan], Any]


# By the type of a state: one for all leaves in it, or one for each field.
Rules: TypeAlias = Mapping[type, Rule | Whole | Mapping[str, Rule]]


def mixed(x: np.ndarray, plan: Plan) -> np.ndarray:
    """By the matrix above, formed in float64; counts as ``counted``.

    Raises ``ValueError`` where finite numbers would not be any more.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return counted(x, plan)
    _refuse_broken(x, plan)
    complex_ = jnp.issubdtype(x.dtype, jnp.complexfloating)
    wide = np.complex128 if complex_ else np.float64
    total = lambda workers: sum((x[i].astype(wide) for i in workers), wide(0))
    out = np.empty((plan.after, *x.shape[1:]), x.dtype)
    out[len(plan.stay) :] = (total(range(plan.before)) / plan.before).astype(x.dtype)
    left = total(plan.leave)
    for place, i in enumerate(plan.stay):
        taken = (len(plan.stay) * x[i].astype(wide) + left) / plan.before
        out[place] = taken if plan.leave else x[i]
    return out


def _refuse_broken(x: np.ndarray, plan: Plan) -> None:
    """Raise where who leaves would make numbers of others infinite or NaN."""
    sound = np.isfinite(x[list(plan.stay)]).any(axis=0)
    for i in plan.leave:
        if (sound & ~np.isfinite(x[i])).any():
            raise ValueError(
                f"holds NaN or an infinity of worker {i}, which leaves, and all others "
                "would have a share of it: first put the values of one who stays in "
                f"their place, x.at[{i}].set(x[{plan.stay[0]}])"
            )


def counted(x: np.ndarray, plan: Plan) -> np.ndarray:
    """Who stays keeps its count; who is new is as far on as the furthest."""
    newest = np.max(x, axis=0, keepdims=True)
    new = np.repeat(newest, plan.after - len(plan.stay), axis=0)
    return np.concatenate([x[list(plan.stay)], new])


def begun(x: np.ndarray, plan: Plan) -> np.ndarray:
    """Who stays keeps its own; who is new begins with zeros."""
    new = np.zeros((plan.after - len(plan.stay), *x.shape[1:]), x.dtype)
    return np.concatenate([x[list(plan.stay)], new])


def worst(x: np.ndarray, plan: Plan) -> np.ndarray:
    """Who stays keeps its loss; who is new has the largest there is."""
    new = begun(x, plan)
    new[len(plan.stay) :] = np.finfo(x.dtype).max
    return new


def same(x: np.ndarray, plan: Plan) -> np.ndarray:
    """Nothing: these agree on all workers, or cannot be handed on."""
    raise ValueError(
        "must be the same on all workers and is not: groups of workers with models of "
        "their own cannot be resized, nor a run that is broken"
    )


def bound_to_graph(x: np.ndarray, plan: Plan) -> np.ndarray:
    """Nothing: what neighbours know of each other is of no use to others."""
    raise ValueError(
        "is what neighbours of the old graph have told each other, and in another "
        "graph others would have had to hear it: begin the state anew from the "
        "consensus of the parameters"
    )


def hand_over(
    tree: PyTree,
    plan: Plan,
    rule: Rule | None = None,
    *,
    rules: Rules,
    path: tuple = (),
    owner: type | None = None,
) -> PyTree:
    """``tree``, stacked for those there were, as NumPy arrays for those there will be.

    ``rule`` is for all leaves below; without one each type has its own. Keys come back
    as they are in JAX. Raises ``ValueError`` with path and type where values differ
    and no rule allows it.
    """
    by_field: Any = rules.get(type(tree), {}) if rule is None else {}
    if isinstance(by_field, Whole):
        return _about(path, type(tree), by_field.make, tree, plan)
    if not isinstance(by_field, Mapping):
        rule, by_field = by_field, {}
    if hasattr(tree, "_fields") or hasattr(type(tree), "__dataclass_fields__"):
        owner = type(tree)
    parts, structure = jax.tree_util.tree_flatten_with_path(
        tree, lambda x: x is not tree
    )
    if parts and parts[0][0] == ():
        return _about(path, owner, _leaf, tree, plan, rule, owner in rules)
    made = []
    for (key,), part in parts:
        own = rule or by_field.get(getattr(key, "name", ""))
        made.append(
            hand_over(part, plan, own, rules=rules, path=(*path, key), owner=owner)
        )
    return jax.tree.unflatten(structure, made)


def rows(x: Any) -> np.ndarray:
    """A stacked leaf as a NumPy array."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            "is held in parts by several processes: save a checkpoint, and go on from "
            "it with Checkpoints.restore_resized"
        )
    if not np.ndim(x):
        raise ValueError(f"is {x!r:.40}, and must be stacked, [K, ...]")
    return np.asarray(x)


def _leaf(leaf: Any, plan: Plan, rule: Rule | None, has_rules: bool) -> Any:
    if is_key(leaf):  # of which there is no mean
        data = _handed(rows(jax.random.key_data(leaf)), plan, None, False)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return _handed(rows(leaf), plan, rule, has_rules)


def _handed(x: np.ndarray, plan: Plan, rule: Rule | None, has_rules: bool) -> Any:
    if x.shape[0] != plan.before:
        raise ValueError(f"has shape {x.shape} and is not stacked for {plan.before}")
    if agree(x):
        return np.repeat(x[:1], plan.after, axis=0)
    if plan.stay == tuple(range(plan.after)) and plan.after == plan.before:
        return x
    if rule is None and plan.before == plan.after == len(plan.stay):
        return x[list(plan.stay)]  # others in a worker's place, but nobody's graph
    if rule is None:
        whole = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
        if not (has_rules and whole):
            raise ValueError(
                "differs between workers, and what becomes of it is not known: say it "
                "by type, as in rules={TheState: lowcomm.handover.mixed}"
            )
        rule = counted
    return rule(x, plan)


def agree(x: np.ndarray) -> bool:
    """Whether all workers hold the same bits."""
    if not x.size:
        return True
    raw = np.ascontiguousarray(x).view(np.uint8).reshape(x.shape[0], -1)
    return bool((raw == raw[0]).all())


def _about(path: tuple, owner: type | None, do: Callable, *args: Any) -> Any:
    try:
        return do(*args)
    except ValueError as problem:
        of = f" of {owner.__name__}" if owner is not None else ""
        where = jax.tree_util.keystr(path) or "(the tree)"
        raise ValueError(f"resize: {where}{of} {problem}.") from problem
