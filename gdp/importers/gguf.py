"""GGUF files as graphs: a prompt, one decoded token with its cache of keys and values, or both.

A spec is `MODEL.gguf`, `MODEL.gguf?batch=1&sequence=512&decode`, or for a whole request
`MODEL.gguf?prompt=2048&new=256`, with `context=32768` for caches of more tokens than these;
`cache=q8_0` asks for caches of another type than f16. `mmproj=FILE` is llama.cpp's image encoder,
which reads one image before the prompt, of `image=` pixels a side; `draft=FILE`, with `drafts=4`
and `acceptance=0.7`, is a model that drafts so many tokens a pass (`gdp.importers.gguf_draft`).
`ubatch=2048` computes so many tokens of a prompt at once, `outputs=1` reserves so many rows of
logits instead of those of a whole micro-batch, `flash=off` has no flash attention. Only headers are
read.

A block is told by its tensors, named as llama.cpp names them: attention (with windows, or latent),
a state-space recurrence, linear attention or a short convolution, both side by side, or nothing;
then a feed-forward, dense or a mixture of experts, or nothing. Each may have another width.

llama.cpp computes a prompt in micro-batches, so that memory holds the tensors of one of them
(`OpGraph.chunks`), under any placement of such a graph, beside buffers that it reserves for the
longest one at the full context (`gdp.importers.gguf_buffers`).
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gdp.base.errors import ModelError
from gdp.base.units import MAX_SIZE_BYTES
from gdp.costs.offload import SENT_BYTES
from gdp.graph.generation import CACHE_AT, generation_graph, with_context
from gdp.graph.op_graph import (
    ARCHITECTURE,
    BUFFER,
    INPUT,
    OUTPUT,
    Attribute,
    GraphBuilder,
    OpDetail,
    OpGraph,
)
from gdp.graph.request import CacheGrowth, Request
from gdp.importers.gguf_buffers import WITHOUT_FLASH, logits_bytes, mask_bytes
from gdp.importers.gguf_caches import (
    STATE_FLOP,
    Parts,
    cells,
    has_cache,
    heads_of,
    row_bytes,
    state_of,
    window,
)
from gdp.importers.gguf_draft import require_one_vocabulary
from gdp.importers.gguf_header import GgufHeader, StoredTensor, part_files, read_header
from gdp.importers.gguf_projector import read_projector
from gdp.importers.gguf_spec import GgufSpec, parse_gguf_spec
from gdp.ops.llamacpp import DRAFT, IMAGE_ENCODER, OFFLOAD_TOKENS, PROJECTOR, UBATCH
from gdp.ops.rule import RMS_NORMALISE_FLOP, SIGMOID_FLOP, attention_flop

ACTIVATION_BYTES = 4  # llama.cpp passes F32 between ops
TOKENS = "tokens"
"""Name of the op that holds the tokens of a pass."""
ATTENTION = "Attention"
"""Type of the ops that hold keys and values."""
SCORES = "scores"
"""Attribute of the ops that hold masks: heads of which scores are kept, 0 with flash attention."""
IMAGE = "image"
EXPERTS = "_exps"
_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")
_FEED_FORWARDS = ("", "_shexp", EXPERTS)
"""Dense, shared experts, and experts: endings of tensors."""
_ROWS = ("attn_k_b", "attn_v_b")
"""Products with a matrix for each head."""
_INTO_ATTENTION = (
    "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_gate", "attn_q_a", "attn_kv_a_mqa", "attn_q_b",
    "attn_kv_b", "attn_k_b", "indexer.attn_k", "indexer.proj", "indexer.attn_q_b",
)  # fmt: skip
_INTO_STATE = (
    "ssm_in", "ssm_ba", "ssm_beta", "ssm_alpha", "ssm_x", "ssm_dt", "ssm_f_a", "ssm_f_b",
    "ssm_g_a", "ssm_g_b", "shortconv.in_proj",
)  # fmt: skip
_AFTER = {
    "attn_q_b": ("attn_q_a",), "indexer.attn_q_b": ("attn_q_a",), "attn_kv_b": ("attn_kv_a_mqa",),
    "attn_k_b": ("attn_q_b", "attn_q"), "ssm_x": ("ssm_in",), "ssm_dt": ("ssm_x",),
    "ssm_f_b": ("ssm_f_a",), "ssm_g_b": ("ssm_g_a",),
}  # fmt: skip
"""Products that read another one instead of the normalised input: the first that there is."""
_STATE_OUT = ("ssm_out", "shortconv.out_proj")
_KEYS_OF_ATTENTION = ("attn_k", "attn_qkv", "attn_kv_a_mqa")
_PRODUCTS = frozenset((
    *_INTO_ATTENTION, *_INTO_STATE, *_STATE_OUT, *_ROWS, "attn_output", "inp_gate", "proj",
    "laurel_l", "laurel_r", "ffn_gate_inp", "ffn_gate_inp_shexp", "ffn_latent_down",
    "ffn_latent_up",
    *(f"ffn_{part}{kind}" for part in ("gate", "up", "gate_up", "down") for kind in _FEED_FORWARDS),
))  # fmt: skip
_SMALL = re.compile(r"(ssm_conv1d\w*|ssm_a|ssm_d|shortconv\.conv|altup_\w+|\w+_norm)$")
"""Tensors of more than one axis that are no matrices of products."""
_BESIDE_EMBEDDING = ("token_embd_norm", "token_types", "position_embd", "per_layer_token_embd")
"""Tensors outside blocks that lie with the embedding; others lie with the output."""
_NEXT = "nextn."
"""Begins the tensors of blocks that draft more tokens, which llama.cpp computes only if asked."""
_LOADED_NEXT = frozenset(("qwen35", "qwen35moe", "step35"))
"""Architectures whose drafting blocks llama.cpp loads all the same; it skips those of others."""


MOST_BLOCKS = 4096
"""Several times the largest models there are."""
_Shapes = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]


def gguf_files(text: str) -> list[Path]:
    """The files that a spec is read from."""
    spec = parse_gguf_spec(text)
    beside = [Path(spec.mmproj)] if spec.mmproj else []
    drafts = part_files(Path(spec.draft.file)) if spec.draft.file else []
    return [*part_files(Path(spec.path)), *beside, *drafts]


def load_gguf(text: str) -> OpGraph:
    """The graph of a spec, from the header alone."""
    spec = parse_gguf_spec(text)
    header = read_header(Path(spec.path))
    return _generation(header, spec) if spec.new else graph_of(header, spec)


def _generation(header: GgufHeader, spec: GgufSpec) -> OpGraph:
    """A whole request: the prompt, and steps at the mean context."""
    mean, tokens = spec.prompt + max(1, spec.new // 2), spec.prompt + spec.new
    models = [(header, spec)]
    if spec.draft.file:
        models.append((read_header(Path(spec.draft.file)), spec.of_draft()))
        require_one_vocabulary(Path(spec.path), Path(spec.draft.file))
    prompt = graph_of(header, replace(spec, sequence=spec.prompt))
    step = graph_of(header, replace(spec, sequence=mean, decode=True, mmproj=""))
    longest = header.count("context_length")
    contexts = _bends(models, tokens, longest)
    detail = list(step.detail)
    for op in np.flatnonzero(step.cache_bytes).tolist():
        sizes = [int(step.cache_bytes[op])] * len(contexts)
        own, asked = models[step.op_names[op].startswith(f"{DRAFT}/")]
        layer = int(step.op_names[op].rpartition("blk.")[2].split(".")[0])
        if step.op_types[op] == BUFFER:
            heads: Any = step.detail[op].attributes[SCORES]
            sizes = [_mask_bytes(own, asked, layer, n, heads) for n in contexts]
        if step.op_types[op] == ATTENTION:
            now, *then = (cells(own, layer, spec.batch, n, spec.ubatch) for n in (mean, *contexts))
            sizes = [sizes[0] * kept // now for kept in then]
        more = {**detail[op].attributes, CACHE_AT: tuple(sizes)}
        detail[op] = replace(detail[op], attributes=more)
    step, passes = replace(step, detail=tuple(detail)), spec.draft.passes(spec.new)
    graph = generation_graph(
        f"{Path(spec.path).stem} {spec.batch}x{spec.prompt}+{spec.new}", prompt, step,
        Request(spec.prompt, spec.new, spec.batch, spec.requests, passes=passes),
        full_cache=CacheGrowth(contexts, longest),
    )  # fmt: skip
    return with_context(graph, spec.context)


def _mask_bytes(header: GgufHeader, spec: GgufSpec, layer: int, tokens: int, heads: int) -> int:
    """Bytes of a block's mask at a context of `tokens` tokens a sequence."""
    kept = cells(header, layer, spec.batch, tokens, spec.ubatch)
    return mask_bytes(spec.rows(tokens), kept, heads)


def _bends(
    models: Sequence[tuple[GgufHeader, GgufSpec]], tokens: int, longest: int
) -> tuple[int, ...]:
    """Contexts between which every cache grows evenly: from `tokens` to the longest or beyond,
    with those from which on a window holds no more."""
    full = [
        -(-cells(header, i, spec.batch, 1 << 30, spec.ubatch) // spec.batch)
        for header, spec in models
        for i in range(header.count("block_count"))
        if window(header, i)
    ]
    bends = sorted({n for n in full if n > tokens})
    return (tokens, *bends, max(longest, 2 * max([tokens, *bends])))


class _ModelBuilder:
    """The graph of a model under construction; ops return the tensor that they make."""

    def __init__(
        self, header: GgufHeader, spec: GgufSpec, beside: "_ModelBuilder | None" = None
    ) -> None:
        """Begin a model, or one that drafts in the graph of another one, which runs it for each
        draft and once more over what was checked (`draft` and `process` of
        common/speculative.cpp)."""
        self.header, self.spec, self.tokens = header, spec, spec.tokens
        self.outer, self.blocks = _by_block(header)
        if "token_embd" not in self.outer:
            raise ModelError(f"{header.path} has no token_embd.weight; it is no language model")
        self.embedding = _matrix(header, "token_embd", self.outer["token_embd"])
        self.graph = GraphBuilder() if beside is None else beside.graph
        self.part = "" if beside is None else DRAFT
        self.repeats = beside.spec.queries if beside is not None and spec.decode else 1
        self.details: dict[tuple, OpDetail] = {}
        self.masks: dict[bool, int] = {}  # the op that holds the mask of full caches, of windows

    def add(
        self, name: str, op_type: str, reads: list[int], numbers: int, *, flop: float = 0.0,
        held: int = 0, touched: float = 0.0, kind: str = "F32", weight_id: int | None = None,
        cached: int = 0, sent: float | None = None, rows: int = 0, shapes: _Shapes = ((), ()),
    ) -> int:  # fmt: skip
        """An op that makes a tensor of so many numbers, none for 0; it holds `held` bytes, `cached`
        of which one request fills, and reads `touched` of them. Where it lies on a processor `sent`
        bytes go to a GPU that computes it; None: none does. It computes so many `rows`, those of
        all tokens for 0, by micro-batches; products and attention tell the `shapes` that they read
        and make."""
        size_bytes = numbers * ACTIVATION_BYTES
        if max(size_bytes, held) > MAX_SIZE_BYTES:
            raise ModelError(
                f"{self.header.path}: op {name!r} would take {max(size_bytes, held):.1e} bytes; "
                "the file is damaged, or batch and sequence are too large"
            )
        is_io = op_type in (INPUT, OUTPUT)
        moved = sum(self.graph.tensors[t][1] for t in reads) + size_bytes
        # Quantised weights are multiplied in low precision; the roofline has no finer entry.
        dtype = "float32" if kind == "F32" else "float16"
        attributes: dict[str, Attribute] = {"context": self.spec.cached_tokens, "stored": kind}
        if name == TOKENS:
            attributes["blocks"] = len(self.blocks)
            attributes[ARCHITECTURE] = self.header.architecture
            if self.spec.ubatch != UBATCH:
                attributes["ubatch"] = self.spec.ubatch
            if not self.spec.flash:
                attributes["flash"] = "off"
            if self.spec.outputs:
                attributes["outputs"] = self.spec.outputs
            if self.spec.draft.file:
                attributes |= {"draft": self.spec.draft.file, "drafts": self.spec.draft.tokens}
        if sent is not None:
            attributes[SENT_BYTES] = float(sent)
        op = self.graph.add_op(
            self.named(name), op_type, reads=reads, flop=flop,
            traffic_bytes=0.0 if is_io else moved + touched, weight_bytes=held,
            weight_id=weight_id, scope="" if is_io else self.scope(name),
            detail=self.shared(OpDetail(dtype, *shapes, attributes)), cache_bytes=cached,
            repeats=self.repeats,
            chunks=1 if is_io else -(-(rows or self.tokens) // self.spec.ubatch),
        )  # fmt: skip
        return self.graph.make_tensor(op, size_bytes) if numbers else -1

    def named(self, name: str) -> str:
        """The name of an op, behind that of its part."""
        return f"{self.part}/{name}" if self.part else name

    def scope(self, name: str) -> str:
        """The piece that an op is of: a block, its experts, what is outside of blocks; or all of a
        model that drafts but its embedding, which lies on the processor."""
        if self.part:
            return f"{DRAFT}.{name}" if name == "token_embd" else DRAFT
        block = _BLOCK.match(name)
        return (f"blk.{block[1]}" if block else name) + ".experts" * name.endswith(EXPERTS)

    def shared(self, detail: OpDetail) -> OpDetail:
        """The first equal object: layers are identical."""
        key = (detail.dtype, detail.input_shapes, tuple(sorted(detail.attributes.items())))
        return self.details.setdefault(key, detail)

    @property
    def chunks(self) -> int:
        """Micro-batches of a pass."""
        return -(-self.tokens // self.spec.ubatch)

    def sent(self, name: str, size: float) -> float | None:
        """Bytes that go to a GPU with an op between products that it computes with weights on the
        processor: ggml's scheduler expands that GPU over ops that no weight of the processor holds
        (`ggml_backend_sched_split_graph`, pass 2). None where these products stay, too."""
        at_once = min(self.tokens, self.spec.ubatch)
        return size if name.startswith("blk.") and at_once >= OFFLOAD_TOKENS else None

    @property
    def next_op(self) -> int:
        """The index of the op that is added next."""
        return len(self.graph.op_types)

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
        used, share, at_once = (
            1,
            1.0,
            min(rows, self.spec.ubatch),
        )  # share that one micro-batch needs
        is_experts, is_stack = name.endswith(EXPERTS), name.endswith(_ROWS)
        if is_stack:
            used = weight.dims[2]
        elif is_experts:
            used, experts = self.header.number("expert_used_count"), weight.dims[2]
            # Tokens choose independently here, each `used` different ones of the experts.
            share = 1.0 - (1.0 - min(1.0, used / experts)) ** at_once
        flop = 2.0 * rows * used * inputs * outputs
        if "ffn_down" in name:
            flop += rows * used * inputs * (SIGMOID_FLOP + 2)  # the gated activation
        # Every micro-batch reads the weights again.
        touched = -(-rows // self.spec.ubatch) * share * held
        shapes: _Shapes = (((rows, inputs), (outputs, inputs)), ((rows, outputs),))
        if is_experts or is_stack:
            each = used if is_stack or "ffn_down" in name else 1  # rows of a token that it reads
            stack = (weight.dims[2], inputs, outputs)
            shapes = (((rows, each, inputs), stack), ((rows, used, outputs),))
        return self.add(
            name, "MatMul", reads, rows * used * outputs,
            flop=flop, held=held, touched=touched, kind=weight.kind, weight_id=weight_id,
            sent=touched if at_once >= OFFLOAD_TOKENS else None, rows=rows, shapes=shapes,
        )  # fmt: skip

    def mask(self, layer: int, attention: int, heads: int) -> None:
        """The mask of a block's attention, which all blocks of a device share."""
        spec, header = self.spec, self.header
        flash = spec.flash and header.architecture not in WITHOUT_FLASH
        scores = 0 if flash else heads
        held, op = _mask_bytes(header, spec, layer, spec.sequence, scores), self.next_op
        first = self.masks.setdefault(window(header, layer) > 0, op)
        self._buffer(f"blk.{layer}.mask", attention, held, held, first, scores)

    def logits(self, head: int, vocabulary: int) -> None:
        """Logits of a micro-batch, of which the head computes those of the last token."""
        spec = self.spec
        rows = spec.outputs * (1 + spec.draft.tokens) or spec.rows(spec.sequence)
        self._buffer("output.logits", head, logits_bytes(rows, vocabulary))

    def _buffer(
        self, name: str, beside: int, held: int, cached: int = 0,
        weight_id: int | None = None, scores: int = 0,
    ) -> None:  # fmt: skip
        """Room that llama.cpp reserves where another op is; of a request its steps hold it."""
        if self.spec.decode or not self.spec.new:
            detail = self.shared(OpDetail(attributes={SCORES: scores}))
            scope = self.scope(name.removesuffix(".logits"))
            self.graph.add_op(
                self.named(name), BUFFER, weight_bytes=held, cache_bytes=cached,
                weight_id=weight_id, colocate=beside, scope=scope, detail=detail,
            )  # fmt: skip

    def norm(self, name: str, read: int, held: int) -> int:
        """A root-mean-square normalisation that holds its scale."""
        numbers = self.numbers(read)
        return self.add(
            name, "RMSNormalization", [read], numbers,
            flop=float(RMS_NORMALISE_FLOP * numbers), held=held, touched=held,
            sent=self.sent(name, held * self.chunks),
        )  # fmt: skip

    def sum(self, name: str, left: int, right: int) -> int:
        """The sum of two tensors of one shape."""
        numbers = self.numbers(left)
        return self.add(
            name, "Add", [left, right], numbers, flop=float(numbers), sent=self.sent(name, 0)
        )


def _matrix(header: GgufHeader, name: str, parts: dict[str, StoredTensor]) -> StoredTensor:
    """The weight of a product; raises `ModelError` where it is missing or has other axes."""
    weight, is_stack = parts.get("weight"), name.endswith((EXPERTS, *_ROWS))
    if weight is None:
        raise ModelError(f"{header.path} has no tensor {name}.weight; it is damaged")
    if len(weight.dims) != 3 if is_stack else len(weight.dims) > 2:
        raise ModelError(
            f"{header.path}: tensor {name}.weight has the shape {list(weight.dims)}, where "
            f"{'three axes are' if is_stack else 'two axes are'} wanted"
        )
    return weight


def graph_of(header: GgufHeader, spec: GgufSpec) -> OpGraph:
    """The ops of one pass, block by block; raises `ModelError` for tensors of unknown blocks."""
    builder = _ModelBuilder(header, spec)
    tokens = builder.add(TOKENS, INPUT, [], builder.tokens)
    beside = [_image(builder)] if spec.mmproj else []
    if spec.draft.file:
        own = read_header(Path(spec.draft.file))
        beside.append(_logits(_ModelBuilder(own, spec.of_draft(), builder), [tokens]))
    builder.add("logits", OUTPUT, [_logits(builder, [tokens, *beside])], 0)
    size = f"{spec.batch}x{spec.sequence}{' decode' if spec.decode else ''}"
    try:
        return builder.graph.build(f"{Path(spec.path).stem} {size}", "gguf")
    except ModelError as error:  # sizes that no model has
        raise ModelError(f"{header.path}: {error}") from None


def _logits(builder: _ModelBuilder, reads: list[int]) -> int:
    """Embedding, blocks and head of a model: the tensor of its logits."""
    outer, embedding, spec = dict(builder.outer), builder.embedding, builder.spec
    width, vocabulary = (*embedding.dims, 1)[:2]
    beside = [outer.pop(name) for name in _BESIDE_EMBEDDING if name in outer]
    held = embedding.nbytes + sum(part.nbytes for parts in beside for part in parts.values())
    embedding_op, rows = builder.next_op, builder.tokens
    x = builder.add(
        "token_embd", "Gather", reads, rows * width,
        held=held, touched=rows * (held / vocabulary), kind=embedding.kind,
    )  # fmt: skip
    for index, parts in enumerate(builder.blocks):
        if any(base.startswith(_NEXT) for base in parts):
            _next_tokens(builder, index, parts, x)
        else:
            x = _block(builder, index, parts, x)
    # llama.cpp computes logits of the last token only, and of all that are checked.
    last = spec.tokens if spec.decode else spec.batch
    head = outer.get("output", {"weight": embedding})
    tied = None if "output" in outer else embedding_op
    small = [parts for name, parts in outer.items() if name not in ("token_embd", "output")]
    held = sum(part.nbytes for parts in small for part in parts.values())
    x = builder.norm("output_norm", x, held)
    head_op = builder.next_op
    x = builder.product("output", [x], head, last, tied)
    builder.logits(head_op, vocabulary)
    return x


def _image(builder: _ModelBuilder) -> int:
    """The embeddings of one image, by an encoder in a separate file."""
    width = builder.embedding.dims[0]
    encoder = read_projector(Path(builder.spec.mmproj), builder.spec.image)
    pixels = builder.add(IMAGE, INPUT, [], encoder.numbers)
    attributes: dict[str, Attribute] = {
        "file": encoder.path, "patches": encoder.patches, "width": encoder.width,
        "inner": encoder.inner, "heads": encoder.heads, "blocks": encoder.blocks,
    }  # fmt: skip
    # No more embeddings than patches; projectors that join patches make fewer.
    graph, made = builder.graph, min(encoder.patches, builder.tokens) * width * ACTIVATION_BYTES
    op = graph.add_op(
        PROJECTOR, IMAGE_ENCODER, reads=[pixels], flop=encoder.flop,
        traffic_bytes=encoder.traffic_bytes, weight_bytes=encoder.held_bytes, scope=PROJECTOR,
        detail=OpDetail("float16", attributes=attributes),
    )  # fmt: skip
    return graph.make_tensor(op, made)


def _by_block(header: GgufHeader) -> tuple[Parts, list[Parts]]:
    """Tensors outside blocks, and those of each block."""
    outer: Parts = {}
    blocks: dict[int, Parts] = {}
    for name, stored in header.tensors.items():
        block = _BLOCK.match(name)
        group = blocks.setdefault(int(block[1]), {}) if block else outer
        base, dot, ending = (block[2] if block else name).rpartition(".")
        group.setdefault(base if dot else ending, {})[ending if dot else ""] = stored
    count = header.count("block_count", max(blocks, default=-1) + 1)
    if (
        not blocks or not max(blocks) < count <= MOST_BLOCKS
        or not all(_is_nothing(header, i) for i in range(count) if i not in blocks)
    ):  # fmt: skip
        raise ModelError(f"{header.path} has blocks {sorted(blocks)[:9]}, not 0, 1, 2, ...")
    return outer, [blocks.get(i, {}) for i in range(count)]


def _is_nothing(header: GgufHeader, layer: int) -> bool:
    """True for an empty block (neither attention nor feed-forward), which architecture searches
    leave."""
    told = [header.numbers.get(key) for key in ("attention.head_count", "feed_forward_length")]
    return all(isinstance(row, list) and row[layer : layer + 1] == [0] for row in told)


def _next_tokens(builder: _ModelBuilder, index: int, parts: Parts, x: int) -> None:
    """A multi-token-prediction block: not computed, and held if llama.cpp loads it."""
    if builder.header.architecture in _LOADED_NEXT:
        held = sum(part.nbytes for tensors in parts.values() for part in tensors.values())
        builder.add(f"blk.{index}.nextn", "Identity", [x], 0, held=held)


class _BlockBuilder:
    """Ops of one block: the mixer of tokens, then the feed-forward, each added to the residual
    stream."""

    def __init__(self, builder: _ModelBuilder, index: int, parts: Parts) -> None:
        self.builder, self.index, self.parts = builder, index, parts
        self.path, self.built = f"blk.{index}", set[str]()
        self.small = {"attn": 0, "ffn": 0}
        for base, tensors in parts.items():
            if base in _PRODUCTS and "weight" in tensors:
                continue
            if not _SMALL.match(base) and any(len(part.dims) > 1 for part in tensors.values()):
                raise self.unknown(base)
            section = "attn" if re.search("att|ssm|shortconv", base) else "ffn"
            self.small[section] += sum(part.nbytes for part in tensors.values())

    def unknown(self, base: str) -> ModelError:
        """An error that names a tensor of a block of another kind."""
        header = self.builder.header
        return ModelError(
            f"{header.path}: gdp knows no blocks of architecture {header.architecture!r} with a "
            f"tensor {self.path}.{base}"
        )

    def has(self, base: str) -> bool:
        """True where the block has a tensor."""
        return base in self.parts

    def product(self, base: str, *reads: int) -> int:
        """A product of the block."""
        self.built.add(base)
        name = f"{self.path}.{base}"
        return self.builder.product(name, list(reads), self.parts[base], self.builder.tokens)

    def chain(self, bases: Sequence[str], normed: int) -> list[int]:
        """Products of the normalised input, or of one another; the tensors that none of them
        reads."""
        made: dict[str, int] = {}
        inner: set[str] = set()
        for base in bases:
            # The step of some recurrences is a bias alone, which is no product.
            tensors = self.parts.get(base)
            if tensors is None or (base == "ssm_dt" and "weight" not in tensors):
                continue
            source = next((b for b in _AFTER.get(base, ()) if b in made), None)
            if source is not None:
                inner.add(source)
            made[base] = self.product(base, normed if source is None else made[source])
        return [tensor for base, tensor in made.items() if base not in inner]

    def add_to(self, x: int, part: int, name: str) -> int:
        """The sum of the residual stream and the output of a part of the block."""
        return self.builder.sum(f"{self.path}.{name}", x, part)


def _block(builder: _ModelBuilder, index: int, parts: Parts, x: int) -> int:
    """Build a block from its tensor names; `ModelError` for tensors of unknown blocks."""
    block = _BlockBuilder(builder, index, parts)
    mixes = any(block.has(base) for base in ("attn_output", *_STATE_OUT))
    feeds = [kind for kind in _FEED_FORWARDS if block.has(f"ffn_down{kind}")]
    small = block.small
    if mixes or (small["attn"] and not feeds):
        held = small["attn"] + (0 if feeds else small["ffn"])
        normed = builder.norm(f"{block.path}.attn_norm", x, held)
        for k, mixed in enumerate(_mixed(block, normed)):
            x = block.add_to(x, mixed, f"attn_add{k or ''}")
        if block.has("laurel_l"):
            low = block.product("laurel_r", block.product("laurel_l", normed))
            x = block.add_to(x, low, "laurel_add")
    elif not feeds and any(base in _INTO_ATTENTION for base in parts):
        raise _no_attention(block)
    if feeds:
        held = small["ffn"] + (0 if mixes else small["attn"])
        normed = builder.norm(f"{block.path}.ffn_norm", x, held)
        for k, kind in enumerate(feeds):
            x = block.add_to(x, _feed_forward(block, kind, normed), f"ffn_add{k or ''}")
    if block.has("inp_gate") and block.has("proj"):
        x = block.add_to(x, block.product("proj", block.product("inp_gate", x)), "per_layer_add")
    for base, tensors in parts.items():
        if base in _PRODUCTS and "weight" in tensors and base not in block.built:
            raise _no_attention(block) if "attn" in base else block.unknown(base)
    return x


def _no_attention(block: _BlockBuilder) -> ModelError:
    header = block.builder.header
    return ModelError(
        f"{header.path}: block {block.index} of architecture {header.architecture!r} has no "
        "attention that gdp knows"
    )


def _mixed(block: _BlockBuilder, normed: int) -> list[int]:
    """Mix tokens by attention, by a state, or by both side by side."""
    out = next((base for base in _STATE_OUT if block.has(base)), None)
    # Of linear attention in the way of Kimi, which has no output of its own name.
    is_linear = block.has("ssm_conv1d_q")
    mixed = []
    if out or is_linear:
        alone = is_linear or not block.has("attn_output")
        read = block.chain((*_INTO_STATE, *(_INTO_ATTENTION if alone else ())), normed)
        mixed.append(block.product(out or "attn_output", _state(block, read or [normed])))
    if block.has("attn_output") and not is_linear:
        read = block.chain(_INTO_ATTENTION, normed)
        # Without queries it is a plain product, which an architecture search puts in its place.
        mixed.append(block.product("attn_output", _attention(block, read) if read else normed))
    return mixed


def _feed_forward(block: _BlockBuilder, kind: str, normed: int) -> int:
    latent = kind == EXPERTS and block.has("ffn_latent_down")
    reads = [block.product("ffn_latent_down", normed) if latent else normed]
    router = "ffn_gate_inp" + ("_shexp" if kind == "_shexp" else "")
    if kind and block.has(router):
        reads.append(block.product(router, normed))
    names = [f"ffn_{part}{kind}" for part in ("gate", "up", "gate_up")]
    inner = [block.product(name, *reads) for name in names if block.has(name)]
    made = block.product(f"ffn_down{kind}", *(inner or reads))
    return block.product("ffn_latent_up", made) if latent and block.has("ffn_latent_up") else made


def _state(block: _BlockBuilder, read: list[int]) -> int:
    """The recurrence of a state that each token changes; holds the state of every sequence."""
    builder = block.builder
    state = state_of(builder.header, block.index, block.parts)
    held = builder.spec.batch * state.nbytes
    rows = builder.tokens
    return builder.add(
        f"{block.path}.state", "StateSpace", read, rows * state.width,
        flop=float(rows) * (STATE_FLOP * state.elements + 2 * state.conv_elements),
        held=held, touched=2.0 * held, cached=held,
        sent=builder.sent(block.path + ".", 2.0 * held * builder.chunks),  # there and back
    )  # fmt: skip


def _attention(block: _BlockBuilder, read: list[int]) -> int:
    """Queries over the cache and the tokens themselves; holds keys and values of the context, or
    of the last window of it."""
    builder, index, parts = block.builder, block.index, block.parts
    header, spec = builder.header, builder.spec
    owns = has_cache(header, index)
    if not any(base in parts for base in ("attn_q", "attn_q_b", "attn_qkv")) or (
        owns and not any(base in parts for base in _KEYS_OF_ATTENTION)
    ):
        raise _no_attention(block)
    heads = heads_of(header, index, parts)
    kept = cells(header, index, spec.batch, spec.sequence, spec.ubatch)
    row = row_bytes(header, heads, spec.cache)
    cache = kept * row
    queries, keys = spec.queries, -(-kept // spec.batch)
    # A micro-batch attends to the tokens so far, not to those behind it.
    seen = keys if spec.decode else _mean_seen(spec.batch * spec.sequence, keys, spec.ubatch)
    key_heads = header.number("attention.head_count_kv", heads.number, layer=index)
    if "attn_k_b" in parts:
        key_heads = 1
    # Each micro-batch copies keys and values so far to the GPU, and its own, in F32, back.
    sent = builder.chunks * min(seen * spec.batch, kept) * row
    sent += builder.tokens * sum(heads.cell_numbers) * ACTIVATION_BYTES
    op = builder.next_op
    mixed = builder.add(
        f"{block.path}.attention", ATTENTION, read,
        builder.tokens * heads.number * heads.value_size,
        flop=attention_flop(
            spec.batch, heads.number, queries, seen, heads.key_size, heads.value_size
        ),
        held=cache if owns else 0, touched=cache, cached=cache if owns else 0,
        sent=builder.sent(block.path + ".", sent), kind=spec.cache.upper(),
        shapes=(
            ((spec.batch, heads.number, queries, heads.key_size),
             (spec.batch, key_heads, seen, heads.key_size),
             (spec.batch, key_heads, seen, heads.value_size)),
            ((spec.batch, heads.number, queries, heads.value_size),),
        ),
    )  # fmt: skip
    builder.mask(index, op, heads.number)
    return block.product("attn_v_b", mixed) if block.has("attn_v_b") else mixed


def _mean_seen(tokens: int, keys: int, ubatch: int = UBATCH) -> int:
    """Keys that a micro-batch attends to, in the mean over those of a prompt.

    >>> _mean_seen(2048, 2048), _mean_seen(100, 100), _mean_seen(2048, 512), _mean_seen(700, 600)
    (1280, 100, 512, 556)
    """
    most, batches = min(tokens, keys), -(-tokens // ubatch)
    growing = most // ubatch  # batches that end before all keys are seen
    seen = ubatch * growing * (growing + 1) // 2 + (batches - growing) * most
    return max(1, round(seen / batches))
