"""Collective algorithms, played message by message on a small machine.

It moves the data as well: an algorithm that would not end with the right numbers on
every worker fails here, whatever it is said to cost.
"""

import math

import numpy as np

from lowcomm.connections import Link

# 8 bits a second at full efficiency would be a byte a second: one byte takes 2 s here.
LINK = Link(bandwidth=8.0, latency=0.5, overhead=0.25, efficiency=0.5)


class Machine:
    """Workers with clocks, and links on which a message takes α + o + 8n/(ηβ)."""

    def __init__(self, workers, link=LINK):
        self.link, self.clock = link, [0.0] * workers

    def step(self, messages):
        """Messages (from, to, bytes) that leave together, one a worker at most."""
        assert len({source for source, _, _ in messages}) == len(messages)
        assert len({target for _, target, _ in messages}) == len(messages)
        done = list(self.clock)
        rate = self.link.bandwidth * self.link.efficiency
        for source, target, nbytes in messages:
            took = self.link.latency + self.link.overhead + 8 * nbytes / rate
            begin = max(self.clock[source], self.clock[target])  # both have finished
            for worker in (source, target):
                done[worker] = max(done[worker], begin + took)
        self.clock = done

    @property
    def seconds(self):
        return max(self.clock)


def parts(workers, count):
    """What each worker has: ``count`` numbers, and what everybody should have."""
    data = np.random.default_rng(0).integers(0, 99, (workers, count)).astype(float)
    return data, data.sum(axis=0)


def ring_all_reduce(k, n):
    machine, (data, total) = Machine(k), parts(k, k)
    for turn in range(2 * (k - 1)):  # adding up, then telling
        before, adding = data.copy(), turn < k - 1
        for i in range(k):
            part = (i - turn) % k if adding else (i + 1 - (turn - k + 1)) % k
            to = (i + 1) % k
            data[to, part] = before[i, part] + (data[to, part] if adding else 0)
        machine.step([(i, (i + 1) % k, n / k) for i in range(k)])
    assert (data == total).all()
    return machine.seconds


def folded(k, n, machine, data):
    """The extra workers give all they have to a partner; the others remain."""
    power = 2 ** int(math.log2(k))
    extra = k - power
    if extra:
        machine.step([(power + i, i, n) for i in range(extra)])
        data[:extra] += data[power:]
    return power, extra


def doubling_all_reduce(k, n):
    machine, (data, total) = Machine(k), parts(k, 1)
    power, extra = folded(k, n, machine, data)
    distance = 1
    while distance < power:
        data[:power] += data[[i ^ distance for i in range(power)]]
        machine.step([(i, i ^ distance, n) for i in range(power)])
        distance *= 2
    if extra:
        machine.step([(i, power + i, n) for i in range(extra)])
        data[power:] = data[:extra]
    assert (data == total).all()
    return machine.seconds


def halving_all_reduce(k, n):
    power = 2 ** int(math.log2(k))
    machine, (data, total) = Machine(k), parts(k, power)
    _, extra = folded(k, n, machine, data)
    begin, size = [0] * power, power  # the part each is still about
    while size > 1:
        size //= 2
        before = data.copy()
        for i in range(power):
            begin[i] += size if i & size else 0
            mine = slice(begin[i], begin[i] + size)
            data[i, mine] = before[i, mine] + before[i ^ size, mine]
        machine.step([(i, i ^ size, n * size / power) for i in range(power)])
    while size < power:
        before = data.copy()
        for i in range(power):
            theirs = slice(begin[i ^ size], begin[i ^ size] + size)
            data[i, theirs] = before[i ^ size, theirs]
        begin = [min(begin[i], begin[i ^ size]) for i in range(power)]
        machine.step([(i, i ^ size, n * size / power) for i in range(power)])
        size *= 2
    if extra:
        machine.step([(i, power + i, n) for i in range(extra)])
        data[power:] = data[:extra]
    assert (data == total).all()
    return machine.seconds


def ring_reduce_scatter(k, n):
    machine, (data, total) = Machine(k), parts(k, k)
    for turn in range(k - 1):
        before = data.copy()
        for i in range(k):
            data[(i + 1) % k, (i - turn) % k] += before[i, (i - turn) % k]
        machine.step([(i, (i + 1) % k, n / k) for i in range(k)])
    assert all(data[i, (i + 1) % k] == total[(i + 1) % k] for i in range(k))
    return machine.seconds


def halving_reduce_scatter(k, n):
    machine, (data, total) = Machine(k), parts(k, k)
    power, extra = folded(k, n, machine, data)
    # Worker i < power answers for its own part, and for that of power + i if there.
    of = lambda group: [j for j in range(k) if j % power in group]
    groups = {i: range(power) for i in range(power)}
    size = power
    while size > 1:
        size //= 2
        before, messages = data.copy(), []
        for i in range(power):
            half = range(i // size * size, i // size * size + size)
            away = [j for j in groups[i] if j not in half]
            partner = i ^ size
            data[i, of(half)] = before[i, of(half)] + before[partner, of(half)]
            messages.append((i, partner, n * len(of(away)) / k))
            groups[i] = half
        machine.step(messages)
    if extra:
        machine.step([(i, power + i, n / k) for i in range(extra)])
        for i in range(extra):
            data[power + i, power + i] = data[i, power + i]
    assert (np.diag(data) == total).all()
    return machine.seconds


def ring_all_gather(k, n):
    machine, known = Machine(k), [{i} for i in range(k)]
    for turn in range(k - 1):
        for i in range(k):
            known[(i + 1) % k].add((i - turn) % k)
        machine.step([(i, (i + 1) % k, n) for i in range(k)])
    assert all(len(have) == k for have in known)
    return machine.seconds


def bruck_all_gather(k, n):
    machine, known = Machine(k), [[i] for i in range(k)]
    distance = 1
    while distance < k:
        sent = min(distance, k - distance)
        before = [list(have) for have in known]
        for i in range(k):
            known[i] += before[(i + distance) % k][:sent]
        machine.step([(i, (i - distance) % k, sent * n) for i in range(k)])
        distance *= 2
    assert all(sorted(have) == list(range(k)) for have in known)
    return machine.seconds


def pairwise_all_to_all(k, n):
    machine, got = Machine(k), [{i} for i in range(k)]
    for away in range(1, k):
        for i in range(k):
            got[(i + away) % k].add(i)
        machine.step([(i, (i + away) % k, n / k) for i in range(k)])
    assert all(len(have) == k for have in got)
    return machine.seconds


def bruck_all_to_all(k, n):
    # held[i]: (from, how far it still has to go)
    machine, held = Machine(k), [[(i, away) for away in range(k)] for i in range(k)]
    bit = 1
    while bit < k:
        moving = [[(s, far - bit) for s, far in have if far & bit] for have in held]
        held = [[(s, far) for s, far in have if not far & bit] for have in held]
        for i in range(k):
            held[(i + bit) % k] += moving[i]
        machine.step(
            [(i, (i + bit) % k, n * len(moving[i]) / k) for i in range(k)],
        )
        bit *= 2
    assert all(sorted(have) == [(source, 0) for source in range(k)] for have in held)
    return machine.seconds


def tree_broadcast(k, n):
    machine, knowing = Machine(k), 1
    while knowing < k:
        told = min(knowing, k - knowing)
        machine.step([(i, knowing + i, n) for i in range(told)])
        knowing += told
    return machine.seconds


def chained(k, n, segments, link):
    """A pipeline: a worker passes a segment on as soon as it has it."""
    rate = link.bandwidth * link.efficiency
    took = link.overhead + 8 * n / segments / rate
    there = [0.0] * segments  # when the worker at hand has each
    for _ in range(k - 1):
        free = 0.0
        for j in range(segments):
            free = max(free, there[j]) + took
            there[j] = free + link.latency
    return there[-1]


PLAYED = {
    ("all_reduce", "ring"): ring_all_reduce,
    ("all_reduce", "doubling"): doubling_all_reduce,
    ("all_reduce", "halving"): halving_all_reduce,
    ("reduce_scatter", "ring"): ring_reduce_scatter,
    ("reduce_scatter", "halving"): halving_reduce_scatter,
    ("all_gather", "ring"): ring_all_gather,
    ("all_gather", "bruck"): bruck_all_gather,
    ("all_to_all", "pairwise"): pairwise_all_to_all,
    ("all_to_all", "bruck"): bruck_all_to_all,
    ("broadcast", "tree"): tree_broadcast,
}


def two_levels(groups, members, n, between, inside):
    """Played: scattered inside, all-reduced between by halving, gathered inside."""
    machine = Machine(members, inside)
    size = members
    while size > 1:
        size //= 2
        machine.step([(i, i ^ size, n * size / members) for i in range(members)])
    scattered = machine.seconds
    outer = Machine(groups, between)
    size = groups
    for size in (groups // 2, groups // 4, groups // 4, groups // 2):
        nbytes = n / members * size / groups
        outer.step([(i, i ^ size, nbytes) for i in range(groups)])
    return 2 * scattered + outer.seconds  # gathering is scattering backwards


def gloo_ring(k, n, link, phases):
    """Played: segments of a ring, two under way, a receiver asks for each."""
    segments = max(2, math.ceil(n / 2**20 / k)) if phases == 2 else 2
    part = n / k if phases == 2 else n
    took = link.overhead + 8 * part / segments / (link.bandwidth * link.efficiency)
    clock = 0.0
    for _ in range(phases):
        free, there = clock, []
        for j in range((k - 1) * segments):
            asked = clock if j < 2 else there[j - 2]
            free = max(free, asked + link.latency) + took
            there.append(free + link.latency)
        clock = there[-1]
    return clock
