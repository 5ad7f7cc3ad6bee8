"""The specification of a GGUF model, as `gdp.importers.gguf` describes it, and its parts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gdp.base.errors import ModelError
from gdp.base.units import whole_number
from gdp.importers.gguf_draft import NO_DRAFT, DraftSpec, draft_of
from gdp.importers.program import batch_of, request_tokens, spec_parts
from gdp.ops.llamacpp import UBATCH

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""Of cached keys and values, as llama.cpp's `--cache-type-k` has them."""
UNPACKED = ("f32", "f16", "bf16")
"""Types of caches that do without flash attention (`llama_init_from_model`)."""
_KEYS = frozenset((
    "batch", "sequence", "decode", "prompt", "new", "requests", "context", "cache", "ubatch",
    "mmproj", "image", "outputs", "flash", "draft", "drafts", "acceptance",
))  # fmt: skip


@dataclass(frozen=True)
class GgufSpec:
    """A file, and the batch that its graph is of."""

    path: str
    batch: int = 1
    sequence: int = 512  # tokens of the prompt; with `decode`, of the cache
    decode: bool = False
    prompt: int = 0  # tokens that are read before `new` ones are written; 0: one phase alone
    new: int = 0
    requests: int = 0  # in flight at once; 0 where nobody said
    context: int = 0  # tokens of a sequence that have cache; 0: those of prompt and new
    cache: str = "f16"  # type of cached keys and values
    ubatch: int = UBATCH  # most tokens of a prompt that are computed at once
    mmproj: str = ""  # file of an image encoder
    image: int = 0  # pixels a side of the image that it reads; 0: as its file says
    outputs: int = 0  # rows of logits that are reserved; 0: those of a whole micro-batch
    flash: bool = True  # attention keeps no scores of tokens by tokens
    draft: DraftSpec = NO_DRAFT  # a small model that drafts

    @property
    def tokens(self) -> int:
        """Tokens of all sequences in one pass: of a step those that were drafted and one more."""
        return self.batch * self.queries

    @property
    def queries(self) -> int:
        """Tokens of a sequence in one pass."""
        return 1 + self.draft.tokens if self.decode else self.sequence

    def of_draft(self) -> "GgufSpec":
        """This pass of the small model, with logits of one token a sequence
        (`common_base_params_to_speculative` of common/speculative.cpp)."""
        return replace(
            self, path=self.draft.file, draft=NO_DRAFT, mmproj="", cache="f16", outputs=1
        )

    def rows(self, tokens: int) -> int:
        """Tokens of the longest micro-batch, of a pass over so many a sequence; a request may have
        a longer context than its tokens, so that it has whole ones."""
        return self.ubatch if self.new else min(self.ubatch, self.batch * tokens)

    @property
    def cached_tokens(self) -> int:
        """Tokens of all sequences that are computed, for which there is cache."""
        tokens = self.prompt + self.new if self.new else self.sequence
        return self.batch * max(1, self.requests) * tokens


def parse_gguf_spec(text: str) -> GgufSpec:
    """A spec from its text; raises `ModelError` for an unknown or malformed part.

    >>> parse_gguf_spec("m.gguf?sequence=4096&decode")  # doctest: +NORMALIZE_WHITESPACE
    GgufSpec(path='m.gguf', batch=1, sequence=4096, decode=True, prompt=0, new=0, requests=0,
             context=0, cache='f16', ubatch=512, mmproj='', image=0, outputs=0, flash=True,
             draft=DraftSpec(file='', tokens=0, acceptance=0.0))
    """
    form = "MODEL.gguf?batch=1&sequence=512&decode&cache=f16&ubatch=512"
    path, given = spec_parts(text, form, _KEYS)
    cache = given.get("cache", "f16").lower()
    if cache not in CACHE_TYPES:
        raise ModelError(f"no type of cache {cache!r}; llama.cpp has {', '.join(CACHE_TYPES)}")
    flash = given.get("flash", "on")
    if flash not in ("on", "off"):
        raise ModelError(f"flash must be on or off, got {flash!r}")
    if flash == "off" and cache not in UNPACKED:
        raise ModelError(f"llama.cpp needs flash attention for a cache of {cache}: take cache=f16")
    asked = request_tokens(given)
    return GgufSpec(
        path, *batch_of(given), asked.prompt, asked.new, asked.requests, asked.context, cache,
        _positive("ubatch", given.get("ubatch", str(UBATCH))), *_image_of(given),
        _positive("outputs", given["outputs"]) if "outputs" in given else 0, flash == "on",
        draft_of(given),
    )  # fmt: skip


def _positive(key: str, text: str) -> int:
    number = whole_number(text)
    if number is None:
        raise ModelError(f"{key} must be a positive whole number below 2**31, got {text!r}")
    return number


def _image_of(given: Mapping[str, str]) -> tuple[str, int]:
    """(file of the image encoder, pixels a side) of a spec's parameters."""
    if "mmproj" not in given:
        if "image" in given:
            raise ModelError("image is read by an encoder: give mmproj=FILE, too")
        return "", 0
    if "decode" in given:
        raise ModelError("an image is read with a prompt: leave out decode, or mmproj")
    return given["mmproj"], _positive("image", given["image"]) if "image" in given else 0
