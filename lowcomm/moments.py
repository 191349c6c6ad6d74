"""What happens to the inner optimizer's moments when workers agree on a model.

    keep      nothing: each worker goes on with its own
    average   parameter-like leaves are averaged over the workers
    reset     parameter-like leaves return to what init makes of the new model

A leaf is parameter-like if optax says so (``optax.tree_map_params``): Adam's moments,
momentum buffers, iterate averages. A step ``count`` is reset only together with the
moments it belongs to, those in the same NamedTuple (Adam's bias correction), so that
learning-rate schedules and injected hyperparameters go on. Counts are never averaged,
and gradients that ``optax.MultiSteps`` is still accumulating are no moments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from .leaves import PyTree, takes_part

POLICIES = ("keep", "average", "reset")


def realign(
    policy: str, inner: optax.GradientTransformation, mean: Callable[[PyTree], PyTree]
) -> Callable[[Any, PyTree], Any]:
    """``(inner_state, params) -> inner_state`` at a sync, for one of the policies.

    ``mean`` averages a tree over the workers; ``params`` is the model they go on from.
    """
    if policy not in POLICIES:
        raise ValueError(f"moments {policy!r}: choose one of {', '.join(POLICIES)}.")

    def keep(state, params):
        return state

    def average(state, params):
        own = _parameter_like(inner, state)
        leaves, treedef = jax.tree.flatten(state)
        chosen = [x if is_own else None for x, is_own in zip(leaves, own, strict=True)]
        means = mean([x if takes_part(x) else None for x in chosen])
        parts = zip(leaves, means, strict=True)
        return jax.tree.unflatten(treedef, [x if m is None else m for x, m in parts])

    def reset(state, params):
        own = jax.tree.unflatten(
            jax.tree.structure(state), _parameter_like(inner, state)
        )
        own = _with_counts(own, jax.tree.structure(params))
        return jax.tree.map(
            lambda x, new, is_own: new.astype(x.dtype) if is_own else x,
            state,
            inner.init(params),
            own,
        )

    return {"keep": keep, "average": average, "reset": reset}[policy]


def _parameter_like(inner: optax.GradientTransformation, state: Any) -> list[bool]:
    """For each leaf of ``state``, in order, whether it belongs to a parameter."""
    marks = optax.tree_utils.tree_map_params(
        inner, lambda _: True, state, transform_non_params=lambda _: False
    )
    return jax.tree.leaves(marks)


def _with_counts(marks: Any, params: Any) -> Any:
    """Also mark the ``count`` of each NamedTuple that directly holds moments.

    A field holds moments if all its leaves are marked and it is shaped like
    ``params`` or, masked, at least contains no other transformation's state.
    """

    def holds_moments(part):
        mine = jax.tree.leaves(part)
        alone = not any(map(_is_state, jax.tree.leaves(part, is_leaf=_is_state)))
        return mine and all(mine) and (alone or jax.tree.structure(part) == params)

    if _is_state(marks):
        fields = marks._asdict()
        if isinstance(marks, optax.MultiStepsState):
            fields["acc_grads"] = jax.tree.map(lambda _: False, fields["acc_grads"])
        if fields.get("count") is False and any(map(holds_moments, fields.values())):
            fields["count"] = True
        return type(marks)(**{k: _with_counts(v, params) for k, v in fields.items()})
    if isinstance(marks, dict):
        return {key: _with_counts(part, params) for key, part in marks.items()}
    if isinstance(marks, tuple | list) and not isinstance(marks, optax.MaskedNode):
        return type(marks)(_with_counts(part, params) for part in marks)
    return marks


def _is_state(x: Any) -> bool:
    is_named = isinstance(x, tuple) and hasattr(x, "_asdict")
    return is_named and not isinstance(x, optax.MaskedNode)
