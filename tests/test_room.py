"""Memory that there is for weights: what can never fit in it is refused without a trace."""

import pytest

import gdp
from gdp.api.ask import _room_bytes
from gdp.cluster.presets import cluster_preset, device_preset
from gdp.cluster.reserve import for_runtime
from gdp.cluster.types import Cluster, make_cluster
from gdp.costs.base import roofline
from gdp.placement.constraints import Constraints, Pin
from gdp.question.prepare import room_bytes
from gdp.question.question import question_about
from tests.decoders import decoder


@pytest.fixture
def machine() -> Cluster:
    return cluster_preset("cpu+2xt4-pcie4")


def sizes(cluster: Cluster) -> dict[str, int]:
    return {device.name: device.memory_bytes for device in cluster.devices}


def test_room_is_all_memory_that_constraints_leave(machine: Cluster) -> None:
    of = sizes(machine)
    assert room_bytes(machine) == sum(of.values())
    forbid = Constraints(forbid=(Pin("*", ("cpu",)), Pin("layer.1", ("t4:0",))))
    assert room_bytes(machine, forbid) == of["t4:0"] + of["t4:1"]
    pin = Constraints(pins=(Pin("*", ("t4:0",)), Pin("layer.1", ("cpu",))))
    assert room_bytes(machine, pin) == of["t4:0"]


def test_memory_that_devices_share_counts_once() -> None:
    from dataclasses import replace

    cores = [
        replace(device_preset("cpu-core", name), memory_pool="host", memory_bytes=1000)
        for name in ("core0", "core1")
    ]
    assert room_bytes(make_cluster("cores", cores)) == 1000


@pytest.mark.parametrize("target", [None, "accelerate", "vllm"])
def test_a_plan_is_read_again_with_the_memory_it_was_made_for(
    target: str | None, machine: Cluster
) -> None:
    graph, once = decoder(), gdp.Search(seconds=None, evaluations=5)
    result = gdp.place(graph, machine, target=target, costs=roofline, search=once)
    question, _ = question_about(result.placement, graph)
    cards = [d for d in question.cluster.devices if d.name.startswith("t4")]
    planned = {d.name: d for d in result.question.cluster.devices}
    for card in cards:
        whole = planned[card.name]
        assert (card.memory_bytes, card.reserve_bytes) == (whole.memory_bytes, whole.reserve_bytes)
    kept = 0.1 * cards[0].total_bytes if target else 1 << 30
    assert cards[0].reserve_bytes == pytest.approx(kept, rel=1e-6)


def test_a_runtime_may_offload(machine: Cluster) -> None:
    of, torch = sizes(machine), sizes(for_runtime(machine, "accelerate"))
    cards, less = of["t4:0"] + of["t4:1"], torch["t4:0"] + torch["t4:1"]
    assert less < cards

    def room(target: str | None, offload: str | None = None) -> int:
        return _room_bytes(target, machine, offload, Constraints())

    assert room(None) == room("llamacpp") + of["cpu"]
    assert room("llamacpp") == cards
    assert room("pipelining") == less
    assert room("accelerate", "none") == less
    assert room("accelerate") == less + of["cpu"]
    assert room("accelerate", "disk") > 1 << 60
