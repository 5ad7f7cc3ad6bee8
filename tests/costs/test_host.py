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
from gdp.costs.measured.host import ENGINE, HOSTS, RANK_S, host_s, ranks_s
from gdp.placement.placement import Split, make_placement
from gdp.question.models import Generation
from gdp.question.prepare import prepare_placement
from gdp.question.question import Question
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
