"""Critical path first, ties at random, the best of many: where much is sent, luck can be bought."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.clock import Clock
from gdp.graph.index import inverse
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.heuristics.reserved import reserved_assignments
from gdp.methods.ranks import as_rank, longest_s, mean_compute_s, mean_send_s
from gdp.methods.repair import settle
from gdp.methods.scoring import compile_once, unsupported
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem

TRIALS = 60
"""Plans drawn; fewer where ops are many, see `PLACED`."""
PLACED = 60_000
"""Ops placed by all plans together, at most."""
PRICES = (0.0, 0.1, 0.3, 1.0)
"""Seconds that one second on a link counts beside an end, in turn: what is sent delays others."""


def critical_path(problem: Problem, search: Search) -> Answer:
    """The op with the longest path left goes where it ends first, ties at random; best of many.

    On equal devices that is where it starts first: list scheduling by level (Graham 1969, doi
    10.1137/0117039), here with paths that count communication, into idle gaps, on links that queue,
    memory-constrained as `heft`. What a plan draws: the order
    of ops whose paths are equally long, the device of those that are equally good, and in turn the
    price of sending (`PRICES`). An op that reads nothing and may run anywhere (a stored weight)
    goes where its first reader goes. Where memory is short, by paths and in program order again
    under limits lowered by what their runs missed, as in `heft`. O(k (E D + N D gaps)) for k plans,
    each simulated twice.
    """
    if (refusal := unsupported(problem, "critical_path")) is not None:
        return refusal
    compile_once("critical_path", critical_path, problem.objective)
    clock = Clock(search.seconds)
    made = critical_path_assignments(problem, search.seed)
    return settle(problem, search, made, "critical_path", clock)


def critical_path_assignments(
    problem: Problem, seed: int, trials: int = TRIALS
) -> Iterator[Assignment]:
    """The plans that `critical_path` chooses from, each by its starts and by its paths."""
    from gdp.methods.heuristics.critical_path_kernels import critical_plan

    a, n = arrays_of(problem), problem.num_ops
    left_s = longest_s(a, mean_compute_s(a), mean_send_s(a))
    depth, waits = _depth(problem), _waiting(problem)
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


def _depth(problem: Problem) -> Int[np.ndarray, "N"]:
    """The most edges on a path to each op. O(N + E)."""
    depth = np.zeros(problem.num_ops, dtype=np.int64)
    src, dst = problem.graph.edges
    by_reader = np.argsort(dst, kind="stable")
    for u, v in zip(src[by_reader].tolist(), dst[by_reader].tolist(), strict=True):
        depth[v] = max(depth[v], depth[u] + 1)
    return depth


def _waiting(problem: Problem) -> Bool[np.ndarray, "N"]:
    """Ops that read nothing, are read, are alone in their group and may run on any device."""
    a = arrays_of(problem)
    is_read = np.zeros(problem.num_ops, dtype=bool)
    is_read[a.producer[np.diff(a.use_start) > 0]] = True
    alone = np.bincount(problem.group, minlength=problem.num_groups)[problem.group] == 1
    return (np.diff(a.in_start) == 0) & is_read & alone & problem.allowed.all(axis=1)
