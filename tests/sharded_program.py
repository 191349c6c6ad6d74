"""What each of two processes does in ``test_sharded_processes``, and one does alone.

Two workers of two devices each: a process holds one worker, or half of both.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import lowcomm as lc
from experiments import sharding
from experiments.tasks import least_squares
from lowcomm.checkpoint import Checkpoints

K, FSDP, STEPS = 2, 2, 4
TASK = least_squares(workers=K, batch_size=8)
MODEL = {"x": np.zeros((16, 8), np.float32)}  # as the task has it, without JAX
SPECS = sharding.specs(MODEL, {"fsdp": FSDP})
METHODS = {
    "diloco": lc.diloco(optax.adam(0.05), period=2),
    "sign_sgd": lc.sign_sgd(optax.sgd(0.01, momentum=0.5)),
}


def meshes() -> dict[str, Mesh]:
    """The first device of a worker is on process 0, and the second there or not."""
    whole = lc.worker_mesh(K, inside={"fsdp": FSDP})
    halves = whole.devices.T  # of two processes each now holds half of every worker
    return {"worker each": whole, "half each": Mesh(halves, whole.axis_names)}


def begun(name, mesh):
    """The parameters and state before the first step."""
    params = lc.stack(MODEL, K, mesh=mesh, specs=SPECS)
    return params, lc.init(lc.sharded(METHODS[name], SPECS), params, mesh=mesh)


def train(name, mesh, carry=None, start=0, steps=STEPS):
    """The parameters and state after some steps of a method."""
    mine = lc.workers_at_hand(mesh)
    tx = lc.sharded(METHODS[name], SPECS)
    params, state = carry or (MODEL, None)
    run = lc.fit(
        sharding.divided(TASK.loss, {"fsdp": FSDP}),
        tx,
        params,
        lambda t: lc.feed(TASK.batches(t, mine), mesh),
        steps=steps - start,
        start=start,
        workers=K,
        state=state,
        mesh=mesh,
        specs=SPECS,
    )
    return run.params, run.state


def pieces(carry) -> dict[str, np.ndarray]:
    """Each leaf's parts here, by the entries of the whole that they are."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(carry):
        for part in x.addressable_shards:
            where = [i.indices(n)[:2] for i, n in zip(part.index, x.shape, strict=True)]
            name = f"{jax.tree_util.keystr(path)} {where}"
            found[name] = np.asarray(part.data)
    return found


def main(folder: Path) -> None:
    """Train half of the steps on one mesh and the rest on the other, and write it."""
    if (processes := lc.join()) > 1:
        jax.config.update("jax_num_cpu_devices", K * FSDP // processes)
    found = {}
    first, second = meshes().values()
    for name in METHODS:
        half = train(name, first, steps=STEPS // 2)
        found |= {f"{name} saved {key}": part for key, part in pieces(half).items()}
        with Checkpoints(folder / name) as saved:
            saved.save(STEPS // 2, half)
            same = saved.restore(begun(name, first))[1]
            step, other = saved.restore(begun(name, second))
        found |= {f"{name} same {key}": part for key, part in pieces(same).items()}
        ended = train(name, second, other, start=step)
        found |= {f"{name} ended {key}": part for key, part in pieces(ended).items()}
    np.savez(folder / f"{jax.process_index()}.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
