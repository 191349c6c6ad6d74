"""A method in training, one worker a host."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import lowcomm as lc
from experiments.tasks import least_squares, make_task

from . import wire
from .methods import Recipe

TOY = "toy"  # a task that compiles at once


def task_of(name: str, size: str, workers: int, seed: int) -> Any:
    """The task of a run; each host takes its own worker's part of the batches."""
    if name == TOY:
        wide: Any = {"inputs": 64, "outputs": 1024, "examples": 64}
        return least_squares(workers=workers, batch_size=8, seed=seed, **wide)
    return make_task(name, workers=workers, batch_size=8, size=size, seed=seed)


class Training:
    """A method in the middle of its training, on all hosts.

    Args:
        recipe: the method.
        task: what is trained.
        mesh: one device a host.
        me: the number of this host.
        rate: of AdamW, the inner optimizer.
        seed: of the first parameters.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: Any,
        *,
        mesh: Mesh,
        me: int,
        rate: float,
        seed: int,
    ):
        """See the class."""
        self.recipe, self.task, self.mesh, self.me = recipe, task, mesh, me
        self.tx = recipe.make(optax.adamw(rate), mesh.size)
        self.step = lc.counted_step(task.loss, self.tx, workers=mesh.size, mesh=mesh)
        self.model = task.init(jax.random.key(seed))
        self.params = lc.stack(self.model, mesh.size, mesh=mesh)
        self.state = lc.init(self.tx, self.params, mesh=mesh)
        self.t = 0

    def batch(self, t: int) -> Any:
        """This host's part of the batch, as all hosts' array."""
        own = jax.tree.map(lambda x: x[self.me : self.me + 1], self.task.batches(t))
        return lc.feed(own, self.mesh)

    def one(self) -> Any:
        """One step, to its end; what it sent."""
        self.params, self.state, metrics, sent = self.step(
            self.params, self.state, self.batch(self.t), self.t
        )
        self.t += 1
        lc.at_hand(metrics["loss"])  # waits
        return sent

    def round(self) -> float:
        """Seconds of one round."""
        since = time.perf_counter()
        for _ in range(self.recipe.period):
            self.one()
        return time.perf_counter() - since

    def compiled(self, t: int) -> lc.Traffic:
        """What step ``t`` sends, in the order in which XLA's program sends it."""
        worker = lc.local_step(self.task.loss, self.tx)
        step = lambda params, state, batch: worker(params, state, batch, t)
        program = jax.jit(lc.spread(step, mesh=self.mesh))
        lowered = program.lower(self.params, self.state, self.batch(t))
        return lc.compiled_traffic(lowered.compile(), mesh=self.mesh)

    def reading(self) -> dict[str, Any]:
        """A first round: its bytes by formula, by compiled program and by meter."""
        steps: list[list[dict[str, Any]]] = []
        metered, compiled, on_wire = 0, 0, 0.0
        programs: dict[int, lc.Traffic] = {}
        for _ in range(self.recipe.period):
            sent = self.one()
            ran = lc.at_hand(sent.counts)[0]
            metered += sent.traffic.bytes(ran)
            on_wire += wire.expected(sent.traffic, ran, self.mesh.size)
            if sent.program not in programs:
                programs[sent.program] = self.compiled(self.t - 1)
            program = programs[sent.program]
            compiled += program.bytes_max
            steps.append(
                [
                    {"collective": row.collective, "bytes": row.bytes}
                    for row in program.rows
                    for _ in range(row.count or 0)
                ]
            )
        return {
            "period": self.recipe.period,
            "formula": self.recipe.sent(self.model, self.mesh.size),
            "compiled": compiled,
            "meter": metered,
            "wire": on_wire,
            "steps": steps,
        }

    def race(
        self, *, most: int, every: int, target: float | None
    ) -> list[dict[str, float]]:
        """Train until the held-out loss is at ``target``, or for ``most`` steps.

        The clock stands while the consensus is evaluated, every so many steps or every
        round, whichever is longer, and it began when everything was compiled.
        """
        self._rehearse()
        consensus = jax.jit(lc.spread(lc.consensus, mesh=self.mesh))
        every, clock, curve = max(every, self.recipe.period), 0.0, []
        while self.t < most:
            self._meet()
            since = time.perf_counter()
            for _ in range(min(every, most - self.t)):
                self.one()
            self._meet()
            clock += time.perf_counter() - since
            model = lc.at_hand(consensus(self.state, self.params))
            model = jax.tree.map(lambda x: x[0], model)
            loss = self.task.evaluate(model)["loss"]
            curve.append({"step": self.t, "seconds": clock, "loss": loss})
            if not np.isfinite(loss) or (target is not None and loss <= target):
                break
        return curve

    def _rehearse(self) -> None:
        """A round that leaves nothing but compiled programs."""
        carry = jax.tree.map(jnp.copy, (self.params, self.state))
        self.round()
        self._meet()
        (self.params, self.state), self.t = carry, 0

    def _meet(self) -> None:
        """Wait for all hosts."""
        if not hasattr(self, "_meeting"):
            mean = lc.mean()
            meet = lambda x: mean.update(x, mean.init(x), None, step=0)[0]
            self._meeting = jax.jit(lc.spread(meet, mesh=self.mesh))
        lc.at_hand(self._meeting(lc.feed(np.ones((1, 1), np.float32), self.mesh)))
