"""Sparse attention: an indexer in one kernel, attention over the keys that it picks."""

import json
from pathlib import Path

import numpy as np
import pytest

from gdp.graph.attention import FUSED
from gdp.graph.generation import CACHE_AT, with_context
from gdp.graph.op_graph import OpGraph
from gdp.graph.request import DECODE, PREFILL
from gdp.graph.sparse import INDEXER
from gdp.question.models import load
from gdp.splits.division import Role, division_of
from gdp.splits.sharding import Shares, member_graph
from tests.generating_configs import generating_config

BATCH, PROMPT, NEW, HEADS = 2, 9, 4, 4
LATENT, ROTATED = 16, 8
INDEX_HEADS, INDEX, PICKED = 3, 20, 6
KINDS = {
    "deepseek_v32": "DeepseekV32ForCausalLM", "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}  # fmt: skip


def _graph(kind: str, folder: Path, prompt: int = PROMPT, options: str = "") -> OpGraph:
    """A request as an engine computes it, of two layers, the second with experts."""
    pytest.importorskip(f"transformers.models.{kind}")
    config = generating_config("deepseek_v3") | {
        "model_type": kind, "architectures": [KINDS[kind]], "dtype": "bfloat16",
        "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX, "index_topk": PICKED,
        "mlp_layer_types": ["dense", "sparse"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    sizes = f"batch={BATCH}&prompt={prompt}&new={NEW}&max_num_batched_tokens=64"
    return load(f"hf:{folder}?{sizes}{options}")


def _of(graph: OpGraph, phase: int) -> tuple[list[int], list[int]]:
    """(indexers, attentions) of a phase."""
    indexers = [op for op, d in enumerate(graph.detail) if INDEXER in d.attributes]
    attentions = [op for op, kind in enumerate(graph.op_types) if kind == FUSED]
    return tuple([op for op in ops if graph.phase[op] == phase] for ops in (indexers, attentions))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_by_hand(kind: str, tmp_path: Path) -> None:
    """Nine queries see one to nine keys, five in the mean; of these they pick 1, 2, ... 6, 6, 6, 6,
    39 of nine, whose rows have 16 + 8 numbers, in two bytes, 16 of them values."""
    graph = _graph(kind, tmp_path)
    indexers, attentions = _of(graph, PREFILL)
    assert len(indexers) == len(attentions) == 2
    queries = BATCH * PROMPT
    for op in indexers:
        assert graph.flop[op] == 2 * queries * INDEX_HEADS * 5 * INDEX
        moved = queries * INDEX_HEADS * INDEX + queries * (INDEX + 4) + 2 * 4 * queries * 5
        assert graph.memory_traffic_bytes[op] == moved
        assert graph.tensor_bytes[graph.producer == op].max() <= 4 * queries * PICKED
    for op in attentions:
        numbers, row = 2 * LATENT + ROTATED, LATENT + ROTATED
        assert graph.flop[op] == pytest.approx(2 * BATCH * HEADS * 39 * numbers)
        moved = 2 * (queries * HEADS * numbers + BATCH * 39 * row)
        assert graph.memory_traffic_bytes[op] == pytest.approx(moved)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_by_hand(kind: str, tmp_path: Path) -> None:
    """Keys of the indexer lie in 8 bits with a scale of 4 bytes; attention reads six rows."""
    graph = _graph(kind, tmp_path)
    indexers, attentions = _of(graph, DECODE)
    assert len(indexers) == len(attentions) == 2
    for op in indexers:
        (*_, keys) = graph.detail[op].input_shapes[1]
        assert PROMPT < keys <= PROMPT + NEW
        assert graph.flop[op] == 2 * BATCH * INDEX_HEADS * keys * INDEX
        moved = BATCH * INDEX_HEADS * INDEX + BATCH * keys * (INDEX + 4) + 2 * 4 * BATCH * keys
        assert graph.memory_traffic_bytes[op] == moved
        assert graph.cache_bytes[op] == BATCH * (PROMPT + NEW) * (INDEX + 4)
    for op in attentions:
        assert graph.detail[op].input_shapes[1] == (BATCH, 1, PICKED, LATENT + ROTATED)
        numbers = 2 * LATENT + ROTATED
        products = 2 * BATCH * HEADS * PICKED * numbers
        assert products <= graph.flop[op] < 1.2 * products  # and the softmax
        moved = 2 * BATCH * (HEADS * numbers + PICKED * (LATENT + ROTATED))
        assert graph.memory_traffic_bytes[op] == pytest.approx(moved)
        assert graph.cache_bytes[op] == 2 * BATCH * (PROMPT + NEW) * (LATENT + ROTATED)


def test_all_keys_are_read_where_they_are_few(tmp_path: Path) -> None:
    graph = _graph("deepseek_v32", tmp_path, prompt=1)
    for phase, seen in ((PREFILL, 1), (DECODE, None)):
        for op in _of(graph, phase)[1]:
            keys = graph.detail[op].input_shapes[1][2]
            assert keys == seen if seen else 1 < keys <= 1 + NEW


def test_latents_in_8_bits_leave_the_indexers_keys_as_they_are(tmp_path: Path) -> None:
    graphs = [_graph("deepseek_v32", tmp_path, options=o) for o in ("", "&kv_cache_dtype=fp8")]
    (indexers, attentions), (same, narrow) = (_of(graph, DECODE) for graph in graphs)
    wide, eight = graphs
    assert (wide.cache_bytes[indexers] == eight.cache_bytes[same]).all()
    assert (wide.cache_bytes[attentions] == 2 * eight.cache_bytes[narrow]).all()
    saved = BATCH * PICKED * (LATENT + ROTATED)
    moved = wide.memory_traffic_bytes[attentions] - eight.memory_traffic_bytes[narrow]
    assert ((0.9 * saved < moved) & (moved <= saved)).all()  # the token itself is in no cache yet


def test_caches_of_indexers_grow_with_the_context(tmp_path: Path) -> None:
    graph = with_context(_graph("deepseek_v32", tmp_path), 200)
    for op in _of(graph, DECODE)[0]:
        assert graph.cache_bytes[op] == pytest.approx(BATCH * 200 * (INDEX + 4), abs=2)
        assert CACHE_AT in graph.detail[op].attributes


def test_no_mask_over_all_keys_is_left(tmp_path: Path) -> None:
    """A mask of a prompt of 2,000 tokens would have 2,000 x 2,000 numbers, in whatever type."""
    graph = _graph("glm_moe_dsa", tmp_path, prompt=2000)
    own = graph.tensor_bytes[(graph.phase == PREFILL)[graph.producer]]
    assert own.max() < 2000 * 2000


@pytest.mark.parametrize("kind", KINDS)
def test_members_have_whole_indexers_and_their_heads(kind: str, tmp_path: Path) -> None:
    graph = _graph(kind, tmp_path)
    division = division_of(graph)
    member = member_graph(division, Shares((1, 1)), 0)
    for phase in (PREFILL, DECODE):
        indexers, attentions = _of(graph, phase)
        assert [division.columns.role[op] for op in indexers] == [Role.WHOLE] * 2
        assert [division.columns.role[op] for op in attentions] == [Role.ATTEND] * 2
        assert (member.flop[indexers] == graph.flop[indexers]).all()
        assert (member.cache_bytes[indexers] == graph.cache_bytes[indexers]).all()
        assert member.flop[attentions] == pytest.approx(graph.flop[attentions] / 2)
        for op in attentions:
            before, after = graph.detail[op].input_shapes, member.detail[op].input_shapes
            assert after[0][1] == HEADS // 2
            assert after[1:3] == before[1:3]
    held = np.array([".indexer." in scope for scope in graph.scope])
    assert held.any()
    assert (member.weight_bytes[held] == graph.weight_bytes[held]).all()
    halved = np.array(["_b_proj" in scope or "o_proj" in scope for scope in graph.scope])
    halved &= (graph.weight_bytes > 0) & (graph.phase == PREFILL)
    assert halved.any()
    assert (2 * member.weight_bytes[halved] == graph.weight_bytes[halved]).all()


def test_a_router_is_no_indexer(tmp_path: Path) -> None:
    """Experts are picked by `topk`, too."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(generating_config("deepseek_v3")))
    graph = load(f"hf:{tmp_path}?prompt=9&new=2&max_num_batched_tokens=64")
    assert "topk" in graph.op_types
    assert not any(INDEXER in detail.attributes for detail in graph.detail)
