"""A schedule as a Chrome trace, which ui.perfetto.dev opens.

The format: "Trace Event Format", Google. Measured traces of ONNX Runtime's profiler have the same
form and can be laid beside it.
"""

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Int

from gdp.base.files.writing import write_atomic
from gdp.reports.payload import memory_curves
from gdp.reports.view import PlacementView, lanes, op_label

DEVICES, CHANNELS = 0, 1
"""Processes of the trace: their threads are devices, and channels."""
Event = dict[str, Any]


def trace_events(view: PlacementView) -> list[Event]:
    """Tracks of devices, of channels in use, and of memory; times in microseconds.

    Complete events ("X") for ops and transfers, flow arrows ("s", "f") from the op that makes a
    tensor over its transfer to the first op that reads it there, counters ("C") of held bytes.
    What never runs is left out. Samples that take different ways come one after the other.
    """
    parts = list(_names(view))
    for k, (way, lane) in enumerate(zip(view.ways, lanes(view)[0], strict=True)):
        parts += [*_ops(way), *_transfers(way, lane, "" if k == 0 else f"{k} ")]
    return [*parts, *_memory(view)]


def _us(seconds: float) -> float:
    """Microseconds in whole nanoseconds: what ends when another starts does so in the trace."""
    return round(seconds * 1e9) / 1e3


def _lasts(start_s: float, end_s: float) -> dict[str, float]:
    start, end = round(start_s * 1e9), round(end_s * 1e9)
    return {"ts": start / 1e3, "dur": (end - start) / 1e3}


def _names(view: PlacementView) -> Iterator[Event]:
    cluster = view.problem.cluster
    for pid, name in ((DEVICES, "devices"), (CHANNELS, "channels")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    threads = [(DEVICES, d, name) for d, name in enumerate(cluster.device_names)]
    threads += [(CHANNELS, lane, name) for lane, name in enumerate(lanes(view)[1])]
    for pid, tid, name in threads:
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {
            "ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid,
            "args": {"sort_index": tid},
        }  # fmt: skip


def _ops(view: PlacementView) -> Iterator[Event]:
    """Slices of kernels: those of a split on the track of each member, with the seconds of their
    collectives."""
    graph, schedule, problem = view.problem.graph, view.schedule, view.problem
    names = problem.cluster.device_names
    together = {split.devices[0]: split.devices for split in view.splits}
    for op in np.flatnonzero(view.is_work & np.isfinite(schedule.finish_s)).tolist():
        lead = int(view.device[op])
        members, exchange = together.get(lead, (lead,)), problem.origin.exchange_s
        shared = {}
        if len(members) > 1:
            shared["members"] = [names[d] for d in members]
            if exchange is not None:
                shared["exchange_us"] = _us(float(exchange[op, lead] * graph.repeats[op]))
        slice_ = {
            "ph": "X", "pid": DEVICES, "name": op_label(graph, op), "cat": graph.op_types[op],
            **_lasts(
                view.since_s + float(schedule.start_s[op]),
                view.since_s + float(schedule.finish_s[op]),
            ),
        }  # fmt: skip
        for d in members:
            own = problem.origin.members.get(d, graph)
            yield slice_ | {
                "tid": d,
                "args": {
                    "op": graph.op_names[op], "scope": graph.scope[op], "flop": float(own.flop[op]),
                    "weight_bytes": int(own.weight_bytes[op]), "fused_ops": int(view.ops_in[op]),
                } | shared,
            }  # fmt: skip


def _transfers(view: PlacementView, lane: Int[np.ndarray, "X"], way: str) -> Iterator[Event]:
    graph, cluster, schedule = view.problem.graph, view.problem.cluster, view.schedule
    sent, names, since_s = schedule.transfers, cluster.device_names, view.since_s
    use_of = np.argsort(graph.use_tensor, kind="stable")
    first = np.searchsorted(graph.use_tensor[use_of], np.arange(graph.num_tensors + 1))
    for k in np.flatnonzero(np.isfinite(sent.arrive_s)).tolist():
        tensor, a, b = int(sent.tensor[k]), int(sent.source[k]), int(sent.destination[k])
        start_s, arrive_s = since_s + float(sent.start_s[k]), since_s + float(sent.arrive_s[k])
        channel = int(lane[k])
        maker = int(graph.producer[tensor])
        yield {
            "ph": "X", "pid": CHANNELS, "tid": channel,
            "name": f"{graph.tensor_names[tensor]}: {names[a]} to {names[b]}", "cat": "transfer",
            **_lasts(start_s, arrive_s),
            "args": {
                "bytes": int(view.problem.sent_bytes[tensor]), "made_by": op_label(graph, maker),
            },
        }  # fmt: skip
        readers = graph.use_op[use_of[first[tensor] : first[tensor + 1]]]
        readers = readers[(view.device[readers] == b) & view.is_work[readers]]
        if view.is_work[maker]:
            yield from _arrow(
                f"{way}{k} out", (DEVICES, a, since_s + schedule.start_s[maker]),
                (CHANNELS, channel, start_s),
            )  # fmt: skip
        if len(readers):
            reader = int(readers[np.argmin(schedule.start_s[readers])])
            yield from _arrow(
                f"{way}{k} in", (CHANNELS, channel, start_s),
                (DEVICES, b, since_s + schedule.start_s[reader]),
            )  # fmt: skip


def _arrow(name: str, source: tuple[int, int, float], to: tuple[int, int, float]) -> list[Event]:
    """A flow arrow; each end lies in the slice that starts at its time on its track."""
    ends = []
    for phase, (pid, tid, at_s) in (("s", source), ("f", to)):
        ends.append(
            {
                "ph": phase, "id": name, "name": "tensor", "cat": "transfer", "pid": pid,
                "tid": tid, "ts": _us(float(at_s)),
            }
        )  # fmt: skip
    ends[1]["bp"] = "e"  # the enclosing slice, not the next one
    return ends


def _memory(view: PlacementView) -> Iterator[Event]:
    if not np.isfinite(view.end_s):
        return
    curves = memory_curves(view)
    for name, curve in zip(view.problem.cluster.device_names, curves, strict=True):
        for time_s, size in zip(curve.time_s.tolist(), curve.held_bytes.tolist(), strict=True):
            yield {
                "ph": "C", "pid": DEVICES, "name": f"memory of {name}", "ts": _us(time_s),
                "args": {"bytes": size},
            }  # fmt: skip


def write_trace(view: PlacementView, path: str | os.PathLike[str]) -> None:
    """Write the trace as JSON."""
    cluster, schedule = view.problem.cluster, view.schedule
    finite = bool(np.isfinite(schedule.latency_s))
    document = {
        # First: `gdp.base.files.writing` knows gdp's traces by it.
        "otherData": {
            "generator": "gdp", "model": view.model.name, "cluster": cluster.name,
            "latency_s": schedule.latency_s if finite else None,
            "ops": int(view.ops_in.sum()), "kernels": int(view.is_work.sum()),
            "memory_bytes": {d.name: d.memory_bytes for d in cluster.devices},
        },
        "traceEvents": trace_events(view),
        "displayTimeUnit": "ms",
    }  # fmt: skip
    write_atomic(path, msgspec.json.encode(document))
