"""FLOPs and memory traffic of one JAX primitive, from shapes alone.

An element-wise primitive counts one operation per output element, whatever it computes; moving
data counts none. Traffic is what is read plus what is written, except where a primitive touches
only part of its operand (gather, slices, in-place updates) or nothing (bitcasts).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gdp.graph.op_classes import ELEMENTWISE, REDUCTIONS, VIEWS, names
from gdp.importers.op_costs import Cost, Shape, convolution_flop, matmul_flop

BITCASTS = names(
    "reshape squeeze expand_dims stop_gradient bitcast_convert_type copy_p optimization_barrier "
    "sharding_constraint name"
)
"""Views that cost nothing at all: the bytes stay where they are."""

_RANDOM_FLOP = 100  # per word of threefry: 20 rounds of add, rotate, xor, and the key schedule
_RANDOM = names(
    "random_bits threefry2x32 random_seed random_fold_in random_split rng_bit_generator rng_uniform"
)
_MOVES = VIEWS | names("pad concatenate stack gather dynamic_update_slice scatter")


def primitive_cost(
    name: str, params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
) -> Cost:
    """The cost of a primitive without sub-programs.

    >>> square = Shape((8, 8), 4)
    >>> dims = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    >>> primitive_cost("dot_general", dims, [square, square], [square])
    Cost(flop=1024.0, traffic_bytes=768.0, known=True)
    """
    moved = float(sum(s.nbytes for s in ins) + sum(s.nbytes for s in outs))
    size = float(max((s.size for s in outs), default=0))
    if name in BITCASTS:
        return Cost(0.0, 0.0)
    if name in _TRAFFIC:
        moved = float(_TRAFFIC[name](ins, outs))
    if name in _FLOP:
        return Cost(float(_FLOP[name](params, ins, outs)), moved)
    if name in _RANDOM:
        return Cost(_RANDOM_FLOP * size, moved)
    if name in _MOVES:
        return Cost(0.0, moved)
    if name in ELEMENTWISE:
        return Cost(size, moved)
    if name in REDUCTIONS or name.startswith("cum"):
        return Cost(float(ins[0].size if ins else size), moved)
    return Cost(size, moved, known=False)


def _dot_general(params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    (contracted, _), _ = params["dimension_numbers"]
    inner = math.prod(ins[0].dims[axis] for axis in contracted)
    return matmul_flop(1, outs[0].size, 1, inner)


def _ragged_dot(params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    """[M, K] times [G, K, N], each row with the matrix of its group."""
    return matmul_flop(1, ins[0].dims[-2], ins[1].dims[-1], ins[0].dims[-1])


def _convolution(params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    out_axis, in_axis, *spatial = params["dimension_numbers"].rhs_spec
    kernel = math.prod(ins[1].dims[axis] for axis in spatial)
    del out_axis
    # A dilated input is mostly zeros (the gradient of a strided convolution): nobody adds them.
    zeros = math.prod(params["lhs_dilation"] or (1,))
    return convolution_flop(outs[0].size, ins[1].dims[in_axis], kernel) / zeros


def _window(params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    return outs[0].size * math.prod(params["window_dimensions"])


def _window_gradient(
    params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
) -> float:
    return ins[0].size * math.prod(params["window_dimensions"])


def _sort(params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    axis = params.get("dimension", -1)
    length = ins[0].dims[axis] if ins[0].dims else 1
    return ins[0].size * max(1.0, math.log2(max(length, 1)))


def _top_k(params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    return ins[0].size * max(1.0, math.log2(max(params["k"], 1) + 1))


def _fft(params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    """5 n log2 n for a complex transform, half of that for a real one."""
    points = math.prod(params["fft_lengths"])
    batch = max(ins[0].size, outs[0].size) / max(points, 1)
    half = 0.5 if "RFFT" in str(params.get("fft_type", "")).upper() else 1.0
    return half * batch * 5 * points * math.log2(max(points, 2))


def _linear_algebra(factor: float) -> Callable[..., float]:
    def flop(params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
        *batch, rows, columns = ins[0].dims
        return factor * math.prod(batch) * rows * columns * min(rows, columns)

    return flop


def _triangular_solve(
    params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
) -> float:
    return ins[1].size * ins[0].dims[-1]


_FLOP: dict[str, Callable[..., float]] = {
    "dot_general": _dot_general,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "reduce_window_sum": _window,
    "reduce_window": _window,
    "select_and_scatter_add": _window_gradient,
    "select_and_gather_add": _window,
    "sort": _sort,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    "fft": _fft,
    "cholesky": _linear_algebra(1 / 3),
    "lu": _linear_algebra(2 / 3),
    "qr": _linear_algebra(2.0),
    "geqrf": _linear_algebra(2.0),
    "householder_product": _linear_algebra(2.0),
    "svd": _linear_algebra(12.0),
    "eigh": _linear_algebra(9.0),
    "eig": _linear_algebra(25.0),
    "triangular_solve": _triangular_solve,
    "scatter-add": lambda params, ins, outs: ins[2].size,
    "scatter_add": lambda params, ins, outs: ins[2].size,
    "scatter_mul": lambda params, ins, outs: ins[2].size,
    "scatter-mul": lambda params, ins, outs: ins[2].size,
    "scatter_min": lambda params, ins, outs: ins[2].size,
    "scatter-min": lambda params, ins, outs: ins[2].size,
    "scatter_max": lambda params, ins, outs: ins[2].size,
    "scatter-max": lambda params, ins, outs: ins[2].size,
}
"""By primitive, from (params, input shapes, output shapes)."""


def _reads_what_it_writes(ins: Sequence[Shape], outs: Sequence[Shape]) -> int:
    return 2 * sum(s.nbytes for s in outs) + sum(s.nbytes for s in ins[1:])


def _updates_in_place(ins: Sequence[Shape], outs: Sequence[Shape]) -> int:
    # operand, indices, updates: the touched part is read and written, the indices are read.
    return 3 * ins[2].nbytes + ins[1].nbytes


_TRAFFIC: dict[str, Callable[..., int]] = {
    "gather": _reads_what_it_writes,
    "dynamic_slice": lambda ins, outs: 2 * outs[0].nbytes,
    "slice": lambda ins, outs: 2 * outs[0].nbytes,
    "split": lambda ins, outs: 2 * sum(s.nbytes for s in outs),
    "dynamic_update_slice": lambda ins, outs: 2 * ins[1].nbytes,
    "iota": lambda ins, outs: outs[0].nbytes,
    "scatter": _updates_in_place,
    "scatter-add": _updates_in_place,
    "scatter_add": _updates_in_place,
    "scatter_mul": _updates_in_place,
    "scatter-mul": _updates_in_place,
    "scatter_min": _updates_in_place,
    "scatter-min": _updates_in_place,
    "scatter_max": _updates_in_place,
    "scatter-max": _updates_in_place,
}
"""By primitive, from (input shapes, output shapes), where it is not simply everything."""
