"""Who hears whom: graphs of workers, as weighted permutations.

A gossip step replaces every worker's value by a weighted mean of those it hears,
``x_new = W @ x``. Every graph here is a convex combination of permutations,

.. math:: W_r = \\sum_m w_{r,m} P_{r,m}, \\qquad w_{r,m} > 0, \\quad
    \\sum_m w_{r,m} = 1,

which are precisely the doubly stochastic matrices (Birkhoff's theorem): rows that sum
to one leave a consensus alone, columns that sum to one preserve the mean. A permutation
is also what one ``ppermute`` does, so a round costs each worker one message per
permutation that moves its value; a worker that a permutation leaves in place keeps its
own value, with that weight. Directed graphs without these sums need push-sum.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Round = tuple[tuple[float, tuple[int, ...]], ...]


class Graph(NamedTuple):
    """A sequence of rounds of mixing, repeated for ever.

    A round is a tuple of (weight, permutation) pairs. In a permutation ``p`` worker
    ``i``'s value is sent to worker ``p[i]``; ``p[i] == i`` keeps it, and sends nothing.
    """

    name: str
    size: int
    rounds: tuple[Round, ...]


def ring(size: int) -> Graph:
    """Each worker averages itself and its two neighbours, 1/3 each.

    Two workers are each other's only neighbour: they hear it once, with weight 1/2. One
    worker hears itself. A round sends 2 messages per worker (1 of two, 0 of one). The
    smallest eigenvalue is negative; where positive ones are required (delayed mixing),
    take :func:`lazy` of it.

    Example:
        >>> print(mixing_matrix(ring(4)).round(2))
        [[0.33 0.33 0.   0.33]
         [0.33 0.33 0.33 0.  ]
         [0.   0.33 0.33 0.33]
         [0.33 0.   0.33 0.33]]

    References:
        Xiangru Lian et al., `Can Decentralized Algorithms Outperform Centralized
        Algorithms? <https://arxiv.org/abs/1705.09056>`_, 2017.
    """
    hops = sorted({0, 1 % _size("ring", size), (size - 1) % size})
    return Graph("ring", size, (_equal_shifts(size, hops),))


def complete(size: int) -> Graph:
    """Each worker averages all: the mean in one round, of ``size - 1`` messages.

    Example:
        >>> print(mixing_matrix(complete(4)) @ np.array([0.0, 0.0, 0.0, 8.0]))
        [2. 2. 2. 2.]
    """
    return Graph(
        "complete", size, (_equal_shifts(size, range(_size("complete", size))),)
    )


def exponential(size: int) -> Graph:
    """Each worker averages itself and those 1, 2, 4, … hops behind it, equally.

    Directed, ``⌈log₂ size⌉`` messages per worker and round; the spectral gap shrinks
    like ``2 / (1 + ⌈log₂ size⌉)``, where the ring's shrinks like ``1 / size²``.

    Example:
        >>> print(f"{spectral_gap(exponential(64)):.3f} {spectral_gap(ring(64)):.3f}")
        0.286 0.003

    References:
        Bicheng Ying et al., `Exponential Graph is Provably Efficient for Decentralized
        Deep Training <https://arxiv.org/abs/2110.13363>`_, 2021 (static graph).
    """
    hops = [2**j for j in range(_log2_ceil("exponential", size))]
    return Graph("exponential", size, (_equal_shifts(size, [0, *hops]),))


def one_peer_exponential(size: int) -> Graph:
    """Each worker averages itself and one other, 1, then 2, then 4, … hops behind it.

    One message per worker and round, ``⌈log₂ size⌉`` rounds. For a power of two their
    product is exactly the mean; other sizes only come near it, and preserve the mean
    all the same.

    Example:
        >>> x = np.array([8.0, 0.0, 0.0, 0.0])
        >>> for step in range(2):
        ...     x = mixing_matrix(one_peer_exponential(4), step) @ x
        ...     print(x)
        [4. 4. 0. 0.]
        [2. 2. 2. 2.]

    References:
        Bicheng Ying et al., `Exponential Graph is Provably Efficient for Decentralized
        Deep Training <https://arxiv.org/abs/2110.13363>`_, 2021 (one-peer
        graph, periodic exact averaging).
    """
    hops = [2**j for j in range(_log2_ceil("one_peer_exponential", size))]
    rounds = tuple(_equal_shifts(size, [0, hop]) for hop in hops)
    return Graph("one_peer_exponential", size, rounds or (_equal_shifts(size, [0]),))


def clusters(sizes: Sequence[int]) -> Graph:
    """Each worker averages its cluster: the first ``sizes[0]`` workers, the next, ….

    The mean of all workers stays, whatever the sizes. At least as many messages per
    worker as its cluster has other members, and a few more where sizes differ.

    Example:
        >>> print(mixing_matrix(clusters([1, 3])) @ np.array([8.0, 0.0, 3.0, 6.0]))
        [8. 3. 3. 3.]
    """
    labels = np.repeat(range(len(sizes)), [_size("clusters", n) for n in sizes])
    together = labels[:, None] == labels
    return from_matrix(together / together.sum(1), name="clusters")


def random_matchings(size: int, *, rounds: int, seed: int = 0) -> Graph:
    """Each worker averages itself and one other, drawn at random for each round.

    ``rounds`` perfect matchings, drawn independently and uniformly; of an odd number
    of workers one idles. One message per worker and round. Each round is a branch of
    the program: some tens of rounds, which repeat, are enough.

    Example:
        >>> graph = random_matchings(5, rounds=2, seed=1)
        >>> for weights in graph.rounds:
        ...     print([p for _, p in weights][-1])
        (4, 2, 1, 3, 0)
        (3, 4, 2, 0, 1)
    """
    keep = tuple(range(_size("random_matchings", size)))
    if rounds < 1:
        raise ValueError(f"random_matchings(rounds={rounds!r}): needs at least 1.")
    draw = np.random.default_rng(seed)

    def matching() -> Round:
        order, partner = draw.permutation(size).tolist(), list(keep)
        for i, j in zip(order[::2], order[1::2], strict=False):
            partner[i], partner[j] = j, i
        return (0.5, keep), (0.5, tuple(partner))

    return Graph("random_matchings", size, tuple(matching() for _ in range(rounds)))


def from_matrix(matrix: np.ndarray, *, name: str = "matrix") -> Graph:
    """The graph of a doubly stochastic matrix, ``matrix[i, j]`` = how i hears j.

    Repeatedly takes the permutation whose smallest remaining entry is largest and
    subtracts that entry (Birkhoff's decomposition). At most ``(size - 1)² + 1``
    permutations; an entry spread over several of them is sent as often, so regular
    graphs with few distinct weights are the cheap ones. Sums may be off by 1e-6, as
    float32 rounding makes them; what is below that error is dropped, and the weights
    are normalized.

    ``ValueError`` for a matrix that is not square, finite, non-negative and doubly
    stochastic, with the offending row or column.

    Example:
        Two workers that trust each other little, and a third that is alone.

        >>> matrix = np.array([[0.75, 0.25, 0], [0.25, 0.75, 0], [0, 0, 1]])
        >>> print(*from_matrix(matrix).rounds[0])
        (0.75, (0, 1, 2)) (0.25, (1, 0, 2))

    References:
        Garrett Birkhoff, Tres observaciones sobre el álgebra lineal, 1946. Fanny
        Dufossé, Bora Uçar, Notes on Birkhoff-von Neumann decomposition of doubly
        stochastic matrices, 2016 (the greedy choice).
    """
    rest = np.array(matrix, dtype=np.float64)
    slack = _check_doubly_stochastic(rest, f"from_matrix(name={name!r})")
    floor = 1e-12 + len(rest) * slack
    pairs: list[tuple[float, tuple[int, ...]]] = []
    while (found := _bottleneck_permutation(rest, floor)) is not None:
        weight, senders = found
        rest[np.arange(len(rest)), senders] -= weight
        pairs.append((weight, tuple(int(i) for i in np.argsort(senders))))
    total = math.fsum(weight for weight, _ in pairs)
    round_ = tuple((weight / total, p) for weight, p in pairs)
    return Graph(name, len(rest), (round_,))


def lazy(graph: Graph) -> Graph:
    """Each worker keeps half of its own value and mixes the rest: ``(W + I) / 2``.

    As many messages as ``graph``. A symmetric ``W`` has no negative eigenvalue then.

    Example:
        >>> for graph in (ring(8), lazy(ring(8))):
        ...     eigenvalues = np.linalg.eigvalsh(mixing_matrix(graph))
        ...     print(graph.name, eigenvalues.min().round(3))
        ring -0.333
        lazy ring 0.333
    """
    own = tuple(range(graph.size))

    def half(part: Round) -> Round:
        kept = 0.5 + sum(weight / 2 for weight, p in part if p == own)
        return ((kept, own), *((weight / 2, p) for weight, p in part if p != own))

    return Graph(f"lazy {graph.name}", graph.size, tuple(map(half, graph.rounds)))


def mixing_matrix(graph: Graph, step: int = 0) -> np.ndarray:
    """The matrix ``W`` of round ``step % len(graph.rounds)``: ``x_new = W @ x``.

    Row ``i`` holds the weights with which worker ``i`` hears the others. ``ValueError``
    if a hand-made graph has something else than permutations, or is not doubly
    stochastic.

    Example:
        Two pairs average and the fifth worker is left alone; the mean stays.

        >>> pairs = (1, 0, 3, 2, 4)
        >>> graph = Graph("pairs", 5, (((0.5, (0, 1, 2, 3, 4)), (0.5, pairs)),))
        >>> print(mixing_matrix(graph) @ np.array([1.0, 3.0, 5.0, 9.0, 2.0]))
        [2. 2. 7. 7. 2.]
    """
    matrix = np.zeros((graph.size, graph.size))
    for weight, p in graph.rounds[step % len(graph.rounds)]:
        if sorted(p) != list(range(graph.size)):
            raise ValueError(
                f"{graph.name}: {p} is no permutation of the workers 0 to "
                f"{graph.size - 1}; each must receive exactly one value, its own if it "
                "sits out."
            )
        matrix[list(p), range(graph.size)] += weight
    _check_doubly_stochastic(matrix, graph.name)
    return matrix


def spectral_gap(graph: Graph) -> float:
    r"""How much of the disagreement a round removes: 0 is nothing, 1 is everything.

    .. math:: 1 - \sigma^{1/T}, \qquad \sigma = \|W_{T-1} \cdots W_0 - J\|_2

    with ``T`` rounds in a period, ``J`` the matrix of the mean and the largest singular
    value as norm: after a period the distance to the mean, in root mean square over the
    workers, is at most :math:`\sigma` times what it was. For one symmetric ``W`` this
    is ``1 - max(|λ₂|, |λ_n|)``. Eigenvalues would promise too much for products that
    are not symmetric: they give the rate only in the long run.

    Example:
        >>> print(f"{spectral_gap(ring(8)):.6f}")  # 1 - (1 + 2 cos 45°) / 3
        0.195262
        >>> spectral_gap(one_peer_exponential(8)), spectral_gap(one_peer_exponential(1))
        (1.0, 1.0)
    """
    rounds = len(graph.rounds)
    product = np.eye(graph.size)
    for step in range(rounds):
        product = mixing_matrix(graph, step) @ product
    sigma = np.linalg.norm(product - 1 / graph.size, 2)
    # Without this a rounding error of 1e-17 in three rounds would read 1 - 2e-6.
    if sigma < 1e-14 * graph.size:
        return 1.0
    return float(1 - min(sigma, 1.0) ** (1 / rounds))


def _equal_shifts(size, hops) -> Round:
    """Equal weights for the permutations that send ``i`` to ``i + hop``."""
    hops = list(hops)
    shift = lambda hop: tuple((i + hop) % size for i in range(size))
    return tuple((1 / len(hops), shift(hop)) for hop in hops)


def _size(name, size) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{name}({size!r}): needs at least one worker, as an integer.")
    return size


def _log2_ceil(name, size) -> int:
    return (_size(name, size) - 1).bit_length()


def _check_doubly_stochastic(matrix, name) -> float:
    """The largest error of a row or column sum, if it is only rounding."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(f"{name}: a mixing matrix is square, not {matrix.shape}.")
    bad = np.argwhere(~(np.isfinite(matrix) & (matrix >= 0)))
    if len(bad):
        i, j = (int(index) for index in bad[0])
        raise ValueError(
            f"{name}: entry ({i}, {j}) is {matrix[i, j]}; weights are finite and not "
            "negative."
        )
    for axis, (line, harm) in enumerate(
        (("column", "the mean would drift"), ("row", "a consensus would not stay"))
    ):
        sums = matrix.sum(axis=axis)
        worst = int(np.argmax(np.abs(sums - 1)))
        if abs(sums[worst] - 1) > 1e-6:
            raise ValueError(
                f"{name}: {line} {worst} sums to {sums[worst]:.6g}, not 1, so {harm}; "
                "rows and columns must all sum to 1 (Metropolis weights do)."
            )
    return max(float(np.abs(matrix.sum(axis=axis) - 1).max()) for axis in (0, 1))


def _bottleneck_permutation(matrix, floor):
    """The permutation with the largest smallest entry above floor, with that entry."""
    levels = np.unique(matrix[matrix > floor])
    for level in levels[::-1]:
        senders = _perfect_matching(matrix >= level)
        if senders is not None:
            return float(level), senders
    return None


def _perfect_matching(allowed):
    """For each row a column of its own among the allowed ones, or None."""
    row_of: dict[int, int] = {}

    def place(row, tried):
        # The diagonal comes first: what a worker keeps is not sent.
        heard = np.flatnonzero(allowed[row]).tolist()
        for column in sorted(heard, key=lambda sender: sender != row):
            if column not in tried:
                tried.add(column)
                if column not in row_of or place(row_of[column], tried):
                    row_of[column] = row
                    return True
        return False

    if not all(place(row, set()) for row in range(len(allowed))):
        return None
    return np.argsort([row_of[column] for column in range(len(allowed))])
