"""What a program computes while it sends: small schedules from TPU and GPU compilers.

The texts in ``tests/hlo`` are the compilers' own, without metadata. ``gpu`` and
``tpu_slices`` are one program: an all-reduce of 5000 float32 between workers beside a
loop of four products that does not need it. ``tpu_chain`` multiplies by three matrices
that are divided over a slice.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from lowcomm.hlo import compiled_traffic
from lowcomm.scheduled import scheduled
from tests.hlo_modules import module, two_slices

HLO = Path(__file__).parent / "hlo"
GPUS = AbstractMesh((2, 8), ("workers", "fsdp"))
TPUS = two_slices(16)
PAIR = {"devices": 2}


def text(name):
    return (HLO / f"{name}.txt").read_text()


def names_of(transfers):
    return [(t.row.collective, t.row.axis, t.row.bytes, t.loops) for t in transfers]


def test_on_gpus_the_exchange_is_under_way_while_the_loop_runs():
    found = scheduled(text("gpu"), mesh=GPUS)
    assert names_of(found) == [("all_reduce", "workers", 20000, ("while.9",))]
    assert found[0].overlapped


def test_between_tpu_slices_it_is_sent_before_the_loop_and_received_after():
    between, inside = scheduled(text("tpu_slices"), mesh=TPUS)
    # 5000 numbers in tiles of 128.
    assert names_of([between]) == [("all_reduce", "workers", 20480, ("while.10",))]
    # In each turn of the loop the next product needs the sum at once.
    assert names_of([inside]) == [("all_reduce", "fsdp", 4 * 512 * 512, ())]
    assert between.overlapped
    assert not inside.overlapped


def test_a_result_that_is_waited_for_at_once_hides_behind_nothing():
    moved = text("gpu").splitlines()
    (end,) = [line for line in moved if "all-reduce-done(" in line]
    moved.remove(end)
    loop = next(i for i, line in enumerate(moved) if " while(" in line)
    moved.insert(loop, end)
    (found,) = scheduled("\n".join(moved), mesh=GPUS)
    assert found.loops == ()
    assert not found.overlapped


def test_tpu_fusions_carry_a_gather_while_they_multiply():
    found = scheduled(text("tpu_chain"), mesh=TPUS)
    each = ("all_gather", "fsdp", 2 * 64 * 1024, ())
    assert names_of(found) == [each] * 3
    # Two are waited for; the third matrix comes during the first two products.
    assert [t.products for t in found] == [0, 0, 2]


def test_a_gather_that_fusions_carry_is_sent_once():
    # Its start, its end and each product in between hold it.
    assert text("tpu_chain").count(" all-gather(") > 3
    sent = compiled_traffic(text("tpu_chain"), mesh=TPUS)
    assert sent.census() == {("all_gather", "fsdp", "bfloat16"): 3 * 2 * 64 * 1024}


def test_updates_lie_between_a_start_and_its_end():
    (found,) = scheduled(
        module(
            "%a = (f32[5], f32[5]) all-gather-start(%x), replica_groups={{0,1}}",
            "%u = (f32[5], f32[5]) all-gather-update(%a)",
            "%w = f32[5,5] dot(%x, %x)",
            "ROOT %y = f32[5] all-gather-done(%u)",
            **PAIR,
        ),
        mesh=AbstractMesh((2,), ("workers",)),
    )
    assert found.products == 1


def test_a_library_that_multiplies_counts_and_another_does_not():
    def between(target):
        call = f'%w = f32[5] custom-call(%x), custom_call_target="{target}"'
        lines = (
            "%a = f32[5] all-reduce-start(%x), replica_groups={{0,1}}",
            call,
            "ROOT %y = f32[5] all-reduce-done(%a)",
        )
        mesh = AbstractMesh((2,), ("workers",))
        return scheduled(module(*lines, **PAIR), mesh=mesh)[0].products

    assert between("__cublas$gemm") == 1
    assert between("TopK") == 0


def test_groups_of_one_send_nothing():
    alone = module("ROOT %y = f32[5] all-reduce(%x), replica_groups={{0},{1}}", **PAIR)
    assert scheduled(alone, mesh=AbstractMesh((2,), ("workers",))) == ()


def test_an_unscheduled_module_is_refused():
    plain = text("gpu").replace("is_scheduled=true, ", "")
    with pytest.raises(ValueError, match="unscheduled"):
        scheduled(plain, mesh=GPUS)


def test_this_backend_overlaps_nothing():
    # XLA's CPU backend waits for what it sends; the reader says so of a real program.
    mesh = Mesh(np.array(jax.devices()[:2]), ("workers",))

    def round_(x, y):
        again = lambda y, _: (jnp.tanh(y @ y), None)
        return jax.lax.psum(x, "workers"), jax.lax.scan(again, y, length=4)[0]

    spec = P("workers")
    mapped = jax.shard_map(
        round_, mesh=mesh, in_specs=(spec, spec), out_specs=(P(), spec)
    )
    compiled = jax.jit(mapped).lower(np.ones((2, 5)), np.ones((8, 4))).compile()
    (found,) = scheduled(compiled, mesh=mesh)
    assert found.row.bytes == 20
    assert not found.overlapped
