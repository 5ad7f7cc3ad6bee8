"""Shapes of ONNX Runtime's own operators, which the onnx package has no schema for."""

import dataclasses

import onnx_ir as ir

from gdp.importers.onnx.shapes.types import (
    Inferred,
    NodeView,
    Partial,
    Rule,
    Tensor,
    broadcast,
    need,
)

MICROSOFT = "com.microsoft"
FLOAT, UINT8 = ir.DataType.FLOAT, ir.DataType.UINT8


def contrib_rule(view: NodeView) -> Rule | None:
    """The shape rule of an operator, None where a schema answers or nothing is known."""
    if view.domain == MICROSOFT:
        return _CONTRIB.get(view.op_type)
    return _DEFAULT_DOMAIN.get(view.op_type) if view.domain == "" else None


def standard_twin(view: NodeView) -> NodeView | None:
    """The node as the standard operator that a contrib one extends, for the schema to infer."""
    twin = _TWINS.get(view.op_type) if view.domain == MICROSOFT else None
    if twin is None:
        return None
    op_type, version, num_inputs, attributes = twin
    return dataclasses.replace(
        view,
        domain="",
        op_type=op_type,
        version=version,
        inputs=view.inputs[:num_inputs],
        known=view.known[:num_inputs],
        attributes={k: v for k, v in view.attributes.items() if k in attributes},
    )


def _like(*indices: int) -> Rule:
    """Outputs that are like the inputs of these indices, one output each."""

    def rule(view: NodeView) -> list[Inferred]:
        return [view.tensor(index) or Partial() for index in indices]

    return rule


def _broadcast_of(*indices: int) -> Rule:
    def rule(view: NodeView) -> list[Inferred]:
        tensors = [t for index in indices if (t := view.tensor(index)) is not None]
        return [Tensor(tensors[0].dtype, broadcast(*(t.shape for t in tensors)))]

    return rule


def _skip_normalization(view: NodeView) -> list[Inferred]:
    x = need(view, 0)
    statistics = Tensor(FLOAT, (*x.shape[:-1], 1))
    return [x, statistics, statistics, x]


def _normalization(view: NodeView) -> list[Inferred]:
    x, axis = need(view, 0), view.attribute("axis", -1)
    axis %= len(x.shape)
    statistics = Tensor(FLOAT, (*x.shape[:axis], *(1 for _ in x.shape[axis:])))
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
    return [out, Tensor(ir.DataType.INT32, ids.shape[:1]), out]


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


def _matmul_to_float(*, data: int, dtype_from: int) -> Rule:
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
    return [Tensor(FLOAT if out is None else out.dtype, (rows, columns))]


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
    return [Tensor(UINT8 if zero is None else zero.dtype, x.shape)]


def _dequantize(view: NodeView) -> list[Inferred]:
    return [Tensor(need(view, 1).dtype, need(view, 0).shape)]


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
    if table.dtype == UINT8:
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


def _group_norm(view: NodeView) -> list[Inferred]:
    return [need(view, 0), need(view, 0)]


def _dynamic_lstm(view: NodeView) -> list[Inferred]:
    x, recurrent = need(view, 0), need(view, 2)
    hidden, directions = int(view.attribute("hidden_size", recurrent.shape[1])), recurrent.shape[0]
    state = Tensor(x.dtype, (directions, x.shape[1], hidden))
    return [Tensor(x.dtype, (x.shape[0], directions, x.shape[1], hidden)), state, state]


_FIRST = _like(0)
# ONNX Runtime's exporter writes these without a domain.
_DEFAULT_DOMAIN: dict[str, Rule] = {"SimplifiedLayerNormalization": _normalization}
_CONTRIB: dict[str, Rule] = {
    **dict.fromkeys(
        ("Gelu", "FastGelu", "QuickGelu", "BiasGelu", "BiasAdd", "BiasSoftmax", "RotaryEmbedding",
         "GemmaRotaryEmbedding", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "Trilu",
         "GatedRelativePositionBias", "Inverse", "MoE", "QMoE"),
        _FIRST,
    ),
    "SkipLayerNormalization": _skip_normalization,
    "SkipSimplifiedLayerNormalization": _skip_normalization,
    "SimplifiedLayerNormalization": _normalization,
    "LayerNormalization": _normalization,
    "GroupNorm": _FIRST,
    "SkipGroupNorm": _group_norm,
    "Attention": _attention,
    "QAttention": _q_attention,
    "MultiHeadAttention": _multi_head_attention,
    "DecoderMaskedMultiHeadAttention": _multi_head_attention,
    "GroupQueryAttention": _group_query_attention,
    "SparseAttention": _group_query_attention,
    "EmbedLayerNormalization": _embed_layer_normalization,
    "MatMulNBits": _matmul_n_bits,
    "MatMulBnb4": _matmul_n_bits,
    "GatherBlockQuantized": _gathered_blocks,
    "FusedMatMul": _fused_matmul,
    "TransposeMatMul": _fused_matmul,
    "FusedMatMulActivation": _fused_matmul,
    "DynamicQuantizeMatMul": _matmul_to_float(data=1, dtype_from=0),
    "MatMulIntegerToFloat": _matmul_to_float(data=1, dtype_from=2),
    "DynamicQuantizeLSTM": _dynamic_lstm,
    "QGemm": _q_gemm,
    "QLinearAdd": _broadcast_of(0, 3),
    "QLinearMul": _broadcast_of(0, 3),
    "QLinearConcat": _q_linear_concat,
    "QLinearGlobalAveragePool": _q_global_average_pool,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "BiasSplitGelu": _bias_split_gelu,
    "Rfft": _rfft,
    "Irfft": _irfft,
}  # fmt: skip
_WINDOW = {"auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"}
# contrib operator: standard operator, operator set, inputs passed on, attributes passed on
_TWINS: dict[str, tuple[str, int, int, set[str]]] = {
    "FusedConv": ("Conv", 11, 3, _WINDOW),
    "FusedGemm": ("Gemm", 13, 3, {"alpha", "beta", "transA", "transB"}),
    "QLinearAveragePool": (
        "AveragePool", 11, 1, _WINDOW - {"group", "dilations"} | {"ceil_mode", "count_include_pad"},
    ),
    "GridSample": ("GridSample", 16, 2, {"mode", "padding_mode", "align_corners"}),
    "QLinearReduceMean": ("ReduceMean", 13, 1, {"axes", "keepdims"}),
    "QLinearConv": ("QLinearConv", 10, 9, _WINDOW),
    "Pad": ("Pad", 13, 3, {"mode"}),
    "Unique": ("Unique", 11, 1, set()),
}  # fmt: skip
