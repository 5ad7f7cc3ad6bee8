"""Whether large graphs can be placed by roles: `python -m benchmarks.policy.roles VERB`.

    known       long searches of each problem, whose placements are kept in a folder
    forced      the best of them, ops of one place on one device, then searched by windows
    tied        search of a problem in which ops of one place share a device, then by windows

Colours of (type, costs, bytes) are refined by those of the ops before and after, `ROUNDS` times
(Weisfeiler and Leman 1968). Ops of one colour have one *role*; where ops that hold weights are
told apart first, one *place*: the op of a layer in all micro-batches. `forced` chooses the device
of each place by the known placement, which no method could; `search alone` has as many CPU seconds.
"""

import json
import time
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from jaxtyping import Float, Int

from benchmarks.policy.instances import reached_s
from benchmarks.policy.regimes import LIST
from benchmarks.tables import geomean, head
from gdp.clock import Clock
from gdp.graph.groups import merge_ids
from gdp.learn.instances import Instance, Problems, load_problems, make
from gdp.methods.base import Assignment, Method, Search
from gdp.methods.heuristics.list_schedule import heft
from gdp.methods.heuristics.multilevel import multilevel
from gdp.methods.portfolio import auto
from gdp.methods.scoring import Evaluated, best_of, best_priority_rule, score_all
from gdp.methods.search.budget import Budget, SearchConfig
from gdp.methods.search.local_search import compile_for_large, improve
from gdp.methods.search.windows import search_windows
from gdp.problem.problem import Problem, make_problem

CASES = (
    ("gpt-layers24-features1024-heads16-batch32-microbatched16", 1),
    ("llama-layers32-features4096-heads32-batch16-microbatched16", 2),
    ("vit-layers24-features1024-heads16-batch64-microbatched16", 3),
    ("encoder-layers24-features1024-heads16-batch32-microbatched32", 4),
    ("wavenet-stacks8-layers10-channels128-batch32-microbatched16", 518314460),
    ("nasnet-cells18-width44-batch32-microbatched8", 743329030),
)
"""Graphs of the corpus and seeds of their random clusters."""
ROUNDS = 3
FEW = 300
"""Evaluations of the search by windows after placements are forced to repeat."""


def roles_of(problem: Problem, rounds: int = ROUNDS) -> Int[np.ndarray, "N"]:
    """The role of each op: equal for ops of equal costs and surroundings."""
    g = problem.graph
    largest = np.zeros(g.num_ops, dtype=np.int64)
    np.maximum.at(largest, g.producer, g.tensor_bytes)
    columns = [np.unique(np.array(g.op_types), return_inverse=True)[1], g.weight_bytes, largest]
    columns += [np.round(x, 12) for x in problem.compute_s.T] + list(problem.allowed.T)
    colour = np.unique(np.stack([c.astype(float) for c in columns], 1), axis=0, return_inverse=True)
    colour = colour[1].reshape(-1)
    return refined(problem, colour, rounds)


def refined(problem: Problem, colour: Int[np.ndarray, "N"], rounds: int) -> Int[np.ndarray, "N"]:
    """Colours told apart by those of the ops before and after."""
    g, rng = problem.graph, np.random.default_rng(0)
    source, target = g.producer[g.use_tensor], g.use_op
    for _ in range(rounds):
        code = rng.integers(1, 1 << 62, size=(2, colour.max() + 1), dtype=np.int64)
        into, out = np.zeros((2, g.num_ops), dtype=np.int64)
        with np.errstate(over="ignore"):  # sums of random numbers: multisets, but for accidents
            np.add.at(into, target, code[0][colour[source]])
            np.add.at(out, source, code[1][colour[target]])
        together = np.stack([colour, into, out], axis=1)
        colour = np.unique(together, axis=0, return_inverse=True)[1].reshape(-1)
    return colour


def places_of(problem: Problem, rounds: int = ROUNDS) -> Int[np.ndarray, "N"]:
    """The place of each op: its role where ops that hold weights are told apart, so that equal ops
    of all micro-batches, but not those of other layers, have one."""
    held = np.flatnonzero(problem.graph.weight_bytes > 0)
    colour = roles_of(problem, 0)
    colour[held] = colour.max() + 1 + np.arange(len(held))
    return refined(problem, np.unique(colour, return_inverse=True)[1], rounds)


def of_groups(
    problem: Problem, device: Int[np.ndarray, "N"], work_s: Float[np.ndarray, "N"]
) -> Int[np.ndarray, "N"]:
    """Groups that must share a device go where most of their work is."""
    votes = np.zeros((problem.num_groups, problem.num_devices))
    np.add.at(votes, (problem.group, device), work_s)
    return np.where(problem.group_allowed, votes, -1.0).argmax(axis=1)[problem.group]


class CpuClock(Clock):
    """A budget of this process's CPU seconds."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(seconds)
        self._began_s = time.process_time()

    def elapsed_s(self) -> float:
        """CPU seconds since the start."""
        return time.process_time() - self._began_s


def source() -> Problems:
    """All large graphs of the corpus."""
    return load_problems("data/corpus", random_graphs=0, min_ops=3_000, max_ops=30_000)


@click.group(help=__doc__)
def main() -> None:
    """The benchmark's verbs."""


@main.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True)
@click.option("--evaluations", default=10_000, show_default=True)
@click.option("--seed", default=0, show_default=True)
def known(folder: Path, evaluations: int, seed: int) -> None:
    """`auto` with so many evaluations; better placements are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    graphs = source()
    for number, (name, cluster) in enumerate(CASES):
        problem = make(Instance(name, cluster), graphs.graph)
        began_s = time.process_time()
        answer = auto(problem, Search(seed=seed, seconds=None, evaluations=evaluations))
        value_s, file = reached_s(problem, answer), folder / f"{number}.npz"
        before_s = float(np.load(file)["value_s"]) if file.exists() else np.inf
        placed = answer.assignment
        if placed is not None and value_s < before_s:
            rank = np.arange(problem.num_ops) if placed.rank is None else placed.rank
            np.savez(file, device=placed.device, rank=rank, value_s=value_s)
        cpu_s = time.process_time() - began_s
        click.echo(f"{name}: {value_s:.6g} s, before {before_s:.6g} s, CPU {cpu_s:.0f} s")


def windows(problem: Problem, start: Evaluated, count: int) -> tuple[float, float]:
    """(value after the search by windows, its CPU seconds)."""
    began_s = time.process_time()
    search = Search(seed=5, seconds=None, evaluations=count)
    budget = Budget(search.budget(), search, SearchConfig(), 0)
    best = search_windows(problem, start, 5, budget)
    return best.value_s, time.process_time() - began_s


@main.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True)
@click.option("--evaluations", default="300,1000", show_default=True)
@click.option("--rounds", default="2,3", show_default=True)
def forced(folder: Path, evaluations: str, rounds: str) -> None:
    """Values over the best known: forced, under the known ranks, after windows; plain search."""
    graphs, counts = source(), [int(x) for x in evaluations.split(",")]
    rows: dict[str, list[float]] = {}
    listed = {(x["graph"], x["cluster"]): x["best_s"] for x in json.loads(LIST.read_text())}
    click.echo(head("graph | ops, roles, places | way | value over best known | CPU s"))
    for number, (name, cluster) in enumerate(CASES):
        problem = make(Instance(name, cluster), graphs.graph)
        compile_for_large(problem)
        stored = np.load(folder / f"{number}.npz")
        best_s = min(float(stored["value_s"]), listed.get((name, cluster), np.inf))
        role = roles_of(problem)
        size = f"{problem.num_ops}, {role.max() + 1}, {places_of(problem).max() + 1}"

        def row(
            way: str, value_s: float, cpu_s: float, best_s: float = best_s,
            cells: str = f"{name} | {size}",
        ) -> None:  # fmt: skip
            rows.setdefault(way, []).append(value_s / best_s)
            click.echo(f"| {cells} | {way} | {value_s / best_s:.4f} | {cpu_s:.1f} |")

        row("known placement", float(stored["value_s"]), 0.0)
        cpu_s = dict.fromkeys(counts, 0.0)
        for k in map(int, rounds.split(",")):
            place = places_of(problem, k)
            work_s = np.where(problem.allowed, problem.compute_s, 0.0).mean(axis=1) + 1e-12
            votes = np.zeros((place.max() + 1, problem.num_devices))
            np.add.at(votes, (place, stored["device"]), work_s)
            device = of_groups(problem, votes.argmax(axis=1)[place], work_s)
            moved = float((device != stored["device"]).mean())
            start = best_priority_rule(problem, score_all(problem, [Assignment(device)])[0])
            click.echo(f"{name}, {k} rounds: {moved:.1%} of the ops moved", err=True)
            row(f"{k} rounds", start.value_s, 0.0)
            ranked = score_all(problem, [Assignment(device, stored["rank"])])[0]
            row(f"{k} rounds, known ranks", ranked.value_s, 0.0)
            for count in counts:  # from the better of both
                value_s, took_s = windows(problem, min(start, ranked), count)
                cpu_s[count] = max(cpu_s[count], took_s)
                row(f"{k} rounds, {count} evaluations", value_s, took_s)
        start = first_of(problem, (heft, multilevel))
        row("best of HEFT and multilevel", start.value_s, 0.0)
        for count in counts:
            search = Search(seed=5, seconds=None)
            best = improve(problem, [replace(start, evaluations=0)], search, CpuClock(cpu_s[count]))
            row(f"the same searched as long as {count} evaluations", best.value_s, cpu_s[count])
    for way, ratios in rows.items():
        click.echo(f"{way}: {geomean(ratios):.4f} ({len(ratios)})")


@main.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True)
@click.option("--seconds", default="3,10", show_default=True)
def tied(folder: Path, seconds: str) -> None:
    """Values over the best known: 0.6 of the CPU seconds on the tied problem, then windows."""
    graphs = source()
    rows: dict[str, list[float]] = {}
    listed = {(x["graph"], x["cluster"]): x["best_s"] for x in json.loads(LIST.read_text())}
    for number, (name, cluster) in enumerate(CASES):
        problem = make(Instance(name, cluster), graphs.graph)
        compile_for_large(problem)
        known_s = float(np.load(folder / f"{number}.npz")["value_s"])
        best_s = min(known_s, listed.get((name, cluster), np.inf))
        group = merge_ids(places_of(problem), problem.group)
        small = make_problem(
            problem.graph, problem.cluster, problem.compute_s, problem.objective,
            allowed=problem.allowed, together=group,
        )  # fmt: skip
        work_s = np.where(problem.allowed, problem.compute_s, 0.0).mean(axis=1) + 1e-12
        start, search = first_of(problem, (heft, multilevel)), Search(seed=5, seconds=None)
        device = of_groups(small, start.assignment.device, work_s)
        begun = best_priority_rule(small, score_all(small, [Assignment(device)])[0])
        begun = min(begun, first_of(small, (heft,)))
        for limit_s in map(float, seconds.split(",")):
            plain = improve(problem, [start], search, CpuClock(limit_s))
            best = min(start, improve(small, [begun], search, CpuClock(0.6 * limit_s)))
            budget = Budget(CpuClock(0.4 * limit_s), search, SearchConfig(), 0)
            best = search_windows(problem, best, 5, budget)
            for way, value_s in (("search alone", plain.value_s), ("tied", best.value_s)):
                rows.setdefault(f"{way}, {limit_s:g} CPU s", []).append(value_s / best_s)
                click.echo(f"{name}, {way}, {limit_s:g} CPU s: {value_s / best_s:.4f}")
    for way, ratios in rows.items():
        click.echo(f"{way}: {geomean(ratios):.4f} ({len(ratios)})")


def first_of(problem: Problem, methods: tuple[Method, ...]) -> Evaluated:
    """The best placement of some methods, under the priorities that suit it."""
    placed = [method(problem, Search(seconds=None)).assignment for method in methods]
    best = best_of(problem, [x for x in placed if x is not None])
    return replace(best_priority_rule(problem, best), evaluations=0)


if __name__ == "__main__":
    main()
