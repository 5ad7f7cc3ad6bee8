"""Exact pipelines: contiguous stages of least dearest stage, by dynamic programming over down-sets.

Tarnawski et al., NeurIPS 2020, arXiv 2006.16423, section 5.1: stages are the differences of a chain
of down-sets of the contracted graph, each on one device; a stage's memory, colocation and kernels
are hard. What a stage costs must not depend on where the others are, so the method is exact for
`max_load`, and for `throughput` where channels belong to one device (`gdp.methods.stage_costs`); it
says where it is a heuristic. Where the down-sets are too many, the same program runs along some
linear orders of the elements (the paper's DPL).

The best linear order gives a first pipeline, whose cost is the target: few down-sets can lie
between stages below it, and only pairs of those are looked at.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from gdp.methods.base import Answer, Assignment, Clock, Search
from gdp.methods.contraction import Contraction, contract, linear_orders, random_order
from gdp.methods.down_sets import Found, Limits, Span, best_chain, chain_below
from gdp.methods.feasible import EVENT_OBJECTIVES, settle
from gdp.methods.lattice import Lattice, make_lattice
from gdp.methods.stage_costs import StageCosts, stage_costs
from gdp.methods.windows import make_windows, work_bound_s
from gdp.sim.problem import Problem

_MOST_SEEN = 20_000_000  # down-sets; a million takes about a second
_SEEN_PER_S = 1_000_000
_MOST_BYTES = 500_000_000
_MOST_ORDERS = 50
_CHAIN_TARGETS = (1.02, 1.1, 1.5, 3.0)  # over the work bound: narrow windows first
_TARGETS = (1.03, 1.1)  # the same over down-sets, where a run costs more than its preparation
_FEW_SETS = 4000
_FEW_STATES = 32  # so few cost less to follow by value than to ask first
_TRIES = 4  # times to tighten the memory of stages when the simulator needs more
SAME = 1.0 + 1e-9  # values this close are equal: sums are added up in different orders


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The best contiguous pipeline found, and how sure that is. Axes: N ops."""

    device: Int[np.ndarray, "N"] | None  # None: no pipeline found that fits
    cost_s: float  # of the dearest stage; inf without one
    is_optimal: bool  # no contiguous pipeline costs less (or none fits)
    bound_s: float  # no placement at all has a lower value: work over speed
    costs_bound: bool  # the dearest stage never exceeds the objective's value
    down_sets: int  # of the contracted graph; those counted so far where a limit was met
    pairs: int  # stages whose cost was computed over down-sets


@dataclass(frozen=True, eq=False)
class _Task:
    """A problem made ready for the kernels."""

    problem: Problem
    contraction: Contraction
    costs: StageCosts
    lat: Lattice
    bound_s: float


def pipeline_dp(problem: Problem, search: Search) -> Answer:
    """The best contiguous pipeline, and whether that is certain."""
    clock = Clock(search.seconds)
    pipeline = best_pipeline(problem, search)
    bound = {"bound_s": pipeline.bound_s, "bound_by": "work over the speed of all devices"}
    if problem.objective == "latency":
        bound = {}
    if pipeline.device is None:
        why = "no contiguous pipeline fits the devices' memories"
        if not pipeline.is_optimal:
            why = "no contiguous pipeline was found that fits the devices' memories"
        return Answer(None, reason=why, **bound)
    if problem.objective in EVENT_OBJECTIVES:
        return dataclasses.replace(_simulated(problem, search, clock, pipeline), **bound)
    value_s = _value_s(problem, pipeline.device)
    return Answer(
        Assignment(pipeline.device),
        reason=_certainty(problem, pipeline, value_s),
        proven_optimal=problem.objective == "max_load" and value_s <= pipeline.bound_s * SAME,
        evaluations=1,
        **bound,
    )


def best_pipeline(
    problem: Problem, search: Search, linear_only: bool = False, memory_share: float = 1.0
) -> Pipeline:
    """The contiguous pipeline whose dearest stage costs least, in weights' memory times a share.

    With `linear_only`, the best along a few linear orders. O(down-sets^2) in the worst case; the
    targets leave a small part of the pairs.
    """
    clock = Clock(search.seconds)
    task = _prepare(problem, memory_share)
    spans = _best_linear(task, linear_orders(task.contraction))
    if linear_only:
        return _pipeline(task, spans, False, 0, 0)
    most_seen = _MOST_SEEN
    if search.seconds is not None:
        most_seen = int(min(most_seen, search.seconds * _SEEN_PER_S))
    limits = Limits(clock, most_seen, _MOST_BYTES)
    found, seen, pairs = None, 0, 0
    for target_s in _targets(task, _cost(spans)):
        if 0 < seen <= _FEW_SETS and target_s < _cost(spans):
            continue
        found = _below(task, target_s, limits)
        seen, pairs = found.seen, pairs + found.pairs
        if found.spans is not None or not found.is_certain:
            break
    if found is not None and not found.is_certain:
        more = _random_orders(task.contraction, search.seed, clock)
        better = _best_linear(task, more, found.spans or spans)
        return _pipeline(task, better, False, seen, pairs)
    return _pipeline(task, (found and found.spans) or spans, True, seen, pairs)


def _targets(task: _Task, known_s: float) -> list[float]:
    """Targets to try, the last of which decides: a low one leaves few down-sets."""
    low = [f * task.bound_s for f in _TARGETS if f * task.bound_s < 0.97 * known_s]
    return [*low, known_s]


def _below(task: _Task, target_s: float, limits: Limits) -> Found:
    """The best stages below a target; with many states, after asking whether there are any."""
    if len(task.lat.following) <= _FEW_STATES:
        return best_chain(task.lat, task.costs, target_s, limits)
    first = chain_below(task.lat, task.costs, target_s, limits)
    if first.spans is None:
        return first
    below_s = float(np.nextafter(_cost(first.spans), np.inf))
    best = best_chain(task.lat, task.costs, below_s, limits)
    return dataclasses.replace(
        best, spans=best.spans or first.spans, pairs=first.pairs + best.pairs
    )


def _prepare(problem: Problem, memory_share: float) -> _Task:
    contraction = contract(problem)
    costs = stage_costs(problem, contraction)
    if memory_share < 1.0:
        shrunk = (costs.memory_bytes * memory_share).astype(np.int64)
        costs = dataclasses.replace(costs, memory_bytes=shrunk)
    lat = make_lattice(problem, contraction, costs)
    return _Task(problem, contraction, costs, lat, work_bound_s(costs))


def _cost(spans: list[Span] | None) -> float:
    return np.inf if spans is None else max((span.cost_s for span in spans), default=0.0)


def _pipeline(
    task: _Task, spans: list[Span] | None, is_optimal: bool, seen: int, pairs: int
) -> Pipeline:
    device = None
    if spans is not None:
        problem, free = task.problem, [list(devices) for devices in task.costs.devices]
        of_element = np.full(task.contraction.num_elements + 1, problem.cluster.host)
        for span in spans:
            of_element[span.elements] = free[span.device_class].pop(0)
        device = of_element[task.contraction.element]
    return Pipeline(
        device=device,
        cost_s=_cost(spans),
        is_optimal=is_optimal,
        bound_s=task.bound_s,
        costs_bound=task.costs.is_bound,
        down_sets=seen,
        pairs=pairs,
    )


def _random_orders(
    contraction: Contraction, seed: int, clock: Clock
) -> Iterator[Int[np.ndarray, "M"]]:
    """Random topological orders, depth first, for as long as there is time."""
    rng = np.random.default_rng(seed)
    for _ in range(_MOST_ORDERS):
        if clock.is_over():
            return
        yield random_order(contraction, rng)


def _best_linear(
    task: _Task, orders: Iterable[Int[np.ndarray, "M"]], best: list[Span] | None = None
) -> list[Span] | None:
    """The best of `best` and the best pipelines along some linear orders; None where none fits."""
    from gdp.methods.chain_kernels import run_chain

    barred = np.ascontiguousarray(task.costs.barred)
    for order in orders:
        known_s = _cost(best)
        targets = [f * task.bound_s for f in _CHAIN_TARGETS if f * task.bound_s < known_s]
        for target_s in [*targets, known_s]:
            windows = make_windows(task.lat, task.costs, target_s)
            table = run_chain(task.lat, windows, task.costs.work_s, barred, order, target_s)
            if table[0][-1].min() < target_s:
                best = _chain_spans(task, order, *table)
                break
    return best


def _chain_spans(
    task: _Task,
    order: Int[np.ndarray, "M"],
    best: Float[np.ndarray, "M+1 S"],
    origin: Int[np.ndarray, "M+1 S"],
    taken: Int[np.ndarray, "M+1 S"],
) -> list[Span]:
    """The stages of the best pipeline along an order, first to last."""
    i, s = len(order), int(np.argmin(best[-1]))
    cost_s = float(best[-1, s])
    spans: list[Span] = []
    while i > 0:
        c, j = int(taken[i, s]), int(origin[i, s])
        if j >= 0:
            spans.append(Span(order[j:i], c, cost_s))
            i = j
        s = int(task.lat.previous[s, c])
    return spans[::-1]


def _simulated(problem: Problem, search: Search, clock: Clock, pipeline: Pipeline) -> Answer:
    """The pipeline as the event simulator sees it, with less memory for stages if it must be."""
    from gdp.sim.score import values

    tries = [pipeline]
    for attempt in range(_TRIES):
        device = tries[-1].device
        if device is None or values(problem, device[None])[1][0] == 0 or clock.is_over():
            break
        left_s = None if search.seconds is None else max(0.0, clock.remaining_s())
        rest = dataclasses.replace(search, seconds=left_s)
        tries.append(best_pipeline(problem, rest, memory_share=0.85 ** (attempt + 1)))
    devices = [p.device for p in tries if p.device is not None]
    answer = settle(problem, search, map(Assignment, devices[::-1]), "pipeline_dp", clock)
    if answer.assignment is None or answer.reason or answer.assignment.device is not devices[0]:
        return answer
    value_s = float(values(problem, devices[0][None])[0][0])
    optimal = problem.objective == "throughput" and value_s <= pipeline.bound_s * SAME
    return dataclasses.replace(
        answer, reason=_certainty(problem, pipeline, value_s), proven_optimal=optimal
    )


def _value_s(problem: Problem, device: Int[np.ndarray, "N"]) -> float:
    from gdp.sim import block_latency, max_load

    judge = max_load if problem.objective == "max_load" else block_latency
    return float(judge.values(problem, device[None])[0][0])


def _certainty(problem: Problem, pipeline: Pipeline, value_s: float) -> str:
    """What is known of a pipeline, in one line."""
    if problem.objective in ("latency", "block_latency"):
        return "heuristic: stages of least load, which is not latency"
    if not pipeline.is_optimal:
        return "heuristic: too many down-sets for the time given; best of some linear orders"
    if not pipeline.costs_bound:
        return "heuristic: what a stage sends and receives shares no channel that is its own"
    if value_s > pipeline.cost_s * SAME:
        return "heuristic: its dearest channel depends on which devices read a tensor"
    return f"no contiguous pipeline is better ({pipeline.down_sets} down-sets); others may be"
