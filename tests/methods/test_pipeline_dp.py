"""The dynamic program over down-sets against every assignment, and against published values."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from host_memory import assignments, is_pipeline, load_problem
from published import DNN_PARTITIONING
from splits import save_split
from tiny import fork_join, plain_graph, random_problem, unit_cluster

from benchmarks.partitioning_instances import load_dnn_partitioning
from gdp.base.clock import Clock
from gdp.cluster.types import Device, make_cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import INPUT, OUTPUT, make_graph
from gdp.methods.base import Search
from gdp.methods.host_memory import load as host_load
from gdp.methods.host_memory.pipelines import best, stage_costs
from gdp.methods.pipeline import down_sets, orders
from gdp.methods.pipeline import method as module
from gdp.methods.pipeline.lattice import (
    as_bits,
    make_lattice,
    make_stage_program,
    state_counts,
    state_moves,
)
from gdp.methods.pipeline.method import contract, linear_orders, pipeline_dp
from gdp.methods.table import METHODS
from gdp.problem.problem import Problem, make_problem
from gdp.question import solve
from gdp.question.question import Question
from gdp.sim.latency import periods

SEARCH = Search(seconds=None)


def pipelines(problem: Problem) -> list[np.ndarray]:
    """Every assignment that is a pipeline over the contracted graph."""
    contraction = contract(problem)
    inside = contraction.element < contraction.num_elements
    found = []
    for device in assignments(problem):
        of_element = np.full(contraction.num_elements, -1)
        of_element[contraction.element[inside]] = device[inside]
        whole = np.array_equal(of_element[contraction.element[inside]], device[inside])
        if whole and is_pipeline(of_element, contraction.src, contraction.dst):
            found.append(device)
    return found


def least_load_s(problem: Problem) -> float:
    """The optimum over all pipelines, by trying every assignment; inf where nothing fits."""
    value_s, overflow = host_load.values(problem, np.array(pipelines(problem)))
    return float(value_s[overflow == 0].min(initial=np.inf))


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("accelerators", "cpus"), [(2, 1), (3, 0), (1, 2), (2, 0)])
def test_the_least_maximal_load_is_found(training: bool, accelerators: int, cpus: int) -> None:
    rng = np.random.default_rng(accelerators * 10 + cpus)
    misfits, changed = 0, 0
    for i in range(10):
        problem = load_problem(
            rng, 6, accelerators, cpus, training=training, memory_bytes=5 if i % 2 else 1 << 40
        )
        best_s = least_load_s(problem)
        pipeline = best(problem, SEARCH)
        assert pipeline.is_optimal
        if not np.isfinite(best_s):
            misfits += 1
            assert pipeline.assignment is None
            answer = pipeline_dp(problem, SEARCH)
            assert answer.assignment is None
            assert answer.reason.startswith("infeasible: no contiguous pipeline fits")
            continue
        changed += host_load.values(problem, np.array(pipelines(problem)))[0].min() < best_s
        assert pipeline.assignment is not None
        value_s, overflow = host_load.values(problem, pipeline.assignment.device[None])
        assert overflow[0] == 0
        assert value_s[0] == pytest.approx(best_s, rel=1e-12, abs=1e-12)
        assert pipeline.cost_s == pytest.approx(best_s, rel=1e-12, abs=1e-12)
        assert pipeline.bound_s <= best_s * (1 + 1e-12)
        linear = best(problem, SEARCH, linear_only=True)
        assert linear.assignment is None or linear.cost_s >= best_s * (1 - 1e-12)
    # CPUs hold everything, so memory makes nothing impossible beside them, but slower.
    assert (misfits > 0) == (cpus == 0)
    assert misfits + changed > 0


def test_low_targets_first_lead_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Low targets leave few down-sets; where they are too low, the last one decides."""
    rng = np.random.default_rng(4)
    problems = [load_problem(rng, 9, 3, 2, memory_bytes=9) for _ in range(12)]
    by_value = [best(p, SEARCH).cost_s for p in problems]
    monkeypatch.setattr(module, "_FEW_SETS", 0)
    assert [best(p, SEARCH).cost_s for p in problems] == by_value


def test_more_states_than_one_word_holds() -> None:
    """72 states: eight accelerators and seven CPUs for a chain of ten."""
    graph = plain_graph(10, [(i, i + 1) for i in range(9)])
    devices = [Device(f"a{i}", "accelerator", {"default": 1.0}, 1.0) for i in range(8)]
    devices += [Device(f"c{i}", "cpu", {"default": 1.0}, 1.0) for i in range(7)]
    compute_s = np.repeat([[1.0] * 8 + [2.0] * 7], 10, axis=0)
    problem = make_problem(
        graph, make_cluster("many", devices), compute_s, "max_load", sent_s=np.full(10, 0.75)
    )
    # Ten ops on ten devices: an accelerator pays 1 + 0.75 (ends) or 1 + 1.5, a CPU 2. All at most
    # 2 s with the ends on accelerators and CPUs between: nothing below 2 s, as only the ends may
    # be alone on an accelerator for less and two ops cost more.
    pipeline = best(problem, SEARCH)
    assert pipeline.is_optimal
    assert pipeline.assignment is not None
    assert pipeline.cost_s == host_load.values(problem, pipeline.assignment.device[None])[0][0]
    graph = plain_graph(9, [(i, i + 1) for i in range(8)])
    problem = make_problem(
        graph, problem.cluster, compute_s[:9], "max_load", sent_s=np.full(9, 0.75)
    )
    assert best(problem, SEARCH).cost_s == 2.0


def test_contraction_by_hand() -> None:
    """Rules 2 to 4: a and c share a group, so b between them joins; idle x joins its one reader;
    backward d' alone becomes an element before the element of e, whose backward op it feeds."""
    names = ["a", "b", "c", "x", "e", "e'", "d'"]
    edges = [("a", "b"), ("b", "c"), ("x", "e"), ("c", "e"), ("e", "e'"), ("e'", "d'")]
    index = {name: i for i, name in enumerate(names)}
    graph = make_graph(
        "hand", names, ["Op"] * 7, [(i, 1) for i in range(7)],
        [(index[a], index[b]) for a, b in edges],
        colocate=[0, 1, 0, 2, 3, 3, 4],
        is_backward=[name.endswith("'") for name in names],
    )  # fmt: skip
    compute_s = np.array([[0.0 if name == "x" else 1.0] for name in graph.op_names])
    devices = [Device("a0", "accelerator", {"default": 1.0}, 1.0)]
    problem = make_problem(
        graph, make_cluster("one", devices), compute_s, "max_load",
        sent_s=np.ones(graph.num_tensors),
    )  # fmt: skip
    contraction = contract(problem)
    element = {name: contraction.element[graph.op_index[name]] for name in names}
    assert contraction.num_elements == 3
    assert element["a"] == element["b"] == element["c"]
    assert element["e"] == element["e'"]
    arcs = set(zip(contraction.src.tolist(), contraction.dst.tolist(), strict=True))
    # e touches a backward op, so x (idle) still joins it: only x itself must touch none.
    assert element["x"] == element["e"]
    assert arcs == {(element["a"], element["e"]), (element["d'"], element["e"])}


def random_pipeline_problem(rng: np.random.Generator, num_devices: int, shared: bool) -> Problem:
    """A throughput problem with graph inputs and outputs and channels of one of two kinds."""
    n = 6
    ops = ["in", *[f"o{i}" for i in range(n)], "out"]
    edges = [(0, 1 + int(rng.integers(n))) for _ in range(2)]
    edges += [(1 + a, 1 + b) for b in range(n) for a in range(b) if rng.random() < 0.25]
    edges += [(n, n + 1)]
    graph = make_graph(
        "io", ops, [INPUT, *["Op"] * n, OUTPUT],
        [(i, int(rng.integers(1, 5))) for i in range(n + 1)], sorted(set(edges)),
    )  # fmt: skip
    devices = [
        Device(
            f"d{i}", "gpu", {"default": 1.0}, 1.0,
            dispatch_s=float(rng.choice([0.0, 0.5])), dispatch_per="segment" if shared else "op",
        )
        for i in range(num_devices)
    ]  # fmt: skip
    cluster = make_cluster("io", devices, default_bytes_per_s=1.0, default_latency_s=0.25)
    if shared:  # everything that reaches a device comes over one channel
        channel = np.repeat(np.arange(num_devices)[None], num_devices, axis=0)
        cluster = replace(cluster, channel=np.ascontiguousarray(channel))
    compute_s = rng.integers(1, 6, (n + 2, num_devices)).astype(float)
    compute_s[[0, -1]] = 0.0
    compute_s[[0, -1], 1:] = np.inf
    return make_problem(graph, cluster, compute_s, "throughput")


@pytest.mark.parametrize("num_devices", [2, 3])
def test_no_contiguous_pipeline_has_a_shorter_period_where_it_says_so(num_devices: int) -> None:
    rng = np.random.default_rng(num_devices)
    certain = 0
    for _ in range(20):
        problem = random_pipeline_problem(rng, num_devices, shared=num_devices == 3)
        period_s = periods(problem, np.array(pipelines(problem)))[0]
        answer = METHODS["pipeline_dp"](problem, SEARCH)
        assert answer.assignment is not None
        found_s = periods(problem, answer.assignment.device[None])[0][0]
        assert answer.bound_s <= period_s.min() * (1 + 1e-12)
        if answer.reason.startswith("no contiguous pipeline is better"):
            certain += 1
            assert found_s == pytest.approx(period_s.min(), rel=1e-12)
        elif answer.proven_optimal:
            assert answer.reason.startswith("optimal")
            assert found_s == pytest.approx(period_s.min(), rel=1e-12)
        else:
            assert answer.reason.startswith("heuristic")
    assert certain >= 12


@pytest.mark.slow
def test_any_problem_gets_an_answer_that_fits_or_a_reason() -> None:
    """Unlike devices, supported kernels, tight memory and any channels: heuristic, but valid."""
    pipeline_dp(random_problem(0, objective="throughput", num_ops=6), SEARCH)
    found = 0
    for seed in range(20):
        problem = random_problem(seed, objective="throughput", num_ops=24 if seed < 4 else 10)
        answer = pipeline_dp(problem, Search(seconds=0.2))
        if answer.assignment is None:
            assert answer.reason
            continue
        found += 1
        device = answer.assignment.device
        assert problem.allowed[np.arange(problem.num_ops), device].all()
        assert periods(problem, device[None])[1][0] == 0
    assert found >= 4


def test_no_bound_is_above_any_placement() -> None:
    """Also where contiguity merges ops that share no device otherwise."""
    rng = np.random.default_rng(8)
    for i in range(25):
        problem = load_problem(rng, 5, 2, i % 2, training=i % 3 == 0)
        value_s = host_load.values(problem, np.array(list(assignments(problem))))[0].min()
        assert pipeline_dp(problem, SEARCH).bound_s <= value_s * (1 + 1e-12)


def test_latency_is_said_to_be_a_heuristic() -> None:
    answer = pipeline_dp(fork_join("latency"), SEARCH)
    assert answer.reason == "heuristic: stages of least load, which is not latency"
    assert answer.bound_s == 0.0


def test_too_many_down_sets_fall_back_to_linear_orders() -> None:
    """Forty parallel chains of three have 4**40 down-sets."""
    edges = [(3 * i + k, 3 * i + k + 1) for i in range(40) for k in range(2)]
    graph = plain_graph(120, edges)
    problem = make_problem(graph, unit_cluster(2), np.ones((120, 2)), "throughput")
    answer = pipeline_dp(problem, Search(seconds=0.05))
    assert answer.assignment is not None
    # The work bound settles what the down-sets cannot: 60 ops each, no chain cut.
    assert periods(problem, answer.assignment.device[None])[0][0] == 60.0
    assert answer.proven_optimal
    compute_s = np.random.default_rng(0).uniform(1.0, 2.0, (120, 1)).repeat(2, axis=1)
    answer = pipeline_dp(replace(problem, compute_s=compute_s), Search(seconds=0.3))
    assert answer.reason.startswith("heuristic: ")
    assert "down-sets" in answer.reason


class StopsAt(Clock):
    """A clock that is over after so many looks."""

    def __init__(self, looks: int) -> None:
        super().__init__(None)
        self.looks = looks

    def is_over(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_what_is_known_when_time_ends_is_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """However early the program over down-sets is stopped: nothing, or stages that hold."""
    monkeypatch.setattr(down_sets, "_PAIR_STEPS", 1)
    problem = load_problem(np.random.default_rng(2), 12, 3, 1)
    contraction = contract(problem)
    costs = stage_costs(problem, contraction)
    program = make_stage_program(make_lattice(problem, contraction, costs), costs)
    best_s = best(problem, SEARCH).cost_s
    stopped = known = 0
    for looks in range(0, 400, 5):
        limits = down_sets.Limits(StopsAt(looks), 10**6, 10**8)
        found = down_sets.best_chain(program, np.inf, limits)
        stopped += not found.is_certain
        if found.stages is None:
            continue
        known += not found.is_certain
        cost_s = down_sets.cost_of(found.stages)
        assert cost_s == pytest.approx(best_s) if found.is_certain else cost_s >= best_s - 1e-12
        covered = np.sort(np.concatenate([stage.elements for stage in found.stages]))
        assert covered.tolist() == list(range(contraction.num_elements))
    assert stopped
    assert known


def test_long_orders_are_cut_coarsely_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of 300 with one cheap tensor at every 50th place: the same stages either way."""
    rng = np.random.default_rng(1)
    graph = plain_graph(300, [(i, i + 1) for i in range(299)])
    devices = [Device(f"a{i}", "accelerator", {"default": 1.0}, 1.0) for i in range(3)]
    sent_s = np.where(np.arange(300) % 50 == 7, 0.0, rng.uniform(3.0, 9.0, 300))
    compute_s = np.repeat(rng.uniform(0.5, 1.0, (300, 1)), 3, axis=1)
    cluster = make_cluster("chain", devices)
    problem = make_problem(graph, cluster, compute_s, "max_load", sent_s=sent_s)
    exact = best(problem, SEARCH)
    assert exact.is_optimal
    assert exact.down_sets == 301
    monkeypatch.setattr(orders, "_QUICK_STEPS", 1)
    assert best(problem, SEARCH, linear_only=True).cost_s == exact.cost_s
    contraction = contract(problem)
    costs = stage_costs(problem, contraction)
    program = make_stage_program(make_lattice(problem, contraction, costs), costs)
    stages = orders.best_linear(program, linear_orders(contraction), 0.0, StopsAt(8))
    assert exact.cost_s <= down_sets.cost_of(stages) <= exact.cost_s * 1.2


def test_place_answers_for_pipelines_and_says_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten ops of 1 s on two accelerators and a slow CPU, all tensors a hundredth of a second."""
    monkeypatch.setattr(solve, "_trained", lambda checkpoint: {})  # which takes long to load
    graph = plain_graph(10, [(i, i + 1) for i in range(9)], 1, flop=[1.0] * 10)
    devices = [Device(f"g{i}", "gpu", {"default": 1.0}, 1e9) for i in range(2)]
    devices.append(Device("host", "cpu", {"default": 0.1}, 1e9))
    cluster = make_cluster(
        "three", devices, default_bytes_per_s=100.0, default_latency_s=0.0, host="host"
    )
    load = solve.solve(
        Question(graph, cluster, objective="max_load", method="pipeline_dp", costs=roofline)
    )
    assert load.value_s == pytest.approx(5.01)
    assert load.notes[0].startswith("no contiguous pipeline is better")
    period = solve.solve(
        Question(graph, cluster, objective="throughput", method="pipeline_dp", costs=roofline)
    )
    assert period.value_s == pytest.approx(5.0)


def test_what_cannot_fit_is_proven_infeasible() -> None:
    """Weights of 5 bytes on devices of 3: no placement at all; 2 + 2 on one each fits."""
    for weights, fits in ((5, False), (2, True)):
        graph = plain_graph(2, [(0, 1)], 0, weight_bytes=[weights, 2])
        cluster = unit_cluster(2, memory_bytes=3)
        for objective in ("throughput", "latency"):
            answer = pipeline_dp(make_problem(graph, cluster, np.ones((2, 2)), objective), SEARCH)
            assert (answer.assignment is not None) == fits
            assert answer.reason.startswith("infeasible: no placement can fit") != fits


def test_many_unlike_devices_are_left_out_and_it_is_said() -> None:
    graph = plain_graph(8, [(i, i + 1) for i in range(7)])
    compute_s = np.tile(np.arange(1.0, 13.0), (8, 1))
    devices = [Device(f"d{i}", "gpu", {"default": 1.0}, 1.0) for i in range(12)]
    cluster = make_cluster("unlike", devices, default_bytes_per_s=1e9, default_latency_s=0.0)
    answer = pipeline_dp(make_problem(graph, cluster, compute_s, "throughput"), SEARCH)
    assert answer.reason == "heuristic: too many unlike devices; 2 were left out"
    assert answer.assignment is not None
    assert set(answer.assignment.device.tolist()) <= set(range(10))


def test_states_are_numbered_so_that_one_more_device_is_later() -> None:
    following, previous = state_moves([2, 1], [[1, 0], [0, 1]])
    counts = state_counts([2, 1])
    for s, row in enumerate(following):
        for c, after in enumerate(row):
            if after >= 0:
                assert after > s
                assert previous[after, c] == s
                assert (counts[after] - counts[s]).tolist() == np.eye(2, dtype=int)[c].tolist()
    assert as_bits(np.array([[False] * 64 + [True]])).tolist() == [[0, 1]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.skipif(not DNN_PARTITIONING.exists(), reason="the public instances are not here")
def test_published_values_are_reproduced(tmp_path: Path) -> None:
    """Tarnawski et al.'s program on their instances, to 1e-9, with all the down-sets it counts.

    Every split is valued once more by an evaluator that shares no code with gdp.
    """
    judge = runpy.run_path(str(DNN_PARTITIONING / "evaluate.py"))
    for name, entry in json.loads((DNN_PARTITIONING / "reference.json").read_text()).items():
        values = entry["values"]
        wanted = values.get("dp", values.get("max_load_dp"))
        if wanted is None or "latency" in name:
            continue
        problem = load_dnn_partitioning(DNN_PARTITIONING / name, "max_load")
        pipeline = best(problem, SEARCH)
        assert pipeline.is_optimal
        assert pipeline.down_sets == entry["ideals"]
        assert pipeline.assignment is not None
        value_s, overflow = host_load.values(problem, pipeline.assignment.device[None])
        assert value_s[0] * 1e3 == pytest.approx(wanted, rel=1e-9)
        assert overflow[0] == 0
        save_split(problem, pipeline.assignment.device, tmp_path / "split.json")
        split = judge["read_split"](tmp_path / "split.json")
        by_others, _ = judge["max_load"](judge["Instance"](DNN_PARTITIONING / name), *split)
        assert by_others == pytest.approx(wanted, rel=1e-9)
