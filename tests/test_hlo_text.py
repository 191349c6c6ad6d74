"""The HLO reader attributes every spelling of a collective to the right axis."""

import pytest

from lowcomm.hlo import compiled_traffic
from lowcomm.hlo_text import parse, replica_groups, trip_count
from lowcomm.ledger import Row
from tests.hlo_modules import AXES, GRID, module, only_row, two_slices


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


def test_groups_inside_one_slice_are_named_after_axes_of_the_whole_mesh():
    text = module(
        "ROOT %y = f32[5] all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add",
        devices=4,
    )
    (row,) = compiled_traffic(text, mesh=two_slices()).rows
    assert row.axis == "fsdp"


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
