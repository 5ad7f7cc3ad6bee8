"""Placement files survive a round trip and are refused where they do not belong."""

from pathlib import Path

import numpy as np
import pytest

from gdp.api import simulate
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.errors import PlacementError
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph, make_graph
from gdp.placement import check, load_placement, make_placement, require, save_placement


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
            '{"schema":1,"graph_digest":"","made_by":"","devices":["a"],"ops":["x"],"device":[3],"rank":[0]}',
            "outside 0..0",
        ),
        (
            '{"schema":1,"graph_digest":"","made_by":"","devices":["a"],"ops":["x"],"device":[],"rank":[0]}',
            "equally long",
        ),
    ],
)
def test_a_bad_placement_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(PlacementError, match=message):
        load_placement(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    from gdp.files.writing import write_atomic

    path = tmp_path / "p.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_atomic(path, [b"new", "not bytes"])  # type: ignore[list-item]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
