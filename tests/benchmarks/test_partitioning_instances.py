"""Instances of the public benchmark, by hand and against its own evaluator's rules."""

import importlib.util
import json
import logging
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from published import DNN_PARTITIONING
from splits import save_split

from benchmarks.partitioning_instances import load_dnn_partitioning
from gdp.base.errors import ModelError
from gdp.cluster.types import UNLIMITED_BYTES

NOWHERE = pytest.mark.skip(reason="the public instances are not here")
FILES = sorted(DNN_PARTITIONING.glob("*/*/*.json")) or [
    pytest.param(Path(), marks=NOWHERE, id="none")
]


def instance() -> dict:
    """5 (2 ms) feeds 9 (4 ms, CPU only) and 7 (1 ms); 3 is the backward node of 5."""

    def node(i: int, cpu: float, acc: float, **more: object) -> dict:
        return {"id": i, "cpuLatency": cpu, "fpgaLatency": acc, "supportedOnFpga": True, **more}

    return {
        "maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 100.0,
        "nodes": [
            node(9, 40, 4, size=30.0) | {"supportedOnFpga": False},
            node(7, 10, 1, size=70),
            node(5, 20, 2, colorClass=1, size=0.0),
            node(3, 20, 2, colorClass=1, isBackwardNode=True),
        ],
        "edges": [
            {"sourceId": 5, "destId": 9, "cost": 0.5, "size": 1},
            {"sourceId": 5, "destId": 7, "cost": 0.5000001},
            {"sourceId": 9, "destId": 3, "cost": 0.25},
        ],
    }  # fmt: skip


def written(tmp_path: Path, document: object) -> Path:
    (tmp_path / "tiny.json").write_text(json.dumps(document))
    return tmp_path / "tiny.json"


def test_every_number_of_a_tiny_instance(tmp_path: Path) -> None:
    problem = load_dnn_partitioning(written(tmp_path, instance()))
    graph, op = problem.graph, problem.graph.op_index
    assert [d.kind for d in problem.cluster.devices] == ["accelerator", "accelerator", "cpu"]
    assert problem.cluster.memory_bytes.tolist() == [100, 100, UNLIMITED_BYTES]
    assert graph.num_ops == 4
    assert graph.num_tensors == 2  # 7 and 3 have no readers
    order = [op[i] for i in ("5", "7", "9", "3")]
    assert problem.compute_s[order].tolist() == [
        [0.002, 0.002, 0.02], [0.001, 0.001, 0.01], [np.inf, np.inf, 0.04], [0.002, 0.002, 0.02],
    ]  # fmt: skip
    assert graph.weight_bytes[order].tolist() == [0, 70, 30, 0]
    assert graph.is_backward[order].tolist() == [False, False, False, True]
    assert problem.group[op["5"]] == problem.group[op["3"]]
    assert len(set(problem.group.tolist())) == 3
    assert problem.sent_s is not None
    seconds = {graph.op_names[p]: s for p, s in zip(graph.producer, problem.sent_s, strict=True)}
    assert seconds == {"5": 0.0005, "9": 0.00025}
    names = graph.op_names
    edges = {(names[u], names[v]) for u, v in zip(*graph.edges, strict=True)}
    assert edges == {("5", "9"), ("5", "7"), ("9", "3")}


def test_links_reproduce_the_transfer_costs(tmp_path: Path) -> None:
    problem = load_dnn_partitioning(written(tmp_path, instance()))
    sent_s = problem.graph.tensor_bytes[0] / problem.cluster.link_bytes_per_s
    assert sent_s[0, 2] == pytest.approx(0.0005, rel=1e-6)
    assert sent_s[1, 0] == pytest.approx(0.001, rel=1e-6)


def test_latency_has_one_cpu_that_stands_for_all(tmp_path: Path) -> None:
    document = instance() | {"maxCPUs": 8}
    problem = load_dnn_partitioning(written(tmp_path, document), "block_latency")
    assert [d.kind for d in problem.cluster.devices] == ["accelerator", "accelerator", "cpu"]
    assert problem.objective == "block_latency"
    assert load_dnn_partitioning(written(tmp_path, document)).num_devices == 10


def test_fractions_of_bytes_are_rounded_to_the_safe_side(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    document = instance() | {"maxSizePerFPGA": 100.9}
    document["nodes"][1]["size"] = 70.25
    with caplog.at_level(logging.WARNING):
        problem = load_dnn_partitioning(written(tmp_path, document))
    assert "fractions of bytes" in caplog.text
    assert problem.graph.weight_bytes[problem.graph.op_index["7"]] == 71
    assert problem.cluster.memory_bytes[0] == 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"maxFPGAs": 1.5}, "maxFPGAs must be a whole number"),
        ({"maxFPGAs": 0, "maxCPUs": 0}, "no devices"),
        ({"maxSizePerFPGA": 0}, "at least one byte"),
        ({"nodes": []}, "names a node that does not exist"),
        ({"nodes": [], "edges": []}, "no ops"),
        ({"edges": [{"sourceId": 5, "destId": 5, "cost": 1}]}, "cycle"),
        (
            {"edges": [{"sourceId": 5, "destId": 9, "cost": -1}]},
            r">= 0.0 - at `\$.edges\[0\].cost`",
        ),
        (
            {"edges": [{"sourceId": 5, "destId": v, "cost": v} for v in (7, 9)]},
            "outgoing edges of cost 7.0 and 9.0",
        ),
        ({"nodes": "x"}, "is not a dnn-partitioning instance"),
    ],
)
def test_a_bad_instance_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_dnn_partitioning(written(tmp_path, instance() | change))


def test_a_node_that_stands_twice_or_takes_negative_time_is_named(tmp_path: Path) -> None:
    document = instance()
    document["nodes"][0]["id"] = 7
    with pytest.raises(ModelError, match="node id 7 appears twice"):
        load_dnn_partitioning(written(tmp_path, document))
    document = instance()
    document["nodes"][0]["cpuLatency"] = -1
    with pytest.raises(ModelError, match=r">= 0.0 - at `\$.nodes\[0\].cpuLatency`"):
        load_dnn_partitioning(written(tmp_path, document))


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no dnn-partitioning instance"):
        load_dnn_partitioning(tmp_path / "none.json")
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ModelError, match="is not a dnn-partitioning instance"):
        load_dnn_partitioning(tmp_path / "x.json")
    with pytest.raises(ValueError, match="objective"):
        load_dnn_partitioning(tmp_path / "x.json", "latency")


def evaluator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dnn_evaluate", DNN_PARTITIONING / "evaluate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the evaluator's
@pytest.mark.parametrize("path", FILES, ids=lambda p: "-".join((*p.parts[-3:-1], p.stem)))
def test_published_instances_agree_with_an_independent_reader(path: Path, tmp_path: Path) -> None:
    """A random split, written by gdp and read by the evaluator, has the loads our arrays give."""
    problem = load_dnn_partitioning(path)
    module = evaluator()
    theirs = module.Instance(path)
    k = theirs.k
    choice = np.random.default_rng(0).integers(k + 1, size=problem.num_groups)
    device = choice[problem.group]
    save_split(problem, device, tmp_path / "s.json")
    acc, cpu = module.read_split(tmp_path / "s.json")
    value_ms, loads = module.max_load(theirs, acc, cpu)
    assert not [v for v in module.check(theirs, acc, cpu) if "memory" not in v]

    graph = problem.graph
    assert problem.sent_s is not None
    load_s = np.zeros(problem.num_devices)
    np.add.at(load_s, device, problem.compute_s[np.arange(graph.num_ops), device])
    src, dst = graph.edges
    for d in range(k):
        cut = np.unique(src[(device[src] == d) != (device[dst] == d)])
        load_s[d] += problem.sent_s[np.isin(graph.producer, cut)].sum()
    assert load_s[: k + 1] * 1e3 == pytest.approx([load for _, load in loads][: k + 1])
    assert graph.weight_bytes.sum() == sum(theirs.size.values())
    assert problem.cluster.memory_bytes[0] == theirs.mem
    assert value_ms == pytest.approx(load_s.max() * 1e3)
