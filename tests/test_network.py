"""The α–β model: what each collective costs, and how a program's rows add up."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lowcomm as lc
from lowcomm.connections import Level
from lowcomm.costs import levels_seconds
from lowcomm.ledger import Row, Traffic, traffic
from lowcomm.lowrank import powersgd
from lowcomm.network import Link, Network, collective_seconds, run_seconds, seconds
from lowcomm.spmd import AXIS

LINK = Link(8e6, 0.001)  # a megabyte a second, a millisecond
EVERY = [
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
    "all_gather",
    "broadcast",
    "permute",
    "send",
]


def sent(*rows):
    return Traffic(tuple(rows))


@pytest.mark.parametrize("collective", EVERY)
def test_one_worker_pays_nothing(collective):
    assert collective_seconds(collective, 10**9, workers=1, link=LINK) == 0


def ring(workers, nbytes, link):
    """Seconds of a ring all-reduce, simulated step by step."""
    clock, chunk = 0.0, nbytes / workers
    for _ in range(2):  # reduce-scatter, then all-gather
        for _ in range(workers - 1):
            clock += link.latency + 8 * chunk / link.bandwidth
    return clock


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 64])
def test_an_all_reduce_costs_what_its_ring_takes_step_by_step(workers):
    assert collective_seconds(
        "all_reduce", 999, workers=workers, link=LINK
    ) == pytest.approx(ring(workers, 999, LINK))


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_of_the_parts(workers):
    cost = lambda kind, n: collective_seconds(kind, n, workers=workers, link=LINK)
    assert cost("all_reduce", 800) == pytest.approx(
        cost("reduce_scatter", 800) + cost("all_gather", 800 / workers)
    )


@pytest.mark.parametrize("workers", [2, 5])
def test_an_all_gather_is_as_many_permutes_as_there_are_others(workers):
    cost = lambda kind: collective_seconds(kind, 800, workers=workers, link=LINK)
    assert cost("all_gather") == pytest.approx((workers - 1) * cost("permute"))


@pytest.mark.parametrize("collective", EVERY)
def test_costs_grow_with_bytes_and_latency_and_shrink_with_bandwidth(collective):
    cost = lambda n, link: collective_seconds(collective, n, workers=4, link=link)
    assert cost(1000, LINK) < cost(2000, LINK)
    assert cost(1000, LINK) < cost(1000, Link(8e6, 0.002))
    assert cost(1000, LINK) > cost(1000, Link(16e6, 0.001))


def test_seconds_are_compute_plus_every_call():
    twice = sent(Row("permute", AXIS, "float32", 1000, 2), Row("send", AXIS, "int8", 0))
    assert seconds(twice, LINK, 4, compute=5.0) == pytest.approx(5 + 2 * 0.002 + 0.001)
    assert seconds(sent(), LINK, 4, compute=5.0) == 5.0
    assert seconds(twice, LINK, 1, compute=5.0) == 5.0


def fires_sometimes(x):
    fire = lax.pmax(x, AXIS) > 1
    talk = lambda x: lax.pmean(x, AXIS)
    return lax.cond(fire, talk, lambda x: lax.ppermute(x, AXIS, [(0, 1), (1, 0)]), x)


def test_without_counts_each_conditional_takes_its_dearest_branch():
    program = traffic(fires_sometimes, jnp.float32(0), workers=2)
    reduce = collective_seconds("all_reduce", 4, workers=2, link=LINK)
    assert seconds(program, LINK, 2) == pytest.approx(2 * reduce)


def test_the_dearest_branch_is_the_one_of_most_seconds_not_of_most_bytes():
    many = [Row("permute", AXIS, "int8", 1, 1, ((1, 0),), wave=i) for i in range(9)]
    one = Row("permute", AXIS, "int8", 100, 1, ((1, 1),))
    program = sent(*many, one)
    assert program.bytes_max == 100
    assert seconds(program, LINK, 2) == pytest.approx(9 * 0.001 + 9 / 1e6)


def test_with_counts_the_price_is_of_what_happened():
    program = traffic(fires_sometimes, jnp.float32(0), workers=2)
    kinds = [row.collective for row in program.rows]
    assert kinds == ["all_reduce", "permute", "all_reduce"]
    reduce = collective_seconds("all_reduce", 4, workers=2, link=LINK)
    permute = collective_seconds("permute", 4, workers=2, link=LINK)
    run = seconds(program, LINK, 2, compute=1.0, counts=np.array([10, 7, 3]))
    assert run == pytest.approx(1 + 13 * reduce + 7 * permute)


def test_a_while_needs_counts():
    program = sent(Row("permute", AXIS, "int8", 1000, None))
    with pytest.raises(ValueError, match="meter"):
        seconds(program, LINK, 2)
    assert seconds(program, LINK, 2, counts=[3]) == pytest.approx(0.006)


def test_every_axis_has_its_own_link_and_the_slowest_sets_the_pace():
    fast, slow = Link(8e9, 0.0), Link(8e6, 0.01)
    links, sizes = {"chip": fast, "site": slow}, {"chip": 4, "site": 2}
    row = lambda axis: sent(Row("all_gather", axis, "int8", 1000))
    cost = lambda axis: seconds(row(axis), links, sizes)
    assert cost("chip") == pytest.approx(3 * 1e-6)
    assert cost("site") == pytest.approx(0.001 + 0.01)
    assert cost(("site", "chip")) == pytest.approx(7 * (0.001 + 0.01))


def test_an_axis_without_link_or_size_is_an_error_by_name():
    program = sent(Row("permute", "site", "int8", 1), Row("permute", "chip", "int8", 1))
    with pytest.raises(ValueError, match="no link is given for it"):
        seconds(program, {"chip": LINK}, {"chip": 2, "site": 2})
    with pytest.raises(ValueError, match="no size is given for it"):
        seconds(program, LINK, {"chip": 2})
    with pytest.raises(ValueError, match="is one size"):
        seconds(program, LINK, 4)


def test_a_collective_of_one_member_needs_neither_link_nor_size():
    alone = sent(Row("all_reduce", (), "float32", 100, 0))
    assert seconds(alone, {}, {}) == 0
    assert seconds(alone, LINK, 8) == 0


def test_an_unknown_collective_is_an_error_by_name():
    with pytest.raises(ValueError, match="gossip"):
        collective_seconds("gossip", 1, workers=2, link=LINK)
    with pytest.raises(ValueError, match="workers=0"):
        collective_seconds("permute", 1, workers=0, link=LINK)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1bit", 1),
        ("10kbit", 1e4),
        ("100Mbit", 1e8),
        ("100mbit", 1e8),
        (" 2.5 Gbit ", 2.5e9),
        ("1e3Tbit", 1e15),
    ],
)
def test_bandwidths_are_parsed(text, bits):
    assert Link.parse(text) == Link(bits, 0.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("20ms", 0.02), ("3s", 3), ("250us", 250e-6), ("250 µs", 250e-6), ("5ns", 5e-9)],
)
def test_latencies_are_parsed(text, value):
    assert Link.parse("1Gbit", text).latency == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "fast", "100", "100MB", "100Mbps", "Mbit", "-1Mbit", "1.2.3Mbit"]
)
def test_a_bandwidth_in_other_words_is_refused_with_the_right_ones(text):
    with pytest.raises(ValueError, match=r"bandwidth .* Mbit"):
        Link.parse(text)


@pytest.mark.parametrize("text", ["", "20", "20min", "-1ms", "ms", "1,5ms"])
def test_a_latency_in_other_words_is_refused_with_the_right_ones(text):
    with pytest.raises(ValueError, match=r"latency .* ms"):
        Link.parse("1Gbit", text)


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, 0), (-1, 0), (math.nan, 0)])
def test_a_link_needs_a_positive_bandwidth(bandwidth, latency):
    with pytest.raises(ValueError, match="bandwidth="):
        Link(bandwidth, latency)


@pytest.mark.parametrize("latency", [-1e-9, math.inf, math.nan])
def test_a_link_needs_a_finite_latency(latency):
    with pytest.raises(ValueError, match="latency="):
        Link(1.0, latency)


def test_an_infinite_bandwidth_leaves_latency_alone():
    link = Link(math.inf, 0.01)
    assert collective_seconds("permute", 1 << 40, workers=2, link=link) == 0.01


def test_a_mean_of_compiled_size_is_priced_like_its_row():
    shape = jax.ShapeDtypeStruct((1_000_000,), jnp.float32)
    program = traffic(lambda x: lax.pmean(x, AXIS), shape, workers=8)
    cost = collective_seconds("all_reduce", 4_000_000, workers=8, link=LINK)
    assert seconds(program, LINK, 8) == cost


def test_collectives_that_do_not_wait_for_each_other_pay_latency_once():
    link = Link.parse("1Gbit", "10ms")

    def both(x, y):
        return lax.psum(x, AXIS), lax.psum(y, AXIS)

    def one_after_the_other(x, y):
        return lax.psum(y + lax.psum(x, AXIS).sum(), AXIS)

    def in_a_branch(x, y, fire):
        talk = lambda x, y: both(x, y)
        return lax.cond(fire, talk, lambda x, y: (x, y), x, y)

    x, y = jnp.zeros(1000), jnp.zeros(500)
    price = lambda fn, *args: seconds(traffic(fn, *args, workers=4), link, 4)
    one = lambda n: 2 * 3 / 4 * 8 * 4 * n / 1e9 + 2 * 3 * 0.01
    assert price(both, x, y) == pytest.approx(one(1500), rel=1e-12)
    assert price(one_after_the_other, x, y) == pytest.approx(
        one(1000) + one(500), rel=1e-12
    )
    assert price(in_a_branch, x, y, np.bool_(True)) == pytest.approx(one(1500))


def test_powersgd_waits_twice_whatever_the_number_of_matrices():
    grads = [jnp.zeros((32, 32))] * 3 + [jnp.zeros(32)]
    tx = powersgd(2)
    worker = lambda g: tx.update(g, tx.init(g), step=0)[0]
    rows = traffic(worker, grads, workers=4).rows
    assert sorted(row.wave for row in rows) == [0, 1]


def test_what_follows_a_loop_that_talks_waits_for_it():
    def worker(x):
        x, _ = lax.scan(lambda x, _: (lax.pmean(x, AXIS), None), x, length=3)
        return lax.pmean(x, AXIS)

    first, second = traffic(worker, jnp.zeros(2), workers=4).rows
    assert (first.wave, second.wave) == (0, 1)


SLOW, FAST = Link(1e9, 1e-3), Link(1e12, 1e-6)
SLICES = Network(
    {"slices": SLOW, "chips": FAST}, {"slices": 2, "chips": 16}, {"slices": 16}
)


def test_a_network_is_its_links_and_sizes_with_the_shared_ones_divided():
    row = lambda axis: sent(Row("all_reduce", axis, "float32", 10**6))
    sizes = {"slices": 2, "chips": 16}
    links = {"slices": SLOW.shared(16), "chips": FAST}
    for axis in ("slices", "chips"):
        assert seconds(row(axis), SLICES) == seconds(row(axis), links, sizes)
    program = sent(*row("slices").rows, *row("chips").rows)
    assert seconds(program, SLICES) == pytest.approx(
        seconds(row("slices"), SLICES) + seconds(row("chips"), SLICES)
    )


@pytest.mark.parametrize("axis", [("slices", "chips"), ("chips", "slices")])
def test_along_two_axes_the_best_goes_level_by_level_whatever_their_order(axis):
    program = sent(Row("all_reduce", axis, "float32", 10**7))
    levels = [Level(2, SLOW, 16), Level(16, FAST)]
    for how in ("ring", "tree", "best", "two_level", "gloo"):
        assert seconds(program, SLICES, algorithm=how) == levels_seconds(
            "all_reduce", 10**7, levels=levels, algorithm=how
        )
    best = seconds(program, SLICES, algorithm="best")
    assert best == seconds(program, SLICES, algorithm="two_level")
    # Between slices two chips exchange their sixteenths over a sixteenth of the link:
    # one message. Inside 15/16 of the bytes go in four messages, twice.
    inside = 2 * (15 / 16 * 8 * 10**7 / 1e12 + 4e-6)
    assert best == pytest.approx(8 * 10**7 / 1e9 + 1e-3 + inside, rel=1e-12)
    ring = seconds(program, SLICES, algorithm="ring")
    assert ring == pytest.approx(2 * 31 / 32 * 8 * 10**7 / 1e9 + 62e-3)


def test_flags_of_a_program_go_by_trees_and_its_model_by_what_is_best():
    flag = Row("all_reduce", AXIS, "float32", 4)
    model = Row("all_reduce", AXIS, "float32", 10**8, wave=1)
    link = Link.parse("100Mbit", "20ms")
    cost = lambda how: seconds(sent(flag, model), link, 8, algorithm=how)
    one = lambda row, how: collective_seconds(
        "all_reduce", row.bytes, workers=8, link=link, algorithm=how
    )
    assert cost("best") == pytest.approx(one(flag, "doubling") + one(model, "halving"))
    assert cost("best") < cost("ring")
    assert cost("ring") == seconds(sent(flag, model), link, 8)


def test_one_number_of_workers_takes_the_slowest_of_links_given_by_axis():
    program = sent(Row("all_gather", ("slices", "chips"), "int8", 1000))
    links = {"slices": SLOW, "chips": FAST}
    together = seconds(program, links, {"slices": 2, "chips": 16})
    assert seconds(program, links, 32) == together
    assert seconds(program, links, np.int64(32)) == together


def test_a_network_needs_no_sizes_and_a_link_does():
    program = sent(Row("permute", "slices", "int8", 1))
    with pytest.raises(ValueError, match="leave workers out"):
        seconds(program, SLICES, 2)
    with pytest.raises(ValueError, match="give how many there are"):
        seconds(program, SLOW)
    with pytest.raises(ValueError, match="no size is given for it"):
        seconds(sent(Row("permute", "sites", "int8", 1)), SLICES)


@pytest.mark.parametrize("how", ["ring", "best"])
def test_a_run_of_fit_takes_what_its_steps_take_one_by_one(how):
    tx = lc.post_local_sgd(optax.sgd(0.1), warmup=3, period=4)
    loss, batch = lambda x, c: jnp.sum((x - c) ** 2), jnp.array([0.0, 2.0])
    params = jnp.zeros(1000)
    run = lc.fit(loss, tx, params, lambda t: batch, steps=12, workers=2)
    step = lc.counted_step(loss, tx, workers=2)
    params, state = lc.stack(params, 2), lc.init(tx, lc.stack(params, 2))
    total = 0.0
    for t in range(12):
        params, state, _, one = step(params, state, batch, t)
        total += seconds(one.traffic, LINK, 2, 0.01, counts=one.ran, algorithm=how)
    found = run_seconds(run.programs, LINK, 2, compute=0.01, algorithm=how)
    assert found == pytest.approx(total)
    assert found > 12 * 0.01
