"""Labels: the best placement known of each instance, with its value and the effort it took.

One JSON object per line, so that files merge and diffs stay readable. A search for labels that is
run again goes on where it stopped: each label is the start of its next search, so that labels only
get better.
"""

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Int

from gdp.base.errors import GdpError
from gdp.base.files.reading import Kind, decode_json, is_there, read_bytes
from gdp.base.files.writing import write_atomic
from gdp.base.tasks import HERE, Engine, each
from gdp.learn.instances import Instance, Problems, load_problems
from gdp.methods.base import Assignment, Search
from gdp.methods.portfolio import HEURISTICS
from gdp.methods.priorities import RULES, evaluate_rules, rank_under, timing
from gdp.methods.search.local_search import local_search
from gdp.policy.advice import cost, judge
from gdp.policy.policy import pack, unpack
from gdp.problem.problem import Problem
from gdp.problem.symmetry import canonical

log = logging.getLogger(__name__)

QUICK_EVALUATIONS = 500
DIGITS = 16
"""Of the graph's digest, which a label holds."""
_KIND = Kind("file of labels", GdpError)
_LINE = Kind("label", GdpError)


class Label(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The best placement seen of one instance, under the best of the policy's priorities."""

    instance: Instance
    digest: str  # first digits of the graph's digest: a label of another version is left out
    value_s: Annotated[float, msgspec.Meta(ge=0)]
    evaluations: Annotated[int, msgspec.Meta(ge=0, le=2**62)]  # simulated placements spent so far
    device: str  # base64 of zlib of one byte per op
    found_by: str = ""

    def __post_init__(self) -> None:
        """Raises `ValueError` on a row that `pack` cannot have written."""
        self.placement()

    def placement(self) -> Int[np.ndarray, "N"]:
        """The device of every op."""
        return unpack(self.device, "u1")


class LabelStore:
    """Labels by instance; `improve` only ever lowers a value."""

    def __init__(self, labels: list[Label]) -> None:
        self._labels = {label.instance.key: label for label in labels}
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._labels)

    def instances(self) -> list[Instance]:
        """All that have a label, in the order they came."""
        return [label.instance for label in self._labels.values()]

    def get(self, instance: Instance, problem: Problem | None = None) -> Label | None:
        """The label, unless it was made for another version of the graph; the first that was is
        named in the log."""
        label = self._labels.get(instance.key)
        if label is None or problem is None:
            return label
        if label.digest in [digest[:DIGITS] for digest in problem.graph.digests]:
            return label
        if not self._has_warned:
            log.warning(
                "the label of %s is of another version of that graph and is left out, as are all "
                "such labels; label the corpus again", instance.key,
            )  # fmt: skip
        self._has_warned = True
        return None

    def improve(
        self,
        instance: Instance,
        problem: Problem,
        device: Int[np.ndarray, "N"],
        *,
        evaluations: int,
        found_by: str,
    ) -> Label:
        """Keep a placement if it is better than the known one; the effort adds up either way."""
        device = canonical(problem, device, timing(problem).order)
        cost_s, feasible = judge(problem, device[None])
        previous = self.get(instance, problem)
        effort = evaluations + (previous.evaluations if previous else 0)
        if previous and (not feasible[0] or cost_s[0] >= previous.value_s):
            label = msgspec.structs.replace(previous, evaluations=effort)
        else:
            label = Label(
                instance=instance,
                digest=problem.graph.digest[:DIGITS],
                value_s=float(cost_s[0]),
                evaluations=effort,
                device=pack(device, "u1"),
                found_by=found_by,
            )
        self._labels[instance.key] = label
        return label

    def merge(self, labels: list[Label]) -> None:
        """Take over the labels that are better than the known ones of their instances."""
        for label in labels:
            previous = self._labels.get(label.instance.key)
            if previous is None or label.value_s < previous.value_s:
                self._labels[label.instance.key] = label

    def all(self) -> list[Label]:
        """The labels, in the order they came."""
        return list(self._labels.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all labels, one line each."""
        lines = [msgspec.json.encode(label) + b"\n" for label in self._labels.values()]
        write_atomic(path, lines)


def load_labels(path: str | os.PathLike[str]) -> LabelStore:
    """The labels of a file; none where there is no file yet."""
    file = Path(path)
    if not is_there(file):
        return LabelStore([])
    lines = read_bytes(file, _KIND).splitlines()
    return LabelStore(
        [
            decode_json(line, _LINE, Label, f"{path}, line {number},")
            for number, line in enumerate(lines, start=1)
        ]
    )


# The search for labels.


class Corpus(NamedTuple):
    """Graphs to label: those of a folder, and random ones."""

    folder: str  # "" for none
    random_graphs: int
    min_ops: int
    max_ops: int
    version: str = ""  # of the folder: workers read another version anew

    @functools.cache  # noqa: B019 - each process reads the folder once
    def problems(self) -> Problems:
        """The graphs by split."""
        return load_problems(
            self.folder, random_graphs=self.random_graphs,
            min_ops=self.min_ops, max_ops=self.max_ops,
        )  # fmt: skip


def search_label(
    store: LabelStore, instance: Instance, problem: Problem, *, evaluations: int, seed: int
) -> Label | None:
    """Label an instance: the best of the heuristics and its label, polished by local search.

    A better label is kept; None where no method places the instance.
    """
    candidates: dict[str, Int[np.ndarray, "N"]] = {}
    for name, method in HEURISTICS:
        answer = method(problem, Search(seed=seed, seconds=None))
        if answer.assignment is not None:
            candidates[name] = answer.assignment.device
    previous = store.get(instance, problem)
    if previous is not None:
        candidates["label"] = previous.placement()
    start, best = None, "none"
    improved: dict[str, Int[np.ndarray, "N"]] = {}
    if candidates:
        rated = evaluate_rules(problem, np.stack(list(candidates.values())))
        row = int(np.argmin(cost(problem, rated)))
        best = list(candidates)[row]
        improved[best] = device = candidates[best]
        start = Assignment(device, rank_under(problem, device, RULES[int(rated.rule[row])]))
    search = Search(seed=seed, seconds=None, evaluations=evaluations, start=start)
    answer = local_search(problem, search)
    if answer.assignment is not None:
        improved["search"] = answer.assignment.device
    label = None
    for name, device in improved.items():
        spent = answer.evaluations if name == "search" else len(candidates)
        label = store.improve(
            instance, problem, device, evaluations=spent, found_by=f"{best}+{name}"
        )
    return label


def quick_labels(
    problems: Problems, instances: list[Instance], seed: int
) -> tuple[list[Instance], LabelStore]:
    """(instances that have a placement, their labels by a short search)."""
    store = LabelStore([])
    for instance in instances:
        problem = problems.get(instance)
        search_label(store, instance, problem, evaluations=QUICK_EVALUATIONS, seed=seed)
    return store.instances(), store


class Task(NamedTuple):
    """One instance to label, in a process that knows nothing yet."""

    corpus: Corpus
    instance: Instance
    known: Label | None
    evaluations: int
    seed: int


def label_of(task: Task) -> Label | None:
    """The label of a task; None where no method places the instance."""
    problem = task.corpus.problems().get(task.instance)
    store = LabelStore([] if task.known is None else [task.known])
    return search_label(store, task.instance, problem, evaluations=task.evaluations, seed=task.seed)


def label_all(
    out: Path,
    todo: Iterable[Task],
    seconds: float = np.inf,
    engine: Engine = HERE,
    progress: Callable[[int, int, str], None] = lambda done, count, problem: None,
) -> int:
    """Label problems with fewer evaluations until the time is over; return how many were labelled.

    Each label is appended as it comes, and stands if the run is killed; at the end the file has
    one line for each instance, in the order they were asked for. `progress` gets (labels found,
    instances to label, the last in words).
    """
    store, begin = load_labels(out), time.monotonic()
    todo = list({task.instance.key: task for task in todo}.values())
    previous = {task.instance.key: store.get(task.instance) for task in todo}
    todo = [
        task._replace(known=label)
        for task in todo
        if (label := previous[task.instance.key]) is None or label.evaluations < task.evaluations
    ]
    in_time = takewhile(lambda _: time.monotonic() - begin <= seconds, todo)
    done = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("ab") as file:
        for number, label in each(label_of, in_time, engine):
            if label is not None:
                done += 1
                file.write(msgspec.json.encode(label) + b"\n")
                file.flush()
            progress(done, len(todo), todo[number].instance.text)
    labels = {label.instance.key: label for label in load_labels(out).all()}
    requested = [labels.pop(key) for key in previous if key in labels]
    LabelStore([*labels.values(), *requested]).save(out)
    return done
