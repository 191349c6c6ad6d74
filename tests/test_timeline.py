"""When steps end: against an event simulation, closed forms, and by hand."""

import heapq
import math

import numpy as np
import pytest

from lowcomm.timeline import Transfer, exposed_seconds, seconds_to, timeline


def simulated(compute, transfers):
    """Events in order of their time: a worker is through, a transfer has come.

    Independent of ``timeline``: no arithmetic on whole steps, only what happens next.
    """
    steps, workers = compute.shape
    sends = [[] for _ in range(steps)]
    for transfer in transfers:
        each = np.broadcast_to(transfer.seconds, len(transfer.at))
        for t, took in zip(transfer.at, each, strict=True):
            sends[t].append((took, transfer.hidden))
    needs = [set() for _ in range(steps)]  # transfers awaited at the end of a step
    for t in range(steps):
        for number, (_, hidden) in enumerate(sends[t]):
            if t + hidden < steps:
                needs[t + hidden].add((t, number))
    events = [(compute[0, i], "through", i, 0) for i in range(workers)]
    heapq.heapify(events)
    come, through, ends = set(), [0] * steps, np.zeros((steps, workers))
    waiting, queue, busy = {}, [], False
    while events:
        now, what, *which = heapq.heappop(events)
        if what == "through":
            i, t = which
            waiting[i] = t
            through[t] += 1
            if through[t] == workers:
                queue += [(t, n, took) for n, (took, _) in enumerate(sends[t])]
        else:
            come.add(tuple(which))
            busy = False
        if queue and not busy:
            t, number, took = queue.pop(0)
            heapq.heappush(events, (now + took, "there", t, number))
            busy = True
        for i, t in list(waiting.items()):
            # Transfers of a step leave when the last worker is through with it.
            if needs[t] <= come:
                ends[t, i] = now
                del waiting[i]
                if t + 1 < steps:
                    heapq.heappush(
                        events, (now + compute[t + 1, i], "through", i, t + 1)
                    )
    return ends.max(axis=1)


@pytest.mark.parametrize("seed", range(25))
def test_steps_end_when_the_events_say_so(seed):
    rng = np.random.default_rng(seed)
    steps, workers = int(rng.integers(1, 30)), int(rng.integers(1, 5))
    compute = rng.exponential(size=(steps, workers))
    transfers = []
    for hidden in rng.integers(0, 4, size=rng.integers(0, 3)):
        at = np.flatnonzero(rng.random(steps) < 0.4)
        transfers.append(Transfer(at, rng.exponential(2.0, size=len(at)), int(hidden)))
    run = timeline(compute, *transfers)
    np.testing.assert_allclose(run.ends, simulated(compute, transfers), rtol=1e-12)
    np.testing.assert_allclose(run.computing, compute.sum(axis=0))
    assert 0 < run.share <= 1


@pytest.mark.parametrize("exchange", [0.0, 0.3, 1.0, 2.5, 7.0, 30.0])
@pytest.mark.parametrize("hidden", [0, 1, 3, 5])
def test_a_round_of_steady_steps_loses_what_is_not_hidden(exchange, hidden):
    period, rounds = 5, 40
    at = range(period - 1, period * rounds, period)
    run = timeline(np.ones(period * rounds), Transfer(at, exchange, hidden))
    later = run.ends[at[30]] - run.ends[at[10]]
    lost = exposed_seconds(exchange, 1.0, hidden)
    assert later == pytest.approx(20 * (period + lost))


def test_hiding_longer_never_takes_longer():
    compute = np.random.default_rng(0).exponential(size=(60, 3))
    taken = [
        timeline(compute, Transfer(range(3, 60, 6), 4.0, hidden)).seconds
        for hidden in range(7)
    ]
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > taken[-1]


def test_a_transfer_that_hides_behind_all_steps_costs_nothing():
    compute = np.random.default_rng(0).exponential(size=(20, 3))
    free = timeline(compute)
    assert free.seconds == pytest.approx(compute.sum(axis=0).max())
    hidden = timeline(compute, Transfer([0, 5], 1.0, hidden=20))
    assert (hidden.ends == free.ends).all()


def test_workers_that_wait_for_news_do_not_wait_for_each_other_before():
    # One is slow at first, the other later: a sync between makes both slow twice.
    compute = np.array([[1.0, 3.0], [3.0, 1.0]])
    assert timeline(compute).seconds == 4
    assert timeline(compute, Transfer([0], 0.0)).seconds == 6
    # Sent at 3 s, by the slower one, and needed by neither before 4 s.
    assert timeline(compute, Transfer([0], 0.5, hidden=1)).seconds == 4
    assert timeline(compute, Transfer([0], 2.0, hidden=1)).seconds == 5


def test_a_flag_leaves_before_what_it_lets_go():
    flag, model = Transfer([0, 1], 0.5), Transfer([0], 3.0, hidden=1)
    run = timeline(np.ones(2), flag, model)
    # 0 – 1 computing, the flag until 1.5, the model until 4.5; the step after ends at
    # 2.5, its own flag has the link from 4.5 to 5.
    assert run.ends.tolist() == [1.5, 5.0]


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="compute of shape"):
        timeline(np.ones((2, 2, 2)))
    with pytest.raises(ValueError, match="compute of shape"):
        timeline([1.0, math.nan])
    with pytest.raises(ValueError, match="at step 3 of 3"):
        timeline(np.ones(3), Transfer([3], 1.0))
    with pytest.raises(ValueError, match="step numbers"):
        Transfer([-1], 1.0)
    with pytest.raises(ValueError, match="0 or more"):
        Transfer([1], -1.0)
    with pytest.raises(ValueError, match="one for each"):
        Transfer([1, 2], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="hidden=-1"):
        Transfer([1], 1.0, hidden=-1)
    for bad in ((-1.0, 1.0, 0), (1.0, -1.0, 0), (1.0, 1.0, -1)):
        with pytest.raises(ValueError, match="-1"):
            exposed_seconds(*bad)


def test_no_steps_take_no_time():
    run = timeline(np.zeros(0))
    assert (run.seconds, run.share, len(run.ends)) == (0.0, 1.0, 0)


def test_a_loss_is_reached_between_the_points_that_hold_it():
    losses, when = np.array([3.0, 1.0, 2.0, 0.0]), np.array([0.0, 1.0, 5.0, 6.0])
    assert seconds_to(3.0, losses, when) == 0
    assert seconds_to(1.5, losses, when) == 0.75  # the first time, not the last
    assert seconds_to(0.5, losses, when) == 5.75
    assert seconds_to(-1, losses, when) == math.inf
    assert seconds_to(1.0, [], []) == math.inf


def test_a_smoothed_curve_is_the_mean_of_what_was_seen():
    losses = np.random.default_rng(0).uniform(1, 2, 50) - np.linspace(0, 1, 50)
    weights = lambda i: 0.9 ** np.arange(i, -1, -1)
    smooth = [float(np.average(losses[: i + 1], weights=weights(i))) for i in range(50)]
    for target in (1.4, 1.2, 1.0, 0.8):
        assert seconds_to(target, losses, np.arange(50.0), smoothing=0.9) == (
            pytest.approx(seconds_to(target, smooth, np.arange(50.0)))
        )
    noisy = [2.0, 0.0, 2.0, 2.0, 1.0]
    assert seconds_to(0.5, noisy, range(5)) < 1
    assert seconds_to(0.5, noisy, range(5), smoothing=0.9) == math.inf


def test_a_run_that_diverged_reaches_nothing_afterwards():
    assert seconds_to(1.0, [3.0, math.nan, 0.5], [0, 1, 2]) == math.inf
    assert seconds_to(2.0, [math.inf, 1.0], [0, 4]) == math.inf


def test_curves_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="one of each"):
        seconds_to(1.0, [1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="must not fall"):
        seconds_to(1.0, [1.0, 2.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="smoothing=1"):
        seconds_to(1.0, [1.0], [1.0], smoothing=1.0)
    with pytest.raises(ValueError, match="NaN"):
        seconds_to(math.nan, [1.0], [1.0])
