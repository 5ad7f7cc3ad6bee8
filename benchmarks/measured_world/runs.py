"""Predictions of whole vLLM runs under load beside measured ones.

    python -m benchmarks.measured_world runs --runs serving_runs.csv [--data FOLDER]

`--runs` is a CSV file of LLMServingSim's measured runs with columns device, n_devices, model,
max_num_seqs, max_num_batched_tokens, requests, arrival_span_s, input_tokens_mean,
output_tokens_mean, duration_s, output_tokens_per_s and tpot_mean_ms. Those of one device are asked;
data parallel ranks that share experts are nothing that gdp plans. Configurations of the models come
with NVIDIA's AIConfigurator, as for `serving`.

No traffic is simulated. Requests come faster than the device serves them, so that all B slots
(`max_num_seqs`) are full but at both ends. A request of mean lengths P and N lives for L, its first
token and N times a token beside B - 1 others, whose prompts are read in between (`serving`):

    seconds of the run = (arrivals of the first B requests) / 2 + R L / B + L / 2

as slots are half full while they fill and while they empty; R is the number of requests.
"""

import csv
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.measured_world.serving import (
    GET,
    Predicted,
    Run,
    installed,
    predicted,
    write_config,
)
from benchmarks.tables import head
from gdp.cluster.file import load_cluster
from gdp.cluster.presets import preset_of_model
from gdp.costs.default import DATASHEET


@dataclass(frozen=True)
class Loaded:
    """One measured run of a server under more load than it can take."""

    run: Run  # of mean lengths; `token_s` as measured
    preset: str
    requests: int
    span_s: float  # between the first arrival and the last
    seconds: float
    rate: float  # tokens written per second


def loaded_runs(path: Path) -> tuple[list[Loaded], list[str]]:
    """(runs on one device, those that are not asked)."""
    found, others = [], []
    with path.open() as file:
        for row in csv.DictReader(file):
            preset = preset_of_model(row["device"])
            if preset is None or row["n_devices"] != "1":
                others.append(f"{row['model']} on {row['n_devices']} x {row['device']}")
                continue
            run = Run(
                row["model"], row["model"], preset, row["engine"], "",
                round(float(row["input_tokens_mean"])), round(float(row["output_tokens_mean"])),
                int(row["max_num_seqs"]), 0.0, float(row["tpot_mean_ms"]) / 1e3,
            )  # fmt: skip
            found.append(
                Loaded(
                    run, preset, int(row["requests"]), float(row["arrival_span_s"]),
                    float(row["duration_s"]), float(row["output_tokens_per_s"]),
                )
            )  # fmt: skip
    return found, others


def seconds_of(loaded: Loaded, answer: Predicted) -> float:
    """Seconds of the run by the formula above."""
    life_s = answer.first_s + loaded.run.new * answer.token_s
    slots = answer.batch
    filling_s = loaded.span_s * min(slots, loaded.requests) / loaded.requests
    return filling_s / 2 + loaded.requests * life_s / slots + life_s / 2


def told(runs: list[Loaded], answers: Mapping[str, list[Predicted]]) -> Iterator[str]:
    """A line for each run and costs."""
    yield head(
        "model | device | costs | slots | token ms | measured | error | tokens/s | measured | "
        "error | run s | measured | error",
        left=3,
    )
    for costs, listed in answers.items():
        for loaded, answer in zip(runs, listed, strict=True):
            run, seconds = loaded.run, seconds_of(loaded, answer)
            rate = loaded.requests * run.new / seconds
            yield (
                f"| {run.model} | {loaded.preset} | {costs} | {answer.batch} | "
                f"{1e3 * answer.token_s:.1f} | {1e3 * run.token_s:.1f} | "
                f"{answer.token_s / run.token_s - 1:+.0%} | {rate:.0f} | {loaded.rate:.0f} | "
                f"{rate / loaded.rate - 1:+.0%} | {seconds:.1f} | {loaded.seconds:.1f} | "
                f"{seconds / loaded.seconds - 1:+.0%} |"
            )


@click.command("runs", help=__doc__)
@click.option(
    "--runs", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True
)
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(path: Path, data: Path | None) -> None:
    data = data or installed()
    if data is None or not (data / "model_configs").is_dir():
        raise click.UsageError(GET)
    runs, others = loaded_runs(path)
    answers: dict[str, list[Predicted]] = {"shipped": [], DATASHEET: []}
    with tempfile.TemporaryDirectory(prefix="measured-runs-") as root:
        for loaded in runs:
            config = Path(root) / loaded.run.model.replace("/", "--")
            write_config(config, data, loaded.run.model, "")
            cluster = load_cluster(f"cpu-server-ddr5+{loaded.preset}")
            for costs, listed in answers.items():
                listed.append(predicted(config, cluster, loaded.run, costs))
    click.echo("\n".join(told(runs, answers)))
    for other in others:
        click.echo(f"not asked: {other}")
