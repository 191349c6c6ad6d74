"""What PyTorch trains with in the race, in one file: parameters, batches, judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np


def save(path: Path, task: Any, heads: int, *, seed: int, steps: int) -> None:
    """Write the first parameters, so many batches, and the windows of the judge."""
    params = jax.device_get(task.init(jax.random.key(seed)))["params"]
    spell = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    _, judge = task.evaluate.args  # the model, and the windows
    arrays: dict[str, Any] = {
        "heads": np.int64(heads),
        "batches": np.stack([task.batches(t) for t in range(steps)]),
        "judge": judge,
        **{f"params/{spell(at)}": np.asarray(leaf) for at, leaf in leaves},
    }
    np.savez(path, **arrays)
