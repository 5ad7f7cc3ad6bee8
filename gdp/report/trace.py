"""A schedule as a Chrome trace, which ui.perfetto.dev opens."""

import os

import msgspec
import numpy as np
from jaxtyping import Int

from gdp.cluster.types import Cluster
from gdp.files.writing import write_atomic
from gdp.problem.problem import Problem
from gdp.sim.latency import Schedule

US = 1e6


def trace_events(
    problem: Problem, schedule: Schedule, device: Int[np.ndarray, "N"]
) -> list[dict[str, object]]:
    """One track per device and per channel in use, times in microseconds.

    Copies on links without a channel overlap; each goes to the first track that is free.

    The format: "Trace Event Format", Google, complete events (ph "X"). Measured traces of ONNX
    Runtime's profiler have the same form and can be laid beside it.
    """
    graph, names = problem.graph, problem.cluster.device_names
    events: list[dict[str, object]] = []
    for pid, name in ((0, "devices"), (1, "channels")):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
    for d, name in enumerate(names):
        events.append(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": d, "args": {"name": name}}
        )
    for op in range(graph.num_ops):
        if graph.is_io[op]:
            continue
        events.append(
            {
                "ph": "X", "pid": 0, "tid": int(device[op]), "name": graph.op_names[op],
                "cat": graph.op_types[op], "ts": float(schedule.start_s[op]) * US,
                "dur": float(schedule.finish_s[op] - schedule.start_s[op]) * US,
                "args": {"flop": float(graph.flop[op]), "scope": graph.scope[op]},
            }
        )  # fmt: skip
    sent, tracks = schedule.transfers, _Tracks(problem.cluster)
    for tensor, a, b, start_s, arrive_s in zip(
        sent.tensor.tolist(), sent.source.tolist(), sent.destination.tolist(),
        sent.start_s.tolist(), sent.arrive_s.tolist(), strict=True,
    ):  # fmt: skip
        events.append(
            {
                "ph": "X", "pid": 1, "tid": tracks.of(a, b, start_s, arrive_s),
                "name": f"{graph.tensor_names[tensor]}: {names[a]} to {names[b]}",
                "cat": "transfer", "ts": start_s * US, "dur": (arrive_s - start_s) * US,
                "args": {"bytes": int(graph.tensor_bytes[tensor])},
            }
        )  # fmt: skip
    return events


class _Tracks:
    """The track of each transfer: its channel's, or beyond all channels one that is free then."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.free_s: list[float] = []

    def of(self, source: int, destination: int, start_s: float, arrive_s: float) -> int:
        if self.cluster.queues[source, destination]:
            return int(self.cluster.channel[source, destination])
        free = (k for k, until_s in enumerate(self.free_s) if until_s <= start_s)
        track = next(free, len(self.free_s))
        self.free_s[track : track + 1] = [arrive_s]
        return self.cluster.num_channels + track


def write_trace(
    problem: Problem,
    schedule: Schedule,
    device: Int[np.ndarray, "N"],
    path: str | os.PathLike[str],
) -> None:
    """Write the trace as JSON."""
    document = {
        "otherData": {"generator": "gdp"},  # first: `gdp.files.targets` knows gdp's traces by it
        "traceEvents": trace_events(problem, schedule, device),
        "displayTimeUnit": "ms",
    }
    write_atomic(path, msgspec.json.encode(document))
