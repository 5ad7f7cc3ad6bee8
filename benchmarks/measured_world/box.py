"""Which layout of one box is the fastest? Predictions beside measured rows of four RTX 3090.

    python -m benchmarks.measured_world box --rows layouts_4x3090.csv [--data FOLDER]
        [--plans FILE] [NAME ...]

`--rows` is a CSV file with columns run, engine, model, quantisation, tp, pp, replicas, metric,
concurrency, prompt_tokens, output_tokens, context_reserved, power_limit_w and tokens_per_s. Rows of
vLLM count that run in more than one layout under one load and limit of watts, of models whose
configuration comes with AIConfigurator (`serving --help`): tensor degrees, and replicas that share
the clients. Each layout is `gdp place --for vllm` on so many of the cards, and its clients ask ten
times each. Pairs are those that differ by 5%, the loss is that of the first by prediction. Nothing
is fitted. NAME limits rows to models and quantisations that contain it.
"""

import csv
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from benchmarks.measured_world.serving import GET, installed, kept, planned_or_kept
from benchmarks.measured_world.serving_runs import Run
from benchmarks.tables import head
from gdp.cluster.file import load_cluster
from gdp.sim.serving import ServingEngine, serve
from gdp.sim.traffic import ROUNDS, Arrival, Traffic

MODELS = {
    "Qwen3.6-27B": "Qwen/Qwen3.5-27B", "Qwen3.6-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
    "Qwen3.5-122B": "Qwen/Qwen3.5-122B-A10B",
}  # fmt: skip
"""Configuration of a model's architecture and sizes, which later versions kept."""
PRECISIONS = {
    "bf16": "", "fp8-static": "fp8", "int8-w8a8": "int8", "autoround-int4": "int4",
    "awq-int4": "int4",
}  # fmt: skip
BATCH = 16
"""Requests side by side for which a layout is planned; its passes are simulated for any number."""


@dataclass(frozen=True)
class Layout:
    """A measured layout under one load; rows of one are merged by their median."""

    load: tuple[str, ...]
    tensor: int
    replicas: int
    clients: int
    prompt: int
    new: int
    tokens_per_s: float

    @property
    def name(self) -> str:
        """Layout in words."""
        copies = f"{self.replicas} x " if self.replicas > 1 else ""
        return f"{copies}tensor {self.tensor}"

    def run(self) -> Run:
        """What a plan depends on."""
        model, precision = MODELS[self.load[0]], PRECISIONS[self.load[1]]
        return Run(
            self.name, model, "rtx3090", "vllm", precision, self.prompt, self.new, BATCH,
            math.nan, math.nan, self.tensor,
        )  # fmt: skip


def layouts(path: Path, wanted: Iterable[str] = ()) -> list[Layout]:
    """The rows of loads that were measured in several layouts."""
    names = list(wanted)
    rows: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            known = row["model"] in MODELS and row["quantisation"] in PRECISIONS
            sized = row["prompt_tokens"] and row["output_tokens"] and row["concurrency"]
            if row["engine"] != "vllm" or row["pp"] != "1" or not (known and sized):
                continue
            load = tuple(
                row[name] for name in (
                    "model", "quantisation", "metric", "concurrency", "context_reserved",
                    "power_limit_w", "prompt_tokens", "output_tokens",
                )
            )  # fmt: skip
            if not names or any(name in " ".join(load[:2]) for name in names):
                key = load, int(row["tp"]), int(row["replicas"])
                rows[key].append(float(row["tokens_per_s"]))
    found = []
    for (load, tensor, copies), values in rows.items():
        clients, prompt, new = (int(float(load[k])) for k in (3, 6, 7))
        found.append(Layout(load, tensor, copies, clients, prompt, new, median(values)))
    several = {one.load for one in found if sum(other.load == one.load for other in found) > 1}
    return [one for one in found if one.load in several]


def tokens_per_s(layout: Layout, engine: ServingEngine) -> float:
    """Tokens a second that a layout writes by prediction; each copy has its part of the clients."""
    requests = (Arrival(0.0, layout.prompt, layout.new),) * (ROUNDS * layout.clients)
    traffic = Traffic(requests, layout.clients, together=True)
    served = serve(traffic, engine._replace(copies=layout.replicas))
    return len(requests) * layout.new / served.seconds


class _Outcome(NamedTuple):
    """How one load was answered."""

    pairs: list[bool]  # of layouts that differ, in the right order
    lost: float  # by the first
    largest_lost: float  # by the largest tensor degree


def told(found: list[Layout], predicted: Mapping[Layout, float]) -> Iterator[str]:
    """A line for each load, then pairs and losses by kind of load."""
    yield head(
        "model | weights | measured as | at once | layouts: tokens/s, predicted | "
        "loss of the first",
        left=3,
    )
    groups = defaultdict[str, list[_Outcome]](list)
    for load, rows in itertools.groupby(found, key=lambda one: one.load):
        mine = sorted(rows, key=lambda one: -predicted[one])
        best = max(one.tokens_per_s for one in mine)
        pairs = [
            (a.tokens_per_s > b.tokens_per_s) == (predicted[a] > predicted[b])
            for a, b in itertools.combinations(mine, 2)
            if abs(math.log(a.tokens_per_s / b.tokens_per_s)) > math.log(1.05)
        ]
        tensor = max(mine, key=lambda one: (one.tensor, -one.replicas))
        lost = [1 - one.tokens_per_s / best for one in (mine[0], tensor)]
        cells = ", ".join(
            f"{one.name}: {one.tokens_per_s:.0f}, {predicted[one]:.0f}" for one in mine
        )
        yield f"| {load[0]} | {load[1]} | {load[2]} | {load[3]} | {cells} | {lost[0]:.1%} |"
        for kind in ("all", load[1], load[2], "1 at once" if load[3] == "1.0" else "more"):
            groups[kind].append(_Outcome(pairs, *lost))
    yield ""
    for kind, own in groups.items():
        right = [pair for row in own for pair in row.pairs]
        first = sum(row.lost for row in own) / len(own)
        tensor_first = sum(row.largest_lost for row in own) / len(own)
        share = f"{sum(right) / len(right):.0%} of {len(right)}" if right else "none of 0"
        yield (
            f"{kind}: {len(own)} loads; {share} pairs in the right order; the first loses "
            f"{first:.1%} in the mean, {max(row.lost for row in own):.0%} at worst; always the "
            f"largest tensor degree {tensor_first:.1%}"
        )


@click.command("box", help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--rows", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--costs", help='Of `gdp place`: "datasheet", or a file; the default is the shipped.')
@click.option("--plans", "kept_in", type=click.Path(dir_okay=False, path_type=Path))
def main(
    names: tuple[str, ...], rows: Path, data: Path | None, costs: str | None, kept_in: Path | None
) -> None:
    data = data or installed()
    if data is None:
        raise click.UsageError(GET)
    found = sorted(layouts(rows, names), key=lambda one: (*one.load[:2], one.load))
    plans, predicted = kept(kept_in), dict[Layout, float]()
    for layout in found:
        cards = load_cluster(f"cpu-server-ddr5+{layout.tensor}xrtx3090")
        plan = planned_or_kept(plans, kept_in, layout.run(), cards, data, costs)
        if plan.engine is None:
            raise click.ClickException(f"{layout.name} of {layout.load[0]}: {plan.why}")
        predicted[layout] = tokens_per_s(layout, plan.engine)
        click.echo(f"{layout.load[:4]} {layout.name}: {predicted[layout]:.0f}", err=True)
    click.echo("\n".join(told(found, predicted)))
