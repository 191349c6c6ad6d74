"""Few bits an entry lose what they should, and a grid of pairs picks the best pair."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from experiments.codebook import GAUSSIAN, POWERS, codebook
from experiments.toys import Problem
from experiments.trials import at_rate, tuned_both


def heard(compressor, x):
    return np.asarray(compressor.decode(compressor.encode(x, None), x, None))


@pytest.mark.parametrize(
    ("levels", "relative_to"), [(POWERS, "largest"), (GAUSSIAN, "rms")]
)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (8,), ()])
def test_every_entry_comes_back_as_the_nearest_level(levels, relative_to, shape):
    x = jax.random.normal(jax.random.key(len(shape)), shape)
    scale = {"largest": np.abs(x).max(), "rms": np.sqrt(np.mean(x**2))}[relative_to]
    table = np.sort(np.float32(levels)) * scale
    gap = np.abs(np.asarray(x)[..., None] - table)
    compressor = codebook(levels, relative_to=relative_to)
    # The scale differs by a rounding from that computed here.
    np.testing.assert_allclose(
        heard(compressor, x), table[gap.argmin(-1)], rtol=1e-6, atol=0
    )
    bits = {4: 2, 16: 4}[len(levels)]
    assert lc.payload_bytes(compressor, x) == -(-x.size * bits // 8) + 4


def test_four_levels_lose_the_least_that_four_levels_can_of_normal_noise():
    x = jax.random.normal(jax.random.key(0), (40_000,))
    error = heard(codebook(GAUSSIAN, relative_to="rms"), x) - np.asarray(x)
    # Max (1960) has 0.1175; of 40000 draws the standard error is below 0.001.
    assert np.mean(error**2) == pytest.approx(0.1175, abs=0.004)


def test_zeros_stay_zeros_and_other_sizes_are_refused():
    compressor = codebook(GAUSSIAN, relative_to="rms")
    assert not heard(compressor, jnp.zeros(5)).any()
    with pytest.raises(ValueError, match="3 levels"):
        codebook((-1.0, 0.0, 1.0), relative_to="rms")
    with pytest.raises(ValueError, match="'mean'"):
        codebook(GAUSSIAN, relative_to="mean")


def test_both_numbers_are_chosen_and_each_is_told_at_the_best_of_the_other():
    hill = Problem(
        "a slope",
        1,
        lambda key: {"x": jnp.zeros(())},
        lambda params, drawn: params["x"] + 0 * drawn,
        np.zeros(1, np.int32),
        lambda own, key: jax.random.normal(key),
        lambda params: {"validation": jnp.square(params["x"] + 1), "loss": params["x"]},
    )
    cell = tuned_both(
        hill,
        lambda rate, other: optax.sgd(rate * other),  # one step to -rate · other
        steps=1,
        points=1,
        rates=(0.25, 0.5, 1.0),
        others=(1.0, 2.0, 16.0),
        seeds=(0, 1),
    )
    assert (cell["rate"], cell["other"]) == (0.5, 2.0)
    assert not cell["at_the_edge"]
    assert cell["rates"] == {"0.25": 0.25, "0.5": 0.0, "1": 0.0}
    assert cell["others"] == {"1": 0.0, "2": 0.0, "16": 9.0}
    assert cell["final"]["loss"] == [-1, -1]
    assert at_rate(cell, 0.25) == [-0.5, -0.5]
    assert cell["others grid"]["loss"] == [[-1, -1], [-1, -1], [-4, -4]]
