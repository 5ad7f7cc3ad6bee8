"""What each part of HSDAG and of gdp's policy is worth on single graphs, under equal evaluations.

    python -m benchmarks.published.ablation [--what hsdag,policy] [--evaluations 500] [--seeds 5]
        [--rows FILE] [--processes 2 | --ray ADDRESS] [--json]

HSDAG: the rows of its table 3 (arXiv 2405.14185), trained from nothing on its three models on a
processor and one accelerator. The policy: adapted to one graph, without `auto` before or search
after. Rows `fresh` are trained on that graph alone, from fresh weights, in a form that never had
the part: a fair ablation of adapting, not of pre-training. Rows `shipped` start from the shipped
weights; "without" switches a part off for good, "zeroed" sets its weights to zero before adapting,
which may learn it anew. A pre-training each would be needed to say what the shipped policy would be
without cost features, device conditioning, autoregression or imitation: those rows are not here.
Neither is "without grouping": the policy places fused ops, which a runtime runs as one, and its
form with learned groups does not exist.

Each row is compared with the whole seed by seed: mean of value / whole - 1 with a 95% interval.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from benchmarks.published.ablation_cases import HSDAG_PROBLEMS, POLICY_PROBLEMS, rows_of, run
from benchmarks.published.cases import (
    BOUND,
    Row,
    cases_of,
    chosen,
    engine_options,
    interval,
    kept,
    tables_of,
)
from gdp.tasks import Engine

WHAT = {"hsdag": HSDAG_PROBLEMS, "policy": POLICY_PROBLEMS}
WHOLE = ("HSDAG", "shipped", "fresh")
"""What rows are parts of: a row belongs to the one that its name starts with."""


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with `paired`: seconds over those of the whole with the same seed, minus one."""
    whole = {row["method"]: np.array(row["values_s"], float) for row in rows}
    for row in rows:
        if row["method"] == BOUND:
            continue
        base = next((name for name in WHOLE if row["method"].startswith(name)), WHOLE[1])
        values = whole[row["method"]]
        if base in whole and len(whole[base]) == len(values):
            row["paired"] = (values / whole[base] - 1).tolist()
    return list(rows)


def table_text(rows: Sequence[Row]) -> str:
    """The table of one problem, in Markdown."""
    lines = [
        f"{rows[0]['model']} on {rows[0]['cluster']}: {rows[0]['fused']} ops", "",
        "| row | ms | 95% | over the whole | 95% | evaluations | CPU s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for row in rows:
        cells = [row["method"], *[""] * 6]
        if row["value_s"] is None:
            cells[1] = "nothing that fits"
        else:
            cells[1] = f"{row['value_s'] * 1e3:.4f}"
            cells[2] = f"{row['interval_s'] * 1e3:.4f}" if row["interval_s"] else ""
            paired = np.array(row.get("paired", []))
            if row["method"] not in WHOLE and len(paired) and np.isfinite(paired).all():
                cells[3] = f"{paired.mean():+.2%}"
                cells[4] = f"{interval(paired):.2%}" if len(paired) > 1 else ""
        if row["method"] != BOUND:
            cells[5:] = f"{row['evaluations_spent']:.0f}", f"{row['cpu_s']:.1f}"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--what", default="all", show_default=True, help="hsdag, policy, or both.")
@click.option("--evaluations", default=500, show_default=True)
@click.option("--seeds", default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True)
@engine_options
def main(
    what: str, evaluations: int, seeds: int, as_json: bool, rows: Path | None, processes: int,
    ray: str | None,
) -> None:  # fmt: skip
    """Print the tables."""
    began_s = time.perf_counter()
    problems = [problem for part in chosen(what, list(WHAT), "part") for problem in WHAT[part]]
    cases = cases_of(problems, rows_of, evaluations, seeds)
    tables = [compared(rows) for rows in tables_of(kept(cases, run, rows, Engine(processes, ray)))]
    took_s = time.perf_counter() - began_s
    if as_json:
        click.echo(json.dumps({"rows": [row for table in tables for row in table]}))
        return
    for table in tables:
        click.echo(table_text(table) + "\n")
    click.echo(f"{took_s:.0f} s on {processes} processes, rows that were kept not run again.")


if __name__ == "__main__":
    main()
