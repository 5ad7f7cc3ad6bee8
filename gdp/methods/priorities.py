"""Priorities beside devices: a placement is run under each of a few rules, and the best counts.

Which of two ready ops a device takes first decides as much as a good move of an op, and no one rule
is best everywhere: the longest path to the end suits forward passes, program order pipelines of
micro-batches, first come first served what is bound by links. All are computed in O(E) per
placement, from mean costs, mean transfers and longest paths.

Axes: K placements, N ops, R rules, T tensors, P pairs of ops joined by at least one tensor, D
devices.
"""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.graph.groups import distinct, inverse
from gdp.problem.arrays import Arrays, arrays_of
from gdp.problem.problem import Problem, cached_on_problem
from gdp.sim.objectives import objective_of


def upward_rank(problem: Problem) -> Int[np.ndarray, "N"]:
    """HEFT's priorities as ranks 0..N-1, the first to run being 0; ties in topological order."""
    a = arrays_of(problem)
    return as_rank(-longest_s(a, mean_compute_s(a), mean_send_s(a)))


def longest_s(
    a: Arrays, op_s: Float[np.ndarray, "N"], send_s: Float[np.ndarray, "T"]
) -> Float[np.ndarray, "N"]:
    """Seconds from the start of each op to the end, on the longest path, transfers included."""
    from gdp.methods.path_kernels import fill_upward_ranks

    seconds = np.zeros(len(op_s))
    fill_upward_ranks(a, op_s, send_s, seconds)
    return seconds


def as_rank(key: Float[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """Ranks 0..N-1 in ascending order of a key, ties by op id.

    >>> as_rank(np.array([3.0, 1.0, 1.0]))
    array([2, 0, 1])
    """
    return inverse(np.argsort(key, kind="stable"))


def mean_compute_s(a: Arrays) -> Float[np.ndarray, "N"]:
    """The mean of an op's seconds over the devices that may run it."""
    may = a.group_allowed[a.group]
    return np.where(may, a.compute_s, 0.0).sum(axis=1) / may.sum(axis=1)


def mean_send_s(a: Arrays) -> Float[np.ndarray, "T"]:
    """The mean over all links of a tensor's seconds on it; zero where there is one device."""
    off = ~np.eye(len(a.latency_s), dtype=bool)
    if not off.any():
        return np.zeros(len(a.sent_bytes))
    return a.latency_s[off].mean() + a.sent_bytes * (1.0 / a.bytes_per_s[off]).mean()


def ranks_to_try(problem: Problem) -> list[Int[np.ndarray, "N"] | None]:
    """Priorities that differ in the tensors they keep alive; one where they change nothing."""
    if not objective_of(problem).ordered:
        return [None]
    return [None, upward_rank(problem), np.arange(problem.num_ops), depth_first_rank(problem)]


def depth_first_rank(problem: Problem) -> Int[np.ndarray, "N"]:
    """Ranks of a depth-first topological order, which consumes the most recent results first.

    It keeps few tensors alive where branches are long, as breadth-first order does not. O(N + E).
    """
    a = arrays_of(problem)
    waits = np.diff(a.in_start).tolist()
    readers = [a.use_op[a.use_start[t] : a.use_start[t + 1]] for t in a.out_tensor]
    first = a.out_start.tolist()
    stack = [i for i in range(problem.num_ops - 1, -1, -1) if waits[i] == 0]
    order: list[int] = []
    while stack:
        op = stack.pop()
        order.append(op)
        for x in range(first[op + 1] - 1, first[op] - 1, -1):
            for reader in readers[x][::-1].tolist():
                waits[reader] -= 1
                if waits[reader] == 0:
                    stack.append(reader)
    return inverse(np.array(order))


class PathTimes(NamedTuple):
    """Seconds behind the features; the decoder uses them too."""

    cost_s: Float[np.ndarray, "N D"]  # dispatch per op included; 0 where not allowed
    mean_cost_s: Float[np.ndarray, "N"]  # over allowed devices
    send_s: Float[np.ndarray, "T"]  # mean over ordered pairs of devices
    scale_s: float  # mean cost of an op that does work
    up_s: Float[np.ndarray, "N"]  # longest path to the end, transfers included
    order: Int[np.ndarray, "N"]  # decode order and priority: decreasing up_s, topological


def squash(ratio: Float[np.ndarray, "..."] | float) -> Float[np.ndarray, "..."] | float:
    """A ratio of times on a scale that is linear near zero and logarithmic far out."""
    return np.arcsinh(ratio) / 3.0


def mean_link(problem: Problem) -> tuple[float, float]:
    """(seconds per byte, latency in seconds), averaged over ordered pairs of devices."""
    off = ~np.eye(problem.num_devices, dtype=bool)
    if not off.any():
        return 0.0, 0.0
    latency_s, s_per_byte = links(problem)
    return float(s_per_byte[off].mean()), float(latency_s[off].mean())


@cached_on_problem
def timing(problem: Problem) -> PathTimes:
    """The times of a problem."""
    a = arrays_of(problem)
    cost_s = np.where(problem.allowed, a.compute_s, 0.0)
    mean_cost_s = cost_s.sum(axis=1) / np.maximum(problem.allowed.sum(axis=1), 1)
    send_s = mean_send_s(a)
    works = mean_cost_s > 0
    scale_s = float(mean_cost_s[works].mean()) if works.any() else max(mean_link(problem)[1], 1e-9)
    up_s = longest_s(a, mean_cost_s, send_s)
    order = np.lexsort((np.arange(problem.num_ops), -up_s))
    return PathTimes(cost_s, mean_cost_s, send_s, scale_s, up_s, order)


def pairs(problem: Problem) -> tuple[Int[np.ndarray, "P"], Int[np.ndarray, "P"]]:
    """(source, destination) of the ops joined by tensors, each pair once."""
    src, dst = problem.graph.edges
    key = distinct(src * problem.num_ops + dst)
    return key // problem.num_ops, key % problem.num_ops


def links(problem: Problem) -> tuple[Float[np.ndarray, "D D"], Float[np.ndarray, "D D"]]:
    """(latency, seconds per byte) of each ordered pair of devices."""
    return np.array(problem.cluster.link_latency_s), 1.0 / problem.cluster.link_bytes_per_s


def down(
    problem: Problem, seconds: Float[np.ndarray, "N"], send_s: Float[np.ndarray, "T"]
) -> Float[np.ndarray, "N"]:
    """Seconds before the start of each op on the longest path from an entry."""
    from gdp.methods.path_kernels import fill_downward_ranks

    rank = np.zeros(problem.num_ops)
    fill_downward_ranks(arrays_of(problem), seconds, send_s, rank)
    return rank


def priority(problem: Problem) -> Int[np.ndarray, "N"]:
    """The rank of every op: its place in the decode order (decreasing longest path to the end)."""
    return inverse(timing(problem).order)


Rule = Literal["upward", "placed", "arrival", "program", "critical"]

RULES: tuple[Rule, ...] = ("upward", "placed", "arrival", "program", "critical")
"""upward: longest path to the end with mean costs (HEFT's rank, Topcuoglu et al. 2002). placed: the
same with the costs and transfers of the placement. arrival: first ready, first served. program: the
graph's own order. critical: longest path through the op, with the costs of the placement."""


def rules_of(problem: Problem) -> tuple[Rule, ...]:
    """The rules that can make a difference: only a latency depends on priorities."""
    return RULES if objective_of(problem).ordered else RULES[:1]


def ranks(
    problem: Problem, devices: Int[np.ndarray, "K N"], rules: tuple[Rule, ...]
) -> Int[np.ndarray, "R K N"]:
    """The rank of every op under each rule; equal ranks mean first ready, first served."""
    count, n = devices.shape
    rank_rows = np.zeros((len(rules), count, n), dtype=np.int64)
    up_s, down_s = np.zeros((count, n)), np.zeros((count, n))
    if "placed" in rules or "critical" in rules:
        from gdp.methods.path_kernels import path_seconds

        times, rows = timing(problem), np.ascontiguousarray(devices)
        path_seconds(
            arrays_of(problem), times.order, times.cost_s, *links(problem), rows, up_s, down_s
        )
    for row, rule in enumerate(rules):
        if rule == "upward":
            rank_rows[row] = priority(problem)
        elif rule == "program":
            rank_rows[row] = np.arange(n)
        elif rule == "placed":
            rank_rows[row] = [as_rank(key) for key in -up_s]
        elif rule == "critical":
            rank_rows[row] = [as_rank(key) for key in -(up_s + down_s)]
    return rank_rows


def rank_under(
    problem: Problem, device: Int[np.ndarray, "N"], rule: Rule
) -> Int[np.ndarray, "N"] | None:
    """The ranks of one placement under a rule, as an `Assignment` takes them."""
    if rule == "arrival":
        return None
    return ranks(problem, device[None], (rule,))[0, 0]


class RatedPlacements(NamedTuple):
    """Placements with their evaluation, each under the best of the rules tried."""

    device: Int[np.ndarray, "K N"]
    seconds: Float[np.ndarray, "K"]  # of the objective
    overflow: Int[np.ndarray, "K"]  # bytes over device memory
    rule: Int[np.ndarray, "K"]  # index into RULES
    evaluations: int  # runs of the simulator that led to them

    @property
    def best(self) -> int:
        """Row with the least overflow, then the fewest seconds."""
        return int(np.lexsort((self.seconds, self.overflow))[0])

    @property
    def value_s(self) -> Float[np.ndarray, "K"]:
        """Seconds, inf where memory overflows."""
        return np.where(self.overflow == 0, self.seconds, np.inf)


def evaluate_rules(
    problem: Problem, devices: Int[np.ndarray, "K N"], rules: tuple[Rule, ...] | None = None
) -> RatedPlacements:
    """Simulate placements under each rule: the least overflow counts, then the least seconds.

    Without `rules`, under all that can make a difference for the objective.
    """
    count, n = devices.shape
    rules = rules_of(problem) if rules is None else rules
    evaluate = objective_of(problem).values
    if objective_of(problem).ordered:
        rows = ranks(problem, devices, rules).reshape(len(rules) * count, n)
        seconds, overflow = evaluate(problem, np.tile(devices, (len(rules), 1)), rows)
    else:
        seconds, overflow = evaluate(problem, devices)
    seconds, overflow = seconds.reshape(-1, count), overflow.reshape(-1, count)
    best = np.lexsort((seconds, overflow), axis=0)[0]
    column = np.arange(count)
    index = np.array([RULES.index(rule) for rule in rules])
    return RatedPlacements(
        devices, seconds[best, column], overflow[best, column], index[best], seconds.size
    )
