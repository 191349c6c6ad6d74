"""The law of elasticity: a run of some workers goes on with more of them, or fewer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..leaves import PyTree
from ..resize import resize
from .equality import Broken, difference, finite, is_key, wide
from .laws import Law
from .problems import Carry, host, place_of
from .subject import Subject

RESIZES = Law(
    "changes size", "it goes on with more workers, or with fewer", optional=True
)

# What is averaged later, in whatever state: parameters, and what is still to be said.
AVERAGED = {"params", "error", "residual", "unsent", "said", "summed", "correction"}


@RESIZES.clause()
def with_as_many_workers_the_carry_is_the_same(s: Subject):
    """Bit for bit, after each step."""
    for t, carry in enumerate(s.path()):
        part = difference(resized(s, carry, s.workers), carry)
        if part:
            raise Broken(f"after step {t} {part}")


@RESIZES.clause()
def what_is_agreed_stays_and_so_do_the_means(s: Subject):
    """Twice as many, as few again, and half as many, after each step."""
    s.own_workers()
    for t, carry in enumerate(s.path()):
        more = resized(s, carry, 2 * s.workers)
        handed_on(carry, more, f"after step {t}, with twice as many workers,")
        back = resized(s, more, s.workers)
        handed_on(more, back, f"after step {t}, with half of those,")
        few = resized(s, carry, s.workers // 2)
        handed_on(carry, few, f"after step {t}, with half as many workers,")


@RESIZES.clause()
def training_goes_on_and_workers_agree_at_the_next_sync(s: Subject):
    """From the middle of the run, after others came and went."""
    s.own_workers()
    middle = s.steps // 2 + 1
    carry = resized(s, s.path()[middle], 2 * s.workers)
    carry = resized(s, carry, s.workers)
    for t in range(middle + 1, s.steps):
        carry = s.step(carry, t)
        finite(carry.params, f"resized after step {middle}, after step {t}")
        _agrees(s, carry.params, s.path()[t].params, t)


def resized(s: Subject, carry: Carry, workers: int) -> Carry:
    """A carry for so many workers, as numpy arrays."""
    mesh = place_of("vmap", workers, s.axis)["mesh"]
    tx = s.method(workers=workers)
    return host(Carry(*resize(tx, carry, workers=workers, mesh=mesh, axis=s.axis)))


def handed_on(before: Carry, after: Carry, when: str) -> None:
    """Raise unless equal leaves keep their bits, and what is averaged its mean.

    A new value is a convex combination of old ones, formed in double precision and
    rounded once, by at most eps/2 of the largest; so is their mean.
    """
    old = jax.tree_util.tree_leaves_with_path(before._asdict())
    for (path, x), y in zip(old, jax.tree.leaves(after._asdict()), strict=True):
        if is_key(x) or x.shape[1:] != y.shape[1:] or not x.size:
            continue
        name = jax.tree_util.keystr(path)
        if (x == x[:1]).all():
            if not (y == x[:1]).all():
                raise Broken(f"{when} {name} is not what all workers agreed on")
            continue
        keys = {str(getattr(k, "name", getattr(k, "key", ""))) for k in path}
        if not jnp.issubdtype(x.dtype, jnp.inexact) or not keys & AVERAGED:
            continue
        gap = np.abs(wide(y).mean(0) - wide(x).mean(0)).max()
        if not gap <= float(jnp.finfo(x.dtype).eps) / 2 * np.abs(wide(x)).max():
            raise Broken(f"{when} the mean of {name} has moved by {gap:.3g}")


def _agrees(s: Subject, here: PyTree, expected: PyTree, t: int) -> None:
    """Raise unless workers agree after step ``t``, if those that stayed do."""
    ulp = float(np.spacing(np.float32(s.scale)))
    far = lambda tree: max(float(np.ptp(x, axis=0).max()) for x in _moving(tree))
    most = 0.0 if s.bitwise else 2 * ulp
    if far(expected) <= most < far(here):
        raise Broken(
            f"resized before, after step {t} workers are {far(here):.3g} apart"
        )


def _moving(tree: PyTree) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
