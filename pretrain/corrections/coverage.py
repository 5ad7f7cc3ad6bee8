"""How often intervals of corrections hold runs of a stack that made none of them, and how wide.

    python -m pretrain.corrections.coverage ROWS.jsonl... [--kept FILE]

For each group (a model and format on an engine's version and a machine) the half widths are those
of all other groups, by family of engines, phase and number of measured runs. Told are the share of
passes within their interval, each group weighing the same, the median factor from the middle of an
interval to its end, and the share of passes that are off by more than half and beyond it.
"""

import math
from collections import defaultdict
from pathlib import Path

import click
import numpy as np

from benchmarks.tables import head
from gdp.corrections.features import family_of
from pretrain.corrections.contenders import OWN_RUNS
from pretrain.corrections.rows import rows_of
from pretrain.corrections.ship import SHOWN, quantile
from pretrain.corrections.table import folds, predictions
from pretrain.corrections.train import samples_of

WRONG = math.log(1.5)
"""Log of a ratio that is off by more than half."""


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--kept", type=click.Path(path_type=Path), help="File of residuals found before.")
def main(files: tuple[Path, ...], kept: Path | None) -> None:
    rows = [row for row in rows_of(files, kept) if row.stack.engine != "tgi"]
    samples = samples_of(rows)
    cells = defaultdict[tuple[str, str, int], list[tuple[str, float, float]]](list)
    for fold in folds(rows, "group"):
        for told in predictions(rows, samples, fold, OWN_RUNS, 1):
            row = rows[told.row]
            for phase, name in enumerate(("prefill", "decode")):
                if row.found.shown[phase] >= SHOWN:
                    found = told.residuals[phase]
                    one = (fold.name, row.found.phases[phase] - found.mean, found.deviation)
                    cells[family_of(row.stack.engine), name, told.runs].append(one)
    click.echo(head("engines | phase | runs | passes | within | factor | unflagged, over 50%", 3))
    for (family, phase, runs), own in sorted(cells.items()):
        held, widths, wrong = defaultdict[str, list[bool]](list), list[float](), list[bool]()
        for group in sorted({name for name, _, _ in own}):
            others = [one for one in own if one[0] != group]
            if not others:
                continue
            width = quantile([abs(off) / d for _, off, d in others], [n for n, _, _ in others])
            for _, off, deviation in (one for one in own if one[0] == group):
                held[group].append(abs(off) <= width * deviation)
                widths.append(width * deviation)
                wrong.append(abs(off) > max(WRONG, width * deviation))
        share = np.mean([np.mean(inside) for inside in held.values()])
        click.echo(
            f"| {family} | {phase} | {runs} | {len(own)} | {share:.0%} | "
            f"{math.exp(float(np.median(widths))):.2f} | {np.mean(wrong):.1%} |"
        )


if __name__ == "__main__":
    main()
