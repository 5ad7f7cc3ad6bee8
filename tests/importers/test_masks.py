"""Masks of tokens times tokens are in a graph where the model makes them when it runs."""

from pathlib import Path
from typing import Any

import pytest

from gdp.graph.op_graph import OpGraph
from gdp.question.models import load

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
TOKENS = 4096


def _saved(folder: Path, family: str = "llama", **changed: Any) -> Path:
    from tests.torch_models import config

    config(family, max_position_embeddings=2 * TOKENS, **changed).save_pretrained(folder)
    return folder


def _squares(graph: OpGraph) -> int:
    """Tensors of at least a byte for each pair of tokens."""
    return int((graph.held_bytes >= TOKENS**2).sum())


@pytest.mark.parametrize("phases", [f"sequence={TOKENS}", f"prompt={TOKENS}&new=8"])
def test_fused_attention_holds_no_mask(phases: str, tmp_path: Path) -> None:
    spec = f"hf:{_saved(tmp_path)}?task=causal-lm&{phases}"
    graph = load(spec)
    attention = [
        detail
        for kind, detail in zip(graph.op_types, graph.detail, strict=True)
        if kind == "scaled_dot_product_attention"
    ]
    assert attention
    assert attention[0].attributes["is_causal"] == 1
    assert all(len(detail.input_shapes) == 3 for detail in attention)  # query, keys, values
    assert _squares(graph) == 0


def test_attention_of_single_ops_keeps_its_mask_and_scores(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    document = path / "config.json"
    asks = document.read_text().replace("{", '{"attn_implementation": "eager",', 1)
    document.write_text(asks)
    graph = load(f"hf:{path}?task=causal-lm&sequence={TOKENS}")
    # At least the mask, and in each of both layers the scores and their softmax.
    assert _squares(graph) >= 5


@pytest.mark.slow
def test_a_window_shorter_than_the_context_has_a_mask(tmp_path: Path) -> None:
    """Torch's fused attention knows no window, so that transformers makes its mask."""
    short = _saved(tmp_path / "short", "mixtral", sliding_window=TOKENS // 4)
    wide = _saved(tmp_path / "wide", "mixtral", sliding_window=2 * TOKENS)
    spec = f"?task=causal-lm&sequence={TOKENS}"
    assert _squares(load(f"hf:{wide}{spec}")) == 0
    assert _squares(load(f"hf:{short}{spec}")) >= 1


def test_positions_of_several_sequences_in_a_row_keep_their_mask() -> None:
    """Positions from outside may tell packed sequences apart, which are masked from each other."""
    from gdp.importers.pytorch.model import trace_torch
    from tests.torch_models import build

    module, _ = build("llama")
    tokens = torch.zeros(1, 64, dtype=torch.long)
    inputs = {"input_ids": tokens, "use_cache": False}
    alone = trace_torch(module, (), inputs)
    packed = trace_torch(module, (), {**inputs, "position_ids": tokens})
    masked = [
        sum(len(d.input_shapes) == 4 for k, d in zip(g.op_types, g.detail, strict=True)
            if k == "scaled_dot_product_attention")
        for g in (alone, packed)
    ]  # fmt: skip
    assert masked == [0, 2]
