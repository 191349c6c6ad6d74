"""Which examples each worker has, and in which order it sees them.

A *split* is a function ``(labels, workers, rng) -> int[workers, m]``: row *k* lists the
positions of worker *k*'s examples. Every worker has the same number of them,
``m = n // workers``, so that all take equally many steps; the ``n % workers`` that are
left over are drawn at random and given to nobody. No example belongs to two workers,
but for ``whole``, where every example belongs to all of them.

A *stream* turns the rows into batches. Every epoch each worker shuffles its own row and
takes ``m // batch_size`` batches from it, none of them twice; the ``m % batch_size``
examples at the end of the order sit the epoch out, and the next order brings others to
the end. Batch ``step`` is a pure function of (rows, batch size, seed, step): a run may
stop anywhere and go on from there. So is any worker's part of it: a process looks up
the examples of its own workers only.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from .names import lookup
from .task import ALL, Workers

Split: TypeAlias = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]


def iid(labels: np.ndarray, workers: int, rng: np.random.Generator) -> np.ndarray:
    """All workers draw from one distribution: a shuffle cut into equal pieces."""
    return _kept(labels, workers, rng).reshape(workers, -1)


def by_label(labels: np.ndarray, workers: int, rng: np.random.Generator) -> np.ndarray:
    """Sort by label, then cut: each worker sees about ``classes / workers`` labels.

    The hardest split, since no two workers' optima are near each other. Within a label
    the examples are shuffled first.
    """
    kept = _kept(labels, workers, rng)
    return kept[np.argsort(labels[kept], kind="stable")].reshape(workers, -1)


def dirichlet(alpha: float) -> Split:
    r"""Worker *k* draws its labels from :math:`q_k \sim \text{Dirichlet}(\alpha C p)`.

    ``p`` is the share of each of the ``C`` labels in the data set: where all are
    equally frequent this is the symmetric distribution with concentration ``alpha``.
    Near 0 a worker has few labels; at infinity all workers are alike, as under
    :func:`iid`. A worker draws without replacement; when a label is used up, ``q`` is
    renormalized over those that are left, so workers late in a random order have less
    of a choice.

    Raises ``ValueError`` for an ``alpha`` that is not positive.

    References:
        Hsu, Qi and Brown, `Measuring the Effects of Non-Identical Data Distribution for
        Federated Visual Classification <https://arxiv.org/abs/1909.06335>`_, 2019,
        section 3 (their clients have equally many examples, too).

    Note:
        The paper's alpha is ``C`` times ours; ours is the customary one.
    """
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha must be positive and finite, not {alpha}")

    def split(labels, workers, rng):
        kept = _kept(labels, workers, rng)
        classes, inverse, sizes = np.unique(
            labels[kept], return_inverse=True, return_counts=True
        )
        piles = [kept[inverse == c] for c in range(len(classes))]
        taken = np.zeros_like(sizes)
        rows = np.empty((workers, len(kept) // workers), kept.dtype)
        for worker in rng.permutation(workers):
            log_q = _log_dirichlet(rng, alpha * len(classes) * sizes / len(kept))
            share = _draw(rng, log_q, sizes - taken, rows.shape[1])
            rows[worker] = np.concatenate(
                [
                    pile[start : start + n]
                    for pile, start, n in zip(piles, taken, share, strict=True)
                ]
            )
            taken = taken + share
        return rows

    return split


def whole(labels: np.ndarray, workers: int, rng: np.random.Generator) -> np.ndarray:
    """Every worker has all the data, in an order of its own: SelSync's SelDP.

    Row *k* is the rows of ``iid`` one after the other, beginning with number *k*: in an
    epoch the workers are never at the same place. (A ``stream`` shuffles each row by
    itself.) The ``n % workers`` that are left over are nobody's here, too.

    References:
        Tyagi and Swany, `Accelerating Distributed ML Training via Selective
        Synchronization <https://arxiv.org/abs/2307.07950>`_, 2023.
    """
    pieces = iid(labels, workers, rng)
    return np.stack([np.roll(pieces, -k, axis=0).ravel() for k in range(workers)])


def find_split(name: str, *, alpha: float = 0.5) -> Split:
    """The split of that name: ``iid``, ``sorted``, ``whole`` or ``dirichlet``.

    ``alpha`` is that of ``dirichlet``.

    Raises ``ValueError`` with the nearest names for any other.
    """
    table = {"iid": lambda: iid, "sorted": lambda: by_label, "whole": lambda: whole}
    return lookup(table | {"dirichlet": lambda: dirichlet(alpha)}, name, "split")()


def stream(
    rows: np.ndarray, batch_size: int, *, seed: int = 0
) -> Callable[..., np.ndarray]:
    """Batches of positions: ``stream(rows, b)(step)`` is ``int[workers, b]``.

    ``stream(rows, b)(step, some)`` are the rows ``some`` of it.

    Raises ``ValueError`` where a worker has fewer examples than a batch takes.

    Example:
        Six examples each, batches of two: three batches are one epoch.

        >>> positions = stream(np.arange(12).reshape(2, 6), 2)
        >>> epoch = np.concatenate([positions(step) for step in range(3)], axis=1)
        >>> sorted(epoch[0].tolist()), sorted(epoch[1].tolist())
        ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11])
    """
    size = rows.shape[1]
    if not 1 <= batch_size <= size:
        raise ValueError(
            f"a batch of {batch_size} cannot be taken from the {size} examples of each "
            f"of {len(rows)} workers: choose a batch size from 1 to {size}"
        )
    per_epoch = size // batch_size

    # Two orders, so that a look back across an epoch's border costs no new shuffle.
    @lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng((seed, epoch)).permuted(rows, axis=1)

    def positions(step: int, workers: Workers = ALL) -> np.ndarray:
        if step < 0:
            raise ValueError(f"steps count from 0, not from {step}")
        epoch, batch = divmod(int(step), per_epoch)
        return order(epoch)[workers, batch * batch_size : (batch + 1) * batch_size]

    return positions


def _kept(labels: np.ndarray, workers: int, rng: np.random.Generator) -> np.ndarray:
    if not 1 <= workers <= len(labels):
        raise ValueError(
            f"{len(labels)} examples cannot be shared out among {workers} workers"
        )
    return rng.permutation(len(labels))[: len(labels) // workers * workers]


def _log_dirichlet(rng: np.random.Generator, alphas: np.ndarray) -> np.ndarray:
    # log Gamma(a) = log Gamma(a + 1) + log(U) / a in distribution. The logarithms are
    # kept, up to a constant: below alphas of about 1e-2 all but one share underflow,
    # and renormalizing once that label is used up would divide 0 by 0.
    return np.log(rng.gamma(alphas + 1)) + np.log(rng.random(len(alphas))) / alphas


def _draw(
    rng: np.random.Generator, log_q: np.ndarray, left: np.ndarray, size: int
) -> np.ndarray:
    """How many of each class make up ``size``, never more than there are ``left``."""
    share = np.zeros_like(left)
    while (missing := size - share.sum()) > 0:
        logits = np.where(share < left, log_q, -np.inf)
        odds = np.exp(logits - logits.max())
        share += np.minimum(rng.multinomial(missing, odds / odds.sum()), left - share)
    return share
