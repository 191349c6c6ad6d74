"""How many entries hide under the backward pass, and how much that can be worth."""

import numpy as np
import optax
import pytest

import lowcomm as lc
from lowcomm.network import Link, collective_seconds
from lowcomm.planning.sparsity import (
    entries_to_send,
    ethernet_seconds,
    largest_speedup,
    selection_seconds,
    smallest_ratio,
)

MILLION = 1_000_000


@pytest.mark.parametrize(
    ("budget", "ratio"), [(0.05, 26), (0.1, 11), (1.0, 1), (0.005, 1000)]
)
def test_eight_workers_on_ethernet_have_the_ratios_of_the_paper_s_model(budget, ratio):
    assert smallest_ratio(MILLION, budget, ethernet_seconds(8)) == ratio


def test_latency_alone_may_be_too_long():
    assert ethernet_seconds(8)(0) == 0.008
    assert smallest_ratio(MILLION, 0.008, ethernet_seconds(8), cap=77) == 77


def test_the_ratio_is_the_first_that_fits():
    rng = np.random.default_rng(0)
    for _ in range(50):
        size, cap = int(rng.integers(1, 5000)), int(rng.integers(1, 60))
        price, budget = rng.uniform(0, 1e-3), rng.uniform(0, 1)
        exchange = lambda k, price=price: 0.05 + price * k
        select = lambda d: 1e-5 * d
        fits = [
            c
            for c in range(1, cap)
            if select(size) + exchange(max(1, size // c)) <= budget
        ]
        found = smallest_ratio(size, budget, exchange, select=select, cap=cap)
        assert found == min(fits, default=cap)


def test_each_layer_hides_under_the_next_and_the_last_one_under_nothing():
    sizes = [MILLION, MILLION, 10, MILLION]
    entries = entries_to_send(sizes, [9.0, 0.05, 1.0, 0.1], ethernet_seconds(8))
    # The first layer has 0.05 s, the second 1 s, the third 0.1 s.
    assert entries == [MILLION // 26, MILLION, 10, MILLION // 1000]
    assert entries_to_send([3], [1.0], ethernet_seconds(2)) == [1]


def test_a_faster_link_sends_more():
    def planned(bandwidth):
        link = Link(bandwidth, 1e-4)
        exchange = lambda k: collective_seconds(
            "all_gather", 8 * k, workers=8, link=link
        )
        return entries_to_send([MILLION] * 2, [0.02, 0.02], exchange)[0]

    assert planned(1e8) < planned(1e9) < planned(1e10) < MILLION
    assert planned(1e12) == MILLION


def test_what_was_planned_is_what_is_sent():
    tree = {"out": np.ones((100, 100)), "in": np.ones((100, 200))}
    tree = {name: x.astype(np.float32) for name, x in tree.items()}
    names = ["out", "in"]  # in backward order
    sizes = [tree[name].size for name in names]
    exchange = lambda k: 1e-6 * k
    entries = entries_to_send(sizes, [0.1, 0.002], exchange, select=lambda d: 0.0)
    assert entries == [10_000 // 5, 20_000 // 1000]
    plan = dict(zip(names, entries, strict=True))
    tx = lc.lags_sgd(optax.sgd(1.0), plan)
    sent = lc.traffic(lambda g: tx.update(g, tx.init(g), g, step=0), tree, workers=8)
    shares = {name: lc.top_k(k / tree[name].size) for name, k in plan.items()}
    parts = [lc.payload_bytes(shares[name], tree[name]) for name in names]
    assert sent.bytes_always == sum(parts)
    values = [x.shape for x in lc.top_k(0.2).encode(tree["out"], None)[:1]]
    assert values == [(2000,)]


@pytest.mark.parametrize(
    ("times", "gain"), [((1, 2, 3), 1.5), ((0.5, 1, 1), 5 / 3), ((0, 1, 1), 2)]
)
def test_hiding_is_worth_at_most_two(times, gain):
    assert largest_speedup(*times) == pytest.approx(gain, rel=1e-12)
    forward, backward, exchange = times
    r = exchange / backward
    form = 1 + 1 / (forward / min(backward, exchange) + max(r, 1 / r))
    assert form == pytest.approx(gain, rel=1e-12)


def test_selection_takes_longer_than_in_proportion():
    assert selection_seconds(MILLION) == pytest.approx(2.19e-10 * 1e6 * 19.931569)
    assert selection_seconds(1) == 0
    assert selection_seconds(2 * MILLION) > 2 * selection_seconds(MILLION)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ethernet_seconds(3), "2, 4, 8, 16 workers, not for 3"),
        (lambda: entries_to_send([], [], float), "0 sizes and 0 backward times"),
        (lambda: entries_to_send([1, 2], [1.0], float), "2 sizes and 1 backward times"),
        (lambda: entries_to_send([0], [1.0], float), r"sizes\[0\] = 0"),
        (lambda: entries_to_send([1], [-1.0], float), r"backward\[0\] = -1.0"),
        (lambda: entries_to_send([1], [np.nan], float), r"backward\[0\] = nan"),
        (lambda: smallest_ratio(1, 1.0, float, cap=0), "cap 0 is below 1"),
    ],
)
def test_plans_without_sense_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
