"""`gdp place models.toml`: several models on one box."""

import sys
from typing import TYPE_CHECKING

from gdp.base.units import format_bytes, format_seconds
from gdp.cli.show import show, stages
from gdp.cli.text import shown, table

if TYPE_CHECKING:
    from gdp.api.box.answer import BoxAnswer, PlacedModel
    from gdp.cluster.types import Cluster


def place_box(
    models: str, cluster: "Cluster", costs: str | None, output: str | None, force: bool
) -> None:
    """Answer about the models of a file, and write the files that start them to a folder."""
    from gdp.api.box.export import KIND, export_box
    from gdp.api.box.place import place_models
    from gdp.base.files.writing import OverwritePolicy, check_folder_writable

    if output:
        check_folder_writable(output, KIND, OverwritePolicy(force=force))
    with stages() as say:
        answer = place_models(models, cluster, costs=costs, progress=say)
    if output:
        export_box(answer, output, force)
    show(answer.to_json(), lambda: box_text(answer, output))
    if not answer.keeps_limits_alone:
        sys.exit(1)


def box_text(answer: "BoxAnswer", output: str | None = None) -> str:
    """Text of an answer: verdict, models, memory by device, advice, commands."""
    placed = [m for m in answer.models if m.priced is not None]
    count, all_ = len(placed), len(answer.models)
    proof = f"no packing is below {answer.load_bound:.2f}"
    if answer.proven:
        proof = f"optimal over {answer.options} options"
    lines = [
        f"{count} of {all_} models on {answer.cluster.name}: {_verdict(answer)}",
        f"load     {_load(answer)} ({proof})",
    ]
    lines += [f"turns    {', '.join(names)}: one of them is loaded" for names in answer.groups]
    lines += [f"dropped  {m.model.name}: {m.reason}" for m in answer.models if m.priced is None]
    lines += [f"advice   {text}" for text in answer.advice]
    lines += [f"disk     {answer.disk}; engines' own start-up comes on top"]
    header = (
        "model", "devices", "TTFT alone", "all busy", "TPOT alone", "all busy", "tokens/s",
        "all busy", "served", "load",
    )  # fmt: skip
    lines += ["", table(header, [_row(m) for m in placed]), ""]
    header = ("device", "model", "weights", "caches", "buffers", "own context", "together")
    rows = []
    for use in answer.devices:
        for name, held in use.engines:
            rows.append(
                (use.device, name, *map(format_bytes, held[1:]), format_bytes(held.all_bytes))
            )
        room = "no limit" if use.room_bytes is None else format_bytes(use.room_bytes)
        rows.append(
            (
                use.device,
                "loaded at most",
                "",
                "",
                "",
                "",
                f"{format_bytes(use.loaded_bytes)} of {room}",
            )
        )
    lines += [table(header, rows)]
    lines += [f"note     {text}" for text in answer.notes]
    lines += [""] + [f"start    {m.model.name}: {line}" for m in placed for line in m.commands]
    if output:
        lines += [f"written  {output}"]
    return shown(lines)


def _verdict(answer: "BoxAnswer") -> str:
    if answer.feasible:
        return "all limits are kept, whatever the others do"
    late = [m.model.name for m in answer.models if m.busy is not None and m.excess(m.busy) > 1]
    if answer.keeps_limits_alone:
        return f"limits are kept alone, and not by {', '.join(late)} while all others are busy"
    return "limits are not kept" + (f" by {', '.join(late)}" if late else "")


def _load(answer: "BoxAnswer") -> str:
    """Part of the demands that is served, in words."""
    if answer.load <= 1:
        return f"all demands are served; the busiest device, or group, takes {answer.load:.0%}"
    placed = [m for m in answer.models if m.priced is not None]
    worst = min(placed, key=lambda m: m.served / m.model.weight)
    return (
        f"not all demands are served at once: {worst.model.name} gets {worst.served:.0%} of its "
        "own, the least by its weight"
    )


def _row(m: "PlacedModel") -> tuple[str, ...]:
    priced, alone, busy = m.priced, m.alone, m.busy
    assert priced is not None
    assert alone is not None
    assert busy is not None
    used = [
        h.device for h, b in zip(priced.held, priced.busy, strict=True) if b > 0 and h.all_bytes
    ]
    name = m.model.name + ("" if m.group is None else f" (turn {m.group + 1})")
    return (
        name, " + ".join(used) or "-", format_seconds(alone.ttft_s), format_seconds(busy.ttft_s),
        format_seconds(alone.tpot_s), format_seconds(busy.tpot_s), f"{alone.tokens_per_s:.1f}",
        f"{busy.tokens_per_s:.1f}", f"{m.served:.0%}", format_seconds(priced.load_s),
    )  # fmt: skip
