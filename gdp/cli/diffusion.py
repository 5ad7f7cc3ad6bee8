"""`gdp place` of an image or video pipeline."""

import sys
from typing import TYPE_CHECKING, Any

from gdp.base.units import format_bytes, format_seconds
from gdp.cli.show import show, stages
from gdp.cli.text import shown, table

if TYPE_CHECKING:
    from gdp.api.diffusion.answer import PipelineAnswer, PlacedComponent
    from gdp.cluster.types import Cluster


def place_media(
    spec: str, cluster: "Cluster", request: dict[str, str], costs: str | None,
    output: str | None, force: bool,
) -> None:  # fmt: skip
    """Answer about a pipeline, and write the files that run it to a folder."""
    from gdp.api.diffusion.export import KIND, export_pipeline
    from gdp.api.diffusion.place import place_pipeline
    from gdp.base.files.writing import OverwritePolicy, check_folder_writable

    if output:
        check_folder_writable(output, KIND, OverwritePolicy(force=force))
    with stages() as say:
        answer = place_pipeline(spec, cluster, costs=costs, progress=say, **request)
    if output and answer.feasible:
        export_pipeline(answer, output, force)
    show(answer.to_json(), lambda: pipeline_text(answer, output))
    if not answer.feasible:
        sys.exit(1)


def pipeline_text(answer: "PipelineAnswer", output: str | None = None) -> str:
    """Text of an answer: seconds, how each component runs, memory by phase, other plans."""
    pipeline, plan = answer.pipeline, answer.plan
    lines = [f"{pipeline.name}: {pipeline.request.text} on {answer.cluster.name}"]
    if plan is None:
        lines += ["nothing fits: no way to run its components leaves each of them enough memory"]
        lines += [f"advice   {text}" for text in answer.advice]
        return shown([*lines, *(f"note     {text}" for text in answer.notes)])
    item = "video" if pipeline.request.frames > 1 else "image"
    lines += [
        f"time     {format_seconds(answer.item_s)} for each {item}: {_phases(plan.placed)}",
        f"plan     {plan.text} (the quickest of {plan.options} ways to run the components)",
        "",
        table(
            ("component", "weights", "on", "how", "one pass", "passes", "seconds"),
            [_row(answer, p) for p in plan.placed],
        ),
        "",
        _memory(answer),
    ]  # fmt: skip
    others = [f"{o.text} {format_seconds(o.seconds)}" for o in answer.others[:4]]
    lines += ["", f"else     {'; '.join(others)}"] if others else []
    lines += [f"advice   {text}" for text in answer.advice]
    lines += [f"note     {text}" for text in answer.notes]
    if output:
        lines += [f"written  {output}"]
    return shown(lines)


def _phases(placed: "tuple[PlacedComponent, ...]") -> str:
    words = {"encode": "prompt", "denoise": "denoising", "decode": "decoding"}
    seconds = {word: 0.0 for word in words.values()}
    for p in placed:
        seconds[words[p.role]] += p.way.seconds
    return ", ".join(f"{word} {format_seconds(s)}" for word, s in seconds.items())


def _row(answer: "PipelineAnswer", placed: "PlacedComponent") -> tuple[str, ...]:
    way, names = placed.way, answer.cluster.device_names
    plan = answer.plan
    devices = plan.cards if plan is not None and plan.cards else way.devices
    return (
        placed.name, format_bytes(placed.priced.weight_bytes),
        " + ".join(names[d] for d in devices), way.text, format_seconds(way.call_s * placed.priced.component.calls),
        str(placed.priced.component.passes), format_seconds(way.seconds),
    )  # fmt: skip


def _memory(answer: "PipelineAnswer") -> str:
    """Bytes of each memory while each component runs."""
    plan = answer.plan
    assert plan is not None
    header = ("memory while", *(p.name for p in plan.placed), "limit")
    rows: list[tuple[str, ...]] = []
    for row in answer.memory():
        held: dict[str, Any] = row["held_bytes"]
        room = row["room_bytes"]
        rows.append((
            ", ".join(row["devices"]), *(format_bytes(b) for b in held.values()),
            "none" if room is None else format_bytes(room),
        ))  # fmt: skip
    return table(header, rows)
