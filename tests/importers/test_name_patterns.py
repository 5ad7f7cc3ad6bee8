"""Patterns in quantisation configurations: what they leave out, by hand, and in bounded time."""

import time
from itertools import product
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from transformers.quantizers.quantizers_utils import should_convert_module

from gdp.base.errors import ModelError
from gdp.importers.pytorch import patterns
from gdp.importers.pytorch.quantised import stored_weights
from tests.generating_configs import DENSE

ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
MLP = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
BLOCKS = {f"model.layers.{i}.{name}" for i in range(2) for name in ATTENTION | MLP}
ALL = {*BLOCKS, "lm_head"}
BITS4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
BITS8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


def ending(*names: str) -> set[str]:
    return {path for path in ALL if path.endswith(names)}


def packed(*groups: dict[str, Any], ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": list(ignore),
        "config_groups": {str(i): group for i, group in enumerate(groups)},
    }  # fmt: skip


def group(*targets: str, weights: Any = BITS4) -> dict[str, Any]:
    return {"targets": list(targets), "weights": weights}


def gptq(*dynamic: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "dynamic": {name: {} for name in dynamic}, **more}


def skipping(key: str, method: str, *names: str) -> dict[str, Any]:
    return {"quant_method": method, "bits": 4, "load_in_4bit": True, key: list(names)}


@pytest.fixture(scope="module")
def model() -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DENSE))


def converted(model: Any, config: dict[str, Any]) -> set[str]:
    return {path.removesuffix(".weight") for path in stored_weights(model, config, "F")}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (packed(group("Linear")), ALL),
        (packed(group("Linear"), ignore=("lm_head",)), BLOCKS),
        (packed(group("Linear"), ignore=(r"re:model\.layers\.1",)),
         {path for path in ALL if ".1." not in path}),
        (packed(group("Linear"), ignore=(r"re:layers\.1",)), ALL),  # from the start of a name
        (packed(group("Linear"), ignore=("re:^(?!.*mlp).*$",)), ending(*MLP)),
        (packed(group("Linear"), ignore=("_proj", "proj")), ALL),  # whole parts of a name
        (packed(group("re:.*[qk]_proj$")), ending("q_proj", "k_proj")),
        (packed(group("self_attn.o_proj")), ending("o_proj")),
        (packed(group("lm_head")), {"lm_head"}),
        (packed(group("lm_head", weights=None), group("Linear")), BLOCKS),
        (gptq(), BLOCKS),
        (gptq(lm_head=True), ALL),
        (gptq(r"-:.*\.0\."), {path for path in BLOCKS if ".1." in path}),
        (gptq(r"-:layers\.0"), BLOCKS),
        (gptq("+:.*q_proj", ".*k_proj"), BLOCKS),
        (gptq("-:.*q_proj", "-:.*mlp"), ending("k_proj", "v_proj", "o_proj")),
        (skipping("llm_int8_skip_modules", "bitsandbytes", "model.layers.1"),
         {path for path in ALL if ".1." not in path}),
        (skipping("llm_int8_skip_modules", "bitsandbytes", "model.layers.1", "o_proj", "lm_he"),
         {path for path in ALL if ".1." not in path} - ending("o_proj")),
        (skipping("modules_to_not_convert", "awq", r"model\.layers\.\d+\.(mlp|x)"),
         ending(*ATTENTION)),
        (skipping("modules_to_not_convert", "fp8", "nothing|model.layers.0.mlp"),
         ALL - {path for path in BLOCKS if ".0.mlp" in path}),
    ],
)  # fmt: skip
def test_modules_that_a_configuration_names(
    config: dict[str, Any], wanted: set[str], model: Any
) -> None:
    assert converted(model, config) == wanted


def test_each_module_has_the_bits_of_the_first_group_that_names_it(model: Any) -> None:
    config = packed(group("re:.*mlp", weights=BITS8), group("Linear"))
    stored = stored_weights(model, config, "F")
    size = 48 * 64  # of the MLP; a scale of 4 bytes for each row, or for each 16 numbers
    up = stored["model.layers.0.mlp.up_proj.weight"].nbytes
    query = stored["model.layers.0.self_attn.q_proj.weight"].nbytes
    assert up == size + 4 * 64 + 16
    assert query == 48 * 48 // 2 + 4 * 48 * 3 + 16


def test_names_are_skipped_as_transformers_skips_them(model: Any) -> None:
    keys = ("model", "model.layers.1", "layers.1", "model.layers.*", "model.layers.1.", "lm_head",
            "mlp", "model.layers.0.mlp.up", "proj", ".*up", "model.lay|lm", "", "model.layers.1$",
            "(?!lm).*")  # fmt: skip
    for key in keys:
        left = {path for path in ALL if should_convert_module(path, [key])}
        config = skipping("llm_int8_skip_modules", "bitsandbytes", key)
        assert converted(model, config) == left, key


def test_lists_of_names_and_patterns_skip_as_transformers_skips_them(model: Any) -> None:
    lists = (
        ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp", "lm_head"],
        ["model.layers.1", "model.layers.11", "mlp.up"], ["mlp_up", "model.layers-0"],
        ["model.layers.0", ".*up_proj"], ["q_proj", "(?!lm).*gate"],
    )  # fmt: skip
    for keys in lists:
        left = {path for path in ALL if should_convert_module(path, keys)}
        config = skipping("llm_int8_skip_modules", "bitsandbytes", *keys)
        assert converted(model, config) == left, keys


def test_lists_of_each_module_are_no_long_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "LIMIT_S", 0.0)  # nothing is left for patterns one by one
    names = patterns.NamePatterns("F")
    keys = [f"model.layers.{n}.self_attn.{k}_proj" for n in range(126) for k in "qkvo"]
    found = [names.any_matches(keys, f"model.layers.{n}.self_attn.o_proj") for n in range(130)]
    assert found == [True] * 126 + [False] * 4


EVIL = (r"(\w+\.?)+!", ".?" * 30 + "!", r"(?:a?|b?|\w?){300}[!?]", ".*" * 200 + "[!?]",
        r"((.{0,200}){0,200}){0,200}[!?]")  # fmt: skip
METHODS = (
    lambda p: packed(group("Linear"), ignore=(f"re:{p}",)),
    lambda p: packed(group(f"re:{p}"), group("Linear")),
    lambda p: gptq(f"-:{p}"),
    lambda p: skipping("llm_int8_skip_modules", "bitsandbytes", p),
    lambda p: skipping("modules_to_not_convert", "awq", p),
    lambda p: skipping("skip_modules", "hqq", p),
)


@pytest.mark.parametrize(("evil", "method"), list(product(EVIL, METHODS)))
def test_patterns_are_compared_in_bounded_time(
    evil: str, method: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "LIMIT_S", 0.05)
    started_s, said = time.process_time(), "F: '...' take too long to compare"
    try:
        assert stored_weights(model, method(evil), "F")
    except ModelError as error:
        said = str(error)
    assert said.startswith("F: '")
    assert "too long to compare" in said
    assert "\n" not in said
    assert time.process_time() - started_s < 2.0


def test_the_limit_is_one_of_all_patterns_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr(patterns.time, "process_time", lambda: float(next(seconds)))
    names = patterns.NamePatterns("F")
    for _ in range(4):
        assert names.matches("a", "a")
    with pytest.raises(ModelError, match="too long to compare"):
        names.matches("b", "a")


@pytest.mark.parametrize("wrong", ["(", "model.[", "*", "a{2,1}", "(?:" * 4000 + ")" * 4000])
@pytest.mark.parametrize("method", METHODS)
def test_no_pattern_is_one_line(wrong: str, method: Any, model: Any) -> None:
    with pytest.raises(ModelError, match=r"^F: '.* is no regular expression: .*$"):
        stored_weights(model, method(wrong), "F")


def test_a_pattern_of_endless_letters_is_refused(model: Any) -> None:
    with pytest.raises(ModelError, match="has 20000 characters; a pattern may have 16384"):
        stored_weights(model, gptq("-:" + "a" * 20000), "F")
