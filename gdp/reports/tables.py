"""The tables of a report, as rows of plain values that the page formats.

Seconds are of one sample or training step. Names are those of `gdp.reports.view.op_label`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gdp.cluster.types import UNLIMITED_BYTES, Cluster
from gdp.reports.modules import FEW, ModuleTree, layers
from gdp.reports.view import PlacementView, op_label
from gdp.sim.objectives import find_objective

MAX_ROWS = 200
"""Of a table that people read; what is left out is counted."""
SMALL = 0.005
"""Parts of a smaller share are neither drawn nor told."""


def device_rows(
    view: PlacementView, peak_bytes: Mapping[str, int], period_s: float | None = None
) -> list[dict[str, Any]]:
    """Rows of the devices for the samples shown; `peak_bytes` are those of the objective, by name.

    With a period, shares of busy time are those of a full pipeline.
    """
    span_s = view.end_s if period_s is None else period_s * len(view.ways)
    ops, kernels = view.counts()
    busy = np.sum([way.schedule.busy_s for way in view.ways], axis=0)
    names = view.problem.cluster.device_names
    beside = {d: [names[e] for e in team if e != d] for team in view.teams for d in team}
    rows = []
    for d, device in enumerate(view.problem.cluster.devices):
        peak = int(peak_bytes.get(device.name, view.schedule.peak_bytes[d]))
        limit = None if device.memory_bytes >= UNLIMITED_BYTES else device.memory_bytes
        busy_s = float(busy[d])
        rows.append(
            {
                "name": device.name, "kind": device.kind, "ops": int(ops[d]),
                "beside": beside.get(d, []),
                "kernels": int(kernels[d]), "busy_s": busy_s,
                "busy_share": busy_s / max(span_s, 1e-30),
                "peak_bytes": peak, "limit_bytes": limit,
                "full": None if limit is None else peak / limit,
            }
        )  # fmt: skip
    return rows


def generation_rows(answer: Mapping[str, Any], cluster: Cluster) -> dict[str, Any]:
    """A placed generation with the bars of its page: of each phase the parts of its time, of each
    device what fills it, as shares of the whole."""
    number = {name: d for d, name in enumerate(cluster.device_names)}
    phases = [
        {
            "name": name, "seconds": seconds,
            "parts": [
                part | {"number": number.get(part["device"])}
                for part in answer["shares"][phase] if part["share"] >= SMALL
            ],
        }
        for name, phase, seconds in (
            ("prompt", "prompt", answer["first_token_s"]), ("step", "decode", answer["token_s"])
        )
    ]  # fmt: skip
    seen = {part["text"]: part for phase in phases for part in phase["parts"]}
    held = ("weights", "cache", "activations", "reserve")
    memory = []
    for row in answer["memory"]:
        whole = sum(row[f"{kind}_bytes"] for kind in held) + max(row["free_bytes"] or 0, 0)
        parts = [(kind, row[f"{kind}_bytes"] / max(whole, 1)) for kind in held]
        memory.append(dict(row) | {"number": number[row["device"]], "parts": parts})
    legend = sorted(seen.values(), key=lambda part: (part["number"] is None, part["number"]))
    return dict(answer) | {"phases": phases, "legend": legend, "memory": memory, "held": held}


def cut_rows(view: PlacementView) -> list[dict[str, Any]]:
    """Every tensor that is sent, of each way that samples take, the longest transfer first."""
    rows = [row for k, way in enumerate(view.ways, start=1) for row in _cut(way, k)]
    return sorted(rows, key=lambda row: (-row["seconds"], -row["bytes"]))


def _cut(view: PlacementView, sample: int) -> Iterator[dict[str, Any]]:
    graph, names, sent = view.problem.graph, view.problem.cluster.device_names, view.schedule
    transfers = sent.transfers
    by_tensor = np.searchsorted(np.sort(graph.use_tensor), np.arange(graph.num_tensors + 1))
    readers = graph.use_op[np.argsort(graph.use_tensor, kind="stable")]
    for k in range(len(transfers.tensor)):
        tensor, to = int(transfers.tensor[k]), int(transfers.destination[k])
        maker = int(graph.producer[tensor])
        read_by = readers[by_tensor[tensor] : by_tensor[tensor + 1]]
        read_by = read_by[view.device[read_by] == to]
        yield {
            "sample": sample, "tensor": graph.tensor_names[tensor],
            "bytes": int(graph.tensor_bytes[tensor]),
            "seconds": float(transfers.arrive_s[k] - transfers.start_s[k]),
            "waits_s": max(0.0, float(transfers.start_s[k] - sent.finish_s[maker])),
            "source": names[transfers.source[k]], "destination": names[to],
            "maker": op_label(graph, maker),
            "readers": [op_label(graph, int(op)) for op in read_by],
        }  # fmt: skip


def time_by(
    view: PlacementView, labels: Sequence[str], group: Int[np.ndarray, "M"]
) -> list[dict[str, Any]]:
    """Seconds of the kernels of each group on each device, the costliest group first; what comes
    after the first `FEW` is one row."""
    work, seconds = view.is_work, _seconds(view)
    table = np.zeros((len(labels), view.problem.num_devices))
    for way in view.ways:  # a sample's share on each device, in the mean
        np.add.at(table, (group[work], way.device[work]), seconds[work] / len(view.ways))
    kernels = np.bincount(group[work], minlength=len(labels))
    order = [int(g) for g in np.argsort(-table.sum(axis=1), kind="stable") if kernels[g]]
    rows = [_time_row(labels[g], table[g], int(kernels[g])) for g in order[:FEW]]
    if rest := order[FEW:]:
        total = np.sum(table[rest], axis=0)
        rows.append(_time_row(f"{len(rest)} others", total, int(kernels[rest].sum())))
    return rows


def _time_row(label: str, by_device_s: Float[np.ndarray, "D"], kernels: int) -> dict[str, Any]:
    return {
        "label": label, "seconds": float(by_device_s.sum()), "kernels": kernels,
        "by_device_s": by_device_s.tolist(),
    }  # fmt: skip


def breakdowns(view: PlacementView, tree: ModuleTree) -> dict[str, list[dict[str, Any]]]:
    """Time by op type and, if the model names them, by module."""
    types = sorted(set(view.problem.graph.op_types))
    index = {name: i for i, name in enumerate(types)}
    type_of = np.array([index[name] for name in view.problem.graph.op_types])
    tables = {"op type": time_by(view, types, type_of)}
    if not tree.by_type:
        tables["module"] = time_by(view, *layers(tree, view))
    return tables


def costliest_rows(view: PlacementView) -> list[dict[str, Any]]:
    """The kernels that take longest."""
    graph, seconds, names = view.problem.graph, _seconds(view), view.problem.cluster.device_names
    serving = {team[0]: ", ".join(names[d] for d in team) for team in view.teams}
    order = [op for op in np.argsort(-seconds, kind="stable") if view.is_work[op]]
    return [
        {
            "label": op_label(graph, int(op)), "type": graph.op_types[op],
            "device": serving.get(int(view.device[op]), names[view.device[op]]),
            "seconds": float(seconds[op]), "flop": float(graph.flop[op]),
            "weight_bytes": int(graph.weight_bytes[op]), "ops": int(view.ops_in[op]),
        }
        for op in order[:MAX_ROWS]
    ]  # fmt: skip


def _seconds(view: PlacementView) -> Float[np.ndarray, "M"]:
    """Seconds of each kernel; 0 if it never starts."""
    schedule = view.schedule
    ran = np.isfinite(schedule.finish_s)
    return np.where(ran, np.where(ran, schedule.finish_s, 0.0) - np.where(
        ran, schedule.start_s, 0.0), 0.0)  # fmt: skip


def speed_ups(result: Mapping[str, Any], heuristics: Sequence[str]) -> dict[str, Any]:
    """Simulated speed-up over the best single device and over the best heuristic; None if no such
    placement fits in memory."""
    value_s = value_of(result)
    fits = {c["method"]: c["value_s"] for c in result["candidates"] if c["feasible"]}
    single_s = fits.get("single")
    best = min((n for n in heuristics if n in fits), key=lambda n: fits[n], default=None)
    return {
        "single": None if single_s is None or value_s <= 0 else single_s / value_s,
        "heuristic": None if best is None or value_s <= 0 else fits[best] / value_s,
        "heuristic_name": best,
        "asked": "single" in {c["method"] for c in result["candidates"]},
    }


def value_of(result: Mapping[str, Any]) -> float:
    """The seconds that the result's objective minimises."""
    return result["period_s" if find_objective(result["objective"]).pipelined else "latency_s"]
