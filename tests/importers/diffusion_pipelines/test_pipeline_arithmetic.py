"""FLOPs of graphs against arithmetic by hand, tiles and chunks, and parameters of public models."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")

from gdp.importers.diffusers.decoders import decoder_call
from gdp.importers.diffusers.pipeline import Component, load_pipeline
from gdp.importers.diffusers.request import MediaRequest
from gdp.importers.diffusers.spec import pipeline_config, pipeline_names
from gdp.importers.diffusers.tracing import ComponentCall, build_component
from tests.importers.diffusion_pipelines.tiny_pipelines import saved


def flux(folder: Path, **more: Any) -> dict[str, Component]:
    saved("FluxPipeline", folder)
    request = MediaRequest(64, 32, 1, steps=3, **more)
    pipeline = load_pipeline(f"hf:{folder}", request, "float32")
    assert not pipeline.guided
    return {c.name: c for c in pipeline.components}


@pytest.mark.parametrize("batch", [1, 3])
def test_flop_of_a_transformer_and_of_convolutions(batch: int, tmp_path: Path) -> None:
    """Products of matrices of FLUX with 4 double and 5 single blocks of width 32, by hand."""
    parts = flux(tmp_path, batch=batch)
    image, text, width = 16 // 2 * (32 // 2), 512, 32
    both = image + text
    double = 2 * both * (4 * width * width + 2 * width * 4 * width)
    single = 2 * both * (3 * width * width + width * 4 * width + 5 * width * width)
    modulated = 2 * width * width * (4 * 2 * 6 + 5 * 3 + 2)
    embedded = 2 * (image * 16 * width * 2 + text * 32 * width)
    # Time and guidance: 256 sines, the pooled prompt 32 numbers, each through two layers.
    embedded += 2 * (2 * (256 * width + width * width) + 2 * width * width)
    # An addition of a bias for each number that a layer makes.
    biases = both * width * (4 * (4 + 4 + 1) + 5 * (3 + 4 + 1)) + image * (width + 16)
    biases += text * width + width * (4 * 2 * 6 + 5 * 3 + 2 + 3 * 2)
    by_hand = batch * (4 * double + 5 * single + modulated + embedded + biases)
    graph = parts["transformer"].graph
    assert graph.flop[graph.has_type(("linear",))].sum() == pytest.approx(by_hand, rel=1e-9)
    # Two products of attention, and some FLOPs of each score for its softmax.
    attention = graph.flop[graph.has_type(("scaled_dot_product_attention",))].sum()
    scores = 9 * batch * both * both
    assert 4 * scores * width < attention < (4 * width + 2 * 8) * scores
    assert parts["transformer"].passes == 3

    # The decoder: convolutions of 8 channels at half the resolution (the first, two blocks of two
    # in the middle and two in the lower level) and at the whole (behind the enlargement, two blocks
    # of two, the last), and one of a pixel; a bias for each number.
    low, full = 16 * 32, 32 * 64
    by_hand = low * (18 * (4 * 8 + 8 * 8 * 8) + 2 * 4 * 4 + 8 + 8 * 8 + 4)
    by_hand += full * (18 * (8 * 8 + 4 * 8 * 8 + 8 * 3) + 5 * 8 + 3)
    graph = parts["vae"].graph
    found = graph.flop[graph.has_type(("conv2d",))].sum()
    assert found == pytest.approx(batch * by_hand, rel=1e-9)


def test_guidance_doubles_the_batch_or_the_calls(tmp_path: Path) -> None:
    """Guidance of PixArt doubles what a call computes, to the FLOP of its attention."""
    saved("PixArtSigmaPipeline", tmp_path)
    flop = []
    for scale in (1.0, 4.5):
        request = MediaRequest(64, 64, guidance=scale)
        pipeline = load_pipeline(f"hf:{tmp_path}", request, "float32")
        assert pipeline.guided == (scale > 1)
        (denoiser,) = (c for c in pipeline.components if c.role == "denoise")
        assert denoiser.calls == 1
        flop.append(float(denoiser.graph.flop.sum()))
    assert flop[1] == pytest.approx(2 * flop[0], rel=1e-4)


def vae_of(name: str, **config: Any) -> Any:
    import torch

    with torch.device("meta"):
        return build_component(ComponentCall("vae", name, config, "float32", (1, 1, 1)))


def calls(vae: Any, latent: tuple[int, ...], **more: Any) -> tuple[tuple[int, ...], float]:
    import torch

    with torch.device("meta"):
        call = decoder_call(vae, MediaRequest(64, 64, **more), latent, torch.float32)
    return tuple(call.inputs["latent"].shape), call.calls


def test_tiles_and_chunks_are_counted_as_diffusers_makes_them() -> None:
    """Tiles of the latent at every stride, smaller ones in proportion."""
    four = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    vae = vae_of(
        "AutoencoderKL", block_out_channels=(8,) * 4, down_block_types=four[0], sample_size=512,
        up_block_types=four[1], norm_num_groups=4,
    )  # fmt: skip
    assert calls(vae, (2, 4, 128, 128)) == ((2, 4, 128, 128), 1.0)
    assert calls(vae, (2, 4, 128, 128), slicing=True) == ((1, 4, 128, 128), 2.0)
    # 64 rows at 0, 48 and 96, where 32 are left: 2.5 tiles each way.
    assert calls(vae, (2, 4, 128, 128), tiling=True) == ((2, 4, 64, 64), 2.5 * 2.5)
    assert calls(vae, (1, 4, 48, 128), tiling=True) == ((1, 4, 48, 64), (1 + 0) * 2.5)
    assert calls(vae, (1, 4, 64, 64), tiling=True) == ((1, 4, 64, 64), 1.0)


def test_frames_are_decoded_in_chunks() -> None:
    wan = vae_of("AutoencoderKLWan", base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    # 21 frames of the latent make 81: the first one frame, the others four each.
    assert calls(wan, (1, 16, 21, 6, 8)) == ((1, 16, 1, 6, 8), 81 / 4)
    hunyuan = vae_of("AutoencoderKLHunyuanVideo", block_out_channels=[8] * 4, norm_num_groups=4)
    # Tiles of 5 frames at 0, 3, ..., 30 of 33, the last of which has 3.
    assert calls(hunyuan, (1, 16, 33, 6, 8)) == ((1, 16, 5, 6, 8), (10 * 5 + 3) / 5)
    cog = vae_of("AutoencoderKLCogVideoX", block_out_channels=[8] * 4, norm_num_groups=4)
    assert calls(cog, (1, 16, 13, 6, 8)) == ((1, 16, 2, 6, 8), 6.5)


PUBLISHED = {
    "FLUX.1-dev": {"transformer": 11.90, "text_encoder_2": 4.76, "text_encoder": 0.123},
    "FLUX.1-schnell": {"transformer": 11.89},
    "stable-diffusion-3.5-medium": {"transformer": 2.243, "text_encoder_2": 0.695},
    "stable-diffusion-3.5-large": {"transformer": 8.06},
    "stable-diffusion-xl-base-1.0": {"unet": 2.567, "vae": 0.0837},
    "PixArt-Sigma": {"transformer": 0.611},
    "SANA1.5-1.6B": {"transformer": 1.60, "text_encoder": 2.61, "vae": 0.312},
    "SANA1.5-4.8B": {"transformer": 4.72},
    "HunyuanDiT-v1.2": {"transformer": 1.5, "text_encoder_2": 1.67},
    "Qwen-Image": {"transformer": 20.43, "text_encoder": 8.29, "vae": 0.127},
    "Wan2.1-T2V-1.3B": {"transformer": 1.419, "text_encoder": 5.68, "vae": 0.127},
    "Wan2.1-T2V-14B": {"transformer": 14.29},
    "HunyuanVideo": {"transformer": 12.82, "text_encoder": 7.5, "vae": 0.246},
    "CogVideoX-2b": {"transformer": 1.69, "vae": 0.216},
    "CogVideoX1.5-5B": {"transformer": 5.57},
}
"""Parameters of components, 1e9, by the sizes of their published files of 16-bit weights."""


def test_every_public_pipeline_has_a_published_size() -> None:
    assert sorted(PUBLISHED) == pipeline_names()


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_public_models(name: str) -> None:
    import torch

    config = pipeline_config(f"diffusers:{name}")
    for part, billions in PUBLISHED[name].items():
        own = config.components[part]
        with torch.device("meta"):
            model = build_component(ComponentCall(part, *own, "bfloat16", (1, 1, 1)))
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e9 * billions, rel=5e-3)


@pytest.mark.slow
def test_facts_hold_only_what_differs_from_the_defaults_of_classes() -> None:
    import inspect

    import diffusers

    for name in pipeline_names():
        for own in pipeline_config(f"diffusers:{name}").components.values():
            cls = getattr(diffusers, own.class_name, None)
            if cls is None:
                continue
            takes = inspect.signature(cls.__init__).parameters
            for key, value in own.document.items():
                default = takes[key].default
                default = list(default) if isinstance(default, tuple) else default
                assert value != default, (own.class_name, key)
