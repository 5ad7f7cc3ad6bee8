"""The period program where memory is tight: solve, look where the solution overflows, solve again.

Each round is a valid program, so its bound holds for every placement that fits; a solution that
fits is simulated like any other. A solution that overflows a little is repaired and counts, too.
A short search comes first: what is better than its answer is all that the rounds look for.
With more than two devices the solver rarely gets through the whole program. Then the devices are
split into halves again and again (`gdp.methods.period.split`), and pairs of devices take turns:
what is on other devices stays there, and the pair is solved on its own.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from gdp.bounds.load_memory import NO_MARKS, Marks, more_marks, placed_marks
from gdp.bounds.load_program import model_size
from gdp.clock import Clock
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.period.program import solve_period
from gdp.methods.period.solution import LoadSolution
from gdp.methods.period.split import Parts, choices, halves, home_of, merged, start_of
from gdp.methods.repair import repair
from gdp.methods.scoring import Scored, best_of, missing_text
from gdp.methods.search.again import improve_again
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.problem.ticks import send_time
from gdp.sim.objectives import memory_binds, objective_of

_SEARCHED = 30_000  # evaluations of each search that comes first, some tenths of a second
_SEARCH_SHARE = 0.1  # of the seconds, for it
_ROUNDS = 10
_ROUND_SHARE = 0.3  # of the seconds left, for one round
_SPLIT_SHARE = 0.5  # of the seconds, for splits of more than two devices
_GAP = 5e-3  # relative; what a round leaves open
_NODES = 200  # of a round's search tree
_SPLIT_NODES = 20  # the same in splits, which make a start only
_MOST_ENTRIES = 150_000  # of the matrix
_FEW_ENTRIES = 1_500  # up to here all devices at once are solved soon
_BETTER = 1.0 - 1e-4  # of the best: what a round looks for
_MOST_TURNS = 24
NOTHING = LoadSolution(None, 0.0, False)


@dataclass(frozen=True, eq=False)
class Fitted:
    """What the rounds have found so far."""

    best: Scored
    marks: Marks = NO_MARKS
    solution: LoadSolution = NOTHING  # of the last rounds, below their `upper_s`


@dataclass(frozen=True)
class RoundLimits:
    """How far a round goes. Nodes end it at the same place each time, seconds only end it."""

    relative_gap: float = 1e-6
    nodes: int | None = None
    seed: int = 0


def applies(problem: Problem) -> bool:
    """Whether the program is about this problem, and not too large for a solver."""
    goal = objective_of(problem)
    return (
        goal.pipelined
        and goal.on_links
        and problem.num_devices > 1
        and memory_binds(problem)
        and model_size(problem) <= _MOST_ENTRIES
    )


def period_fit(problem: Problem, search: Search) -> Answer:
    """The best pipeline that the program's rounds find from `search.start` or what is known on."""
    clock, limits = Clock(search.seconds), RoundLimits(_GAP, _NODES, search.seed)
    answered = [answer.assignment for answer in search.known.values()]
    starts = [search.start] if search.start is not None else [x for x in answered if x is not None]
    anywhere = Assignment(problem.group_allowed.argmax(axis=1)[problem.group])
    first = best_of(problem, starts or [anywhere])
    few = Search(seed=search.seed, seconds=None, evaluations=_SEARCHED)
    known = Fitted(improve_again(problem, first, few, clock.part(_SEARCH_SHARE)))
    if problem.num_devices == 2 or model_size(problem) <= _FEW_ENTRIES:
        best = fit(problem, known, clock, limits).best
    else:
        coarse = replace(limits, nodes=_SPLIT_NODES)
        known = by_halves(problem, known, Clock(clock.left_s(_SPLIT_SHARE)), coarse)
        best = by_pairs(problem, known, clock, limits).best
    if best.overflow_bytes > 0:
        missing = missing_text(problem, best.assignment)
        why = f"no round of the period program fits; the closest misses {missing}"
        return Answer(None, reason=why, evaluations=best.evaluations)
    return Answer(best.assignment, evaluations=best.evaluations)


def fit(
    problem: Problem,
    known: Fitted,
    clock: Clock,
    limits: RoundLimits,
    may: Bool[np.ndarray, "G D"] | None = None,
    upper_s: float | None = None,
) -> Fitted:
    """Rounds of the program below `upper_s`, until a solution fits or none is left.

    The solution is complete where the last round was and its placement fits; its bound is that of
    any round. With `may` both hold for those placements alone.
    """
    if upper_s is None:
        upper_s = known.best.value_s * _BETTER if known.best.overflow_bytes == 0 else np.inf
    best, marks, solution = known.best, known.marks, NOTHING
    if upper_s <= 0.0:  # nothing takes less than nothing
        return Fitted(best, marks, LoadSolution(None, 0.0, True))
    for _ in range(_ROUNDS):
        seconds = None if clock.seconds is None else max(0.2, _ROUND_SHARE * clock.remaining_s())
        solved = solve_period(
            problem,
            upper_s,
            seconds,
            marks,
            may=may,
            relative_gap=limits.relative_gap,
            nodes=limits.nodes,
        )
        bound_s = max(solution.bound_s, solved.bound_s)
        solution = LoadSolution(solved.device, bound_s, solved.is_complete)
        if solved.device is None:
            break
        placed = best_of(problem, [Assignment(solved.device[problem.group])])
        fits = placed.overflow_bytes == 0
        solution = LoadSolution(solved.device, bound_s, fits and solved.is_complete)
        fixed = placed if fits else repair(problem, placed, clock, limits.seed)
        count = best.evaluations + fixed.evaluations
        best = min(best, fixed, key=lambda scored: scored.key)
        best = Scored(best.assignment, best.overflow_bytes, best.value_s, count)
        more = more_marks(marks, placed_marks(problem, placed.assignment.device))
        stuck = len(more.op) == len(marks.op)
        marks = more
        if fits or stuck or clock.is_over():
            break
    return Fitted(best, marks, solution)


def by_halves(problem: Problem, known: Fitted, clock: Clock, limits: RoundLimits) -> Fitted:
    """With the placement that splits of the devices into halves lead to, if it is better."""
    parts: Parts = [list(range(problem.num_devices))]
    home = np.zeros(problem.num_groups, dtype=np.int64)
    evaluations = 0
    while (split := halves(parts)) is not None and not clock.is_over():
        parts, which = split
        small = merged(problem, parts)
        may = choices(small, home, which)
        first = Fitted(best_of(small, [start_of(small, may)]))
        found = fit(small, first, clock, limits, may).best
        evaluations += found.evaluations
        home = home_of(small, found.assignment)
    if halves(parts) is not None:
        return known
    device = np.array([part[0] for part in parts])[home][problem.group]
    placed = best_of(problem, [Assignment(device)])
    fixed = placed if placed.overflow_bytes == 0 else repair(problem, placed, clock, limits.seed)
    best = min(known.best, fixed, key=lambda scored: scored.key)
    count = known.best.evaluations + fixed.evaluations + evaluations
    best = Scored(best.assignment, best.overflow_bytes, best.value_s, count)
    return Fitted(best, known.marks)


def by_pairs(problem: Problem, known: Fitted, clock: Clock, limits: RoundLimits) -> Fitted:
    """Pairs of the busiest device with each other one in turn, as long as one of them gains."""
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
            pair = fit(problem, known, clock, limits, _pair(problem, known.best, first, other))
            gains = pair.best.value_s < known.best.value_s
            known = pair
            if gains:
                break
    return known


def _pair(problem: Problem, best: Scored, first: int, other: int) -> Bool[np.ndarray, "G D"]:
    """Where groups may go if only those of two devices move, between these two."""
    now = home_of(problem, best.assignment)
    may = np.zeros((problem.num_groups, problem.num_devices), dtype=bool)
    may[np.arange(problem.num_groups), now] = True
    moves = (now == first) | (now == other)
    may[moves, first] = True
    may[moves, other] = True
    return may & problem.group_allowed


def _busy_s(problem: Problem, assignment: Assignment) -> Float[np.ndarray, "D"]:
    """Seconds of a sample's ops on each device, or of what it sends or receives if that is more."""
    a, device = arrays_of(problem), assignment.device
    busy_s = np.bincount(
        device, a.compute_s[np.arange(problem.num_ops), device], problem.num_devices
    )
    tensor = np.repeat(np.arange(len(a.producer)), np.diff(a.use_start))
    source, to = device[a.producer[tensor]], device[a.use_op]
    pairs = np.unique(np.stack([tensor, source, to])[:, source != to], axis=1)
    link = pairs[1], pairs[2]
    send_s = send_time(a.latency_s[link], a.tensor_bytes[pairs[0]], a.bytes_per_s[link], a.round_to)
    for end in (pairs[1], pairs[2]):
        busy_s = np.maximum(busy_s, np.bincount(end, send_s, problem.num_devices))
    return busy_s
