"""Small problems on which `auto` is behind a simpler method: `python -m benchmarks.adversary VERB`.

    search     evolve problems until the CPU minutes are over; with the same --out it goes on
    show       the curve of every island, the worst problems and all faults
    shrink     take away of the worst problems what their ratio does not need

After PISA (Coleman and Krishnamachari 2024, arXiv 2403.07120). The value of `auto` with so many
evaluations is divided by the least of: every heuristic of the table, plain search with as many
evaluations, the pipelines' program, and every placement where they can be tried
(`benchmarks.small_optimum`). Evolution maximises that ratio, and of equal ratios the one
with a tenth of the evaluations, which changes more often. Each island has an objective. Faults are
kept apart, whatever the ratio: an exception, an answer that does not fit, none where one fits, a
candidate that is better than the answer, a bound above a value, and a proof that is false.

A generation is drawn from (seed, island, generation) alone, so that a search that goes on finds
what one without a break finds.
"""

import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.small_changes import changed, simpler
from benchmarks.small_optimum import optimum
from benchmarks.small_problems import Small, drawn
from benchmarks.tables import head, line
from gdp.bounds.best import all_bounds
from gdp.cli.program import run
from gdp.files.writing import write_atomic
from gdp.methods.base import Answer, Search
from gdp.methods.exact.method import exact
from gdp.methods.pipeline.method import pipeline_dp
from gdp.methods.portfolio import auto, heuristic_candidates
from gdp.methods.search.local_search import local_search
from gdp.problem.problem import Problem
from gdp.sim.score import score_of

ISLANDS = (("latency", False), ("throughput", False), ("throughput", True))
"""(objective, whether stages may be replicated)."""
POPULATION, CHILDREN = 12, 8
STALE = 30
"""Generations without a better problem, after which an island begins anew."""
MISFIT = 10.0
"""The ratio of no answer where there is one."""
PROOFS_SHARE = 0.25
"""Of the problems that `exact` answers, too."""
SAME = 1.0 + 1e-9
BOUND_S = 0.3
"""Counted work of the bounds, in seconds of an idle core."""
SOLVER = 1.0 + 1e-5
"""Up to which HiGHS and CP-SAT decide."""


@dataclass(frozen=True)
class Judged:
    """A problem, and how far `auto` is behind on it."""

    small: Small
    ratio: float
    by: str  # what is better
    early: float  # the ratio with a tenth of the evaluations
    optimal_s: float | None = None  # in the problem's seconds, where every placement was tried
    faults: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[float, float]:
        """Larger is worse for `auto`."""
        return self.ratio, self.early

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "small": self.small.to_json()}

    @staticmethod
    def of_json(row: dict[str, Any]) -> "Judged":
        """Inverse of `to_json`."""
        return Judged(
            **{**row, "small": Small.of_json(row["small"]), "faults": tuple(row["faults"])}
        )


def judged(small: Small, evaluations: int, seed: int = 0, proofs: bool = True) -> Judged:
    """`auto` beside all others on a problem; `proofs` are those of `exact`, which cost most."""
    try:
        with np.errstate(all="raise", under="ignore"), warnings.catch_warnings():
            warnings.simplefilter("error")
            return _judged(small, evaluations, seed, proofs)
    except Exception as error:  # whatever it is, it is a fault
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__} in {last.name}: {error}"
        return Judged(small, 1.0, "", 1.0, faults=(text,))


def _judged(small: Small, evaluations: int, seed: int, proofs: bool) -> Judged:
    faults: list[str] = []
    search = Search(seed=seed, seconds=None, evaluations=evaluations)
    tenth = replace(search, evaluations=evaluations // 10)
    problem = small.problem()
    answers = {"auto": auto(problem, search)}
    value = _value(problem, answers["auto"], "auto", faults)
    # Problems made anew: what was derived of one is as good as known.
    early = _value(problem, auto(small.problem(), tenth), "auto", faults)
    others = {
        row.method: _finite(row.value_s) for row in answers["auto"].candidates if row.feasible
    }
    if value > min(others.values(), default=np.inf) * SAME:
        faults.append(f"behind its candidate {min(others, key=others.__getitem__)}")
    for row in heuristic_candidates(small.problem(), seed):  # `auto` may leave some out
        if row.feasible:
            others.setdefault(row.method, _finite(row.value_s))
    rows = [("local_search", local_search), ("pipeline_dp", pipeline_dp)]
    for name, method in [*rows, *([("exact", exact)] if proofs else [])]:
        answers[name] = method(small.problem(), search)
        others[name] = _value(problem, answers[name], name, faults)
    least = optimum(problem)
    if least is not None:
        others["every placement"] = least
    best = min([value, *others.values()])
    faults += _false_proofs(answers, best, {**others, "auto": value}, problem)
    by = min(others, key=others.__getitem__)
    optimal_s = None if least is None or np.isinf(least) else least * problem.unit.seconds
    return Judged(
        small, _over(value, best), by if others[by] < value else "", _over(early, best), optimal_s,
        tuple(dict.fromkeys(faults)),
    )  # fmt: skip


def _false_proofs(
    answers: dict[str, Answer], best: float, value_of: dict[str, float], problem: Problem
) -> Iterable[str]:
    """What is said to be proven and is not, given the least value that was found."""
    for name, answer in answers.items():
        if answer.proven_misfit and np.isfinite(best):
            yield f"{name} proves that nothing fits"
        if answer.proven_optimal and value_of[name] > best * SOLVER:
            yield f"{name} proves a value that is not the least"
        if answer.bound_s > best * SOLVER:
            yield f"{name} has a bound above a value"
    if np.isfinite(best):
        for bound in all_bounds(problem, BOUND_S):
            if bound.value_s > best * SAME:
                yield f"bound above a value: {bound.argument.split('; ')[0][:60]}"


def _value(problem: Problem, answer: Answer, name: str, faults: list[str]) -> float:
    """The value of an answer as the simulator has it, inf without one."""
    if answer.assignment is None:
        return np.inf
    scored = score_of(problem, answer.assignment)
    if not scored.feasible:
        faults.append(f"{name} answers a placement that does not fit")
        return np.inf
    return scored.value_s


def _finite(value: float | None) -> float:
    return np.inf if value is None else value


def _over(value: float, best: float) -> float:
    """The ratio of two values: 1 of two alike, `MISFIT` of no value where there is one."""
    if value <= best:
        return 1.0
    return MISFIT if np.isinf(value) or best <= 0 else min(MISFIT, value / best)


@dataclass
class Island:
    """Problems that evolve together. A curve has (generation, CPU seconds of all, worst ratio of
    the island so far, worst of the population)."""

    objective: str
    replicas: bool
    generation: int = 0
    stale: int = 0
    population: list[Judged] = field(default_factory=list)
    curve: list[tuple[int, float, float, float]] = field(default_factory=list)


@dataclass
class State:
    """All that a search is."""

    seed: int
    evaluations: int
    most_ops: int
    cpu_s: float = 0.0
    judged: int = 0
    islands: list[Island] = field(default_factory=list)
    worst: list[Judged] = field(default_factory=list)  # the worst of every population that ended
    faults: dict[str, Judged] = field(default_factory=dict)  # by text, the smallest problem of each

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        row = {**vars(self)}
        row["islands"] = [
            {**vars(x), "population": [p.to_json() for p in x.population]} for x in self.islands
        ]
        row["worst"] = [x.to_json() for x in self.worst]
        row["faults"] = {text: x.to_json() for text, x in self.faults.items()}
        write_atomic(path, json.dumps(row).encode())

    @staticmethod
    def load(path: Path) -> "State":
        """Inverse of `save`."""
        row = json.loads(path.read_text())
        row["islands"] = [
            Island(**{**x, "population": [Judged.of_json(p) for p in x["population"]]})
            for x in row["islands"]
        ]
        row["worst"] = [Judged.of_json(x) for x in row["worst"]]
        row["faults"] = {text: Judged.of_json(x) for text, x in row["faults"].items()}
        return State(**row)

    def all_worst(self) -> list[Judged]:
        """The worst problems of all populations, the worst first."""
        found = [*self.worst, *(p for island in self.islands for p in island.population[:1])]
        return sorted((x for x in found if x.ratio > SAME), key=lambda x: x.key, reverse=True)


def evolve(state: State, is_over: Callable[[], bool], saved: Callable[[], None]) -> None:
    """Generations of the islands in turn until it is over."""
    if not state.islands:
        state.islands = [Island(objective, replicas) for objective, replicas in ISLANDS]
    begin_s = time.process_time() - state.cpu_s
    while not is_over():
        number = min(range(len(state.islands)), key=lambda k: (state.islands[k].generation, k))
        island = state.islands[number]
        rng = np.random.default_rng([state.seed, number, island.generation])
        _generation(state, island, rng)
        state.cpu_s = time.process_time() - begin_s
        best = max([x.ratio for x in island.population[:1]] + [row[2] for row in island.curve[-1:]])
        row = (island.generation, state.cpu_s, best, island.population[0].ratio)
        island.curve.append(row)
        saved()


def _generation(state: State, island: Island, rng: np.random.Generator) -> None:
    """Children of problems drawn by tournament, of which the worst for `auto` stay."""
    island.generation += 1
    before = island.population[0].key if island.population else None
    for _ in range(CHILDREN):
        if len(island.population) < POPULATION // 2:
            child = drawn(rng, island.objective, island.replicas, min(7, state.most_ops))
            child = changed(child, rng, state.most_ops)
        else:
            two = rng.integers(len(island.population), size=2)
            child = changed(island.population[int(two.min())].small, rng, state.most_ops)
        row = judged(child, state.evaluations, proofs=bool(rng.random() < PROOFS_SHARE))
        state.judged += 1
        for text in row.faults:
            kept = state.faults.get(text)
            if kept is None or len(row.small.ops) < len(kept.small.ops):
                state.faults[text] = row
        # Of equal problems the newer one stays, so that a population drifts.
        island.population = sorted([row, *island.population], key=lambda x: x.key, reverse=True)
    island.population = island.population[:POPULATION]
    grew = before is None or island.population[0].key > before
    island.stale = 0 if grew else island.stale + 1
    if island.stale >= STALE:
        state.worst.append(island.population[0])
        island.population, island.stale = island.population[-1:], 0


def shrunk(row: Judged, evaluations: int, keep: float = 0.9) -> Judged:
    """The problem after taking away one thing after another while `keep` of its excess stays."""
    least = 1.0 + keep * (row.ratio - 1.0)
    again = True
    while again:
        again = False
        for small in simpler(row.small):
            other = judged(small, evaluations, proofs=False)
            if other.ratio >= least and not other.faults:
                row, again = other, True
                break
    return row


def over_seeds(small: Small, evaluations: int, seeds: Iterable[int]) -> list[float]:
    """The ratio under other seeds, which tells a weakness from bad luck."""
    return [judged(small, evaluations, seed, proofs=False).ratio for seed in seeds]


@click.group(help=__doc__)
def main() -> None:
    """The benchmark's verbs."""


OUT = click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON.")


@main.command("search")
@OUT
@click.option("--minutes", default=60.0, show_default=True, help="Of CPU, in this call.")
@click.option("--seed", default=0, show_default=True, help="Of a new search.")
@click.option("--evaluations", default=1000, show_default=True, help="Of a new search.")
@click.option("--most-ops", default=10, show_default=True, help="Of a new search.")
def search_verb(out: Path, minutes: float, seed: int, evaluations: int, most_ops: int) -> None:
    """Evolve."""
    state = State.load(out) if out.exists() else State(seed, evaluations, most_ops)
    end_s = time.process_time() + 60.0 * minutes
    evolve(state, lambda: time.process_time() >= end_s, lambda: state.save(out))
    _show(state)


@main.command("show")
@OUT
def show_verb(out: Path) -> None:
    """Print the curve, the worst problems and the faults."""
    _show(State.load(out))


def _show(state: State) -> None:
    """Worst ratios by generation, one row for each doubling."""
    click.echo(
        f"seed {state.seed}, {state.evaluations} evaluations, {state.judged} problems in "
        f"{state.cpu_s:.0f} CPU s"
    )
    names = [f"{x.objective}{', replicas' if x.replicas else ''}" for x in state.islands]
    click.echo(head(" | ".join(["generation", *names])))
    last = max((island.generation for island in state.islands), default=0)
    for generation in [*(2**k for k in range(20) if 2**k < last), last]:
        cells = [
            f"{island.curve[min(generation, len(island.curve)) - 1][2]:.4f}"
            for island in state.islands
            if island.curve
        ]
        click.echo(line(generation, *cells))
    for row in state.all_worst()[:12]:
        click.echo(f"{row.ratio:.4f} (early {row.early:.4f}) behind {row.by}, {len(row.small.ops)} "
                   f"ops on {len(row.small.places)} devices, {row.small.objective}")  # fmt: skip
    for text, row in state.faults.items():
        click.echo(f"FAULT {text} ({len(row.small.ops)} ops)")


@main.command("shrink")
@OUT
@click.option("--count", default=5, show_default=True)
@click.option("--seeds", default=5, show_default=True, help="Other seeds that judge it again.")
def shrink_verb(out: Path, count: int, seeds: int) -> None:
    """Print the worst problems, made as small as they stay as bad, with their ratio by seed."""
    state = State.load(out)
    for row in state.all_worst()[:count]:
        small = shrunk(row, state.evaluations)
        ratios = over_seeds(small.small, state.evaluations, range(1, 1 + seeds))
        click.echo(f"{row.ratio:.4f} -> {small.ratio:.4f} behind {small.by}; by seed "
                   + " ".join(f"{x:.4f}" for x in ratios))  # fmt: skip
        click.echo(json.dumps(small.to_json()))


if __name__ == "__main__":
    run(main)
