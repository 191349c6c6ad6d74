r"""What a collective costs among K workers: one formula for each algorithm.

With ``m(n) = α + o + 8n/(ηβ)`` for a message of n bytes (``Link.message``), where n is
the operand of one worker, P the largest power of two up to K and r = K − P. All workers
send and receive at once, one message at a time in each direction; adding numbers up
costs nothing here.

    all_reduce      ring       2 (K−1) m(n/K)
                    doubling   log₂P m(n)                       + 2 m(n) if r > 0
                    halving    2 Σ_j m(n/2^j),  j = 1 … log₂P   + 2 m(n) if r > 0
    reduce_scatter  ring       (K−1) m(n/K)
                    halving    Σ_s m((s + min(r, s)) n/K),  s = P/2 … 2, 1
                                                        + m(n) + m(n/K) if r > 0
    all_gather      ring       (K−1) m(n)               n is what each contributes
                    bruck      Σ_j m(min(2^j, K − 2^j) n),      j = 0 … ⌈log₂K⌉ − 1
    all_to_all      pairwise   (K−1) m(n/K)
                    bruck      Σ_j m(c_j n/K),  c_j numbers below K have bit j set
    broadcast       tree       ⌈log₂K⌉ m(n)
                    chain      (K−1) α + 8n/(ηβ), and with an overhead
                               (K−1) α + (S+K−2) (o + 8n/(ηβS)) of S segments
    permute, send   direct     m(n)

Ring: K parts go round, each worker passing on one part a step, K − 1 steps to add up
and K − 1 to tell. Nothing sends less than its 2 (K−1)/K n bytes a worker (Patarasuk and
Yuan, Theorem 1), and nothing waits longer. Doubling: partners at distances 1, 2, 4, …
exchange what they have. Halving: the other way round, each time half of what is left,
then doubling to gather it. Where K is no power of two, r workers first give all they
have to a partner and are told by it at the end, which is what the "+" is. Bruck: at
distance 2^j everything collected so far, so ⌈log₂K⌉ messages for any K. Tree: who knows
tells one more. Chain: in S segments, so that all links are busy; S is the best one, and
without an overhead as many as there are bytes.

Latency-bound messages are cheapest by what has log₂K of them, long ones by rings and
halving; ``"best"`` takes the cheapest for each message. ``"gloo"`` is what JAX's CPU
processes do, below. Along several axes a *flat* algorithm goes at the pace of the
slowest link; ``"two_level"`` reduces and scatters inside, all-reduces between, and
gathers inside,

    all_reduce(n) = reduce_scatter_m(n) + all_reduce_{K/m}(n/m) + all_gather_m(n/m)

so that a link between groups of m carries 1/m of what it would for each device.

**gloo.** A receiver says that it is ready, then the message comes: 2α + o + 8n/(ηβ).
All-reduce is a ring in 2K segments or more, of a mebibyte at most, all-gather one in
two halves; both keep two messages under way. Of q messages of T = o + 8n/(ηβ) that is

    ⌊(q−1)/2⌋ max(2α + T, 2T) + 2α + (1 or 2) T          1 if q is odd, 2 if even

once for the gather and twice for the all-reduce. All-to-all sends to everyone at once
and pays its latency once.

References:
    Thakur, Rabenseifner and Gropp, `Optimization of Collective Communication Operations
    in MPICH <https://doi.org/10.1177/1094342005051521>`_, 2005 (doubling, halving,
    Bruck, pairwise, trees; α and β as here). Patarasuk and Yuan, `Bandwidth Optimal
    All-reduce Algorithms for Clusters of Workstations
    <https://doi.org/10.1016/j.jpdc.2008.09.002>`_, 2009 (the ring).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from .connections import Level, Link, slowest

Formula = Callable[[int, float, Link], float]  # of K, n and the link: seconds

_SEGMENT = 2**20  # bytes, of gloo's ring


def _power(k: int) -> int:
    """The largest power of two up to k."""
    return 1 << (k.bit_length() - 1)


def _distances(k: int) -> list[int]:
    """1, 2, 4, … below k."""
    return [1 << j for j in range((k - 1).bit_length())]


def _doubling(k: int, n: float, link: Link) -> float:
    power = _power(k)
    told = 2 * link.message(n) if k > power else 0.0
    return len(_distances(power)) * link.message(n) + told


def _halving(k: int, n: float, link: Link) -> float:
    power = _power(k)
    told = 2 * link.message(n) if k > power else 0.0
    return 2 * sum(link.message(n * s / power) for s in _distances(power)) + told


def _scatter_by_halving(k: int, n: float, link: Link) -> float:
    power = _power(k)
    rest = k - power  # so many of them answer for a partner's part as well
    parts = (s + min(rest, s) for s in _distances(power))
    told = link.message(n) + link.message(n / k) if rest else 0.0
    return sum(link.message(n * count / k) for count in parts) + told


def _bruck(k: int, n: float, link: Link) -> float:
    return sum(link.message(n * min(s, k - s)) for s in _distances(k))


def _bruck_to_all(k: int, n: float, link: Link) -> float:
    having = (sum(1 for i in range(k) if i & s) for s in _distances(k))
    return sum(link.message(n * count / k) for count in having)


def _chain(k: int, n: float, link: Link) -> float:
    whole, passed = link.transfer(n), (k - 1) * link.latency
    if link.overhead == 0:
        return passed + whole
    segments = max(1.0, math.sqrt((k - 2) * whole / link.overhead))
    return passed + (segments + k - 2) * (link.overhead + whole / segments)


def _direct(k: int, n: float, link: Link) -> float:
    return link.message(n)


def _two_under_way(count: int, nbytes: float, link: Link) -> float:
    """So many messages of gloo, each begun when the last but one is there."""
    one, delay = link.overhead + link.transfer(nbytes), 2 * link.latency
    turns, last = (count - 1) // 2, 1 + (count - 1) % 2
    return turns * max(delay + one, 2 * one) + delay + last * one


def _gloo_ring(k: int, n: float, link: Link) -> float:
    segments = max(2, math.ceil(n / _SEGMENT / k))  # of each worker's part
    return 2 * _two_under_way((k - 1) * segments, n / k / segments, link)


def _gloo_to_all(k: int, n: float, link: Link) -> float:
    return 2 * link.latency + (k - 1) * (link.overhead + link.transfer(n / k))


def _gloo_direct(k: int, n: float, link: Link) -> float:
    return link.latency + link.message(n)


FORMULAS: dict[str, dict[str, Formula]] = {
    "all_reduce": {
        "ring": lambda k, n, link: 2 * (k - 1) * link.message(n / k),
        "doubling": _doubling,
        "halving": _halving,
    },
    "reduce_scatter": {
        "ring": lambda k, n, link: (k - 1) * link.message(n / k),
        "halving": _scatter_by_halving,
    },
    "all_gather": {
        "ring": lambda k, n, link: (k - 1) * link.message(n),
        "bruck": _bruck,
    },
    "all_to_all": {
        "pairwise": lambda k, n, link: (k - 1) * link.message(n / k),
        "bruck": _bruck_to_all,
    },
    "broadcast": {
        "chain": _chain,
        "tree": lambda k, n, link: len(_distances(k)) * link.message(n),
    },
    "permute": {"direct": _direct},
    "send": {"direct": _direct},
}
# What goes round or along crosses each link once, whoever shares it.
_PASSED_ON = {"ring", "chain"}

_NAMED: dict[str, dict[str, tuple[str, ...]]] = {
    "ring": {
        "all_reduce": ("ring",),
        "reduce_scatter": ("ring",),
        "all_gather": ("ring",),
        "all_to_all": ("pairwise",),
        "broadcast": ("chain",),
        "permute": ("direct",),
        "send": ("direct",),
    },
    "tree": {
        "all_reduce": ("doubling", "halving"),
        "reduce_scatter": ("halving",),
        "all_gather": ("bruck",),
        "all_to_all": ("bruck",),
        "broadcast": ("tree",),
        "permute": ("direct",),
        "send": ("direct",),
    },
    "best": {kind: tuple(formulas) for kind, formulas in FORMULAS.items()},
}
_NAMED["two_level"] = _NAMED["best"]
_GLOO: dict[str, Formula] = {
    "all_reduce": _gloo_ring,
    "all_gather": lambda k, n, link: _two_under_way(2 * (k - 1), n / 2, link),
    "all_to_all": _gloo_to_all,
    "permute": _gloo_direct,
    "send": _gloo_direct,
}


def collective_seconds(
    collective: str,
    nbytes: float,
    *,
    workers: int,
    link: Link,
    algorithm: str = "ring",
) -> float:
    """Seconds of one collective, by the formulas above.

    Args:
        collective: as in ``Row.collective``.
        nbytes: of the operand of one worker.
        workers: K, how many take part; one alone pays nothing.
        link: what connects each to the next.
        algorithm: of the formulas above, or what an implementation does: "ring" and
            "tree" one kind of algorithm for every collective (of halving and doubling
            the cheaper one), "gloo" JAX's CPU processes, "best" always the cheapest.

    Raises:
        ValueError: an unknown collective or algorithm, fewer than one worker.

    Example:
        >>> link = Link.parse("8Mbit", "1ms")
        >>> collective_seconds("permute", 1_000_000, workers=4, link=link)
        1.001
        >>> price = lambda n, how: round(collective_seconds(
        ...     "all_reduce", n, workers=4, link=link, algorithm=how), 6)
        >>> [price(1_000_000, how) for how in ("ring", "doubling", "halving")]
        [1.506, 2.002, 1.504]
        >>> [price(4, how) for how in ("ring", "doubling", "best")]
        [0.006006, 0.002008, 0.002008]
    """
    return levels_seconds(
        collective, nbytes, levels=[Level(workers, link)], algorithm=algorithm
    )


def levels_seconds(
    collective: str, nbytes: float, *, levels: Sequence[Level], algorithm: str = "ring"
) -> float:
    """Seconds of one collective along several axes, the slowest link first.

    ``"best"`` takes the levels one after the other or all at once, whichever is
    cheaper; ``"two_level"`` takes them one after the other, by the cheapest algorithm
    on each; all others go along all axes at once.

    Raises:
        ValueError: what ``collective_seconds`` raises.

    Example:
        Two machines of eight: between them the mean of a megabyte costs little more
        than one eighth of it does.

        >>> levels = [Level(2, Link(1e9), shared=1), Level(8, Link(1e11))]
        >>> flat, deep = (levels_seconds("all_reduce", 1e6, levels=levels, algorithm=a)
        ...               for a in ("ring", "two_level"))
        >>> round(1000 * flat, 2), round(1000 * deep, 2)
        (15.0, 1.14)
    """
    _check(collective, levels, algorithm)
    crossed = [level for level in levels if level.workers > 1]
    if not crossed:
        return 0.0
    flat = _flat(collective, nbytes, crossed, algorithm)
    if len(crossed) == 1 or algorithm not in ("best", "two_level"):
        return flat
    deep = _deep(collective, nbytes, crossed)
    return deep if algorithm == "two_level" else min(flat, deep)


def _flat(kind: str, n: float, levels: Sequence[Level], algorithm: str) -> float:
    workers = math.prod(level.workers for level in levels)
    divided = slowest([level.link.shared(level.shared) for level in levels])
    once, inside = [], 1
    for level in reversed(levels):  # those inside take part, the rest send as well
        once.append(level.link.shared(max(1, level.shared / inside)))
        inside *= level.workers
    alone = slowest(once)
    if algorithm == "gloo":
        return _GLOO[kind](workers, n, divided)
    known = FORMULAS[kind]
    named = (algorithm,) if algorithm in known else _NAMED[algorithm][kind]
    return min(
        known[name](workers, n, alone if name in _PASSED_ON else divided)
        for name in named
    )


def _deep(kind: str, n: float, levels: Sequence[Level]) -> float:
    """One level after the other; the last one is the innermost."""
    if len(levels) == 1:
        return _flat(kind, n, levels, "best")
    *outer, inner = levels
    m, groups = inner.workers, math.prod(level.workers for level in outer)
    inside = lambda kind, n: _flat(kind, n, [inner], "best")
    between = lambda kind, n: _deep(kind, n, outer)
    scatter, gather = "reduce_scatter", "all_gather"
    if kind == "all_reduce":
        return inside(scatter, n) + between(kind, n / m) + inside(gather, n / m)
    if kind == scatter:
        return inside(kind, n) + between(kind, n / m)
    if kind == gather:
        return between(kind, n) + inside(kind, groups * n)
    if kind in ("all_to_all", "broadcast"):
        return between(kind, n) + inside(kind, n)
    return _flat(kind, n, levels, "best")


def _check(collective: str, levels: Sequence[Level], algorithm: str) -> None:
    if collective not in FORMULAS:
        raise ValueError(f"no cost for {collective!r}: know {', '.join(FORMULAS)}.")
    for level in levels:
        if level.workers < 1:
            raise ValueError(f"workers={level.workers}: there must be at least one.")
    known: Mapping[str, object] = FORMULAS[collective] | _NAMED
    if algorithm == "gloo" and collective not in _GLOO:
        raise ValueError(
            f"no cost for {collective!r} over gloo, only for {', '.join(_GLOO)}."
        )
    if algorithm != "gloo" and algorithm not in known:
        raise ValueError(
            f"no algorithm {algorithm!r} for {collective!r}: there are "
            f"{', '.join(dict.fromkeys([*known, 'gloo']))}."
        )
