"""A made-up device whose kernel times follow a known law, to calibrate against."""

import numpy as np

from gdp.costs.profile import DeviceRecord, Kernel, Profile, ProfiledModel
from gdp.graph.op_graph import OpDetail, OpGraph, make_graph

FLOP_PER_S, BYTES_PER_S, LAUNCH_S = 5e10, 8e9, 3e-6


def chain_graph(name: str, layers: list[tuple[int, int, int]]) -> OpGraph:
    """MatMul -> Relu pairs over (rows, inner, columns)."""
    names, types, tensors, uses, flop, traffic, weight, detail = [], [], [], [], [], [], [], []
    for rows, inner, columns in layers:
        op = len(names)
        out = 4 * rows * columns
        names += [f"matmul{op}", f"relu{op}"]
        types += ["MatMul", "Relu"]
        if op:
            uses.append((op - 1, op))
        tensors += [(op, out), (op + 1, out)]
        uses.append((op, op + 1))
        flop += [2.0 * rows * inner * columns, float(rows * columns)]
        traffic += [4.0 * (rows * inner + inner * columns) + out, 2.0 * out]
        weight += [4 * inner * columns, 0]
        detail += [
            OpDetail("float32", ((rows, inner), (inner, columns)), ((rows, columns),)),
            OpDetail("float32", ((rows, columns),), ((rows, columns),)),
        ]
    return make_graph(
        name, names, types, tensors, uses, flop=flop, memory_traffic_bytes=traffic,
        weight_bytes=weight, detail=detail,
    )  # fmt: skip


def law_s(graph: OpGraph, op: int) -> float:
    """The device's time of a matrix product with its activation: a sum of three terms."""
    out = graph.detail[op].output_shapes[0]
    shapes = graph.detail[op].input_shapes
    moved = 4 * (sum(int(np.prod(s)) for s in shapes) + int(np.prod(out)))
    return graph.flop[op] / FLOP_PER_S + moved / BYTES_PER_S + LAUNCH_S


def profiled(name: str, family: str, layers: list[tuple[int, int, int]], noise: float, rng):
    """The chain as the device would be measured: product and activation in one kernel."""
    graph = chain_graph(name, layers)
    kernels = []
    for op in range(0, graph.num_ops, 2):
        seconds = law_s(graph, op) * float(np.exp(noise * rng.standard_normal()))
        kernels.append(Kernel(graph.op_names[op], "FusedMatMul", (op, op + 1), seconds, 0.0))
    total = sum(k.seconds for k in kernels)
    return ProfiledModel(name, family, graph, total, tuple(kernels), 10, 3)


def profile(families: int = 10, per_family: int = 4, noise: float = 0.02, seed: int = 0) -> Profile:
    """Random chains, by family."""
    rng = np.random.default_rng(seed)
    models = []
    for i in range(families * per_family):
        sizes = np.exp(rng.uniform(np.log(8), np.log(512), size=(8, 3))).astype(int)
        layers = [tuple(int(s) for s in row) for row in sizes]
        models.append(profiled(f"m{i}", f"f{i % families}", layers, noise, rng))
    device = DeviceRecord("cpu-core", "Made-up avx2", ("avx2",))
    return Profile(
        device, "onnxruntime", 1, "all", {"onnxruntime": "1.0"}, "2026-01-02", tuple(models)
    )
