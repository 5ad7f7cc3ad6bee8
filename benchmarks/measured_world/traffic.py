"""Predictions of real vLLM runs, request by request, beside what was measured.

    python -m benchmarks.measured_world traffic --bench FOLDER [--data FOLDER] [--costs datasheet]

`FOLDER` holds `serving_runs.csv` and `serving_requests.csv`: runs of LLMServingSim's authors (MIT)
on one GPU, with the arrival and the lengths of each request. The engine of `gdp.serve` gets the
same requests. Configurations of the models come with AIConfigurator, as the command `serving` says.
Nothing is fitted. Runs on several devices are left out.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

import gdp
from benchmarks.measured_world.serving import GET, configuration, installed
from benchmarks.tables import head
from gdp.sim.traffic import Arrival, ServedTraffic

PRESETS = {"RTX PRO 6000": "rtx-pro-6000", "H100": "h100", "A6000": "a6000", "3090": "rtx3090"}


def arrivals(path: Path) -> Mapping[str, list[Arrival]]:
    """Requests of each run."""
    runs = defaultdict[str, list[Arrival]](list)
    with path.open() as file:
        for row in csv.DictReader(file):
            runs[row["run"]].append(
                Arrival(
                    float(row["arrival_s"]), int(row["input_tokens"]), int(row["output_tokens"])
                )
            )
    return runs


def predicted(
    run: Mapping[str, str], requests: list[Arrival], config: str, costs: str | None
) -> ServedTraffic:
    """The requests of a run on gdp's engine, with the limits of the run."""
    preset = next(own for name, own in PRESETS.items() if name in run["device"])
    spec = f"hf:{config}?max_num_batched_tokens={run['max_num_batched_tokens']}"
    return gdp.serve(
        spec, f"cpu-server-ddr5+{preset}", gdp.Traffic(tuple(sorted(requests))), costs=costs,
        requests_at_once=int(run["max_num_seqs"]),
    ).served  # fmt: skip


def told(run: Mapping[str, str], served: ServedTraffic) -> Iterator[str]:
    """A line for each figure of a run."""
    pairs = {
        "tokens/s": (served.tokens_per_s, float(run["output_tokens_per_s"])),
        "seconds in all": (served.seconds, float(run["duration_s"])),
        "ms per token, mean": (1e3 * served.token.mean_s, float(run["tpot_mean_ms"])),
        "ms per token, median": (1e3 * served.token.median_s, float(run["tpot_median_ms"])),
        "first token ms, mean": (1e3 * served.first_token.mean_s, float(run["ttft_mean_ms"])),
        "first token ms, median": (1e3 * served.first_token.median_s, float(run["ttft_median_ms"])),
    }
    for name, (own, measured) in pairs.items():
        yield (
            f"| {run['model']} | {run['device'].partition(' (')[0]} | {name} | {own:.1f} | "
            f"{measured:.1f} | {own / measured - 1:+.0%} |"
        )


@click.command("traffic", help=__doc__)
@click.option(
    "--bench", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--costs", help='Of `gdp place`: "datasheet", or a file; the default is the shipped.')
def main(bench: Path, data: Path | None, costs: str | None) -> None:
    data = data or installed()
    if data is None:
        raise click.UsageError(GET)
    requests = arrivals(bench / "serving_requests.csv")
    click.echo(head("model | GPU | figure | predicted | measured | error", left=3))
    with (bench / "serving_runs.csv").open() as file:
        for run in csv.DictReader(file):
            key = next((k for k in requests if run["source"].endswith(k)), None)
            if key is None or int(run["n_devices"]) > 1:
                continue
            config = configuration(run["model"], [data / "model_configs"])
            if config is None:
                raise click.UsageError(f"no configuration of {run['model']}: {GET}")
            for line in told(run, predicted(run, requests[key], config, costs)):
                click.echo(line)


if __name__ == "__main__":
    main()
