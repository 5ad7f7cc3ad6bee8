"""Predicted rates of products beside the highest that were measured on each card.

    python -m benchmarks.measured_world peaks --peaks matmul_peaks_measured.csv [--above 5]

`--peaks` is a CSV file with columns device (the name that its owner gives it), tflops_fp32,
tflops_fp16 and tflops_bf16: the highest rate of a product of square matrices in PyTorch. Rows of
one preset are merged by the fastest; overclocked cards, laptops and cards without a preset are left
out, and so is bfloat16 of GPUs without it, whose presets have it from these rows. Asked are all
products of m, n and k in powers of two from 256 to 16,384, launch included: a prediction is wrong
where it is faster than the fastest that anyone measured. The datasheet's roofline stands beside it:
it reaches its peak in every large product.
"""

import csv
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from jaxtyping import Float

from benchmarks.tables import head
from gdp.cluster.presets import cluster_preset, device_preset, preset_of_model
from gdp.cluster.types import Cluster
from gdp.costs.base import CostModel
from gdp.costs.default import DATASHEET, SHIPPED, resolve_costs
from gdp.graph.op_graph import GraphBuilder, OpDetail, OpGraph

TYPES = {"float32": "tflops_fp32", "float16": "tflops_fp16", "bfloat16": "tflops_bf16"}
"""Column of the measured peak by type of arithmetic."""
SIZES = tuple(2**i for i in range(8, 15))
OVERCLOCKED = "*OC"


@dataclass(frozen=True)
class Peak:
    """The highest measured rate of a card's products in one type, and the predicted ones."""

    preset: str
    dtype: str
    measured: float  # FLOP/s
    shipped: Float[np.ndarray, "P"]  # FLOP/s of each product, by the costs that ship
    datasheet: Float[np.ndarray, "P"]

    @property
    def ratio(self) -> float:
        """The fastest prediction over the measured peak."""
        return float(self.shipped.max() / self.measured)


def measured_peaks(path: Path) -> dict[tuple[str, str], float]:
    """FLOP/s by preset and type of arithmetic; of several cards of a preset the fastest."""
    best: dict[tuple[str, str], float] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            preset = preset_of_model(row["device"])
            if preset is None or OVERCLOCKED in row["device"]:
                continue
            device = device_preset(preset)
            for dtype, column in TYPES.items():
                emulated = device.speed(dtype) < device.speed("float32")
                if row[column] and not emulated:
                    key = (preset, dtype)
                    best[key] = max(best.get(key, 0.0), 1e12 * float(row[column]))
    return best


def products(dtype: str, sizes: tuple[int, ...] = SIZES) -> OpGraph:
    """A graph of products of matrices of activations, of all m, n and k of these sizes."""
    code, item = GraphBuilder(), 4 if dtype == "float32" else 2
    for m, n, k in itertools.product(sizes, repeat=3):
        detail = OpDetail(dtype, ((m, k), (k, n)), ((m, n),))
        moved = item * (m * k + k * n + m * n)
        op = code.add_op(
            f"{m}x{n}x{k}", "mm", flop=2.0 * m * n * k, traffic_bytes=moved, detail=detail
        )
        code.make_tensor(op, item * m * n)
    return code.build("products")


def rates(graph: OpGraph, cluster: Cluster, costs: CostModel) -> Float[np.ndarray, "P"]:
    """Predicted FLOP/s of each op on the only device, its launch included."""
    return graph.flop / (costs(graph, cluster)[:, 0] + cluster.devices[0].dispatch_s)


def compared(measured: Mapping[tuple[str, str], float]) -> list[Peak]:
    """Predictions for every card and type."""
    graphs = {dtype: products(dtype) for dtype in dict.fromkeys(d for _, d in measured)}
    found = []
    for (preset, dtype), peak in measured.items():
        cluster, graph = cluster_preset(preset), graphs[dtype]
        both = (
            rates(graph, cluster, resolve_costs(costs, cluster, graph)[0])
            for costs in (SHIPPED, DATASHEET)
        )
        found.append(Peak(preset, dtype, peak, *both))
    return sorted(found, key=lambda peak: -peak.ratio)


def told(peaks: list[Peak], above: float) -> Iterator[str]:
    """A line for each card and type, the worst first, then one for each type."""
    yield head(
        "card | type | measured TFLOP/s | fastest predicted | over measured | by its datasheet | "
        f"products above by {above:.0%}",
        left=2,
    )
    for peak in peaks:
        over = int((peak.shipped > (1 + above) * peak.measured).sum())
        yield (
            f"| {peak.preset} | {peak.dtype} | {peak.measured / 1e12:.1f} | "
            f"{peak.shipped.max() / 1e12:.1f} | {peak.ratio:.2f} | "
            f"{peak.datasheet.max() / peak.measured:.2f} | {over} of {len(peak.shipped)} |"
        )
    yield ""
    for dtype in TYPES:
        own = [peak for peak in peaks if peak.dtype == dtype]
        if own:
            yield f"{dtype}: {_summary(own, above)}"


def _summary(peaks: list[Peak], above: float) -> str:
    ratios = {
        "predictions": np.array([peak.ratio for peak in peaks]),
        "datasheets": np.array([peak.datasheet.max() / peak.measured for peak in peaks]),
    }
    texts = [
        f"{name} pass the measured peak by more than {above:.0%} on {(r > 1 + above).sum()} of "
        f"{len(r)} cards, at all on {(r > 1).sum()}; fastest over measured {np.median(r):.2f} in "
        f"the median, {math.exp(np.log(r).mean()):.2f} in the mean, {r.max():.2f} at worst"
        for name, r in ratios.items()
    ]
    return "; ".join(texts)


@click.command("peaks", help=__doc__)
@click.option(
    "--peaks", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True
)
@click.option("--above", type=click.FloatRange(0), default=5.0, help="Percent of the peak.")
def main(path: Path, above: float) -> None:
    peaks = compared(measured_peaks(path))
    if not peaks:
        raise click.UsageError(f"{path}: no row is of a card that gdp has a preset of")
    click.echo("\n".join(told(peaks, above / 100)))
