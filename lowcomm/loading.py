r"""What a step costs when communication may hide behind the loading of its batch.

    flat       c + t_io + AR(n)
    layered    c + m_in + max(t_io, AR(G)) + m_in

``c`` is the time to compute a gradient, ``t_io`` to load a batch, ``AR`` an all-reduce
over all ``n`` workers or over the communicators of ``G`` groups, ``m_in`` a transfer
between the workers of a group and its communicator. Only the middle of a layered step
hides: a gradient must be whole before the next one is taken.
"""

from __future__ import annotations

from .network import Link, collective_seconds


def flat_seconds(
    nbytes: float, *, workers: int, link: Link, compute: float, loading: float
) -> float:
    """Seconds of a step that loads, computes and then all-reduces ``nbytes``.

    Args:
        nbytes: of the gradient.
        workers: n.
        link: what connects each to the next, the slowest on the way.
        compute: seconds to compute a gradient.
        loading: seconds to load a batch.

    Raises:
        ValueError: fewer than one worker, negative seconds.

    Example:
        >>> link = Link.parse("8Mbit")
        >>> flat_seconds(1e6, workers=2, link=link, compute=2.0, loading=0.5)
        3.5
    """
    _check(compute, loading)
    reduced = collective_seconds("all_reduce", nbytes, workers=workers, link=link)
    return compute + loading + reduced


def layered_seconds(
    nbytes: float,
    *,
    groups: int,
    workers: int,
    between: Link,
    inside: Link,
    compute: float,
    loading: float,
) -> float:
    """Seconds of a step of Layered SGD.

    Every group has a communicator besides its workers. It gathers the sum of their
    gradients, along a chain, and gives them the mean of all.

    Args:
        nbytes: of the gradient.
        groups: G.
        workers: of each group.
        between: the link between communicators.
        inside: the link between a worker and the next, and the communicator.
        compute: seconds to compute a gradient.
        loading: seconds to load a batch.

    Raises:
        ValueError: fewer than one group or worker, negative seconds.

    Example:
        The all-reduce between two groups takes a second: loading hides it, or half.

        >>> fast, slow = Link(float("inf")), Link.parse("8Mbit")
        >>> for loading in (0.0, 0.5, 1.0, 1.5):
        ...     print(layered_seconds(1e6, groups=2, workers=4, between=slow,
        ...         inside=fast, compute=2.0, loading=loading))
        3.0
        3.0
        3.0
        3.5

    References:
        Yu, Flynn, Yoo and D'Imperio, `Layered SGD: A Decentralized and Synchronous SGD
        Algorithm for Scalable Deep Neural Network Training
        <https://arxiv.org/abs/1906.05936>`_, 2019; the formula is this library's
        reading of it.
    """
    _check(compute, loading)
    if workers < 1:
        raise ValueError(f"workers={workers}: a group has at least one.")
    transfer = collective_seconds("broadcast", nbytes, workers=workers + 1, link=inside)
    reduced = collective_seconds("all_reduce", nbytes, workers=groups, link=between)
    return compute + transfer + max(loading, reduced) + transfer


def _check(compute: float, loading: float) -> None:
    if not (compute >= 0 and loading >= 0):
        raise ValueError(
            f"compute={compute}, loading={loading}: give seconds, 0 or more."
        )
