"""A method in the setting of the laws: what is run once and read by many of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..leaves import PyTree
from ..spmd import AXIS, Axis
from ..steps import local_step
from ..train import Run, fit
from .equality import Broken, NotApplicable, apart, difference, magnitude
from .problems import (
    Carry,
    host,
    initializer,
    place_of,
    sizes_of,
    squares,
    start,
    stepper,
    targets,
    walk,
)
from .traces import same_each_time

LOOK_AHEAD = 64  # steps in which a method must have talked
ROUGH = 2.0**-10  # a state may come from ill-conditioned arithmetic; a bug is larger


def heavy_ball(rate: float) -> optax.GradientTransformation:
    """The inner optimizer; with a binary rate its arithmetic is exact on integers."""
    return optax.sgd(rate, momentum=0.5)


class Program(NamedTuple):
    """A step: as it is traced, compiled, and how often it was traced."""

    step: Callable
    call: Callable
    traces: list[Any]


def once(f: Callable) -> Callable:
    """Remember what a method of the subject returned for these arguments."""

    kind = inspect.signature(f)

    @functools.wraps(f)
    def remembered(self, *args, **more):
        given = kind.bind(self, *args, **more)
        given.apply_defaults()
        key = (f.__name__, *given.args[1:])
        if key not in self.memory:
            self.memory[key] = f(self, *args, **more)
        return self.memory[key]

    return remembered


@dataclass(eq=False)
class Subject:
    """A method, what it declares, and what has been run of it.

    Attributes:
        build: from an inner optimizer, a number of workers and of steps to the method.
        workers: how many, where a law does not ask for another number.
        steps: how many, from step 0.
        counted: whether it is told how many workers there are.
        fixed_inner: why it is made with its own inner optimizer only, or "".
        fixed_workers: why it is made for its own number of workers only, or "".
        exact: how many steps stay exact in float32 on small integers. Where it is
            declared, bits are asked for that long, and for ever where nothing need be
            rounded; where it is None, equality to rounding will do.
        smooth: whether a rounding stays a rounding (false for signs and selections).
        bitwise: whether all workers hold the same bits right after a sync.
        syncs: after every so many steps all workers agree; or "measured"; or unknown.
        kinds: of steps, where not all are of one kind; a program each.
        axis: the name it talks along, or several.
        extra_args: of ``local_step``.
    """

    build: Callable[[Any, int, int], optax.GradientTransformation]
    workers: int = 4
    steps: int = 8
    counted: bool = True
    fixed_inner: str = ""
    fixed_workers: str = ""
    exact: int | None = None
    smooth: bool | None = None
    bitwise: bool = False
    syncs: int | str | None = None
    kinds: int = 2
    axis: Axis = AXIS
    extra_args: Callable[[PyTree], dict] | None = None
    memory: dict = field(default_factory=dict)

    @property
    def strict(self) -> bool:
        """Whether the method declares how exact it is, and is held to it."""
        return self.exact is not None

    @property
    def patience(self) -> int:
        """In how many steps the model must have improved.

        What is not sent at once, and remembered, may make it worse at first.
        """
        return self.steps if self.strict else 8 * self.steps

    @property
    def rate(self) -> float:
        """The learning rate: 1/2 stays exact for long, 1/16 suits noisy methods too."""
        return 0.5 if self.strict else 0.0625

    @property
    def roundings(self) -> int:
        """What a path may have gathered, in units of eps.

        A step sums K values and does fewer than eight operations more, and errors of
        earlier steps do not grow, since the dynamics contract.
        """
        return self.steps * (self.workers + 8)

    def method(
        self, inner: Any = None, workers: int | None = None, steps: int | None = None
    ) -> optax.GradientTransformation:
        """The transformation, made anew."""
        return self.build(
            heavy_ball(self.rate) if inner is None else inner,
            workers or self.workers,
            steps or self.steps,
        )

    def own_inner(self) -> None:
        """Stop unless the inner optimizer may be chosen."""
        if self.fixed_inner:
            raise NotApplicable(self.fixed_inner)

    def own_workers(self) -> None:
        """Stop unless the number of workers may be chosen."""
        if self.fixed_workers:
            raise NotApplicable(self.fixed_workers)

    def devices(self, backend: str) -> None:
        """Stop unless this backend can run here."""
        seen = len(jax.devices())
        if backend != "vmap" and seen < self.workers:
            raise NotApplicable(f"needs {self.workers} devices, JAX sees {seen}")
        if backend == "pmap" and not isinstance(self.axis, str):
            raise NotApplicable("pmap has one axis")

    def targets(self, **more: Any) -> PyTree:
        """The targets of its workers."""
        return targets(self.workers, **more)

    @property
    def how(self) -> dict[str, Any]:
        """What every worker's step is made with."""
        return {"axis": self.axis, "extra_args": self.extra_args}

    @property
    def where(self) -> dict[str, Any]:
        """What every first carry is made with."""
        return {"workers": self.workers, "axis": self.axis}

    @property
    def setting(self) -> dict[str, Any]:
        """What every step of stacked trees is made with."""
        return self.where | self.how

    @once
    def program(self, backend: str = "vmap", workers: int | None = None) -> Program:
        """The step in the setting of the laws, compiled once."""
        n, traces = workers or self.workers, []
        step = stepper(self.method(workers=n), backend=backend, workers=n, **self.how)

        def counted(carry, target, t):
            traces.append(t)
            return step(carry, target, t)

        return Program(step, jax.jit(counted), traces)

    @once
    def traced(self) -> Any:
        """The program of one worker's step, which is the same whenever it is traced."""
        worker = local_step(squares, self.method(), **self.how)
        one = jax.tree.map(lambda x: x[0], (*self.first(), self.targets()))
        sizes = sizes_of(self.workers, self.axis)
        return same_each_time(worker, (*one, jnp.int32(0)), sizes)

    @once
    def half(self) -> Callable:
        """The compiled step for bfloat16 parameters."""
        return jax.jit(stepper(self.method(), **self.setting))

    @once
    def first(self, backend: str = "vmap", workers: int | None = None) -> Carry:
        """The first carry on a backend; copy it to donate it."""
        return self.initializer(backend, workers)(start())

    @once
    def initializer(self, backend: str = "vmap", workers: int | None = None):
        """``params -> carry``, compiled once."""
        n = workers or self.workers
        tx = self.method(workers=n)
        return initializer(tx, backend=backend, workers=n, axis=self.axis)

    @once
    def path(self, backend: str = "vmap", binary: bool = True) -> list[Carry]:
        """The carries after each step."""
        self.devices(backend)
        step, target = self.program(backend).call, self.targets(binary=binary)
        return walk(step, self.first(backend), target, steps=self.steps)

    @once
    def alone(self) -> list[Carry]:
        """The path of one worker, the first, with nobody to talk to."""
        target = jax.tree.map(lambda x: x[:1], self.targets())
        step = self.program(workers=1).call
        return walk(step, self.first(workers=1), target, steps=self.steps)

    def step(self, carry: Carry, t: int, backend: str = "vmap") -> Carry:
        """One step from a carry of numpy arrays, placed as the backend places it."""
        if backend != "vmap":
            put = lambda x, like: jax.device_put(x, like.sharding)
            carry = jax.tree.map(put, carry, self.first(backend))
        return host(self.program(backend).call(carry, self.targets(), jnp.int32(t)))

    @once
    def fitted(self) -> tuple[Run, list[Carry]]:
        """What ``fit`` makes of it on virtual workers, and the path there."""
        path = []
        made = fit(
            squares,
            self.method(),
            start(),
            lambda t: self.targets(),
            steps=self.steps,
            workers=self.workers,
            on_step=lambda t, params, state, _: path.append(host(Carry(params, state))),
            **self.how,
            **place_of("vmap", self.workers, self.axis),
        )
        return made, path

    @property
    def talks(self) -> np.ndarray:
        """The steps on which it sends most, as ``fit`` counted them."""
        payload = self.fitted()[0].payload
        most = (payload > 0) & (2 * payload >= payload.max(initial=0))
        return np.flatnonzero(most[: self.steps])

    @property
    def steady(self) -> int:
        """For how many steps a rounding stays a rounding, on integer targets.

        Where one ulp flips a sign or selects another entry, two programs that round
        otherwise part, and nothing is wrong with either. Found by trial.
        """
        return self._steady()

    @once
    def _steady(self) -> int:
        path, steady = self.path(), self.steps
        size = (self.workers + 8) * float(jnp.finfo(jnp.float32).eps) * self.scale
        for seed in range(4):
            rng = np.random.default_rng(seed)
            shake = lambda x, rng=rng: (
                x + np.asarray(size * rng.choice([-1.0, 1.0], x.shape), x.dtype)
            )
            carry, target = self.first(), jax.tree.map(shake, self.targets())
            carry = carry._replace(params=jax.tree.map(shake, carry.params))
            shaken = walk(self.program().call, carry, target, steps=steady)
            for t, (here, there) in enumerate(zip(shaken, path, strict=False)):
                if not apart(here.params, there.params, self.scale) <= self.roundings:
                    steady = min(steady, t)
        return max(1, steady)

    @property
    def scale(self) -> float:
        """The size of the values that are rounded."""
        return magnitude(([c.params for c in self.path()], self.targets()))

    def follows(
        self,
        path: list[Carry],
        expected: list[Carry],
        *,
        bits: int = 0,
        close: int | None = None,
    ) -> str:
        """Two programs take one path: some steps bit for bit, then to rounding.

        ``close`` says how far to look at the parameters; unless it is given, for as
        long as a rounding stays one.
        """
        pairs = list(zip(path, expected, strict=False))
        parts = [difference(here, there) for here, there in pairs]
        if not any(parts):
            return "bit for bit"
        for t, part in enumerate(parts[:bits]):
            if part:
                raise Broken(f"after step {t} {part}")
        worst = 0.0
        steady = min(len(pairs), self.steady if close is None else close)
        for t, (here, there) in enumerate(pairs[:steady]):
            gap = apart(here.params, there.params, self.scale)
            if not gap <= self.roundings:
                part = difference(here.params, there.params)
                raise Broken(f"after step {t} {part}: {gap:.2g} roundings")
            worst = max(worst, gap)
        short = f" on {steady} of {len(pairs)} steps" if steady < len(pairs) else ""
        return f"to {np.ceil(worst):.0f} roundings{short}"
