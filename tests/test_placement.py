"""Placement files survive a round trip and are refused where they do not belong."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gdp.api.place import simulate
from gdp.base.errors import ModelError, PlacementError
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph, make_graph
from gdp.placement.placement import (
    Teams,
    check,
    load_placement,
    make_placement,
    require,
    save_placement,
)
from gdp.question.models import load


def pair(size: int = 4, second: str = "b") -> OpGraph:
    return make_graph("g", ["a", second], ["Relu", "Relu"], [(0, size)], [(0, 1)])


def test_a_placement_survives_its_file(tmp_path: Path) -> None:
    cluster = cluster_preset("2xcpu-core")
    placement = make_placement(pair(), cluster, np.array([0, 1]), np.array([5, 2]), "hand")
    save_placement(placement, tmp_path / "p.json")
    again = load_placement(tmp_path / "p.json")
    assert again.device.tolist() == [0, 1]
    assert again.rank.tolist() == [5, 2]
    assert (again.made_by, again.graph_digest) == ("hand", pair().digest)
    require(again, pair(), cluster)


def test_a_placement_with_teams_survives_its_file(tmp_path: Path) -> None:
    cluster = cluster_preset("2xcpu-core")
    placement = make_placement(pair(), cluster, np.array([0, 0]), teams=((0, 1),))
    save_placement(placement, tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    assert '"schema": 3' in text
    again = load_placement(tmp_path / "p.json")
    assert again.teams == ((0, 1),)
    require(again, pair(), cluster)


def test_teams_that_cannot_serve_are_named() -> None:
    cluster = cluster_preset("2xcpu-core+2xt4")
    backward = make_graph(
        "g", ["a", "b"], ["X", "X"], [(0, 4)], [(0, 1)], is_backward=[False, True]
    )

    def found(teams: Teams, device: tuple[int, int] = (0, 0), graph: OpGraph | None = None) -> str:
        graph = graph or pair()
        return "; ".join(
            check(make_placement(graph, cluster, np.array(device), teams=teams), graph, cluster)
        )

    assert found(((0, 1), (2, 3)), (0, 2)) == ""
    assert "of one kind, got core1 (cpu-core), t4:0 (t4)" in found(((1, 2),))
    assert "op 'b' is on core1, which serves in the team of core0" in found(((0, 1),), (0, 1))
    assert "device 1 is in two teams" in found(((0, 1), (1, 3)))
    assert "outside 0..3" in found(((0, 7),))
    assert "must be two devices or more, ascending" in found(((1, 0),))
    assert "is a training step" in found(((0, 1),), graph=backward)


@pytest.mark.parametrize("key", ["splits", "teams"])
def test_faults_of_many_groups_are_found_in_linear_time(key: str, tmp_path: Path) -> None:
    """40,000 groups that name each device twice; the line stays short."""
    path, cluster = tmp_path / "p.json", cluster_preset("2xcpu-core")
    save_placement(make_placement(pair(), cluster, np.array([0, 0])), path)
    document = json.loads(path.read_text())
    groups = [[k, k + 1] for k in range(1, 40_000)] + [list(range(10**5, 0, -1))]
    document[key] = groups if key == "teams" else [{"devices": group} for group in groups]
    path.write_text(json.dumps(document))
    started_s = time.process_time()
    with pytest.raises(
        PlacementError, match=r"device 1|device 2 is in two|\.\.\.\] must be two"
    ) as error:
        load_placement(path)
    assert "outside 0..1" in str(error.value)
    assert len(str(error.value)) < 600
    assert time.process_time() - started_s < 5.0


def test_a_device_is_in_one_split(tmp_path: Path) -> None:
    path, cluster = tmp_path / "p.json", cluster_preset("4xcpu-core")
    save_placement(make_placement(pair(), cluster, np.array([0, 0])), path)
    document = json.loads(path.read_text())
    document["splits"] = [{"devices": [0, 1]}, {"devices": [1, 2]}]
    path.write_text(json.dumps(document))
    with pytest.raises(PlacementError, match=r"p\.json: device 1 is in two splits$"):
        load_placement(path)


def test_a_placement_for_another_graph_names_the_first_op_without_device() -> None:
    cluster = cluster_preset("2xcpu-core")
    placement = make_placement(pair(), cluster, np.array([0, 1]))
    with pytest.raises(PlacementError, match="1 ops have no device, first 'z'"):
        require(placement, pair(second="z"), cluster)
    with pytest.raises(PlacementError, match="another version of graph"):
        require(placement, pair(size=8), cluster)
    with pytest.raises(PlacementError, match="names devices core0, core1"):
        require(placement, pair(), cluster_preset("2xt4"))


def hosted(colocate: list[int] | None = None) -> OpGraph:
    """x -> a -> b -> y, the model's input and output at both ends."""
    edges, kinds = [(0, 1), (1, 2), (2, 3)], [INPUT, "Relu", "Conv", OUTPUT]
    return make_graph(
        "g", list("xaby"), kinds, [(i, 4) for i in range(3)], edges, colocate=colocate
    )


def machine(host: int = 0) -> Cluster:
    """Two devices, of which the second runs no convolution."""
    relu = Device("relu", "npu", {"default": 1.0}, 1.0, supported=frozenset({"Relu"}))
    return make_cluster("m", [Device("cpu", "cpu", {"default": 1.0}, 1.0), relu], host=host)


@pytest.mark.parametrize(
    ("device", "colocate", "message"),
    [
        ([0, 1, 0, 1], None, "belong to the host cpu: 1 of 4 ops, first 'y' .* on relu"),
        ([1, 1, 0, 1], None, "belong to the host cpu: 2 of 4 ops, first 'x'"),
        ([0, 1, 1, 0], None, "relu does not support .*: 1 of 4 ops, first 'b' .Conv. on relu"),
        ([0, 1, 0, 0], [0, 3, 3, 7], "must share a device do not: 1 of 4 ops, first 'b'"),
    ],
)
def test_an_op_where_it_cannot_be_is_named(
    device: list[int], colocate: list[int] | None, message: str
) -> None:
    graph = hosted(colocate)
    with pytest.raises(PlacementError, match=message):
        require(make_placement(graph, machine(), np.array(device)), graph, machine())


def test_the_same_placement_fits_where_the_host_is_another() -> None:
    graph, cluster = hosted(), machine(host=1)
    assert check(make_placement(graph, cluster, np.array([1, 1, 0, 1])), graph, cluster) == []


def test_an_op_without_a_time_on_its_device_is_named() -> None:
    def costs(graph: OpGraph, cluster: Cluster) -> np.ndarray:
        seconds = np.ones((graph.num_ops, cluster.num_devices))
        seconds[graph.op_index["b"], 1] = np.inf
        return seconds

    graph, cluster = pair(), cluster_preset("2xcpu-core")
    placement = make_placement(graph, cluster, np.array([0, 1]))
    with pytest.raises(PlacementError, match=r"1 ops cannot run .* first 'b' on core1"):
        simulate(graph, placement, cluster, costs=costs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a placement file"),
        ("{}", "missing required field"),
        ('{"schema":1,"wheel":2}', "unknown field `wheel`"),
        (
            '{"schema":9,"graph_digest":"","made_by":"","devices":[],"ops":[],"device":[],"rank":[]}',
            "has schema 9",
        ),
        (
            '{"schema":3,"graph_digest":"","made_by":"","devices":["a"],"ops":["x"],"device":[3],"rank":[0]}',
            "outside 0..0",
        ),
        (
            '{"schema":3,"graph_digest":"","made_by":"","devices":["a"],"ops":["x"],"device":[],"rank":[0]}',
            "equally long",
        ),
        (
            '{"schema":3,"graph_digest":"","made_by":"","devices":["a"],"ops":[],"device":[],"rank":[],"teams":[[0]]}',
            "two devices or more",
        ),
    ],
)
def test_a_bad_placement_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(PlacementError, match=message):
        load_placement(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    from gdp.base.files.writing import write_atomic

    path = tmp_path / "p.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_atomic(path, [b"new", "not bytes"])  # type: ignore[list-item]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_placement_is_no_model(tmp_path: Path) -> None:
    placement = make_placement(pair(), cluster_preset("2xcpu-core"), np.array([0, 1]))
    save_placement(placement, tmp_path / "p.json")
    with pytest.raises(ModelError, match=r"p.json is a placement; the model that it is of"):
        load(tmp_path / "p.json")
    (tmp_path / "empty.json").touch()
    with pytest.raises(ModelError, match="is not a graph file"):
        load(tmp_path / "empty.json")


def test_a_placement_of_an_earlier_version_is_read_with_a_warning(caplog) -> None:
    """Its digest says nothing of ties; a later one does, and does not fit the untied graph."""
    ties = ([0, 0], [0, 1])
    tied, untied = (
        make_graph("g", ["a", "b"], ["X"] * 2, [(0, 4)], [(0, 1)], weight_bytes=[8, 8], weight_id=t)
        for t in ties
    )
    cluster = cluster_preset("2xcpu-core")
    placement = make_placement(tied, cluster, np.array([0, 1]))
    with pytest.raises(PlacementError, match="another version of graph"):
        require(placement, untied, cluster)
    require(placement, tied, cluster)
    assert not caplog.messages
    require(replace(placement, graph_digest=tied.earlier_digest), untied, cluster)
    assert [message.split(",")[0] for message in caplog.messages] == [
        "the placement was made by an earlier version"
    ]
