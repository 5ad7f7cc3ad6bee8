"""The policy as a placement method: greedy decode and samples, repaired and searched from."""

import functools
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from gdp.base.clock import Clock
from gdp.methods.base import Answer, Assignment, Method, Search
from gdp.methods.heuristics.multilevel import coarse_problem
from gdp.methods.priorities import rules_of
from gdp.methods.repair import repair
from gdp.methods.scoring import Evaluated, best_of, best_priority_rule, missing_text
from gdp.methods.shares import ADVICE_SHARE
from gdp.policy.advice import advice
from gdp.policy.policy import (
    Policy,
    default_checkpoint,
    load_policy,
    policy_folder,
    recall_placement,
)
from gdp.policy.propose import propose
from gdp.problem.problem import Problem
from gdp.sim.objectives import objective_of, value_text

SAMPLES = 16
"""Samples besides the greedy placement, unless the evaluation budget is smaller."""
POLISHED = (1000, 10_000)
"""Fewest and most evaluations of the local search after decoding."""
POLISHED_OPS = 3_000_000
"""Ops simulated by that search between the two limits: a tenth of a second or two."""
POLISHED_PERIODS = 30_000
"""Evaluations of that search for pipelines, where moves are evaluated incrementally."""
LARGEST = 60_000
"""Ops above which groups of ops are placed."""


def place_with_policy(
    problem: Problem,
    search: Search,
    checkpoint: str | os.PathLike[str] | Policy | None = None,
    *,
    samples: int = SAMPLES,
    polish: bool = True,
) -> Answer:
    """The best of the policy's greedy placement and its samples under all rules of priority,
    repaired where it does not fit, and searched from, as is the best placement that it reads where
    that is better; as decoded without `polish`.

    `checkpoint` is a folder, a policy, or None for the shipped one. A policy that was fine-tuned to
    this graph also answers with the placement found then. With an evaluation budget there are as
    many samples as it allows. The clock of `search.seconds` is asked between decodes.
    """
    policy, clock = load(checkpoint), search.budget()
    placed, spent, reason = _decoded(problem, policy, search, clock, samples)
    kept = recall_placement(policy.placed, problem)
    known = [*(placed if polish else placed[:1]), *([] if kept is None else [kept])]
    rated = [best_priority_rule(problem, best_of(problem, [one])) for one in known]
    best = min(rated)
    which, spent = rated.index(best), spent + sum(one.evaluations for one in rated)
    best = replace(best, evaluations=spent)
    if known[which] is kept:
        reason += f", {value_text(problem, best.value_s)} found when it was fine-tuned"
    elif which > 0:
        reason += f"; a placement that it read is better, {value_text(problem, best.value_s)}"
    if polish:
        best = _polished(problem, best, search, clock)
    if best.overflow_bytes == 0:
        return Answer(best.assignment, reason=reason, evaluations=best.evaluations)
    reason += f"; the closest placement misses {missing_text(problem, best.assignment)}"
    return Answer(None, reason=reason, evaluations=best.evaluations, closest=best.assignment)


def _decoded(
    problem: Problem, policy: Policy, search: Search, clock: Clock, samples: int
) -> tuple[list[Assignment], int, str]:
    """(the best decoded placement and the best that was read, without ranks; evaluations; what was
    decoded)."""
    coarse = coarse_problem(problem, LARGEST // 2) if problem.num_ops > LARGEST else None
    small = problem if coarse is None else coarse.problem
    spent, read = 0, np.zeros((0, small.num_ops), dtype=np.int64)
    if policy.config.advice:
        prior_answers = search.prior_answers if small is problem else {}
        advised = advice(small, prior_answers, clock.part(ADVICE_SHARE))
        spent, read = advised.evaluations, advised.device[:1]
    if search.evaluations is not None:
        samples = min(samples, (search.evaluations - spent) // len(rules_of(small)) - 1)
    found = propose(policy, small, 1 + samples, search.seed, clock)
    seconds = float(found.seconds[found.best])
    reason = f"policy {policy.name!r}: greedy {value_text(small, float(found.seconds[0]))}"
    if len(found.device) > 1:
        reason += f", best of {len(found.device)} {value_text(small, seconds)}"
    devices = np.concatenate([found.device[found.best][None], read])
    if coarse is not None:
        devices = devices[:, coarse.part_of]
    return [Assignment(device) for device in devices], spent + found.evaluations, reason


def _polished(problem: Problem, best: Evaluated, search: Search, clock: Clock) -> Evaluated:
    """A placement repaired, whatever is left of the evaluations, and searched from."""
    from gdp.methods.search.local_search import improve

    if best.overflow_bytes > 0:
        best = best_priority_rule(problem, repair(problem, best, clock, search.seed))
    count = POLISHED_PERIODS
    if not objective_of(problem).pipelined:
        count = int(np.clip(POLISHED_OPS // problem.num_ops, *POLISHED))
    if search.evaluations is not None:
        count = min(count, search.evaluations - best.evaluations)
    if count <= 0:
        return best
    few = Search(seed=search.seed, seconds=None, evaluations=count)
    found = improve(problem, [replace(best, evaluations=0)], few, clock)
    return replace(found, evaluations=best.evaluations + found.evaluations)


def policy_methods(
    checkpoint: str | os.PathLike[str] | Policy | None = None,
) -> dict[str, Method]:
    """`place_with_policy`, and as decoded, `policy_greedy` and `policy_samples`; none where no
    checkpoint is named and none is shipped."""
    if checkpoint is None and not _is(default_checkpoint()):
        return {}
    place = functools.partial(place_with_policy, checkpoint=checkpoint)
    return {
        "policy": place,
        "policy_greedy": functools.partial(place, samples=0, polish=False),
        "policy_samples": functools.partial(place, polish=False),
    }


def load(checkpoint: str | os.PathLike[str] | Policy | None) -> Policy:
    """The policy of a folder, or the shipped one; read once per process."""
    if isinstance(checkpoint, Policy):
        return checkpoint
    folder = policy_folder(default_checkpoint() if checkpoint is None else checkpoint)
    return _loaded(str(folder), (folder / "meta.json").stat().st_mtime_ns if _is(folder) else 0)


@functools.lru_cache(maxsize=4)
def _loaded(folder: str, version: int) -> Policy:
    del version  # a checkpoint that was written again is another one
    return load_policy(folder)


def _is(folder: Path) -> bool:
    return (folder / "meta.json").exists()
