"""Image encoders of llama.cpp (`--mmproj FILE`): a vision tower and the projector behind it.

A file of its own beside the language model's. One image becomes patches, all of which pass the
tower at once; the embeddings that the projector makes of them go to the host's memory, and from
there into the prompt as tokens do. Bytes of working memory are those of a tower whose attention
keeps no scores, as since llama.cpp's pull request 16837: the widest layer and three tensors of the
stream. For 8464 patches of 1152 numbers with 4304 inside it prints a buffer of 248.1 MiB (a log of
Qwen3.6 27B), this is 250.5.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from gdp.base.errors import ModelError
from gdp.importers.gguf_header import GgufHeader, read_header
from gdp.ops.rule import attention_flop

ARCHITECTURE = "clip"
"""Of the files of all encoders."""
FLOAT = 4  # llama.cpp passes F32 between ops
STREAMS = 3
"""Tensors of the stream that are alive beside the widest layer."""
_MOVES = 14
"""Tensors of the stream that a block reads and writes: norms, sums, what products take and make."""


@dataclass(frozen=True)
class Projector:
    """An encoder, and one image of it."""

    path: str
    nbytes: int  # weights
    patches: int
    numbers: int  # of the image: three for each pixel
    width: int
    inner: int  # width of the layer between the two products of a feed-forward
    heads: int
    blocks: int
    flop: float
    traffic_bytes: float  # weights and tensors

    @property
    def held_bytes(self) -> int:
        """Weights and working memory, both taken when the file is loaded."""
        return self.nbytes + FLOAT * self.patches * (self.inner + STREAMS * self.width)


def read_projector(path: Path, side: int = 0) -> Projector:
    """The encoder of a file, for a square image of `side` pixels (0: the encoder's own size).

    Raises:
        ModelError: The file cannot be read, or is no image encoder.
    """
    header = read_header(path)
    if header.architecture != ARCHITECTURE or "vision.embedding_length" not in header.numbers:
        raise ModelError(
            f"{path} is no image encoder (mmproj): its architecture is {header.architecture!r}"
            + (", without vision" if header.architecture == ARCHITECTURE else "")
        )
    width, blocks = header.number("vision.embedding_length"), header.number("vision.block_count")
    patch = header.number("vision.patch_size")
    patches = ((side or header.number("vision.image_size")) // patch) ** 2
    if not patches:
        raise ModelError(f"{path}: an image of {side} pixels is smaller than a patch of {patch}")
    heads = header.number("vision.attention.head_count")
    nbytes = sum(tensor.nbytes for tensor in header.tensors.values())
    attention = attention_flop(1, heads, patches, patches, width // heads, width // heads)
    return Projector(
        str(path), nbytes, patches, 3 * patches * patch**2, width,
        header.number("vision.feed_forward_length"), heads, blocks,
        _products_flop(header, patches, width) + blocks * attention,
        nbytes + blocks * _MOVES * FLOAT * patches * width,
    )  # fmt: skip


def _products_flop(header: GgufHeader, patches: int, width: int) -> float:
    """FLOPs of all stored matrices: those of the projector read as many numbers, where several
    patches were joined in fewer rows."""
    total = 0.0
    for name, tensor in header.tensors.items():
        if len(tensor.dims) < 2 or "position_embd" in name:
            continue
        joined = name.startswith("mm.") and tensor.dims[0] > width
        share = width / tensor.dims[0] if joined else 1.0
        total += 2.0 * patches * math.prod(tensor.dims) * share
    return total
