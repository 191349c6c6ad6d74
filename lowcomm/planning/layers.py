r"""Which layers to average in which step, so that their transfers hide under backward.

Layers are numbered in backward order: layer 0 is the last one of the model. Gradients
of layer ℓ are done at ``B_ℓ``, the sum of the backward times up to ℓ, and its transfer
may begin then; the link carries one transfer at a time. Of a step (a slot) in which the
layers of ``block`` travel, what exceeds the backward pass is waited for:

    e = 0;  for ℓ in block: e ← max(e, B_ℓ) + m_ℓ;      wait = max(0, e − B_last)

A table gives the layers of each slot; ``lowcomm.dreamddp`` takes one that names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

Times = Sequence[float]  # seconds a layer, in backward order
Table = list[list[int]]  # of each slot the layers, in backward order


def slot_wait(block: Iterable[int], backward: Times, transfer: Times) -> float:
    """Seconds to wait after the backward pass of a slot.

    Example:
        >>> slot_wait([0, 2], backward=[1, 1, 1], transfer=[3, 2, 1])
        2
    """
    done = _done(backward, transfer)
    end = 0
    for layer in _known(block, done):
        end = max(end, done[layer]) + transfer[layer]
    return max(0, end - done[-1])


def total_wait(table: Iterable[Iterable[int]], backward: Times, transfer: Times):
    """Seconds to wait in all slots of a table together."""
    return sum(slot_wait(block, backward, transfer) for block in table)


def naive_blocks(layers: int, slots: int) -> Table:
    """Consecutive blocks of ``⌈layers/slots⌉`` layers; the last slots may be empty.

    Example:
        >>> naive_blocks(5, 3)
        [[0, 1], [2, 3], [4]]
    """
    _check_counts(layers, slots)
    size = -(-layers // slots)
    return [list(range(layers))[i * size : (i + 1) * size] for i in range(slots)]


def consecutive_blocks(backward: Times, transfer: Times, *, slots: int) -> Table:
    """The consecutive blocks of least total wait; each layer travels in one slot.

    By a dynamic program over (first layer, slots left), O(layers² · slots). Of equal
    totals, the one whose first blocks are shorter.

    Raises:
        ValueError: no layers, no slots, negative times, unequal numbers of times.

    Note:
        Schedules are optimal among consecutive blocks, not globally. The search is
        exact, where the published one branches greedily. The wait model, one transfer
        at a time, is this implementation's and simpler than the released one.

    Example:
        All six layers in the last slot would be waited for for 16 seconds.

        >>> times = {"backward": [4] * 6, "transfer": [6] * 6}
        >>> table = consecutive_blocks(**times, slots=2)
        >>> table, total_wait(table, **times)
        ([[0, 1, 2], [3, 4, 5]], 10)

    References:
        Tang et al., `DreamDDP: Accelerating Data Parallel Distributed LLM Training with
        Layer-wise Scheduled Partial Synchronization
        <https://arxiv.org/abs/2502.11058>`_, 2025.
    """
    done = _done(backward, transfer)
    layers = len(done)
    _check_counts(layers, slots)
    # waits[i][j]: of the block i, …, j − 1.
    waits = []
    for i in range(layers + 1):
        ends = accumulate(
            range(i, layers),
            lambda end, layer: max(end, done[layer]) + transfer[layer],
            initial=0,
        )
        waits.append([0] * i + [max(0, end - done[-1]) for end in ends])
    # best[i]: the least total of layers i, … in the slots left, and where to cut.
    best = [(waits[i][layers], (layers,)) for i in range(layers + 1)]
    for _ in range(slots - 1):
        best = [
            min(
                (waits[i][j] + best[j][0], (j, *best[j][1]))
                for j in range(i, layers + 1)
            )
            for i in range(layers + 1)
        ]
    cuts = (0, *best[0][1])
    return [list(range(a, b)) for a, b in pairwise(cuts)]


def fill_in(table: Table, backward: Times, transfer: Times) -> Table:
    """``table`` with more averages where the link is idle; no slot waits longer.

    Before the first layer of a slot may travel the link is free: layers 0, 1, … are
    sent once more, as long as their transfers end by then. In an empty slot they must
    end with the backward pass.

    Note:
        What may travel in an empty slot is a choice of this implementation.

    Example:
        >>> fill_in([[0, 1], [2]], backward=[2, 2, 2], transfer=[3, 2, 1])
        [[0, 1], [0, 2]]
    """
    done = _done(backward, transfer)
    filled = []
    for block in table:
        block = _known(block, done)
        first = min(block, default=len(done))
        free_until = done[min(first, len(done) - 1)]
        extra, end = [], 0
        for layer in range(first):
            end = max(end, done[layer]) + transfer[layer]
            if end > free_until:
                break
            extra.append(layer)
        filled.append(extra + block)
    return filled


def _done(backward: Times, transfer: Times) -> list[float]:
    """When the gradients of each layer are there, in seconds from the start."""
    if not backward or len(backward) != len(transfer):
        raise ValueError(
            f"{len(backward)} backward times and {len(transfer)} transfer times: give "
            "one of each for every layer, in backward order."
        )
    for name, times in (("backward", backward), ("transfer", transfer)):
        for layer, seconds in enumerate(times):
            if not seconds >= 0:
                raise ValueError(f"{name}[{layer}] = {seconds} is no time in seconds.")
    return list(accumulate(backward))


def _known(block: Iterable[int], done: list[float]) -> list[int]:
    """The layers of a slot, in backward order."""
    layers = sorted(block)
    for layer in layers:
        if layer not in range(len(done)):
            raise ValueError(
                f"layer {layer} of {len(done)}: they are numbered from 0, the last one "
                "of the model."
            )
    return layers


def _check_counts(layers: int, slots: int) -> None:
    if layers < 1 or slots < 1:
        raise ValueError(f"{layers} layers and {slots} slots: give at least one each.")
