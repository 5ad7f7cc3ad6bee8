"""Costs of processors that were not measured: scaled from those of a core that was."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gdp
from gdp.base.errors import ClusterError
from gdp.cluster.detect import (
    AVX512_UNITS,
    Rates,
    local_cluster,
    measure_arithmetic,
    with_arithmetic,
)
from gdp.cluster.presets import cluster_preset, device_preset
from gdp.cluster.types import Device, make_cluster
from gdp.costs.default import SHIPPED, resolve_costs, shipped_for, transferred, with_processors
from gdp.graph.op_graph import OpGraph, make_graph

CORE = shipped_for("cpu-core")
MODEL = "onnx:light_squeezenet"


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return gdp.load(MODEL)


def _seconds(graph: OpGraph, arithmetic: float, traffic: float) -> np.ndarray:
    core = device_preset("cpu-core")
    device = replace(
        core, flop_per_s={"default": arithmetic * core.speed("float32")},
        bytes_per_s=traffic * core.bytes_per_s,
    )  # fmt: skip
    return transferred(CORE, device).predictor.op_seconds(graph)


def test_a_processor_as_fast_as_the_measured_core_has_its_costs(graph: OpGraph) -> None:
    assert np.array_equal(_seconds(graph, 1.0, 1.0), CORE.predictor.op_seconds(graph))


@pytest.mark.parametrize(("arithmetic", "traffic"), [(2.0, 1.0), (1.0, 3.0), (13.0, 4.5)])
def test_faster_processors_take_less_but_no_less_than_their_speed_allows(
    graph: OpGraph, arithmetic: float, traffic: float
) -> None:
    as_measured, scaled = _seconds(graph, 1.0, 1.0), _seconds(graph, arithmetic, traffic)
    assert (scaled <= as_measured).all()
    assert (scaled >= as_measured / max(arithmetic, traffic) * (1 - 1e-12)).all()
    assert scaled.sum() < as_measured.sum()


def test_arithmetic_speeds_up_products_and_bandwidth_what_moves_bytes(graph: OpGraph) -> None:
    once = _seconds(graph, 1.0, 1.0)
    lead = once > 0
    by_arithmetic = (once / np.where(lead, _seconds(graph, 4.0, 1.0), 1.0))[lead]
    by_traffic = (once / np.where(lead, _seconds(graph, 1.0, 4.0), 1.0))[lead]
    convolves = np.array([t == "Conv" for t in graph.op_types])[lead]
    assert np.median(by_arithmetic[convolves]) > np.median(by_traffic[convolves])
    pools = np.array([t in ("MaxPool", "Concat") for t in graph.op_types])[lead]
    assert np.median(by_traffic[pools]) > np.median(by_arithmetic[pools])


def test_presets_of_processors_use_them_beside_an_accelerator(graph: OpGraph) -> None:
    cluster = cluster_preset("cpu+t4")
    costs, label = resolve_costs(SHIPPED, cluster, graph)
    assert "scaled by FLOP/s and bandwidth from AMD EPYC avx2" in label
    own = transferred(CORE, cluster.devices[0]).predictor.op_seconds(graph)
    assert np.array_equal(costs(graph, cluster)[~graph.is_io, 0], own[~graph.is_io])
    # A session is started once, and kernels have their launches.
    overheads = costs.with_runtime_overheads(cluster)  # type: ignore[attr-defined]
    assert overheads.devices[0].dispatch_per == "segment"
    assert overheads.devices[0].dispatch_s == CORE.segment_s


def test_processors_of_one_kind_keep_their_own_speeds(graph: OpGraph) -> None:
    slow = device_preset("cpu", "slow")
    fast = replace(slow, name="fast", flop_per_s={"default": 4 * slow.speed("float32")})
    cluster = make_cluster("two", [slow, fast])
    known = with_processors((CORE,), cluster, graph)
    costs, _ = resolve_costs(SHIPPED, cluster, graph)
    seconds = costs(graph, cluster)
    assert len(known) == 3
    assert seconds[~graph.is_io, 1].sum() < seconds[~graph.is_io, 0].sum()


def test_graphs_of_other_frameworks_keep_datasheets() -> None:
    graph = make_graph("one", ["a"], ["aten.mystery"], [], [], flop=[1e9])
    cluster = cluster_preset("cpu+t4")
    assert with_processors((CORE,), cluster, graph) == (CORE,)
    assert "scaled" not in resolve_costs(SHIPPED, cluster, graph)[1]


def _cores(monkeypatch: pytest.MonkeyPatch, model: str) -> Device:
    monkeypatch.setattr("gdp.cluster.detect.cpu_model", lambda: model)
    return local_cluster(run=lambda _: None).devices[0]


def test_cores_with_wider_units_are_faster_and_not_those_that_were_measured(
    graph: OpGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, wide = (_cores(monkeypatch, f"Some Processor {v}") for v in ("avx2", "avx512"))
    assert wide.speed("float32") == AVX512_UNITS * usual.speed("float32")
    labels = [resolve_costs(SHIPPED, make_cluster("x", [d]), graph)[1] for d in (usual, wide)]
    assert ["scaled" in label for label in labels] == [False, True]


def test_arithmetic_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('a file of this folder was run')")
    monkeypatch.chdir(tmp_path)
    measured = measure_arithmetic(1, seconds=0.01)
    assert 1e8 < measured.one_core == measured.all_cores < 1e14


def test_cores_share_the_arithmetic_that_was_measured() -> None:
    measured = Rates(one_core=90e9, all_cores=300e9, cores=4)
    cores = with_arithmetic(cluster_preset("4xcpu-core"), measured)
    assert {d.speed("float32") for d in cores.devices} == {75e9}
    mixed = with_arithmetic(cluster_preset("cpu+t4"), measured)
    assert [d.speed("float32") for d in mixed.devices] == [300e9, 8.1e12]


def test_arithmetic_that_cannot_be_measured_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdp.cluster.detect._MULTIPLY", "raise SystemExit('no numbers today')")
    with pytest.raises(ClusterError, match="no numbers today"):
        measure_arithmetic(1)
