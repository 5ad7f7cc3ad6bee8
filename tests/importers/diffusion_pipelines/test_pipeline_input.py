"""Pipelines and requests that are refused, each in one line that names the thing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")

import gdp
from gdp.base.errors import ArgumentError, GdpError, ModelError
from gdp.importers.diffusers.pipeline import load_pipeline
from gdp.importers.diffusers.request import MediaRequest, parse_image, parse_video
from gdp.importers.diffusers.spec import is_pipeline, pipeline_config
from tests.importers.diffusion_pipelines.tiny_pipelines import saved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved("PixArtSigmaPipeline", tmp_path)
    return tmp_path


SMALL = MediaRequest(64, 64)


def refused(folder: Path, request: MediaRequest = SMALL) -> str:
    with pytest.raises(GdpError) as caught:
        load_pipeline(f"hf:{folder}", request, "float32")
    assert isinstance(caught.value, ModelError)
    text = str(caught.value)
    assert "\n" not in text
    return text


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_missing_folder_of_a_component(folder: Path) -> None:
    (folder / "transformer" / "config.json").unlink()
    assert "there is no transformer/config.json" in refused(folder)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"_class_name": "NewPipeline"}, "does not know the pipeline 'NewPipeline'"),
        ({"_class_name": ["PixArtSigmaPipeline"]}, "does not know the pipeline"),
        ({"transformer": ["os", "system"]}, "does not know the class system of transformer"),
        ({"transformer": ["diffusers"]}, "must be a library and a class"),
        ({"transformer": [None, None]}, "needs a transformer"),
        ({"../../outside": ["diffusers", "AutoencoderKL"]}, "is no name of a component"),
        ({"/etc": ["diffusers", "AutoencoderKL"]}, "is no name of a component"),
        ({"text_encoder_9": ["transformers", "T5EncoderModel"]}, "no text_encoder_9/config.json"),
    ],
)  # fmt: skip
def test_an_index_that_is_wrong(folder: Path, fields: dict[str, Any], words: str) -> None:
    change(folder / "model_index.json", **fields)
    assert words in refused(folder)


@pytest.mark.parametrize("text", ["[]", "3", "{", "\x00", "[" * 10_000, '{"_class_name": 1e999}'])
def test_an_index_that_is_no_object(folder: Path, text: str) -> None:
    (folder / "model_index.json").write_text(text)
    refused(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_layers": 1 << 40}, {"num_layers": -1}, {"num_attention_heads": 1 << 40},
        {"attention_head_dim": 1 << 30, "num_attention_heads": 1 << 30},
        {"caption_channels": "wide"}, {"norm_type": "no such norm"}, {"sample_size": [1] * 5000},
        {"num_attention_heads": {"a": 1}}, {"patch_size": 0},
    ],
)  # fmt: skip
def test_absurd_fields_of_a_component(folder: Path, fields: dict[str, Any]) -> None:
    change(folder / "transformer" / "config.json", **fields)
    assert "transformer" in refused(folder)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (MediaRequest(66, 64), "width 66 is no multiple of 4, such as 64"),
        (MediaRequest(64, 2), "height 2 is no multiple of 4, such as 4"),
        (MediaRequest(64, 64, 5), "makes images"),
    ],
)
def test_sizes_that_a_pipeline_does_not_make(
    folder: Path, request_: MediaRequest, words: str
) -> None:
    assert words in refused(folder, request_)


def test_frames_that_a_decoder_does_not_make(tmp_path: Path) -> None:
    saved("WanPipeline", tmp_path)
    assert "such as 77 or 81, got 80" in refused(tmp_path, MediaRequest(64, 48, 80))


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_image, ""), (parse_image, "1024"), (parse_image, "0x1024"),
        (parse_image, "1024x1024x5"), (parse_image, "1024x1024,steps=0"),
        (parse_image, "1024x1024,steps=5,steps=6"), (parse_image, "1024x1024,guidance=nan"),
        (parse_image, "1024x1024,guidance=-1"), (parse_image, "1024x1024,speed=3"),
        (parse_image, "99999x1024"), (parse_image, "1024x1024,decoder_dtype=int3"),
        (parse_image, "1024x1024,tiling=no"), (parse_image, "\uff11\uff12x1024"),
        (parse_video, "1280x720"), (parse_video, "1280x720x99999"),
    ],
)  # fmt: skip
def test_requests_that_are_refused(parse: Callable[[str], MediaRequest], text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_requests_that_are_read() -> None:
    assert parse_image("1024x768,steps=20,guidance=3.5,batch=2,tiling") == MediaRequest(
        1024, 768, steps=20, guidance=3.5, batch=2, tiling=True
    )
    assert parse_video("1280x720x129,prompt=77") == MediaRequest(1280, 720, 129, prompt=77)


def test_a_pipeline_is_told_from_a_model(folder: Path) -> None:
    assert is_pipeline(f"hf:{folder}")
    assert is_pipeline("diffusers:FLUX.1-dev")
    assert not is_pipeline(f"hf:{folder / 'transformer'}")
    assert not is_pipeline("model.onnx")
    for spec in (f"hf:{folder}", "diffusers:FLUX.1-dev"):
        with pytest.raises(ModelError, match="--image"):
            gdp.load(spec)
    with pytest.raises(ModelError, match=r"no pipeline diffusers:nothing; there are .*FLUX.1-dev"):
        pipeline_config("diffusers:nothing")
    with pytest.raises(ModelError, match="no pipeline"):
        pipeline_config(f"hf:{folder / 'vae'}")
