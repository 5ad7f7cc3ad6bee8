"""FLOPs and memory traffic of one ATen op, from shapes alone.

Products count as `torch.utils.flop_counter` counts them; its registry answers first, see
`gdp.importers.pytorch.listing`. Beside products, the elementary operations of the textbook formula
count, as for the other importers, and an element-wise op counts one per output element.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from gdp.graph.op_classes import VIEWS, names
from gdp.importers.op_costs import (
    GELU_ERF_FLOP,
    NORMALISE_FLOP,
    RMS_NORMALISE_FLOP,
    SIGMOID_FLOP,
    SOFTMAX_FLOP,
    Cost,
    Formulas,
    Shapes,
    attention_flop,
    convolution_flop,
    einsum_flop,
    looked_up_bytes,
    matmul_flop,
    recurrent_flop,
)

Flop = Callable[[Mapping[str, Any], Shapes, Shapes], float]

_MOVES = VIEWS | names(
    "embedding index index_select gather select_copy slice_copy cat stack constant_pad_nd pad "
    "index_put scatter slice_scatter select_scatter repeat repeat_interleave tile roll flip "
    "zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full "
    "new_empty arange linspace eye scalar_tensor tril triu meshgrid tril_indices triu_indices "
    "broadcast_tensors empty_strided new_empty_strided lift_fresh_copy embedding_dense_backward "
    "slice_backward select_backward one_hot"
)


def aten_cost(name: str, params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> Cost:
    """The cost of an op by its ATen name without the overload; `params` are its arguments that are
    no tensors, by the names of its schema.

    >>> x, weight, out = Shape((2, 8), 4), Shape((16, 8), 4), Shape((2, 16), 4)
    >>> aten_cost("linear", {}, [x, weight], [out])
    Cost(flop=512.0, traffic_bytes=704.0, known=True)
    """
    return _FORMULAS.cost(name, params, ins, outs)


def _linear(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    return matmul_flop(1, outs[0].size, 1, ins[0].dims[-1]) + (outs[0].size if ins[2:] else 0)


def _product(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    """Every product of two arrays; the last axis of the first is contracted."""
    return matmul_flop(1, outs[0].size, 1, ins[0].dims[-1])


def _added_product(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    return matmul_flop(1, outs[0].size, 1, ins[1].dims[-1]) + outs[0].size


def _attention(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    *batch, queries, key_size = ins[0].dims
    return attention_flop(math.prod(batch), 1, queries, ins[1].dims[-2], key_size, ins[2].dims[-1])


def _convolution(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    _, per_group, *kernel = ins[1].dims
    bias = len(ins) > 2
    return convolution_flop(outs[0].size, per_group, math.prod(kernel), bias)


def _transposed_convolution(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    _, per_group, *kernel = ins[1].dims
    return convolution_flop(ins[0].size, per_group, math.prod(kernel)) + (
        outs[0].size if ins[2:] else 0
    )


def _recurrent(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    """Every matrix of the cell multiplies once per step and sample."""
    samples = ins[0].size / max(ins[0].dims[-1], 1)
    return 2.0 * samples * sum(s.size for s in ins[1:] if len(s.dims) == 2)


def _cell(gates: int, states: int, elementwise: int) -> Flop:
    """One step: x [batch, input], the states, then the matrices of x and of the hidden state."""

    def flop(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
        *_, hidden = outs[0].dims
        batch = outs[0].size // max(hidden, 1)
        width = ins[1 + states].dims[-1]
        return recurrent_flop(1, 1, batch, width, hidden, gates, elementwise)

    return flop


def _bilinear(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    """Each output of a sample is a matrix between two vectors, and a bias where there is one."""
    _, one, two = ins[2].dims
    return outs[0].size * (2.0 * one * two + 2.0 * one + (1 if ins[3:] else 0))


def _pool(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    kernel = params.get("kernel_size", 1)
    if isinstance(kernel, int):
        kernel = [kernel] * (2 if len(outs[0].dims) > 3 else 1)
    return outs[0].size * math.prod(kernel)


def _einsum(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    return einsum_flop(str(params["equation"]), [s.dims for s in ins])


def _sort(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    length = ins[0].dims[-1] if ins[0].dims else 1
    kept = params.get("k", length)
    return ins[0].size * max(1.0, math.log2(max(min(kept, length), 1) + 1))


def _sort_all(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    return ins[0].size * max(1.0, math.log2(max(ins[0].size, 2)))


def _times(per_element: float) -> Flop:
    def flop(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
        return per_element * ins[0].size

    return flop


_FLOP: dict[str, Flop] = {
    "linear": _linear,
    "addmm": _added_product,
    "baddbmm": _added_product,
    "addbmm": _added_product,
    "addmv": _added_product,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "lstm": _recurrent,
    "gru": _recurrent,
    "rnn_tanh": _recurrent,
    "rnn_relu": _recurrent,
    # As in ONNX: sigmoid and tanh per gate, then the blend of old and new state.
    "lstm_cell": _cell(4, 2, 3 * SIGMOID_FLOP + 2 + 4),
    "gru_cell": _cell(3, 1, 2 * SIGMOID_FLOP + 1 + 4),
    "rnn_tanh_cell": _cell(1, 1, 1),
    "rnn_relu_cell": _cell(1, 1, 1),
    "bilinear": _bilinear,
    **dict.fromkeys(["unique_dim", "unique_consecutive", "_unique", "_unique2"], _sort_all),
    "sort": _sort,
    "argsort": _sort,
    "topk": _sort,
    "softmax": _times(SOFTMAX_FLOP),
    "_softmax": _times(SOFTMAX_FLOP),
    "log_softmax": _times(SOFTMAX_FLOP),
    "_log_softmax": _times(SOFTMAX_FLOP),
    "_safe_softmax": _times(SOFTMAX_FLOP),
    "_softmax_backward_data": _times(3),  # a product, its sum, a difference
    "_log_softmax_backward_data": _times(4),
    "layer_norm": _times(NORMALISE_FLOP),
    "native_layer_norm": _times(NORMALISE_FLOP),
    "native_layer_norm_backward": _times(2 * NORMALISE_FLOP),
    "group_norm": _times(NORMALISE_FLOP),
    "native_group_norm": _times(NORMALISE_FLOP),
    "native_group_norm_backward": _times(2 * NORMALISE_FLOP),
    "rms_norm": _times(RMS_NORMALISE_FLOP),
    "_fused_rms_norm": _times(RMS_NORMALISE_FLOP),
    "batch_norm": _times(2),  # with statistics that are known: a scale and a shift
    "native_batch_norm": _times(NORMALISE_FLOP),
    "_native_batch_norm_legit": _times(NORMALISE_FLOP),
    "native_batch_norm_backward": _times(2 * NORMALISE_FLOP),
    "silu": _times(SIGMOID_FLOP + 1),
    "gelu": _times(GELU_ERF_FLOP),
    "sigmoid": _times(SIGMOID_FLOP),
    "hardswish": _times(4),
    "hardsigmoid": _times(3),
    "mish": _times(6),
    **dict.fromkeys(["mm", "bmm", "matmul", "mv", "dot", "vdot"], _product),
    **dict.fromkeys(["_grouped_mm", "grouped_mm", "grouped_mm_fallback"], _product),
    # Of the rows and of the matrices; the gradient comes last.
    "grouped_mm_fallback_backward": lambda p, ins, outs: 4.0 * ins[-1].dims[-1] * outs[0].size,
    **dict.fromkeys(["conv1d", "conv2d", "conv3d"], _convolution),
    **dict.fromkeys([f"conv_transpose{n}d" for n in (1, 2, 3)], _transposed_convolution),
    **dict.fromkeys(
        ["max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"], _pool
    ),
    **dict.fromkeys(["max_pool2d_with_indices", "max_pool2d_with_indices_backward"], _pool),
}


def _experts(ins: Shapes, outs: Shapes) -> float:
    """Rows [M, K] times the matrices [G, K, N] of their groups: those of at most M are read."""
    share = min(1.0, ins[0].dims[-2] / max(ins[1].dims[0], 1))
    rest = sum(s.nbytes for s in (ins[0], *ins[2:], *outs))
    return share * ins[1].nbytes + rest


_TRAFFIC: dict[str, Callable[[Shapes, Shapes], float]] = {
    **dict.fromkeys(
        ["embedding", "index", "index_select", "gather", "select_copy", "slice_copy"],
        looked_up_bytes,
    ),
    **dict.fromkeys(["_grouped_mm", "grouped_mm", "grouped_mm_fallback"], _experts),
    **dict.fromkeys(["empty", "empty_like", "new_empty", "empty_strided"], lambda ins, outs: 0),
    **dict.fromkeys(
        ["zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"],
        lambda ins, outs: sum(s.nbytes for s in outs),
    ),
}
_FORMULAS = Formulas(_FLOP, _TRAFFIC, _MOVES)
