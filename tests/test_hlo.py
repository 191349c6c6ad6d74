"""The HLO reader counts transfers, loops and branches of whole programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from lowcomm.hlo import compiled_traffic
from lowcomm.ledger import Row, traffic
from lowcomm.spmd import vary
from tests.hlo_modules import AXES, GRID, devices, module, only_row, two_slices


def megascale(kind, target):
    return (
        "is_host_transfer=true, frontend_attributes={"
        '_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    )


@pytest.mark.parametrize(
    ("attributes", "row"),
    [
        (
            megascale("ALL_REDUCE", '"{1,2}x{0:3}"'),
            Row("all_reduce", "workers", "float32", 20),
        ),
        (
            megascale("ALL_GATHER", '"{1,2}x{0:3}"'),
            Row("all_gather", "workers", "float32", 20),
        ),
        (
            megascale("ONE_TO_ONE", "{{100000->200000},{100001->200001}}"),
            Row("permute", "workers", "float32", 20),
        ),
        (
            megascale("ONE_TO_ONE", "{{100000->200001},{100001->200000}}"),
            Row("permute", AXES, "float32", 20),
        ),
        (
            'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}',
            Row("permute", "fsdp", "float32", 20),
        ),
    ],
)
def test_a_send_between_slices_counts_once_and_its_receive_not(attributes, row):
    text = module(
        "%t = token[] after-all()",
        f"%s = (f32[5]{{0}}, u32[], token[]) send(%x, %t), channel_id=2, {attributes}",
        f"%r = (f32[5]{{0}}, u32[], token[]) recv(%t), channel_id=1, {attributes}",
        "%sd = token[] send-done(%s), channel_id=2, is_host_transfer=true",
        "%rd = (f32[5]{0}, token[]) recv-done(%r), channel_id=1, is_host_transfer=true",
        "ROOT %y = f32[5]{0} get-tuple-element(%rd), index=0",
        devices=4,  # one slice: the program numbers its own devices only
    )
    assert compiled_traffic(text, mesh=two_slices()).rows == (row,)


def test_a_send_between_slices_needs_a_mesh_that_knows_them():
    line = f"ROOT %s = (f32[5], u32[]) send(%x), {megascale('ALL_REDUCE', '')}"
    with pytest.raises(ValueError, match="knows the slices"):
        compiled_traffic(module(line), mesh=GRID)


def test_a_transfer_to_the_own_host_is_not_communication():
    text = module(
        "%t = token[] after-all()",
        "ROOT %s = (f32[5], u32[], token[]) send(%x, %t), channel_id=1, "
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_name="log"}',
    )
    assert compiled_traffic(text, mesh=GRID).rows == ()


def test_a_program_for_another_number_of_devices_is_refused():
    with pytest.raises(ValueError, match=r"for 5 devices .* has 8"):
        compiled_traffic(module("ROOT %y = f32[5] copy(%x)", devices=5), mesh=GRID)


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%quiet, %loud}",
        "true_computation=%loud, false_computation=%quiet",
    ],
)
def test_the_branches_of_a_conditional_guard_their_rows(branches):
    before = (
        "%quiet (p: f32[5]) -> f32[5] {\n  ROOT %p = f32[5] parameter(0)\n}\n\n"
        "%loud (p: f32[5]) -> f32[5] {\n  %p = f32[5] parameter(0)\n"
        "  ROOT %y = f32[5] all-reduce(%p), replica_groups={}, to_apply=%add\n}\n"
    )
    row = only_row(
        "%go = pred[] constant(true)",
        f"ROOT %y = f32[5] conditional(%go, %x, %x), {branches}",
        before=before,
    )
    assert row.guard == ((1, 1),)


def two_axes(x):
    x = lax.pmean(x, AXES) + lax.pmean(x, "workers")
    x = vary(x, AXES)
    x = lax.scan(lambda c, _: (vary(lax.pmean(c, "fsdp"), AXES), None), x, length=3)[0]
    x = x + lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)])
    x = x + lax.all_gather(x, "workers")[0]
    return x + vary(lax.all_to_all(jnp.outer(jnp.ones(4), x), "fsdp", 0, 0)[0], AXES)


@pytest.mark.parametrize("order", [range(8), [3, 1, 7, 0, 2, 6, 5, 4]])
@pytest.mark.parametrize("check", [True, False])
def test_on_two_axes_the_compiled_program_sends_what_the_jaxpr_says(order, check):
    mesh = Mesh(devices(order), AXES)
    whole = jax.shard_map(
        two_axes, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=check
    )
    compiled = jax.jit(whole).lower(jnp.arange(48.0)).compile()
    found = compiled_traffic(compiled, mesh=mesh)
    shape = jax.ShapeDtypeStruct((6,), jnp.float32)
    sent = traffic(two_axes, shape, workers=(2, 4), axis=AXES)
    assert found.census() == sent.census()
    assert found.census()["all_reduce", "fsdp", "float32"] == 3 * 24


def test_collectives_that_the_partitioner_inserts_are_found():
    mesh = Mesh(devices(), AXES)
    split = NamedSharding(mesh, P(None, "fsdp"))
    x = jax.ShapeDtypeStruct((3, 8), jnp.float32, sharding=split)
    compiled = jax.jit(lambda x: x.sum(1)).lower(x).compile()
    assert compiled_traffic(compiled, mesh=mesh).census() == {
        ("all_reduce", "fsdp", "float32"): 12
    }


def test_an_elementwise_function_of_sharded_workers_sends_nothing():
    mesh = Mesh(devices(), AXES)
    x = jax.ShapeDtypeStruct(
        (2, 8), jnp.float32, sharding=NamedSharding(mesh, P(*AXES))
    )
    local = jax.shard_map(
        lambda x: x * 2,
        mesh=mesh,
        in_specs=P("workers"),
        out_specs=P("workers"),
        axis_names={"workers"},
    )
    compiled = jax.jit(local).lower(x).compile()
    assert compiled_traffic(compiled, mesh=mesh).rows == ()


def test_pmap_programs_are_read_too():
    fn = lambda x: lax.psum(x, "workers")
    compiled = jax.pmap(fn, axis_name="workers").lower(jnp.ones((8, 3))).compile()
    mesh = Mesh(np.array(jax.devices()), ("workers",))
    assert compiled_traffic(compiled, mesh=mesh).census() == {
        ("all_reduce", "workers", "float32"): 12
    }
