"""Blocks of other kinds in GGUF files: caches by hand, and all bytes are counted."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gdp.base.errors import ModelError
from gdp.graph.op_graph import OpGraph
from gdp.importers.gguf_caches import Heads, row_bytes
from gdp.importers.gguf_header import GgufHeader
from gdp.question.models import load
from tests.fuzz import gguf_files
from tests.gguf_models import stored_bytes

pytest.importorskip("gguf", reason="needs the gguf package")

WIDTH, VOCABULARY = 16, 32
CELL = 2 * 2 * 8 * 2  # bytes of keys and values of a token: two heads of 8, F16
ATTENTION = {"attn_norm": [16], "attn_q": [16, 16], "attn_k": [16, 16], "attn_v": [16, 16],
             "attn_output": [16, 16]}  # fmt: skip
DENSE = {"ffn_norm": [16], "ffn_gate": [16, 24], "ffn_up": [16, 24], "ffn_down": [24, 16]}
EXPERTS = {"ffn_norm": [16], "ffn_gate_inp": [16, 4], "ffn_gate_exps": [16, 8, 4],
           "ffn_up_exps": [16, 8, 4], "ffn_down_exps": [8, 16, 4]}  # fmt: skip
FUSED = {"ffn_gate_inp": [16, 4], "ffn_gate_up_exps": [16, 16, 4], "ffn_down_exps": [8, 16, 4],
         "ffn_gate_inp_shexp": [16], "ffn_gate_shexp": [16, 8], "ffn_up_shexp": [16, 8],
         "ffn_down_shexp": [8, 16]}  # fmt: skip
DELTA = {"attn_norm": [16], "post_attention_norm": [16], "attn_qkv": [16, 32],
         "attn_gate": [16, 16], "ssm_conv1d": [4, 32], "ssm_dt.bias": [2], "ssm_a.": [2],
         "ssm_norm": [8], "ssm_out": [16, 16]}  # fmt: skip
NEXT = DELTA | {"ssm_in": [16, 48], "ssm_ba": [16, 4]}
DELTA |= {"ssm_beta": [16, 2], "ssm_alpha": [16, 2]}
GATED = {**ATTENTION, "attn_q": [16, 32], "attn_q_norm": [8], "attn_k_norm": [8],
         "post_attention_norm": [16]}  # fmt: skip
MAMBA = {"attn_norm": [16], "ssm_in": [16, 64], "ssm_conv1d": [4, 32], "ssm_conv1d.bias": [32],
         "ssm_x": [32, 9], "ssm_dt": [1, 32], "ssm_dt.bias": [32], "ssm_a.": [4, 32],
         "ssm_d.": [32], "ssm_out": [32, 16]}  # fmt: skip
MAMBA_2 = {"attn_norm": [16], "ssm_in": [16, 76], "ssm_conv1d": [4, 40], "ssm_dt.bias": [4],
           "ssm_a.": [1, 4], "ssm_d.": [1, 4], "ssm_norm": [32, 1],
           "ssm_out": [32, 16]}  # fmt: skip
LATENT = {"attn_norm": [16], "attn_q_a": [16, 8], "attn_q_a_norm": [8], "attn_q_b": [8, 24],
          "attn_kv_a_mqa": [16, 12], "attn_kv_a_norm": [8], "attn_k_b": [8, 8, 2],
          "attn_v_b": [8, 8, 2], "attn_output": [16, 16]}  # fmt: skip
INDEXED = LATENT | {
    "indexer.attn_k.weight": [16, 4],
    "indexer.attn_q_b.weight": [8, 8],
    "indexer.proj.weight": [16, 2],
    "indexer.attn_k_norm.weight": [4],
}
SHORT = {"attn_norm": [16], "shortconv.conv": [3, 16], "shortconv.in_proj": [16, 48],
         "shortconv.out_proj": [16, 16]}  # fmt: skip
KIMI = {**ATTENTION, "ssm_conv1d_q": [4, 16], "ssm_conv1d_k": [4, 16], "ssm_conv1d_v": [4, 16],
        "ssm_f_a": [16, 8], "ssm_f_b": [8, 16], "ssm_g_a": [16, 8], "ssm_g_b": [8, 16],
        "ssm_beta": [16, 2], "ssm_a.": [1, 2], "ssm_dt.bias": [16], "ssm_norm": [8]}  # fmt: skip
DRAFT = {**ATTENTION, **EXPERTS, "nextn.eh_proj": [32, 16], "nextn.enorm": [16]}
SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 32, "ssm.state_size": 4, "ssm.group_count": 1}
DELTA_NET = {"ssm.conv_kernel": 4, "ssm.inner_size": 16, "ssm.state_size": 8, "ssm.group_count": 1}
MOE = {"expert_used_count": 2, "expert_count": 4}
NONE, FFN = {}, {"attention.head_count": [2, 0], "attention.head_count_kv": [2, 0]}


class Kind(NamedTuple):
    """Two blocks of an architecture, and the bytes that they cache by hand."""

    architecture: str
    blocks: list[dict[str, list[int]]]
    fields: dict[str, Any]
    caches: tuple[int, ...]  # of 2000 tokens
    grows: tuple[bool, bool] = (True, True)  # with the number of tokens


MAMBA_STATE = 4 * (3 * (32 + 2 * 4) + 32 * 4)  # F32: inputs of the convolution, and the state
FULL = 2000 * CELL
WINDOW = 768 * CELL  # 128 tokens and 512 of a micro-batch, in steps of 256
KINDS = {
    "deci": Kind("deci", [ATTENTION | DENSE, DENSE], {**FFN, "feed_forward_length": [24, 24]},
                 (FULL, 0)),
    "deci, linear": Kind("deci", [{"attn_norm": [16], "attn_output": [16, 16], **DENSE},
                                  ATTENTION], {"attention.head_count_kv": [0, 2]}, (0, FULL)),
    "qwen3next": Kind("qwen3next", [NEXT | FUSED, GATED | FUSED], {**DELTA_NET, **MOE},
                      (4 * (3 * (16 + 2 * 8) + 16 * 8), FULL), (False, True)),
    "qwen35moe": Kind("qwen35moe", [DELTA | FUSED, GATED | FUSED], {**DELTA_NET, **MOE},
                      (4 * (3 * (16 + 2 * 8) + 16 * 8), FULL), (False, True)),
    "mamba": Kind("mamba", [MAMBA, MAMBA], SSM | {"ssm.group_count": 0},
                  (4 * (3 * 32 + 32 * 4),) * 2, (False, False)),
    "jamba": Kind("jamba", [MAMBA | DENSE, ATTENTION | EXPERTS], {**SSM, **MOE},
                  (MAMBA_STATE, FULL), (False, True)),
    "granitehybrid": Kind("granitehybrid", [MAMBA_2 | EXPERTS, ATTENTION | EXPERTS],
                          {**SSM, **MOE}, (MAMBA_STATE, FULL), (False, True)),
    "falcon-h1": Kind("falcon-h1", [ATTENTION | MAMBA_2 | DENSE] * 2, SSM,
                      (MAMBA_STATE + FULL,) * 2),
    "nemotron_h": Kind("nemotron_h", [MAMBA_2, {"attn_norm": [16], "ffn_up": [16, 24],
                                                "ffn_down": [24, 16]}],
                       {**SSM, **FFN}, (MAMBA_STATE, 0), (False, False)),
    "nemotron_h_moe": Kind("nemotron_h_moe", [ATTENTION, {
        "attn_norm": [16], "ffn_latent_down": [16, 8], "ffn_latent_up": [8, 16],
        "ffn_gate_inp": [16, 4], "exp_probs_b.bias": [4], "ffn_up_exps": [8, 8, 4],
        "ffn_down_exps": [8, 8, 4]}], MOE, (FULL, 0)),
    "deepseek2": Kind("deepseek2", [LATENT | DENSE, LATENT | EXPERTS], {
        **MOE, "attention.head_count_kv": 1, "attention.key_length": 12,
        "attention.value_length": 8}, (2000 * 12 * 2,) * 2),
    "deepseek2, as before": Kind("deepseek2", [{
        **{k: v for k, v in LATENT.items() if k not in ("attn_k_b", "attn_v_b", "attn_q_a",
                                                        "attn_q_a_norm", "attn_q_b")},
        "attn_q": [16, 24], "attn_kv_b": [8, 32], **DENSE}] * 2, {
        "attention.key_length": 12, "attention.value_length": 8}, (2000 * 2 * (12 + 8) * 2,) * 2),
    "deepseek32": Kind("deepseek32", [INDEXED | DENSE, INDEXED | EXPERTS], {
        **MOE, "attention.head_count_kv": 1, "attention.key_length": 12,
        "attention.value_length": 8, "attention.indexer.key_length": 4},
        (2000 * (12 + 4) * 2,) * 2),
    "glm4moe": Kind("glm4moe", [ATTENTION | EXPERTS, DRAFT], MOE, (FULL, 0)),
    "lfm2": Kind("lfm2", [SHORT | DENSE, ATTENTION | DENSE], {"shortconv.l_cache": 3},
                 (4 * 2 * 16, FULL), (False, True)),
    "kimi-linear": Kind("kimi-linear", [KIMI | EXPERTS, LATENT | EXPERTS], {
        **MOE, "ssm.conv_kernel": 4, "kda.head_dim": 8, "attention.key_length": 12,
        "attention.value_length": 8}, (4 * (3 * 3 * 16 + 8 * 16), 2000 * 12 * 2), (False, True)),
    "gpt-oss": Kind("gpt-oss", [ATTENTION | EXPERTS] * 2, {
        **MOE, "attention.sliding_window": 128}, (WINDOW, FULL), (False, True)),
    "gemma4": Kind("gemma4", [ATTENTION | DENSE] * 2, {
        "attention.sliding_window": 128, "attention.sliding_window_pattern": [True, False],
        "attention.shared_kv_layers": 1, "attention.key_length_swa": 4,
        "attention.value_length_swa": 4}, (WINDOW // 2, 0), (False, False)),
    "smallthinker": Kind("smallthinker", [ATTENTION | DENSE] * 2, {
        "attention.sliding_window": 128}, (FULL, WINDOW), (True, False)),
    "llama4": Kind("llama4", [ATTENTION | DENSE] * 2, {}, (FULL, FULL)),
    "phi3": Kind("phi3", [ATTENTION | DENSE] * 2, {"attention.sliding_window": 128}, (FULL,) * 2),
}  # fmt: skip


def written(kind: Kind, path: Path) -> str:
    """A file of such blocks, all in F32."""
    name = kind.architecture
    fields = {"embedding_length": WIDTH, "block_count": len(kind.blocks), "attention.head_count": 2,
              "feed_forward_length": 24, "attention.key_length": 8, "attention.value_length": 8,
              "attention.head_count_kv": 2, **kind.fields}  # fmt: skip
    tensors = {"token_embd.weight": [16, 32], "output_norm.weight": [16], "output.weight": [16, 32]}
    for index, block in enumerate(kind.blocks):
        for base, dims in block.items():
            ending = "" if "." in base and not base.startswith(("short", "next")) else ".weight"
            tensors[f"blk.{index}.{base.rstrip('.')}{ending}"] = dims
    document = {
        "fields": {"general.architecture": name, **{f"{name}.{k}": v for k, v in fields.items()}},
        "tensors": {name: [dims, 0] for name, dims in tensors.items()},
    }
    path.write_bytes(gguf_files.encode(document))
    return str(path)


def caches(graph: OpGraph) -> list[int]:
    """Bytes of the caches of both blocks."""
    return [
        int(
            graph.cache_bytes[
                [scope.startswith(f"blk.{i}") for scope in graph.scope] & ~graph.is_buffer
            ].sum()
        )
        for i in range(2)
    ]


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_block_caches_as_much_as_llama_cpp_and_no_byte_is_lost(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    path = written(kind, tmp_path / "m.gguf")
    step = load(f"{path}?decode&sequence=2000")
    for tokens in (700, 2000):  # a window of 128 tokens and its rest has 768 cells
        reserved = load(f"{path}?prompt=60&new=4&context={tokens}")
        assert caches(reserved) == caches(load(f"{path}?decode&sequence={tokens}"))
    assert tuple(caches(step)) == kind.caches
    skipped = [block for block in kind.blocks if "nextn.enorm" in block]
    stored = sum(4 * math.prod(dims) for block in kind.blocks if block not in skipped
                 for dims in block.values())  # fmt: skip
    stored += 4 * (2 * WIDTH * VOCABULARY + WIDTH)
    assert stored_bytes(step) - sum(caches(step)) == stored
    request = load(f"{path}?prompt=1900&new=100")
    assert tuple(caches(request)) == kind.caches
    assert stored_bytes(request) - sum(caches(request)) == stored
    longer = caches(load(f"{path}?decode&sequence=4000"))
    for grows, before, after in zip(kind.grows, kind.caches, longer, strict=True):
        assert after > before if grows and before else after == before
    two = caches(load(f"{path}?decode&sequence=2000&batch=2"))
    for one, both in zip(kind.caches, two, strict=True):
        assert one <= both <= 2 * one


def test_every_sequence_of_a_batch_has_its_window(tmp_path: Path) -> None:
    """Eight of 128 tokens and one micro-batch of 512: 1536 tokens, a multiple of 256."""
    path = written(KINDS["gpt-oss"], tmp_path / "m.gguf")
    graph = load(f"{path}?decode&sequence=2000&batch=8")
    assert caches(graph) == [1536 * CELL, 8 * FULL]


def test_packed_caches_want_heads_of_whole_packs() -> None:
    """q8_0 packs 32 numbers in 34 bytes, which no two heads may share."""
    header = GgufHeader("m.gguf", "llama", {}, {})
    assert row_bytes(header, Heads(2, 32, 32, (64, 64)), "q8_0") == 4 * 34
    with pytest.raises(ModelError, match="heads have 16 and 16; take cache=f16"):
        row_bytes(header, Heads(2, 16, 16, (32, 32)), "q8_0")


def test_a_prompt_computes_every_matrix_once_a_token(tmp_path: Path) -> None:
    """FLOPs of 8 tokens: two a number of each matrix, and what has no matrix besides."""
    kind = KINDS["deepseek2"]
    graph = load(f"{written(kind, tmp_path / 'm.gguf')}?sequence=8")
    for op, name in enumerate(graph.op_names):
        base = name.split(".", 2)[-1]
        if base in LATENT and base != "attn_norm":
            assert graph.flop[op] == 2 * 8 * math.prod(LATENT[base]), name


def test_a_block_of_nothing_is_counted(tmp_path: Path) -> None:
    """An architecture search leaves blocks without attention and feed-forward."""
    fields = {"attention.head_count": [2, 0, 2], "attention.head_count_kv": [2, 0, 2],
              "feed_forward_length": [24, 0, 24]}  # fmt: skip
    kind = Kind("deci", [ATTENTION | DENSE, {}, ATTENTION | DENSE], fields, (0, 0))
    graph = load(f"{written(kind, tmp_path / 'm.gguf')}?decode")
    assert {scope for scope in graph.scope if scope.startswith("blk")} == {"blk.0", "blk.2"}
    damaged = kind._replace(fields=fields | {"feed_forward_length": [24, 24, 24]})
    with pytest.raises(ModelError, match=r"has blocks \[0, 2\], not 0, 1, 2"):
        load(written(damaged, tmp_path / "d.gguf"))


def test_drafting_blocks_are_held_where_llama_cpp_loads_them(tmp_path: Path) -> None:
    kind = KINDS["glm4moe"]
    skipped = load(f"{written(kind, tmp_path / 's.gguf')}?decode")
    loaded = load(f"{written(kind._replace(architecture='step35'), tmp_path / 'l.gguf')}?decode")
    draft = 4 * sum(math.prod(dims) for dims in DRAFT.values())
    assert stored_bytes(loaded) - stored_bytes(skipped) == draft
    assert loaded.flop.sum() == skipped.flop.sum()


def test_tensors_outside_blocks_are_counted(tmp_path: Path) -> None:
    document = gguf_files.document()
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_files.encode(document))
    plain = load(f"{path}?decode")
    document["tensors"]["per_layer_token_embd.weight"] = [[8, 32], 0]
    document["tensors"]["per_layer_model_proj.weight"] = [[16, 8], 0]
    path.write_bytes(gguf_files.encode(document))
    more = load(f"{path}?decode")
    gained = more.weight_bytes - plain.weight_bytes
    assert {more.op_names[op]: int(gained[op]) for op in np.flatnonzero(gained)} == {
        "token_embd": 4 * 8 * 32, "output_norm": 4 * 16 * 8,
    }  # fmt: skip
