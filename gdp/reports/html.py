"""A placement as one HTML page that opens without a network.

Jinja2 fills the templates in `page/` and escapes what comes from models; the charts are drawn by
the page's own scripts on canvases. plotly.js was tried: it alone is 4.8 MB, and a page of 5,000 ops
took over six seconds to open, as it draws an SVG element for each.
"""

import base64
import functools
import hashlib
import os
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import msgspec

from gdp.files.writing import write_atomic
from gdp.methods.portfolio import HEURISTICS
from gdp.reports import tables
from gdp.reports.modules import module_tree
from gdp.reports.payload import payload
from gdp.reports.view import PlacementView
from gdp.sim.objectives import find_objective
from gdp.units import format_bytes, format_seconds

SCRIPTS = ("base.js", "timeline.js", "memory.js", "modules.js", "page.js")


def write_report(
    view: PlacementView,
    result: Mapping[str, Any],
    path: str | os.PathLike[str],
    measured: Mapping[str, Any] | None = None,
    steady: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write the page of `report_html`."""
    write_atomic(path, report_html(view, result, measured, steady, generation).encode())


def report_html(
    view: PlacementView,
    result: Mapping[str, Any],
    measured: Mapping[str, Any] | None = None,
    steady: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> str:
    """The page's text. `result` holds the fields of `Result.to_json`, `measured` those of
    `RunReport.to_json` where the placement was executed, `steady` those of a
    `gdp.runtime.steady_state.SteadyState` where the pipeline is to be drawn, `generation` those of
    `gdp.commands.generation.GenerationAnswer` where a request was placed."""
    tree = module_tree(view)
    cut = tables.cut_rows(view)
    script, pipelined = _scripts(), find_objective(result["objective"]).pipelined
    return _environment().get_template("page.html").render(
        title=f"{view.model.name} on {view.problem.cluster.name}",
        model=view.model.name,
        cluster=view.problem.cluster.name,
        result=result,
        value_s=tables.value_of(result),
        pipelined=pipelined,
        speed_up=tables.speed_ups(result, [name for name, _ in HEURISTICS]),
        num_ops=int(view.ops_in.sum()),
        num_kernels=int(view.is_work.sum()),
        samples=len(view.ways),
        devices=tables.device_rows(
            view, result["peak_bytes"], result["period_s"] if pipelined else None
        ),
        cut=cut[: tables.MAX_ROWS],
        cut_count=len(cut),
        cut_bytes=sum(row["bytes"] for row in cut),
        cut_s=sum(row["seconds"] for row in cut),
        breakdowns=tables.breakdowns(view, tree),
        costliest=tables.costliest_rows(view),
        curve=_polyline(result.get("curve", ())),
        measured=measured,
        steady=steady,
        generation=generation and tables.generation_rows(generation, view.problem.cluster),
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
    """A file of `page/`, which is gdp's own and goes into the page as it is."""
    return (files("gdp.reports") / "page" / name).read_text(encoding="utf-8")


@functools.cache
def _scripts() -> str:
    """The page's script; its hash stands in the page's policy, which lets no other run."""
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
