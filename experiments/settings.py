"""What every training program asks for on its command line, and what it makes of it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import optax

import lowcomm as lc
from lowcomm.agreement import code_of
from lowcomm.network import parse_latency

from . import language
from .catalogue import CATALOGUE
from .contracts import Method
from .measure import Where
from .names import lookup
from .splits import find_split
from .task import Task
from .tasks import TASKS, make_task

INNER = {
    "sgd": lambda s, rate: optax.sgd(rate, momentum=s.momentum),
    "adam": lambda s, rate: optax.adam(rate),
    "adamw": lambda s, rate: optax.adamw(rate, weight_decay=s.weight_decay),
    "lion": lambda s, rate: optax.lion(rate, weight_decay=s.weight_decay),
}


@dataclass(frozen=True)
class Common:
    """What is trained, by whom, over which link, and how the run is kept."""

    task: str = "mnist-mixer"
    """One of mnist-mixer, mnist-cnn, fashion-mixer, fashion-cnn, digits, stdlib-lm,
    kjv-lm, least-squares."""
    workers: int = 8
    steps: int = 320
    batch_size: int | None = None
    """Examples a worker takes in a step; default: 8 windows of text, or 32."""
    split: str = "iid"
    """How examples go to workers: iid, whole (all to everybody), sorted (by label, or
    by source of the text) or dirichlet."""
    alpha: float = 0.5
    """Concentration of the dirichlet split; small is uneven."""
    heterogeneity: float = 1.0
    """How far least-squares workers disagree."""
    size: str = "0.5m"
    """Of the language model: 0.5m or 3m parameters."""
    length: int = 64
    """Bytes a language model reads at once."""
    inner: Literal["auto", "sgd", "adam", "adamw", "lion"] = "auto"
    """The inner optimizer; auto: adamw for language models, else sgd."""
    learning_rate: float | None = None
    """Instead of the rate the method was tuned to."""
    momentum: float = 0.9
    """Of sgd."""
    weight_decay: float = 1e-4
    """Of adamw and lion."""
    period: int | None = None
    """Steps from sync to sync, instead of the method's own."""
    fraction: float = 0.05
    """Share of the entries that top_k_sgd sends."""
    threshold: float = 0.07
    """Relative change of the gradients at which selsync syncs."""
    window: int = 25
    """Steps over which selsync smooths the gradients."""
    bandwidth: str = "100Mbit"
    """Of the imagined link, per second."""
    latency: str = "20ms"
    """Of the imagined link, one way."""
    compute: str | None = None
    """Time of a step without its traffic, such as 5ms; measured here by default, where
    all workers share this machine."""
    evaluations: int = 20
    """Points of a curve."""
    backend: Literal["vmap", "shard_map", "pmap"] = "vmap"
    """Virtual workers, or devices (simulated on a CPU)."""
    fsdp: int = 1
    """Devices of a worker that share its parameters and examples, on shard_map."""
    tensor: int = 1
    """Devices that share its matrix products: a worker has fsdp x tensor of them."""
    save_every: int = 50
    """Steps from checkpoint to checkpoint; 0 saves none."""
    resume: bool = False
    """Go on with the run in --out where it was stopped, if there is one."""
    out: Path | None = None
    """Folder for the output, without another run in it; default: a new one in runs/."""


# What may change from a run to its continuation.
FREE = ("out", "resume", "save_every", "processes", "resize")


def fixed(settings: Common) -> dict[str, Any]:
    """The settings that a run's numbers depend on."""
    return {k: v for k, v in asdict(settings).items() if k not in FREE}


def check(settings: Common, *, counts: tuple[str, ...] = ()) -> None:
    """Refuse what cannot run; touches no data and no devices.

    ``counts`` are further settings that must be at least 1.
    """
    lookup(dict.fromkeys(TASKS), settings.task, "task")
    find_split(settings.split, alpha=settings.alpha)
    sizes = ("workers", "fsdp", "tensor")
    for name in (*sizes, "steps", "batch_size", "evaluations", "period", *counts):
        value = getattr(settings, name)
        if value is not None and value < 1:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} must be at least 1, not {value}")
    if settings.save_every < 0:
        raise ValueError(f"--save-every cannot be {settings.save_every}")
    if settings.resume and settings.out is None:
        raise ValueError("--resume needs --out, the folder of the run to go on with")
    _link(settings)


def share(settings: Common, processes: int) -> int:
    """How many devices each of several processes has for its workers.

    Raises ``ValueError`` where they cannot have equally many, or cannot run together.
    """
    group = settings.fsdp * settings.tensor
    if settings.workers * group % processes:
        each = f" of {group} devices" if group > 1 else ""
        raise ValueError(
            f"--workers {settings.workers}{each} cannot be shared out evenly among "
            f"{processes} processes: give a multiple of {processes}"
        )
    if processes > 1 and settings.backend == "pmap":
        raise ValueError("--backend pmap runs in one process: leave it out")
    if processes == 1 and group > 1 and settings.backend != "shard_map":
        raise ValueError("--fsdp and --tensor need --backend shard_map")
    return settings.workers * group // processes


def place(settings: Common, *, processes: int = 1) -> Where:
    """Where it runs: virtual workers, or devices, of all processes that have joined.

    Raises ``Disagreement`` where these were started with other settings or other code.
    """
    devices, mesh = share(settings, processes), None
    if settings.backend != "vmap":
        # Only before the backend starts; after that the mesh says what is missing.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices)
        if processes > 1:
            asked = {"settings": asdict(settings), "code of experiments": _code()}
            lc.check_alike(json.loads(json.dumps(asked, default=str)))
        inside = {"fsdp": settings.fsdp, "tensor": settings.tensor}
        inside = {name: size for name, size in inside.items() if size > 1}
        mesh = lc.worker_mesh(settings.workers, inside=inside)
    link, compute = _link(settings)
    return Where(settings.workers, link, mesh, settings.backend, compute, processes)


def _code() -> dict[str, str]:
    return code_of(Path(__file__).parent)


def _link(settings: Common) -> tuple[lc.Link, float | None]:
    link = lc.Link.parse(settings.bandwidth, settings.latency)
    if settings.compute is None:
        return link, None
    try:
        return link, parse_latency(settings.compute)
    except ValueError:
        raise ValueError(
            f"--compute {settings.compute!r}: write seconds such as '5ms'."
        ) from None


def examples(settings: Common) -> int:
    """How many examples a worker takes in a step."""
    return settings.batch_size or (8 if settings.task in language.CORPORA else 32)


def task(settings: Common, seed: int) -> Task:
    """The task of one seed."""
    return make_task(
        settings.task,
        workers=settings.workers,
        batch_size=examples(settings),
        split=settings.split,
        alpha=settings.alpha,
        heterogeneity=settings.heterogeneity,
        size=settings.size,
        length=settings.length,
        seed=seed,
    )


def inner_name(settings: Common) -> str:
    """The inner optimizer that was asked for."""
    if settings.inner != "auto":
        return settings.inner
    return "adamw" if settings.task in language.CORPORA else "sgd"


def tuned(settings: Common) -> list[str]:
    """The methods with a rate for this inner optimizer: all, where one is given."""
    flat = {name: m for name, m in CATALOGUE.items() if m.axis == lc.AXIS}
    rates = [(name, _tuned(m, inner_name(settings))) for name, m in flat.items()]
    return [n for n, rate in rates if rate or settings.learning_rate is not None]


def _tuned(method: Method, inner: str) -> float | None:
    return {"sgd": method.learning_rate, "adamw": method.adamw_rate}.get(inner)


def learning_rate(settings: Common, name: str) -> float:
    """The rate asked for, or the one the method was tuned to.

    Raises ``ValueError`` for an inner optimizer with which no rate was tuned.
    """
    if settings.learning_rate is not None:
        return settings.learning_rate
    inner = inner_name(settings)
    rate = _tuned(CATALOGUE[name], inner)
    if rate is None:
        raise ValueError(
            f"no rate was tuned for {name} around {inner}: give --learning-rate"
        )
    return rate


def transformation(settings: Common, name: str) -> Any:
    """The method of that name around the inner optimizer that was asked for.

    Raises ``ValueError`` for one whose workers are on two axes, as no task has them.
    """
    if (axis := CATALOGUE[name].axis) != lc.AXIS:
        raise ValueError(
            f"{name} is for workers on the axes {' and '.join(axis)}, and those of a "
            "task are on one: choose another method"
        )
    rate = learning_rate(settings, name)
    setting: dict[str, Any] = {
        key: getattr(settings, key) for key in ("fraction", "threshold", "window")
    }
    if settings.period is not None:
        setting["period"] = settings.period
    return CATALOGUE[name].make(
        workers=settings.workers,
        steps=settings.steps,
        learning_rate=rate,
        inner=INNER[inner_name(settings)](settings, rate),
        **setting,
    )
