"""Who leaves, or takes another's place, leaves nothing broken behind in others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import lowcomm as lc

AXES = ("site", "chip")
APART = jnp.array([[4.0, 1.0], [2.0, 8.0], [-1.0, 3.0], [5.0, -2.0]])


def after_a_step(tx, mesh=None, axis=lc.AXIS):
    """The carry of four workers with gradients that are apart."""
    how = {"mesh": mesh, "axis": axis, "backend": "vmap"}
    params = 0 * APART
    state = lc.spread(tx.init, **how)(params)
    update = lambda g, s, x: tx.update(g, s, x, step=0)
    moves, state = jax.jit(lc.spread(update, **how))(APART, state, params)
    return params + moves, state


@pytest.mark.parametrize(("broken", "value"), [(3, np.nan), (2, np.inf)])
def test_numbers_that_broke_on_who_leaves_are_not_handed_to_the_others(broken, value):
    tx = lc.local_sgd(optax.sgd(0.5), period=4)
    x = {"w": APART.at[broken, 1].set(value)}
    carry = x, lc.init(tx, x)
    said = rf"\['w'\].* holds NaN or an infinity of worker {broken}, which leaves"
    with pytest.raises(ValueError, match=said):
        lc.resize(tx, carry, workers=2)
    stays = [broken, 0, 1]  # and then it is nobody else's
    others, _ = lc.resize(tx, carry, workers=3, stay=stays)
    assert np.isfinite(others["w"]).all(-1).tolist() == [False, True, True]
    mended = jax.tree.map(lambda x: x.at[broken].set(x[0]), carry)
    assert np.isfinite(lc.resize(tx, mended, workers=2)[0]["w"]).all()


def test_who_is_not_finite_with_all_others_changes_nothing_by_leaving():
    tx = lc.local_sgd(optax.sgd(0.5), period=4)
    x = APART.at[:, 0].set(jnp.nan)
    fewer, _ = lc.resize(tx, (x, lc.init(tx, x)), workers=2)
    assert np.isnan(fewer).tolist() == [[True, False]] * 2


def test_nobody_takes_another_s_place_among_neighbours_or_in_groups():
    choco = lc.choco_sgd(optax.sgd(0.5), lc.ring(4), lc.top_k(0.5), step_size=0.25)
    groups = lc.diloco(optax.sgd(0.5), period=2)
    pairs = APART.at[1].set(APART[0]).at[3].set(APART[2])
    for tx, carry, said in (
        (choco, after_a_step(choco), "neighbours of the old graph"),
        (groups, (pairs, lc.init(groups, pairs)), "must be the same on all workers"),
    ):
        same = lc.resize(tx, carry, workers=4)
        assert jax.tree.all(
            jax.tree.map(lambda x, y: bool((x == y).all()), same, carry)
        )
        with pytest.raises(ValueError, match=said):
            lc.resize(tx, carry, workers=4, stay=[1, 2, 3, 0])


@pytest.mark.parametrize(
    ("dense", "sparse", "sizes", "refused"),
    [
        ("chip", "site", (3, 2), None),
        ("chip", "site", (1, 2), None),
        ("chip", "site", (4, 1), None),
        ("chip", "site", (2, 4), "'chip'"),
        ("chip", "site", (1, 4), "'chip'"),
        ("site", "chip", (3, 2), "'site'"),
    ],
)
def test_along_several_axes_replicas_stay_replicas_or_it_is_said(
    dense, sparse, sizes, refused
):
    # The residual of what goes along one axis is the same along the other.
    exchange = lc.error_feedback(lc.top_k(0.5), axis=sparse)
    tx = optax.chain(lc.mean(dense), exchange, optax.sgd(1.0))
    carry = after_a_step(tx, AbstractMesh((2, 2), AXES), AXES)
    mesh, workers = AbstractMesh(sizes, AXES), int(np.prod(sizes))
    how = {"workers": workers, "mesh": mesh, "axis": AXES}
    if refused:
        with pytest.raises(ValueError, match=rf"\.error.* along {refused} of"):
            lc.resize(tx, carry, **how)
        return
    params, state = lc.resize(tx, carry, **how)
    update = lambda g, s, x: tx.update(g, s, x, step=1)
    spread = jax.jit(lc.spread(update, mesh=mesh, axis=AXES, backend="vmap"))
    moves, _ = spread(jnp.resize(APART, params.shape), state, params)
    assert (moves == moves[0]).all()
