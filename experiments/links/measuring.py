"""What is measured of a job: its links, its background, its rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from lowcomm.network import Link

from . import calibration
from .calibration import AFTER
from .counters import Counters
from .job import PORT, Job

TURNS = 5  # from shaped links to unshaped ones and back


def idle(job: Job, seconds: float = 2.0) -> float:
    """Bytes of payload a second that a host sends while nothing is asked of it."""
    before = job.ask("count")
    time.sleep(seconds)
    sent = [one.payload for one in _sent(job, before)]
    return float(np.mean(sent)) / seconds


def obtained(job: Job, rate: float | None) -> float:
    """Bits a second of one connection, of payload; half a second's worth is sent."""
    size = 1 << 26 if rate is None else int(rate / 8 / 2)
    return job.ask("transfer", nbytes=size, port=PORT + 1)[0]


def calibrate(job: Job, rate: float | None, wanted: Iterable[str]) -> dict[str, Link]:
    """The link that each collective finds, of those wanted.

    They go by their names, and by their names and ``AFTER`` where another one went
    before.
    """
    many = calibration.large(rate)
    links: dict[str, Link] = {}
    for name in wanted:
        collective, after = name.removesuffix(AFTER), name.endswith(AFTER)
        probe = lambda nbytes, repeats, after, collective=collective: job.ask(
            "probe", collective=collective, nbytes=nbytes, repeats=repeats, after=after
        )
        few = float(np.median(probe(calibration.SMALL, 30, False)))
        if after:
            before = float(np.median(probe(calibration.SMALL, 30, True))) - few
            seconds = float(np.mean(probe(many, 16, True))) - before
        else:
            seconds = float(np.median(probe(many, 4, False)))
        links[name] = calibration.fit(collective, few, seconds, many, len(job.hosts))
    return links


def rounds(job: Job, name: str, count: int) -> np.ndarray:
    """Seconds of so many rounds of a method, each until the last host is through."""
    return np.max(job.ask("rounds", method=name, rounds=count), axis=0)


def observe(
    job: Job,
    name: str,
    reading: Mapping[str, Any],
    background: float,
    rate: float,
    seconds: float,
    *,
    shape: Callable[[float | None], None],
) -> dict[str, Any]:
    """Rounds of a method: how long each took, and what the kernel counted.

    Args:
        job: on whose hosts it is prepared.
        name: of the method.
        reading: what it is known to send, ``Training.reading``.
        background: bytes a second that are sent anyway.
        rate: of the links, in bits a second.
        seconds: that its rounds should take at least; there are 5 to 30 rounds, and as
            many on links that are not shaped, in turns.
        shape: gives the links a rate, or none.
    """
    trial = rounds(job, name, 1)[0]
    count = int(np.clip(np.ceil(seconds / trial), TURNS, 30))
    before, since = job.ask("count"), time.perf_counter()
    unshaped, took = [], []
    for turn in np.array_split(np.arange(count), TURNS):
        shape(None)
        unshaped += rounds(job, name, len(turn)).tolist()
        shape(rate)
        took += rounds(job, name, len(turn)).tolist()
    whole = time.perf_counter() - since
    sent = _sent(job, before)
    payload = [(one.payload - background * whole) / (2 * count) for one in sent]
    return {
        "rounds": count,
        "unshaped": unshaped,
        "seconds": took,
        "median": float(np.median(took)),
        "kernel": payload,
        "kernel_off": float(max(abs(p / reading["wire"] - 1) for p in payload)),
        "packets": sum(one.packets for one in sent) / len(sent) / (2 * count),
        "retransmitted": sum(one.retransmitted for one in sent),
    }


def _sent(job: Job, before: list[Any]) -> list[Counters]:
    """What each host has sent since."""
    pairs = zip(job.ask("count"), before, strict=True)
    return [Counters(*now).since(Counters(*then)) for now, then in pairs]
