"""The meter counts what happened in a run, and changes nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lowcomm.ledger import traffic
from lowcomm.meter import meter
from lowcomm.workers import spread
from tests.talking_programs import (
    BYTES,
    PROGRAMS,
    K,
    N,
    loudest,
    mesh_of,
    on_mesh,
    pmean,
    reading,
    skip_what_jax_cannot_check,
    stacked,
    until_quiet,
    virtual,
)


@pytest.mark.parametrize("backend", ["vmap", "checked mesh", "unchecked mesh"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_meter_agrees_with_the_ledger_and_leaves_the_outputs(name, backend):
    skip_what_jax_cannot_check(name, backend == "checked mesh")
    fn, sent = PROGRAMS[name][0], reading(name)
    run = {
        "vmap": virtual,
        "checked mesh": functools.partial(on_mesh, check_vma=True),
        "unchecked mesh": functools.partial(on_mesh, check_vma=False),
    }[backend]
    if name == "lonely" and backend == "vmap":
        pytest.skip("under vmap JAX takes only whole permutations")
    x = jnp.asarray(np.random.default_rng(0).normal(0, 3, (K, N)), jnp.float32)
    plain = jax.jit(run(fn))(x)
    out, counts = jax.jit(run(meter(fn)))(x)
    np.testing.assert_array_equal(out, plain)
    assert out.dtype == plain.dtype
    assert counts.shape == (K, len(sent.rows))
    assert (counts == counts[0]).all()
    assert sent.bytes_always <= sent.bytes(counts[0]) <= sent.bytes_max
    if not any(row.guard for row in sent.rows):
        assert counts[0].tolist() == [row.count for row in sent.rows]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_meter_adds_no_collective(name):
    fn = PROGRAMS[name][0]
    assert traffic(meter(fn), stacked()[0], workers=K).census() == (
        reading(name).census()
    )


def test_the_meter_counts_what_happened_when_the_data_decides():
    fn = PROGRAMS["cond"][0]
    sent = reading("cond")
    for run in (virtual, on_mesh):
        for top, bytes_ in ((2.0, 4), (4.0, 4 + BYTES)):
            x = jnp.zeros((K, N)).at[3, 2].set(top)
            _, counts = jax.jit(run(meter(fn)))(x)
            assert sent.bytes(counts[0]) == bytes_


def test_the_meter_counts_the_firing_steps_of_a_scan():
    _, counts = jax.jit(virtual(meter(PROGRAMS["cond in scan"][0])))(stacked())
    assert counts[0].tolist() == [3, 4]  # steps 0, 3, 6 and 0, 2, 4, 6


@pytest.mark.parametrize("run", [virtual, on_mesh])
def test_the_meter_counts_the_turns_and_questions_of_a_while(run):
    sent = traffic(until_quiet, stacked()[0], workers=K)
    assert [row.count for row in sent.rows] == [None, None]
    assert sent.bytes_always == 0
    with pytest.raises(ValueError, match="while loop"):
        _ = sent.bytes_max
    x = jnp.full((K, N), 9.0)  # 9, 4.5, 2.25, 1.125, 0.5625
    plain = jax.jit(run(until_quiet))(x)
    out, counts = jax.jit(run(meter(until_quiet)))(x)
    np.testing.assert_array_equal(out, plain)
    assert counts[0].tolist() == [5, 2]
    assert sent.bytes(counts[0]) == 5 * 4 + 2 * BYTES


def test_virtual_workers_that_disagree_are_counted_for_what_each_asked():
    fn = lambda x: lax.cond(x[0] > 3, pmean, lambda x: x, x)
    _, counts = virtual(meter(fn))(jnp.zeros((K, N)).at[2, 0].set(4.0))
    assert counts[:, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("backend", ["vmap", "shard_map", "pmap"])
def test_the_meter_goes_inside_spread(backend):
    fn = lambda x, step: lax.cond(step % 2 == 0, pmean, lambda x: x, x)
    mesh = None if backend == "vmap" else mesh_of(K)
    run = jax.jit(spread(meter(fn), mesh=mesh, backend=backend, in_axes=(0, None)))
    counts = [run(stacked(), jnp.int32(step))[1][0] for step in range(4)]
    assert [count.tolist() for count in counts] == [[1], [0], [1], [0]]


@pytest.mark.parametrize("run", [virtual, on_mesh])
def test_constants_keep_their_types_through_the_meter(run):
    def fn(x):
        talk = lambda x: (pmean(x), 1, jnp.float32(2))
        x, chosen, weight = lax.cond(loudest(x) > 3, talk, lambda x: (x, 0, weight_), x)
        return {"x": x, "chosen": chosen, "weight": weight, "none": None, "three": 3}

    weight_ = np.float32(5)
    plain = jax.eval_shape(run(fn), stacked())
    out, _ = jax.eval_shape(run(meter(fn)), stacked())
    kinds = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), tree)
    assert kinds(out) == kinds(plain)


def test_the_meter_composes_with_donation():
    step = jax.jit(virtual(meter(PROGRAMS["cond in scan"][0])), donate_argnums=0)
    x, total = stacked(), 0
    for _ in range(3):
        x, counts = step(x)
        total += reading("cond in scan").bytes(counts[0])
    assert total == 3 * 7 * BYTES


def test_the_meter_of_a_method_without_conditionals_is_the_same_program():
    fn = PROGRAMS["scan"][0]
    text = lambda f: str(jax.make_jaxpr(virtual(f))(stacked())).count("scan[")
    assert text(meter(lambda x: fn(x))) == text(fn) == 1


def test_python_numbers_choose_the_branch_at_trace():
    step = lambda x, step: pmean(x) if step % 2 else x
    assert traffic(step, stacked()[0], 3, workers=K).bytes_always == BYTES
    assert traffic(step, stacked()[0], 4, workers=K).rows == ()
    _, counts = virtual(lambda x: meter(step)(x, 3))(stacked())
    assert counts[0].tolist() == [1]
