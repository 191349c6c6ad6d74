"""What a step of PowerSGD costs beside PyTorch's hook: paired times in one process.

    python -m experiments.benchmarks.lowrank

One worker compresses the gradients of a small transformer, once by ``powersgd`` under
``jit`` and once by the ``powerSGD_hook`` of torch's DistributedDataParallel itself, in
a gloo group of one process, on a bucket that answers what the hook asks of DDP's. Both
alternate, ABBA, on the same matrices and all cores. Copying the gradients into the
bucket, which the hook overwrites, is not counted.

PyTorch is no dependency; install it beside the project (``pip install torch``), or only
the times of ``powersgd`` are shown.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import lowcomm as lc


@dataclass(frozen=True)
class Settings:
    """On what to measure, and how long."""

    ranks: tuple[int, ...] = (1, 4, 16)
    widths: tuple[int, ...] = (256, 768)
    layers: int = 4
    pairs: int = 30


def gradients(width: int, layers: int) -> list[np.ndarray]:
    """The matrices and vectors of so many transformer layers."""
    rng = np.random.default_rng(0)
    shapes = [
        (width, 3 * width),
        (width, width),
        (width, 4 * width),
        (4 * width, width),
        (width,),
        (4 * width,),
    ]
    return [
        rng.normal(size=shape).astype(np.float32)
        for shape in shapes
        for _ in range(layers)
    ]


def ours(grads: list[np.ndarray], rank: int) -> Callable[[], float]:
    """Milliseconds of a step of ``powersgd`` on one device."""
    mesh, tx = lc.worker_mesh(1), lc.powersgd(rank)
    stacked = lc.stack([jnp.asarray(g) for g in grads], 1, mesh=mesh)
    step = lc.spread(lambda g, state: tx.update(g, state), mesh=mesh)
    compiled = jax.jit(step, donate_argnums=1)
    state = lc.init(tx, stacked, mesh=mesh)

    def once() -> float:
        nonlocal state
        start = time.perf_counter()
        _, state = jax.block_until_ready(compiled(stacked, state))
        return 1e3 * (time.perf_counter() - start)

    return once


def theirs(torch: Any, grads: list[np.ndarray], rank: int) -> Callable[[], float]:
    """Milliseconds of a call of torch's hook."""
    hooks = importlib.import_module(
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
    )
    flat = torch.from_numpy(np.concatenate([g.ravel() for g in grads]))
    buffer = flat.clone()
    views = [
        part.view(g.shape)
        for part, g in zip(buffer.split([g.size for g in grads]), grads, strict=True)
    ]

    class Bucket:
        """What the hook asks of a bucket of DDP."""

        index = staticmethod(lambda: 0)
        buffer = staticmethod(lambda: buffer)
        gradients = staticmethod(lambda: views)
        parameters = staticmethod(lambda: views)
        is_last = staticmethod(lambda: True)

    state = hooks.PowerSGDState(
        process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2
    )
    state.iter = 2  # the steps before are dense

    def once() -> float:
        buffer.copy_(flat)
        start = time.perf_counter()
        hooks.powerSGD_hook(state, Bucket()).wait()
        return 1e3 * (time.perf_counter() - start)

    return once


def paired(a: Callable[[], float], b: Callable[[], float], pairs: int) -> np.ndarray:
    """``[pairs, 2]`` times of ``a`` and ``b``, alternating ABBA."""
    for f in (a, b, a, b):
        f()
    rows = []
    for i in range(pairs):
        rows.append((a(), b()) if i % 2 else (b(), a())[::-1])
    return np.array(rows)


def load_torch() -> Any:
    """PyTorch with a group of this process alone, or None where it is not installed."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    torch.set_num_threads(os.cpu_count() or 1)
    file = os.path.join(tempfile.mkdtemp(), "group")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=0, world_size=1
    )
    return torch


def main(settings: Settings) -> None:
    """Measure and print."""
    console, torch = Console(), load_torch()
    if torch is None:
        console.print("torch is not installed: pip install torch. powersgd alone:")
    table = Table(title=f"{settings.layers} layers, medians of {settings.pairs} pairs")
    columns = ("width", "million numbers", "rank", "powersgd ms", "hook ms", "ratio")
    for column in columns:
        table.add_column(column)
    for width in settings.widths:
        grads = gradients(width, settings.layers)
        for rank in settings.ranks:
            a = ours(grads, rank)
            b = a if torch is None else theirs(torch, grads, rank)
            times = paired(a, b, settings.pairs)
            mine, other = np.median(times, axis=0)
            ratio = np.median(times[:, 0] / times[:, 1])
            size = sum(g.size for g in grads) / 1e6
            compared = ("", "") if torch is None else (f"{other:.2f}", f"{ratio:.2f}")
            table.add_row(
                str(width), f"{size:.1f}", str(rank), f"{mine:.2f}", *compared
            )
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Settings))
