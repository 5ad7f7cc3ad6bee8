"""The models, from configurations with random weights: torch modules, and training steps in JAX."""

import os
from collections.abc import Callable
from typing import Any

TORCH = ("resnet50", "bert", "gpt2", "llama", "mixtral")
JAX = ("attention_step", "dense_step")
TINY = "tiny"
"""A size of models for rehearsals; any other name is the full size."""

_SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4,
}  # fmt: skip
_LLAMA = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}
_CONFIGS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "resnet50": ("ResNetConfig", "ResNetForImageClassification",
                 {"embedding_size": 32, "hidden_sizes": [64, 128], "depths": [1, 1]}, {}),
    "bert": ("BertConfig", "BertForMaskedLM", _SMALL, {}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel",
             {"vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 4}, {}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _SMALL | {"num_key_value_heads": 2},
              _LLAMA | {"intermediate_size": 2816, "num_hidden_layers": 12}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM",
                _SMALL | {"num_key_value_heads": 2, "num_local_experts": 4},
                _LLAMA | {"intermediate_size": 1792, "num_hidden_layers": 4}),
}  # fmt: skip
"""Configuration and model of transformers, with what is changed in tiny and in full size."""


def torch_model(name: str, size: str = "full", device: str = "cpu") -> Any:
    """A `TorchModel` with seeded weights: one image of 224 x 224, or one sequence."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import transformers as hf

    from gdp.importers.pytorch.model import TorchModel

    config, kind, small, full = _CONFIGS[name]
    made = getattr(hf, config)(**(small if size == TINY else full))
    torch.manual_seed(0)
    with torch.device(device):
        module = getattr(hf, kind)(made).eval()
        if name == "resnet50":
            side = 32 if size == TINY else 224
            inputs: dict[str, Any] = {"pixel_values": torch.zeros(1, 3, side, side)}
        else:
            inputs = {"input_ids": torch.arange(16 if size == TINY else 128).remainder(7)[None]}
    if name in ("gpt2", "llama", "mixtral"):
        inputs["use_cache"] = False
    return TorchModel(name, module, (), inputs, {"name": name})


def jax_function(name: str, size: str = "full") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step with plain gradient descent, and shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    width, layers, tokens = (32, 2, 16) if size == TINY else (768, 6, 512)

    def shape(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    def dense(params: Any, x: Any) -> Any:
        for layer in params:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return x

    def attention(params: Any, x: Any) -> Any:
        for layer in params:
            q, k, v = jnp.split(x @ layer["qkv"], 3, axis=-1)
            x = x + jax.nn.softmax(q @ k.T / width**0.5) @ v
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        return x

    forward = attention if name == "attention_step" else dense
    each = {"up": shape(width, 4 * width), "down": shape(4 * width, width)}
    if name == "attention_step":
        each["qkv"] = shape(width, 3 * width)

    def step(params: Any, x: Any) -> Any:
        gradient = jax.grad(lambda p: jnp.mean(jnp.square(forward(p, x))))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    return step, ([each] * layers, shape(tokens, width))
