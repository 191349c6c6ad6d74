"""What each of several processes does in ``test_processes``, and what one does alone.

Several methods on eight workers, a checkpoint that is taken up in the middle, and what
of all this belongs to the workers of this process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm as lc
from experiments.tasks import least_squares
from lowcomm.agreement import Disagreement, gathered
from lowcomm.checkpoint import Checkpoints

K, STEPS, PERIOD, RATE = 8, 12, 4, 0.02
SGD = optax.sgd(RATE)
METHODS = {
    "data_parallel": lambda: lc.data_parallel(SGD),
    "diloco": lambda: lc.diloco(SGD, period=PERIOD),
    "top_k_sgd": lambda: lc.top_k_sgd(SGD, fraction=0.1),
    "sign_sgd": lambda: lc.sign_sgd(SGD),
    "dpsgd": lambda: lc.dpsgd(SGD, graph=lc.ring(K)),
    "selsync": lambda: lc.selsync(SGD, threshold=0.2, window=2),
}
TASK = least_squares(workers=K, batch_size=16)


def trained(name: str, mesh, model=None, **how):
    """The run of one method; each process builds the rows of its own workers."""
    mine = lc.workers_at_hand(mesh)
    batches = lambda t: lc.feed(TASK.batches(t, mine), mesh)
    model = TASK.init(jax.random.key(0)) if model is None else model
    how = {"steps": STEPS, "workers": K, "mesh": mesh} | how
    return lc.fit(TASK.loss, METHODS[name](), model, batches, **how)


def in_two_parts(name: str, mesh, folder: Path):
    """The same, saved in the middle of a round and gone on with from the file."""
    half = trained(name, mesh, steps=STEPS // 2)
    with Checkpoints(folder) as saved:
        saved.save(STEPS // 2, (half.params, half.state))
        saved.wait()
        step, (params, state) = saved.restore((half.params, half.state))
        try:
            saved.restore({"another": half.params})
        except ValueError as problem:
            refused = str(problem)
    rest = {"state": state, "start": step, "steps": STEPS - step}
    return trained(name, mesh, params, **rest), refused


def refused_runs(mesh, me: int) -> dict[str, str]:
    """What is said where process 0 trains otherwise than the others."""

    def train(
        period=PERIOD,
        steps=2 * PERIOD,
        rate=RATE,
        size=16,
        at=mesh,
        start=0.0,
        note=None,
    ):
        task = least_squares(workers=K, batch_size=size)
        mine = lc.workers_at_hand(at)

        def loss(params, batch):
            if note:
                jax.debug.callback(lambda x: None, note)
                jax.debug.print(note + " {}", params["x"][0, 0], ordered=False)
            return task.loss(params, batch)

        lc.fit(
            loss,
            lc.local_sgd(optax.sgd(rate), period=period),
            {"x": start + task.init(jax.random.key(0))["x"]},
            lambda t: lc.feed(task.batches(t, mine), at),
            steps=steps,
            workers=K,
            mesh=at,
        )

    turned = np.roll(mesh.devices, 1)
    others = {
        "steps": {"steps": PERIOD},
        "period": {"period": PERIOD + 1},
        "rate": {"rate": RATE / 2},
        "array": {"rate": jnp.float32(RATE)},
        "batch": {"size": 8},
        "devices": {"at": jax.sharding.Mesh(turned, mesh.axis_names)},
        "start": {"start": 1.0},
        "note": {"note": "of another"},
    }
    first = {"array": {"rate": jnp.float32(2 * RATE)}, "note": {"note": "of the first"}}
    said = {}
    for name, how in others.items():
        try:
            train(**(how if me else first.get(name, {})))
            said[name] = "nothing"
        except Disagreement as problem:
            said[name] = str(problem)
    return said


def by_itself(me: int) -> float:
    """A run of this process alone, which is no matter of the others."""
    here = jax.sharding.Mesh(np.array(jax.local_devices()[:2]), (lc.AXIS,))
    task = least_squares(workers=2, batch_size=16)
    run = None
    for mesh in (None, here):
        tx = lc.local_sgd(optax.sgd(RATE), period=2 + me)
        how = {"steps": 4 + me, "workers": 2, "mesh": mesh}
        run = lc.fit(task.loss, tx, task.init(jax.random.key(me)), task.batches, **how)
    return float(run.losses.mean())


def consensus(run, mesh):
    """The model that the workers stand for, from the workers at hand."""
    agreed = jax.jit(lc.spread(lc.consensus, mesh=mesh))(run.state, run.params)
    return lc.unstack(agreed)["x"]


def main(folder: Path, failing: int) -> None:
    """Train with the others, and write down what this process has of it."""
    processes = lc.join()
    jax.config.update("jax_num_cpu_devices", K // processes)
    lc.check_alike({"steps": STEPS})
    mesh, me = lc.worker_mesh(), jax.process_index()
    found = {"workers": lc.workers_at_hand(mesh)}
    for name in METHODS:
        run = trained(name, mesh)
        found[f"{name} losses"] = run.losses
        found[f"{name} params"] = lc.at_hand(run.params)["x"]
        found[f"{name} payload"] = run.payload
        found[f"{name} consensus"] = consensus(run, mesh)
    run, refused = in_two_parts("top_k_sgd", mesh, folder / "checkpoints")
    found["resumed params"] = lc.at_hand(run.params)["x"]
    told = {
        "processes": processes,
        "refused": refused,
        "others": gathered(f"I am {me}"),
        "unlike": refused_runs(mesh, me),
        "by itself": by_itself(me),
    }
    try:
        lc.unstack(run.params, worker=(found["workers"][0] - 1) % K)
    except ValueError as problem:
        told["not here"] = str(problem)
    np.savez(folder / f"{me}.npz", **found)
    (folder / f"{me}.json").write_text(json.dumps(told))
    gathered("written")
    if me == failing:
        raise ValueError("this one fails")
    gathered("and the others wait for it")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
