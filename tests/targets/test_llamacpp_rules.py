"""What llama.cpp refuses to load is no plan."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from gdp.cluster.presets import cluster_preset
from gdp.question.models import load
from gdp.question.question import Question
from gdp.targets.llamacpp.flags import flags_of
from gdp.targets.llamacpp.plan import plan_llamacpp
from gdp.targets.llamacpp.rules import (
    MOST_GPUS,
    NO_TENSOR_SPLIT,
    leaves_one_without,
    with_known_gpus,
)
from gdp.targets.llamacpp.tensor import why_no_tensor_split
from tests.gguf_models import quick, write_gguf


@pytest.mark.parametrize("architecture", ["llama", "olmo2", "minimax-m2", "qwen3"])
def test_architectures_without_tensor_splits(architecture: str, tmp_path: Path) -> None:
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', architecture=architecture)}?decode&sequence=64")
    plan = plan_llamacpp(Question(graph, quick(1e11, 1e11)))
    refused = architecture in NO_TENSOR_SPLIT
    assert refused == (architecture in ("olmo2", "minimax-m2"))
    assert bool(plan.placement.splits) != refused
    assert ("llm_arch_supports_sm_tensor" in why_no_tensor_split(graph)) == refused
    bare = tuple(replace(d, attributes={k: v for k, v in d.attributes.items()
                                        if k != "architecture"}) for d in graph.detail)  # fmt: skip
    assert replace(graph, detail=bare).digest in graph.digests


@pytest.mark.parametrize("keys", [1, 2, 3, 8])
def test_every_gpu_has_a_whole_head_of_keys_in_every_layer(keys: int) -> None:
    """By the rule of the source: ends are rounded down, in every turn of the GPUs."""
    for parts in itertools.product((1, 2, 5), repeat=3):
        turns = [parts[k:] + parts[:k] for k in range(3)]
        ends = [[keys * sum(turn[:k]) // sum(turn) for k in range(4)] for turn in turns]
        none = any(a == b for own in ends for a, b in itertools.pairwise(own))
        assert leaves_one_without(parts, keys) == none
    assert leaves_one_without((1,) * 4, keys) == (keys < 4)


def test_fewer_heads_of_keys_than_gpus_is_no_tensor_split(tmp_path: Path) -> None:
    """Two heads of keys: two GPUs divide them, four do not."""
    graph = load(f"{write_gguf(tmp_path / 'm.gguf')}?decode&sequence=64")
    plan = plan_llamacpp(Question(graph, quick(*[1e11] * 4)))
    assert all(len(split.devices) == 2 for split in plan.placement.splits)


def test_sixteen_gpus_are_named_as_fifteen(tmp_path: Path) -> None:
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', layers=20)}?decode&sequence=64")
    cluster = cluster_preset("cpu+16xt4-pcie4")
    assert [d.supported for d in with_known_gpus(cluster).devices].count(frozenset()) == 1
    plan = plan_llamacpp(Question(graph, cluster))
    flags = flags_of(graph, plan.placement, cluster)
    assert len(flags.tensor_split) <= MOST_GPUS
    assert len(flags.device) == len(flags.tensor_split)
