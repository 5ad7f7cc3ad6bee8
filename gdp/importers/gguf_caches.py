"""Bytes that a block of a GGUF model keeps between tokens, as llama.cpp allocates them.

Keys and values of every token; of the last tokens alone where a block attends to a window of them;
one latent row a token in latent attention; or a state of a fixed size in state-space blocks, short
convolutions and linear attention.
"""

from typing import NamedTuple

from gdp.base.errors import ModelError
from gdp.importers.gguf_header import GgufHeader, import_gguf
from gdp.ops.llamacpp import UBATCH

STATE_FLOP = 8  # per element of a state and token: decay, outer product, sum, and readout
_STATE_BYTES = 4  # llama.cpp keeps states in F32, whatever the type of the cache
_PAD = 256  # cells of a window's cache are a multiple of it

Parts = dict[str, dict]
"""The tensors of one block by base name and ending: `["attn_q"]["weight"]`."""


class Windows(NamedTuple):
    """Sliding-window blocks of an architecture whose files hold no pattern."""

    period: int  # of blocks, one of which attends to all tokens: the last, or the first
    full_first: bool = False
    tokens: int = 0  # of the window, where the file does not say


WINDOWS = {
    "gpt-oss": Windows(2), "gemma2": Windows(2, tokens=4096), "gemma3": Windows(6),
    "gemma3n": Windows(5), "cohere2": Windows(4), "cohere2moe": Windows(4),
    "llama4": Windows(4, tokens=8192), "exaone4": Windows(4), "exaone-moe": Windows(4, tokens=128),
    "olmo2": Windows(4), "afmoe": Windows(4), "plamo3": Windows(8),
    "smallthinker": Windows(4, full_first=True, tokens=4096),
}  # fmt: skip
"""Of `load_arch_hparams` in llama.cpp's models; others, such as phi3 and mistral, have a window in
their files that llama.cpp does not use."""


def window(header: GgufHeader, layer: int) -> int:
    """Tokens of the window of a block; 0 where it attends to all."""
    rule = WINDOWS.get(header.architecture)
    tokens = header.count("attention.sliding_window", rule.tokens if rule else 0)
    pattern = header.numbers.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and pattern:
        return tokens if pattern[layer % len(pattern)] else 0
    if rule is None or not tokens:
        return 0
    period = pattern if isinstance(pattern, int) and pattern >= 0 else rule.period
    if period == 0:
        return tokens
    is_full = layer % period == (0 if rule.full_first else period - 1)
    return 0 if is_full else tokens


def cells(header: GgufHeader, layer: int, batch: int, sequence: int, ubatch: int = UBATCH) -> int:
    """Tokens that the cache of a block has room for, of all sequences: `llama_kv_cache_iswa`."""
    size = batch * sequence
    if not (tokens := window(header, layer)):
        return size
    wanted = batch * tokens + min(ubatch, size)
    return min(size, -(-wanted // _PAD) * _PAD)


def has_cache(header: GgufHeader, layer: int) -> bool:
    """False for the last blocks of a model that read the cache of an earlier one."""
    shared = header.count("attention.shared_kv_layers")
    return not shared or layer < header.number("block_count", 1) - shared


class Heads(NamedTuple):
    """Sizes of the attention of one block."""

    number: int
    key_size: int
    value_size: int
    cell_numbers: tuple[int, ...]  # that a token caches, in rows that are packed one by one


def heads_of(header: GgufHeader, layer: int, parts: Parts) -> Heads:
    """Sizes of a block's attention; of windows, latent rows and an indexer where it has them."""
    count = header.number("attention.head_count", layer=layer)
    width = header.number("embedding_length")
    ending = "_swa" if window(header, layer) else ""
    size = header.number("attention.key_length", max(1, width // count))
    size = header.number(f"attention.key_length{ending}", size)
    value_size = header.number("attention.value_length", size)
    value_size = header.number(f"attention.value_length{ending}", value_size)
    index = header.number("attention.indexer.key_length") if "indexer.attn_k" in parts else 0
    if "attn_k_b" in parts:
        # Absorbed: heads share one key, whose first part is the value.
        return Heads(count, size, value_size, (size, index) if index else (size,))
    key_heads = header.number("attention.head_count_kv", count, layer=layer)
    numbers = (key_heads * size, key_heads * value_size)
    return Heads(count, size, value_size, (*numbers, index) if index else numbers)


def row_bytes(header: GgufHeader, heads: Heads, kind: str) -> int:
    """Bytes that one token caches in a block."""
    gguf = import_gguf()
    numbers, packed = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    if any(row % numbers for row in heads.cell_numbers) or heads.key_size % numbers:
        raise ModelError(
            f"{header.path}: a cache of {kind} packs {numbers} numbers together, and heads have "
            f"{heads.key_size} and {heads.value_size}; take cache=f16"
        )
    return sum(heads.cell_numbers) // numbers * packed


class State(NamedTuple):
    """A state of a fixed size that a block keeps of one sequence."""

    width: int  # numbers that it makes of a token
    elements: int  # that a token changes, of the recurrence
    conv_elements: int  # of the tokens before that a convolution reads

    @property
    def nbytes(self) -> int:
        """Of one sequence."""
        return (self.elements + self.conv_elements) * _STATE_BYTES


def state_of(header: GgufHeader, layer: int, parts: Parts) -> State:
    """Sizes of a block's state: `n_embd_r` and `n_embd_s` of llama.cpp's hyperparameters."""
    if "shortconv.out_proj" in parts:
        width = header.number("embedding_length")
        return State(width, 0, width * (header.number("shortconv.l_cache") - 1))
    before = header.number("ssm.conv_kernel") - 1
    if "ssm_conv1d_q" in parts:
        size = header.number("kda.head_dim")
        width = size * header.number("attention.head_count", layer=layer)
        return State(width, size * width, before * 3 * width)
    width, size = header.number("ssm.inner_size"), header.number("ssm.state_size")
    channels = width + 2 * header.count("ssm.group_count") * size
    return State(width, size * width, before * channels)
