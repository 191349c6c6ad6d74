r"""The pseudo-gradient penalty of EDiT: a mean that mistrusts unusual displacements.

Layer by layer, of the displacements that workers bring to a sync:

    1. anomalies are left out      norms far above a worker's own history, or not finite
    2. the rest are weighted       by softmax(−norm / T)
    3. the combination is clipped  to a norm of φ

Where nothing is left of a layer, nothing can be said of it, and ``penalized_mean`` says
NaN. ``roll_back`` is what makes an outer optimizer understand: it stays where it is, in
that layer, and so does its momentum. The cut is there because ``rounds`` hands to its
outer optimizer what was heard and nothing else, so the news must be in what was heard;
and a zero would be no news: outer momentum goes on moving the model through zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .exchange import Exchange, admit
from .leaves import PyTree, exchanged, map_exchanged, map_leaves, precise, takes_part
from .parts import expect
from .spmd import (
    AXIS,
    Axis,
    axis_size,
    names,
    tracks_variance,
    vary,
    varying_axes,
    worker_index,
)
from .transport import gather, reduce_sum

# Norms of one size differ by roundings, and a spread below these is none.
_ROUNDINGS = 2.0**-20


class PenaltyState(NamedTuple):
    """State of ``penalized_mean``, of this worker: one entry for each layer."""

    norm_mean: jax.Array  # [layers] float32, of the norms so far, exponentially
    norm_variance: jax.Array  # [layers] float32
    norms_seen: jax.Array  # [layers] int32, how many norms there are in the two
    scores: jax.Array  # [window, layers] float32, z of the last norms, newest first
    weight: jax.Array  # [layers] float32, at the last sync; 0 where it was left out


def module_of(path: str) -> str:
    """The module that holds a leaf: ``"block_0/dense"`` of ``"block_0/dense/bias"``."""
    return path.rpartition("/")[0] or path


def penalized_mean(
    axis: Axis = AXIS,
    *,
    layers: Callable[[str], Any] = module_of,
    temperature: float = 1.0,
    clip: float = math.inf,
    threshold: float = 3.0,
    warmup: int = 120,
    smoothing: float = 0.02,
    window: int = 100,
    shards: Axis | None = None,
) -> Exchange:
    r"""The mean of displacements, layer by layer, without and against outliers.

    .. math::
        z_j &= (n_j - \mu_j) / \sigma_j, \qquad n_j = \lVert \Delta_j \rVert, \qquad
        j \text{ is left out if } z_j > z_{\max} \max(1, \text{std of recent } z_j) \\
        \bar\Delta &= \sum_j w_j \Delta_j, \qquad
        w_j = e^{-n_j/T} \big/ \sum_k e^{-n_k/T}, \qquad
        \bar\Delta \leftarrow \bar\Delta
        \min\!\big(1, \varphi / (\lVert \bar\Delta \rVert + 10^{-6})\big)

    ``T`` is ``temperature``, in the units of the norms: it is not scale-free, and a
    small one lets only the smallest displacements pass. ``φ`` is ``clip`` and
    ``z_max`` is ``threshold``; infinity turns either off. ``μ`` and ``σ²`` follow a
    worker's own norms at the rate ``smoothing``; the first ``warmup`` norms are only
    watched. What was left out does not enter them, so a norm that has jumped for good
    is left out for good: mind a learning rate that rises after the warm-up. A
    displacement that is not finite is left out at any time.

    A layer is what ``layers`` maps to one label, from the path of a leaf
    (``"block_0/dense/kernel"``). Unless given it is the module that holds the leaf, so
    kernel and bias of a Dense belong together; for whole blocks pass
    ``lambda path: path.split("/")[0]``, for single arrays ``lambda path: path``.

    Where every worker is left out of a layer, what is heard of it is NaN: put the outer
    optimizer into ``roll_back``. For ``rounds``; the result is the same, bit for bit,
    on all workers. Sends every leaf once by an all-reduce, and one float32 a layer, all
    in one gather.

    ``shards`` names the axis along which each worker's leaves are divided by hand; the
    squared norms of the parts are summed along it. Where the compiler divides them, as
    on a mesh of workers × fsdp, norms are of whole leaves and it stays None.

    Raises:
        ValueError: an option out of its range; at trace, anything but displacements, a
            leaf that is known not to be divided along ``shards``.

    Note:
        Initialization of the detector, masking and granularity follow this
        implementation, not the released code: the first norm starts the mean, σ is at
        least what roundings of it are, what is left out has weight 0 and never enters
        the detector, and weights sum to 1 over the rest. The length of the window is
        ours. The order of the three stages is recalled, not read.

    Example:
        Norms 1 and 1 + ln 9 weigh 0.9 and 0.1, and NaN weighs nothing.

        >>> from lowcomm import spread
        >>> tx = penalized_mean(layers=lambda path: path)
        >>> def worker(d):
        ...     return tx.update(d, tx.init(d), about="displacements")[0]
        >>> far = 1 + jnp.log(9.0)
        >>> print(spread(worker)(jnp.array([1.0, far, jnp.nan])).round(4))
        [1.2197 1.2197 1.2197]

    References:
        Cheng et al., `EDiT: A Local-SGD-Based Efficient Distributed Training Method for
        Large Language Models <https://arxiv.org/abs/2412.07210>`_, 2025.
    """
    _check(temperature, clip, threshold, warmup, smoothing, window)

    def init(params):
        n = len(_layers(params, layers)[1])
        zeros = lambda *shape, dtype=jnp.float32: jnp.zeros((*shape, n), dtype)
        state = PenaltyState(
            zeros(), zeros(), zeros(dtype=jnp.int32), zeros(window), zeros()
        )
        return vary(state, names(axis) + names(shards or ()))

    def update(updates, state, params=None, *, about="gradients", within=None, **extra):
        admit(
            updates,
            "penalized_mean",
            axis=axis,
            about=about,
            within=within,
            takes=("displacements",),
            instead="It is an exchange for rounds.",
        )
        if shards is not None:
            _check_divided(updates, shards)
        layer_of, labels = _layers(updates, layers)
        if len(labels) != state.norms_seen.size:
            raise ValueError(
                f"penalized_mean keeps numbers for {state.norms_seen.size} layers, and "
                f"here are {len(labels)}: call init with the new tree."
            )

        def norms(tree):
            squares = [jnp.float32(0)] * len(labels)
            for i, x in zip(layer_of, _exchanged(tree), strict=True):
                squares[i] += jnp.sum(jnp.square(jnp.abs(precise(x))))
            total = jnp.array(squares, jnp.float32)
            return jnp.sqrt(total if shards is None else reduce_sum(total, shards))

        def each(f, tree, *per_layer):
            numbers = iter(layer_of)

            def leaf(x):
                i = next(numbers)
                return f(x, *(values[i] for values in per_layer))

            return map_exchanged(leaf, tree)

        norm = norms(updates)
        z = _score(norm, state)
        late = (state.norms_seen >= warmup) & (z > threshold * _unrest(state))
        bad = late | ~jnp.isfinite(norm)
        # Whoever is left out reports an infinite norm, and softmax gives it nothing.
        heard = gather(jnp.where(bad, jnp.inf, norm), axis)
        nobody = jnp.all(jnp.isinf(heard), axis=0)
        nearest = jnp.where(nobody, 0, jnp.min(heard, axis=0))
        share = jnp.exp((nearest - heard) / temperature)
        total = jnp.where(nobody, 1, jnp.sum(share, axis=0))
        weight = (share / total)[worker_index(axis)]

        def share_of(x, w, bad):
            return jnp.where(bad, 0, w * precise(x))  # 0 · NaN would be NaN

        sums = reduce_sum(exchanged(each(share_of, updates, weight, bad)), axis)
        sums = map_exchanged(lambda x, total: total, updates, sums)
        mean = each(lambda x, nobody: jnp.where(nobody, jnp.nan, x), sums, nobody)
        if clip != math.inf:
            scale = jnp.minimum(1, clip / (norms(mean) + 1e-6))
            mean = each(lambda x, scale: x * scale, mean, scale)
        mean = map_exchanged(lambda x, like: x.astype(like.dtype), mean, updates)
        seen = _observe(norm, z, state, smoothing)
        kept = jax.tree.map(lambda old, new: jnp.where(bad, old, new), state, seen)
        return mean, kept._replace(weight=weight)

    return Exchange(init, update)


def roll_back(outer: optax.GradientTransformation) -> Exchange:
    """An outer optimizer that stays, in each leaf of which it heard nothing finite.

    There its update is zero, so that workers return to the anchor, and its moments are
    what they were; elsewhere it is ``outer``. Numbers that belong to no leaf, such as a
    step count, stay only if nothing finite was heard of any.

    Example:
        >>> tx = roll_back(optax.sgd(1.0, momentum=0.5))
        >>> state = tx.init(jnp.zeros(2))
        >>> for heard in (1.0, jnp.nan, 1.0):
        ...     move, state = tx.update(jnp.full(2, heard), state)
        ...     print(move)
        [-1. -1.]
        [0. 0.]
        [-1.5 -1.5]
    """
    expect(optax.GradientTransformation, outer=outer)
    outer = optax.with_extra_args_support(outer)

    def update(updates, state, params=None, **extra):
        lost = map_leaves(lambda x: ~jnp.all(jnp.isfinite(x)), updates)
        stay = lambda lost, x: jnp.where(lost, jnp.zeros_like(x), x)
        moves, after = outer.update(
            map_leaves(stay, lost, updates), state, params, **extra
        )
        flags = jax.tree.leaves(lost)
        every = jnp.all(jnp.array(flags)) if flags else False
        lost_in = optax.tree_utils.tree_map_params(
            outer,
            lambda _, lost: lost,
            after,
            lost,
            transform_non_params=lambda _: every,
        )
        state = jax.tree.map(jnp.where, lost_in, state, after)
        return map_leaves(stay, lost, moves), state

    return Exchange(outer.init, update)


def _exchanged(tree: PyTree) -> list:
    return [x for x in jax.tree.leaves(tree) if takes_part(x)]


def _layers(tree: PyTree, layers: Callable) -> tuple[list[int], list]:
    """For each leaf that takes part the number of its layer; the layers' labels."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    spell = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    found = [layers(spell(path)) for path, x in leaves if takes_part(x)]
    labels = list(dict.fromkeys(found))
    return [labels.index(label) for label in found], labels


def _score(norm: jax.Array, state: PenaltyState) -> jax.Array:
    """``z``, 0 where there is no history to speak of."""
    least = _ROUNDINGS * state.norm_mean
    deviation = jnp.maximum(jnp.sqrt(state.norm_variance), least)
    known = (state.norms_seen > 1) & (deviation > 0)
    return jnp.where(
        known, (norm - state.norm_mean) / jnp.where(known, deviation, 1), 0
    )


def _unrest(state: PenaltyState) -> jax.Array:
    """``max(1, std)`` of the scores in the window."""
    there = np.arange(state.scores.shape[0])[:, None] < state.norms_seen
    n = jnp.maximum(1, jnp.sum(there, axis=0))
    center = jnp.sum(state.scores, axis=0) / n  # those not there yet are zero
    squares = jnp.where(there, jnp.square(state.scores - center), 0)
    return jnp.maximum(1, jnp.sqrt(jnp.sum(squares, axis=0) / n))


def _observe(
    norm: jax.Array, z: jax.Array, state: PenaltyState, smoothing: float
) -> PenaltyState:
    """The state with one norm more."""
    first = state.norms_seen == 0
    d = norm - state.norm_mean
    mean = jnp.where(first, norm, state.norm_mean + smoothing * d)
    variance = (1 - smoothing) * (state.norm_variance + smoothing * d * (norm - mean))
    return PenaltyState(
        mean,
        jnp.where(first, 0, variance),
        state.norms_seen + 1,
        jnp.roll(state.scores, 1, axis=0).at[0].set(z),
        state.weight,
    )


def _check(
    temperature: float,
    clip: float,
    threshold: float,
    warmup: int,
    smoothing: float,
    window: int,
) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be above 0.")
    if not clip > 0:
        raise ValueError(f"clip {clip} must be above 0 (infinity does not clip).")
    if not threshold >= 0:
        raise ValueError(
            f"threshold {threshold} must be 0 or more (infinity leaves nobody out)."
        )
    if warmup < 0 or window < 1:
        raise ValueError(
            f"warmup={warmup} and window={window} count norms: give 0 or more and 1 "
            "or more."
        )
    if not 0 < smoothing < 1:
        raise ValueError(f"smoothing {smoothing} is outside (0, 1).")


def _check_divided(tree: PyTree, shards: Axis) -> None:
    axis_size(shards)  # it must be there
    if not tracks_variance(shards):
        return
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if takes_part(x) and not varying_axes(x) & set(names(shards)):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path) or '(the tree)'} is the same on all "
                f"devices along {shards!r}, and its norm would be counted on each of "
                "them: divide it, or leave the axis to the compiler and shards= out."
            )
