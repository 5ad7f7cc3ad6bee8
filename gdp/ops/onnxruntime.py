"""Operators of ONNX Runtime's own domain: costs, and shapes, for which the onnx package has no
schema."""

import dataclasses
import math
from typing import Any

from gdp.ops.onnx import (
    STANDARD,
    Formula,
    all_bytes,
    fused_attention,
    input_bytes,
    matmul,
    per_input,
    pool,
    recurrent,
)
from gdp.ops.onnx_view import (
    Inferred,
    NodeView,
    Partial,
    ShapeRule,
    Tensor,
    broadcast,
    data_type,
    need,
)
from gdp.ops.rule import (
    ATTENTION,
    GELU_ERF_FLOP,
    GELU_TANH_FLOP,
    LSTM_FLOP,
    NORMALISE_FLOP,
    PRODUCT,
    REDUCTION,
    RMS_NORMALISE_FLOP,
    Extension,
    Number,
    OpRule,
    attention_flop,
    rows,
)

MICROSOFT = "com.microsoft"

# FLOPs and traffic


def _q_gemm_flop(view: NodeView) -> Number:
    """The integer product, its bias, and the scale of the result."""
    return matmul(view) + (view.has(6) + 1) * view.out_elements


def _skip_flop(per_element: int) -> Formula:
    """Input plus skip, plus a bias where there is one, then normalised."""

    def formula(view: NodeView) -> Number:
        bias = 4 if view.op_type == "SkipLayerNormalization" else 3
        return (per_element + 1 + view.has(bias)) * view.out_elements

    return formula


def _experts_flop(view: NodeView) -> Number:
    """Each token passes k experts: two or three products of [hidden, inner] and the activation."""
    x, first = view.shape(0), view.shape(2)
    hidden = x[-1]
    tokens = view.in_elements(0) // max(hidden, 1)
    # Weights are [experts, hidden, inner] or its transpose; packed forms hold two numbers a byte.
    inner = math.prod(first[1:]) // max(hidden, 1)
    if view.op_type == "QMoE":
        inner = inner * 8 // int(view.attribute("expert_weight_bits", 4))
    third = 2 if view.has(6) else 1
    return tokens * int(view.attribute("k", 1)) * (2.0 * hidden * inner * (1 + third) + 5 * inner)


def _n_bits_flop(view: NodeView) -> Number:
    """The product, and two operations per weight to expand it from its few bits."""
    inner, columns = int(view.attribute("K")), int(view.attribute("N"))
    return 2.0 * view.out_elements * inner + 2.0 * inner * columns


def _dynamic_flop(view: NodeView) -> Number:
    """Range and quantisation of the input, the product, scale and bias."""
    return matmul(view) + 5 * view.in_elements(0) + (1 + view.has(4)) * view.out_elements


def _attention_flop(view: NodeView) -> Number:
    """Keys are counted from `present` if it is made, else from the key itself."""
    batch, queries, width = view.out_shape
    heads, key = int(view.attribute("num_heads", 1)), view.shape(1)
    present = view.outputs[1] if len(view.outputs) > 1 else None
    if isinstance(present, Tensor):
        keys = present.shape[2]
    else:
        keys = (key[2] if len(key) == 4 else key[1]) if key else queries
    size = width // heads
    return attention_flop(batch, heads, queries, keys, size, size)


def _embed_bytes(view: NodeView) -> float:
    """EmbedLayerNormalization reads rows of its tables, not the tables."""
    output = view.outputs[0]
    return (
        3.0 * (output.bytes if output is not None else 0)
        + view.written_bytes
        + input_bytes(view, 0)
    )


def _gather_block_bytes(view: NodeView) -> float:
    """Quantised rows: the share of the table that its requested rows are."""
    table, output = view.tensor(0), view.outputs[0]
    if table is None or not isinstance(output, Tensor):
        return all_bytes(view)
    rows = output.elements / max(output.shape[-1], 1)
    row_bytes = table.bytes / max(math.prod(table.shape[:-1]), 1)
    return output.bytes + rows * row_bytes + input_bytes(view, 1)


def _experts_bytes(view: NodeView) -> float:
    """A mixture of experts reads the weights of the experts that its tokens reach, at most all."""
    x = view.tensor(0)
    experts = view.tensor(2)
    if x is None or experts is None:
        return all_bytes(view)
    count, tokens = experts.shape[0], x.elements // max(x.shape[-1], 1)
    reached = min(count, tokens * int(view.attribute("k", 1)))
    weights = view.read_bytes - x.bytes
    return x.bytes + weights * reached / max(count, 1) + view.written_bytes


# Shapes


def _like(*indices: int) -> ShapeRule:
    """Outputs that are like the inputs of these indices, one output each."""

    def rule(view: NodeView) -> list[Inferred]:
        return [view.tensor(index) or Partial() for index in indices]

    return rule


def _broadcast_of(*indices: int) -> ShapeRule:
    def rule(view: NodeView) -> list[Inferred]:
        tensors = [t for index in indices if (t := view.tensor(index)) is not None]
        return [Tensor(tensors[0].dtype, broadcast(*(t.shape for t in tensors)))]

    return rule


def _skip_normalization(view: NodeView) -> list[Inferred]:
    x = need(view, 0)
    statistics = Tensor(data_type("FLOAT"), (*x.shape[:-1], 1))
    return [x, statistics, statistics, x]


def _normalization(view: NodeView) -> list[Inferred]:
    x, axis = need(view, 0), view.attribute("axis", -1)
    axis %= len(x.shape)
    statistics = Tensor(data_type("FLOAT"), (*x.shape[:axis], *(1 for _ in x.shape[axis:])))
    return [x, statistics, statistics]


def _attention(view: NodeView) -> list[Inferred]:
    """Attention: input [B, S, C], weights [C, Q + K + V], bias; the output has V's width."""
    x, weights = need(view, 0), need(view, 1)
    widths = view.attribute("qkv_hidden_sizes")
    width = int(widths[2]) if widths else weights.shape[-1] // 3
    heads = view.attribute("num_heads", 1)
    past = view.tensor(4)
    length = x.shape[1] + (past.shape[3] if past is not None else 0)
    present = Tensor(x.dtype, (2, x.shape[0], heads, length, width // heads))
    return [Tensor(x.dtype, (*x.shape[:2], width)), present]


def _q_attention(view: NodeView) -> list[Inferred]:
    x, weights, scale = need(view, 0), need(view, 1), need(view, 3)
    return [Tensor(scale.dtype, (*x.shape[:2], weights.shape[-1] // 3))]


def _multi_head_attention(view: NodeView) -> list[Inferred]:
    """query [B, S, C]; key and value [B, L, C] or [B, heads, L, size]; packed forms have rank 5."""
    query, heads = need(view, 0), view.attribute("num_heads", 1)
    key, value = view.tensor(1), view.tensor(2)
    batch, steps = query.shape[:2]
    width = query.shape[2] if len(query.shape) == 3 else heads * query.shape[-1]
    length = steps
    for given in (key, value):
        if given is not None:
            length = given.shape[2] if len(given.shape) == 4 else given.shape[1]
    if value is not None:
        width = value.shape[2] if len(value.shape) == 3 else heads * value.shape[-1]
    past = view.tensor(6)
    total = length + (past.shape[2] if past is not None else 0)
    present = Tensor(query.dtype, (batch, heads, total, width // heads))
    return [Tensor(query.dtype, (batch, steps, width)), present, present]


def _group_query_attention(view: NodeView) -> list[Inferred]:
    """query [B, S, heads * size], or all of Q, K, V in it; the cache grows to the total length."""
    query = need(view, 0)
    heads, kv_heads = view.attribute("num_heads", 1), view.attribute("kv_num_heads", 1)
    batch, steps, width = query.shape
    if view.tensor(1) is None:
        width = width * heads // (heads + 2 * kv_heads)
    past = view.tensor(3)
    total = view.data(6)
    length = steps if past is None else max(past.shape[2], steps)
    if total is not None and total.size == 1:
        length = max(length, int(total.reshape(-1)[0]))
    present = Tensor(query.dtype, (batch, kv_heads, length, width // heads))
    return [Tensor(query.dtype, (batch, steps, width)), present, present]


def _embed_layer_normalization(view: NodeView) -> list[Inferred]:
    ids, table = need(view, 0), need(view, 2)
    out = Tensor(table.dtype, (*ids.shape, table.shape[-1]))
    return [out, Tensor(data_type("INT32"), ids.shape[:1]), out]


def _matmul_n_bits(view: NodeView) -> list[Inferred]:
    x = need(view, 0)
    return [Tensor(x.dtype, (*x.shape[:-1], int(view.attribute("N"))))]


def _fused_matmul(view: NodeView) -> list[Inferred]:
    a, b = need(view, 0), need(view, 1)
    left, right = list(a.shape), list(b.shape)
    if view.attribute("transA", 0):
        left[-2:] = left[:-3:-1]
    if view.attribute("transB", 0):
        right[-2:] = right[:-3:-1]
    return [Tensor(a.dtype, matmul_shape(tuple(left), tuple(right)))]


def _matmul_to_float(*, data: int, dtype_from: int) -> ShapeRule:
    """A quantised product whose output has the type of input `dtype_from`."""

    def rule(view: NodeView) -> list[Inferred]:
        a, b, scale = need(view, 0), need(view, data), need(view, dtype_from)
        return [Tensor(scale.dtype, matmul_shape(a.shape, b.shape))]

    return rule


def _q_gemm(view: NodeView) -> list[Inferred]:
    a, b = need(view, 0), need(view, 3)
    rows = a.shape[1] if view.attribute("transA", 0) else a.shape[0]
    columns = b.shape[0] if view.attribute("transB", 0) else b.shape[1]
    out = view.tensor(8)  # the output's zero point; without it the output is float
    return [Tensor(data_type("FLOAT") if out is None else out.dtype, (rows, columns))]


def _q_linear_concat(view: NodeView) -> list[Inferred]:
    """Y_scale, Y_zero_point, then (x, scale, zero point) of each operand."""
    operands = [t for i in range(2, len(view.inputs), 3) if (t := view.tensor(i)) is not None]
    axis = view.attribute("axis", 0)
    shape = list(operands[0].shape)
    shape[axis] = sum(t.shape[axis] for t in operands)
    return [Tensor(operands[0].dtype, tuple(shape))]


def _q_global_average_pool(view: NodeView) -> list[Inferred]:
    x = need(view, 0)
    last = view.attribute("channels_last", 0)
    ones = (1,) * (len(x.shape) - 2)
    shape = (x.shape[0], *ones, x.shape[-1]) if last else (*x.shape[:2], *ones)
    return [Tensor(x.dtype, shape)]


def _quantize(view: NodeView) -> list[Inferred]:
    x, zero = need(view, 0), view.tensor(2)
    return [Tensor(data_type("UINT8") if zero is None else zero.dtype, x.shape)]


def matmul_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a NumPy matrix product.

    >>> matmul_shape((8, 2, 3), (3, 4))
    (8, 2, 4)
    """
    rows, columns = a[-2:-1] if len(a) > 1 else (), b[-1:] if len(b) > 1 else ()
    return (*broadcast(a[:-2], b[:-2]), *rows, *columns)


def _gathered_blocks(view: NodeView) -> list[Inferred]:
    """GatherBlockQuantized: rows of a quantised table, as numbers of the scales' type."""
    table, ids, scales = need(view, 0), need(view, 1), need(view, 2)
    axis = view.attribute("gather_axis", 0) % len(table.shape)
    shape = list(table.shape)
    if table.dtype == data_type("UINT8"):
        shape[-1] = shape[-1] * 8 // int(view.attribute("bits", 4))
    return [Tensor(scales.dtype, (*shape[:axis], *ids.shape, *shape[axis + 1 :]))]


def _rfft(view: NodeView) -> list[Inferred]:
    x, axes = need(view, 0), int(view.attribute("signal_ndim", 1))
    return [Tensor(x.dtype, (*x.shape[:-axes], *x.shape[-axes:-1], x.shape[-1] // 2 + 1, 2))]


def _irfft(view: NodeView) -> list[Inferred]:
    x = need(view, 0)
    return [Tensor(x.dtype, (*x.shape[:-2], 2 * (x.shape[-2] - 1)))]


def _bias_split_gelu(view: NodeView) -> list[Inferred]:
    x = need(view, 0)
    return [Tensor(x.dtype, (*x.shape[:-1], x.shape[-1] // 2))]


def _dynamic_lstm(view: NodeView) -> list[Inferred]:
    x, recurrent = need(view, 0), need(view, 2)
    hidden, directions = int(view.attribute("hidden_size", recurrent.shape[1])), recurrent.shape[0]
    state = Tensor(x.dtype, (directions, x.shape[1], hidden))
    return [Tensor(x.dtype, (x.shape[0], directions, x.shape[1], hidden)), state, state]


def _shared(name: str, shape: ShapeRule) -> OpRule:
    """The row of a standard operator, with the shapes that it has in com.microsoft."""
    return dataclasses.replace(STANDARD[name], shape=shape, domains=(MICROSOFT,))


def _extending(row: OpRule, op_type: str, version: int, inputs: int, attributes: str) -> OpRule:
    extension = Extension(op_type, version, inputs, frozenset(attributes.split()))
    return dataclasses.replace(row, extends=extension)


_FIRST = _like(0)
_OURS: dict[str, Any] = {"domains": (MICROSOFT,)}
_WINDOW = "auto_pad dilations group kernel_shape pads strides"
CONTRIB: dict[str, OpRule] = {
    **{name: _shared(name, _FIRST) for name in ("Gelu", "RotaryEmbedding", "Trilu")},
    "LayerNormalization": _shared("LayerNormalization", _normalization),
    "Attention": _shared("Attention", _attention),
    "QuantizeLinear": _shared("QuantizeLinear", _quantize),
    "DequantizeLinear": _shared(
        "DequantizeLinear", lambda v: [Tensor(need(v, 1).dtype, need(v, 0).shape)]
    ),
    "FastGelu": OpRule("", GELU_TANH_FLOP, None, _FIRST, **_OURS),
    **rows("QuickGelu BiasGelu BiasSoftmax", "", 6, shape=_FIRST, **_OURS),
    "BiasAdd": OpRule("", 1, None, _FIRST, **_OURS),
    "BiasSplitGelu": OpRule("", GELU_ERF_FLOP + 3, None, _bias_split_gelu, **_OURS),
    "GemmaRotaryEmbedding": OpRule("", per_input(3), None, _FIRST, **_OURS),
    **rows("QLinearSigmoid QLinearLeakyRelu", "", 9, shape=_FIRST, **_OURS),
    "QLinearSoftmax": OpRule("", 10, None, _FIRST, **_OURS),
    **rows("GatedRelativePositionBias Inverse", shape=_FIRST, **_OURS),
    **rows("MoE QMoE", "", _experts_flop, _experts_bytes, shape=_FIRST, **_OURS),
    "SkipLayerNormalization": OpRule(
        REDUCTION, _skip_flop(NORMALISE_FLOP), None, _skip_normalization, **_OURS
    ),
    "SkipSimplifiedLayerNormalization": OpRule(
        "", _skip_flop(RMS_NORMALISE_FLOP), None, _skip_normalization, **_OURS
    ),
    # ONNX Runtime's exporter writes it without a domain, too.
    "SimplifiedLayerNormalization": OpRule(
        "", RMS_NORMALISE_FLOP, None, _normalization, ("", MICROSOFT)
    ),
    "GroupNorm": OpRule("", NORMALISE_FLOP, None, _FIRST, **_OURS),
    "SkipGroupNorm": OpRule("", NORMALISE_FLOP + 1, None, lambda v: [need(v, 0)] * 2, **_OURS),
    "EmbedLayerNormalization": OpRule(
        "", lambda view: (NORMALISE_FLOP + 1 + view.has(4)) * view.out_elements, _embed_bytes,
        _embed_layer_normalization, **_OURS
    ),
    "QAttention": OpRule("", fused_attention, None, _q_attention, integer=True, **_OURS),
    **rows(
        "MultiHeadAttention DecoderMaskedMultiHeadAttention", "", _attention_flop,
        shape=_multi_head_attention, kernel=ATTENTION, **_OURS,
    ),
    "GroupQueryAttention": OpRule(
        "", _attention_flop, None, _group_query_attention, kernel=ATTENTION, **_OURS
    ),
    "SparseAttention": OpRule("", _attention_flop, None, _group_query_attention, **_OURS),
    **rows("MatMulNBits MatMulBnb4", "", _n_bits_flop, shape=_matmul_n_bits, **_OURS),
    **rows(
        "FusedMatMul TransposeMatMul FusedMatMulActivation", "", matmul, shape=_fused_matmul,
        kernel=PRODUCT, **_OURS,
    ),
    "MatMulIntegerToFloat": OpRule(
        "", matmul, None, _matmul_to_float(data=1, dtype_from=2), integer=True, **_OURS
    ),
    "DynamicQuantizeMatMul": OpRule(
        "", _dynamic_flop, None, _matmul_to_float(data=1, dtype_from=0), integer=True, **_OURS
    ),
    "DynamicQuantizeLSTM": OpRule(
        "", recurrent(4, LSTM_FLOP), None, _dynamic_lstm, integer=True, **_OURS
    ),
    "QGemm": OpRule("", _q_gemm_flop, None, _q_gemm, integer=True, **_OURS),
    **rows("QLinearAdd QLinearMul", "", 5, shape=_broadcast_of(0, 3), integer=True, **_OURS),
    "QLinearConcat": OpRule("", 0, None, _q_linear_concat, **_OURS),
    "QLinearGlobalAveragePool": OpRule(
        "", per_input(1), None, _q_global_average_pool, integer=True, **_OURS
    ),
    "GatherBlockQuantized": OpRule("", 0, _gather_block_bytes, _gathered_blocks, **_OURS),
    "Rfft": OpRule(shape=_rfft, **_OURS),
    "Irfft": OpRule(shape=_irfft, **_OURS),
    # Inferred as the standard operators that they extend.
    "FusedConv": _extending(STANDARD["Conv"], "Conv", 11, 3, _WINDOW),
    "FusedGemm": _extending(STANDARD["Gemm"], "Gemm", 13, 3, "alpha beta transA transB"),
    "QLinearAveragePool": _extending(
        OpRule("", pool, integer=True), "AveragePool", 11, 1,
        "auto_pad kernel_shape pads strides ceil_mode count_include_pad",
    ),
    "QLinearReduceMean": _extending(
        OpRule("", per_input(1)), "ReduceMean", 13, 1, "axes keepdims"
    ),
    "GridSample": _extending(
        STANDARD["GridSample"], "GridSample", 16, 2, "mode padding_mode align_corners"
    ),
    "QLinearConv": _extending(STANDARD["QLinearConv"], "QLinearConv", 10, 9, _WINDOW),
    "Pad": _extending(STANDARD["Pad"], "Pad", 13, 3, "mode"),
    "Unique": _extending(STANDARD["Unique"], "Unique", 11, 1, ""),
}  # fmt: skip
