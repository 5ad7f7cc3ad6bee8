"""What is remembered of a machine: kept, read, matched, forgotten; damaged files cost no answer."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

import gdp
from gdp.cluster.file import load_cluster
from gdp.costs import machine
from gdp.costs.adapt import LinkSeconds, Piece, Run, Share, op_keys
from gdp.costs.default import resolve_costs
from gdp.costs.profile import ProfileError
from gdp.graph.op_graph import make_graph

MODEL, CLUSTER = "onnx:light_squeezenet", "2xcpu-core"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GDP_DATA_DIR", str(tmp_path))
    return tmp_path / "machine"


def a_record(factor: float = 2.0, digest: str = "0" * 64) -> machine.MachineRecord:
    graph, cluster = gdp.load(MODEL), load_cluster(CLUSTER)
    base, label = resolve_costs("shipped", cluster, graph)
    seconds = base(graph, cluster)[:, 0]
    shares = tuple(
        Share(*key, float(s)) for key, s in zip(op_keys(graph), seconds, strict=True) if s > 0
    )
    piece = Piece("core0", "cpu-core", shares, factor * float(seconds.sum()), False)
    return machine.MachineRecord(
        schema=1, date=machine.now(), model="squeezenet", digest=digest, runtime="onnxruntime",
        versions=machine.runtime_versions("onnxruntime"), costs=label,
        devices=machine.measured_devices(cluster), runs=(Run("squeezenet", (piece,) * 4),),
        off_before=0.5, off=0.06,
    )  # fmt: skip


def predicted_s(**more: object) -> float:
    result = gdp.place(
        MODEL, CLUSTER, method="single", search=gdp.Search(seconds=None, simplicity=0), **more
    )
    return result.value_s


def test_place_predicts_with_what_is_remembered_and_says_so() -> None:
    before_s = predicted_s()
    machine.remember(a_record())
    result = gdp.place(MODEL, CLUSTER, method="single")
    assert result.value_s == pytest.approx(2 * before_s, rel=0.05)
    assert result.costs.startswith("this machine, tuned on 1 model, 6% off when last checked; ")
    assert predicted_s(costs="shipped") == before_s
    assert machine.forget() == 1
    assert predicted_s() == before_s


@pytest.mark.parametrize(
    "change",
    [
        {"versions": {"onnxruntime": "0.1"}},
        {"runtime": "openvino"},
        {"costs": "others"},
        {"devices": (machine.TunedDevice("cpu-core", "another processor"),)},
        {"schema": 2},
    ],
)
def test_a_record_of_something_else_does_not_count(change: dict[str, object]) -> None:
    before_s = predicted_s()
    machine.remember(msgspec.structs.replace(a_record(), **change))
    assert predicted_s() == before_s


def test_a_model_that_is_tuned_again_replaces_its_record_and_others_stay(folder: Path) -> None:
    for factor, digest in ((2.0, "0" * 64), (2.0, "1" * 64), (3.0, "0" * 64)):
        machine.remember(a_record(factor, digest))
    assert len(list(folder.glob("*.json"))) == 2
    assert len(machine.records()) == 2
    assert "tuned on 2 models" in gdp.place(MODEL, CLUSTER, method="single").costs


def test_damaged_files_are_left_out(folder: Path) -> None:
    before_s = predicted_s()
    path = machine.remember(a_record())
    path.write_bytes(path.read_bytes()[:100])
    (folder / "other.json").write_text("[]")
    assert predicted_s() == before_s
    assert machine.records() == []


def test_a_written_record_serves_as_costs(tmp_path: Path) -> None:
    before_s = predicted_s()
    path = tmp_path / "costs.json"
    path.write_bytes(machine.encode(a_record(3.0)))
    assert predicted_s(costs=path) == pytest.approx(3 * before_s, rel=0.05)
    path.write_bytes(machine.encode(msgspec.structs.replace(a_record(), costs="others")))
    with pytest.raises(ProfileError, match="relative to costs 'others'"):
        predicted_s(costs=path)
    path.write_text("{}")
    with pytest.raises(ProfileError, match=r"costs\.json"):
        predicted_s(costs=path)


def test_only_the_newest_runs_are_read_for_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOST_PIECES", 6)
    record = a_record()
    old, new = record.runs[0], replace_model(record.runs[0], "newer")
    kept = machine.Knowledge([msgspec.structs.replace(record, runs=(old, new))]).runs
    assert [run.model for run in kept] == ["newer"]


def replace_model(run: Run, name: str) -> Run:
    return msgspec.structs.replace(run, model=name)


def test_the_runtime_is_that_of_the_importer_whatever_the_ops_are_called() -> None:
    graph = gdp.load(MODEL)
    assert machine.runtime_of(graph) == "onnxruntime"
    small = replace(graph, op_types=tuple(t if io else t.lower() for t, io in zip(
        graph.op_types, np.asarray(graph.is_io), strict=True)))  # fmt: skip
    assert machine.runtime_of(small) == "onnxruntime"
    assert machine.runtime_of(replace(small, source="torch")) == "torch"


def test_the_runtime_of_a_graph_by_hand_is_that_of_most_ops_not_of_one() -> None:
    """A single op with a name as of ONNX makes no ONNX model, nor one of torch a module."""
    names, links = ["in", "a", "b", "c"], [(0, 8), (1, 8), (2, 8)]
    uses = [(0, 1), (1, 2), (2, 3)]
    for types, runtime in (
        (["Input", "mm", "add", "Relu"], "torch"),
        (["Input", "MatMul", "Add", "relu"], "onnxruntime"),
    ):
        assert machine.runtime_of(make_graph("g", names, types, links, uses)) == runtime


@pytest.mark.parametrize("wrong", [-1.0, 1e7, 1e300, float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("field", ["measured", "link", "share", "off"])
def test_seconds_that_nobody_measured_are_refused(field: str, wrong: float, tmp_path: Path) -> None:
    seconds = {name: wrong if name == field else 0.5 for name in ("measured", "link", "share")}
    piece = Piece("core0", "cpu-core", (Share("Relu", 1, "", seconds["share"]),),
                  seconds["measured"], False)  # fmt: skip
    run = Run("m", (piece,), (LinkSeconds("core0", "core1", 0.1, seconds["link"]),))
    off = wrong if field == "off" else 0.1
    record = msgspec.structs.replace(a_record(), runs=(run,), off=off)
    path = tmp_path / "r.json"
    path.write_bytes(machine.encode(record))
    if wrong == 0.0 and field in ("share", "off"):  # of ops without work, and of luck
        assert machine.read_record(path).off == off
        return
    with pytest.raises(ProfileError, match=r"r\.json is not a record of a machine"):
        machine.read_record(path)
