"""The HLO reader attributes every spelling of every collective to the right axis."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from lowcomm.hlo import compiled_traffic
from lowcomm.hlo_text import parse, replica_groups, trip_count
from lowcomm.ledger import Row, traffic
from lowcomm.spmd import vary

AXES = ("workers", "fsdp")
GRID = AbstractMesh((2, 4), AXES)


def module(*lines, before="", devices=8):
    """A module whose entry has a parameter %x of 5 float32 and these lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule step, is_scheduled=true, num_partitions={devices}\n\n{before}\n"
        "%add (a: f32[], b: f32[]) -> f32[] {\n"
        "  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        "  ROOT %sum = f32[] add(%a, %b)\n}\n\n"
        "ENTRY %main (x: f32[5]) -> f32[5] {\n"
        f"  %x = f32[5]{{0}} parameter(0)\n{body}\n}}\n"
    )


def only_row(*lines, **options):
    (row,) = compiled_traffic(module(*lines, **options), mesh=GRID).rows
    return row


@pytest.mark.parametrize(
    ("spelling", "groups"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("{{0,1,2,3},{4,5,6,7}}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[1,8]<=[8]", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("[2,4]<=[2,2,2]T(1,0,2)", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['workers'=2,'fsdp'=4] {'fsdp'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(4)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("@mesh<a=2,b=4> {a}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (
            "@mesh<a=2,b=4>, device_ids=([4,2]T(1,0)) {a}",
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,0,2) {'a'}", [[3, 0], [1, 2]]),
    ],
)
def test_the_three_spellings_of_replica_groups_are_read(spelling, groups):
    text = f", channel_id=1, replica_groups={spelling}, dimensions={{0}}, to_apply=%add"
    assert replica_groups(text, 8) == groups


def test_an_unknown_spelling_is_an_error_that_shows_it():
    with pytest.raises(ValueError, match="novel"):
        replica_groups("replica_groups=novel(8)", 8)


@pytest.mark.parametrize(
    ("groups", "axis"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", "workers"),
        ("[4,2]<=[2,4]T(1,0)", "workers"),
        ("mesh['workers'=2,'fsdp'=4] {'workers'}", "workers"),
        ("{{0,1,2,3},{4,5,6,7}}", "fsdp"),
        ("{{0,1},{2,3},{4,5},{6,7}}", "fsdp"),
        ("[2,4]<=[8]", "fsdp"),
        ("[1,8]<=[8]", AXES),
        ("{{0,5},{1,4},{2,7},{3,6}}", AXES),
    ],
)
def test_a_group_is_named_after_the_axes_its_members_differ_in(groups, axis):
    row = only_row(
        f"ROOT %y = f32[5]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, "
        "use_global_device_ids=true, to_apply=%add"
    )
    assert row == Row("all_reduce", axis, "float32", 20)


def test_groups_of_one_member_send_nothing():
    for groups in ("{{0},{1},{2},{3},{4},{5},{6},{7}}", "[8,1]<=[8]"):
        row = only_row(
            f"ROOT %y = f32[5] all-reduce(%x), replica_groups={groups}, to_apply=%add"
        )
        assert (row.axis, row.count) == ((), 0)


@pytest.mark.parametrize(
    ("lines", "row"),
    [
        (
            [
                "%s = f32[5]{0} all-reduce-start(%x), replica_groups=[1,8]<=[8], "
                "to_apply=%add",
                "ROOT %d = f32[5]{0} all-reduce-done(%s)",
            ],
            Row("all_reduce", AXES, "float32", 20),
        ),
        (
            [
                "%s = (f32[5]{0}, f32[10]{0}) all-gather-start(%x), channel_id=2, "
                "replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}",
                "ROOT %d = f32[10]{0} all-gather-done(%s)",
            ],
            Row("all_gather", "workers", "float32", 20),
        ),
        (
            [
                "%s = (f32[5]{0}, f32[5]{0}, u32[], u32[]) collective-permute-start(%x)"
                ", channel_id=3, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
                "ROOT %d = f32[5]{0} collective-permute-done(%s)",
            ],
            Row("permute", "fsdp", "float32", 20),
        ),
        (
            [
                "%s = ((f32[5]{0}), f32[5]{0}, s32[]) async-start(%x), calls=%wrapped",
                "%u = ((f32[5]{0}), f32[5]{0}, s32[]) async-update(%s), calls=%wrapped",
                "ROOT %d = f32[5]{0} async-done(%u), calls=%wrapped",
            ],
            Row("all_to_all", "fsdp", "float32", 20),
        ),
        (
            ["ROOT %y = f32[5] collective-broadcast(f32[5] %x), replica_groups={}"],
            Row("broadcast", AXES, "float32", 20),
        ),
        (
            ["ROOT %y = f32[5] collective-permute(%x), source_target_pairs={{2,2}}"],
            Row("permute", (), "float32", 20, 0),
        ),
    ],
)
def test_a_start_and_its_done_are_one_transfer(lines, row):
    wrapped = (
        "%wrapped (p: f32[5]) -> f32[5] {\n"
        "  %p = f32[5]{0} parameter(0)\n"
        "  ROOT %a = f32[5]{0} all-to-all(%p), replica_groups=[2,4]<=[8]\n}\n"
    )
    assert only_row(*lines, before=wrapped) == row


def test_every_operand_of_a_combined_all_reduce_counts():
    text = module(
        "%h = bf16[2,3]{1,0:T(8,128)(2,1)S(1)} convert(%x)",
        "%i = pred[] constant(true)",
        "ROOT %y = (f32[5]{0}, bf16[2,3]{1,0}, /*index=2*/pred[]) "
        "all-reduce(%x, %h, /*index=2*/%i), replica_groups=[1,8]<=[8], to_apply=%add",
    )
    rows = compiled_traffic(text, mesh=GRID).rows
    assert [(row.dtype, row.bytes) for row in rows] == [
        ("float32", 20),
        ("bfloat16", 12),
        ("bool", 1),
    ]


def test_pieces_of_an_all_to_all_are_one_operand():
    row = only_row(
        "ROOT %y = (f32[5]{0}, f32[5]{0}) all-to-all(%x, %x), replica_groups={{0,4}}"
    )
    assert row == Row("all_to_all", "workers", "float32", 40)


class Chip:
    """A device as the compiler's topologies describe them."""

    def __init__(self, slice_index, chip):
        self.slice_index = slice_index
        self.id = 100_000 * (slice_index + 1) + chip


def two_slices():
    devices = np.array([[Chip(s, c) for c in range(4)] for s in range(2)])

    return types.SimpleNamespace(
        shape=dict(zip(AXES, (2, 4), strict=True)),
        axis_names=AXES,
        size=8,
        devices=devices,
    )


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


def test_groups_inside_one_slice_are_named_after_axes_of_the_whole_mesh():
    text = module(
        "ROOT %y = f32[5] all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add",
        devices=4,
    )
    (row,) = compiled_traffic(text, mesh=two_slices()).rows
    assert row.axis == "fsdp"


def test_a_program_for_another_number_of_devices_is_refused():
    with pytest.raises(ValueError, match=r"for 5 devices .* has 8"):
        compiled_traffic(module("ROOT %y = f32[5] copy(%x)", devices=5), mesh=GRID)


def loop(condition, start="constant(0)", step="constant(1)", written=""):
    """A while whose body all-reduces; its condition is one comparison."""
    state = "(s32[], f32[5])"
    before = f"""
%body (p: {state}) -> {state} {{
  %p = {state} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[5] get-tuple-element(%p), index=1
  %one = s32[] {step}
  %next = s32[] add(%i, %one)
  %y = f32[5] all-reduce(%v), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %out = {state} tuple(%next, %y)
}}

%compare (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = pred[] compare(%a, %b), direction=LT
}}

%condition (p: {state}) -> pred[] {{
  %p = {state} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[5] get-tuple-element(%p), index=1
  %n = s32[] constant(7)
  ROOT %go = pred[] {condition}
}}
"""
    return module(
        f"%zero = s32[] {start}",
        "%from = s32[] copy(%zero)",
        f"%state = {state} tuple(%from, %x)",
        f"%w = {state} while(%state), condition=%condition, body=%body{written}",
        "ROOT %y = f32[5] get-tuple-element(%w), index=1",
        before=before,
    )


@pytest.mark.parametrize(
    ("text", "trips"),
    [
        (loop("compare(%i, %n), direction=LT"), 7),
        (loop("compare(%i, %n), direction=LE"), 8),
        (loop("compare(%n, %i), direction=GT"), 7),
        (loop("fusion(%i, %n), kind=kLoop, calls=%compare"), 7),
        (loop("compare(%i, %n), direction=LT", start="constant(2)"), 5),
        (loop("compare(%i, %n), direction=LT", step="constant(3)"), 3),
        (
            loop(
                "compare(%i, %n), direction=GT",
                start="constant(9)",
                step="constant(-1)",
            ),
            2,
        ),
        (loop("compare(%i, %n), direction=LT", start="parameter(1)"), None),
        (loop("compare(%i, %n), direction=LT", step="custom-call()"), None),
        (loop("compare(%v, %n), direction=LT"), None),
        (loop("custom-call(%i)"), None),
        (
            loop(
                "custom-call(%i)",
                written=', backend_config={"known_trip_count":{"n":"6"}}',
            ),
            6,
        ),
    ],
)
def test_a_trip_count_is_read_or_follows_from_the_condition_or_is_unknown(text, trips):
    computations, entry = parse(text)
    here = computations[entry]
    assert trip_count(computations, here, here["w"]) == trips
    (row,) = compiled_traffic(text, mesh=GRID).rows
    assert row.count == trips


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


def devices(order=None):
    order = range(8) if order is None else order
    return np.array([jax.devices()[i] for i in order]).reshape(2, 4)


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
