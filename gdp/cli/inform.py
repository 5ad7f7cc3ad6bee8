"""`gdp explain`, `inspect`, `devices` and `doctor`."""

import sys
from collections.abc import Mapping
from typing import Any

import click
from msgspec.structs import asdict

from gdp.cli import options
from gdp.cli.asking import Asking, require_writable
from gdp.cli.show import reporting_stages, show

SHOWN = 12
"""Transfers and kernels that the text lists; `--json` has all."""


@click.command()
@options.stack(
    click.argument("placement"), *options.about(options.NAMED_MODEL),
    click.option("--op", metavar="GLOB", help="Ops or scopes that match, as in --pin."),
    click.option("--scope", metavar="a.b.c", help="All ops of a module and of those in it."),
    *options.CONSTRAINTS, options.AS_JSON,
)  # fmt: skip
def explain(placement: str, op: str | None, scope: str | None, **values: Any) -> None:
    """Why ops are where they are: time here and elsewhere, what moving them alone would change.

    Of a placement of --generate, without --op and --scope: tokens per second, what limits them, and
    what fills each device. Constraints are those that the model was placed with, which its file
    remembers.
    """
    from gdp.api.explain import explained, faster_machines
    from gdp.api.generation import generation_of
    from gdp.cli.text import generation_text
    from gdp.cluster.links import links_line

    asking = Asking(**values)
    question, placed = asking.about(placement, asking.model, asking.demands())
    if op is None and scope is None:
        answer, faster = generation_of(question, placed), faster_machines(question, placed)
        plain = {"generation": answer.to_json(), "faster": [row.to_json() for row in faster]}
        plain["links"] = links_line(question.cluster)
        show(plain, lambda: generation_text(answer, question.cluster, faster))
        return
    explanation = explained(question, placed, op, scope)
    show(explanation, lambda: explained_text(explanation))


def explained_text(explanation: Mapping[str, Any]) -> str:
    """Text of `gdp explain`."""
    from gdp.base.units import format_bytes, format_seconds
    from gdp.cli.text import shown, table
    from gdp.sim.objectives import find_objective

    of_value = find_objective(explanation["objective"]).text
    rows = []
    for row in explanation["devices"]:
        change = row["change_s"]
        rows.append(
            [
                row["device"] + (f" ({row['holds']} here)" if row["holds"] else ""),
                "-" if row["compute_s"] == float("inf") else format_seconds(row["compute_s"]),
                "-" if row["value_s"] is None else of_value(row["value_s"]),
                "-" if change is None else f"{change / max(explanation['value_s'], 1e-30):+.2%}",
                "yes" if row["feasible"] else "no",
            ]
        )
    kernels, objective = explanation["kernels"], explanation["objective"]
    more = f" and {len(kernels) - SHOWN} more" if len(kernels) > SHOWN else ""
    lines = [
        f"{explanation['matches']}: {_count(explanation['ops'], 'op')}, run as "
        f"{_count(len(kernels), 'kernel')}: "
        f"{', '.join(kernels[:SHOWN])}{more}",
        table(
            ["device", "takes there", f"{objective} if moved", "change", "fits"],
            rows,
        ),
    ]
    if along := explanation["moved_along"]:
        lines.append(f"along with them moves what shares their device: {len(along)} more, first "
                     f"{along[0]}")  # fmt: skip
    sent = explanation["transfers"]
    if sent:
        total = sum(row["bytes"] for row in sent)
        lines += [
            f"{_count(len(sent), 'transfer')} of what they make or read, {format_bytes(total)}",
            table(
                ["made by", "", "from", "to", "bytes", "takes"],
                [
                    [r["made_by"], r["direction"], r["source"], r["destination"],
                     format_bytes(r["bytes"]), format_seconds(r["seconds"])]
                    for r in sent[:SHOWN]
                ],
            ),
        ]  # fmt: skip
    else:
        lines.append("nothing that they make or read is sent")
    links = explanation["links"]
    return shown([*lines, *([f"links: {links}"] if links else []), *explanation["limits"]])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@click.command()
@options.stack(
    *options.MODEL, click.option("--ops", is_flag=True, help="List every op."), options.AS_JSON
)
def inspect(ops: bool, **values: Any) -> None:
    """Show ops, FLOPs, bytes, and the ops that are only estimated."""
    from gdp.cli.text import inspection_text
    from gdp.question.models import inspect_model

    asking = Asking(**values)
    with reporting_stages():
        summary = inspect_model(asking.model or "", asking.dims, ops=ops)
    show(summary, lambda: inspection_text(summary))


@click.command()
@options.stack(
    options.output("cluster.toml", "Write a cluster file to edit."), options.FORCE,
    *options.CLUSTER, options.AS_JSON,
    click.option(
        "--presets", is_flag=True, help="List every device preset with its source instead."
    ),
)  # fmt: skip
def devices(output: str | None, force: bool, presets: bool, **values: Any) -> None:
    """Show the devices of this machine (or a cluster).

    Of this machine the bandwidth of main memory and the arithmetic of its cores are measured, for a
    second each, and written with -o. Costs of a processor that none ship of are scaled by them.
    """
    from gdp.base.cores import num_cores
    from gdp.cli.text import cluster_json, cluster_text, presets_text, shown, speeds_text
    from gdp.cluster.detect import (
        measure_arithmetic,
        measure_bandwidth,
        with_arithmetic,
        with_bandwidth,
    )
    from gdp.cluster.file import write_cluster
    from gdp.cluster.presets import device_preset
    from gdp.cluster.presets import presets as all_presets
    from gdp.costs.default import source_of

    if presets:
        rows = {
            name: asdict(entry) | {"costs": source_of(device_preset(name))}
            for name, entry in all_presets().items()
        }
        show(rows, presets_text)
        return
    asking, measured = Asking(**values), None
    machine = asking.machine()
    require_writable(force, asking.cluster, cluster=output)
    if asking.cluster is None:
        measured = measure_bandwidth(num_cores()), measure_arithmetic(num_cores())
        machine = with_arithmetic(with_bandwidth(machine, measured[0]), measured[1])
    if output:
        write_cluster(machine, output)
    plain = cluster_json(machine)
    if measured is None:
        show(plain, lambda: cluster_text(machine))
    else:
        for name, speeds in zip(("bytes_per_s", "flop_per_s"), measured, strict=True):
            plain[f"measured_{name}"] = speeds._asdict()
        show(plain, lambda: shown([cluster_text(machine), speeds_text(*measured)]))


@click.command()
@options.AS_JSON
def doctor() -> None:
    """Show what is installed, which devices and runtimes are seen, what fails and what to do.

    Exits with 1 where something fails that gdp needs.
    """
    from gdp.api.doctor import examine

    checks = examine()
    show(checks, lambda: doctor_text(checks))
    if not checks["healthy"]:
        sys.exit(1)


def doctor_text(report: Mapping[str, Any]) -> str:
    """Text of `gdp doctor`: a block for each area, then advice."""
    from gdp.cli.text import shown, table

    lines = [f"gdp {report['gdp']}, Python {report['python']}, {report['platform']}"]
    for area in dict.fromkeys(check["area"] for check in report["checks"]):
        checks = [check for check in report["checks"] if check["area"] == area]
        width = max(len(check["name"]) for check in checks)
        lines += ["", area]
        lines += [
            f"  {check['status']:4}  {check['name'].ljust(width)}  {check['found']}"
            for check in checks
        ]
    todo: dict[str, list[str]] = {}
    for check in report["checks"]:
        if check["advice"] and check["status"] != "ok":
            todo.setdefault(check["advice"], []).append(check["name"])
    if todo:
        rows = [[", ".join(names), advice] for advice, names in todo.items()]
        lines += ["", table(["what to do", ""], rows)]
    lines += ["", _verdict(report)]
    return shown(lines)


def _verdict(report: Mapping[str, Any]) -> str:
    """The last line; extras that are not installed do not count."""
    if not report["healthy"]:
        return "something that gdp needs fails"
    return "gdp works; see the warnings" if report["warns"] else "all is well"
