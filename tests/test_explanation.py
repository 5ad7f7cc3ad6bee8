"""Why ops are where they are, on a fork and join whose latencies are worked by hand."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import cpu, plain_graph, unit_cluster

import gdp
from gdp.cli.inform import explained_text
from gdp.cluster.types import Cluster, Link, make_cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph
from gdp.placement.constraints import Constraints, Pin
from gdp.placement.placement import Placement, make_placement


def fork() -> OpGraph:
    """a -> b, c -> d: 1, 2, 3 and 1 s on every device; 1 s to send a tensor. Heads: m.b, m.c."""
    return replace(
        plain_graph(
            4, [(0, 1), (0, 2), (1, 3), (2, 3)], flop=[1.0, 2.0, 3.0, 1.0],
            weight_bytes=[0, 5, 0, 0], scope=["m", "m.b", "m.c", ""],
        ),
        op_names=("a", "b", "c", "d"), op_types=("Conv", "Gemm", "Conv", "Conv"),
    )  # fmt: skip


def placed(graph: OpGraph, cluster: Cluster, device: list[int]) -> Placement:
    return make_placement(graph, cluster, np.array(device))


def boxes(**second: object) -> Cluster:
    first = cpu("d0", memory_bytes=20)
    return make_cluster("boxes", [first, replace(cpu("d1", memory_bytes=20), **second)],
                        default_bytes_per_s=1.0, default_latency_s=0.0)  # fmt: skip


def why(graph: OpGraph, cluster: Cluster, device: list[int], **asked: object) -> dict:
    return gdp.explain(graph, placed(graph, cluster, device), cluster, costs=roofline, **asked)


def test_moving_a_branch_alone_is_simulated() -> None:
    """On one device 7 s; with b on the other, a's tensor arrives at 2 s, b's returns at 5 s, d
    starts then: 6 s."""
    found = why(fork(), boxes(), [0, 0, 0, 0], op="b")
    here, there = found["devices"]
    assert found["value_s"] == 7.0
    assert (here["holds"], here["compute_s"], here["change_s"]) == (1, 2.0, 0.0)
    assert (there["holds"], there["compute_s"]) == (0, 2.0)
    assert (there["value_s"], there["change_s"], there["feasible"]) == (6.0, -1.0, True)
    assert found["transfers"] == []
    assert found["limits"] == [
        "moved alone to d1, the value would fall by 14.3%: the placement can be improved"
    ]


def test_the_transfers_that_it_causes_are_named() -> None:
    found = why(fork(), boxes(), [0, 1, 0, 0], scope="m.b")
    assert [(t["direction"], t["made_by"], t["source"], t["destination"], t["seconds"])
            for t in found["transfers"]] == [
        ("in", "m / a", "d0", "d1", 1.0), ("out", "m.b / b", "d1", "d0", 1.0)
    ]  # fmt: skip
    assert found["limits"] == ["moved alone to where else they fit, the whole is at least 16.7% "
                               "slower"]  # fmt: skip


def test_memory_that_binds_is_told_in_bytes() -> None:
    """On d1 b holds its weights, 5 B, and what it reads and makes, 1 B each; d1 has 6 B."""
    found = why(fork(), boxes(memory_bytes=6), [0, 0, 0, 0], op="b")
    assert found["devices"][1]["feasible"] is False
    assert found["devices"][1]["peak_bytes"]["d1"] == 7
    assert found["limits"] == ["d1 would hold 7 B of 6 B"]


def test_a_full_device_is_told() -> None:
    found = why(fork(), boxes(memory_bytes=8), [0, 1, 0, 0], op="b")
    assert found["limits"][0] == "d1 is 88% full as it is"


def test_constraints_and_kernels_that_bind_are_told() -> None:
    pins = Constraints(pins=(Pin("b", ("d0",)),))
    found = why(fork(), boxes(), [0, 0, 0, 0], op="b", constraints=pins)
    assert found["devices"][1]["value_s"] is None
    assert found["limits"] == ["a constraint keeps 'b' off d1"]
    found = why(fork(), boxes(supported=frozenset({"Conv"})), [0, 0, 0, 0], scope="m")
    assert found["limits"] == ["d1 does not support Gemm ('b')"]


def test_what_shares_their_device_moves_along() -> None:
    """b and c go together: all of both on the other device takes 1 + 1 + 5 + 1 + 1 = 9 s, as the
    tensor of the first is sent while the second runs."""
    tied = Constraints(together=("[bc]",))
    found = why(fork(), boxes(), [0, 0, 0, 0], op="b", constraints=tied)
    assert found["moved_along"] == ["c"]
    assert found["devices"][1]["value_s"] == 9.0


def test_ops_on_several_devices_are_moved_to_one() -> None:
    found = why(fork(), boxes(), [0, 1, 0, 0], scope="m")
    assert found["ops"] == 3
    assert [row["holds"] for row in found["devices"]] == [2, 1]
    assert [row["compute_s"] for row in found["devices"]] == [6.0, 6.0]
    assert found["devices"][0]["value_s"] == 7.0


def test_throughput_is_judged_by_the_period() -> None:
    """One device is busy 7 s a sample; with b on the other, 5 s."""
    found = why(fork(), boxes(), [0, 0, 0, 0], op="b", objective="throughput")
    assert (found["value_s"], found["devices"][1]["value_s"]) == (7.0, 5.0)


def test_one_device_has_no_elsewhere() -> None:
    found = why(fork(), unit_cluster(1), [0, 0, 0, 0], op="b")
    assert found["limits"] == ["there is no other device"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "give --op GLOB or --scope MODULE"),
        ({"op": "a", "scope": "m"}, "give --op GLOB or --scope MODULE"),
        ({"op": "zz"}, "no op or scope of graph 'plain' matches 'zz'"),
        ({"scope": "m.x"}, r"no module 'm.x' in graph 'plain'; there is m\.[bc]"),
    ],
)
def test_what_matches_nothing_is_refused(asked: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        why(fork(), boxes(), [0, 0, 0, 0], **asked)


def test_inputs_and_outputs_belong_to_the_host() -> None:
    graph = plain_graph(2, [(0, 1)], op_types=[INPUT, OUTPUT])
    with pytest.raises(ValueError, match="'o0' is an input or output of the model"):
        why(graph, boxes(), [0, 0], op="o0")


def test_the_text_has_a_row_per_device_and_ends_with_what_binds() -> None:
    lines = explained_text(why(fork(), boxes(), [0, 0, 0, 0], op="b")).splitlines()
    assert lines[0] == "b: 1 op, run as 1 kernel: m.b / b"
    assert lines[2].split() == ["d0", "(1", "here)", "2.000", "s", "7.000", "s", "+0.00%", "yes"]
    assert lines[3].split() == ["d1", "2.000", "s", "6.000", "s", "-14.29%", "yes"]
    assert lines[-1].startswith("moved alone to d1")


def test_the_op_that_binds_is_named_and_not_one_that_moves_along() -> None:
    """Of a, b and c in module m, c alone is bound."""
    pins = Constraints(pins=(Pin("c", ("d0",)),))
    found = why(fork(), boxes(), [0, 0, 0, 0], scope="m", constraints=pins)
    assert found["limits"] == ["a constraint keeps 'c' off d1"]

    def no_time(graph: OpGraph, cluster: Cluster) -> np.ndarray:
        seconds = roofline(graph, cluster)
        seconds[graph.op_index["c"], 1] = np.inf
        return seconds

    placement = placed(fork(), boxes(), [0, 0, 0, 0])
    found = gdp.explain(fork(), placement, boxes(), costs=no_time, scope="m")
    assert found["limits"] == ["the costs give 'c' no time on d1"]
    only = boxes(supported=frozenset({"Conv", "Gemm"}))
    graph = replace(fork(), op_types=("Conv", "Gemm", "Tanh", "Conv"))
    found = why(graph, only, [0, 0, 0, 0], scope="m")
    assert found["limits"] == ["d1 does not support Tanh ('c')"]


def test_of_several_better_places_the_best_is_advised() -> None:
    """b takes 2 s on d0 to d2 and 1 s on d3: 7 s where all is on d0, 6 s with b elsewhere. The
    link to d1 is slower; c is 3 s, so that b on d1 ends d at 7 s, on d2 at 6 s."""
    devices = [cpu(f"d{i}") for i in range(3)]
    links = [Link("d0", "d1", 0.75), Link("d0", "d2", 1.0)]
    cluster = make_cluster("three", devices, links, default_bytes_per_s=1.0, default_latency_s=0.0)
    found = why(fork(), cluster, [0, 0, 0, 0], op="b")
    changes = [row["change_s"] for row in found["devices"]]
    assert changes[2] == -1.0 < changes[1] < -0.1
    assert found["limits"] == [
        "moved alone to d2, the value would fall by 14.3%: the placement can be improved"
    ]
    turned = why(fork(), make_cluster("three", [devices[i] for i in (0, 2, 1)], links,
                 default_bytes_per_s=1.0, default_latency_s=0.0), [0] * 4, op="b")  # fmt: skip
    assert turned["limits"] == found["limits"]


def test_a_slow_link_keeps_them() -> None:
    slow = make_cluster("slow", [cpu("d0"), cpu("d1")], [Link("d0", "d1", 0.1)])
    found = why(fork(), slow, [0, 0, 0, 0], op="b")
    assert found["devices"][1]["value_s"] == 24.0  # 1 + 10 + 2 + 10 + 1


def test_what_simplicity_gave_up_is_no_flaw() -> None:
    graph, cluster = fork(), boxes()
    simple = replace(placed(graph, cluster, [0, 0, 0, 0]), simplicity_cost=0.2)
    found = gdp.explain(graph, simple, cluster, costs=roofline, op="b")
    assert found["limits"] == [
        "moved alone to d1, the value would fall by 14.3%: the placement was given for its fewer "
        "cuts, 20.00% slower than the best found, which --simplicity 0 answers"
    ]
    little = replace(simple, simplicity_cost=0.01)
    found = gdp.explain(graph, little, cluster, costs=roofline, op="b")
    assert found["limits"][0].endswith("can be improved"), "more than simplicity cost"
