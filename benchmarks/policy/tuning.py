"""What pre-training saves, and fine-tuning on real runs: `python -m benchmarks.policy.tuning VERB`.

    scratch     the same network from fresh weights, 12,800 samples, on test instances
    saved       evaluations to the same quality from the shipped policy
    paired      fine-tuning from the shipped and from fresh weights, by the same procedure
    measured    100 measured runs of two models: fine-tuning against simulated annealing

From the root of a checkout. Figures are ratios; lower is better, but for the samples saved.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.policy import instances as tests
from benchmarks.policy.hard import CHECKPOINT, loaded, show, start_of
from benchmarks.policy.instances import geomean, hard, spread
from gdp.cluster.types import Cluster
from gdp.files.writing import write_atomic
from gdp.learn.finetune import FinetuneConfig, finetune
from gdp.learn.judge import FINALISTS, confirm, turns_of
from gdp.methods.base import Assignment
from gdp.models import load
from gdp.policy.model.network import init
from gdp.policy.policy import Policy
from gdp.posed import pose
from gdp.problem.problem import Problem
from gdp.verbs.measured import MeasuredReward

SCRATCH = FinetuneConfig(
    updates=800, evaluations=1_000_000, samples=16, explore=0.0, search=0.0, freedom="all",
    rate=1e-3, rate_end=1e-4, entropy=1e-3, imitate=0.0, hottest=1.0, portfolio=False,
)  # fmt: skip
"""GDP-one: 12,800 samples of the policy, PPO with advantages normalised in the batch, no more."""
OBJECTIVES = ("throughput", "latency")
MODELS = ("onnx:light_squeezenet", "onnx:light_inception_v2")
HOT, COLD = 3e-2, 1e-3
"""Temperatures of annealing on measured runs, over the value at the start."""


BUDGETS = (100, 200, 400, 800, 1600, 3200, 6400, 12800)
"""Evaluations of fine-tuning, tried in turn: its schedule is another for each."""


def samples_to(problem: Problem, policy: Policy, value_s: float) -> int | None:
    """The smallest budget with which fine-tuning finds such a value; None where none does."""
    own = FinetuneConfig(portfolio=False)
    for budget in BUDGETS:
        updates = max(own.updates, budget // own.samples)
        found = finetune(problem, policy, config=replace(own, evaluations=budget, updates=updates))
        if found.value_s <= value_s * (1 + 1e-9):
            return budget
    return None


@click.group(help=__doc__)
def main() -> None:
    """The benchmark's verbs."""


@main.command()
@click.option("--count", default=12, show_default=True, help="Instances.")
def scratch(count: int) -> None:
    """12,800 samples from fresh weights on each instance that is not in the file yet, minutes each;
    from the last to the first."""
    source, policy = tests.problems(), loaded(None)
    for entry in reversed(spread(hard(tests.load()), count)):
        kept = tests.from_scratch()
        if entry.instance.key in kept:
            continue
        fresh = Policy(policy.config, init(policy.config, 1))
        found = finetune(source.get(entry.instance), fresh, config=SCRATCH)
        kept[entry.instance.key] = found.value_s
        rows = {"samples": SCRATCH.updates * SCRATCH.samples, "value_s": kept}
        write_atomic(tests.SCRATCH_LIST, json.dumps(rows, indent=1).encode())
        click.echo(f"{entry.instance.key}: {found.value_s / entry.best_s:.4f}", err=True)


@main.command()
@CHECKPOINT
def saved(checkpoint: Path | None) -> None:
    """Evaluations with which the pre-trained policy, fine-tuned, finds as good placements as
    `scratch` did."""
    policy, source = loaded(checkpoint), tests.problems()
    known = {entry.instance.key: entry for entry in tests.load()}
    samples = SCRATCH.updates * SCRATCH.samples
    factors: list[float] = []
    ends: list[tuple[float, float]] = []
    for key, value_s in tests.from_scratch().items():
        entry = known[key]
        problem = source.get(entry.instance)
        short = finetune(problem, policy)
        ends.append((value_s / entry.best_s, short.value_s / entry.best_s))
        needed = samples_to(problem, policy, value_s)
        # Where it is never reached, nothing is saved.
        factors.append(1.0 if needed is None else samples / needed)
        click.echo(
            f"{key}: from scratch {ends[-1][0]:.4f}, pre-trained {ends[-1][1]:.4f} after "
            f"{short.evaluations}, there after {needed}",
            err=True,
        )
    table: dict[str, Any] = {
        "from scratch": geomean([a for a, _ in ends]),
        "pre-trained, 800": geomean([b for _, b in ends]),
        "samples saved, times": geomean(factors),
        "15 times or more": sum(factor >= 15 for factor in factors),
        "none saved": sum(factor == 1.0 for factor in factors),
        "instances": len(ends),
    }
    show(f"{samples} samples from scratch", table)


@main.command()
@CHECKPOINT
@click.option("--count", default=6, show_default=True, help="Instances.")
@click.option("--most", default=1600, show_default=True, help="Evaluations, at most.")
def paired(checkpoint: Path | None, count: int, most: int) -> None:
    """Fine-tuning, explored and searched alike on both sides; only the weights at its start differ.

    By budget, geometric means over the best listed; and how many times fewer evaluations the
    shipped weights need for what fresh ones reach with the most.
    """
    policy, source, own = loaded(checkpoint), tests.problems(), FinetuneConfig(portfolio=False)
    budgets = [budget for budget in BUDGETS if budget <= most]
    ends: dict[str, list[list[float]]] = {"pre-trained": [], "fresh": []}
    for entry in spread(hard(tests.load()), count):
        problem = source.get(entry.instance)
        starts = {"pre-trained": policy, "fresh": Policy(policy.config, init(policy.config, 1))}
        for name, start in starts.items():
            row = []
            for budget in budgets:
                updates = max(own.updates, budget // own.samples)
                settings = replace(own, evaluations=budget, updates=updates)
                row.append(finetune(problem, start, config=settings).value_s / entry.best_s)
            ends[name].append(row)
            click.echo(f"{entry.instance.key} {name}: {np.round(row, 4).tolist()}", err=True)
    for name, table in ends.items():
        columns = zip(budgets, np.exp(np.log(table).mean(axis=0)), strict=True)
        show(name, {f"{budget} evaluations": float(ratio) for budget, ratio in columns})
    saved_times = [
        most / next((b for b, ratio in zip(budgets, told, strict=True) if ratio <= fresh[-1]), most)
        for told, fresh in zip(ends["pre-trained"], ends["fresh"], strict=True)
    ]
    show("the same procedure", {"evaluations saved, times": geomean(saved_times)})


def anneal_measured(
    problem: Problem, start: Assignment, reward: MeasuredReward, runs: int, seed: int
) -> Assignment:
    """The best after so many runs; windows of the topological order move.

    The last runs measure the best few again, as fine-tuning does.
    """
    rng = np.random.default_rng(seed)
    turns = turns_of(runs)
    steps = runs - FINALISTS * turns
    now, now_s = start, reward(start)
    heat_s, met = now_s, {start.device.tobytes(): (now_s, 0, start)}
    for k in range(1, steps):
        length = int(np.exp(rng.uniform(0.0, np.log(max(problem.num_ops / 2, 2)))))
        at = int(rng.integers(max(1, problem.num_ops - length)))
        device = now.device.copy()
        to = int(rng.integers(problem.num_devices))
        window = np.arange(at, at + length)
        device[window[problem.allowed[window, to]]] = to
        # Groups stay together: all go where their first op is.
        lead = np.full(problem.num_groups, -1, dtype=np.int64)
        lead[problem.group[::-1]] = device[::-1]
        tried = Assignment(lead[problem.group], now.rank)
        seconds = reward(tried)
        heat = heat_s * HOT * (COLD / HOT) ** (k / steps)
        if seconds <= now_s or rng.random() < np.exp((now_s - seconds) / heat):
            now, now_s = tried, seconds
        met.setdefault(tried.device.tobytes(), (seconds, k, tried))
    found = [assignment for _, _, assignment in sorted(met.values())[:FINALISTS]]
    return found[confirm(found, reward, turns)[0]] if turns else found[0]


@main.command()
@CHECKPOINT
@click.option("--runs", default=100, show_default=True, help="Measured runs each.")
@click.option("--cluster", default="2xcpu-core", show_default=True)
@click.option("--objective", type=click.Choice(("throughput", "latency")), default=None)
@click.option("--model", "models", multiple=True, default=MODELS, show_default=True)
@click.option("--again", default=7, show_default=True, help="Last measurements, in turns.")
def measured(
    checkpoint: Path | None, runs: int, cluster: str, objective: str | None,
    models: tuple[str, ...], again: int,
) -> None:  # fmt: skip
    """Both search with real runs; what they end with is then measured again, in turns."""
    policy, machine = loaded(checkpoint), Cluster.load(cluster)
    config = FinetuneConfig(updates=runs, evaluations=runs, samples=5, gate_updates=4)
    ratios: list[float] = []
    for name, kind in itertools.product(models, (objective,) if objective else OBJECTIVES):
        graph = load(name, {})
        posed = pose(graph, machine, kind)  # type: ignore[arg-type]
        start = start_of(posed.problem)
        judge = MeasuredReward(name, graph, posed, machine)
        tuned = finetune(posed.problem, policy, reward=judge, config=config)
        used = judge.count
        annealed = anneal_measured(posed.problem, start, judge, runs, 0)
        last = {"heuristic": start, "annealing": annealed, "fine-tuned": tuned.assignment}
        seconds = np.array([[judge(found) for found in last.values()] for _ in range(again)])
        middle = dict(zip(last, np.median(seconds, axis=0), strict=True))
        ratios.append(middle["fine-tuned"] / middle["annealing"])
        table = {f"{label}, ms": value * 1e3 for label, value in middle.items()}
        title = f"{name}, {kind}: {used} runs of fine-tuning, {judge.count - used - seconds.size}"
        show(f"{title} of annealing", table)
    show("measured", {"fine-tuned / annealing": geomean(ratios)})


if __name__ == "__main__":
    main()
