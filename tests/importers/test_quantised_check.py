"""A `quantization_config` of any types is read or refused in one line."""

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers

from gdp.base.errors import ModelError
from gdp.importers.pytorch.quantised import quantization_of, stored_weights
from gdp.importers.pytorch.quantised_check import FIELDS, check_quantization
from tests.generating_configs import DENSE

WRONG: tuple[Any, ...] = (
    1, 0, -7, 2**70, 1.5, float("nan"), True, "x", "", "(", None, [], [1], ["a", 1], [[1]], [[]],
    [0, 0], [64, 64], {}, {"a": 1}, {"a": None}, {"default": 3}, [{}],
)  # fmt: skip
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False}
SCHEMES: tuple[dict[str, Any], ...] = (
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True,
     "llm_int8_skip_modules": ["lm_head"], "dequantize": False},
    {"quant_method": "bitsandbytes", "load_in_8bit": True},
    {"quant_method": "gptq", "bits": 4, "group_size": 16, "lm_head": True, "dynamic": {"-:x": {}},
     "modules_in_block_to_quantize": [["mlp.up_proj"]]},
    {"quant_method": "awq", "bits": 4, "w_bit": 4, "group_size": 16,
     "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0",
     "activation_scheme": "static"},
    {"quant_method": "hqq", "skip_modules": ["lm_head"],
     "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 16, "axis": 1}}},
    {"quant_method": "torchao", "quant_type_kwargs": {"group_size": 16},
     "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 16}}}},
    {"quant_method": "compressed-tensors", "ignore": ["re:.*head"], "format": "pack-quantized",
     "config_groups": {"a": {"targets": ["Linear"], "format": None, "weights": WEIGHTS}}},
    {"quant_method": "compressed-tensors",
     "config_groups": {"a": {"targets": ["Linear"], "weights": {
         "num_bits": 8, "strategy": "block", "block_structure": [16, 16]}}}},
    {"quant_method": "modelopt", "exclude_modules": ["lm_head"], "config_groups": {"a": {
        "targets": ["Linear"], "input_activations": {"num_bits": 4, "type": "float"},
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}}}},
    # As its tools write it: scales of weights are made once, those of activations as they come.
    {"quant_method": "compressed-tensors", "format": "float-quantized",
     "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
     "config_groups": {"a": {
         "targets": ["Linear"], "input_activations": {"num_bits": 8, "dynamic": True},
         "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}}}},
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DENSE))


def places(config: Any) -> list[tuple[Any, ...]]:
    """Paths of all fields, those of objects within it, too."""
    if not isinstance(config, dict):
        return []
    return [p for k, v in config.items() for p in ((k,), *((k, *q) for q in places(v)))]


def changed(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    inner = value if len(path) == 1 else changed(config[path[0]], path[1:], value)
    return {**config, path[0]: inner}


@pytest.mark.parametrize("config", SCHEMES, ids=lambda c: c["quant_method"])
def test_a_field_of_any_type_is_read_or_refused_in_one_line(
    config: dict[str, Any], model: Any
) -> None:
    outcomes = []
    for path in places(config):
        for value in WRONG:
            try:
                scheme = quantization_of(
                    {"quantization_config": changed(config, path, value)}, "", "F"
                )
                sizes = {} if scheme is None else stored_weights(model, scheme, "F")
                assert all(stored.nbytes > 0 for stored in sizes.values())
                outcomes.append("")
            except ModelError as error:
                outcomes.append(str(error))
    assert any(outcomes)
    assert not all(outcomes)
    assert not any("\n" in said for said in outcomes)


def test_every_scheme_of_the_table_is_read_as_it_is(model: Any) -> None:
    seen = {part for config in SCHEMES for path in places(config) for part in path}
    assert not set(FIELDS) - seen
    for config in SCHEMES:
        assert stored_weights(model, quantization_of({"quantization_config": config}, "", "F"), "F")


def test_null_is_as_if_the_field_were_left_out(model: Any) -> None:
    plain = {"quant_method": "gptq", "bits": 4}
    empty = {**plain, "group_size": None, "dynamic": None, "modules_in_block_to_quantize": None}
    check_quantization(empty, "F")
    assert stored_weights(model, empty, "F") == stored_weights(model, plain, "F")
