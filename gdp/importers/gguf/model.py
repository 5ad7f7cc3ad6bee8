"""GGUF files as graphs: a prompt, or one decoded token with its cache of keys and values.

A spec is `MODEL.gguf`, or `MODEL.gguf?batch=1&sequence=512&decode`. Read are transformers whose
blocks are attention, then a dense or a mixture-of-experts feed-forward: llama, mistral, mixtral,
qwen2, qwen3, qwen3moe, gemma and what names its tensors as they do.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from gdp.errors import ModelError
from gdp.graph.op_graph import INPUT, OUTPUT, OpDetail, OpGraph, make_graph
from gdp.importers.gguf.header import Header, Stored, part_files, read_header
from gdp.importers.op_costs import RMS_NORMALISE_FLOP, SIGMOID_FLOP, attention_flop
from gdp.units import MAX_SIZE_BYTES

CACHE_BYTES = 2  # llama.cpp keeps keys and values as F16 by default
ACTIVATION_BYTES = 4  # and passes F32 between ops
EXPERTS = "_exps"
_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")
_PRODUCTS = (
    "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate_inp", "ffn_gate_inp_shexp",
    *(f"ffn_{part}{kind}" for part in ("gate", "up", "down") for kind in ("", "_exps", "_shexp")),
)  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """What is asked of a file."""

    path: str
    batch: int = 1
    sequence: int = 512  # tokens of the prompt; with `decode`, of the cache
    decode: bool = False


def parse(text: str) -> Spec:
    """A spec from its text; raises `ModelError` for an unknown or malformed part.

    >>> parse("m.gguf?sequence=4096&decode")
    Spec(path='m.gguf', batch=1, sequence=4096, decode=True)
    """
    path, _, query = text.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(given.keys() - {"batch", "sequence", "decode"}):
        raise ModelError(
            f"{text!r} must look like MODEL.gguf?batch=1&sequence=512&decode, got {unknown[0]!r}"
        )
    sizes = {key: given.get(key, str(getattr(Spec, key))) for key in ("batch", "sequence")}
    for key, size in sizes.items():
        if not (size.isascii() and size.isdecimal() and 1 <= int(size) < 1 << 31):
            raise ModelError(f"{key} must be a positive whole number below 2**31, got {size!r}")
    decode = given.get("decode", "0") in ("", "1", "true")
    return Spec(path, int(sizes["batch"]), int(sizes["sequence"]), decode)


def gguf_files(text: str) -> list[Path]:
    """The files that a spec is read from."""
    return part_files(Path(parse(text).path))


def load_gguf(text: str) -> OpGraph:
    """The graph of a spec, from the header alone."""
    spec = parse(text)
    return graph_of(read_header(Path(spec.path)), spec)


class _Listing:
    """Ops, tensors and uses as they are appended."""

    def __init__(self, header: Header, spec: Spec) -> None:
        self.header, self.spec = header, spec
        self.tokens = spec.batch * (1 if spec.decode else spec.sequence)
        self.names: list[str] = []
        self.types: list[str] = []
        self.scopes: list[str] = []
        self.flop: list[float] = []
        self.traffic: list[float] = []
        self.weights: list[int] = []
        self.details: list[OpDetail] = []
        self.tensors: list[tuple[int, int]] = []
        self.uses: list[tuple[int, int]] = []

    def add(
        self, name: str, op_type: str, reads: list[int], numbers: int, *,
        flop: float = 0.0, held: int = 0, touched: float = 0.0, kind: str = "F32",
    ) -> int:  # fmt: skip
        """An op that makes a tensor of so many numbers, which is returned (nothing for 0). It
        holds `held` bytes and reads `touched` of them."""
        op, made = len(self.names), numbers * ACTIVATION_BYTES
        if max(made, held) > MAX_SIZE_BYTES:
            raise ModelError(
                f"{self.header.path}: op {name!r} would take {max(made, held):.1e} bytes; the file "
                "is damaged, or batch and sequence are too large"
            )
        block = _BLOCK.match(name)
        scope = f"blk.{block[1]}" if block else name
        scope += ".experts" if name.endswith(EXPERTS) else ""
        moved = sum(self.tensors[t][1] for t in reads) + made
        # Quantised weights are multiplied in low precision; the roofline has no finer entry.
        dtype = "float32" if kind == "F32" else "float16"
        attributes = {"context": self.spec.sequence * self.spec.batch, "stored": kind}
        self.names.append(name)
        self.types.append(op_type)
        self.scopes.append("" if op_type in (INPUT, OUTPUT) else scope)
        self.flop.append(flop)
        self.traffic.append(0.0 if op_type in (INPUT, OUTPUT) else moved + touched)
        self.weights.append(held)
        self.details.append(OpDetail(dtype=dtype, attributes=attributes))
        self.uses += [(tensor, op) for tensor in reads]
        if numbers:
            self.tensors.append((op, made))
        return len(self.tensors) - 1

    def product(self, name: str, reads: list[int], parts: dict[str, Stored], rows: int) -> int:
        """A matrix product with a stored weight; of experts, those that `rows` tokens choose."""
        weight = _matrix(self.header, name, parts)
        held = sum(part.nbytes for part in parts.values())
        inputs, outputs = (*weight.dims, 1)[:2]  # the gate of a shared expert is a vector
        used, share = 1, 1.0
        if name.endswith(EXPERTS):
            used, experts = self.header.number("expert_used_count"), weight.dims[2]
            # Tokens choose independently here, each `used` different ones of the experts.
            share = 1.0 - (1.0 - min(1.0, used / experts)) ** rows
        flop = 2.0 * rows * used * inputs * outputs
        if "ffn_down" in name:
            flop += rows * used * inputs * (SIGMOID_FLOP + 2)  # the gated activation
        return self.add(
            name, "MatMul", reads, rows * used * outputs,
            flop=flop, held=held, touched=share * held, kind=weight.kind,
        )  # fmt: skip

    def norm(self, name: str, read: int, held: int) -> int:
        numbers = self.tensors[read][1] // ACTIVATION_BYTES
        return self.add(
            name, "RMSNormalization", [read], numbers,
            flop=float(RMS_NORMALISE_FLOP * numbers), held=held, touched=held,
        )  # fmt: skip

    def sum(self, name: str, left: int, right: int) -> int:
        numbers = self.tensors[left][1] // ACTIVATION_BYTES
        return self.add(name, "Add", [left, right], numbers, flop=float(numbers))


def _matrix(header: Header, name: str, parts: dict[str, Stored]) -> Stored:
    """The weight of a product; raises `ModelError` where it is missing or has other axes."""
    weight, is_stack = parts.get("weight"), name.endswith(EXPERTS)
    if weight is None:
        raise ModelError(f"{header.path} has no tensor {name}.weight; it is damaged")
    if len(weight.dims) != 3 if is_stack else len(weight.dims) > 2:
        raise ModelError(
            f"{header.path}: tensor {name}.weight has the shape {list(weight.dims)}, where "
            f"{'three axes are' if is_stack else 'two axes are'} wanted"
        )
    return weight


Parts = dict[str, dict[str, Stored]]
"""The tensors of one block by base name and ending: `["attn_q"]["weight"]`."""


def graph_of(header: Header, spec: Spec) -> OpGraph:
    """The ops of one pass, block by block; raises `ModelError` for tensors of unknown blocks."""
    listing, (outer, blocks) = _Listing(header, spec), _by_block(header)
    if "token_embd" not in outer:
        raise ModelError(f"{header.path} has no token_embd.weight; it is no language model")
    embedding = _matrix(header, "token_embd", outer["token_embd"])
    width, vocabulary = (*embedding.dims, 1)[:2]
    rows = listing.tokens
    x = listing.add("tokens", INPUT, [], rows)
    row_bytes = embedding.nbytes / vocabulary
    x = listing.add(
        "token_embd", "Gather", [x], rows * width,
        held=embedding.nbytes, touched=rows * row_bytes, kind=embedding.kind,
    )  # fmt: skip
    for index, parts in sorted(blocks.items()):
        x = _block(listing, index, parts, x)
    last = spec.batch  # llama.cpp computes logits of the last token only
    head = outer.get("output", {"weight": embedding})
    small = [outer.get(name, {}).values() for name in ("output_norm", "rope_freqs")]
    held = sum(part.nbytes for parts in small for part in parts)
    x = listing.norm("output_norm", x, held)
    x = listing.product("output", [x], head, last)
    listing.add("logits", OUTPUT, [x], 0)
    tied = list(range(len(listing.names)))
    if "output" not in outer:
        tied[listing.names.index("output")] = listing.names.index("token_embd")
    asked = f"{spec.batch}x{spec.sequence}{' decode' if spec.decode else ''}"
    try:
        return make_graph(
            f"{Path(spec.path).stem} {asked}", listing.names, listing.types, listing.tensors,
            listing.uses, flop=listing.flop, memory_traffic_bytes=listing.traffic,
            weight_bytes=listing.weights, weight_id=tied, scope=listing.scopes,
            detail=listing.details,
        )  # fmt: skip
    except ModelError as error:  # sizes that no model has
        raise ModelError(f"{header.path}: {error}") from None


def _by_block(header: Header) -> tuple[Parts, dict[int, Parts]]:
    outer: Parts = {}
    blocks: dict[int, Parts] = {}
    for name, stored in header.tensors.items():
        found = _BLOCK.match(name)
        group = blocks.setdefault(int(found[1]), {}) if found else outer
        base, _, ending = (found[2] if found else name).rpartition(".")
        group.setdefault(base, {})[ending] = stored
    if sorted(blocks) != list(range(len(blocks))) or not blocks:
        raise ModelError(f"{header.path} has blocks {sorted(blocks)[:9]}, not 0, 1, 2, ...")
    return outer, blocks


def _block(listing: _Listing, index: int, parts: Parts, x: int) -> int:
    """Attention, then the feed-forward, each added to what flows past it."""
    path, rows = f"blk.{index}", listing.tokens
    small = {"attn": 0, "ffn": 0}
    for base, found in parts.items():
        if base in _PRODUCTS and "weight" in found:
            continue
        if any(len(stored.dims) > 1 for stored in found.values()):
            raise ModelError(
                f"{listing.header.path}: gdp knows no blocks of architecture "
                f"{listing.header.architecture!r} with a tensor {path}.{base}"
            )
        section = "attn" if "att" in base else "ffn"
        small[section] += sum(stored.nbytes for stored in found.values())

    def product(base: str, *reads: int) -> int:
        return listing.product(f"{path}.{base}", list(reads), parts[base], rows)

    normed = listing.norm(f"{path}.attn_norm", x, small["attn"])
    wanted = [b for b in ("attn_q", "attn_k", "attn_v", "attn_qkv") if b in parts]
    if wanted not in (["attn_q", "attn_k", "attn_v"], ["attn_qkv"]) or "attn_output" not in parts:
        raise ModelError(
            f"{listing.header.path}: block {index} of architecture "
            f"{listing.header.architecture!r} has no attention that gdp knows"
        )
    read = [product(base, normed) for base in wanted]
    mixed = _attention(listing, index, read)
    x = listing.sum(f"{path}.attn_add", x, product("attn_output", mixed))
    normed = listing.norm(f"{path}.ffn_norm", x, small["ffn"])
    made = [
        _feed_forward(product, parts, kind, normed)
        for kind in ("", "_shexp", EXPERTS)
        if f"ffn_down{kind}" in parts
    ]
    for k, part in enumerate(made):
        x = listing.sum(f"{path}.ffn_add{k or ''}", x, part)
    return x


def _feed_forward(product: Callable[..., int], parts: Parts, kind: str, normed: int) -> int:
    reads = [normed]
    router = "ffn_gate_inp" + ("_shexp" if kind == "_shexp" else "")
    if kind and router in parts:
        reads.append(product(router, normed))
    inner = [product(b, *reads) for b in (f"ffn_gate{kind}", f"ffn_up{kind}") if b in parts]
    return product(f"ffn_down{kind}", *(inner or reads))


def _attention(listing: _Listing, index: int, read: list[int]) -> int:
    """Queries over the cache and the tokens themselves; holds keys and values of the context."""
    header, spec = listing.header, listing.spec
    heads = header.number("attention.head_count", layer=index)
    key_heads = header.number("attention.head_count_kv", heads, layer=index)
    size = header.number("attention.key_length", header.number("embedding_length") // heads)
    value_size = header.number("attention.value_length", size)
    queries = 1 if spec.decode else spec.sequence
    cache = spec.batch * spec.sequence * key_heads * (size + value_size) * CACHE_BYTES
    return listing.add(
        f"blk.{index}.attention", "Attention", read, listing.tokens * heads * value_size,
        flop=attention_flop(spec.batch, heads, queries, spec.sequence, size, value_size),
        held=cache, touched=cache, kind="F16",
    )  # fmt: skip
