"""Which op types a runtime or compiler fuses with their neighbours, by ONNX, JAX and ATen
name."""

from jaxtyping import Bool
from numpy import array, ndarray

from gdp.graph.op_graph import OpGraph


def names(text: str) -> frozenset[str]:
    """Op types written as words.

    >>> sorted(names("Relu Add"))
    ['Add', 'Relu']
    """
    return frozenset(text.split())


VIEWS = names(
    # ONNX
    "Reshape Flatten Squeeze Unsqueeze Identity Dropout Cast CastLike Transpose Expand Shape Size "
    "Constant ConstantOfShape EyeLike Range Slice Split "
    # JAX
    "reshape squeeze expand_dims transpose broadcast_in_dim convert_element_type copy copy_p rev "
    "slice dynamic_slice iota bitcast_convert_type stop_gradient reduce_precision split "
    "optimization_barrier sharding_constraint real imag device_put unstack name "
    # ATen
    "view _unsafe_view clone contiguous _to_copy to expand expand_as permute t select unbind chunk "
    "alias detach detach_ arange full full_like zeros ones zeros_like ones_like new_zeros new_ones "
    "new_full scalar_tensor empty empty_like narrow movedim swapaxes unflatten lift_fresh_copy"
)
"""Ops that move or relabel data without arithmetic."""

ELEMENTWISE = names(
    # ONNX
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr "
    "BitwiseXor Ceil Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual "
    "HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul "
    "Neg Not Or Pow PRelu Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus "
    "Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor BatchNormalization "
    "QuantizeLinear DequantizeLinear DynamicQuantizeLinear "
    # JAX
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj "
    "cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag "
    "integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg "
    "bessel_i0e bessel_i1e igamma igamma_grad_a igammac polygamma regularized_incomplete_beta "
    "zeta random_split rng_bit_generator rng_uniform "
    "nextafter not or population_count pow random_bits random_wrap random_unwrap random_fold_in "
    "random_seed rem round rsqrt select_and_gather_add select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh "
    "threefry2x32 xor zeros_like add_jaxvals "
    # ATen
    "relu relu6 gelu silu sigmoid leaky_relu elu selu celu mish hardswish hardsigmoid hardtanh "
    "softplus softsign where masked_fill dropout native_dropout bernoulli clamp_min clamp_max "
    "maximum minimum reciprocal rsub addcmul addcdiv lerp logical_and logical_or logical_not "
    "logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ __xor__ "
    "__lshift__ __rshift__ floor_divide remainder fmod trunc frac isnan isinf isfinite "
    "batch_norm gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward "
    "native_dropout_backward hardswish_backward hardsigmoid_backward leaky_relu_backward "
    "elu_backward hardtanh_backward polar view_as_complex view_as_real nan_to_num true_divide "
    "fused_sgd fused_adam fused_adamw rand randn rand_like randn_like fill"
)
"""Ops whose outputs need the same element of their inputs only."""

REDUCTIONS = names(
    # ONNX
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSum ReduceSumSquare ArgMax ArgMin Softmax LogSoftmax LayerNormalization "
    "RMSNormalization GroupNormalization InstanceNormalization LpNormalization "
    "SkipLayerNormalization MeanVarianceNormalization "
    # JAX
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
    "reduce_xor reduce pad concatenate stack "
    # ATen
    "sum mean amax amin prod var std var_mean std_mean any all norm linalg_vector_norm logsumexp "
    "softmax _softmax _safe_softmax log_softmax _log_softmax layer_norm native_layer_norm "
    "group_norm rms_norm native_group_norm _fused_rms_norm cat constant_pad_nd cumsum cumprod "
    "diff histc bincount "
    "_softmax_backward_data _log_softmax_backward_data native_layer_norm_backward "
    "native_group_norm_backward native_batch_norm native_batch_norm_backward nll_loss "
    "nll_loss_forward nll_loss_backward cross_entropy_loss mse_loss"
)
"""Ops that read a whole axis: a compiler fuses them with element-wise ops, not with a matmul."""

_CHEAP = VIEWS | ELEMENTWISE


def is_cheap(graph: OpGraph) -> Bool[ndarray, "N"]:
    """True for views and element-wise ops."""
    return array([op_type in _CHEAP for op_type in graph.op_types], dtype=bool)


def is_reduction(graph: OpGraph) -> Bool[ndarray, "N"]:
    """True for ops that read a whole axis."""
    return array([op_type in REDUCTIONS for op_type in graph.op_types], dtype=bool)
