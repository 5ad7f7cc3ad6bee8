"""Results as text for a terminal: aligned tables with units.

Names come from models and may hold anything, so every cell and every line is made printable.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gdp.base.terminal import printable
from gdp.base.units import format_bytes, format_seconds
from gdp.cluster.detect import Rates
from gdp.cluster.links import links_line
from gdp.cluster.presets import device_preset, presets
from gdp.cluster.types import UNLIMITED_BYTES, Cluster, Device
from gdp.costs.default import source_of
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import MethodNote
from gdp.placement.placement import Split
from gdp.question.result import DeviceMemory, GenerationAnswer, Result
from gdp.sim.objectives import find_objective
from gdp.splits.members import held_graphs

if TYPE_CHECKING:
    from gdp.api.explain import Faster
    from gdp.cli.energy_text import Price
    from gdp.targets.target import StartCommand


class Shown(str):
    """Text of several lines that is printable already."""


def shown(lines: Sequence[str]) -> Shown:
    """Lines and tables as one text, every line printable."""
    return Shown("\n".join(x if isinstance(x, Shown) else printable(x) for x in lines))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Shown:
    """Columns padded to their widest cell; the first to the left, the others to the right.

    >>> print(table(["a", "bb"], [["x", "1"]]))
    a  bb
    x   1
    """
    cells = [[printable(cell) for cell in row] for row in (header, *rows)]
    width = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        texts = [
            cell.ljust(width[i]) if i == 0 else cell.rjust(width[i]) for i, cell in enumerate(row)
        ]
        lines.append("  ".join(texts).rstrip())
    return shown(lines)


def _memory(limit: int) -> str:
    return "no limit" if limit >= UNLIMITED_BYTES else format_bytes(limit)


def _reserve(device: Device) -> str:
    return format_bytes(device.reserve_bytes) if device.reserve_bytes else "-"


def is_verbose() -> bool:
    """True under `--verbose`."""
    return logging.getLogger("gdp").isEnabledFor(logging.INFO)


def result_text(
    result: Result, output: str | None = None, starts: Sequence["StartCommand"] = (),
    price: "Price | None" = None,
) -> str:  # fmt: skip
    """Text of `gdp place`: speed, memory by device, limits, gains; `--verbose` adds the rest.

    Args:
        result: The answer.
        output: File that holds the placement.
        starts: Commands that start the runtime by the placement.
        price: Of electricity; None: no money is reported.
    """
    from gdp.api.explain import faster_machines
    from gdp.cli.energy_text import energy_lines
    from gdp.cli.serving_text import serving_lines

    answer, verbose = result.generation, is_verbose()
    question, served = result.question, result.traffic
    what = result.objective if served is None else served.layout
    lines = [f"{question.graph.name} on {question.cluster.name}, {what}"]
    if served is not None:
        lines += serving_lines(served)
    if answer is None:
        lines += [*_times(result), *_deviation(result), *_bound_lines(result)]
    else:
        # The GPUs of a disaggregated plan's placement do not prefill.
        has_prefill = served is None or served.prefill is None
        if served is None:
            lines += [*generation_lines(answer), *_bound_lines(result)]
        else:
            lines += [f"limit    {text}" for text in answer.limits[0 if has_prefill else 1 :]]
        gains = faster_machines(question, result.placement)
        lines += _gains(answer, gains, has_prefill=has_prefill)
    lines += energy_lines(result, price, verbose=verbose)
    lines += [f"costs    {result.costs}"]
    lines += [_team_text(team, result) for team in result.placement.teams]
    lines += [_split_text(split, result) for split in result.placement.splits]
    if answer is None:
        lines += ["", _device_table(result)]
    else:
        lines += ["", memory_table(answer.memory if served is None else served.memory)]
    if verbose:
        lines += _details(result)
    about = "note" if served is None else "note on a batch"
    notes = [x for x in result.notes if verbose or not isinstance(x, MethodNote)]
    lines += [f"{about}: {note}" for note in notes]
    for start in starts:
        where = f" on {start.machine}" if start.machine else ""
        lines.append(f"start{f' {start.role}' if start.role else ''}{where}: {start.command}")
    lines.append(_next(result, output))
    return shown(lines)


def _device_table(result: Result) -> Shown:
    """A row per device: its ops, peak memory and limit."""
    graph, placement = result.question.graph, result.placement
    leads, held = placement.homes, held_graphs(graph, placement)
    rows = []
    for d, entry in enumerate(result.question.cluster.devices):
        mine = (placement.device == leads.get(d, d)) & ~graph.is_io
        peak = int(result.score.peak_bytes[d])
        rows.append(
            [
                entry.name,
                str(int(mine.sum())),
                f"{held[d].flop[mine].sum() / 1e9:.2f}",
                format_bytes(peak),
                _memory(entry.memory_bytes) + (" shared" if entry.memory_pool else ""),
                "-"
                if entry.memory_bytes >= UNLIMITED_BYTES
                else f"{peak / entry.memory_bytes:.0%}",
                _reserve(entry),
            ]
        )
    return table(["device", "ops", "GFLOP", "peak", "memory", "full", "reserve"], rows)


def _details(result: Result) -> list[str]:
    """Lines of `--verbose`: kernels, links, seconds of each phase, plans and candidates."""
    from gdp.cli.serving_text import compared_lines

    graph, leads, served = result.question.graph, result.placement.homes, result.traffic
    # The members of a replica group run the same kernels.
    kernels = sum(n for d, n in enumerate(result.counts.kernels) if leads.get(d, d) == d)
    phases = ", ".join(f"{name} {s:.2f}" for name, s in result.phases.items() if s >= 0.005)
    lines = [
        "",
        f"model    {int((~graph.is_io).sum())} ops, run as {kernels} kernels",
        f"method   {result.method}, seed {result.seed}",
        *links_lines(result.question.cluster),
        f"waited   {result.seconds:.2f} s: {phases}; {result.evaluations} evaluations in "
        f"{result.search_cpu_s:.2g} CPU s",
    ]
    if result.generation is not None:
        lines += ["", _device_table(result)]
    if served is not None:
        count = served.generation.request.batch
        batch = f"a batch of {count} requests" if count > 1 else "one request"
        lines += ["", f"without other traffic, {batch}:", *generation_lines(served.generation)]
        lines += [*_bound_lines(result), "", *compared_lines(served)]
    return [*lines, *(["", _candidates(result)] if result.candidates else []), ""]


def _gains(answer: GenerationAnswer, gains: "Sequence[Faster]", *, has_prefill: bool) -> list[str]:
    """The line on smaller weights and the upgrades that shorten decode and prefill most."""
    if not gains:
        return []
    chosen = [min(gains, key=lambda g: g.token_s)]
    chosen += [min(gains, key=lambda g: g.first_token_s)] if has_prefill else []
    chosen += [g for g in gains if g.what.startswith("weights")]
    texts = []
    for gain in dict.fromkeys(chosen):
        ratios = {"TPOT": answer.token_s / gain.token_s}
        if has_prefill:
            ratios["TTFT"] = answer.first_token_s / gain.first_token_s
        words = [f"{name} {ratio:.2f} times" for name, ratio in ratios.items() if ratio >= 1.01]
        texts += [f"{gain.what}: {', '.join(words)}"] if words else []
    return [f"faster   {'; '.join(texts)}"] if texts else []


def _next(result: Result, output: str | None) -> str:
    """The last line: the file that holds the placement, and the command that takes it."""
    from gdp.targets.table import EXPORTERS

    target = result.question.target
    if output is None:
        return "next: -o FILE keeps this placement for gdp explain, run and export"
    if target in EXPORTERS:
        return f"written to {output}; next: gdp export {output} --to {target} -o FOLDER"
    return f"written to {output}; next: gdp explain, run or export"


def links_lines(cluster: Cluster) -> list[str]:
    """The line of an answer on the links that it was planned on, where there are any."""
    line = links_line(cluster)
    return [f"links    {line}"] if line else []


def _bound_lines(result: Result, *, gap: bool = True) -> list[str]:
    """The proven limit and the gap to it; with `--verbose` the proof, too."""
    if not result.bound_by:
        return [f"bound    none is known of {result.objective}"]
    limit = find_objective(result.objective).text(result.bound_s)
    found = None if result.generation is None else result.generation.correction
    before = ", before measured runs corrected it" if found is not None and found.runs else ""
    lines = [f"bound    {limit}" + (f" ({result.gap_text}{before})" if gap else "")]
    if is_verbose():
        lines.append(f"proof    no placement of {result.bound_over} takes less: {result.bound_by}")
    return lines


def _times(result: Result) -> list[str]:
    row, score = find_objective(result.objective), result.score
    return [
        *([] if row.unit == "s" else [f"{row.quantity:8} {row.text(result.value_s)}"]),
        f"latency  {format_seconds(score.latency_s)}",
        f"period   {format_seconds(score.period_s)} per sample"
        + (f", {1 / score.period_s:.4g} samples/s" if score.period_s > 0 else ""),
    ]


def generation_lines(answer: GenerationAnswer) -> list[str]:
    """Tokens/s, TTFT, TPOT, pipeline, draft model, context, and what limits either phase."""
    from gdp.cli.serving_text import interval_lines

    request = answer.request
    batch = f", batch of {request.batch}" if request.batch > 1 else ""
    batch += f" on each of {answer.copies} copies" if answer.copies > 1 else ""
    lines = [
        f"speed    {answer.tokens_per_s:.1f} tokens/s{batch}; "
        f"TTFT {format_seconds(answer.first_token_s)}, "
        f"TPOT {format_seconds(answer.token_s * request.steps / request.new)}; "
        f"{format_seconds(answer.request_s)} for {request.prompt} + {request.new} tokens"
    ]
    lines += interval_lines(answer.intervals, answer.correction)
    if answer.full_tokens_per_s is not None:
        lines.append(
            f"full     {answer.full_tokens_per_s:.1f} tokens/s once all {answer.context} tokens of "
            "the context are in use"
        )
    if answer.is_pipeline:
        flight = f"{answer.in_flight} request{'s' if answer.in_flight > 1 else ''} in flight"
        more = [] if answer.room is None else [f"memory has room for {answer.room}"]
        more += [f"more than {answer.useful} are no faster"] * (answer.useful <= answer.in_flight)
        lines.append(
            f"in all   {answer.all_tokens_per_s:.1f} tokens/s, {'; '.join([flight, *more])}"
        )
    if answer.draft is not None:
        gpus = ", ".join(row.device for row in answer.memory if row.draft_bytes)
        kept = (
            f", {request.new / request.steps:.2f} of an iteration are accepted"
            if request.passes else ""
        )  # fmt: skip
        lines.append(
            f"drafts   of {answer.draft.tokens} tokens an iteration by {answer.draft.model} on "
            f"{gpus}{kept}"
        )
    if answer.longest_context is not None:
        lines.append(
            f"context  KV cache for {answer.context} tokens; this plan has room for "
            f"{answer.longest_context}"
        )
    return [*lines, *(f"limit    {text}" for text in answer.limits)]


def generation_text(
    answer: GenerationAnswer, cluster: Cluster, faster: "Sequence[Faster]" = ()
) -> Shown:  # fmt: skip
    """Text of `gdp explain` for a whole request."""
    from gdp.cli.energy_text import tokens_lines

    parts = {
        part.text: [
            next((s.share for s in rows if s.text == part.text), 0) for rows in answer.shares
        ]
        for part in (*answer.shares[0], *answer.shares[1])
    }
    rows = [
        [text, *(f"{share:.0%}" for share in both)]
        for text, both in parts.items() if max(both) >= 0.005
    ]  # fmt: skip
    shares = table(["time goes to", "prompt", "decode"], rows)
    energy = tokens_lines(answer, answer, verbose=is_verbose())
    lines = [*links_lines(cluster), *generation_lines(answer), *energy, "", shares, ""]
    if faster:
        gains = [
            [
                row.what, f"{answer.first_token_s / row.first_token_s:.2f} times as fast",
                f"{answer.token_s / row.token_s:.2f} times as fast",
            ]
            for row in faster
        ]  # fmt: skip
        lines += [table(["what if", "prompt", "decode"], gains), ""]
    return shown([*lines, memory_table(answer.memory)])


def memory_table(memory: Sequence[DeviceMemory]) -> Shown:
    """A row per device: weights, cache, activations, draft model if there is one, reserve, free."""
    drafts = ["draft"] if any(row.draft_bytes for row in memory) else []
    rows = [
        [
            row.device, format_bytes(row.weights_bytes), format_bytes(row.cache_bytes),
            format_bytes(row.activations_bytes), *(format_bytes(row.draft_bytes) for _ in drafts),
            format_bytes(row.reserve_bytes),
            "no limit" if row.free_bytes is None else format_bytes(row.free_bytes),
        ]
        for row in memory
    ]  # fmt: skip
    return table(["device", "weights", "cache", "activations", *drafts, "reserve", "free"], rows)


def _deviation(result: Result) -> list[str]:
    if result.deviation_s is None:
        return []
    of_value = find_objective(result.objective).text
    text = f"{of_value(result.value_s)} +- {of_value(result.deviation_s)}"
    return [f"sure     {text} (one standard deviation of what was learned of this machine)"]


def _team_text(team: tuple[int, ...], result: Result) -> str:
    names = ", ".join(result.placement.device_names[d] for d in team)
    return f"replicas {names} take the samples round-robin, 1 of {len(team)} each"


def _split_text(split: Split, result: Result) -> str:
    names = ", ".join(result.placement.device_names[d] for d in split.devices)
    how = "with whole experts on each" if split.experts else "heads and columns divided"
    how += "" if split.is_even else f" as {':'.join(map(str, split.parts))}"
    return f"split    {names} compute each op together, {how}"


def _candidates(result: Result) -> Shown:
    rows, of_value = [], find_objective(result.objective).text
    for c in result.candidates:
        rows.append(
            [
                c.method,
                "-" if c.value_s is None else of_value(c.value_s),
                "yes" if c.feasible else "no" if c.seconds else "skipped",
                f"{c.seconds:.2f} s",
            ]
        )
    text = table(["candidate", result.objective, "fits", "took"], rows)
    reasons = [f"{c.method}: {c.reason}" for c in result.candidates if not c.feasible and c.reason]
    return shown([text, *reasons])


def compare_text(graph: OpGraph, cluster: Cluster, rows: Mapping[str, Result | str]) -> str:
    """Text of `gdp compare`, best first."""
    results = {name: row for name, row in rows.items() if isinstance(row, Result)}
    order = sorted(results, key=lambda name: results[name].value_s)
    # Of a value that is neither of the two times a column of its own.
    others = {row.objective: find_objective(row.objective) for row in results.values()}
    others = {name: row for name, row in others.items() if row.unit != "s"}
    body = [
        [
            name,
            *(row.text(results[name].value_s) for row in others.values()),
            format_seconds(results[name].score.latency_s),
            format_seconds(results[name].score.period_s),
            _compared_gap(results[name]),
            f"{results[name].seconds:.2f} s",
            str(results[name].evaluations),
        ]
        for name in order
    ]
    header = ["method", *others, "latency", "period", "gap", "took", "evaluations"]
    lines = [f"{graph.name} on {cluster.name}", table(header, body)]
    if results:
        best = max(results.values(), key=lambda row: row.bound_s)
        lines += _bound_lines(best, gap=False)
    lines += [f"{name}: {row}" for name, row in rows.items() if isinstance(row, str)]
    return shown(lines)


def _compared_gap(result: Result) -> str:
    if not result.bound_by:
        return result.gap_text
    return "proven" if result.proven_optimal else f"{result.gap:.1%}, not proven"


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    """A cluster as plain data."""
    return {
        "name": cluster.name,
        "host": cluster.device_names[cluster.host],
        "devices": [
            {
                "name": d.name,
                "kind": d.kind,
                "model": d.model,
                "flop_per_s": dict(d.flop_per_s),
                "bytes_per_s": d.bytes_per_s,
                "memory_bytes": None if d.memory_bytes >= UNLIMITED_BYTES else d.memory_bytes,
                "reserve_bytes": d.reserve_bytes,
                "memory_pool": d.memory_pool or None,
                "dispatch_s": d.dispatch_s,
                "dispatch_per": d.dispatch_per,
                "costs": source_of(d),
            }
            for d in cluster.devices
        ],
        "memory_bytes": memory_in_all(cluster),
        "link_bytes_per_s": cluster.link_bytes_per_s,
        "link_latency_s": cluster.link_latency_s,
        "channel": cluster.channel,
    }


def memory_in_all(cluster: Cluster) -> int | None:
    """Bytes that plans may fill of all devices, shared memory counted once; None if one is
    unlimited."""
    if max(cluster.memory_bytes) >= UNLIMITED_BYTES:
        return None
    return cluster.room_bytes(np.ones(cluster.num_devices, dtype=bool))


def cluster_text(cluster: Cluster) -> str:
    """Text of `gdp devices`."""
    rows = [
        [
            d.name + (" (host)" if i == cluster.host else ""),
            d.kind,
            f"{d.flop_per_s['default'] / 1e9:.0f}",
            f"{d.bytes_per_s / 1e9:.0f}",
            _memory(d.total_bytes) + (" shared" if d.memory_pool else ""),
            _reserve(d),
            f"{d.dispatch_s * 1e6:.0f} per {d.dispatch_per}",
            d.model,
        ]
        for i, d in enumerate(cluster.devices)
    ]
    header = ["device", "kind", "GFLOP/s", "GB/s", "memory", "reserve", "dispatch us", "model"]
    text = [f"cluster {cluster.name}", table(header, rows)]
    total = memory_in_all(cluster)
    if total is not None and cluster.num_devices > 1:
        text.append(f"memory for plans {format_bytes(total)} in all")
    if cluster.num_devices > 1:
        off = ~np.eye(cluster.num_devices, dtype=bool)
        speeds = cluster.link_bytes_per_s[off] / 1e9
        delays = cluster.link_latency_s[off] * 1e6
        text.append(
            f"links {speeds.min():.4g} to {speeds.max():.4g} GB/s, "
            f"{delays.min():.3g} to {delays.max():.3g} us, " + _channels_text(cluster)
        )
        text += [line] if (line := links_line(cluster)) else []
    text += dict.fromkeys(f"costs of {d.kind}: {source_of(d)}" for d in cluster.devices)
    return shown(text)


def speeds_text(memory: Rates, arithmetic: Rates) -> str:
    """Text of a measured memory bandwidth and of measured products of matrices."""
    one, every = (f"{speed / 1e9:.1f} GB/s" for speed in memory[:2])
    alone, together = (f"{speed / 1e9:.0f} GFLOP/s" for speed in arithmetic[:2])
    return (
        f"main memory was read at {one} by one core and {every} by {memory.cores}; products in "
        f"float32 took place at {alone} on one core and {together} on {arithmetic.cores}; both "
        "measured now; -o writes this machine with them"
    )


def presets_text() -> str:
    """Text of `gdp devices --presets`."""
    rows = []
    for name, entry in presets().items():
        device, speeds = device_preset(name), entry.flop_per_s
        half = speeds.get("float16")
        rows.append(
            [
                name, entry.memory, format_bytes(device.total_bytes), _reserve(device),
                f"{entry.bytes_per_s / 1e9:.0f}", f"{speeds['default'] / 1e12:.2f}",
                "-" if half is None else f"{half / 1e12:.1f}", source_of(device), entry.source,
            ]
        )  # fmt: skip
    header = [
        "preset", "printed", "reported", "reserve", "GB/s", "TFLOP/s", "in float16", "costs",
        "source",
    ]  # fmt: skip
    return table(header, rows)


def _channels_text(cluster: Cluster) -> str:
    """Number of channels, and of links without one."""
    channels = len(set(cluster.channel[cluster.queues].tolist()))
    if channels == 0:
        return "no contention"
    free = int((~cluster.queues).sum()) - cluster.num_devices
    return f"{channels} channels" + (f", {free} links without contention" if free else "")


def run_text(report: Mapping[str, Any]) -> str:
    """Text of `gdp run`: predicted and measured times, the baselines, and the fastest of them."""
    from gdp.measure.report import advice

    placed = dict(report) | {
        "latency_s": report["measured_latency_s"],
        "throughput_per_s": report["measured_throughput_per_s"],
    }
    rows = [_measured_row("placed", placed)]
    rows += [
        _measured_row(name.replace("_", " "), row) for name, row in report["baselines"].items()
    ]
    header = [
        "", "predicted ms", "measured ms", "95% interval",
        "predicted /s", "measured /s", "95% interval",
    ]  # fmt: skip
    lines = [
        f"{report['model']} on {report['cluster']}, {report['objective']}",
        table(header, rows),
        f"medians of {report['rounds']} rounds, measured for at most "
        f"{report['measure_seconds']:g} s in all, {report['samples_in_flight']} samples in flight",
        *_compared(report),
    ]
    if report.get("note"):
        lines.append(f"note: {report['note']}")
    lines += [f"note: {warning}" for warning in report["warnings"]]
    return shown([*lines, advice(report)])


def _compared(report: Mapping[str, Any]) -> list[str]:
    """Results of the comparison with the uncut model, and outputs that cannot be compared."""
    random = ", ".join(report.get("random_ops", ()))
    if report["outputs_equal"] is None:
        lines = [f"outputs cannot be compared, they are other ones at each run: {random}"]
    else:
        verdict = "equal" if report["outputs_equal"] else "DIFFERENT"
        lines = [
            f"outputs {verdict} to the uncut model's, largest difference "
            f"{report['max_abs_diff']:.2e}"
        ]
        if random:
            lines.append(f"not compared, as it is another one at each run: what reads {random}")
    if not report.get("inner_equal", True):
        lines.append(f"tensors between pieces DIFFERENT, most {report['worst_tensor']!r}")
    return lines


def _measured_row(name: str, row: Mapping[str, Any]) -> list[str]:
    """A contender's cells: for each quantity predicted, measured, and its interval."""
    cells = [name]
    for quantity, unit, places in (("latency_s", 1e3, 3), ("throughput_per_s", 1, 1)):
        expected = row.get(f"predicted_{quantity}")
        low, high = row[quantity.replace("_", "_interval_", 1)]
        cells += [
            "-" if expected is None else f"{unit * expected:.{places}f}",
            f"{unit * row[quantity]:.{places}f}",
            f"{unit * low:.{places}f} to {unit * high:.{places}f}",
        ]
    return cells


def inspection_text(summary: Mapping[str, Any]) -> str:
    """Text of `gdp inspect`."""
    lines = [
        f"{summary['name']}: {summary['num_ops']} ops, {summary['flop'] / 1e9:.3f} GFLOP, "
        f"{format_bytes(summary['weight_bytes'])} of weights, {summary['num_tensors']} tensors"
    ]
    if "parameters" in summary:
        lines.append(f"{summary['parameters']:,} parameters, tied ones counted once")
    rows = [
        [
            entry["op_type"],
            str(entry["count"]),
            f"{entry['flop'] / 1e9:.3f}",
            format_bytes(entry["memory_traffic_bytes"]),
        ]
        for entry in summary["op_types"]
    ]
    lines.append(table(["op type", "ops", "GFLOP", "traffic"], rows))
    if summary.get("estimated"):
        lines.append("costed by a general estimate: " + ", ".join(summary["estimated"]))
    lines += [f"assumed: {text}" for text in summary.get("assumptions", ())]
    if summary.get("ops"):
        body = [
            [o["name"], o["op_type"], f"{o['flop'] / 1e6:.3f}", o["scope"]] for o in summary["ops"]
        ]
        lines.append(table(["op", "type", "MFLOP", "scope"], body))
    return shown(lines)
