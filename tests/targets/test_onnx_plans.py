"""`--for openvino` and `--for onnxruntime`: what these can follow, for the objective asked for."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gdp.api.answer import answer
from gdp.base.errors import InfeasibleError
from gdp.cli.main import cli
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.base import CostModel
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph, make_graph
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints, Pin
from gdp.question import solve
from gdp.question.question import Question
from gdp.targets.intel_openvino.export import hetero_plan
from gdp.targets.table import EXPORTERS, PLANNERS

SEARCH = Search(seconds=None, evaluations=50)
plan_openvino = PLANNERS["openvino"].plan


def machine(memory_bytes: int = 1 << 30) -> Cluster:
    devices = [Device(n, n, {"default": 1e9}, 1e9, memory_bytes) for n in ("cpu", "gpu")]
    return make_cluster("machine", devices, default_latency_s=0.25)


def row() -> OpGraph:
    """x -> a -> b -> c -> d -> y, tensors of a byte, weights of 10."""
    return make_graph(
        "row", [*"xabcdy"], [INPUT, *["Conv"] * 4, OUTPUT], [(i, 1) for i in range(5)],
        [(i, i + 1) for i in range(5)], weight_bytes=[0, 10, 10, 10, 10, 0],
    )  # fmt: skip


def costs_of(*columns: list[float]) -> CostModel:
    """Seconds of a, b, c, d on each device."""

    def costs(graph: OpGraph, cluster: Cluster) -> np.ndarray:
        seconds = np.zeros((graph.num_ops, cluster.num_devices))
        seconds[~graph.is_io] = np.array(columns).T
        return seconds

    return costs


ALTERNATING = costs_of([1.0, 9.0, 1.0, 9.0], [9.0, 1.0, 9.0, 1.0])
"""The best placement changes device at every op, which HETERO cannot follow."""
HALVES = costs_of([1.0, 1.0, 9.0, 9.0], [9.0, 9.0, 1.0, 1.0])


def test_the_best_row_of_pieces_is_found_by_hand_figures() -> None:
    """1 + 1 on the CPU, 0.25 s over, 1 + 1 on the GPU, 0.25 s back."""
    found = plan_openvino(Question(row(), machine(), costs=HALVES, search=SEARCH))
    assert found.placement.device.tolist() == [0, 0, 0, 1, 1, 0]
    assert found.value_s == pytest.approx(4.5, rel=1e-6)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("costs", [ALTERNATING, HALVES])
def test_openvino_follows_the_plan_and_no_device_alone_is_better(
    objective: str, costs: CostModel
) -> None:
    graph, cluster = row(), machine()
    found = plan_openvino(Question(graph, cluster, objective=objective, costs=costs, search=SEARCH))
    assert found.objective == objective
    plan = hetero_plan(graph, found.placement.device, cluster.device_names)
    assert len(set(plan["order"])) == len(plan["order"])
    alone = [c.value_s for c in found.candidates if c.method.startswith("all on")]
    assert len(alone) == 2
    assert found.value_s <= min(v for v in alone if v is not None)
    free = solve.solve(Question(graph, cluster, objective=objective, costs=costs, search=SEARCH))
    assert free.bound_s <= found.value_s * (1 + 1e-9)


def test_for_the_period_the_pieces_are_balanced() -> None:
    even = costs_of([2.0] * 4, [2.0] * 4)
    found = plan_openvino(
        Question(row(), machine(), objective="throughput", costs=even, search=SEARCH)
    )
    assert found.value_s < 8.0
    latency = plan_openvino(Question(row(), machine(), costs=even, search=SEARCH))
    assert latency.value_s == pytest.approx(8.0, rel=1e-6), "for the latency one device is enough"


def test_pins_and_memory_are_heeded() -> None:
    pinned = Constraints(pins=(Pin("a", ("gpu",)),))
    found = plan_openvino(
        Question(row(), machine(), costs=HALVES, constraints=pinned, search=SEARCH)
    )
    assert found.placement.device[1] == 1
    small = machine(25)
    split = plan_openvino(
        Question(row(), small, costs=costs_of([1.0] * 4, [5.0] * 4), search=SEARCH)
    )
    assert sorted(np.bincount(split.placement.device[1:5]).tolist()) == [2, 2]
    with pytest.raises(InfeasibleError):
        plan_openvino(Question(row(), machine(15), costs=HALVES, search=SEARCH))


def test_cuts_are_where_the_fewest_bytes_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one cut is looked at, it is between b and c, over which one byte passes."""
    graph = make_graph(
        "sizes", [*"abcd"], ["Conv"] * 4, [(0, 100), (1, 1), (2, 50)], [(0, 1), (1, 2), (2, 3)]
    )
    early = costs_of([1.0, 9.0, 9.0, 9.0], [9.0, 1.0, 1.0, 1.0])

    def devices(costs: CostModel) -> list[int]:
        found = plan_openvino(Question(graph, machine(), costs=costs, search=SEARCH))
        return found.placement.device.tolist()

    assert devices(early) == [0, 1, 1, 1]
    monkeypatch.setattr("gdp.targets.intel_openvino.plan.MAX_CUTS", 1)
    monkeypatch.setattr("gdp.targets.intel_openvino.plan.PIPELINE_METHODS", ())
    assert devices(HALVES) == [0, 0, 1, 1]
    assert devices(early) == [1, 1, 1, 1]


def test_onnx_runtime_follows_what_gdp_places() -> None:
    graph, cluster = row(), machine()
    free = solve.solve(Question(graph, cluster, costs=ALTERNATING, search=SEARCH))
    planned = answer(
        Question(graph, cluster, target="onnxruntime", costs=ALTERNATING, search=SEARCH)
    )
    assert planned.placement.device.tolist() == free.placement.device.tolist()


def test_from_the_model_to_openvinos_files_on_the_command_line(tmp_path: Path) -> None:
    """The placement for the latency enters its devices many times; `--for openvino` does not."""
    runner, placed = CliRunner(), str(tmp_path / "p.json")
    box = ["--cluster", "cpu+arc-a770"]
    model = "onnx:light_squeezenet"
    done = runner.invoke(cli, ["place", model, *box, "--for", "openvino", "-o", placed])
    assert done.exit_code == 0, done.output
    assert json.loads(Path(placed).read_text())["made_by"] == "gdp openvino"
    export = ["export", placed, "--model", model, *box, "--to", "openvino"]
    done = runner.invoke(cli, [*export, "-o", str(tmp_path / "ov")])
    assert done.exit_code == 0, done.output
    refused = runner.invoke(cli, ["place", model, *box, "--for", "openvino", "--method", "heft"])
    assert refused.exit_code != 0


def test_memory_is_counted_before_the_search() -> None:
    tiny = replace(machine(5))
    with pytest.raises(InfeasibleError):
        answer(Question(row(), tiny, target="openvino", costs=HALVES, search=SEARCH))


@pytest.mark.parametrize("target", [None, "accelerate", "onnxruntime", "openvino"])
def test_stages_are_replicated_where_the_export_holds_replicas(target: str | None) -> None:
    """One op takes nearly all the time, so that two cores in turn halve the period."""
    graph, costs = row(), costs_of([8.0, 0.5, 0.5, 0.5], [8.0, 0.5, 0.5, 0.5])
    cores = make_cluster("two", [Device(f"core{i}", "core", {"default": 1e9}, 1e9) for i in (0, 1)])
    placed = answer(
        Question(graph, cores, target=target, objective="throughput", costs=costs, search=SEARCH)
    )
    replicates = target is None or EXPORTERS[target].replicates
    assert bool(placed.placement.teams) == replicates
    assert placed.value_s == pytest.approx(4.75 if replicates else 8.0, rel=0.01)


def test_a_target_replicates_if_its_export_does() -> None:
    assert {name: row.replicates for name, row in PLANNERS.items()} == {
        name: EXPORTERS[name].replicates for name in PLANNERS
    }


def test_a_model_that_llama_cpp_does_not_know_has_no_row_of_it() -> None:
    placed = answer(Question(row(), machine(), target=None, costs=HALVES, search=SEARCH))
    methods = [candidate.method for candidate in placed.candidates]
    assert "single" in methods
    assert "llamacpp" not in methods
