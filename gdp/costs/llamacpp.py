"""Seconds of llama.cpp's kernels.

ggml computes each op of a GGUF graph by a row of kernels, one after the other on one stream, so
that an op takes the sum of theirs, and each at least its launch. Of few tokens a product reads its
packed weights once (mat-vec), as fast as memory is read. Of a prompt every micro-batch multiplies
by the weights again, in the way of the backend: packed ones as integers (MMQ of CUDA and ROCm),
unpacked by a kernel for a library's product of 16 bits (CUDA without integers, SYCL), or unpacked
inside the product (Vulkan, Metal). How near products and attention of a prompt come to a device's
peak is, under CUDA, what the network of kernels learned of 16-bit ones of their sizes, and a share
for each other backend (`gdp.costs.llama_backends`). What surrounds them (norms, gates, rotations,
sums, copies to the cache) moves 32-bit numbers through memory. A processor reads packed weights for
few tokens at the lesser of its memory's and its cores' rate; of prompts it has the roofline.

Sources: ggml/src/ggml-cuda (mmvq.cu, mmq.cuh, quantize.cu, convert.cu, fattn.cu, norm.cu, rope.cu,
unary.cu, `ggml_cuda_op_mul_mat`), ggml-vulkan, ggml-sycl (gemm.hpp), ggml-metal,
src/llama-graph.cpp of ggml-org/llama.cpp.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from gdp.cluster.machines import machine_of
from gdp.cluster.presets import presets
from gdp.cluster.types import Cluster, Device
from gdp.costs import llama_backends as backends
from gdp.costs.base import CostModel, can_run
from gdp.costs.measured.kernels import ENGINES, KINDS, Kernels, descriptor_of, floor_s
from gdp.costs.measured.network import VECTOR, KernelNetwork
from gdp.graph.fuse import fuse
from gdp.graph.groups import first_members, indexed
from gdp.graph.op_graph import OpDetail, OpGraph
from gdp.ops.llamacpp import IMAGE_ENCODER
from gdp.ops.rule import ATTENTION, PRODUCT
from gdp.ops.table import kernel_of

BOUNDARY_S = 0.2e-3
"""Seconds beside the copy when the next op is on another GPU of the machine: the scheduler copies
inputs and waits for events. From tokens of Llama 3 8B on one and four A40 and RTX 6000 Ada, May
2024 (0.17 to 0.26 ms for each of three; `benchmarks.measured_world layouts`)."""
MAT_VEC_TOKENS = 8
"""Most tokens at once that mat-vec kernels take: `MMVQ_MAX_BATCH_SIZE`."""
_BLOCK, _BLOCK_INSTRUCTIONS = 32, 4
"""Packed numbers that share a scale, and instructions of a 32-bit lane for the product of two such
blocks: a conversion from integers, a product of scales, a multiply-add, and one for the minimum."""
_FLOAT, _HALF, _PACKED = 4.0, 2.0, 1.125
"""Bytes of a number in 32 bits, in 16, and of activations that are packed in 8 with scales."""
_PLAIN = frozenset(("F32", "F16", "BF16"))
_ROTATED = frozenset(("attn_q", "attn_k", "attn_qkv"))  # products whose results are rotated
_ENCODER_MOVES = 6
"""Kernels of a block of an image encoder that read and write the stream: two norms, two sums, two
rotations or copies of queries and keys."""
_CACHED = frozenset(("attn_k", "attn_v", "attn_qkv", "attn_kv_a_mqa"))


@dataclass(frozen=True)
class Build:
    """Kernels of a build of llama.cpp."""

    integers: bool = True  # packed weights of prompts multiply as integers, else unpacked to 16 bit
    fused: bool = True  # norm with its scale, gate with its product, rotation with the cache
    flash: bool = True  # attention keeps no scores in memory


NEWEST = Build()
BEFORE_JULY_2024 = Build(integers=False, fused=False, flash=False)
"""Before pull request 8075 (integer products on tensor cores by default, June 2024)."""


class Style(StrEnum):
    """Ways in which packed weights meet the tokens of a prompt."""

    INTEGERS = "integers"  # as packed, by integer units
    UNPACKED = "unpacked"  # by a kernel that writes them in 16 bits, for the library's product
    DIRECT = "direct"  # unpacked inside the product, as Metal and Vulkan do


class Product(NamedTuple):
    """A product or an attention of the tokens of one micro-batch."""

    kind: str  # of `KINDS`
    b: float
    m: float
    n: float
    k: float
    held_bytes: float  # weights or cache as they are read
    dtype: str = "float16"  # "int8" for packed weights, "bfloat16" where sums have 32 bits


class OpKernels(NamedTuple):
    """The kernels of an op in one micro-batch."""

    moved: tuple[float, ...]  # bytes of each that moves numbers through memory
    products: tuple[Product, ...] = ()


@dataclass(frozen=True, eq=False)
class LlamaCosts:
    """Costs of GGUF graphs: kernels of llama.cpp on GPUs and processors, another model elsewhere.

    GPUs that no preset is of, and cores lent by RPC, have the other model's seconds.
    """

    network: KernelNetwork | None
    base: CostModel
    build: Build = NEWEST
    reads_unfused: bool = True

    def __call__(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        seconds = self.base(graph, cluster)
        first = first_members(fuse(graph).group_of)
        kernels: dict[Style, tuple[list[OpKernels], list[int]]] = {}
        for d, device in enumerate(cluster.devices):
            if device.is_cpu:
                seconds[:, d] = on_processor_s(graph, device, seconds[:, d])
            if not predicts(device):
                continue
            style = self.style_of(device)
            if style not in kernels:
                kernels[style] = indexed(graph_kernels(graph, self.build, style))
            rows, which = kernels[style]
            own = self.kernel_seconds(rows, device)[which] * graph.chunks
            if cluster.launches_ops[d]:  # the simulator adds it once for fused ops
                own[first] = np.maximum(own[first] - backends.launch_s(device), 0.0)
            seconds[:, d] = own
        seconds[graph.is_io] = 0.0
        return np.where(can_run(graph, cluster), seconds, np.inf)

    def with_runtime_overheads(self, cluster: Cluster) -> Cluster:
        """The cluster whose GPUs launch as their backends do, and hand tensors to each other within
        one machine as late as llama.cpp's scheduler does."""
        gpus = [d for d, device in enumerate(cluster.devices) if predicts(device)]
        devices = tuple(
            replace(device, dispatch_s=backends.launch_s(device)) if d in gpus else device
            for d, device in enumerate(cluster.devices)
        )
        latency_s = cluster.link_latency_s.copy()
        for i in gpus:
            for j in gpus:
                if i != j and machine_of(cluster, i) == machine_of(cluster, j):
                    latency_s[i, j] += BOUNDARY_S
        return replace(cluster, devices=devices, link_latency_s=latency_s)

    def style_of(self, device: Device) -> Style:
        """Way in which a device multiplies the packed weights of prompts."""
        if backends.backend_of(device) in ("vulkan", "metal"):
            return Style.DIRECT
        fast = self.build.integers and backends.multiplies_integers(device)
        return Style.INTEGERS if fast else Style.UNPACKED

    def kernel_seconds(self, rows: Sequence[OpKernels], device: Device) -> Float[np.ndarray, "K"]:
        """Seconds of all kernels of each op in one micro-batch, launches included."""
        read, launch_s = backends.read_bytes_per_s(device), backends.launch_s(device)
        seconds = np.array(
            [sum(max(launch_s, size / read) for size in row.moved) for row in rows], dtype=float
        )
        owner = np.array([i for i, row in enumerate(rows) for _ in row.products], dtype=np.int64)
        products = [product for row in rows for product in row.products]
        if products:
            own = np.maximum(self._product_seconds(products, device), launch_s)
            np.add.at(seconds, owner, own)
        return seconds

    def _product_seconds(
        self, products: Sequence[Product], device: Device
    ) -> Float[np.ndarray, "P"]:
        """Roofline of the types that are multiplied, under CUDA times the factor by which the
        network is above that of a 16-bit one of its size; at a share of the peak elsewhere."""
        flop = np.array([2.0 * p.b * p.m * p.n * p.k for p in products])
        flop *= np.where([p.kind == "prompt attention" for p in products], 2.0, 1.0)
        held = np.array([p.held_bytes for p in products])
        if (reach := backends.reach_of(device)) is not None:
            rate_s = np.array([_reached_s(p, device, reach) for p in products])
            return np.maximum(flop * rate_s, held / backends.read_bytes_per_s(device))
        seconds_per_flop = {dtype: _seconds_per_flop(device, dtype) for dtype in _DTYPES}
        rate_s = np.array([seconds_per_flop[p.dtype] for p in products])
        floor = np.maximum(flop * rate_s, held / device.bytes_per_s)
        if self.network is None:
            return floor
        kernels, silicon = _as_kernels(products, flop, held), descriptor_of(device)
        vector = self.network.vectors.get(device.kind, np.zeros(VECTOR))
        logs = self.network.log_seconds(
            kernels, [silicon], vector[None], np.zeros(len(products), dtype=np.int64)
        )
        peak = np.array(silicon.flop_per_s)[kernels.arithmetic]
        above = logs - np.log(floor_s(kernels, peak, np.full(len(peak), silicon.bytes_per_s)))
        # Rounded, as processors differ in the last bits of a product of matrices.
        return floor * np.exp(np.round(above, 9))


def predicts(device: Device) -> bool:
    """True for GPUs of a preset, whose launches are known; not for cores lent in their place."""
    return not device.is_cpu and device.kind in presets()


_DTYPES = ("float32", "float16", "bfloat16", "int8")


def on_processor_s(
    graph: OpGraph, device: Device, seconds: Float[np.ndarray, "N"]
) -> Float[np.ndarray, "N"]:
    """Seconds of ops on a processor: what it reads at the bandwidth that is reached, packed weights
    of few tokens besides at the rate of its cores; other seconds of prompts as they are. O(N)."""
    read_s = graph.memory_traffic_bytes / backends.read_bytes_per_s(device)
    found = np.maximum(seconds, read_s)
    for op in np.flatnonzero(graph.has_kernel(PRODUCT)).tolist():
        detail = graph.detail[op]
        packed = str(detail.attributes.get("stored", "F32")) not in _PLAIN
        few = bool(detail.input_shapes) and detail.input_shapes[0][0] <= MAT_VEC_TOKENS
        if packed and few:
            found[op] = max(found[op], graph.flop[op] / backends.dots_per_s(device))
    return found


def _reached_s(product: Product, device: Device, reach: backends.Reach) -> float:
    """Seconds of a FLOP where a share of the 16-bit peak is reached; bfloat16 is widened where the
    backend has no products of it."""
    single = device.speed("float32")
    half = max(device.flop_per_s.get("float16", 0.0), single)
    if product.kind == "prompt attention":
        return 1.0 / (reach.attention * half)
    share = reach.experts if product.kind == "experts" else reach.products
    if product.dtype == "bfloat16" and backends.widens_bfloat16(device):
        return reach.products / share / (backends.BFLOAT16_AS_FLOAT32 * single)
    return 1.0 / (share * (single if product.dtype == "float32" else half))


def _seconds_per_flop(device: Device, dtype: str) -> float:
    """Seconds of a FLOP of products of a type at a device's peak."""
    speed, single = device.flop_per_s, device.speed("float32")
    integers = speed.get("int8", 0.0)
    if dtype == "float32":
        return 1.0 / single
    half = max(speed.get("float16", 0.0), speed.get("bfloat16", 0.0), single)
    if dtype == "int8":
        integers = integers or 2 * half  # as NVIDIA's tensor cores since Turing
        # A lane's instruction counts as two FLOP in the peak of 32 bits.
        return 1.0 / integers + _BLOCK_INSTRUCTIONS / _BLOCK / single
    # Sums in 16 bits, which datasheets of consumer cards leave out, are half as fast as integers.
    return 1.0 / (max(half, integers / 2) if dtype == "float16" else half)


def _as_kernels(
    products: Sequence[Product], flop: Float[np.ndarray, "P"], held: Float[np.ndarray, "P"]
) -> Kernels:
    """Kernels of 16 bits, or of 32, of these sizes; weights count by the bytes that are read."""
    b, m, n, k = (np.array([float(getattr(p, name)) for p in products]) for name in "bmnk")
    single = np.array([p.dtype == "float32" for p in products])
    items = np.where(single, _FLOAT, _HALF)
    engine = np.where(single, ENGINES.index("torch"), ENGINES.index("vllm"))
    return Kernels(
        kind=np.array([KINDS.index(p.kind) for p in products]), engine=engine,
        arithmetic=np.where(single, 0, 1), stored_bits=8.0 * items,
        block_scaled=np.zeros(len(products)), b=b, m=m, n=n, k=k, flop=flop, held_bytes=held,
        moved_bytes=items * b * m * (k + n), numbers=np.zeros(len(products), dtype=np.int64),
    )  # fmt: skip


def graph_kernels(graph: OpGraph, build: Build, style: Style) -> list[OpKernels]:
    """The kernels of every op of a graph that was read from a GGUF file, not fused. O(N)."""
    n = graph.num_ops
    read = np.bincount(graph.use_op, graph.tensor_bytes[graph.use_tensor], n)
    made = np.bincount(graph.producer, graph.tensor_bytes, n)
    held = np.maximum(graph.memory_traffic_bytes - read - made, 0.0) / graph.chunks
    rows = []
    for op, op_type in enumerate(graph.op_types):
        chunks, detail = int(graph.chunks[op]), graph.detail[op]
        base = graph.op_names[op].split(".", 2)[-1]
        if graph.is_io[op]:
            rows.append(OpKernels(()))
        elif kernel_of(op_type) == PRODUCT and detail.input_shapes:
            rows.append(_Multiply(base, detail, chunks, float(held[op]), build, style).kernels())
        elif op_type == IMAGE_ENCODER:
            rows.append(_image_encoder(detail, build))
        elif kernel_of(op_type) == ATTENTION and detail.input_shapes:
            rows.append(_attention(detail, chunks, float(held[op]), build))
        else:
            moved = float(graph.memory_traffic_bytes[op]) / chunks
            twice = op_type == "RMSNormalization" and not build.fused
            rows.append(OpKernels((moved,) * (2 if twice else 1)))
    return rows


@dataclass(frozen=True)
class _Multiply:
    """A product with stored weights, and what surrounds it."""

    base: str  # of its tensor, such as "ffn_down"
    detail: OpDetail
    chunks: int
    held_bytes: float  # weights that one micro-batch reads
    build: Build
    style: Style

    def kernels(self) -> OpKernels:
        """Its kernels in one micro-batch."""
        (rows, *each, inputs), weight = self.detail.input_shapes[:2]
        _, *used, outputs = self.detail.output_shapes[0]
        tokens = -(-rows // self.chunks)
        read, made = (float(tokens * math.prod(n)) for n in ((*each, inputs), (*used, outputs)))
        stored = str(self.detail.attributes.get("stored", "F32"))
        few = tokens <= MAT_VEC_TOKENS
        packed = stored not in _PLAIN
        moved = [*self._before(read), *self._behind(made)]
        if packed and (few or self.style == Style.INTEGERS):
            moved.append(read * (_FLOAT + _PACKED))
        if few:
            return OpKernels((*moved, self.held_bytes + _FLOAT * (read + made)))
        dtype = {"F32": "float32", "BF16": "bfloat16"}.get(stored, "float16")
        held = self.held_bytes
        if packed and self.style == Style.INTEGERS:
            dtype = "int8"
        elif dtype != "float32" and self.style == Style.UNPACKED:
            moved += [read * (_FLOAT + _HALF), made * (_HALF + _FLOAT)]
            if packed:
                unpacked = _HALF * math.prod(weight)
                moved, held = [*moved, held + unpacked], unpacked
        if len(weight) == 2:
            whole = Product("product", 1.0, tokens, outputs, inputs, held, dtype)
            return OpKernels(tuple(moved), (whole,))
        experts = float(weight[0])
        picked = made / outputs
        working = experts * (1.0 - (1.0 - 1.0 / experts) ** picked)
        product = Product(
            "experts", working, picked / working, float(outputs), float(inputs), held, dtype
        )
        return OpKernels(tuple(moved), (product,))

    def _before(self, read: float) -> list[float]:
        """Bytes of the gate that a product reads, if it is the last of a feed-forward."""
        if not self.base.startswith("ffn_down"):
            return []
        gate = read * 3 * _FLOAT
        return [gate] if self.build.fused else [read * 2 * _FLOAT, gate]

    def _behind(self, made: float) -> list[float]:
        """Bytes of kernels that read its results: rotations, copies to the cache, the choice of
        experts and the sum of theirs."""
        moved = []
        rotates, caches = self.base in _ROTATED, self.base in _CACHED
        if rotates and not (caches and self.build.fused):
            moved.append(made * 2 * _FLOAT)
        if caches:
            moved.append(made * (_FLOAT + _HALF))
        if self.base == "ffn_gate_inp":
            moved += [made * _FLOAT] * (1 if self.build.fused else 5)
        if self.base == "ffn_down_exps":
            moved += [made * 2 * _FLOAT, made * 2 * _FLOAT]
        return moved


def _image_encoder(detail: OpDetail, build: Build) -> OpKernels:
    """A vision tower: of each block four products as wide as the stream, two of the feed-forward,
    attention of all patches to all, and what moves the stream (norms, sums, rotations)."""
    p, width, inner, heads, blocks = (
        float(detail.attributes[name])  # pyright: ignore[reportArgumentType]
        for name in ("patches", "width", "inner", "heads", "blocks")
    )
    size, count = width / heads, int(blocks)
    products = [
        *[Product("product", 1.0, p, width, width, _HALF * width**2)] * 4,
        Product("product", 1.0, p, inner, width, _HALF * width * inner),
        Product("product", 1.0, p, width, inner, _HALF * width * inner),
    ]
    moved = [p * width * 2 * _FLOAT] * _ENCODER_MOVES + [p * inner * 2 * _FLOAT]
    if build.flash:
        kept = _HALF * 2 * p * width
        products.append(Product("prompt attention", heads, p, p, size, kept))
    else:
        moved += [heads * p * p * 2 * _FLOAT]
        products.append(Product("batched product", heads, p, p, size, _HALF * p * width))
        products.append(Product("batched product", heads, p, size, p, _HALF * p * width))
    return OpKernels(tuple(moved * count), tuple(products * count))


def _attention(detail: OpDetail, chunks: int, held: float, build: Build) -> OpKernels:
    """Attention of one micro-batch over the keys that its tokens see on average."""
    (batch, heads, queries, size), (_, keys, seen, _) = detail.input_shapes[:2]
    made = float(math.prod(detail.output_shapes[0])) / chunks
    queries = -(-queries // chunks)
    scores = float(batch * heads * queries * seen)
    group = float(queries * heads) / keys
    if batch * queries <= MAT_VEC_TOKENS:
        if build.flash:
            return OpKernels((held + _FLOAT * 2 * made, _FLOAT * 2 * made))
        return OpKernels((held / 2, scores * 2 * _FLOAT, held / 2, _FLOAT * 2 * made))
    if build.flash:
        return OpKernels(
            (), (Product("prompt attention", float(batch * keys), group, seen, size, held),)
        )
    # Scores are products in 16 bits, converted, normalised behind a mask, and converted back.
    moved = (
        made * (_FLOAT + _HALF), scores * (_HALF + _FLOAT), scores * 2 * _FLOAT,
        scores * (_FLOAT + _HALF), made * (_HALF + _FLOAT), made * 2 * _FLOAT,
    )  # fmt: skip
    b = float(batch * heads)
    return OpKernels(moved, (
        Product("batched product", b, float(queries), float(seen), float(size), held / 2),
        Product("batched product", b, float(queries), float(size), float(seen), held / 2),
    ))  # fmt: skip
