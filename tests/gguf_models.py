"""Small GGUF files: headers as llama.cpp writes them, tensors of zeros unless they are drawn; and
all placements of them that llama.cpp's flags can say."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import Placement, make_placement
from gdp.targets.llamacpp.flags import slots_of

MIB = 1 << 20
WIDTH, INNER, VOCABULARY, HEADS, KEY_HEADS = 256, 512, 1024, 4, 2


def _describe(
    writer: Any, layers: int, experts: int, used: int, empty: tuple[int, ...], keys: int
) -> None:
    """The fields of the header."""
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    for add, size in ((writer.add_head_count, HEADS), (writer.add_head_count_kv, keys),
                      (writer.add_feed_forward_length, INNER)):  # fmt: skip
        add([0 if i in empty else size for i in range(layers)] if empty else size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(used)


def write_gguf(
    path: Path, *, layers: int = 3, experts: int = 0, used: int = 2, tied: bool = False,
    architecture: str = "llama", kind: str = "Q4_K",
    extra: dict[str, tuple[int, ...]] | None = None, seed: int | None = None,
    empty: tuple[int, ...] = (), context: int = 512,
    keys: int = KEY_HEADS, words: tuple[str, Sequence[str], int] | None = None,
) -> Path:  # fmt: skip
    """A model with quantised products and F32 norms, `experts` in each block where asked, some
    blocks left empty; with a seed weights are drawn, of kinds that the gguf package can quantise
    to, such as F16 and Q8_0; words are the kind of a vocabulary, its tokens and the first one of a
    text."""
    gguf = pytest.importorskip("gguf", reason="needs the gguf package")
    writer = gguf.GGUFWriter(path, architecture)
    _describe(writer, layers, experts, used, empty, keys)
    writer.add_tokenizer_model("none" if words is None else words[0])
    if words is not None:
        writer.add_token_list(words[1])
        writer.add_add_bos_token(True)
        writer.add_bos_token_id(words[2])
    writer.add_context_length(context)
    rng = None if seed is None else np.random.default_rng(seed)

    def quantised(name: str, *shape: int) -> None:
        type_ = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[type_]
        packed = np.zeros((*shape[:-1], shape[-1] // block * size), np.uint8)
        if rng is not None:
            drawn = rng.standard_normal(shape, dtype=np.float32) / shape[-1] ** 0.5
            packed = gguf.quants.quantize(drawn, type_).view(np.uint8)
        writer.add_tensor(name, packed, raw_dtype=type_)

    def plain(name: str, *shape: int) -> None:
        drawn = None if rng is None else 1 + 0.1 * rng.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, np.zeros(shape, np.float32) if drawn is None else drawn)

    key_width = WIDTH * keys // HEADS
    quantised("token_embd.weight", VOCABULARY, WIDTH)
    plain("output_norm.weight", WIDTH)
    if not tied:
        quantised("output.weight", VOCABULARY, WIDTH)
    for block in (block for block in range(layers) if block not in empty):
        at, many = f"blk.{block}.", (experts,) if experts else ()
        plain(at + "attn_norm.weight", WIDTH)
        plain(at + "ffn_norm.weight", WIDTH)
        quantised(at + "attn_q.weight", WIDTH, WIDTH)
        quantised(at + "attn_k.weight", key_width, WIDTH)
        quantised(at + "attn_v.weight", key_width, WIDTH)
        quantised(at + "attn_output.weight", WIDTH, WIDTH)
        if architecture == "qwen2":
            plain(at + "attn_q.bias", WIDTH)
        ending = "_exps" if experts else ""
        if experts:
            plain(at + "ffn_gate_inp.weight", experts, WIDTH)
        quantised(f"{at}ffn_gate{ending}.weight", *many, INNER, WIDTH)
        quantised(f"{at}ffn_up{ending}.weight", *many, INNER, WIDTH)
        quantised(f"{at}ffn_down{ending}.weight", *many, WIDTH, INNER)
        for name, shape in (extra or {}).items():
            plain(at + name, *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_bytes(graph: OpGraph) -> int:
    """Bytes of weights and caches, without the buffers that llama.cpp reserves."""
    return int(graph.weight_bytes[~graph.is_buffer].sum())


def box(*gpu_bytes: int, cpu_bytes: int = 64 * MIB) -> Cluster:
    """A slow CPU and GPUs of these sizes, links that are quick to begin."""
    gpus = [
        Device(f"gpu{i}", "gpu", {"default": 1e12}, 100e9, size) for i, size in enumerate(gpu_bytes)
    ]
    cpu = Device("cpu", "cpu", {"default": 1e11}, 10e9, cpu_bytes)
    return make_cluster("box", [cpu, *gpus], default_latency_s=1e-6)


def quick(*rates: float, link: float = 1e12, size: int = 64 * MIB) -> Cluster:
    """GPUs of these bytes a second, and links that hardly cost anything unless they are told to."""
    plain = box(*(size for _ in rates))
    gpus = (
        replace(d, bytes_per_s=r, flop_per_s={"default": 100 * r})
        for d, r in zip(plain.devices[1:], rates, strict=True)
    )
    return make_cluster(
        "quick", [plain.devices[0], *gpus], default_bytes_per_s=link, default_latency_s=1e-9
    )


def sayable(graph: OpGraph, cluster: Cluster) -> list[Placement]:
    """Every placement that the flags can say, one by one."""
    slots, found = slots_of(graph), []
    places = range(cluster.num_devices)
    for row in itertools.combinations_with_replacement(places, len(slots.layers)):
        mine = [i for i, d in enumerate(row) if d and len(slots.experts[i])]
        for k in range(len(mine) + 1):
            for away in itertools.combinations(mine, k):
                device = np.zeros(graph.num_ops, dtype=np.int64)
                for slot, d in enumerate(row):
                    device[slots.layers[slot]] = d
                    device[slots.experts[slot]] = 0 if slot in away else d
                found.append(make_placement(graph, cluster, device))
    return found


def write_projector(
    path: Path, *, width: int = 64, inner: int = 128, blocks: int = 2, side: int = 64,
    patch: int = 16, output: int = WIDTH, vision: bool = True,
) -> Path:  # fmt: skip
    """An image encoder of zeros in 16 bits, whose projector joins four patches in a row."""
    gguf = pytest.importorskip("gguf", reason="needs the gguf package")
    writer = gguf.GGUFWriter(path, "clip")
    sizes = {"image_size": side, "patch_size": patch, "feed_forward_length": inner,
             "block_count": blocks, "attention.head_count": 4}  # fmt: skip
    for key, size in (sizes | ({"embedding_length": width} if vision else {})).items():
        writer.add_uint32(f"clip.vision.{key}", size)
    shapes = {
        "v.patch_embd.weight": (width, 3, patch, patch),
        "v.position_embd.weight": ((side // patch) ** 2, width),
        "mm.0.weight": (4 * width, 4 * width), "mm.2.weight": (output, 4 * width),
    }  # fmt: skip
    for block in range(blocks):
        at = f"v.blk.{block}."
        shapes |= {f"{at}attn_{name}.weight": (width, width) for name in ("q", "k", "v", "out")}
        shapes |= {f"{at}ffn_up.weight": (inner, width), f"{at}ffn_down.weight": (width, inner)}
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
