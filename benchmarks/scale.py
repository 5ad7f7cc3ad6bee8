"""How far methods scale: seconds, memory and quality at 10,000 ops and more.

    python -m benchmarks.scale [--graphs layered-10000-1,layered-50000-1,layered-200000-1]
        [--ways posed,heuristics,greedy,policy,finetune] [--cluster 4xa100-nvlink] [--limit 600]
        [--evaluations 64] [--json]

A graph is a random one by its name (`layered-OPS-SEED`, `series-OPS-SEED`) or any MODEL of `gdp
place`. Every way answers for latency in a process of its own, and is stopped after `--limit`
seconds:

    posed       nothing: what the graph and the problem alone take
    heuristics  every heuristic of `auto` in turn, each under its own priorities and under all rules
    greedy      the policy's first placement, under all rules of priority; no heuristic's beside it
    policy      `--method policy` with `--evaluations`, which answers what its advisers find as well
    finetune    `gdp finetune` with `--evaluations`

Wall and CPU seconds are of the answer, compilation included, and not of reading and posing. MiB is
the peak of the process. The last column is seconds over the best heuristic's, below 1 is better.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import numpy as np

from benchmarks.apart import peak_mib, run_apart
from gdp.cluster.types import Cluster
from gdp.learn.instances import Instance, make, random_graph
from gdp.learn.problems import is_random
from gdp.methods.base import Assignment, Search
from gdp.problem.problem import Problem

GRAPHS = "layered-10000-1,layered-50000-1,layered-200000-1"
Made = dict[str, Any]  # "value_s", None where nothing fits, and what else is worth saying


def posed(name: str, cluster: str) -> Problem:
    """The problem of a graph on a cluster, with datasheet costs."""
    where = Cluster.load(cluster)
    if is_random(name):
        return make(Instance(name, 0), random_graph, where)
    from gdp.models import load
    from gdp.posed import pose

    return pose(load(name), where).problem


def _reached(problem: Problem, assignment: Assignment | None) -> Made:
    """Seconds under the placement's own priorities, or under the best rule where that is better."""
    from gdp.methods.priorities import under_rules
    from gdp.methods.scoring import best_of

    if assignment is None:
        return {"value_s": None}
    best = under_rules(problem, best_of(problem, [assignment]))
    return {"value_s": best.value_s if best.overflow_bytes <= 0 else None}


def _nothing(problem: Problem, evaluations: int) -> Made:
    del problem, evaluations
    return {"value_s": None}


def _heuristics(problem: Problem, evaluations: int) -> Made:
    from gdp.methods.portfolio import HEURISTICS

    del evaluations
    values, seconds = {}, {}
    for name, method in HEURISTICS:
        begin_s = time.perf_counter()
        answer = method(problem, Search(seconds=None))
        values[name] = _reached(problem, answer.assignment)["value_s"] or np.inf
        seconds[name] = round(time.perf_counter() - begin_s, 2)
    best = min(values, key=values.__getitem__)
    slow = ", ".join(f"{n} {s} s" for n, s in sorted(seconds.items(), key=lambda x: -x[1])[:3])
    return {"value_s": values[best], "said": f"{best}; slowest {slow}"}


def _greedy(problem: Problem, evaluations: int) -> Made:
    from gdp.policy.method import coarse, load
    from gdp.policy.propose import propose

    del evaluations
    small, widen = coarse(problem)
    found = propose(load(None), small, 1, 0)
    said = "" if small is problem else f"over {small.num_ops} groups"
    return _reached(problem, Assignment(widen(found.device[0]))) | {"said": said}


def _policy(problem: Problem, evaluations: int) -> Made:
    from gdp.policy.method import place_with_policy

    answer = place_with_policy(problem, None, Search(seconds=None, evaluations=evaluations))
    return _reached(problem, answer.assignment) | {"said": f"{answer.evaluations} evaluations"}


def _finetune(problem: Problem, evaluations: int) -> Made:
    from gdp.learn.finetune import FinetuneConfig, finetune

    found = finetune(problem, config=FinetuneConfig(evaluations=evaluations))
    return {"value_s": found.value_s, "said": f"from {found.start_s * 1e3:.4g} ms"}


WAYS: dict[str, Callable[[Problem, int], Made]] = {
    "posed": _nothing, "heuristics": _heuristics, "greedy": _greedy, "policy": _policy,
    "finetune": _finetune,
}  # fmt: skip


def measured(name: str, cluster: str, way: str, evaluations: int) -> dict[str, Any]:
    """One row, in this process."""
    problem = posed(name, cluster)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    made = WAYS[way](problem, evaluations)
    return {
        "ops": problem.num_ops, "wall_s": time.perf_counter() - wall_s,
        "cpu_s": time.process_time() - cpu_s, "peak_mib": peak_mib(), **made,
    }  # fmt: skip


def rows(
    graphs: list[str], cluster: str, ways: list[str], limit_s: float, evaluations: int
) -> Iterator[dict[str, Any]]:
    """Every way on every graph; `over` is seconds over the best heuristic's."""
    for name in graphs:
        best_s = None
        for way in ways:
            row: dict[str, Any] = {"graph": name, "way": way}
            row |= run_apart("benchmarks.scale", [name, cluster, way, evaluations], limit_s)
            value_s = row.get("value_s")
            if way == "heuristics":
                best_s = value_s
            row["over"] = value_s / best_s if value_s and best_s else None
            yield row


def line(row: dict[str, Any]) -> str:
    """A row of the table, in Markdown."""

    def text(key: str, form: str, unit: float = 1.0) -> str:
        return "" if row.get(key) is None else format(row[key] * unit, form)

    cells = [row["graph"], row["way"], text("wall_s", ".1f"), text("cpu_s", ".1f"),
             text("peak_mib", ".0f"), text("value_s", ".4g", 1e3), text("over", ".3f"),
             row.get("reason") or row.get("said", "")]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


@click.command(help=__doc__)
@click.option("--graphs", default=GRAPHS, show_default=True)
@click.option("--ways", default=",".join(WAYS), show_default=True)
@click.option("--cluster", default="4xa100-nvlink", show_default=True)
@click.option("--limit", default=600.0, show_default=True, help="Seconds of each process.")
@click.option("--evaluations", default=64, show_default=True)
@click.option("--json", "as_json", is_flag=True)
@click.option("--task", hidden=True)
def main(
    graphs: str, ways: str, cluster: str, limit: float, evaluations: int, as_json: bool,
    task: str | None,
) -> None:  # fmt: skip
    """Print the table."""
    if task is not None:
        click.echo(json.dumps(measured(*json.loads(task))))
        return
    wanted = ways.split(",")
    if unknown := [way for way in wanted if way not in WAYS]:
        raise click.UsageError(f"no way {unknown[0]!r}; there are {', '.join(WAYS)}")
    if not as_json:
        click.echo("| graph | way | wall s | CPU s | MiB | ms | over best heuristic | |")
        click.echo("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    made = []
    for row in rows(graphs.split(","), cluster, wanted, limit, evaluations):
        made.append(row)
        if not as_json:
            click.echo(line(row))
    if as_json:
        click.echo(json.dumps({"cluster": cluster, "limit_s": limit, "rows": made}))


if __name__ == "__main__":
    main()
