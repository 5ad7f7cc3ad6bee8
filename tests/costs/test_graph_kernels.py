"""Kernels of a graph: those of many ops are those of each op alone, whatever stands beside it."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from tiny import plain_graph

from gdp.costs.measured.graph import graph_kernels
from gdp.graph.latent import LATENT
from gdp.graph.op_graph import WEIGHT_ARITHMETIC, OpDetail, OpGraph
from gdp.ops.aten import ATEN
from gdp.ops.jax import JAX
from gdp.ops.rule import ATTENTION, CONVOLUTION, EXPERTS, LINEAR, PRODUCT, SOFTMAX
from gdp.ops.table import ELEMENTWISE_OPS, ONNX, REDUCTIONS, VIEWS, kernel_of

BY_KERNEL = [
    [op_type for op_type in sorted({*ONNX, *JAX, *ATEN}) if kernel_of(op_type) == kernel]
    for kernel in (PRODUCT, LINEAR, CONVOLUTION, EXPERTS, ATTENTION, SOFTMAX)
]
FAMILIES = [
    *BY_KERNEL, sorted(REDUCTIONS), sorted(ELEMENTWISE_OPS), sorted(VIEWS), ["Unknown"],
]  # fmt: skip
PLAIN = OpDetail("bfloat16", ((8, 64), (64, 32)), ((8, 32),))


def random_detail(rng: np.random.Generator) -> OpDetail:
    """Shapes of up to four tensors, which often fit each other as those of a product do."""

    def shape(rank: int) -> tuple[int, ...]:
        return tuple(
            int(x)
            for x in rng.choice([0, 1, 2, 3, 8, 64, 1000], rank, p=[0.02, *[0.1] * 2, *[0.195] * 4])
        )

    rank = int(rng.integers(2, 5))
    inputs = [
        shape(rank if rng.random() < 0.8 else int(rng.integers(0, 5)))
        for _ in range(rng.integers(0, 4))
    ]
    made = shape(rank)
    if len(inputs) > 1 and inputs[0] and rng.random() < 0.6:
        inputs[1] = (inputs[0][-1], made[-1])[:: int(rng.choice([-1, 1]))]
    attributes = {}
    if rng.random() < 0.5:
        attributes[WEIGHT_ARITHMETIC] = str(
            rng.choice(["weights", "float8", "float4", "int8", "llm.int8"])
        )
    if rng.random() < 0.3:
        attributes[LATENT] = 1
    dtype = str(rng.choice(["float32", "float16", "bfloat16", "float64", "int8"]))
    return OpDetail(dtype, tuple(inputs), (made,) if rng.random() < 0.9 else (), attributes)


def random_op(rng: np.random.Generator) -> dict:
    """Type, detail and work of an op; the weights have anything between none and 32 bits."""
    detail = random_detail(rng)
    sizes = [math.prod(s) for s in (*detail.output_shapes, *detail.input_shapes)] or [1]
    inner = detail.input_shapes[0][-1] if detail.input_shapes and detail.input_shapes[0] else 3
    weights = int(sizes[-1] * rng.choice([0.0, 0.5, 1.0, 1 + 4 / 128**2, 2.0, 4.0]))
    family = FAMILIES[int(rng.integers(len(FAMILIES)))]
    return {
        "op_types": str(rng.choice(family)), "detail": detail, "weight_bytes": weights,
        "flop": float(sizes[0] * inner * rng.choice([0.0, 2.0, 2.2, 7.0])),
        "memory_traffic_bytes": float(weights + sum(sizes) * rng.choice([0.0, 1.0, 2.0, 9.0])),
    }  # fmt: skip


def graph_of(ops: list[dict]) -> OpGraph:
    """Ops without tensors behind a product in 16 bits, which decides how others are computed."""
    first = {
        "op_types": "linear", "detail": PLAIN, "weight_bytes": 4096, "flop": 2.0 * 8 * 64 * 32,
        "memory_traffic_bytes": 6000.0,
    }  # fmt: skip
    columns = {key: [op[key] for op in (first, *ops)] for key in first}
    return plain_graph(len(ops) + 1, [], **columns)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_kernels_of_many_ops_are_those_of_each_alone(seed: int, served: bool) -> None:
    rng = np.random.default_rng(seed)
    ops = [random_op(rng) for _ in range(60)]
    shaped = ("op_types", "detail")  # layers are alike, and some differ in their work alone
    ops += [op | {key: ops[i][key] for key in shaped} for i, op in enumerate(ops[20:])]
    ops = [ops[int(i)] for i in rng.integers(len(ops), size=120)]
    found = graph_kernels(graph_of(ops), served=served)
    for i, op in enumerate(ops, start=1):
        alone = graph_kernels(graph_of([op]), served=served)
        assert found.known[i] == alone.known[1]
        for field in fields(found.kernels):
            one, other = (getattr(x.kernels, field.name) for x in (found, alone))
            assert one[i] == other[1], (op, field.name)
    alike = found.row[1:, None] == found.row[1:]
    same = [[a == b for b in ops] for a in ops]
    assert (alike == np.array(same)).all()


@pytest.mark.parametrize("like", ["linear", "bmm", "_grouped_mm", "conv2d"])
def test_an_op_is_costed_by_the_kernel_class_of_its_row(
    like: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new row with a class is known as its like is; without one it is not."""
    shapes = {
        "linear": ((8, 64), (32, 64)), "bmm": ((4, 8, 64), (4, 64, 32)),
        "_grouped_mm": ((8, 64), (4, 64, 32)), "conv2d": ((1, 64, 9, 9), (32, 64, 3, 3)),
    }  # fmt: skip
    made = {"bmm": (4, 8, 32), "conv2d": (1, 32, 7, 7)}.get(like, (8, 32))
    op = {
        "op_types": like, "detail": OpDetail("bfloat16", shapes[like], (made,)), "weight_bytes": 0,
        "flop": 2.0 * 64 * math.prod(made), "memory_traffic_bytes": 9000.0,
    }  # fmt: skip
    known = graph_kernels(graph_of([op]), served=True)
    for row, kept in ((ATEN[like], True), (replace(ATEN[like], kernel=""), False)):
        monkeypatch.setitem(ATEN, "new_op", row)
        new = graph_kernels(graph_of([op | {"op_types": "new_op"}]), served=True)
        assert (new.kernels.kind[1] == known.kernels.kind[1] and new.known[1]) == kept
