"""Every architecture that generates: prompt and step are placed, with the cache of the real model.

The cache of the graph is compared with the cache object that transformers returns when the model,
with random weights, reads the same prompt on the CPU.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers

from gdp.base.errors import ModelError
from gdp.graph.op_graph import OpGraph
from gdp.graph.request import Request
from gdp.importers.huggingface.model import huggingface_model
from gdp.importers.pytorch.caches import cache_of, read_prompt, refilled, states
from gdp.question.models import load
from tests.generating_configs import CONFIGS, generating_config, shorten_chunks

BATCH, TOKENS = 2, 9
SMALLER: dict[str, dict[str, int]] = {
    **{name: {"num_hidden_layers": 1} for name in ("llama", "mistral", "mamba", "deepseek_v3")},
    "bart": {"encoder_layers": 1, "decoder_layers": 1},
    "jamba": {"num_experts": 1},
}
"""What changes no cache of a layer: one of each kind, and no experts."""


def all_bytes(cache: Any) -> int:
    return sum(int(state.nbytes) for state in states(cache).values())


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    shortened = shorten_chunks(monkeypatch)

    def write(name: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps(generating_config(name) | shortened))
        return f"hf:{tmp_path}?batch={BATCH}&sequence={TOKENS}"

    return write


def cache_bytes(graph: OpGraph) -> int:
    """Of all caches, each once, whoever reads it."""
    first = np.unique(graph.weight_id, return_index=True)[1]
    return int(graph.cache_bytes[first].sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_step_holds_the_cache_of_the_real_model(name: str, written: Any) -> None:
    spec = written(name)
    prefill, step = load(spec), load(f"{spec}&decode")
    assert prefill.cache_bytes.sum() == 0
    assert step.flop.sum() < prefill.flop.sum()
    model = huggingface_model(spec, device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = model.module(**dict(model.kwargs) | {"use_cache": True})
    (_, cache), _ = cache_of(outputs), outputs.logits
    assert cache_bytes(step) == all_bytes(cache) > 0
    # Tied weights count once; beside parameters some buffers are read.
    parameters = sum(w.nbytes for w in model.module.parameters())
    buffers = sum(b.nbytes for b in model.module.buffers())
    first = np.unique(prefill.weight_id, return_index=True)[1]
    held = int(prefill.weight_bytes[first].sum())
    assert parameters <= held <= 1.01 * (parameters + buffers)  # and constants of the code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "new", "engine"),
    [("llama", 1, ""), ("mistral", 1, ""), ("gemma3", 2, ""), ("mamba", 2, ""), ("jamba", 1, ""),
     ("deepseek_v3", 2, ""), ("bart", 2, ""), ("gemma3", 2, "&max_num_batched_tokens=64")],
)  # fmt: skip
def test_a_context_reserves_what_a_request_of_as_many_tokens_fills(
    name: str, new: int, engine: str, tmp_path: Path
) -> None:
    """Windows of 6 tokens are not full at first; states of a fixed size do not grow. With an
    engine, keys and values are one cache."""
    config = generating_config(name) | SMALLER.get(name, {})
    (tmp_path / "config.json").write_text(json.dumps(config))

    def asked(prompt: int, new: int, context: int = 0) -> OpGraph:
        more = engine + (f"&context={context}" if context else "")
        return load(f"hf:{tmp_path}?batch=2&prompt={prompt}&new={new}{more}")

    plain, reserved = asked(2, new), asked(2, new, context=12)
    # An encoder has read the prompt: what the decoder writes grows.
    full = asked(2, 10) if name == "bart" else asked(11, 1)
    held = [graph.cache_bytes[graph.cache_bytes > 0].tolist() for graph in (reserved, full)]
    assert held[0] == held[1] != []
    more = reserved.cache_bytes - plain.cache_bytes
    assert (reserved.weight_bytes - plain.weight_bytes == more).all()
    assert reserved.request == Request(
        2, new, 2, context=12, is_served=bool(engine), pass_tokens=64 if engine else 0
    )
    assert (reserved.flop == plain.flop).all()
    with pytest.raises(ModelError, match=rf"context of 2 tokens holds no request of 2 \+ {new}: "):
        asked(2, new, context=2)


def test_states_are_the_tensors_with_dimensions_each_once() -> None:
    config = transformers.AutoConfig.for_model(**generating_config("gemma2"))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
    _, cache, encoded = read_prompt(model, {"input_ids": ids}, "gemma2")
    assert encoded is None
    # Two layers of two heads of 20; the first keeps all but one of its window of 6.
    assert {path: tuple(t.shape) for path, t in states(cache).items()} == {
        "layers.0.keys": (1, 2, 5, 20), "layers.0.values": (1, 2, 5, 20),
        "layers.1.keys": (1, 2, 9, 20), "layers.1.values": (1, 2, 9, 20),
    }  # fmt: skip
    assert all_bytes(cache) == 2 * 2 * (5 + 9) * 20 * 4
    fresh = [torch.full(t.shape, float(i)) for i, t in enumerate(states(cache).values())]
    again = refilled(cache, fresh)
    assert [t is f for t, f in zip(states(again).values(), fresh, strict=True)] == [True] * 4
    assert again.get_seq_length() == TOKENS
    assert states(cache)["layers.0.keys"].is_meta


def test_a_model_that_returns_no_cache_is_named() -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"tiny: reading a prompt on the meta device failed"):
        read_prompt(module, {}, "tiny")
