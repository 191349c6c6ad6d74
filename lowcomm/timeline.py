r"""When the steps of a run end: workers compute, and transfers may hide behind it.

    step t of worker i ends       b_i(t) + c_i(t),      b_i(t) = f_i(t − 1)
    a transfer sent at t begins   max(max_i (b_i(t) + c_i(t)), the link is free)
    and is there                  m seconds later, awaited at the end of step t + τ
    the step is over              f_i(t) = max(b_i(t) + c_i(t), all that is awaited)

A collective begins when the last worker has come to it. With ``τ = 0`` all workers wait
for what they send, and afterwards they stand together again; with ``τ > 0`` they go on
computing for τ steps and wait for what is left. The link carries one transfer at a
time. Of steady steps of c seconds a round of H steps loses

    exposed = max(0, m − τ c)

for any τ ≤ H, as ``rounds(delay=τ)`` has it: sent when the trigger fires, adopted τ
steps later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Transfer:
    """Exchanges of one kind, all workers together.

    Attributes:
        at: the steps at whose end they are sent, counted from 0.
        seconds: how long each takes, or all of them.
        hidden: τ, for how many further steps workers compute before they need it.

    Raises:
        ValueError: negative steps or seconds, not one number of seconds for each step.

    Example:
        >>> Transfer(at=range(9, 100, 10), seconds=0.3).hidden
        0
    """

    at: Sequence[int] | np.ndarray
    seconds: ArrayLike
    hidden: int = 0

    def __post_init__(self):
        """Refuse what is no exchange."""
        at, each = np.asarray(self.at), np.asarray(self.seconds, float)
        if at.size and (at.min() < 0 or at.ndim != 1):
            raise ValueError(f"at={self.at}: give step numbers from 0.")
        if each.shape not in ((), at.shape):
            raise ValueError(
                f"seconds has shape {each.shape} for {at.size} exchanges: give one "
                "number, or one for each."
            )
        if not np.all(each >= 0):
            raise ValueError(f"seconds={self.seconds}: give 0 or more.")
        if self.hidden < 0:
            raise ValueError(f"hidden={self.hidden}: give steps, 0 or more.")


class Timeline(NamedTuple):
    """When steps end, and what workers did meanwhile."""

    ends: np.ndarray  # [steps] seconds, when the last worker is through with each
    computing: np.ndarray  # [workers] seconds

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return float(self.ends[-1]) if len(self.ends) else 0.0

    @property
    def share(self) -> float:
        """Of the time of all workers, how much they compute."""
        return float(self.computing.mean()) / self.seconds if self.seconds else 1.0


def timeline(compute: ArrayLike, *transfers: Transfer) -> Timeline:
    """When each step of a run ends.

    Transfers of one step leave in the order of the arguments, over one link. What is
    still on its way after the last step is not waited for.

    Args:
        compute: seconds of each step, ``[steps]``, or of each worker, ``[steps,
            workers]``, as ``stragglers.compute_times`` draws them.
        *transfers: what is exchanged and how long it may take.

    Raises:
        ValueError: negative or infinite seconds, another shape, an exchange after the
            last step.

    Example:
        Four steps of a second and an exchange of three, every second step: waited for,
        hidden behind one step, and behind two.

        >>> for hidden in (0, 1, 2):
        ...     run = timeline(np.ones(8), Transfer([1, 3, 5], 3.0, hidden))
        ...     print(run.ends, round(run.share, 2))
        [ 1.  5.  6. 10. 11. 15. 16. 17.] 0.47
        [ 1.  2.  5.  6.  9. 10. 13. 14.] 0.57
        [ 1.  2.  3.  5.  6.  8.  9. 11.] 0.73
    """
    times = np.asarray(compute, float)
    if times.ndim not in (1, 2) or not np.all((times >= 0) & np.isfinite(times)):
        raise ValueError(
            f"compute of shape {times.shape} must be seconds, finite and 0 or more, "
            "[steps] or [steps, workers]."
        )
    times = times[:, None] if times.ndim == 1 else times
    steps = len(times)
    sent: list[list[tuple[float, int]]] = [[] for _ in range(steps)]
    for transfer in transfers:
        each = np.broadcast_to(np.asarray(transfer.seconds, float), len(transfer.at))
        for t, took in zip(transfer.at, each, strict=True):
            if t >= steps:
                raise ValueError(f"an exchange at step {t} of {steps}.")
            sent[int(t)].append((float(took), transfer.hidden))
    clock, free = np.zeros(times.shape[1]), 0.0
    awaited: dict[int, float] = {}
    ends = np.zeros(steps)
    for t in range(steps):
        clock = clock + times[t]
        for took, hidden in sent[t]:
            free = max(free, clock.max()) + took
            awaited[t + hidden] = free
        if t in awaited:
            clock = np.maximum(clock, awaited.pop(t))
        ends[t] = clock.max()
    return Timeline(ends, times.sum(axis=0))


def exposed_seconds(exchange: float, compute: float, hidden: int = 0) -> float:
    """What steady steps wait for an exchange that may hide behind ``hidden`` of them.

    Args:
        exchange: seconds.
        compute: seconds of a step.
        hidden: τ, how many steps go by until it is needed.

    Raises:
        ValueError: a negative argument.

    Example:
        >>> exposed_seconds(3.0, 1.0), exposed_seconds(3.0, 1.0, hidden=2)
        (3.0, 1.0)
    """
    for name, value in (("exchange", exchange), ("compute", compute)):
        if not value >= 0:
            raise ValueError(f"{name}={value}: give seconds, 0 or more.")
    if hidden < 0:
        raise ValueError(f"hidden={hidden}: give steps, 0 or more.")
    return max(0.0, exchange - hidden * compute)


def seconds_to(
    target: float, values: ArrayLike, seconds: ArrayLike, *, smoothing: float = 0.0
) -> float:
    r"""When a curve first comes down to ``target``; infinity where it never does.

    .. math:: s_i = \frac{\sum_{j \le i} \beta^{i-j} v_j}{\sum_{j \le i} \beta^{i-j}}

    ``v`` are the values, ``β`` is ``smoothing``: 0 takes them as they are, 0.9 the mean
    of about the last ten. Between two points ``s`` is a straight line. What comes after
    a value that is not finite is not looked at.

    Args:
        target: a loss.
        values: the curve's, ``[points]``.
        seconds: when each was seen, ``[points]``, such as ``Timeline.ends``.
        smoothing: β, from 0 to below 1.

    Raises:
        ValueError: another number of seconds than of values, seconds that fall,
            smoothing outside [0, 1).

    Example:
        >>> losses, times = [4.0, 2.0, 1.0], [0.0, 10.0, 20.0]
        >>> [seconds_to(loss, losses, times) for loss in (5.0, 3.0, 1.5, 0.5)]
        [0.0, 5.0, 15.0, inf]
    """
    curve, at = np.asarray(values, float), np.asarray(seconds, float)
    if curve.ndim != 1 or curve.shape != at.shape:
        raise ValueError(
            f"values {curve.shape} and seconds {at.shape}: give one of each a point."
        )
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing={smoothing} is outside [0, 1); 0 is none.")
    if np.any(np.diff(at) < 0):
        raise ValueError("seconds must not fall: give the time since the start.")
    if np.isnan(target):
        raise ValueError("target is NaN: give a loss.")
    total = weight = 0.0
    before: tuple[float, float] | None = None
    for value, when in zip(curve, at, strict=True):
        if not np.isfinite(value):
            break
        total, weight = smoothing * total + value, smoothing * weight + 1
        smooth = total / weight
        if smooth <= target:
            if before is None:
                return float(when)
            high, since = before
            return float(since + (when - since) * (high - target) / (high - smooth))
        before = smooth, float(when)
    return float("inf")
