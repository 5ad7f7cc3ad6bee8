"""Exact pipelines: contiguous stages of least dearest stage, by dynamic programming over down-sets.

Tarnawski et al., NeurIPS 2020, arXiv 2006.16423, section 5.1: stages are the differences of a chain
of down-sets of the contracted graph, each on one device; a stage's memory, colocation and kernels
are hard. What a stage costs must not depend on where the others are, so the method is exact for
`throughput` where channels belong to one device (`gdp.methods.pipeline.stage_costs`), and for an
objective whose own program prices stages otherwise; it says where it is a heuristic. Where the
down-sets are too many, the same program runs along some linear orders of the elements (the paper's
DPL).

The best linear order gives a first pipeline, whose cost is the target: few down-sets can lie
between stages below it, and only pairs of those are evaluated.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdp.base.clock import Clock
from gdp.base.rows import imported
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.pipeline.down_sets import (
    DownSetsAnswer,
    Limits,
    PipelineStage,
    best_chain,
    cost_of,
)
from gdp.methods.pipeline.elements import Contraction, contract, linear_orders, random_order
from gdp.methods.pipeline.lattice import (
    StageProgram,
    make_lattice,
    make_stage_program,
    work_bound_s,
)
from gdp.methods.pipeline.stage_costs import (
    Pricing,
    op_group_costs,
    stage_costs,
    with_few_states,
)
from gdp.methods.repair import repair_and_select
from gdp.methods.scoring import best_of, proven_misfit, score_of, tiny_problem
from gdp.methods.shares import DOWN_SETS_SHARE, REPLICATED_SHARE
from gdp.problem.problem import Problem
from gdp.sim.engine import arrays
from gdp.sim.objectives import objective_of
from gdp.sim.score import MAX_CYCLE, cycle_length, may_replicate

_MOST_SEEN = 20_000_000  # down-sets; a million takes about half a second
_MOST_BYTES = 500_000_000
_MOST_ORDERS = 50
_TARGETS = (1.03, 1.1)  # over the work bound; a run costs more than its preparation
_FEW_SETS = 4000
_LINEAR_STEPS = 4e8  # of a linear order, where no seconds say how many are too many
_MEMORY_SHARES = (0.85, 0.6, 0.35)
"""Tried for weights, where a pipeline needs more than all memory."""
_WORK_S = 10.0
"""Counted, where evaluations are given."""
_LESS_MEMORY = "heuristic: stages of less memory than devices have, as activations take the rest"
SAME = 1.0 + 1e-9  # values this close are equal: sums are added up in different orders


@dataclass(frozen=True, eq=False)
class PipelineResult:
    """The best contiguous pipeline found, and how sure that is."""

    assignment: Assignment | None  # None: no pipeline found that fits
    cost_s: float  # of the dearest stage; inf without one
    is_optimal: bool  # no contiguous pipeline costs less (or none fits)
    bound_s: float  # no placement at all has a lower value: work over speed
    costs_bound: bool  # the dearest stage never exceeds the objective's value
    down_sets: int  # of the contracted graph; those counted so far where a limit was met
    num_left_out: int  # devices that no pipeline was allowed, as their unlikeness has a price
    has_all_groups: bool = True  # groups of every size were tried


@dataclass(frozen=True, eq=False)
class _Task:
    """A problem made ready for the kernels."""

    problem: Problem
    contraction: Contraction
    program: StageProgram
    bound_s: float  # no placement has a lower value
    pipeline_bound_s: float  # no contiguous pipeline has one


def pipeline_dp(problem: Problem, search: Search) -> Answer:
    """The best contiguous pipeline, and whether that is certain.

    Where stages may be replicated, the better of the best with and without: never worse than
    without, given the time. Half of the seconds go to each.
    """
    compile_pipelines()
    search = dataclasses.replace(search, clock=search.budget(_WORK_S))
    if own := objective_of(problem).programs.get("pipeline_dp"):
        return imported(own)(problem, search)
    if not may_replicate(problem):
        return plain_pipeline(problem, search)
    clock = search.budget()
    best = replicated_pipeline(
        problem, dataclasses.replace(search, clock=clock.part(REPLICATED_SHARE))
    )
    if best.proven_optimal:
        return best
    plain = plain_pipeline(problem, dataclasses.replace(search, clock=clock))
    if plain.assignment is None:
        return best
    value_s = best_of(problem, [plain.assignment]).value_s
    if best.assignment is not None and score_of(problem, best.assignment).value_s <= value_s:
        return best
    # What bounds plain pipelines does not bound those with replicated stages.
    return dataclasses.replace(
        plain,
        bound_s=best.bound_s,
        bound_by=best.bound_by,
        proven_optimal=value_s <= best.bound_s * SAME,
    )


def replicated_pipeline(problem: Problem, search: Search, linear_only: bool = False) -> Answer:
    """The best pipeline with replicated stages, whose devices take samples round-robin."""
    clock = search.budget()
    for share in (1.0, *_MEMORY_SHARES):
        rest = dataclasses.replace(search, clock=clock)
        quick = linear_only or clock.is_over()
        pipeline = best_pipeline(problem, rest, quick, share, replicas=True)
        bound = {"bound_s": pipeline.bound_s, "bound_by": "work over the speed of all devices"}
        placed = pipeline.assignment
        if placed is None and share < 1.0:
            continue  # other stages may fit into even less, with room for activations
        if placed is None:
            return _misfit(problem, pipeline, **bound)
        if cycle_length(placed.teams) > MAX_CYCLE:
            return Answer(None, reason="the replicas' ways repeat after too many samples", **bound)
        judged = score_of(problem, placed)
        if judged.feasible:
            break
    else:
        return Answer(None, reason="no pipeline with replicated stages was found that fits")
    why = _certainty(problem, pipeline, judged.value_s)
    if share < 1.0:
        why = _LESS_MEMORY
    return Answer(
        placed,
        reason=why,
        proven_optimal=judged.value_s <= pipeline.bound_s * SAME,
        evaluations=1,
        **bound,
    )


def plain_pipeline(problem: Problem, search: Search, costs_of: Pricing = stage_costs) -> Answer:
    """The best contiguous pipeline of single devices."""
    clock, objective = search.budget(), objective_of(problem)
    linear_only = objective.general and not objective.pipelined
    pipeline = best_pipeline(problem, search, linear_only, costs_of=costs_of)
    bound = {"bound_s": pipeline.bound_s, "bound_by": "work over the speed of all devices"}
    if not objective.pipelined:
        bound = {}  # a latency is no load
    if pipeline.assignment is None:
        return _misfit(problem, pipeline, **bound)
    # By the objective's value, with less memory for stages if it must be.
    tries = _with_less_memory(problem, search, clock, pipeline, costs_of)
    answer = repair_and_select(problem, search, tries[::-1], "pipeline_dp", clock)
    answer = dataclasses.replace(answer, **bound)
    if answer.assignment is None or answer.reason:
        return answer
    if answer.assignment.device is not tries[0].device:
        return dataclasses.replace(answer, reason=_LESS_MEMORY)
    value_s = best_of(problem, [tries[0]]).value_s
    optimal = objective.pipelined and value_s <= pipeline.bound_s * SAME
    return dataclasses.replace(
        answer, reason=_certainty(problem, pipeline, value_s), proven_optimal=optimal
    )


def best_pipeline(
    problem: Problem,
    search: Search,
    linear_only: bool = False,
    memory_share: float = 1.0,
    replicas: bool = False,
    costs_of: Pricing = stage_costs,
) -> PipelineResult:
    """The contiguous pipeline whose dearest stage costs least.

    O(down-sets^2) in the worst case; the targets leave a small part of the pairs.

    Args:
        problem: Of any objective.
        search: Its seconds end it with the best pipeline by then.
        linear_only: Look along a few linear orders alone.
        memory_share: Share of the devices' memory that weights may fill.
        replicas: Several devices may serve a stage round-robin.
        costs_of: The costs of stages over the contracted graph.
    """
    from gdp.methods.pipeline.orders import best_linear

    clock = search.budget()
    task = _prepare(problem, memory_share, replicas, costs_of)
    orders = linear_orders(task.contraction)
    most = _LINEAR_STEPS if linear_only and clock.left_s() is None else np.inf
    stages = best_linear(task.program, orders, task.pipeline_bound_s, clock, whole_steps=most)
    uncertain = DownSetsAnswer(stages, False, 0)
    if linear_only:
        return _pipeline(task, uncertain)
    limits = Limits(clock.part(DOWN_SETS_SHARE), _MOST_SEEN, _MOST_BYTES)
    try:
        answer = _best_exact(task, stages, limits)
    except KeyboardInterrupt:
        if stages is None:
            raise
        return _pipeline(task, uncertain)
    if not answer.is_certain and not clock.is_over():
        rng = np.random.default_rng(search.seed)
        more = (random_order(task.contraction, rng) for _ in range(_MOST_ORDERS))
        best = best_linear(task.program, more, task.pipeline_bound_s, clock, answer.stages)
        answer = dataclasses.replace(answer, stages=best)
    return _pipeline(task, answer)


def _best_exact(task: _Task, stages: list[PipelineStage] | None, limits: Limits) -> DownSetsAnswer:
    """The best stages over all down-sets, or those given where none are better."""
    known_s, seen = cost_of(stages), 0
    if known_s <= task.pipeline_bound_s:
        return DownSetsAnswer(stages, True, 0)
    # The last target decides; a low one leaves few down-sets.
    low = [f * task.pipeline_bound_s for f in _TARGETS]
    for target_s in [*(target_s for target_s in low if target_s < 0.97 * known_s), known_s]:
        if 0 < seen <= _FEW_SETS and target_s < known_s:
            continue
        answer = best_chain(task.program, target_s, limits)
        seen = answer.seen
        if answer.stages is not None or not answer.is_certain:
            return dataclasses.replace(answer, stages=answer.stages or stages)
    return DownSetsAnswer(stages, True, seen)


def _prepare(
    problem: Problem, memory_share: float, replicas: bool = False, costs_of: Pricing = stage_costs
) -> _Task:
    contraction = contract(problem)
    costs = costs_of(problem, contraction, replicas)
    bound_s = work_bound_s(op_group_costs(problem, costs), of_any_group=replicas)
    costs = with_few_states(costs)
    if memory_share < 1.0:
        shrunk = (costs.memory_bytes * memory_share).astype(np.int64)
        costs = dataclasses.replace(costs, memory_bytes=shrunk)
    program = make_stage_program(make_lattice(problem, contraction, costs), costs)
    return _Task(problem, contraction, program, bound_s, max(bound_s, work_bound_s(costs)))


def _pipeline(task: _Task, answer: DownSetsAnswer) -> PipelineResult:
    costs = task.program.costs
    left_out = task.problem.num_devices - sum(len(devices) for devices in costs.devices)
    return PipelineResult(
        assignment=None if answer.stages is None else _placed(task, answer.stages),
        cost_s=cost_of(answer.stages),
        is_optimal=answer.is_certain and not left_out and costs.has_all_groups,
        bound_s=task.bound_s,
        costs_bound=costs.is_bound,
        down_sets=answer.seen,
        num_left_out=left_out,
        has_all_groups=costs.has_all_groups,
    )


def _placed(task: _Task, stages: list[PipelineStage]) -> Assignment:
    """The device of every op, the first of its team where several serve a stage, and the teams."""
    costs = task.program.costs
    free = [list(devices) for devices in costs.devices]
    of_element = np.full(task.contraction.num_elements + 1, task.problem.cluster.host)
    teams = []
    for stage in stages:
        counts = costs.groups[stage.group].counts
        members = sorted(free[c].pop(0) for c, count in enumerate(counts) for _ in range(count))
        of_element[stage.elements] = members[0]
        if len(members) > 1:
            teams.append(tuple(members))
    return Assignment(of_element[task.contraction.element], None, tuple(sorted(teams)))


def _with_less_memory(
    problem: Problem, search: Search, clock: Clock, pipeline: PipelineResult, costs_of: Pricing
) -> list[Assignment]:
    """The pipeline, then others in a share of the memory, up to the first that fits."""
    tries = [pipeline]
    for share in _MEMORY_SHARES:
        placed = tries[-1].assignment
        if placed is None or best_of(problem, [placed]).overflow_bytes == 0:
            break
        if clock.is_over() and len(tries) > 1:
            break
        rest = dataclasses.replace(search, clock=clock)
        quick = not objective_of(problem).pipelined or clock.is_over()
        tries.append(best_pipeline(problem, rest, quick, share, costs_of=costs_of))
    return [p.assignment for p in tries if p.assignment is not None]


def _certainty(problem: Problem, pipeline: PipelineResult, value_s: float) -> str:
    """The certainty of a pipeline, in one line."""
    if not objective_of(problem).pipelined:
        return f"heuristic: stages of least load, which is not {objective_of(problem).quantity}"
    if value_s <= pipeline.bound_s * SAME:
        return "optimal: no placement takes less than its work over the speed of all devices"
    if pipeline.num_left_out:
        return f"heuristic: too many unlike devices; {pipeline.num_left_out} were left out"
    if not pipeline.has_all_groups:
        return "heuristic: teams of every size are too many here; some sizes were left out"
    if not pipeline.is_optimal:
        return "heuristic: too many down-sets for the time given; best of some linear orders"
    if not pipeline.costs_bound:
        return "heuristic: what a stage sends and receives shares no channel that is its own"
    if value_s > pipeline.cost_s * SAME and arrays(problem).is_serial:
        return "heuristic: a processor or a thread works for several devices, which no stage sees"
    if value_s > pipeline.cost_s * SAME:
        return "heuristic: what its dearest channel carries depends on which devices meet there"
    how = f"{pipeline.down_sets} down-sets" if pipeline.down_sets else "work bound"
    return f"no contiguous pipeline is better ({how}); others may be"


def _misfit(problem: Problem, pipeline: PipelineResult, **bound: Any) -> Answer:
    """The answer without a pipeline, with how certain it is that none fits."""
    if (proof := proven_misfit(problem)) is not None:
        return Answer(None, reason=f"infeasible: {proof}", proven_misfit=True, **bound)
    reason = (
        "no contiguous pipeline was found that fits the devices' memories, but there may be one"
    )
    if pipeline.is_optimal:
        proof = f"proven over all {pipeline.down_sets} down-sets"
        reason = f"infeasible: no contiguous pipeline fits the devices' memories, {proof}"
    return Answer(None, reason=reason, **bound)


_COMPILED: set[bool] = set()  # whether along linear orders alone


def compile_pipelines(linear_only: bool = False) -> None:
    """Run every kernel on a tiny problem, once per process: budgets start after compilation. Those
    of the program over down-sets take half of the time; `linear_only` leaves them out."""
    from gdp.methods.pipeline.orders import best_linear

    if linear_only in _COMPILED or False in _COMPILED:
        return
    _COMPILED.add(linear_only)
    problem = tiny_problem("throughput")
    task = _prepare(problem, 1.0)
    best_linear(task.program, linear_orders(task.contraction), 1.0, Clock(None))
    if not linear_only:
        limits = Limits(Clock(None), _MOST_SEEN, _MOST_BYTES)
        best_chain(task.program, np.inf, limits)
    repair_and_select(
        problem, Search(), [Assignment(np.zeros(problem.num_ops, dtype=np.int64))], "tiny"
    )
