"""Workers that serve a sample several times each stay busy."""

import heapq
from collections.abc import Sequence

import numpy as np
import pytest

from gdp.measure.cycle import MAX_IN_FLIGHT, MOST_UNROLLED, Cycle, cyclic_schedule, turn_schedule

# Pieces of ResNet-50 on two cores, as a search had placed it: each core works for 47 ms a sample.
WORKER = [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
SECONDS = [4.21, 0.31, 22.23, 1.14, 12.03, 3.61, 7.1, 3.68, 1.13, 37.96]
CHAIN = [[], *[[i] for i in range(9)]]


def rate(
    worker: Sequence[int],
    seconds: Sequence[float],
    cycle: Cycle,
    slots: int,
    spread: float = 0.0,
) -> float:
    """Samples per period of a chain, simulated: a worker takes what is due first."""
    rng = np.random.default_rng(0)
    ready: list[list[tuple[float, int, int]]] = [[] for _ in range(max(worker) + 1)]
    events: list[tuple[float, int, int, int]] = []
    busy, finish, entered = [False] * len(ready), [], slots

    def put(sample: int, stage: int) -> None:
        heapq.heappush(ready[worker[stage]], (cycle.due(sample, stage), sample, stage))

    def start(now_s: float) -> None:
        for w, waiting in enumerate(ready):
            if waiting and not busy[w]:
                _, sample, stage = heapq.heappop(waiting)
                busy[w] = True
                takes_s = seconds[stage] * max(0.3, 1 + spread * rng.standard_normal())
                heapq.heappush(events, (now_s + takes_s, w, sample, stage))

    for sample in range(slots):
        put(sample, 0)
    start(0.0)
    while len(finish) < 600:
        now_s, w, sample, stage = heapq.heappop(events)
        busy[w] = False
        if stage + 1 < len(worker):
            put(sample, stage + 1)
        else:
            finish.append(now_s)
            put(entered, 0)
            entered += 1
        start(now_s)
    steady = np.array(finish)[2 * slots :]
    load_s = max(sum(s for s, x in zip(seconds, worker, strict=True) if x == w) for w in range(2))
    return float(load_s * (len(steady) - 1) / (steady[-1] - steady[0]))


def test_the_cycle_keeps_both_workers_busy_where_the_oldest_sample_first_does_not() -> None:
    cycle = cyclic_schedule(WORKER, SECONDS, CHAIN)
    oldest_first = Cycle(1.0, (0.0,) * 10, 12)
    assert rate(WORKER, SECONDS, oldest_first, 12) < 0.88
    assert cycle.in_flight < 12
    assert rate(WORKER, SECONDS, cycle, cycle.in_flight) > 0.99


def test_it_bears_times_that_vary_by_a_tenth() -> None:
    cycle = cyclic_schedule(WORKER, SECONDS, CHAIN)
    assert rate(WORKER, SECONDS, cycle, cycle.in_flight, spread=0.1) > 0.96


def test_two_halves_take_a_sample_each_and_one_more_for_each_worker() -> None:
    """The second half of sample 0 runs beside the first of sample 1: two, and two to spare."""
    assert cyclic_schedule([0, 1], [5.0, 5.0], [[], [0]]) == Cycle(5.0, (0.0, 5.0), 4)


def test_a_worker_runs_one_stage_at_a_time_and_what_it_reads_is_there() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        worker = rng.integers(3, size=12).tolist()
        seconds = rng.uniform(0.1, 2.0, 12).tolist()
        sources = [[int(j) for j in range(k) if rng.random() < 0.3] for k in range(12)]
        cycle = cyclic_schedule(worker, seconds, sources)
        for k in range(12):
            assert all(cycle.due_s[k] >= cycle.due_s[j] + seconds[j] - 1e-6 for j in sources[k])
        for w in set(worker):
            own = sorted(
                (cycle.due_s[k] % cycle.period_s, seconds[k]) for k in range(12) if worker[k] == w
            )
            ends = [place + s for place, s in own]
            assert all(e <= place + 1e-6 for e, (place, _) in zip(ends, own[1:], strict=False))
            assert ends[-1] <= cycle.period_s + own[0][0] + 1e-6


def test_one_worker_needs_one_sample_and_no_model_more_than_the_most() -> None:
    assert cyclic_schedule([0, 0], [1.0, 2.0], [[], [0]]).in_flight == 1
    assert cyclic_schedule([0], [0.0], [[]]).in_flight == 1
    long = [i % 2 for i in range(100)]
    chain = [[], *[[i] for i in range(99)]]
    assert cyclic_schedule(long, [1.0] * 100, chain).in_flight == MAX_IN_FLIGHT
    assert cyclic_schedule(long, [1.0] * 100, chain).period_s == pytest.approx(50.0)


def test_who_takes_samples_in_turn_is_due_as_often_as_its_share() -> None:
    """A stage of 2 s before one of 4 s that two workers share: a sample every 2 s, and
    of the second stage every other sample is due 4 s later on the same worker."""
    cycle = turn_schedule([(0,), (1, 2)], [2.0, 4.0], [[], [0]])
    assert (cycle.period_s, cycle.samples) == (2.0, 2)
    for sample in range(6):
        assert cycle.due(sample, 0) == 2.0 * sample
        start_s = cycle.due(sample, 1)
        assert start_s >= cycle.due(sample, 0) + 2.0
        assert cycle.due(sample + 2, 1) == start_s + 4.0
    assert cycle.in_flight == 4 + 3  # a sample takes at most 8 s; one more for each worker
    assert turn_schedule([(3,), (5,)], [2.0, 1.0], [[], [0]]) == cyclic_schedule(
        [0, 1], [2.0, 1.0], [[], [0]]
    )


def test_turns_that_repeat_late_let_the_oldest_sample_go_first() -> None:
    primes, first = [], 0
    for size in (7, 11, 13, 5):
        primes.append(tuple(range(first, first + size)))
        first += size
    cycle = turn_schedule(primes, [1.0] * 4, [[], [0], [1], [2]])
    assert MOST_UNROLLED < 7 * 11 * 13 * 5 * 4
    assert cycle == Cycle(1.0, (0.0,) * 4, 36)
    assert cycle.due(3, 2) == 3.0
