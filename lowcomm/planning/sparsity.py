r"""How many entries of each layer to send, so that its exchange hides under backward.

Layers are numbered in backward order: layer 0 is the last one of the model. While layer
ℓ is selected and sent, the backward pass goes on with layer ℓ + 1:

    select(d_ℓ) + exchange(k_ℓ) ≤ backward_{ℓ+1},    k_ℓ = ⌊d_ℓ / c_ℓ⌋

``c_ℓ`` is the smallest whole compression ratio for which that holds. ``lags_sgd`` takes
what is found here, by the paths of the leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def entries_to_send(
    sizes: Sequence[int],
    backward: Sequence[float],
    exchange: Callable[[int], float],
    *,
    select: Callable[[int], float] | None = None,
    cap: int = 1000,
) -> list[int]:
    r"""Of each layer the largest number of entries whose exchange hides.

    .. math::
        c_\ell = \min \{ c \ge 1 : t_\text{select}(d_\ell) +
        t_\text{exchange}(\lfloor d_\ell / c \rfloor) \le t_{\text{backward},\ell+1} \},
        \qquad k_\ell = \max(1, \lfloor d_\ell / c_\ell \rfloor)

    ``c_ℓ`` is ``cap`` where no smaller ratio will do, as for the last layer to be
    differentiated, behind which there is no backward pass.

    Args:
        sizes: ``d``, entries of each layer, in backward order.
        backward: seconds of the backward pass of each layer, in the same order.
        exchange: seconds to send so many of a layer's entries to all, such as
            ``ethernet_seconds(8)``, or ``lambda k: collective_seconds("all_gather",
            8 * k, workers=8, link=link)`` for any ``Link``. Must not fall with k.
        select: seconds to select among so many entries, ``selection_seconds`` unless
            given.
        cap: the largest ratio.

    Raises:
        ValueError: no layers, unequal numbers of sizes and times, a size below 1, a
            negative time, a cap below 1.

    Note:
        The rule is restated from memory of the paper, whose released code uses one
        constant density; that the last layer takes the cap was inferred.

    Example:
        >>> entries_to_send([1_000_000] * 3, [0.1, 0.1, 0.05], ethernet_seconds(8))
        [90909, 38461, 1000]

    References:
        Shi et al., `Layer-wise Adaptive Gradient Sparsification for Distributed Deep
        Learning with Convergence Guarantees <https://arxiv.org/abs/1911.08727>`_, 2020.
    """
    if not sizes or len(sizes) != len(backward):
        raise ValueError(
            f"{len(sizes)} sizes and {len(backward)} backward times: give one of each "
            "for every layer, in backward order."
        )
    for layer, (size, seconds) in enumerate(zip(sizes, backward, strict=True)):
        if size < 1:
            raise ValueError(f"sizes[{layer}] = {size}: a layer has entries.")
        if not seconds >= 0:
            raise ValueError(f"backward[{layer}] = {seconds} is no time in seconds.")
    budgets = [*backward[1:], 0.0]
    return [
        max(1, size // smallest_ratio(size, budget, exchange, select=select, cap=cap))
        for size, budget in zip(sizes, budgets, strict=True)
    ]


def smallest_ratio(
    size: int,
    budget: float,
    exchange: Callable[[int], float],
    *,
    select: Callable[[int], float] | None = None,
    cap: int = 1000,
) -> int:
    """The smallest whole compression ratio of a layer that fits into ``budget``.

    Arguments as for ``entries_to_send``; ``budget`` is in seconds.

    Example:
        >>> budgets, to_all = [0.05, 0.1, 1.0, 0.005], ethernet_seconds(8)
        >>> [smallest_ratio(1_000_000, seconds, to_all) for seconds in budgets]
        [26, 11, 1, 1000]
    """
    if cap < 1:
        raise ValueError(f"cap {cap} is below 1, which sends everything.")
    left = budget - (selection_seconds if select is None else select)(size)
    fits = lambda c: exchange(max(1, size // c)) <= left
    low, high = 1, cap
    while low < high:  # what is sent falls with the ratio, and so does the time
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def selection_seconds(entries: int) -> float:
    """Seconds to select the largest of so many entries, on the GPU of the paper.

    ``2.19e-10 · d · log₂ d``.

    Example:
        >>> round(selection_seconds(1_000_000), 6)
        0.004365
    """
    return 2.19e-10 * entries * math.log2(max(1, entries))


def ethernet_seconds(workers: int) -> Callable[[int], float]:
    r"""Seconds to send k values and k indices to all on the 1 Gbit/s of the paper.

    .. math:: t(k) = 2\,(a + 4\,b\,K k)

    With constants ``a`` and ``b`` that were measured for K of 2, 4, 8 and 16 workers.

    Raises:
        ValueError: another number of workers.

    Example:
        >>> round(ethernet_seconds(8)(1000), 6)
        0.00896
    """
    measured = {
        2: (1.6e-3, 1.0e-8),
        4: (2.7e-3, 1.3e-8),
        8: (4.0e-3, 1.5e-8),
        16: (1.1e-2, 1.7e-8),
    }
    if workers not in measured:
        raise ValueError(
            f"there are constants for {', '.join(map(str, measured))} workers, not for "
            f"{workers}: use lowcomm.network.collective_seconds with a Link."
        )
    latency, byte = measured[workers]
    return lambda entries: 2 * (latency + 4 * byte * workers * entries)


def largest_speedup(forward: float, backward: float, exchange: float) -> float:
    r"""How much faster a step can become if its exchange hides under backward.

    .. math:: S = \frac{t_f + t_b + t_c}{t_f + \max(t_b, t_c)}
        = 1 + \frac{1}{t_f / \min(t_b, t_c) + \max(r, 1/r)}, \qquad r = t_c / t_b

    Seconds of the forward pass, of the backward pass and of the exchange. At most 2.

    Example:
        >>> largest_speedup(1, 2, 3), largest_speedup(0, 1, 1)
        (1.5, 2.0)
    """
    return (forward + backward + exchange) / (forward + max(backward, exchange))
