"""The policy as a placement method: greedy decode and samples, relinked, repaired, the best of all.

Axes: K placements, N ops, M groups of ops.
"""

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Int

from gdp.base.clock import Clock
from gdp.methods.base import Answer, Assignment, Method, Search
from gdp.methods.priorities import (
    RULES,
    RatedPlacements,
    concatenated,
    evaluate_rules,
    rank_under,
    rules_of,
)
from gdp.methods.repair import repair
from gdp.methods.scoring import Evaluated, best_of, best_priority_rule, missing_text
from gdp.methods.shares import ADVICE_SHARE
from gdp.policy.advice import advise, answers_run_here, heuristic_answers, incumbents
from gdp.policy.policy import (
    Policy,
    default_checkpoint,
    load_policy,
    policy_folder,
    recall_placement,
)
from gdp.policy.propose import propose
from gdp.policy.relink import relink
from gdp.problem.problem import Problem, contracted
from gdp.sim.objectives import memory_binds, objective_of

LOG = logging.getLogger(__name__)

Widen = Callable[[Int[np.ndarray, "M"]], Int[np.ndarray, "N"]]
"""Function from values of M groups of ops to values of all N ops."""

SAMPLES = 16
"""Samples besides the greedy placement, unless the evaluation budget is smaller."""
ONCE_MORE = 1 + len(RULES)
"""Evaluations of a decoded placement, under its own priorities and under all rules."""
POLISHED = (1000, 10_000)
"""Fewest and most evaluations of the local search after decoding."""
POLISHED_OPS = 3_000_000
"""Ops simulated by that search between the two limits: a tenth of a second or two."""
LONGEST_OPS = 50_000_000
"""Most ops simulated by that search: a second or two, as large graphs are simulated one window at a
time.
"""
POLISHED_PERIODS = 30_000
"""Evaluations of that search for pipelines, where moves are evaluated incrementally."""
LARGEST = 60_000
"""Ops above which the graph is coarsened first, so that groups of ops are placed."""


def place_with_policy(
    problem: Problem,
    checkpoint: str | os.PathLike[str] | Policy | None,
    search: Search,
    *,
    polish: bool = True,
) -> Answer:
    """The best of the policy's greedy placement, its samples and what any heuristic answers.

    `checkpoint` is a folder, a policy, or None for the shipped one. Greedy and `SAMPLES` samples,
    each under every rule of priority; with an evaluation budget, as many as it allows. A policy
    that was fine-tuned to this graph also answers with the placement found then. The clock of
    `search.seconds` is asked between decodes. Without `polish` no search follows, but where
    nothing fits.
    """
    policy, clock = load(checkpoint), search.budget()
    kept_placement = recall_placement(policy.placed, problem)
    if kept_placement is None:
        return _decoded(problem, policy, search, clock, polish)
    if search.evaluations is not None:  # two compare the decoded placement with the known one
        search = replace(search, evaluations=max(1, search.evaluations - 2))
    answer = _decoded(problem, policy, search, clock, polish)
    both = [placement for placement in (answer.assignment, kept_placement) if placement is not None]
    best, spent = best_of(problem, both), answer.evaluations + len(both)
    if best.assignment is not kept_placement or best.overflow_bytes > 0:
        return replace(answer, evaluations=spent)
    reason = (
        f"policy {policy.name!r}: {problem.unit.text(best.value_s)}, found when it was fine-tuned"
    )
    return Answer(kept_placement, reason=reason, evaluations=spent)


def _decoded(
    problem: Problem, policy: Policy, search: Search, clock: Clock, polish: bool
) -> Answer:
    """Best of the repaired decoded placements and of the heuristics' placements.

    The better of both is polished by a local search, or at least repaired.
    """
    small, widen = coarse(problem)
    if policy.config.advice:
        prior_answers = search.prior_answers if small is problem else {}
        advise(small, prior_answers, clock.part(ADVICE_SHARE))
    count = SAMPLES + 1
    if search.evaluations is not None:
        count = min(count, search.evaluations // len(rules_of(small)))
    others, spent = None, 0
    if policy.config.advice:
        others = best_of(problem, _advised(small, widen))
        spent += others.evaluations + sum(x.evaluations for x in answers_run_here(small).values())
    # Of the budget, what is decoded last is looked at once more under every rule.
    most = None if search.evaluations is None else search.evaluations - spent - ONCE_MORE
    proposals = propose(policy, small, max(1, count), search.seed, clock, most)
    row, spent = proposals.best, spent + proposals.evaluations
    relinked = _relinked(policy, small, proposals, most, clock)
    spent += relinked.evaluations
    placed = Assignment(widen(relinked.assignment.device))
    decoded = best_priority_rule(problem, best_of(problem, [placed]))
    if decoded.overflow_bytes > 0:
        decoded = best_priority_rule(problem, repair(problem, decoded, clock, search.seed))
    best, spent = decoded, spent + decoded.evaluations
    if others is not None:
        best = min(decoded, others)
    if polish or best.overflow_bytes > 0:
        remaining = None if search.evaluations is None else search.evaluations - spent
        best, more = _polished(problem, best, search.seed, remaining, clock)
        spent += more
    if best.overflow_bytes > 0:
        missing = missing_text(problem, best.assignment)
        reason = f"policy {policy.name!r}: the closest placement misses {missing}"
        return Answer(None, reason=reason, evaluations=spent, closest=best.assignment)
    reason = (
        f"policy {policy.name!r}: greedy {problem.unit.text(proposals.seconds[0])}, best of "
        f"{len(proposals.device)} {problem.unit.text(proposals.seconds[row])}"
    )
    if best.key < decoded.key:
        reason += f"; an adviser's or a search's is better, {problem.unit.text(best.value_s)}"
    return Answer(best.assignment, reason=reason, evaluations=spent)


def decode_with_policy(
    problem: Problem,
    checkpoint: str | os.PathLike[str] | Policy | None,
    search: Search,
    *,
    samples: int = 0,
) -> Answer:
    """The policy without any search: its greedy placement, or the best of that, of a greedy decode
    from each further adviser and of samples, `samples` in all besides the first; as decoded, under
    the best rule of priority, neither relinked, repaired nor searched from.

    Where a placement that it read is better, that is the answer: the reason says what was decoded.
    """
    policy, clock = load(checkpoint), search.budget()
    small, widen = coarse(problem)
    read: list[Assignment] = []
    if policy.config.advice:
        prior_answers = search.prior_answers if small is problem else {}
        advise(small, prior_answers, clock.part(ADVICE_SHARE))
        read = _advised(small, widen)
    proposals = propose(policy, small, 1 + samples, search.seed, clock, search.evaluations)
    placed = Assignment(widen(proposals.device[proposals.best]))
    decoded = best_priority_rule(problem, best_of(problem, [placed]))
    best, spent = decoded, proposals.evaluations + decoded.evaluations
    if read:
        given = best_of(problem, read)
        best, spent = min(decoded, given), spent + given.evaluations
        spent += sum(x.evaluations for x in answers_run_here(small).values())
    count = len(proposals.device)
    what = "greedy" if count == 1 else f"best of {count}"
    text = problem.unit.text(decoded.value_s)
    if decoded.overflow_bytes > 0:
        text = f"misses {missing_text(problem, decoded.assignment)}"
    reason = f"policy {policy.name!r}, no search: {what} {text}"
    if best.overflow_bytes > 0:
        return Answer(None, reason=reason, evaluations=spent, closest=best.assignment)
    if best.key < decoded.key:
        reason += f"; a placement that it read is better, {problem.unit.text(best.value_s)}"
    return Answer(best.assignment, reason=reason, evaluations=spent)


def _relinked(
    policy: Policy, problem: Problem, proposals: RatedPlacements, most: int | None, clock: Clock
) -> Evaluated:
    """Path relinking between the decoded placements and their starts.

    It uses half of the evaluations that decoding left of `most`.
    """
    remaining = None if most is None else (most - proposals.evaluations) // 2
    given, spent = incumbents(problem) if policy.config.advice else proposals.device[:0], 0
    if len(given) and (remaining is None or remaining >= len(given) * len(rules_of(problem))):
        rated = evaluate_rules(problem, given)
        proposals, spent = concatenated([proposals, rated]), rated.evaluations
        remaining = None if remaining is None else remaining - spent
    relinked = relink(problem, proposals, most=remaining, clock=clock)
    return replace(relinked, evaluations=relinked.evaluations + spent)


def _advised(problem: Problem, widen: Widen) -> list[Assignment]:
    """Placements of all heuristics, and the starts of the decodes under their own priorities."""
    answers = heuristic_answers(problem).values()
    placements = [answer.assignment for answer in answers if answer.assignment is not None]
    placements += [assignment(problem, device) for device in incumbents(problem)]
    return [
        Assignment(widen(x.device), None if x.rank is None else widen(x.rank)) for x in placements
    ]


def assignment(problem: Problem, device: Int[np.ndarray, "N"]) -> Assignment:
    """An assignment of devices with the best priority rule."""
    rule = RULES[int(evaluate_rules(problem, device[None]).rule[0])]
    return Assignment(device, rank_under(problem, device, rule))


def policy_methods(checkpoint: str | os.PathLike[str] | None = None) -> dict[str, Method]:
    """`place_with_policy` and, as `policy_greedy` and `policy_samples`, `decode_with_policy`; none
    where no checkpoint is named and none is shipped."""
    if checkpoint is None and not _is(default_checkpoint()):
        return {}

    def policy(problem: Problem, search: Search) -> Answer:
        return place_with_policy(problem, checkpoint, search)

    def policy_greedy(problem: Problem, search: Search) -> Answer:
        return decode_with_policy(problem, checkpoint, search)

    def policy_samples(problem: Problem, search: Search) -> Answer:
        return decode_with_policy(problem, checkpoint, search, samples=SAMPLES)

    return {"policy": policy, "policy_greedy": policy_greedy, "policy_samples": policy_samples}


def policy_candidate(checkpoint: str | os.PathLike[str] | Policy | None = None) -> Method:
    """`place_with_policy` for a portfolio that searches on from the best of its candidates."""
    return functools.partial(_candidate, checkpoint)


def _candidate(
    checkpoint: str | os.PathLike[str] | Policy | None, problem: Problem, search: Search
) -> Answer:
    return place_with_policy(problem, checkpoint, search, polish=False)


def load(checkpoint: str | os.PathLike[str] | Policy | None) -> Policy:
    """The policy of a folder, or the shipped one; read once per process."""
    if isinstance(checkpoint, Policy):
        return checkpoint
    folder = policy_folder(default_checkpoint() if checkpoint is None else checkpoint)
    return _loaded(str(folder), (folder / "meta.json").stat().st_mtime_ns if _is(folder) else 0)


@functools.lru_cache(maxsize=4)
def _loaded(folder: str, version: int):
    del version  # a checkpoint that was written again is another one
    return load_policy(folder)


def _is(folder: Path) -> bool:
    return (folder / "meta.json").exists()


def _polished(
    problem: Problem, start: Evaluated, seed: int, remaining: int | None, clock: Clock
) -> tuple[Evaluated, int]:
    """(what a short search finds from a placement, evaluations spent): moves over priorities and
    devices find what no rule of decoding does.

    A placement that does not fit is mended whatever is `remaining` of the evaluations.
    """
    from gdp.methods.search.chains import multi_restart
    from gdp.methods.search.local_search import improve

    pipelined, n = objective_of(problem).pipelined, problem.num_ops
    least, most = POLISHED
    steps = min(most, max(POLISHED_OPS // n, min(least, LONGEST_OPS // n)))
    if pipelined:
        steps = POLISHED_PERIODS
    if start.overflow_bytes == 0:
        steps = steps if remaining is None else min(steps, remaining)
    if steps <= 0:
        return start, 0
    search = Search(seed=seed, seconds=None, evaluations=steps)
    first = replace(start, evaluations=0)
    if pipelined and memory_binds(problem) and remaining is None:
        best = multi_restart(problem, first, search, clock)
    else:
        best = improve(problem, [first], search, clock)
    return min(start, best), best.evaluations


def coarse(problem: Problem) -> tuple[Problem, Widen]:
    """The problem over groups of ops if it is too large, and the function from groups to ops."""
    if problem.num_ops <= LARGEST:
        return problem, lambda device: device
    from gdp.graph.fuse import coarsen
    from gdp.graph.groups import alike

    labels = alike(*np.packbits(problem.allowed, axis=1).T)[1]
    fused = coarsen(problem.graph, LARGEST // 2, apart=labels)
    small = contracted(problem, fused.graph, fused.group_of)
    return small, lambda device: device[fused.group_of]
