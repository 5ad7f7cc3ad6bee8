"""Calls of a decoder: a whole sample where it fits, or the tiles and chunks of frames that the
classes of diffusers decode one after the other.

Decoders of videos keep the last frames of each convolution for the next chunk; the call is one with
frames before it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gdp.importers.diffusers.request import MediaRequest


class Factors(NamedTuple):
    """Compression by a decoder's class."""

    spatial: int  # rows of pixels in one of the latent
    temporal: int  # frames in one of the latent, but for the first, which is one
    channels: int  # of the latent


class Call(NamedTuple):
    """One call of a decoder, and the number of them in a pass; smaller ones count in proportion."""

    module: Any
    inputs: dict[str, Any]
    calls: float


Shape = tuple[int, ...]  # batch, channels, frames (of videos), rows, columns


def factors_of(class_name: str, document: Mapping[str, Any]) -> Factors:
    """The factors of a decoder by its configuration."""
    spatial, temporal, channels = DECODERS[class_name].factors
    return Factors(
        *(int(_first(document, name, default)) for name, default in (spatial, temporal, channels))
    )


def _first(document: Mapping[str, Any], names: str, default: int) -> int:
    value = document.get(names, default)
    if isinstance(value, list | tuple):  # each level but the last halves the rows
        return 2 ** (len(value) - 1)
    return default if value is None else value


def decoder_call(vae: Any, request: MediaRequest, latent: Shape, dtype: Any) -> Call:
    """The call of a decoder that most of a pass is, on torch's default device."""
    batch, channels, *frames, rows, columns = latent
    ratio = factors_of(type(vae).__name__, vae.config)
    calls = float(batch if request.slicing else 1)
    batch = 1 if request.slicing else batch
    if request.tiling:
        high, wide = (_tile(vae, axis, ratio.spatial) for axis in ("height", "width"))
        if rows > high.size or columns > wide.size:
            calls *= high.number(rows) * wide.number(columns)
            rows, columns = min(rows, high.size), min(columns, wide.size)
    shape = (batch, channels, *frames, rows, columns)
    call = DECODERS[type(vae).__name__].call(vae, shape, dtype)
    return call._replace(calls=call.calls * calls)


class _Tile(NamedTuple):
    size: int  # rows or columns of the latent
    stride: int

    def number(self, length: int) -> float:
        """Tiles of a length, of which those at the end are smaller."""
        return sum(min(self.size, length - i) for i in range(0, length, self.stride)) / min(
            self.size, length
        )


def _tile(vae: Any, axis: str, ratio: int) -> _Tile:
    if hasattr(vae, "tile_latent_min_size"):
        size, overlap = vae.tile_latent_min_size, vae.tile_overlap_factor
    else:
        size = getattr(vae, f"tile_sample_min_{axis}") // ratio
        overlap = getattr(vae, f"tile_overlap_factor_{axis}", None)
    if overlap is None:
        return _Tile(size, max(1, getattr(vae, f"tile_sample_stride_{axis}") // ratio))
    return _Tile(size, max(1, int(size * (1 - overlap))))


def _whole(vae: Any, shape: Shape, dtype: Any) -> Call:
    """All frames at once."""
    import torch

    class Decode(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = vae

        def forward(self, latent: Any) -> Any:
            convolved = getattr(self.model, "post_quant_conv", None)
            return self.model.decoder(latent if convolved is None else convolved(latent))

    return Call(Decode().eval(), {"latent": torch.empty(shape, dtype=dtype)}, 1.0)


def _frame_by_frame(vae: Any, shape: Shape, dtype: Any) -> Call:
    """One frame of the latent behind others: Wan and Qwen-Image."""
    import torch

    batch, channels, frames, *area = shape
    frame = torch.empty(batch, channels, 1, *area, dtype=dtype)
    if frames == 1:
        return _whole(vae, (batch, channels, 1, *area), dtype)
    takes_first = "first_chunk" in vae.decoder.forward.__code__.co_varnames

    def step(kept: list[Any], latent: Any, *, first: bool = False) -> Any:
        more = {"first_chunk": True} if first and takes_first else {}
        return vae.decoder(vae.post_quant_conv(latent), feat_cache=kept, feat_idx=[0], **more)

    vae.clear_cache()
    kept = list(vae._feat_map)  # noqa: SLF001
    with torch.no_grad(), torch.device("meta"):
        for i in range(2):
            step(kept, frame.to("meta"), first=i == 0)
    held = {i: torch.empty_like(t) for i, t in enumerate(kept) if torch.is_tensor(t)}
    rest = [None if torch.is_tensor(t) else t for t in kept]

    class DecodeFrame(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = vae

        def forward(self, latent: Any, cache: Sequence[Any]) -> Any:
            given = list(rest)
            for i, tensor in zip(held, cache, strict=True):
                given[i] = tensor
            return step(given, latent)

    # The first frame of the latent is one frame of the video, each other one several.
    ratio = factors_of(type(vae).__name__, vae.config).temporal
    inputs = {"latent": frame, "cache": list(held.values())}
    return Call(DecodeFrame().eval(), inputs, frames - 1 + 1 / ratio)


def _tiles_of_time(vae: Any, shape: Shape, dtype: Any) -> Call:
    """Some frames of the latent with the one before them: HunyuanVideo."""
    batch, channels, frames, *area = shape
    ratio = vae.temporal_compression_ratio
    most = vae.tile_sample_min_num_frames // ratio
    if not vae.use_framewise_decoding or frames <= most:
        return _whole(vae, shape, dtype)
    stride = vae.tile_sample_stride_num_frames // ratio
    total = sum(min(most + 1, frames - i) for i in range(0, frames, stride))
    at_once = min(most + 1, frames)
    call = _whole(vae, (batch, channels, at_once, *area), dtype)
    return call._replace(calls=total / at_once)


def _some_frames(vae: Any, shape: Shape, dtype: Any) -> Call:
    """Some frames of the latent behind others: CogVideoX."""
    import torch
    from torch.utils._pytree import tree_map

    batch, channels, frames, *area = shape
    at_once = min(vae.num_latent_frames_batch_size, frames)
    latent = torch.empty(batch, channels, at_once, *area, dtype=dtype)
    with torch.no_grad(), torch.device("meta"):
        _, kept = vae.decoder(latent.to("meta"), conv_cache=None)

    class DecodeFrames(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = vae

        def forward(self, latent: Any, cache: Any) -> Any:
            return self.model.decoder(latent, conv_cache=cache)[0]

    cache = tree_map(lambda t: torch.empty_like(t) if torch.is_tensor(t) else t, kept)
    return Call(DecodeFrames().eval(), {"latent": latent, "cache": cache}, frames / at_once)


class Decoder(NamedTuple):
    """A class of decoders."""

    call: Callable[[Any, Shape, Any], Call]
    # Field of a configuration and the class's own default: space, time, channels of the latent.
    factors: tuple[tuple[str, int], tuple[str, int], tuple[str, int]]


_NO_TIME = ("", 1)
DECODERS = {
    "AutoencoderKL": Decoder(
        _whole, (("block_out_channels", 1), _NO_TIME, ("latent_channels", 4))
    ),
    "AutoencoderDC": Decoder(
        _whole, (("encoder_block_out_channels", 32), _NO_TIME, ("latent_channels", 32))
    ),
    "AutoencoderKLWan": Decoder(
        _frame_by_frame, (("scale_factor_spatial", 8), ("scale_factor_temporal", 4), ("z_dim", 16))
    ),
    "AutoencoderKLQwenImage": Decoder(
        _frame_by_frame, (("dim_mult", 8), ("temporal", 4), ("z_dim", 16))
    ),
    "AutoencoderKLHunyuanVideo": Decoder(
        _tiles_of_time,
        (("spatial_compression_ratio", 8), ("temporal_compression_ratio", 4),
         ("latent_channels", 16)),
    ),
    "AutoencoderKLCogVideoX": Decoder(
        _some_frames,
        (("block_out_channels", 8), ("temporal_compression_ratio", 4), ("latent_channels", 16)),
    ),
}  # fmt: skip
"""Every class of decoders, by its name in diffusers."""
