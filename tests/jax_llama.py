"""A Llama in JAX, by the names and axes of the checkpoint of transformers."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def norm(x: Any, scale: Any, small: float) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + small) * scale


def turned(x: Any, base: float) -> Any:
    """Rotary positions of [T, heads, size]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[0])[:, None] / base ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def logits(config: dict[str, Any], p: dict[str, Any], ids: Any) -> Any:
    """Logits [T, V] of tokens [T]."""
    heads, keys, size = (
        config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    tokens = ids.shape[0]
    x = p["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):

        def linear(x: Any, name: str, i: int = i) -> Any:
            return x @ p[f"model.layers.{i}.{name}.weight"].T

        y = norm(x, p[f"model.layers.{i}.input_layernorm.weight"], 1e-6)
        q, k, v = (linear(y, f"self_attn.{part}_proj").reshape(tokens, -1, size) for part in "qkv")
        q, k = turned(q, 1e4), turned(k, 1e4)
        k, v = (jnp.repeat(a, heads // keys, axis=1) for a in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / size**0.5
        scores = jnp.where(jnp.tri(tokens, dtype=bool), scores, -jnp.inf)
        mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)
        x = x + linear(mixed.reshape(tokens, -1), "self_attn.o_proj")
        y = norm(x, p[f"model.layers.{i}.post_attention_layernorm.weight"], 1e-6)
        gate = jax.nn.silu(linear(y, "mlp.gate_proj"))
        x = x + linear(gate * linear(y, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, p["model.norm.weight"], 1e-6) @ p["lm_head.weight"].T


def from_checkpoint() -> tuple[Any, tuple[dict[str, Any], Any]]:
    """The function and its arguments, of the folder JAX_LLAMA."""
    from safetensors.numpy import load_file

    folder = Path(os.environ["JAX_LLAMA"])
    config = json.loads((folder / "config.json").read_text())
    ids = np.arange(6) + 3
    return lambda p, ids: logits(config, p, ids), (load_file(folder / "model.safetensors"), ids)
