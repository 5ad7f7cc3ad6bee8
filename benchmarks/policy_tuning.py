"""What pre-training saves, and fine-tuning on real runs: `python -m benchmarks.policy_tuning VERB`.

    scratch     samples to the quality of 12,800 samples from scratch, over test instances
    measured    100 measured runs of two models: fine-tuning against simulated annealing

From the root of a checkout. Figures are ratios; lower is better, but for the samples saved.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import policy_instances as tests
from benchmarks.policy import CHECKPOINT, geomean, hard, loaded, show, spread, start_of
from gdp.api import pose
from gdp.cluster import Cluster
from gdp.learn.finetune import FinetuneConfig, Finetuned, finetune
from gdp.measured import MeasuredReward
from gdp.methods.base import Assignment
from gdp.models import load
from gdp.policy.network import init
from gdp.policy.policy import Policy
from gdp.sim.problem import Problem

SCRATCH = FinetuneConfig(
    updates=800, evaluations=1_000_000, samples=16, search=0.0, freedom="all", rate=1e-3,
    rate_end=1e-4, entropy=1e-3,
)  # fmt: skip
"""12,800 samples with advantages normalised in the batch: GDP-one, as far as it learns at all."""
MODELS = ("onnx:light_squeezenet", "onnx:light_inception_v2")
HOT, COLD = 3e-2, 1e-3
"""Temperatures of annealing on measured runs, over the value at the start."""


def samples_to(found: Finetuned, value_s: float) -> float | None:
    """Evaluations after which the best was at most so much; None where it never was."""
    for numbers in found.history:
        if numbers["best_s"] <= value_s * (1 + 1e-9):
            return numbers["evaluations"]
    return None


@click.group(help=__doc__)
def main() -> None:
    """The benchmark's verbs."""


@main.command()
@CHECKPOINT
@click.option("--count", default=4, show_default=True, help="Instances.")
@click.option("--updates", default=SCRATCH.updates, show_default=True, help="From scratch.")
def scratch(checkpoint: Path | None, count: int, updates: int) -> None:
    """The same network from fresh weights and pre-trained, on one graph and cluster each."""
    policy, source = loaded(checkpoint), tests.problems()
    saved: list[float] = []
    ends: list[tuple[float, float]] = []
    missed = 0
    for entry in spread(hard(tests.load()), count):
        problem = source.get(entry.instance)
        fresh = Policy(policy.config, init(policy.config, 1), "fresh")
        long = finetune(problem, fresh, config=replace(SCRATCH, updates=updates))
        short = finetune(problem, policy)
        ends.append((long.value_s / entry.best_s, short.value_s / entry.best_s))
        needed = samples_to(short, long.value_s)
        missed += needed is None
        if needed is not None:
            saved.append(long.evaluations / needed)
        click.echo(
            f"{entry.instance.key}: scratch {ends[-1][0]:.4f} after {long.evaluations}, "
            f"pre-trained {ends[-1][1]:.4f} after {short.evaluations}, there after {needed}",
            err=True,
        )
    table: dict[str, Any] = {
        "from scratch": geomean([a for a, _ in ends]),
        "pre-trained": geomean([b for _, b in ends]),
        "samples saved, times": geomean(saved),
        "not reached": missed,
        "instances": len(ends),
    }
    show(f"{updates * SCRATCH.samples} samples from scratch", table)


def anneal_measured(
    problem: Problem, start: Assignment, reward: MeasuredReward, runs: int, seed: int
) -> tuple[Assignment, float]:
    """(best assignment, its seconds) after so many runs; windows of the topological order move."""
    rng = np.random.default_rng(seed)
    now, best = start, start
    now_s = best_s = first_s = reward(start)
    for k in range(1, runs):
        length = int(np.exp(rng.uniform(0.0, np.log(max(problem.num_ops / 2, 2)))))
        at = int(rng.integers(max(1, problem.num_ops - length)))
        device = now.device.copy()
        to = int(rng.integers(problem.num_devices))
        window = np.arange(at, at + length)
        device[window[problem.allowed[window, to]]] = to
        # Groups stay together: all go where their first op is.
        lead = np.full(problem.num_groups, -1, dtype=np.int64)
        lead[problem.group[::-1]] = device[::-1]
        device = lead[problem.group]
        tried = Assignment(device, now.rank)
        seconds = reward(tried)
        heat = first_s * HOT * (COLD / HOT) ** (k / runs)
        if seconds <= now_s or rng.random() < np.exp((now_s - seconds) / heat):
            now, now_s = tried, seconds
        if seconds < best_s:
            best, best_s = tried, seconds
    return best, best_s


@main.command()
@CHECKPOINT
@click.option("--runs", default=100, show_default=True, help="Measured runs each.")
@click.option("--cluster", default="2xcpu-core", show_default=True)
@click.option("--objective", default="throughput", show_default=True)
def measured(checkpoint: Path | None, runs: int, cluster: str, objective: str) -> None:
    """Both search with real runs; what they end with is then measured again, in turns."""
    policy, machine = loaded(checkpoint), Cluster.load(cluster)
    config = FinetuneConfig(updates=runs // 5, evaluations=runs, samples=5, gate_updates=4)
    ratios: list[float] = []
    for name in MODELS:
        graph = load(name, {})
        posed = pose(graph, machine, objective)  # type: ignore[arg-type]
        start = start_of(posed.problem)
        judge = MeasuredReward(name, graph, posed, machine)
        tuned = finetune(posed.problem, policy, reward=judge, config=config)
        used = judge.count
        annealed, _ = anneal_measured(posed.problem, start, judge, runs, 0)
        last = {"heuristic": start, "annealing": annealed, "fine-tuned": tuned.assignment}
        again = {label: min(judge(found) for _ in range(5)) for label, found in last.items()}
        ratios.append(again["fine-tuned"] / again["annealing"])
        table = {f"{label}, ms": seconds * 1e3 for label, seconds in again.items()}
        show(f"{name}: {used} runs of fine-tuning, {runs} of annealing", table)
    show("measured", {"fine-tuned / annealing": geomean(ratios)})


if __name__ == "__main__":
    main()
