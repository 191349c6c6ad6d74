"""Workers that disagree must not wait for each other forever.

A hang cannot be caught in its own process, so these run in another one, with a
deadline and with XLA's own rendezvous timeouts set short.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

FLAGS = (
    "--xla_force_host_platform_device_count=4 "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=10 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=20"
)
PRELUDE = """
import jax, jax.numpy as jnp, numpy as np, optax
import lowcomm as lc

K, mesh = 4, lc.worker_mesh(4)
loss = lambda x, batch: jnp.sum(batch * x)  # the batch is the gradient

def grow(t):  # worker 1's gradient jumps, worker 2's is not a number for a while
    g = np.ones((K, 3), np.float32)
    g[1] *= 10.0 if t == 5 else 1.0
    g[2] *= np.nan if 8 <= t < 10 else 1.0
    return g

def train(tx, steps=14):
    step = lc.spread(lc.local_step(loss, tx), mesh=mesh, in_axes=(0, 0, 0, None))
    step = jax.jit(step)
    x = lc.stack(jnp.zeros(3), K, mesh=mesh)
    state, fired = jax.jit(lc.spread(tx.init, mesh=mesh))(x), []
    for t in range(steps):
        x, state, _ = step(x, state, grow(t), jnp.int32(t))
        since = np.asarray(state.since)
        assert (since == since[0]).all(), "workers took different branches"
        fired.append(bool(since[0] == 0))
    return fired
"""


def finishes(program: str, deadline: float = 120) -> str:
    """What a program prints that must end by itself."""
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(program)
    environment = os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize(
    "verb",
    [
        "lc.average(optax.sgd(0.1), when=when)",
        "lc.rounds(optax.sgd(0.1), optax.sgd(1.0), when=when)",
    ],
)
def test_one_worker_that_wants_to_talk_or_holds_nan_makes_all_talk(verb):
    fired = finishes(
        f"""
        when = lc.change_exceeds(0.5, window=1, smoothing=0.0)
        print(train({verb}))
        """
    )
    # Warm-up; the jump and the way back; each NaN.
    at = [0, 5, 6, 8, 9]
    assert fired == str([t in at for t in range(14)])


def test_a_worker_that_skips_its_step_still_comes_to_the_sync():
    fired = finishes(
        """
        inner = optax.apply_if_finite(optax.sgd(0.1), 5)
        print(train(lc.average(inner, when=lc.every(3))))
        """
    )
    assert fired == str([(t + 1) % 3 == 0 for t in range(14)])
