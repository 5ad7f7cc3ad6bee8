"""Inputs of one call of a denoiser: a function for each class of diffusers."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Latent(NamedTuple):
    """Sizes of the inputs of a denoiser."""

    batch: int  # samples of the call
    frames: int  # of the latent
    rows: int
    columns: int
    tokens: tuple[int, ...]  # of the prompt, from each text encoder that the pipeline has
    dtype: Any  # of torch
    width: int = 0  # pixels
    height: int = 0

    def empty(self, *sizes: int) -> Any:
        """A tensor of the batch on torch's default device."""
        import torch

        return torch.empty(self.batch, *sizes, dtype=self.dtype)

    def steps(self) -> Any:
        """The time steps of the samples."""
        import torch

        return torch.zeros(self.batch, dtype=torch.long)


Inputs = dict[str, Any]


def _flux(config: Any, at: Latent) -> Inputs:
    import torch

    image, text = at.rows // 2 * (at.columns // 2), at.tokens[-1]
    inputs = {
        "hidden_states": at.empty(image, config.in_channels),
        "encoder_hidden_states": at.empty(text, config.joint_attention_dim),
        "pooled_projections": at.empty(config.pooled_projection_dim),
        "timestep": at.empty(), "img_ids": torch.empty(image, 3, dtype=at.dtype),
        "txt_ids": torch.empty(text, 3, dtype=at.dtype),
    }  # fmt: skip
    return inputs | ({"guidance": torch.empty(at.batch)} if config.guidance_embeds else {})


def _sd3(config: Any, at: Latent) -> Inputs:
    # Two encoders of CLIP make one sequence of 77 tokens, behind which stands that of T5.
    text = at.tokens[0] + (at.tokens[2] if len(at.tokens) > 2 else 256)
    return {
        "hidden_states": at.empty(config.in_channels, at.rows, at.columns),
        "encoder_hidden_states": at.empty(text, config.joint_attention_dim),
        "pooled_projections": at.empty(config.pooled_projection_dim), "timestep": at.steps(),
    }  # fmt: skip


def _unet(config: Any, at: Latent) -> Inputs:
    width = config.cross_attention_dim
    inputs = {
        "sample": at.empty(config.in_channels, at.rows, at.columns), "timestep": at.steps()[0],
        "encoder_hidden_states": at.empty(
            at.tokens[0], width if isinstance(width, int) else max(width)
        ),
    }  # fmt: skip
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        more = {"text_embeds": at.empty(pooled), "time_ids": at.empty(6)}
        return inputs | {"added_cond_kwargs": more}
    return inputs


def _pixart(config: Any, at: Latent) -> Inputs:
    import torch

    added = {"resolution": None, "aspect_ratio": None}
    if config.sample_size == 128 and config.use_additional_conditions:
        added = {"resolution": at.empty(2), "aspect_ratio": at.empty(1)}
    return {
        "hidden_states": at.empty(config.in_channels, at.rows, at.columns),
        "encoder_hidden_states": at.empty(at.tokens[0], config.caption_channels),
        "encoder_attention_mask": torch.ones(at.batch, at.tokens[0], dtype=torch.long),
        "timestep": at.steps(), "added_cond_kwargs": added,
    }  # fmt: skip


def _sana(config: Any, at: Latent) -> Inputs:
    import torch

    return {
        "hidden_states": at.empty(config.in_channels, at.rows, at.columns),
        "encoder_hidden_states": at.empty(at.tokens[0], config.caption_channels),
        "encoder_attention_mask": torch.ones(at.batch, at.tokens[0], dtype=torch.long),
        "timestep": at.steps(),
    }


def _hunyuan_dit(config: Any, at: Latent) -> Inputs:
    import torch

    image, head = (
        at.rows // config.patch_size * (at.columns // config.patch_size),
        (config.attention_head_dim),
    )
    tokens = at.tokens if len(at.tokens) > 1 else (*at.tokens, 256)
    inputs = {
        "hidden_states": at.empty(config.in_channels, at.rows, at.columns),
        "timestep": at.steps(),
        "encoder_hidden_states": at.empty(tokens[0], config.cross_attention_dim),
        "text_embedding_mask": torch.ones(at.batch, tokens[0], dtype=torch.long),
        "encoder_hidden_states_t5": at.empty(tokens[1], config.cross_attention_dim_t5),
        "text_embedding_mask_t5": torch.ones(at.batch, tokens[1], dtype=torch.long),
        "image_rotary_emb": (torch.empty(image, head), torch.empty(image, head)),
    }
    if config.use_style_cond_and_image_meta_size:
        inputs |= {"image_meta_size": at.empty(6), "style": at.steps()}
    return inputs


def _qwen(config: Any, at: Latent) -> Inputs:
    rows, columns = at.rows // 2, at.columns // 2
    return {
        "hidden_states": at.empty(rows * columns, config.in_channels),
        "encoder_hidden_states": at.empty(at.tokens[0], config.joint_attention_dim),
        "timestep": at.empty(), "img_shapes": [[(1, rows, columns)]] * at.batch,
    }  # fmt: skip


def _wan(config: Any, at: Latent) -> Inputs:
    return {
        "hidden_states": at.empty(config.in_channels, at.frames, at.rows, at.columns),
        "timestep": at.steps(),
        "encoder_hidden_states": at.empty(at.tokens[0], config.text_dim),
    }


def _hunyuan_video(config: Any, at: Latent) -> Inputs:
    import torch

    inputs = {
        "hidden_states": at.empty(config.in_channels, at.frames, at.rows, at.columns),
        "timestep": at.steps(),
        "encoder_hidden_states": at.empty(at.tokens[0], config.text_embed_dim),
        "encoder_attention_mask": torch.ones(at.batch, at.tokens[0], dtype=torch.long),
        "pooled_projections": at.empty(config.pooled_projection_dim),
    }
    return inputs | ({"guidance": at.empty()} if config.guidance_embeds else {})


def _cogvideox(config: Any, at: Latent) -> Inputs:
    import torch

    # Frames of a patch are made whole, as `CogVideoXPipeline.__call__` does.
    per_patch = config.patch_size_t or 1
    frames = -(-at.frames // per_patch) * per_patch
    inputs = {
        "hidden_states": at.empty(frames, config.in_channels, at.rows, at.columns),
        "encoder_hidden_states": at.empty(at.tokens[0], config.text_embed_dim),
        "timestep": at.steps(),
    }
    if not config.use_rotary_positional_embeddings:
        return inputs
    patches = at.rows // config.patch_size * (at.columns // config.patch_size)
    shape = (frames // per_patch * patches, config.attention_head_dim)
    return inputs | {"image_rotary_emb": (torch.empty(shape), torch.empty(shape))}


DENOISERS: dict[str, Callable[[Any, Latent], Inputs]] = {
    "FluxTransformer2DModel": _flux,
    "SD3Transformer2DModel": _sd3,
    "UNet2DConditionModel": _unet,
    "PixArtTransformer2DModel": _pixart,
    "SanaTransformer2DModel": _sana,
    "HunyuanDiT2DModel": _hunyuan_dit,
    "QwenImageTransformer2DModel": _qwen,
    "WanTransformer3DModel": _wan,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "CogVideoXTransformer3DModel": _cogvideox,
}
"""Inputs of every class of denoisers."""
