"""Fewer cuts where they cost next to nothing.

A simulator knows costs to a few percent at best, so that differences far below that are not real,
while every transfer and every piece of a cut model costs a runtime something that it does not know.
So of the placements within a share of the best (`Search.simplicity`) the one with the fewest
transfers and pieces is taken: from those that a method has seen, and from the results of a greedy
walk from the best of them. Of equal ones the faster, of equally fast ones the one whose fullest
device is emptiest is taken; and where a device is nearly full, ops at the borders of its parts move
on, within the share, since runtimes need memory that no plan knows of.

Axes: N ops, T tensors, D devices, K moves.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int

from gdp.base.clock import Clock
from gdp.cluster.types import NEARLY_FULL, fullness
from gdp.graph.groups import components, distinct, lists
from gdp.methods.base import Answer, Assignment
from gdp.methods.heuristics.simple import single_assignments
from gdp.methods.scoring import Evaluated, score_all
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.sim.objectives import objective_of, value_text
from gdp.sim.score import score, score_of, values
from gdp.sim.segments import segments

OPS_SIMULATED, OPS_SWEPT = 2_000_000, 500_000
"""Ops that a simplification may simulate and look at in all, about a second; counted, so that it
repeats."""
LISTED_OP_S = 8e-6
"""Seconds of an idle core in which an op and what it reads and makes are listed, roughly."""
_LEAST, _MOST = 64, 2000
_FRONT = 5  # moves kept of one island towards one device
_AT_ONCE = 256
_ROUNDS = 8  # of moves off the fullest device
Option = TypeVar("Option")
_NOTABLY_EMPTIER = 0.002  # of the memory


def simplify(
    problem: Problem,
    best: Assignment,
    tolerance: float,
    seen: Sequence[Assignment] = (),
    evaluations: int | None = None,
    clock: Clock | None = None,
) -> tuple[Evaluated, Evaluated]:
    """(placement of fewest transfers and pieces within `tolerance` of the best one's value, the
    best), of which the first knows all evaluations.

    Never with more transfers or more pieces than the best, never infeasible, and the same at every
    call. `seen` are other placements that are known. At most `evaluations` are simulated (by
    default `OPS_SIMULATED` ops in all), and until the clock is over.
    """
    budget = _Budget(problem, evaluations, clock)
    (top,) = _fitting(problem, [best], budget)
    most_s = top.value_s * (1.0 + tolerance)
    within = [
        plan
        for plan in _fitting(problem, [*single_assignments(problem), *seen], budget, most_s)
        if _no_more(plan, top)
    ]
    candidates = [top, *within]
    simplest = min(candidates, key=_complexity)
    for start in [top] if simplest is top else [simplest, top]:
        candidates.append(_walk(problem, start, most_s, budget))
    least = min(map(_complexity, candidates))
    equal = [plan for plan in candidates if _complexity(plan) == least]
    plan = equal[0] if len(equal) == 1 else min(equal, key=lambda p: _fullest(problem, p)[0])
    plan = _emptied(problem, plan, most_s, budget)
    return replace(plan, evaluations=budget.used), top


def simpler(
    problem: Problem,
    answer: Answer,
    simplicity: float,
    evaluations: int | None,
    clock: Clock | None = None,
) -> Answer:
    """A method's answer, or the simplest placement within a share `simplicity` of it, with a note
    of its cost; of those tried before the clock is over, or, where a search has `evaluations`,
    by counted work."""
    best = answer.assignment
    # Of an objective with programs of its own nothing is given away: optima are compared.
    if best is None or simplicity == 0 or not objective_of(problem).general:
        return answer
    if best.teams:
        return answer  # cut by the pipelines' program, into as few stages as it has teams for
    if not score_of(problem, best).feasible:
        return answer
    plan, top = simplify(problem, best, simplicity, answer.evaluated, evaluations, clock)
    answer = replace(answer, evaluations=answer.evaluations + plan.evaluations)
    (full, _), (was_full, d) = _fullest(problem, plan), _fullest(problem, top)
    emptier = was_full > NEARLY_FULL and full < was_full
    if _complexity(plan) >= _complexity(top) and not emptier:
        return answer
    share = plan.value_s / top.value_s - 1.0 if top.value_s > 0 else 0.0
    cost = f"costs {share:.2%}" if share > 0 else "costs nothing"
    done = []
    if plan.transfers + plan.pieces < top.transfers + top.pieces:
        done.append(
            f"simplified to {plan.pieces} pieces and {plan.transfers} transfers from {top.pieces} "
            f"and {top.transfers}"
        )
    if emptier:
        name = problem.cluster.device_names[d]
        done.append(f"evened out: the fullest device {full:.0%} full, not {name} {was_full:.0%}")
    note = (
        f"{'; '.join(done) or 'of equally simple placements the faster one'}, which {cost}: "
        f"simplicity 0 answers {value_text(problem, top.value_s)}"
    )
    return replace(
        answer,
        assignment=plan.assignment,
        proven_optimal=answer.proven_optimal and share <= 0,
        notes=(*answer.messages, note),
        simplicity_cost=max(0.0, share),
    )


def _complexity(plan: Evaluated) -> tuple[int, float]:
    """Smaller is simpler, then faster."""
    return plan.transfers + plan.pieces, plan.value_s


def _counted(problem: Problem, plan: Evaluated) -> Evaluated:
    """The placement with its transfers and pieces."""
    device = plan.assignment.device
    transfers, pieces = count_transfers(problem, device), count_pieces(problem, device)
    return replace(plan, transfers=transfers, pieces=pieces)


class _Budget:
    """Remaining simulations, and ops that may still be examined."""

    def __init__(
        self, problem: Problem, evaluations: int | None, clock: Clock | None = None
    ) -> None:
        by_size = max(_LEAST, min(_MOST, OPS_SIMULATED // problem.num_ops))
        self.limit = by_size if evaluations is None else min(by_size, evaluations)
        self.used = 0
        self.sweeps = OPS_SWEPT
        self.clock = clock or Clock(None)

    @property
    def left(self) -> int:
        """Simulations that may still be made."""
        return 0 if self.clock.is_over() else max(0, self.limit - self.used)

    def lists_ops(self, problem: Problem) -> bool:
        """True where the seconds left are enough to list all ops and tensors, before any move."""
        limit_s = self.clock.limit_s()
        return limit_s is None or limit_s > LISTED_OP_S * problem.num_ops


def _no_more(plan: Evaluated, than: Evaluated) -> bool:
    return plan.transfers <= than.transfers and plan.pieces <= than.pieces


def _fitting(
    problem: Problem, assignments: Iterable[Assignment], budget: _Budget, most_s: float = np.inf
) -> list[Evaluated]:
    """Placements that fit, keep the constraints and take at most `most_s`, each once."""
    kept: dict[bytes, Assignment] = {}
    ops = np.arange(problem.num_ops)
    for assignment in assignments:
        if problem.allowed[ops, assignment.device].all():
            kept.setdefault(assignment.device.astype(np.int64).tobytes(), assignment)
    scored = score_all(problem, list(kept.values())[: max(1, budget.left)])
    budget.used += len(scored)
    return [
        _counted(problem, entry)
        for entry in scored
        if entry.overflow_bytes == 0 and entry.value_s <= most_s
    ]


def count_transfers(problem: Problem, device: Int[np.ndarray, "N"]) -> int:
    """Tensors that leave the device that makes them, once per device they are sent to."""
    graph = problem.graph
    there, here = device[graph.use_op], device[graph.producer[graph.use_tensor]]
    key = (graph.use_tensor * problem.num_devices + there)[there != here]
    return len(distinct(key))


def count_pieces(problem: Problem, device: Int[np.ndarray, "N"]) -> int:
    """The fewest sub-models that run the placement, without the model's inputs and outputs."""
    return len(distinct(segments(problem.graph, device)[~problem.graph.is_io]))


def _walk(problem: Problem, start: Evaluated, most_s: float, budget: _Budget) -> Evaluated:
    """The plan after moves that each leave fewer transfers, the cheapest first."""
    now = start
    while budget.left > 0 and budget.lists_ops(problem):
        before = now
        device = now.assignment.device
        options = list(_moves(problem, device, budget))[: budget.left]
        if not options:
            break
        # By seconds lost per transfer saved.
        rated: list[tuple[float, int]] = []
        for first in range(0, len(options), _AT_ONCE):
            some = options[first : first + _AT_ONCE]
            rated += [
                (max(0.0, plan.value_s - now.value_s) / some[i].saved, first + i)
                for i, plan in _simulated(problem, now, some, most_s, budget)
            ]
        for _, k in sorted(rated):
            if budget.left <= 0:
                break
            now = _moved(problem, now, options[k], most_s, budget)
        if now is before:
            break
    return now


class _Move(NamedTuple):
    """Ops of one device that move to another together."""

    ops: Int[np.ndarray, "M"]
    source: int
    target: int
    saved: int  # transfers


def _simulated(
    problem: Problem, now: Evaluated, moves: list[_Move], most_s: float, budget: _Budget
) -> Iterator[tuple[int, Evaluated]]:
    """(number of a move, the plan with it) for the moves that fit and take at most `most_s`."""
    devices = np.repeat(now.assignment.device[None], len(moves), axis=0)
    for row, move in zip(devices, moves, strict=True):
        row[move.ops] = move.target
    value_s, overflow = values(problem, devices, now.assignment.rank)
    budget.used += len(moves)
    for i in np.flatnonzero((overflow == 0) & (value_s <= most_s)).tolist():
        yield i, Evaluated(Assignment(devices[i], now.assignment.rank), 0, float(value_s[i]))


def _moved(
    problem: Problem, now: Evaluated, move: _Move, most_s: float, budget: _Budget
) -> Evaluated:
    """The plan with this move, or as it was where that is not simpler or too slow."""
    device = now.assignment.device.copy()
    if (device[move.ops] != move.source).any():
        return now  # an earlier move has taken some of them
    device[move.ops] = move.target
    if count_transfers(problem, device) >= now.transfers:
        return now
    for _, plan in _simulated(problem, now, [move], most_s, budget):
        moved = _counted(problem, plan)
        return moved if moved.pieces <= now.pieces else now
    return now


def _fullest(problem: Problem, plan: Evaluated) -> tuple[float, int]:
    """Share of its memory that the fullest device holds, and which device it is."""
    scored = score(problem, plan.assignment.device, plan.assignment.rank)
    shares = fullness(problem.cluster, scored.peak_bytes.tolist())
    return max(shares), shares.index(max(shares))


def _emptied(problem: Problem, plan: Evaluated, most_s: float, budget: _Budget) -> Evaluated:
    """The plan after moves off its nearly full device that add no transfers or pieces."""
    now, (share, fullest) = plan, _fullest(problem, plan)
    for _ in range(_ROUNDS):
        if share <= NEARLY_FULL or budget.left <= 0 or not budget.lists_ops(problem):
            break
        device = now.assignment.device
        options = [m for m in _moves(problem, device, budget, saved=0) if m.source == fullest]
        options = _spread(options, min(_AT_ONCE, budget.left))
        if not options:
            break
        tried = []
        for i, plan in _simulated(problem, now, options, most_s, budget):
            moved = _counted(problem, plan)
            if _no_more(moved, now):
                budget.used += 1
                tried.append((*_fullest(problem, moved), i, moved))
        if not tried or min(tried)[0] >= share - _NOTABLY_EMPTIER:
            break
        share, fullest, _, now = min(tried)
    return now


def _spread(options: list[Option], most: int) -> list[Option]:
    """At most so many of the options, evenly over their order."""
    if len(options) <= most:
        return options
    return [options[i] for i in np.linspace(0, len(options) - 1, most).round().astype(int)]


def _moves(
    problem: Problem, device: Int[np.ndarray, "N"], budget: _Budget, saved: int = 1
) -> Iterator[_Move]:
    """Whole islands, and their first or last ops in topological order, to a device that they
    exchange tensors with; only where at least `saved` transfers fewer are left. An island is a
    connected part of one device's ops; small ones come first."""
    count = _Counting(problem, device)
    for groups in sorted(_islands(problem, device), key=len):
        if budget.sweeps <= 0 or budget.clock.is_over():
            return
        source = int(device[count.group_ops[groups[0]][0]])
        for target in sorted(count.neighbours(groups, source)):
            free = [g for g in groups if problem.group_allowed[g, target]]
            budget.sweeps -= 2 * len(free)
            for order in (free, free[::-1]):
                yield from count.sweep(order, source, target, saved)


def _islands(problem: Problem, device: Int[np.ndarray, "N"]) -> list[list[int]]:
    """The groups of each island in topological order, islands by their first group."""
    graph, group = problem.graph, problem.group
    src, dst = graph.edges
    same = (device[src] == device[dst]) & ~graph.is_io[src] & ~graph.is_io[dst]
    size = problem.num_groups
    label = components(group[src[same]], group[dst[same]], size)
    islands: dict[int, list[int]] = {}
    first_op = np.unique(group, return_index=True)[1]
    fixed = np.zeros(size, dtype=bool)
    fixed[group[graph.is_io]] = True
    for g in np.argsort(first_op, kind="stable").tolist():
        if not fixed[g]:
            islands.setdefault(int(label[g]), []).append(g)
    return list(islands.values())


class _Counting:
    """Counter of the transfers left when groups move one after the other: O(degree) a move."""

    def __init__(self, problem: Problem, device: Int[np.ndarray, "N"]) -> None:
        a, graph = arrays_of(problem), problem.graph
        self.device: list[int] = device.tolist()
        self.producer: list[int] = graph.producer.tolist()
        self.reads = _split(a.in_start, a.in_tensor)
        self.makes = _split(a.out_start, a.out_tensor)
        self.readers = _split(a.use_start, a.use_op)
        self.group_ops = _split(*lists(problem.group, problem.num_groups))
        readers = np.zeros((graph.num_tensors, problem.num_devices), dtype=np.int64)
        np.add.at(readers, (graph.use_tensor, device[graph.use_op]), 1)
        self.count: list[list[int]] = readers.tolist()  # readers of a tensor on a device

    def neighbours(self, groups: list[int], source: int) -> set[int]:
        """The devices that these groups exchange tensors with."""
        devices: set[int] = set()
        for g in groups:
            for op in self.group_ops[g]:
                devices.update(self.device[self.producer[t]] for t in self.reads[op])
                devices.update(self.device[r] for t in self.makes[op] for r in self.readers[t])
        return devices - {source}

    def sweep(self, groups: list[int], source: int, target: int, saved: int = 1) -> Iterator[_Move]:
        """The first k groups moved to the target, for the few k that leave ever fewer transfers;
        where none have to be `saved`, for all k that leave no more."""
        change, least, front = 0, 0, []
        for k, g in enumerate(groups):
            change += sum(self._move(op, source, target) for op in self.group_ops[g])
            if change < least or (saved == 0 and change <= 0):
                least = min(least, change)
                front.append((k + 1, -change))
        for g in reversed(groups):
            for op in reversed(self.group_ops[g]):
                self._move(op, target, source)
        for k, fewer in _spread(front, _FRONT) if saved > 0 else front:
            ops = [op for g in groups[:k] for op in self.group_ops[g]]
            yield _Move(np.array(ops, dtype=np.int64), source, target, fewer)

    def _move(self, op: int, source: int, target: int) -> int:
        """Moves an op; how many transfers there are more."""
        more = 0
        for t in self.reads[op]:
            count, home = self.count[t], self.device[self.producer[t]]
            count[source] -= 1
            count[target] += 1
            more += (count[target] == 1 and home != target) - (
                count[source] == 0 and home != source
            )
        for t in self.makes[op]:
            count = self.count[t]
            more += (count[source] > 0) - (count[target] > 0)
        self.device[op] = target
        return more


def _split(start: Int[np.ndarray, "S"], items: Int[np.ndarray, "M"]) -> list[list[int]]:
    bounds, flat = start.tolist(), items.tolist()
    return [flat[a:b] for a, b in itertools.pairwise(bounds)]
