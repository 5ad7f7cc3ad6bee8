"""auto finds the optimum of tiny problems and is never worse than what it contains."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import cpu, plain_graph, tight_latency

from gdp.base.clock import Clock
from gdp.base.errors import InfeasibleError
from gdp.cluster.types import Cluster, Device, Link, make_cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import OpGraph, make_graph
from gdp.methods import portfolio
from gdp.methods.base import Answer, Assignment, Method, Search
from gdp.methods.heuristics.simple import single
from gdp.methods.portfolio import (
    HEURISTICS,
    auto,
    candidate_share,
    quick_fill,
    replica_period_s,
)
from gdp.methods.scoring import Evaluated
from gdp.problem.problem import Problem, make_problem
from gdp.question import solve
from gdp.question.question import Question
from gdp.sim.score import score, values


def random_problem(seed: int, num_ops: int, num_devices: int, objective: str) -> Problem:
    rng = np.random.default_rng(seed)
    pairs = [
        (a, b) for b in range(1, num_ops) for a in range(b) if rng.random() < 2.0 / num_ops
    ]  # fmt: skip
    graph: OpGraph = make_graph(
        f"random{seed}",
        [f"op{i}" for i in range(num_ops)],
        ["X"] * num_ops,
        [(i, int(rng.integers(1, 1000))) for i in range(num_ops)],
        pairs,
        weight_bytes=rng.integers(0, 100, size=num_ops),
    )
    devices = [
        Device(f"d{i}", "d", {"default": 1.0}, 1.0, memory_bytes=10**6) for i in range(num_devices)
    ]
    links = [Link(a.name, b.name, 1000.0, 0.01) for a, b in itertools.combinations(devices, 2)]
    cluster: Cluster = make_cluster("c", devices, links)
    seconds = rng.uniform(0.1, 1.0, size=(num_ops, num_devices))
    return make_problem(graph, cluster, seconds, objective)  # type: ignore[arg-type]


@pytest.mark.parametrize(("objective", "evaluations"), [("latency", 3000), ("throughput", 60_000)])
def test_auto_reaches_the_optimum_of_seven_ops_on_two_devices(
    objective: str, evaluations: int
) -> None:
    """Of ten problems at least eight, and the others within 4%: a search is no proof."""
    over = []
    for seed in range(10):
        problem = random_problem(seed, 7, 2, objective)
        everywhere = np.array(list(itertools.product(range(2), repeat=7)), dtype=np.int64)
        best_s = values(problem, everywhere)[0].min()
        answer = auto(problem, Search(seconds=None, evaluations=evaluations))
        assert answer.assignment is not None
        found = score(problem, answer.assignment.device, answer.assignment.rank)
        # Priorities may beat the best first-ready-first schedule.
        over.append(found.value_s / best_s)
    assert sum(ratio <= 1 + 1e-12 for ratio in over) >= 8, over
    assert max(over) <= 1.04, over


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("seed", range(3))
def test_auto_is_never_worse_than_a_heuristic(seed: int, objective: str) -> None:
    problem = random_problem(seed, 60, 3, objective)
    answer = auto(problem, Search(seconds=None, evaluations=50))
    assert answer.assignment is not None
    found_s = score(problem, answer.assignment.device, answer.assignment.rank).value_s
    assert {c.method for c in answer.candidates} >= {name for name, _ in HEURISTICS}
    for candidate in answer.candidates:
        value_s = candidate.latency_s if objective == "latency" else candidate.period_s
        if candidate.feasible:
            assert value_s is not None
            assert found_s <= value_s


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_run_first_changes_no_answer(
    seed: int, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many placements of few equal ops are equally good: which is answered, and the candidates
    that are told of, do not depend on the order in which they were run."""
    found, order = [], []

    def noted(name: str, method: Method) -> tuple[str, Method]:
        def run(problem: Problem, search: Search) -> Answer:
            order.append(name)
            return method(problem, search)

        return name, run

    monkeypatch.setattr(portfolio, "HEURISTICS", tuple(noted(*row) for row in HEURISTICS))
    monkeypatch.setattr(portfolio, "_TRADED_OPS", 0)  # none is left out
    for first, quick in ((portfolio.FIRST, portfolio.QUICK), ((), ())):
        monkeypatch.setattr(portfolio, "FIRST", first)
        monkeypatch.setattr(portfolio, "QUICK", quick)
        order.clear()
        answer = auto(random_problem(seed, 9, 2, objective), Search(seconds=None, evaluations=20))
        assert answer.assignment is not None
        found.append((answer.assignment.device.tolist(), answer.evaluations,
                      [row.method for row in answer.candidates]))  # fmt: skip
        assert order[:2] == (["single", "blocks"] if first else ["single", "modules"])
    assert found[0] == found[1]


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_search_has_the_work_of_slow_heuristics_where_it_gains(objective: str) -> None:
    """Of few evaluations: where it gains they are left out and it evaluates as much more, where it
    stands still, or many evaluations are asked for, all are run."""
    slow = {"round_robin", "modules", "critical_path", "multilevel"}
    gains = random_problem(0, 70, 3, objective)
    alike = np.ones((70, 3)) * [1.0, 90.0, 90.0]
    still = replace(gains, compute_s=alike)  # on the first device alone, or worse
    trade = portfolio.TRADES[objective == "latency"]
    for problem, asked, left_out in ((gains, 40, True), (still, 40, False), (gains, 6000, False)):
        if objective == "throughput" and asked > 40:
            continue  # 40,000 would take seconds
        answer = auto(problem, Search(seconds=None, evaluations=asked))
        rows = {row.method: row for row in answer.candidates if row.method in slow}
        assert set(rows) == slow
        assert {row.reason == "search has its work" for row in rows.values()} == {left_out}
        assert (answer.evaluations > trade.more) == (left_out or asked >= trade.more)
        found = min(row.value_s for row in answer.candidates if row.value_s is not None)
        assert answer.assignment is not None
        assert score(problem, answer.assignment.device, answer.assignment.rank).value_s == found


def test_an_interrupt_of_the_short_search_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gdp.methods.search.local_search._search_levels", interrupted)
    answer = auto(random_problem(0, 70, 3, "latency"), Search(seconds=None, evaluations=40))
    assert answer.reason == "interrupted"
    assert answer.assignment is not None
    assert "multilevel" not in {row.method for row in answer.candidates}


def test_one_candidate_leaves_seconds_to_those_behind_it(monkeypatch) -> None:
    """Of ten candidates the first ones may take half of what is left each, once something fits, the
    next one as much as each of those that wait, the last one all; the baseline comes late."""
    given: dict[str, tuple[float, float]] = {}

    def noted(name: str) -> tuple[str, Method]:
        def run(problem: Problem, search: Search) -> Answer:
            assert search.clock is not None
            given[name] = (now[0], search.clock.remaining_s())
            now[0] += 1.0
            return single(problem, search)

        return name, run

    problem, now = random_problem(1, 9, 2, "latency"), [0.0]
    auto(problem, Search(evaluations=1))  # compiled
    monkeypatch.setattr(
        "gdp.base.clock.time",
        SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: 0.0),
    )
    monkeypatch.setattr(portfolio, "HEURISTICS", tuple(noted(name) for name, _ in HEURISTICS))
    search = Search(evaluations=10, clock=Clock(100.0))
    auto(problem, search, extra=[noted("extra")])
    left = {name: 60.0 - began for name, (began, _) in given.items()}
    shares = {name: seconds / left[name] for name, (_, seconds) in given.items()}
    assert list(given)[:3] == ["single", "blocks", "heft"]
    assert list(given)[-2:] == ["round_robin", "extra"]
    assert shares["single"] == pytest.approx(1 / 10)  # nothing fits yet
    assert [shares[name] for name in ("blocks", "heft")] == pytest.approx([0.5, 0.5])
    assert shares["metis"] == pytest.approx(1 / 7)
    assert shares["extra"] == pytest.approx(1.0)


def test_an_extra_method_joins_as_one_more_candidate() -> None:
    """It knows the optimum of four independent ops, two on each device, and auto keeps it."""
    graph = make_graph("g", list("abcd"), ["X"] * 4, [], [])
    devices = [Device(n, "d", {"default": 1.0}, 1.0) for n in "xy"]
    problem = make_problem(graph, make_cluster("c", devices), np.ones((4, 2)), "latency")

    def oracle(problem: Problem, search: Search) -> Answer:
        from gdp.methods.base import Assignment

        return Answer(Assignment(np.array([0, 1, 0, 1])), evaluations=1)

    answer = auto(problem, Search(seconds=None, evaluations=1), extra=[("oracle", oracle)])
    assert [c.latency_s for c in answer.candidates if c.method == "oracle"] == [2.0]
    assert answer.assignment is not None
    assert score(problem, answer.assignment.device).latency_s == 2.0


def test_what_fits_nowhere_says_how_much_is_missing() -> None:
    graph = make_graph("g", ["a"], ["X"], [], [], weight_bytes=[3 * 2**30])
    devices = [Device(n, "d", {"default": 1.0}, 1.0, memory_bytes=2**30) for n in "xy"]
    problem = make_problem(graph, make_cluster("c", devices), np.ones((1, 2)), "latency")
    answer = auto(problem, Search(seconds=0.5))
    assert answer.assignment is None
    assert "2.00 GiB" in answer.reason


def test_replicas_are_named_where_they_beat_the_pipeline() -> None:
    """One op cannot be cut: one device does 1 sample a second, two replicas do 2."""
    graph = make_graph("g", ["a"], ["X"], [], [])
    devices = [Device(n, "d", {"default": 1.0}, 1.0) for n in "xy"]
    problem = make_problem(graph, make_cluster("c", devices), np.ones((1, 2)), "throughput")
    answer = auto(problem, Search(seconds=None, evaluations=10))
    assert answer.notes == (
        "2 replicas of the whole model would take 500.000 ms a sample, the pipeline 1.000 s",
    )


def test_replicas_are_left_out_where_their_preparation_takes_longer_than_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of counted work they are not, as nobody waits for it."""
    problem = random_problem(0, 6, 2, "throughput")
    problem = replace(problem, replicas=True)
    asked: list[Search] = []

    def noted(problem: Problem, search: Search, linear_only: bool) -> Answer:
        asked.append(search)
        return Answer(None, reason="noted")

    monkeypatch.setattr(portfolio, "replicated_pipeline", noted)
    monkeypatch.setattr(portfolio, "REPLICA_OP_S", 1.0)
    row = {x.method: x for x in auto(problem, Search(seconds=0.3)).candidates}["replicas"]
    assert not asked
    assert row.reason == "no time was left"
    auto(problem, Search(seconds=None, evaluations=10))
    assert len(asked) == 1
    monkeypatch.setattr(portfolio, "REPLICA_OP_S", 1e-9)
    auto(problem, Search(seconds=0.3))
    assert len(asked) == 2


def test_replicas_share_no_processor_and_fill_each_memory_once() -> None:
    """Two ops of 5 bytes each. "a" and "b" are one processor, where "b" takes 1 s; "c" and "d" have
    a memory of 15 bytes together, so that only "c" holds a copy: 2 s, and 0.5 s to begin each op;
    "e" has no room. So 1 + 1/3 samples a second."""
    graph = plain_graph(2, [(0, 1)], weight_bytes=[5, 5])
    slow = replace(cpu("c", memory_bytes=15, memory_pool="m"), dispatch_s=0.5, dispatch_per="op")
    devices = [
        cpu("a", processor="p"), cpu("b", processor="p"), slow, replace(slow, name="d"),
        cpu("e", memory_bytes=9),
    ]  # fmt: skip
    seconds = np.array([[2.0, 0.5, 1.0, 5.0, 0.1]] * 2)
    problem = make_problem(graph, make_cluster("c", devices), seconds, "throughput")
    period_s, holders = replica_period_s(problem)
    assert holders == 2
    assert period_s == pytest.approx(3 / 4)


def ran(memory_bytes: list[int], seconds: list[float]) -> set[str]:
    """The candidates of `auto` for ten ops of 10 bytes in a row on devices with so much memory."""
    n = 10
    graph = make_graph(
        "row", [f"op{i}" for i in range(n)], ["X"] * n, [(i, 1) for i in range(n)],
        [(i, i + 1) for i in range(n - 1)], weight_bytes=[10] * n,
    )  # fmt: skip
    devices = [
        Device(f"d{i}", "d", {"default": 1.0}, 1.0, memory_bytes=size)
        for i, size in enumerate(memory_bytes)
    ]
    links = [Link(a.name, b.name, 1000.0, 0.01) for a, b in itertools.combinations(devices, 2)]
    problem = make_problem(graph, make_cluster("c", devices, links), np.tile(seconds, (n, 1)))
    answer = auto(problem, Search(seconds=None, evaluations=50))
    return {row.method for row in answer.candidates}


def test_the_latency_program_runs_where_the_memory_of_quick_devices_is_full() -> None:
    """100 bytes of weights: a device of 90 cannot hold them, and either much memory is left on one
    as fast, where the program is no use, or only on one ten times slower."""
    assert "latency_fit" in ran([90, 90], [1.0, 1.0])
    assert "latency_fit" not in ran([90, 1000], [1.0, 1.0])
    assert "latency_fit" in ran([90, 1000], [1.0, 10.0])


def test_a_device_that_runs_few_ops_is_not_the_quick_one() -> None:
    """49 of 50 ops run on two devices of much memory alone; one also on a device with little."""
    count = 50
    graph = plain_graph(count, [(i, i + 1) for i in range(count - 1)], weight_bytes=[100] * count)
    devices = [cpu(name, memory_bytes=1_000_000) for name in "ab"]
    compute_s = np.ones((count, 3))
    compute_s[:-1, 2] = np.inf
    both = make_problem(graph, make_cluster("two", devices), compute_s[:, :2])
    npu = cpu("npu", memory_bytes=10_000)
    three = make_problem(graph, make_cluster("three", [*devices, npu]), compute_s)
    assert (
        quick_fill(three)
        == pytest.approx(quick_fill(both), rel=1e-9)
        == pytest.approx((count * 100 + 2) / 2_000_000)
    )


def test_the_placement_that_misses_least_is_repaired_first(monkeypatch) -> None:
    """Three ops of 4 bytes on devices of 9: two together fit, three miss 3 bytes, and both that
    fit nowhere else are tried in that order."""
    graph = plain_graph(3, [], sizes=0, weight_bytes=[4, 4, 4])
    cluster = make_cluster("two", [cpu("a", memory_bytes=9), cpu("b", memory_bytes=3)])
    problem = make_problem(graph, cluster, np.ones((3, 2)))
    ends = [np.array(device) for device in ([1, 1, 1], [0, 0, 0], [0, 0, 1])]
    begun: list[list[int]] = []

    def unmended(problem: Problem, start: Evaluated, *rest: object) -> Evaluated:
        begun.append(start.assignment.device.tolist())
        return start

    monkeypatch.setattr(portfolio, "proven_misfit", lambda problem: None)
    monkeypatch.setattr(portfolio, "repair", unmended)
    search = Search(seconds=None, evaluations=10)
    portfolio._repaired(problem, [Assignment(end) for end in ends], search, Clock(None))
    assert begun == [[0, 0, 1], [0, 0, 0], [1, 1, 1]]


def test_what_was_not_found_is_told_from_what_cannot_fit() -> None:
    """10 bytes in 8 are proven not to fit; three weights of 4 bytes in two devices of 7 are not."""
    counted = Search(seconds=None, evaluations=40)
    lumpy = plain_graph(3, [(0, 1), (1, 2)], 0, flop=[1.0] * 3, weight_bytes=[4, 4, 4])
    cluster = make_cluster("two", [cpu("a", memory_bytes=7), cpu("b", memory_bytes=7)])
    with pytest.raises(InfeasibleError) as unproven:
        solve.solve(Question(lumpy, cluster, costs=roofline, search=counted))
    assert "found no placement in 40 evaluations: " in str(unproven.value)
    assert "the closest misses" in str(unproven.value)
    assert "no proof that none fits" in str(unproven.value)
    large = plain_graph(1, [], 0, flop=[1.0], weight_bytes=[10])
    with pytest.raises(InfeasibleError, match=r"^no placement can fit: op 'o0' needs 10 B"):
        solve.solve(Question(large, cluster, costs=roofline, search=counted))


def test_search_has_most_of_the_seconds_where_memory_binds_a_latency(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not of a period, nor with ample memory, nor where a graph is too large to search as whole."""
    tight = tight_latency(1, 3, 1.2)
    ample = replace(
        tight.cluster,
        devices=tuple(replace(d, memory_bytes=1 << 40) for d in tight.cluster.devices),
    )
    roomy = make_problem(tight.graph, ample, tight.compute_s)
    assert candidate_share(tight) < candidate_share(roomy)
    assert candidate_share(roomy) == candidate_share(replace(tight, objective="throughput"))
    monkeypatch.setattr(
        portfolio, "SearchConfig", lambda: SimpleNamespace(windows_above=tight.num_ops - 1)
    )
    assert candidate_share(tight) == candidate_share(roomy)
    asked = []
    monkeypatch.setattr(portfolio, "candidate_share", lambda of: asked.append(of) or 0.3)
    auto(tight, Search(seconds=0.2))
    assert any(of is tight for of in asked)  # others are those that kernels are compiled with
