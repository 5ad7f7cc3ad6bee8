"""The best cover of a sequence by intervals, against all covers and by its rule for ties."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from gdp.methods.heuristics.blocks_kernels import best_cuts
from gdp.methods.intervals import Join, Row, best_row, best_rows


def covers(order: Sequence[int], count: int) -> Iterator[Row]:
    """Every way to cut `count` elements into intervals, with devices of the order in its order."""
    for size in range(1, len(order) + 1):
        for devices in itertools.combinations(order, size):
            for inner in itertools.combinations(range(1, count), size - 1):
                cuts = (0, *inner, count)
                yield [
                    (*span, d) for span, d in zip(itertools.pairwise(cuts), devices, strict=True)
                ]


def value_of(row: Row, stage: np.ndarray, link: np.ndarray, join: Join) -> float:
    total = stage[row[0]]
    for (_, cut, before), (_, stop, device) in itertools.pairwise(row):
        total = join(join(total, link[before, device, cut]), stage[cut, stop, device])
    return float(total)


@pytest.mark.parametrize("join", [np.add, np.maximum])
def test_no_cover_is_better(join: Join) -> None:
    """Whole numbers, so that sums are exact; some intervals and some links are forbidden."""
    feasible = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        count, devices = int(rng.integers(1, 6)), int(rng.integers(1, 4))
        stage = rng.choice([0.0, 1.0, 2.0, 5.0, np.inf], size=(count + 1, count + 1, devices))
        stage[np.tril_indices(count + 1)] = np.inf
        link = rng.choice([0.0, 1.0, 3.0, np.inf], size=(devices, devices, count + 1))
        order = [*rng.permutation(devices).tolist(), 0]  # device 0 stands twice
        value, row = best_row(order, lambda d, stage=stage: stage[:, :, d], link, join)
        least = min(value_of(cover, stage, link, join) for cover in covers(order, count))
        assert value == (least,)
        assert bool(row) == np.isfinite(least)
        if row:
            feasible += 1
            assert [row[0][0], row[-1][1]] == [0, count]
            assert value_of(row, stage, link, join) == least
    assert feasible > 20


def test_orders_in_a_row_get_what_each_gets_alone() -> None:
    """Whatever they begin with; shorter ones, too."""
    rng = np.random.default_rng(0)
    stage = rng.choice([1.0, 2.0, 5.0, np.inf], size=(6, 6, 4))
    stage[np.tril_indices(6)] = np.inf
    link = rng.choice([0.0, 1.0, 3.0], size=(4, 4, 6))
    orders = [order for size in (4, 2, 3) for order in itertools.permutations(range(4), size)]
    orders += [orders[i] for i in rng.permutation(len(orders))]
    alone = [best_row(order, lambda d: stage[:, :, d], link) for order in orders]
    assert list(best_rows(orders, lambda d: stage[:, :, d], link)) == alone
    assert len({value for value, _ in alone}) > 2


def test_links_may_cost_nothing_and_later_parts_break_ties() -> None:
    """Both devices take 2 s for everything; the second alone costs nothing of the second kind."""
    stage = np.full((2, 2, 2, 2), np.inf)
    stage[:, 0, 1] = [(2, 1), (2, 0)]
    assert best_row([0, 1], lambda d: stage[d]) == ((2, 0), [(0, 1, 1)])
    assert best_row([0, 1], lambda d: stage[d, :, :, ::-1]) == ((0, 2), [(0, 1, 1)])


def test_of_equal_covers_the_first_device_and_the_longest_last_interval_are_taken() -> None:
    never = np.tri(4, dtype=bool)
    free = np.where(never, np.inf, 0.0)
    assert best_row([1, 0, 2], lambda d: free)[1] == [(0, 3, 1)]
    short = np.where(np.arange(4) - np.arange(4)[:, None] > 2, np.inf, free)
    assert best_row([1, 0, 2], lambda d: short)[1] == [(0, 1, 1), (1, 3, 0)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("in_turn", [False, True])
def test_blocks_are_cut_as_the_general_program_cuts_them(in_turn: bool, seed: int) -> None:
    """The kernel that stops early finds the least value over the same table of costs."""
    rng = np.random.default_rng(seed)
    places, devices = int(rng.integers(2, 9)), int(rng.integers(1, 4))
    sums = rng.integers(0, 4, size=(devices + 1, places)).cumsum(axis=1) * 1.0
    sums -= sums[:, :1]
    work_s, held = sums[:-1].copy(), sums[-1]
    receive_s, openers = rng.integers(0, 3, size=(2, places, places)) * 1.0
    segment_s, room = rng.integers(0, 3, devices) * 0.5, rng.integers(1, 20, devices) * 1.0
    order = rng.permutation(devices)

    def stage(d: int) -> np.ndarray:
        computing_s = work_s[d] - work_s[d][:, None] + segment_s[d] * openers
        seconds = computing_s + receive_s if in_turn else np.maximum(computing_s, receive_s)
        never = np.tri(places, dtype=bool) | (held - held[:, None] > room[d])
        return np.where(never, np.inf, seconds)

    value, _ = best_row(order.tolist(), stage, None, np.add if in_turn else np.maximum)
    value_s, ends = best_cuts(work_s, held, receive_s, openers, order, segment_s, room, in_turn)
    assert value == (value_s,)
    assert np.isinf(value_s) or ends[-1] == places - 1
