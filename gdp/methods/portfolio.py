"""auto: heuristics as candidates, then local search from the best of them.

Where memory is ample the quick heuristics cost some 2,000 evaluations of a search and the others
10,000, so that of a small budget of evaluations these would take nearly all of the seconds. There a
short search decides (`_search_early`): while it gains, the others' work is better spent on search.
"""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from gdp.base.clock import Clock
from gdp.base.errors import MissingExtraError
from gdp.cluster.types import ALONE, pool_excess_bytes
from gdp.methods.annealing.annealer import annealer_of
from gdp.methods.base import Answer, Assignment, Candidate, Method, Search, inner_seed
from gdp.methods.fix_and_optimise.latency import applies as latency_applies
from gdp.methods.fix_and_optimise.latency import latency_fit
from gdp.methods.fix_and_optimise.period import applies as period_applies
from gdp.methods.fix_and_optimise.period import period_fit
from gdp.methods.heuristics.blocks import blocks
from gdp.methods.heuristics.list_schedule import critical_path, etf, heft
from gdp.methods.heuristics.metis import metis
from gdp.methods.heuristics.modules import modules
from gdp.methods.heuristics.multilevel import multilevel
from gdp.methods.heuristics.simple import round_robin, single
from gdp.methods.pipeline.method import compile_pipelines, replicated_pipeline
from gdp.methods.repair import repair
from gdp.methods.scoring import (
    Evaluated,
    as_answer,
    compile_once,
    is_compiling,
    proven_misfit,
    score_all,
    score_of,
)
from gdp.methods.search.budget import PROGRAM_WORK_S, SearchConfig
from gdp.methods.search.local_search import compile_for_large, improve, local_search
from gdp.methods.search.replica_groups import search_teams
from gdp.methods.shares import (
    CANDIDATE_SHARE,
    REPAIR_SHARE,
    REPLICA_PROGRAM_SHARE,
    TEAMS_AHEAD_SHARE,
    TEAMS_BEHIND_SHARE,
    TIGHT_CANDIDATE_SHARE,
)
from gdp.problem.arrays import arrays_of, touched_bytes
from gdp.problem.problem import Problem
from gdp.sim.objectives import Score, memory_binds, objective_of
from gdp.sim.score import may_replicate, score

LOG = logging.getLogger(__name__)

HEURISTICS: tuple[tuple[str, Method], ...] = (
    ("single", single),
    ("round_robin", round_robin),
    ("modules", modules),
    ("blocks", blocks),
    ("metis", metis),
    ("heft", heft),
    ("etf", etf),
    ("critical_path", critical_path),
    ("multilevel", multilevel),
)
"""Of equal placements the one of the method that is named first here is kept."""
FIRST = ("single", "blocks", "heft")
"""Run before the others, whatever the order here: cheap, and often close to the best."""
QUICK = (*FIRST, "etf", "metis")
"""Run before a short search decides on the others."""
BASELINE = "round_robin"
"""Run after all other heuristics: seldom the best, and where memory is short long to repair."""
ALWAYS = frozenset(("single", "blocks"))
"""Run even when the time is over, as long as it takes to simulate a few placements."""
_LATENCY_FILL = 1.0 / 3.0  # below it the latency program never paid (`benchmarks.budgets gains`)
_QUICK = 4.0  # times the seconds of the whole model on the fastest device
_MOST_REPAIRED = 4  # placements that are repaired in earnest where no candidate fits
_TRADED_OPS = 1000  # from so many on `multilevel` recombines: too good to leave out
_TRADED_GAIN = 0.01  # of the short search, from which the other heuristics are left out
_NEAR = 1.25  # replica groups that take at most so many times as long are searched
REPLICA_OP_S = 40e-6
"""Seconds of an idle core for each op, in which pipelines with replicated stages are prepared,
before the first is found: 8 s of 200,000 (`benchmarks.budgets kept --objective throughput`)."""
_FIRST_SHARE = 0.5  # of the candidates' seconds left, for one of `FIRST`; others share alike
_SAME = 1.0 - 1e-9  # sums are added up in different orders


class Trade(NamedTuple):
    """Evaluations for the other heuristics' work."""

    short: int  # of the search that decides
    more: int  # which a search does in the CPU seconds of these heuristics, at least


TRADES = {True: Trade(400, 6_000), False: Trade(4_000, 40_000)}
"""By `Annealer.simulates`: steps of a period cost what they change. On 47 problems of 73 to 1,030
ops the other heuristics took 5,400 to 24,000 and 14,000 to 180,000."""


@dataclass
class Pool:
    """Results of the candidates."""

    tried: list[Candidate] = field(default_factory=list)
    fitting: list[Evaluated] = field(default_factory=list)
    closest: list[Assignment] = field(default_factory=list)  # that overflow least, of a method each
    spent: int = 0  # evaluations
    early: Evaluated | None = None  # by a short search, once it was tried
    traded: int = 0  # evaluations that the search has more, for heuristics that were left out


def auto(
    problem: Problem,
    search: Search,
    extra: Sequence[tuple[str, Method]] = (),
    planned: Sequence[tuple[str, Method]] = (),
) -> Answer:
    """The best of all heuristics and `extra` methods, improved by local search in the time left.

    Never worse than any candidate, because the search starts from the best of them. A candidate
    whose library is missing is left out. `planned` ones are run first, whatever the time.
    """
    compile_once("auto", auto, problem.objective)
    compile_for_large(problem)
    if may_replicate(problem):
        compile_pipelines(linear_only=True)
    # Last, as they start from the best of the others: where memory binds they go beyond search.
    programs = [] if is_compiling() else [row for row in PROGRAMS if row[1](problem)]
    for name, _, method in programs:
        compile_once(name, method, problem.objective)
    clock = search.budget()
    limit = clock.part(candidate_share(problem))
    pool = Pool()
    replicated: Evaluated | None = None
    try:
        others = (*HEURISTICS, *extra, *((name, method) for name, _, method in programs))
        _run_all(problem, planned, others, search, limit, pool)
        if not pool.fitting and pool.closest:
            fixed = _repaired(problem, pool.closest, search, clock)
            pool.spent += fixed.evaluations
            pool.fitting += [fixed] if fixed.overflow_bytes == 0 else []
        if may_replicate(problem):
            replicated, proof = _with_teams(problem, search, clock, pool)
            if proof is not None:
                tried = tuple(pool.tried)
                return replace(proof, reason="", evaluations=pool.spent, candidates=tried)
        answer = _improved(problem, search, clock, pool)
        answer = _better(problem, answer, replicated)
    except KeyboardInterrupt:
        pool.fitting += [] if replicated is None else [replicated]
        if not pool.fitting:
            raise
        best = min(pool.fitting)
        answer = Answer(best.assignment, reason="interrupted", evaluations=pool.spent)
    evaluated = tuple(scored.assignment for scored in pool.fitting)
    return replace(
        answer, candidates=tuple(pool.tried), evaluated=evaluated, notes=_notes(problem, answer)
    )


def candidate_share(problem: Problem) -> float:
    """Of the seconds, for all candidates together."""
    goal = objective_of(problem)
    whole = problem.num_ops <= SearchConfig().windows_above
    tight = goal.ordered and not goal.pipelined and memory_binds(problem)
    return TIGHT_CANDIDATE_SHARE if tight and whole else CANDIDATE_SHARE


def memory_fill(problem: Problem) -> float:
    """Share of all devices' memory that the weights and the largest op take."""
    largest = float(touched_bytes(problem).max(initial=0))
    held = float(arrays_of(problem).weight_bytes.sum()) + largest
    return held / float(problem.cluster.room_bytes(np.ones(problem.num_devices, dtype=bool)))


def quick_fill(problem: Problem) -> float:
    """Share of memory taken, of devices at most `_QUICK` times slower than the fastest.

    A slow host with much memory leaves it as hard to use the fast devices well. The seconds of a
    device are those of the whole model, so that one which runs few ops is not quick: what it cannot
    run counts as too slow.
    """
    runs = problem.allowed[~problem.graph.is_io]
    work_s = np.where(runs, problem.compute_s[~problem.graph.is_io], 0.0)
    slowest_s = work_s.max(axis=1, initial=0.0)[:, None]
    whole_s = np.where(runs, work_s, 2.0 * _QUICK * slowest_s).sum(axis=0)
    quick = runs.any(axis=0) & (whole_s <= _QUICK * whole_s.min(initial=np.inf))
    room_bytes = problem.cluster.room_bytes
    room = float(room_bytes(np.ones_like(quick))) / max(1.0, float(room_bytes(quick)))
    return memory_fill(problem) * room


PROGRAMS: tuple[tuple[str, Callable[[Problem], bool], Method], ...] = (
    ("period_fit", period_applies, period_fit),
    # Where memory is full enough for it to beat search:
    ("latency_fit", lambda p: latency_applies(p) and quick_fill(p) >= _LATENCY_FILL, latency_fit),
)
"""Programs that go beyond search where memory binds, and when each is worth its seconds."""


def in_turn(rows: Sequence[tuple[str, Method]]) -> list[tuple[str, Method]]:
    """The candidates in the order in which they are run."""
    own = [name for name, _ in HEURISTICS]
    stage = dict.fromkeys(own, 2) | dict.fromkeys(QUICK, 1) | dict.fromkeys(FIRST, 0)
    return sorted(rows, key=lambda row: (stage | {BASELINE: 3}).get(row[0], 4))


def _run_all(
    problem: Problem, planned: Sequence[tuple[str, Method]], others: Sequence[tuple[str, Method]],
    search: Search, limit: Clock, pool: Pool,
) -> None:  # fmt: skip
    """Run all candidates, those that are not cheap as far as the time goes, or until one proves
    that nothing fits; heuristics that are not quick only where a short search does not gain more.

    They are run sequentially; what they leave in `pool` and for those that start from the others'
    answers is in the order of the rows, which so decides between equal ones.
    """
    order = [name for name, _ in (*others, *planned)]
    always = ALWAYS.union(name for name, _ in planned)
    slow = {name for name, _ in HEURISTICS}.difference(QUICK, always)
    answered: dict[str, Answer] = {}
    met: dict[str, Evaluated] = {}
    try:
        for name, method in (*planned, *in_turn(others)):
            if name in slow and pool.early is None and met:
                _search_early(problem, min(met.values()), search, limit, pool)
            reason = "search has its work" if name in slow and pool.traded else ""
            if met and limit.is_over() and name not in always:
                reason = "no time was left"
            if reason:
                pool.tried.append(_without(name, 0.0, reason))
                continue
            prior = {name: answered[name] for name in order if name in answered}
            work_s = PROGRAM_WORK_S.get(name) if limit.is_counted else None
            part = limit if work_s is None else limit.at_most(work_s)
            waiting = len(order) - len(pool.tried)
            if not limit.is_counted and waiting > 1:  # a repair would take all of the seconds
                ahead = bool(met) and name in FIRST
                part = limit.part(max(1.0 / waiting, _FIRST_SHARE if ahead else 0.0))
            row, scored, answer = _try(
                problem, name, method, replace(search, prior_answers=prior), part
            )
            pool.tried.append(row)
            if answer is not None:
                answered[name] = answer
                pool.spent += answer.evaluations + (answer.assignment is not None)
                pool.closest += [] if answer.closest is None else [answer.closest]
                if answer.proven_misfit:
                    return
            if scored is not None:
                met[name] = scored
    finally:
        pool.tried.sort(key=lambda row: order.index(row.method))
        pool.fitting += [met[name] for name in order if name in met]
        pool.fitting += [] if pool.early is None else [pool.early]


def _search_early(
    problem: Problem, start: Evaluated, search: Search, clock: Clock, pool: Pool
) -> None:
    """A short search from the best of the quick heuristics, where the others would cost more than
    the evaluations asked for; where it gains, the search has their work instead.

    Search that stands still after it needs another start, which others may have; one that gains
    ends far ahead of them in the same work.
    """
    trade = TRADES[annealer_of(problem).simulates]
    if search.evaluations is None or not clock.is_counted or problem.num_ops >= _TRADED_OPS:
        return
    if search.evaluations >= trade.more or memory_binds(problem):
        return
    few = replace(search, seed=inner_seed(search.seed, 1), evaluations=trade.short, progress=None)
    early = improve(problem, [replace(start, evaluations=0)], few, clock, raises=True)
    pool.spent += early.evaluations
    pool.early = replace(early, evaluations=0)
    if early.value_s < start.value_s * (1.0 - _TRADED_GAIN):
        pool.traded = trade.more


def _repaired(
    problem: Problem, closest: list[Assignment], search: Search, clock: Clock
) -> Evaluated:
    """The first feasible repair of some placements, in order of their overflow."""
    over = sorted(score_all(problem, closest))
    best, count = over[0], len(over)
    if proven_misfit(problem) is not None:
        return replace(best, evaluations=count)
    for number, start in enumerate(_distinct(over)[:_MOST_REPAIRED]):
        if best.overflow_bytes == 0 or (number and clock.is_over()):
            break
        seed = inner_seed(search.seed, number)
        fixed = repair(problem, replace(start, evaluations=0), clock.part(REPAIR_SHARE), seed)
        count, best = count + fixed.evaluations, min(best, fixed)
    return replace(best, evaluations=count)


def heuristic_candidates(problem: Problem, seed: int = 0) -> tuple[Candidate, ...]:
    """Answer of the heuristics alone: the yardstick of a placement made elsewhere."""
    if not objective_of(problem).general:
        return ()
    tried: list[Candidate] = []
    answered: dict[str, Answer] = {}
    for name, method in HEURISTICS:
        search = Search(seed=seed, prior_answers=answered)
        row, _, answer = _try(problem, name, method, search, Clock(None))
        tried.append(row)
        if answer is not None:
            answered[name] = answer
    return tuple(tried)


def _try(
    problem: Problem, name: str, method: Method, search: Search, clock: Clock
) -> tuple[Candidate, Evaluated | None, Answer | None]:
    """One candidate's row, its placement if it has one that fits, and its answer."""
    began_s = time.perf_counter()
    inner = Search(seed=search.seed, clock=clock, prior_answers=search.prior_answers)
    try:
        answer = method(problem, inner)
    except MissingExtraError as error:
        return _without(name, 0.0, str(error)), None, None
    took_s = time.perf_counter() - began_s
    if answer.assignment is None:
        return _without(name, took_s, answer.reason), None, answer
    judged = score_of(problem, answer.assignment)
    row = _candidate(name, judged, took_s, answer.reason)
    scored = Evaluated(answer.assignment, judged.overflow_bytes, judged.value_s)
    return row, scored if judged.feasible else None, answer


def _with_teams(
    problem: Problem, search: Search, clock: Clock, pool: Pool
) -> tuple[Evaluated | None, Answer | None]:
    """(the best pipeline with replicated stages, the answer that proves that none at all is
    better).

    Pipelines along a few linear orders first, then a search of teams, which has half as many
    evaluations as are asked for: the search of plain placements has as many as without teams, so
    that with the same evaluations the answer is never worse. Of the seconds, teams have more where
    they are ahead of the heuristics.
    """
    began_s = time.perf_counter()
    part = clock.part(REPLICA_PROGRAM_SHARE)
    if not part.is_counted and part.remaining_s() < REPLICA_OP_S * problem.num_ops:
        row, best, program = _without("replicas", 0.0, "no time was left"), None, None
    else:
        few_orders = functools.partial(replicated_pipeline, linear_only=True)
        row, best, program = _try(problem, "replicas", few_orders, search, part)
    pool.spent += 0 if program is None else program.evaluations
    proven = best is not None and program is not None and program.proven_optimal
    if not proven:
        plain_s = min((scored.value_s for scored in pool.fitting), default=np.inf)
        share = (
            TEAMS_AHEAD_SHARE if best is not None and best.value_s < plain_s else TEAMS_BEHIND_SHARE
        )
        count = None if search.evaluations is None else search.evaluations // 2
        few = replace(search, clock=clock.part(share), evaluations=count)
        starts = sorted(pool.fitting)[:1]
        best, more = search_teams(problem, best, few, plain_s * _NEAR, auto, starts)
        pool.spent += more
    if best is not None:
        judged = score_of(problem, best.assignment)
        row = _candidate("replicas", judged, time.perf_counter() - began_s, row.reason)
    pool.tried.append(row)
    return best, program if proven else None


def _better(problem: Problem, answer: Answer, replicated: Evaluated | None) -> Answer:
    """The answer, or the one with replicated stages where that is better."""
    if replicated is None:
        return answer
    if answer.assignment is not None:
        evaluation = score_of(problem, answer.assignment)
        if (evaluation.overflow_bytes, evaluation.value_s) <= replicated.key:
            return answer
    return replace(answer, assignment=replicated.assignment, reason="")


def _candidate(name: str, judged: Score, seconds: float, reason: str = "") -> Candidate:
    return Candidate(
        name, judged.latency_s, judged.period_s, judged.value_s, judged.feasible, seconds, reason
    )


def _without(name: str, seconds: float, reason: str) -> Candidate:
    """A candidate that has no placement."""
    return Candidate(name, None, None, None, False, seconds, reason)


def _improved(problem: Problem, search: Search, clock: Clock, pool: Pool) -> Answer:
    """Local search from the best two candidates; after a gain of the early search from one."""
    began_s = time.perf_counter()
    if not pool.fitting:
        answer = local_search(problem, replace(search, clock=clock))
        return replace(answer, evaluations=answer.evaluations + pool.spent)
    starts = _distinct(sorted(pool.fitting))[: 1 if pool.traded else 2]
    if search.evaluations is not None:
        search = replace(search, evaluations=search.evaluations + pool.traded)
    # Only the search's own evaluations count against the budget: what the candidates took is small
    # and the same for every budget.
    starts = [replace(start, evaluations=0) for start in starts]
    best = improve(problem, starts, search, clock)
    judged = score_of(problem, best.assignment)
    pool.tried.append(_candidate("local_search", judged, time.perf_counter() - began_s))
    answer = as_answer(problem, best, "auto")
    return replace(answer, evaluations=answer.evaluations + pool.spent)


def _distinct(scored: list[Evaluated]) -> list[Evaluated]:
    """Without repetitions of the same devices."""
    kept: list[Evaluated] = []
    for entry in scored:
        if not any((entry.assignment.device == k.assignment.device).all() for k in kept):
            kept.append(entry)
    return kept


def _notes(problem: Problem, answer: Answer) -> tuple[str, ...]:
    """For a pipeline: whether plain replicas of the model would be faster."""
    if not objective_of(problem).pipelined or answer.assignment is None:
        return ()
    period_s = score_of(problem, answer.assignment).period_s
    replicas_s, holders = replica_period_s(problem)
    if holders < 2 or replicas_s >= period_s * _SAME:
        return ()
    text = problem.unit.text
    return (
        f"{holders} replicas of the whole model would take {text(replicas_s)} a sample, "
        f"the pipeline {text(period_s)}",
    )


def replica_period_s(problem: Problem) -> tuple[float, int]:
    """Seconds per sample when every device that can hold the model runs its own copy.

    Rates add up, of devices of one processor the fastest alone; a memory that devices share holds
    as many copies as fit, of the fastest first. Inputs and outputs are taken to reach every replica
    in time.
    """
    cluster, io = problem.cluster, problem.graph.is_io
    dispatch_s = (~io).sum() * cluster.op_dispatch_s + cluster.segment_dispatch_s
    copies: list[tuple[float, int, Int[np.ndarray, "D"]]] = []
    for d in range(problem.num_devices):
        if not problem.allowed[~io, d].all():
            continue
        device = np.where(io, cluster.host, d)
        judged = score(problem, device, None)
        if judged.feasible and judged.latency_s > 0:
            busy_s = float(problem.compute_s[~io, d].sum()) + float(dispatch_s[d])
            copies.append((busy_s, d, judged.peak_bytes))
    rate, holders, held = 0.0, 0, np.zeros(problem.num_devices, dtype=np.int64)
    computing: set[int] = set()
    for busy_s, d, peak_bytes in sorted(copies, key=lambda copy: copy[:2]):
        together = np.maximum(held, peak_bytes)
        busy = cluster.processor[d] in computing
        if busy or pool_excess_bytes(cluster, together).any():
            continue
        held, rate, holders = together, rate + 1.0 / max(busy_s, 1e-30), holders + 1
        if cluster.processor[d] != ALONE:
            computing.add(int(cluster.processor[d]))
    return (1.0 / rate if rate else np.inf), holders
