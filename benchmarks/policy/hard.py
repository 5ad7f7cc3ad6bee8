"""Fine-tuning on test problems: `python -m benchmarks.policy.hard VERB`, from a checkout's root.

    best        search for better values of the instances, and keep the best
    finetune    800 evaluations of fine-tuning against annealing and `auto` with the same 800

The instances are of families that served for no choice, one random cluster, objective and memory
limit for each graph of up to 1,000 ops; only those that no single device wins. Figures are
geometric means of seconds over the lowest known.
"""

import importlib
import json
import time
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.policy import instances as tests
from benchmarks.policy.instances import Known, geomean, hard, spread
from gdp.cli import options
from gdp.cli.program import run
from gdp.errors import InfeasibleError
from gdp.learn.finetune import FinetuneConfig, finetune
from gdp.learn.pretrain import MISFIT
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.portfolio import auto
from gdp.methods.search.local_search import local_search
from gdp.policy.method import policy_candidate
from gdp.policy.policy import Policy, default_checkpoint, load_policy
from gdp.problem.problem import Problem
from gdp.tasks import Engine, each

SEEDS = (0, 1, 2)


def show(title: str, table: dict[str, Any]) -> None:
    """Print one table, and the same as a JSON line for programs."""
    click.echo(title)
    for name, cell in table.items():
        text = f"{cell:.4f}" if isinstance(cell, float) else str(cell)
        click.echo(f"  {name:34s} {text}")
    click.echo(json.dumps({title: table}))


def start_of(problem: Problem) -> Assignment:
    """The best heuristic's assignment."""
    found = [
        (tests.value(problem, answer.assignment), name, answer.assignment)
        for name, answer in tests.heuristic_answers(problem).items()
        if answer.assignment is not None
    ]
    return min(found, key=lambda entry: entry[:2])[2]


@click.group(help=__doc__)
def main() -> None:
    """The benchmark's verbs."""


CHECKPOINT = click.option("--checkpoint", type=Path, default=None, help="Default: the shipped.")


def loaded(checkpoint: Path | None) -> Policy:
    """The policy under test."""
    return load_policy(default_checkpoint() if checkpoint is None else checkpoint)


def _searched(task: tuple[Known, int, int]) -> Known:
    """After the heuristics and a search; as it was where nothing fits."""
    entry, evaluations, seed = task
    try:
        return tests.searched(entry, tests.problems().get(entry.instance), evaluations, seed)
    except InfeasibleError:
        return entry


@main.command()
@click.option("--evaluations", default=100_000, show_default=True)
@click.option("--seconds", default=1e9, help="Stop after so long; run again to go on.")
@click.option("--seed", default=0)
@options.engine
def best(evaluations: int, seconds: float, seed: int, engine: Engine) -> None:
    """Search every instance that has not been searched as long; better values are kept."""
    known, begin = tests.load(), time.monotonic()
    short = [k for k, entry in enumerate(known) if entry.evaluations < evaluations]
    tasks = ((known[k], evaluations, seed) for k in short)
    in_time = takewhile(lambda _: time.monotonic() - begin <= seconds, tasks)
    for number, entry in each(_searched, in_time, engine):
        known[short[number]] = entry
        tests.save(known)
    done = sum(entry.evaluations >= evaluations for entry in known)
    click.echo(f"{done} of {len(known)} searched with {evaluations} evaluations")


@main.command("finetune")
@CHECKPOINT
@click.option("--count", default=12, show_default=True, help="Instances.")
def finetune_verb(checkpoint: Path | None, count: int) -> None:
    """800 evaluations each: fine-tuning, annealing from the best heuristic, `auto`, and both.

    `auto` is that of `gdp place`, `after auto` what `gdp finetune` does: 800 of it, then its own.
    """
    policy, source = loaded(checkpoint), tests.problems()
    config = FinetuneConfig(portfolio=False)
    known = spread(hard(tests.load()), count)
    budget = Search(seconds=None, evaluations=800)
    extra = [("policy", policy_candidate(policy))]
    reached: dict[str, list[float]] = {}
    for entry in known:
        problem = source.get(entry.instance)
        start = start_of(problem)
        found = {
            "fine-tuned": finetune(problem, policy, config=config).value_s,
            "annealing": answered_s(problem, local_search(problem, replace(budget, start=start))),
            "auto": answered_s(problem, auto(problem, budget, extra)),
            "after auto": finetune(problem, policy, config=replace(config, portfolio=True)).value_s,
        }
        for name, seconds in found.items():
            ratio = min(seconds / entry.lowest_s, MISFIT)
            reached.setdefault(name, []).append(ratio)
    pairs = {name: list(zip(reached[name], reached["auto"], strict=True)) for name in reached}
    worse = {
        f"{name} worse than auto": sum(mine > plain * (1 + 1e-9) for mine, plain in pairs[name])
        for name in ("fine-tuned", "after auto")
    }
    means = {name: geomean(ratios) for name, ratios in reached.items()}
    show("800 evaluations", means | worse | {"instances": len(known)})


def answered_s(problem: Problem, answer: Answer) -> float:
    """The value of an answer in seconds; inf where there is none."""
    return np.inf if answer.assignment is None else tests.value(problem, answer.assignment)


if __name__ == "__main__":
    run(importlib.import_module("benchmarks.policy.hard").main)  # tasks travel by that name
