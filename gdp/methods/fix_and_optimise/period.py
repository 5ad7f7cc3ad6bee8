"""The period program in rounds: solve, look where the solution overflows, solve again.

The program is that of `gdp.bounds.loads` with whole placements, which is the simulator's period
exactly. Memory is there row by row: where a solution overflows a device, the row that it breaks is
added and the program solved again, until a solution fits. Tensors that a training pipeline keeps
for the stages that follow have no row, so there the program stays a relaxation. Each round is a
valid program, so its bound holds for every placement that fits; a solution that fits is simulated
like any other, and one that overflows a little is repaired and counts, too. A short search comes
first: the rounds look for something better than its answer.

With more than two devices the solver rarely gets through the whole program. Then most of the
seconds go to many short chains of annealing that cross the memory limits, and pairs of devices take
turns from the best of these: groups on other devices stay, and the pair is solved on its own.

Axes: G groups, D devices.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from gdp.base.clock import Clock
from gdp.bounds.linear_program import (
    UNIT,
    PlacementSolution,
    needless_renamings,
    read_solution,
)
from gdp.bounds.loads import (
    NO_POINTS,
    SeparationPoints,
    build_loads,
    least_group_seconds,
    load_program_size,
    more_points,
    placed_points,
)
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.fix_and_optimise.rounds import (
    free_region,
    group_devices,
    solve_in_rounds,
    solve_round,
    target_s,
)
from gdp.methods.repair import repair
from gdp.methods.scoring import Evaluated, best_of
from gdp.methods.search.chains import ChainLimits, anneal_from_hot_starts, multi_restart
from gdp.methods.shares import PERIOD_HOT_MOST_SHARE, PERIOD_HOT_SHARE, PERIOD_SEARCH_SHARE
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.problem.symmetry import classes_of, links_alike, same
from gdp.problem.ticks import send_time
from gdp.sim.objectives import memory_binds, objective_of

_SEARCHED = 30_000  # evaluations of each search that comes first, some tenths of a second
_HOT_CHAINS = ChainLimits(60, 24)
_ROUNDS = 10
_GAP = 5e-3  # relative; left open by a round
_NODES = 200  # of a round's search tree
_MOST_ENTRIES = 150_000  # of the matrix
_FEW_ENTRIES = 1_500  # up to here all devices at once are solved soon
_MOST_TURNS = 24
NOTHING = PlacementSolution(None, 0.0, False)


@dataclass(frozen=True, eq=False)
class PeriodRounds:
    """The state of the rounds: best placement, rows of memory, last solution."""

    best: Evaluated
    points: SeparationPoints = NO_POINTS
    solution: PlacementSolution = NOTHING  # of the last rounds, below their `upper_s`


@dataclass(frozen=True)
class RoundLimits:
    """Limits of a round. Nodes end it at the same place each time, seconds only end it."""

    relative_gap: float = 1e-6
    nodes: int | None = None
    seed: int = 0


def applies(problem: Problem) -> bool:
    """True for pipelines on links whose memory binds, if the program is not too large."""
    goal = objective_of(problem)
    return (
        goal.pipelined
        and problem.num_devices > 1
        and memory_binds(problem)
        and load_program_size(problem) <= _MOST_ENTRIES
    )


def period_fit(problem: Problem, search: Search) -> Answer:
    """The best pipeline of the program's rounds, from `search.start` or prior answers on."""

    def improve(first: Evaluated, clock: Clock) -> Evaluated:
        limits = RoundLimits(_GAP, _NODES, search.seed)
        few = Search(seed=search.seed, seconds=None, evaluations=_SEARCHED)
        first = multi_restart(problem, first, few, clock.part(PERIOD_SEARCH_SHARE))
        whole = problem.num_devices == 2 or load_program_size(problem) <= _FEW_ENTRIES
        hot = clock.part(PERIOD_HOT_SHARE if whole else PERIOD_HOT_MOST_SHARE)
        chains = ChainLimits() if whole else _HOT_CHAINS
        known = PeriodRounds(anneal_from_hot_starts(problem, first, search.seed, hot, chains))
        if known.best.key == (0, 0.0):  # of no time: nothing is below it
            return known.best
        if whole:
            return solve_rounds(problem, known, clock, limits).best
        return _by_pairs(problem, known, clock, limits).best

    return solve_in_rounds(problem, search, "period", improve)


def solve_rounds(
    problem: Problem,
    known: PeriodRounds,
    clock: Clock,
    limits: RoundLimits,
    may: Bool[np.ndarray, "G D"] | None = None,
    upper_s: float | None = None,
) -> PeriodRounds:
    """Solve and add rows of memory until a solution below `upper_s` fits or none is left.

    The solution is complete where the last round was and its placement fits; its bound is that of
    any round. With `may` both hold for those placements alone.

    Args:
        problem: Of a pipelined objective.
        known: The best placement, and the rows of memory so far.
        clock: Ends the rounds.
        limits: Of each round.
        may: Where groups may go; None: anywhere.
        upper_s: A little below the best placement's value by default.
    """
    upper_s = target_s(known.best) if upper_s is None else upper_s
    best, points, solution = known.best, known.points, NOTHING
    if upper_s <= 0.0:  # nothing takes less than nothing
        return PeriodRounds(best, points, PlacementSolution(None, 0.0, True))
    for _ in range(_ROUNDS):
        solved = solve_period(problem, upper_s, clock, points, limits, may=may)
        solution = replace(solved, bound_s=max(solution.bound_s, solved.bound_s))
        if solved.device is None:
            break
        placed = best_of(problem, [Assignment(solved.device[problem.group])])
        fits = placed.overflow_bytes == 0
        solution = replace(solution, is_complete=fits and solved.is_complete)
        fixed = placed if fits else repair(problem, placed, clock, limits.seed)
        count = best.evaluations + fixed.evaluations
        best = replace(min(best, fixed), evaluations=count)
        more = more_points(points, placed_points(problem, placed.assignment.device))
        stuck = len(more.op) == len(points.op)
        points = more
        if fits or stuck or clock.is_over():
            break
    return PeriodRounds(best, points, solution)


def solve_period(
    problem: Problem,
    upper_s: float,
    clock: Clock,
    points: SeparationPoints = NO_POINTS,
    limits: RoundLimits = RoundLimits(),
    *,
    may: Bool[np.ndarray, "G D"] | None = None,
) -> PlacementSolution:
    """The placement of least period below `upper_s`, with memory limited at the points.

    With `may` groups go where it says; else anywhere that renaming devices does not make needless.
    """
    work_s = least_group_seconds(problem)
    finite = np.isfinite(upper_s)
    unit_s = (upper_s if finite else _any_upper_s(problem, work_s)) / UNIT
    program = build_loads(problem, unit_s, points)
    if may is None:
        a = arrays_of(problem)
        alike = links_alike(problem) & same(work_s, a.memory_bytes, a.segment_s)
        may = ~needless_renamings(work_s, classes_of(alike))
    may = may & np.isfinite(work_s) & (work_s <= upper_s)
    gap, nodes = limits.relative_gap, limits.nodes
    solution = solve_round(program, may, upper_s / unit_s, clock, gap, nodes)
    return read_solution(solution, 0, program.shape, upper_s, 1.0 / unit_s)


def _any_upper_s(problem: Problem, work_s: Float[np.ndarray, "G D"]) -> float:
    """Upper bound of any period: all work and all transfers on the slowest devices and links."""
    a = arrays_of(problem)
    most_s = np.where(np.isfinite(work_s), work_s, 0.0).max(axis=1).sum()
    openings = float(a.segment_s.max(initial=0.0)) * problem.num_ops
    sent_s = a.latency_s.max() + a.sent_bytes / a.bytes_per_s.min()
    return float(most_s + openings + sent_s.sum() * problem.num_devices) or 1.0


def _by_pairs(
    problem: Problem, known: PeriodRounds, clock: Clock, limits: RoundLimits
) -> PeriodRounds:
    """Solve pairs of the busiest device with each other one, as long as one of them gains."""
    turns = 0
    gains = known.best.overflow_bytes == 0
    while gains:
        gains = False
        busy_s = _busy_s(problem, known.best.assignment)
        first = int(busy_s.argmax())
        for other in np.argsort(busy_s, kind="stable").tolist():
            if other == first:
                continue
            if turns >= _MOST_TURNS or clock.is_over():
                return known
            turns += 1
            home = group_devices(problem, known.best.assignment.device)
            groups = np.flatnonzero((home == first) | (home == other))
            may = free_region(problem, home, groups, np.array([first, other]))
            pair = solve_rounds(problem, known, clock, limits, may)
            gains = pair.best.value_s < known.best.value_s
            known = pair
            if gains:
                break
    return known


def _busy_s(problem: Problem, assignment: Assignment) -> Float[np.ndarray, "D"]:
    """Busy seconds of each device per sample: the largest of its ops, transfers in, and out."""
    a, device = arrays_of(problem), assignment.device
    busy_s = np.bincount(
        device, a.compute_s[np.arange(problem.num_ops), device], problem.num_devices
    )
    tensor = np.repeat(np.arange(len(a.producer)), np.diff(a.use_start))
    source, to = device[a.producer[tensor]], device[a.use_op]
    pairs = np.unique(np.stack([tensor, source, to])[:, source != to], axis=1)
    link = pairs[1], pairs[2]
    send_s = send_time(a.latency_s[link], a.sent_bytes[pairs[0]], a.bytes_per_s[link], a.round_to)
    for end in (pairs[1], pairs[2]):
        busy_s = np.maximum(busy_s, np.bincount(end, send_s, problem.num_devices))
    return busy_s
