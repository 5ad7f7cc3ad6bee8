"""Policies on the validation families, by regime: what decides whether a checkpoint ships.

    python -m benchmarks.policy.validation checkpoints/default runs/NAME/best [--answers]

Over the values of the labels: greedy, the best of 17 placements, and with --answers what
`--method policy` answers, heuristics and repair included. Medians, geometric means over the
instances on which every policy fits, and misfits apart. No instance is of a test family.
"""

from pathlib import Path

import click
import numpy as np

from gdp.learn.instances import Instance, Problems, load_problems
from gdp.learn.labels import LabelStore, load_labels
from gdp.learn.pretrain import LARGE, MISFIT, TIGHT
from gdp.methods.base import Search
from gdp.policy.method import place_with_policy
from gdp.policy.policy import Policy, load_policy
from gdp.policy.propose import propose
from gdp.sim.score import values

FILES = ("data/labels/held.jsonl", "data/labels/train.jsonl")
SAMPLES = 17


def regime(instance: Instance, num_ops: int) -> str:
    """Tight memory first, then size."""
    if 0.0 < instance.memory <= TIGHT:
        return "tight"
    return "large" if num_ops >= LARGE else "ample"


def ratios(
    policy: Policy, where: Path, problems: Problems, labels: LabelStore, instance: Instance,
    answers: bool,
) -> tuple[float, ...] | None:  # fmt: skip
    """(greedy, best[, answer]) over the label, inf where nothing fits; None without a label."""
    problem = problems.get(instance)
    label = labels.get(instance, problem)
    if label is None:
        return None
    found = propose(policy, problem, SAMPLES, 0)
    made = [found.value_s[0], found.value_s.min()]
    if answers:
        answer = place_with_policy(problem, Search(seed=0, seconds=None), where)
        value_s = np.inf
        if answer.assignment is not None:
            rank = answer.assignment.rank
            value_s = values(problem, answer.assignment.device[None], rank)[0][0]
        made.append(value_s)
    return tuple(float(value_s) / label.value_s for value_s in made)


@click.command(help=__doc__)
@click.argument("checkpoints", nargs=-1, type=Path, required=True)
@click.option("--answers", is_flag=True, help="Whole answers too.")
@click.option("--count", type=int, default=None, help="Instances of each file at most, spread.")
def main(checkpoints: tuple[Path, ...], answers: bool, count: int | None) -> None:
    """Print a row per regime, figure and policy."""
    policies = [load_policy(path) for path in checkpoints]
    problems = load_problems("data/corpus", random_graphs=0, min_ops=30, max_ops=3000)
    table: dict[str, list[list[tuple[float, ...]]]] = {}
    for file in FILES:
        labels = load_labels(file)
        held = [i for i in labels.instances() if i.graph in set(problems.validation)]
        step = 1 if count is None else max(1, len(held) // count)
        for instance in held[::step]:
            rows = [
                ratios(policy, where, problems, labels, instance, answers)
                for policy, where in zip(policies, checkpoints, strict=True)
            ]
            known = [row for row in rows if row is not None]
            if len(known) == len(rows):
                name = regime(instance, problems.get(instance).num_ops)
                table.setdefault(name, []).append(known)
    for name, part in sorted(table.items()):
        cube = np.array(part)  # [instances, policies, figures]
        for figure, column in enumerate(("greedy", "best of 17", "answer")[: cube.shape[2]]):
            fits = np.isfinite(cube[:, :, figure])
            both = cube[fits.all(axis=1), :, figure]
            for row, where in enumerate(checkpoints):
                every = np.minimum(cube[:, row, figure], MISFIT)
                click.echo(
                    f"{name:6s} {column:10s} {len(every):3d} instances: median "
                    f"{np.median(every):.4f}, mean of those that fit under all "
                    f"{np.exp(np.log(both[:, row]).mean()):.4f}, misfits "
                    f"{int((~fits[:, row]).sum())}  {where}"
                )


if __name__ == "__main__":
    main()
