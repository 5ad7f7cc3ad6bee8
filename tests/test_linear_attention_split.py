"""Linear attention divided over devices: by heads, with its states."""

import json

import numpy as np
import pytest

from gdp.graph.linear_attention import KEY_HEADS, RULE, VALUE_HEADS
from gdp.graph.op_graph import OpGraph
from gdp.graph.request import DECODE, PREFILL
from gdp.question.models import load
from gdp.splits.division import Division, Pieces, Role, division_of
from gdp.splits.sharding import Shares, exchanges, member_graph
from tests.generating_configs import generating_config

pytest.importorskip("transformers")
HEADS, KEYS = 4, 2


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> OpGraph:
    """A layer of a gated delta net and one of attention, of 4 heads of values and 2 of keys."""
    folder = tmp_path_factory.mktemp("hybrid")
    config = generating_config("qwen3_next") | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return load(f"hf:{folder}?batch=2&prompt=9&new=2&max_num_batched_tokens=64")


@pytest.fixture(scope="module")
def division(graph: OpGraph) -> Division:
    return division_of(graph)


@pytest.mark.slow
def test_the_recurrence_is_one_kernel_of_an_engine(graph: OpGraph) -> None:
    """In a step it reads what it is given, its states, and writes both: 2 sequences, states of
    16 x 12 numbers a head in 32 bits. Beside it are the convolution and six ops that part what one
    product makes; spelled out it is two dozen more."""
    rules = [op for op, kind in enumerate(graph.op_types) if kind == RULE]
    assert graph.phase[rules].tolist() == [PREFILL, DECODE]
    op = rules[1]
    state = 2 * HEADS * 16 * 12 * 4
    assert graph.cache_bytes[op] == state
    read = graph.tensor_bytes[graph.use_tensor[graph.use_op == op]].sum()
    made = graph.tensor_bytes[graph.producer == op].sum()
    assert made < graph.memory_traffic_bytes[op] - 2 * state <= read + made
    inside = [name for name in graph.op_names if name.startswith("step/model.layers.0.linear")]
    assert len([name for name in inside if "norm" not in name and "proj" not in name]) == 8
    assert graph.detail[op].attributes[VALUE_HEADS] == HEADS
    assert graph.detail[op].attributes[KEY_HEADS] == KEYS


def _role(division: Division, part: str) -> set[int]:
    names = division.graph.op_names
    return {int(r) for name, r in zip(names, division.columns.role, strict=True) if part in name}


def test_its_products_are_divided_by_heads(division: Division) -> None:
    assert _role(division, "linear_attn.in_proj") == {Role.COLUMN}
    assert _role(division, "linear_attn.out_proj") == {Role.ROW}
    op = division.graph.op_index["model.layers.0.linear_attn.out_proj/linear"]
    unit = division.units[division.columns.unit[op]]
    assert unit == (Pieces.HEADS, HEADS, KEYS, 1)


def test_each_member_has_half_of_its_states_and_weights(graph: OpGraph, division: Division) -> None:
    member = member_graph(division, Shares((1, 1)), 0)
    mine = np.array(["linear_attn" in name for name in graph.op_names])
    held = mine & (graph.cache_bytes > 0)
    assert held.sum() == 2  # the short convolution's, and the recurrent one
    assert member.cache_bytes[held].tolist() == (graph.cache_bytes[held] // 2).tolist()
    products = mine & np.array(["proj" in name for name in graph.op_names])
    weights = graph.weight_bytes[products & (graph.weight_bytes > 0)]
    assert weights.sum() > 0
    assert member.weight_bytes[products].sum() * 2 == weights.sum()


def test_its_members_add_up_their_outputs_alone(division: Division) -> None:
    """Sums over the numbers of one head are no sums over heads."""
    names = [division.graph.op_names[e.op] for e in exchanges(division)]
    mine = [name for name in names if "linear_attn" in name]
    assert mine == [f"{at}model.layers.0.linear_attn.out_proj/linear" for at in ("", "step/")]
