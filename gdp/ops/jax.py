"""JAX primitives: FLOPs, memory traffic and fusion class, from shapes alone.

An element-wise primitive counts one operation per output element, whatever it computes; moving
data counts none. Traffic is what is read plus what is written, except where a primitive touches
only part of its operand (gather, slices, in-place updates) or nothing (bitcasts).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from gdp.ops.rule import (
    CONVOLUTION,
    ELEMENTWISE,
    EXPERTS,
    PRODUCT,
    REDUCTION,
    VIEW,
    OpRule,
    Shapes,
    convolution_flop,
    expert_bytes,
    gathered_bytes,
    matmul_flop,
    no_traffic,
    rows,
)


def _dot_general(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    (contracted, _), _ = params["dimension_numbers"]
    inner = math.prod(ins[0].dims[axis] for axis in contracted)
    return matmul_flop(1, outs[0].size, 1, inner)


def _ragged_dot(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    """[M, K] times [G, K, N], each row with the matrix of its group."""
    return matmul_flop(1, ins[0].dims[-2], ins[1].dims[-1], ins[0].dims[-1])


def _ragged_bytes(ins: Shapes, outs: Shapes) -> float:
    """Of the matrices [G, K, N] those that rows [M, K] reach; all of them in a gradient's product,
    whose groups are no axis of an operand."""
    if len(ins[1].dims) == 3:
        return expert_bytes(ins, outs)
    return sum(s.nbytes for s in (*ins, *outs))


def _convolution(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    out_axis, in_axis, *spatial = params["dimension_numbers"].rhs_spec
    kernel = math.prod(ins[1].dims[axis] for axis in spatial)
    del out_axis
    # A dilated input is mostly zeros (the gradient of a strided convolution), which are not added.
    zeros = math.prod(params["lhs_dilation"] or (1,))
    return convolution_flop(outs[0].size, ins[1].dims[in_axis], kernel) / zeros


def _window(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    return outs[0].size * math.prod(params["window_dimensions"])


def _sort(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    axis = params.get("dimension", -1)
    length = ins[0].dims[axis] if ins[0].dims else 1
    return ins[0].size * max(1.0, math.log2(max(length, 1)))


def _fft(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
    """5 n log2 n for a complex transform, half of that for a real one."""
    points = math.prod(params["fft_lengths"])
    batch = max(ins[0].size, outs[0].size) / max(points, 1)
    half = 0.5 if "RFFT" in str(params.get("fft_type", "")).upper() else 1.0
    return half * batch * 5 * points * math.log2(max(points, 2))


def _linear_algebra(factor: float) -> Callable[..., float]:
    def flop(params: Mapping[str, Any], ins: Shapes, outs: Shapes) -> float:
        *batch, rows, columns = ins[0].dims
        return factor * math.prod(batch) * rows * columns * min(rows, columns)

    return flop


def _updates_in_place(ins: Shapes, outs: Shapes) -> int:
    """Operand, indices, updates: the touched part is read and written, the indices are read."""
    return 3 * ins[2].nbytes + ins[1].nbytes


JAX: dict[str, OpRule] = {
    # Bytes stay where they are.
    **rows(
        "reshape squeeze expand_dims stop_gradient bitcast_convert_type copy_p sharding_constraint "
        "optimization_barrier name",
        VIEW, 0, no_traffic,
    ),
    **rows(
        "transpose broadcast_in_dim convert_element_type copy rev reduce_precision real imag "
        "device_put unstack",
        VIEW, 0,
    ),
    # As many bytes are read as are written, however large the operand is.
    **rows(
        "slice dynamic_slice split", VIEW, 0, lambda ins, outs: 2 * sum(s.nbytes for s in outs)
    ),
    "iota": OpRule(VIEW, 0, lambda ins, outs: outs[0].nbytes),
    **rows(
        "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex "
        "conj cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt "
        "integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg "
        "bessel_i0e bessel_i1e igamma igamma_grad_a igammac polygamma regularized_incomplete_beta "
        "zeta nextafter not or population_count pow random_wrap random_unwrap rem round rsqrt "
        "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
        "sub tan tanh xor add_jaxvals",
        ELEMENTWISE,
    ),
    **rows(
        "random_bits threefry2x32 random_seed random_fold_in random_split rng_bit_generator "
        "rng_uniform",
        # Per word of threefry: 20 rounds of add, rotate, xor, and the key schedule.
        ELEMENTWISE, lambda params, ins, outs: 100 * max((s.size for s in outs), default=0),
    ),
    **rows(
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
        "reduce_xor reduce",
        REDUCTION,
    ),
    **rows("pad concatenate stack", REDUCTION, 0),
    "gather": OpRule("", 0, gathered_bytes),
    "dynamic_update_slice": OpRule("", 0, lambda ins, outs: 2 * ins[1].nbytes),
    "scatter": OpRule("", 0, _updates_in_place),
    **rows(
        "scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min scatter-max "
        "scatter_max",
        "", lambda params, ins, outs: ins[2].size, _updates_in_place,
    ),
    "dot_general": OpRule("", _dot_general, kernel=PRODUCT),
    **rows("ragged_dot ragged_dot_general", "", _ragged_dot, _ragged_bytes, kernel=EXPERTS),
    "conv_general_dilated": OpRule("", _convolution, kernel=CONVOLUTION),
    **rows("reduce_window_max reduce_window_min reduce_window_sum reduce_window", "", _window),
    "select_and_scatter_add": OpRule(
        "", lambda params, ins, outs: ins[0].size * math.prod(params["window_dimensions"])
    ),
    "select_and_gather_add": OpRule(ELEMENTWISE, _window),
    "sort": OpRule("", _sort),
    **rows("top_k approx_top_k", "",
           lambda params, ins, outs: ins[0].size * max(1.0, math.log2(max(params["k"], 1) + 1))),
    "fft": OpRule("", _fft),
    "cholesky": OpRule("", _linear_algebra(1 / 3)),
    "lu": OpRule("", _linear_algebra(2 / 3)),
    **rows("qr geqrf householder_product", "", _linear_algebra(2.0)),
    "svd": OpRule("", _linear_algebra(12.0)),
    "eigh": OpRule("", _linear_algebra(9.0)),
    "eig": OpRule("", _linear_algebra(25.0)),
    "triangular_solve": OpRule("", lambda params, ins, outs: ins[1].size * ins[0].dims[-1]),
}  # fmt: skip
