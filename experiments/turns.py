"""What methods send whose steps are not all of one kind, and whose turn it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import optax

from lowcomm.algorithms.streaming import fragments_of
from lowcomm.leaves import takes_part
from lowcomm.penalty import module_of
from lowcomm.planning.layers import naive_blocks
from lowcomm.schedules import quadratic_period
from lowcomm.triggers import Trigger

from .contracts import Sent, Setting, dense


def edit(params: Any, s: Setting) -> Sent:
    """Gradients in a warm-up, then displacements and a norm for each layer."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    spell = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    layers = {module_of(spell(path)) for path, x in leaves if takes_part(x)}
    warm, whole = s.steps // 4, dense(params)
    judged = whole + 4 * len(layers)

    def at(t: int) -> int:
        syncs = (t + 1) % s.period == 0
        if t < warm:
            return whole * (2 if syncs or t == warm - 1 else 1)
        return judged if syncs else 0

    return Sent(0, judged + whole * (warm > 0), at)


def even_slots(s: Setting) -> Callable[[list[str]], list[list[str]]]:
    """The leaves dealt out to the slots of a round in blocks."""

    def table(paths: list[str]) -> list[list[str]]:
        blocks = naive_blocks(len(paths), s.period)
        return [[paths[i] for i in block] for block in blocks]

    return table


def slots(params: Any, s: Setting) -> Sent:
    """The leaves whose turn it is."""
    leaves = [x for x in jax.tree.leaves(params) if takes_part(x)]
    blocks = naive_blocks(len(leaves), s.period)
    sizes = [dense([leaves[i] for i in block]) for block in blocks]
    return Sent(0, max(sizes), lambda t: sizes[t % s.period])


def best(params: Any, s: Setting) -> Sent:
    """Who is best, in four bytes, and what the best one holds."""
    one = 4 + dense(params)
    return Sent(0, one, lambda t: one if (t + 1) % s.period == 0 else 0)


def first_and_last(setting: Setting, first: int, last: int, *, begin: int = 0) -> Sent:
    """So many bytes at the first step of a round, and so many at its last.

    Rounds before number ``begin`` begin without the former.
    """

    def at(step: int) -> int:
        number, place = divmod(step, setting.period)
        begins = place == 0 and number >= begin
        return first * begins + last * (place == setting.period - 1)

    return Sent(0, first + last, at)


def two_levels(params: Any, s: Setting) -> Sent:
    """The parameters in the cluster in the middle of a round, everywhere at its end."""
    half, one = s.period // 2, dense(params)
    return Sent(0, one, lambda t: one if (t + 1) % half == 0 else 0)


def together_then_apart(params: Any, s: Setting) -> Sent:
    """Gradients in the first half of a run, and the parameters once."""
    one, last = dense(params), s.steps - 1
    at = lambda t: one if t < s.steps // 2 or t == last else 0
    return Sent(0, 2 * one, at)


def together_then_rounds(params: Any, s: Setting) -> Sent:
    """Gradients in what would be the first round, and displacements at every end."""
    one = dense(params)
    at = lambda t: one * ((t < s.period) + ((t + 1) % s.period == 0))
    return Sent(0, 2 * one, at)


def two_fragments(params: Any, s: Setting) -> Sent:
    """One half of the layers in the middle of a round, the other at its end."""
    leaves, number = jax.tree.leaves(params), jax.tree.leaves(fragments_of(params, 2))
    parts = list(zip(leaves, number, strict=True))
    ends, halves = (dense([x for x, f in parts if f == i]) for i in (0, 1))
    due = {0: ends, s.period // 2: halves}
    return Sent(0, ends + halves, lambda t: due.get((t + 1) % s.period, 0))


def moment_periods(inner: Any, s: Setting) -> dict[str, int]:
    """First moments are averaged half as often as parameters, second ones a quarter."""
    state = jax.eval_shape(inner.init, 0.0)
    there = lambda name: optax.tree.get_all_with_path(state, name)
    first = {name: 2 * s.period for name in ("trace", "mu") if there(name)}
    return first | {name: 4 * s.period for name in ("nu",) if there(name)}


def desynced(params: Any, s: Setting) -> Sent:
    """Parameters each round, and the momentum of SGD every second round."""
    one = dense(params)
    at = lambda t: (
        one * ((t + 1) % s.period == 0) + one * ((t + 1) % (2 * s.period) == 0)
    )
    return Sent(0, 2 * one, at)


def partners(params: Any, s: Setting) -> Sent:
    """To a partner each worker's float32 parameters, to all the number of the round."""
    one = 0 if s.workers == 1 else dense(params) + 4
    return Sent(0, one, lambda t: one * ((t + 1) % s.period == 0))


def quadratic(s: Setting) -> Trigger:
    """The quadratic rule that begins at the setting's period, at the largest rate."""
    given = s.learning_rate
    rate: Any = given if callable(given) else optax.constant_schedule(given)
    peak = max(float(rate(t)) for t in range(s.steps))
    growth = peak * math.sqrt(s.period)
    return quadratic_period(rate, growth=growth, least=s.period, steps=s.steps)
