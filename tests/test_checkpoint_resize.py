"""A checkpoint of K workers is gone on from by K′, where that is asked for."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import lowcomm as lc
from lowcomm.checkpoint import Checkpoints
from tests.problems import begin, mesh_of, run, targets

METHODS = {
    "diloco": lc.diloco(
        optax.adam(0.1), period=4, exchange=lc.error_feedback(lc.top_k(0.25))
    ),
    # What it keeps has another shape for other workers.
    "1-bit Adam": lc.one_bit_adam(optax.sgd(0.1), warmup=2),
}


def raw(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def saved_run(tx, folder):
    """The carry after six steps of four workers, and its checkpoint."""
    carry = tuple(run(tx, targets(4), steps=6)[-1])
    with Checkpoints(folder, settings={"workers": 4, "period": 4}) as saved:
        saved.save(6, carry, notes={"seen": 6})
    return carry


@pytest.mark.parametrize("name", METHODS)
def test_what_is_restored_for_other_workers_is_what_was_saved_resized(name, tmp_path):
    tx = METHODS[name]
    carry = saved_run(tx, tmp_path)
    settings = {"workers": 8, "period": 4}
    with Checkpoints(tmp_path, settings=settings, free=["workers"]) as saved:
        for workers, stay in ((8, None), (4, None), (2, [1, 3])):
            expected = lc.resize(tx, carry, workers=workers, stay=stay)
            like = tuple(begin(tx, workers=workers))
            step, found = saved.restore_resized(like, stay=stay)
            assert step == 6
            assert jax.tree.structure(found) == jax.tree.structure(like)
            assert raw(found) == raw(expected)
            if workers == 4:
                assert raw(found) == raw(carry)


def test_it_goes_where_the_new_workers_are_and_the_run_is_saved_on(tmp_path):
    tx = METHODS["diloco"]
    saved_run(tx, tmp_path)
    like = tuple(begin(tx, workers=8, backend="shard_map"))
    settings = {"workers": 8, "period": 4}
    with Checkpoints(tmp_path, settings=settings, free=["workers"]) as saved:
        step, carry = saved.restore_resized(like)
        for x, y in zip(*map(jax.tree.leaves, (carry, like)), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
            assert len(x.sharding.device_set) == mesh_of(8).size
        saved.save(step + 1, carry)
    with Checkpoints(tmp_path, settings=settings) as saved:  # which are now its own
        assert raw(saved.restore(like)[1]) == raw(carry)


def test_unless_it_is_asked_for_another_number_is_refused(tmp_path):
    tx = METHODS["diloco"]
    saved_run(tx, tmp_path)
    with pytest.raises(ValueError, match="workers was 4 and is 8"):
        Checkpoints(tmp_path, settings={"workers": 8, "period": 4})
    with pytest.raises(ValueError, match="period was 4 and is 5"):
        Checkpoints(tmp_path, settings={"period": 5}, free=["workers"])
    with Checkpoints(tmp_path) as saved:
        like = tuple(begin(tx, workers=8))
        with pytest.raises(ValueError, match="of 4 workers and this carry of 8"):
            saved.restore(like)
        other = tuple(begin(lc.local_sgd(optax.sgd(0.1), period=4), workers=8))
        with pytest.raises(ValueError, match="is of another method or model"):
            saved.restore_resized(other)
        wide = tuple(begin(tx, {"b": np.zeros(5)}, workers=8))
        with pytest.raises(ValueError, match="is of another method or model"):
            saved.restore_resized(wide)
        with pytest.raises(ValueError, match="must be different numbers of workers"):
            saved.restore_resized(like, stay=[7])
