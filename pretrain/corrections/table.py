"""Errors of corrections on runs that were left out: the table that says whether learning helps.

    python -m pretrain.corrections.table ROWS.jsonl... [--kept FILE]
        [--out pair|model|gpu|stack|group] [--every K] [--of SOURCE] [CONTENDER ...]

`ROWS.jsonl` is of `benchmarks.measured_world passes`. Left out are, by `--out`, rows of one model
and rows of one GPU at once (pair), of a model, of a GPU, of an engine's version on a GPU (stack),
or of a model and format on one (group); of these rows every K-th is told. Beside predictions
without a run stand those after 1, 2 and 3 runs of the row's own stack and model, drawn at random.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks.tables import head
from gdp.corrections.process import Residual
from pretrain.corrections.contenders import CONTENDERS, Predict
from pretrain.corrections.rows import Row, rows_of
from pretrain.corrections.train import Samples, samples_of

RUNS = (0, 1, 2, 3)


class Fold(NamedTuple):
    """Rows that are learned from, and rows that are told."""

    name: str
    train: list[int]
    test: list[int]


def folds(rows: Sequence[Row], kind: str) -> Iterator[Fold]:
    """The folds of a kind of left-out rows."""
    names = [
        {"model": row.architecture, "gpu": row.stack.card, "stack": row.stack.key,
         "group": str(row.group), "pair": f"{row.architecture} on {row.stack.card}"}[kind]
        for row in rows
    ]  # fmt: skip
    for name in sorted(set(names)):
        test = [i for i, own in enumerate(names) if own == name]
        models = {rows[i].architecture for i in test}
        cards = {rows[i].stack.card for i in test}
        gone = {
            i for i, row in enumerate(rows)
            if names[i] == name
            or (kind == "pair" and (row.architecture in models or row.stack.card in cards))
        }  # fmt: skip
        yield Fold(name, [i for i in range(len(rows)) if i not in gone], test)


class Told(NamedTuple):
    """A prediction of a row after so many runs."""

    row: int
    runs: int
    residuals: list[Residual]


def predictions(
    rows: Sequence[Row], samples: Samples, fold: Fold, name: str, every: int, seed: int = 0
) -> Iterator[Told]:
    """Predictions of the rows of a fold, before and after runs of their stack and model."""
    marked = np.isin(samples.row, fold.train)
    predict: Predict = CONTENDERS[name](samples, marked)
    groups = defaultdict[tuple[str, ...], list[int]](list)
    for i in fold.test:
        groups[*rows[i].group, rows[i].source].append(i)
    rng = np.random.default_rng(seed)
    for members in groups.values():
        order = rng.permutation(members).tolist()
        for place, i in enumerate(order):
            if place % every:
                continue
            others = [order[(place + 1 + k) % len(order)] for k in range(max(RUNS))]
            for runs in RUNS:
                if runs >= len(members):
                    continue
                lessons = [x for j in others[:runs] for x in rows[j].lessons]
                yield Told(i, runs, predict(rows[i], lessons))


def errors(rows: Sequence[Row], told: Sequence[Told], name: str) -> Iterator[str]:
    """A line for each source, and number of runs: errors of both times."""
    sources = ["all", *sorted({row.source for row in rows})]
    for source in sources:
        for runs in RUNS:
            own = [t for t in told if t.runs == runs and source in ("all", rows[t.row].source)]
            if not own:
                continue
            times = [rows[t.row].predict(*(r.mean for r in t.residuals)) for t in own]
            cells = []
            for field in (1, 0):
                off = np.array([
                    abs(time[field] / rows[t.row].measured[field] - 1)
                    for t, time in zip(own, times, strict=True)
                ])  # fmt: skip
                off = off[np.isfinite(off)]
                cells += (
                    [f"{100 * np.median(off):.1f}, {100 * off.mean():.1f}"] if len(off) else ["-"]
                )
            yield f"| {name} | {source} | {runs} | {len(own)} | {' | '.join(cells)} |"


@click.command(help=__doc__)
@click.argument("words", nargs=-1, required=True)
@click.option("--kept", type=click.Path(path_type=Path))
@click.option(
    "--out", "kind", type=click.Choice(["pair", "model", "gpu", "stack", "group"]), default="pair"
)
@click.option("--every", type=click.IntRange(1), default=1)
@click.option("--of", "source")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(
    words: tuple[str, ...], kept: Path | None, kind: str, every: int, source: str | None,
    path: Path | None,
) -> None:  # fmt: skip
    files = [Path(word) for word in words if word.endswith(".jsonl")]
    names = [word for word in words if word in CONTENDERS] or list(CONTENDERS)
    rows = [row for row in rows_of(files, kept) if source in (None, row.source)]
    samples = samples_of(rows)
    click.echo(head("correction | rows | runs | told | ms a token: median, mean | TTFT", left=2))
    for name in names:
        told = [
            t for fold in folds(rows, kind) for t in predictions(rows, samples, fold, name, every)
        ]
        click.echo("\n".join(errors(rows, told, name)))
        if path is not None:
            with path.open("a") as file:
                for t in told:
                    file.write(json.dumps([name, t.row, t.runs, t.residuals]) + "\n")


if __name__ == "__main__":
    main()
