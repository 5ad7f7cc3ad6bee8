"""Errors of serving runs by the pace of passes over prompts, of all rows and of models left out.

    python -m benchmarks.measured_world pace ROWS.jsonl...

`ROWS.jsonl` is of `passes`, of the silicon sample; rows listed as DeepSeek-R1, some of whose
servers draft tokens, are left out. For each model: medians of |predicted / measured - 1| of TPOT
and TTFT by pace (seconds of a pass over prompts to those of its kernels), and with the pace whose
sum of both medians is least on all other models. Collectives inside of prompts are scaled with it.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks.measured_world.servers import asked_of, set_up
from benchmarks.measured_world.serving_runs import Run
from benchmarks.tables import head
from gdp.costs.measured.costs import PROMPT_PACE
from gdp.sim.serving import ServingEngine, serve
from gdp.targets.vllm.scheduler import VllmScheduler

PACES = (1.0, 1.1, 1.2, 1.3, 1.4)


class Errors(NamedTuple):
    """|predicted / measured - 1| of rows. Axes: N rows, P paces."""

    tpot: np.ndarray
    ttft: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The sum of both medians, by pace."""
        return np.median(self.tpot, axis=0) + np.median(self.ttft, axis=0)


def errors_of(rows: Sequence[dict[str, Any]]) -> Errors:
    """Errors of rows of one model."""
    found = []
    for row in rows:
        run = Run(**row["run"])
        engine = {**row["engine"], "watts": None}
        engine = set_up(ServingEngine(**engine, scheduler=VllmScheduler()), run)
        served = [
            serve(asked_of(run), engine._replace(token_s=engine.token_s * pace / PROMPT_PACE))
            for pace in PACES
        ]
        found.append([
            [abs(s.token.mean_s / run.token_s - 1) for s in served],
            [abs(s.first_token.mean_s / run.first_s - 1) for s in served],
        ])  # fmt: skip
    return Errors(*np.array(found).transpose(1, 0, 2))


@click.command("pace", help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(files: tuple[Path, ...]) -> None:
    models = defaultdict[str, list[dict[str, Any]]](list)
    for row in (json.loads(line) for path in files for line in path.open()):
        name = row["run"]["model"].rpartition("/")[2]
        if row["source"] == "silicon" and "why" not in row and name != "DeepSeek-R1":
            models[name].append(row)
    if len(models) < 2:
        raise click.UsageError("rows of two models of the silicon sample at least are needed")
    errors = {name: errors_of(rows) for name, rows in models.items()}
    errors["all"] = Errors(*map(np.concatenate, zip(*errors.values(), strict=True)))
    paces = " | ".join(f"{pace:g}: TPOT, TTFT" for pace in PACES)
    click.echo(head(f"model | rows | {paces} | pace of the others: TPOT, TTFT", left=1))
    for name, own in errors.items():
        cells = [
            f"{np.median(own.tpot[:, i]):.1%}, {np.median(own.ttft[:, i]):.1%}"
            for i in range(len(PACES))
        ]
        others = [e for key, e in errors.items() if key not in ("all", name)]
        best = int(np.argmin(Errors(*map(np.concatenate, zip(*others, strict=True))).total))
        left = "-" if name == "all" else f"{PACES[best]:g}: {cells[best]}"
        click.echo(f"| {name} | {len(own.tpot)} | {' | '.join(cells)} | {left} |")
