"""The verb that answers why: `gdp explain`."""

from collections.abc import Mapping
from typing import Any

import click

from gdp.cli import options
from gdp.cli.show import show

SHOWN = 12
"""Transfers and kernels that the text lists; `--json` has all."""


@click.command()
@click.argument("placement")
@options.named_model
@options.cluster
@click.option("--op", metavar="GLOB", help="Ops or scopes that match, as in --pin.")
@click.option("--scope", metavar="a.b.c", help="All ops of a module and of those in it.")
@options.objective
@options.costs
@options.constraints
@options.as_json
def explain(
    placement: str, model: options.ModelOptions, cluster: options.ClusterOptions, op: str | None,
    scope: str | None, objective: str, costs: str | None, constraints: options.ConstraintOptions,
) -> None:  # fmt: skip
    """Why ops are where they are: time here and elsewhere, what moving them alone would change.

    Constraints are those that the model was placed with: a placement does not hold them.
    """
    from gdp.commands.explanation import explain as explain_ops
    from gdp.placement import load_placement

    if (op is None) == (scope is None):
        raise ValueError("give --op GLOB or --scope MODULE, one of them")
    graph = model.load()
    found = explain_ops(
        graph, load_placement(placement), cluster.load(), op=op, scope=scope,
        objective=objective, costs=costs, constraints=constraints.read(),
    )  # fmt: skip
    show(found, lambda: explained_text(found))


def explained_text(found: Mapping[str, Any]) -> str:
    """What `gdp explain` prints."""
    from gdp.cli.text import shown, table
    from gdp.units import format_bytes, format_seconds

    rows = []
    for row in found["devices"]:
        change = row["change_s"]
        rows.append(
            [
                row["device"] + (f" ({row['holds']} here)" if row["holds"] else ""),
                "-" if row["compute_s"] == float("inf") else format_seconds(row["compute_s"]),
                "-" if row["value_s"] is None else format_seconds(row["value_s"]),
                "-" if change is None else f"{change / max(found['value_s'], 1e-30):+.2%}",
                "yes" if row["feasible"] else "no",
            ]
        )
    kernels = found["kernels"]
    more = f" and {len(kernels) - SHOWN} more" if len(kernels) > SHOWN else ""
    lines = [
        f"{found['matches']}: {_count(found['ops'], 'op')}, run as "
        f"{_count(len(kernels), 'kernel')}: "
        f"{', '.join(kernels[:SHOWN])}{more}",
        table(["device", "takes there", f"{found['objective']} if moved", "change", "fits"], rows),
    ]
    if along := found["moved_along"]:
        lines.append(f"along with them moves what shares their device: {len(along)} more, first "
                     f"{along[0]}")  # fmt: skip
    sent = found["transfers"]
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
    return shown([*lines, *found["limits"]])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
