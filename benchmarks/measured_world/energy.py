"""Joules per token of serving engines beside measured ones.

    python -m benchmarks.measured_world energy --rows mlenergy_serving.csv -o ROWS.jsonl
        [--data FOLDER] [--configs FOLDER] [--batch B ...] [--every K] [NAME ...]

Rows of ML.ENERGY as `mlenergy --help` says, with its columns joules_per_token and watts: of the
GPUs alone, as NVML counts them. `--batch` takes the rows whose mean number of requests at once is
within a tenth of B, and `--every` each K-th of these in the order of model sizes, GPU and
tensor-parallel degree. Predictions are appended to the file, and those in it are not made
again: a run that was stopped goes on, and one without rows left prints.

Joules are predicted watts times predicted seconds of a token, and, with measured times given,
times measured ones. Shares of the power model are those that ship, and, for each model, those
fitted to the rows of all others (`pretrain.costs.power`). The last columns are the power limits
(TDP) of the GPUs times predicted and times measured seconds.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from benchmarks.measured_world.engines import Step, mlenergy_steps
from benchmarks.measured_world.passes import asked_of
from benchmarks.measured_world.serving import GET, RunPlan, installed, plan_of
from benchmarks.tables import head
from gdp.base.errors import GdpError
from gdp.costs.power import BUSY, BYTES, FLOP, Power, work_seconds
from gdp.question.prepare import once_of, prepare_placement

if TYPE_CHECKING:
    from pretrain.costs.power import Sample


NEAR = 0.1
"""Log of the ratio of two numbers of requests that count as equal."""


def work_of(plan: RunPlan) -> list[list[float]]:
    """Ops of one GPU in classes: (1 for decode, number of ops, seconds of each, of its FLOP at the
    peak, of its bytes at the bandwidth)."""
    once = once_of(plan.question)
    question = replace(plan.question, graph=once, objective="latency")
    problem, placed = prepare_placement(question, plan.placement)
    ops = np.flatnonzero(~problem.graph.is_io)
    device = placed.device[ops]
    decode = np.zeros(problem.num_ops, dtype=bool)
    decode[problem.origin.group_of[plan.question.graph.repeats > 1]] = True
    parts = [problem.compute_s, *work_seconds(problem.graph, problem.cluster)]
    rows = np.column_stack([decode[ops], *(part[ops, device] for part in parts)])
    rows = np.array([[float(f"{x:.4g}") for x in row] for row in rows])
    classes, counts = np.unique(rows, axis=0, return_counts=True)
    return np.column_stack([classes[:, :1], counts, classes[:, 1:]]).tolist()


def row_of(step: Step, data: Path, folders: list[Path]) -> dict[str, Any]:
    """A measured row with its prediction, or why there is none."""
    measured = {"mean_s": step.mean_s, "watts": step.watts, "joules": step.joules}
    row = {"run": asdict(step.run)} | measured
    try:
        cluster, spec, costs = asked_of("mlenergy", step.run, data, folders, data)
        plan = plan_of(spec, cluster, step.run, costs)
    except GdpError as error:
        return row | {"why": str(error)}
    answer = plan.answer
    gpu = next(d for d, device in enumerate(cluster.devices) if not device.is_cpu)
    return row | {
        "first_s": answer.first_token_s, "token_s": answer.token_s, "work": work_of(plan),
        "power": [float(part[gpu]) for part in Power.of(cluster)],
    }  # fmt: skip


def error_lines(samples: "list[Sample]") -> Iterator[str]:
    """Errors of watts and joules of all rows, and of those of each model and GPU."""
    from pretrain.costs.power import fitted

    shipped = np.array([BUSY, FLOP, BYTES])
    folds = {
        name: fitted([s for s in samples if s.name != name]) for name in {s.name for s in samples}
    }
    yield head(
        "rows | | measured times: shipped | model left out | own times: shipped | model left out | "
        "TDP x own seconds | TDP x measured", 1
    )  # fmt: skip
    groups = {"all": samples} | {
        value: [s for s in samples if value in (s.name, s.gpu)]
        for value in sorted({s.name for s in samples} | {s.gpu for s in samples})
    }
    for group, own in groups.items():
        columns = [
            [s.predicted(shipped) / s.watts for s in own],
            [s.predicted(folds[s.name]) / s.watts for s in own],
            [s.predicted(shipped) * s.all_s / s.joules for s in own],
            [s.predicted(folds[s.name]) * s.all_s / s.joules for s in own],
            [s.power[2] * s.all_s / s.joules for s in own],
            [s.power[2] / s.watts for s in own],
        ]
        cells = []
        for column in columns:
            off = np.abs(np.array(column) - 1)
            cells.append(f"{np.median(off):.1%}, {off.mean():.1%}")
        yield f"| {group} | {len(own)} | {' | '.join(cells)} |"


@click.command("energy", help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--rows", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "output", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--configs", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--batch", "batches", type=int, multiple=True)
@click.option("--every", type=click.IntRange(1), default=1)
def main(
    names: tuple[str, ...], rows: Path | None, output: Path, data: Path | None,
    configs: Path | None, batches: tuple[int, ...], every: int,
) -> None:  # fmt: skip
    from pretrain.costs.power import servers

    data = data or installed()
    if data is None:
        raise click.UsageError(GET)
    folders = [*([configs] if configs else []), data / "model_configs"]
    lines = output.read_text().splitlines() if output.is_file() else []
    done = {json.dumps(json.loads(line)["run"], sort_keys=True) for line in lines}
    steps = [] if rows is None else mlenergy_steps(rows, names)
    if batches:
        off = [min(abs(math.log(s.run.batch / batch)) for batch in batches) for s in steps]
        steps = [step for step, own in zip(steps, off, strict=True) if own <= NEAR]
    steps = sorted(steps, key=lambda s: (s.run.sizes, s.run.system, s.run.tensor, s.run.batch))
    for step in steps[::every]:
        if json.dumps(asdict(step.run), sort_keys=True) in done:
            continue
        with output.open("a") as file:
            file.write(json.dumps(row_of(step, data, folders)) + "\n")
        click.echo(f"{step.run.model} {step.run.system} {step.run.batch}", err=True)
    click.echo("\n".join(error_lines(list(servers(output)))))
