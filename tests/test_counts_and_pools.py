"""Ops and kernels are counted alike everywhere; memory that devices share is counted once."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from tiny import cpu, plain_graph

from gdp.base.errors import InfeasibleError
from gdp.cli.text import cluster_json, cluster_text, memory_in_all, result_text
from gdp.cluster.detect import local_cluster
from gdp.cluster.file import read_cluster, with_max_memory, write_cluster
from gdp.cluster.types import Cluster, make_cluster, shared_overflow
from gdp.costs.base import roofline
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph
from gdp.methods.base import Search
from gdp.question import solve
from gdp.question.question import Question


def pooled(size: int, alone: int = 7) -> Cluster:
    """Two cores that share a memory, and a device with its own."""
    cores = [cpu(f"c{i}", memory_bytes=size, memory_pool="ram") for i in range(2)]
    return make_cluster("box", [*cores, cpu("g", memory_bytes=alone)], default_bytes_per_s=1e9,
                        default_latency_s=0.0)  # fmt: skip


def chain() -> OpGraph:
    """in -> Conv -> Relu -> Conv -> Relu -> out: each Relu is fused to its Conv."""
    kinds = [INPUT, "Conv", "Relu", "Conv", "Relu", OUTPUT]
    return plain_graph(
        6, [(i, i + 1) for i in range(5)], op_types=kinds, flop=[0, 9, 1, 9, 1, 0],
        memory_traffic_bytes=[0, 9, 1, 9, 1, 0],
    )  # fmt: skip


def test_terminal_json_and_page_count_the_same(caplog: pytest.LogCaptureFixture) -> None:
    graph, cluster = chain(), make_cluster("two", [cpu("a"), cpu("b")])
    result = solve.solve(
        Question(graph, cluster, costs=roofline, search=Search(seconds=None, evaluations=50))
    )
    view = solve.view_of(Question(graph, cluster, costs=roofline), result.placement)
    ops, kernels = view.counts()
    assert result.counts == (tuple(ops), tuple(kernels))
    assert (sum(ops), sum(kernels)) == (4, 2)
    plain = result.to_json()
    assert sum(plain["devices"].values()) == 4
    assert sum(plain["kernels"].values()) == 2
    with caplog.at_level(logging.INFO, logger="gdp"):
        assert "4 ops, run as 2 kernels" in result_text(result)
    again = solve.evaluate(Question(graph, cluster, costs=roofline), result.placement)
    assert again.counts == result.counts


def test_what_is_shared_is_counted_once() -> None:
    assert memory_in_all(pooled(20)) == 27
    assert cluster_json(pooled(20))["memory_bytes"] == 27
    assert "memory for plans 27 B in all" in cluster_text(pooled(20))
    assert memory_in_all(make_cluster("free", [cpu("a")])) is None


def test_what_is_held_together_must_fit_together() -> None:
    """8 and 11 bytes share 20; with 13 they do not fit. What the third holds does not count."""
    assert shared_overflow(pooled(20), np.array([8, 11, 99])) == ""
    said = shared_overflow(pooled(20), np.array([8, 13, 0]))
    assert said == "c0, c1 share 20 B of memory and would hold 21 B together"


def test_methods_see_the_shared_memory() -> None:
    """Weights of 12 bytes in a memory of 11 fit nowhere, and of 10 do, though each core may hold
    11: one op in the pipeline of both cores, as two replicas would hold 20 bytes together."""
    graph = plain_graph(4, [], sizes=0, flop=[9.0] * 4, weight_bytes=[3] * 4)
    cores = [cpu(f"c{i}", memory_bytes=11, memory_pool="ram") for i in range(2)]
    cluster = make_cluster("box", cores)
    with pytest.raises(InfeasibleError, match=r"weights need 12 B, c0, c1 hold 11 B: 1 B missing"):
        solve.solve(Question(graph, cluster, costs=roofline, method="blocks"))
    divided = with_max_memory(cluster, {"c0": 11, "c1": 6})
    assert [d.memory_pool for d in divided.devices] == ["", ""]
    assert solve.solve(Question(graph, divided, costs=roofline, method="blocks")).score.feasible
    less = plain_graph(2, [(0, 1)], sizes=0, flop=[9.0] * 2, weight_bytes=[5] * 2)
    counted = Search(seconds=None, evaluations=50)
    for method in ("auto", "single", "pipeline_dp", "exact"):
        found = solve.solve(
            Question(
                less, cluster, objective="throughput", costs=roofline, method=method, search=counted
            )
        )
        assert found.score.peak_bytes.sum() == 10
        assert found.value_s == 9.0 or method == "single"


def test_a_placement_made_elsewhere_is_noted() -> None:
    graph = plain_graph(2, [], sizes=0, flop=[9.0] * 2, weight_bytes=[6] * 2)
    cluster = make_cluster("box", [replace(d, memory_bytes=11) for d in pooled(1).devices[:2]])
    from gdp.placement.placement import make_placement

    placement = make_placement(graph, cluster, np.array([0, 1]))
    assert solve.evaluate(Question(graph, cluster, costs=roofline), placement).notes == (
        "c0, c1 share 11 B of memory and would hold 12 B together",
    )


def test_pools_are_kept_in_files_and_found_on_this_machine(tmp_path) -> None:
    write_cluster(pooled(20), tmp_path / "box.toml")
    found = read_cluster(tmp_path / "box.toml")
    assert [d.memory_pool for d in found.devices] == ["ram", "ram", ""]
    local = local_cluster(run=lambda command: None)
    if all(d.kind == "cpu-core" for d in local.devices):
        assert memory_in_all(local) == local.devices[0].memory_bytes
