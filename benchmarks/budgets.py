"""Values that budgets buy, and seconds taken: `python -m benchmarks.budgets VERB`.

    gains       a program's gain over search in the same CPU seconds, by how full memory is
    spread      values over seeds, and their distance from the best
    waited      values of tight latencies after five and after twenty seconds
    kept        seconds asked for and taken, on generated graphs of so many ops

Graphs are of data/corpus, times of the roofline model, stages are not replicated. Memory is
`--over` times the least share in which a heuristic or a short search is known to fit; the tight
latencies are those of data/labels/test_regimes.json. CPU seconds are of this process, so that
another load on the machine changes little.
"""

import functools
import time
from dataclasses import replace

import click
import numpy as np

from benchmarks.tables import head
from benchmarks.tight import tight
from gdp.base.clock import COMPILE, WorkClock, waited_s
from gdp.bounds.best import best_bound
from gdp.cluster.types import Cluster
from gdp.methods.base import Answer, Search
from gdp.methods.portfolio import HEURISTICS, PROGRAMS, auto, memory_fill
from gdp.methods.scoring import best_of
from gdp.methods.search.local_search import improve
from gdp.methods.shares import BOUND_SHARE, SIMPLIFY_SHARE
from gdp.problem.problem import Problem
from gdp.problem.ticks import in_ticks
from gdp.question.question import Question
from gdp.sim.score import score_of

CORPUS = "data/corpus/{}/{}.json.gz"
GRAPHS = (
    "swin-counts2x2x6x2-forward,llama-layers8-features1024-heads16-forward,"
    "multi_modal-layers6-features512-heads8-forward,nasnet-cells9-width48-forward"
)


@click.group()
def main() -> None:
    """Measure what budgets buy."""


def problem_of(graph: str, cluster: str, objective: str, over: float) -> Problem:
    """The problem of a graph of the corpus, with so little memory; 0: all that devices have."""
    import gdp
    from gdp.costs.base import roofline
    from gdp.question.prepare import prepare_problem

    loaded = gdp.load(CORPUS.format(graph.split("-")[0], graph))
    prepared = prepare_problem(
        Question(loaded, Cluster.load(cluster), objective=objective, costs=roofline)
    )
    problem = replace(prepared, replicas=False)
    return in_ticks(tight(problem, over) if over else problem)


def value_s(problem: Problem, answer: Answer) -> float:
    """Seconds of an answer, inf without one."""
    if answer.assignment is None:
        return np.inf
    return score_of(problem, answer.assignment).value_s * problem.unit.seconds


@main.command()
@click.option("--objective", type=click.Choice(["throughput", "latency"]), default="throughput")
@click.option("--graphs", default=GRAPHS, show_default=True)
@click.option("--cluster", default="4xt4-pcie3", show_default=True)
@click.option("--over", default="1.1,1.6,2.5", show_default=True, help="times the least memory")
@click.option("--work", type=float, default=8.0, show_default=True, help="counted seconds")
def gains(objective: str, graphs: str, cluster: str, over: str, work: float) -> None:
    """A program in rounds against search from the same heuristics in the same CPU seconds."""
    click.echo(head("graph | over | memory full | program ms (CPU s) | search ms | gain a CPU s"))
    for graph in graphs.split(","):
        for factor in map(float, over.split(",")):
            problem = problem_of(graph, cluster, objective, factor)
            row = _gain(problem, work)
            if row is None:
                click.echo(f"| {graph} | {factor:g} | {memory_fill(problem):.2f} | none applies |")
                continue
            program_s, cpu_s, search_s = row
            click.echo(
                f"| {graph} | {factor:g} | {memory_fill(problem):.2f} | {program_s * 1e3:.4f} "
                f"({cpu_s:.1f}) | {search_s * 1e3:.4f} | {(search_s / program_s - 1) / cpu_s:.2%} |"
            )


def _gain(problem: Problem, work_s: float) -> tuple[float, float, float] | None:
    """(value by the program, its CPU seconds, value by search in these), in seconds."""
    chosen = [method for _, applies, method in PROGRAMS if applies(problem)]
    if not chosen:
        return None
    prior = {name: method(problem, Search(seconds=None)) for name, method in HEURISTICS}
    chosen[0](problem, Search(clock=WorkClock(0.01), prior_answers=prior))  # compiled
    began_s = time.process_time()
    answer = chosen[0](problem, Search(clock=WorkClock(work_s), prior_answers=prior))
    cpu_s = time.process_time() - began_s
    placed = [x.assignment for x in prior.values() if x.assignment is not None]
    start = replace(best_of(problem, placed), evaluations=0)
    evaluations, spent_s, best = 2_000, 0.0, start
    while spent_s < cpu_s:
        began_s = time.process_time()
        search = Search(seed=1, seconds=None, evaluations=evaluations)
        best = min(best, improve(problem, [start], search, search.budget()))
        took_s = time.process_time() - began_s
        spent_s = took_s  # of the longest search alone
        evaluations = int(evaluations * min(8.0, max(1.2, 1.05 * cpu_s / max(took_s, 1e-3))))
    return value_s(problem, answer), cpu_s, best.value_s * problem.unit.seconds


@main.command()
@click.option("--objective", type=click.Choice(["throughput", "latency"]), default="throughput")
@click.option("--graphs", default="swin-counts2x2x6x2-forward", show_default=True)
@click.option("--cluster", default="4xt4-pcie3", show_default=True)
@click.option("--over", type=float, default=1.1, show_default=True)
@click.option("--evaluations", type=int, default=20_000, show_default=True)
@click.option("--seeds", type=int, default=10, show_default=True)
def spread(
    objective: str, graphs: str, cluster: str, over: float, evaluations: int, seeds: int
) -> None:
    """`auto` over seeds: lowest and highest value, their mean, CPU seconds, a bound of 3 s."""
    click.echo(
        head("graph | bound ms | lowest ms | highest / lowest | mean / lowest | CPU s | values ms")
    )
    for graph in graphs.split(","):
        made = problem_of(graph, cluster, objective, over)
        values, began_s = [], time.process_time()
        for seed in range(seeds):
            problem = replace(made)  # of which nothing is known yet
            search = Search(seed=seed, seconds=None, evaluations=evaluations)
            values.append(value_s(problem, auto(problem, search)) * 1e3)
        cpu_s = (time.process_time() - began_s) / seeds
        low, bound_s = min(values), best_bound(made, 3.0).value_s * made.unit.seconds
        click.echo(
            f"| {graph} | {bound_s * 1e3:.4f} | {low:.4f} | {max(values) / low:.3f} | "
            f"{np.mean(values) / low:.3f} | {cpu_s:.1f} | {' '.join(f'{x:.4f}' for x in values)} |"
        )


@main.command()
@click.option("--seconds", default="5,20", show_default=True, help="of whole answers")
@click.option("--seeds", type=int, default=3, show_default=True)
@click.option("--chains", type=int, help="searches side by side; default: one a core, at most 4")
def waited(seconds: str, seeds: int, chains: int | None) -> None:
    """Tight latencies of test families: values after so many wall-clock seconds, of which `auto`
    has what answers leave it, over the lowest known (of all seeds); the bound of ten seconds.

    On a machine where nothing else runs: the values are of its cores and their speed.
    """
    from benchmarks.policy import regimes

    limits = [float(text) for text in seconds.split(",")]
    share = 1.0 - BOUND_SHARE - SIMPLIFY_SHARE
    click.echo(head("graph | ops | " + " | ".join(f"{s:g} s" for s in limits) + " | bound"))
    for entry in regimes.load():
        if (entry.regime, entry.objective) != ("tight", "latency"):
            continue
        made = in_ticks(regimes.problem_of(entry, regimes.source()))
        auto(replace(made), Search(seconds=0.5))  # compiled
        found = [
            [
                value_s(made, auto(replace(made), Search(seed, share * limit_s, chains=chains)))
                for seed in range(seeds)
            ]
            for limit_s in limits
        ]
        low_s = min(*map(min, found), entry.best_s or np.inf)
        bound_s = best_bound(made, 10.0).value_s * made.unit.seconds
        cells = [" ".join(f"{x / low_s:.3f}" for x in sorted(row)) for row in found]
        click.echo(
            f"| {entry.graph} | {made.num_ops} | {' | '.join(cells)} | {bound_s / low_s:.3f} |"
        )


@main.command()
@click.option("--ops", default="5000,50000,200000", show_default=True)
@click.option("--seconds", default="5,20", show_default=True)
@click.option("--cluster", default="4xt4-pcie4", show_default=True)
@click.option("--objective", type=click.Choice(["throughput", "latency"]), default="latency")
@click.option("--kinds", default=0, show_default=True, help="different ops; 0: all are")
@click.option("--cpu", is_flag=True, help="All clocks read CPU seconds, as on an idle machine.")
def kept(ops: str, seconds: str, cluster: str, objective: str, kinds: int, cpu: bool) -> None:
    """`gdp.place` under seconds: time without compilation over seconds asked for, phases, value."""
    import gdp

    if cpu:
        time.perf_counter = time.process_time
    place = functools.partial(gdp.place, cluster=cluster, objective=objective)
    place(layered(4000), search=gdp.Search(seconds=2.0))  # compiled
    click.echo(head("ops | asked s | taken s | taken / asked | CPU s | phases | value s | bound s"))
    for count in map(int, ops.split(",")):
        graph = layered(count, kinds=kinds)
        for limit_s in map(float, seconds.split(",")):
            began_s, compiled_s, cpu_s = time.perf_counter(), waited_s(COMPILE), time.process_time()
            result = place(graph, search=gdp.Search(seconds=limit_s))
            took_s = time.perf_counter() - began_s - (waited_s(COMPILE) - compiled_s)
            cpu_s = time.process_time() - cpu_s
            phases = ", ".join(f"{name} {s:.1f}" for name, s in result.phases.items())
            click.echo(
                f"| {count} | {limit_s:g} | {took_s:.1f} | {took_s / limit_s:.2f} | "
                f"{cpu_s:.1f} | {phases} | {result.value_s:.4g} | {result.bound_s:.4g} |"
            )


def layered(num_ops: int, seed: int = 0, kinds: int = 0):
    """A graph of chains with branches, of as many ops as are asked for; of so many kinds, as layers
    of a model are alike, or all different (0)."""
    from gdp.graph.op_graph import make_graph

    rng = np.random.default_rng(seed)
    which = np.arange(num_ops) % (kinds or num_ops)
    most = (1 << 20) * min(50_000, num_ops) // num_ops  # all weights fit on four T4
    sizes = rng.integers(1 << 12, 1 << 20, num_ops)[which]
    tensors = [(i, int(size)) for i, size in enumerate(sizes)]
    uses = [(i - 1 if i % 7 else max(0, i - 7), i) for i in range(1, num_ops)]
    uses += [(i - int(rng.integers(2, 20)), i) for i in range(21, num_ops, 3)]
    return make_graph(
        f"layered-{num_ops}", [f"op{i}" for i in range(num_ops)], ["MatMul"] * num_ops, tensors,
        uses, flop=rng.uniform(1e6, 1e9, num_ops)[which],
        weight_bytes=rng.integers(0, most, num_ops)[which],
    )  # fmt: skip


if __name__ == "__main__":
    main()
