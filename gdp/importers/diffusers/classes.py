"""Classes of pipelines: their denoiser, the tokens of their prompts, steps and guidance.

Defaults are those of `__call__` in diffusers 0.42 (`diffusers/pipelines/*/pipeline_*.py`), which
the tests compare.
"""

from typing import Literal, NamedTuple


class PipelineClass(NamedTuple):
    """A class of pipelines, by the arguments of its call."""

    prompts: dict[str, int]  # tokens that each text encoder reads
    steps: int
    guidance: float
    # Classifier-free guidance: two samples in one call of the denoiser, two calls, or none, as the
    # model was distilled for a scale that it reads.
    guides_by: Literal["batch", "calls", "distilled"]
    denoisers: tuple[str, ...] = ("transformer",)
    dropped: int = 0  # tokens of a template, which only the encoder reads
    pads: bool = True  # False where prompts are as long as they are
    has_negative: bool = True  # text encoders read a second prompt under guidance
    is_video: bool = False
    multiple: int = 1  # latent rows and columns in a token, which sizes must be divisible by
    boundary: float = 0.0  # share of the steps of the first of two denoisers, where nothing says it


PIPELINES = {
    "FluxPipeline": PipelineClass(
        {"text_encoder": 77, "text_encoder_2": 512}, 28, 3.5, "distilled", multiple=2
    ),
    "StableDiffusion3Pipeline": PipelineClass(
        {"text_encoder": 77, "text_encoder_2": 77, "text_encoder_3": 256}, 28, 7.0, "batch",
        multiple=2,
    ),
    "StableDiffusionPipeline": PipelineClass({"text_encoder": 77}, 50, 7.5, "batch", ("unet",)),
    "StableDiffusionXLPipeline": PipelineClass(
        {"text_encoder": 77, "text_encoder_2": 77}, 50, 5.0, "batch", ("unet",), has_negative=False
    ),
    "PixArtSigmaPipeline": PipelineClass({"text_encoder": 300}, 20, 4.5, "batch", multiple=2),
    "SanaPipeline": PipelineClass({"text_encoder": 300}, 20, 4.5, "batch"),
    "HunyuanDiTPipeline": PipelineClass(
        {"text_encoder": 77, "text_encoder_2": 256}, 50, 5.0, "batch", multiple=2
    ),
    "QwenImagePipeline": PipelineClass(
        {"text_encoder": 512}, 50, 4.0, "calls", dropped=34, pads=False, multiple=2
    ),
    "WanPipeline": PipelineClass(
        {"text_encoder": 512}, 50, 5.0, "calls", ("transformer", "transformer_2"), is_video=True,
        multiple=2, boundary=0.5,
    ),
    "HunyuanVideoPipeline": PipelineClass(
        {"text_encoder": 256, "text_encoder_2": 77}, 50, 6.0, "distilled", dropped=95,
        is_video=True, multiple=2,
    ),
    "CogVideoXPipeline": PipelineClass(
        {"text_encoder": 226}, 50, 6.0, "batch", is_video=True, multiple=2
    ),
}  # fmt: skip
"""Every class of pipelines that can be loaded, by its name in diffusers."""
