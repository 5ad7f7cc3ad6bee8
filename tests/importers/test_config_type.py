"""The type that a configuration is loaded in, whatever way it leaves it out."""

import json
from pathlib import Path
from typing import Any

import pytest

import gdp
from gdp.base.errors import ModelError
from gdp.cluster.file import load_cluster
from gdp.cluster.table import has_bfloat16
from gdp.importers.huggingface.dtype import bytes_of_files, loaded_config, type_note
from gdp.importers.huggingface.model import loading_note

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
BERT = LLAMA | {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
SERVED = "&max_num_batched_tokens=2048"


def _saved(folder: Path, config: dict[str, Any], tensors: dict[str, int] | None = None) -> str:
    """The spec of a configuration, beside a checkpoint of so many bytes by type."""
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        header, at = dict[str, Any](__metadata__={"format": "pt"}), 0
        for name, size in tensors.items():
            header[f"w{at}"] = {"dtype": name, "shape": [1], "data_offsets": [at, at + size]}
            at += size
        data = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    return f"hf:{folder}?task=causal-lm"


@pytest.mark.parametrize(
    ("more", "tensors", "free", "served"),
    [
        ({"dtype": "bfloat16"}, None, "bfloat16", "bfloat16"),
        ({"torch_dtype": "float16"}, None, "float16", "float16"),
        ({"torch_dtype": "float32"}, None, "float32", "bfloat16"),
        ({"dtype": {"": "float16", "text_config": "float32"}}, None, "float16", "float16"),
        ({"dtype": None}, None, "bfloat16", "bfloat16"),
        ({"dtype": "auto"}, None, "bfloat16", "bfloat16"),
        ({}, None, "bfloat16", "bfloat16"),
        (MXFP4, None, "bfloat16", "bfloat16"),
        ({"text_config": {"dtype": "float16"}}, None, "float16", "float16"),
        ({"text_config": {"torch_dtype": "float32"}}, None, "float32", "bfloat16"),
        ({"text_config": MXFP4}, None, "bfloat16", "bfloat16"),
        ({"vision_config": {"dtype": "float16"}, "text_config": {}}, None, "float16", "float16"),
        ({"thinker_config": {"dtype": "float16"}}, None, "float16", "float16"),
        ({"thinker_config": {"text_config": {"dtype": "float16"}}}, None, "float16", "float16"),
        ({"text_config": "x", "thinker_config": 3}, None, "bfloat16", "bfloat16"),
        ({}, {"F32": 400}, "float32", "bfloat16"),
        ({}, {"F32": 4, "F16": 200}, "float16", "float16"),
        (MXFP4, {"U8": 9000, "BF16": 200, "F32": 8}, "bfloat16", "bfloat16"),
        ({}, {"U8": 10}, "bfloat16", "bfloat16"),
        ({"dtype": "float16"}, {"F32": 400}, "float16", "float16"),
    ],
)  # fmt: skip
def test_a_type_is_that_of_the_checkpoint_as_it_is_loaded(
    tmp_path: Path, more: dict[str, Any], tensors: dict[str, int] | None, free: str, served: str
) -> None:
    spec = _saved(tmp_path, LLAMA | more, tensors)
    assert loaded_config(spec).loaded == free
    assert loaded_config(spec + SERVED).loaded == served
    # A card before Ampere: float16, whatever 16 or 32 bits a checkpoint has.
    assert loaded_config(spec + SERVED, has_bfloat16=False).loaded == "float16"
    for asked in ("float32", "float16"):
        assert loaded_config(f"{spec}{SERVED}&dtype={asked}").loaded == asked
        assert loaded_config(f"{spec}&dtype={asked}").loaded == asked
    assert "torch_dtype" not in loaded_config(spec).document


def test_models_that_write_nothing_are_those_of_pytorch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    assert loaded_config(f"hf:{tmp_path}").loaded == "float32"
    assert type_note(f"hf:{tmp_path}") == ""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for more in ("", "?decode", "?prompt=8&new=2"):
        assert loaded_config(f"hf:{tmp_path}{more}").loaded == "bfloat16"


def test_a_damaged_checkpoint_says_nothing(tmp_path: Path) -> None:
    spec = _saved(tmp_path, LLAMA)
    for data in (b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x04\0\0\0\0\0\0\0{{{{"):
        (tmp_path / "model.safetensors").write_bytes(data)
        assert loaded_config(spec).loaded == "bfloat16"
    with pytest.raises(ModelError, match="no dtype 'int8' to load weights in"):
        loaded_config(f"{spec}&dtype=int8")


def test_cards_before_ampere_have_no_bfloat16() -> None:
    """Compute capabilities of the datasheets: P100 6.0, V100 7.0, T4 7.5; A100 8.0 and later."""
    old, new = ("t4", "v100", "p100"), ("a100", "l4", "h100", "rtx3090", "b200")
    has = {k: has_bfloat16(load_cluster(f"cpu+1x{k}").devices[-1]) for k in (*old, *new)}
    assert has == dict.fromkeys(old, False) | dict.fromkeys(new, True)


# Two layers of width 64, by hand: attention 64 x (64 + 2 x 32) + 64 x 64, feed-forward 3 x 64 x 96,
# two norms; embedding and head of 96 x 64, and a last norm.
NUMBERS = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 96 + 2 * 64) + 2 * 96 * 64 + 64
ANGLES = 4 * 8  # frequencies of rotations stay float32


@pytest.mark.parametrize(
    ("machine", "target", "more", "told"),
    [
        ("cpu+1xh100", "vllm", {}, "config.json names no dtype: bfloat16, as vLLM loads it"),
        ("cpu+1xh100", "vllm", {"dtype": "float32"}, "of float32 are loaded as bfloat16"),
        ("cpu+1xh100", "vllm", {"dtype": "bfloat16"}, ""),
        ("cpu+1xt4", "vllm", {"dtype": "bfloat16"}, "of bfloat16 are loaded as float16"),
        ("cpu+1xt4", "vllm", {}, "config.json names no dtype: float16, as vLLM loads it"),
        ("cpu+1xh100", "accelerate", {}, "config.json names no dtype: bfloat16 is assumed"),
        ("cpu+1xh100", None, {}, "config.json names no dtype: bfloat16 is assumed"),
    ],
)  # fmt: skip
def test_answers_count_the_bytes_of_the_type_and_say_it(
    tmp_path: Path, machine: str, target: str | None, more: dict[str, Any], told: str
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | more))
    request = gdp.Generation(f"hf:{tmp_path}", prompt=8, new=4)
    once = gdp.Search(seconds=None, evaluations=1)
    result = gdp.place(request, machine, target=target, search=once)
    graph = result.question.graph
    first = graph.weight_holders()
    caches = graph.cache_bytes[first].sum()
    assert graph.weight_bytes[first].sum() - caches == 2 * NUMBERS + ANGLES
    assert caches == 2 * 2 * 32 * (8 + 4) * 2  # keys and values of two layers, of 12 tokens
    kept = [d.dtype for d in graph.detail if d.dtype.startswith(("bf", "float1"))]
    assert set(kept) == {"float16" if "t4" in machine else "bfloat16"}
    notes = [note for note in result.notes if "dtype" in note or "loaded as" in note]
    assert (told in notes[0]) if told else not notes


@pytest.mark.parametrize(
    ("share", "quantize", "told"),
    [(1.0, "", False), (0.9, "", False), (0.5, "", True), (0.5, "&quantize=fp8", False)],
)
@pytest.mark.parametrize("indexed", [True, False])
def test_files_of_fewer_bytes_than_the_weights_are_worth_a_word(
    tmp_path: Path, share: float, quantize: str, told: bool, indexed: bool
) -> None:
    pytest.importorskip("transformers")
    size = int(share * (2 * NUMBERS + ANGLES))
    spec = _saved(tmp_path, LLAMA | {"dtype": "bfloat16"}, None if indexed else {"BF16": size})
    if indexed:
        index = {"metadata": {"total_size": size}, "weight_map": {"w": "a.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    spec = f"{spec}&sequence=8{quantize}"
    note = loading_note(spec, gdp.load(spec))
    assert ("the files of the checkpoint hold" in note) == told


def test_a_damaged_index_says_nothing(tmp_path: Path) -> None:
    _saved(tmp_path, LLAMA)
    assert bytes_of_files(tmp_path) == 0
    for data in ("", "[]", "{}", '{"metadata": 3}', '{"metadata": {"total_size": "7"}}'):
        (tmp_path / "model.safetensors.index.json").write_text(data)
        assert bytes_of_files(tmp_path) == 0
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 7}}')
    assert bytes_of_files(tmp_path) == 7
    assert bytes_of_files(tmp_path / "none") == 0
