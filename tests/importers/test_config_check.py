"""Configurations that no class of transformers may see: each is refused in one line."""

import json
import re
from pathlib import Path

import pytest

from gdp.base.errors import ModelError
from gdp.importers.huggingface.check import check_config


def written(folder: Path, text: str) -> Path:
    path = folder / "config.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": 3}, "architectures must be a list of class names, got 3"),
        ({"architectures": [3]}, "architectures must be a list of class names, got [3]"),
        ({"image_size": "x"}, "image_size must be a positive whole number or two of them, got 'x'"),
        ({"image_size": [1, 2, 3]}, "or two of them, got [1, 2, 3]"),
        ({"num_channels": 0}, "num_channels must be a positive whole number"),
        ({"patch_size": True}, "patch_size must be a positive whole number"),
        ({"patch_size": [7, 0]}, "or a list of them, one of each stage, got [7, 0]"),
        ({"spatial_vision_layer": -2000}, "spatial_vision_layer must be from -1000 to 1000"),
        ({"n_layer": 2**63}, f"n_layer must be from 0 to 1000, got {2**63}"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be from 0 to 1000, got -1"),
        ({"text_config": {"decoder_layers": 10**9}}, "decoder_layers must be from 0 to 1000"),
        ({"depths": [2, 10**6]}, "depths must be from 0 to 1000, got [2, 1000000]"),
        ({"num_local_experts": 2**40}, "num_local_experts must be from 0 to 32768"),
        ({"num_labels": 2**31}, "num_labels must be from 0 to 1048576"),
    ],
)
def test_what_cannot_be_built_is_named(fields: dict, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"model_type": "gpt2", **fields}))
    with pytest.raises(ModelError, match=re.escape(said)) as found:
        check_config(path)
    assert str(path) in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "holds no object with a model_type"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested too deeply"),
        ('{"n_layer": 1%s}' % ("0" * 5000), "is no configuration of transformers"),
        ("\x00", "is no configuration of transformers"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        check_config(written(tmp_path, text))


def test_real_sizes_pass(tmp_path: Path) -> None:
    fields = {
        "architectures": None, "num_hidden_layers": 126, "depths": [3, 8, 36, 3],
        "image_size": None, "n_routed_experts": 256, "mlp_only_layers": [], "num_labels": 21841,
        "time_step_limit": [0.0, float("inf")], "patch_size": [16, 16], "use_layers": "all",
        "vision_config": {"patch_size": [7, 3, 3, 3]}, "vision_feature_layer": [-1, -2],
        "spatial_vision_layer": -1, "num_experts": 16384,
        "eos_token_id": -1, "layer_types": ["full_attention"] * 126,
    }  # fmt: skip
    check_config(written(tmp_path, json.dumps(fields)))


def test_the_importer_asks_before_transformers_reads(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from gdp.question.models import load

    path = written(tmp_path, json.dumps({"model_type": "gpt2", "n_layer": 2**40}))
    with pytest.raises(ModelError, match="n_layer must be from 0 to 1000"):
        load(f"hf:{path}")


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 50,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
CONVNEXT = {
    "model_type": "convnext", "architectures": ["ConvNextForImageClassification"],
    "depths": [1, 1], "num_stages": 2, "hidden_sizes": [8, 16], "image_size": 2**31 - 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "query"),
    [
        (CONVNEXT, ""),
        (LLAMA, "?batch=2147483647&sequence=2147483647"),
        (LLAMA, "?batch=2147483647&sequence=2147483647&decode"),
    ],
)
def test_inputs_of_more_bytes_than_can_be_counted_are_refused(
    fields: dict, query: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from gdp.question.models import load

    text = f"hf:{written(tmp_path, json.dumps(fields))}{query}"
    with pytest.raises(ModelError, match="too large to be counted; ask for fewer") as found:
        load(text)
    assert text in str(found.value)
    assert "\n" not in str(found.value)
