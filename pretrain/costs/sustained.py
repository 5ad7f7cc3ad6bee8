"""Fit the paces of kernels over whole images and videos, and print how far off they are.

    python -m pretrain.costs.sustained --bench FOLDER

`FOLDER` holds `mlenergy_image.csv` and `mlenergy_video.csv`; rows of one GPU are read, images at
batch 1, 4 and 16, videos at batch 1. Errors are printed of the kernels alone, of the shipped paces,
of a fit, and of fits that leave each model out. Nothing is written: `gdp.costs.sustained.Paces`
holds the fit, rounded.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from jaxtyping import Float
from scipy.optimize import least_squares

from benchmarks.measured_world.media import measured
from gdp.api.diffusion.pricing import STEP_S
from gdp.cluster.file import load_cluster
from gdp.cluster.presets import device_preset, presets
from gdp.costs.default import resolve_costs
from gdp.costs.measured.graph import graph_kernels
from gdp.costs.measured.host import is_blackwell
from gdp.costs.sustained import (
    CLASSES,
    HEAD_STEP,
    NARROW_HEAD,
    PACES,
    Paces,
    call_seconds,
    classes_of,
)
from gdp.importers.diffusers.pipeline import Component, DiffusionPipeline, load_pipeline

BATCHES = {"image": (1, 4, 16), "video": (1,)}
PLAIN = Paces(1.0, 1.0, 1.0, 1.0, 1.0, math.inf, 1.0)
"""Kernels as the network has them."""
PRIOR_STD, OUTLIER = 20.0, 0.1
"""Deviation of the log of a pace from the shipped one, in deviations of a row; log errors beyond
which the loss is linear."""


class Part(NamedTuple):
    """A component of a row."""

    times: float  # calls of its graph in a request
    steps: int  # passes of a denoiser, else 0
    launch_s: float  # of the host in a call
    kernel_s: dict[str, float]  # of a call by class, at no pace
    heads: tuple[tuple[float, float], ...]  # (size, padded FLOP a clock of a unit) of attention


class Row(NamedTuple):
    """A measured batch, and the seconds of its kernels."""

    model: str
    kind: str
    gpu: str
    seconds: float
    parts: tuple[Part, ...]

    def predicted(self, paces: Paces, step_s: float = STEP_S) -> float:
        """Seconds at some paces."""
        is_new, seconds = is_blackwell(device_preset(self.gpu)), 0.0
        factor = dict.fromkeys(CLASSES, 1.0) | {
            "products": paces.products * (paces.new_products if is_new else 1.0),
            "moves": paces.moves * (paces.new_moves if is_new else 1.0), "volumes": paces.volumes,
        }  # fmt: skip
        for part in self.parts:
            attended_s = sum(
                flop / paces.attention / (paces.narrow if head <= NARROW_HEAD else 1.0)
                for head, flop in part.heads
            )
            kernels_s = sum(
                factor[name] * s for name, s in part.kernel_s.items() if name != "attention"
            )
            kernels_s += max(attended_s, part.kernel_s["attention"])
            seconds += part.times * max(kernels_s, part.launch_s) + part.steps * step_s
        return seconds


def rows_of(bench: Path) -> list[Row]:
    """Rows of one GPU, with their kernels."""
    rows, kept = list[Row](), dict[object, DiffusionPipeline]()
    for kind, batches in BATCHES.items():
        for row in measured(bench, kind):
            if row.degrees.cards > 1 or row.request.batch not in batches:
                continue
            key = row.model, row.request
            if key not in kept:
                kept = {key: load_pipeline(f"diffusers:{row.model}", row.request)}
            parts = tuple(_part(component, row.gpu) for component in kept[key].components)
            rows.append(Row(row.model, kind, row.gpu, row.seconds, parts))
    return rows


def _part(component: Component, gpu: str) -> Part:
    graph, cluster = component.graph, load_cluster(f"cpu+{gpu}")
    model, _ = resolve_costs(None, cluster, graph)
    call = call_seconds(graph, cluster, model, PLAIN)
    found = graph_kernels(graph, served=False)
    classes, preset = classes_of(graph, found), presets()[gpu]
    sums = np.bincount(classes, call.kernel_s[:, 1], len(CLASSES))
    attends = np.flatnonzero(classes == CLASSES.index("attention"))
    clocks = preset.units * preset.clock_hz
    heads = defaultdict[float, float](float)
    for op in attends.tolist():
        head = float(found.kernels.k[op])
        padded = math.ceil(head / HEAD_STEP) * HEAD_STEP / head
        heads[head] += float(graph.flop[op]) * padded / clocks
    steps = component.passes if component.role == "denoise" else 0
    return Part(
        component.calls * component.passes, steps, float(call.launch_s[:, 1].sum()),
        dict(zip(CLASSES, sums.tolist(), strict=True)), tuple(heads.items()),
    )  # fmt: skip


def fitted(rows: Sequence[Row]) -> Paces:
    """Paces with the least robust log errors, each model weighing the same, near the shipped
    ones."""
    counts = Counter(row.model for row in rows)
    shipped = np.log(PACES)

    def losses(logs: Float[np.ndarray, "P"]) -> Float[np.ndarray, "L"]:
        paces = Paces(*np.exp(logs).tolist())
        off = [
            math.log(row.predicted(paces) / row.seconds) / math.sqrt(counts[row.model])
            for row in rows
        ]
        return np.array([*off, *((logs - shipped) / PRIOR_STD)])

    return Paces(*np.exp(least_squares(losses, shipped, loss="soft_l1", f_scale=OUTLIER).x))


def show(label: str, rows: Sequence[Row], predicted: Sequence[float]) -> None:
    """Print errors by kind."""
    for kind in BATCHES:
        off = [
            abs(p / row.seconds - 1)
            for row, p in zip(rows, predicted, strict=True) if row.kind == kind
        ]  # fmt: skip
        click.echo(
            f"{label:28s} {kind}s, {len(off):2d}: {statistics.median(off):6.1%} median, "
            f"{statistics.mean(off):6.1%} mean"
        )


@click.command(help=__doc__)
@click.option("--bench", type=click.Path(exists=True, path_type=Path), required=True)
def main(bench: Path) -> None:
    """Print errors and paces."""
    rows = rows_of(bench)
    show("kernels and launches alone", rows, [row.predicted(PLAIN, 0.0) for row in rows])
    show("shipped", rows, [row.predicted(PACES) for row in rows])
    best = fitted(rows)
    show("fitted", rows, [row.predicted(best) for row in rows])
    models = sorted({row.model for row in rows})
    others = {m: fitted([row for row in rows if row.model != m]) for m in models}
    show("fitted to other models", rows, [row.predicted(others[row.model]) for row in rows])
    click.echo(f"fit: {', '.join(f'{k} {v:.3g}' for k, v in best._asdict().items())}")
    for row in rows:
        click.echo(
            f"  {row.model:28s} {row.gpu} {row.seconds:9.2f} s, alone "
            f"{row.predicted(PLAIN, 0.0):9.2f}, shipped {row.predicted(PACES):9.2f}, "
            f"left out {row.predicted(others[row.model]):9.2f}"
        )


if __name__ == "__main__":
    main()
