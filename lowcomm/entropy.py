r"""How many ranks a gradient needs, from how spread out its entries are.

    H = ½ ln(2πe σ²)                                entropy of entries N(0, σ²), in nats
    g(r) = sqrt(E Σ_{i>r} s_i²)                     what rank r misses at σ = 1
    e^{H₁} g(r₁) = e^{H₀} g(r₀)                     the same error in absolute terms

A fall of entropy by ``H₀ − H₁`` scales all entries by its exponential, so that a lower
rank misses as much as the higher one did before. Pure functions, for EDGC.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .keys import random_bits
from .leaves import precise


def gaussian_entropy(x: jax.Array) -> jax.Array:
    r"""``½ ln(2πe σ²)`` in nats, with ``σ²`` the mean square of the entries.

    Of ``k`` Gaussian entries its standard error is ``1/√(2k)``. Scaling the entries by
    ``c`` adds ``ln c``. Minus infinity where all entries are zero.

    Example:
        >>> x = jnp.array([3.0, -3.0])
        >>> round(float(gaussian_entropy(2 * x) - gaussian_entropy(x)), 4)  # ln 2
        0.6931
    """
    x = jnp.abs(precise(x))
    largest = jnp.max(x)
    unit = x / jnp.where(largest == 0, 1, largest)  # whose squares stay in range
    spread = jnp.log(largest) + jnp.log(jnp.mean(jnp.square(unit))) / 2
    constant = math.log(2 * math.pi * math.e) / 2
    return jnp.where(largest == 0, -jnp.inf, spread + constant).astype(jnp.float32)


def sample(x: jax.Array, key: jax.Array, fraction: float) -> jax.Array:
    """That fraction of the entries, at least one, drawn with repetition; all at 1."""
    count = max(1, round(fraction * x.size))
    flat = x.reshape(-1)
    if count >= x.size:
        return flat
    return flat[random_bits(key, count) % np.uint32(x.size)]


def low_rank_errors(m: int, n: int, *, points: int = 2**14) -> np.ndarray:
    r"""``g(r)`` for ``r = 0 … min(m, n)``: what the best rank ``r`` misses.

    Root of the expected squared Frobenius error for an ``[m, n]`` matrix of standard
    Gaussian entries, by the Marchenko-Pastur law of its singular values. With
    ``γ = min(m, n)/max(m, n)`` the squares are ``max(m, n) (1 + γ + 2√γ cos θ)``, and
    the largest, those up to an angle ``θ``, are a share of

    .. math::
        \int_0^θ \frac{2 \sin^2 φ}{π (1 + γ + 2\sqrtγ \cos φ)} dφ \text{ of them all,
        with } \frac{θ - \sin θ \cos θ}{π} \text{ of the sum.}

    ``g(0) = √(mn)`` and ``g(min(m, n)) = 0``. Finite matrices are within a fraction of
    a rank of the limit.

    Example:
        >>> g = low_rank_errors(64, 256)
        >>> print(g[0], round(float(np.log(g[0] / g[16])), 2), g[64])
        128.0 0.28 0.0
    """
    k, γ = min(m, n), min(m, n) / max(m, n)
    edges = np.linspace(0, math.pi, points + 1)
    φ = (edges[1:] + edges[:-1]) / 2
    density = np.sin(φ) ** 2 / (1 + γ + 2 * math.sqrt(γ) * np.cos(φ))
    share = np.concatenate([[0], np.cumsum(density)])
    left = 1 - (edges - np.sin(edges) * np.cos(edges)) / math.pi
    left[-1] = 0
    squares = m * n * np.interp(np.arange(k + 1) / k, share / share[-1], left)
    return np.sqrt(squares)


def errors_together(shapes: Sequence[tuple[int, int]], most: int) -> np.ndarray:
    """``g`` of several matrices, the root of the sum of squares, up to rank ``most``.

    Example:
        >>> print(errors_together([(3, 12), (8, 8)], 8)[[0, 8]])
        [10.  0.]
    """
    squares = np.zeros(most + 1)
    for (m, n), count in Counter(shapes).items():
        errors = low_rank_errors(m, n)[: most + 1]
        squares[: len(errors)] += count * errors**2
    return np.sqrt(squares)


def rank_for(errors: Any, rank: Any, fall: Any, *, power: int = 1) -> jax.Array:
    """The rank whose error is nearest to what ``rank`` missed before, an int32.

    ``errors`` is ``g`` (``low_rank_errors``, of several matrices ``errors_together``),
    ``fall`` how far the entropy fell since. With ``power=2`` nearest is said of squared
    errors, which the fall scales by its exponential's square.

    Example:
        >>> g = low_rank_errors(64, 256)
        >>> [int(rank_for(g, 16, fall)) for fall in (-0.1, 0.0, 0.1, 0.3)]
        [21, 16, 10, 0]
    """
    g = jnp.asarray(errors, jnp.float32) / np.max(errors, initial=1e-30)
    target = jnp.exp(power * jnp.asarray(fall, jnp.float32)) * g[rank] ** power
    return jnp.argmin(jnp.abs(g**power - target)).astype(jnp.int32)


def next_rank(
    errors: Any,
    reference: Any,
    fall: Any,
    rank: Any,
    *,
    least: int,
    most: int,
    change: int,
    power: int = 1,
) -> jax.Array:
    """The rank of the next window, at most ``change`` from ``rank``.

    ``rank_for(errors, reference, fall)`` within ``least`` and ``most``. A fall beyond
    ``ln(g(0) / g(reference))``, a few tenths of a nat, asks for rank 0, so that the
    answer is ``least``.

    Example:
        >>> g = low_rank_errors(64, 256)
        >>> int(next_rank(g, 16, 0.2, 16, least=2, most=32, change=4))
        12
    """
    wanted = jnp.clip(rank_for(errors, reference, fall, power=power), least, most)
    return jnp.clip(wanted, rank - change, rank + change).astype(jnp.int32)


def aligned_ranks(
    rank: int,
    seconds: Sequence[Callable[[int], float]],
    *,
    microbatch: float,
    whole: Sequence[float],
    most: int,
) -> list[int | None]:
    """The ranks of all stages of a pipeline, where the first one has ``rank``.

    Stage ``s`` begins its exchange ``s`` microbatches before the first, and may take
    that much longer: its rank is the largest that does, rounded up to a multiple of
    four. None sends the gradients whole, where that is no slower or ``most`` would be
    exceeded.

    Args:
        rank: of stage 0.
        seconds: for each stage, from a rank to the time of its exchange.
        microbatch: seconds of one backward pass of a stage.
        whole: for each stage, the time of its exchange without compression.
        most: the largest rank.

    Example:
        >>> aligned_ranks(8, [lambda r: r] * 4, microbatch=5, whole=[32] * 4, most=20)
        [8, 16, 20, None]
    """
    ranks: list[int | None] = [rank]
    for stage in range(1, len(seconds)):
        limit = seconds[0](rank) + stage * microbatch
        fits = [r for r in range(1, most + 5) if seconds[stage](r) <= limit]
        chosen = 4 * math.ceil(max(fits, default=1) / 4)
        slow = chosen > most or seconds[stage](chosen) > whole[stage]
        ranks.append(None if slow else chosen)
    return ranks
