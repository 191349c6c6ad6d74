r"""Majority votes: the sign of the sum of the workers' signs, in one bit or two.

A vote is the quantized all-reduce of a sign without a scale: the mean of what the
workers say has the sign of their majority, and that is all that is said of it. Since
there is no scale to share, the tree travels as one vector, which has fewer rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from .compressors import Compressor, for_any_shape
from .exchange import Exchange, like
from .leaves import PyTree
from .packing import pack, unpack
from .row_means import mean_of_rows, two_stage_bytes
from .sharded import by_shard
from .spmd import AXIS, Axis
from .talk import admit_shrinking
from .vectors import entries, joined


def majority_vote(*, levels: int = 2, axis: Axis = AXIS) -> Exchange:
    r"""The majority of the workers' signs, entry by entry.

    .. math:: x_i \leftarrow \text{sign}\Big(\sum_j \text{sign}(x_j)\Big)

    The result is ±1, and 0 where the convention has it:

    - ``levels=2``: one bit up, one bit down. A bit has no third value: zero counts as
      plus, and of an even number of workers a tie does too, which is a bias. Only a row
      (a ``K``-th of the tree) of nothing but zeros is nothing, and so is a count of
      nothing but ties.
    - ``levels=3``: two bits. Zero counts as nothing, a tie is 0, and the equation holds
      to the letter: what to choose where gradients have zeros, as of an embedding.

    Scaling a worker's tree by a positive number changes nothing, and fewer than half of
    the workers cannot turn an entry on which the others agree. What is not finite has
    no sign, and is heard: as NaN in its entry with three levels, in its whole row with
    two. That is the way for one worker to stop all others.

    Each worker sends ``K`` rows of ``⌈n/K⌉`` packed codes by an all-to-all, counts the
    votes of one row and sends their outcome by a gather: ``2 n/8`` bytes with two
    levels, ``2 n/4`` with three, rounded up in each row, and one byte a row more with
    two. Stateless, and without the magnitudes: where the workers' data differ, it need
    not converge to the minimum of the mean loss, and no memory mends that.

    Raises:
        ValueError: other levels; at trace, what ``two_stage`` raises.

    Example:
        A tie, a zero beside a plus, another against a minus, and two that agree.

        >>> from lowcomm import spread
        >>> g = jnp.array([[3.0, 0.0, 0.0, 1.0], [-1.0, 2.0, -5.0, 2.0]])
        >>> for levels in (2, 3):
        ...     vote = majority_vote(levels=levels).update
        ...     print(spread(lambda g: vote(g, ())[0])(g)[0])
        [1. 1. 1. 1.]
        [ 0.  1. -1.  1.]

    References:
        Bernstein et al., `signSGD with Majority Vote is Communication Efficient And
        Fault Tolerant <https://arxiv.org/abs/1810.05291>`_, 2019, Algorithm 1 (one
        bit).
    """
    if levels not in _BALLOTS:
        raise ValueError(f"levels={levels!r}: a vote has 2, plus and minus, or 3.")
    ballot = _BALLOTS[levels]()

    def update(updates, state, params=None, *, about="gradients", within=None, **extra):
        admit_shrinking(updates, "majority_vote", axis, about, within)
        # Nothing is drawn, so that any step will do.
        vector, back = joined(updates, "majority_vote")
        told = mean_of_rows(
            ballot, vector, name="majority_vote", step=0, seed=0, axis=axis
        )
        return like(updates, back(told.heard)), state

    return by_shard(Exchange(lambda params: optax.EmptyState(), update))


def vote_bytes(tree: PyTree, *, workers: int, levels: int = 2) -> int:
    """Payload bytes of a majority vote: a worker's, for one tree. Shapes will do.

    Example:
        >>> vote_bytes({"w": jnp.zeros(4096)}, workers=8)  # 9 (64 + 1)
        585
    """
    vector = jax.ShapeDtypeStruct((entries(tree),), jnp.float32)
    return two_stage_bytes(_BALLOTS[levels](), vector, workers=workers)


def _plus_or_minus() -> Compressor:
    """A bit an entry, and a byte: all of them zero, ordinary, or not all finite."""

    def encode(x, keys, agreed=None):
        # A maximum is fast where asking all of them is not, and may lose a NaN.
        most = jnp.max(jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)))
        kind = jnp.where(most < jnp.inf, most > 0, 2)
        return jnp.packbits(x >= 0), kind.astype(jnp.uint8)

    def decode(payload, like, keys, agreed=None):
        bits, kind = payload
        size = jnp.where(kind == 2, jnp.nan, kind.astype(jnp.float32))
        return jnp.where(jnp.unpackbits(bits, count=like.size) == 1, size, -size)

    return for_any_shape("majority_vote", encode, decode)


def _three_valued() -> Compressor:
    """Two bits an entry: zero, plus, minus, not finite."""

    def encode(x, keys, agreed=None):
        code = jnp.where(x > 0, 1, jnp.where(x < 0, 2, 0))
        return pack(jnp.where(jnp.isfinite(x), code, 3), 2)

    def decode(payload, like, keys, agreed=None):
        # No table: gathers are slow where selections are not.
        code = unpack(payload, 2, like.size)
        sign = jnp.where(code == 2, -1.0, code.astype(jnp.float32))
        return jnp.where(code == 3, jnp.nan, sign)

    return for_any_shape("majority_vote", encode, decode)


_BALLOTS = {2: _plus_or_minus, 3: _three_valued}
