"""The dynamic program over down-sets against every assignment, and against published values."""

import json
from pathlib import Path

import numpy as np
import pytest
from host_memory import assignments, is_pipeline, load_problem
from tiny import plain_graph

from gdp.cluster import Device, make_cluster
from gdp.graph import make_graph
from gdp.importers.dnn_partitioning import load_dnn_partitioning
from gdp.methods import pipeline_dp as module
from gdp.methods.base import Search
from gdp.methods.contraction import contract
from gdp.methods.lattice import as_bits, state_counts, state_moves
from gdp.methods.pipeline_dp import best_pipeline, pipeline_dp
from gdp.sim import max_load
from gdp.sim.problem import Problem, make_problem

SEARCH = Search(seconds=None)
BENCH = Path(__file__).resolve().parents[3] / "shared" / "bench" / "dnn_partitioning"


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
    value_s, overflow = max_load.values(problem, np.array(pipelines(problem)))
    return float(value_s[overflow == 0].min(initial=np.inf))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("accelerators", "cpus"), [(2, 1), (3, 0), (1, 2), (2, 0)])
def test_the_least_maximal_load_is_found(training: bool, accelerators: int, cpus: int) -> None:
    rng = np.random.default_rng(accelerators * 10 + cpus)
    misfits = 0
    for i in range(14):
        problem = load_problem(
            rng, 6, accelerators, cpus, training=training, memory_bytes=5 if i % 2 else 1 << 40
        )
        best_s = least_load_s(problem)
        pipeline = best_pipeline(problem, SEARCH)
        assert pipeline.is_optimal
        if not np.isfinite(best_s):
            misfits += 1
            assert pipeline.device is None
            assert pipeline_dp(problem, SEARCH).assignment is None
            continue
        assert pipeline.device is not None
        value_s, overflow = max_load.values(problem, pipeline.device[None])
        assert overflow[0] == 0
        assert value_s[0] == pytest.approx(best_s, rel=1e-12, abs=1e-12)
        assert pipeline.cost_s == pytest.approx(best_s, rel=1e-12, abs=1e-12)
        assert pipeline.bound_s <= best_s * (1 + 1e-12)
        linear = best_pipeline(problem, SEARCH, linear_only=True)
        assert linear.device is None or linear.cost_s >= best_s * (1 - 1e-12)
    assert misfits or accelerators == 1 or cpus


def test_asking_first_and_following_values_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many states are asked first whether anything better exists; the optimum is the same."""
    rng = np.random.default_rng(4)
    problems = [load_problem(rng, 9, 3, 2, memory_bytes=9) for _ in range(12)]
    by_value = [best_pipeline(p, SEARCH).cost_s for p in problems]
    monkeypatch.setattr(module, "_FEW_STATES", 0)
    monkeypatch.setattr(module, "_FEW_SETS", 0)
    assert [best_pipeline(p, SEARCH).cost_s for p in problems] == by_value


def test_more_states_than_one_word_holds() -> None:
    """72 states: eight accelerators and seven CPUs for a chain of ten."""
    graph = plain_graph(10, [(i, i + 1) for i in range(9)])
    devices = [Device(f"a{i}", "accelerator", {"default": 1.0}, 1.0) for i in range(8)]
    devices += [Device(f"c{i}", "cpu", {"default": 1.0}, 1.0) for i in range(7)]
    compute_s = np.repeat([[1.0] * 8 + [2.0] * 7], 10, axis=0)
    problem = make_problem(
        graph, make_cluster("many", devices), compute_s, "max_load", tensor_s=np.full(10, 0.75)
    )
    # Ten ops on ten devices: an accelerator pays 1 + 0.75 (ends) or 1 + 1.5, a CPU 2. All at most
    # 2 s with the ends on accelerators and CPUs between: nothing below 2 s, as only the ends may
    # be alone on an accelerator for less and two ops cost more.
    pipeline = best_pipeline(problem, SEARCH)
    assert pipeline.is_optimal
    assert pipeline.cost_s == max_load.values(problem, pipeline.device[None])[0][0]
    graph = plain_graph(9, [(i, i + 1) for i in range(8)])
    problem = make_problem(
        graph, problem.cluster, compute_s[:9], "max_load", tensor_s=np.full(9, 0.75)
    )
    assert best_pipeline(problem, SEARCH).cost_s == 2.0


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
        tensor_s=np.ones(graph.num_tensors),
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


def test_states_are_numbered_so_that_one_more_device_is_later() -> None:
    following, previous = state_moves([2, 1])
    counts = state_counts([2, 1])
    for s, row in enumerate(following):
        for c, after in enumerate(row):
            if after >= 0:
                assert after > s
                assert previous[after, c] == s
                assert (counts[after] - counts[s]).tolist() == np.eye(2, dtype=int)[c].tolist()
    assert as_bits(np.array([[False] * 64 + [True]])).tolist() == [[0, 1]]


@pytest.mark.skipif(not BENCH.exists(), reason="the public instances are not here")
def test_published_values_are_reproduced() -> None:
    """Tarnawski et al.'s program on their instances, to 1e-9, with all the down-sets it counts."""
    for name, entry in json.loads((BENCH / "reference.json").read_text()).items():
        values = entry["values"]
        wanted = values.get("dp", values.get("max_load_dp"))
        if wanted is None or "latency" in name:
            continue
        problem = load_dnn_partitioning(BENCH / name, "max_load")
        pipeline = best_pipeline(problem, SEARCH)
        assert pipeline.is_optimal
        assert pipeline.down_sets == entry["ideals"]
        assert pipeline.device is not None
        value_s, overflow = max_load.values(problem, pipeline.device[None])
        assert value_s[0] * 1e3 == pytest.approx(wanted, rel=1e-9)
        assert overflow[0] == 0
