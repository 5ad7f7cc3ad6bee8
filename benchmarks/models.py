"""Models from configurations with random weights: torch modules, and training steps in JAX.

`benchmarks.executed` executes BERT, Llama, Mixtral and the JAX step; costs are fitted to others:

    gdp profile python:benchmarks.models:gpt2 ... --device torch:cpu -o p.json.gz

Functions without arguments return what `gdp place python:` takes. Those of `benchmarks.gpu` have
two sizes.
"""

import os
from collections.abc import Callable
from typing import Any

TORCH = ("resnet50", "bert", "gpt2", "llama", "mixtral")
JAX = ("attention_step", "dense_step")
TINY = "tiny"
"""A size of models for rehearsals; any other name is the full size."""


def _made(
    config: str, kind: str, tokens: int = 128, side: int = 224, **changed: Any
) -> tuple[Any, dict[str, Any]]:
    """A module of transformers with seeded weights, and one image or one sequence for it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import transformers as hf

    torch.manual_seed(0)
    module = getattr(hf, kind)(getattr(hf, config)(**changed)).eval()
    if hasattr(module.config, "num_channels"):
        return module, {"pixel_values": torch.randn(1, 3, side, side)}
    inputs: dict[str, Any] = {"input_ids": torch.arange(tokens).remainder(101)[None]}
    return module, inputs | (
        {"use_cache": False} if kind.endswith(("CausalLM", "HeadModel")) else {}
    )


_WIDE = {"hidden_size": 512, "num_attention_heads": 8, "vocab_size": 8000}
_GROUPED = _WIDE | {"num_key_value_heads": 4, "intermediate_size": 1408}


def bert() -> Any:
    """BERT-base without a head."""
    return _made("BertConfig", "BertModel")


def llama() -> Any:
    """A small Llama of 6 layers."""
    return _made("LlamaConfig", "LlamaForCausalLM", **_GROUPED, num_hidden_layers=6)


def mixtral() -> Any:
    """A small Mixtral: 4 layers of 8 experts, 2 of them for each token."""
    return _made("MixtralConfig", "MixtralForCausalLM", **_GROUPED, num_hidden_layers=4)


def gpt2() -> Any:
    """GPT-2 of 3 layers, to fit costs to."""
    return _made("GPT2Config", "GPT2LMHeadModel", n_embd=768, n_head=12, n_layer=3,
                 vocab_size=4000)  # fmt: skip


def distilbert() -> Any:
    """To fit costs to: narrower than BERT-base."""
    return _made("DistilBertConfig", "DistilBertModel", dim=512, n_heads=8, hidden_dim=2048,
                 n_layers=3)  # fmt: skip


def vit() -> Any:
    """To fit costs to."""
    return _made("ViTConfig", "ViTModel", hidden_size=384, num_attention_heads=6,
                 intermediate_size=1536, num_hidden_layers=3)  # fmt: skip


def resnet() -> Any:
    """To fit costs to."""
    return _made("ResNetConfig", "ResNetModel", depths=[1, 1, 1, 1])


def qwen2() -> Any:
    """To fit costs to: rotary positions and grouped queries, as Llama has, of other sizes."""
    return _made("Qwen2Config", "Qwen2ForCausalLM", hidden_size=384, num_attention_heads=6,
                 num_key_value_heads=2, intermediate_size=1024, num_hidden_layers=3,
                 vocab_size=4000)  # fmt: skip


def qwen2_moe() -> Any:
    """To fit costs to: experts, as Mixtral has, of other sizes."""
    return _made("Qwen2MoeConfig", "Qwen2MoeForCausalLM", hidden_size=384, num_attention_heads=6,
                 num_key_value_heads=2, moe_intermediate_size=512, num_experts=6,
                 num_experts_per_tok=2, shared_expert_intermediate_size=512,
                 num_hidden_layers=3, vocab_size=4000)  # fmt: skip


def jax_step() -> Any:
    """A training step of dense layers with plain gradient descent."""
    import jax
    import jax.numpy as jnp
    import optax

    def loss(params: Any, batch: Any) -> Any:
        x, wanted = batch
        for layer in params:
            x = jnp.tanh(x @ layer)
        return jnp.mean((x - wanted) ** 2)

    def shape(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    batch = shape(64, 512), shape(64, 512)
    return loss, ([shape(512, 512)] * 8, batch), {"optimizer": optax.sgd(0.1)}


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


def torch_model(name: str, size: str = "full") -> Any:
    """A `TorchModel` of `TORCH`."""
    from gdp.importers.pytorch.model import TorchModel

    config, kind, small, full = _CONFIGS[name]
    tiny = {"tokens": 16, "side": 32} | small
    module, inputs = _made(config, kind, **(tiny if size == TINY else full))
    return TorchModel(name, module, (), inputs, {"name": name})


def jax_function(name: str, size: str = "full") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step of `JAX` with plain gradient descent, and shapes of its arguments."""
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
