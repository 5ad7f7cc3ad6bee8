"""A placement as one HTML page that opens without a network."""

import html
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.files import write_atomic
from gdp.sim.latency import Schedule
from gdp.sim.problem import Problem
from gdp.units import format_bytes, format_seconds

# Browsers slow down with more bars than this; the longest ops are drawn, the rest is said.
MAX_BARS = 4000

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
"""


def write_report(
    problem: Problem,
    schedule: Schedule,
    device: Int[np.ndarray, "N"],
    result: Mapping[str, Any],
    path: str | os.PathLike[str],
) -> None:
    """Write the page: headline numbers, devices, timeline, candidates, costliest ops."""
    write_atomic(path, report_html(problem, schedule, device, result).encode())


def report_html(
    problem: Problem, schedule: Schedule, device: Int[np.ndarray, "N"], result: Mapping[str, Any]
) -> str:
    """The page's text; `result` holds the fields of the command line's `--json`."""
    title = f"{problem.graph.name} on {problem.cluster.name}"
    gap = "optimal" if result["proven_optimal"] else f"gap at most {result['gap']:.1%}"
    headline = (
        f"{result['objective']}: latency {format_seconds(result['latency_s'])}, period "
        f"{format_seconds(result['period_s'])} per sample; proven bound "
        f"{format_seconds(result['bound_s'])} ({result['bound_by']}), {gap}. "
        f"Method {result['method']}, seed {result['seed']}. Costs: {result['costs']}."
    )
    sections = [
        f"<h1>{html.escape(title)}</h1><p>{html.escape(headline)}</p>",
        "<h2>Devices</h2>" + _devices(problem, schedule, device),
        "<h2>Timeline</h2>" + _timeline(problem, schedule, device),
    ]
    if result["candidates"]:
        sections.append("<h2>Candidates</h2>" + _candidates(result["candidates"]))
    sections.append("<h2>Costliest ops</h2>" + _costliest(problem, schedule, device))
    body = "\n".join(sections)
    return (
        # `gdp.targets` knows gdp's reports by their first words.
        "<!doctype html><html lang='en'><head><meta name='generator' content='gdp'>"
        f"<meta charset='utf-8'><title>{html.escape(title)}"
        f"</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line(header, "th") + "".join(line(row, "td") for row in rows) + "</table>"


def _devices(problem: Problem, schedule: Schedule, device: Int[np.ndarray, "N"]) -> str:
    rows = []
    for d, entry in enumerate(problem.cluster.devices):
        busy_s = float(schedule.busy_s[d])
        peak = int(schedule.peak_bytes[d])
        rows.append(
            [
                entry.name,
                str(int((device == d).sum())),
                format_seconds(busy_s),
                f"{busy_s / max(schedule.latency_s, 1e-30):.0%}",
                format_bytes(peak),
                f"{peak / entry.memory_bytes:.0%}",
            ]
        )
    return _table(["device", "ops", "busy", "of the run", "peak memory", "full"], rows)


def _timeline(problem: Problem, schedule: Schedule, device: Int[np.ndarray, "N"]) -> str:
    import plotly.graph_objects as go

    graph, names = problem.graph, problem.cluster.device_names
    length_s = schedule.finish_s - schedule.start_s
    drawn = np.flatnonzero(~graph.is_io & (length_s > 0))
    left_out = max(0, len(drawn) - MAX_BARS)
    drawn = drawn[np.argsort(-length_s[drawn], kind="stable")][:MAX_BARS]
    figure = go.Figure()
    figure.add_bar(
        orientation="h",
        y=[names[d] for d in device[drawn]],
        x=(length_s[drawn] * 1e3).tolist(),
        base=(schedule.start_s[drawn] * 1e3).tolist(),
        hovertext=[f"{graph.op_names[i]} ({graph.op_types[i]})" for i in drawn],
        name="ops",
    )
    sent = schedule.transfers
    moved = np.flatnonzero(sent.arrive_s > sent.start_s)[:MAX_BARS]
    if len(moved):
        figure.add_bar(
            orientation="h",
            y=[f"{names[sent.source[i]]} to {names[sent.destination[i]]}" for i in moved],
            x=((sent.arrive_s - sent.start_s)[moved] * 1e3).tolist(),
            base=(sent.start_s[moved] * 1e3).tolist(),
            hovertext=[graph.tensor_names[sent.tensor[i]] for i in moved],
            name="transfers",
        )
    figure.update_layout(barmode="overlay", xaxis_title="ms", height=180 + 45 * len(names))
    note = f"<p>{left_out} shorter ops are not drawn.</p>" if left_out else ""
    return figure.to_html(full_html=False, include_plotlyjs=True) + note


def _candidates(candidates: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            c["method"],
            "-" if c["latency_s"] is None else format_seconds(c["latency_s"]),
            "-" if c["period_s"] is None else format_seconds(c["period_s"]),
            "yes" if c["feasible"] else f"no {c['reason']}",
            f"{c['seconds']:.2f} s",
        ]
        for c in candidates
    ]
    return _table(["method", "latency", "period", "fits", "took"], rows)


def _costliest(problem: Problem, schedule: Schedule, device: Int[np.ndarray, "N"]) -> str:
    graph = problem.graph
    length_s = schedule.finish_s - schedule.start_s
    rows = [
        [
            graph.op_names[i],
            graph.op_types[i],
            problem.cluster.device_names[device[i]],
            format_seconds(float(length_s[i])),
            f"{graph.flop[i] / 1e9:.3f}",
        ]
        for i in np.argsort(-length_s, kind="stable")[:20]
    ]
    return _table(["op", "type", "device", "time", "GFLOP"], rows)
