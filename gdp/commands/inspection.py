"""Contents of a model, for `gdp inspect`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from gdp.graph.op_graph import OpGraph
from gdp.models import is_onnx, is_traced, load, traced, with_dims


def inspect_model(model: str, dims: Sequence[str] = (), *, ops: bool = False) -> dict[str, Any]:
    """Counts, FLOPs and bytes by op type, and the estimates and assumptions of the import."""
    estimated: list[str] = []
    assumptions: list[str] = []
    parameters: int | None = None
    if is_onnx(model):
        from gdp.importers.onnx.model import load_onnx_model

        # An op that placing would refuse is listed here instead.
        imported = load_onnx_model(model, with_dims(dims), unknown="estimate")
        graph, assumptions = imported.graph, list(imported.assumptions)
        estimated = sorted({graph.op_types[graph.op_index[op]] for op in imported.estimated})
    elif is_traced(model) and not isinstance(trace := traced(model), OpGraph):
        graph, estimated = trace.graph, list(trace.estimated)
        assumptions, parameters = list(trace.assumptions), trace.parameters
    else:
        graph = load(model, with_dims(dims))
    about = summary(graph)
    about |= {"estimated": estimated, "assumptions": assumptions}
    if parameters is not None:
        about["parameters"] = parameters
    if ops:
        about["ops"] = [
            {
                "name": graph.op_names[i],
                "op_type": graph.op_types[i],
                "flop": float(graph.flop[i]),
                "memory_traffic_bytes": float(graph.memory_traffic_bytes[i]),
                "weight_bytes": int(graph.weight_bytes[i]),
                "scope": graph.scope[i],
            }
            for i in range(graph.num_ops)
        ]
    return about


def summary(graph: OpGraph) -> dict[str, Any]:
    """Totals of a graph and a row per op type, costliest first."""
    types = np.array(graph.op_types)
    counts = Counter(graph.op_types)
    first_of_weight = np.unique(graph.weight_id, return_index=True)[1]
    rows = [
        {
            "op_type": op_type,
            "count": count,
            "flop": float(graph.flop[types == op_type].sum()),
            "memory_traffic_bytes": float(graph.memory_traffic_bytes[types == op_type].sum()),
        }
        for op_type, count in counts.items()
    ]
    rows.sort(key=lambda row: (-row["flop"], -row["memory_traffic_bytes"], row["op_type"]))
    return {
        "name": graph.name,
        "num_ops": int((~graph.is_io).sum()),
        "num_tensors": graph.num_tensors,
        "flop": float(graph.flop.sum()),
        "memory_traffic_bytes": float(graph.memory_traffic_bytes.sum()),
        "weight_bytes": int(graph.weight_bytes[first_of_weight].sum()),
        "op_types": rows,
    }
