"""Latent attention of a step: the latent is read once, nothing is made of earlier tokens."""

import json
from pathlib import Path

import pytest

from gdp.graph.attention import FUSED
from gdp.graph.generation import CACHE_AT
from gdp.graph.latent import with_absorbed_latents
from gdp.graph.op_graph import INPUT, OUTPUT, GraphBuilder, OpDetail, OpGraph
from gdp.graph.request import DECODE
from gdp.question.models import load
from gdp.splits.division import division_of
from gdp.splits.sharding import Shares, member_graph
from tests.generating_configs import generating_config

BATCH, HEADS, TOKENS, LATENT, ROTATED, PLAIN, VALUE = 2, 3, 7, 4, 2, 5, 6
KEY = PLAIN + ROTATED
MADE = HEADS * (PLAIN + VALUE)


def _step(queries: int = 1) -> OpGraph:
    """Queries, a latent that is kept, the product that makes keys and values of it, attention, in
    numbers of two bytes."""
    code = GraphBuilder()
    x = code.make_tensor(code.add_op("x", INPUT), 2 * BATCH * LATENT)
    q = code.make_tensor(code.add_op("q", "linear", reads=[x]), 2 * BATCH * HEADS * KEY)
    rows = (BATCH, 1, TOKENS, LATENT)
    kept = code.add_op(
        "kept", "cat", reads=[x], weight_bytes=112, cache_bytes=112, traffic_bytes=300,
        detail=OpDetail("bfloat16", (rows,), (rows,), {CACHE_AT: (112, 224)}),
    )  # fmt: skip
    latent = code.make_tensor(kept, 112)
    made = (BATCH, 1, TOKENS, MADE)
    up = code.add_op(
        "up", "linear", reads=[latent], flop=2.0 * BATCH * TOKENS * LATENT * MADE,
        traffic_bytes=2 * MADE * LATENT + 2 * BATCH * TOKENS * (LATENT + MADE),
        detail=OpDetail("bfloat16", (rows, (MADE, LATENT)), (made,), {}),
    )  # fmt: skip
    keys = code.make_tensor(up, 2 * BATCH * TOKENS * MADE)
    copied = code.make_tensor(
        code.add_op("copied", "copy_", reads=[keys], flop=70.0, traffic_bytes=700), 840
    )
    shapes = tuple(
        (BATCH, HEADS, t, n) for t, n in ((queries, KEY), (TOKENS, KEY), (TOKENS, VALUE))
    )
    out = (BATCH, HEADS, queries, VALUE)
    attends = code.add_op(
        "attends", FUSED, reads=[q, keys, copied], flop=1300.0, traffic_bytes=9000,
        weight_bytes=56, cache_bytes=56,
        detail=OpDetail("bfloat16", shapes, (out,), {CACHE_AT: (56, 112)}),
    )  # fmt: skip
    code.add_op("y", OUTPUT, reads=[code.make_tensor(attends, 72)])
    return code.build("latent")


def test_a_latent_is_read_once_by_hand() -> None:
    """A row has 4 + 2 numbers: attention multiplies 6 + 4 of them where it multiplied 7 + 6, and
    moves 2 x (3 x (6 + 4) + 7 x 6) numbers; the product is that of one token."""
    graph = with_absorbed_latents(_step())
    before = _step()
    at = graph.op_index
    assert graph.flop[at["attends"]] == pytest.approx(1300 * 10 / 13)
    assert graph.memory_traffic_bytes[at["attends"]] == 2 * 2 * (3 * 10 + 7 * 6)
    assert graph.flop[at["up"]] == pytest.approx(before.flop[at["up"]] / TOKENS)
    moved = 2 * MADE * LATENT + 2 * BATCH * (LATENT + MADE)
    assert graph.memory_traffic_bytes[at["up"]] == pytest.approx(moved)
    assert graph.flop[at["copied"]] == pytest.approx(10)
    assert graph.memory_traffic_bytes[at["kept"]] == 2 * 2 * BATCH * LATENT
    assert graph.cache_bytes.tolist() == [0, 0, 0, 0, 0, 168, 0]
    assert graph.weight_bytes.sum() == before.weight_bytes.sum()
    detail = graph.detail[at["attends"]]
    assert detail.attributes[CACHE_AT] == (168, 336)
    assert detail.input_shapes == ((2, 3, 1, 6), (2, 1, 7, 6), (2, 1, 7, 4))
    assert graph.detail[at["up"]].input_shapes == ((2, 1, 1, 4), (MADE, LATENT))
    assert graph.tensor_bytes[graph.producer == at["up"]].tolist() == [2 * BATCH * MADE]


def test_prompts_are_read_with_keys_of_every_head() -> None:
    graph = _step(queries=TOKENS)
    assert with_absorbed_latents(graph) is graph


def test_an_engine_keeps_a_latent_and_every_member_all_of_it(tmp_path: Path) -> None:
    """16 numbers of the latent and 8 that are rotated, of 2 sequences of 11 tokens."""
    pytest.importorskip("transformers")
    config = generating_config("deepseek_v3") | {"num_hidden_layers": 1, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    graph = load(f"hf:{tmp_path}?batch=2&prompt=9&new=2&max_num_batched_tokens=64")
    held = graph.cache_bytes > 0
    assert graph.cache_bytes[held].tolist() == [2 * 2 * 11 * (16 + 8)]
    (op,) = held.nonzero()[0].tolist()
    assert (graph.op_types[op], graph.phase[op]) == (FUSED, DECODE)
    member = member_graph(division_of(graph), Shares((1, 1)), 0)
    assert member.cache_bytes[op] == graph.cache_bytes[op]
    heads = graph.detail[op].input_shapes[0][1]
    queries, keys, values = member.detail[op].input_shapes[:3]
    assert queries == (2, heads // 2, 1, 24)
    assert (keys, values) == graph.detail[op].input_shapes[1:3]
