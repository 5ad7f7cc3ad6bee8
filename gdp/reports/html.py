"""A placement as one HTML page that opens without a network: the page, then its tables.

Jinja2 fills the templates in `page/` and escapes what comes from models; the charts are drawn by
the page's own scripts on canvases. plotly.js was tried: it alone is 4.8 MB, and a page of 5,000 ops
took over six seconds to open, as it draws an SVG element for each.

Tables are rows of plain values; seconds are of one sample or training step, and ops are named by
`gdp.reports.view.op_label`.
"""

import base64
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float, Int

from gdp.base.files.writing import write_atomic
from gdp.base.units import format_bytes, format_seconds
from gdp.cluster.types import UNLIMITED_BYTES, Cluster
from gdp.methods.portfolio import HEURISTICS
from gdp.reports.payload import payload
from gdp.reports.view import FEW, ModuleTree, PlacementView, layers, module_tree, op_label
from gdp.sim.objectives import find_objective

SCRIPTS = ("base.js", "timeline.js", "memory.js", "modules.js", "page.js")
MAX_ROWS = 200
"""Of a table that people read; what is left out is counted."""
SMALL = 0.005
"""Parts of a smaller share are neither drawn nor told."""


def write_report(
    view: PlacementView,
    result: Mapping[str, Any],
    path: str | os.PathLike[str],
    measured: Mapping[str, Any] | None = None,
    steady: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    traffic: Mapping[str, Any] | None = None,
) -> None:
    """Write the page of `report_html`."""
    write_atomic(path, report_html(view, result, measured, steady, generation, traffic).encode())


def report_html(
    view: PlacementView,
    result: Mapping[str, Any],
    measured: Mapping[str, Any] | None = None,
    steady: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    traffic: Mapping[str, Any] | None = None,
) -> str:
    """The page's text. `result` holds the fields of `Result.to_json`, `measured` those of
    `RunReport.to_json` where the placement was executed, `steady` those of a
    `gdp.measure.cycle.SteadyState` where the pipeline is to be drawn, `generation` those of
    `gdp.api.generation.GenerationAnswer` where a request was placed, `traffic` those under
    "traffic" of `gdp.api.traffic.plan.ServedPlan.to_json` where traffic was simulated."""
    tree = module_tree(view)
    cut = cut_rows(view)
    script, row = _scripts(), find_objective(result["objective"])
    pipelined = row.pipelined
    return _environment().get_template("page.html").render(
        title=f"{view.model.name} on {view.problem.cluster.name}",
        model=view.model.name,
        cluster=view.problem.cluster.name,
        result=result,
        of_value=row.text,
        quantity=row.quantity,
        compared=row.compared,
        pipelined=pipelined,
        speed_up=speed_ups(result, [name for name, _ in HEURISTICS]),
        num_ops=int(view.ops_in.sum()),
        num_kernels=int(view.is_work.sum()),
        samples=len(view.ways),
        devices=device_rows(
            view, result["peak_bytes"], result["period_s"] if pipelined else None
        ),
        groups=group_rows(view),
        cut=cut[: MAX_ROWS],
        cut_count=len(cut),
        cut_bytes=sum(row["bytes"] for row in cut),
        cut_s=sum(row["seconds"] for row in cut),
        breakdowns=breakdowns(view, tree),
        costliest=costliest_rows(view),
        curve=_polyline(result.get("curve", ())),
        measured=measured,
        steady=steady,
        generation=generation and generation_rows(generation, view.problem.cluster),
        traffic=traffic,
        style=_asset("page.css"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=_json(payload(view, tree)),
    )  # fmt: skip


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("gdp.reports", "page"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"seconds": format_seconds, "bytes": format_bytes}
    return environment


@functools.cache
def _asset(name: str) -> str:
    """A file of `page/`, written by gdp and inserted unchanged."""
    return (files("gdp.reports") / "page" / name).read_text(encoding="utf-8")


@functools.cache
def _scripts() -> str:
    """The page's script; the page's policy holds its hash and allows no other."""
    return '"use strict";\n' + "\n".join(map(_asset, SCRIPTS))


def _json(data: Mapping[str, Any]) -> str:
    """JSON for the inside of a script element, which a name in it cannot end."""
    text = msgspec.json.encode(data).decode()
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _polyline(curve: Any) -> dict[str, Any] | None:
    """The best value over the course of a search, as corners of a line in a box of 600 x 120."""
    points = [(float(at), float(value)) for at, value in curve if value < float("inf")]
    if len(points) < 2 or points[0][1] <= points[-1][1]:
        return None
    end, top, low = max(points[-1][0], 1e-30), points[0][1], points[-1][1]
    corners, y = [], 0.0
    for at, value in points:
        x = 600 * at / end
        corners.append((x, y))
        y = 120 * (top - value) / (top - low)
        corners.append((x, y))
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*corners, (600.0, y)])
    return {"points": text, "seconds": end, "first_s": top, "last_s": low}


def device_rows(
    view: PlacementView, peak_bytes: Mapping[str, int], period_s: float | None = None
) -> list[dict[str, Any]]:
    """Rows of the devices for the samples shown; `peak_bytes` are those of the objective, by name.

    With a period, shares of busy time are those of a full pipeline.
    """
    span_s = view.end_s if period_s is None else period_s * len(view.ways)
    ops, kernels = view.counts()
    names = view.problem.cluster.device_names
    beside = {d: [names[e] for e in team if e != d] for team in view.teams for d in team}
    shared = {d: [names[e] for e in s.devices if e != d] for s in view.splits for d in s.devices}
    rows = []
    for d, device in enumerate(view.problem.cluster.devices):
        peak = int(peak_bytes.get(device.name, view.schedule.peak_bytes[d]))
        limit = None if device.memory_bytes >= UNLIMITED_BYTES else device.memory_bytes
        busy_s = float(view.busy_s[d])
        rows.append(
            {
                "name": device.name, "kind": device.kind, "ops": int(ops[d]),
                "beside": beside.get(d, []), "shared": shared.get(d, []),
                "kernels": int(kernels[d]), "busy_s": busy_s,
                "busy_share": busy_s / max(span_s, 1e-30),
                "peak_bytes": peak, "limit_bytes": limit,
                "full": None if limit is None else peak / limit,
            }
        )  # fmt: skip
    return rows


def group_rows(view: PlacementView) -> list[dict[str, Any]]:
    """Groups of devices that compute each op together: the share of each member, and the seconds
    of their collectives in the run shown, which are also a share of the group's busy time."""
    problem, names = view.problem, view.problem.cluster.device_names
    once_s, rows = problem.origin.exchange_s, []
    for split in view.splits:
        lead, spent_s = split.devices[0], 0.0
        if once_s is not None:
            mine = (view.device == lead) & view.is_work
            spent_s = float((once_s[mine, lead] * problem.graph.repeats[mine]).sum())
        rows.append(
            {
                "members": [
                    {"name": names[d], "number": d, "part": part, "share": part / sum(split.parts)}
                    for d, part in zip(split.devices, split.parts, strict=True)
                ],
                "experts": split.experts, "even": split.is_even, "exchange_s": spent_s,
                "exchange_share": spent_s / max(float(view.schedule.busy_s[lead]), 1e-30),
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
    draft = ("draft",) if answer["draft"] is not None else ()
    held = ("weights", "cache", "activations", *draft, "reserve")
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
            "bytes": int(view.problem.sent_bytes[tensor]),
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
    value_s = result["value"]
    fits = {c["method"]: c["value_s"] for c in result["candidates"] if c["feasible"]}
    single_s = fits.get("single")
    best = min((n for n in heuristics if n in fits), key=lambda n: fits[n], default=None)
    return {
        "single": None if single_s is None or value_s <= 0 else single_s / value_s,
        "heuristic": None if best is None or value_s <= 0 else fits[best] / value_s,
        "heuristic_name": best,
        "asked": "single" in {c["method"] for c in result["candidates"]},
    }
