"""GGUF files with random weights for llama.cpp: dense models and mixtures of experts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gdp.importers.gguf import import_gguf

VOCABULARY = 8192
DRAWN_ROWS = 256
"""Rows of a matrix that are drawn; the others repeat them, which no kernel can tell."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model of llama's architecture."""

    name: str
    kind: str  # how products are stored
    layers: int
    width: int
    inner: int  # of the feed-forward, of each expert in a mixture
    heads: int
    key_heads: int
    experts: int = 0
    used: int = 2

    @property
    def parameters(self) -> float:
        """Billions of weights."""
        keys = self.width * self.key_heads // self.heads
        block = 2 * self.width * (self.width + keys)
        block += 3 * self.width * self.inner * max(self.experts, 1)
        return (self.layers * block + 2 * VOCABULARY * self.width) / 1e9


SIZES = (
    ModelSize("dense", "F16", 12, 768, 2048, 12, 4),
    ModelSize("dense", "Q8_0", 16, 1024, 4096, 16, 4),
    ModelSize("dense", "Q4_K", 16, 1536, 6144, 12, 4),
    ModelSize("mixture", "Q8_0", 12, 768, 1024, 12, 4, experts=8),
    ModelSize("mixture", "Q4_K", 12, 1024, 1536, 16, 4, experts=8),
)
TINY = ModelSize("dense", "Q8_0", 4, 256, 512, 4, 2)
"""To see whether all works."""


def packed(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random weights as they are stored: quantised by the gguf package, or for Q4_K, to which it
    cannot quantise, random blocks of that form."""
    gguf = import_gguf()
    stored = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[stored]
    columns, total = shape[-1], int(np.prod(shape[:-1]))
    count = min(DRAWN_ROWS, total)
    if kind == "Q4_K":
        drawn = rng.integers(0, 256, (count, columns // block, size), dtype=np.uint8)
        scale = np.float16(0.02 / columns**0.5)
        # The two scales of a block: of its weights, which are 0 to 15 times 0 to 63, and of the
        # minima that are taken from them.
        drawn[..., :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
        drawn = drawn.reshape(count, -1)
    else:
        plain = rng.standard_normal((count, columns), dtype=np.float32) / np.float32(columns**0.5)
        drawn = gguf.quants.quantize(plain, stored).view(np.uint8)
    whole = np.tile(drawn, (-(-total // count), 1))[:total]
    return np.ascontiguousarray(whole).reshape(*shape[:-1], -1)


def write_model(path: Path, size: ModelSize, seed: int = 0) -> Path:
    """Write the file of a model with weights drawn with a seed."""
    gguf, rng = import_gguf(), np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, size)

    def product(name: str, *shape: int) -> None:
        stored = gguf.GGMLQuantizationType[size.kind]
        writer.add_tensor(f"{name}.weight", packed(rng, size.kind, shape), raw_dtype=stored)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size.width, np.float32))

    keys = size.width * size.key_heads // size.heads
    product("token_embd", VOCABULARY, size.width)
    norm("output_norm")
    product("output", VOCABULARY, size.width)
    for layer in range(size.layers):
        at, many = f"blk.{layer}.", (size.experts,) if size.experts else ()
        norm(at + "attn_norm")
        norm(at + "ffn_norm")
        product(at + "attn_q", size.width, size.width)
        product(at + "attn_k", keys, size.width)
        product(at + "attn_v", keys, size.width)
        product(at + "attn_output", size.width, size.width)
        if size.experts:
            router = rng.standard_normal((size.experts, size.width), dtype=np.float32)
            writer.add_tensor(f"{at}ffn_gate_inp.weight", router)
        end = "_exps" if size.experts else ""
        product(f"{at}ffn_gate{end}", *many, size.inner, size.width)
        product(f"{at}ffn_up{end}", *many, size.inner, size.width)
        product(f"{at}ffn_down{end}", *many, size.width, size.inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer: Any, size: ModelSize) -> None:
    """The fields of the header."""
    writer.add_embedding_length(size.width)
    writer.add_block_count(size.layers)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.key_heads)
    writer.add_feed_forward_length(size.inner)
    writer.add_context_length(4096)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")
    if size.experts:
        writer.add_expert_count(size.experts)
        writer.add_expert_used_count(size.used)
