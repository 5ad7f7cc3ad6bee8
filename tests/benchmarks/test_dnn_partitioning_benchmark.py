"""The benchmark of published instances, on a folder laid out as the authors' repository."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "dnn_partitioning.py"


@pytest.fixture
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dnn_partitioning_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chain_instance(path: Path) -> None:
    """Four nodes in a row: 1, 2, 3, 4 ms on two accelerators, ten times that on a CPU; c = 1 ms."""
    nodes = [
        {"id": i, "cpuLatency": 10.0 * (i + 1), "fpgaLatency": i + 1.0, "size": 1.0}
        for i in range(4)
    ]
    edges = [{"sourceId": i, "destId": i + 1, "cost": 1.0} for i in range(3)]
    path.parent.mkdir(parents=True)
    path.write_text(
        json.dumps(
            {"maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 4, "nodes": nodes, "edges": edges}
        )
    )


def test_instances_are_found_in_a_clone_and_solved(benchmark: ModuleType, tmp_path: Path) -> None:
    """The best cut is before the last node: 6 + 1 ms and 4 + 1 ms."""
    chain_instance(tmp_path / "throughput-inputs" / "LayerGraphs" / "chain.json")
    chain_instance(tmp_path / "latency-inputs" / "OperatorGraphs" / "chain.json")
    (tmp_path / "latency-inputs" / "OperatorGraphs" / "split.json").write_text('{"fpgas": []}')
    found = benchmark.instances(tmp_path, "")
    assert list(found) == ["latency/OperatorGraphs/chain", "throughput/LayerGraphs/chain"]
    reference = {"values": {"dp": 7.0, "expert": 8.0}, "user_seconds": {"dp": 10.0}}
    stated = tmp_path / "stated.json"
    stated.write_text(json.dumps({"throughput/LayerGraphs/chain.json": reference}))
    options = ["--only", "throughput", "--methods", "pipeline_dp", "--json", "--reference"]
    done = CliRunner().invoke(benchmark.main, [str(tmp_path), *options, str(stated)])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.output)["rows"]
    assert row["value_ms"] == pytest.approx(7.0)
    assert row["bound_ms"] <= 7.0
    assert row["authors_ms"] == 7.0
    assert row["times_faster"] > 1.0
    assert row["baselines_ms"] == {"dp": 7.0, "expert": 8.0}
    assert row["peak_mb"] >= row["added_mb"] >= 0.0


def test_an_unknown_method_is_refused(benchmark: ModuleType, tmp_path: Path) -> None:
    chain_instance(tmp_path / "throughput" / "LayerGraphs" / "chain.json")
    done = CliRunner().invoke(benchmark.main, [str(tmp_path), "--methods", "magic"])
    assert done.exit_code == 2
    assert "no method 'magic'" in done.output
