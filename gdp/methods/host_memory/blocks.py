"""Single-sample latency with a limited number of blocks per accelerator, as a CP-SAT model.

Blocks stand in an order in which every arc between blocks leads forward; one always exists, so the
order itself breaks the symmetry of equal accelerators. Block b is position 2b + 1 of a ladder, ops
on CPUs are at even positions, and positions never fall along an edge: that makes blocks convex and
prevents deadlock. Along the ladder

    start(b) >= finish(u) for every tensor that b reads and op u outside b makes
    finish(b) = start(b) + sent_s of b's inputs + compute_s + sent_s of the outputs others read

(Tarnawski et al. 2020, arXiv 2006.16423, appendix: contiguous with one block per accelerator, which
is an accelerator's position; with more, each block has an owner that it waits for.)

First answers (`contiguous_start`) are serial calls, then small moves that the evaluator accepts.
Along a linear order of the elements, a call of an accelerator covers an interval, ops between calls
are on CPUs, and everything runs one after another. The best such plan is a dynamic program; it is
an upper bound of the latency, since independent calls really overlap.

Axes: N ops, T tensors, B blocks, A accelerators, G groups, M elements, S = M + 1 places between.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gdp.base.clock import Clock
from gdp.bounds.linear_program import PlacementSolution
from gdp.bounds.work import earliest_ends
from gdp.graph.op_graph import topological_order
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.exact.cp_sat import (
    TICKS,
    cp_model_library,
    fit_weights,
    run_cp,
    ticks,
)
from gdp.methods.exact.method import NO_TIME, ExactProgram, is_counted
from gdp.methods.host_memory.load import (
    block_latency_s,
    block_values,
    blocks,
    is_cpu,
    overflow,
    sent_s,
)
from gdp.methods.host_memory.program import answered
from gdp.methods.intervals import best_row
from gdp.methods.pipeline.elements import Contraction, contract, linear_orders, random_order
from gdp.methods.shares import EXACT_BLOCK_START_SHARE
from gdp.problem.problem import Problem
from gdp.problem.symmetry import same


def least_block_latency(problem: Problem, search: Search, blocks_per_device: int = 1) -> Answer:
    """The placement of least latency with at most some blocks on every accelerator."""
    clock = Clock(search.seconds)
    if search.start is not None:
        start = np.array(search.start.device)
    else:
        first = Clock(_START_S) if search.seconds is None else clock.part(EXACT_BLOCK_START_SHARE)
        start = contiguous_start(problem, first, search.seed)

    def latency_s(device: np.ndarray | None, rank: np.ndarray | None) -> float:
        if device is None:
            return np.inf
        value_s, overflow = block_values(problem, device[None], rank)
        return float(value_s[0]) if overflow[0] == 0 else np.inf

    best, best_s = start, latency_s(start, None)
    if best is not None and best_s == 0.0:
        return answered(Assignment(best), 0.0, 0.0, NO_TIME, complete=True)
    rank: Int[np.ndarray, "N"] | None = None
    upper_s = best_s if np.isfinite(best_s) else _everything_s(problem)
    left_s = None if search.seconds is None else clock.remaining_s()
    limits = left_s, search.seed
    solution = solve_blocks(
        problem, blocks_per_device, upper_s, *limits, hint=start, counted=is_counted(search)
    )
    if (solved_s := latency_s(solution.device, solution.rank)) < best_s:
        best, rank, best_s = solution.device, solution.rank, solved_s
    calls = "once" if blocks_per_device == 1 else f"{blocks_per_device} times"
    by = f"CP-SAT; every accelerator is called at most {calls}"
    assignment = None if best is None or np.isinf(best_s) else Assignment(best, rank)
    bound_s = min(solution.bound_s, best_s)
    overflows = solution.device is not None and np.isinf(solved_s)
    return answered(assignment, best_s, bound_s, by, solution.is_complete and not overflows)


LEAST_BLOCK_LATENCY = ExactProgram(least_block_latency, "CP-SAT")


def _everything_s(problem: Problem) -> float:
    """Upper bound of a latency without idling: all work on slowest devices, all tensors twice."""
    compute_s = np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0).max(axis=1)
    sent = np.bincount(problem.graph.use_tensor, minlength=problem.graph.num_tensors)
    return float(compute_s.sum() + ((sent + 1.0) * sent_s(problem)).sum()) or 1.0


def solve_blocks(
    problem: Problem,
    blocks_per_device: int,
    upper_s: float,
    seconds: float | None,
    seed: int,
    hint: Int[np.ndarray, "N"] | None = None,
    counted: bool = False,
) -> PlacementSolution:
    """The fastest placement of at most some blocks per accelerator, up to `upper_s`.

    Args:
        problem: Of block latency.
        blocks_per_device: The limit; with 1 an accelerator's position is its block.
        upper_s: Value of a known placement, or more.
        seconds: For the solver; None: no limit.
        seed: Of the solver.
        hint: Device of each op, where the search starts.
        counted: Limit the solver's work instead of its seconds.
    """
    model = _Model(problem, blocks_per_device, upper_s / TICKS)
    if hint is not None:
        model.hint(hint)
    solution = run_cp(model.model, seconds, seed, counted)
    # Where time ran out before a first bound, the longest path still holds.
    bound_s = max(model.path, solution.bound) * model.unit_s
    if solution.solver is None:
        return PlacementSolution(None, min(bound_s, upper_s), solution.is_complete)
    device, rank = model.read(solution.solver)
    return PlacementSolution(device, min(bound_s, upper_s), solution.is_complete, rank)


class _Model:
    """The CP-SAT model; the fields are its variables."""

    def __init__(self, problem: Problem, blocks_per_device: int, unit_s: float) -> None:
        cp_model = cp_model_library()
        self.problem, self.unit_s = problem, unit_s
        self.model = cp_model.CpModel()
        cpu = is_cpu(problem)
        self.accelerators = np.flatnonzero(~cpu)
        self.cpus = np.flatnonzero(cpu)
        self.work = ticks(np.where(problem.allowed, problem.compute_s, np.inf), unit_s)
        self.send = ticks(sent_s(problem), unit_s)
        self.num_blocks = blocks_per_device * len(self.accelerators)
        self.owned = blocks_per_device == 1 and self._are_equal()
        self._ladder()
        self.owner = self._owners(blocks_per_device)
        self._groups()
        self._memory()
        self._times()

    def _are_equal(self) -> bool:
        a, cluster = self.accelerators, self.problem.cluster
        traits = (self.work, self.problem.allowed, cluster.memory_bytes, cluster.pool)
        if len(self.problem.held_on) > 1:
            return False
        return len(a) > 0 and bool(same(*(trait[..., a] for trait in traits)).all())

    def _ladder(self) -> None:
        """`at_most[v][t]`: position of v <= t; `inside[v][b]`: v in block b; `on_cpu[v]`."""
        model, n = self.model, self.problem.num_ops
        last = 2 * self.num_blocks
        self.at_most: list[list[Any]] = [
            [model.new_bool_var("") for _ in range(last)] + [1] for _ in range(n)
        ]
        self.inside: list[list[Any]] = [
            [model.new_bool_var("") for _ in range(self.num_blocks)] for _ in range(n)
        ]
        self.on_cpu = [model.new_bool_var("") for _ in range(n)]
        for v in range(n):
            for t in range(last - 1):
                model.add_implication(self.at_most[v][t], self.at_most[v][t + 1])
            for b in range(self.num_blocks):
                here = self.at_most[v][2 * b + 1] - self.at_most[v][2 * b]
                model.add(self.inside[v][b] == here)
            model.add_exactly_one([*self.inside[v], self.on_cpu[v]])
            if not self.problem.allowed[v, self.cpus].any():
                model.add(self.on_cpu[v] == 0)
            if not self.problem.allowed[v, self.accelerators].any():
                model.add(self.on_cpu[v] == 1)
        for u, v in sorted(set(zip(*(x.tolist() for x in self.problem.graph.edges), strict=True))):
            for t in range(last):
                model.add_implication(self.at_most[v][t], self.at_most[u][t])

    def _owners(self, blocks_per_device: int) -> list[list[Any]]:
        """`owner[b][i]`: accelerator i runs block b; constants where blocks are accelerators."""
        model, count = self.model, len(self.accelerators)
        if self.owned:
            return [[int(i == b) for i in range(count)] for b in range(count)]
        owner = [[model.new_bool_var("") for _ in range(count)] for _ in range(self.num_blocks)]
        for b in range(self.num_blocks):
            model.add_at_most_one(owner[b])
        for i in range(count):
            model.add(sum(owner[b][i] for b in range(self.num_blocks)) <= blocks_per_device)
        if self._are_equal():
            for b in range(self.num_blocks):
                for i in range(1, count):
                    before = [owner[e][i - 1] for e in range(b)]
                    model.add_bool_or([*before, owner[b][i].negated()])
        for v in range(self.problem.num_ops):
            for b in range(self.num_blocks):
                model.add_bool_or([*owner[b], self.inside[v][b].negated()])
                for i, a in enumerate(self.accelerators):
                    if not self.problem.allowed[v, a]:
                        model.add_at_most_one([owner[b][i], self.inside[v][b]])
        return owner

    def _groups(self) -> None:
        """`holds[g][i]`: accelerator i holds group g."""
        model, count = self.model, len(self.accelerators)
        groups = range(self.problem.num_groups)
        first = [int(np.flatnonzero(self.problem.group == g)[0]) for g in groups]
        self._cpu_groups(first)
        for v, g in enumerate(self.problem.group.tolist()):
            if v != first[g]:
                model.add(self.on_cpu[v] == self.on_cpu[first[g]])
        if self.owned:
            self.holds = [self.inside[first[g]] for g in groups]
            for v, g in enumerate(self.problem.group.tolist()):
                for b in range(self.num_blocks if v != first[g] else 0):
                    model.add(self.inside[v][b] == self.inside[first[g]][b])
            return
        self.holds = [[model.new_bool_var("") for _ in range(count)] for _ in groups]
        for g in groups:
            model.add_exactly_one([*self.holds[g], self.on_cpu[first[g]]])
        for v, g in enumerate(self.problem.group.tolist()):
            for b in range(self.num_blocks):
                for i in range(count):
                    clause = [self.inside[v][b].negated(), self.owner[b][i].negated()]
                    model.add_bool_or([*clause, self.holds[g][i]])

    def _cpu_groups(self, first: list[int]) -> None:
        """`cpu_holds[g][j]`: CPU j holds group g; empty where any op may use its fastest CPU.

        CPUs have no queues, so which one it is matters for memory and for groups alone.
        """
        self.cpu_holds: list[list[Any]] = []
        problem, model = self.problem, self.model
        work = self.work[:, self.cpus]
        total = int(problem.graph.weight_bytes.sum())
        roomy = bool((problem.cluster.memory_bytes[self.cpus] >= total).all())
        if roomy and (problem.num_groups == problem.num_ops or (work == work[:, :1]).all()):
            return
        for v in first:
            may = problem.group_allowed[problem.group[v], self.cpus].tolist()
            row = [model.new_bool_var("") if x else 0 for x in may]
            model.add(sum(row) == self.on_cpu[v])
            self.cpu_holds.append(row)

    def _on_cpus(self, v: int) -> list[tuple[Any, int]]:
        """(literal, ticks) of op v on each CPU that it may use."""
        if not self.cpu_holds:
            return [(self.on_cpu[v], int(self.work[v, self.cpus].min(initial=2 * TICKS)))]
        row = self.cpu_holds[self.problem.group[v]]
        return [(row[j], int(self.work[v, c])) for j, c in enumerate(self.cpus)]

    def _memory(self) -> None:
        """Fit weights into every device, and into every memory that devices share."""
        here = {int(a): [row[i] for row in self.holds] for i, a in enumerate(self.accelerators)}
        if self.cpu_holds:
            here |= {int(c): [row[j] for row in self.cpu_holds] for j, c in enumerate(self.cpus)}
        fit_weights(self.model, self.problem, here)

    def _times(self) -> None:
        model, problem = self.model, self.problem
        n, blocks = problem.num_ops, range(self.num_blocks)
        fastest = np.minimum(self.work.min(axis=1), TICKS)
        latest = np.minimum(earliest_ends(problem, fastest), TICKS)
        self.path = int(latest.max(initial=0))
        finish = [model.new_int_var(int(latest[v]), TICKS, "") for v in range(n)]
        start = [model.new_int_var(0, TICKS, "") for _ in blocks]
        end = [model.new_int_var(0, TICKS, "") for _ in blocks]
        latency = model.new_int_var(int(latest.max(initial=0)), TICKS, "")
        moved: list[list[Any]] = [[] for _ in blocks]
        src, dst = problem.graph.edges
        readers: dict[int, set[int]] = {}
        for t, v in zip(problem.graph.use_tensor.tolist(), dst.tolist(), strict=True):
            readers.setdefault(t, set()).add(v)
        for t, known in readers.items():
            u = int(problem.graph.producer[t])
            for b in blocks:
                reads, writes = model.new_bool_var(""), model.new_bool_var("")
                for v in known:
                    model.add(reads >= self.inside[v][b] - self.inside[u][b])
                    model.add(writes >= self.inside[u][b] - self.inside[v][b])
                model.add_at_most_one([reads, self.inside[u][b]])
                model.add_implication(writes, self.inside[u][b])
                if self.send[t]:
                    moved[b] += [int(self.send[t]) * reads, int(self.send[t]) * writes]
                model.add(start[b] >= finish[u]).only_enforce_if(reads)
        self._blocks_last(start, end, moved)
        for v in range(n):
            for b in blocks:
                model.add(finish[v] >= end[b]).only_enforce_if(self.inside[v][b])
            model.add(latency >= finish[v])
        for u, v in set(zip(src.tolist(), dst.tolist(), strict=True)):
            for here, own in self._on_cpus(v):
                model.add(finish[v] >= finish[u] + min(own, TICKS)).only_enforce_if(here)
            model.add(finish[v] >= finish[u])
        for v in range(n):
            for here, own in self._on_cpus(v):
                if own > TICKS:
                    model.add(here == 0)
                elif own > 0:
                    model.add(finish[v] >= own).only_enforce_if(here)
        model.minimize(latency)

    def _blocks_last(self, start: list[Any], end: list[Any], moved: list[list[Any]]) -> None:
        """End every block when all its transfers and ops are done."""
        model, count = self.model, len(self.accelerators)
        for b in range(self.num_blocks):
            for i in [b] if self.owned else range(count):
                a = self.accelerators[i]
                own = [
                    int(self.work[v, a]) * self.inside[v][b]
                    for v in range(self.problem.num_ops)
                    if self.problem.allowed[v, a] and self.work[v, a]
                ]
                row = model.add(end[b] >= start[b] + sum(moved[b]) + sum(own))
                if not self.owned:
                    row.only_enforce_if(self.owner[b][i])
                    for e in range(b):
                        both = [self.owner[b][i], self.owner[e][i]]
                        model.add(start[b] >= end[e]).only_enforce_if(both)

    def hint(self, device: Int[np.ndarray, "N"]) -> None:
        """Start the search at a placement, if it has no more blocks than the model."""
        position, block_device = ladder_positions(self.problem, device)
        if len(block_device) > self.num_blocks:
            return
        for v, at in enumerate(position.tolist()):
            for t in range(2 * self.num_blocks):
                self.model.add_hint(self.at_most[v][t], at <= t)
            for b in range(self.num_blocks):
                self.model.add_hint(self.inside[v][b], at == 2 * b + 1)
            self.model.add_hint(self.on_cpu[v], at % 2 == 0)

    def read(self, solver: Any) -> tuple[Int[np.ndarray, "N"], Int[np.ndarray, "N"] | None]:
        """The devices, and ranks that tell blocks of one accelerator apart where there are any."""
        problem = self.problem
        device, rank = np.zeros((2, problem.num_ops), dtype=np.int64)
        for v in range(problem.num_ops):
            if solver.value(self.on_cpu[v]):
                allowed = problem.group_allowed[problem.group[v], self.cpus]
                if self.cpu_holds:
                    row = self.cpu_holds[problem.group[v]]
                    allowed = np.array([bool(solver.value(here)) for here in row])
                times = np.where(allowed, self.work[v, self.cpus], 4 * TICKS)
                device[v] = self.cpus[int(times.argmin())]
                continue
            b = next(b for b in range(self.num_blocks) if solver.value(self.inside[v][b]))
            rank[v] = b
            for i, a in enumerate(self.accelerators):
                if solver.value(self.owner[b][i]):
                    device[v] = a
        return device, None if self.owned else rank


def ladder_positions(
    problem: Problem, device: Int[np.ndarray, "N"]
) -> tuple[Int[np.ndarray, "N"], Int[np.ndarray, "B"]]:
    """(position of each op, device of each block): 2b + 1 in block b, even on a CPU."""
    block = blocks(problem, device)
    src, dst = (block[ends] for ends in problem.graph.edges)
    cut = src != dst
    src, dst = src[cut], dst[cut]
    order = topological_order(int(block.max()) + 1, src, dst)
    home = np.zeros(len(order), dtype=np.int64)
    home[block] = device
    before: list[list[int]] = [[] for _ in range(len(order))]
    for u, v in zip(src.tolist(), dst.tolist(), strict=True):
        before[v].append(u)
    cpu = is_cpu(problem)
    at = np.zeros(int(block.max()) + 1, dtype=np.int64)
    block_device: list[int] = []
    for b in order.tolist():
        if cpu[home[b]]:
            at[b] = max((int(at[u] + at[u] % 2) for u in before[b]), default=0)
        else:
            at[b] = 2 * len(block_device) + 1
            block_device.append(int(home[b]))
    return at[block], np.array(block_device, dtype=np.int64)


_START_S = 10.0  # where no limit is given
_MOST_ORDERS = 40
_CPUS = -1  # in an order of calls: the CPUs together, each element on its fastest
_STEPS_PER_OP, _MOST_STEPS = 1000, 200_000
_HOT, _COLD = 0.02, 1e-5  # shares of the latency


def contiguous_start(problem: Problem, clock: Clock, seed: int) -> Int[np.ndarray, "N"] | None:
    """A placement of few calls, each accelerator called once; None where no plan fits."""
    rng = np.random.default_rng(seed)
    contraction = contract(problem)
    best, best_s = None, np.inf
    orders = linear_orders(contraction)
    for i in range(_MOST_ORDERS):
        order = orders[i] if i < len(orders) else random_order(contraction, rng)
        device = _serial_plan(problem, contraction, order)
        if device is not None and (value_s := _called_once_s(problem, device)) < best_s:
            best, best_s = device, value_s
        if clock.elapsed_s() > 0.3 * (clock.seconds or np.inf):
            break
    return None if best is None else _anneal(problem, best, best_s, clock, rng)


def _called_once_s(problem: Problem, device: Int[np.ndarray, "N"]) -> float:
    """Latency; inf where memory overflows or an accelerator is called more than once."""
    if overflow(problem, device[None])[0] > 0:
        return np.inf
    block, called = blocks(problem, device), ~is_cpu(problem)[device]
    if len(np.unique(block[called])) > len(np.unique(device[called])):
        return np.inf
    return block_latency_s(problem, device, block)


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
    graph = problem.graph
    made = at[graph.producer]
    send_s = sent_s(problem)
    last = made.copy()
    np.maximum.at(last, graph.use_tensor, at[graph.use_op])
    by_reader = np.argsort(-at[graph.use_op], kind="stable")
    total = np.zeros((m + 1, m + 1))
    following = np.full(graph.num_tensors, m)  # first reader at place >= i
    by_place: list[list[int]] = [[] for _ in range(m + 1)]
    for e in by_reader.tolist():
        by_place[int(at[graph.use_op[e]])].append(int(graph.use_tensor[e]))
    for i in range(m - 1, -1, -1):
        following[by_place[i]] = i
        outside = (made < i) & (following < m)
        loads = np.bincount(following[outside] + 1, weights=send_s[outside], minlength=m + 1)
        total[i] += np.cumsum(loads[: m + 1])
    for j in range(1, m + 1):
        kept = (made < j) & (last >= j)
        stores = np.bincount(made[kept], weights=send_s[kept], minlength=m + 1)
        total[:, j] += np.cumsum(stores[::-1])[::-1][: m + 1]
    return np.where(np.tri(m + 1, dtype=bool), np.inf, total)


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


def _anneal(
    problem: Problem,
    device: Int[np.ndarray, "N"],
    value_s: float,
    clock: Clock,
    rng: np.random.Generator,
) -> Int[np.ndarray, "N"]:
    """The best placement found by moving groups to devices of their neighbours, or to others."""
    src, dst = problem.graph.edges
    group, now, now_s = problem.group, device.copy(), value_s
    best, best_s = device, value_s
    steps = min(_MOST_STEPS, _STEPS_PER_OP * problem.num_ops) if len(src) else 0
    for step in range(steps):
        if step % 64 == 0 and clock.is_over():
            break
        temperature = best_s * _HOT * (_COLD / _HOT) ** (step / steps)
        e = int(rng.integers(len(src)))
        u, v = (src[e], dst[e]) if rng.random() < 0.5 else (dst[e], src[e])
        to = int(now[u]) if rng.random() < 0.8 else int(rng.integers(problem.num_devices))
        if to == now[v] or not problem.group_allowed[group[v], to]:
            continue
        moved = now.copy()
        moved[group == group[v]] = to
        moved_s = _called_once_s(problem, moved)
        if moved_s <= now_s or rng.random() < np.exp((now_s - moved_s) / temperature):
            now, now_s = moved, moved_s
        if moved_s < best_s:
            best, best_s = moved.copy(), moved_s
    return best
