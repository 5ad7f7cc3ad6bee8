"""List schedulers, memory-constrained: HEFT, ETF and randomised critical path."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.bounds.work import earliest_ends
from gdp.cluster.types import pool_excess_bytes
from gdp.graph.groups import inverse
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.priorities import as_rank, longest_s, mean_compute_s, mean_send_s, upward_rank
from gdp.methods.repair import repair_and_select
from gdp.methods.scoring import compile_once
from gdp.problem.arrays import Arrays, arrays_of
from gdp.problem.problem import Problem
from gdp.sim.objectives import memory_binds, peaks

if TYPE_CHECKING:  # the kernels load numba
    from gdp.methods.heuristics.list_schedule_kernels import PartialSchedule

TRIALS = 60
"""Schedules drawn by `critical_path`; fewer where ops are many, see `PLACED`."""
PLACED = 60_000
"""Ops placed by all schedules together, at most."""
PRICES = (0.0, 0.1, 0.3, 1.0)
"""Penalty weights for communication time, tried cyclically: transfers also delay other ops."""
ROUNDS = 12
"""Schedules under lowered memory limits, at most."""
_LEAST = 0.02  # share of its memory that is left to a device
_MORE = 0.1  # share of the missing bytes that is reserved in addition, times the round


def heft(problem: Problem, search: Search) -> Answer:
    """Each op, by upward rank, on the device where it finishes first; the best of four forms.

    rank(i) = mean_d compute(i, d) + max over tensors t of i and their readers j of
    (mean_send(t) + rank(j)). Topcuoglu, Hariri and Wu 2002, doi 10.1109/71.993206. Forms: into idle
    gaps (insertion, as published) or after the last op (append); links always free (as published)
    or first come first served, as the simulator has them. A device on which the weights of an op's
    group and the tensors alive would not fit is passed over (Baechi: Jeon et al. 2020,
    doi 10.1145/3419111.3421302); the first op of a group that is placed decides for the group.
    Every form is simulated, with the order of its starts and with the upward ranks as priorities.
    Where memory is short, the last form is planned again under limits lowered by the bytes that its
    run missed, until it fits (`reserved_assignments`). O(E D).
    """
    compile_once("heft", heft, problem.objective)
    clock = search.budget()
    return repair_and_select(problem, search, heft_assignments(problem), "heft", clock)


def etf(problem: Problem, search: Search) -> Answer:
    """Always the ready op and device with the earliest start; ties by the longest way to the end.

    Hwang, Chow, Anger and Lee 1989, doi 10.1137/0218016, memory-constrained as `heft`. Starts come
    in order of time, so no op could ever use an earlier gap: the insertion form is the append form,
    and the two forms tried are free links (as published) and queueing links. O(E D + N D log N).
    """
    compile_once("etf", etf, problem.objective)
    clock = search.budget()
    return repair_and_select(problem, search, etf_assignments(problem), "etf", clock)


def critical_path(problem: Problem, search: Search) -> Answer:
    """Randomised critical-path list scheduling; the best of up to `TRIALS` schedules.

    The op with the longest path left goes where it ends first. On equal devices that is where it
    starts first: list scheduling by level (Graham 1969, doi 10.1137/0117039), here with paths that
    count communication, into idle gaps, on links that queue, memory-constrained as `heft`. Drawn
    are the order of ops whose paths are equally long and the device of those that are equally good;
    the price of sending takes turns (`PRICES`). An op that reads nothing and may run anywhere (a
    stored weight) goes where its first reader goes. Where memory is short, by paths and in program
    order again under limits lowered by their runs' missing bytes, as in `heft`. O(k (E D + N D
    gaps)) for k schedules, each simulated twice.
    """
    compile_once("critical_path", critical_path, problem.objective)
    clock = search.budget()
    candidates = critical_path_assignments(problem, search.seed)
    return repair_and_select(problem, search, candidates, "critical_path", clock)


def heft_assignments(problem: Problem) -> Iterator[Assignment]:
    """The forms that `heft` chooses from."""
    from gdp.methods.heuristics.list_schedule_kernels import heft_plan

    a = arrays_of(problem)
    rank = upward_rank(problem)
    order = np.argsort(rank)
    for insertion, queues in ((True, False), (False, True), (True, True), (False, False)):
        plan = heft_plan(a, order, insertion, queues)
        yield from _ranked(plan.device, plan.start_s, rank)
    yield from reserved_assignments(problem, lambda less: heft_plan(less, order, True, True))


def etf_assignments(problem: Problem) -> Iterator[Assignment]:
    """The forms that `etf` chooses from."""
    from gdp.methods.heuristics.list_schedule_kernels import etf_plan

    a = arrays_of(problem)
    level_s = longest_s(a, mean_compute_s(a), np.zeros(len(a.sent_bytes)))
    rank = upward_rank(problem)
    for queues in (False, True):
        plan = etf_plan(a, level_s, queues)
        yield from _ranked(plan.device, plan.start_s, rank)
    yield from reserved_assignments(problem, lambda less: etf_plan(less, level_s, True))


def _ranked(
    device: Int[np.ndarray, "N"], start_s: Float[np.ndarray, "N"], rank: Int[np.ndarray, "N"]
) -> Iterator[Assignment]:
    """A placement under the order of its starts and under given ranks."""
    yield Assignment(device, as_rank(start_s))
    yield Assignment(device, rank)


def critical_path_assignments(
    problem: Problem, seed: int, trials: int = TRIALS
) -> Iterator[Assignment]:
    """The schedules that `critical_path` chooses from, each by its starts and by its paths."""
    from gdp.methods.heuristics.list_schedule_kernels import critical_plan

    a, n = arrays_of(problem), problem.num_ops
    left_s = longest_s(a, mean_compute_s(a), mean_send_s(a))
    depth, waits = earliest_ends(problem, np.ones(n, dtype=np.int64)), _waiting(problem)
    rng = np.random.default_rng([seed, n])
    for k in range(max(len(PRICES), min(trials, PLACED // n))):
        order = _drawn_order(left_s, depth, rng)
        lot = rng.random((n, problem.num_devices))
        plan = critical_plan(a, order, waits, PRICES[k % len(PRICES)], lot)
        yield Assignment(plan.device, as_rank(plan.start_s))
        yield Assignment(plan.device, inverse(order))
    lot = rng.random((n, problem.num_devices))
    for order, price in ((_drawn_order(left_s, depth, rng), 0.3), (np.arange(n), 1.0)):
        yield from reserved_assignments(
            problem,
            lambda less, order=order, price=price: critical_plan(less, order, waits, price, lot),
        )


def _drawn_order(
    left_s: Float[np.ndarray, "N"], depth: Int[np.ndarray, "N"], rng: np.random.Generator
) -> Int[np.ndarray, "N"]:
    """The ops by the longest path left, equals at random; what takes no time keeps its depth.

    A reader's path is never longer than its maker's, so the order is topological.
    """
    return np.lexsort((rng.random(len(left_s)), depth, -left_s))


def _waiting(problem: Problem) -> Bool[np.ndarray, "N"]:
    """Ops that read nothing, are read, are alone in their group and may run on any device."""
    a = arrays_of(problem)
    is_read = np.zeros(problem.num_ops, dtype=bool)
    is_read[a.producer[np.diff(a.use_start) > 0]] = True
    alone = np.bincount(problem.group, minlength=problem.num_groups)[problem.group] == 1
    return (np.diff(a.in_start) == 0) & is_read & alone & problem.allowed.all(axis=1)


def reserved_assignments(
    problem: Problem, make: Callable[[Arrays], "PartialSchedule"]
) -> Iterator[Assignment]:
    """Schedules under ever lower memory limits, up to the first that fits; none in ample memory.

    A schedule counts memory as it places ops; what a run needs shows when it is simulated, with
    other overlaps and, in a pipeline, with buffers. What is missing there is held in reserve next.
    """
    if not memory_binds(problem):
        return
    a = arrays_of(problem)
    capacity = a.memory_bytes.astype(float)
    limit = capacity.copy()
    for attempt in range(ROUNDS):
        shared = pool_limits(problem, limit)
        plan = make(a._replace(memory_bytes=limit.astype(np.int64), pool_bytes=shared))
        assignment = Assignment(plan.device, as_rank(plan.start_s))
        yield assignment
        missing = missing_bytes(problem, assignment)
        if not missing.any():
            return
        limit = lowered(limit, missing, capacity, attempt)


def missing_bytes(problem: Problem, assignment: Assignment) -> Float[np.ndarray, "D"]:
    """Bytes by which each device's memory is exceeded, or the one that it shares."""
    cluster, peak_bytes = problem.cluster, peaks(problem, assignment.device, assignment.rank)
    own = np.maximum(peak_bytes - cluster.memory_bytes, 0.0)
    shared = np.append(pool_excess_bytes(cluster, peak_bytes), 0)[cluster.pool]  # 0 for `ALONE`
    return np.maximum(own, shared)


def pool_limits(problem: Problem, limit: Float[np.ndarray, "D"]) -> Int[np.ndarray, "P"]:
    """Limits of memories that devices share, lowered as those of their devices are on average."""
    cluster = problem.cluster
    share = limit / cluster.memory_bytes
    means = [float(share[cluster.pool == k].mean()) for k in range(len(cluster.pool_bytes))]
    return (cluster.pool_bytes * np.array(means)).astype(np.int64)


def lowered(
    limit: Float[np.ndarray, "D"],
    missing: Float[np.ndarray, "D"],
    capacity: Float[np.ndarray, "D"],
    attempt: int,
) -> Float[np.ndarray, "D"]:
    """Limits to plan under after a plan that missed so many bytes; later attempts reserve more."""
    return np.maximum(limit - missing * (1.0 + _MORE * attempt), _LEAST * capacity)
