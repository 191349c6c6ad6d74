r"""Error feedback in sketches: what all workers together find large is sent.

    sketched(f)         S = mean_j sketch(u_j); momentum and error are sketches too
    sketched_top_k(f)   S says where, and a second round sums the exact values there

Both choose the largest entries of the *mean*, which a gather of each worker's largest
does not, and both send as much whatever the number of workers. The whole tree is one
vector. Hashes stay the same from step to step, so that sketches can be added up.
"""

from __future__ import annotations

import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .exchange import Exchange, like
from .largest import largest
from .leaves import PyTree, check_same_leaves, map_exchanged, precise, zeros
from .peeling import estimates, hashes, sketch
from .sharded import by_shard
from .sketches import check_table, columns_of, median
from .spmd import AXIS, Axis, vary
from .talk import admit_shrinking
from .transport import reduce_mean
from .vectors import entries, itemsize, joined


class SketchedState(NamedTuple):
    """State of ``sketched``; the same on all workers."""

    sketched_momentum: jax.Array  # [rows, columns]
    sketched_error: jax.Array  # [rows, columns], of what was not applied yet


class SketchedTopKState(NamedTuple):
    """State of ``sketched_top_k``."""

    error: PyTree  # what this worker has not managed to say yet


def sketched(
    fraction: float,
    *,
    rows: int = 5,
    columns: int | float = 0.02,
    momentum: float = 0.9,
    forget: str = "zero",
    seed: int = 0,
    axis: Axis = AXIS,
) -> Exchange:
    r"""Momentum and error feedback in the space of sketches (FetchSGD).

    .. math::
        S = \tfrac1K \sum_j \text{sketch}(u_j), \quad V \leftarrow \rho V + S, \quad
        E \leftarrow E + V, \quad
        \Delta = \text{top}_k(\text{median}_r\, E), \quad x_i \leftarrow \Delta

    ``k`` is ``fraction`` of the entries of the whole tree, ``ρ`` is ``momentum``, so
    the inner optimizer wants none. Then what was applied is forgotten: with
    ``forget="zero"`` in all buckets of ``E`` and ``V`` that the chosen entries touch,
    with ``"subtract"`` the sketch of ``Δ`` in ``E`` alone. What is subtracted is an
    estimate, whose error comes back: with too few columns it may grow for ever, where
    zeros lose what else was in the buckets and stay stable.

    No worker keeps anything of its own, so one may take part for a single step. Sends
    ``rows · columns`` float32, ``columns`` a number or a share of the entries.

    Raises:
        ValueError: a fraction outside (0, 1], a momentum outside [0, 1), sizes below 1,
            an unknown ``forget``; at trace, complex leaves, or another tree.

    Note:
        The error is in units of gradients: the rate is applied by the inner optimizer,
        to ``Δ``, and not to ``V``; at a constant rate that is the same. Algorithm 1
        subtracts; the authors' code zeroes, and remarks that subtracting may diverge.
        What is not finite is heard, and then no bucket keeps it. Subtracting adds to a
        bucket from several entries: on a GPU, where the order of such sums is not
        fixed, replicas agree only with ``--xla_gpu_deterministic_ops=true``.

    Example:
        The second entry is small on each worker and large on average: it is found.

        >>> from lowcomm import spread
        >>> tx = sketched(0.1, columns=64, momentum=0.0)
        >>> worker = lambda g: tx.update(g, tx.init(g))[0]
        >>> g = jnp.zeros((2, 10)).at[:, 1].set(3.0)
        >>> g = g.at[:, 0].set(jnp.array([5.0, -5.0]))
        >>> print(spread(worker)(g)[0])
        [0. 3. 0. 0. 0. 0. 0. 0. 0. 0.]

    References:
        Rothchild et al., `FetchSGD: Communication-Efficient Federated Learning with
        Sketching <https://arxiv.org/abs/2007.07682>`_, 2020, Algorithm 1.
    """
    _check_share("sketched", fraction)
    check_table("sketched", rows, columns)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum {momentum} is outside [0, 1).")
    if forget not in ("zero", "subtract"):
        raise ValueError(f'forget={forget!r}: there are "zero" and "subtract".')
    key = lambda: jax.random.key(seed)

    def init(params):
        shape = (rows, columns_of(columns, entries(params)))
        kind = joined(zeros(params), "sketched")[0].dtype
        empty = lambda: vary(jnp.zeros(shape, kind), axis)
        return SketchedState(empty(), empty())

    def update(updates, state, params=None, *, about="gradients", within=None, **extra):
        admit_shrinking(updates, "sketched", axis, about, within)
        u, back = joined(updates, "sketched")
        width = state.sketched_error.shape[1]
        if width != columns_of(columns, u.size):
            raise ValueError(
                f"sketched has {width} columns and this tree of {u.size} entries wants "
                f"{columns_of(columns, u.size)}: call init with the new tree."
            )
        if not u.size:
            return updates, state
        S = reduce_mean(sketch(u, jnp.arange(u.size), key(), rows, width), axis)
        V = momentum * state.sketched_momentum + S
        E = state.sketched_error + V
        found = median(estimates(E, jnp.arange(u.size), key()))
        places = _largest(found, _count(fraction, u.size))
        delta = found[places]
        if forget == "subtract":
            E = E - sketch(delta, places, key(), rows, width)
        else:
            for r in range(rows):
                h, _ = hashes(key(), places, r, width)
                E, V = E.at[r, h].set(0), V.at[r, h].set(0)
        finite = lambda x: jnp.where(jnp.isfinite(x), x, 0)
        heard = back(jnp.zeros_like(u).at[places].set(delta))
        return like(updates, heard), SketchedState(finite(V), finite(E))

    return by_shard(Exchange(init, update))


def sketched_top_k(
    fraction: float,
    *,
    rows: int = 5,
    columns: int | float = 0.02,
    candidates: int = 4,
    seed: int = 0,
    axis: Axis = AXIS,
) -> Exchange:
    r"""The largest entries of the mean, found by a sketch, with exact values.

    .. math::
        p_i = e_i + u_i, \quad
        H = \text{top}_{Pk}\bigl(\text{median}_r \tfrac1K \textstyle\sum_j
        \text{sketch}(p_j)\bigr), \quad
        x_i \leftarrow \text{top}_k\bigl(\tfrac1K \textstyle\sum_j p_j|_H\bigr), \quad
        e_i \leftarrow p_i - p_i|_{\text{chosen}}

    ``k`` is ``fraction`` of the entries of the whole tree and ``P`` is ``candidates``.
    ``e`` is ``state.error`` (float32 or wider). The sketch only says where to look, so
    nothing is lost: the sum of what was heard and the mean of ``e`` is the mean of the
    sum of ``u``, exactly in float32. With enough columns this is top-k with error
    feedback of one worker that has the mean gradient. Sends ``rows · columns`` float32
    and then ``P · k`` of them.

    Raises:
        ValueError: a fraction outside (0, 1], sizes below 1; at trace, complex leaves,
            or another tree.

    Note:
        Published with a second round to a server; here all workers reduce the values of
        the candidates, which they know alike. What is not finite is heard in a chosen
        entry, and then forgotten.

    Example:
        >>> from lowcomm import spread
        >>> tx = sketched_top_k(0.1, columns=64)
        >>> worker = lambda g: tx.update(g, tx.init(g))
        >>> g = jnp.zeros((2, 10)).at[:, 1].set(3.0)
        >>> g = g.at[:, 0].set(jnp.array([5.0, -5.0]))
        >>> heard, state = spread(worker)(g)
        >>> print(heard[0], state.error[1][:2])
        [0. 3. 0. 0. 0. 0. 0. 0. 0. 0.] [-5.  0.]

    References:
        Ivkin et al., `Communication-efficient Distributed SGD with Sketching
        <https://arxiv.org/abs/1903.04488>`_, 2019, Algorithms 1 and 2 (Sketched-SGD).
    """
    _check_share("sketched_top_k", fraction)
    check_table("sketched_top_k", rows, columns)
    if candidates < 1:
        raise ValueError(f"candidates={candidates}: as many as are sent, 1 or more.")
    key = lambda: jax.random.key(seed)

    def init(params):
        return SketchedTopKState(zeros(params))

    def update(updates, state, params=None, *, about="gradients", within=None, **extra):
        admit_shrinking(updates, "sketched_top_k", axis, about, within)
        check_same_leaves("sketched_top_k", state.error, updates)
        wanted = map_exchanged(lambda u, e: precise(u) + e, updates, state.error)
        p, back = joined(wanted, "sketched_top_k")
        if not p.size:
            return updates, state
        width = columns_of(columns, p.size)
        k = _count(fraction, p.size)
        S = reduce_mean(sketch(p, jnp.arange(p.size), key(), rows, width), axis)
        found = median(estimates(S, jnp.arange(p.size), key()))
        places = _largest(found, min(p.size, candidates * k))
        exact = reduce_mean(p[places], axis)
        # A NaN in a bucket must be heard, also where what is chosen has none.
        exact = jnp.where(jnp.isfinite(found[places]), exact, found[places])
        chosen = _largest(exact, k)
        places, values = places[chosen], exact[chosen]
        unsaid = jnp.where(jnp.isfinite(p), p, 0).at[places].set(0)
        error = map_exchanged(lambda e, x: x, state.error, back(unsaid))
        heard = back(jnp.zeros_like(p).at[places].set(values))
        return like(updates, heard), SketchedTopKState(error)

    return by_shard(Exchange(init, update))


def sketched_bytes(
    params: PyTree,
    *,
    rows: int = 5,
    columns: int | float = 0.02,
    fraction: float = 0.0,
    candidates: int = 0,
) -> int:
    """A worker's payload in one exchange; with candidates, of ``sketched_top_k``."""
    n = entries(params)
    sent = rows * columns_of(columns, n)
    if candidates:
        sent += min(n, candidates * _count(fraction, n))
    return itemsize(params) * sent if n else 0


def _largest(x: jax.Array, k: int) -> jax.Array:
    return largest(x[None], k)[0]


def _count(fraction: float, n: int) -> int:
    return columns_of(float(fraction), n)


def _check_share(name: str, fraction: float) -> None:
    if not (isinstance(fraction, numbers.Real) and 0 < fraction <= 1):
        raise ValueError(
            f"{name}: fraction={fraction!r}; give the share of entries to send, above "
            "0 and at most 1."
        )
