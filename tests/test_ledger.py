"""Jaxpr and compiled program agree with the bytes counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from lowcomm.hlo import compiled_traffic
from lowcomm.ledger import Row, Traffic, traffic
from lowcomm.meter import meter
from lowcomm.spmd import AXIS, vary
from tests.talking_programs import (
    BYTES,
    PROGRAMS,
    K,
    mesh_of,
    on_mesh,
    pmean,
    psum,
    reading,
    skip_what_jax_cannot_check,
    stacked,
    until_quiet,
    virtual,
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_largest_step_sends_the_bytes_counted_by_hand(name):
    assert reading(name).bytes_max == PROGRAMS[name][1]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_jaxpr_and_compiled_program_send_the_same(name, check):
    skip_what_jax_cannot_check(name, check)
    whole = on_mesh(PROGRAMS[name][0], check_vma=check)
    compiled = jax.jit(whole).lower(stacked()).compile()
    found = compiled_traffic(compiled, mesh=mesh_of(K))
    assert found.census() == reading(name).merged().widened().census()


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_worker_sends_nothing(name):
    if name in ("ppermute", "lonely", "self", "switch"):
        pytest.skip("its permutation names other workers")
    fn = PROGRAMS[name][0]
    if name in ("all_to_all", "reduce_scatter"):
        fn = lambda x: lax.psum_scatter(x[None], AXIS)
    sent = traffic(fn, stacked()[0], workers=1)
    assert sent.bytes_max == 0
    _, counts = virtual(meter(fn))(stacked(1))
    assert sent.bytes(counts[0]) == 0
    compiled = jax.jit(on_mesh(fn, 1, check_vma=False)).lower(stacked(1)).compile()
    assert compiled_traffic(compiled, mesh=mesh_of(1)).bytes_max == 0


def test_a_psum_inside_a_scan_counts_its_length():
    (row,) = reading("scan").rows
    assert row == Row("all_reduce", AXIS, "float32", BYTES, 5)


def test_each_branch_is_guarded_by_its_conditional_and_the_ids_are_unique():
    guards = [row.guard for row in reading("cond in cond").rows]
    assert guards == [
        (),
        ((1, 1),),
        ((1, 1),),
        ((1, 1), (2, 0)),
        ((1, 1), (2, 1)),
    ]
    guards = [row.guard for row in reading("cond in scan").rows]
    assert guards == [((1, 1),), ((2, 1),)]


def test_the_largest_branch_is_taken_not_the_sum_of_branches():
    pick = lambda x, i: lax.switch(
        i, [lambda x: x, pmean, lambda x: pmean(x[:2])[0] + x], x
    )
    sent = traffic(pick, stacked()[0], jnp.int32(0), workers=K)
    assert (sent.bytes_always, sent.bytes_max) == (0, BYTES)
    assert sum(sent.census().values()) == BYTES + 8


def test_a_while_is_open_in_the_compiled_program_too():
    compiled = jax.jit(on_mesh(until_quiet)).lower(stacked()).compile()
    found = compiled_traffic(compiled, mesh=mesh_of(K))
    assert {row.count for row in found.rows} == {None}
    assert found.census() == traffic(until_quiet, stacked()[0], workers=K).census()


def test_shapes_are_enough_for_any_number_of_workers():
    shape = jax.ShapeDtypeStruct((1 << 20, 1 << 10), jnp.bfloat16)
    assert traffic(pmean, shape, workers=100_000).bytes_always == 1 << 31


def test_what_nobody_uses_is_not_sent():
    assert traffic(lambda x: (pmean(x), x)[1], stacked()[0], workers=K).rows == ()


def test_a_repeated_collective_is_marked_and_its_twin_in_a_branch_is_not():
    rows = reading("equal twice").rows
    assert [row.repeats for row in rows] == [False, True]
    other = lambda x: psum(x) + lax.cond(x[0] > 0, psum, jnp.sin, x) + psum(x + 1)
    sent = traffic(other, stacked()[0], workers=K)
    assert not any(row.repeats for row in sent.rows)
    ring_of_two = lambda x: sum(lax.ppermute(x, AXIS, [(0, 1), (1, 0)]) for _ in "lr")
    assert traffic(ring_of_two, stacked()[0], workers=2).merged().bytes_max == BYTES


def test_xla_takes_out_of_a_loop_what_is_the_same_in_every_turn():
    fn = lambda x: lax.fori_loop(0, 7, lambda i, c: pmean(x) * 2 + c, x)
    assert traffic(fn, stacked()[0], workers=K).bytes_always == 7 * BYTES
    compiled = jax.jit(on_mesh(fn)).lower(stacked()).compile()
    assert compiled_traffic(compiled, mesh=mesh_of(K)).bytes_always == BYTES


def test_two_axes_are_told_apart_and_one_of_size_one_is_not_crossed():
    def fn(x):
        x = lax.pmean(x, ("site", "chip")) + lax.pmean(x, "chip")
        return x + lax.ppermute(x, "site", [(0, 1)])

    axes = ("site", "chip")
    sent = traffic(fn, stacked()[0], workers=(2, 4), axis=axes)
    assert [row.axis for row in sent.rows] == [axes, "chip", "site"]
    sent = traffic(fn, stacked()[0], workers=(2, 1), axis=axes)
    assert [(row.axis, row.count) for row in sent.rows] == [
        ("site", 1),
        ("chip", 0),
        ("site", 1),
    ]


def per_shard(x):
    def shard(y):
        fire = lax.pmax(y.max(), (AXIS, "fsdp")) > 3
        return lax.cond(fire, lambda y: vary(lax.pmean(y, AXIS), AXIS), lambda y: y, y)

    spec = P(None, "fsdp")
    return jax.shard_map(shard, in_specs=spec, out_specs=spec, axis_names={"fsdp"})(x)


def test_inside_a_nested_shard_map_bytes_are_those_of_the_shard():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), (AXIS, "fsdp"))
    x = jax.ShapeDtypeStruct((3, 8), jnp.float32)
    sent = traffic(per_shard, x, workers=mesh)
    assert [(row.axis, row.bytes) for row in sent.rows] == [
        ((AXIS, "fsdp"), 4),
        (AXIS, 4 * 3 * 2),
    ]
    abstract = AbstractMesh((2, 4), (AXIS, "fsdp"))
    assert traffic(per_shard, x, workers=abstract) == sent

    def whole(fn):
        local = lambda x: jax.tree.map(lambda y: vary(y, AXIS)[None], fn(x[0]))
        return jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=P(AXIS),
                out_specs=P(AXIS),
                axis_names={AXIS},
            )
        )

    x = jnp.arange(48.0).reshape(2, 3, 8)
    compiled = whole(per_shard).lower(x).compile()
    assert compiled_traffic(compiled, mesh=mesh).census() == sent.census()
    out, counts = whole(meter(per_shard))(x)
    np.testing.assert_array_equal(out, whole(per_shard)(x))
    assert counts.tolist() == [[1, 1], [1, 1]]


def test_a_talking_program_inside_an_unknown_primitive_is_an_error_by_name():
    solve = lambda x: lax.custom_linear_solve(
        psum, x, lambda mv, b: mv(b), symmetric=True
    )
    with pytest.raises(ValueError, match=r"custom_linear_solve.*all_reduce"):
        traffic(solve, stacked()[0], workers=K)
    silent = lambda x: lax.custom_linear_solve(
        jnp.sin, x, lambda mv, b: b, symmetric=True
    )
    assert traffic(silent, stacked()[0], workers=K).rows == ()


def test_wrong_sizes_and_wrong_counts_are_refused():
    with pytest.raises(ValueError, match="does not size axis"):
        traffic(pmean, stacked()[0], workers=(2, 4))
    with pytest.raises(ValueError, match="does not size axis"):
        traffic(pmean, stacked()[0], workers=0)
    with pytest.raises(ValueError, match="one count per row"):
        reading("scan").bytes([[5]])


def test_bytes_of_many_counts_do_not_overflow():
    sent = Traffic((Row("all_reduce", AXIS, "float32", 1 << 40),))
    assert sent.bytes(np.array([2**31 - 1], np.int32)) == (2**31 - 1) << 40


def test_the_table_has_one_line_per_row_and_names_every_axis():
    sent = Traffic(
        (
            Row("all_reduce", ("site", "chip"), "float32", 8, None, ((1, 0), (2, 1))),
            Row("permute", "chip", "int8", 16),
        )
    )
    first, second = sent.table().splitlines()[1:]
    assert first.split() == [
        "all_reduce",
        "site+chip",
        "float32",
        "8",
        "?",
        "1:0",
        "2:1",
    ]
    assert " ".join(second.split()) == "permute chip int8 16 1 -"
