"""Data of a page's charts as columns of JSON: ops, transfers, memory, modules.

Times are whole nanoseconds, so that they are short as text; sizes are bytes.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gdp.cluster.types import UNLIMITED_BYTES
from gdp.graph.generation import steps_of
from gdp.reports.view import ModuleTree, PlacementView, lanes, layers, op_label
from gdp.sim.memory import Held, held_over_time, weights_held

MAX_DRAWN = 20_000
"""Kernels, or transfers, that a page holds: the longest, the rest is counted. About 3 MB."""
MAX_STEPS = 4_000
"""Instants of a memory curve: beyond, each of so many spans shows what it holds at its fullest."""


def payload(view: PlacementView, tree: ModuleTree) -> dict[str, Any]:
    """Everything that the page's scripts are given."""
    cluster = view.problem.cluster
    finite = bool(np.isfinite(view.end_s))
    peak_bytes = np.max([way.schedule.peak_bytes for way in view.ways], axis=0)
    ops, left_out = _longest(view)
    curves = memory_curves(view) if finite else []
    held = [_curve(curve, view.end_s) for curve in curves]
    lane, channels = lanes(view)
    parts = [_drawn(way, mine) for way, mine in zip(view.ways, lane, strict=True)]
    columns = {key: [x for part in parts for x in part[key]] for key in parts[0] if key != "label"}
    labels = _of_samples(view, [part["label"] for part in parts])
    names = cluster.device_names
    for d in view.leads if curves else ():
        peak_bytes[d] = curves[d].held_bytes.max()
    return {
        "latency": _ns(np.array([view.end_s]))[0] if finite else 0,
        "decode": _decode_from(view) if finite else None,
        "devices": [
            {
                "name": device.name, "busy": _ns(view.busy_s[d : d + 1])[0],
                "limit": None if device.memory_bytes >= UNLIMITED_BYTES else device.memory_bytes,
                "peak": int(peak_bytes[d]), "lead": view.leads.get(d),
                "together": [names[e] for s in view.splits if d in s.devices for e in s.devices],
            }
            for d, device in enumerate(cluster.devices)
        ],
        "ops": _ops(view, tree, ops),
        "left_out": left_out,
        "transfers": {"channels": channels, "label": labels, **columns},
        "memory": held,
        "modules": {"name": tree.names, "parent": tree.parent, "by_type": tree.by_type},
    }  # fmt: skip


def _decode_from(view: PlacementView) -> dict[str, int] | None:
    """Nanosecond at which decode starts, and its steps, of a request whose phases follow each
    other once; None for others."""
    graph = view.problem.graph
    steps = np.flatnonzero((graph.repeats > 1) & view.is_work)
    if len(view.ways) > 1 or not steps.size or (graph.repeats[view.is_work] > 1).all():
        return None
    start_s = view.schedule.start_s[steps].min(keepdims=True)
    return {"from": _ns(start_s)[0], "steps": steps_of(graph)}


def _ns(seconds: Float[np.ndarray, "K"]) -> list[int]:
    return np.round(seconds * 1e9).astype(np.int64).tolist()


def memory_curves(view: PlacementView) -> list[Held]:
    """Bytes held by each device over time, for one way after the other. A replica holds its weights
    while others of its group serve, too; members of a split hold what the first does, or by shares
    of their own."""
    weights = np.stack([weights_held(way.problem, way.device) for way in view.ways])
    rest = weights.max(axis=0) - weights
    curves = [held_over_time(way.problem, way.schedule, way.device) for way in view.ways]
    for d, lead in view.leads.items():
        rest[:, d] = rest[:, lead]
        for way, held in zip(view.ways, curves, strict=True):
            graph = way.problem.origin.members.get(d)
            own = way.problem if graph is None else replace(way.problem, graph=graph)
            held[d] = held_over_time(own, way.schedule, way.device)[lead]
    return [
        Held(
            _joined(
                held[d].time_s + way.since_s for way, held in zip(view.ways, curves, strict=True)
            ),
            _joined(held[d].held_bytes + more[d] for held, more in zip(curves, rest, strict=True)),
        )
        for d in range(view.problem.num_devices)
    ]


def _longest(view: PlacementView) -> tuple[Int[np.ndarray, "K"], int]:
    """Kernels that are drawn of each way, and the number of all others."""
    schedule, most = view.schedule, MAX_DRAWN // len(view.ways)
    ran = np.flatnonzero(view.is_work & np.isfinite(schedule.finish_s))
    if len(ran) <= most:
        return ran, int(view.is_work.sum()) - len(ran)
    length_s = (schedule.finish_s - schedule.start_s)[ran]
    kept = ran[np.argsort(-length_s, kind="stable")[:most]]
    return np.sort(kept), int(view.is_work.sum()) - most


def _ops(view: PlacementView, tree: ModuleTree, kept: Int[np.ndarray, "K"]) -> dict[str, Any]:
    """The kernels of every way, one way after the other."""
    graph, count = view.problem.graph, len(view.ways)
    ops = np.tile(kept, count)
    types = sorted({graph.op_types[op] for op in ops})
    names, layer = layers(tree, view)
    index = {name: i for i, name in enumerate(types)}
    return {
        "label": _of_samples(view, [[op_label(graph, op) for op in kept.tolist()]] * count),
        "type": [index[graph.op_types[op]] for op in ops],
        "types": types,
        "device": _joined(way.device[kept] for way in view.ways).tolist(),
        "start": _ns(_joined(way.schedule.start_s[kept] + way.since_s for way in view.ways)),
        "length": _ns(
            _joined((way.schedule.finish_s - way.schedule.start_s)[kept] for way in view.ways)
        ),
        "flop": np.round(graph.flop[ops]).tolist(),
        "bytes": graph.weight_bytes[ops].tolist(),
        "count": view.ops_in[ops].tolist(),
        "module": tree.module_of[ops].tolist(),
        "layer": layer[ops].tolist(),
        "layers": names,
    }


def _drawn(way: PlacementView, lane: Int[np.ndarray, "X"]) -> dict[str, list[Any]]:
    """The columns of one way's transfers, the longest of them where there are many."""
    graph, sent = way.problem.graph, way.schedule.transfers
    drawn = np.flatnonzero(np.isfinite(sent.arrive_s))
    if len(drawn) > MAX_DRAWN:
        length_s = (sent.arrive_s - sent.start_s)[drawn]
        drawn = np.sort(drawn[np.argsort(-length_s, kind="stable")[:MAX_DRAWN]])
    return {
        "channel": lane[drawn].tolist(),
        "label": [graph.tensor_names[t] for t in sent.tensor[drawn]],
        "source": sent.source[drawn].tolist(),
        "destination": sent.destination[drawn].tolist(),
        "start": _ns(sent.start_s[drawn] + way.since_s),
        "length": _ns((sent.arrive_s - sent.start_s)[drawn]),
        "bytes": way.problem.sent_bytes[sent.tensor[drawn]].tolist(),
    }


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate(list(parts))


def _of_samples(view: PlacementView, labels: list[list[str]]) -> list[str]:
    """The labels of all ways, which name the sample where there is more than one."""
    if len(view.ways) == 1:
        return labels[0]
    return [f"sample {k}: {text}" for k, own in enumerate(labels, start=1) for text in own]


def _curve(held: Held, end_s: float) -> dict[str, list[int]]:
    """The steps of a memory curve, at most `MAX_STEPS` of them."""
    time_s, size = held.time_s, held.held_bytes
    if len(time_s) > MAX_STEPS:
        span = np.minimum((time_s / max(end_s, 1e-30) * MAX_STEPS).astype(np.int64), MAX_STEPS - 1)
        first = np.flatnonzero(np.diff(span, prepend=-1))
        time_s, size = time_s[first], np.maximum.reduceat(size, first)
    return {"time": _ns(time_s), "bytes": size.tolist()}
