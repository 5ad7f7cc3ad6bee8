"""The policy by regime, beside what needs no network: `python -m benchmarks.policy.regimes VERB`.

    best        search for better values of them, and keep the best (run again to go on)
    show        the table of each regime, three seeds
    budgets     the same by evaluations: moves by score and as drawn, weights trained and random

Test families only. Regimes: ample memory, tight memory (1.1 of the smallest limit that a search
fits in), large graphs (5,000 ops and more), tiled matrix products on 4 and 8 devices, and clusters
unlike any of training. Of every row: the median and the geometric mean of seconds over the best
known, over what fits; how many do not fit; and the medians of CPU seconds and of evaluations, all
included. Three rows keep the policy honest: *advisers under all rules, no network*, *random
weights* in the same procedure, and *search alone*, plain local search that may evaluate as much as
fits into the policy's CPU seconds. What
`auto` spends on mixed-integer programs where memory is tight is in its CPU seconds alone.
"""

import functools
import importlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.policy.instances import (
    CHECKPOINT,
    loaded,
    problems,
    reached_s,
    show,
    unseen_cluster,
)
from benchmarks.tables import geomean
from gdp.base.files.writing import write_atomic
from gdp.base.tasks import each, engine_of
from gdp.cli import options
from gdp.cli.program import run
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.graph.op_graph import OpGraph
from gdp.learn.instances import Instance, Problems, limit_memory, make
from gdp.methods.annealing.annealer import moves_as_drawn
from gdp.methods.base import Method, Search
from gdp.methods.portfolio import HEURISTICS, auto
from gdp.methods.priorities import evaluate_rules
from gdp.methods.search.local_search import local_search
from gdp.policy.advice import advice
from gdp.policy.method import place_with_policy, policy_methods
from gdp.policy.model.network import init
from gdp.policy.policy import Policy
from gdp.policy.propose import propose
from gdp.problem.problem import Problem

LIST = Path("data/labels/test_regimes.json")
REGIMES = ("ample", "tight", "large", "tiled", "unseen")
PROBE = 200
"""Evaluations by which the speed of plain search is measured, at first."""
SHARE, MOST = 0.1, 1_000_000
"""So much of the seconds the measurement takes, with so many evaluations at most."""


@dataclass(frozen=True)
class Entry:
    """One instance of a regime, and the best value known of it."""

    regime: str
    graph: str
    cluster: int  # seed of the random cluster; of "tiled" and "unseen", which of the fixed ones
    objective: str = "latency"
    memory: float = 0.0  # share as of `limit_memory`
    best_s: float | None = None
    found_by: str = ""
    evaluations: int = 0  # of the longest search behind it


@functools.cache
def source() -> Problems:
    """All graphs of the test families."""
    return problems(60, 25_000)


def tiled_cluster(kind: int, graph: OpGraph) -> Cluster:
    """4 or 8 devices alike; each tensor sent once would take 4 or 12 times all arithmetic of one
    device, over links that queue or do not."""
    size, share, free = (4, 8)[kind % 2], (4.0, 12.0)[kind // 2 % 2], kind % 3 == 2
    flop_per_s = 1e13
    work_s = float(graph.flop.sum()) / flop_per_s
    link = float(graph.tensor_bytes.sum()) / (share * work_s)
    devices = [
        Device(f"d{i}", "x", {"default": flop_per_s}, flop_per_s / 10.0) for i in range(size)
    ]
    return make_cluster(
        "tiled", devices, default_bytes_per_s=link, default_latency_s=1e-6,
        default_contention=not free,
    )  # fmt: skip


def problem_of(entry: Entry, graphs: Problems) -> Problem:
    """The problem of an instance, made anew: nothing is known of it yet."""
    instance = Instance(entry.graph, entry.cluster, entry.objective)  # type: ignore[arg-type]
    cluster = None
    if entry.regime == "tiled":
        cluster = tiled_cluster(entry.cluster, graphs.graph(entry.graph))
    elif entry.regime == "unseen":
        cluster = unseen_cluster(entry.cluster, graphs.graph(entry.graph))
    problem = make(instance, graphs.graph, cluster)
    return limit_memory(problem, entry.memory) if entry.memory else problem


def names_of(regime: str, graphs: Problems) -> list[str]:
    """The test graphs that a regime is drawn from."""
    sizes = {name: graphs.graph(name).num_ops for name in sorted(graphs.test)}
    if regime == "large":
        return [n for n in sizes if sizes[n] >= 5000]
    tiled = regime == "tiled"
    return [n for n in sizes if n.startswith("tiled") == tiled and (tiled or sizes[n] <= 1000)]


def save(entries: list[Entry]) -> None:
    """Write the list, one instance a line."""
    lines = ",\n".join(" " + json.dumps(asdict(entry)) for entry in entries)
    write_atomic(LIST, f"[\n{lines}\n]\n".encode())


def load() -> list[Entry]:
    """Read the list."""
    return [Entry(**row) for row in json.loads(LIST.read_text())]


@dataclass(frozen=True)
class Made:
    """One way of placing, on one instance."""

    value_s: float
    cpu_s: float
    evaluations: int


Way = Callable[[Problem, int], tuple[float, int]]
"""(problem, seed) -> (seconds, evaluations)."""


def measured(way: Way, problem: Problem, seed: int) -> Made:
    """A way's answer and what it cost, on a problem of which nothing is known."""
    begin_s = time.process_time()
    value_s, evaluations = way(problem, seed)
    return Made(value_s, time.process_time() - begin_s, evaluations)


def heuristics(problem: Problem, seed: int) -> tuple[float, int]:
    """The best heuristic, as each answers by itself."""
    found = [method(problem, Search(seed=seed, seconds=None)) for _, method in HEURISTICS]
    return min(reached_s(problem, x) for x in found), sum(x.evaluations for x in found)


def advisers(problem: Problem, seed: int) -> tuple[float, int]:
    """Placements that the policy reads, under all rules of priority, and the heuristics."""
    value_s, spent = heuristics(problem, seed)
    rated = evaluate_rules(problem, advice(problem).device)
    fits = np.where(rated.overflow == 0, rated.seconds, np.inf)
    return min(value_s, float(fits.min())), spent + rated.evaluations


def searched(evaluations: int, policy: Method | None = None) -> Way:
    """`auto` without the policy, or with it as a candidate."""
    extra = [] if policy is None else [("policy", policy)]

    def way(problem: Problem, seed: int) -> tuple[float, int]:
        search = Search(seed=seed, seconds=None, evaluations=evaluations)
        answer = auto(problem, search, extra)
        return reached_s(problem, answer), answer.evaluations

    return way


def greedy(policy: Policy) -> Way:
    """The policy's first placement, under the rule that suits it, as it was decoded."""

    def way(problem: Problem, seed: int) -> tuple[float, int]:
        found = propose(policy, problem, 1, seed)
        return float(found.value_s[0]), found.evaluations

    return way


def answered(checkpoint: Path | Policy | None, evaluations: int | None = None) -> Way:
    """The policy's answer as `gdp place --method policy` has it."""

    def way(problem: Problem, seed: int) -> tuple[float, int]:
        search = Search(seed=seed, seconds=None, evaluations=evaluations)
        answer = place_with_policy(problem, search, checkpoint)
        return reached_s(problem, answer), answer.evaluations

    return way


def plain(evaluations: int) -> Way:
    """Local search from simple placements: no other heuristic, no program, no network."""

    def way(problem: Problem, seed: int) -> tuple[float, int]:
        answer = local_search(problem, _budget(seed, evaluations))
        return reached_s(problem, answer), answer.evaluations

    return way


def alone(entry: Entry, graphs: Problems, seed: int, cpu_s: float) -> Made:
    """Plain search with as many evaluations as fit into so many CPU seconds."""
    first = measured(plain(1), problem_of(entry, graphs), seed)
    probe, took_s = PROBE, 0.0
    while took_s < SHARE * cpu_s and probe <= MOST:  # less is noise of the clock
        took_s = measured(plain(1 + probe), problem_of(entry, graphs), seed).cpu_s - first.cpu_s
        probe *= 4
    per_s = probe / 4 / max(took_s, 1e-4)
    count = int((cpu_s - first.cpu_s) * per_s)
    return measured(plain(count), problem_of(entry, graphs), seed) if count > 1 else first


def table(entries: list[Entry], made: dict[str, list[Made]]) -> dict[str, Any]:
    """A row of text for each way."""
    best_s = [entry.best_s for entry in entries]
    rows: dict[str, Any] = {}
    for name, column in made.items():
        repeats = len(column) // len(entries)
        known = [value for value in best_s if value is not None for _ in range(repeats)]
        ratios = [x.value_s / value for x, value in zip(column, known, strict=True)]
        fits = [ratio for ratio in ratios if np.isfinite(ratio)]
        rows[name] = (
            f"median {np.median(fits) if fits else np.nan:.3f}, mean {geomean(fits):.3f}, "
            f"misfits {len(ratios) - len(fits)} of {len(ratios)}, "
            f"CPU {np.median([x.cpu_s for x in column]):.2f} s, "
            f"evaluations {np.median([x.evaluations for x in column]):.0f}"
        )
    return rows


REGIME = click.option("--regime", "regimes", multiple=True, type=click.Choice(REGIMES))


@click.group(help=__doc__)
def main() -> None:
    """The benchmark's verbs."""


@main.command()
@REGIME
@click.option("--evaluations", default=50_000, show_default=True, help="Of each search.")
@click.option("--large-evaluations", default=5_000, show_default=True, help="On large graphs.")
@click.option("--seed", default=0, show_default=True)
@options.stack(*options.ENGINE)
def best(
    regimes: tuple[str, ...], evaluations: int, large_evaluations: int, seed: int,
    processes: int | None, ray: str | None,
) -> None:  # fmt: skip
    """`auto` without and with the policy, with so many evaluations; better values are kept."""
    entries = load()
    chosen = [k for k, entry in enumerate(entries) if entry.regime in (regimes or REGIMES)]
    counts = [large_evaluations if entries[k].regime == "large" else evaluations for k in chosen]
    tasks = [(entries[k], count, seed) for k, count in zip(chosen, counts, strict=True)]
    for number, entry in each(_bettered, tasks, engine_of(processes, ray)):
        entries[chosen[number]] = entry
        save(entries)
    click.echo(f"{sum(x.best_s is not None for x in entries)} of {len(entries)} have a value")


def _bettered(task: tuple[Entry, int, int]) -> Entry:
    """An instance after `auto` without the shipped policy and with it, and unless it is large a
    plain search under another seed."""
    entry, count, seed = task
    problem = problem_of(entry, source())
    found = {"auto": reached_s(problem, auto(problem, _budget(seed, count)))}
    extra = [("policy", policy_methods()["policy_samples"])]
    answer = auto(problem_of(entry, source()), _budget(seed, count), extra)
    found["auto with the policy"] = reached_s(problem, answer)
    if entry.regime != "large":
        found["local_search"] = reached_s(problem, local_search(problem, _budget(seed + 1, count)))
    by = min(found, key=found.__getitem__)
    if found[by] < (np.inf if entry.best_s is None else entry.best_s):
        entry = replace(entry, best_s=found[by], found_by=by)
    return replace(entry, evaluations=max(entry.evaluations, count))


def _budget(seed: int, evaluations: int) -> Search:
    return Search(seed=seed, seconds=None, evaluations=evaluations)


@main.command("show")
@CHECKPOINT
@REGIME
@click.option("--policy/--no-policy", "with_policy", default=True, help="Its rows, too.")
@click.option("--seeds", default=3, show_default=True)
def show_verb(
    checkpoint: Path | None, regimes: tuple[str, ...], with_policy: bool, seeds: int
) -> None:
    """Print the tables. Without the policy, the search alone has the CPU seconds of `auto`."""
    graphs = source()
    ways: dict[str, Way] = {
        "best of the heuristics": heuristics,
        "advisers under all rules, no network": advisers,
        "auto, 1,000 evaluations": searched(1000),
    }
    if with_policy:
        policy, samples = loaded(checkpoint), policy_methods(checkpoint)["policy_samples"]
        ways |= {
            "auto with the policy, 1,000 evaluations": searched(1000, samples),
            "policy, greedy": greedy(policy),
            "policy": answered(checkpoint),
            "policy, random weights": answered(Policy(policy.config, init(policy.config, 0))),
        }
    pace = "policy" if with_policy else "auto, 1,000 evaluations"
    known = [entry for entry in load() if entry.best_s is not None]
    for objective in ("latency", "throughput"):  # compiled before anything is measured
        warm = next(entry for entry in known if entry.objective == objective)
        for way in ways.values():
            way(problem_of(warm, graphs), 0)
    for regime in regimes or REGIMES:
        entries = [entry for entry in known if entry.regime == regime]
        made: dict[str, list[Made]] = {name: [] for name in [*ways, "search alone"]}
        for entry in entries:
            for seed in range(seeds):
                for name, way in ways.items():
                    made[name].append(measured(way, problem_of(entry, graphs), seed))
                cpu_s = made[pace][-1].cpu_s
                made["search alone"].append(alone(entry, graphs, seed, cpu_s))
                click.echo(f"{entry.graph}, seed {seed}: {_ratios(entry, made)}", err=True)
        show(f"{regime}, {len(entries)} instances, {seeds} seeds", table(entries, made))


LARGE_SEEDS = 1
"""Large graphs have one seed here: the standard errors are over instances."""


@main.command()
@CHECKPOINT
@REGIME
@click.option("--evaluations", default="100,400,1000,10000", show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option(
    "--rows", "file", type=click.Path(path_type=Path), help="JSON lines of what ran, to go on from."
)
@click.option("--policy/--no-policy", "with_policy", default=True, help="Its rows, too.")
def budgets(
    checkpoint: Path | None, regimes: tuple[str, ...], evaluations: str, seeds: int,
    file: Path | None, with_policy: bool,
) -> None:  # fmt: skip
    """Seconds over the lowest known or found, by evaluations; `search alone` has `auto`'s CPU."""
    graphs, counts = source(), [int(x) for x in evaluations.split(",")]
    kept = file.read_text().splitlines() if file is not None and file.exists() else []
    rows = {tuple(row["case"]): row for row in map(json.loads, kept)}
    policy = loaded(checkpoint) if with_policy else None
    known = [entry for entry in load() if entry.best_s is not None]
    chosen = [
        (k, seed, count)
        for k, entry in enumerate(known)
        if entry.regime in (regimes or REGIMES)
        for count in counts
        for seed in range(LARGE_SEEDS if entry.regime == "large" else seeds)
    ]
    for objective in ("latency", "throughput"):  # compiled before anything is measured
        warm = next(entry for entry in known if entry.objective == objective)
        for way in _budget_ways(policy, 100).values():
            way(problem_of(warm, graphs), 0)
    for case in [case for case in chosen if case not in rows]:
        k, seed, count = case
        made = {
            name: measured(way, problem_of(known[k], graphs), seed)
            for name, way in _budget_ways(policy, count).items()
        }
        made["search alone"] = alone(known[k], graphs, seed, made["auto"].cpu_s)
        rows[case] = {"case": case, **{name: (x.value_s, x.cpu_s) for name, x in made.items()}}
        if file is not None:
            with file.open("a") as out:
                out.write(json.dumps(rows[case]) + "\n")
    shown = {case: rows[case] for case in chosen}
    _show_budgets(known, shown, counts)
    show("portfolio, by evaluations", portfolio(known, shown, counts))


PORTFOLIO = ("auto", "search alone")
"""Ways of equal CPU seconds, of which a portfolio would choose."""


def _budget_ways(policy: Policy | None, evaluations: int) -> dict[str, Way]:
    """Ways that are compared, with so many evaluations each."""
    way = searched(evaluations)

    def drawn(problem: Problem, seed: int) -> tuple[float, int]:
        with moves_as_drawn():
            return way(problem, seed)

    ways = {"auto": way, "auto, moves as drawn": drawn}
    if policy is None:
        return ways
    random = Policy(policy.config, init(policy.config, 0))
    return ways | {
        "policy": answered(policy, evaluations),
        "policy, random weights": answered(random, evaluations),
    }


def _show_budgets(
    known: list[Entry], rows: dict[tuple[int, int, int], dict[str, Any]], counts: list[int]
) -> None:
    """A table a regime: geometric mean over the lowest (CPU seconds), misfits, for each budget;
    below, weights and scores in percent of what is without them, with the standard error."""
    lowest = {k: float(entry.best_s or np.inf) for k, entry in enumerate(known)}
    for (k, _, _), row in rows.items():
        lowest[k] = min(lowest[k], *(cell[0] for name, cell in row.items() if name != "case"))
    for regime in dict.fromkeys(known[k].regime for k, _, _ in rows):
        names = [name for name in next(iter(rows.values())) if name != "case"]
        table: dict[str, Any] = {name: [] for name in names}
        pairs = [
            pair
            for pair in (
                ("auto", "auto, moves as drawn"), ("auto", "search alone"),
                ("policy", "policy, random weights"),
            )
            if set(pair) <= set(names)
        ]  # fmt: skip
        table |= {f"{left} / {right.split(', ')[-1]}": [] for left, right in pairs}
        for count in counts:
            mine = [
                (case[0], row)
                for case, row in rows.items()
                if known[case[0]].regime == regime and case[2] == count
            ]
            for name in names:
                ratios = np.array([row[name][0] / lowest[k] for k, row in mine])
                fits = np.isfinite(ratios)
                cpu_s = np.median([row[name][1] for _, row in mine])
                misfits = f", {(~fits).sum()} misfit" if not fits.all() else ""
                table[name].append(f"{geomean(ratios[fits]):.3f} ({cpu_s:.2f} s{misfits})")
            for left, right in pairs:
                table[f"{left} / {right.split(', ')[-1]}"].append(_paired(mine, left, right))
        title = f"{regime}, {len({k for k, _, _ in rows if known[k].regime == regime})} instances, "
        show(
            title + "/".join(map(str, counts)) + " evaluations",
            {name: " | ".join(cells) for name, cells in table.items()},
        )


def portfolio(
    known: list[Entry], rows: dict[tuple[int, int, int], dict[str, Any]], counts: list[int]
) -> dict[str, Any]:
    """A line a budget: `auto`, `search alone` in the same CPU, the better of both on each instance
    (virtual best), and the way that is better in the mean on other families of the same regime."""
    lines: dict[str, Any] = {}
    for count in counts:
        ratios: dict[int, list[list[float]]] = {}
        for (k, _, evaluations), row in rows.items():
            pair = [row[name][0] / float(known[k].best_s or np.nan) for name in PORTFOLIO]
            if evaluations == count and np.isfinite(pair).all():
                ratios.setdefault(k, []).append(pair)
        if not ratios:
            continue
        entries = [known[k] for k in ratios]
        logs = np.array([np.log(pairs).mean(axis=0) for pairs in ratios.values()])
        family = np.array([source().family(entry.graph) for entry in entries])
        regime = np.array([entry.regime + entry.objective for entry in entries])
        ruled: list[float] = []
        for row, own, kind in zip(logs, family, regime, strict=True):
            others = family != own
            alike = others & (regime == kind)
            chosen = alike if alike.any() else others
            ruled.append(row[logs[chosen].mean(axis=0).argmin()] if chosen.any() else row.mean())
        single, virtual = logs.mean(axis=0), float(logs.min(axis=1).mean())
        lines[f"{count} evaluations"] = (
            ", ".join(f"{n} {np.exp(x):.3f}" for n, x in zip(PORTFOLIO, single, strict=True))
            + f", virtual best {np.exp(virtual):.3f} ({100 * (virtual - single.min()):+.2f}% of "
            f"the single best), by regime on held-out families {np.exp(np.mean(ruled)):.3f}"
        )
    return lines


def _paired(rows: list[tuple[int, dict[str, Any]]], left: str, right: str) -> str:
    """Mean logarithm of one row over another in percent, with its standard error by instance."""
    logs: dict[int, list[float]] = {}
    for k, row in rows:
        if np.isfinite(row[left][0]) and np.isfinite(row[right][0]):
            logs.setdefault(k, []).append(float(np.log(row[left][0] / row[right][0])))
    means = 100.0 * np.array([np.mean(x) for x in logs.values()])
    if len(means) < 2:
        return "nan"
    return f"{means.mean():+.2f}% ±{means.std(ddof=1) / np.sqrt(len(means)):.2f}"


def _ratios(entry: Entry, made: dict[str, list[Made]]) -> str:
    """The last of every row over the best known, and its CPU seconds."""
    last = {name: column[-1] for name, column in made.items()}
    return ", ".join(
        f"{name} {one.value_s / (entry.best_s or np.nan):.3f} ({one.cpu_s:.1f} s)"
        for name, one in last.items()
    )


if __name__ == "__main__":
    run(importlib.import_module("benchmarks.policy.regimes").main)  # tasks travel by that name
