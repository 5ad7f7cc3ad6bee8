"""The policy as a placement method: greedy decode and samples, relinked, repaired, the best of all.

Path relinking: parts of other placements replace parts of the best one where that is faster. A
placement that is decoded op by op goes wrong somewhere, and so does everything after it: as a whole
it may be twice as slow as its start, and still be right about half of the ops. So parts are
simulated. Glover, Laguna and Martí 2000, Control and Cybernetics 29(3); Resende et al. 2010, doi
10.1007/978-1-4419-1665-5_4. Axes: K placements, P parts, N ops, M of them.
"""

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.clock import Clock
from gdp.methods.base import Answer, Assignment, Method, Search
from gdp.methods.priorities import RULES, evaluate_rules, rank_under, rules_of, timing
from gdp.methods.repair import repair
from gdp.methods.scoring import Evaluated, best_of, best_priority_rule, missing_text
from gdp.policy.advice import advise, answers_run_here, heuristic_answers, incumbents
from gdp.policy.policy import (
    Policy,
    default_checkpoint,
    load_policy,
    policy_folder,
    recall_placement,
)
from gdp.policy.propose import Proposals, propose
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
ADVISING = 0.6
"""Largest share of the seconds for all heuristics together, as in `auto`."""
LARGEST = 60_000
"""Ops above which the graph is coarsened first, so that groups of ops are placed."""


# Path relinking


STAGES = ((1, 8), (16, 4), (32, 3))
"""(parts, placements): number of best other placements, and of parts of each."""
SIMULATED_OPS = 6_000_000
"""Most ops simulated by all parts: about a second on any graph."""


class Relinked(NamedTuple):
    """The placement, bytes over device memory under its rule of priority, simulations spent."""

    device: Int[np.ndarray, "N"]
    overflow: int
    evaluations: int


def relink(
    problem: Problem,
    devices: Int[np.ndarray, "K N"],
    seconds: Float[np.ndarray, "K"],
    overflow: Int[np.ndarray, "K"],
    *,
    most: int | None = None,
    clock: Clock | None = None,
) -> Relinked:
    """The best of the placements with parts of the others, never worse under its rule of priority.

    What the others place elsewhere is cut by where it is and where it would be, and along the order
    of decoding. Every part is tried by itself; those that do no harm are then taken together, the
    best first, as far as that is best. `seconds` and `overflow` (bytes) are those of
    `evaluate_rules`. At most `most` simulations, and until the clock is over.
    """
    order = np.lexsort((seconds, overflow))
    limit, clock = SIMULATED_OPS // problem.num_ops, clock or Clock(None)
    best = Relinked(devices[order[0]], int(overflow[order[0]]), 0)
    most = limit if most is None else min(limit, most)
    if most < len(rules_of(problem)):
        return best
    work = _Relinking(problem, best.device, most)
    for parts, others in STAGES:
        for k in order[1 : 1 + others]:
            if not clock.is_over():
                work.take_from(devices[k], parts)
    return Relinked(work.device, work.key[0], work.spent)


class _Relinking:
    """The placement so far."""

    def __init__(self, problem: Problem, device: Int[np.ndarray, "N"], most: int) -> None:
        self.problem, self.device, self.most = problem, device, most
        rated = evaluate_rules(problem, device[None])
        self.rules = (RULES[int(rated.rule[0])],)
        self.key = (int(rated.overflow[0]), float(rated.seconds[0]))
        self.spent = rated.evaluations

    def take_from(self, other: Int[np.ndarray, "N"], parts: int) -> None:
        """Adopt improving parts of another placement, unless they exceed the simulations."""
        masks = parts_of(self.problem, self.device, other, parts)
        if not len(masks) or self.spent + 2 * len(masks) > self.most:
            return
        keys = self._keys(np.where(masks, other, self.device))
        harmless = [
            k for k in sorted(range(len(masks)), key=keys.__getitem__) if keys[k] <= self.key
        ]
        if not harmless:
            return
        together = np.where(np.logical_or.accumulate(masks[harmless]), other, self.device)
        keys = self._keys(together)
        best = min(range(len(harmless)), key=keys.__getitem__)
        if keys[best] < self.key:
            self.device, self.key = together[best], keys[best]

    def _keys(self, devices: Int[np.ndarray, "P N"]) -> list[tuple[int, float]]:
        rated = evaluate_rules(self.problem, devices, self.rules)
        self.spent += rated.evaluations
        return list(zip(rated.overflow.tolist(), rated.seconds.tolist(), strict=True))


def parts_of(
    problem: Problem, device: Int[np.ndarray, "N"], other: Int[np.ndarray, "N"], count: int
) -> Bool[np.ndarray, "P N"]:
    """The ops of each part of the difference to another placement; whole groups.

    At least one part for each pair of devices that ops would leave and come to, each pair's ops cut
    along the order of decoding, so that there are about `count`.
    """
    order = timing(problem).order
    moved = order[device[order] != other[order]]
    pair = device[moved] * problem.num_devices + other[moved]
    pieces: list[Int[np.ndarray, "M"]] = []
    for each in np.unique(pair):
        ops = moved[pair == each]
        cuts = round(count * len(ops) / len(moved))
        pieces += np.array_split(ops, min(len(ops), max(1, cuts)))
    masks = np.zeros((len(pieces), problem.num_groups), dtype=bool)
    for mask, piece in zip(masks, pieces, strict=True):
        mask[problem.group[piece]] = True
    return masks[:, problem.group]


# The method


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
        advise(small, prior_answers, clock.part(ADVISING))
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
    decoded = best_priority_rule(problem, best_of(problem, [Assignment(widen(relinked.device))]))
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


def _relinked(
    policy: Policy, problem: Problem, proposals: Proposals, most: int | None, clock: Clock
) -> Relinked:
    """Path relinking between the decoded placements and their starts.

    It uses half of the evaluations that decoding left of `most`.
    """
    devices, seconds, overflow = proposals.device, proposals.seconds, proposals.overflow
    remaining = None if most is None else (most - proposals.evaluations) // 2
    given, spent = incumbents(problem) if policy.config.advice else devices[:0], 0
    if len(given) and (remaining is None or remaining >= len(given) * len(rules_of(problem))):
        rated = evaluate_rules(problem, given)
        devices = np.concatenate([devices, given])
        seconds = np.concatenate([seconds, rated.seconds])
        overflow = np.concatenate([overflow, rated.overflow])
        spent = rated.evaluations
        remaining = None if remaining is None else remaining - spent
    relinked = relink(problem, devices, seconds, overflow, most=remaining, clock=clock)
    return relinked._replace(evaluations=relinked.evaluations + spent)


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
    """`place_with_policy` as a method; none where no checkpoint is named and none is shipped."""
    if checkpoint is None and not _is(default_checkpoint()):
        return {}

    def policy(problem: Problem, search: Search) -> Answer:
        return place_with_policy(problem, checkpoint, search)

    return {"policy": policy}


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

    if problem.tensor_s is not None:
        return start, 0
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
    """The problem over groups of ops where it is too large, and the way back."""
    if problem.num_ops <= LARGEST or problem.tensor_s is not None:
        return problem, lambda device: device
    from gdp.graph.fuse import coarsen

    labels = np.unique(problem.allowed, axis=0, return_inverse=True)[1].reshape(-1)
    fused = coarsen(problem.graph, LARGEST // 2, apart=labels.astype(np.int64))
    small = contracted(problem, fused.graph, fused.group_of)
    return small, lambda device: device[fused.group_of]
