"""Rules of vLLM, read in its package: what it refuses to start."""

from gdp.targets.engine import EngineRules, Needs

_LAYERS = "vllm/model_executor/layers/quantization"
_SCHEMES = f"{_LAYERS}/compressed_tensors/schemes/compressed_tensors"

VLLM = EngineRules(
    "vLLM", "0.33.0",
    Needs(7.5, "docs/getting_started/installation/gpu.cuda.inc.md"),
    {
        "awq": Needs(7.5, f"{_LAYERS}/auto_awq.py"),
        "gptq": Needs(6.0, f"{_LAYERS}/auto_gptq.py"),
        "fp8": Needs(7.5, f"{_LAYERS}/fp8.py"),
        "fbgemm_fp8": Needs(8.0, f"{_LAYERS}/fbgemm_fp8.py"),
        "mxfp4": Needs(8.0, f"{_LAYERS}/mxfp4.py"),
        "torchao": Needs(7.5, f"{_LAYERS}/torchao.py"),
        "compressed-tensors": Needs(7.0, f"{_LAYERS}/compressed_tensors/compressed_tensors.py"),
        "compressed-tensors int4/16": Needs(7.5, f"{_SCHEMES}_wNa16.py"),
        "compressed-tensors int8/16": Needs(7.5, f"{_SCHEMES}_wNa16.py"),
        "compressed-tensors int8/8": Needs(7.5, f"{_SCHEMES}_w8a8_int8.py"),
        # Cards before 8.9 have the weights alone in 8 bits (Marlin).
        "compressed-tensors float8/8": Needs(7.5, f"{_SCHEMES}_w8a16_fp8.py"),
        "compressed-tensors float8/16": Needs(7.5, f"{_SCHEMES}_w8a16_fp8.py"),
        "compressed-tensors float4/4": Needs(7.5, f"{_SCHEMES}_w4a4_nvfp4.py"),
        "compressed-tensors int4/8": Needs(9.0, f"{_SCHEMES}_w4a8_fp8.py"),
        "compressed-tensors mxfp4/4": Needs(8.0, f"{_SCHEMES}_w4a4_mxfp4.py"),
        "modelopt float8/8": Needs(8.0, f"{_LAYERS}/modelopt.py"),
        "modelopt float4/4": Needs(7.5, f"{_LAYERS}/modelopt.py"),
        "modelopt float4/16": Needs(7.5, f"{_LAYERS}/modelopt.py"),
    },
    # Out of the tree since 0.28 (vllm-project/vllm#43529).
    {"bitsandbytes": "vllm-bnb-plugin"},
    frozenset((
        "AliceAIForCausalLM", "AriaForConditionalGeneration", "CohereAsrForConditionalGeneration",
        "DiffusionGemmaForBlockDiffusion", "DomynEdgeForCausalLM", "DoryForCausalLM",
        "FireRedASR2ForConditionalGeneration", "FunASRForConditionalGeneration",
        "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "HrmTextForCausalLM",
        "IQuestLoopCoderForCausalLM", "Idefics3ForConditionalGeneration", "Mamba2ForCausalLM",
        "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3", "NemotronParseForConditionalGeneration",
        "PaddleOCRVLForConditionalGeneration", "Phi4MMForCausalLM", "RadioMBartPrefixForCausalLM",
        "SmolVLMForConditionalGeneration", "WhisperForConditionalGeneration", "Zamba2ForCausalLM",
    )),
    "vllm/model_executor/models/interfaces.py (SupportsPP)",
)  # fmt: skip
DEPRECATED = frozenset({"fbgemm_fp8"})
"""Methods that it reads where it is told to (`DEPRECATED_QUANTIZATION_METHODS`)."""
BITSANDBYTES_LEFT = "0.28"
"""Version since which bitsandbytes is a plugin."""
TRITON = "TRITON_ATTN"
"""Backend of attention that all cards have (`vllm/v1/attention/backends/triton_attn.py`); that
which vLLM takes by itself is one of the first visible card, for all ranks of a process
(`get_device_capability(device_id=0)` of `vllm/platforms/cuda.py`)."""
