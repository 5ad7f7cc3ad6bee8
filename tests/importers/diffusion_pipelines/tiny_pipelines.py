"""Tiny random pipelines of every class that is imported, made by diffusers itself."""

from typing import Any, NamedTuple


class Tiny(NamedTuple):
    """Components of a pipeline by name, arguments of a call of it, and the size that it makes."""

    components: dict[str, Any]
    call: dict[str, Any]
    size: tuple[int, int, int] = (64, 64, 1)  # width, height, frames


def clip(cls: str = "CLIPTextModel") -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=32, vocab_size=100, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return getattr(transformers, cls)(config)


def t5(cls: str = "T5EncoderModel", config: str = "T5Config") -> Any:
    import transformers

    made = getattr(transformers, config)(
        d_model=32, d_ff=64, d_kv=16, num_layers=2, num_decoder_layers=2, num_heads=2,
        vocab_size=100,
    )  # fmt: skip
    return getattr(transformers, cls)(made)


def decoder_model(kind: str) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=100, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return getattr(transformers, f"{kind}Model")(config)


def qwen_vl() -> Any:
    import transformers

    text = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 100,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3], "rope_type": "default"},
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "depth": 2,
        "out_hidden_size": 32,
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def kl(channels: int = 4, levels: int = 2) -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        block_out_channels=(8,) * levels, down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels, latent_channels=channels, norm_num_groups=4,
        sample_size=32, shift_factor=0.1,
    )  # fmt: skip


def states(tokens: int, width: int = 32) -> Any:
    import torch

    return torch.randn(1, tokens, width)


def flux() -> Tiny:
    import diffusers
    import torch

    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=4, num_single_layers=5, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    parts = {
        "text_encoder": clip(),
        "text_encoder_2": t5(),
        "transformer": transformer,
        "vae": kl(),
    }
    call = {"prompt_embeds": states(512), "pooled_prompt_embeds": torch.randn(1, 32)}
    return Tiny(parts, call)


def sd3() -> Tiny:
    import diffusers
    import torch

    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32, in_channels=4, out_channels=4, num_layers=4, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=64, caption_projection_dim=32,
        pooled_projection_dim=64, pos_embed_max_size=32,
    )  # fmt: skip
    kinds = ("CLIPTextModelWithProjection",) * 2
    parts = {"text_encoder": clip(kinds[0]), "text_encoder_2": clip(kinds[1]),
             "text_encoder_3": t5(), "transformer": transformer, "vae": kl()}  # fmt: skip
    embeds = {"prompt_embeds": states(333, 64), "pooled_prompt_embeds": torch.randn(1, 64)}
    return Tiny(parts, embeds | {f"negative_{k}": v for k, v in embeds.items()})


def unet(**more: Any) -> Any:
    import diffusers

    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, sample_size=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=(2, 2),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **more,
    )  # fmt: skip


def sd() -> Tiny:
    embeds = {"prompt_embeds": states(77), "negative_prompt_embeds": states(77)}
    parts = {"text_encoder": clip(), "unet": unet(cross_attention_dim=32), "vae": kl()}
    return Tiny(parts, embeds)


def sdxl() -> Tiny:
    import torch

    denoiser = unet(
        cross_attention_dim=64, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80, transformer_layers_per_block=(1, 4),
        use_linear_projection=True,
    )  # fmt: skip
    parts = {"text_encoder": clip(), "text_encoder_2": clip("CLIPTextModelWithProjection"),
             "unet": denoiser, "vae": kl()}  # fmt: skip
    embeds = {"prompt_embeds": states(77, 64), "pooled_prompt_embeds": torch.randn(1, 32)}
    return Tiny(parts, embeds | {f"negative_{k}": v for k, v in embeds.items()})


def masked(tokens: int) -> dict[str, Any]:
    import torch

    embeds = {"prompt_embeds": states(tokens), "prompt_attention_mask": torch.ones(1, tokens)}
    return embeds | {f"negative_{k}": v for k, v in embeds.items()} | {"negative_prompt": None}


def pixart() -> Tiny:
    import diffusers

    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=4, cross_attention_dim=32,
        caption_channels=32, sample_size=32, use_additional_conditions=False,
    )  # fmt: skip
    parts = {"text_encoder": t5(), "transformer": transformer, "vae": kl()}
    return Tiny(parts, {**masked(300), "use_resolution_binning": False})


def sana() -> Tiny:
    import diffusers

    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=4,
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32,
        caption_channels=32, sample_size=32,
    )  # fmt: skip
    vae = diffusers.AutoencoderDC(
        latent_channels=4, attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)), downsample_block_type="conv",
        decoder_norm_types="rms_norm", decoder_act_fns="silu",
    )  # fmt: skip
    parts = {"text_encoder": decoder_model("Gemma2"), "transformer": transformer, "vae": vae}
    return Tiny(parts, {**masked(300), "use_resolution_binning": False})


def hunyuan_dit() -> Tiny:
    import diffusers
    import transformers

    transformer = diffusers.HunyuanDiT2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, patch_size=2, sample_size=16,
        hidden_size=32, num_layers=4, cross_attention_dim=32, cross_attention_dim_t5=32,
        pooled_projection_dim=16, use_style_cond_and_image_meta_size=False,
        activation_fn="gelu-approximate",
    )  # fmt: skip
    bert = transformers.BertModel(transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=100,
    ))  # fmt: skip
    parts = {"text_encoder": bert, "text_encoder_2": t5(), "transformer": transformer,
             "vae": kl(levels=4)}  # fmt: skip
    first, second = masked(77), masked(256)
    call = {**first, **{f"{k}_2": v for k, v in second.items() if k != "negative_prompt"}}
    return Tiny(parts, {**call, "use_resolution_binning": False})


def qwen() -> Tiny:
    import diffusers
    import torch

    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    parts = {"text_encoder": qwen_vl(), "transformer": transformer, "vae": vae}
    embeds = {"prompt_embeds": states(512), "prompt_embeds_mask": torch.ones(1, 512, dtype=int)}
    return Tiny(parts, embeds | {f"negative_{k}": v for k, v in embeds.items()})


def wan() -> Tiny:
    import diffusers

    def expert() -> Any:
        return diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
            text_dim=32, freq_dim=16, ffn_dim=64, num_layers=4,
        )  # fmt: skip

    vae = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    parts = {"text_encoder": t5("UMT5EncoderModel", "UMT5Config"), "transformer": expert(),
             "transformer_2": expert(), "vae": vae}  # fmt: skip
    embeds = {"prompt_embeds": states(512), "negative_prompt_embeds": states(512)}
    return Tiny(parts, embeds, (64, 48, 9))


def hunyuan_video() -> Tiny:
    import diffusers
    import torch

    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=4,
        num_single_layers=4, num_refiner_layers=1, text_embed_dim=32, pooled_projection_dim=32,
        rope_axes_dim=(4, 4, 8),
    )  # fmt: skip
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4,
    )  # fmt: skip
    parts = {"text_encoder": decoder_model("Llama"), "text_encoder_2": clip(),
             "transformer": transformer, "vae": vae}  # fmt: skip
    embeds = {"prompt_embeds": states(256), "pooled_prompt_embeds": torch.randn(1, 32),
              "prompt_attention_mask": torch.ones(1, 256)}  # fmt: skip
    return Tiny(parts, embeds, (64, 48, 33))


def cogvideox() -> Tiny:
    import diffusers

    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
        time_embed_dim=8, text_embed_dim=32, num_layers=4, sample_width=8, sample_height=6,
        sample_frames=9, use_rotary_positional_embeddings=True, max_text_seq_length=226,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=4,
        sample_height=48, sample_width=64,
    )  # fmt: skip
    parts = {"text_encoder": t5(), "transformer": transformer, "vae": vae}
    embeds = {"prompt_embeds": states(226), "negative_prompt_embeds": states(226)}
    return Tiny(parts, embeds, (64, 48, 17))


TINY = {
    "FluxPipeline": flux, "StableDiffusion3Pipeline": sd3, "StableDiffusionPipeline": sd,
    "StableDiffusionXLPipeline": sdxl, "PixArtSigmaPipeline": pixart, "SanaPipeline": sana,
    "HunyuanDiTPipeline": hunyuan_dit, "QwenImagePipeline": qwen, "WanPipeline": wan,
    "HunyuanVideoPipeline": hunyuan_video, "CogVideoXPipeline": cogvideox,
}  # fmt: skip
"""A tiny pipeline of each class."""


def saved(name: str, folder: Any) -> Tiny:
    """A tiny pipeline, whose configurations are written to a folder as diffusers writes them."""
    import json

    tiny = TINY[name]()
    index: dict[str, Any] = {"_class_name": name, "_diffusers_version": "0.42.1",
                             "scheduler": ["diffusers", "DDIMScheduler"],
                             "tokenizer": ["transformers", "CLIPTokenizer"]}  # fmt: skip
    for key, module in tiny.components.items():
        library = type(module).__module__.partition(".")[0]
        index[key] = [library, type(module).__name__]
        if library == "diffusers":
            module.save_config(folder / key)
        else:
            module.config.save_pretrained(folder / key)
    (folder / "model_index.json").write_text(json.dumps(index))
    return tiny
