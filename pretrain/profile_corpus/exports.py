"""Architectures exported to ONNX from their configurations, with random weights and few layers.

Kernels repeat from layer to layer, so a few layers at several widths say more than many at one.
Needs the extra `corpus`: torch, transformers, onnxscript.
"""

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Export:
    """One architecture at one size."""

    name: str
    family: str
    config: str  # class of transformers
    model: str
    inputs: tuple[tuple[str, tuple[int, ...]], ...]  # integers for *_ids, floats otherwise
    options: Mapping[str, Any] = field(default_factory=dict)
    output: Callable[[Any], Any] | None = None


def tokens(batch: int, length: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return (("input_ids", (batch, length)),)


def image(size: int, batch: int = 1) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return (("pixel_values", (batch, 3, size, size)),)


def _text(
    family: str,
    stem: str,
    sizes: list[tuple[int, int, int, int]],
    keys: tuple[str, str, str, str],
    model: str | None = None,
    **extra: Any,
) -> list[Export]:
    """Decoders and encoders over tokens: sizes are (width, layers, batch, length); `keys` are the
    names of width, layers, heads and feed-forward width ("" where it is left as it is)."""
    found = []
    for width, layers, batch, length in sizes:
        options = {keys[0]: width, keys[1]: layers, "vocab_size": 2000, **extra}
        if keys[2]:
            options[keys[2]] = max(2, width // 64)
        if keys[3]:
            options[keys[3]] = 4 * width
        found.append(
            Export(
                f"{family}-w{width}-b{batch}-s{length}", family, f"{stem}Config",
                model or f"{stem}Model", tokens(batch, length), options,
            )
        )  # fmt: skip
    return found


_HF = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_TEXT = [
    *_text("bert", "Bert", [(768, 4, 1, 128), (384, 6, 1, 64), (512, 4, 4, 128)], _HF),
    *_text("gpt2", "GPT2", [(768, 4, 1, 128), (512, 4, 2, 64)],
           ("n_embd", "n_layer", "n_head", "n_inner"), use_cache=False),
    *_text("llama", "Llama", [(768, 3, 1, 128), (512, 4, 2, 48)], _HF, use_cache=False),
    *_text("qwen2", "Qwen2", [(640, 3, 1, 96)], _HF, use_cache=False, num_key_value_heads=2),
    *_text("opt", "OPT", [(768, 3, 1, 128), (320, 4, 2, 80)],
           ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim"), use_cache=False,
           word_embed_proj_dim=None),
    *_text("bloom", "Bloom", [(512, 3, 1, 160)], ("hidden_size", "n_layer", "n_head", ""),
           use_cache=False),
    *_text("gpt_neox", "GPTNeoX", [(512, 3, 1, 128), (896, 2, 1, 64)], _HF, use_cache=False),
    *_text("phi", "Phi", [(576, 3, 1, 112)], _HF, use_cache=False),
    *_text("gemma", "Gemma", [(512, 3, 1, 72)], _HF, use_cache=False, head_dim=64),
    *_text("falcon", "Falcon", [(704, 2, 1, 144)],
           ("hidden_size", "num_hidden_layers", "num_attention_heads", ""), use_cache=False),
    *_text("mpt", "Mpt", [(640, 2, 2, 64)], ("d_model", "n_layers", "n_heads", ""),
           use_cache=False),
    *_text("mixtral", "Mixtral", [(384, 3, 1, 64)], _HF, use_cache=False, num_key_value_heads=2,
           num_local_experts=4),
    *_text("xlnet", "XLNet", [(448, 3, 1, 96)], ("d_model", "n_layer", "n_head", "d_inner")),
    *_text("deberta", "Deberta", [(512, 3, 1, 96)], _HF),
    *_text("fnet", "FNet", [(512, 3, 1, 128)],
           ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")),
    *_text("squeezebert", "SqueezeBert", [(384, 4, 1, 96)], _HF, embedding_size=384),
    *_text("clip_text", "CLIPText", [(512, 4, 1, 77)], _HF, "CLIPTextModel"),
    *_text("xglm", "XGLM", [(512, 3, 1, 128)],
           ("d_model", "num_layers", "attention_heads", "ffn_dim"), use_cache=False),
    *_text("megatron", "MegatronBert", [(640, 3, 2, 96)], _HF),
]  # fmt: skip


def _vision(family: str, stem: str, *sizes: tuple[int, int, dict[str, Any]]) -> list[Export]:
    """Over images: (size, batch, options)."""
    return [
        Export(
            f"{family}-{i}-b{batch}-i{size}", family, f"{stem}Config", f"{stem}Model",
            image(size, batch), options,
        )
        for i, (size, batch, options) in enumerate(sizes)
    ]  # fmt: skip


_VISION = [
    *_vision("vit", "ViT", (224, 1, {"num_hidden_layers": 4}),
             (160, 1, {"num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1536,
                       "num_attention_heads": 6, "image_size": 160})),
    *_vision("convnext", "ConvNext", (224, 1, {"depths": [2, 2, 4, 2]}),
             (192, 2, {"depths": [2, 2, 3, 2], "hidden_sizes": [48, 96, 192, 384]})),
    *_vision("swin", "Swin", (224, 1, {"depths": [2, 2, 2, 2]}),
             (224, 1, {"depths": [2, 2, 2, 2], "embed_dim": 64, "num_heads": [2, 4, 8, 16]})),
    *_vision("mobilenet_v2", "MobileNetV2", (224, 1, {}), (160, 2, {"depth_multiplier": 0.5})),
    *_vision("mobilenet_v1", "MobileNetV1", (224, 1, {}), (192, 1, {"depth_multiplier": 0.5})),
    *_vision("resnet", "ResNet",
             (224, 1, {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512],
                       "depths": [2, 2, 2, 2]}),
             (160, 2, {"layer_type": "basic", "hidden_sizes": [48, 96, 192, 384],
                       "depths": [2, 3, 3, 2]})),
    *_vision("regnet", "RegNet",
             (224, 1, {"hidden_sizes": [48, 120, 336, 888], "depths": [2, 3, 5, 2],
                       "groups_width": 24}),
             (192, 1, {"hidden_sizes": [32, 64, 160, 384], "depths": [2, 3, 4, 2],
                       "groups_width": 16})),
    *_vision("efficientnet", "EfficientNet",
             (224, 1, {"width_coefficient": 1.0, "depth_coefficient": 1.0, "image_size": 224,
                       "hidden_dim": 1280})),
    *_vision("bit", "Bit", (224, 1, {"depths": [1, 2, 2, 1], "hidden_sizes": [128, 256, 512, 1024],
                                     "embedding_size": 64})),
    *_vision("poolformer", "PoolFormer", (224, 1, {"depths": [1, 2, 2, 1]})),
    *_vision("segformer", "Segformer", (256, 1, {})),
    *_vision("pvt", "Pvt", (224, 1, {"depths": [1, 1, 2, 1]})),
    *_vision("cvt", "Cvt", (224, 1, {"depth": [1, 1, 3]})),
    *_vision("levit", "Levit", (224, 1, {})),
    *_vision("mobilevit", "MobileViT", (256, 1, {})),
    *_vision("focalnet", "FocalNet", (224, 1, {"depths": [1, 1, 2, 1]})),
    *_vision("swiftformer", "SwiftFormer", (224, 1, {"depths": [1, 1, 2, 1]})),
]  # fmt: skip
_OTHER = [
    *(Export(f"t5-w{w}-s{s}", "t5", "T5Config", "T5Model",
             (*tokens(b, s), ("decoder_input_ids", (b, s // 2))),
             {"d_model": w, "num_layers": n, "num_decoder_layers": n, "d_ff": 4 * w, "d_kv": 64,
              "num_heads": w // 64, "vocab_size": 2000, "use_cache": False})
      for w, n, b, s in ((512, 3, 1, 128), (256, 4, 2, 64))),
    *(Export(f"bart-w{w}-s{s}", "bart", "BartConfig", "BartModel",
             (*tokens(1, s), ("decoder_input_ids", (1, s // 2))),
             {"d_model": w, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 4 * w,
              "decoder_ffn_dim": 4 * w, "encoder_attention_heads": w // 64, "vocab_size": 2000,
              "decoder_attention_heads": w // 64, "use_cache": False})
      for w, s in ((512, 128),)),
    *(Export(f"whisper-w{w}", "whisper", "WhisperConfig", "WhisperModel",
             (("input_features", (1, 80, 2 * s)), ("decoder_input_ids", (1, 32))),
             {"d_model": w, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 4 * w,
              "decoder_ffn_dim": 4 * w, "encoder_attention_heads": w // 64, "vocab_size": 2000,
              "decoder_attention_heads": w // 64, "max_source_positions": s, "use_cache": False,
              "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
              "suppress_tokens": None, "begin_suppress_tokens": None})
      for w, s in ((384, 400), (512, 250))),
    Export("wav2vec2-w384", "wav2vec2", "Wav2Vec2Config", "Wav2Vec2Model",
           (("input_values", (1, 16000)),),
           {"hidden_size": 384, "num_hidden_layers": 3, "num_attention_heads": 6,
            "intermediate_size": 1536, "conv_dim": (256,) * 7}),
    Export("patchtst", "patchtst", "PatchTSTConfig", "PatchTSTModel",
           (("past_values", (4, 512, 7)),), {"context_length": 512, "num_hidden_layers": 3}),
]  # fmt: skip
EXPORTS: dict[str, Export] = {e.name: e for e in (*_TEXT, *_VISION, *_OTHER)}

_BLIND = [
    *_text("electra", "Electra", [(256, 5, 1, 112)], _HF, embedding_size=128),
    *_text("distilbert", "DistilBert", [(640, 4, 1, 96)],
           ("dim", "n_layers", "n_heads", "hidden_dim")),
    *_text("mobilebert", "MobileBert", [(512, 5, 1, 80)],
           ("hidden_size", "num_hidden_layers", "", ""), num_attention_heads=4),
    *_text("codegen", "CodeGen", [(512, 3, 1, 120)], ("n_embd", "n_layer", "n_head", "n_inner"),
           use_cache=False, rotary_dim=32),
    *_text("stablelm", "StableLm", [(640, 3, 1, 72)], _HF, use_cache=False,
           num_key_value_heads=5),
    *_vision("dinov2", "Dinov2", (196, 1, {"hidden_size": 384, "num_hidden_layers": 5,
                                           "num_attention_heads": 6, "image_size": 196})),
    *_vision("beit", "Beit", (192, 1, {"hidden_size": 512, "num_hidden_layers": 4,
                                       "num_attention_heads": 8, "intermediate_size": 2048,
                                       "image_size": 192})),
    *_vision("convnextv2", "ConvNextV2", (208, 1, {"depths": [2, 2, 4, 2],
                                                   "hidden_sizes": [64, 128, 256, 512]})),
    *_vision("swinv2", "Swinv2", (256, 1, {"depths": [2, 2, 2, 2], "embed_dim": 72,
                                           "num_heads": [3, 6, 12, 24], "image_size": 256,
                                           "window_size": 8})),
    *_vision("mobilevitv2", "MobileViTV2", (224, 1, {"width_multiplier": 0.75,
                                                     "image_size": 224})),
    *_vision("textnet", "TextNet", (224, 1, {})),
    Export("hgnetv2-b1-i208", "hgnetv2", "HGNetV2Config", "HGNetV2Backbone", image(208)),
]  # fmt: skip
BLIND: dict[str, Export] = {e.name: e for e in _BLIND}
"""Families to test on once, that neither fitting nor any choice of a feature has seen."""


BERT_BASE = Export("bert-base-s128", "bert", "BertConfig", "BertModel", tokens(1, 128))
"""The 12 layers of Devlin et al. 2019, for benchmarks; nothing is fitted to it."""


def export(entry: Export, folder: Path, seed: int = 0) -> Path:
    """The ONNX file of one entry, written to `folder` unless it is there; of large ones
    the weights lie beside it."""
    path = folder / f"{entry.name}.onnx"
    if path.exists():
        return path
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, entry.config)(**entry.options)
    config._attn_implementation = "eager"  # noqa: SLF001
    if entry.family == "mixtral":
        config._experts_implementation = "batched_mm"  # the one form that exports  # noqa: SLF001
    model = getattr(transformers, entry.model)(config).eval()
    names = [name for name, _ in entry.inputs]
    feeds = tuple(
        torch.randint(0, 2, shape) + 1 if name.endswith("_ids") else torch.randn(shape)
        for name, shape in entry.inputs
    )

    class First(torch.nn.Module):
        """Positional inputs, the main output only."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            made = self.model(**dict(zip(names, values, strict=True)), return_dict=True)[0]
            # Backbones give one map per stage; the last one is behind all the others.
            return made[-1] if isinstance(made, tuple | list) else made

    return write(First(), feeds, path)


def write(module: Any, feeds: tuple[Any, ...], path: Path) -> Path:
    """The ONNX file of a torch module; of large ones the weights lie beside it."""
    import torch

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, feeds, dynamo=True, verbose=False)
    if program is None:
        raise RuntimeError(f"{path.stem}: the exporter returned no program")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as staging:
        made = Path(staging) / path.name
        # A file of more than 2 GiB cannot be written, one of more than 256 MiB is not read.
        weights = sum(p.numel() * p.element_size() for p in module.parameters())
        program.save(str(made), external_data=weights > 128 << 20)
        for written in sorted(Path(staging).iterdir(), key=lambda found: found == made):
            written.replace(path.parent / written.name)  # the model last: it says that all is
    return path
