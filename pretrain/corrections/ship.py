"""Fits the correction process to public measurements and writes it as a checkpoint of gdp.

    python -m pretrain.corrections ROWS.jsonl... [--kept FILE] [-o FOLDER]

`ROWS.jsonl` is of `benchmarks.measured_world passes`. Half widths of 90% intervals are those of
stacks that were left out whole, by split conformal prediction: the quantile of |residual - mean|
over the predicted deviation, with the same weight for each stack (a model on an engine's version
and a GPU), as its passes err alike. The table of errors, and the contenders that the process has to
beat, are `pretrain.corrections.table`.
"""

import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import click
import msgspec
import numpy as np

from gdp.base import checkpoint
from gdp.corrections.features import format_class
from gdp.corrections.process import CONSTANTS, CorrectionMeta, CorrectionProcess
from pretrain.corrections.contenders import POINTS, chosen
from pretrain.corrections.rows import Row, rows_of
from pretrain.corrections.table import RUNS, Told, folds, predictions
from pretrain.corrections.train import points_of, samples_of

SOURCE = (
    "serving runs of AIConfigurator 0.12's silicon sample (NVIDIA, Apache-2.0; most are of "
    "InferenceX), ML.ENERGY's leaderboard (0cd52da) and LLM-Pilot (IBM, 3c66483, "
    "CDLA-Permissive-2.0), each beside gdp's own prediction of its passes"
)
COVERED = 0.9
SHOWN = 0.1
"""Least share by which times show a pass that intervals are measured on."""
PROCESS = "Gaussian process"
PLANNED = ("vllm", "sglang", "trtllm")
"""Engines whose left-out runs make the intervals: TGI of 2023 is learned from, and no target."""


def quantile(values: Sequence[float], groups: Sequence[object], covered: float = COVERED) -> float:
    """The value that this share of groups stays below, each group weighing the same; one more group
    counts as beyond all, as split conformal prediction has it."""
    order = np.argsort(values)
    names, which = np.unique(np.array([str(g) for g in groups]), return_inverse=True)
    weight = 1.0 / np.bincount(which)[which] / (len(names) + 1)
    share = np.cumsum(weight[order])
    place = int(np.searchsorted(share, covered))
    return float(np.asarray(values)[order[min(place, len(order) - 1)]])


def half_widths(rows: Sequence[Row], told: Sequence[Told], runs: int) -> tuple[float, float]:
    """Quantiles of prefill and decode after so many runs."""
    found = []
    for phase in (0, 1):
        own = [t for t in told if t.runs == runs and _counts(rows[t.row], phase)]
        off = [
            abs(rows[t.row].found[phase] - t.residuals[phase].mean) / t.residuals[phase].deviation
            for t in own
        ]
        found.append(quantile(off, [rows[t.row].group for t in own]))
    return found[0], found[1]


def _counts(row: Row, phase: int) -> bool:
    """True where a row tells of a phase of an engine that plans are made for."""
    return row.stack.engine in PLANNED and row.found.shown[phase] >= SHOWN


def far_factor(rows: Sequence[Row], told: Sequence[Told]) -> float:
    """Factor within which 90% of uncorrected passes of left-out stacks lie."""
    own = [(t, p) for t in told for p in (0, 1) if t.runs == 0]
    own = [(t, p) for t, p in own if _counts(rows[t.row], p)]
    off = [abs(rows[t.row].found[p]) for t, p in own]
    return math.exp(quantile(off, [rows[t.row].group for t, _ in own]))


def meta_of(rows: Sequence[Row], told: Sequence[Told]) -> CorrectionMeta:
    """What is known of a process that learned from rows, by predictions of rows left out."""
    stacks: dict[str, int] = {}
    formats: dict[str, set[int]] = {}
    for row in rows:
        stacks[row.stack.key] = stacks.get(row.stack.key, 0) + len(row.lessons)
        formats.setdefault(row.stack.engine, set()).add(format_class(row.passes[1].bits))
    known = sorted({
        (row.stack.engine, row.stack.backend, round(math.log(row.stack.bytes_per_s), 3),
         round(math.log(row.stack.flop_per_s), 3)) for row in rows
    })  # fmt: skip
    return CorrectionMeta(
        {}, CONSTANTS._asdict(), [half_widths(rows, told, runs) for runs in RUNS],
        far_factor(rows, told), stacks, known,
        {engine: tuple(sorted(own)) for engine, own in formats.items()},
        SOURCE, date.today().isoformat(),
    )  # fmt: skip


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--kept", type=click.Path(path_type=Path), help="File of residuals found before.")
@click.option("-o", "output", type=click.Path(path_type=Path), default="checkpoints/corrections")
def main(files: tuple[Path, ...], kept: Path | None, output: Path) -> None:
    rows = rows_of(files, kept)
    samples = samples_of(rows)
    told = [
        t for fold in folds(rows, "group") for t in predictions(rows, samples, fold, PROCESS, 1)
    ]
    meta = meta_of(rows, told)
    everything = np.ones(len(samples.row), dtype=bool)
    process = CorrectionProcess(points_of(samples, chosen(samples, everything)))
    tree = {n: np.asarray(a, dtype=np.float32 if a.dtype.kind == "f" else np.int32)
            for n, a in process.points._asdict().items()}  # fmt: skip
    shapes = {name: array.shape for name, array in tree.items()}
    document = msgspec.to_builtins(msgspec.structs.replace(meta, shapes=shapes))
    recipe = f"points = {POINTS}\nrows = {len(rows)}\npasses = {len(samples.row)}\n"
    recipe += "".join(f"{name} = {value}\n" for name, value in CONSTANTS._asdict().items())
    digest = checkpoint.save(
        output, tree, recipe=recipe, meta=document, kind="corrections", force=True
    )
    click.echo(f"{output}: {len(process.points.residual)} passes of {len(rows)} runs, {digest}")
    click.echo(f"half widths {meta.quantiles}, far {meta.far:.2f}")
