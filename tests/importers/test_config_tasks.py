"""Tasks of configurations: by transformers' own tables, and each refusal says where to go."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers

import gdp
from benchmarks.architectures import architectures, imported, small_config
from gdp.base.errors import ModelError
from gdp.importers.huggingface.model import huggingface_model
from gdp.importers.huggingface.tasks import encodes, prompt_inputs, task_of
from gdp.question.models import load
from tests.generating_configs import CONFIGS, DENSE

AUDIO = {
    "d_model": 32, "hidden_size": 32, "intermediate_size": 48, "encoder_layers": 1,
    "num_hidden_layers": 1, "encoder_attention_heads": 2, "num_attention_heads": 2,
    "encoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 20,
}  # fmt: skip
LLAMA = {"model_type": "llama", **DENSE}
HEARING = {
    "model_type": "voxtral", "architectures": ["VoxtralForConditionalGeneration"],
    "text_config": LLAMA, "audio_config": {"model_type": "voxtral_encoder", **AUDIO},
}  # fmt: skip


def written(folder: Path, fields: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return f"hf:{folder}?prompt=9&new=4"


@pytest.mark.parametrize(
    ("kind", "name", "task"),
    [
        ("llama", "LlamaForCausalLM", "causal-lm"),
        ("llama", "TinyForCausalLM", "causal-lm"),  # an ending decides where no table has the class
        ("llama", "LlamaModel", "feature-extraction"),
        ("gpt2", "GPT2LMHeadModel", "causal-lm"),
        ("gemma4", "Gemma4ForConditionalGeneration", "image-text-to-text"),
        ("voxtral", "VoxtralForConditionalGeneration", "speech-to-text"),
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration", "seq2seq-lm"),
        ("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", "any-to-any"),
        ("dia", "DiaForConditionalGeneration", "speech-to-text"),
        ("moonshine", "MoonshineForConditionalGeneration", "speech-to-text"),
        ("seamless_m4t", "SeamlessM4TForTextToText", "seq2seq-lm"),
        ("t5", "T5ForConditionalGeneration", "seq2seq-lm"),
        ("bert", "BertForMaskedLM", "masked-lm"),
        ("vit", "ViTForImageClassification", "image-classification"),
    ],
)
def test_the_class_that_is_named_has_its_task(kind: str, name: str, task: str) -> None:
    config = transformers.CONFIG_MAPPING[kind]()
    config.architectures = [name]
    assert task_of(config) == task


def test_a_model_that_hears_without_an_encoder_of_its_own_decodes(tmp_path: Path) -> None:
    """Voxtral is in the tables of speech, and its language model alone writes."""
    model = huggingface_model(written(tmp_path, HEARING))
    assert set(model.kwargs) == {"input_ids"}
    assert set(model.step.kwargs) == {"input_ids", "cache"}


def test_the_encoders_result_has_the_width_that_the_encoder_gives(tmp_path: Path) -> None:
    """T5Gemma's configuration has no width of its own: 24 is that of its encoder."""
    part = {**DENSE, "head_dim": 12, "sliding_window": 6}
    fields = {
        "model_type": "t5gemma", "architectures": ["T5GemmaForConditionalGeneration"],
        "encoder": {**part, "hidden_size": 24}, "vocab_size": 96,
        "decoder": {**part, "cross_attention_hidden_size": 24},
    }  # fmt: skip
    step = huggingface_model(written(tmp_path, fields)).step
    assert tuple(step.kwargs["encoder_outputs"].shape) == (1, 9, 24)
    assert encodes(step.unwrapped)


@pytest.mark.parametrize(
    ("fields", "query", "said"),
    [
        ({**LLAMA, "architectures": ["LlamaForCausalLM"]}, "&task=seq2seq-lm",
         "transformers has no seq2seq-lm model of type 'llama'; ask for ?task=causal-lm"),
        ({**LLAMA, "architectures": ["LlamaModel"]}, "",
         "decode with a cache, this is feature-extraction; ask for ?task=causal-lm"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"], **DENSE}, "",
         "BertLMHeadModel returns none (it has one where its configuration says is_decoder: true)"),
        ({"model_type": "qwen2_5_omni"}, "&task=any-to-any",
         "has no forward pass of its own; place one of its parts, with its configuration in a "
         "file: thinker_config"),
    ],
)  # fmt: skip
def test_a_refusal_says_where_to_go(
    fields: dict[str, Any], query: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=re.escape(said)) as found:
        huggingface_model(written(tmp_path, fields) + query)
    assert "\n" not in str(found.value)


def test_what_an_encoder_hears_has_the_type_of_its_weights() -> None:
    config = transformers.WhisperConfig(**CONFIGS["whisper"][1])
    with torch.device("meta"):
        model = transformers.WhisperForConditionalGeneration._from_config(
            config, dtype=torch.bfloat16
        )
        inputs = prompt_inputs(model, config, (2, 9), 3, "whisper")
    assert {name: (tuple(x.shape), x.dtype) for name, x in inputs.items()} == {
        "input_features": ((2, 8, 40), torch.bfloat16), "decoder_input_ids": ((2, 3), torch.long),
    }  # fmt: skip
    # No more tokens are written than the decoder has positions for.
    with torch.device("meta"):
        inputs = prompt_inputs(model, config, (2, 9), 10**6, "whisper")
    assert tuple(inputs["decoder_input_ids"].shape) == (2, config.max_target_positions)


def test_configurations_are_cut_to_few_layers_of_each_kind() -> None:
    assert len(architectures()) > 300
    document = small_config("qwen3_next", "Qwen3NextForCausalLM", layers=2)
    assert document["num_hidden_layers"] == 2
    assert sorted(document["layer_types"]) == ["full_attention", "linear_attention"]


@pytest.mark.parametrize(
    ("kind", "architecture", "outcome"),
    [
        ("dia", "DiaForConditionalGeneration", "refused"),
        ("florence2", "Florence2ForConditionalGeneration", "answered"),
        ("longcat_flash", "LongcatFlashForCausalLM", "refused"),
    ],
)
def test_no_architecture_is_an_internal_error(kind: str, architecture: str, outcome: str) -> None:
    """Of their default configurations the caches are read; `python -m benchmarks.architectures`
    does so for all, and traces them."""
    row = imported(kind, architecture, 20.0, traces=False)
    assert row.outcome == outcome, row.said


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("phi3", {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}),
    ],
)
def test_ropes_that_grow_with_the_sequence_decode(
    kind: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    """Phi-3.5 ended in a RecursionError of torch.export; the step is that of a plain rope."""
    fields = {
        "model_type": kind, "architectures": ["TinyForCausalLM"], **DENSE,
        "num_hidden_layers": 1, "original_max_position_embeddings": 16,
    }  # fmt: skip
    spec = written(tmp_path, fields).replace("prompt=9&new=4", "sequence=20&decode")
    plain = load(spec)
    written(tmp_path, {**fields, "rope_scaling": rope})
    grown = load(spec)
    assert grown.flop.sum() == pytest.approx(plain.flop.sum(), rel=1e-3)
    assert grown.cache_bytes.sum() == plain.cache_bytes.sum() == 2 * 2 * 20 * 12 * 2


def test_a_model_without_positions_has_no_longest_context(tmp_path: Path) -> None:
    """T5 counts distances: its prompt bounds neither what it reads nor what it writes."""
    tiny = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=16, d_ff=48, num_heads=2, num_layers=2,
        is_encoder_decoder=True, architectures=["T5ForConditionalGeneration"],
    )  # fmt: skip
    tiny.save_pretrained(tmp_path)
    spec = gdp.Generation(f"hf:{tmp_path}", prompt=8, new=24)
    assert gdp.load(spec).growth.longest == 0
    assert gdp.place(spec, "cpu+t4", target="vllm").of_request().context == 32
