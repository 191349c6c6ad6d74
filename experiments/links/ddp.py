"""The same training in PyTorch, by its DistributedDataParallel, for the race.

Run by ``experiments.links.race --torch PYTHON`` with a Python that has torch: each host
runs this file. What it trains with is in one file that the race writes: the language
model's first parameters, all batches, and the windows that the judge reads, so that
everything but the framework is the same. It imports torch and numpy alone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

import numpy as np


def torch() -> Any:
    """PyTorch, or the end of this process with what is missing."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError:
        sys.exit(f"{sys.executable} has no PyTorch: pip install torch")


def language_model(params: dict[str, np.ndarray], heads: int) -> Any:
    """A module that computes the loss of ``experiments.transformer.LanguageModel``.

    Args:
        params: its first parameters by their paths, ``"Dense_0/kernel"``.
        heads: of the attention.
    """
    t = torch()
    F = t.nn.functional
    plain = {key.replace("/", "_"): value for key, value in params.items()}
    layers = sum(key.startswith("Dense_") for key in plain) // 4

    def norm(x: Any, scale: Any) -> Any:
        return x * t.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale

    def turn(x: Any) -> Any:
        length, size = x.shape[-2:]
        speeds = 1e-4 ** (t.arange(size // 2) / (size // 2))
        angles = t.arange(length)[:, None] * speeds
        cos, sin = t.cos(angles), t.sin(angles)
        a, b = x.chunk(2, dim=-1)
        return t.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def attend(qkv: Any) -> Any:
        n, length, _ = qkv.shape
        q, k, v = qkv.reshape(n, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return mixed.transpose(1, 2).reshape(n, length, -1)

    class Model(t.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = {key: t.from_numpy(value.copy()) for key, value in plain.items()}
            self.weights = t.nn.ParameterDict(first)

        def forward(self, text: Any) -> Any:
            w = self.weights
            kernel = lambda i: w[f"Dense_{i}_kernel"]
            scaled = lambda x, i: norm(x, w[f"RMSNorm_{i}_scale"])
            x = F.pad(w["Embed_0_embedding"][text[:, :-1]], (0, 0, 1, 0))
            for i in range(layers):
                mixed = attend(scaled(x, 2 * i) @ kernel(4 * i))
                x = x + mixed @ kernel(4 * i + 1)
                hidden = F.relu(scaled(x, 2 * i + 1) @ kernel(4 * i + 2))
                x = x + hidden @ kernel(4 * i + 3)
            logits = scaled(x, 2 * layers) @ w["head_kernel"]
            return F.cross_entropy(logits.flatten(0, 1), text.flatten())

    return Model()


def race(path: str, *, every: int, target: float | None, rate: float) -> list[Any]:
    """Step, seconds and held-out loss, until it is at ``target`` or batches end."""
    t = torch()
    dist = t.distributed
    with np.load(path) as found:
        arrays = {key: found[key] for key in found.files}
    rank = dist.get_rank()
    batches = t.from_numpy(arrays["batches"][:, rank].astype(np.int64))
    judge = t.from_numpy(arrays["judge"].astype(np.int64))
    params = {
        key.removeprefix("params/"): value
        for key, value in arrays.items()
        if key.startswith("params/")
    }
    model = language_model(params, int(arrays["heads"]))
    parallel = t.nn.parallel.DistributedDataParallel(model)
    optimizer = t.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-4)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        parallel(batch).backward()
        optimizer.step()

    first = {key: value.clone() for key, value in model.state_dict().items()}
    for _ in range(2):  # connections are made, and buckets ordered
        step(batches[0])
    model.load_state_dict(first)
    optimizer.state.clear()
    clock, curve = 0.0, []
    for start in range(0, len(batches), every):
        dist.barrier()
        since = time.perf_counter()
        for batch in batches[start : start + every]:
            step(batch)
        dist.barrier()
        clock += time.perf_counter() - since
        with t.no_grad():
            loss = float(np.mean([float(model(part)) for part in judge.split(64)]))
        at = min(start + every, len(batches))
        curve.append({"step": at, "seconds": clock, "loss": loss})
        if target is not None and loss <= target:
            break
    return curve


if __name__ == "__main__":
    to_director = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch().set_num_threads(1)
    torch().distributed.init_process_group("gloo")
    for line in sys.stdin:
        request = json.loads(line)
        request.pop("do")
        answer = race(request.pop("path"), **request)
        print(json.dumps(answer), file=to_director, flush=True)
