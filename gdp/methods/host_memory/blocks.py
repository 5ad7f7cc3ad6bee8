"""Single-sample latency with one block per accelerator, as a CP-SAT model.

Blocks stand in an order in which every arc between blocks leads forward; one always exists, so the
order itself breaks the symmetry of equal accelerators, of which block b is then the b-th. Block b
is position 2b + 1 of a ladder, ops on CPUs are at even positions, and positions never fall along an
edge: that makes blocks convex and prevents deadlock. Along the ladder

    start(b) >= finish(u) for every tensor that b reads and op u outside b makes
    finish(b) = start(b) + sent_s of b's inputs + compute_s + sent_s of the outputs others read

(Tarnawski et al. 2020, arXiv 2006.16423, appendix, contiguous.)

First answers (`serial_start`) are serial calls: along a linear order of the elements, a call of an
accelerator covers an interval, ops between calls are on CPUs, and everything runs one after
another. The best such plan is a dynamic program; it is an upper bound of the latency, since
independent calls really overlap.

Axes: N ops, T tensors, B blocks, A accelerators, G groups, M elements, S = M + 1 places between.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gdp.base.clock import Clock
from gdp.bounds.linear_program import PlacementSolution
from gdp.bounds.work import earliest_ends
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.exact.cp_sat import TICKS, cp_model_library, place_groups, run_cp, ticks
from gdp.methods.exact.method import NO_TIME, ExactProgram, is_counted
from gdp.methods.host_memory.load import blocks, is_cpu, sent_s
from gdp.methods.host_memory.program import answered, fitting_s
from gdp.methods.intervals import best_row
from gdp.methods.pipeline.elements import Contraction, contract, linear_orders
from gdp.problem.problem import Problem
from gdp.problem.symmetry import same


def least_block_latency(problem: Problem, search: Search) -> Answer:
    """The placement of least latency with at most one block on every accelerator."""
    clock = Clock(search.seconds)
    best = serial_start(problem) if search.start is None else search.start.device
    best_s = fitting_s(problem, best)
    if best is not None and best_s == 0.0:
        return answered(Assignment(best), 0.0, 0.0, NO_TIME, complete=True)
    upper_s = best_s if np.isfinite(best_s) else _everything_s(problem)
    left_s = None if search.seconds is None else clock.remaining_s()
    solution = solve_blocks(problem, upper_s, left_s, search.seed, best, is_counted(search))
    solved_s = fitting_s(problem, solution.device)
    overflows = solution.device is not None and np.isinf(solved_s)
    if solved_s < best_s:
        best, best_s = solution.device, solved_s
    assignment = None if best is None or np.isinf(best_s) else Assignment(best)
    by = "CP-SAT; every accelerator is called at most once"
    bound_s = min(solution.bound_s, best_s)
    return answered(assignment, best_s, bound_s, by, solution.is_complete and not overflows)


LEAST_BLOCK_LATENCY = ExactProgram(least_block_latency, "CP-SAT")


def _everything_s(problem: Problem) -> float:
    """Upper bound of a latency without idling: all work on slowest devices, all tensors twice."""
    compute_s = np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0).max(axis=1)
    sent = np.bincount(problem.graph.use_tensor, minlength=problem.graph.num_tensors)
    return float(compute_s.sum() + ((sent + 1.0) * sent_s(problem)).sum()) or 1.0


def solve_blocks(
    problem: Problem,
    upper_s: float,
    seconds: float | None,
    seed: int,
    hint: Int[np.ndarray, "N"] | None = None,
    counted: bool = False,
) -> PlacementSolution:
    """The fastest placement of at most one block per accelerator, up to `upper_s`.

    Args:
        problem: Of block latency.
        upper_s: Value of a known placement, or more.
        seconds: For the solver; None: no limit.
        seed: Of the solver.
        hint: Device of each op, where the search starts.
        counted: Limit the solver's work instead of its seconds.
    """
    built = _Model(problem, upper_s / TICKS, hint)
    solution = run_cp(built.model, seconds, seed, counted)
    # Where time ran out before a first bound, the longest path still holds.
    bound_s = min(max(built.path, solution.bound) * built.unit_s, upper_s)
    if solution.solver is None:
        return PlacementSolution(None, bound_s, solution.is_complete)
    on = [[solution.solver.value(literal) for literal in row] for row in built.on]
    device = np.array(on).argmax(axis=1)[problem.group]
    return PlacementSolution(device, bound_s, solution.is_complete)


class _Model:
    """The CP-SAT model; the fields are its variables, `on[g][d]` of group g on device d."""

    def __init__(self, problem: Problem, unit_s: float, hint: Int[np.ndarray, "N"] | None) -> None:
        self.problem, self.unit_s = problem, unit_s
        self.model = cp_model_library().CpModel()
        cpu = is_cpu(problem)
        self.accelerators, self.cpus = np.flatnonzero(~cpu).tolist(), np.flatnonzero(cpu).tolist()
        self.work = ticks(np.where(problem.allowed, problem.compute_s, np.inf), unit_s)
        self.send = ticks(sent_s(problem), unit_s)
        self.on = place_groups(self.model, problem, hint)
        self._owners()
        self._ladder()
        self._times()

    def _owners(self) -> None:
        """`owner[b][i]`: accelerator i runs block b; `inside[v][b]`: op v is in block b."""
        model, count, group = self.model, len(self.accelerators), self.problem.group.tolist()
        if self._are_equal():
            self.owner: list[list[Any]] = np.eye(count, dtype=bool).tolist()
            self.inside = [[self.on[g][a] for a in self.accelerators] for g in group]
            return
        self.owner = [[model.new_bool_var("") for _ in range(count)] for _ in range(count)]
        for row in (*self.owner, *zip(*self.owner, strict=True)):
            model.add_exactly_one(row)
        self.inside = [[model.new_bool_var("") for _ in range(count)] for _ in group]
        for here, g in zip(self.inside, group, strict=True):
            model.add_exactly_one([*here, *(self.on[g][c] for c in self.cpus)])
            for b, i in np.ndindex(count, count):
                both = [here[b].negated(), self.owner[b][i].negated()]
                model.add_bool_or([*both, self.on[g][self.accelerators[i]]])

    def _are_equal(self) -> bool:
        a, cluster = self.accelerators, self.problem.cluster
        traits = (self.work, self.problem.allowed, cluster.memory_bytes, cluster.pool)
        if len(self.problem.held_on) > 1 or not a:
            return False
        return bool(same(*(trait[..., a] for trait in traits)).all())

    def _ladder(self) -> None:
        """`at_most[v][t]`: the position of v is at most t."""
        model, last = self.model, 2 * len(self.accelerators)
        at_most = [[*(model.new_bool_var("") for _ in range(last)), 1] for _ in self.inside]
        for here, row in zip(self.inside, at_most, strict=True):
            for t in range(last - 1):
                model.add_implication(row[t], row[t + 1])
            for b, literal in enumerate(here):
                model.add(literal == row[2 * b + 1] - row[2 * b])
        for u, v in sorted(set(zip(*(x.tolist() for x in self.problem.graph.edges), strict=True))):
            for t in range(last):
                model.add_implication(at_most[v][t], at_most[u][t])

    def _times(self) -> None:
        model, problem, group = self.model, self.problem, self.problem.group.tolist()
        n, blocks = problem.num_ops, range(len(self.accelerators))
        fastest = np.minimum(self.work.min(axis=1), TICKS)
        earliest = np.minimum(earliest_ends(problem, fastest), TICKS)
        self.path = int(earliest.max(initial=0))
        finish = [model.new_int_var(int(earliest[v]), TICKS, "") for v in range(n)]
        start = [model.new_int_var(0, TICKS, "") for _ in blocks]
        end = [model.new_int_var(0, TICKS, "") for _ in blocks]
        latency = model.new_int_var(self.path, TICKS, "")
        before: list[set[int]] = [set() for _ in range(n)]
        for u, v in zip(*(ends.tolist() for ends in problem.graph.edges), strict=True):
            before[v].add(u)
        self._blocks_last(start, end, self._transfers(start, finish))
        for v in range(n):
            model.add(latency >= finish[v])
            for b in blocks:
                model.add(finish[v] >= end[b]).only_enforce_if(self.inside[v][b])
            for u in before[v]:
                model.add(finish[v] >= finish[u])
            for c in self.cpus:
                here, own = self.on[group[v]][c], int(self.work[v, c])
                if own > TICKS:
                    model.add(here == 0)
                    continue
                model.add(finish[v] >= own).only_enforce_if(here)
                for u in before[v]:
                    model.add(finish[v] >= finish[u] + own).only_enforce_if(here)
        model.minimize(latency)

    def _transfers(self, start: list[Any], finish: list[Any]) -> list[list[Any]]:
        """Ticks of the transfers of each block, which starts when all that it loads is there."""
        model, graph = self.model, self.problem.graph
        moved: list[list[Any]] = [[] for _ in start]
        readers: dict[int, set[int]] = {}
        for t, v in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
            readers.setdefault(t, set()).add(v)
        for t, known in readers.items():
            u = int(graph.producer[t])
            for b, made in enumerate(self.inside[u]):
                reads, writes = model.new_bool_var(""), model.new_bool_var("")
                for v in known:
                    model.add(reads >= self.inside[v][b] - made)
                    model.add(writes >= made - self.inside[v][b])
                model.add_at_most_one([reads, made])
                model.add_implication(writes, made)
                moved[b] += [int(self.send[t]) * reads, int(self.send[t]) * writes]
                model.add(start[b] >= finish[u]).only_enforce_if(reads)
        return moved

    def _blocks_last(self, start: list[Any], end: list[Any], moved: list[list[Any]]) -> None:
        """End every block when all its transfers and ops are done."""
        for b, i in np.ndindex(len(end), len(end)):
            work = self.work[:, self.accelerators[i]].tolist()
            own = [x * row[b] for x, row in zip(work, self.inside, strict=True) if 0 < x <= TICKS]
            took = self.model.add(end[b] >= start[b] + sum(moved[b]) + sum(own))
            took.only_enforce_if(self.owner[b][i])
            for x, g in zip(work, self.problem.group.tolist(), strict=True):
                if x > TICKS:
                    self.model.add(self.on[g][self.accelerators[i]] == 0)


_CPUS = -1  # in an order of calls: the CPUs together, each element on its fastest


def serial_start(problem: Problem) -> Int[np.ndarray, "N"] | None:
    """The best placement of serial plans, each accelerator called once; None where none fits."""
    contraction = contract(problem)
    plans = [_serial_plan(problem, contraction, order) for order in linear_orders(contraction)]
    best = min(plans, key=lambda device: _called_once_s(problem, device))
    return best if np.isfinite(_called_once_s(problem, best)) else None


def _called_once_s(problem: Problem, device: Int[np.ndarray, "N"] | None) -> float:
    """Latency; inf where memory overflows or an accelerator is called more than once."""
    if device is None:
        return np.inf
    block, called = blocks(problem, device), ~is_cpu(problem)[device]
    if len(np.unique(block[called])) > len(np.unique(device[called])):
        return np.inf
    return fitting_s(problem, device)


def _serial_plan(
    problem: Problem, contraction: Contraction, order: Int[np.ndarray, "M"]
) -> Int[np.ndarray, "N"] | None:
    """The plan of least total time along an order; accelerators are called in their order."""
    m = len(order)
    place = np.empty(m + 1, dtype=np.int64)
    place[order], place[m] = np.arange(m), m
    at = place[contraction.element]
    cpu = is_cpu(problem)
    moved_s = _moved_s(problem, at, m)
    on_cpu_s, home = _cpu_steps(problem, at, m, np.flatnonzero(cpu))
    on_cpus_s = np.full((m + 1, m + 1), np.inf)
    for i in range(m):
        on_cpus_s[i, i + 1 :] = np.cumsum(on_cpu_s[i:])

    def stage_s(a: int) -> Float[np.ndarray, "S S"]:
        return on_cpus_s if a == _CPUS else _call_s(problem, at, m, a, moved_s)

    calls = [_CPUS]
    for a in np.flatnonzero(~cpu).tolist():
        calls += [a, _CPUS]
    _, row = best_row(calls, stage_s)
    if m and not row:
        return None
    where = np.full(m + 1, problem.cluster.host)
    for start, stop, a in row:
        where[start:stop] = home[start:stop] if a == _CPUS else a
    return where[at].astype(np.int64)


def _cpu_steps(
    problem: Problem, at: Int[np.ndarray, "N"], m: int, cpus: Int[np.ndarray, "C"]
) -> tuple[Float[np.ndarray, "M"], Int[np.ndarray, "M"]]:
    """(seconds of each element on its best CPU, that CPU)."""
    if not len(cpus):
        return np.full(m, np.inf), np.zeros(m, dtype=np.int64)
    seconds = np.zeros((m + 1, len(cpus)))
    np.add.at(seconds, at, np.where(problem.allowed, problem.compute_s, np.inf)[:, cpus])
    return seconds[:m].min(axis=1), cpus[seconds[:m].argmin(axis=1)]


def _moved_s(problem: Problem, at: Int[np.ndarray, "N"], m: int) -> Float[np.ndarray, "S S"]:
    """[i, j]: seconds of the transfers between the places i to j - 1 and all others; inf where that
    is none."""
    graph, moved_s, place = problem.graph, sent_s(problem), np.arange(m + 1)
    made = at[graph.producer]
    following = np.full((graph.num_tensors, m + 1), m)  # the first reader at a place or later
    following[graph.use_tensor, at[graph.use_op]] = at[graph.use_op]
    following = np.minimum.accumulate(following[:, ::-1], axis=1)[:, ::-1]
    last = made.copy()
    np.maximum.at(last, graph.use_tensor, at[graph.use_op])
    loads, stores = np.zeros((2, m + 1, m + 2))
    t, i = np.nonzero((made[:, None] < place) & (following < m))
    np.add.at(loads, (i, following[t, i] + 1), moved_s[t])
    t, j = np.nonzero((made[:, None] < place) & (place <= last[:, None]))
    np.add.at(stores, (made[t], j), moved_s[t])
    total = loads.cumsum(axis=1) + stores[::-1].cumsum(axis=0)[::-1]
    return np.where(np.tri(m + 1, dtype=bool), np.inf, total[:, : m + 1])


def _call_s(
    problem: Problem, at: Int[np.ndarray, "N"], m: int, a: int, moved_s: np.ndarray
) -> Float[np.ndarray, "S S"]:
    """[i, j]: seconds of a call of accelerator a for the places i to j - 1; inf where it cannot."""
    work_s = np.zeros(m + 1)
    np.add.at(work_s, at, np.where(problem.allowed[:, a], problem.compute_s[:, a], np.inf))
    barred = np.concatenate([[0], np.cumsum(~np.isfinite(work_s[:m]))])
    done_s = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(work_s[:m]), work_s[:m], 0.0))])
    held = np.zeros(m + 1)
    np.add.at(held, at, problem.graph.weight_bytes.astype(float))
    bytes_ = np.concatenate([[0.0], np.cumsum(held[:m])])
    cost_s = moved_s + done_s[None] - done_s[:, None]
    room = float(problem.cluster.memory_bytes[a])
    cannot = (barred[None] > barred[:, None]) | (bytes_[None] - bytes_[:, None] > room)
    return np.where(cannot, np.inf, cost_s)
