"""Small PyTorch models of transformers' own classes, on the meta device or with weights."""

import os
from typing import Any

import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
torch: Any = pytest.importorskip("torch", reason="torch is not installed")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

_SMALL = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "dtype": "float32",
}  # fmt: skip
CONFIGS = {
    "bert": ("BertConfig", "AutoModelForMaskedLM", {}),
    "llama": ("LlamaConfig", "AutoModelForCausalLM", {"num_key_value_heads": 2}),
    "mixtral": (
        "MixtralConfig", "AutoModelForCausalLM",
        {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}  # fmt: skip


def config(family: str, **changed: Any) -> Any:
    name, _, more = CONFIGS[family]
    return getattr(transformers, name)(**{**_SMALL, **more, **changed})


def build(family: str, device: str = "meta", **changed: Any) -> tuple[Any, dict[str, Any]]:
    """A model in inference mode, and its inputs: one sequence of 16 tokens."""
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, CONFIGS[family][1]).from_config(config(family, **changed))
        ids = torch.arange(16).remainder(7).reshape(1, 16)
    inputs = {"input_ids": ids} | ({} if family == "bert" else {"use_cache": False})
    return model.eval(), inputs
