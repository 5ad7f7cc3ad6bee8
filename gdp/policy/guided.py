"""Search guided by the policy: annealing whose moves follow the policy's probabilities.

The policy is made to follow the best placement and asked, op by op, where else it would put it.
Which groups of ops are moved and where to is then drawn from its answers, most of the time; the
moves themselves, their judge and the schedule are those of `local_search`.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from gdp.clock import Clock
from gdp.methods.annealing.annealer import Annealer
from gdp.methods.base import Answer, Search
from gdp.methods.priorities import rules_of
from gdp.methods.scoring import best_of
from gdp.methods.search.local_search import as_answer, improve
from gdp.policy.advice import advice, with_incumbent
from gdp.policy.decode import decode
from gdp.policy.evaluate import assignment
from gdp.policy.model.head import score
from gdp.policy.policy import Policy
from gdp.policy.propose import propose
from gdp.problem.problem import Problem

SHARE = 0.8
"""Of the choices that follow the policy; the others are as in `local_search`."""
FADING = 4.0
"""Evaluations per group of ops after which half as many choices follow the policy."""
ASKING = 0.15
"""Share of the seconds that asking the policy may take."""


def guided_search(
    problem: Problem, policy: Policy, search: Search, *, share: float = SHARE
) -> Answer:
    """The best placement that annealing finds from `search.start`, or from the policy's best.

    With `share` 0 the policy is not asked about moves: what the guidance is worth.
    """
    if search.seconds is None and search.evaluations is None:
        raise ValueError("guided search needs a limit: give seconds or evaluations")
    clock = Clock(search.seconds)
    start, spent = search.start, 0
    if start is None:
        found = propose(policy, problem, 1 + len(rules_of(problem)), search.seed)
        start, spent = assignment(problem, found.device[found.best]), found.evaluations
    first = best_of(problem, [start])
    guide = _Guide(policy, share, clock) if share > 0.0 else None
    if search.evaluations is not None:
        search = replace(search, evaluations=max(1, search.evaluations - spent))
    best = improve(problem, [first], search, clock, guide=guide)
    answer = as_answer(problem, best, "guided search")
    return Answer(answer.assignment, reason=answer.reason, evaluations=answer.evaluations + spent)


class _Guide:
    """Asks the policy about an annealing run's best placement, unless it was asked before.

    Where seconds end the search, asking takes a share of them at most, once it was asked at all.
    """

    def __init__(self, policy: Policy, share: float, clock: Clock) -> None:
        self.policy, self.share, self.clock = policy, share, clock
        self.asked: tuple[int, bytes] = (0, b"")
        self.longest_s = self.spent_s = 0.0
        self.table = np.zeros((0, 0))

    def __call__(self, problem: Problem, annealer: Annealer) -> None:
        device = annealer.best().assignment.device
        key = (id(problem), device.tobytes())
        known = key == self.asked or (key[0] == self.asked[0] and self.is_dear())
        if not known:
            self.asked = key
            begin_s = self.clock.elapsed_s()
            self.table = wanted(self.policy, problem, device)
            took_s = self.clock.elapsed_s() - begin_s
            self.longest_s, self.spent_s = max(self.longest_s, took_s), self.spent_s + took_s
        # The longer the search, the less is left of what the policy sees at a glance.
        share = self.share / (1.0 + annealer.evaluations / (FADING * problem.num_groups))
        annealer.guide(self.table, share)

    def is_dear(self) -> bool:
        """Whether asking again would take more than its share of the time."""
        if self.clock.seconds is None:
            return False
        return self.spent_s + self.longest_s > ASKING * self.clock.elapsed_s()


def wanted(
    policy: Policy, problem: Problem, device: Int[np.ndarray, "N"]
) -> Float[np.ndarray, "G D"]:
    """How likely the policy puts each group on each device where all before it is as in `device`.

    Rows sum to 1; a group that the policy cannot move stays where it is.
    """
    told = None
    if policy.config.advice:
        told = with_incumbent(advice(problem), problem, device)
        # The names of devices that are alike must be those that are followed.
        told = told._replace(device=np.concatenate([device[None], told.device[1:]]))
    head = policy.head(problem, told)
    view = policy.view(problem, told)._replace(mask_alike=False)
    seen = decode(view, head, samples=1, seed=0, forced=device[None], keep=True)
    assert seen.feats is not None
    assert seen.legal is not None
    assert seen.taken is not None
    logit = np.where(seen.legal[0], score(head, seen.feats[0]), -np.inf)
    table = np.zeros((problem.num_groups, problem.num_devices))
    table[problem.group, device] = 1.0
    ops = np.flatnonzero(seen.taken[0])
    odds = np.exp(logit[ops] - logit[ops].max(axis=1, keepdims=True))
    table[problem.group[ops]] = odds / odds.sum(axis=1, keepdims=True)
    return table
