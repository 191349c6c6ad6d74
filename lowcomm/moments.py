"""What happens to the inner optimizer's moments when workers agree on a model.

    keep      nothing: each worker goes on with its own
    average   parameter-like leaves are averaged over the workers
    reset     parameter-like leaves return to what init makes of the new model

A leaf is parameter-like if optax says so (``optax.tree_map_params``): Adam's moments,
momentum buffers, iterate averages. A step ``count`` is reset only together with the
moments it belongs to, those in the same NamedTuple (Adam's bias correction), so that
learning-rate schedules and injected hyperparameters go on. Counts are never averaged,
and gradients that ``optax.MultiSteps`` is still accumulating are no moments.

``averaged_moments`` gives moments schedules of their own, whatever the parameters do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from . import uniform
from .exchange import mean
from .leaves import PyTree, takes_part
from .parts import expect
from .spmd import AXIS, Axis, vary
from .triggers import Trigger, clock

POLICIES = ("keep", "average", "reset")


class AveragedMomentsState(NamedTuple):
    """State of ``averaged_moments``."""

    optimizer: Any
    moment_triggers: tuple  # one for each field, in the order of the names
    moment_ages: tuple[jax.Array, ...]  # int32, steps since each was averaged


def averaged_moments(
    inner: optax.GradientTransformation,
    when: Mapping[str, int | Trigger],
    *,
    axis: Axis = AXIS,
) -> optax.GradientTransformationExtraArgs:
    r"""An optimizer whose moments are averaged now and then, each on its own clock.

    .. math::
        \text{after the inner update, if the trigger of } m \text{ fires:} \quad
        m_i \leftarrow \tfrac1K \sum_j m_j

    ``when`` maps the name of a field of the inner state, such as ``"mu"`` and
    ``"nu"`` of Adam or ``"trace"`` of momentum, to a period or a trigger. Fields of
    one name are averaged wherever they are. Sends the field's size, in float32 or
    wider, on the steps that fire. Integers, such as step counts, are never averaged.

    Raises:
        ValueError: in ``init``, a name that no field with floating-point arrays has;
            at trace, no ``step``.

    Example:
        Two workers with gradients 1 and 3; the momentum is averaged every second step.

        >>> from lowcomm import spread
        >>> tx = averaged_moments(optax.sgd(1.0, momentum=0.5), {"trace": 2})
        >>> def worker(g):
        ...     state, seen = tx.init(g), []
        ...     for t in range(3):
        ...         _, state = tx.update(g, state, g, step=t)
        ...         seen.append(optax.tree.get(state, "trace"))
        ...     return jnp.stack(seen)
        >>> print(spread(worker)(jnp.array([1.0, 3.0])))
        [[1.  3.  2.5]
         [3.  3.  4.5]]
    """
    expect(optax.GradientTransformation, inner=inner)
    inner = optax.with_extra_args_support(inner)
    clocks = {name: clock(when[name]) for name in sorted(when)}
    expect(Trigger, **clocks)

    def together(chosen, since):
        means, _ = mean(axis).update(chosen, (), about="parameters")
        return means, jnp.zeros_like(since)

    def init(params):
        optimizer = inner.init(params)
        there = _fields(optimizer)
        for name in clocks:
            if name not in there:
                raise ValueError(
                    f"no field {name!r} with floating-point arrays is in the state of "
                    "the inner optimizer; there are "
                    f"{', '.join(sorted(there)) or 'none'}."
                )
        state = AveragedMomentsState(
            optimizer,
            tuple(trigger.init(params) for trigger in clocks.values()),
            tuple(jnp.zeros((), jnp.int32) for _ in clocks),
        )
        return vary(state, axis)

    def update(updates, state, params=None, *, step=None, **extra):
        moves, optimizer = inner.update(
            updates, state.optimizer, params, step=step, **extra
        )
        optimizer = vary(optimizer, axis)
        triggers, ages = [], []
        parts = zip(
            clocks.items(), state.moment_triggers, state.moment_ages, strict=True
        )
        for (name, trigger), trigger_state, age in parts:
            fire, trigger_state = trigger.fire(
                trigger_state,
                step=step,
                since=age + 1,
                drift=None,
                grads=updates,
                axis=axis,
                **extra,
            )
            chosen, put_back = _chosen(optimizer, name)
            chosen, age = uniform.cond(
                fire, together, lambda *same: same, chosen, age + 1, axis=axis
            )
            optimizer = put_back(chosen)
            triggers.append(trigger_state)
            ages.append(age)
        return moves, AveragedMomentsState(optimizer, tuple(triggers), tuple(ages))

    return optax.GradientTransformationExtraArgs(init, update)


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


def _chosen(state: Any, name: str) -> tuple[list, Callable[[list], Any]]:
    """The arrays of the fields of one name, and how others take their places."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    own = [name in _names(path) and takes_part(x) for path, x in leaves]

    def put_back(chosen):
        new, parts = iter(chosen), zip(leaves, own, strict=True)
        return treedef.unflatten([next(new) if mine else x for (_, x), mine in parts])

    return [x for (_, x), mine in zip(leaves, own, strict=True) if mine], put_back


def _names(path: tuple) -> set[str]:
    """The fields on the way to a leaf of a state."""
    return {k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)}


def _fields(state: Any) -> set[str]:
    """The fields of a state that hold floating-point arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {name for path, x in leaves if takes_part(x) for name in _names(path)}
