"""What the page draws from, as columns of plain JSON: ops, transfers, memory, modules.

Times are whole nanoseconds, so that they are short as text; sizes are bytes.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gdp.cluster.types import UNLIMITED_BYTES
from gdp.reports.modules import ModuleTree, layers
from gdp.reports.view import View, lanes, op_label
from gdp.sim.memory import Held, held_over_time

MAX_DRAWN = 20_000
"""Kernels, or transfers, that a page holds: the longest, the rest is counted. About 3 MB."""
MAX_STEPS = 4_000
"""Instants of a memory curve: beyond, each of so many spans shows what it holds at its fullest."""


def payload(view: View, tree: ModuleTree) -> dict[str, Any]:
    """Everything that the page's scripts are given."""
    cluster, schedule = view.problem.cluster, view.schedule
    finite = bool(np.isfinite(schedule.latency_s))
    ops, left_out = _longest(view)
    held = held_over_time(view.problem, schedule, view.device) if finite else []
    return {
        "latency": _ns(np.array([schedule.latency_s]))[0] if finite else 0,
        "devices": [
            {
                "name": device.name, "busy": _ns(schedule.busy_s[d : d + 1])[0],
                "limit": None if device.memory_bytes >= UNLIMITED_BYTES else device.memory_bytes,
                "peak": int(schedule.peak_bytes[d]),
            }
            for d, device in enumerate(cluster.devices)
        ],
        "ops": _ops(view, tree, ops),
        "left_out": left_out,
        "transfers": _transfers(view),
        "memory": [_curve(entry, schedule.latency_s) for entry in held],
        "modules": {"name": tree.names, "parent": tree.parent, "by_type": tree.by_type},
    }  # fmt: skip


def _ns(seconds: Float[np.ndarray, "K"]) -> list[int]:
    return np.round(seconds * 1e9).astype(np.int64).tolist()


def _longest(view: View) -> tuple[Int[np.ndarray, "K"], int]:
    """The kernels that are drawn, and how many are not: those that never run among these."""
    schedule = view.schedule
    ran = np.flatnonzero(view.is_work & np.isfinite(schedule.finish_s))
    if len(ran) <= MAX_DRAWN:
        return ran, int(view.is_work.sum()) - len(ran)
    length_s = (schedule.finish_s - schedule.start_s)[ran]
    kept = ran[np.argsort(-length_s, kind="stable")[:MAX_DRAWN]]
    return np.sort(kept), int(view.is_work.sum()) - MAX_DRAWN


def _ops(view: View, tree: ModuleTree, ops: Int[np.ndarray, "K"]) -> dict[str, Any]:
    graph, schedule = view.problem.graph, view.schedule
    types = sorted({graph.op_types[op] for op in ops})
    names, layer = layers(tree, view)
    index = {name: i for i, name in enumerate(types)}
    return {
        "label": [op_label(graph, op) for op in ops.tolist()],
        "type": [index[graph.op_types[op]] for op in ops],
        "types": types,
        "device": view.device[ops].tolist(),
        "start": _ns(schedule.start_s[ops]),
        "length": _ns(schedule.finish_s[ops] - schedule.start_s[ops]),
        "flop": np.round(graph.flop[ops]).tolist(),
        "bytes": graph.weight_bytes[ops].tolist(),
        "count": view.ops_in[ops].tolist(),
        "module": tree.module_of[ops].tolist(),
        "layer": layer[ops].tolist(),
        "layers": names,
    }


def _transfers(view: View) -> dict[str, Any]:
    graph, sent = view.problem.graph, view.schedule.transfers
    drawn = np.flatnonzero(np.isfinite(sent.arrive_s))
    if len(drawn) > MAX_DRAWN:
        length_s = (sent.arrive_s - sent.start_s)[drawn]
        drawn = np.sort(drawn[np.argsort(-length_s, kind="stable")[:MAX_DRAWN]])
    lane, names = lanes(view)
    return {
        "channels": names,
        "channel": lane[drawn].tolist(),
        "label": [graph.tensor_names[t] for t in sent.tensor[drawn]],
        "source": sent.source[drawn].tolist(),
        "destination": sent.destination[drawn].tolist(),
        "start": _ns(sent.start_s[drawn]),
        "length": _ns((sent.arrive_s - sent.start_s)[drawn]),
        "bytes": graph.tensor_bytes[sent.tensor[drawn]].tolist(),
    }


def _curve(held: Held, end_s: float) -> dict[str, list[int]]:
    """The steps of a memory curve, at most `MAX_STEPS` of them."""
    time_s, size = held.time_s, held.held_bytes
    if len(time_s) > MAX_STEPS:
        span = np.minimum((time_s / max(end_s, 1e-30) * MAX_STEPS).astype(np.int64), MAX_STEPS - 1)
        first = np.flatnonzero(np.diff(span, prepend=-1))
        time_s, size = time_s[first], np.maximum.reduceat(size, first)
    return {"time": _ns(time_s), "bytes": size.tolist()}
