"""The host's part of a step, by hand: of plans for vLLM, and of nothing else."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gdp
from gdp.api.generation import generation_of
from gdp.base.errors import ArgumentError
from gdp.cluster.file import load_cluster
from gdp.costs.measured.collectives import LIBRARY, collective_s
from gdp.costs.measured.host import ENGINE, HOSTS, RANK_S, host_s, own_reduce_bytes, ranks_s
from gdp.graph.op_graph import OpGraph
from gdp.graph.sparse import INDEXER
from gdp.placement.placement import Split, make_placement
from gdp.question.models import Generation
from gdp.question.prepare import prepare_placement
from gdp.question.question import Question
from gdp.splits.members import divided
from tests.generating_configs import DENSE

pytest.importorskip("transformers", reason="transformers is not installed")
VOCABULARY = DENSE["vocab_size"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(json.dumps({
        **DENSE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16",
    }))  # fmt: skip
    return path


@functools.cache
def _token_s(config: Path, batch: int, costs: str | None = None, target: str = "vllm") -> float:
    request = Generation(config, prompt=16, new=8, batch=batch)
    result = gdp.place(request, "cpu+h100", target=target, costs=costs)
    answer = generation_of(result.question, result.placement)
    return answer.token_s


@pytest.mark.parametrize("name", [name for name in HOSTS if name != ENGINE])
def test_steps_of_engines_differ_by_their_hosts(config: Path, name: str) -> None:
    """By hand: a step, each sequence, each of its logits; kernels are the same."""
    own, other, batch = HOSTS[ENGINE], HOSTS[name], 8
    by_hand = (
        other.step_s - own.step_s
        + batch * (other.sequence_s - own.sequence_s)
        + batch * VOCABULARY * (other.logit_s - own.logit_s)
    )  # fmt: skip
    told = _token_s(config, batch, name) - _token_s(config, batch)
    assert told == pytest.approx(by_hand, rel=1e-6, abs=1e-12)


def test_a_step_is_no_shorter_than_its_host(config: Path) -> None:
    """Kernels of a tiny model take microseconds; the step of an engine takes its host's part."""
    least_s = HOSTS[ENGINE].seconds(8, 8 * VOCABULARY)
    assert least_s < _token_s(config, 8) < least_s + 5e-4
    assert _token_s(config, 8, "datasheet") < 0.2 * least_s


def test_members_of_a_group_wait_for_the_latest(config: Path) -> None:
    """With two GPUs, a step has one further rank beside what collectives take."""
    cluster = load_cluster("cpu+2xh100-nvlink")
    result = gdp.place(
        Generation(config, prompt=16, new=8), "cpu+h100", target="vllm"
    )  # fmt: skip
    graph = result.question.graph
    gpus = [d for d, device in enumerate(cluster.devices) if not device.is_cpu]
    device = np.where(graph.is_io, cluster.host, gpus[0])
    placement = make_placement(graph, cluster, device, splits=(Split(tuple(gpus)),))
    predicted = prepare_placement(Question(graph, cluster, target="vllm"), placement)
    exchange_s = predicted.problem.origin.exchange_s
    assert exchange_s is not None
    last = predicted.problem.origin.group_of[graph.op_index["step/next_token"]]
    others = exchange_s[:, gpus[0]].copy()
    assert others[last] >= RANK_S
    assert graph.request is not None
    unserved = replace(graph, request=graph.request._replace(is_served=False))
    alone = prepare_placement(Question(unserved, cluster, target="vllm"), placement)
    assert alone.problem.origin.exchange_s is not None
    less = exchange_s[:, gpus[0]].sum() - alone.problem.origin.exchange_s[:, gpus[0]].sum()
    assert less == pytest.approx(RANK_S)


def test_an_engine_without_a_row_is_a_file_that_is_missing(config: Path) -> None:
    with pytest.raises((ArgumentError, gdp.GdpError, OSError)):
        _token_s(config, 1, "vllm-9.9")


def test_drafted_tokens_are_scheduled_with_those_of_the_large_model(config: Path) -> None:
    """The step of a model that drafts has no host of its own."""
    request = Generation(config, prompt=16, new=8)
    graph = gdp.place(request, "cpu+h100", target="vllm").question.graph
    assert host_s(graph, HOSTS[ENGINE]).sum() == HOSTS[ENGINE].seconds(1, VOCABULARY)
    assert ranks_s(graph, 3).sum() == pytest.approx(2 * RANK_S)
    assert graph.request is not None
    drafting = replace(graph, request=graph.request._replace(is_draft=True))
    assert not host_s(drafting, HOSTS[ENGINE]).any()
    assert not ranks_s(drafting, 3).any()


def _divided_s(graph: OpGraph, box: str, costs: str) -> np.ndarray:
    """Seconds of each fused op on all GPUs of a box together, and of its collectives."""
    cluster = load_cluster(box)
    gpus = tuple(d for d, device in enumerate(cluster.devices) if not device.is_cpu)
    device = np.where(graph.is_io, cluster.host, gpus[0])
    placement = make_placement(graph, cluster, device, splits=(Split(gpus),))
    question = Question(graph, cluster, target="vllm", costs=costs)
    own_s = prepare_placement(question, placement).problem.compute_s[:, gpus[0]]
    return own_s[np.isfinite(own_s)]


def test_the_sampler_reads_the_logits_of_all_members(config: Path) -> None:
    """vLLM sorts all logits of a step, 1.4e-10 s each, however many GPUs made them."""
    graph = gdp.place(
        Generation(config, prompt=16, new=8, batch=4), "cpu+h100", target="vllm"
    ).question.graph  # fmt: skip
    assert graph.request is not None
    sorting_s, newest_s = (
        _divided_s(graph, "cpu+2xh100-nvlink", name).sum() for name in ("vllm-sync", "shipped")
    )
    by_hand_s = np.subtract(*(HOSTS[n].seconds(4, 4 * VOCABULARY) for n in ("vllm-sync", ENGINE)))
    steps = graph.repeats[graph.op_index["step/next_token"]]
    assert sorting_s - newest_s == pytest.approx(steps * by_hand_s, rel=1e-9)
    assert HOSTS["vllm-sync"].logit_s * 4 * VOCABULARY / 2 > 1e-9 * by_hand_s * steps


@pytest.mark.parametrize(
    ("card", "count", "most"),
    [("h100", 8, 2**18), ("h100", 4, 2**23), ("b200", 8, 2**20), ("b200", 2, 2**21),
     ("a100", 8, 2**23)],
)  # fmt: skip
def test_an_engines_own_all_reduce_gives_way_to_the_library(
    card: str, count: int, most: int
) -> None:
    """By vLLM's `CUSTOM_ALL_REDUCE_MAX_SIZES`; beyond them NCCL takes longer."""
    cluster = load_cluster(f"cpu+{count}x{card}-nvlink")
    gpus = [d for d, device in enumerate(cluster.devices) if not device.is_cpu]
    assert own_reduce_bytes(cluster.devices[gpus[0]], count) == most
    own_s, library_s = (
        float(collective_s(cluster, gpus, "all_reduce", most, name)) for name in ("vllm", LIBRARY)
    )
    assert own_s < library_s or card == "a100" or count == 2


@pytest.mark.parametrize(("batch", "by"), [(63, "vllm"), (64, LIBRARY)])
def test_large_sums_of_vllm_0_11_are_those_of_the_library(
    tmp_path: Path, batch: int, by: str
) -> None:
    """64 sequences of 2,048 numbers in two bytes are 256 KiB, from which on eight H100 take NCCL;
    a pass has a sum behind the embedding and two in its one layer."""
    small = {
        **DENSE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16",
        "hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8,
        "num_hidden_layers": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(small))
    request = Generation(tmp_path, prompt=2, new=2, batch=batch)
    graph = gdp.place(request, "cpu+h100", target="vllm").question.graph
    cluster = load_cluster("cpu+8xh100-nvlink")
    gpus = tuple(d for d, device in enumerate(cluster.devices) if not device.is_cpu)
    told_s = divided(graph, cluster, (Split(gpus),), host=HOSTS["vllm-0.11"]).exchange_s.sum()
    newest_s = divided(graph, cluster, (Split(gpus),)).exchange_s.sum()
    step_s, prompt_s = (
        3 * np.subtract(*(
            float(collective_s(cluster, gpus, "all_reduce", 2 * 2048 * tokens, name))
            for name in (LIBRARY, "vllm")
        )) for tokens in (batch, 2 * batch)
    )  # fmt: skip
    by_hand_s = prompt_s + (step_s if by == LIBRARY else 0.0)
    assert told_s - newest_s == pytest.approx(by_hand_s, rel=1e-6)


def test_indexers_take_what_their_engine_adds(config: Path) -> None:
    """In each pass of a prompt, and in a step."""
    graph = gdp.place(
        Generation(config, prompt=16, new=8), "cpu+h100", target="vllm"
    ).question.graph  # fmt: skip
    assert host_s(graph, HOSTS[ENGINE])[0] == 0
    marked = replace(graph.detail[0], attributes={INDEXER: 64})
    indexed = replace(
        graph, detail=(marked, *graph.detail[1:]), chunks=np.where(graph.flop >= 0, 3, 3)
    )  # fmt: skip
    for name in (ENGINE, "sglang"):
        found = host_s(indexed, HOSTS[name])[0]
        assert found == pytest.approx(3 * HOSTS[name].indexer_s)
