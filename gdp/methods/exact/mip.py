"""Exact placements by general solvers: HiGHS for loads and periods, CP-SAT for latencies.

| objective | model | solver |
| --- | --- | --- |
| max_load | `gdp.methods.exact.load_program`, non-contiguous | HiGHS |
| throughput | `gdp.methods.period.program`, memory row by row as it binds | HiGHS |
| block_latency | `gdp.methods.exact.blocks`, one block per accelerator | CP-SAT |
| latency | `gdp.methods.exact.schedule`, a relaxation of the event simulator's | CP-SAT |

A good placement comes first, from the pipeline's dynamic program and a search; it is the solver's
cutoff or hint. Then the model is reduced by rules that keep every better placement
(`gdp.methods.exact.reduce`). The solver's bound counts also when time runs out.
"""

import dataclasses
import logging
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from gdp.clock import Clock
from gdp.methods.base import Answer, Assignment, Method, Search
from gdp.methods.exact import schedule
from gdp.methods.exact.event import least_latency, least_period
from gdp.methods.exact.hypergraph import LoadModel, load_model, work_bound_s
from gdp.methods.exact.load_program import solve_loads
from gdp.methods.exact.reduce import absorb, reduce_model
from gdp.methods.exact.targets import CLOSE, Known, close_gap
from gdp.methods.period import program
from gdp.methods.scoring import refusal
from gdp.problem.problem import Problem
from gdp.sim.replicas import may_replicate

LOG = logging.getLogger(__name__)

_SEARCH_SHARE = 0.15
_POLISH_SHARE = 0.15
_PIPELINE_SHARE = 0.1
_REDUCE_SHARE = 0.3
_START_S = 10.0  # for a first answer where no limit is given
_ROUNDS = 12  # of annealing where no limit is given
_MOST_ROUNDS = 200
_FIRST_SHARE = 0.1  # of the seconds left, to decide the value itself
_ONE_BLOCK = "CP-SAT; every accelerator is called at most once"


def mip(problem: Problem, search: Search) -> Answer:
    """The best placement that the solver of the objective finds, and its bound.

    The programs know no replicated stages: where these are allowed, nothing is proven.
    """
    if problem.objective not in PROGRAMS:
        return refusal(problem, "mip", PROGRAMS)
    if may_replicate(problem):
        return without_proof(mip(without_replicas(problem), search))
    return PROGRAMS[problem.objective].solve(problem, search)


def without_replicas(problem: Problem) -> Problem:
    """The same question where every stage has one device."""
    return dataclasses.replace(problem, replicas=False)


def without_proof(answer: Answer) -> Answer:
    """What a program says that left placements with replicated stages out."""
    reason = "the best found of one device for each stage; replicated stages were not looked at"
    return dataclasses.replace(
        answer,
        reason=answer.reason if answer.assignment is None else reason,
        bound_s=0.0,
        bound_by="",
        proven_optimal=False,
    )


def least_load(problem: Problem, search: Search) -> Answer:
    """The placement of least largest load, contiguous or not."""
    clock = Clock(search.seconds)
    model = load_model(problem)
    groups = _good_groups(problem, model, search, clock)
    device = None if groups is None else groups[problem.group]
    value_s = _load_s(problem, device)
    known = Known(device, value_s, work_bound_s(model), "work over the speed of all devices")

    def below(known: Known, target_s: float, seconds: float | None) -> Known:
        return _solve_below(problem, model, known, target_s, seconds)

    known = close_gap(known, below, clock, _FIRST_SHARE)
    return _answer(known.best, known.value_s, known.bound_s, known.by, known.is_complete)


def _solve_below(
    problem: Problem, model: LoadModel, known: Known, target_s: float, seconds: float | None
) -> Known:
    """What is known after looking for an assignment below a target for some seconds."""
    clock = Clock(seconds)
    reduced = reduce_model(model, target_s, Clock(seconds and _REDUCE_SHARE * seconds))
    LOG.debug("target %.6g s: %s", target_s, reduced and (reduced.num_nodes, len(reduced.pins)))
    if reduced is None:
        return known.raised(target_s, "minimum cuts")
    solution = solve_loads(reduced, target_s, None if seconds is None else clock.remaining_s())
    if solution.device is not None:
        device = solution.device[reduced.node][problem.group]
        value_s = _load_s(problem, device)
        if value_s < known.value_s:
            known = dataclasses.replace(known, best=device, value_s=value_s)
        if not np.isfinite(value_s):  # the solver's tolerance let some bytes too many pass
            solution = dataclasses.replace(solution, is_complete=False)
    return known.after(solution, target_s, "HiGHS over all placements")


def _answer(
    device: Int[np.ndarray, "N"] | None,
    value_s: float,
    bound_s: float,
    by: str,
    complete: bool,
    rank: Int[np.ndarray, "N"] | None = None,
) -> Answer:
    """What was found, with a reason that says how certain it is."""
    if device is None:
        reason = "no placement fits the devices' memories (proven)"
        if not complete:
            reason = "no placement was found that fits the devices' memories; none is ruled out"
        return Answer(None, reason=reason, bound_s=0.0 if complete else bound_s, bound_by=by)
    optimal = bound_s >= value_s * CLOSE
    reason = "" if optimal else f"cut short: at most {1 - bound_s / value_s:.2%} from the optimum"
    return Answer(
        Assignment(device, rank),
        reason=reason,
        bound_s=min(bound_s, value_s),
        bound_by=by,
        proven_optimal=optimal,
        evaluations=1,
    )


def _load_s(problem: Problem, device: Int[np.ndarray, "N"] | None) -> float:
    """The largest load; inf where memory overflows or there is no placement."""
    from gdp.sim.host_load import values

    if device is None:
        return np.inf
    value_s, overflow = values(problem, device[None])
    return float(value_s[0]) if overflow[0] == 0 else np.inf


def _good_groups(
    problem: Problem, model: LoadModel, search: Search, clock: Clock
) -> Int[np.ndarray, "G"] | None:
    """A good device for each group, by the pipelines' program and annealing; None: none fits."""
    from gdp.methods.exact.load_search import search_loads
    from gdp.methods.exact.neighbourhood import polish
    from gdp.methods.pipeline.method import best_pipeline

    seconds = search.seconds if search.seconds is None else search.seconds * _PIPELINE_SHARE
    if search.start is not None:
        first = np.array(search.start.device)
    else:
        first = best_pipeline(problem, dataclasses.replace(search, seconds=seconds)).device
    upper_s = _load_s(problem, first)
    small = absorb(model, upper_s)
    if first is not None and np.isfinite(upper_s):
        starts = [_node_values(small, problem, first)]
    else:
        starts = [np.isfinite(small.work_s).argmax(axis=1)]
    share_s = None if search.seconds is None else _SEARCH_SHARE * search.seconds
    rounds = _ROUNDS if search.seconds is None else _MOST_ROUNDS
    device, load_s, over = search_loads(small, starts, Clock(share_s), search.seed, rounds)
    if over == 0 and load_s < upper_s:
        share_s = None if search.seconds is None else _POLISH_SHARE * search.seconds
        return polish(small, device, load_s, Clock(share_s), search.seed)[small.node]
    if first is None or not np.isfinite(upper_s):
        return None
    return _node_values(model, problem, first)


def _node_values(
    model: LoadModel, problem: Problem, device: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "V"]:
    """The device of each node, where each node's ops are on one device, or on any of theirs."""
    of_node = np.zeros(model.num_nodes, dtype=np.int64)
    of_node[model.node[problem.group]] = device
    barred = ~np.isfinite(model.work_s[np.arange(model.num_nodes), of_node])
    return np.where(barred, np.isfinite(model.work_s).argmax(axis=1), of_node).astype(np.int64)


def least_block_latency(problem: Problem, search: Search, blocks_per_device: int = 1) -> Answer:
    """The placement of least latency with at most some blocks on every accelerator."""
    from gdp.methods.exact.block_starts import contiguous_start
    from gdp.methods.exact.blocks import solve_blocks
    from gdp.sim.block_latency import values

    clock = Clock(search.seconds)
    if search.start is not None:
        start = np.array(search.start.device)
    else:
        share_s = _START_S if search.seconds is None else _SEARCH_SHARE * search.seconds
        start = contiguous_start(problem, Clock(share_s), search.seed)

    def judge(device: np.ndarray | None, rank: np.ndarray | None) -> float:
        if device is None:
            return np.inf
        value_s, overflow = values(problem, device[None], rank)
        return float(value_s[0]) if overflow[0] == 0 else np.inf

    best, best_s = (start, None), judge(start, None)
    upper_s = best_s if np.isfinite(best_s) else _everything_s(problem)
    left_s = None if search.seconds is None else clock.remaining_s()
    solution = solve_blocks(problem, blocks_per_device, upper_s, left_s, search.seed, hint=start)
    if (found_s := judge(solution.device, solution.rank)) < best_s:
        best, best_s = (solution.device, solution.rank), found_s
    by = _ONE_BLOCK if blocks_per_device == 1 else f"CP-SAT; at most {blocks_per_device} calls each"
    if not np.isfinite(best_s):
        return _answer(None, np.inf, solution.bound_s, by, solution.is_complete)
    bound_s = min(solution.bound_s, best_s)
    return _answer(best[0], best_s, bound_s, by, solution.is_complete, best[1])


def _everything_s(problem: Problem) -> float:
    """No latency without idling is longer: all work on the slowest devices, all tensors twice."""
    compute_s = np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0).max(axis=1)
    sent_s = np.zeros(problem.graph.num_tensors)
    np.add.at(sent_s, problem.graph.use_tensor, 1.0)
    tensor_s = np.array(problem.tensor_s, dtype=float)
    return float(compute_s.sum() + ((sent_s + 1.0) * tensor_s).sum()) or 1.0


@dataclasses.dataclass(frozen=True)
class Program:
    """An exact program of one objective."""

    solve: Method
    solver: str
    too_large: Callable[[Problem], str] = lambda problem: ""  # how large, where it is for a solver


PROGRAMS: dict[str, Program] = {
    "max_load": Program(least_load, "HiGHS"),
    "block_latency": Program(least_block_latency, "CP-SAT"),
    "throughput": Program(least_period, "HiGHS", program.too_large),
    "latency": Program(least_latency, "CP-SAT", schedule.too_large),
}
"""The exact program of each objective that has one."""
