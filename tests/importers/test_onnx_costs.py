"""FLOPs and bytes of single operators, worked out by hand beside each."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_tiny import BOOL, HALF, INT8, INT32, INT64, UINT8, ints, model, node, save, zeros

from gdp.graph.op_graph import OpGraph
from gdp.importers.onnx.model import load_onnx_model

# One row per case: operator, inputs (a shape, a (dtype, shape) pair, an array for a weight, None
# for left out), attributes, FLOPs, bytes of traffic. float32 is 4 bytes.
IMAGE = [1, 3, 8, 8]
CASES: dict[str, tuple[str, list[Any], dict[str, Any], float, float]] = {
    # 1*4*8*8 = 256 outputs, each 3*3*3 = 27 multiply-adds; reads 192 + 108, writes 256 floats.
    "conv": ("Conv", [IMAGE, zeros(4, 3, 3, 3)], {"pads": [1, 1, 1, 1]}, 256 * 54, 4 * 556),
    "conv bias": (
        "Conv",
        [IMAGE, zeros(4, 3, 3, 3), zeros(4)],
        {"pads": [1, 1, 1, 1]},
        256 * 55,
        4 * 560,
    ),
    # Stride 2: 4x4 outputs of 4 channels. Dilation 2 with a 3x3 kernel covers 5x5.
    "conv strided": ("Conv", [IMAGE, zeros(4, 3, 2, 2)], {"strides": [2, 2]}, 64 * 24, 4 * 304),
    "conv dilated": ("Conv", [IMAGE, zeros(4, 3, 3, 3)], {"dilations": [2, 2]}, 64 * 54, 4 * 364),
    # Three groups of one channel each: nine multiply-adds per output.
    "conv depthwise": (
        "Conv",
        [IMAGE, zeros(3, 1, 3, 3)],
        {"group": 3, "pads": [1, 1, 1, 1]},
        192 * 18,
        4 * (192 + 27 + 192),
    ),
    "conv 1d": ("Conv", [[2, 4, 10], zeros(8, 4, 3)], {}, 2 * 8 * 8 * 24, 4 * (80 + 96 + 128)),
    # Each of 3*4 inputs meets 5 channels of 2x2: 2*12*20; 5*4*4... outputs with stride 2.
    "conv transpose": (
        "ConvTranspose",
        [[1, 3, 2, 2], zeros(3, 5, 2, 2), zeros(5)],
        {"strides": [2, 2]},
        2 * 12 * 20 + 80,
        4 * (12 + 60 + 5 + 80),
    ),
    "gemm": (
        "Gemm",
        [[2, 3], zeros(5, 3), zeros(5)],
        {"transB": 1},
        2 * 2 * 3 * 5 + 10,
        4 * (6 + 15 + 5 + 10),
    ),
    "gemm scaled": ("Gemm", [[2, 3], zeros(3, 5)], {"alpha": 0.5}, 60 + 10, 4 * (6 + 15 + 10)),
    "gemm transposed": ("Gemm", [[3, 2], zeros(3, 5)], {"transA": 1}, 60, 4 * (6 + 15 + 10)),
    "matmul": ("MatMul", [[7, 2, 3], [3, 5]], {}, 7 * 60, 4 * (42 + 15 + 70)),
    "matmul vector": ("MatMul", [[2, 3], [3]], {}, 12, 4 * (6 + 3 + 2)),
    "matmul integer": (
        "MatMulInteger",
        [(UINT8, [2, 3]), (UINT8, [3, 5])],
        {},
        60,
        6 + 15 + 4 * 10,
    ),
    "qlinear matmul": (
        "QLinearMatMul",
        [
            (UINT8, [2, 3]), np.float32(1), np.uint8(0),
            np.zeros((3, 5), np.uint8), np.float32(1), np.uint8(0), np.float32(1), np.uint8(0),
        ],
        {}, 60, 6 + 15 + 10 + 3 * 5,
    ),
    "qlinear conv": (
        "QLinearConv",
        [
            (UINT8, [1, 3, 4, 4]), np.float32(1), np.uint8(0),
            np.zeros((2, 3, 1, 1), np.uint8), np.float32(1), np.uint8(0),
            np.float32(1), np.uint8(0), np.zeros(2, np.int32),
        ],
        {}, 32 * 7, 48 + 6 + 32 + 3 * 5 + 8,
    ),
    # ij,jk->ik is the product of 2x3 and 3x4.
    "einsum": ("Einsum", [[2, 3], [3, 4]], {"equation": "ij,jk->ik"}, 48, 4 * (6 + 12 + 8)),
    "einsum twice": ("Einsum", [[2, 3], "again"], {"equation": "ij,ij->i"}, 12, 4 * (6 + 2)),
    "einsum outer": ("Einsum", [[2], [3]], {"equation": "i,j->ij"}, 6, 4 * (2 + 3 + 6)),
    # Two contractions: 2*3*4 then 2*4*5 index combinations, twice each.
    "einsum chain": (
        "Einsum", [[2, 3], [3, 4], [4, 5]], {"equation": "ij,jk,kl->il"},
        2 * 24 + 2 * 40, 4 * (6 + 12 + 20 + 10),
    ),
    "relu": ("Relu", [[2, 3]], {}, 6, 48),
    "half": ("Relu", [(HALF, [2, 3])], {}, 6, 24),
    "add broadcast": ("Add", [[2, 3], zeros(3)], {}, 6, 4 * (6 + 3 + 6)),
    "sum of three": ("Sum", [[4], [4], [4]], {}, 8, 4 * 16),
    "mean of three": ("Mean", [[4], [4], [4]], {}, 12, 4 * 16),
    "where": ("Where", [(BOOL, [4]), [4], [4]], {}, 4, 4 + 48),
    "sigmoid": ("Sigmoid", [[4]], {}, 16, 32),
    "erf": ("Erf", [[4]], {}, 4, 32),
    "softmax": ("Softmax", [[2, 5]], {}, 50, 80),
    "layer norm": (
        "LayerNormalization", [[2, 5], zeros(5), zeros(5)], {}, 70, 4 * (10 + 5 + 5 + 10),
    ),
    "batch norm": (
        "BatchNormalization", [[1, 2, 3], zeros(2), zeros(2), zeros(2), zeros(2)], {},
        12, 4 * (6 + 8 + 6),
    ),
    "instance norm": (
        "InstanceNormalization", [[1, 2, 3], zeros(2), zeros(2)], {}, 42, 4 * (6 + 4 + 6),
    ),
    # size 3: 3 + 4 operations per element.
    "lrn": ("LRN", [[1, 4, 2, 2]], {"size": 3}, 16 * 7, 128),
    "max pool": ("MaxPool", [[1, 2, 4, 4]], {"kernel_shape": [2, 2]}, 2 * 9 * 4, 4 * (32 + 18)),
    "average pool": (
        "AveragePool", [[1, 2, 4, 4]], {"kernel_shape": [2, 2], "strides": [2, 2]},
        8 * 4, 4 * (32 + 8),
    ),
    "global pool": ("GlobalAveragePool", [[1, 2, 4, 4]], {}, 32, 4 * (32 + 2)),
    "reduce mean": ("ReduceMean", [[2, 8]], {"axes": [1]}, 16, 4 * (16 + 2)),
    "arg max": ("ArgMax", [[2, 8]], {"axis": 1, "keepdims": 0}, 16, 4 * 16 + 8 * 2),
    # k = 4 of 16: two comparisons per element; values and int64 indices are written.
    "top k": ("TopK", [[16], ints(4)], {}, 32, 4 * 16 + 8 + 4 * 4 + 8 * 4),
    # 2x linear upsampling of two axes: 2**2 - 1 blends of 3 operations.
    "resize linear": (
        "Resize", [[1, 1, 2, 2], None, np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"},
        16 * 9, 4 * (4 + 4 + 16),
    ),
    "resize nearest": (
        "Resize", [[1, 1, 2, 2], None, np.array([1, 1, 2, 2], np.float32)], {"mode": "nearest"},
        0, 4 * (4 + 4 + 16),
    ),
    # Views move nothing.
    "reshape": ("Reshape", [[2, 6], ints(3, 4)], {}, 0, 0),
    "squeeze": ("Squeeze", [[1, 6]], {}, 0, 0),
    "flatten": ("Flatten", [[2, 3, 4]], {}, 0, 0),
    "identity": ("Identity", [[4]], {}, 0, 0),
    "dropout": ("Dropout", [[4]], {}, 0, 0),
    "cast": ("Cast", [[4]], {"to": HALF}, 0, 16 + 8),
    "cast to the same": ("Cast", [[4]], {"to": 1}, 0, 0),
    "transpose": ("Transpose", [[2, 3]], {"perm": [1, 0]}, 0, 48),
    "concat": ("Concat", [[2, 3], [2, 5]], {"axis": 1}, 0, 2 * 4 * 16),
    # Two rows of four of a large table, read and written, and two indices.
    "gather": ("Gather", [zeros(1000, 4), (INT64, [2])], {}, 0, 2 * 32 + 16),
    "slice": ("Slice", [[100, 4], ints(0), ints(5), ints(0)], {}, 0, 2 * 5 * 4 * 4),
    # The data copied (80), three updates of one row each read and written (2 * 48), indices (24).
    "scatter": (
        "ScatterND", [[5, 4], (INT64, [3, 1]), [3, 4]], {}, 0, 2 * 80 + 2 * 48 + 24,
    ),
    "expand": ("Expand", [[1, 4], ints(3, 4)], {}, 0, 4 * 4 + 16 + 4 * 12),
    # Both directions, 5 steps, batch 2, 3 inputs, 4 hidden units: per step and direction
    # 2 * (4 gates * (2*4*(3+4) + 2*4) + 18*4) = 2 * (256 + 72).
    "lstm": (
        "LSTM", [[5, 2, 3], zeros(2, 16, 3), zeros(2, 16, 4)],
        {"hidden_size": 4, "direction": "bidirectional"},
        5 * 2 * 2 * (4 * 64 + 18 * 4), 4 * (30 + 96 + 128 + 5 * 2 * 2 * 4),
    ),
    "gru": (
        "GRU", [[5, 2, 3], zeros(1, 12, 3), zeros(1, 12, 4)], {"hidden_size": 4},
        5 * 2 * (3 * 64 + 13 * 4), 4 * (30 + 36 + 48 + 40),
    ),
    "rnn": (
        "RNN", [[5, 2, 3], zeros(1, 4, 3), zeros(1, 4, 4)], {"hidden_size": 4},
        5 * 2 * (64 + 4), 4 * (30 + 12 + 16 + 40),
    ),
    "quantize": ("QuantizeLinear", [[4], np.float32(1), np.uint8(0)], {}, 12, 16 + 4 + 1 + 4),
    "dequantize": ("DequantizeLinear", [(INT8, [4]), np.float32(1)], {}, 8, 4 + 4 + 16),
    "one int32": ("Abs", [(INT32, [4])], {}, 4, 32),
}  # fmt: skip
# From operator set 20 on.
NEWER: dict[str, tuple[str, list[Any], dict[str, Any], float, float]] = {
    "gelu": ("Gelu", [[4]], {}, 20, 32),
    "gelu tanh": ("Gelu", [[4]], {"approximate": "tanh"}, 36, 32),
    "group norm": (
        "GroupNormalization", [[1, 4, 3], zeros(4), zeros(4)], {"num_groups": 2},
        12 * 7, 4 * (12 + 8 + 12),
    ),
    "rms norm": ("RMSNormalization", [[2, 5], zeros(5)], {}, 40, 4 * (10 + 5 + 10)),
    # 2 heads, 3 queries, 4 keys, size 5: 24 scores, each 2*5 + 1 + 5 + 2*5 operations.
    "attention": (
        "Attention", [[1, 2, 3, 5], [1, 2, 4, 5], [1, 2, 4, 5]], {},
        24 * 26, 4 * (30 + 40 + 40 + 30),
    ),
    # The same packed as [B, S, heads * size], four query heads over two key-value heads.
    "grouped attention": (
        "Attention", [[1, 3, 20], [1, 4, 10], [1, 4, 10]],
        {"q_num_heads": 4, "kv_num_heads": 2}, 4 * 12 * 26, 4 * (60 + 40 + 40 + 60),
    ),
    "rotary": (
        "RotaryEmbedding", [[1, 2, 3, 4], zeros(1, 3, 2), zeros(1, 3, 2)], {},
        24 * 3, 4 * (24 + 6 + 6 + 24),
    ),
    "swish": ("Swish", [[4]], {}, 24, 32),
}  # fmt: skip
# Of the domain com.microsoft.
CONTRIB: dict[str, tuple[str, list[Any], dict[str, Any], float, float]] = {
    # Input plus skip (1), then a layer norm (7).
    "skip norm": (
        "SkipLayerNormalization", [[1, 2, 4], [1, 2, 4], zeros(4), zeros(4)], {},
        8 * 8, 4 * (8 + 8 + 8 + 8),
    ),
    "skip rms norm": (
        "SkipSimplifiedLayerNormalization", [[1, 2, 4], [1, 2, 4], zeros(4)], {},
        8 * 5, 4 * (8 + 8 + 4 + 8),
    ),
    "bias gelu": ("BiasGelu", [[2, 4], zeros(4)], {}, 48, 4 * (8 + 4 + 8)),
    "fused matmul": (
        "FusedMatMul", [[2, 3], [5, 3]], {"transB": 1}, 60, 4 * (6 + 15 + 10),
    ),
    # 8 columns of 32 weights in 4 bits: 8 * 16 bytes; one scale each. 2*3*8*32 and 2*32*8.
    "4-bit matmul": (
        "MatMulNBits", [[3, 32], np.zeros((8, 1, 16), np.uint8), zeros(8)],
        {"K": 32, "N": 8, "bits": 4, "block_size": 32},
        2 * 24 * 32 + 2 * 256, 4 * 96 + 128 + 32 + 4 * 24,
    ),
    # Two heads of two, three steps: 6*3 scores = 18, each 4 + 1 + 5 + 4.
    "multi head": (
        "MultiHeadAttention", [[1, 3, 4], [1, 3, 4], [1, 3, 4]], {"num_heads": 2},
        18 * 14, 4 * 12 * 4,
    ),
    # The same with its input projection, 3 x 4 times 4 x 12 and bias.
    "attention": (
        "Attention", [[1, 3, 4], zeros(4, 12), zeros(12)], {"num_heads": 2},
        2 * 3 * 4 * 12 + 36 + 18 * 14, 4 * (12 + 48 + 12 + 12),
    ),
}  # fmt: skip


def only_op(folder: Path, case: tuple, opset: int, domain: str = "") -> tuple[OpGraph, int, list]:
    """The graph of a model of one node, the node's place in it, and the estimated ops."""
    op_type, given, attributes, _, _ = case
    names, inputs, weights = [], {}, {}
    for i, spec in enumerate(given):
        if isinstance(spec, str):  # the input before, read once more
            names.append(names[-1])
            continue
        names.append("" if spec is None else f"x{i}")
        if isinstance(spec, np.ndarray | np.generic):
            weights[f"x{i}"] = np.asarray(spec)
        elif spec is not None:
            inputs[f"x{i}"] = spec
    outputs = ["y", "indices"] if op_type == "TopK" else ["y"]
    made = model(
        [node(op_type, names, outputs, domain=domain, name="op", **attributes)],
        inputs, ["y"], weights, opset=opset, ir_version=10, domains={domain: 1} if domain else {},
    )  # fmt: skip
    found = load_onnx_model(save(folder, made))
    return found.graph, found.graph.op_index["op"], found.estimated


@pytest.mark.parametrize("name", CASES)
def test_flops_and_traffic_are_those_worked_out_by_hand(name: str, tmp_path: Path) -> None:
    graph, op, estimated = only_op(tmp_path, CASES[name], opset=17)
    assert (graph.flop[op], graph.memory_traffic_bytes[op]) == CASES[name][3:]
    assert not estimated


@pytest.mark.parametrize("name", NEWER)
def test_newer_operators_cost_what_was_worked_out_by_hand(name: str, tmp_path: Path) -> None:
    graph, op, estimated = only_op(tmp_path, NEWER[name], opset=24)
    assert (graph.flop[op], graph.memory_traffic_bytes[op]) == NEWER[name][3:]
    assert not estimated


@pytest.mark.parametrize("name", CONTRIB)
def test_runtime_operators_cost_what_was_worked_out_by_hand(name: str, tmp_path: Path) -> None:
    graph, op, estimated = only_op(tmp_path, CONTRIB[name], opset=17, domain="com.microsoft")
    assert (graph.flop[op], graph.memory_traffic_bytes[op]) == CONTRIB[name][3:]
    assert not estimated


def test_a_value_read_twice_by_one_op_is_read_once_from_memory(tmp_path: Path) -> None:
    """x * x: 4 floats in, 4 out."""
    made = model([node("Mul", ["x", "x"], ["y"], name="square")], {"x": [4]}, ["y"])
    graph = load_onnx_model(save(tmp_path, made)).graph
    assert graph.memory_traffic_bytes[graph.op_index["square"]] == 32
    assert graph.num_uses == 2  # x by the square, y by the output
    twice = node("Einsum", ["x", "x"], ["y"], name="dot", equation="ij,ij->i")
    graph = load_onnx_model(save(tmp_path, model([twice], {"x": [2, 3]}, ["y"]))).graph
    op = graph.op_index["dot"]
    assert (graph.flop[op], graph.memory_traffic_bytes[op]) == (12, 4 * (6 + 2))


def test_an_operator_without_a_formula_is_estimated_and_said_so(tmp_path: Path) -> None:
    """One FLOP per output element: 2 * 3 * 4 grid points of 2 coordinates."""
    made = model(
        [node("AffineGrid", ["theta", "size"], ["grid"], name="grid_op")],
        {"theta": [2, 2, 3]}, ["grid"], {"size": ints(2, 1, 3, 4)}, opset=20, ir_version=9,
    )  # fmt: skip
    found = load_onnx_model(save(tmp_path, made))
    assert found.estimated == ("grid_op",)
    assert found.graph.flop[found.graph.op_index["grid_op"]] == 2 * 3 * 4 * 2


def test_dtypes_name_the_arithmetic(tmp_path: Path) -> None:
    graph, op, _ = only_op(tmp_path, CASES["qlinear conv"], opset=17)
    assert graph.detail[op].dtype == "int8"
    graph, op, _ = only_op(tmp_path, CASES["half"], opset=17)
    assert graph.detail[op].dtype == "float16"
    graph, op, _ = only_op(tmp_path, CASES["gather"], opset=17)
    assert graph.detail[op].dtype == "float32"


def test_details_hold_shapes_by_place_and_plain_attributes(tmp_path: Path) -> None:
    graph, op, _ = only_op(tmp_path, CASES["resize linear"], opset=17)
    detail = graph.detail[op]
    assert detail.input_shapes == ((1, 1, 2, 2), (0,), (4,))  # the left-out input has no elements
    assert detail.output_shapes == ((1, 1, 4, 4),)
    assert detail.attributes == {"mode": "linear"}
    graph, op, _ = only_op(tmp_path, CASES["conv strided"], opset=17)
    assert graph.detail[op].attributes == {"strides": (2, 2)}
