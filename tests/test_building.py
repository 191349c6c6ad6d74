"""Building a method: nothing starts, nothing is traced, and what may be injected."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from lowcomm import apply_updates, local_sgd, selsync, spread

K = 4
SGD = optax.sgd(1.0)


def test_methods_are_built_before_jax_starts():
    program = """
import jax, optax, lowcomm as lc
lc.selsync(optax.sgd(0.1), threshold=0.3)
lc.change_exceeds(0.3, window=4)
lc.dpsgd(optax.adam(0.1), lc.one_peer_exponential(4))
lc.diloco(optax.sgd(0.1), exchange=lc.error_feedback(lc.top_k(0.1)))
lc.rounds(optax.adam(0.1), lc.slow_momentum(0.1, period=4), when=lc.every(4), delay=2)
jax.config.update("jax_num_cpu_devices", 4)
print(len(jax.devices()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"JAX_PLATFORMS": "cpu", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "4", done.stderr[-2000:]


def test_the_threshold_of_selsync_may_be_injected_and_changed():
    make = optax.inject_hyperparams(
        selsync, static_args=("window", "smoothing", "warmup")
    )
    tx = make(SGD, threshold=0.5, window=1, smoothing=0.0, warmup=0)

    def worker(x, state, norm, t):
        updates, state = tx.update(norm, state, x, step=t)
        return apply_updates(x, updates, state), state

    step = spread(worker, in_axes=(0, 0, 0, None))
    norms = np.ones((7, K), np.float32)
    norms[2, 1] = norms[5, 1] = 2.0  # a change by 1, and back by 1/2

    def fired(threshold):
        x, fires = jnp.zeros(K), []
        state = spread(tx.init)(x)
        state.hyperparams["threshold"] = jnp.full(K, threshold)
        for t, norm in enumerate(norms):
            x, state = step(x, state, norm, t)
            fires.append(bool((state.inner_state.since == 0).all()))
        return [t for t, fire in enumerate(fires) if fire]

    assert fired(0.5) == [2, 3, 5, 6]
    assert fired(0.75) == [2, 5]
    assert fired(np.inf) == []


def test_a_period_that_is_injected_as_an_array_is_refused_with_the_remedy():
    tx = optax.inject_hyperparams(local_sgd)(SGD, period=2)
    with pytest.raises(ValueError, match=r"period is a traced array.*static_args"):
        jax.jit(spread(tx.init))(jnp.zeros(K))
    static = optax.inject_hyperparams(local_sgd, static_args="period")(SGD, period=2)
    worker = lambda x: static.update(x, static.init(x), x, step=1)[0]
    assert spread(worker)(jnp.zeros(K)).shape == (K,)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: lc.error_feedback(0.01), "compressor must be a Compressor"),
        (lambda: lc.compressed_mean(lc.sign), r"Call it: sign\(...\)"),
        (lambda: lc.difference_feedback(lc.mean()), "compressor must be a Compressor"),
        (lambda: lc.average(SGD, exchange=lc.top_k(0.1)), "exchange must be"),
        (lambda: lc.average(SGD, when=lambda step: True), "when must be a Trigger"),
        (lambda: lc.diloco(1e-3), "inner must be a GradientTransformation"),
        (lambda: lc.diloco(optax.adamw), r"Call it: adamw\(...\)"),
        (lambda: lc.dpsgd(lc.ring(8), SGD), "graph must be a Graph"),
        (lambda: lc.delayed(lc.top_k(0.1)), "exchange must be"),
        (lambda: lc.any_of(5), "takes triggers"),
    ],
)
def test_a_part_of_another_kind_is_refused_when_the_method_is_built(build, named):
    with pytest.raises(ValueError, match=named):
        build()


def test_whatever_has_init_and_update_is_an_optimizer():
    tx = lc.diloco(optax.MultiSteps(SGD, 2), period=4)
    assert tx.init(jnp.zeros(3)).inner.acc_grads.shape == (3,)


def test_a_function_that_was_spread_is_not_one_workers():
    step = lc.spread(lambda x: x + lc.mean().update(x, ())[0])
    with pytest.raises(ValueError, match="bound already: hand one worker's function"):
        lc.traffic(step, jnp.zeros((4, 3)), workers=4)


def test_leading_sizes_that_disagree_are_named():
    step = lc.spread(lambda p, b: p["w"] + b)
    with pytest.raises(ValueError, match=r"argument 0\['w'\]: 4, argument 1: 8"):
        step({"w": jnp.zeros((4, 3))}, jnp.zeros((8, 3)))
