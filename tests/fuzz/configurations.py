"""Valid configurations of transformers, as small as each architecture allows."""

from typing import Any

_TEXT = {
    "vocab_size": 12, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip
_SHARED = _TEXT | {"num_key_value_heads": 1}
_HEADS = _SHARED | {"head_dim": 4}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
_OLD = {"vocab_size": 12, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 12}
_IMAGE = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
_BART = {
    "vocab_size": 12, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8, "max_position_embeddings": 12,
}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

# (type, class, sizes). Where a mutant loses its number of layers, it gets the default, which must
# be traced within the limit: few mixtures of experts, whose layers take a second each.
_ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "LlamaForCausalLM", _SHARED | _ROPE),
    ("mistral", "MistralForCausalLM", _SHARED | {"sliding_window": 4}),
    ("qwen2", "Qwen2ForCausalLM", _SHARED | {"tie_word_embeddings": True}),
    ("qwen3", "Qwen3ForCausalLM", _HEADS | {"layer_types": ["full_attention"]}),
    ("qwen3_moe", "Qwen3MoeForCausalLM", _HEADS | _EXPERTS),
    ("gemma2", "Gemma2ForCausalLM", _HEADS),
    ("gemma3_text", "Gemma3ForCausalLM", _HEADS),
    ("gpt2", "GPT2LMHeadModel", _OLD),
    ("gptj", "GPTJForCausalLM", _OLD | {"rotary_dim": 2}),
    ("gpt_neox", "GPTNeoXForCausalLM", _TEXT),
    ("opt", "OPTForCausalLM", _TEXT | {"ffn_dim": 8, "word_embed_proj_dim": 8}),
    ("phi", "PhiForCausalLM", _TEXT | {"dtype": "bfloat16"}),
    ("phi3", "Phi3ForCausalLM", _SHARED | {"pad_token_id": 0}),
    ("falcon", "FalconForCausalLM", _TEXT),
    ("bloom", "BloomForCausalLM", _OLD | {"hidden_size": 8}),
    ("mpt", "MptForCausalLM",
     {"vocab_size": 12, "d_model": 8, "n_layers": 1, "n_heads": 2, "max_seq_len": 12}),
    ("olmo2", "Olmo2ForCausalLM", _TEXT),
    ("granite", "GraniteForCausalLM", _TEXT),
    ("cohere", "CohereForCausalLM", _TEXT),
    ("mamba", "MambaForCausalLM",
     {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4}),
    ("bert", "BertForMaskedLM", _TEXT),
    ("roberta", "RobertaForSequenceClassification", _TEXT | {"id2label": {"0": "a", "1": "b"}}),
    ("distilbert", "DistilBertForMaskedLM",
     {"vocab_size": 12, "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8}),
    ("electra", "ElectraForMaskedLM", _TEXT | {"embedding_size": 8}),
    ("albert", "AlbertForMaskedLM", _TEXT | {"embedding_size": 8}),
    ("deberta-v2", "DebertaV2ForMaskedLM", _TEXT),
    ("t5", "T5ForConditionalGeneration",
     {"vocab_size": 12, "d_model": 8, "d_kv": 8, "d_ff": 12, "num_layers": 1, "num_heads": 2}),
    ("bart", "BartForConditionalGeneration", _BART),
    ("vit", "ViTForImageClassification", _IMAGE),
    ("deit", "DeiTForImageClassification", _IMAGE),
    ("dinov2", "Dinov2ForImageClassification", _IMAGE),
    ("swin", "SwinForImageClassification",
     {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2],
      "window_size": 4}),
    ("convnext", "ConvNextForImageClassification",
     {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32}),
    ("resnet", "ResNetForImageClassification",
     {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
)  # fmt: skip

# What configurations may say beside sizes, added to some mutants before they are changed.
_MORE: tuple[dict[str, Any], ...] = (
    {"attn_implementation": "eager"}, {"attn_implementation": "flash_attention_2"},
    {"_attn_implementation": "sdpa"}, {"dtype": "float16"}, {"torch_dtype": "bfloat16"},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}},
    {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 4,
                             "modules_to_not_convert": ["lm_head", r"(\w+\.?)+!"]}},
    {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 4,
                             "dynamic": {"-:" + ".?" * 30 + "[!?]": {}, "+:.*": {"bits": 8}}}},
    {"quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "ignore": ["lm_head", "re:^(?!.*mlp).*$", "re:" + ".*" * 60 + "[!?]"],
        "config_groups": {"g": {"targets": ["Linear", "re:.*q_proj"], "weights": {
            "num_bits": 4, "type": "int", "group_size": 4, "strategy": "group"}}}}},
    {"quantization_config": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp*"],
        "kv_cache_scheme": {"num_bits": 8}, "config_groups": {"g": {
            "targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {"num_bits": 4, "type": "float"}}}}},
    {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                             "quantized_layers": {"lm_head": {"quant_algo": "FP8"}}}},
    {"auto_map": {"AutoConfig": "configuration_x.XConfig"}}, {"backbone": "resnet18"},
    {"use_timm_backbone": True, "backbone": "resnet18"}, {"num_labels": 3}, {"use_cache": True},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"is_encoder_decoder": True},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {"output_attentions": True},
    {"hidden_act": "silu"}, {"hidden_act": "nothing"}, {"max_position_embeddings": 4},
    {"text_config": {"model_type": "llama"}}, {"is_decoder": True, "add_cross_attention": True},
    {"pruned_heads": {"0": [0]}}, {"chunk_size_feed_forward": 4}, {"problem_type": "regression"},
    {"transformers_version": "99.0.0"}, {"architectures": []}, {"architectures": ["XModel"]},
)  # fmt: skip


def configurations() -> list[dict[str, Any]]:
    """One document of each architecture."""
    return [{"model_type": kind, "architectures": [name], **sizes} for kind, name, sizes in _ROWS]


def additions() -> tuple[dict[str, Any], ...]:
    """Fields that stand in some real configurations."""
    return _MORE
