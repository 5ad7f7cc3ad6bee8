"""Quantised models: bytes as libraries hold them, by their own modules where they run on a CPU; the
layouts of the others by hand; what is refused, left out and assumed."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import gdp  # noqa: E402
from gdp.base.errors import InfeasibleError, ModelError  # noqa: E402
from gdp.graph.file import load_graph, save_graph  # noqa: E402
from gdp.graph.op_graph import WEIGHT_ARITHMETIC, WEIGHT_BLOCK, OpGraph  # noqa: E402
from gdp.importers.huggingface.model import huggingface_model  # noqa: E402
from gdp.importers.pytorch.quantised import (  # noqa: E402
    QUANTIZE,
    SCHEMES,
    Weight,
    quantization_of,
    torchao_kind,
)

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1000, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": 500, "torch_dtype": "bfloat16",
}  # fmt: skip


def imported(folder: Path, config: dict[str, Any], **fields: Any) -> OpGraph:
    """The graph of a configuration, its trace not kept."""
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return gdp.load(f"hf:{folder}?task=causal-lm&sequence=16")


def held_bytes(graph: OpGraph) -> int:
    """Bytes of all weights, each once."""
    _, first = np.unique(graph.weight_id, return_index=True)
    return int(graph.weight_bytes[first].sum())


def tensors_of(value: Any, depth: int = 0) -> Iterator[Any]:
    """Plain tensors inside of what a library keeps for a weight."""
    if depth > 4:
        return
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from tensors_of(getattr(value, name), depth + 1)
        else:
            yield value
        yield from tensors_of(getattr(value, "quant_state", None), depth + 1)
        yield from tensors_of(getattr(value, "SCB", None), depth + 1)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_of(part, depth + 1)
    elif type(value).__name__ == "QuantState":
        for part in (value.absmax, value.code, value.offset, value.state2):
            yield from tensors_of(part, depth + 1)


def loaded_bytes(model: Any) -> int:
    """Bytes of everything that a loaded model holds, each storage once."""
    storages: dict[int, int] = {}
    for module in model.modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        own.append(getattr(module, "meta", None))
        for value in own:
            for tensor in tensors_of(value):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def load_quantised(folder: Path, config: dict[str, Any]) -> Any:
    """A model with random weights, quantised by transformers and the scheme's library."""
    kept = {k: v for k, v in config.items() if k != "torch_dtype"}
    (folder / "config.json").write_text(json.dumps(kept))
    plain = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(plain).to(torch.bfloat16)
    model.save_pretrained(folder / "saved")
    return folder / "saved"


def loaded(saved: Path, config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        saved, quantization_config=config, device_map="cpu", dtype=torch.bfloat16
    )


def group(activations: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group."""
    own = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"a": own}}


INT8_DYNAMIC = {"_type": "Int8DynamicActivationInt8WeightConfig", "_data": {}}


@pytest.mark.parametrize(
    ("config", "arithmetic"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "llm.int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "weights"),
        ({"quant_method": "gptq", "bits": 8}, "weights"),
        ({"quant_method": "awq", "bits": 4}, "weights"),
        ({"quant_method": "fp8"}, "float8"),
        ({"quant_method": "mxfp4"}, "float4"),
        ({"quant_method": "torchao", "quant_type": {"default": INT8_DYNAMIC}}, "int8"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "weights"),
        (group(None, num_bits=8, type="int"), "weights"),
        (group({"num_bits": 8, "type": "int"}, num_bits=8, type="int"), "int8"),
        (group({"num_bits": 8, "type": "float"}, num_bits=8, type="float"), "float8"),
        (group({"num_bits": 8, "type": "int"}, num_bits=4, type="int"), "int8"),
        (group({"num_bits": 4, "type": "float"}, num_bits=4, type="float"), "float4"),
    ],
)
def test_a_configuration_says_what_its_kernels_multiply(
    config: dict[str, Any], arithmetic: str
) -> None:
    assert SCHEMES[config["quant_method"]].arithmetic(config) == arithmetic


def test_products_of_a_quantised_model_carry_what_they_multiply(tmp_path: Path) -> None:
    """Also through a file; a placement of the graph without it is still one of this graph."""
    graph = imported(tmp_path, LLAMA, quantization_config={"quant_method": "gptq", "bits": 8})
    told = [detail.attributes.get(WEIGHT_ARITHMETIC) for detail in graph.detail]
    linear = [kind == "linear" for kind in graph.op_types]
    assert told.count("weights") == sum(linear) - 1  # all but the output
    assert [x is not None for x in told].count(True) == told.count("weights")
    save_graph(graph, tmp_path / "graph.json")
    again = load_graph(tmp_path / "graph.json")
    assert [d.attributes.get(WEIGHT_ARITHMETIC) for d in again.detail] == told
    earlier = dataclasses.replace(
        graph,
        detail=tuple(
            dataclasses.replace(
                d, attributes={k: v for k, v in d.attributes.items() if k not in LATER}
            )
            for d in graph.detail
        ),
    )
    assert earlier.digest != graph.digest
    assert earlier.digest in graph.digests


LATER = (WEIGHT_ARITHMETIC, WEIGHT_BLOCK)
"""Attributes that digests of earlier files do not cover."""
BITSANDBYTES = [
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    {"load_in_8bit": True},
    {"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head", "down_proj"]},
]


@pytest.mark.slow
@pytest.mark.parametrize("fields", BITSANDBYTES)
def test_bitsandbytes_within_a_percent_of_the_loaded_model(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    pytest.importorskip("bitsandbytes")
    model = loaded(load_quantised(tmp_path, LLAMA), transformers.BitsAndBytesConfig(**fields))
    config = {"quant_method": "bitsandbytes", **fields}
    graph = imported(tmp_path, LLAMA, quantization_config=config)
    assert held_bytes(graph) == pytest.approx(loaded_bytes(model), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 64), (4, 128), (3, 64), (2, 16), (1, 32)])
def test_hqq_within_a_percent_of_the_loaded_layer(bits: int, group: int) -> None:
    core = pytest.importorskip("hqq.core.quantize")
    layer = core.HQQLinear(
        torch.nn.Linear(1024, 512, bias=False),
        core.BaseQuantizeConfig(nbits=bits, group_size=group),
        compute_dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip
    held = [layer.W_q, layer.meta["scale"], layer.meta["zero"]]
    nbytes = sum(t.numel() * t.element_size() for t in held)
    config = {"quant_config": {"nbits": bits, "group_size": group}}
    assert SCHEMES["hqq"].nbytes(config, Weight(1, 512, 1024, 2)) == pytest.approx(nbytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"],
)
def test_torchao_within_a_percent_of_the_quantised_layer(name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    layer = torch.nn.Sequential(torch.nn.Linear(1024, 512, bias=False, dtype=torch.bfloat16))
    quantization.quantize_(layer, getattr(quantization, name)())
    nbytes = sum(t.numel() * t.element_size() for t in tensors_of(layer[0].weight))
    config = {"quant_type": {"default": {"_type": name, "_data": {}}}}
    mine = SCHEMES["torchao"].nbytes(config, Weight(1, 512, 1024, 2))
    assert mine == pytest.approx(nbytes, rel=0.01)


COMPRESSED = [
    ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128,
                        "symmetric": True}),
    ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64,
                        "symmetric": False}),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel",
                         "symmetric": True}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "weights"), COMPRESSED)
def test_compressed_tensors_within_a_percent_of_the_compressed_layer(
    fmt: str, weights: dict[str, Any]
) -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    config = {"format": fmt, "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    model = torch.nn.Sequential(torch.nn.Linear(1024, 512, bias=False, dtype=torch.bfloat16))
    library.apply_quantization_config(model, library.QuantizationConfig(**config))
    compressors.ModelCompressor.from_pretrained_model(
        model, quantization_format=fmt
    ).compress_model(model)
    tensors = [*model.parameters(), *model.buffers()]
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    mine = SCHEMES["compressed-tensors"].nbytes(config, Weight(1, 512, 1024, 2))
    assert mine == pytest.approx(nbytes, rel=0.01)


@pytest.mark.parametrize("block", [(128, 128), None])
@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_fp8_is_what_transformers_own_layer_holds(
    block: tuple[int, int] | None, scheme: str
) -> None:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    with torch.device("meta"):
        layer = FP8Linear(1000, 500, block_size=block, activation_scheme=scheme, has_bias=False)
    nbytes = sum(p.numel() * p.element_size() for p in layer.parameters())
    config = {"weight_block_size": block, "activation_scheme": scheme}
    assert SCHEMES["fp8"].nbytes(config, Weight(1, 500, 1000, 2)) == pytest.approx(nbytes, rel=1e-4)


def test_mxfp4_is_half_a_byte_and_a_scale_of_every_32_numbers(tmp_path: Path) -> None:
    """gpt-oss: 4 experts of [512, 256] and [256, 256]; the rest as it was, two bytes a number."""
    plain = held_bytes(imported(tmp_path, GPT_OSS))
    experts = 4 * (512 * 256 + 256 * 256)
    graph = imported(tmp_path, GPT_OSS, quantization_config={"quant_method": "mxfp4"})
    assert held_bytes(graph) == plain - 2 * experts + experts * 17 // 32
    left_out = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0.mlp.experts"]}
    with pytest.raises(ModelError, match="'mxfp4' converts none of its weights"):
        imported(tmp_path, GPT_OSS, quantization_config=left_out)


DEEPSEEK_V4 = {
    "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "hidden_size": 256,
    "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "o_groups": 2, "o_lora_rank": 32,
    "q_lora_rank": 32, "index_n_heads": 2, "index_head_dim": 32, "num_hash_layers": 1,
    "compress_ratios": [4, 4], "vocab_size": 500, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "algorithm", "bytes_of_32"),
    [("fp8", None, 32), ("fp4", None, 17), (None, None, 17), ("fp4", "NVFP4", 18)],
)
def test_experts_of_deepseek_v4_are_in_4_bits_beside_8(
    tmp_path: Path, dtype: str | None, algorithm: str | None, bytes_of_32: int
) -> None:
    """Two layers of 4 experts of [256, 256] and [256, 128]. In 8 bits a scale of 4 bytes for each
    block of 128 numbers squared, in 4 bits scales of 32 or 16 numbers; NVFP4 has one more of each
    matrix. A shared expert of three matrices of [128, 256] stays in 8 bits."""
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    scheme |= {"moe_quant_algo": algorithm} if algorithm else {}
    document = DEEPSEEK_V4 | {"quantization_config": scheme}
    document |= {"expert_dtype": dtype} if dtype else {}
    (tmp_path / "config.json").write_text(json.dumps(document))
    stored = huggingface_model(f"hf:{tmp_path}?task=causal-lm", whole=False).options["stored"]
    experts = [kept for path, kept in stored.items() if ".experts." in path]
    shared = [kept for path, kept in stored.items() if ".shared_experts." in path]
    numbers, scales = 2 * 4 * (256 * 256 + 256 * 128), {32: 4 * 2 * 4 * 6, 17: 0, 18: 4 * 2 * 8}
    wanted = numbers * bytes_of_32 // 32 + scales[bytes_of_32]
    assert sum(kept.nbytes for kept in experts) == wanted
    assert {kept.arithmetic for kept in experts} == {"float8" if bytes_of_32 == 32 else "float4"}
    assert sum(kept.nbytes for kept in shared) == 2 * 3 * (128 * 256 + 4 * 2)
    assert {kept.arithmetic for kept in shared} == {"float8"}


@pytest.mark.parametrize(
    ("fields", "form", "wanted"),
    [
        # 16 * 256 numbers of 4 bits in words of 32, 16 * 2 scales of 2 bytes, a shape of 16 bytes.
        ({"num_bits": 4, "group_size": 128}, "pack-quantized", 2048 + 64 + 16),
        # Zero points of both groups: 16 of 4 bits each, in words of 32.
        ({"num_bits": 4, "group_size": 128, "symmetric": False}, "pack-quantized", 2128 + 2 * 8),
        # 16 * 256 bytes and a scale of 2 bytes for each row; then a zero point of a byte, too.
        ({"num_bits": 8, "strategy": "channel"}, "int-quantized", 4096 + 32),
        ({"num_bits": 8, "strategy": "channel", "symmetric": False}, "int-quantized", 4128 + 16),
    ],
)
def test_asymmetric_weights_hold_zero_points_by_hand(
    fields: dict[str, Any], form: str, wanted: int
) -> None:
    config = {"format": form, "config_groups": {"a": {"targets": ["Linear"], "weights": fields}}}
    assert SCHEMES["compressed-tensors"].nbytes(config, Weight(1, 16, 256, 2)) == wanted


def test_gptq_and_awq_by_hand() -> None:
    """1024 to 512 in 4 bits, groups of 128: 262144 bytes packed; 8 groups with 4-bit zeros (256
    bytes each) and 16-bit scales (1024 bytes each); GPTQ keeps the group of each input in 4 bytes,
    too."""
    weight = Weight(1, 512, 1024, 2)
    assert SCHEMES["gptq"].nbytes({"bits": 4, "group_size": 128}, weight) == 262144 + 10240 + 4096
    assert SCHEMES["awq"].nbytes({"bits": 4, "group_size": 128}, weight) == 262144 + 10240
    assert SCHEMES["gptq"].nbytes({"bits": 4, "group_size": -1}, weight) == 262144 + 1280 + 4096


def test_the_output_layer_stays_and_tied_weights_do(tmp_path: Path) -> None:
    """Linear layers of a block: 2.95 million numbers; 4 bits and a float32 scale for every 64
    numbers instead of 16 bits."""
    numbers = 2 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1408)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for tied in (False, True):
        plain = held_bytes(imported(tmp_path, LLAMA, tie_word_embeddings=tied))
        graph = imported(tmp_path, LLAMA, tie_word_embeddings=tied, quantization_config=config)
        assert plain - held_bytes(graph) == 2 * numbers - (numbers // 2 + numbers // 16) - 14 * 64


def test_gptq_leaves_out_what_its_configuration_leaves_out(tmp_path: Path) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    whole = held_bytes(imported(tmp_path, LLAMA, quantization_config=gptq))
    some = {**gptq, "modules_in_block_to_quantize": [["self_attn.q_proj"]]}
    assert held_bytes(imported(tmp_path, LLAMA, quantization_config=some)) > 1.5 * whole
    none = {**gptq, "dynamic": {"-:.*q_proj": {}}}
    saved = 2 * (2 * 512 * 512 - SCHEMES["gptq"].nbytes(gptq, Weight(1, 512, 512, 2)))
    assert held_bytes(imported(tmp_path, LLAMA, quantization_config=none)) == whole + saved
    head = held_bytes(imported(tmp_path, LLAMA, quantization_config={**gptq, "lm_head": True}))
    assert head < whole


def test_compressed_tensors_heed_targets_and_ignored_modules(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config = {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "ignore": ["lm_head", "re:.*down_proj"],
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    graph = imported(tmp_path, LLAMA, quantization_config=config)
    linears = 2 * (2 * 512 * 512 + 2 * 512 * 256 + 2 * 512 * 1408)
    plain = held_bytes(imported(tmp_path, LLAMA))
    assert held_bytes(graph) == plain - linears + 2 * 12


def test_decoding_reads_the_stored_bytes_and_a_prompt_a_dense_copy(tmp_path: Path) -> None:
    """One row: 4.5 bits a number and two operations more for each. More rows: the dense copy is
    written and read beside it."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": config}))
    stored = SCHEMES["bitsandbytes"].nbytes(config, Weight(1, 1408, 512, 2))
    traffic = {}
    for phase in ("sequence=16", "sequence=16&decode"):
        for quantize in ("none", "nf4"):
            graph = gdp.load(f"hf:{tmp_path}?task=causal-lm&{phase}&quantize={quantize}")
            op = next(
                i for i, s in enumerate(graph.scope)
                if s.endswith("layers.0.mlp.up_proj") and graph.weight_bytes[i]
            )  # fmt: skip
            traffic[phase, quantize] = graph.memory_traffic_bytes[op], graph.flop[op]
    dense = 2 * 1408 * 512
    bytes_of = {key: value[0] for key, value in traffic.items()}
    decode, prompt = "sequence=16&decode", "sequence=16"
    assert bytes_of[decode, "none"] - bytes_of[decode, "nf4"] == dense - stored
    assert bytes_of[prompt, "nf4"] - bytes_of[prompt, "none"] == stored - dense + 2 * dense
    assert traffic[decode, "nf4"][1] - traffic[decode, "none"][1] == 2 * 1408 * 512


def test_an_unknown_scheme_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"quantisation 'spqr' is not known, only bitsandbytes"):
        imported(tmp_path, LLAMA, quantization_config={"quant_method": "spqr", "bits": 3})
    with pytest.raises(ModelError, match=r"no quantisation 'q5' to try; there are none, nf4"):
        gdp.load(f"hf:{tmp_path}?task=causal-lm&quantize=q5")
    hqq = {"quant_method": "hqq", "quant_config": {"nbits": 5}}
    with pytest.raises(ModelError, match=r"quantization_config: HQQ has 1, 2, 3, 4 and 8 bits"):
        imported(tmp_path, LLAMA, quantization_config=hqq)
    assert gdp.load(f"hf:{tmp_path}?task=causal-lm&sequence=16&quantize=none").num_ops > 10


@pytest.mark.parametrize("name", sorted(set(QUANTIZE) - {"none", "mxfp4"}))
def test_every_scheme_can_be_tried(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    graph = gdp.load(f"hf:{tmp_path}?task=causal-lm&sequence=16&quantize={name}")
    linears = 2 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1408)
    rest = 2 * (2 * 1000 * 512 + 5 * 512)
    per_number = (held_bytes(graph) - rest) / linears
    assert (0.5 if "8" not in name else 1.0) < per_number < (0.6 if "8" not in name else 1.02)
    assert name in graph.name


@pytest.mark.usefixtures("traces_anew")  # a kept trace is loaded, and refused later
def test_what_fits_only_quantised_is_placed_only_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    cluster = gdp.make_cluster(
        "one", [gdp.Device("g", "gpu", {"default": 1e12}, 1e11, memory_bytes=8 << 20)]
    )
    spec = f"hf:{tmp_path}?task=causal-lm&sequence=16"
    once = gdp.Search(seconds=None, evaluations=5)
    with pytest.raises(InfeasibleError, match="weights alone miss"):
        gdp.place(spec, cluster, search=once)
    assert gdp.place(f"{spec}&quantize=nf4", cluster, search=once).score.feasible


def test_a_torchao_configuration_is_named_in_both_forms() -> None:
    new = {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"x": 1}}}}
    assert torchao_kind(new) == ("int8weightonly", {"x": 1})
    assert torchao_kind({"quant_type": "int8_weight_only"})[0] == "int8weightonly"


def test_a_document_that_asks_to_dequantise_is_placed_dense() -> None:
    asked = {"quantization_config": {"quant_method": "fp8", "dequantize": True}}
    assert quantization_of(asked, "", "x") is None
    assert quantization_of(asked, "nf4", "x") == QUANTIZE["nf4"]


def test_the_command_line_appends_the_scheme_to_the_spec() -> None:
    import click

    from gdp.cli.asking import Asking

    asked = Asking("hf:x", task="causal-lm", sequence=16, quantize="nf4")
    assert asked.model == "hf:x?task=causal-lm&sequence=16&quantize=nf4"
    for file in ("model.onnx", "model.gguf"):
        with pytest.raises(click.UsageError, match="--quantize is for hf:CONFIG models"):
            _ = Asking(file, quantize="nf4").model
