"""ATen ops of PyTorch: FLOPs, memory traffic and fusion class, from shapes alone.

Products count as `torch.utils.flop_counter` counts them; its registry answers first, see
`gdp.importers.pytorch.listing`. Besides products, the elementary operations of the textbook formula
count, as for the other importers, and an element-wise op counts one per output element. Names that
ATen shares with JAX primitives (add, exp, reshape, ...) have their fusion class from there.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from gdp.ops.rule import (
    ATTENTION,
    CONVOLUTION,
    ELEMENTWISE,
    EXPERTS,
    GATHER,
    GELU_ERF_FLOP,
    GRU_FLOP,
    LINEAR,
    LSTM_FLOP,
    NORMALISE_FLOP,
    PRODUCT,
    REDUCTION,
    RMS_NORMALISE_FLOP,
    SIGMOID_FLOP,
    SOFTMAX,
    SOFTMAX_FLOP,
    VIEW,
    OpRule,
    Shapes,
    attention_flop,
    convolution_flop,
    einsum_flop,
    expert_bytes,
    gathered_bytes,
    matmul_flop,
    no_traffic,
    recurrent_flop,
    rows,
)

Flop = Callable[[Mapping[str, Any], Shapes, Shapes], float]


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


def _times(per_element: float) -> Flop:
    def flop(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
        return per_element * ins[0].size

    return flop


def _bag(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    """Rows are added up, after a product where samples have weights."""
    return ins[1].size * ins[0].dims[-1] * (2.0 if len(ins) > 3 else 1.0)


def _bag_bytes(ins: Shapes, outs: Shapes) -> float:
    """The requested rows, not the table; the rest is read and written once."""
    rows_bytes = ins[1].size * ins[0].dims[-1] * ins[0].itemsize
    return min(rows_bytes, ins[0].nbytes) + sum(s.nbytes for s in (*ins[1:], *outs))


def _written_into_bytes(ins: Shapes, outs: Shapes) -> float:
    """An in-place write, as into a cache: the new values are read and written, and their indices
    read."""
    places = ins[1:-1]
    count = max([ins[-1].size, *(s.size for s in places)])
    written = min(count * ins[0].itemsize, ins[0].nbytes)
    return ins[-1].nbytes + written + sum(s.nbytes for s in places)


ATEN: dict[str, OpRule] = {
    **rows(
        "view _unsafe_view clone contiguous _to_copy to expand expand_as permute t select unbind "
        "chunk alias detach detach_ arange full zeros ones scalar_tensor narrow movedim swapaxes "
        "unflatten lift_fresh_copy",
        VIEW, 0,
    ),
    **rows("full_like zeros_like ones_like new_zeros new_ones new_full", VIEW, 0,
           lambda ins, outs: sum(s.nbytes for s in outs)),
    **rows("empty empty_like", VIEW, 0, no_traffic),
    **rows("new_empty empty_strided", "", 0, no_traffic),
    **rows("embedding index index_select gather take", "", 0, gathered_bytes, kernel=GATHER),
    **rows("select_copy slice_copy narrow_copy", "", 0, gathered_bytes),
    **rows("embedding_bag _embedding_bag _embedding_bag_forward_only", "", _bag, _bag_bytes),
    **rows("index_put index_copy slice_scatter select_scatter", "", 0, _written_into_bytes),
    **rows(
        "stack pad scatter repeat repeat_interleave tile "
        "roll flip linspace eye tril triu meshgrid tril_indices triu_indices broadcast_tensors "
        "new_empty_strided embedding_dense_backward slice_backward select_backward one_hot",
        "", 0,
    ),
    **rows("cat constant_pad_nd", REDUCTION, 0),
    **rows(
        "relu relu6 leaky_relu elu selu celu hardtanh softplus softsign where masked_fill dropout "
        "native_dropout bernoulli clamp_min clamp_max maximum minimum reciprocal rsub addcmul "
        "addcdiv lerp logical_and logical_or logical_not logical_xor bitwise_and bitwise_or "
        "bitwise_not bitwise_xor __and__ __or__ __xor__ __lshift__ __rshift__ floor_divide "
        "remainder fmod trunc frac isnan isinf isfinite gelu_backward silu_backward "
        "sigmoid_backward tanh_backward threshold_backward native_dropout_backward "
        "hardswish_backward hardsigmoid_backward leaky_relu_backward elu_backward "
        "hardtanh_backward polar view_as_complex view_as_real nan_to_num true_divide fused_sgd "
        "fused_adam fused_adamw rand randn rand_like randn_like fill",
        ELEMENTWISE,
    ),
    "silu": OpRule(ELEMENTWISE, _times(SIGMOID_FLOP + 1)),
    "gelu": OpRule(ELEMENTWISE, _times(GELU_ERF_FLOP)),
    "sigmoid": OpRule(ELEMENTWISE, _times(SIGMOID_FLOP)),
    "hardswish": OpRule(ELEMENTWISE, _times(4)),
    "hardsigmoid": OpRule(ELEMENTWISE, _times(3)),
    "mish": OpRule(ELEMENTWISE, _times(6)),
    # With statistics that are known: a scale and a shift.
    "batch_norm": OpRule(ELEMENTWISE, _times(2)),
    **rows(
        "sum mean amax amin prod var std var_mean std_mean any all norm linalg_vector_norm "
        "logsumexp cumsum cumprod diff histc bincount nll_loss nll_loss_forward "
        "nll_loss_backward cross_entropy_loss mse_loss",
        REDUCTION,
    ),
    **rows("softmax _softmax log_softmax _log_softmax _safe_softmax", REDUCTION,
           _times(SOFTMAX_FLOP), kernel=SOFTMAX),
    # A product, its sum, a difference.
    "_softmax_backward_data": OpRule(REDUCTION, _times(3)),
    "_log_softmax_backward_data": OpRule(REDUCTION, _times(4)),
    **rows("layer_norm native_layer_norm group_norm native_group_norm native_batch_norm",
           REDUCTION, _times(NORMALISE_FLOP)),
    "_native_batch_norm_legit": OpRule("", _times(NORMALISE_FLOP)),
    **rows("native_layer_norm_backward native_group_norm_backward native_batch_norm_backward",
           REDUCTION, _times(2 * NORMALISE_FLOP)),
    **rows("rms_norm _fused_rms_norm", REDUCTION, _times(RMS_NORMALISE_FLOP)),
    "linear": OpRule("", _linear, kernel=LINEAR),
    **rows("mm bmm matmul mv", "", _product, kernel=PRODUCT),
    **rows("dot vdot", "", _product),
    **rows("_grouped_mm grouped_mm grouped_mm_fallback", "", _product, expert_bytes,
           kernel=EXPERTS),
    # Of the rows and of the matrices; the gradient comes last.
    "grouped_mm_fallback_backward": OpRule(
        "", lambda params, ins, outs: 4.0 * ins[-1].dims[-1] * outs[0].size
    ),
    **rows("addmm baddbmm addbmm addmv", "", _added_product, kernel=PRODUCT),
    "einsum": OpRule("", _einsum, kernel=PRODUCT),
    "scaled_dot_product_attention": OpRule("", _attention, kernel=ATTENTION),
    **rows("conv1d conv2d conv3d convolution", "", _convolution, kernel=CONVOLUTION),
    **rows("conv_transpose1d conv_transpose2d conv_transpose3d", "", _transposed_convolution,
           kernel=CONVOLUTION),
    **rows("lstm gru rnn_tanh rnn_relu", "", _recurrent),
    "lstm_cell": OpRule("", _cell(4, 2, LSTM_FLOP)),
    "gru_cell": OpRule("", _cell(3, 1, GRU_FLOP)),
    **rows("rnn_tanh_cell rnn_relu_cell", "", _cell(1, 1, 1)),
    "bilinear": OpRule("", _bilinear),
    **rows(
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
        "max_pool2d_with_indices max_pool2d_with_indices_backward",
        "", _pool,
    ),
    **rows("sort argsort topk", "", _sort),
    **rows("unique_dim unique_consecutive _unique _unique2", "",
           lambda params, ins, outs: ins[0].size * max(1.0, math.log2(max(ins[0].size, 2)))),
}  # fmt: skip
