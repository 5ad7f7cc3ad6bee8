"""Layouts of vLLM: the best of all that can be enumerated, what is exported, and what is kept."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gdp
from gdp.api.fit import FitRow, _with_answer
from gdp.api.generation import generation_answer
from gdp.base.errors import ArgumentError, InfeasibleError, PlacementError
from gdp.cli.fit import fit_text
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import OpGraph
from gdp.methods.chain import layer_row
from gdp.placement.constraints import Constraints, Pin
from gdp.placement.placement import Placement, Split, load_placement, make_placement, save_placement
from gdp.question import solve
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.targets.table import PLANNERS
from gdp.targets.vllm.export import VllmOptions, export_vllm, vllm_options
from gdp.targets.vllm.groups import grouped
from tests.decoders import Sizes, decoder

LARGE = Sizes(layers=2, hidden=512, heads=8, keys=4, head=64, inner=2048, vocabulary=1024)


def boxes(*kinds: str, size: int = 1 << 30, link: float = 1e12, latency_s: float = 1e-7) -> Cluster:
    """A processor and GPUs, of which "slow" ones have half of the speed."""
    gpus = [
        Device(f"g{i}", kind, {"default": 1e14 / (1 + (kind == "slow"))},
               1e12 / (1 + (kind == "slow")), size, reserve_bytes=size // 9)
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    cpu = Device("cpu", "cpu", {"default": 1e11}, 1e10, 1 << 40)
    return make_cluster("box", [cpu, *gpus], default_bytes_per_s=link, default_latency_s=latency_s)


def planned(graph: OpGraph, cluster: Cluster, objective: str = "latency") -> Result:
    return PLANNERS["vllm"].plan(
        Question(graph, cluster, objective=objective, costs=roofline, target="vllm")
    )


def test_alike_gpus_with_fast_links_divide_the_layers() -> None:
    graph = decoder(LARGE)
    alone, pair = planned(graph, boxes("a")), planned(graph, boxes("a", "a"))
    assert alone.placement.splits == ()
    assert pair.placement.splits == (Split((1, 2)),)
    assert alone.value_s / 2 < pair.value_s < 0.7 * alone.value_s
    held = pair.score.peak_bytes
    assert held[1] == held[2] < 0.6 * alone.score.peak_bytes[1]
    assert pair.bound_s <= pair.value_s
    assert "tensor 2: 1." in pair.notes[-1]
    assert "collectives take" in pair.notes[-1]


def test_slow_links_leave_the_layers_whole() -> None:
    result = planned(decoder(LARGE), boxes("a", "a", link=1e8, latency_s=1e-3))
    assert result.placement.splits == ()
    assert "no layout that divides layers" in result.notes[-1]


def every_layout(question: Question) -> dict[tuple[object, ...], float]:
    """Seconds of every split into equal groups and every cut between them, that fit."""
    graph, cluster = question.graph, question.cluster
    row = layer_row(graph)
    layer = row.layer.clip(0, row.num_layers - 1)
    gpus = range(1, cluster.num_devices)
    found = {}
    for size, experts in itertools.product(range(1, len(gpus) + 1), (False, True)):
        groups = grouped(cluster, list(gpus), size)
        splits = tuple(Split(group, experts) for group in groups if size > 1)
        for count in range(1, len(groups) + 1):
            for order in itertools.permutations([group[0] for group in groups], count):
                for cuts in itertools.combinations(range(1, row.num_layers), count - 1):
                    device = np.array(order)[np.searchsorted(cuts, layer, side="right")]
                    device = np.where(graph.is_io, cluster.host, device)
                    used = tuple(s for s in splits if s.devices[0] in order)
                    placement = make_placement(graph, cluster, device, splits=used)
                    try:
                        score = solve.simulate(question, placement)
                    except gdp.ModelError:
                        continue
                    if score.feasible:
                        found[size, experts, order, cuts] = score.value_s
    return found


@pytest.mark.parametrize(
    ("sizes", "kinds", "size"),
    [(LARGE, "a a", 1 << 30), (replace(LARGE, experts=8), "a slow", 1 << 30),
     (replace(LARGE, layers=3), "a a slow slow", 9_000_000)],
)  # fmt: skip
def test_no_layout_is_better(sizes: Sizes, kinds: str, size: int) -> None:
    graph = decoder(sizes)
    result = planned(graph, boxes(*kinds.split(), size=size))
    best = min(every_layout(result.question).values())
    assert result.value_s == pytest.approx(best, rel=2e-3)
    assert result.bound_s <= best


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_more_memory_or_another_gpu_is_never_worse(objective: str) -> None:
    graph = decoder(LARGE)
    value_s = np.inf
    for kinds, size in (("a", 30_000_000), ("a a", 30_000_000), ("a a", 1 << 30),
                        ("a a slow", 1 << 30), ("a a slow a", 1 << 30)):  # fmt: skip
        try:
            found = planned(graph, boxes(*kinds.split(), size=size), objective)
        except InfeasibleError:
            assert value_s == np.inf
            continue
        assert found.value_s <= value_s * (1 + 2e-3)
        value_s = found.value_s
    assert np.isfinite(value_s)


def test_copies_take_requests_in_turn() -> None:
    result = planned(decoder(LARGE), boxes(*"aaaa", link=1e8, latency_s=1e-4), "throughput")
    assert result.placement.teams == ((1, 2, 3, 4),)
    options = exported(result)
    assert options.data == 4
    assert "--data-parallel-size" in options.arguments()


@pytest.mark.parametrize(("experts", "servers"), [(0, 1), (8, 2)])
def test_so_many_copies_as_are_asked_for_and_servers_where_they_would_share_experts(
    experts: int, servers: int
) -> None:
    """In vLLM copies of a mixture in one server divide its experts among all of their GPUs."""
    graph, cluster = decoder(replace(LARGE, experts=experts)), boxes(*"aaaa")
    question = Question(graph, cluster, costs=roofline, target="vllm", copies=2)
    result = PLANNERS["vllm"].plan(question)
    assert result.placement.teams == ((1, 3),)
    assert [split.devices for split in result.placement.splits] == [(1, 2), (3, 4)]
    pair = planned(graph, boxes(*"aa"))
    assert result.value_s == pytest.approx(pair.value_s)
    assert result.score.peak_bytes[[1, 3]].tolist() == [pair.score.peak_bytes[1]] * 2
    assert result.notes[-1].startswith("tensor 2 x data 2")
    options = exported(result)
    each = options.servers
    assert (options.data, len(each)) == (2, servers)
    gpus = [own.environment()["CUDA_VISIBLE_DEVICES"] for own in each]
    assert gpus == (["0,1,2,3"] if servers == 1 else ["0,1", "2,3"])
    flag = "--data-parallel-size"
    assert [flag in own.arguments() for own in each] == [servers == 1] * servers
    assert ("servers" in options.why(), flag in options.why()) == (servers == 2, servers == 1)
    ports = [own.arguments()[-2:] for own in each if own.port]
    assert ports == [["--port", "8000"], ["--port", "8001"]] * (servers == 2)


def test_gpus_that_no_op_may_use_hold_no_copy() -> None:
    rules = Constraints(forbid=(Pin("*", ("g0", "g2")),))
    question = Question(
        decoder(LARGE), boxes(*"aaaa"), costs=roofline, target="vllm", copies=2, constraints=rules
    )
    result = PLANNERS["vllm"].plan(question)
    assert result.placement.teams == ((2, 4),)
    assert result.score.peak_bytes[[1, 3]].tolist() == [0, 0]


def test_more_copies_than_gpus_do_not_fit() -> None:
    question = Question(decoder(LARGE), boxes("a", "a"), costs=roofline, target="vllm", copies=3)
    with pytest.raises(InfeasibleError):
        PLANNERS["vllm"].plan(question)


def test_a_model_that_does_not_fit_says_what_it_takes_and_what_there_is() -> None:
    graph = decoder(LARGE)
    held = int(graph.weight_bytes[graph.weight_holders()].sum())
    devices = tuple(
        d if d.is_cpu else replace(d, memory_bytes=held // 4) for d in boxes("a", "a").devices
    )
    question = Question(
        graph, replace(boxes("a", "a"), devices=devices), costs=roofline, target="vllm"
    )
    with pytest.raises(InfeasibleError, match=r"caches take .*iB, and vLLM has .*iB on all GPUs"):
        PLANNERS["vllm"].plan(question)


def test_servers_have_a_line_each(tmp_path: Path) -> None:
    options = VllmOptions((4,), (0, 1), 0.9, 64, data=2, mixture=True)
    export_vllm(options, tmp_path / "serve")
    lines = (tmp_path / "serve/environment.txt").read_text().splitlines()
    assert [line.rpartition("=")[2] for line in lines] == ["0", "1"]
    arguments = (tmp_path / "serve/arguments.txt").read_text().splitlines()
    assert [line.split()[-1] for line in arguments] == ["8000", "8001"]
    told = json.loads((tmp_path / "serve/vllm.json").read_text())
    assert [own["environment"]["CUDA_VISIBLE_DEVICES"] for own in told["servers"]] == ["0", "1"]


def exported(result: Result):
    return vllm_options(
        result.question.graph, result.placement, result.question.cluster, result.score.peak_bytes
    )


def two_by_two(graph: OpGraph, cluster: Cluster, experts: bool = False) -> Placement:
    """A layer on each of two groups of two, the slower one first."""
    row = layer_row(graph)
    at = np.where(row.layer.clip(0, 1) == 0, 3, 1)
    splits = (Split((1, 2), experts), Split((3, 4), experts))
    return make_placement(graph, cluster, np.where(graph.is_io, cluster.host, at), splits=splits)


def test_options_are_those_of_the_layout() -> None:
    graph, cluster = decoder(replace(LARGE, experts=8)), boxes("a", "a", "slow", "slow")
    placement = two_by_two(graph, cluster, experts=True)
    peaks = solve.simulate(Question(graph, cluster, costs=roofline), placement).peak_bytes
    options = vllm_options(graph, placement, cluster, peaks)
    assert options.environment()["CUDA_VISIBLE_DEVICES"] == "2,3,0,1"
    assert options.environment()["VLLM_PP_LAYER_PARTITION"] == "1,1"
    arguments = options.arguments()
    assert arguments[:4] == ["--pipeline-parallel-size", "2", "--tensor-parallel-size", "2"]
    assert "--enable-expert-parallel" in arguments
    assert "--data-parallel-size" not in arguments
    assert {"--tensor-parallel-size", "--enable-expert-parallel"} <= set(options.why())


def test_stages_that_are_divided_differently_are_refused() -> None:
    graph, cluster = decoder(LARGE), boxes("a", "a", "slow", "slow")
    placement = replace(two_by_two(graph, cluster), splits=(Split((1, 2)),))
    with pytest.raises(PlacementError, match="all its stages are divided and copied alike"):
        vllm_options(graph, placement, cluster, np.zeros(5, np.int64))


def test_a_stage_takes_as_long_as_its_slowest_member() -> None:
    graph = decoder(LARGE)
    fast, mixed, slow = (boxes(*kinds.split()) for kinds in ("a a", "a slow", "slow slow"))
    at = np.where(graph.is_io, 0, 1)
    seconds = [
        solve.simulate(
            Question(graph, cluster, costs=roofline),
            make_placement(graph, cluster, at, splits=(Split((1, 2)),)),
        ).latency_s
        for cluster in (fast, mixed, slow)
    ]
    assert seconds[0] < seconds[1] == pytest.approx(seconds[2], rel=1e-12)


def test_the_file_keeps_the_splits(tmp_path: Path) -> None:
    graph, cluster = decoder(LARGE), boxes("a", "a", "slow", "slow")
    placement, path = two_by_two(graph, cluster, experts=True), tmp_path / "p.json"
    save_placement(placement, path)
    read = load_placement(path)
    assert read.splits == placement.splits == (Split((1, 2), True), Split((3, 4), True))
    assert read.ops_on["g0"] == read.ops_on["g1"] > 0
    question = Question(graph, cluster, costs=roofline)
    assert solve.simulate(question, read).latency_s == solve.simulate(question, placement).latency_s


@pytest.mark.parametrize(
    ("splits", "said"),
    [([[1]], "must be two devices or more"), ([[2, 1]], "ascending"),
     ([[1, 9]], "outside 0..4"), ([[1, 2], [2, 3]], "device 2 is in two splits")],
)  # fmt: skip
def test_splits_that_contradict_themselves_are_refused(
    tmp_path: Path, splits: list[list[int]], said: str
) -> None:
    graph, cluster = decoder(LARGE), boxes(*"aaaa")
    bad = tuple(Split(tuple(devices)) for devices in splits)
    placement, path = replace(two_by_two(graph, cluster), splits=bad), tmp_path / "p.json"
    save_placement(placement, path)
    with pytest.raises(PlacementError, match=said):
        load_placement(path)
    with pytest.raises(PlacementError, match=said):
        solve.simulate(Question(graph, cluster, costs=roofline), placement)


def test_ops_on_another_member_than_the_first_are_refused() -> None:
    graph, cluster = decoder(LARGE), boxes(*"aaaa")
    placement = replace(two_by_two(graph, cluster), splits=(Split((2, 3)), Split((1, 4))))
    with pytest.raises(PlacementError, match="on g2, which shares the ops of a split"):
        solve.simulate(Question(graph, cluster, costs=roofline), placement)


def test_what_others_cannot_do_with_a_split_they_say_in_a_line(tmp_path: Path) -> None:
    graph = decoder(LARGE)
    result = gdp.place(graph, boxes("a", "a"), target="vllm", costs=roofline)
    assert result.placement.splits
    assert result.to_json()["splits"] == [
        {"devices": ["g0", "g1"], "experts": False, "shares": [1, 1]}
    ]
    with pytest.raises(ArgumentError, match="none can move alone"):
        gdp.explain(graph, result.placement, costs=roofline, op="*")
    with pytest.raises(PlacementError, match="compute each of its ops together"):
        gdp.export(result.placement, graph, "accelerate", tmp_path / "out")
    whole = gdp.explain(graph, result.placement, costs=roofline)["generation"]
    assert any(part["cause"] == "collectives" for part in whole["shares"]["decode"])
    gdp.report(graph, result.placement, None, tmp_path / "r.html", costs=roofline)
    assert "computes each op together with g1" in (tmp_path / "r.html").read_text()


def test_gpus_that_are_forbidden_are_no_members() -> None:
    graph = decoder(LARGE)
    barred = gdp.Constraints(forbid=(Pin("*mlp*", ("g1",)),))
    result = gdp.place(graph, boxes("a", "a", "a"), target="vllm", costs=roofline,
                       constraints=barred)  # fmt: skip
    assert result.placement.splits == (Split((1, 3)),)
    one = gdp.Constraints(replicas=False)
    result = gdp.place(graph, boxes(*"aa", link=1e8, latency_s=1e-4), target="vllm",
                       objective="throughput", costs=roofline, constraints=one)  # fmt: skip
    assert result.placement.teams == ()


def test_no_bound_of_whole_ops_is_claimed_of_a_split() -> None:
    graph, cluster = decoder(LARGE), boxes(*"aaaa")
    result = solve.evaluate(Question(graph, cluster, costs=roofline), two_by_two(graph, cluster))
    assert (result.bound_s, result.bound_by) == (0.0, "")
    assert not result.proven_optimal


def test_memory_and_context_are_those_of_a_member() -> None:
    graph = decoder(LARGE)
    result = planned(graph, boxes("a", "a"))
    answer = generation_answer(result.question, result.placement, result.score)
    assert answer is not None
    first, second = answer.memory[1:]
    assert first.weights_bytes == second.weights_bytes
    assert first.cache_bytes == second.cache_bytes == int(graph.cache_bytes.sum()) // 2
    assert answer.stages == 1
    with_generation = replace(result, generation=answer)
    row = _with_answer(FitRow("box", 8, 4, 1, fits=False), result.question, with_generation)
    assert (row.layout, row.fits) == ("tensor 2", True)
    assert "tensor 2" in fit_text([row])
