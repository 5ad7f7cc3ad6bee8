"""Tiny configurations of architectures that transformers can `generate` with, by name.

Sizes are such that no two dimensions of a cache are equal by chance where an architecture allows
it; windows of sliding attention are shorter than the prompts of the tests.
"""

import functools
from typing import Any

import pytest

CAUSAL, SEQ2SEQ, SPEECH, IMAGE = (
    "ForCausalLM", "ForConditionalGeneration", "WhisperForConditionalGeneration",
    "LlavaForConditionalGeneration",
)  # fmt: skip
DENSE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention"]
HYBRID = ["linear_attention", "full_attention"]
VISION: dict[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", DENSE),
    "mistral": ("mistral", {**DENSE, "sliding_window": 6}),
    "mixtral": ("mixtral", {**DENSE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", DENSE),
    "qwen3": ("qwen3", {**DENSE, "head_dim": 20}),
    "qwen3_moe": ("qwen3_moe", {**DENSE, **MOE, "head_dim": 20}),
    "qwen3_next": ("qwen3_next", {
        **DENSE, **MOE, "head_dim": 20, "layer_types": HYBRID, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
        "shared_expert_intermediate_size": 24, "num_experts_per_tok": 2}),
    "gemma2": ("gemma2", {**DENSE, "head_dim": 20, "sliding_window": 6, "layer_types": SLIDING}),
    "gemma3": ("gemma3_text", {
        **DENSE, "head_dim": 20, "sliding_window": 6, "layer_types": SLIDING}),
    "gemma4": ("gemma4_text", {
        **DENSE, "head_dim": 20, "global_head_dim": 40, "sliding_window": 6,
        "layer_types": SLIDING, "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}),
    "phi3": ("phi3", {**DENSE, "sliding_window": None}),
    "gpt_oss": ("gpt_oss", {
        **DENSE, "head_dim": 20, "sliding_window": 6, "layer_types": SLIDING,
        "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("deepseek_v3", {
        **DENSE, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
        "v_head_dim": 10}),
    "glm4": ("glm4", {**DENSE, "head_dim": 20}),
    "olmo2": ("olmo2", DENSE),
    "falcon": ("falcon", {
        **DENSE, "num_kv_heads": 1, "multi_query": True, "new_decoder_architecture": False}),
    "mamba": ("mamba", {
        "vocab_size": 96, "hidden_size": 32, "state_size": 6, "num_hidden_layers": 2}),
    "mamba2": ("mamba2", {
        "vocab_size": 96, "hidden_size": 32, "state_size": 6, "num_hidden_layers": 2,
        "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}),
    "jamba": ("jamba", {
        **DENSE, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "mamba_d_state": 6, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4,
        "use_mamba_kernels": False}),
    "granite_hybrid": ("granitemoehybrid", {
        **DENSE, "layer_types": ["mamba", "attention"], "layers_block_type": None,
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
        "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 6, "mamba_n_groups": 1,
        "mamba_expand": 2, "mamba_chunk_size": 4}),
    "t5": ("t5", {
        "vocab_size": 96, "d_model": 32, "d_kv": 10, "d_ff": 48, "num_layers": 2, "num_heads": 3,
        "decoder_start_token_id": 0}),
    "bart": ("bart", {
        "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "max_position_embeddings": 256}),
    "whisper": ("whisper", {
        "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 20,
        "max_target_positions": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}),
    "llava": ("llava", {
        "text_config": {"model_type": "llama", **DENSE}, "vision_config": VISION,
        "image_token_index": 3, "vision_feature_layer": -1}),
}  # fmt: skip

_CLASSES = {
    "falcon": "FalconForCausalLM", "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration", "whisper": "WhisperForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
}  # fmt: skip


def generating_config(name: str) -> dict[str, Any]:
    """The `config.json` of a name, with the class that the architecture generates by."""
    kind, fields = CONFIGS[name]
    fields = {k: v for k, v in fields.items() if v is not None or k in ("sliding_window",)}
    architecture = _CLASSES.get(name, "TinyForCausalLM")
    return {"model_type": kind, "architectures": [architecture], "dtype": "float32", **fields}


def shorten_chunks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make gated delta rules work in chunks of 8 tokens, not 64: each is unrolled, token by token.

    Returns:
        A field that nothing reads, for configurations: their kept traces are no other's.
    """
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    rule = functools.partial(module.torch_chunk_gated_delta_rule, chunk_size=8)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", rule)
    return {"tokens_of_chunks": 8}
