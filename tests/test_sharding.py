"""Members of a split: what each has, what all have together, and what is refused."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from gdp.base.errors import ModelError, PlacementError
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import OpGraph
from gdp.ops.aten import ATEN
from gdp.placement.placement import (
    Placement,
    Split,
    load_placement,
    make_placement,
    require,
    save_placement,
)
from gdp.question import solve
from gdp.question.models import load
from gdp.question.question import Question
from gdp.sim.objectives import Score
from gdp.splits.division import Role, division_of
from gdp.splits.sharding import Shares, exchanges, member_graph
from tests.decoders import ITEM, Sizes, decoder
from tests.generating_configs import generating_config

DENSE, MIXTURE = Sizes(), Sizes(experts=8)


def members(graph: OpGraph, shares: Shares) -> list[OpGraph]:
    division = division_of(graph)
    return [member_graph(division, shares, rank) for rank in range(shares.size)]


def by_name(graph: OpGraph, values: np.ndarray) -> dict[str, float]:
    return dict(zip(graph.op_names, values.tolist(), strict=True))


def test_a_split_of_one_is_the_graph_itself() -> None:
    graph = decoder()
    (alone,) = members(graph, Shares((3,)))
    for field in fields(OpGraph):
        own, whole = getattr(alone, field.name), getattr(graph, field.name)
        assert own == whole if isinstance(own, tuple) else np.array_equal(own, whole)
    assert alone.digest == graph.digest


def test_weights_caches_and_flops_of_half_a_layer_counted_by_hand() -> None:
    graph = decoder(DENSE)
    first, _ = members(graph, Shares((1, 1)))
    weights = by_name(first, first.weight_bytes - first.cache_bytes)
    at = "m.layers.1"
    assert weights[f"{at}.attn.q/linear"] == ITEM * 64 * (8 * 16 // 2)
    assert weights[f"{at}.attn.k/linear"] == ITEM * 64 * (4 * 16 // 2)
    assert weights[f"{at}.attn.o/linear"] == ITEM * (8 * 16 // 2) * 64
    assert weights[f"{at}.mlp.gate/linear"] == weights[f"{at}.mlp.down/linear"] == ITEM * 64 * 48
    assert weights["head/linear"] == weights["m.embed/embedding"] == ITEM * 64 * 64
    caches = by_name(first, first.cache_bytes)
    assert caches[f"step/{at}.attn/scaled_dot_product_attention"] == 2 * ITEM * 2 * 16 * 12
    flop = by_name(first, first.flop)
    assert flop[f"{at}.mlp.down/linear"] == 2 * 8 * 64 * 48
    assert flop[f"{at}/add"] == by_name(graph, graph.flop)[f"{at}/add"]


def test_activations_of_half_a_layer_counted_by_hand() -> None:
    """What columns and heads make is divided; what rows add up, norms, embeddings and logits, which
    all members have after they are gathered, are whole."""
    graph = decoder(DENSE)
    first, _ = members(graph, Shares((1, 1)))
    made = dict(zip(first.op_names, np.bincount(first.producer, first.tensor_bytes), strict=False))
    tokens, at = 8, "m.layers.1"
    assert made[f"{at}.attn.q/linear"] == ITEM * tokens * 8 * 16 // 2
    assert made[f"{at}.attn.k/linear"] == ITEM * tokens * 4 * 16 // 2
    assert made[f"{at}.attn/scaled_dot_product_attention"] == ITEM * tokens * 8 * 16 // 2
    assert made[f"{at}.mlp.gate/linear"] == made[f"{at}.mlp/mul"] == ITEM * tokens * 48
    assert made[f"{at}.mlp.down/linear"] == made[f"{at}.attn.o/linear"] == ITEM * tokens * 64
    assert made[f"{at}/add"] == made["m.embed/embedding"] == ITEM * tokens * 64
    assert made["head/linear"] == ITEM * tokens * 128


@pytest.mark.parametrize("size", [2, 4, 8])
def test_parts_of_caches_and_flops_by_the_number_of_members(size: int) -> None:
    """Heads of queries, columns and their FLOPs are divided by all members, the four heads of keys
    and their caches by four of them at most; looking up a token costs everyone the same."""
    graph = decoder(DENSE)
    for member in members(graph, Shares((1,) * size)):
        flop, caches = by_name(member, member.flop), by_name(member, member.cache_bytes)
        whole, all_caches = by_name(graph, graph.flop), by_name(graph, graph.cache_bytes)
        assert sum(caches.values()) == sum(all_caches.values()) / min(size, 4)
        for name in ("attn.q/linear", "attn/scaled_dot_product_attention", "attn.o/linear",
                     "mlp.gate/linear", "mlp.down/linear", "mlp/mul"):  # fmt: skip
            op = f"m.layers.0.{name}"
            assert whole[op] > 0
            assert flop[op] == pytest.approx(whole[op] / size), name
        assert flop["m.layers.0.attn.k/linear"] == whole["m.layers.0.attn.k/linear"] / min(size, 4)
        assert flop["m.layers.0/add"] == whole["m.layers.0/add"]
        assert flop["m.embed/embedding"] == whole["m.embed/embedding"]
        logits = graph.producer == graph.op_index["head/linear"]
        assert (member.tensor_bytes[logits] == graph.tensor_bytes[logits]).all()


def test_what_moves_is_everything_columns_read_and_rows_make() -> None:
    graph = decoder(DENSE)
    first, _ = members(graph, Shares((1, 1)))
    moved = by_name(first, first.memory_traffic_bytes)
    tokens = 8
    assert moved["m.layers.0.mlp.gate/linear"] == ITEM * (tokens * 64 + 64 * 48 + tokens * 48)
    assert moved["m.layers.0.mlp.down/linear"] == ITEM * (tokens * 48 + 64 * 48 + tokens * 64)
    assert moved["m.layers.0.mlp/mul"] == ITEM * 3 * tokens * 48
    # One token reads the mean of 10 cached tokens, and writes its own.
    seen = ITEM * (2 * 4 * 16 + 2 * 2 * 16 + 2 * 2 * 16 * 10)
    assert moved["step/m.layers.0.attn/scaled_dot_product_attention"] == seen


def test_shapes_are_those_of_the_member() -> None:
    graph = decoder(DENSE)
    first, _ = members(graph, Shares((1, 1)))
    detail = dict(zip(first.op_names, first.detail, strict=True))
    assert detail["m.layers.0.attn.q/linear"].input_shapes == ((1, 8, 64), (64, 64))
    assert detail["m.layers.0.attn.o/linear"].input_shapes == ((1, 8, 64), (64, 64))
    assert detail["m.layers.0.attn.o/linear"].output_shapes == ((1, 8, 64),)
    attends = detail["step/m.layers.0.attn/scaled_dot_product_attention"]
    assert attends.input_shapes == ((1, 4, 1, 16), (1, 2, 11, 16), (1, 2, 11, 16))
    assert detail["m.layers.0.mlp/mul"].output_shapes == ((1, 8, 48),)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("parts", [(1, 1), (1, 1, 1, 1), (3, 1), (1, 2, 1)])
@pytest.mark.parametrize("sizes", [DENSE, MIXTURE])
def test_members_add_up_to_the_whole(sizes: Sizes, parts: tuple[int, ...], experts: bool) -> None:
    graph = decoder(sizes)
    division, own = division_of(graph), members(graph, Shares(parts, experts))
    role = (division.experts if experts else division.columns).role
    divided = role != Role.WHOLE
    for name in ("weight_bytes", "cache_bytes"):
        total = np.sum([getattr(member, name) for member in own], axis=0)
        assert (total[divided] == getattr(graph, name)[divided]).all(), name
    computed = np.sum([member.flop for member in own], axis=0)
    divided &= role != Role.LOOK_UP
    np.testing.assert_allclose(computed[divided], graph.flop[divided])
    moved = np.sum([member.memory_traffic_bytes for member in own], axis=0)
    assert (moved >= graph.memory_traffic_bytes * (1 - 1e-12)).all()
    for member in own:
        assert (member.memory_traffic_bytes <= graph.memory_traffic_bytes * (1 + 1e-12)).all()


def test_unlike_shares_are_whole_heads_and_blocks_of_columns() -> None:
    graph = decoder(replace(DENSE, inner=128))
    large, small = members(graph, Shares((7, 3)))
    weights = [by_name(m, m.weight_bytes) for m in (large, small)]
    assert [w["m.layers.0.attn.k/linear"] // (ITEM * 64 * 16) for w in weights] == [3, 1]
    assert [w["m.layers.0.mlp.up/linear"] // (ITEM * 64) for w in weights] == [96, 32]


def test_heads_of_keys_are_copied_where_members_are_more() -> None:
    graph = decoder(DENSE)
    own = members(graph, Shares((1,) * 8))
    for member in own:
        weights, caches = by_name(member, member.weight_bytes), by_name(member, member.cache_bytes)
        assert weights["m.layers.0.attn.q/linear"] == ITEM * 64 * 16
        assert weights["m.layers.0.attn.k/linear"] == ITEM * 64 * 16
        assert caches["step/m.layers.0.attn/scaled_dot_product_attention"] == 2 * ITEM * 16 * 12


def test_experts_are_divided_by_columns_or_as_a_whole() -> None:
    graph = decoder(MIXTURE)
    for experts, shapes in ((False, ((16, 64), (8, 64, 96))), (True, ((8, 64), (4, 64, 192)))):
        first, _ = members(graph, Shares((1, 1), experts))
        weights = by_name(first, first.weight_bytes)
        assert weights["m.layers.0.mlp.experts/gate_up"] == ITEM * 8 * 64 * 192 // 2
        assert weights["m.layers.0.mlp.router/linear"] == ITEM * 64 * 8
        detail = dict(zip(first.op_names, first.detail, strict=True))
        assert detail["m.layers.0.mlp.experts/gate_up"].input_shapes == shapes


def test_members_add_up_what_rows_make_and_gather_logits() -> None:
    graph = decoder(MIXTURE)
    told = [
        (graph.op_names[e.op], e.operation, e.size_bytes)
        for e in exchanges(division_of(graph)) if not graph.op_names[e.op].startswith("step/")
    ]  # fmt: skip
    tensor = ITEM * 8 * 64
    assert told == [
        ("m.embed/embedding", "all_reduce", tensor),
        ("m.layers.0.attn.o/linear", "all_reduce", tensor),
        ("m.layers.0.mlp.experts/sum", "all_reduce", tensor),
        ("m.layers.1.attn.o/linear", "all_reduce", tensor),
        ("m.layers.1.mlp.experts/sum", "all_reduce", tensor),
        ("head/linear", "all_gather", ITEM * 8 * 128),
    ]


def test_a_norm_of_all_queries_adds_up_their_squares() -> None:
    graph = decoder(replace(DENSE, norm_of_all=True))
    small = [e for e in exchanges(division_of(graph)) if "q_norm" in graph.op_names[e.op]]
    assert [e.size_bytes for e in small] == [ITEM * 8] * 2 + [ITEM] * 2


def test_latents_are_whole_on_every_member() -> None:
    graph = decoder(replace(DENSE, latent=32))
    first, second = members(graph, Shares((1, 1)))
    for member in (first, second):
        weights = by_name(member, member.weight_bytes)
        assert weights["m.layers.0.attn.kv_a/linear"] == ITEM * 64 * 32
        assert weights["m.layers.0.attn.k/linear"] == ITEM * 32 * 32


def test_every_cost_model_reads_a_member() -> None:
    """Half of a product of weights alone takes half of the seconds."""
    graph = decoder(replace(DENSE, hidden=512, inner=4096))
    gpu = Device("g", "gpu", {"default": 1e15}, 1e12)
    cluster = make_cluster("one", [gpu])
    seconds = [roofline(g, cluster)[:, 0] for g in (graph, *members(graph, Shares((1, 1))))]
    op = graph.op_index["step/m.layers.0.mlp.up/linear"]
    assert seconds[1][op] == pytest.approx(seconds[0][op] / 2, rel=1e-3)
    assert (seconds[1] <= seconds[0]).all()


@pytest.mark.parametrize(
    ("parts", "said"),
    [((1, 1, 1), "3 GPUs do not divide 4 heads of keys evenly"),
     ((1,) * 16, "16 GPUs do not divide 8 heads evenly"),
     ((100, 1), "leave a member without a piece of 4")],
)  # fmt: skip
def test_shares_that_cut_a_head_are_refused(parts: tuple[int, ...], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        members(decoder(), Shares(parts))


def test_layers_of_unknown_form_are_refused_by_name() -> None:
    graph = decoder()
    odd = graph.op_index["m.layers.1.mlp.down/linear"]
    kinds = ["einsum" if op == odd else kind for op, kind in enumerate(graph.op_types)]
    with pytest.raises(ModelError, match=r"an unknown use of linear in 'm\.layers\.1\.mlp"):
        division_of(replace(graph, op_types=tuple(kinds)))


def unlike_pair(slow: float = 2.0) -> Cluster:
    """Two devices of which the second is slower, without a link to wait for."""
    pair = [
        Device("fast", "a", {"default": 1e12}, 1e11, 1 << 40),
        Device("slow", "b", {"default": 1e12 / slow}, 1e11 / slow, 1 << 40),
    ]
    return make_cluster("pair", pair, default_bytes_per_s=1e15, default_latency_s=0.0)


def split_score(graph: OpGraph, cluster: Cluster, split: Split) -> Score:
    device = np.zeros(graph.num_ops, dtype=np.int64)
    placement = make_placement(graph, cluster, device, splits=(split,))
    return solve.simulate(Question(graph, cluster, costs=roofline), placement)


def test_each_member_takes_the_seconds_of_its_own_share() -> None:
    """Where one device has twice the speed, shares of 2:1 beat equal ones, and 1:2 lose."""
    graph = decoder(replace(DENSE, heads=9, keys=3, hidden=576, inner=1152))
    cluster = unlike_pair()
    right, wrong = (
        split_score(graph, cluster, Split((0, 1), shares=shares)).latency_s
        for shares in ((2, 1), (1, 2))
    )
    assert right < 0.6 * wrong
    alone = solve.simulate(
        Question(graph, cluster, costs=roofline),
        make_placement(graph, cluster, np.zeros(graph.num_ops, dtype=np.int64)),
    )
    assert right < alone.latency_s


@pytest.mark.parametrize("shares", [(7, 3), (3, 7)])
def test_each_member_holds_its_own_share(shares: tuple[int, int]) -> None:
    graph = decoder(replace(DENSE, inner=128))
    cluster, parts = unlike_pair(), members(graph, Shares(shares))
    held = split_score(graph, cluster, Split((0, 1), shares=shares)).peak_bytes
    weights = [member.weight_bytes[member.weight_holders()].sum() for member in parts]
    for d, member in enumerate(parts):
        device = np.zeros(graph.num_ops, dtype=np.int64)
        alone = solve.simulate(
            Question(member, cluster, costs=roofline), make_placement(member, cluster, device)
        )
        assert held[d] == alone.peak_bytes[0] > weights[d]
    assert held[0] != held[1]


def test_shares_are_kept_in_files_and_bad_ones_refused(tmp_path: Path) -> None:
    graph, cluster = decoder(replace(DENSE, inner=128)), unlike_pair()
    device = np.zeros(graph.num_ops, dtype=np.int64)

    def placed(shares: tuple[int, ...]) -> Placement:
        return make_placement(graph, cluster, device, splits=(Split((0, 1), shares=shares),))

    save_placement(placed((7, 3)), tmp_path / "p.json")
    assert load_placement(tmp_path / "p.json").splits == (Split((0, 1), shares=(7, 3)),)
    for shares, told in (((7,), "has 1 shares"), ((7, 0), "whole numbers of 1 and more")):
        with pytest.raises(PlacementError, match=told):
            require(placed(shares), graph, cluster)


def test_new_ops_are_divided_by_the_kernel_class_of_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = decoder(MIXTURE)
    kinds = ("linear", "_grouped_mm", "scaled_dot_product_attention", "embedding")
    assert set(kinds) < set(graph.op_types)
    for kind in kinds[:3]:
        monkeypatch.setitem(ATEN, f"new_{kind}", ATEN[kind])
    renamed = tuple(f"new_{kind}" if kind in kinds[:3] else kind for kind in graph.op_types)
    old, new = division_of(graph), division_of(replace(graph, op_types=renamed))
    assert (old.columns.role == new.columns.role).all()
    assert (old.columns.role != Role.WHOLE).any()
    assert (old.experts.role == new.experts.role).all()
    assert old.partial == new.partial


def test_members_look_up_their_share_where_images_replace_tokens(tmp_path: Path) -> None:
    """Kimi K2.5 writes over the places of its images before it reads the table."""
    pytest.importorskip("transformers.models.kimi_k25")
    text = {k: v for k, v in generating_config("deepseek_v3").items() if k != "architectures"}
    config = {
        "model_type": "kimi_k25", "architectures": ["Kimi_K25ForConditionalGeneration"],
        "dtype": "bfloat16", "text_config": text, "image_token_id": 3,
        "vision_config": {
            "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
            "intermediate_size": 48,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    graph = load(f"hf:{tmp_path}?prompt=9&new=2&max_num_batched_tokens=64")
    division = division_of(graph)
    tables = [op for op, kind in enumerate(graph.op_types) if kind == "embedding"]
    assert [division.columns.role[op] for op in tables] == [Role.LOOK_UP] * 2
    member = member_graph(division, Shares((1, 1)), 0)
    assert 2 * member.weight_bytes[tables[0]] == graph.weight_bytes[tables[0]]
