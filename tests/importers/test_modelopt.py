"""Checkpoints of NVIDIA's ModelOpt: groups, names and bytes, told in both of its files."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from gdp.base.errors import ModelError
from gdp.importers.huggingface.dtype import loaded_config
from gdp.importers.huggingface.modelopt import ALGORITHMS, grouped, patterns
from gdp.importers.pytorch.patterns import NamePatterns
from gdp.importers.pytorch.quantised import cache_bits, stored_weights
from gdp.targets.engine import kind_of
from gdp.targets.sglang.rules import SGLANG
from gdp.targets.vllm.rules import VLLM
from tests.generating_configs import DENSE

NVFP4 = {"num_bits": 4, "type": "float", "dynamic": False, "group_size": 16}
FP8 = {"num_bits": 8, "type": "float", "dynamic": False}
GROUPS = {"group_0": {"input_activations": NVFP4, "weights": NVFP4, "targets": ["Linear"]}}


@pytest.fixture(scope="module")
def model() -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DENSE))


def folder(tmp_path: Path, config: Any = None, beside: Any = None) -> str:
    document: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    document |= DENSE | ({} if config is None else {"quantization_config": config})
    (tmp_path / "config.json").write_text(json.dumps(document))
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    return f"hf:{tmp_path}"


def read(spec: str) -> dict[str, Any]:
    return loaded_config(spec).document["quantization_config"]


def wanted_bytes(model: Any, left_out: tuple[str, ...]) -> dict[str, int]:
    """By hand: half a byte a number, a scale of a byte for sixteen, and one of four for all."""
    return {
        f"{path}.weight": m.weight.numel() // 2 + m.weight.numel() // 16 + 4
        for path, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and not any(name in path for name in left_out)
    }


def test_groups_are_stored_in_4_bits_with_a_scale_for_sixteen(model: Any, tmp_path: Path) -> None:
    config = {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": GROUPS,
        "ignore": ["lm_head", "model.layers.0.self_attn*"],
        "kv_cache_scheme": FP8, "producer": {"name": "modelopt", "version": "0.39.0"},
    }  # fmt: skip
    found = read(folder(tmp_path, config))
    stored = stored_weights(model, found, "a test")
    assert {path: own.nbytes for path, own in stored.items()} == wanted_bytes(
        model, ("lm_head", "layers.0.self_attn")
    )
    assert {own.arithmetic for own in stored.values()} == {"float4"}
    assert cache_bits({"quantization_config": found}) == 8
    assert kind_of(found) == "modelopt float4/4"


def test_the_file_beside_a_configuration_says_the_same(model: Any, tmp_path: Path) -> None:
    beside = {"producer": {"name": "modelopt"}, "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.0.self_attn.q_proj"],
    }}  # fmt: skip
    found = read(folder(tmp_path, beside=beside))
    assert {path: own.nbytes for path, own in stored_weights(model, found, "").items()} == (
        wanted_bytes(model, ("lm_head", "layers.0.self_attn.q_proj"))
    )
    assert cache_bits({"quantization_config": found}) == 8
    # A scheme of the configuration's own goes before it, and no scheme is none.
    assert read(folder(tmp_path, {"quant_method": "fp8"}, beside)) == {"quant_method": "fp8"}
    spec = folder(tmp_path, beside={"quantization": {"quant_algo": None}})
    assert "quantization_config" not in loaded_config(spec).document


def test_layers_of_mixed_precision_have_each_their_own(model: Any, tmp_path: Path) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.language_model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.language_model.layers.1.mlp": {"quant_algo": "NVFP4", "group_size": 16},
    }, "config_groups": GROUPS}  # fmt: skip
    stored = stored_weights(model, read(folder(tmp_path, config)), "a test")
    kinds = {path: own.arithmetic for path, own in stored.items()}
    inner = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    assert kinds == dict.fromkeys(inner, "float4") | {
        "lm_head.weight": "weights", "model.layers.0.self_attn.q_proj.weight": "float8",
    }  # fmt: skip


def test_a_configuration_without_method_and_targets_is_known_by_its_producer(
    model: Any, tmp_path: Path
) -> None:
    config = {
        "config_groups": {"group_0": {"input_activations": FP8, "weights": FP8}},
        "ignore": ["lm_head"], "quant_algo": "FP8", "kv_cache_scheme": "FP8",
        "producer": {"name": "modelopt", "version": "0.31.0"},
    }  # fmt: skip
    found = read(folder(tmp_path, config))
    stored = stored_weights(model, found, "a test")
    assert len(stored) == len(wanted_bytes(model, ("lm_head",)))
    assert {own.arithmetic for own in stored.values()} == {"float8"}
    assert cache_bits({"quantization_config": found}) == 8


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_is_stored_and_known_to_an_engine(model: Any, algorithm: str) -> None:
    found = grouped({"quant_algo": algorithm.lower(), "exclude_modules": []}, "a test")
    assert len(stored_weights(model, found, "a test")) == len(wanted_bytes(model, ()))
    assert kind_of(found) in VLLM.methods
    assert kind_of(found) in SGLANG.methods


@pytest.mark.parametrize(
    ("names", "path", "inside"),
    [(["a.b*"], "a.b", True), (["a.b*"], "a.b.c", True), (["a.b*"], "a.bc", False),
     (["a.1.*"], "a.1.x", True), (["a.1.*"], "a.10.x", False), (["*.gate"], "x.y.gate", True),
     (["*.gate"], "x.y.gate_proj", False), (["b"], "a.b", True), (["b"], "ab", False),
     (["model.language_model.x"], "model.x.y", True), (["language_model.head"], "head", True),
     (["language_model.model.x*"], "model.language_model.x.y", True),
     (["backbone.layers.1.mixer"], "model.layers.1.mixer.in_proj", True),
     ([f"model.layers.{i}.self_attn" for i in range(999)], "model.layers.998.self_attn.q", True),
     ([f"model.layers.{i}.self_attn" for i in range(999)], "model.layers.999.self_attn.q", False),
     (["a[0-9]", "a(b"], "a5", False)],
)  # fmt: skip
def test_names_are_wildcards_of_modules(names: list[str], path: str, inside: bool) -> None:
    limited = NamePatterns("a test")
    assert any(limited.matches(p.removeprefix("re:"), path) for p in patterns(names)) == inside


@pytest.mark.parametrize(
    ("config", "said"),
    [({"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' of ModelOpt is not known"),
     ({"quant_algo": "FP8", "ignore": "lm_head"}, "ignore must be a list of names"),
     ({"quant_algo": "FP8", "exclude_modules": [1]}, "exclude_modules must be a list of names"),
     ({"config_groups": {"g": 5}}, "config_groups must be an object of objects"),
     ({"config_groups": {"g": {"weights": 4}}}, "weights must be an object"),
     ({"config_groups": {"g": {"weights": NVFP4, "targets": [2]}}}, "targets must be a list"),
     ({"quantized_layers": {"lm_head": {"quant_algo": "X"}}}, "quant_algo 'X' of ModelOpt")],
)  # fmt: skip
def test_another_form_is_refused(tmp_path: Path, config: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said) as error:
        read(folder(tmp_path, {"quant_method": "modelopt", **config}))
    assert str(tmp_path) in str(error.value)


def test_experts_that_are_named_one_by_one_are_stored_together() -> None:
    config = transformers.Qwen3MoeConfig(
        **DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    with torch.device("meta"):
        mixture = transformers.Qwen3MoeForCausalLM(config)
    layers = {
        f"model.layers.0.mlp.experts.{i}.{name}_proj": {"quant_algo": "NVFP4"}
        for i in range(4) for name in ("gate", "up", "down")
    }  # fmt: skip
    found = grouped({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, "a test")
    stored = stored_weights(mixture, found, "a test")
    experts = dict(mixture.get_submodule("model.layers.0.mlp.experts").named_parameters())
    assert {path: own.nbytes for path, own in stored.items()} == {
        f"model.layers.0.mlp.experts.{name}": w.numel() // 2 + w.numel() // 16 + 4 * 4
        for name, w in experts.items()
    }


def test_a_file_beside_that_is_no_json_is_named(tmp_path: Path) -> None:
    spec = folder(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json is not a configuration"):
        loaded_config(spec)
