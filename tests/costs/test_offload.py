"""Offloading by hand: weights cross the link at every use, and the main device computes."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gdp
from gdp import explain
from gdp.api.answer import answer
from gdp.api.ask import require_answerable
from gdp.base import clock
from gdp.base.errors import InfeasibleError
from gdp.bounds.best import all_bounds, best_bound
from gdp.cluster.presets import cluster_preset, device_preset
from gdp.cluster.types import UNLIMITED_BYTES, Cluster, Device, Link, make_cluster
from gdp.costs.base import roofline
from gdp.costs.default import CrossingCosts
from gdp.costs.measured.costs import MeasuredCosts
from gdp.costs.offload import (
    COPY_BYTES_PER_S,
    HOST_POOL,
    Streamed,
    read_bytes,
    resident,
    unpinned_bytes_per_s,
    with_offload,
)
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph, make_graph
from gdp.graph.request import DECODE, PREFILL
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints, Pin, streamed_bytes
from gdp.placement.placement import make_placement
from gdp.problem.problem import make_problem
from gdp.question import solve
from gdp.question.question import Question, evaluating, question_about
from gdp.question.result import Result
from gdp.sim.memory import weights_held
from gdp.sim.score import values
from gdp.targets.hf_accelerate import plan as accelerate
from gdp.targets.hf_accelerate.plan import plan_accelerate
from gdp.targets.modules import whole_modules
from gdp.targets.peers import Peer, beside

MB = 10**6
SEARCH = Search(seconds=None, evaluations=50)


def box(memory_mb: int, second_mb: int | None = None) -> Cluster:
    """A CPU named otherwise, and one or two accelerators of 1 GFLOP/s behind links of 1 GB/s."""
    cpu = Device("epyc", "cpu", {"default": 1e12}, 1e12)
    gpus = [
        Device(f"g{i}", "gpu", {"default": 1e9}, 1e12, mb * MB)
        for i, mb in enumerate(m for m in (memory_mb, second_mb) if m is not None)
    ]
    links = [Link("epyc", gpu.name, 1e9) for gpu in gpus]
    return make_cluster("box", [cpu, *gpus], links, default_bytes_per_s=1e9, default_latency_s=0.0)


def chain(layers: int = 3, weight_mb: int = 10) -> OpGraph:
    """Input, layers of two ops each (one holds the weights), output; 1 MFLOP per op."""
    names, types, scope, weights = ["in"], [INPUT], [""], [0]
    for i in range(layers):
        names += [f"mul{i}", f"act{i}"]
        types += ["MatMul", "Softmax"]
        scope += [f"layers.{i}.linear", f"layers.{i}"]
        weights += [weight_mb * MB, 0]
    n = len(names)
    return make_graph(
        "chain", [*names, "out"], [*types, OUTPUT], [(i, 4) for i in range(n)],
        [(i, i + 1) for i in range(n)], flop=[0, *[1e6] * (n - 1), 0],
        weight_bytes=[*weights, 0], scope=[*scope, ""],
    )  # fmt: skip


def test_an_offload_device_takes_the_way_of_the_weights_and_the_main_devices_time() -> None:
    graph, cluster = chain(), with_offload(box(100, 100), ["cpu", "disk"])
    assert cluster.device_names == ("epyc", "g0", "g1", "cpu offload", "disk offload")
    seconds = Streamed(roofline)(graph, cluster)
    first, relu = graph.op_index["mul0"], graph.op_index["act0"]
    # 1 ms to compute; 10 MB at 1 GB/s take 10 ms more, from disk at 2 GB/s another 5.1 ms.
    assert seconds[first].tolist() == pytest.approx([np.inf, 1e-3, 1e-3, 11e-3, 16.1e-3])
    assert seconds[relu].tolist() == pytest.approx([np.inf, 1e-3, 1e-3, 1e-3, 1e-3])
    assert np.isinf(seconds[0]).tolist() == [False, True, True, True, True]


def test_a_cache_stays_where_it_is_read_and_is_not_streamed() -> None:
    graph, cluster = chain(), with_offload(box(100), ["cpu"])
    held = np.where(graph.weight_bytes > 0, 4 * MB, 0)
    cached = replace(graph, weight_bytes=graph.weight_bytes + held, cache_bytes=held)
    seconds, plain = (Streamed(roofline)(g, cluster) for g in (cached, graph))
    assert seconds[:, -1].tolist() == plain[:, -1].tolist()


@pytest.mark.parametrize(("memory_mb", "resting"), [(51, 2), (48, 3)])
def test_caches_of_offloaded_modules_lie_on_the_main_device(memory_mb: int, resting: int) -> None:
    """Four layers of 10 MB of weights and 4 MB of cache; 14 MB of the main device are for what
    streams. In 37 MB two layers and four caches fit, 36 MB. In 34 MB two layers with their own
    caches would, but not the other two caches: one layer and four caches, 26 MB."""
    plain = chain(4)
    holds = plain.weight_bytes > 0
    graph = replace(
        plain, weight_bytes=plain.weight_bytes + 4 * MB * holds, cache_bytes=4 * MB * holds
    )
    plan = plan_accelerate(
        Question(
            graph,
            box(memory_mb),
            constraints=Constraints(whole=whole_modules(None, graph, "module")),
            costs=roofline,
            search=SEARCH,
        )
    )
    peak = dict(
        zip(plan.question.cluster.device_names, plan.score.peak_bytes.tolist(), strict=True)
    )
    assert peak["g0"] // MB == 10 * (4 - resting) + 16
    assert peak["cpu offload"] // MB == 10 * resting
    assert plan.bound_s <= plan.value_s
    again = gdp.simulate(graph, plan.placement, box(memory_mb), costs=roofline)
    assert again.peak_bytes.tolist() == list(peak.values())
    assert again.feasible


def test_caches_of_offloaded_modules_have_two_places() -> None:
    """Of three modules the first and the last are offloaded, by two ops that hold one cache of
    4 bytes and by one of 8: they leave the host and lie on the main device."""
    graph = make_graph(
        "caches", [*"abcd"], ["Op"] * 4, [], [], weight_bytes=[4, 4, 6, 9],
        cache_bytes=[4, 4, 6, 8], weight_id=[0, 0, 1, 2],
    )  # fmt: skip
    cluster = with_offload(box(100, 100), ["cpu", "disk"])
    problem = make_problem(graph, cluster, Streamed(roofline)(graph, cluster))
    held = weights_held(problem, np.array([3, 3, 2, 4]))
    assert dict(zip(cluster.device_names, held.tolist(), strict=True)) == {
        "epyc": 0, "g0": 12, "g1": 6, "cpu offload": 0, "disk offload": 1,
    }  # fmt: skip


def test_a_layer_gives_way_where_caches_hardly_lack_room() -> None:
    """Four layers of 100 MB, the last with 160 MB of cache; half of 519 MB streams. A layer and the
    cache take half a megabyte more than the rest: no layer stays."""
    plain = chain(4, weight_mb=100)
    held = np.where(np.arange(plain.num_ops) == plain.op_index["mul3"], 160 * MB, 0)
    graph = replace(plain, weight_bytes=plain.weight_bytes + held, cache_bytes=held)
    plan = plan_accelerate(
        Question(
            graph,
            box(519),
            constraints=Constraints(whole=whole_modules(None, graph, "module")),
            costs=roofline,
            search=SEARCH,
        )
    )
    peak = dict(
        zip(plan.question.cluster.device_names, plan.score.peak_bytes.tolist(), strict=True)
    )
    assert (peak["g0"] // MB, peak["cpu offload"] // MB) == (160, 400)


@pytest.mark.parametrize("memory_mb", [48, 51, 90])
@pytest.mark.parametrize("second_mb", [None, 15])
def test_searches_for_one_map_share_the_seconds(
    memory_mb: int, second_mb: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what may not fit is searched for first, on the accelerators alone, the rest of the
    clock is left to the other."""
    given: list[float] = []

    def counted(question: Question) -> Result:
        limit = question.search.budget()
        given.append(limit.remaining_s())
        now.s += given[-1]
        # Of what a search may use, it uses all.
        return solved(replace(question, search=SEARCH))

    solved, now = solve.solve, SimpleNamespace(s=0.0)
    monkeypatch.setattr(solve, "solve", counted)
    monkeypatch.setattr(
        clock, "time", SimpleNamespace(perf_counter=lambda: now.s, process_time=lambda: 0.0)
    )
    plain = chain(4)
    holds = plain.weight_bytes > 0
    graph = replace(
        plain, weight_bytes=plain.weight_bytes + 4 * MB * holds, cache_bytes=4 * MB * holds
    )
    plan = plan_accelerate(
        Question(
            graph,
            box(memory_mb, second_mb),
            constraints=Constraints(whole=whole_modules(None, graph, "module")),
            costs=roofline,
            search=Search(seconds=8.0),
        )
    )
    assert plan.score.feasible
    assert 0.0 < sum(given) <= 8.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", ["single", "round_robin"])
def test_no_answer_is_worse_than_the_plan_of_a_peer_that_fits(seed: int, method: str) -> None:
    """Random plans stand for those of another tool; one that may not be answered is no candidate
    that fits."""
    graph, cluster = chain(3), resident(box(100, 100))
    rng = np.random.default_rng(seed)
    constraints = Constraints(forbid=(Pin("mul0", ("g1",)),)) if seed % 2 else Constraints()
    own = solve.solve(
        Question(
            graph, cluster, method=method, costs=roofline, search=SEARCH, constraints=constraints
        )
    )
    result = own
    for number in range(8):
        device = np.where(graph.is_io, cluster.host, rng.integers(1, 3, graph.num_ops))
        peer = Peer(f"peer {number}", "a peer", lambda d=device: make_placement(graph, cluster, d))
        result = beside(result, peer)
        row = result.candidates[-1]
        barred = bool(seed % 2) and device[graph.op_index["mul0"]] == 2
        assert row.feasible != barred
        again = solve.simulate(Question(graph, cluster, costs=roofline), result.placement)
        assert again.value_s == result.value_s
        assert result.bound_s <= result.value_s
    rows = [row for row in result.candidates if row.feasible]
    assert len(rows) > 2
    assert all(result.value_s <= (row.value_s or np.inf) * (1 + 1e-9) for row in rows)


def test_accelerates_own_map_is_answered_where_it_is_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only devices alone are searched, so all four layers stream; the map streams two of them."""
    graph, cluster = chain(4), box(35)
    map_of = {f"layers.{i}.linear": 0 if i % 2 else "cpu" for i in range(4)}
    monkeypatch.setattr(accelerate, "balanced_map", lambda *_: map_of)
    monkeypatch.setattr(accelerate, "torch_module", lambda _: object())
    how: dict[str, Any] = {"method": "single", "costs": roofline, "search": SEARCH}
    for granularity in ("module", "layer"):
        whole = whole_modules(None, graph, granularity)
        plan = plan_accelerate(
            Question(graph, cluster, constraints=Constraints(whole=whole), **how)
        )
        row = plan.candidates[-1]
        assert row.method == "accelerate, auto"
        assert row.feasible
        assert plan.method == "accelerate, auto"
        assert plan.value_s == row.value_s
        assert plan.placement.device_names == plan.question.cluster.device_names
        score = gdp.simulate(graph, plan.placement, cluster, costs=roofline)
        assert score.value_s == row.value_s
        # Eight ops of 1 ms, and twice 10 MB over a link of 1 GB/s.
        assert row.value_s == pytest.approx(28e-3, rel=1e-4)


def test_what_streams_takes_half_of_the_memory_at_most_and_rests_in_that_of_the_host() -> None:
    base = box(100)
    host = replace(base.devices[0], memory_bytes=40 * MB)
    cluster = with_offload(
        replace(base, devices=(host, base.devices[1])), ["cpu", "disk"], reserved_bytes=90 * MB
    )
    memory = [device.memory_bytes for device in cluster.devices]
    # As much of the one host memory is left to inputs and outputs.
    assert memory == [40 * MB, 50 * MB, 20 * MB, UNLIMITED_BYTES]
    assert [device.memory_pool for device in cluster.devices] == [HOST_POOL, "", HOST_POOL, ""]


def test_cores_of_one_memory_offer_it_once() -> None:
    base = box(100)
    core = replace(base.devices[0], memory_bytes=40 * MB, memory_pool="ram")
    gpu = base.devices[1]
    cores = make_cluster("box", [core, replace(core, name="second"), gpu])
    offload = with_offload(cores, ["cpu"]).devices[-1]
    assert (offload.memory_bytes, offload.memory_pool) == (40 * MB, "ram")


def test_costs_beside_offloaded_weights_are_those_of_the_graph() -> None:
    """A model of PyTorch runs op by op, also where its weights stream."""
    graph, cluster = replace(chain(), source="torch"), cluster_preset("cpu+t4")
    offloading = with_offload(cluster, ["cpu"])
    placement = make_placement(graph, offloading, np.zeros(graph.num_ops, dtype=np.int64))
    for source, eager in (("torch", True), ("onnx", False)):
        own = replace(graph, source=source)
        machine, costs = evaluating(placement, own, cluster, None)
        assert machine.device_names == offloading.device_names
        assert isinstance(costs, Streamed)
        model = costs.base.base if isinstance(costs.base, CrossingCosts) else costs.base
        assert isinstance(model, MeasuredCosts)
        assert model.eager == isinstance(costs.base, CrossingCosts) == eager


def test_the_latency_of_the_link_is_paid_at_every_use() -> None:
    """10 MB take 10 ms, 1 ms to compute and 2 ms to begin; what has no weights does not wait."""
    plain = box(100)
    cluster = with_offload(replace(plain, link_latency_s=2e-3 * (1 - np.eye(2))), ["cpu"])
    seconds = Streamed(roofline)(chain(), cluster)
    assert seconds[chain().op_index["mul0"], 2] == pytest.approx(13e-3)
    assert seconds[chain().op_index["act0"], 2] == pytest.approx(1e-3)


def test_tensors_of_offloaded_ops_are_the_main_devices() -> None:
    cluster = with_offload(box(100, 100), ["cpu"], reserved_bytes=30 * MB)
    main, other, offload = 1, 2, 3
    assert cluster.link_bytes_per_s[main, offload] == np.inf
    assert cluster.link_bytes_per_s[offload, other] == 1e9
    assert cluster.channel[offload, other] == cluster.channel[main, other]
    assert cluster.devices[main].memory_bytes == 70 * MB
    assert resident(cluster).devices[0].supported == frozenset()


def test_a_machine_without_accelerators_offloads_nothing() -> None:
    cpu = make_cluster("cpu", [Device("epyc", "cpu", {"default": 1e9}, 1e9)])
    assert with_offload(cpu, ["cpu"]) is cpu
    found = plan_accelerate(Question(chain(), cpu, method="blocks"))
    assert set(found.placement.device.tolist()) == {0}


def test_what_fits_stays_on_the_accelerator_and_what_does_not_streams() -> None:
    """Three layers of 10 MB: 6 ms where they fit. Of 25 MB one layer's room is kept, so that one
    layer stays, and two stream 10 ms each."""
    graph = chain()
    whole = whole_modules(None, graph, "layer")
    assert whole == ("layers.0", "layers.1", "layers.2")
    fits = plan_accelerate(
        Question(
            graph, box(100), constraints=Constraints(whole=whole), method="auto", search=SEARCH
        )
    )
    assert fits.score.latency_s == pytest.approx(6e-3, rel=1e-3)
    assert "cpu offload" not in fits.question.cluster.device_names
    tight = plan_accelerate(
        Question(graph, box(25), constraints=Constraints(whole=whole), method="auto", search=SEARCH)
    )
    assert tight.score.latency_s == pytest.approx(26e-3, rel=1e-3)
    devices = tight.placement.device
    assert sorted(np.bincount(devices, minlength=3).tolist()) == [2, 2, 4]
    asked = question_about(tight.placement, graph, box(25), costs=roofline)
    for again in (solve.simulate(*asked), solve.evaluate(*asked)):
        assert again.value_s == pytest.approx(tight.value_s, rel=1e-9), (
            "the plain cluster is all that is needed"
        )
    moved = explain(graph, tight.placement, box(25), op="mul0", costs=roofline)
    assert [row["device"] for row in moved["devices"]] == ["epyc", "g0", "cpu offload"]
    with pytest.raises(InfeasibleError):
        plan_accelerate(
            Question(
                graph,
                box(25),
                constraints=Constraints(whole=whole),
                offload="none",
                method="auto",
                search=SEARCH,
            )
        )


def test_the_bound_counts_what_streams_beside_the_critical_path() -> None:
    """200 layers of 10 MB, of which 1,000 MB fit: 100 layers stream 10 ms each, beside 0.4 s of ops
    on the critical path, which holds no weights."""
    names = [f"{kind}{i}" for i in range(200) for kind in ("main", "side", "join")]
    uses = [(3 * i + k, 3 * i + 2) for i in range(200) for k in (0, 1)]
    uses += [(3 * i + 2, 3 * i + 3 + k) for i in range(199) for k in (0, 1)]
    graph = make_graph(
        "wide", names, ["MatMul"] * 600, [(i, 4) for i in range(600)], uses,
        flop=[1e6, 1e3, 1e6] * 200, weight_bytes=[0, 10 * MB, 0] * 200,
    )  # fmt: skip
    best_s = {}
    for memory_mb in (1000, 3000):
        cluster = with_offload(box(memory_mb), ["cpu"])
        seconds = Streamed(roofline)(graph, cluster)
        best_s[memory_mb] = best_bound(make_problem(graph, cluster, seconds), 0.04)
    assert best_s[1000].value_s == pytest.approx(1.0, rel=1e-3)
    assert "953.67 MiB of weights or more stream" in best_s[1000].argument
    assert best_s[3000].value_s == pytest.approx(0.4, rel=1e-3)


def test_the_bound_counts_caches_on_the_main_device() -> None:
    """Ten layers of 10 MB and 4 MB of cache, 100 MB: beside all caches six layers stay, and four
    stream 10 ms each. The same caches on the host's side would leave room for seven and a bit."""
    plain = chain(10)
    held = 4 * MB * (plain.weight_bytes > 0)
    graph = replace(plain, weight_bytes=plain.weight_bytes + held, cache_bytes=held)
    cluster = with_offload(box(100), ["cpu"])
    problem = make_problem(graph, cluster, Streamed(roofline)(graph, cluster))
    bound = best_bound(problem, 0.5)
    assert bound.value_s == pytest.approx(60e-3, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory_mb", "host_mb"),
    [((51,), None), ((48,), None), ((36, 25), None), ((51,), 36), ((41, 15), 36), ((48,), 36)],
)
def test_one_search_finds_the_best_of_all_maps(
    memory_mb: tuple[int, ...], host_mb: int | None
) -> None:
    """Four layers of 10 MB and 4 MB of cache: every map of them, as the simulator sees it. The
    host's 36 MB hold two layers beside 14 MB that stream, but not their caches, too, nor three."""
    plain, cluster = chain(4), box(*memory_mb)
    held = 4 * MB * (plain.weight_bytes > 0)
    graph = replace(plain, weight_bytes=plain.weight_bytes + held, cache_bytes=held)
    if host_mb is not None:
        host = replace(cluster.devices[0], memory_bytes=host_mb * MB)
        cluster = replace(cluster, devices=(host, *cluster.devices[1:]))
    whole = Constraints(whole=whole_modules(None, graph, "layer"))
    question = Question(graph, cluster, constraints=whole, costs=roofline, search=SEARCH)
    offloading = with_offload(cluster, ["cpu"], streamed_bytes(graph, whole))
    asked, best_s = replace(question, cluster=offloading, costs=Streamed(roofline)), np.inf
    for layers in itertools.product(range(1, offloading.num_devices), repeat=4):
        device = np.zeros(graph.num_ops, dtype=np.int64)
        device[1:-1] = np.repeat(layers, 2)
        score = solve.simulate(asked, make_placement(graph, offloading, device))
        best_s = min(best_s, score.value_s if score.feasible else np.inf)
    assert np.isinf(best_s) == ((memory_mb, host_mb) == ((48,), 36))
    if np.isinf(best_s):
        with pytest.raises(InfeasibleError):
            plan_accelerate(question)
        return
    plan = plan_accelerate(question)
    assert plan.score.feasible
    assert plan.value_s == pytest.approx(best_s, rel=1e-9)
    assert plan.bound_s <= best_s * (1 + 1e-9)


def test_the_bound_of_a_tiny_machine_stays_below_its_best_placement() -> None:
    graph, cluster = chain(3), with_offload(box(15), ["cpu", "disk"])
    problem = make_problem(graph, cluster, Streamed(roofline)(graph, cluster))
    ways = np.array(list(itertools.product((1, 2, 3), repeat=6)))
    devices = np.zeros((len(ways), graph.num_ops), dtype=np.int64)
    devices[:, 1:-1] = ways
    latency_s, overflow = values(problem, devices)
    best_s = latency_s[overflow == 0].min()
    assert best_s == pytest.approx(26e-3)
    bounds = [bound.value_s for bound in all_bounds(problem, 2.0)]
    assert max(bounds) <= best_s * (1 + 1e-9)
    assert max(bounds) >= 20e-3


def test_a_step_streams_the_weights_of_its_module_for_every_token() -> None:
    """The prompt's ops hold 10 and 6 MB of two modules; the step of the first reads 10 MB again,
    that of the second, whose tied weight two ops of the prompt hold, 6 MB and its own 2 MB."""
    graph = make_graph(
        "request", ["a", "b", "c", "step/a", "step/b", "step/b2"], ["MatMul"] * 6,
        [(i, 4) for i in range(6)], [(i, i + 1) for i in range(5)],
        weight_bytes=[10 * MB, 6 * MB, 6 * MB, 0, 2 * MB, 0], weight_id=[0, 1, 1, 3, 4, 5],
        memory_traffic_bytes=[0, 0, 0, 1, 9, 5], colocate=[0, 1, 1, 0, 1, 1],
        repeats=[1, 1, 1, 8, 8, 8], phase=[PREFILL] * 3 + [DECODE] * 3,
    )  # fmt: skip
    assert (read_bytes(graph) / MB).tolist() == [10, 6, 6, 10, 8, 0]
    assert read_bytes(chain()).tolist() == chain().weight_bytes.tolist()


def test_room_is_kept_for_the_largest_module_that_streams() -> None:
    graph = chain(2)
    assert streamed_bytes(graph, Constraints(whole=("layers.0", "layers.1"))) == 10 * MB + 8
    assert streamed_bytes(graph, Constraints(whole=("layers",))) == 20 * MB + 8
    # Tensors that are computed in two parts take half of that.
    parts = replace(graph, chunks=np.full(graph.num_ops, 2))
    assert streamed_bytes(parts, Constraints(whole=("layers",))) == 20 * MB + 4


def test_a_tied_weight_streams_once_with_its_module() -> None:
    """Two layers of one module of 10 MB each, which are one weight."""
    graph = chain(3)
    first, second = graph.op_index["mul0"], graph.op_index["mul1"]
    tied = graph.weight_id.copy()
    tied[second] = tied[first]
    graph = replace(graph, weight_id=tied)
    assert streamed_bytes(graph, Constraints(whole=("layers",))) == 20 * MB + 8
    assert streamed_bytes(graph, Constraints(whole=("layers.0", "layers.1"))) == 10 * MB + 8


def test_modules_stay_whole_by_granularity() -> None:
    graph, cluster = chain(4), box(100, 100)
    assert whole_modules(None, graph, "op") == ()
    assert whole_modules(None, graph, "module") == tuple(f"layers.{i}.linear" for i in range(4))
    for seed in range(3):
        placed = answer(
            Question(
                graph,
                cluster,
                target=None,
                granularity="layer",
                objective="throughput",
                method="auto",
                search=Search(seed, None, 50),
            )
        )
        device = placed.placement.device[1:-1].reshape(4, 2)
        assert (device[:, 0] == device[:, 1]).all()
    with pytest.raises(ValueError, match="accelerate goes by whole modules"):
        require_answerable(Question(graph, cluster, target="accelerate", granularity="op"))
    with pytest.raises(ValueError, match="no granularity 'block'"):
        whole_modules(None, graph, "block")


def test_parameters_of_the_model_itself_stay_on_the_main_device() -> None:
    """10 MB before two parts of 30 MB and 10 MB behind them: the parts give way, though either of
    the two would be cheaper to stream. What the second parameter reads is not on another GPU."""
    graph = make_graph(
        "rooted", [*"xa", "first", "second", "view", *"by"],
        [INPUT, *["MatMul"] * 3, "Reshape", "MatMul", OUTPUT],
        [(i, 8) for i in range(6)], [(i, i + 1) for i in range(6)],
        flop=[0, 1e6, 1e6, 1e6, 0, 1e6, 0],
        weight_bytes=[0, 10 * MB, 30 * MB, 30 * MB, 0, 10 * MB, 0],
        scope=["", "", "first", "second", "", "", ""],
    )  # fmt: skip
    how: dict[str, Any] = {"method": "auto", "search": SEARCH,
                           "constraints": Constraints(whole=("first", "second"))}  # fmt: skip

    def names(*memory_mb: int) -> list[str]:
        plan = plan_accelerate(Question(graph, box(*memory_mb), **how))
        return [plan.question.cluster.device_names[d] for d in plan.placement.device[1:6]]

    assert set(names(90)) == {"g0"}
    assert names(60, 35) == ["g0", "g1", "g0", "g0", "g0"]
    offloaded = names(45, 35)
    assert offloaded[:3] == ["g0", "g1", "cpu offload"]
    assert set(offloaded[3:]) <= {"g0", "cpu offload"}
    assert offloaded[4] == "g0"
    with pytest.raises(InfeasibleError, match=r"parameters of the model itself, .* take 19.07 MiB"):
        plan_accelerate(Question(graph, box(30), **how))


@pytest.mark.parametrize(
    ("copied", "link", "rate"),
    [(7e9, 31.5e9, 7e9), (0.0, 63e9, COPY_BYTES_PER_S), (20e9, 8e9, 8e9)],
)
def test_weights_leave_memory_no_faster_than_a_core_copies_it(
    copied: float, link: float, rate: float
) -> None:
    cpu = replace(device_preset("cpu"), copy_bytes_per_s=copied)
    box = make_cluster("box", [cpu, device_preset("h100")], default_bytes_per_s=link)
    assert unpinned_bytes_per_s(box, 0, 1) == rate
