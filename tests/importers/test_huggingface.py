"""Configurations of transformers become graphs: prefill, or one token with its cache."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gdp.base.errors import ModelError
from gdp.cli.main import cli
from gdp.graph.op_graph import INPUT, OUTPUT
from gdp.importers.huggingface.spec import ConfigSpec, parse_config_spec
from gdp.question.models import inspect_model, load, source_files


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("hf:a/b", ConfigSpec("a/b")),
        ("hf:a?task=masked-lm&sequence=8", ConfigSpec("a", "masked-lm", 1, 8)),
        ("hf:a?batch=3&decode", ConfigSpec("a", "", 3, 512, True)),
    ],
)
def test_a_spec_is_read(text: str, spec: ConfigSpec) -> None:
    assert parse_config_spec(text) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hf:", "must look like"),
        ("hf:a?tasks=x", "got 'tasks'"),
        ("hf:a?task=x", "no task 'x'; there are causal-lm"),
        ("hf:a?batch=0", "batch must be a positive whole number"),
        ("hf:a?sequence=1e3", "sequence must be a positive whole number"),
    ],
)
def test_a_malformed_spec_is_refused(text: str, said: str) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        parse_config_spec(text)


def test_flags_are_for_configurations_only() -> None:
    done = CliRunner().invoke(cli, ["inspect", "model.onnx", "--decode"])
    assert done.exit_code == 2
    assert "--decode is for hf:CONFIG and .gguf models, not for 'model.onnx'" in done.output


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    from tests.torch_models import CONFIGS, config

    def saved(family: str, **changed: Any) -> Path:
        made = config(family, **changed)
        made.architectures = [CONFIGS[family][0].replace("Config", "ForCausalLM")]
        if family == "bert":
            made.architectures = ["BertForMaskedLM"]
        made.save_pretrained(tmp_path / family)
        return tmp_path / family

    return saved


@pytest.mark.parametrize("family", ["bert", "llama", "mixtral"])
def test_a_configuration_is_a_model_without_weights(family: str, folder: Any) -> None:
    from tests.torch_models import build

    path = folder(family)
    spec = f"hf:{path}?sequence=16"
    found = inspect_model(spec)
    model, _ = build(family)
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["name"].endswith("1x16")
    assert source_files(spec) == [path / "config.json"]
    graph = load(f"hf:{path}/config.json?sequence=32&batch=2")
    assert graph.flop.sum() > 3.9 * found["flop"]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_one_step_of_decoding_reads_the_cache_where_it_lies(family: str, folder: Any) -> None:
    path = folder(family)
    graph = load(f"hf:{path}?sequence=100&decode")
    kinds = graph.op_types
    assert [kinds.count(t) for t in (INPUT, OUTPUT)] == [1, 1]
    # Keys and values of 100 tokens, 2 layers and 2 heads of 16; they are held, not sent.
    cached = 2 * 2 * 100 * 2 * 16 * 4
    prefill = load(f"hf:{path}?sequence=100")
    assert graph.weight_bytes.sum() == pytest.approx(prefill.weight_bytes.sum() + cached, rel=1e-3)
    per_layer = {s for s, b in zip(graph.scope, graph.weight_bytes, strict=True) if b == cached / 4}
    assert per_layer == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert graph.flop.sum() < prefill.flop.sum() / 20


def test_what_is_no_causal_model_decodes_nothing(folder: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"models of causal-lm, .* decode with a cache, this is masked-lm"
    ):
        load(f"hf:{folder('bert')}?decode")
    with pytest.raises(ModelError, match="no configuration"):
        load(f"hf:{tmp_path}/nothing.json")
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(ModelError, match="is no configuration of transformers"):
        load(f"hf:{tmp_path}/odd.json")
