"""The schedule search of DreamDDP against brute force and the exact examples."""

from __future__ import annotations

import itertools
import random

import pytest

from lowcomm.planning.layers import (
    consecutive_blocks,
    fill_in,
    naive_blocks,
    slot_wait,
    total_wait,
)


def instances(n):
    """Small instances with whole seconds, so that sums are exact."""
    draw = random.Random(0)
    for _ in range(n):
        layers, slots = draw.randint(1, 6), draw.randint(1, 3)
        times = lambda most, layers=layers: [
            draw.randint(0, most) for _ in range(layers)
        ]
        yield times(8), times(12), slots


def waited(block, backward, transfer):
    """The wait by simulation, second by second."""
    ready = {layer: sum(backward[: layer + 1]) for layer in block}
    queue, clock = sorted(block), 0
    while queue:
        if ready[queue[0]] <= clock:
            clock += transfer[queue.pop(0)]
        else:
            clock += 1
    return max(0, clock - sum(backward))


def cut(layers, slots):
    """All ways to deal layers out to slots in consecutive blocks."""
    for cuts in itertools.combinations_with_replacement(range(layers + 1), slots - 1):
        ends = (0, *cuts, layers)
        yield [list(range(a, b)) for a, b in itertools.pairwise(ends)]


def any_table(layers, slots):
    """All ways to deal layers out to slots."""
    for slot_of in itertools.product(range(slots), repeat=layers):
        yield [[i for i in range(layers) if slot_of[i] == s] for s in range(slots)]


def test_the_wait_of_a_slot_is_that_of_a_link_with_one_transfer_at_a_time():
    for backward, transfer, _ in instances(100):
        for block in (range(len(backward)), range(0, len(backward), 2), []):
            expected = waited(list(block), backward, transfer)
            assert slot_wait(block, backward, transfer) == expected


def test_the_search_finds_the_least_wait_among_consecutive_blocks():
    for backward, transfer, slots in instances(400):
        table = consecutive_blocks(backward, transfer, slots=slots)
        layers = len(backward)
        assert table in list(cut(layers, slots))
        assert total_wait(table, backward, transfer) == min(
            total_wait(other, backward, transfer) for other in cut(layers, slots)
        )


def test_no_wait_is_below_that_of_the_layer_that_has_nothing_to_hide_under():
    for backward, transfer, slots in instances(400):
        table = consecutive_blocks(backward, transfer, slots=slots)
        last = [[]] * (slots - 1) + [list(range(len(backward)))]
        assert all(slot_wait(block, backward, transfer) >= 0 for block in table)
        assert sorted(itertools.chain(*table)) == last[-1]
        total = total_wait(table, backward, transfer)
        assert transfer[-1] <= total <= total_wait(last, backward, transfer)


@pytest.mark.parametrize(("slots", "consecutive", "best"), [(2, 10, 8), (3, 8, 8)])
def test_the_example_in_which_other_tables_wait_less(slots, consecutive, best):
    backward, transfer = [4] * 6, [6] * 6
    wait = lambda table: total_wait(table, backward, transfer)
    assert wait([[]] * (slots - 1) + [list(range(6))]) == 16
    assert wait(consecutive_blocks(backward, transfer, slots=slots)) == consecutive
    assert min(map(wait, any_table(6, slots))) == best


def ages(table):
    """Of each layer the largest number of steps since it last travelled."""
    rounds = [set(block) for block in table] * 2
    layers = set().union(*rounds)
    fired = {x: [t for t, block in enumerate(rounds) if x in block] for x in layers}
    cycle = len(table)
    gap = lambda times: max(
        b - a for a, b in itertools.pairwise([*times, times[0] + 2 * cycle])
    )
    return {x: gap(times) for x, times in fired.items()}


def test_fill_ins_are_free_and_no_layer_gets_older():
    filled = 0
    for backward, transfer, slots in instances(400):
        table = consecutive_blocks(backward, transfer, slots=slots)
        more = fill_in(table, backward, transfer)
        for block, fuller in zip(table, more, strict=True):
            assert set(block) <= set(fuller)
            assert len(set(fuller)) == len(fuller)
            waits = [slot_wait(b, backward, transfer) for b in (block, fuller)]
            assert waits[0] == waits[1]
        before, after = ages(table), ages(more)
        assert all(after[x] <= before[x] <= slots for x in before)
        filled += more != table
    assert filled > 100


def test_naive_blocks_deal_all_layers_out_in_order():
    for layers, slots in itertools.product(range(1, 9), range(1, 6)):
        table = naive_blocks(layers, slots)
        assert len(table) == slots
        assert list(itertools.chain(*table)) == list(range(layers))
        assert max(map(len, table)) == -(-layers // slots)


def test_a_layer_too_long_for_any_slot_is_sent_alone_in_time():
    # It cannot hide, but the other layers need not wait behind it.
    table = consecutive_blocks([1, 1, 1], [1, 100, 0], slots=2)
    assert total_wait(table, [1, 1, 1], [1, 100, 0]) == 99


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: slot_wait([0], [], []), "0 backward times"),
        (lambda: slot_wait([0], [1.0], [1.0, 2.0]), "2 transfer times"),
        (lambda: fill_in([[0]], [1.0], [-2.0]), r"transfer\[0\] = -2.0"),
        (lambda: fill_in([[0]], [float("nan")], [2.0]), r"backward\[0\] = nan"),
        (lambda: consecutive_blocks([1.0], [1.0], slots=0), "0 slots"),
        (lambda: naive_blocks(0, 2), "0 layers"),
    ],
)
def test_what_is_no_instance_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
