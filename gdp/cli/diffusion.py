"""`gdp place` of an image or video pipeline."""

import sys
from typing import TYPE_CHECKING, Any

from gdp.base.units import format_bytes, format_seconds
from gdp.cli.show import show, stages
from gdp.cli.text import shown, table

if TYPE_CHECKING:
    from gdp.api.diffusion.answer import PipelineAnswer, PlacedComponent
    from gdp.cli.energy_text import Price
    from gdp.cluster.types import Cluster
    from gdp.importers.diffusers.request import MediaRequest


def place_media(
    spec: str, cluster: "Cluster", request: dict[str, str | None], quantize: str,
    costs: str | None, output: str | None, force: bool, price: "Price | None" = None,
) -> None:  # fmt: skip
    """Answer about a pipeline, and write the files that run it to a folder."""
    from gdp.api.diffusion.export import KIND, export_pipeline
    from gdp.api.diffusion.place import place_pipeline
    from gdp.base.files.writing import OverwritePolicy, check_folder_writable

    if output:
        check_folder_writable(output, KIND, OverwritePolicy(force=force))
    with stages() as say:
        answer = place_pipeline(
            spec, cluster, quantize=quantize, costs=costs, progress=say, **request
        )
    if output and answer.feasible:
        export_pipeline(answer, output, force)
    plain = answer.to_json()
    if price is not None and answer.item_j is not None:
        plain |= {
            "price_per_kwh": price.per_kwh, "currency": price.currency or None,
            "price_per_thousand_items": price.of(1000 * answer.item_j),
        }  # fmt: skip
    show(plain, lambda: pipeline_text(answer, output, price))
    if not answer.feasible:
        sys.exit(1)


def pipeline_text(
    answer: "PipelineAnswer", output: str | None = None, price: "Price | None" = None
) -> str:
    """Text of an answer: seconds, how each component runs, memory by phase, other plans."""
    pipeline, plan = answer.pipeline, answer.plan
    lines = [f"{pipeline.name}: {_request(pipeline.request)} on {answer.cluster.name}"]
    if plan is None:
        lines += ["nothing fits: no way to run its components leaves each of them enough memory"]
        lines += [f"advice   {text}" for text in answer.advice]
        return shown([*lines, *(f"note     {text}" for text in answer.notes)])
    item = "video" if pipeline.request.is_video else "image"
    lines += [
        f"time     {format_seconds(answer.item_s)} for each {item}: {_phases(plan.placed)}",
        *_energy(answer, item, price),
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


def _energy(answer: "PipelineAnswer", item: str, price: "Price | None") -> list[str]:
    """The line on joules, watts and money; none where the watts of a device are unknown."""
    joules, plan = answer.item_j, answer.plan
    if joules is None or plan is None or plan.watts is None:
        return []
    money = "" if price is None else f"; {price.text(1000 * joules)} per thousand {item}s"
    return [f"energy   {joules:.4g} J for each {item}; {plan.watts:.0f} W on average (GPUs){money}"]


def _request(request: "MediaRequest") -> str:
    """A request in words."""
    size = f"{request.width}x{request.height}"
    what = f"video {size}, {request.frames} frames" if request.is_video else f"image {size}"
    many = f"{request.batch} of them, " if request.batch > 1 else ""
    return f"{what}, {many}{request.steps} steps, guidance {request.guidance or 0:g}"


def _phases(placed: "tuple[PlacedComponent, ...]") -> str:
    words = {"encode": "prompt", "denoise": "denoising", "decode": "decoding"}
    seconds = dict.fromkeys(words.values(), 0.0)
    for p in placed:
        seconds[words[p.role]] += p.way.seconds
    return ", ".join(f"{word} {format_seconds(s)}" for word, s in seconds.items())


def _row(answer: "PipelineAnswer", placed: "PlacedComponent") -> tuple[str, ...]:
    way, component = placed.way, placed.priced.component
    return (
        placed.name, format_bytes(placed.priced.weight_bytes),
        " + ".join(answer.names(way.devices)), way.text,
        format_seconds(way.call_s * component.calls), str(component.passes),
        format_seconds(way.seconds),
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
