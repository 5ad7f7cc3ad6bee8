"""Operators of the ONNX standard: FLOPs, memory traffic, fusion class; shapes of sequences.

Traffic is what an unfused kernel reads and writes once: its distinct inputs and its outputs, except
for views, which touch nothing, and for operators that touch a part of an input. Shapes come from
the schemas of the onnx package, except where a row has a shape rule.
"""

import math
from collections.abc import Callable

from gdp.ops.onnx_view import (
    Inferred,
    NodeView,
    Partial,
    ShapeRule,
    Tensor,
    TensorList,
    data_type,
    need,
    tensor_list,
)
from gdp.ops.rule import (
    ATTENTION,
    CONVOLUTION,
    ELEMENTWISE,
    GATHER,
    GELU_ERF_FLOP,
    GELU_TANH_FLOP,
    GRU_FLOP,
    LSTM_FLOP,
    NORMALISE_FLOP,
    PRODUCT,
    REDUCTION,
    RMS_NORMALISE_FLOP,
    SIGMOID_FLOP,
    SOFTMAX,
    VIEW,
    Number,
    OpRule,
    attention_flop,
    convolution_flop,
    einsum_flop,
    fft_flop,
    interpolation_flop,
    matmul_flop,
    no_traffic,
    recurrent_flop,
    rows,
)

Formula = Callable[[NodeView], Number]


def per_input(flop: Number) -> Formula:
    """FLOPs per element of the first input."""
    return lambda view: flop * view.in_elements(0)


# Products


def matmul(view: NodeView) -> Number:
    """The output's elements times the inner size, the last axis of the first operand."""
    shape = view.shape(0)
    inner = shape[-2 if view.attribute("transA", 0) and len(shape) > 1 else -1]
    return 2.0 * view.out_elements * inner


def gemm(view: NodeView) -> Number:
    """alpha A B + beta C; factors of one are free."""
    scaled = (view.attribute("alpha", 1.0) != 1.0) + (view.attribute("beta", 1.0) != 1.0)
    return matmul(view) + (view.has(2) + scaled) * view.out_elements


def _einsum(view: NodeView) -> Number:
    shapes = [fact.shape for fact in view.inputs if isinstance(fact, Tensor)]
    return einsum_flop(str(view.attribute("equation")), shapes)


def convolution(*, weight: int, bias: int | None) -> Formula:
    """Inputs by place; weights are [M, C / group, *kernel], so groups need no further thought."""

    def formula(view: NodeView) -> Number:
        weights = view.shape(weight)
        biased = bias is not None and view.has(bias)
        return convolution_flop(view.out_elements, weights[1], math.prod(weights[2:]), biased)

    return formula


def _transposed_convolution(view: NodeView) -> Number:
    """Each input element meets the kernel [C, M / group, *kernel] once."""
    weights = view.shape(1)
    flop = convolution_flop(view.in_elements(0), weights[1], math.prod(weights[2:]))
    return flop + (view.out_elements if view.has(2) else 0)


def _deformable_convolution(view: NodeView) -> Number:
    """A convolution over samples that are blended bilinearly, and scaled where there is a mask."""
    weights, out = view.shape(1), view.out_shape
    kernel, channels = math.prod(weights[2:]), view.shape(0)[1]
    samples = out[0] * channels * kernel * math.prod(out[2:])
    blend = interpolation_flop(len(weights) - 2, "linear")
    product = convolution_flop(view.out_elements, weights[1], kernel, bias=view.has(3))
    return product + samples * (blend + view.has(4))


def _causal_convolution(view: NodeView) -> Number:
    """Depthwise, with an optional Swish on top."""
    flop = convolution_flop(view.out_elements, 1, view.shape(1)[-1], bias=view.has(2))
    active = view.attribute("activation", "none") not in ("none", "")
    return flop + (SIGMOID_FLOP + 1) * view.out_elements * active


def recurrent(gates: int, elementwise: int) -> Formula:
    """X [steps, batch, input] (or batch first), W [directions, gates * hidden, input]."""

    def formula(view: NodeView) -> Number:
        x, recurrent = view.shape(0), view.shape(2)
        directions, hidden = recurrent[0], min(recurrent[1:])
        return recurrent_flop(x[0], directions, x[1], x[2], hidden, gates, elementwise)

    return formula


# Attention


def _standard_attention(view: NodeView) -> Number:
    """Attention of the standard: [B, heads, S, size], or [B, S, heads * size] with head counts."""
    q, k, v = view.shape(0), view.shape(1), view.shape(2)
    past = view.shape(4)[2] if view.has(4) else 0
    if len(q) == 4:
        batch, heads, queries, size = q
        keys, value_size = k[2] + past, v[-1]
    else:
        heads, kv_heads = int(view.attribute("q_num_heads")), int(view.attribute("kv_num_heads"))
        batch, queries, size = q[0], q[1], q[2] // heads
        keys, value_size = k[1] + past, v[2] // kv_heads
    flop = attention_flop(batch, heads, queries, keys, size, value_size)
    return flop + batch * heads * queries * keys * view.has(3)


def fused_attention(view: NodeView) -> Number:
    """com.microsoft Attention and QAttention: the input projection, then attention."""
    batch, steps, inner = view.shape(0)
    weights, heads = view.shape(1), int(view.attribute("num_heads", 1))
    width = view.out_shape[-1]
    past = view.shape(4)[3] if len(view.shape(4)) == 5 else 0
    key_size = (weights[-1] - width) // 2 // heads
    flop = matmul_flop(1, batch * steps, weights[-1], inner)
    flop += batch * steps * weights[-1]
    return flop + attention_flop(batch, heads, steps, steps + past, key_size, width // heads)


def attention(view: NodeView) -> Number:
    """Attention of the standard, or of com.microsoft."""
    return fused_attention(view) if view.domain == "com.microsoft" else _standard_attention(view)


def _linear_attention(view: NodeView) -> Number:
    """Per step, a state of [key size, value size] per key-value head takes in k v (two operations
    per entry), is decayed (one) and corrected (two) where the rule says so; each query head reads
    its state (two)."""
    heads, kv_heads = int(view.attribute("q_num_heads")), int(view.attribute("kv_num_heads"))
    batch, steps, width = view.shape(0)
    entries = batch * steps * (width // heads) * (view.shape(2)[-1] // kv_heads)
    rule = str(view.attribute("update_rule", "gated_delta"))
    update = 2.0 + ("gated" in rule) + 2.0 * ("delta" in rule)
    return entries * (kv_heads * update + 2.0 * heads)


# Normalisation, pooling, sampling and the rest


def _variadic(view: NodeView) -> Number:
    """n operands are combined by n - 1 operations; a mean also divides."""
    count = sum(fact is not None for fact in view.inputs)
    return (count - 1 + (view.op_type == "Mean")) * view.out_elements


def pool(view: NodeView) -> Number:
    """One operation per element of the window, or of the whole image, for each output."""
    kernel = view.attribute("kernel_shape") or view.shape(0)[2:]
    return float(view.out_elements * math.prod(kernel))


def _lrn(view: NodeView) -> Number:
    """x / (bias + alpha / size * sum of size squares) ** beta."""
    return float(view.out_elements * (int(view.attribute("size")) + 4))


def _batch_normalization(view: NodeView) -> Number:
    """In inference, scale and shift per channel are known: a multiply and an add per element."""
    return (2.0 if not view.attribute("training_mode", 0) else 7.0) * view.out_elements


def _gelu(view: NodeView) -> Number:
    tanh = view.attribute("approximate", "none") == "tanh"
    return (GELU_TANH_FLOP if tanh else GELU_ERF_FLOP) * view.out_elements


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
    return view.out_elements * interpolation_flop(axes, str(view.attribute("mode", "nearest")))


def _grid_sample(view: NodeView) -> Number:
    mode = str(view.attribute("mode", "linear")).removeprefix("bi")
    axes = len(view.shape(0)) - 2
    return view.out_elements * interpolation_flop(axes, mode)


def _roi_align(view: NodeView) -> Number:
    """sampling_ratio squared bilinear samples per bin and their sum; adaptive counts as two."""
    samples = int(view.attribute("sampling_ratio", 0) or 2) ** 2
    return view.out_elements * samples * (interpolation_flop(2, "linear") + 1)


def _determinant(view: NodeView) -> Number:
    size = view.shape(0)[-1]
    return 2.0 / 3.0 * size**3 * max(view.out_elements, 1)


def _dft(view: NodeView) -> Number:
    axis = view.data(2)
    at = int(axis.reshape(-1)[0]) if axis is not None else int(view.attribute("axis", -2))
    shape = view.shape(0)
    length = max(shape[at], 1)
    return fft_flop(math.prod(shape[:-1]) // length, length)


def _stft(view: NodeView) -> Number:
    """A window product and a transform per frame; output [batch, frames, bins, 2]."""
    batch, frames, bins, _ = view.out_shape
    one_sided = view.attribute("onesided", 1)
    length = (bins - 1) * 2 if one_sided else bins
    return fft_flop(batch * frames, length) + batch * frames * length


def _dropout(view: NodeView) -> Number:
    """The identity in inference; a draw, a comparison and a product in training."""
    training = view.data(2)
    return 3.0 * view.out_elements * bool(training is not None and training.any())


# Memory traffic


def all_bytes(view: NodeView) -> float:
    """Each distinct input read and each output written, once."""
    return float(view.read_bytes + view.written_bytes)


def _gather_bytes(view: NodeView) -> float:
    """The requested rows, their copies, and the indices."""
    return 2.0 * view.written_bytes + input_bytes(view, 1)


def _scatter_bytes(view: NodeView) -> float:
    """The data copied, and each update read and written over it."""
    return 2.0 * view.written_bytes + input_bytes(view, 1) + 2.0 * input_bytes(view, 2)


def _dropout_bytes(view: NodeView) -> float:
    """Nothing in inference, where it is the identity, but the output mask."""
    training = view.data(2)
    if training is not None and training.any():
        return all_bytes(view)
    mask = view.outputs[1] if len(view.outputs) > 1 else None
    return float(mask.bytes) if mask is not None else 0.0


def _cast_bytes(view: NodeView) -> float:
    """A cast to the same type is the identity."""
    output, source = view.outputs[0], view.tensor(0)
    same = isinstance(output, Tensor) and source is not None and output.dtype == source.dtype
    return 0.0 if same else all_bytes(view)


def input_bytes(view: NodeView, index: int) -> int:
    """Bytes of input `index`, 0 if omitted."""
    fact = view.inputs[index] if index < len(view.inputs) else None
    return 0 if fact is None else fact.bytes


# Shapes of sequences and optional values, followed tensor by tensor


Runs = tuple[tuple[Tensor, int], ...]


def _same_as_first(view: NodeView) -> list[Inferred]:
    fact = view.inputs[0] if view.inputs else None
    return [TensorList() if fact is None else fact]


def _sequence_of(view: NodeView) -> list[Inferred]:
    return [tensor_list((fact, 1) for fact in view.inputs if isinstance(fact, Tensor))]


def _split_to_sequence(view: NodeView) -> list[Inferred]:
    x, axis = need(view, 0), view.attribute("axis", 0)
    split, size = view.data(1), x.shape[axis]
    if split is None and view.tensor(1) is not None:
        return [Partial()]
    lengths: list[tuple[int, int]]  # (length, how many of it)
    if split is None or split.ndim == 0:
        step = 1 if split is None else int(split)
        if step < 1:
            raise ValueError(f"parts of length {step}")
        lengths = [(step, size // step), (size % step, 1 if size % step else 0)]
    else:
        lengths = [(int(part), 1) for part in split]

    def part(length: int) -> Tensor:
        shape = list(x.shape)
        shape[axis] = length
        if split is None and not view.attribute("keepdims", 1):
            del shape[axis]
        return Tensor(x.dtype, tuple(shape))

    return [tensor_list((part(length), count) for length, count in lengths)]


def _sequence_at(view: NodeView) -> list[Inferred]:
    runs, count, place = _runs(view), _list(view).count, _place(view, 1)
    if place is not None and -count <= place < count:
        return [_split_runs(runs, place)[1][0][0]]
    # Any element will do when all are identical.
    return [runs[0][0] if len(runs) == 1 else Partial()]


def _sequence_insert(view: NodeView) -> list[Inferred]:
    place = _place(view, 2)
    before, after = (_runs(view), ()) if place is None else _split_runs(_runs(view), place)
    return [tensor_list([*before, (need(view, 1), 1), *after])]


def _sequence_erase(view: NodeView) -> list[Inferred]:
    place = _place(view, 1)
    before, after = _split_runs(_runs(view), -1 if place is None else place)
    rest = ((after[0][0], after[0][1] - 1), *after[1:]) if after else ()
    return [tensor_list([*before, *rest])]


def _concat_from_sequence(view: NodeView) -> list[Inferred]:
    runs, axis = _runs(view), view.attribute("axis", 0)
    if not runs:
        return [Partial()]
    first = runs[0][0]
    shape = list(first.shape)
    if view.attribute("new_axis", 0):
        shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, _list(view).count)
    else:
        shape[axis] = sum(item.shape[axis] * count for item, count in runs)
    return [Tensor(first.dtype, tuple(shape))]


def _list(view: NodeView) -> TensorList:
    fact = view.inputs[0]
    return fact if isinstance(fact, TensorList) else TensorList()


def _runs(view: NodeView) -> Runs:
    return _list(view).runs


def _split_runs(runs: Runs, place: int) -> tuple[Runs, Runs]:
    """The runs before a position and those from it on; negative positions count from the end."""
    left = place if place >= 0 else max(place + sum(count for _, count in runs), 0)
    for i, (item, count) in enumerate(runs):
        if left < count:
            return (*runs[:i], (item, left)), ((item, count - left), *runs[i + 1 :])
        left -= count
    return runs, ()


def _place(view: NodeView, index: int) -> int | None:
    data = view.data(index)
    return None if data is None else int(data.reshape(-1)[0])


def _scalar(dtype: str) -> ShapeRule:
    return lambda view: [Tensor(data_type(dtype), ())]


def _identity(view: NodeView) -> list[Inferred]:
    fact = view.inputs[0]
    return [Partial() if fact is None else fact]


STANDARD: dict[str, OpRule] = {
    "Identity": OpRule(VIEW, 0, no_traffic, _identity, ("",)),
    **rows("Reshape Flatten Squeeze Unsqueeze Shape Size Constant", VIEW, 0, no_traffic),
    **rows("Transpose Expand ConstantOfShape EyeLike Split", VIEW, 0),
    **rows("Cast CastLike", VIEW, 0, _cast_bytes),
    # As many bytes are read as are written, however large the input is.
    "Slice": OpRule(VIEW, 0, lambda view: 2.0 * view.written_bytes),
    "Range": OpRule(VIEW, 1),
    "Dropout": OpRule(VIEW, _dropout, _dropout_bytes),
    "BitCast": OpRule("", 0, no_traffic),
    **rows(
        "Concat Tile Pad DepthToSpace SpaceToDepth Trilu OneHot Compress ReverseSequence "
        "CenterCropPad MaxUnpool",
        "", 0,
    ),
    **rows("Gather GatherND", "", 0, _gather_bytes, kernel=GATHER),
    "GatherElements": OpRule("", 0, _gather_bytes),
    **rows("Scatter ScatterElements ScatterND", "", 0, _scatter_bytes),
    "TensorScatter": OpRule(  # a cache updated in place: only the new part moves
        "", 0, lambda view: 2.0 * input_bytes(view, 1) + input_bytes(view, 2)
    ),
    **rows(
        "Abs Neg Ceil Floor Round Sign Sqrt Reciprocal Exp Log Erf Sin Cos Tan Asin Acos Atan Sinh "
        "Cosh Tanh Asinh Acosh Atanh Relu ThresholdedRelu Add Sub Mul Div Pow Mod And Or Xor Not "
        "BitShift BitwiseAnd BitwiseOr BitwiseXor BitwiseNot Equal Less LessOrEqual Greater "
        "GreaterOrEqual Where IsNaN IsInf PRelu",
        ELEMENTWISE, 1,
    ),
    **rows("Clip LeakyRelu DequantizeLinear Shrink", ELEMENTWISE, 2),
    **rows("Softplus Softsign QuantizeLinear", ELEMENTWISE, 3),
    **rows("Sigmoid HardSigmoid Elu", ELEMENTWISE, 4),
    **rows("Selu Celu HardSwish Mish DynamicQuantizeLinear", ELEMENTWISE, 5),
    "Swish": OpRule(ELEMENTWISE, 6),
    "SwiGLU": OpRule("", 6),
    "Gelu": OpRule(ELEMENTWISE, _gelu),
    **rows("Sum Max Min Mean", ELEMENTWISE, _variadic),
    "BatchNormalization": OpRule(ELEMENTWISE, _batch_normalization),
    **rows("RandomNormal RandomNormalLike RandomUniform RandomUniformLike Bernoulli", "", 1),
    **rows(
        "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ArgMax ArgMin", REDUCTION,
        per_input(1),
    ),
    **rows("ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum", REDUCTION, per_input(2)),
    **rows("LpNormalization ReduceLogSumExp", REDUCTION, per_input(3)),
    **rows("Softmax LogSoftmax", REDUCTION, 5, kernel=SOFTMAX),
    **rows(
        "LayerNormalization InstanceNormalization GroupNormalization MeanVarianceNormalization",
        REDUCTION, NORMALISE_FLOP,
    ),
    "RMSNormalization": OpRule(REDUCTION, RMS_NORMALISE_FLOP),
    **rows("CumSum CumProd GlobalAveragePool GlobalMaxPool NonZero Hardmax Col2Im", "",
           per_input(1)),
    "GlobalLpPool": OpRule("", per_input(2)),
    "SoftmaxCrossEntropyLoss": OpRule("", per_input(6)),
    # Pick, weigh, add.
    "NegativeLogLikelihoodLoss": OpRule("", lambda view: 3 * view.in_elements(1)),
    **rows("MaxPool AveragePool LpPool", "", pool),
    "LRN": OpRule("", _lrn),
    "MatMul": OpRule("", matmul, kernel=PRODUCT),
    **rows("MatMulInteger QLinearMatMul", "", matmul, integer=True, kernel=PRODUCT),
    "Gemm": OpRule("", gemm, kernel=PRODUCT),
    "Einsum": OpRule("", _einsum, kernel=PRODUCT),
    "Conv": OpRule("", convolution(weight=1, bias=2), kernel=CONVOLUTION),
    "ConvInteger": OpRule(
        "", convolution(weight=1, bias=None), integer=True, kernel=CONVOLUTION
    ),
    "QLinearConv": OpRule(
        "", convolution(weight=3, bias=8), integer=True, kernel=CONVOLUTION
    ),
    "ConvTranspose": OpRule("", _transposed_convolution, kernel=CONVOLUTION),
    "DeformConv": OpRule("", _deformable_convolution),
    "CausalConvWithState": OpRule("", _causal_convolution),
    **rows("Attention FlexAttention", "", attention, kernel=ATTENTION),
    "LinearAttention": OpRule("", _linear_attention),
    "RotaryEmbedding": OpRule("", per_input(3.0)),
    "RNN": OpRule("", recurrent(1, 1)),
    "GRU": OpRule("", recurrent(3, GRU_FLOP)),
    "LSTM": OpRule("", recurrent(4, LSTM_FLOP)),
    "TopK": OpRule("", _top_k),
    "Unique": OpRule("", _sort),
    **rows("Resize Upsample", "", _resize),
    "GridSample": OpRule("", _grid_sample),
    "RoiAlign": OpRule("", _roi_align),
    "Det": OpRule("", _determinant),
    "DFT": OpRule("", _dft),
    "STFT": OpRule("", _stft),
    **rows("If Loop Scan SequenceMap", "", lambda view: view.body[0], lambda view: view.body[1]),
    "SequenceConstruct": OpRule("", 0, no_traffic, _sequence_of, ("",)),
    "SequenceEmpty": OpRule("", 0, no_traffic, lambda view: [TensorList()], ("",)),
    "SequenceAt": OpRule("", 0, no_traffic, _sequence_at, ("",)),
    "SequenceInsert": OpRule("", 0, no_traffic, _sequence_insert, ("",)),
    "SequenceErase": OpRule("", 0, no_traffic, _sequence_erase, ("",)),
    "SequenceLength": OpRule("", 0, no_traffic, _scalar("INT64"), ("",)),
    "SplitToSequence": OpRule("", 0, None, _split_to_sequence, ("",)),
    "ConcatFromSequence": OpRule("", 0, None, _concat_from_sequence, ("",)),
    # An optional value that is there is taken as the value itself.
    **rows("Optional OptionalGetElement", "", 0, no_traffic, shape=_same_as_first, domains=("",)),
    "OptionalHasElement": OpRule("", 0, no_traffic, _scalar("BOOL"), ("",)),
}  # fmt: skip
