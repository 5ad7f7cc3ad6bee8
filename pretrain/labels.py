"""Searches labels for training and validation: `python -m pretrain.labels --help`.

Run again, it goes on where it stopped; with more evaluations, labels only get better, since what is
there is the start of the search.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np

from gdp.errors import InfeasibleError
from gdp.learn.instances import Instance, draw
from gdp.learn.labels import Label, LabelStore, load_labels, starts
from gdp.learn.problems import Problems, load_problems
from gdp.methods.base import Method, Search
from gdp.policy.evaluate import assignment, judge
from gdp.problem.problem import Problem


def quick_methods() -> tuple[dict[str, Method], Method]:
    """(heuristics that the search starts from the best of, local search)."""
    from gdp.methods.portfolio import HEURISTICS
    from gdp.methods.search.local_search import local_search

    return dict(HEURISTICS), local_search


def wanted(
    problems: Problems, per_graph: int, held_per_graph: int, seed: int, limited: float = 0.3,
    memory: tuple[float, float] = (1.15, 2.5),
) -> list[Instance]:  # fmt: skip
    """Random instances over the training and validation graphs, validation first."""
    rng = np.random.default_rng([seed, 5])
    names = [name for name in problems.validation for _ in range(held_per_graph)]
    names += problems.train * per_graph
    return [draw(rng, [name], limited=limited, memory=memory) for name in names]


def search_label(
    store: LabelStore,
    instance: Instance,
    problem: Problem,
    methods: Mapping[str, Method],
    polish: Method,
    *,
    evaluations: int,
    seed: int,
) -> Label:
    """Label an instance: the best of some methods, polished by search; better labels are kept."""
    candidates = starts(problem, methods, seed)
    known = store.get(instance, problem)
    if known is not None:
        candidates["label"] = known.placement()
    start, best = None, "none"
    if candidates:
        names = list(candidates)
        cost_s, _ = judge(problem, np.stack([candidates[name] for name in names]))
        best = names[int(np.argmin(cost_s))]
        start = assignment(problem, candidates[best])
    search = Search(seed=seed, seconds=None, evaluations=evaluations, start=start)
    answer = polish(problem, search)
    improved = {best: candidates[best]} if candidates else {}
    if answer.assignment is not None:
        improved["search"] = answer.assignment.device
    label = None
    for name, device in improved.items():
        spent = answer.evaluations if name == "search" else len(candidates)
        label = store.improve(
            instance, problem, device, evaluations=spent, found_by=f"{best}+{name}"
        )
    if label is None:
        raise InfeasibleError(f"no method places instance {instance.key!r}; it is left out")
    return label


def label_all(
    store: LabelStore,
    problems: Problems,
    instances: list[Instance],
    evaluations: int,
    seed: int,
    seconds: float,
    out: Path,
) -> int:
    """Label instances until the time is over; saves now and then. Returns how many were done."""
    methods, polish = quick_methods()
    begin = saved = time.monotonic()
    done = 0
    for instance in instances:
        if time.monotonic() - begin > seconds:
            break
        known = store.get(instance)
        if known is not None and known.evaluations >= evaluations:
            continue
        try:
            problem = problems.get(instance)
            search_label(
                store, instance, problem, methods, polish, evaluations=evaluations, seed=seed
            )
        except InfeasibleError:
            continue
        done += 1
        if time.monotonic() - saved > 60:
            store.save(out)
            saved = time.monotonic()
            click.echo(f"{done} of {len(instances)}", err=True)
    store.save(out)
    return done


@click.command()
@click.option("--corpus", default="data/corpus", show_default=True)
@click.option("--out", type=Path, default=Path("data/labels/train.jsonl"), show_default=True)
@click.option("--evaluations", default=20_000, show_default=True, help="Per instance.")
@click.option("--per-graph", default=2, show_default=True, help="Training instances per graph.")
@click.option("--held-per-graph", default=2, show_default=True, help="Validation ones.")
@click.option("--max-ops", default=1000, show_default=True)
@click.option("--random-graphs", default=40, show_default=True)
@click.option("--limited", default=0.3, show_default=True, help="Share with limited memory.")
@click.option(
    "--memory",
    type=(float, float),
    default=(1.15, 2.5),
    show_default=True,
    help="Range of the limit, over the fair share.",
)
@click.option("--seconds", default=1e9, help="Stop after so long.")
@click.option("--seed", default=0, show_default=True)
def main(
    corpus: str,
    out: Path,
    evaluations: int,
    per_graph: int,
    held_per_graph: int,
    max_ops: int,
    random_graphs: int,
    limited: float,
    memory: tuple[float, float],
    seconds: float,
    seed: int,
) -> None:
    """Search labels and keep the best of what is known."""
    problems = load_problems(
        corpus, random_graphs=random_graphs, seed=0, min_ops=30, max_ops=max_ops
    )
    store = load_labels(out)
    todo = wanted(problems, per_graph, held_per_graph, seed, limited, memory)
    done = label_all(store, problems, todo, evaluations, seed, seconds, out)
    click.echo(f"{done} instances labelled, {len(store)} in {out}")


if __name__ == "__main__":
    main()
