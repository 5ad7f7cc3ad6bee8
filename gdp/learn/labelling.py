"""Search of labels for training and validation.

Run again, it goes on where it stopped; with more evaluations, labels only get better, since what is
there is the start of the search.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from jaxtyping import Int

from gdp.errors import InfeasibleError
from gdp.learn.instances import Instance, Problems, draw, load_problems
from gdp.learn.labels import Label, LabelStore, load_labels
from gdp.methods.base import Method, Search
from gdp.policy.evaluate import assignment, judge
from gdp.problem.problem import Problem
from gdp.tasks import HERE, Engine, each

QUICK_EVALUATIONS = 500


class Corpus(NamedTuple):
    """Graphs to label: those of a folder, and random ones."""

    folder: str  # "" for none
    random_graphs: int
    min_ops: int
    max_ops: int
    version: str = ""  # of the folder: workers read another version anew

    def problems(self) -> Problems:
        """The graphs by split; each process reads the folder once."""
        return _problems(self)


@functools.cache
def _problems(corpus: Corpus) -> Problems:
    return load_problems(
        corpus.folder, random_graphs=corpus.random_graphs,
        min_ops=corpus.min_ops, max_ops=corpus.max_ops,
    )  # fmt: skip


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


def _starts(
    problem: Problem, methods: Mapping[str, Method], seed: int
) -> dict[str, Int[np.ndarray, "N"]]:
    """Placements of quick methods; methods without an answer are left out."""
    placements = {}
    for name, method in methods.items():
        answer = method(problem, Search(seed=seed, seconds=None))
        if answer.assignment is not None:
            placements[name] = answer.assignment.device
    return placements


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
    candidates = _starts(problem, methods, seed)
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


def quick_labels(
    problems: Problems, instances: list[Instance], seed: int
) -> tuple[list[Instance], LabelStore]:
    """(instances that have a placement, their labels by a short search)."""
    store, (methods, polish) = LabelStore([]), quick_methods()
    for instance in instances:
        with contextlib.suppress(InfeasibleError):
            search_label(
                store, instance, problems.get(instance), methods, polish,
                evaluations=QUICK_EVALUATIONS, seed=seed,
            )  # fmt: skip
    return store.instances(), store


class Task(NamedTuple):
    """One instance to label, in a process that knows nothing yet."""

    corpus: Corpus
    instance: Instance
    known: Label | None
    evaluations: int
    seed: int


def searched(task: Task) -> Label | None:
    """The label of a task; None where no method places the instance."""
    problems = task.corpus.problems()
    store = LabelStore([] if task.known is None else [task.known])
    methods, polish = quick_methods()
    try:
        problem = problems.get(task.instance)
        return search_label(
            store, task.instance, problem, methods, polish,
            evaluations=task.evaluations, seed=task.seed,
        )  # fmt: skip
    except InfeasibleError:
        return None


def label_all(
    out: Path,
    todo: Iterable[Task],
    seconds: float = np.inf,
    engine: Engine = HERE,
    progress: Callable[[int, int, str], None] = lambda done, count, key: None,
) -> int:
    """Label what has had fewer evaluations, until the time is over. Returns how many were done.

    Each label is appended as it comes, and stands if the run is killed; at the end the file has
    one line for each instance, in the order they were asked for. `progress` gets (labels found,
    instances to label, key of the last).
    """
    store, begin = load_labels(out), time.monotonic()
    todo = list({task.instance.key: task for task in todo}.values())
    known = {task.instance.key: store.get(task.instance) for task in todo}
    todo = [
        task._replace(known=label)
        for task in todo
        if (label := known[task.instance.key]) is None or label.evaluations < task.evaluations
    ]
    in_time = takewhile(lambda _: time.monotonic() - begin <= seconds, todo)
    done = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("ab") as file:
        for number, label in each(searched, in_time, engine):
            if label is not None:
                done += 1
                file.write(msgspec.json.encode(label) + b"\n")
                file.flush()
            progress(done, len(todo), todo[number].instance.key)
    labels = {label.instance.key: label for label in load_labels(out).all()}
    asked = [labels.pop(key) for key in known if key in labels]
    LabelStore([*labels.values(), *asked]).save(out)
    return done
