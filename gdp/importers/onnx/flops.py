"""FLOPs of ONNX operators: one table from the operator's name to a formula of its shapes."""

import math
from collections.abc import Callable

from gdp.importers import op_costs
from gdp.importers.onnx.flops_attention import (
    attention,
    fused_attention,
    linear_attention,
    multi_head_attention,
)
from gdp.importers.onnx.shapes.types import NodeView, Tensor
from gdp.importers.op_costs import Number

Formula = Callable[[NodeView], Number]


def _per_output(flop: Number) -> Formula:
    return lambda view: flop * view.out_elements


def _per_input(flop: Number) -> Formula:
    return lambda view: flop * view.in_elements(0)


def _variadic(view: NodeView) -> Number:
    """n operands are combined by n - 1 operations; a mean also divides."""
    count = sum(fact is not None for fact in view.inputs)
    return (count - 1 + (view.op_type == "Mean")) * view.out_elements


def _convolution(*, weight: int, bias: int | None) -> Formula:
    """Inputs by place; weights are [M, C / group, *kernel], so groups need no further thought."""

    def formula(view: NodeView) -> Number:
        weights = view.shape(weight)
        biased = bias is not None and view.has(bias)
        return op_costs.convolution_flop(
            view.out_elements, weights[1], math.prod(weights[2:]), biased
        )

    return formula


def _transposed_convolution(view: NodeView) -> Number:
    """Each input element meets the kernel [C, M / group, *kernel] once."""
    weights = view.shape(1)
    flop = op_costs.convolution_flop(view.in_elements(0), weights[1], math.prod(weights[2:]))
    return flop + (view.out_elements if view.has(2) else 0)


def _deformable_convolution(view: NodeView) -> Number:
    """A convolution over samples that are blended bilinearly, and scaled where there is a mask."""
    weights, out = view.shape(1), view.out_shape
    kernel, channels = math.prod(weights[2:]), view.shape(0)[1]
    samples = out[0] * channels * kernel * math.prod(out[2:])
    blend = op_costs.interpolation_flop(len(weights) - 2, "linear")
    product = op_costs.convolution_flop(view.out_elements, weights[1], kernel, bias=view.has(3))
    return product + samples * (blend + view.has(4))


def _causal_convolution(view: NodeView) -> Number:
    """Depthwise, with an optional Swish on top."""
    flop = op_costs.convolution_flop(view.out_elements, 1, view.shape(1)[-1], bias=view.has(2))
    active = view.attribute("activation", "none") not in ("none", "")
    return flop + (op_costs.SIGMOID_FLOP + 1) * view.out_elements * active


def _matmul(a: int = 0, *, transposed: str = "transA") -> Formula:
    """The output's elements times the inner size, the last axis of operand `a`."""

    def formula(view: NodeView) -> Number:
        shape = view.shape(a)
        inner = shape[-2 if view.attribute(transposed, 0) and len(shape) > 1 else -1]
        return 2.0 * view.out_elements * inner

    return formula


def _gemm(view: NodeView) -> Number:
    """alpha A B + beta C; factors of one are free."""
    scaled = (view.attribute("alpha", 1.0) != 1.0) + (view.attribute("beta", 1.0) != 1.0)
    return _matmul()(view) + (view.has(2) + scaled) * view.out_elements


def _q_gemm(view: NodeView) -> Number:
    """The integer product, its bias, and the scale of the result."""
    return _matmul()(view) + (view.has(6) + 1) * view.out_elements


def _einsum(view: NodeView) -> Number:
    shapes = [fact.shape for fact in view.inputs if isinstance(fact, Tensor)]
    return op_costs.einsum_flop(str(view.attribute("equation")), shapes)


def _recurrent(gates: int, elementwise: int) -> Formula:
    """X [steps, batch, input] (or batch first), W [directions, gates * hidden, input]."""

    def formula(view: NodeView) -> Number:
        x, recurrent = view.shape(0), view.shape(2)
        directions, hidden = recurrent[0], min(recurrent[1:])
        return op_costs.recurrent_flop(x[0], directions, x[1], x[2], hidden, gates, elementwise)

    return formula


def _pool(view: NodeView) -> Number:
    kernel = view.attribute("kernel_shape") or view.shape(0)[2:]
    return float(view.out_elements * math.prod(kernel))


def _lrn(view: NodeView) -> Number:
    """x / (bias + alpha / size * sum of size squares) ** beta."""
    return float(view.out_elements * (int(view.attribute("size")) + 4))


def _batch_normalization(view: NodeView) -> Number:
    """In inference, scale and shift per channel are known: a multiply and an add per element."""
    return (2.0 if not view.attribute("training_mode", 0) else 7.0) * view.out_elements


def _skip_normalization(per_element: int) -> Formula:
    """Input plus skip, plus a bias where there is one, then normalised."""

    def formula(view: NodeView) -> Number:
        bias = 4 if view.op_type == "SkipLayerNormalization" else 3
        return (per_element + 1 + view.has(bias)) * view.out_elements

    return formula


def _embed_normalization(view: NodeView) -> Number:
    return (op_costs.NORMALISE_FLOP + 1 + view.has(4)) * view.out_elements


def _gelu(view: NodeView) -> Number:
    tanh = view.attribute("approximate", "none") == "tanh"
    return (op_costs.GELU_TANH_FLOP if tanh else op_costs.GELU_ERF_FLOP) * view.out_elements


def _top_k(view: NodeView) -> Number:
    """A heap of k: each element is compared log2 k times."""
    axis = int(view.attribute("axis", -1))
    k = view.out_shape[axis] if view.out_shape else 1
    return view.in_elements(0) * max(1.0, math.log2(max(k, 1)))


def _sort(view: NodeView) -> Number:
    return view.in_elements(0) * math.log2(max(view.in_elements(0), 2))


def _resize(view: NodeView) -> Number:
    before, after = view.shape(0), view.out_shape
    axes = sum(a != b for a, b in zip(before, after, strict=False))
    return view.out_elements * op_costs.interpolation_flop(
        axes, str(view.attribute("mode", "nearest"))
    )


def _grid_sample(view: NodeView) -> Number:
    mode = str(view.attribute("mode", "linear")).removeprefix("bi")
    axes = len(view.shape(0)) - 2
    return view.out_elements * op_costs.interpolation_flop(axes, mode)


def _roi_align(view: NodeView) -> Number:
    """sampling_ratio squared bilinear samples per bin and their sum; adaptive counts as two."""
    samples = int(view.attribute("sampling_ratio", 0) or 2) ** 2
    return view.out_elements * samples * (op_costs.interpolation_flop(2, "linear") + 1)


def _determinant(view: NodeView) -> Number:
    size = view.shape(0)[-1]
    return 2.0 / 3.0 * size**3 * max(view.out_elements, 1)


def _dft(view: NodeView) -> Number:
    axis = view.data(2)
    at = int(axis.reshape(-1)[0]) if axis is not None else int(view.attribute("axis", -2))
    shape = view.shape(0)
    length = max(shape[at], 1)
    return op_costs.fft_flop(math.prod(shape[:-1]) // length, length)


def _stft(view: NodeView) -> Number:
    """A window product and a transform per frame; output [batch, frames, bins, 2]."""
    batch, frames, bins, _ = view.out_shape
    one_sided = view.attribute("onesided", 1)
    length = (bins - 1) * 2 if one_sided else bins
    return op_costs.fft_flop(batch * frames, length) + batch * frames * length


def _rotary(view: NodeView) -> Number:
    """x cos + rotated x sin, over the part of each head that is rotated."""
    return 3.0 * view.in_elements(0)


def _experts(view: NodeView) -> Number:
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


def _matmul_n_bits(view: NodeView) -> Number:
    """The product, and two operations per weight to expand it from its few bits."""
    inner, columns = int(view.attribute("K")), int(view.attribute("N"))
    return 2.0 * view.out_elements * inner + 2.0 * inner * columns


def _dynamic_quantized_matmul(view: NodeView) -> Number:
    """Range and quantisation of the input, the product, scale and bias."""
    return _matmul()(view) + 5 * view.in_elements(0) + (1 + view.has(4)) * view.out_elements


def _dropout(view: NodeView) -> Number:
    """The identity in inference; a draw, a comparison and a product in training."""
    training = view.data(2)
    return 3.0 * view.out_elements * bool(training is not None and training.any())


def _body(view: NodeView) -> Number:
    return view.body[0]


_SIGMOID = op_costs.SIGMOID_FLOP
_ELEMENTWISE: dict[int, tuple[str, ...]] = {
    # Moves, views, conversions and what is known before the run.
    0: ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Shape", "Size", "Constant",
        "ConstantOfShape", "Transpose", "Concat", "Split", "Slice", "Gather", "GatherElements",
        "GatherND", "Scatter", "ScatterElements", "ScatterND", "TensorScatter", "Expand", "Tile",
        "Pad", "Cast", "CastLike", "BitCast", "DepthToSpace", "SpaceToDepth", "Trilu", "EyeLike",
        "OneHot", "Compress", "ReverseSequence", "CenterCropPad", "MaxUnpool", "QLinearConcat",
        "SequenceConstruct", "SequenceEmpty", "SequenceAt", "SequenceInsert", "SequenceErase",
        "SequenceLength", "SplitToSequence", "ConcatFromSequence", "Optional",
        "OptionalGetElement", "OptionalHasElement", "GatherBlockQuantized"),
    1: ("Abs", "Neg", "Ceil", "Floor", "Round", "Sign", "Sqrt", "Reciprocal", "Exp", "Log", "Erf",
        "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Tanh", "Asinh", "Acosh",
        "Atanh", "Relu", "ThresholdedRelu", "Add", "Sub", "Mul", "Div", "Pow", "Mod", "And", "Or",
        "Xor", "Not", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "Equal",
        "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Where", "IsNaN", "IsInf", "Range",
        "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli",
        "BiasAdd", "PRelu"),
    2: ("Clip", "LeakyRelu", "DequantizeLinear", "Shrink"),
    3: ("Softplus", "Softsign", "QuantizeLinear"),
    4: ("Sigmoid", "HardSigmoid", "Elu"),
    5: ("Softmax", "LogSoftmax", "Selu", "Celu", "HardSwish", "Mish", "DynamicQuantizeLinear",
        "QLinearAdd", "QLinearMul"),
    6: ("QuickGelu", "Swish", "SwiGLU", "BiasSoftmax", "BiasGelu"),
    9: ("QLinearSigmoid", "QLinearLeakyRelu"),
    10: ("QLinearSoftmax",),
}  # fmt: skip
_PER_INPUT: dict[int, tuple[str, ...]] = {
    1: ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ArgMax", "ArgMin",
        "CumSum", "CumProd", "GlobalAveragePool", "GlobalMaxPool", "NonZero", "Hardmax", "Col2Im",
        "QLinearGlobalAveragePool", "QLinearReduceMean"),
    2: ("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "GlobalLpPool"),
    3: ("LpNormalization", "ReduceLogSumExp", "GemmaRotaryEmbedding"),
    6: ("SoftmaxCrossEntropyLoss",),
}  # fmt: skip

FLOP: dict[str, Formula] = {
    **{name: _per_output(flop) for flop, names in _ELEMENTWISE.items() for name in names},
    **{name: _per_input(flop) for flop, names in _PER_INPUT.items() for name in names},
    **dict.fromkeys(("Sum", "Max", "Min", "Mean"), _variadic),
    **dict.fromkeys(("Conv", "FusedConv"), _convolution(weight=1, bias=2)),
    "ConvInteger": _convolution(weight=1, bias=None),
    "QLinearConv": _convolution(weight=3, bias=8),
    "ConvTranspose": _transposed_convolution,
    "DeformConv": _deformable_convolution,
    "CausalConvWithState": _causal_convolution,
    **dict.fromkeys(
        ("MatMul", "MatMulInteger", "QLinearMatMul", "FusedMatMul", "TransposeMatMul",
         "FusedMatMulActivation", "MatMulIntegerToFloat"),
        _matmul(),
    ),
    **dict.fromkeys(("Gemm", "FusedGemm"), _gemm),
    "QGemm": _q_gemm,
    "MatMulNBits": _matmul_n_bits,
    "MatMulBnb4": _matmul_n_bits,
    "DynamicQuantizeMatMul": _dynamic_quantized_matmul,
    "Einsum": _einsum,
    "Attention": attention,
    "FlexAttention": attention,
    "QAttention": fused_attention,
    **dict.fromkeys(
        ("MultiHeadAttention", "DecoderMaskedMultiHeadAttention", "GroupQueryAttention",
         "SparseAttention"),
        multi_head_attention,
    ),
    "LinearAttention": linear_attention,
    "RotaryEmbedding": _rotary,
    "RNN": _recurrent(1, 1),
    # sigmoid and tanh per gate, then the blend of old and new state.
    "GRU": _recurrent(3, 2 * _SIGMOID + 1 + 4),
    "LSTM": _recurrent(4, 3 * _SIGMOID + 2 + 4),
    "DynamicQuantizeLSTM": _recurrent(4, 3 * _SIGMOID + 2 + 4),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool", "QLinearAveragePool"), _pool),
    "LRN": _lrn,
    "BatchNormalization": _batch_normalization,
    **dict.fromkeys(
        ("LayerNormalization", "InstanceNormalization", "GroupNormalization", "GroupNorm",
         "MeanVarianceNormalization"),
        _per_output(op_costs.NORMALISE_FLOP),
    ),
    **dict.fromkeys(
        ("RMSNormalization", "SimplifiedLayerNormalization"),
        _per_output(op_costs.RMS_NORMALISE_FLOP),
    ),
    "SkipLayerNormalization": _skip_normalization(op_costs.NORMALISE_FLOP),
    "SkipSimplifiedLayerNormalization": _skip_normalization(op_costs.RMS_NORMALISE_FLOP),
    "SkipGroupNorm": _per_output(op_costs.NORMALISE_FLOP + 1),
    "EmbedLayerNormalization": _embed_normalization,
    "Gelu": _gelu,
    "FastGelu": _per_output(op_costs.GELU_TANH_FLOP),
    "BiasSplitGelu": _per_output(op_costs.GELU_ERF_FLOP + 3),
    "Dropout": _dropout,
    "NegativeLogLikelihoodLoss": lambda view: 3 * view.in_elements(1),  # pick, weigh, add
    "TopK": _top_k,
    "Unique": _sort,
    "Resize": _resize,
    "Upsample": _resize,
    "GridSample": _grid_sample,
    "RoiAlign": _roi_align,
    "Det": _determinant,
    "DFT": _dft,
    "STFT": _stft,
    "MoE": _experts,
    "QMoE": _experts,
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), _body),
}  # fmt: skip
