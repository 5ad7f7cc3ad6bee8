"""Models that `benchmarks.runtimes.executed` executes, and others that costs are fitted to.

    gdp profile python:benchmarks.runtimes.executed_models:gpt2 ... --device torch:cpu -o p.json.gz

names them one by one. Every function returns what `gdp place python:` takes: weights are random.
"""

import os
from typing import Any

TOKENS = 128


def _made(config: str, kind: str, **changed: Any) -> tuple[Any, dict[str, Any]]:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import transformers as hf

    torch.manual_seed(0)
    module = getattr(hf, kind)(getattr(hf, config)(**changed)).eval()
    if hasattr(module.config, "num_channels"):
        return module, {"pixel_values": torch.randn(1, 3, 224, 224)}
    inputs: dict[str, Any] = {"input_ids": torch.arange(TOKENS).remainder(101)[None]}
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
    """To fit costs to."""
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
