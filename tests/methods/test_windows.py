"""Search by windows of the schedule: what it expects, what it finds, what it spends."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import cpu, plain_graph, random_devices, random_problem, unit_cluster

from gdp.base.clock import Clock
from gdp.cluster.types import make_cluster
from gdp.methods.annealing.annealer import moves_as_drawn
from gdp.methods.base import Assignment, Search
from gdp.methods.scoring import Evaluated, score_all
from gdp.methods.search import local_search, windows
from gdp.methods.search.local_search import Budget, SearchConfig, improve
from gdp.methods.search.windows import WindowConfig, WindowSearch, search_windows
from gdp.problem.problem import Launches, Problem, make_problem

FOREVER = Clock(None)
SMALL = WindowConfig(state_ops=12, steps=40)


def begun(problem: Problem, device: np.ndarray, rank: np.ndarray | None = None) -> Evaluated:
    return score_all(problem, [Assignment(device, rank)])[0]


def ladder(rungs: int) -> Problem:
    """Rungs of two ops side by side between ops that wait for both, 1 s each, sent in no time."""
    edges = []
    for r in range(rungs):
        edges += [(3 * r, 3 * r + 1), (3 * r, 3 * r + 2), (3 * r + 1, 3 * r + 3)]
        edges += [(3 * r + 2, 3 * r + 3)]
    n = 3 * rungs + 1
    return make_problem(plain_graph(n, edges, 0), unit_cluster(2), np.ones((n, 2)))


def fine(seed: int, num_ops: int = 150) -> Problem:
    """A random problem on whose memory nothing depends, whose placements all end."""
    while True:
        problem = random_problem(seed, num_devices=3, num_ops=num_ops)
        device = random_devices(problem, seed)[0]
        start = begun(problem, device)
        if start.overflow_bytes == 0 and np.isfinite(start.value_s):
            return problem
        seed += 100


def test_every_second_rung_goes_to_the_other_device() -> None:
    """All on one device 3 s a rung; with both devices 2 s."""
    problem = ladder(40)
    windows = WindowSearch(problem, begun(problem, np.zeros(121, np.int64)), 0, SMALL)
    for _ in range(120):
        windows.step(FOREVER)
    best = windows.best()
    assert best.value_s == 81.0
    assert begun(problem, best.assignment.device, best.assignment.rank).value_s == 81.0


@pytest.mark.parametrize(("launch_s", "value_s"), [(0.5, 81.0), (0.75, 90.75), (1.0, 121.0)])
def test_a_window_is_kept_for_the_seconds_of_run_and_launches(launch_s, value_s) -> None:
    """Of 121 ops; all on one device take 121 s."""
    launches = Launches(np.full((121, 2), launch_s), np.zeros(2, np.int64))
    problem = replace(ladder(40), launches=launches)
    windows = WindowSearch(problem, begun(problem, np.zeros(121, np.int64)), 0, SMALL)
    for _ in range(120):
        windows.step(FOREVER)
    best = windows.best()
    assert best.value_s == value_s
    assert begun(problem, best.assignment.device, best.assignment.rank).value_s == value_s


@pytest.mark.parametrize("seed", range(6))
def test_a_window_expects_of_the_record_what_the_record_took(seed: int) -> None:
    """Where the rest follows the record, heads and tails add up to the latency."""
    from gdp.methods.search.window_kernels import open_window

    problem = fine(seed)
    windows = WindowSearch(problem, begun(problem, random_devices(problem, seed)[0]), 0, SMALL)
    c, count = windows.chain, len(windows.states.goal)
    opened = 0
    for k in range(count):
        for stop in range(k + 1, count + 1):
            until = int(windows.states.goal[stop]) if stop < count else problem.num_ops
            opened += open_window(
                c.methods, c.engine, c.work, windows.states, windows.tails, windows.window,
                c.chain, k, until, stop,
            ) > 0  # fmt: skip
            expected_s = windows.window.value[0]
            assert expected_s == pytest.approx(windows.value_s, rel=1e-12) or opened == 0
    assert opened > count


@pytest.mark.parametrize("seed", [*range(6), 15, 38])
def test_what_windows_find_is_what_the_simulator_says(seed: int) -> None:
    """Records that go on from the middle of older records stay exact, and nothing gets worse."""
    problem = fine(seed)
    start = begun(problem, random_devices(problem, seed)[0])
    windows = WindowSearch(problem, start, seed, SMALL)
    values = [windows.value_s]
    for _ in range(60):
        windows.step(FOREVER)
        best = windows.best()
        again = begun(problem, best.assignment.device, best.assignment.rank)
        assert again.key == (0, windows.value_s)
        values.append(windows.value_s)
    assert values == sorted(values, reverse=True)
    assert values[0] == start.value_s
    assert values[-1] < values[0]


def test_the_search_is_repeatable_and_keeps_its_evaluations() -> None:
    problem = fine(2, 200)
    start = begun(problem, random_devices(problem, 2)[0])
    found = []
    for limit in (300, 300, 50, 3):
        search = Search(seconds=None, evaluations=limit)
        config = SearchConfig(windows_above=100)
        budget = Budget(FOREVER, search, config, 0)
        best = search_windows(problem, start, 7, budget)
        assert budget.used <= limit
        found.append(best)
    assert found[0].value_s == found[1].value_s
    assert (found[0].assignment.device == found[1].assignment.device).all()
    assert found[0].value_s <= found[2].value_s <= found[3].value_s == start.value_s


def test_large_graphs_are_improved_by_windows() -> None:
    problem = ladder(60)
    start = begun(problem, np.zeros(181, np.int64))
    search = Search(seconds=None, evaluations=400)
    plain = improve(problem, [start], search, FOREVER)
    config = SearchConfig(windows_above=100)
    found = improve(problem, [start], search, FOREVER, config)
    assert found.evaluations <= 400
    assert found.value_s <= plain.value_s


def test_nothing_large_is_begun_when_the_seconds_are_over(monkeypatch) -> None:
    """Neither a coarser graph nor the record of windows, each of which simulates everything."""

    def never(*_args: object) -> None:
        raise AssertionError

    problem, over = ladder(30), Clock(0.0)
    start = begun(problem, np.zeros(problem.num_ops, np.int64))
    search, config = Search(seconds=None), SearchConfig(coarse_above=1, windows_above=1)
    with monkeypatch.context() as patched:
        patched.setattr(local_search, "coarse_problem", never)
        patched.setattr(windows, "WindowSearch", never)
        patched.setattr(local_search.WindowSearch, "supports", lambda *_args: True)
        best = improve(problem, [start], search, over, config)
    assert best.value_s == start.value_s
    asked = []
    monkeypatch.setattr(local_search, "coarse_problem", lambda *args: asked.append(args))
    few = replace(search, evaluations=20)  # counted: whatever the seconds
    improve(problem, [start], few, few.budget(), config)
    assert len(asked) == 1


@pytest.mark.slow
def test_windows_begin_at_states_that_were_kept() -> None:
    """With room for one arrival under way, most states are not kept."""
    for seed in range(2):
        problem = fine(seed)
        windows = WindowSearch(
            problem, begun(problem, random_devices(problem, seed)[0]), seed, SMALL
        )
        states = windows.states
        windows.states = states._replace(entry_s=states.entry_s[:, :1].copy())
        windows.adopt(windows)  # records anew
        assert 0 < windows.states.kept.sum() < len(windows.states.kept) - 2
        start_s = windows.value_s
        for _ in range(60):
            windows.step(FOREVER)
            best = windows.best()
            again = begun(problem, best.assignment.device, best.assignment.rank)
            assert again.key == (0, windows.value_s)
        assert windows.value_s < start_s


def test_a_window_that_gains_time_by_too_much_memory_is_taken_back() -> None:
    """Half of the rungs' sides hold 4 bytes; the second device has room for five of them."""
    graph = ladder(40).graph
    graph = replace(graph, weight_bytes=np.where(np.arange(121) % 3 == 0, 0, 4))
    devices = (cpu("large"), cpu("small", memory_bytes=20))
    cluster = make_cluster("two", devices, default_bytes_per_s=1.0, default_latency_s=0.0)
    problem = make_problem(graph, cluster, np.ones((121, 2)))
    windows = WindowSearch(problem, begun(problem, np.zeros(121, np.int64)), 0, SMALL)
    for _ in range(120):
        windows.step(FOREVER)
    best = windows.best()
    again = begun(problem, best.assignment.device, best.assignment.rank)
    assert again.overflow_bytes == 0
    assert again.value_s == best.value_s < 121.0


def test_a_window_is_searched_hot_first_and_cold_at_last() -> None:
    """Each op of a chain takes 1 s on its own device, 2 s on the other; from all wrong to none."""
    n = 80
    own = np.arange(n) % 2
    compute_s = np.where(own[:, None] == np.arange(2), 1.0, 2.0)
    problem = make_problem(plain_graph(n, [(i, i + 1) for i in range(n - 1)], 0), unit_cluster(2),
                           compute_s)  # fmt: skip
    config = WindowConfig(states=(2,), steps=3000, hot=10.0, cold=1e-6)
    with moves_as_drawn():  # the best of several is no walk
        windows = WindowSearch(problem, begun(problem, 1 - own), 0, config)
    for _ in range(8):
        windows.step(FOREVER)
    assert windows.value_s == 80.0
