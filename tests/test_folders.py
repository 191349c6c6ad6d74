"""Who may write to a folder of checkpoints, and what is left alone there."""

import jax
import jax.numpy as jnp
import pytest

from lowcomm.checkpoint import Checkpoints


def test_only_one_writes_to_a_folder(tmp_path):
    with Checkpoints(tmp_path) as first, Checkpoints(tmp_path) as second:
        first.save(1, {"x": jnp.ones(2)})
        with pytest.raises(ValueError, match="another process is saving"):
            second.save(2, {"x": jnp.ones(2)})
        first.wait()
        assert second.restore({"x": jnp.zeros(2)})[0] == 1  # reading is free
    with Checkpoints(tmp_path) as third:
        third.save(2, {"x": jnp.ones(2)})


def test_shapes_are_no_carry_and_a_strange_folder_is_left_alone(tmp_path):
    with Checkpoints(tmp_path) as saved:
        shapes = jax.eval_shape(lambda: {"x": jnp.ones(2)})
        with pytest.raises(ValueError, match="holds shapes, not arrays"):
            saved.save(1, shapes)
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "mine.txt").write_text("mine")
        with pytest.raises(ValueError, match="7 is there and is no checkpoint"):
            saved.save(7, {"x": jnp.ones(2)})
    assert (tmp_path / "7" / "mine.txt").read_text() == "mine"
