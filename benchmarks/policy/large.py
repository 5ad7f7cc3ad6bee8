"""The policy on graphs of 5,000 ops and more: `python -m benchmarks.policy.large VERB`.

    best        search for better values of the problems, and keep the best (run again to go on)
    show        the table, with comparisons in pairs; with the same --rows it goes on

Latency of training steps on 4 or 8 GPUs: of every graph of this size whose family is held out, on
two clusters. Those of test families are reported; those of validation families serve to choose
weights. Each problem stands for itself in the table: the geometric mean of the value over the best
known, and the median CPU seconds of a row, everything included. Comparisons are of the same
problems and seeds; their 95% intervals draw graphs anew (10,000 bootstrap samples), so that
clusters and seeds of one graph do not count as more graphs.

`auto` without the policy has the CPU seconds of `auto` with it. Weights of "random" are drawn anew
by each seed. Decoding uses the core that the process may use: `taskset -c 1` for a single one.
"""

import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np

from benchmarks.policy.instances import loaded, problems, reached_s, show
from benchmarks.policy.regimes import Made, answered, measured, searched
from benchmarks.tables import between
from gdp.base.files.writing import write_atomic
from gdp.cli.program import run
from gdp.cluster.file import load_cluster
from gdp.learn.instances import Instance, Problems, make
from gdp.methods.base import Answer, Search
from gdp.methods.portfolio import HEURISTICS
from gdp.methods.priorities import evaluate_rules
from gdp.policy.advice import advice
from gdp.policy.method import SAMPLES, policy_methods
from gdp.policy.model.network import init
from gdp.policy.policy import Policy, default_checkpoint, policy_folder
from gdp.policy.propose import propose
from gdp.problem.problem import Problem

LIST = Path("data/labels/large.json")
SIZES = (5_000, 200_000)
SHOWN = {"multilevel": "multilevel", "metis": "METIS", "heft": "HEFT"}
"""Heuristics that have a row of their own."""
BEST_HEURISTIC, ADVISERS = "best heuristic", "best that the policy reads"
RANDOM = "random"
"""Name of weights that were never trained."""
NEAR = 1.05
"""Up to so many times the evaluations that were run are not worth another run."""


@dataclass(frozen=True)
class Entry:
    """One problem, and the best value known of it."""

    graph: str
    cluster: str  # a preset
    best_s: float | None = None
    found_by: str = ""
    evaluations: int = 0  # of the longest search behind it


KINDS = ("heuristics", "policy", "decoded", "with", "auto")
"""Of parts: whole answers are "policy", `auto` with the policy is "with"."""
Case = tuple[str, str, int, str]
"""(graph, cluster, seed, part): what is run at once and kept as one line."""
Cells = dict[str, Made]
"""Values of a part, by row of the table."""
Rows = dict[Case, Cells]


def load() -> list[Entry]:
    """Read the list."""
    return [Entry(**row) for row in json.loads(LIST.read_text())]


def save(entries: list[Entry]) -> None:
    """Write the list, one problem a line."""
    lines = ",\n".join(" " + json.dumps(asdict(entry)) for entry in entries)
    write_atomic(LIST, f"[\n{lines}\n]\n".encode())


def of_split(entries: list[Entry], split: str, graphs: Problems) -> list[Entry]:
    """The problems of test or of validation families."""
    names = graphs.test if split == "test" else graphs.validation
    return [entry for entry in entries if entry.graph in names]


def problem_of(entry: Entry, graphs: Problems) -> Problem:
    """The problem, made anew: nothing is known of it yet."""
    return make(Instance(entry.graph, 0), graphs.graph, load_cluster(entry.cluster))


# What is run.


def heuristics(problem: Problem, seed: int) -> Cells:
    """Some heuristics by themselves, the best of all, and all that the policy reads."""
    made: Cells = {}
    answers: dict[str, Answer] = {}
    for name, method in HEURISTICS:
        begin_s = time.process_time()
        answer = answers[name] = method(problem, Search(seed=seed, seconds=None))
        cpu_s = time.process_time() - begin_s
        made[name] = Made(reached_s(problem, answer), cpu_s, answer.evaluations)
    best_s = min(one.value_s for one in made.values())
    cpu_s = sum(one.cpu_s for one in made.values())
    spent = sum(one.evaluations for one in made.values())
    begin_s = time.process_time()
    rated = evaluate_rules(problem, advice(problem, answers).device)
    fits = np.where(rated.overflow == 0, rated.seconds, np.inf)
    return {
        **{SHOWN[name]: made[name] for name in SHOWN},
        BEST_HEURISTIC: Made(best_s, cpu_s, spent),
        ADVISERS: Made(
            min(best_s, float(fits.min())),
            cpu_s + time.process_time() - begin_s,
            spent + rated.evaluations,
        ),
    }


def decoded(problem: Problem, seed: int, policy: Policy, name: str) -> Cells:
    """The greedy placement and the best of 17, as decoded; the advisers' seconds count in both."""
    begin_s = time.process_time()
    advice(problem)
    advised_s, cells = time.process_time() - begin_s, {}
    for count, row in ((1, "greedy"), (1 + SAMPLES, f"{1 + SAMPLES} decodes")):
        begin_s = time.process_time()
        found = propose(policy, problem, count, seed)
        cpu_s = advised_s + time.process_time() - begin_s
        cells[f"{row}, {name}"] = Made(float(found.value_s.min()), cpu_s, found.evaluations)
    return cells


def in_seconds(
    fresh: Callable[[], Problem], seed: int, evaluations: int, cpu_s: float, first_s: float
) -> Cells:
    """`auto` without the policy, with so many evaluations and with as many as fit into `cpu_s`;
    `first_s` is what its heuristics take."""
    few = measured(searched(evaluations), fresh(), seed)
    per_s = evaluations / max(few.cpu_s - first_s, 1e-3)
    count = evaluations + int(max(cpu_s - few.cpu_s, 0.0) * per_s)
    many = few
    if count > NEAR * evaluations:
        many = measured(searched(count), fresh(), seed)
    return {f"auto, {evaluations} evaluations": few, AUTO: many}


AUTO = "auto, in the same seconds"


def cells_of(
    part: str, entry: Entry, seed: int, graphs: Problems, policies: dict[str, Policy | None],
    evaluations: int, done: Rows,
) -> Cells:  # fmt: skip
    """Run one part on one problem."""
    kind, _, name = part.partition(":")

    def fresh() -> Problem:
        return problem_of(entry, graphs)

    if kind == "heuristics":
        return heuristics(fresh(), seed)
    if kind == "auto":
        where = (entry.graph, entry.cluster, seed)
        pace = next(iter(done[*where, f"with:{name}"].values()))
        first = done[*where, "heuristics"][BEST_HEURISTIC]
        return in_seconds(fresh, seed, evaluations, pace.cpu_s, first.cpu_s)
    policy = policies[name]
    if policy is None:
        config = next(x for x in policies.values() if x is not None).config
        policy = Policy(config, init(config, seed))
    if kind == "decoded":
        return decoded(fresh(), seed, policy, name)
    if kind == "with":
        way = searched(evaluations, policy_methods(policy)["policy_samples"])
        return {f"auto with the policy, {name}": measured(way, fresh(), seed)}
    return {f"policy, {name}": measured(answered(policy), fresh(), seed)}


def parts_of(names: list[str], kinds: Sequence[str] = ()) -> list[str]:
    """All parts, or those of some kinds, each behind those that it needs; `names` are of trained
    weights."""
    trained = [f"{kind}:{name}" for name in names for kind in ("policy", "decoded", "with")]
    parts = ["heuristics", f"policy:{RANDOM}", *trained, f"auto:{names[0]}"]
    wanted = {*kinds, *(("heuristics", "with") if "auto" in kinds else ())}
    return [part for part in parts if not wanted or part.partition(":")[0] in wanted]


# What is shown.


def logs(entries: list[Entry], rows: Rows, row: str, seeds: int) -> np.ndarray:
    """[problems, seeds] logarithms of a row's value over the best known; nan where it has none,
    inf where it does not fit."""
    table = np.full((len(entries), seeds), np.nan)
    for k, entry in enumerate(entries):
        for seed in range(seeds):
            cells = _cells(entry, seed, rows)
            if row in cells and entry.best_s is not None:
                table[k, seed] = np.log(cells[row].value_s / entry.best_s)
    return table


def _cells(entry: Entry, seed: int, rows: Rows) -> Cells:
    """All cells of one problem and seed. "greedy or read, NAME" follows from two of them: a decoded
    placement, or the best that the policy read where that is better."""
    cells = {
        row: made
        for (graph, cluster, other, _), part in rows.items()
        if (graph, cluster, other) == (entry.graph, entry.cluster, seed)
        for row, made in part.items()
    }
    read = cells.get(ADVISERS)
    for row, made in list(cells.items()):
        kind, _, name = row.partition(", ")
        if read is not None and kind in ("greedy", f"{1 + SAMPLES} decodes"):
            cells[f"{kind} or read, {name}"] = replace(
                made, value_s=min(made.value_s, read.value_s)
            )
    return cells


def by_graph(entries: list[Entry], table: np.ndarray) -> np.ndarray:
    """[graphs] means over the problems and seeds of each graph that have a finite value."""
    names = np.array([entry.graph for entry in entries])
    parts = (table[names == name] for name in dict.fromkeys(names))
    means = [part[np.isfinite(part)].mean() for part in parts if np.isfinite(part).any()]
    return np.array(means)


def bootstrap(means: np.ndarray, samples: int = 10_000) -> tuple[float, float]:
    """The middle 95% of means of as many graphs drawn with repetition; nan of nothing."""
    if len(means) == 0:
        return float("nan"), float("nan")
    drawn = np.random.default_rng(0).integers(len(means), size=(samples, len(means)))
    low, high = np.quantile(means[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def row_text(entries: list[Entry], rows: Rows, row: str, seeds: int) -> str:
    """Geometric mean over graphs with its interval, worst, misfits, median CPU seconds."""
    table = logs(entries, rows, row, seeds)
    means = by_graph(entries, table)
    if not len(means):
        return "nan"
    low, high = bootstrap(means)
    mean, low, high = (float(np.exp(x)) for x in (means.mean(), low, high))
    fits = np.isfinite(table)
    misfits = f", misfits {np.isposinf(table).sum()}" if np.isposinf(table).any() else ""
    cells = [_cells(entry, seed, rows) for entry in entries for seed in range(seeds)]
    cpu_s = np.median([cell[row].cpu_s for cell in cells if row in cell])
    return (
        f"{between(mean, low, high, '.3f')}, worst {np.exp(table[fits].max()):.2f}{misfits}, "
        f"CPU {cpu_s:.1f} s, {(~np.isnan(table)).sum()} runs"
    )


def compared(entries: list[Entry], rows: Rows, left: str, right: str, seeds: int) -> str:
    """Percent by which one row's value differs from another's on the same problems and seeds."""
    first, second = (logs(entries, rows, row, seeds) for row in (left, right))
    known = np.isfinite(first) & np.isfinite(second)
    difference = np.where(known, first, np.nan) - np.where(known, second, np.nan)
    means = by_graph(entries, difference)
    if not len(means):
        return "nan"
    low, high = bootstrap(means)
    mean, low, high = (100.0 * float(np.expm1(x)) for x in (means.mean(), low, high))
    each = [row[np.isfinite(row)].mean() for row in difference if np.isfinite(row).any()]
    lower = int(np.sum(np.array(each) < 0))
    return f"{between(mean, low, high, '+.1f')}%, lower on {lower} of {len(each)}"


def pairs_of(names: list[str]) -> list[tuple[str, str]]:
    """Rows that are compared: a row, and one that should be higher."""
    pairs: list[tuple[str, str]] = []
    for name in names:
        pairs += [
            (f"policy, {name}", f"policy, {RANDOM}"),
            (f"policy, {name}", BEST_HEURISTIC),
            (f"policy, {name}", AUTO),
            (f"auto with the policy, {name}", AUTO),
            (f"greedy, {name}", SHOWN["multilevel"]),
            (f"greedy or read, {name}", SHOWN["multilevel"]),
            (f"{1 + SAMPLES} decodes or read, {name}", ADVISERS),
        ]
        pairs += [(f"policy, {name}", f"policy, {names[0]}")] if name != names[0] else []
    return pairs


def kept(file: Path | None) -> Rows:
    """Cells that were run, from a file of JSON lines."""
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    rows = map(json.loads, lines)
    return {
        tuple(x["case"]): {row: Made(*cell) for row, cell in x["made"].items()} for x in rows
    }  # fmt: skip


def _named(checkpoint: Path | None) -> tuple[str, Policy]:
    """A name that tells weights of one folder from those of another training, and the policy."""
    where = policy_folder(default_checkpoint() if checkpoint is None else checkpoint)
    digest = json.loads((where / "meta.json").read_text())["sha256"]
    label = "shipped" if checkpoint is None else where.as_posix()
    return f"{label} {digest[:6]}", loaded(checkpoint)


def keep(file: Path | None, case: Case, cells: Cells) -> None:
    """Add a line to the file."""
    if file is not None:
        made = {row: [x.value_s, round(x.cpu_s, 3), x.evaluations] for row, x in cells.items()}
        with file.open("a") as out:
            out.write(json.dumps({"case": case, "made": made}) + "\n")


SPLIT = click.option(
    "--split", type=click.Choice(("test", "validation")), default="test", show_default=True
)
ROWS = click.option(
    "--rows", "file", type=click.Path(path_type=Path), help="JSON lines of what ran, to go on from."
)


@click.group(help=__doc__)
def main() -> None:
    """The benchmark's verbs."""


@main.command()
@SPLIT
@ROWS
@click.option("--evaluations", default=20_000, show_default=True, help="Of each search.")
@click.option("--seed", default=0, show_default=True)
def best(split: str, file: Path | None, evaluations: int, seed: int) -> None:
    """`auto` without and with the policy, and all values of --rows; the lowest are kept.

    Problems that had as long a search are not searched again.
    """
    graphs, entries = problems(*SIZES), load()
    for (graph, cluster, _, _), cells in kept(file).items():
        for k, entry in enumerate(entries):
            if (entry.graph, entry.cluster) == (graph, cluster):
                for row, made in cells.items():
                    entries[k] = _lower(entries[k], made.value_s, row, entry.evaluations)
    save(entries)
    for entry in of_split(entries, split, graphs):
        if entry.evaluations >= evaluations:
            continue
        k, found = entries.index(entry), entry
        for name, policy in (
            ("auto", None),
            ("auto with the policy", policy_methods()["policy_samples"]),
        ):
            made = measured(searched(evaluations, policy), problem_of(entry, graphs), seed)
            found = _lower(found, made.value_s, name, evaluations)
            click.echo(f"{entry.graph}, {entry.cluster}, {name}: {made}", err=True)
        entries[k] = found
        save(entries)
    click.echo(f"{sum(x.best_s is not None for x in entries)} of {len(entries)} have a value")


def _lower(entry: Entry, value_s: float, by: str, evaluations: int) -> Entry:
    """The problem after a search."""
    if value_s < (np.inf if entry.best_s is None else entry.best_s):
        entry = replace(entry, best_s=value_s, found_by=by)
    return replace(entry, evaluations=max(entry.evaluations, evaluations))


@main.command("show")
@click.option(
    "--checkpoint", "checkpoints", type=Path, multiple=True, help="Default: the shipped; several."
)
@SPLIT
@ROWS
@click.option("--only", "kinds", multiple=True, type=click.Choice(KINDS), help="Rows of a kind.")
@click.option("--evaluations", default=3000, show_default=True, help="Of auto with the policy.")
@click.option("--seeds", default=3, show_default=True)
def show_verb(
    checkpoints: tuple[Path, ...], split: str, file: Path | None, kinds: tuple[str, ...],
    evaluations: int, seeds: int,
) -> None:  # fmt: skip
    """Run what --rows does not hold yet, and print the table and the comparisons."""
    graphs, rows = problems(*SIZES), kept(file)
    named = dict(_named(path) for path in checkpoints or (None,))
    policies: dict[str, Policy | None] = {**named, RANDOM: None}
    entries = of_split(load(), split, graphs)
    parts = parts_of(list(named), kinds)
    todo: list[tuple[Entry, int, str]] = [
        (entry, seed, part)
        for seed in range(seeds)
        for entry in entries
        for part in parts
        if (entry.graph, entry.cluster, seed, part) not in rows
    ]
    if todo:  # compiled before anything is measured
        smallest = min(entries, key=lambda entry: graphs.files[entry.graph].num_ops)
        warm: Rows = {}
        for part in parts_of(list(named)[:1], kinds):
            case = (smallest.graph, smallest.cluster, 0, part)
            warm[case] = cells_of(part, smallest, 0, graphs, policies, 100, warm)
    for entry, seed, part in todo:
        case = (entry.graph, entry.cluster, seed, part)
        rows[case] = cells_of(part, entry, seed, graphs, policies, evaluations, rows)
        keep(file, case, rows[case])
        best_s = entry.best_s or np.nan
        text = ", ".join(
            f"{row} {x.value_s / best_s:.3f} ({x.cpu_s:.1f} s)" for row, x in rows[case].items()
        )
        click.echo(f"{entry.graph}, {entry.cluster}, seed {seed}: {text}", err=True)
    shown = {case: cells for case, cells in rows.items() if case[3] in parts}
    cases = [(entry, seed) for entry in entries for seed in range(seeds)]
    names = list(dict.fromkeys(row for case in cases for row in _cells(*case, shown)))
    graphs_count = len({entry.graph for entry in entries})
    title = f"{split} families, {len(entries)} problems of {graphs_count} graphs, {seeds} seeds"
    show(title, {row: row_text(entries, shown, row, seeds) for row in names})
    show(
        "in pairs",
        {
            f"{left} / {right}": compared(entries, shown, left, right, seeds)
            for left, right in pairs_of(list(named))
            if left in names and right in names
        },
    )


if __name__ == "__main__":
    run(importlib.import_module("benchmarks.policy.large").main)
