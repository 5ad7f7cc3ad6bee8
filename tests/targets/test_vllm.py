"""vLLM's environment and arguments: what they say is the placement, and the plan is the best."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gdp
from gdp.base.errors import PlacementError
from gdp.base.units import format_seconds
from gdp.cli.main import cli
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.base import roofline
from gdp.graph.generation import generation_graph
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph, make_graph
from gdp.graph.request import Request
from gdp.methods.chain import layer_row
from gdp.placement.placement import Placement, make_placement
from gdp.question import solve
from gdp.question.question import Question
from gdp.targets.table import PLANNERS
from gdp.targets.vllm.export import vllm_options

LAYERS, WEIGHTS, TOKEN = 4, 100_000, 80
"""Layers of a decoder, bytes of the weights of each, bytes that each caches of a token."""
RATES = {"flop_per_s": {"default": 1e12}, "bytes_per_s": 1e10}


def phase(tokens: int, cached: int, tied: bool) -> OpGraph:
    """Embedding, layers, norm, head; `cached` tokens are held by the layers."""
    scopes = ["", "m.embed", *(f"m.layers.{i}.mlp" for i in range(LAYERS)), "m.norm", "head", ""]
    names = ["ids", *(s or "y" for s in scopes[1:])]
    n = len(scopes)
    weights = [0, 40_000, *[WEIGHTS + TOKEN * cached] * LAYERS, 10, 40_000, 0]
    ids = list(range(n))
    ids[-2] = 1 if tied else ids[-2]
    return make_graph(
        "lm", names, [INPUT, *["MatMul"] * (n - 2), OUTPUT],
        [(i, 4 * tokens) for i in range(n - 1)], [(i, i + 1) for i in range(n - 1)],
        flop=[0, *[2e6 * tokens] * (n - 2), 0],
        memory_traffic_bytes=[0, *[1e5] * (n - 2), 0], weight_bytes=weights, weight_id=ids,
        cache_bytes=[0, 0, *[TOKEN * cached] * LAYERS, 0, 0, 0], scope=scopes,
    )  # fmt: skip


def decoder(new: int = 4, tied: bool = False) -> OpGraph:
    """A request of eight tokens."""
    mean = 8 + max(1, new // 2)
    return generation_graph(
        "lm", phase(8, 0, tied), phase(1, mean, tied), Request(8, new), (8 + new) / mean
    )


def cards(*bytes_: int) -> Cluster:
    """A processor, and GPUs of these usable sizes; the second is twice as fast as the others."""
    gpus = [
        Device(f"g{i}", f"k{i == 1}", {"default": 1e12 * (1 + (i == 1))}, 1e10 * (1 + (i == 1)),
               size, reserve_bytes=size // 9)
        for i, size in enumerate(bytes_)
    ]  # fmt: skip
    cpu = Device("cpu", "cpu", {"default": 1e11}, 1e9, 1 << 30)
    return make_cluster("cards", [cpu, *gpus], default_latency_s=1e-6)


def placed(graph: OpGraph, cluster: Cluster, layers: list[int]) -> Placement:
    """Layers on these devices, what comes before and behind with the first and the last."""
    row = layer_row(graph)
    at = np.array([layers[0], *layers, layers[-1]])[row.layer + 1]
    return make_placement(graph, cluster, np.where(graph.is_io, cluster.host, at))


@pytest.mark.parametrize("new", [1, 4])
def test_layers_are_numbered_in_both_phases(new: int) -> None:
    graph = decoder(new)
    row = layer_row(graph)
    at = dict(zip(graph.op_names, row.layer.tolist(), strict=True))
    for lead in ("", "step/"):
        assert [at[f"{lead}m.layers.{i}.mlp"] for i in range(LAYERS)] == [0, 1, 2, 3]
        assert at[f"{lead}head"] == at[f"{lead}m.norm"] == LAYERS
        assert at[f"{lead}m.embed"] == -1
    held = {graph.scope[op] for op in row.fixed}
    assert held == {"m.embed", "head", *(f"m.layers.{i}.mlp" for i in range(LAYERS))}


def test_environment_and_arguments_are_the_placement() -> None:
    """g1 holds the first three layers, g0 the last; of each 90% is usable. On g1 the embedding and
    three layers leave 1,000,000 - 340,000 bytes, and a token caches 240 there: 2750 tokens. On g0
    the last layer and the head leave 360,000 - 140,010 for 80 a token: 2749."""
    graph, cluster = decoder(), cards(360_000, 1_000_000)
    found = placed(graph, cluster, [2, 2, 2, 1])
    caches = np.array([0, 80, 240]) * 12
    peak = np.array([0, 140_010, 340_000]) + caches
    options = vllm_options(graph, found, cluster, peak)
    assert options.environment() == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,0",
        "VLLM_PP_LAYER_PARTITION": "3,1",
    }  # fmt: skip
    rooms = [0.9 * cluster.devices[d].total_bytes - peak[d] + caches[d] for d in (1, 2)]
    longest = int(min(rooms[0] / 80, rooms[1] / 240))
    assert 2700 < longest < 2800
    assert options.arguments() == [
        "--pipeline-parallel-size", "2", "--gpu-memory-utilization", "0.90", "--max-model-len",
        str(longest),
    ]  # fmt: skip
    assert vllm_options(graph, found, cluster, peak, 2048).max_model_len == 2048
    alone = vllm_options(graph, placed(graph, cluster, [2] * 4), cluster, peak)
    assert "VLLM_PP_LAYER_PARTITION" not in alone.environment()
    assert set(options.why()) == {
        *options.environment(), *options.arguments()[::2], "status",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "flags"),
    [("fp8", ["--quantization", "fp8"]), ("nf4", ["--quantization", "bitsandbytes"]),
     ("nf4-double", ["--quantization", "bitsandbytes"]), ("gptq", []), ("int8", []), ("", [])],
)  # fmt: skip
def test_weights_are_quantised_as_planned(scheme: str, flags: list[str]) -> None:
    """By a flag where vLLM quantises while it loads, else a sentence asks for such a checkpoint."""
    graph, cluster = decoder(), cards(360_000, 1_000_000)
    found = placed(graph, cluster, [2, 2, 2, 1])
    options = replace(vllm_options(graph, found, cluster, np.zeros(3, np.int64)), quantize=scheme)
    assert options.arguments()[6:] == flags
    assert ("--quantization" in options.why()) == bool(flags)
    assert ("model" in options.why()) == bool(scheme and not flags)


def test_answers_on_several_cards_name_what_tensor_parallelism_is_bounded_by() -> None:
    """Bytes of one step over the bandwidths of both cards; bounds are of placements of whole ops,
    or modules."""
    graph, cluster = decoder(), cards(360_000, 1_000_000)
    step = graph.repeats > 1
    least_s = graph.memory_traffic_bytes[step].sum() / (2 * cluster.devices[1].bytes_per_s)
    once = gdp.Search(seconds=None, evaluations=5)
    result = gdp.place(graph, cluster, costs=roofline, search=once)
    (note,) = [n for n in result.notes if n.startswith("plans are of whole ops: ")]
    assert f"2 GPUs take at least {format_seconds(least_s)} for a step of decoding" in note
    assert result.bound_over == "whole ops"
    served = gdp.place(graph, cluster, target="vllm", costs=roofline, search=once)
    assert served.bound_over == "ops, divided or whole,"
    assert not any("whole ops" in note for note in served.notes)
    assert any("layers stay whole on one GPU each: gdp does not know" in n for n in served.notes)
    modules = gdp.place(graph, cluster, granularity="module", costs=roofline, search=once)
    assert modules.bound_over == modules.to_json()["bound_over"] == "whole modules"
    alone = gdp.place(graph, "cpu", costs=roofline, search=once)
    assert not any("whole ops" in note for note in alone.notes)


def test_the_share_is_that_of_the_fullest_reserve_and_never_rounded_up() -> None:
    """g0 keeps 96.6% and g1 90.9% of its memory: vLLM gets 90% for both."""
    graph, cluster = decoder(), cards(10**6, 10**6)
    devices = tuple(
        replace(device, reserve_bytes=reserve)
        for device, reserve in zip(cluster.devices, (0, 35_000, 100_000), strict=True)
    )
    cluster = replace(cluster, devices=devices)
    found = placed(graph, cluster, [1, 1, 2, 2])
    options = vllm_options(graph, found, cluster, np.array([0, 300_000, 300_000]))
    assert options.gpu_memory_utilization == 0.90
    assert "0.90" in options.arguments()


def test_the_longest_context_is_that_of_one_sequence_of_a_batch() -> None:
    """Four sequences side by side cache a token four times over, and each may be as long."""
    cluster, lengths = cards(10**6, 10**6), []
    for batch in (1, 4):
        both = (phase(8, 0, tied=False), phase(1, 10 * batch, tied=False))
        graph = generation_graph("lm", *both, Request(8, 4, batch), 1.2)
        caches = np.array([0, 2, 2]) * TOKEN * 12 * batch
        peak = np.array([0, 300_000, 300_000]) + caches
        options = vllm_options(graph, placed(graph, cluster, [1, 1, 2, 2]), cluster, peak)
        lengths.append(options.max_model_len)
    assert lengths[0] == lengths[1] > 2000


def test_the_last_rank_holds_a_copy_of_a_tied_embedding() -> None:
    cluster = cards(360_000, 1_000_000)
    peak = np.array([0, 150_000, 340_000])
    lengths = []
    for tied in (False, True):
        graph = decoder(tied=tied)
        device = placed(graph, cluster, [2, 2, 2, 1]).device.copy()
        if tied:
            device[[graph.op_index["head"], graph.op_index["step/head"]]] = 2
        options = vllm_options(graph, make_placement(graph, cluster, device), cluster, peak)
        lengths.append(options.max_model_len)
    assert lengths[0] - lengths[1] == 40_000 // 80


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([1, 2, 1, 1], "'g0' has two stretches of layers, and a rank has one"),
        ([0, 1, 1, 1], "lies on 'cpu', and it computes on GPUs"),
    ],
)
def test_plans_that_it_cannot_follow_are_refused_in_a_line(layers: list[int], said: str) -> None:
    graph, cluster = decoder(), cards(10**6, 10**6)
    found = placed(graph, cluster, layers)
    with pytest.raises(PlacementError, match=f"{said}.*--for vllm$"):
        vllm_options(graph, found, cluster, np.zeros(3, np.int64))


def test_other_models_and_plans_are_refused_in_a_line() -> None:
    graph, cluster, peak = decoder(), cards(10**6, 10**6), np.zeros(3, np.int64)
    device = placed(graph, cluster, [1, 1, 2, 2]).device.copy()
    device[graph.op_index["head"]] = device[graph.op_index["step/head"]] = 1
    with pytest.raises(PlacementError, match="'head' lies on 'g0', and it is with the last layers"):
        vllm_options(graph, make_placement(graph, cluster, device), cluster, peak)
    full = np.array([0, 2 * 10**6, 10**6])
    with pytest.raises(
        PlacementError, match="leaves cache for 0 tokens of context, and the plan is for 12"
    ):
        vllm_options(graph, placed(graph, cluster, [1, 1, 2, 2]), cluster, full)
    one = phase(8, 0, tied=False)
    with pytest.raises(PlacementError, match="with --generate prompt"):
        vllm_options(one, placed(one, cluster, [1, 1, 2, 2]), cluster, peak)
    both = replace(one, scope=tuple(s.replace("layers.3", "more.0") for s in one.scope))
    with pytest.raises(PlacementError, match=r"'m\.layers' and 'm\.more'"):
        layer_row(both)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize(
    "sizes", [(700_000, 300_000), (380_000, 280_000), (300_000, 300_000, 300_000)]
)
def test_the_plan_is_the_best_that_it_can_follow(objective: str, sizes: tuple[int, ...]) -> None:
    """Among all stretches of layers in all orders of the GPUs."""
    graph, cluster = decoder(), cards(*sizes)
    gpus = range(1, len(sizes) + 1)
    rows = [
        row for row in itertools.product(gpus, repeat=LAYERS)
        if len(list(itertools.groupby(row))) == len(set(row))
    ]  # fmt: skip
    question = Question(graph, cluster, objective=objective, costs=roofline)
    scores = [solve.simulate(question, placed(graph, cluster, list(row))) for row in rows]
    best = min(score.value_s for score in scores if score.feasible)
    found = PLANNERS["vllm"].plan(question)
    assert found.score.feasible
    assert found.value_s <= best * 1.02
    vllm_options(graph, found.placement, cluster, np.array(found.score.peak_bytes))


def test_of_equally_fast_plans_the_one_that_spreads_evenly() -> None:
    """Four layers on two like GPUs, each of which holds three: two and two are as fast, and leave
    the fullest room for more cache."""
    graph, cluster = decoder(), cards(380_000, 380_000)
    like = tuple(replace(device, kind="k", **RATES) for device in cluster.devices[1:])
    cluster = replace(cluster, devices=(cluster.devices[0], *like))
    found = PLANNERS["vllm"].plan(Question(graph, cluster, costs=roofline))
    options = vllm_options(graph, found.placement, cluster, np.array(found.score.peak_bytes))
    assert options.partition == (2, 2)


def test_from_a_configuration_to_the_options_on_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.generating_configs import generating_config

    (tmp_path / "config.json").write_text(json.dumps(generating_config("llama")))
    model, plan = f"hf:{tmp_path}", str(tmp_path / "p.json")
    small = tmp_path / "small.toml"
    devices = [("cpu", "cpu", ""), *((f"t4:{i}", "t4", "memory_bytes = 75000") for i in (0, 1))]
    small.write_text("".join(
        f'[[device]]\nname = "{name}"\npreset = "{preset}"\n{more}\n'
        for name, preset, more in devices
    ))  # fmt: skip
    words = ["place", model, "--generate", "prompt=8,new=6", "--cluster", str(small),
             "--for", "vllm", "-o", plan]  # fmt: skip
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    words = ["export", plan, "--to", "vllm", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert "VLLM_PP_LAYER_PARTITION=1,1" in told["environment"]
    assert "--pipeline-parallel-size 2" in told["arguments"]
    assert "was not run" in told["why"]["status"]
    # The configuration was made for 256 tokens.
    arguments = told["arguments"].split()
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert 14 <= int(flags["--max-model-len"]) <= 256
    assert flags["--max-num-batched-tokens"] == "2048"
