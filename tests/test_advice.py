"""Advice: bytes are the methods' own, seconds the model's, and little is given up."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm as lc
from experiments import advise as program
from lowcomm.planning.advice import advise, amount
from lowcomm.planning.candidates import (
    CODECS,
    FAMILIES,
    Codec,
    coding_seconds,
    exchanged,
)

TREE = {"a": np.zeros((48, 32), np.float32), "b": np.zeros(40, np.float32)}
LINK = lc.Link.parse("100Mbit", "5ms")
FASTER = lc.Link.parse("100Gbit", "10us")
LOST = {"parameters": TREE, "link": LINK, "workers": 4, "compute": 0.002}


@pytest.fixture(scope="module")
def usual():
    """A model of three megabytes on a slow link."""
    return advise(750_000, link=LINK, workers=4, compute=0.02)


def squares(params, batch):
    return sum(jnp.sum((x - batch) ** 2) for x in jax.tree.leaves(params))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_bytes_are_those_that_a_run_of_the_method_counts(family):
    workers, period, steps = 2, 4 if family.rounds else 1, 8
    tx = family.make(optax.sgd(0.01), period, int(family.delayed), lc.AXIS)
    batch = jnp.arange(float(workers))
    run = lc.fit(squares, tx, TREE, lambda t: batch, steps=steps, workers=workers)
    sent = exchanged(family, TREE, workers=workers).bytes_always
    assert run.bytes == sent * steps // period > 0


def test_the_call_of_every_option_makes_its_method(usual):
    space = {name: getattr(lc, name) for name in dir(lc)}
    space |= {"inner": optax.sgd(0.1), "sgd": optax.sgd}
    for family, options in itertools.groupby(
        sorted(usual.options, key=lambda o: o.method), key=lambda o: o.method
    ):
        option = next(options)
        tx = eval(option.call, space)
        worker = lambda p, tx=tx, t=option.period - 1: tx.update(
            p, tx.init(p), p, step=t
        )
        made = lc.traffic(worker, TREE, workers=4)
        own = next(f for f in FAMILIES if f.name == family)
        assert made.census() == exchanged(own, TREE, workers=4).census()


def test_seconds_are_computing_waiting_and_coding(usual):
    base = next(o for o in usual.options if o.method == "data_parallel")
    assert base.exchange == lc.seconds(
        exchanged(FAMILIES[0], [np.zeros(750_000, np.float32)], workers=4),
        LINK,
        4,
        algorithm="best",
    )
    for option in usual.options:
        exposed = lc.exposed_seconds(option.exchange, 0.02, option.delay)
        assert option.exposed == pytest.approx(exposed / option.period)
        step = 0.02 + option.exposed + option.coding
        assert option.seconds == pytest.approx(step)
        assert option.share == pytest.approx(0.02 / step)
        assert option.speedup == pytest.approx(base.seconds / step)
        assert option.fewer == pytest.approx(base.bytes / option.bytes)
        assert option.bytes == option.sent / option.period


def test_steps_of_an_option_end_when_the_timeline_says_so(usual):
    delayed = [o for o in usual.options if o.delay and o.exposed]
    waiting = next(o for o in usual.options if o.method == "diloco" and o.period == 8)
    for option in (waiting, delayed[0]):
        h, rounds = option.period, 12
        at = range(h - 1, h * rounds, h)
        run = lc.timeline(
            np.full(h * rounds, 0.02), lc.Transfer(at, option.exchange, option.delay)
        )
        # From one round's sending to another's: the first has nobody to wait for.
        took = (run.ends[at[10]] - run.ends[at[4]]) / (6 * h)
        assert took == pytest.approx(option.seconds)


@pytest.mark.parametrize("efficiency", [0.3, 0.6, 0.8, 0.95])
def test_what_is_recommended_holds_back_least_of_what_is_efficient(efficiency):
    found = advise(**LOST, efficiency=efficiency)
    enough = [o for o in found.options if o.share >= efficiency * (1 - 1e-9)]
    assert found.reached
    assert found.best.held_back == min(o.held_back for o in enough)
    held = [o.held_back for o in found.options]
    # Sorted to six digits behind the point, so that a rounding decides nothing.
    assert all(b >= a - 1e-5 for a, b in itertools.pairwise(held))


def test_where_data_parallel_is_efficient_nothing_is_given_up():
    found = advise(TREE, link=FASTER, workers=4, compute=0.02)
    assert found.best.call == "data_parallel(inner)"
    assert found.reached
    assert "nothing need be given up" in found.reason


def test_a_slower_link_never_has_more_recommended_of_it(usual):
    held = []
    for rate in ("100Gbit", "1Gbit", "100Mbit", "10Mbit"):
        link = lc.Link.parse(rate, "1us")
        best = advise(TREE, link=link, workers=4, compute=0.001).best
        held.append(best.held_back)
    assert held == sorted(held)
    assert held[0] == 1 < held[-1]


def test_where_nothing_is_enough_the_most_efficient_is_named():
    found = advise(**LOST | {"compute": 1e-7, "periods": (2, 4)})
    assert not found.reached
    assert found.best.share == max(o.share for o in found.options)
    assert found.reason.startswith("Nothing computes 80% of the time")


def test_published_periods_come_first_among_equals(usual):
    place = [(o.method, o.period) for o in usual.options].index
    assert place(("local_sgd", 8)) < place(("diloco", 8))  # both published: simpler
    assert place(("diloco", 50)) < place(("local_sgd", 50))
    cautions = {(o.method, o.period): o.caution for o in usual.options}
    assert cautions["diloco", 500] == ""
    assert cautions["diloco", 1000] == "published up to H = 500"


def test_a_delay_is_as_long_as_it_must_be_and_counts_as_holding_back():
    found = advise(**LOST)
    for option in (o for o in found.options if o.delay):
        assert 1 <= option.delay <= option.period
        assert option.held_back == pytest.approx(
            option.fewer * (1 + option.delay / option.period)
        )
        if option.delay > 1 and option.delay < option.period:
            assert option.share >= 0.8 * (1 - 1e-9)
            sooner = lc.exposed_seconds(option.exchange, 0.002, option.delay - 1)
            assert 0.002 / (0.002 + sooner / option.period) < 0.8
    waits = advise(**LOST, overlap=False)
    assert {o.method for o in found.options} - {o.method for o in waits.options} == {
        "delayed diloco"
    }


def test_slow_codecs_are_not_recommended_and_fast_ones_cost_nothing():
    sign = next(family for family in FAMILIES if family.name == "sign")
    # One encoding, and five decodings: of four workers' signs and its own.
    assert coding_seconds(sign, 1e6, workers=4, codecs={"sign": Codec(1e6, 1e7)}) == 1.5
    slow = advise(**LOST, codecs=dict.fromkeys(CODECS, Codec(1e3, 1e3)))
    assert slow.best.coding == 0
    free = advise(**LOST, codecs=dict.fromkeys(CODECS, Codec(math.inf, math.inf)))
    assert all(o.coding == 0 for o in free.options)


def test_a_network_s_devices_share_its_link():
    alone = advise(TREE, link=LINK, workers=4, compute=0.002)
    sizes = {"workers": 4, "chips": 8}
    network = lambda shared: lc.Network(
        {"workers": LINK, "chips": lc.Link(1e12)}, sizes, {"workers": shared}
    )
    own = advise(TREE, link=network(1), compute=0.002)
    assert [o.seconds for o in own.options] == [o.seconds for o in alone.options]
    shared = advise(TREE, link=network(8), compute=0.002)
    dense = lambda advice: next(o for o in advice.options if o.period == 1).exchange
    assert dense(shared) > dense(own)


def test_the_table_has_a_line_for_each_family_and_marks_one(usual):
    text = usual.table()
    lines = text.splitlines()
    assert len(lines) == 1 + len(FAMILIES) + 2
    assert sum(line.startswith("→") for line in lines) == 1
    assert usual.best.method in next(line for line in lines if line.startswith("→"))
    assert lines[-1] == usual.reason
    assert usual.best in usual.shown()
    assert len(usual.table(usual.options).splitlines()) == len(usual.options) + 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parameters": 0}, "parameters=0"),
        ({"parameters": math.nan}, "parameters=nan"),
        ({"parameters": {"a": np.zeros(3, np.int32)}}, "no floating-point"),
        ({"workers": 1}, "takes two"),
        ({"workers": None}, "takes two"),
        ({"compute": 0.0}, "compute="),
        ({"compute": math.inf}, "compute="),
        ({"efficiency": 1.0}, "efficiency="),
        ({"steps": 0}, "steps="),
        ({"periods": ()}, "periods="),
        ({"periods": (1, 2)}, "periods="),
        ({"periods": (2.5,)}, "periods="),
        ({"codecs": {}}, "no speed for 'int8'"),
        ({"codecs": {"int8": Codec(0.0, 1.0)}}, "'int8'"),
        ({"families": FAMILIES[1:2]}, "data_parallel must be one"),
        ({"algorithm": "magic"}, "no algorithm 'magic'"),
        ({"link": lc.Network({"x": LINK}, {"x": 2}), "workers": None}, "'workers'"),
        ({"link": lc.Network({"workers": LINK}, {"workers": 2})}, "leave workers out"),
    ],
)
def test_nonsense_is_refused(change, named):
    with pytest.raises(ValueError, match=named):
        advise(**LOST | {"families": FAMILIES[:2]} | change)


def test_a_run_of_few_rounds_is_not_given_an_outer_momentum():
    # DiLoCo's of 0.9 looks back ten rounds: a run has at least fifty, or does without.
    enough, few = (advise(**LOST | {"steps": n}) for n in (50 * 30, 50 * 30 - 1))
    found = lambda advice: {
        o.period for o in advice.options if o.method.startswith("diloco")
    }
    assert max(found(enough)) == 30 > max(found(few))
    averaged = [
        {o for o in a.options if o.method == "local_sgd"} for a in (enough, few)
    ]
    assert averaged[0] == averaged[1]


def test_a_family_that_talks_between_its_rounds_is_refused():
    chatty = FAMILIES[0]._replace(rounds=True)
    with pytest.raises(ValueError, match="talks between its rounds"):
        exchanged(chatty, TREE, workers=2)


def test_amounts_have_three_digits_and_a_unit():
    shown = [amount(x, "s") for x in (1e-9, 2.5e-6, 0.999, 1, 999, 1000, 1e20)]
    assert shown == ["1 ns", "2.5 µs", "999 ms", "1 s", "999 s", "1 ks", "1e+08 Ts"]
    assert [amount(x, "B") for x in (0.25, 999, 1e6)] == ["0.25 B", "999 B", "1 MB"]
    assert [amount(x, "s") for x in (0.9997, 999.7)] == ["1 s", "1 ks"]


def test_a_model_too_large_for_one_array_is_advised_on():
    # 2.4e9 parameters a matrix would be more than 32-bit indices reach.
    families = [f for f in FAMILIES if f.name in ("data_parallel", "sign")]
    big = LOST | {"parameters": 4e10}
    base = next(
        option
        for option in advise(**big, families=families).options
        if option.method == "data_parallel"
    )
    assert base.sent == 4 * 4e10


def test_the_program_prints_the_recommendation(capsys):
    arguments = "--bandwidth 100Mbit --latency 5ms --parameters 750e3 --workers 4"
    assert program.main(arguments.split()) == 0
    printed = capsys.readouterr().out
    found = advise(750e3, link=LINK, workers=4, compute=0.02)
    assert found.reason in printed
    assert all(option.method in printed for option in found.shown())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--compute 20", "time '20'"),
        ("--bandwidth 50MB", "bandwidth '50MB'"),
        ("--parameters -1", "parameters=-1"),
        ("--payload 0", "efficiency=0"),
    ],
)
def test_the_program_says_what_it_cannot_read(arguments, named, capsys):
    assert program.main(arguments.split()) == 2
    assert named in capsys.readouterr().err
