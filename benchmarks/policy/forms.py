"""Forms of the network under one training budget: `python -m benchmarks.policy.forms -o FOLDER`.

Imitation of the labels of `data/labels/train.jsonl` from fresh weights, the same problems in the
same order for every form of one seed. Then the validation families (`data/labels/held.jsonl`), by
regime: greedy and the best of 17 over the label, without repair, geometric means, what does not fit
counting five-fold; the last column is each form over the first, paired by seed, with a 95% interval
over the seeds. Gates are mean absolute values of what switches a part on: the strengths of
attention's two branches, and the last layer of what reads the incumbent. FOLDER keeps what is done;
run again to go on. 400 updates take 2 to 4 CPU minutes a form and seed.
"""

import importlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import jax
import msgspec
import numpy as np
from scipy.stats import t as student

from gdp.cli import options
from gdp.cli.program import run
from gdp.files.writing import write_atomic
from gdp.learn.labels import load_labels
from gdp.learn.pretrain import pretrain
from gdp.learn.problems import load_problems
from gdp.learn.recipe import DataConfig, Recipe, RunConfig, parse_recipe
from gdp.learn.validate import by_regime, outcomes
from gdp.policy.model.config import NetworkConfig
from gdp.tasks import Engine, each

HELD = "data/labels/held.jsonl"
PLAIN = NetworkConfig(attention_layers=0)
FORMS = {
    "no attention": PLAIN,
    "segments, as published": replace(PLAIN, attention_layers=1),
    "incumbent's schedule": replace(PLAIN, device_attention=True),
    "incumbent's devices, diffused": replace(PLAIN, diffusion=4),
    "schedule and devices": replace(PLAIN, device_attention=True, diffusion=4),
    "all three": NetworkConfig(device_attention=True, diffusion=4),
    "all three, no superposition": NetworkConfig(
        device_attention=True, diffusion=4, superposition=False
    ),
    "segments, no advice": NetworkConfig(advice=False),
    "segments, published features": NetworkConfig(features="published"),
    "segments, each op by itself": NetworkConfig(decode="independent"),
}
"""The first is what the others are compared with."""


@dataclass(frozen=True)
class Task:
    """A form, a seed, and how long it learns."""

    form: str
    seed: int
    updates: int
    folder: str


class Row(msgspec.Struct, frozen=True):
    """What became of a task."""

    form: str
    seed: int
    updates: int
    cpu_s: float
    loss: float  # cross-entropy, mean of the last 50 updates
    gates: dict[str, float]
    values: dict[str, float]  # "tight_greedy" and so on
    misfits: int  # greedy placements


def recipe_of(task: Task) -> Recipe:
    """Imitation alone; the rest is that of the shipped policy."""
    base = parse_recipe(Path("pretrain/recipes/imitate.toml").read_text())
    return replace(
        base,
        name=task.form,
        seed=task.seed,
        network=FORMS[task.form],
        imitation=replace(base.imitation, updates=task.updates),
        ppo=replace(base.ppo, updates=0),
        run=RunConfig(checkpoint_minutes=60.0, validate_every=task.updates + 1),
    )


def gates_of(params: Any, path: str = "") -> dict[str, float]:
    """Mean absolute value of what switches parts of the network on, by its place there."""
    if not isinstance(params, dict):
        is_gate = path.endswith(("/strength", "across/last/kernel"))
        return {path: round(float(np.abs(params).mean()), 4)} if is_gate else {}
    found: dict[str, float] = {}
    for key, inner in params.items():
        found |= gates_of(inner, f"{path}/{key}" if path else str(key))
    return found


def done(task: Task) -> Row:
    """Train and validate one form."""
    begin_s = time.process_time()
    where = Path(task.folder) / f"{task.form.replace(' ', '_')}-{task.seed}-{task.updates}"
    made = pretrain(recipe_of(task), where)
    losses = [row["cross_entropy"] for row in made.history[-50:] if "cross_entropy" in row]
    data = DataConfig()
    problems = load_problems(
        "data/corpus", random_graphs=0, seed=0, min_ops=data.min_ops, max_ops=3000
    )
    labels = load_labels(HELD)
    held = [i for i in labels.instances() if i.graph in set(problems.validation)]
    found = outcomes(made.policy, problems, labels, held)
    jax.clear_caches()  # no other form runs what was compiled for this one, and mappings are few
    return Row(
        task.form, task.seed, task.updates, time.process_time() - begin_s,
        float(np.mean(losses)), gates_of(made.policy.params), by_regime(found),
        sum(not one.fits for one in found),
    )  # fmt: skip


def table(rows: list[Row], first: str) -> Iterator[str]:
    """A line per form and figure: mean over seeds, and over the first form."""
    by = {(row.form, row.seed): row for row in rows}
    for form in FORMS:
        mine = [row for row in rows if row.form == form]
        if not mine:
            continue
        loss, cpu_s = np.mean([x.loss for x in mine]), np.mean([x.cpu_s for x in mine])
        misfits = np.mean([x.misfits for x in mine])
        cost = f"{cpu_s:.0f} CPU s"
        yield f"{form}: {len(mine)} seeds, loss {loss:.3f}, {misfits:.1f} misfits, {cost}"
        gates = {k: np.mean([x.gates[k] for x in mine]) for k in mine[0].gates}
        if gates:
            yield "  gates " + ", ".join(f"{k} {v:.3f}" for k, v in gates.items())
        for figure in sorted(mine[0].values):
            mean = np.exp(np.mean([np.log(x.values[figure]) for x in mine]))
            pairs = [
                np.log(x.values[figure] / by[first, x.seed].values[figure])
                for x in mine
                if (first, x.seed) in by
            ]
            yield f"  {figure:14s} {mean:.4f}  {_over(pairs, form == first)}"


def _over(logs: list[float], is_first: bool) -> str:
    """Geometric mean with its 95% interval."""
    if is_first or not logs:
        return ""
    mean, text = np.mean(logs), f"x {np.exp(np.mean(logs)):.4f}"
    if len(logs) > 1:
        half = student.ppf(0.975, len(logs) - 1) * np.std(logs, ddof=1) / np.sqrt(len(logs))
        text += f" ({np.exp(mean - half):.4f} to {np.exp(mean + half):.4f})"
    return text


@click.command(help=__doc__)
@click.option("-o", "--output", type=click.Path(file_okay=False), required=True)
@click.option("--updates", default=400, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--form", "forms", multiple=True, type=click.Choice(list(FORMS)))
@options.engine
def main(output: str, updates: int, seeds: int, forms: tuple[str, ...], engine: Engine) -> None:
    """Train what is not there yet, and print the table."""
    file = Path(output) / "rows.json"
    rows = msgspec.json.decode(file.read_bytes(), type=list[Row]) if file.exists() else []
    there = {(row.form, row.seed, row.updates) for row in rows}
    tasks = [
        Task(form, seed, updates, output)
        for seed in range(seeds)
        for form in forms or FORMS
        if (form, seed, updates) not in there
    ]
    for _, row in each(done, tasks, engine):
        rows.append(row)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, msgspec.json.encode(rows))
        click.echo(f"{row.form}, seed {row.seed}: {row.values}", err=True)
    chosen = [row for row in rows if row.updates == updates]
    for line in table(chosen, next(iter(FORMS))):
        click.echo(line)


if __name__ == "__main__":
    run(importlib.import_module("benchmarks.policy.forms").main)  # tasks travel by that name
