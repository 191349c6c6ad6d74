"""Laws of triggers: one answer for all workers, and what asking costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ..anchor import rounds
from ..ledger import traffic
from ..spmd import AXIS, Axis, abstract_mesh, check_uniform, vary
from ..triggers import Trigger
from ..workers import spread
from .equality import Broken, NotApplicable, apart, difference
from .laws import Law
from .problems import host, place_of, sizes_of
from .subject import Subject
from .traces import same_each_time

SAME = Law("same everywhere", "the answer is one bool, the same on all workers")
BACKENDS_AGREE = Law("backends agree", "virtual workers and devices decide the same")
TYPES = Law("types constant", "the state stays what init made it")
REPEATS = Law("repeats", "asked again, it is the same program")
KNOWN = Law("a known step", "a step that is a Python integer gets the same answer")
CLOCK = Law("clock", "if the step alone decides (gap), asking is silent and free")
IN_A_VERB = Law("runs", "rounds takes its steps with it")
ALARM = Law("NaN fires", "what is not a number makes all talk", optional=True)

STEPS, K = 32, 4


@dataclass(eq=False)
class Asked:
    """A trigger, and what it listens to."""

    trigger: Trigger
    axis: Axis = AXIS

    def worker(self, grads: Any, drifts: Any, losses: Any, known: int = 0) -> Any:
        """One worker's answers and states over a stream; the first steps known."""
        part = lambda tree, t: jax.tree.map(lambda x: x[t], tree)

        def ask(carry, t):
            state, since = carry
            fired, state = self.fire(
                state,
                step=t,
                since=since + 1,
                grads=part(grads, t),
                drift=part(drifts, t),
                value=losses[t],
            )
            fired = vary(jnp.asarray(fired), self.axis)
            state = vary(state, self.axis)
            return (state, jnp.where(fired, 0, since + 1)), (fired, state)

        since = vary(jnp.int32(0), self.axis)
        carry = (vary(self.trigger.init(part(grads, 0)), self.axis), since)
        if known:
            fires = []
            for t in range(known):
                carry, (fired, _) = ask(carry, t)
                fires.append(fired)
            return jnp.stack(fires), carry[0]
        _, (fires, states) = lax.scan(ask, carry, jnp.arange(STEPS))
        return fires, states

    def once(self, grads: Any, drift: Any, value: Any) -> tuple[Any, Any]:
        """One worker's answer when it is asked for the first time."""
        asked = {"grads": grads, "drift": drift, "value": value}
        state = self.trigger.init(grads)
        return self.fire(state, step=jnp.int32(0), since=jnp.int32(1), **asked)

    def now(self) -> tuple[Any, Any, Any]:
        """What one worker hears first."""
        return jax.tree.map(lambda x: x[0, 0], self.stream())

    def fire(self, state: Any, **asked: Any) -> tuple[Any, Any]:
        """The trigger's answer, which must be the same everywhere."""
        fired, state = self.trigger.fire(state, axis=self.axis, **asked)
        if not isinstance(fired, bool | np.bool_):
            if fired.dtype != bool or fired.shape:
                raise Broken(f"the answer is {fired.dtype}{fired.shape}, not one bool")
            check_uniform(fired, self.axis, "the trigger's answer")
        return fired, state

    def stream(self, seed: int = 0) -> tuple[Any, Any, Any]:
        """Gradients, drifts and losses of each worker, ``[K, T, …]``, with jumps."""
        rng = np.random.default_rng(seed)
        jumps = 1 + 9 * (rng.random((K, STEPS)) < 0.1)
        size = rng.gamma(4.0, size=(K, STEPS)) * jumps
        tree = {"w": rng.normal(size=(K, STEPS, 3)), "b": rng.normal(size=(K, STEPS))}
        grads = {"w": tree["w"] * size[..., None], "b": tree["b"] * size}
        drifts = jax.tree.map(lambda g: np.cumsum(g, 1) / 8, grads)
        to32 = lambda x: jnp.asarray(x, jnp.float32)
        return jax.tree.map(to32, (grads, drifts, size))

    def answers(self, backend: str = "vmap", seed: int = 0, known: int = 0) -> Any:
        """Answers ``[K, T]`` and states, on a backend."""
        place = place_of(backend, K, self.axis)
        worker = lambda *stream: self.worker(*stream, known=known)
        run = jax.jit(spread(worker, axis=self.axis, **place))
        return host(run(*self.stream(seed)))


@SAME.clause()
def the_answer_is_the_same_on_all_workers(a: Asked):
    """As JAX's types say, and as virtual workers answer."""
    mesh = abstract_mesh(sizes_of(K, a.axis))
    jax.eval_shape(spread(a.worker, mesh=mesh, axis=a.axis), *a.stream())
    fires, _ = a.answers()
    if not (fires == fires[:1]).all():
        raise Broken("virtual workers are told different things")
    return f"fires on {int(fires[0].sum())} of {STEPS} steps of a stream with jumps"


@BACKENDS_AGREE.clause()
def virtual_workers_and_devices_decide_the_same(a: Asked):
    """The same answers; states to rounding."""
    if len(jax.devices()) < K:
        raise NotApplicable(f"needs {K} devices, JAX sees {len(jax.devices())}")
    (here, states), (there, others) = a.answers(), a.answers("shard_map")
    if part := difference({"answers": there}, {"answers": here}):
        raise Broken(f"on devices {part}")
    if not apart(others, states) <= 12:
        raise Broken(f"on devices {difference(others, states)}")


@TYPES.clause(dtype=[jnp.float32, jnp.bfloat16])
def the_state_stays_what_init_made_it(a: Asked, dtype: Any):
    """Shapes and types, for gradients of two types."""
    kinds = lambda tree: jax.tree.map(lambda x: f"{x.dtype}{x.shape}", tree)

    def worker(*stream):
        grads, drift, value = jax.tree.map(lambda x: x[0].astype(dtype), stream)
        state = a.trigger.init(grads)
        asked = {"grads": grads, "drift": drift, "value": value}
        _, after = a.fire(state, step=jnp.int32(0), since=jnp.int32(1), **asked)
        return state, after

    place = place_of("vmap", K, a.axis)
    before, after = map(
        kinds, jax.eval_shape(spread(worker, axis=a.axis, **place), *a.stream())
    )
    if before != after:
        raise Broken(f"the state is {before} and then {after}")


@REPEATS.clause()
def asked_again_it_is_the_same_program(a: Asked):
    """Nothing but its arguments changes the answer."""
    same_each_time(a.once, a.now(), sizes_of(K, a.axis))


@KNOWN.clause()
def a_known_step_gets_the_same_answer(a: Asked):
    """Where the step is a Python integer."""
    known, (fires, _) = STEPS // 2, a.answers()
    told, _ = a.answers(known=known)
    if part := difference({"answers": told}, {"answers": fires[:, :known]}):
        raise Broken(f"with Python integers {part}")


@CLOCK.clause()
def a_clock_is_silent_and_looks_at_the_step_alone(a: Asked):
    """No bytes, other gradients, no gap below the declared."""
    sizes = list(sizes_of(K, a.axis).values())
    sent = traffic(a.once, *a.now(), workers=sizes, axis=a.axis).bytes_max
    if a.trigger.gap is None:
        raise NotApplicable(f"it measures, and sends {sent} bytes a step")
    if sent:
        raise Broken(f"it declares a gap and sends {sent} bytes a step")
    (fires, _), (others, _) = a.answers(), a.answers(seed=1)
    if part := difference({"answers": others}, {"answers": fires}):
        raise Broken(f"it declares a gap, and on other gradients {part}")
    between = np.diff(np.flatnonzero(fires[0]))
    if between.size and between.min() < a.trigger.gap:
        raise Broken(
            f"it declares a gap of {a.trigger.gap} and fires {between.min()} apart"
        )


@IN_A_VERB.clause()
def rounds_takes_its_steps_with_it(a: Asked):
    """On virtual workers."""
    build = lambda inner, workers, steps: rounds(
        inner, optax.sgd(1.0), when=a.trigger, axis=a.axis
    )
    Subject(build, axis=a.axis).path()


@ALARM.clause()
def one_worker_s_nan_makes_all_talk(a: Asked):
    """In its gradients, drift and loss."""
    if a.trigger.gap is not None:
        raise NotApplicable("the step alone decides")
    stream = a.stream()
    bad = jax.tree.map(lambda x: x.at[1, STEPS // 2].set(jnp.nan), stream)
    place = place_of("vmap", K, a.axis)
    fires, _ = jax.jit(spread(a.worker, axis=a.axis, **place))(*bad)
    if not fires[:, STEPS // 2].all():
        raise Broken("a NaN on one worker passes unnoticed")
