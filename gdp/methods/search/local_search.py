"""Local search: simulated annealing from any start, coarse before fine, until the budget ends."""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from gdp.base.clock import Clock
from gdp.methods.annealing.annealer import (
    AnnealConfig,
    Annealer,
    anneal,
    annealer_of,
    make_annealer,
    side_by_side,
)
from gdp.methods.base import Answer, Assignment, Search, inner_seed
from gdp.methods.heuristics.blocks import block_assignments
from gdp.methods.heuristics.list_schedule import heft_assignments
from gdp.methods.heuristics.multilevel import coarse_problem
from gdp.methods.heuristics.simple import single_assignments
from gdp.methods.priorities import upward_rank
from gdp.methods.repair import repair
from gdp.methods.scoring import (
    Evaluated,
    as_answer,
    best_of,
    compile_once,
    proven_misfit,
    score_all,
)
from gdp.methods.search.budget import Budget, SearchConfig
from gdp.methods.search.windows import WindowSearch, search_windows
from gdp.methods.shares import LOCAL_START_SHARE, OUTSIDE_SHARE
from gdp.problem.problem import Problem
from gdp.sim.objectives import memory_binds, objective_of

LOG = logging.getLogger(__name__)
_ROOM = 1000  # evaluations left, from which a start outside the memory limits is worth its cost
_ALL, _ALL_OPS = 20_000, 500_000  # placements that are all tried, and ops simulated so, at most
_SWEEPS = 2  # of every group on every device, in the first round of a small graph
COARSE_OP_S = 1e-5
"""Seconds of an idle core in which one op of a graph is joined to others, roughly."""
_HEATS = (1.0, 300.0)  # by which rounds in a row without a better placement are hotter


def local_search(problem: Problem, search: Search) -> Answer:
    """The best placement that annealing finds from `search.start`, or from simple placements.

    Steps move single groups of ops that must share a device, chains, windows of an order, breadth
    first clusters and borders between devices, swap two groups, or exchange two priorities; every
    one is judged by the exact simulator (latency), or by its changes (throughput: O(degree) an
    op moved). Kirkpatrick, Gelatt and Vecchi 1983, doi 10.1126/science.220.4598.671, in rounds that
    begin from the best so far. Large graphs are first searched on a coarse graph. Ctrl-C ends the
    search with the best so far.
    """
    compile_once("local_search", local_search, problem.objective)
    compile_for_large(problem)
    clock = search.budget()
    config = SearchConfig()
    candidates = simple_assignments(problem) if search.start is None else [search.start]
    first = best_of(problem, candidates, clock.part(LOCAL_START_SHARE))
    if first.overflow_bytes > 0 and (proof := proven_misfit(problem)) is not None:
        return Answer(None, reason=proof, evaluations=first.evaluations, proven_misfit=True)
    best = improve(problem, [first], search, clock, config)
    return as_answer(problem, best, "local_search")


def simple_assignments(problem: Problem) -> Iterator[Assignment]:
    """Candidates for a start where none is given."""
    return itertools.chain(
        single_assignments(problem), block_assignments(problem), heft_assignments(problem)
    )


def compile_for_large(problem: Problem) -> None:
    """Compile kernels that only large graphs need, if this is one: before budgets start."""
    if problem.num_ops <= SearchConfig().windows_above or not WindowSearch.supports(problem):
        return

    def small(tiny: Problem, search: Search) -> Answer:
        config = SearchConfig(windows_above=1)
        first = score_all(tiny, list(single_assignments(tiny)))[:1]
        return as_answer(tiny, improve(tiny, first, search, Clock(None), config), "windows")

    compile_once("windows", small, problem.objective)


def improve(
    problem: Problem,
    starts: list[Evaluated],
    search: Search,
    clock: Clock,
    config: SearchConfig | None = None,
    *,
    raises: bool = False,
) -> Evaluated:
    """The best placement found from scored starts within the clock and `search.evaluations`.

    The evaluations of the starts count; the result's are those of the starts and the search. Ctrl-C
    ends it with the best so far; where it `raises`, as others would run after it, it goes on up.
    """
    config = config or SearchConfig()
    budget = Budget(clock, search, config, sum(start.evaluations for start in starts))
    best = min(starts)
    try:
        if (every := _best_of_all(problem, budget)) is not None:
            best, starts = min(best, every), [every, *starts]
            if not objective_of(problem).ordered:
                return replace(best, evaluations=budget.used)
        if best.overflow_bytes > 0:
            fixed = repair(problem, replace(best, evaluations=0), clock, search.seed)
            budget.used += fixed.evaluations
            starts = [fixed, *starts] if fixed < best else starts
            best = min(best, fixed)
        starts = [*starts, *_outside(problem, starts, budget, config)]
        starts = _with_best_ranks(problem, starts, budget)
        best = min(best, *starts)
        best = _search_levels(problem, starts, search, budget, best, config)
    except KeyboardInterrupt:
        if raises:
            raise
        LOG.info("interrupted; the best placement so far is kept")
        best = min(best, budget.best or best)
    return replace(best, evaluations=budget.used)


def _best_of_all(problem: Problem, budget: Budget) -> Evaluated | None:
    """The best of all placements, without priorities, where these are few: half of the evaluations
    where priorities are searched after it, else all. None where they are more.

    A move of a few ops changes much of their value, which annealing is too cold for.
    """
    left, most = budget.left(), min(_ALL, _ALL_OPS // problem.num_ops)
    if left is not None:
        most = min(most, left // 2 if objective_of(problem).ordered else left)
    if np.log(problem.group_allowed.sum(axis=1)).sum() > np.log(max(most, 1)) + 1e-9:
        return None
    choices = [np.flatnonzero(row) for row in problem.group_allowed]
    group = problem.group
    every = (Assignment(np.array(homes)[group]) for homes in itertools.product(*choices))
    best = best_of(problem, every)
    budget.used += best.evaluations
    budget.report(best)
    return replace(best, evaluations=0)


def _outside(
    problem: Problem, starts: list[Evaluated], budget: Budget, config: SearchConfig
) -> list[Evaluated]:
    """With little memory, where all starts fit: a simple placement that does not.

    Annealing enters the memory limits from there elsewhere than repair does, where placements may
    be far faster; where they are not, its chain ends after the first round.
    """
    if not memory_binds(problem) or any(start.overflow_bytes > 0 for start in starts):
        return []
    left, large = budget.left(), problem.num_ops > config.windows_above
    if (left is not None and left < _ROOM) or (large and annealer_of(problem).simulates):
        return []
    first = best_of(problem, simple_assignments(problem), budget.clock.part(OUTSIDE_SHARE))
    budget.used += first.evaluations
    return [first] if first.overflow_bytes > 0 else []


def _with_best_ranks(problem: Problem, starts: list[Evaluated], budget: Budget) -> list[Evaluated]:
    """Each start with the priorities that suit it best: its own, none, or upward ranks."""
    if not objective_of(problem).ordered:
        return starts
    rank = upward_rank(problem)
    chosen = []
    for start in starts:
        variants = [
            Assignment(start.assignment.device, other)
            for other in (None, rank)
            if other is not start.assignment.rank
        ]
        variants = [] if budget.clock.is_over() else variants[: budget.left()]
        budget.used += len(variants)
        chosen.append(min([start, *score_all(problem, variants)]))
    return chosen


def _search_levels(
    problem: Problem,
    starts: list[Evaluated],
    search: Search,
    budget: Budget,
    best: Evaluated,
    config: SearchConfig,
) -> Evaluated:
    """Search the graph, large ones coarsely first: as METIS does for cuts (Karypis and Kumar 1998,
    doi 10.1137/S1064827595287997), with the simulator as the judge of every level."""
    if annealer_of(problem).simulates and problem.num_ops > config.coarse_above:
        from_coarse = _search_coarse(problem, starts, search, budget, config)
        starts = [*from_coarse, *starts][:2]
        best = min(best, *starts)
    fits = best.key < (1, np.inf)
    if problem.num_ops > config.windows_above and fits and WindowSearch.supports(problem):
        return search_windows(problem, best, search.seed, budget)
    return _search(problem, starts, search.seed, budget, best)


def _search(
    problem: Problem,
    starts: list[Evaluated],
    seed: int,
    budget: Budget,
    best: Evaluated,
    config: AnnealConfig | None = None,
) -> Evaluated:
    """Rounds of annealing from every start, then from the chains that keep up."""
    config = config or annealer_of(problem).default
    # Python's steps take turns: of an objective without kernels more chains are shorter ones.
    side = budget.chains if objective_of(problem).annealer else budget.chains_asked
    count = max(len(starts), side)
    given = [starts[k % len(starts)] for k in range(count)]
    chains = [make_annealer(problem, start, inner_seed(seed, k)) for k, start in enumerate(given)]
    # Ways to move a group, and of two neighbouring ops to change places where priorities count.
    moves = int((problem.group_allowed.sum(axis=1) - 1).sum())
    moves += problem.num_ops * objective_of(problem).ordered
    steps, missed = min(config.first_steps, _SWEEPS * max(1, moves)), 0
    for round_number in itertools.count():
        before, best_before = sum(chain.evaluations for chain in chains), best
        heat = _HEATS[missed % len(_HEATS)]
        warm = replace(config, hot=min(1.0, heat * config.hot))
        for first in range(0, len(chains), side):
            together = chains[first : first + side]
            best = _round(together, steps, warm, budget, best)
            if budget.is_over():
                return best
        missed = 0 if best < best_before else missed + 1
        if sum(chain.evaluations for chain in chains) == before:
            return best  # there is nothing to move
        drop = SearchConfig().drop / (1 + round_number)
        chains = [
            c for c in chains if c.best().key <= (best.overflow_bytes, best.value_s * (1 + drop))
        ]
        for k in range(side - len(chains)):
            fresh = inner_seed(seed, len(starts) + round_number + 32 * k)
            chains.append(make_annealer(problem, best, fresh))
        steps = int(steps * config.growth)
    raise AssertionError("rounds end with the budget")


def _round(
    chains: list[Annealer],
    steps: int,
    config: AnnealConfig,
    budget: Budget,
    best: Evaluated,
) -> Evaluated:
    """One round of each chain, concurrently, with equal shares of the evaluations left."""
    before = sum(chain.evaluations for chain in chains)
    left = budget.left()
    share = None if left is None else left // len(chains)

    def call(chain: Annealer, clock: Clock) -> None:
        anneal(chain, steps, config, clock, share)

    if share == 0:
        chains, share = chains[:1], left
    try:
        side_by_side([partial(call, chain) for chain in chains], budget.clock)
    finally:
        # An interrupt ends the round between two calls of the kernel: the chains are whole.
        budget.used += sum(chain.evaluations for chain in chains) - before
        best = min([best, *(c.best() for c in chains)])
        budget.report(best)
    return best


def _search_coarse(
    problem: Problem, starts: list[Evaluated], search: Search, budget: Budget, config: SearchConfig
) -> list[Evaluated]:
    """The best start from a search of a coarser graph; none where the seconds are too few."""
    limit_s = budget.clock.limit_s(config.coarse_share)
    if limit_s is not None and limit_s < COARSE_OP_S * problem.num_ops:
        return []
    coarse = coarse_problem(problem, max(config.coarse_ops, problem.num_ops // config.coarse_ratio))
    if coarse is None:
        return []
    clock = budget.clock.part(config.coarse_share)
    left = budget.left()
    limit = None if left is None else int(config.coarse_share * left)
    inner = Budget(clock, replace(search, evaluations=limit, progress=None), config, 0)
    projected, rank = [], upward_rank(coarse.problem)
    for start in starts:
        device = coarse.project(problem, start.assignment.device)
        projected += [Assignment(device), Assignment(device, rank)]
    begun = sorted(score_all(coarse.problem, projected))[:2]
    inner.used = len(projected)
    coarse_best = _search_levels(coarse.problem, begun, search, inner, begun[0], config)
    fine = coarse.expand_all(problem, coarse_best.assignment)
    budget.used += inner.used + len(fine)
    return sorted(score_all(problem, fine))[:1]
