"""What a model is made of: the numbers behind `gdp inspect`, as plain data."""

from collections import Counter

import msgspec


class TensorInfo(msgspec.Struct, frozen=True):
    """A graph input or output."""

    name: str
    dtype: str
    shape: list[int]


class OpTypeInfo(msgspec.Struct, frozen=True):
    """All ops of one type."""

    op_type: str
    count: int
    flop: float
    memory_traffic_bytes: float
    weight_bytes: int  # shared weights counted once
    estimated: int  # how many are costed without a formula


class Inspection(msgspec.Struct, frozen=True):
    """A model in numbers. `msgspec.to_builtins` or `msgspec.json.encode` make it JSON."""

    name: str
    path: str
    producer: str
    ir_version: int
    opsets: dict[str, int]
    dims: dict[str, int]  # sizes bound to open dimensions
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    ops: int  # graph inputs and outputs not counted
    tensors: int
    parameters: int  # distinct stored numbers that are no integers of 32 bits or more
    weight_bytes: int  # distinct, as the ops hold them
    activation_bytes: int  # of all tensors together
    flop: float
    memory_traffic_bytes: float
    op_types: list[OpTypeInfo]  # most FLOPs first
    estimated_ops: list[str]  # costed without a formula: one FLOP per output element
    assumptions: list[str]  # trip counts, branches and shapes that the model leaves open
    weight_nodes: int  # nodes that only prepare weights, and are no ops
    dropped_nodes: int  # nodes computed while importing, or feeding nothing


def op_type_infos(
    op_types: list[str],
    flop: list[float],
    traffic_bytes: list[float],
    weight_bytes: list[int],
    estimated: list[bool],
) -> list[OpTypeInfo]:
    """One row per op type, most FLOPs first, then most frequent, then by name."""
    count, weights, guessed = Counter[str](), Counter[str](), Counter[str]()
    flops, traffic = dict.fromkeys(op_types, 0.0), dict.fromkeys(op_types, 0.0)
    for op, op_type in enumerate(op_types):
        count[op_type] += 1
        flops[op_type] += flop[op]
        traffic[op_type] += traffic_bytes[op]
        weights[op_type] += weight_bytes[op]
        guessed[op_type] += estimated[op]
    rows = [
        OpTypeInfo(name, count[name], flops[name], traffic[name], weights[name], guessed[name])
        for name in count
    ]
    return sorted(rows, key=lambda row: (-row.flop, -row.count, row.op_type))
