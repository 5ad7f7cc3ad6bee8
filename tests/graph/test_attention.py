"""Attention as engines compute it: one op between two products, whatever the code spells out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gdp.graph.attention import FUSED, with_fused_attention
from gdp.graph.op_graph import INPUT, OUTPUT, GraphBuilder, OpDetail, OpGraph
from gdp.graph.serving import Served, served

TOKENS, WIDTH = 8, 4
SQUARE = 4 * TOKENS * TOKENS


class Spelled:
    """Attention written out op by op, one number of four bytes for each element."""

    def __init__(self) -> None:
        self.graph = GraphBuilder()
        self.x = self.add("x", INPUT, [], TOKENS * WIDTH)

    def add(self, name: str, kind: str, reads: Sequence[int], numbers: int, **more: Any) -> int:
        moved = sum(self.graph.tensors[t][1] for t in reads) + 4 * numbers
        moved += more.get("weight_bytes", 0)
        flop = 0.0 if kind in (INPUT, OUTPUT) else float(numbers)
        op = self.graph.add_op(name, kind, reads=reads, flop=flop, traffic_bytes=moved, **more)
        return self.graph.make_tensor(op, 4 * numbers) if numbers else -1

    def projected(self, name: str) -> int:
        return self.add(name, "linear", [self.x], TOKENS * WIDTH, weight_bytes=64, scope="attn")

    def masked(self, scores: int) -> int:
        positions = self.add("positions", "arange", [], TOKENS)
        mask = self.add("mask", "le", [positions], TOKENS * TOKENS)
        return self.add("masked", "add", [scores, mask], TOKENS * TOKENS)

    def built(self, *outputs: int) -> OpGraph:
        for i, tensor in enumerate(outputs):
            self.add(f"y{i}", OUTPUT, [tensor], 0)
        return self.graph.build("attention")


def _scores(code: Spelled) -> int:
    both = [code.projected("q"), code.projected("k")]
    return code.add("scores", "bmm", both, TOKENS * TOKENS, scope="attn")


def _of_values(code: Spelled, weights: int) -> int:
    return code.add("out", "bmm", [weights, code.projected("v")], TOKENS * WIDTH, scope="attn")


def test_scores_and_masks_of_positions_are_gone() -> None:
    """By hand: 3 x 32 numbers of 4 bytes come in, 32 leave; FLOPs of two products, a sum and a
    softmax add up, those of the mask are gone."""
    code = Spelled()
    scaled = code.add("scaled", "mul", [_scores(code)], TOKENS * TOKENS)
    weights = code.add("weights", "softmax", [code.masked(scaled)], TOKENS * TOKENS)
    before = code.built(_of_values(code, weights))
    graph = with_fused_attention(before)
    out = graph.op_types.index(FUSED)
    assert sorted(set(graph.op_names) - {graph.op_names[out]}) == ["k", "q", "v", "x", "y0"]
    assert graph.scope[out] == "attn"
    assert graph.memory_traffic_bytes[out] == 4 * 4 * TOKENS * WIDTH
    assert graph.flop[out] == 4 * TOKENS * TOKENS + TOKENS * WIDTH
    assert graph.tensor_bytes.max() == 4 * TOKENS * WIDTH
    assert graph.weight_bytes.sum() == before.weight_bytes.sum() == 3 * 64
    # Of a prompt 36 of 64 pairs are seen; a step sees all keys.
    prompt, step = (served(before, Served(tokens, 1, TOKENS)) for tokens in (TOKENS, 1))
    assert prompt.flop[out] == graph.flop[out] * 36 / 64
    assert step.flop[out] == graph.flop[out]


def test_attention_without_a_mask_sees_all_keys() -> None:
    """An encoder within a decoder: nothing says that it is causal."""
    code = Spelled()
    weights = code.add("weights", "softmax", [_scores(code)], TOKENS * TOKENS)
    before = code.built(_of_values(code, weights))
    assert served(before, Served(TOKENS, 1, TOKENS)).flop.sum() == before.flop.sum()


def test_copies_of_keys_and_caches_are_read_where_they_are() -> None:
    """Keys are put behind those of a cache, then repeated for two heads: neither is written."""
    code = Spelled()
    held = {"weight_bytes": 256, "cache_bytes": 256, "scope": "attn"}
    keys = code.add("keys", "cat", [code.projected("k")], 2 * TOKENS * WIDTH, **held)
    heads = code.add("heads", "expand", [keys], 4 * TOKENS * WIDTH)
    scores = code.add("scores", "bmm", [code.projected("q"), heads], 2 * TOKENS * TOKENS)
    weights = code.add("weights", "_softmax", [scores], 2 * TOKENS * TOKENS)
    graph = with_fused_attention(code.built(_of_values(code, weights)))
    out = graph.op_types.index(FUSED)
    assert graph.cache_bytes[out] == graph.weight_bytes[out] == 256
    assert graph.memory_traffic_bytes[out] == 256 + 4 * 4 * TOKENS * WIDTH


def test_a_mask_that_an_input_decides_stays() -> None:
    code = Spelled()
    padding = code.add("padding", INPUT, [], TOKENS)
    mask = code.add("mask", "expand", [padding], TOKENS * TOKENS)
    masked = code.add("masked", "add", [_scores(code), mask], TOKENS * TOKENS)
    weights = code.add("weights", "softmax", [masked], TOKENS * TOKENS)
    graph = with_fused_attention(code.built(_of_values(code, weights)))
    assert "padding" in graph.op_names
    assert FUSED in graph.op_types
    assert graph.num_uses == 3 + 3 + 1 + 1  # projections, q k v, the mask, the output


def test_what_others_read_of_it_is_kept() -> None:
    """Weights of attention that are an output exist."""
    code = Spelled()
    weights = code.add("weights", "softmax", [_scores(code)], TOKENS * TOKENS)
    graph = with_fused_attention(code.built(_of_values(code, weights), weights))
    assert SQUARE in graph.tensor_bytes
    assert "weights" not in graph.op_names


@pytest.mark.parametrize("kind", ["topk", "linear"])
def test_scores_that_pass_through_other_ops_are_not_fused(kind: str) -> None:
    """A choice of the best scores, or weights that mix heads, stand between: no kernel has them."""
    code = Spelled()
    scores, more = _scores(code), {"weight_bytes": 16} if kind == "linear" else {}
    other = code.add("other", kind, [scores], TOKENS * TOKENS, **more)
    reads = [scores, other] if kind == "topk" else [other]
    mixed = code.add("mixed", "add", reads, TOKENS * TOKENS)
    weights = code.add("weights", "softmax", [mixed], TOKENS * TOKENS)
    before = code.built(_of_values(code, weights))
    assert with_fused_attention(before).op_names == before.op_names


def test_a_router_is_no_attention() -> None:
    code = Spelled()
    logits = code.add("router", "linear", [code.x], TOKENS * 2, weight_bytes=8)
    chosen = code.add("chosen", "softmax", [logits], TOKENS * 2)
    experts = code.add("experts", "bmm", [chosen, code.x], TOKENS * WIDTH)
    before = code.built(experts)
    assert with_fused_attention(before).digest == before.digest


def decoder(tokens: int, batch: int) -> OpGraph:
    """An embedding, a product and a head over 100 words."""
    code = GraphBuilder()
    at = code.make_tensor(code.add_op("x", INPUT), 8 * tokens * batch)
    for name, width in (("embed", 4), ("up", 8), ("head", 100)):
        size = 2 * tokens * batch * width
        op = code.add_op(
            name, "embedding" if name == "embed" else "linear", reads=[at], flop=float(size),
            traffic_bytes=1000.0 + size, weight_bytes=1000,
            detail=OpDetail(output_shapes=((batch, tokens, width),)),
        )  # fmt: skip
        at = code.make_tensor(op, size)
    code.add_op("y", OUTPUT, reads=[at])
    return code.build("decoder")


@pytest.mark.parametrize(("batch", "chunks"), [(1, 2), (4, 8)])
def test_prompts_are_computed_in_chunks(batch: int, chunks: int) -> None:
    before = decoder(64, batch)
    graph = served(before, Served(64, batch, 32))
    assert graph.chunks.tolist() == [1, chunks, chunks, chunks, 1]
    up, head, embed = (graph.op_index[name] for name in ("up", "head", "embed"))
    made = dict(zip(graph.producer.tolist(), graph.held_bytes.tolist(), strict=True))
    assert made[up] == 2 * 32 * 8
    # Logits of the last token of each sequence, and never of all of a prompt.
    assert graph.sent_bytes[graph.producer == head].tolist() == [2 * batch * 100]
    assert graph.flop[head] == before.flop[head] / 64
    # Every chunk reads the weights; an embedding reads the rows of its tokens.
    assert graph.memory_traffic_bytes[up] == before.memory_traffic_bytes[up] + 1000 * (chunks - 1)
    assert graph.memory_traffic_bytes[embed] == before.memory_traffic_bytes[embed]
    assert graph.weight_bytes.sum() == before.weight_bytes.sum()


def test_a_step_of_decoding_is_one_pass() -> None:
    before = decoder(1, 16)
    assert served(before, Served(1, 16, 32)).digest == before.digest


def test_random_attentions_keep_weights_and_their_order() -> None:
    """Several in a row, of random sizes: what is held stays, and what is moved never grows."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        code = Spelled()
        for layer in range(int(rng.integers(1, 4))):
            names = iter(f"{layer}.{i}" for i in range(20))
            q, k, v = (
                code.add(next(names), "linear", [code.x], TOKENS * WIDTH,
                         weight_bytes=int(rng.integers(1, 99)))
                for _ in range(3)
            )  # fmt: skip
            at = code.add(next(names), "matmul", [q, k], TOKENS * TOKENS)
            for _ in range(int(rng.integers(0, 3))):
                at = code.add(next(names), str(rng.choice(["mul", "to", "tanh"])), [at], TOKENS**2)
            at = code.add(next(names), "softmax", [at], TOKENS * TOKENS)
            code.x = code.add(next(names), "matmul", [at, v], TOKENS * WIDTH)
        before = code.built(code.x)
        graph = with_fused_attention(before)
        assert graph.weight_bytes.sum() == before.weight_bytes.sum()
        assert graph.flop.sum() == before.flop.sum()
        assert graph.memory_traffic_bytes.sum() < before.memory_traffic_bytes.sum()
        assert graph.tensor_bytes.max() == 4 * TOKENS * WIDTH


@pytest.mark.parametrize(("bits", "kept"), [(0, 256), (8, 64), (64, 256)])
def test_keys_and_values_are_stored_in_the_bits_asked_for(bits: int, kept: int) -> None:
    """Of 32-bit numbers a quarter in 8 bits; a state that is no attention's stays as it is."""
    code = Spelled()
    held = {"weight_bytes": 256, "cache_bytes": 256, "scope": "attn"}
    keys = code.add("keys", "cat", [code.projected("k")], 2 * TOKENS * WIDTH, **held)
    scores = code.add("scores", "bmm", [code.projected("q"), keys], TOKENS * TOKENS)
    weights = code.add("weights", "softmax", [scores], TOKENS * TOKENS)
    out = _of_values(code, weights)
    state = code.add("state", "mul", [out], TOKENS * WIDTH, weight_bytes=40, cache_bytes=40)
    graph = served(code.built(state), Served(1, 1, 1, bits))
    attention = graph.op_types.index(FUSED)
    assert graph.cache_bytes[attention] == graph.weight_bytes[attention] == kept
    assert graph.memory_traffic_bytes[attention] == kept + 4 * 4 * TOKENS * WIDTH
    assert graph.cache_bytes[graph.op_index["state"]] == 40
