"""Measures the intervals of corrections on public runs, and writes the checkpoint of gdp.

    python -m pretrain.corrections ROWS.jsonl... [--kept FILE] [-o FOLDER]

`ROWS.jsonl` is of `benchmarks.measured_world passes` and `llama-passes`. Half widths of 90%
intervals are those of stacks that were left out whole, by split conformal prediction: the quantile
of |residual - mean| over the predicted deviation, with the same weight for each stack (a model on
an engine's version and a machine), as its passes err alike. The table of errors, and the contenders
that the process has to beat, are `pretrain.corrections.table`.
"""

import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import click
import msgspec
import numpy as np

from gdp.base import checkpoint
from gdp.corrections.features import family_of, format_class
from gdp.corrections.process import CONSTANTS, CorrectionMeta, scales_of
from pretrain.corrections.contenders import OWN_RUNS
from pretrain.corrections.rows import Row, rows_of
from pretrain.corrections.table import RUNS, Told, folds, predictions
from pretrain.corrections.train import samples_of

SOURCE = (
    "runs of llama-bench from public repositories and threads, serving runs of AIConfigurator "
    "0.12's silicon sample (NVIDIA, Apache-2.0; most are of InferenceX), ML.ENERGY's leaderboard "
    "(0cd52da) and LLM-Pilot (IBM, 3c66483, CDLA-Permissive-2.0), each beside gdp's own "
    "prediction of its passes"
)
COVERED = 0.9
SHOWN = 0.1
"""Least share by which times show a pass that intervals are measured on."""
PLANNED = ("vllm", "sglang", "trtllm", "llamacpp")
"""Engines whose left-out runs make the intervals: TGI of 2023 is no target."""


def quantile(values: Sequence[float], groups: Sequence[object], covered: float = COVERED) -> float:
    """The value that this share of groups stays below, each group weighing the same; one more group
    counts as beyond all, as split conformal prediction has it."""
    order = np.argsort(values)
    names, which = np.unique(np.array([str(g) for g in groups]), return_inverse=True)
    weight = 1.0 / np.bincount(which)[which] / (len(names) + 1)
    share = np.cumsum(weight[order])
    place = int(np.searchsorted(share, covered))
    return float(np.asarray(values)[order[min(place, len(order) - 1)]])


def half_widths(
    rows: Sequence[Row], told: Sequence[Told], runs: int, family: str
) -> tuple[float, float]:
    """Quantiles of prefill and decode of a family of engines after so many runs."""
    found = []
    for phase in (0, 1):
        mine = [t for t in told if _counts(rows[t.row], phase)]
        mine = [t for t in mine if family_of(rows[t.row].stack.engine) == family]
        # Where no stack has so many runs, intervals are those of fewer.
        most = min(runs, max(t.runs for t in mine))
        own = [t for t in mine if t.runs == most]
        off = [
            abs(rows[t.row].found.phases[phase] - t.residuals[phase].mean)
            / t.residuals[phase].deviation
            for t in own
        ]
        found.append(quantile(off, [rows[t.row].group for t in own]))
    return found[0], found[1]


def _counts(row: Row, phase: int) -> bool:
    """True where a row tells of a phase of an engine that plans are made for."""
    return row.stack.engine in PLANNED and row.found.shown[phase] >= SHOWN


def far_factor(rows: Sequence[Row], told: Sequence[Told], family: str) -> float:
    """Factor within which 90% of uncorrected passes lie, also those of engines without a target."""
    own = [(t, p) for t in told for p in (0, 1) if t.runs == 0]
    own = [
        (t, p)
        for t, p in own
        if rows[t.row].found.shown[p] >= SHOWN and family_of(rows[t.row].stack.engine) == family
    ]
    off = [abs(rows[t.row].found.phases[p]) for t, p in own]
    return math.exp(quantile(off, [rows[t.row].group for t, _ in own]))


def meta_of(rows: Sequence[Row], told: Sequence[Told]) -> CorrectionMeta:
    """What is known of a process that learned from rows, by predictions of rows left out."""
    stacks: dict[str, int] = {}
    formats: dict[str, set[int]] = {}
    for row in rows:
        stacks[row.stack.key] = stacks.get(row.stack.key, 0) + len(row.lessons)
        formats.setdefault(row.stack.engine, set()).add(format_class(row.passes[1].bits))
    families = sorted({family_of(row.stack.engine) for row in rows})
    known = sorted({
        (row.stack.engine, row.stack.backend, round(math.log(row.stack.bytes_per_s), 3),
         round(math.log(row.stack.flop_per_s), 3)) for row in rows
    })  # fmt: skip
    return CorrectionMeta(
        {}, CONSTANTS._asdict(),
        {f: [half_widths(rows, told, runs, f) for runs in RUNS] for f in families},
        {f: far_factor(rows, told, f) for f in families}, stacks, known,
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
        t for fold in folds(rows, "group") for t in predictions(rows, samples, fold, OWN_RUNS, 1)
    ]
    meta = meta_of(rows, told)
    tree = scales_of(samples.shown, samples.formats)
    shapes = {name: array.shape for name, array in tree.items()}
    document = msgspec.to_builtins(msgspec.structs.replace(meta, shapes=shapes))
    recipe = f"rows = {len(rows)}\npasses = {len(samples.row)}\n"
    recipe += "".join(f"{name} = {value}\n" for name, value in CONSTANTS._asdict().items())
    digest = checkpoint.save(
        output, tree, recipe=recipe, meta=document, kind="corrections", force=True
    )
    click.echo(f"{output}: {len(samples.row)} passes of {len(rows)} runs, {digest}")
    click.echo(f"half widths {meta.quantiles}, far {meta.far}")
