"""Requests for images and videos, and their texts: `1024x1024,steps=50,guidance=3.5,batch=1`."""

import math
import re
from dataclasses import dataclass, replace

from gdp.base.errors import ArgumentError

LARGEST_SIDE, MOST_FRAMES, MOST_STEPS, MOST_BATCH, MOST_TOKENS = 16384, 4096, 10_000, 4096, 65_536
DTYPES = ("bfloat16", "float16", "float32")
_SIZE = re.compile(r"^(\d{1,6})x(\d{1,6})(?:x(\d{1,6}))?$")


@dataclass(frozen=True)
class MediaRequest:
    """Images or videos to make in one call of a pipeline."""

    width: int  # pixels
    height: int
    frames: int = 1  # 1: an image
    steps: int = 0  # of denoising; 0: the default of the pipeline
    guidance: float | None = None  # None: the default of the pipeline
    batch: int = 1  # images or videos at once
    tiling: bool = False  # the decoder works tile by tile
    slicing: bool = False  # the decoder works sample by sample
    prompt: int = 0  # tokens that the longest text encoder reads; 0: those of the pipeline
    encoder_dtype: str = ""  # type of text encoders; "": that of the pipeline
    decoder_dtype: str = ""  # type of the decoder; "": that of the pipeline

    @property
    def is_video(self) -> bool:
        """True for more than one frame."""
        return self.frames > 1

    def by_default(self, steps: int, guidance: float) -> "MediaRequest":
        """A copy with steps and guidance where it leaves them out."""
        return replace(
            self, steps=self.steps or steps,
            guidance=guidance if self.guidance is None else self.guidance,
        )  # fmt: skip


def parse_image(text: str) -> MediaRequest:
    """The request of an image; raises `ArgumentError`.

    >>> parse_image("1024x768,steps=50,guidance=3.5").guidance
    3.5
    """
    return _parsed(text, "--image", "1024x1024,steps=50,guidance=3.5,batch=1", is_video=False)


def parse_video(text: str) -> MediaRequest:
    """The request of a video, whose third size is its frames; raises `ArgumentError`.

    >>> parse_video("1280x720x129,steps=50,tiling").frames
    129
    """
    return _parsed(text, "--video", "1280x720x129,steps=50,guidance=6,batch=1", is_video=True)


def _parsed(text: str, option: str, form: str, *, is_video: bool) -> MediaRequest:
    size, *parts = [part.strip() for part in text.split(",")]
    found = _SIZE.match(size)
    if found is None or (found[3] is not None) != is_video:
        what = "WIDTHxHEIGHTxFRAMES" if is_video else "WIDTHxHEIGHT"
        raise ArgumentError(f"{option} {text!r}: the size must be {what}, as in {form}")
    request = MediaRequest(
        _whole(option, "width", found[1], LARGEST_SIDE),
        _whole(option, "height", found[2], LARGEST_SIDE),
        _whole(option, "frames", found[3] or "1", MOST_FRAMES),
    )
    given: dict[str, int | float | str | bool] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name in given:
            raise ArgumentError(f"{option} {text!r} gives {name} twice")
        given[name] = _value(option, name, value, text)
    return replace(request, **given)  # pyright: ignore[reportArgumentType]


_COUNTS = {"steps": MOST_STEPS, "batch": MOST_BATCH, "prompt": MOST_TOKENS}


def _value(option: str, name: str, value: str, text: str) -> int | float | str | bool:
    if name in _COUNTS:
        return _whole(option, name, value, _COUNTS[name])
    if name in ("tiling", "slicing") and not value:
        return True
    if name in ("encoder_dtype", "decoder_dtype"):
        if value not in DTYPES:
            raise ArgumentError(
                f"{option}: {name} must be one of {', '.join(DTYPES)}, got {value!r}"
            )
        return value
    if name == "guidance":
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number <= 1000:
            raise ArgumentError(f"{option}: guidance must be from 0 to 1000, got {value!r}")
        return number
    raise ArgumentError(
        f"{option} {text!r}: no option {name!r}; there are steps, guidance, batch, prompt, tiling, "
        "slicing, encoder_dtype and decoder_dtype"
    )


def _whole(option: str, name: str, value: str, most: int) -> int:
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0
    if not 1 <= number <= most:
        raise ArgumentError(
            f"{option}: {name} must be a whole number from 1 to {most}, got {value!r}"
        )
    return number
