"""GGUF files as graphs: a prompt, one decoded token with its cache of keys and values, or both.

A spec is `MODEL.gguf`, `MODEL.gguf?batch=1&sequence=512&decode`, or for a whole request
`MODEL.gguf?prompt=2048&new=256`; `cache=q8_0` asks for caches of another type than f16. Read are
transformers whose
blocks are attention, then a dense or a mixture-of-experts feed-forward: llama, mistral, mixtral,
qwen2, qwen3, qwen3moe, gemma and what names its tensors as they do. Only the header is read
(hyperparameters, shape and type of every tensor; the GGUF specification of ggml, version 3): the
file is mapped, and its weights stay on disk.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gdp.errors import MissingExtraError, ModelError
from gdp.graph.generation import Request, generation_graph
from gdp.graph.op_graph import INPUT, OUTPUT, GraphBuilder, OpDetail, OpGraph
from gdp.importers.program import batch_of, request_tokens, spec_parts
from gdp.ops.rule import RMS_NORMALISE_FLOP, SIGMOID_FLOP, attention_flop
from gdp.units import MAX_SIZE_BYTES
from gdp.version import install_command

LARGEST = (1 << 31) - 1
"""Of a hyperparameter."""
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the file."""

    dims: tuple[int, ...]  # as ggml orders them: inputs of a product first, experts last
    kind: str  # the type, such as "Q4_K"
    nbytes: int  # packed: blocks of elements with their scales


@dataclass(frozen=True)
class GgufHeader:
    """Architecture, hyperparameters and tensors of a model, without its weights."""

    path: str
    architecture: str
    numbers: Mapping[str, int | list[int]]  # by key, less the architecture before it
    tensors: Mapping[str, StoredTensor]  # by name, such as "blk.0.attn_q.weight"

    def number(self, key: str, default: int | None = None, layer: int = 0) -> int:
        """A hyperparameter, of one layer where the layers differ; raises `ModelError` where it
        is missing and has no default, or is none that a model can have."""
        value = self.numbers.get(key, default)
        if isinstance(value, list):
            value = value[layer] if layer < len(value) else None
        if value is None:
            raise ModelError(f"{self.path} says no {self.architecture}.{key}")
        if not 1 <= value <= LARGEST:
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} must be from 1 to {LARGEST}, got {value}; "
                "the file is damaged"
            )
        return value


def import_gguf() -> Any:
    """The `gguf` package."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise MissingExtraError(
            f".gguf models need the gguf package: {install_command('gguf')}"
        ) from None
    return gguf


def part_files(path: Path) -> list[Path]:
    """The file, or all parts of the model that it is one of."""
    part = _PART.search(path.name)
    if part is None:
        return [path]
    stem, count = path.name[: part.start()], int(part[2])
    return [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def read_header(path: Path) -> GgufHeader:
    """The header of a model, of all its parts; raises `ModelError` where it cannot be read."""
    numbers: dict[str, int | list[int]] = {}
    tensors: dict[str, StoredTensor] = {}
    architecture = ""
    for part in part_files(path):
        named, more, stored = _read_part(part, architecture)
        architecture = architecture or named
        numbers |= more
        tensors |= stored
    if not architecture or not tensors:
        raise ModelError(f"{path} names no architecture or has no tensors; it is no language model")
    return GgufHeader(str(path), architecture, numbers, tensors)


def _read_part(
    path: Path, architecture: str
) -> tuple[str, dict[str, int | list[int]], dict[str, StoredTensor]]:
    """(architecture, hyperparameters, tensors) of one file; the first part names the
    architecture."""
    gguf = import_gguf()
    if not path.is_file():
        raise ModelError(
            f"no model {str(path)!r}; all parts of a split model must be in one folder"
        )
    # What a damaged file makes the reader raise is of any kind.
    try:
        reader = gguf.GGUFReader(path)
        if not architecture:
            field = reader.get_field("general.architecture")
            architecture = str(field.contents()) if field else ""
        numbers = _numbers(reader, architecture + ".")
        tensors = {
            tensor.name: StoredTensor(
                tuple(int(size) for size in tensor.shape),
                tensor.tensor_type.name,
                int(tensor.n_bytes),
            )
            for tensor in reader.tensors
        }
    except Exception as error:
        raise ModelError(
            f"{path} cannot be read as GGUF: {type(error).__name__}: {error}"
        ) from error
    for name, stored in tensors.items():
        if not stored.dims or min(stored.dims) < 1:
            raise ModelError(
                f"{path}: tensor {name!r} has the shape {list(stored.dims)}; the file is damaged"
            )
    return architecture, numbers, tensors


def _numbers(reader: Any, prefix: str) -> dict[str, int | list[int]]:
    numbers: dict[str, int | list[int]] = {}
    for key, field in reader.fields.items():
        value = field.contents() if key.startswith(prefix) else None
        is_list = isinstance(value, list) and all(isinstance(v, int) for v in value)
        if value is not None and (isinstance(value, int) or is_list):
            numbers[key.removeprefix(prefix)] = value
    return numbers


CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""Of cached keys and values, as llama.cpp's `--cache-type-k` has them."""
ACTIVATION_BYTES = 4  # llama.cpp passes F32 between ops
TOKENS = "tokens"
"""Name of the op that holds the tokens of a pass."""
EXPERTS = "_exps"
_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")
_PRODUCTS = (
    "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate_inp", "ffn_gate_inp_shexp",
    *(f"ffn_{part}{kind}" for part in ("gate", "up", "down") for kind in ("", "_exps", "_shexp")),
)  # fmt: skip


_KEYS = frozenset(("batch", "sequence", "decode", "prompt", "new", "requests", "cache"))


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
    cache: str = "f16"  # type of cached keys and values

    @property
    def context(self) -> int:
        """Tokens of all sequences for which there is cache."""
        tokens = self.prompt + self.new if self.new else self.sequence
        return self.batch * max(1, self.requests) * tokens


def parse_gguf_spec(text: str) -> GgufSpec:
    """A spec from its text; raises `ModelError` for an unknown or malformed part.

    >>> parse_gguf_spec("m.gguf?sequence=4096&decode")  # doctest: +NORMALIZE_WHITESPACE
    GgufSpec(path='m.gguf', batch=1, sequence=4096, decode=True, prompt=0, new=0, requests=0,
             cache='f16')
    """
    path, given = spec_parts(text, "MODEL.gguf?batch=1&sequence=512&decode&cache=f16", _KEYS)
    cache = given.get("cache", "f16").lower()
    if cache not in CACHE_TYPES:
        raise ModelError(f"no type of cache {cache!r}; llama.cpp has {', '.join(CACHE_TYPES)}")
    return GgufSpec(path, *batch_of(given), *request_tokens(given), cache)


def gguf_files(text: str) -> list[Path]:
    """The files that a spec is read from."""
    return part_files(Path(parse_gguf_spec(text).path))


def load_gguf(text: str) -> OpGraph:
    """The graph of a spec, from the header alone."""
    spec = parse_gguf_spec(text)
    header = read_header(Path(spec.path))
    return _generation(header, spec) if spec.new else graph_of(header, spec)


def _generation(header: GgufHeader, spec: GgufSpec) -> OpGraph:
    """A whole request: the prompt, and steps at the mean context."""
    mean = spec.prompt + max(1, spec.new // 2)
    prompt = graph_of(header, replace(spec, sequence=spec.prompt))
    step = graph_of(header, replace(spec, sequence=mean, decode=True))
    return generation_graph(
        f"{Path(spec.path).stem} {spec.batch}x{spec.prompt}+{spec.new}", prompt, step,
        Request(spec.prompt, spec.new, spec.batch, spec.requests),
        full_cache=(spec.prompt + spec.new) / mean,
    )  # fmt: skip


class _ModelBuilder:
    """The graph of a model under construction; ops return the tensor that they make."""

    def __init__(self, header: GgufHeader, spec: GgufSpec) -> None:
        self.header, self.spec = header, spec
        self.tokens = spec.batch * (1 if spec.decode else spec.sequence)
        self.graph = GraphBuilder()

    def add(
        self, name: str, op_type: str, reads: list[int], numbers: int, *, flop: float = 0.0,
        held: int = 0, touched: float = 0.0, kind: str = "F32", weight_id: int | None = None,
        cached: int = 0,
    ) -> int:  # fmt: skip
        """An op that makes a tensor of so many numbers, none for 0; it holds `held` bytes, `cached`
        of which one request fills, and reads `touched` of them."""
        size_bytes = numbers * ACTIVATION_BYTES
        if max(size_bytes, held) > MAX_SIZE_BYTES:
            raise ModelError(
                f"{self.header.path}: op {name!r} would take {max(size_bytes, held):.1e} bytes; "
                "the file is damaged, or batch and sequence are too large"
            )
        block, is_io = _BLOCK.match(name), op_type in (INPUT, OUTPUT)
        scope = f"blk.{block[1]}" if block else name
        scope += ".experts" if name.endswith(EXPERTS) else ""
        moved = sum(self.graph.tensors[t][1] for t in reads) + size_bytes
        # Quantised weights are multiplied in low precision; the roofline has no finer entry.
        dtype = "float32" if kind == "F32" else "float16"
        attributes = {"context": self.spec.context, "stored": kind}
        op = self.graph.add_op(
            name, op_type, reads=reads, flop=flop,
            traffic_bytes=0.0 if is_io else moved + touched, weight_bytes=held,
            weight_id=weight_id, scope="" if is_io else scope,
            detail=OpDetail(dtype=dtype, attributes=attributes), cache_bytes=cached,
        )  # fmt: skip
        return self.graph.make_tensor(op, size_bytes) if numbers else -1

    def numbers(self, tensor: int) -> int:
        """Elements of a tensor."""
        return self.graph.tensors[tensor][1] // ACTIVATION_BYTES

    def product(
        self,
        name: str,
        reads: list[int],
        parts: dict[str, StoredTensor],
        rows: int,
        weight_id: int | None = None,
    ) -> int:
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
            flop=flop, held=held, touched=share * held, kind=weight.kind, weight_id=weight_id,
        )  # fmt: skip

    def norm(self, name: str, read: int, held: int) -> int:
        """A root-mean-square normalisation that holds its scale."""
        numbers = self.numbers(read)
        return self.add(
            name, "RMSNormalization", [read], numbers,
            flop=float(RMS_NORMALISE_FLOP * numbers), held=held, touched=held,
        )  # fmt: skip

    def sum(self, name: str, left: int, right: int) -> int:
        """The sum of two tensors of one shape."""
        numbers = self.numbers(left)
        return self.add(name, "Add", [left, right], numbers, flop=float(numbers))


def _matrix(header: GgufHeader, name: str, parts: dict[str, StoredTensor]) -> StoredTensor:
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


Parts = dict[str, dict[str, StoredTensor]]
"""The tensors of one block by base name and ending: `["attn_q"]["weight"]`."""


def graph_of(header: GgufHeader, spec: GgufSpec) -> OpGraph:
    """The ops of one pass, block by block; raises `ModelError` for tensors of unknown blocks."""
    builder, (outer, blocks) = _ModelBuilder(header, spec), _by_block(header)
    if "token_embd" not in outer:
        raise ModelError(f"{header.path} has no token_embd.weight; it is no language model")
    embedding = _matrix(header, "token_embd", outer["token_embd"])
    width, vocabulary = (*embedding.dims, 1)[:2]
    rows = builder.tokens
    x = builder.add(TOKENS, INPUT, [], rows)
    row_bytes = embedding.nbytes / vocabulary
    embedding_op = len(builder.graph.op_types)
    x = builder.add(
        "token_embd", "Gather", [x], rows * width,
        held=embedding.nbytes, touched=rows * row_bytes, kind=embedding.kind,
    )  # fmt: skip
    for index, parts in sorted(blocks.items()):
        x = _block(builder, index, parts, x)
    last = spec.batch  # llama.cpp computes logits of the last token only
    head = outer.get("output", {"weight": embedding})
    small = [outer.get(name, {}).values() for name in ("output_norm", "rope_freqs")]
    x = builder.norm("output_norm", x, sum(part.nbytes for parts in small for part in parts))
    tied = None if "output" in outer else embedding_op
    x = builder.product("output", [x], head, last, tied)
    builder.add("logits", OUTPUT, [x], 0)
    size = f"{spec.batch}x{spec.sequence}{' decode' if spec.decode else ''}"
    try:
        return builder.graph.build(f"{Path(spec.path).stem} {size}")
    except ModelError as error:  # sizes that no model has
        raise ModelError(f"{header.path}: {error}") from None


def _by_block(header: GgufHeader) -> tuple[Parts, dict[int, Parts]]:
    outer: Parts = {}
    blocks: dict[int, Parts] = {}
    for name, stored in header.tensors.items():
        block = _BLOCK.match(name)
        group = blocks.setdefault(int(block[1]), {}) if block else outer
        base, _, ending = (block[2] if block else name).rpartition(".")
        group.setdefault(base, {})[ending] = stored
    if sorted(blocks) != list(range(len(blocks))) or not blocks:
        raise ModelError(f"{header.path} has blocks {sorted(blocks)[:9]}, not 0, 1, 2, ...")
    return outer, blocks


def _block(builder: _ModelBuilder, index: int, parts: Parts, x: int) -> int:
    """Attention, then the feed-forward, each added to what flows past it."""
    path, rows = f"blk.{index}", builder.tokens
    small = {"attn": 0, "ffn": 0}
    for base, tensors in parts.items():
        if base in _PRODUCTS and "weight" in tensors:
            continue
        if any(len(stored.dims) > 1 for stored in tensors.values()):
            raise ModelError(
                f"{builder.header.path}: gdp knows no blocks of architecture "
                f"{builder.header.architecture!r} with a tensor {path}.{base}"
            )
        section = "attn" if "att" in base else "ffn"
        small[section] += sum(stored.nbytes for stored in tensors.values())

    def product(base: str, *reads: int) -> int:
        return builder.product(f"{path}.{base}", list(reads), parts[base], rows)

    normed = builder.norm(f"{path}.attn_norm", x, small["attn"])
    wanted = [b for b in ("attn_q", "attn_k", "attn_v", "attn_qkv") if b in parts]
    if wanted not in (["attn_q", "attn_k", "attn_v"], ["attn_qkv"]) or "attn_output" not in parts:
        raise ModelError(
            f"{builder.header.path}: block {index} of architecture "
            f"{builder.header.architecture!r} has no attention that gdp knows"
        )
    read = [product(base, normed) for base in wanted]
    mixed = _attention(builder, index, read)
    x = builder.sum(f"{path}.attn_add", x, product("attn_output", mixed))
    normed = builder.norm(f"{path}.ffn_norm", x, small["ffn"])
    parts_added = [
        _feed_forward(product, parts, kind, normed)
        for kind in ("", "_shexp", EXPERTS)
        if f"ffn_down{kind}" in parts
    ]
    for k, part in enumerate(parts_added):
        x = builder.sum(f"{path}.ffn_add{k or ''}", x, part)
    return x


def _feed_forward(product: Callable[..., int], parts: Parts, kind: str, normed: int) -> int:
    reads = [normed]
    router = "ffn_gate_inp" + ("_shexp" if kind == "_shexp" else "")
    if kind and router in parts:
        reads.append(product(router, normed))
    inner = [product(b, *reads) for b in (f"ffn_gate{kind}", f"ffn_up{kind}") if b in parts]
    return product(f"ffn_down{kind}", *(inner or reads))


def _attention(builder: _ModelBuilder, index: int, read: list[int]) -> int:
    """Queries over the cache and the tokens themselves; holds keys and values of the context."""
    header, spec = builder.header, builder.spec
    heads = header.number("attention.head_count", layer=index)
    key_heads = header.number("attention.head_count_kv", heads, layer=index)
    size = header.number("attention.key_length", header.number("embedding_length") // heads)
    value_size = header.number("attention.value_length", size)
    queries = 1 if spec.decode else spec.sequence
    gguf = import_gguf()
    numbers, packed = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[spec.cache.upper()]]
    if size % numbers or value_size % numbers:
        raise ModelError(
            f"{header.path}: a cache of {spec.cache} packs {numbers} numbers together, and heads "
            f"have {size} and {value_size}; take cache=f16"
        )
    cache = spec.batch * spec.sequence * key_heads * (size + value_size) // numbers * packed
    return builder.add(
        f"blk.{index}.attention", "Attention", read, builder.tokens * heads * value_size,
        flop=attention_flop(spec.batch, heads, queries, spec.sequence, size, value_size),
        held=cache, touched=cache, cached=cache, kind=spec.cache.upper(),
    )  # fmt: skip
