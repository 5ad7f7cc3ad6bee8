"""A placed generation told in users' words: seconds, tokens per second and bytes known by hand."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tiny import unit_cluster

import gdp
from gdp.api import report as reporting
from gdp.cli.main import cli
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.base import launch_floors_s, roofline
from gdp.costs.measured.costs import MeasuredCosts
from gdp.costs.measured.network import shipped_network
from gdp.costs.offload import with_offload
from gdp.graph.file import save_graph
from gdp.graph.generation import generation_graph
from gdp.graph.op_graph import INPUT, OUTPUT, GraphBuilder, OpGraph
from gdp.graph.request import Request
from gdp.question.prepare import requests_in_flight
from tests.decoders import Sizes, decoder

CLUSTER = unit_cluster(2, memory_bytes=250)
"""Devices of 1 FLOP/s, 1 byte/s and 250 bytes; links of 1 byte/s."""


def phase(tokens: int, flop: float, traffic: float, cache: int = 0) -> OpGraph:
    """Modules m and n, of 100 and 50 bytes of weights; m may hold a cache."""
    b = GraphBuilder()
    x = b.make_tensor(b.add_op("ids", INPUT), tokens)
    for name, held in (("m", 100 + cache), ("n", 50)):
        op = b.add_op(
            f"{name}/mul", "mm", reads=[x], flop=flop, traffic_bytes=traffic, scope=name,
            weight_bytes=held, cache_bytes=held - 100 if name == "m" else 0,
        )  # fmt: skip
        x = b.make_tensor(op, tokens if name == "m" else 2)
    b.add_op("out", OUTPUT, reads=[x])
    return b.build("phase")


def asked(requests: int = 0) -> OpGraph:
    """A prompt of 4 tokens, 8 s of arithmetic in each module, and 5 steps with 3 s of reading in
    each; taking a token takes 2 s. A full cache takes 15 bytes."""
    prompt, step = phase(4, 8.0, 1.0), phase(1, 1.0, 3.0, cache=10)
    return generation_graph("g", prompt, step, Request(4, 5, requests=requests), 1.5)


def cut(graph: OpGraph) -> gdp.Placement:
    """m on d0, which is the host; n, and what takes tokens, on d1."""
    on_d1 = np.array([scope == "n" for scope in graph.scope])
    on_d1 |= np.array(["next_token" in name for name in graph.op_names])
    return gdp.make_placement(graph, CLUSTER, on_d1.astype(np.int64))


def told(graph: OpGraph, objective: str = "latency") -> dict:
    found = gdp.explain(graph, cut(graph), CLUSTER, costs=roofline, objective=objective)
    return found["generation"]


def test_a_request_is_explained_without_naming_ops() -> None:
    """8 s in m, 4 s on the link, 8 + 2 s on d1; a step crosses three times, the last to the host:
    1 + 3 + 1 + 3 + 2 + 1 = 11 s. In all 8 + 4 + 8 + 5 * 2 and five steps."""
    answer = told(asked())
    assert answer["first_token_s"] == 22.0
    assert answer["token_s"] == 11.0
    assert answer["tokens_per_s"] == pytest.approx(1 / 11)
    assert answer["request_s"] == 85.0
    assert answer["limits"] == {
        "prompt": "arithmetic of d0 limits prefill: 36% of TTFT is computing",
        "decode": "bandwidth of d1 limits decode: 45% of an iteration is reading weights and "
        "caches",
    }
    shares = {part["text"]: part["share"] for part in answer["shares"]["decode"]}
    assert shares == {
        "reading weights and caches on d1": pytest.approx(5 / 11),
        "reading weights and caches on d0": pytest.approx(3 / 11),
        "moving tensors between devices": pytest.approx(3 / 11),
    }
    assert [(r["weights_bytes"], r["cache_bytes"]) for r in answer["memory"]] == [
        (100, 15),
        (50, 0),
    ]
    assert all(
        r["weights_bytes"] + r["cache_bytes"] + r["activations_bytes"] + r["free_bytes"] == 250
        for r in answer["memory"]
    )


def test_what_a_faster_machine_would_bring_is_simulated() -> None:
    """Of the prompt's 22 s 8 are computed on each device, 4 sent and 2 read on d1; of the step's 11
    s 5 are read on d1, 3 on d0, and 3 sent. Half of each is saved."""
    found = gdp.explain(asked(), cut(asked()), CLUSTER, costs=roofline)
    assert [tuple(row.values()) for row in found["faster"]] == [
        ("memory of d1 twice as fast", 21.0, 8.5),
        ("links twice as fast", 20.0, 9.5),
        ("memory of d0 twice as fast", 22.0, 9.5),
        ("arithmetic of d0 twice as fast", 18.0, 11.0),
        ("arithmetic of d1 twice as fast", 18.0, 11.0),
    ]


@dataclasses.dataclass(frozen=True)
class Launched:
    """Rooflines, but that the host launches each op in so many seconds, while devices compute."""

    launch_s: float

    def __call__(self, graph: OpGraph, cluster: Cluster) -> np.ndarray:
        return np.maximum(roofline(graph, cluster), self.launch_floor_s(graph, cluster))

    def launch_floor_s(self, graph: OpGraph, cluster: Cluster) -> np.ndarray:
        floor_s = np.full((graph.num_ops, cluster.num_devices), self.launch_s)
        floor_s[graph.is_io] = 0.0
        return floor_s


def gains(launch_s: float) -> dict[str, tuple[float, float]]:
    """Seconds to the first token and of a step less with something twice as fast, on GPUs."""
    cluster = replace(CLUSTER, devices=tuple(replace(d, kind="x") for d in CLUSTER.devices))
    found = gdp.explain(asked(), cut(asked()), cluster, costs=Launched(launch_s))
    now = found["generation"]
    return {
        row["what"]: (now["first_token_s"] - row["first_token_s"], now["token_s"] - row["token_s"])
        for row in found["faster"]
    }


def test_no_op_gets_faster_than_its_launch() -> None:
    """Reading takes 3 s of a step in each module, 2 to take a token on d1; computing 8 s of the
    prompt. Of launches of 1 s half is saved as without any; of 2.5 s half a second of each module's
    step, and nothing of a token's; of 3 s nothing in steps, and 4 of 8 s in the prompt."""
    assert gains(1.0)["memory of d1 twice as fast"] == (1.0, 2.5)
    half = gains(2.5)
    assert half["memory of d1 twice as fast"] == half["memory of d0 twice as fast"] == (0.0, 0.5)
    long = gains(3.0)
    assert set(long) == {f"{what} twice as fast" for what in
                         ("links", "arithmetic of d0", "arithmetic of d1")}  # fmt: skip
    assert long["arithmetic of d0 twice as fast"] == (4.0, 0.0)
    assert set(gains(8.0)) == {"links twice as fast"}


def test_eager_pytorch_gains_nothing_on_what_waits_for_its_launch() -> None:
    """A matrix of 64 MiB takes an H200 13 us by its bytes, a fourth of the launch."""
    graph = replace(decoder(Sizes(layers=1, hidden=4096, inner=8192)), source="torch")
    cluster = gdp.Cluster.load("cpu+h200")
    placement = gdp.make_placement(graph, cluster, np.where(graph.is_io, 0, 1))
    rows = {row["what"] for row in gdp.explain(graph, placement, cluster)["faster"]}
    assert not {row for row in rows if "memory of h200" in row or "bits" in row}
    found = shipped_network()
    assert found is not None
    model = MeasuredCosts(found[0], eager=True)
    floor_s = launch_floors_s(model, graph, cluster)
    assert floor_s is not None
    assert (floor_s <= model(graph, cluster) + 1e-12).all()
    assert launch_floors_s(replace(model, eager=False), graph, cluster) is None


def test_groups_are_named_and_gain_by_half_of_their_exchange() -> None:
    """Both devices of a split are named; links twice as fast save half of what they add up."""
    graph = decoder()
    devices = [
        Device(f"d{i}", "x", {"default": 1e11}, 1e9, 1 << 34, supported=None) for i in (0, 1)
    ]
    pair = make_cluster("pair", devices, default_bytes_per_s=1e9, default_latency_s=1e-6)
    split = gdp.Split((0, 1))
    placement = gdp.make_placement(graph, pair, np.zeros(graph.num_ops, np.int64), splits=(split,))
    found = gdp.explain(graph, placement, pair, costs=roofline)
    answer, rows = found["generation"], {row["what"]: row for row in found["faster"]}
    assert set(rows) >= {"links twice as fast", "memory of d0 and d1 twice as fast"}
    for phase, name in (("prompt", "first_token_s"), ("decode", "token_s")):
        share = {part["text"]: part["share"] for part in answer["shares"][phase]}
        moved = share["adding up parts of ops on d0 and d1"]
        moved += share.get("moving tensors between devices", 0.0)
        assert 0 < moved < 1
        assert rows["links twice as fast"][name] == pytest.approx(answer[name] * (1 - moved / 2))
        assert "d0 and d1" in answer["limits"][phase]


def test_weights_in_four_bits_save_what_they_have_beyond() -> None:
    """On a device that does nothing but read; of numbers of 16 bits 11.5 of each are saved."""
    graph = decoder()
    reads = Device("d0", "x", {"default": 1e18}, 1e9, 1 << 34)
    one = make_cluster("one", [reads], default_bytes_per_s=1e9, default_latency_s=0.0)
    placement = gdp.make_placement(graph, one, np.zeros(graph.num_ops, np.int64))
    found = gdp.explain(graph, placement, one, costs=roofline)
    row = {row["what"]: row for row in found["faster"]}["weights in 4.5 bits"]
    multiplied = np.isin(graph.op_types, ("linear", "_grouped_mm"))
    weights = (graph.weight_bytes - graph.cache_bytes)[multiplied].sum()
    assert weights > 0
    less_s = weights * (1 - 4.5 / 16) / 1e9
    assert found["generation"]["token_s"] - row["token_s"] == pytest.approx(less_s, rel=0.01)


def test_what_waits_for_its_launch_is_neither_read_nor_computed() -> None:
    """With costs of ten times the roofline every op but the copies waits."""
    found = gdp.explain(
        asked(), cut(asked()), CLUSTER, costs=lambda graph, cluster: 10 * roofline(graph, cluster)
    )
    texts = {part["text"] for part in found["generation"]["shares"]["decode"]}
    assert texts == {
        "launching kernels on d0", "launching kernels on d1", "moving tensors between devices",
    }  # fmt: skip


@pytest.mark.parametrize(("requests", "apart_s"), [(1, 85.0), (2, 43.0), (3, 43.0)])
def test_requests_in_flight_take_turns_until_a_device_is_full(
    requests: int, apart_s: float
) -> None:
    """d1 works 8 + 5 * 2 + 5 * 5 = 43 s for a request of 85 s: one request at a time leaves it
    idle for half of them, two keep it busy, and a third only takes memory."""
    answer = told(asked(requests), "throughput")
    assert answer["all_tokens_per_s"] == pytest.approx(5 / apart_s)
    assert (answer["in_flight"], answer["useful"]) == (requests, 2)
    first = answer["memory"][0]
    assert first["cache_bytes"] == 15 * requests
    assert answer["room"] == (first["free_bytes"] + first["cache_bytes"]) // 15


def test_caches_of_all_requests_bind_the_memory() -> None:
    """150 bytes of weights and 15 for each request; beside them 8 of tensors, however many steps
    are run: the 4 of the prompt and the 4 that the first module makes of them."""
    search = gdp.Search(seconds=None, evaluations=20)
    one = unit_cluster(1, memory_bytes=150 + 6 * 15 + 8)
    gdp.place(asked(6), one, costs=roofline, search=search)
    with pytest.raises(gdp.InfeasibleError, match="150 B and caches 105 B, d0 holds 248 B: 7 B"):
        gdp.place(asked(7), one, costs=roofline, search=search)


def test_a_page_shows_the_request_and_what_fills_each_device(tmp_path: Path) -> None:
    graph, path = asked(2), tmp_path / "r.html"
    reporting.report(graph, cut(graph), CLUSTER, path, costs=roofline, objective="throughput")
    text = path.read_text()
    for words in (
        "<b>22.000 s</b><span>to the first token</span>", "<b>85.000 s</b>",
        "<span>in all, 2 requests in flight</span>", "more than 2 are no faster",
        "Bandwidth of d1 limits decode: 45% of an iteration is reading weights and caches.",
        'title="reading weights and caches on d1: 45%"', 'title="cache: 30 B"',
    ):  # fmt: skip
        assert words in text


def test_a_simulated_placement_is_told_as_the_placed_one(tmp_path: Path) -> None:
    save_graph(asked(2), tmp_path / "g.json")
    words = (str(tmp_path / "g.json"), "--cluster", "2xcpu-core", "--objective", "throughput")
    kept = str(tmp_path / "p.json")

    def answer(*command: str) -> dict:
        done = CliRunner().invoke(cli, [*command, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["generation"]

    placed = answer("place", *words, "--evaluations", "20", "-o", kept)
    assert answer("simulate", words[0], kept, *words[1:]) == placed
    lines = CliRunner().invoke(cli, ["simulate", words[0], kept, *words[1:]]).stdout
    assert "2 requests in flight" in lines


def test_a_placement_of_one_phase_needs_ops_to_explain() -> None:
    graph = phase(4, 8.0, 1.0)
    placement = gdp.make_placement(graph, CLUSTER, np.zeros(graph.num_ops, np.int64))
    with pytest.raises(gdp.GdpError, match="give --op GLOB or --scope MODULE"):
        gdp.explain(graph, placement, CLUSTER, costs=roofline)


def test_a_pipeline_has_room_for_a_request_on_each_device_that_computes() -> None:
    """A processor and two GPUs: three requests. Beside offloaded weights, for which accelerate
    leaves the processor no work, two: memory computes nothing."""
    plain = gdp.Cluster.load("cpu+2xt4-pcie4")
    for cluster, count in ((plain, 3), (with_offload(plain, ["cpu", "disk"]), 2)):
        assert requests_in_flight(asked(), cluster, "throughput") == count
        assert requests_in_flight(asked(), cluster, "latency") == 1
        assert requests_in_flight(asked(4), cluster, "latency") == 4
