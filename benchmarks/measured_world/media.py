"""Images and videos of diffusion pipelines beside measured seconds of ML.ENERGY.

    python -m benchmarks.measured_world media --bench FOLDER [--batch N]... [--of image|video]
        [--model NAME]... [-o ROWS.jsonl]

`FOLDER` holds `mlenergy_image.csv` and `mlenergy_video.csv`: seconds of a batch with diffusers and
xDiT on H100 and B200, on one to eight GPUs by the degrees of Ulysses and ring. Each model is asked
for by its public name and the request of the row, through `gdp.place_pipeline`; of several GPUs the
plan of the row's degrees is compared, and the best plan's degrees are looked up among the measured.
"""

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from gdp.api.diffusion.answer import PipelineAnswer, PipelinePlan
from gdp.api.diffusion.parallel import ParallelDegrees
from gdp.api.diffusion.place import place_pipeline
from gdp.cluster.file import load_cluster, with_max_memory
from gdp.importers.diffusers.pipeline import load_pipeline
from gdp.importers.diffusers.request import MediaRequest

NAMES = {
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": "SANA1.5-1.6B",
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": "PixArt-Sigma",
    "Tencent-Hunyuan/HunyuanDiT-v1.2-Diffusers": "HunyuanDiT-v1.2",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "Wan2.1-T2V-1.3B",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "Wan2.1-T2V-14B",
    "tencent/HunyuanVideo": "HunyuanVideo",
    "zai-org/CogVideoX-2b": "CogVideoX-2b",
    "zai-org/CogVideoX1.5-5B": "CogVideoX1.5-5B",
}
"""Names that gdp has for models of the table; of others the last part of theirs."""

HOST_BYTES = 2 << 40
"""Memory of a host with eight such GPUs, as NVIDIA's DGX H100 and B200 have at most."""


class Row(NamedTuple):
    """A measured batch."""

    model: str
    gpu: str
    degrees: ParallelDegrees
    request: MediaRequest
    seconds: float
    joules_per_item: float
    watts: float


def measured(bench: Path, kind: str) -> Iterator[Row]:
    """Rows of a table."""
    with (bench / f"mlenergy_{kind}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            request = MediaRequest(
                int(row["width"]), int(row["height"]), int(row["frames"]), int(row["steps"]),
                batch=int(row["batch"]),
            )  # fmt: skip
            name = NAMES.get(row["model"], row["model"].rpartition("/")[2])
            degrees = ParallelDegrees(int(row["ulysses"]), int(row["ring"]))
            yield Row(
                name, row["gpu"].lower(), degrees, request,
                float(row["batch_latency_s"]), float(row["joules_per_item"]), float(row["watts"]),
            )  # fmt: skip


def predicted(answer: PipelineAnswer, degrees: ParallelDegrees) -> PipelinePlan | None:
    """The plan of some degrees; None where there is none."""
    plans = [*([answer.plan] if answer.plan else []), *answer.others]
    return next((p for p in plans if p.degrees == degrees), None)


@click.command("media", help=__doc__)
@click.option("--bench", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--of", "kinds", type=click.Choice(["image", "video"]), multiple=True)
@click.option("--batch", "batches", type=int, multiple=True, help="Of these batches alone.")
@click.option("--model", "models", multiple=True, help="Of these models alone.")
@click.option("--one", is_flag=True, help="Rows of one GPU alone.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write rows (JSON lines).")
def main(
    bench: Path, kinds: tuple[str, ...], batches: tuple[int, ...], models: tuple[str, ...],
    one: bool, output: Path | None,
) -> None:  # fmt: skip
    """Print errors by model and number of GPUs, and what the best degrees lose."""
    rows: list[dict[str, Any]] = []
    for kind in kinds or ("image", "video"):
        asked: dict[Any, list[Row]] = defaultdict(list)
        for row in measured(bench, kind):
            if (not batches or row.request.batch in batches) and (
                not models or row.model in models
            ):
                asked[row.model, row.request].append(row)
        for (name, request), own in asked.items():
            pipeline = load_pipeline(f"diffusers:{name}", request)
            for gpu in sorted({r.gpu for r in own}):
                some = [r for r in own if r.gpu == gpu and (not one or r.degrees.cards == 1)]
                if some:
                    rows += answered(kind, pipeline, gpu, some)
    if output is not None:
        output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report(rows)


def answered(kind: str, pipeline: Any, gpu: str, own: list[Row]) -> Iterator[dict[str, Any]]:
    """Predictions of the rows of one request on one kind of GPU, by the number of GPUs."""
    for cards in sorted({r.degrees.cards for r in own}):
        nvlink = f"{cards}x{gpu}-nvlink" if cards > 1 else gpu
        machine = with_max_memory(load_cluster(f"cpu+{nvlink}"), {"cpu": HOST_BYTES})
        answer = place_pipeline(pipeline, machine)
        for row in own:
            if row.degrees.cards == cards:
                plan = predicted(answer, row.degrees)
                joules = None if plan is None else plan.joules
                yield {
                    "kind": kind, "model": row.model, "gpu": gpu, "gpus": cards,
                    "ulysses": row.degrees.ulysses, "ring": row.degrees.ring,
                    "batch": row.request.batch, "measured_s": row.seconds,
                    "predicted_s": None if plan is None else plan.seconds, "watts": row.watts,
                    "joules_per_item": row.joules_per_item,
                    "predicted_j": None if joules is None else joules / row.request.batch,
                }  # fmt: skip


def report(rows: list[dict[str, Any]]) -> None:
    """Print the errors of seconds, and the loss of the best degrees."""
    by_model: dict[Any, list[float]] = defaultdict(list)
    for row in rows:
        if row["predicted_s"] is None:
            click.echo(f"no plan: {row}")
            continue
        cards = "1 GPU" if row["gpus"] == 1 else "2 to 8 GPUs"
        found = {"seconds": row["predicted_s"] / row["measured_s"] - 1}
        if row["predicted_j"] is not None:
            found["joules"] = row["predicted_j"] / row["joules_per_item"] - 1
            # Of the watts alone, as if the seconds were known.
            watts = row["predicted_j"] * row["batch"] / row["predicted_s"]
            found["watts"] = watts / row["watts"] - 1
        for what, error in found.items():
            by_model[what, row["kind"], cards, "all", ""].append(error)
            by_model[what, row["kind"], cards, row["model"], row["gpu"]].append(error)
    for key, errors in sorted(by_model.items()):
        sizes = [abs(e) for e in errors]
        click.echo(
            f"{' '.join(key):58s} n {len(errors):3d}  off {statistics.median(sizes):6.1%} median, "
            f"{statistics.mean(sizes):6.1%} mean; signed {statistics.median(errors):+6.1%}"
        )
    losses: list[float] = []
    right = 0
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["gpus"] > 1 and row["predicted_s"] is not None:
            groups[row["kind"], row["model"], row["gpu"], row["gpus"], row["batch"]].append(row)
    for own in groups.values():
        best = min(own, key=lambda r: r["predicted_s"])
        least = min(r["measured_s"] for r in own)
        losses.append(best["measured_s"] / least - 1)
        right += best["measured_s"] <= least
    if losses:
        click.echo(
            f"degrees: best named in {right} of {len(losses)}, loss "
            f"{statistics.mean(losses):.1%} mean, {statistics.median(losses):.1%} median, "
            f"{max(losses):.1%} at most"
        )
