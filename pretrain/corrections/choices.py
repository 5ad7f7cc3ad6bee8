"""Loss of the setting that is chosen under a limit per token, after each measured run.

    python -m pretrain.corrections.choices ROWS.jsonl... [--kept FILE]

Loads of the silicon sample with at least four settings (GPUs, layout, requests at once); the limit
is the median measured TPOT. One setting after the other is tried: of those predicted to keep the
limit the one of most output tokens per second and GPU, else the one of the least TPOT. Loss is that
of the best tried one which keeps the limit within 5%, all where none does. Beside gdp's own order
stands that of predictions which the runs so far correct; intervals are over loads, and over stacks.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import click
import numpy as np

from benchmarks.tables import head
from gdp.corrections.passes import Times
from gdp.corrections.process import CorrectionProcess, scales_of
from pretrain.corrections.rows import Row, rows_of
from pretrain.corrections.train import samples_of

MOST_RUNS = 5
KEPT = 1.05
"""Share of the limit that a measured token may take."""
Predict = Callable[[Row, Sequence[Row]], Times]


def value(row: Row, times: Times) -> float:
    """Output tokens per second and GPU of requests with such times."""
    assert row.run is not None
    request_s = times.ttft_s + (row.run.new - 1) * times.tpot_s
    return row.run.batch * row.run.new / request_s / row.run.tensor


def losses(rows: Sequence[Row], predict: Predict) -> list[float]:
    """Loss after each of the first runs."""
    limit_s = median(row.measured.tpot_s for row in rows)
    best = max(value(r, r.measured) for r in rows if r.measured.tpot_s <= limit_s)
    tried, found, kept = list[Row](), list[float](), 0.0
    for _ in range(min(MOST_RUNS, len(rows))):
        left = [(row, predict(row, tried)) for row in rows if row not in tried]
        keeps = [one for one in left if one[1].tpot_s <= limit_s]
        chosen, _ = (
            max(keeps, key=lambda one: value(*one))
            if keeps
            else min(left, key=lambda one: one[1].tpot_s)
        )
        tried.append(chosen)
        if chosen.measured.tpot_s <= KEPT * limit_s:
            kept = max(kept, value(chosen, chosen.measured))
        found.append(max(0.0, 1.0 - kept / best))
    return found + [found[-1]] * (MOST_RUNS - len(found))


def interval(values: np.ndarray, groups: Sequence[object], seed: int = 0) -> str:
    """95% by bootstrap over groups."""
    names = sorted({str(g) for g in groups})
    members = [np.flatnonzero([str(g) == name for g in groups]) for name in names]
    rng = np.random.default_rng(seed)
    drawn = [
        values[np.concatenate([members[i] for i in rng.integers(len(names), size=len(names))])]
        for _ in range(2000)
    ]
    low, high = np.percentile([d.mean() for d in drawn], [2.5, 97.5])
    return f"{100 * low:+.1f} to {100 * high:+.1f}"


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--kept", type=click.Path(path_type=Path), help="File of residuals found before.")
def main(files: tuple[Path, ...], kept: Path | None) -> None:
    rows = [row for row in rows_of(files, kept) if row.source == "silicon"]
    samples = samples_of(rows)
    process = CorrectionProcess(scales_of(samples.shown, samples.formats))
    loads = defaultdict[tuple[object, ...], list[Row]](list)
    for row in rows:
        loads[row.load].append(row)
    kept_loads = [own for own in loads.values() if len(own) >= 4]

    def plain(row: Row, tried: Sequence[Row]) -> Times:
        return row.predict(0.0, 0.0)

    def corrected(row: Row, tried: Sequence[Row]) -> Times:
        lessons = list(itertools.chain.from_iterable(one.lessons for one in tried))
        found = process.residuals(row.passes, lessons)
        return row.predict(found[0].mean, found[1].mean)

    own, learned = (np.array([losses(x, p) for x in kept_loads]) for p in (plain, corrected))
    stacks = [(own_rows[0].stack.key, own_rows[0].model) for own_rows in kept_loads]
    click.echo(f"{len(kept_loads)} loads of {len(set(stacks))} stacks and models")
    click.echo(
        head("measured runs | own order | corrected | gain, points | over loads | stacks", 1)
    )
    for n in range(MOST_RUNS):
        gain = own[:, n] - learned[:, n]
        click.echo(
            f"| {n + 1} | {own[:, n].mean():.1%} | {learned[:, n].mean():.1%} | "
            f"{100 * gain.mean():+.1f} | {interval(gain, range(len(gain)))} | "
            f"{interval(gain, stacks)} |"
        )


if __name__ == "__main__":
    main()
