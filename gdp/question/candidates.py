"""Candidates of a free search beside those of its methods, and their scores as devices run them.

Plans of other programs enter a search as methods. Where kernels were cut between modules
(`Origin.is_relaxed`), times of the problem may be too short, so that the best candidates
are simulated again with the kernels that each device fuses.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Answer, Assignment, Method, Search
from gdp.placement.placement import Placement, make_placement
from gdp.problem.problem import Problem
from gdp.sim.objectives import Score

Plans = Callable[[], Iterable[Placement]]
"""Makes placements, the most promising first."""


def planned_method(graph: OpGraph, planner: Plans) -> Method:
    """A method that answers the first placement of a planner that fits."""
    from gdp.methods.repair import repair_and_select
    from gdp.methods.scoring import expand, nearest_allowed
    from gdp.sim.score import score_of

    # A group goes where its largest weights are: what else is fused with them may be elsewhere.
    order = np.argsort(graph.weight_bytes, kind="stable")

    def method(problem: Problem, search: Search) -> Answer:
        group = problem.group[problem.origin.group_of][order]
        closest = None
        for placement in planner():
            group_device = np.zeros(problem.num_groups, dtype=np.int64)
            group_device[group] = placement.device[order]
            closest = Assignment(expand(problem, nearest_allowed(problem, group_device)))
            if score_of(problem, closest).feasible:
                break
        if closest is None:
            return Answer(None, reason="it has no plan")
        return repair_and_select(problem, search, [closest], "the plan", search.budget())

    return method


def expanded(graph: OpGraph, problem: Problem, assignment: Assignment, made_by: str) -> Placement:
    """The placement of a model by an assignment of its fused ops."""
    expand = problem.origin.expand
    rank = None if assignment.rank is None else expand(assignment.rank)
    return make_placement(
        graph, problem.cluster, expand(assignment.device), rank,
        made_by=made_by, teams=assignment.teams,
    )  # fmt: skip


def best_executed(
    answer: Answer, found: Assignment | None, executed: Callable[[Assignment], Score]
) -> Answer:
    """An answer to a relaxed problem, and its candidates, with the times of `executed`.

    Candidates that are said to be faster than the answer is are simulated, too, and the fastest of
    all is taken; `found` is the answer before it was simplified. Times are in seconds.
    """
    if answer.assignment is None or found is None:
        return answer
    best, best_s = answer.assignment, executed(answer.assignment).value_s
    best_s /= 1 + answer.simplicity_cost
    plain = [row.feasible and row.method != "replicas" for row in answer.candidates]
    made = [*answer.evaluated, found]
    if sum(plain) != len(made):
        return answer
    rows, made_by_row = list(answer.candidates), iter(made)
    for k in np.flatnonzero(plain).tolist():
        assignment, said_s = next(made_by_row), rows[k].value_s
        if said_s is None or said_s >= best_s * (1 - 1e-9):
            continue
        true = executed(assignment)
        rows[k] = replace(
            rows[k], latency_s=true.latency_s, period_s=true.period_s, value_s=true.value_s,
            feasible=true.feasible, reason=rows[k].reason if true.feasible else str(true),
        )  # fmt: skip
        if true.feasible and true.value_s < best_s * (1 - 1e-9):
            best, best_s = assignment, true.value_s
    return replace(answer, assignment=best, candidates=tuple(rows))
